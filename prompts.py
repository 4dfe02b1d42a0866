"""
A few thousand varied prompts, of this project's own making: what a model is asked for the answers that maps learn from (responses.py).

    python prompts.py               # prints a dozen

Templates and word lists, drawn at random and never twice: instructions, questions, word problems, translation, code, talk; and, about
passages that the model has written before, summaries, questions and extraction. No evaluation data is among them.
"""
import random

TOPICS = """volcanoes|the water cycle|bees and pollination|black holes|the French Revolution|the Silk Road|the printing press|photosynthesis|
glaciers|earthquakes|whales|coral reefs|the Roman Empire|jazz|chess|coffee|bicycles|lighthouses|the Olympic Games|vaccines|antibiotics|
electric cars|solar panels|wind turbines|nuclear power|the human heart|sleep|memory|dreams|languages|maps|bridges|castles|pyramids|trains|
aeroplanes|submarines|satellites|the Moon|Mars|comets|dinosaurs|mammoths|wolves|owls|penguins|spiders|mushrooms|rice|bread|cheese|chocolate|
tea|salt|sugar|honey|cotton|silk|paper|glass|steel|gold|diamonds|inflation|taxes|banks|trade between countries|elections|juries|libraries|
museums|schools|hospitals|parks|zoos|farming|fishing|forests|deserts|rivers|oceans|islands|mountains|the weather|climate change|recycling|
plastic|air pollution|traffic|video games|social media|the internet|e-mail|computers|robots|machine learning|cryptography|databases|
search engines|operating systems|photography|painting|sculpture|poetry|novels|theatre|opera|cinema|dance|football|tennis|swimming|running|
yoga|cooking|gardening|knitting|camping|travelling alone|learning an instrument|learning a language|public speaking|friendship|
leadership|working from home|job interviews|saving money|healthy food|stress|time management|good habits|parenting|pets|ageing|moving house|
starting a small business|volunteering|the stock market|gravity|magnetism|electricity|sound|light|atoms|acids and bases|evolution|genes|
viruses|bacteria|the immune system|prime numbers|probability|statistics|geometry|calculus|logic|democracy|human rights|philosophy|ethics|
the Industrial Revolution|the Middle Ages|the Renaissance|ancient Egypt|ancient Greece|the Vikings|the Aztecs|the Cold War|space travel"""
TOPICS = [topic.strip() for topic in TOPICS.replace("\n", "").split("|")]

WRITING = """Write a short story about {a}.|Write a poem about {a}.|Write a blog post about {a}. Keep it under 200 words.|
Write an e-mail to a colleague about {a}, polite and short.|Draft an outline of a talk on {a} with three main points.|
Write a persuasive paragraph about why {a} matter to everyone.|Write a product description that has to do with {a}.|
Write a dialogue between two friends who disagree about {a}.|Write a letter to the editor of a newspaper about {a}.|
Write the opening paragraph of a novel in which {a} play a part.|Write a review of a documentary about {a}.|
Describe a place that makes one think of {a}. Use all the senses.|Write a speech of one minute about {a}.|
Give me five titles for an article about {a}.|Write a news report about {a}.|Write a funny limerick about {a}."""
EXPLAINING = """What is important to know about {a}?|Explain {a} to a child of ten.|Explain how {a} and {b} are related.|
Compare {a} with {b}.|What are the advantages and disadvantages of {a}?|List five facts about {a}.|What is the history of {a}?|
Why do people care about {a}?|How did {a} change the world?|What are common misunderstandings about {a}?|
Give three examples that show what {a} mean in daily life.|What would happen without {a}?|
Describe in two or three paragraphs how {a} work.|What questions would an expert on {a} ask?|
Summarize what is known about {a} in three sentences.|How might {a} look in a hundred years?|
What role do {a} play in society, and how did that change over time?|Suggest an experiment or project about {a} for school.|
Which books or subjects should I study to learn about {a}?|What are the causes and effects of {a}?"""
TALK = """You are a travel guide. Tell me about {a}.|You are a strict teacher. Question me about {a}.|Pretend to be a pirate and explain {a}.|
You are a doctor. A patient asks you about {a}. What do you say?|Act as a career adviser for someone who is interested in {a}.|
Imagine you are a time traveller from the year 2300. What do you say about {a}?|You are a comedian. Make a joke about {a}.|
Speak as if you were a wise old tree and tell me of {a}.|You are a detective. Explain how {a} helped you solve a case.|
Be my debating partner: argue against {a}.|I am nervous about {a}. Can you help me?|I know nothing about {a}. Where do I start?|
You are a chef with an interest in {a}. What do you cook tonight?|Be a scientist who presents {a} on television."""
ADVICE = """How do I {v}?|Give me a step by step plan to {v}.|What do I need to {v}?|What mistakes do people make when they {v}?|
My friend wants to {v}. What should I tell them?|Is it a good idea to {v}? Give reasons for and against.|How long does it take to {v}?|
Write a checklist for someone who wants to {v}."""
VERBS = """bake a loaf of bread|plant a vegetable garden|learn to swim as an adult|write a CV|prepare for an exam|plan a birthday party|
paint a room|fix a flat tyre|start running|save money for a house|organise a small conference|choose a laptop|train a puppy|sleep better|
write a thank-you note|clean an oven|build a bird house|read more books|learn the guitar|move to another country|make new friends in a new city|
start a podcast|cook dinner for ten people|pack for a week in the mountains|keep a diary|give a good presentation|apologise to a friend|
reduce food waste|set up a home office|teach a child to read|grow tomatoes on a balcony|take better photos|write a short novel|
become a nurse|ask for a raise|spend less time on the phone|ride a bicycle to work|brew good coffee|remember names|speak in front of a crowd"""
VERBS = [verb.strip() for verb in VERBS.replace("\n", "").split("|")]

FACTS = """who {did} {work}?|when was {thing} {made}?|where is {place}?|what is the capital of {country}?|how many people live in {country}?|
what language do they speak in {country}?|what is the currency of {country}?|who was the first person to {feat}?|
what is {word}?|what does the word {word} mean?|what is the difference between {word} and {word2}?|how many {unit} are in a {unit2}?|
what is the {most} {sort} in the world?|which {sort} is the {most}?|what year did {event} happen?|why is {place} famous?|
in which country do you find {place}?|what are the parts of {word}?|where does {word} come from?|name the {most} {sort} in {country}"""
FACT_WORDS = {
    "did": "wrote|painted|composed|invented|discovered|directed|built|designed|founded".split("|"),
    "work": """the first dictionary|the telephone|the theory of relativity|penicillin|the Ninth Symphony|the Mona Lisa|the steam engine|Hamlet|
        the light bulb|the World Wide Web|Don Quixote|the Eiffel Tower|the Red Cross|radium|the periodic table|the radio|War and Peace|
        the first aeroplane|the compass|Guernica|The Odyssey|the vaccine against smallpox""".split("|"),
    "thing": "the Eiffel Tower|the Great Wall|the telephone|the first computer|the Suez Canal|the United Nations|the euro|paper money|the bicycle".split("|"),
    "made": "built|made|invented|first used|finished|started".split("|"),
    "place": """the Sahara|Mount Kilimanjaro|Lake Baikal|the Great Barrier Reef|Machu Picchu|the Taj Mahal|the Danube|Cape Horn|the Black Forest|
        Stonehenge|Angkor Wat|Niagara Falls|the Dead Sea|Table Mountain|the Amazon|Venice|Timbuktu|Easter Island""".split("|"),
    "country": """France|Brazil|Kenya|Japan|Canada|Norway|Egypt|India|Peru|Portugal|Vietnam|Turkey|Chile|Ghana|Poland|Finland|Mexico|Austria|
        New Zealand|Morocco|Thailand|Greece|Ireland|Mongolia""".split("|"),
    "feat": "walk on the Moon|climb Mount Everest|reach the South Pole|sail around the world|cross the Atlantic by air|win two Nobel Prizes".split("|"),
    "word": """osmosis|a sonnet|a fjord|a mortgage|an algorithm|a catalyst|a metaphor|a monsoon|an enzyme|a monopoly|a constitution|a haiku|
        a tsunami|an ecosystem|a subsidy|a vowel|a comet|an isotope|a neuron|a parable|a treaty|an eclipse|a fossil|a plateau""".split("|"),
    "unit": "metres|minutes|grams|pints|inches|seconds|cups|days|feet|ounces".split("|"),
    "unit2": "mile|day|pound|gallon|yard|week|litre|century|kilometre|kilogram".split("|"),
    "most": "largest|oldest|longest|deepest|smallest|most expensive|most popular|fastest|tallest|coldest".split("|"),
    "sort": "city|river|lake|animal|bird|building|island|desert|mountain|bridge|tree|university|planet|fish|flower".split("|"),
    "event": "the moon landing|the fall of the Berlin Wall|the French Revolution|the great fire of London|the sinking of the Titanic|"
             "the first Olympic Games|the First World War|the discovery of America|the invention of printing".split("|"),
}
FACT_WORDS["word2"] = FACT_WORDS["word"]

SUMS = """{p} buys {n} {goods} at {m} dollars each and pays with a {k}00 dollar note. How much money does {p} get back?|
{p} has {n} {goods}. {q} has {m} times as many. How many do they have together?|
A train travels {n}0 kilometres in {m} hours. How far does it travel in {k} hours at the same speed?|
{p} reads {n} pages on Monday, twice as many on Tuesday and {m} fewer on Wednesday than on Tuesday. How many pages does {p} read in all?|
There are {n}0 {goods} in a box. {p} takes out {m} and {q} takes out {k}. What percentage is left?|
{p} earns {n} dollars an hour and works {m} hours a day, {k} days a week. How much does {p} earn in four weeks?|
A farmer has {n} fields with {m} rows of {k} {goods} each. A storm destroys half of them. How many are left?|
{p} is {n} years old. {q} is {m} years older. How old will {q} be when {p} is {n}{k}?|
If {n} workers need {m} days to build a wall, how many days do {k} workers need?|
A shop sells {goods} for {n} dollars. The price falls by {m}0 percent. What do {k} of them cost now?|
{p} bakes {n} trays of {m} cookies. {q} eats {k} of them, and the rest is shared by {m} friends. How many does each friend get?|
{p} walks {n} miles a day from Monday to Friday and {m} miles on Saturday and on Sunday. How many miles is that in {k} weeks?|
{p} saved {n}00 dollars. Half of it went into {goods}, and a quarter of the rest to {q}. How much is left?|
Solve for x: {n}x + {m} = {k}{m}.|What is {n}{m} times {k}?|Find the area and the perimeter of a rectangle of {n} by {m} metres.|
A die is thrown {m} times. What is the probability that it never shows a six?|What is the average of {n}, {m}, {k} and {n}{k}?|
If f(x) = {n}x^2 - {m}x + {k}, what is f(2)?|A tank holds {n}00 litres and loses {m} litres a minute. When is it empty?|
{p} has three times as many {goods} as {q}, and together they have {n}{m}. How many does each have? Think step by step."""
NAMES = "Ada|Ben|Chloe|Dario|Emma|Farid|Grace|Hugo|Ines|Jonas|Kavya|Liam|Mara|Nils|Olga|Pablo|Quinn|Rosa|Sam|Tara|Umar|Vera|Will|Yuki|Zoe".split("|")
GOODS = "apples|pencils|marbles|stamps|books|tickets|roses|cards|bottles|shells|eggs|chairs|coins|balloons|cakes".split("|")

PUZZLES = """If all {a} are {b} and no {b} are {c}, can some {a} be {c}?|{p} is taller than {q}, and {q} is taller than {r}. Who is the shortest?|
{p} stands to the left of {q}. {r} stands to the right of {q}. Who is in the middle?|Which word does not belong: {a}, {b}, {c}, {d}? Say why.|
{p} says that {q} lies, and {q} says that {r} lies. Can all three tell the truth?|Sort these words by length: {a}, {b}, {c}, {d}.|
How many letters are there in the word {a}?|What comes next: {n}, {n2}, {n3}, ...?|Write a sentence with the words {a}, {b} and {c}.|
In a race {p} overtakes the person in second place. Which place is {p} in now?|A farmer must cross a river with {a}, {b} and {c}. What is a safe order?"""

CODE = """Write a Python function that {t}.|Write a JavaScript function that {t}.|Write a C++ program that {t}.|Write code in Java that {t}.|
Explain how to write a program that {t}.|Write a Python class with a method that {t}. Add a docstring.|
What is the time complexity of a function that {t}?|Write unit tests for a Python function that {t}.|Give me an SQL query or a script that {t}.|
My code should be one that {t}, and it is slow. What can I do?"""
CODE_TASKS = """reverses a string|checks whether a number is prime|sorts a list of names|counts the words in a file|finds the largest number in a list|
removes duplicates from a list|computes the n-th Fibonacci number|merges two sorted lists|checks whether a word is a palindrome|
converts Celsius to Fahrenheit|reads a CSV file|finds all files in a folder|computes the factorial of a number|draws a triangle of stars|
implements a stack|implements a queue with two stacks|searches a sorted list by halves|finds the shortest path in a graph|validates an e-mail address|
rolls two dice|plays rock, paper, scissors|computes the greatest common divisor|transposes a matrix|counts the vowels in a sentence|
parses a date|groups people by age|finds the second largest salary|prints the numbers from 1 to 100 with Fizz and Buzz|
measures how long a function takes|caches the results of a slow function|downloads a page and prints its title|balances brackets|
traverses a binary tree|finds the longest common prefix|converts a number to Roman numerals|shuffles a deck of cards"""
CODE_TASKS = [task.strip() for task in CODE_TASKS.replace("\n", "").split("|")]

# Sentences from parts: who, does what, when or why.
SENTENCES = {
    "German": ("""Die Regierung|Der Bürgermeister der Stadt|Meine Schwester|Ein Sprecher der Polizei|Das Unternehmen|Der Trainer|Eine Wissenschaftlerin|Unser Nachbar|
Die junge Ärztin|Der alte Mann|Eine Studie der Universität|Eine Schülerin|Der Verein|Die Zeitung""",
               """hat gestern einen neuen Plan vorgestellt|will im nächsten Jahr mehr Geld ausgeben|sucht seit Wochen nach einer Lösung|
konnte den Zug nicht mehr erreichen|freut sich über den großen Erfolg|warnt vor den Folgen des schlechten Wetters|hat das alte Haus am Fluss gekauft|
möchte die Straße sicherer machen|spricht über die Zukunft der Schule|fährt jeden Morgen mit dem Rad zur Arbeit|hat das Spiel knapp verloren|
bietet den Gästen ein warmes Essen an""",
               """, obwohl viele dagegen sind.|, weil die Preise gestiegen sind.|, sagte er am Dienstag.|, wie die Zeitung berichtet.| und hofft auf einen ruhigen Sommer.|
, damit die Kinder sicher sind.|, bevor der Winter beginnt.| , aber niemand weiß , warum .| - ein gutes Zeichen für alle.|, ohne ein Wort zu sagen."""),
    "French": ("""Le gouvernement|La directrice de l'école|Mon frère|Une équipe de chercheurs|Le vieux marin|Le maire du village|La ville|Le médecin""",
               """a annoncé une nouvelle loi|cherche une solution depuis longtemps|a perdu ses clés dans le train|veut construire un grand pont|prépare un repas pour ses amis|
raconte une histoire aux enfants|a décidé de partir demain|travaille tous les jours au marché""",
               """, malgré la pluie.|, parce que les prix montent.| et personne ne sait pourquoi.|, selon le journal.| avant la fin de l'année.|, sans rien dire."""),
    "Spanish": ("""El gobierno|La profesora|Mi abuelo|Un grupo de estudiantes|La empresa|Un vecino|El médico del pueblo|La ciudad""",
                """ha presentado un plan nuevo|busca una solución desde hace meses|quiere comprar una casa junto al mar|prepara la cena para la familia|
perdió el último autobús|trabaja todos los días en el campo|habla del futuro de la escuela|ganó el partido por poco""",
                """, aunque llueva mucho.|, porque los precios suben.| y nadie sabe por qué.|, según el periódico.| antes del invierno.|, sin decir nada."""),
    "English": ("""The government|My sister|A team of scientists|The old captain|Our neighbour|The company|The teacher|The city""",
                """has announced a new plan|is looking for a solution|missed the last train|wants to build a bridge|cooks dinner for the family|
tells the children a story|bought a house by the river|works at the market every day""",
                """, although it rains.|, because prices are rising.| and nobody knows why.|, the newspaper says.| before winter comes.|, without a word."""),
}
TRANSLATE = """Translate {x} to {y}: {s}|Translate this from {x} into {y}: {s}|What does this {x} sentence mean in {y}? {s}|Please translate into {y}: "{s}"|
{x}: {s} {y}:"""

PASSAGES = """Write a newspaper article about {a}, with names, places and numbers.|Write an encyclopedia entry about {a}.|
Write a detailed report about {a} and {b}.|Write three paragraphs on {a} with dates and figures.|Tell, as a reporter, what happened at an event about {a}.|
Write the biography of an invented person who is known for {a}."""
ABOUT = """Summarize: {p}|Summarize the following text in three sentences: {p}|{p}\nWhat is this text about?|{p}\nGive a short summary.|
Write a headline and a summary for this article. {p}|{p}\nWhat are the main points?|{p}\nWhy does this matter?|TL;DR of this: {p}|
Answer the question with the help of the text. Text: {p} Question: what is said about {a}?|{p}\nWhat is the role of {a} in this?|
{p}\n{p2}\nWhich of these facts belong together?|{p}\nWho or what is named in the text? Make a list.|{p}\nwho is mentioned in connection with {a}?|
{p}\nHow does this happen, and when?|Extract all names, dates and numbers from this text as a JSON object: {p}|
Context: {p} {p2}\nUsing only the context, explain {a}.|Rewrite this in simpler words: {p}|Make a table of the facts in this text: {p}|
{p}\nIs the tone of this text positive, negative or neutral? Explain.|Correct the grammar and style of this text: {p}"""

SHARES = (("writing", 11), ("explaining", 15), ("talk", 9), ("advice", 9), ("facts", 15), ("sums", 16), ("puzzles", 5), ("code", 9), ("translation", 18))


def split(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split("|")]


def single_prompt(kind: str, rng: random.Random) -> str:
    """One prompt of a kind of SHARES."""
    a, b, c, d = rng.sample(TOPICS, 4)
    p, q, r = rng.sample(NAMES, 3)
    n, m, k = rng.randint(3, 30), rng.randint(2, 12), rng.randint(2, 9)
    if kind == "facts":
        text = rng.choice(split(FACTS)).format(**{name: rng.choice(words).strip() for name, words in FACT_WORDS.items()})
        return text if rng.random() < 0.4 else text[0].upper() + text[1:]
    if kind == "translation":
        x, y = rng.choices([("German", "English"), ("French", "English"), ("Spanish", "English"), ("English", rng.choice(["German", "French", "Spanish"]))],
                           weights=[5, 2, 2, 2])[0]
        sentences = " ".join("".join((rng.choice(split(who)), " ", rng.choice(split(what)), rng.choice(split(end))))
                             for who, what, end in [SENTENCES[x]] * rng.choice([1, 1, 2]))
        return rng.choice([split(TRANSLATE)[0], rng.choice(split(TRANSLATE))]).format(x=x, y=y, s=sentences)
    if kind == "code":
        return rng.choice(split(CODE)).format(t=rng.choice(CODE_TASKS))
    if kind == "advice":
        return rng.choice(split(ADVICE)).format(v=rng.choice(VERBS))
    if kind == "sums":
        return rng.choice(split(SUMS)).format(p=p, q=q, n=n, m=m, k=k, goods=rng.choice(GOODS))
    if kind == "puzzles":
        return rng.choice(split(PUZZLES)).format(a=a, b=b, c=c, d=d, p=p, q=q, r=r, n=n, n2=n + m, n3=n + 2 * m)
    return rng.choice(split({"writing": WRITING, "explaining": EXPLAINING, "talk": TALK}[kind])).format(a=a, b=b)


def distinct(draw, count: int) -> list[str]:
    """`count` different values of draw()."""
    found = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def standalone_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts that need no text beside them."""
    rng = random.Random(seed)
    kinds, weights = zip(*SHARES)
    return distinct(lambda: single_prompt(rng.choices(kinds, weights)[0], rng), count)


def passage_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` different requests for a text that later prompts are about."""
    rng = random.Random(f"passages {seed}")

    def draw():
        a, b = rng.sample(TOPICS, 2)
        return rng.choice(split(PASSAGES)).format(a=a, b=b)
    return distinct(draw, count)


def prompts_about(passages: list[str], count: int, seed: int = 0) -> list[str]:
    """`count` different prompts about passages, one to three of them in each."""
    rng = random.Random(f"about {seed}")

    def draw():
        a, b = rng.sample(TOPICS, 2)
        text = "\n".join(rng.choice(passages) for _ in range(rng.choice([1, 1, 2, 3])))
        return rng.choice(split(ABOUT)).format(p=text, p2=rng.choice(passages), a=a, b=b)
    return distinct(draw, count)


if __name__ == "__main__":
    print("\n".join(standalone_prompts(10) + passage_prompts(2)))

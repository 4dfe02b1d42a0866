"""
The prompts of a comparison: pieces of held-out text, or questions in Spec-Bench's format (arXiv 2401.07851), a JSON object a line:

    {"question_id": 81, "category": "writing", "turns": ["Compose an engaging travel blog post about ...", "..."]}

Only the first turn is asked. Prompts are cut to 1,024 tokens, or what the context leaves.
"""
import json
from pathlib import Path
from typing import NamedTuple

from chat import chat_prompt
from data import encode_texts, read_corpus
from replay import cut_prompts

LONGEST_PROMPT = 1024       # tokens


class Question(NamedTuple):
    category: str
    ids: list[int]
    ends: set[int]          # tokens that end the answer


def read_questions(path) -> list[tuple[str, str]]:
    """(category, first turn) of each line. ValueError names the line that is wrong."""
    try:
        lines = Path(path).read_bytes().decode().splitlines()
    except OSError as error:
        raise ValueError(f"--questions {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--questions {path}: not UTF-8 text") from None
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--questions {path}, line {number}: not JSON ({error.msg})") from None
        turns = question.get("turns") if isinstance(question, dict) else None
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise ValueError(f'--questions {path}, line {number}: no turns; a line is {{"question_id": 1, "category": "...", "turns": ["..."]}}')
        if not isinstance(question.get("category"), str):
            raise ValueError(f"--questions {path}, line {number}: no category; give one, a word")
        questions.append((question["category"], turns[0]))
    if not questions:
        raise ValueError(f"--questions {path}: the file holds no questions")
    return questions


def encode_question(tokenizer, text: str, chat: bool, longest: int) -> tuple[list[int], set[int]]:
    """(ids, end tokens) of at most `longest` tokens: the user's text is cut at its end until it fits, the template never."""
    while True:
        ids, ends = chat_prompt(tokenizer, text) if chat else (tokenizer.prefix + tokenizer.encode_ordinary(text), tokenizer.end_tokens)
        if len(ids) <= longest:
            return ids, set(ends)
        text = text[:min(len(text) - 1, len(text) * longest // len(ids))]
        if not text:
            raise ValueError(f"--chat: the template alone is longer than the {longest} tokens that a prompt may have here")


def gather(args, model, tokenizer) -> list[Question]:
    """The prompts that the command line asks for."""
    if args.questions is None:
        for name in ("chat", "category", "per_category"):
            if getattr(args, name):
                raise ValueError(f"--{name.replace('_', '-')} is for --questions; without it the prompts are pieces of held-out text")
        stream = encode_texts(read_corpus()[1], tokenizer)
        return [Question("held-out", ids, set()) for ids in cut_prompts(stream, args.prompts or 20)]
    if tokenizer is None:
        raise ValueError(f"--questions: --checkpoint {args.checkpoint} comes without a tokenizer")
    questions, wanted = read_questions(args.questions), args.category.split(",") if args.category else None
    known = list(dict.fromkeys(category for category, _ in questions))
    for category in wanted or []:
        if category not in known:
            raise ValueError(f"--category {category}: there is none; {args.questions} has {', '.join(known)}")
    chosen = [question for question in questions if wanted is None or question[0] in wanted]
    if args.per_category:
        chosen = [question for category in known for question in spread([q for q in chosen if q[0] == category], args.per_category)]
    longest = min(LONGEST_PROMPT, model.config.block_size + 1 - args.max_new_tokens)
    if longest < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: the context of {model.config.block_size} leaves no room for a prompt")
    return [Question(category, *encode_question(tokenizer, text, args.chat, longest)) for category, text in spread(chosen, args.prompts)]


def spread(questions: list, count: int | None) -> list:
    """`count` of the questions at even distances, so that every category has its share; all of them if count is None."""
    if count is None or count >= len(questions):
        return questions
    return [questions[n * len(questions) // count] for n in range(count)]

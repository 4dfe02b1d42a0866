"""
A model's own chat template around a prompt. The template is jinja2 and comes with the checkpoint, so it runs in jinja2's
sandbox; what a user writes can bring no special token into the conversation.
"""
import datetime
import json

from foreign_tokenizer import need
from tokenizer import split_special


def chat_prompt(tokenizer, text: str) -> tuple[list[int], set[int]]:
    """(ids of a conversation in which the user has said `text` and the model is to answer, ids that end the answer)."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: this checkpoint comes without a chat template; leave --chat out")
    hidden = hide(text, tokenizer.special_tokens)
    user = {"role": "user", "content": hidden}
    prompt = render(tokenizer, [user], add_generation_prompt=True)
    if hidden == text:                                                      # the tokenizer itself knows best how to split around specials
        ids = tokenizer.encode_with_special(prompt)
    else:
        ids = []
        for n, part in enumerate(split_special(prompt, tokenizer.special_tokens)):
            ids += [tokenizer.special_tokens[part]] if n % 2 else tokenizer.encode_ordinary(part.replace(MARK, ""))
    # What the template puts behind an answer is the model's end of turn.
    answered = render(tokenizer, [user, {"role": "assistant", "content": f"{MARK}answer{MARK}"}])
    behind = split_special(answered.rpartition(f"answer{MARK}")[2], tokenizer.special_tokens)
    return ids, set(tokenizer.end_tokens) | {tokenizer.special_tokens[part] for part in behind[1:2]}


def user_opening(tokenizer) -> list[int]:
    """Ids of a conversation up to where the user begins to speak: what a model goes on with from there is a prompt."""
    prompt = render(tokenizer, [{"role": "user", "content": f"{MARK}question{MARK}"}])
    opening, found, _ = prompt.partition(f"{MARK}question{MARK}")
    if not found:
        raise ValueError("--chat: the chat template does not show what the user says")
    return tokenizer.encode_with_special(opening)


MARK = "\ue000"         # of the private use area: no template writes it


def hide(text: str, special_tokens: dict[str, int]) -> str:
    """The text with a mark inside everything that reads like a special token, so that none is found in it."""
    text = text.replace(MARK, "")
    for special in sorted(special_tokens, key=len, reverse=True):
        text = text.replace(special, special[0] + MARK + special[1:])
    return text


def render(tokenizer, messages: list[dict], add_generation_prompt: bool = False) -> str:
    jinja2, sandbox = need("jinja2"), need("jinja2.sandbox")

    def refuse(message):
        raise ValueError(f"--chat: the chat template says: {message}")

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **tokenizer.names)
    except jinja2.TemplateError as error:
        raise ValueError(f"--chat: the chat template cannot be used ({type(error).__name__}: {error})") from None

"""
What the maps of an instruct model learn from: answers that the model writes itself, to prompts of our own (prompts.py) and to
prompts that it invents.

    python responses.py --checkpoint HuggingFaceTB/SmolLM2-135M-Instruct --out out/responses.pt
    python train.py --checkpoint HuggingFaceTB/SmolLM2-135M-Instruct --responses out/responses.pt

Greedy, in the model's chat template where it has one. Half of the prompts are then what the model says in the user's place
(Magpie, arXiv 2406.08464): more varied than any templates. The file is saved as it grows: Ctrl-C loses little, and the same
command goes on.
"""
import sys
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm

from chat import chat_prompt, user_opening
from checkpoint import CHECKPOINT_HELP, DTYPES, fingerprint, load_checkpoint, load_file, save_file
from cli import Parser, has_fast_bfloat16, pick_device, positive, run, writable_folder
from prompts import passage_prompts, prompts_about, standalone_prompts
from replay import Response, answer

HELD_OUT = 25               # every 25th answer is kept from training
COUNT, NEW, BATCH = 6000, 128, 128     # prompts, longest answer in tokens, prompts answered at a time
INVENTED, TEMPERATURE = 256, 0.8        # longest prompt that the model invents, in tokens, and how it draws them
LONG, STEP = 200, 16        # prompts longer than LONG tokens lose a few, so that many have the same length


def wrap(tokenizer, text: str) -> tuple[list[int], set[int]]:
    """(token ids of a prompt, ids that end the answer); a model without a chat template just goes on with the text."""
    if getattr(tokenizer, "chat_template", None) is not None:
        return chat_prompt(tokenizer, text)
    return tokenizer.prefix + tokenizer.encode_ordinary(text + "\n\n"), set(tokenizer.end_tokens)


def batches_of_one_length(prompts: dict[int, list[int]], batch: int) -> list[list[int]]:
    """Keys of prompts (token ids by key), in batches within which all are equally long."""
    by_length = defaultdict(list)
    for key, ids in prompts.items():
        by_length[len(ids)].append(key)
    return [keys[k:k + batch] for _, keys in sorted(by_length.items()) for k in range(0, len(keys), batch)]


def even_length(ids: list[int], limit: int) -> list[int]:
    """A long prompt without a few tokens of its middle: at most `limit` tokens, and a multiple of STEP of them."""
    if len(ids) <= min(LONG, limit):
        return ids
    keep = min(len(ids), limit) // STEP * STEP
    return ids[:keep // 2] + ids[len(ids) - (keep - keep // 2):]


class ResponseFile:
    """The answers so far, by the number of their prompt, and the file they are kept in."""

    def __init__(self, path, plan: dict):
        """plan: what the answers depend on. ValueError if the file holds those of another plan."""
        self.path, self.plan, self.found = Path(path), plan, {}
        if self.path.exists():
            contents = load_file(path, "responses", "--out")
            if contents["plan"] != plan:
                odd = [f"{name} {value}" for name, value in contents["plan"].items() if plan.get(name) != value and name != "base"]
                raise ValueError(f"--out {path} holds other answers ({', '.join(odd) or 'of another model'}): give another name, or delete it")
            self.found = unpack(contents)

    def save(self) -> None:
        keys = sorted(self.found)
        rows = [self.found[key] for key in keys]
        save_file({"kind": "responses", "plan": self.plan, "keys": keys, "prompts": [row.prompt for row in rows],
                   "lengths": [len(row.tokens) for row in rows],
                   "tokens": torch.cat([row.tokens for row in rows]).int() if rows else torch.zeros(0, dtype=torch.int)}, self.path)


def unpack(contents: dict) -> dict[int, Response]:
    tokens = contents["tokens"].long().split(contents["lengths"])
    return {key: Response(row, prompt) for key, row, prompt in zip(contents["keys"], tokens, contents["prompts"])}


def is_complete(path) -> bool:
    """Whether there is a file of answers, and all its prompts are answered."""
    if not Path(path).exists():
        return False
    contents = load_file(path, "responses", "--responses")
    return len(contents["keys"]) == contents["plan"]["count"]


def load_responses(path, model) -> list[Response]:
    """All answers in a file, in the order of their prompts. ValueError if another model wrote them."""
    contents = load_file(path, "responses", "--responses")
    if contents["plan"]["base"] != fingerprint(model):
        raise ValueError(f"--responses {path} was written by another model (python responses.py --checkpoint ... writes some)")
    return [response for _, response in sorted(unpack(contents).items())]


def write_responses(model, tokenizer, path, count: int = COUNT, new: int = NEW, seed: int = 0, batch: int = BATCH) -> None:
    """Let the model answer `count` prompts with up to `new` tokens each, into the file `path`; goes on where it had stopped.

    Of the prompts from templates a tenth asks for passages, a quarter is about these passages. A model with a chat template
    invents half of all prompts itself.
    """
    file = ResponseFile(path, {"base": fingerprint(model), "count": count, "new": new, "seed": seed})
    invented = count // 2 if getattr(tokenizer, "chat_template", None) is not None else 0
    templates = count - invented
    passages, about = max(1, templates // 10), templates // 4
    limit = model.config.block_size - new
    if limit < 64:
        raise ValueError(f"--new {new} leaves no room for prompts in a context of {model.config.block_size} tokens")
    with tqdm(total=count, initial=len(file.found), desc="answers", unit="prompt", dynamic_ncols=True) as bar:
        try:
            texts = passage_prompts(passages, seed)
            written = answer_all(model, tokenizer, file, 0, texts, new, limit, batch, bar)
            texts = prompts_about([tokenizer.decode(tokens) for tokens in written], about, seed)
            answer_all(model, tokenizer, file, passages, texts, new, min(limit, 1024), batch, bar)
            texts = standalone_prompts(templates - passages - about, seed)
            answer_all(model, tokenizer, file, passages + about, texts, new, limit, batch, bar)
            texts = invented_prompts(model, tokenizer, invented, min(limit, INVENTED), seed, batch)
            answer_all(model, tokenizer, file, templates, texts, new, limit, batch, bar)
        except KeyboardInterrupt:
            file.save()
            bar.close()
            print(f"stopped after {len(file.found)} of {count} answers; the same command goes on")
            sys.exit(130)
    tokens = sum(len(row.tokens) - row.prompt for row in file.found.values())
    print(f"{count} answers with {tokens} tokens in {path}")


def invented_prompts(model, tokenizer, count: int, longest: int, seed: int, batch: int) -> list[str]:
    """`count` different prompts that the model itself thinks a user would write, drawn at TEMPERATURE; those that do not come to
    their end within `longest` tokens are left out."""
    generator, device, found, idle = torch.Generator().manual_seed(seed), model.embedding.weight.device, {}, 0

    def draw(logits):                                                       # (B, 1, V) -> (B, 1)
        return torch.multinomial((logits[:, 0].float() / TEMPERATURE).softmax(-1).cpu(), 1, generator=generator).to(device)

    if count == 0:
        return []
    opening, (_, ends) = user_opening(tokenizer), chat_prompt(tokenizer, "")
    with tqdm(total=count, desc="prompts", unit="prompt", dynamic_ncols=True) as bar:
        while len(found) < count:
            if idle == 10:
                raise ValueError(f"--checkpoint invents no prompts that end within {longest} tokens; train.py --data learns from text instead")
            before = len(found)
            for tokens in answer(model, [opening] * batch, ends, longest, draw):
                text = tokenizer.decode(tokens[:-1]).strip()
                if tokens[-1] in ends and text and len(found) < count:
                    found[text] = None
            idle = 0 if len(found) > before else idle + 1
            bar.update(len(found) - before)
    return list(found)


def answer_all(model, tokenizer, file: ResponseFile, first: int, texts: list[str], new, limit, batch, bar) -> list[list[int]]:
    """Answer the prompts `texts`, numbered from `first` on, unless the file holds their answers; all answers, without end tokens."""
    prompts, ends = {}, set()
    for key, text in enumerate(texts, start=first):
        ids, ends = wrap(tokenizer, text)
        prompts[key] = even_length(ids, limit)
    todo = {key: ids for key, ids in prompts.items() if key not in file.found}
    for n, keys in enumerate(batches_of_one_length(todo, batch)):
        for key, tokens in zip(keys, answer(model, [todo[key] for key in keys], ends, new)):
            file.found[key] = Response(torch.tensor(todo[key] + tokens), len(todo[key]))
        tokens = sum(len(row.tokens) - row.prompt for row in file.found.values())
        bar.set_postfix_str(f"{tokens} tokens", refresh=False)
        bar.update(len(keys))
        if n % 20 == 19:
            file.save()
    file.save()
    rows = (file.found[key] for key in prompts)
    return [[token for token in row.tokens[row.prompt:].tolist() if token not in ends] for row in rows]


def held_out(responses: list[Response]) -> tuple[list[Response], list[Response]]:
    """(for training, held out): answers of at least two tokens."""
    usable = [row for row in responses if len(row.tokens) - row.prompt > 1]
    return [row for n, row in enumerate(usable) if n % HELD_OUT], usable[::HELD_OUT]


def main() -> None:
    p = Parser("Let a model answer a few thousand prompts: the text that its transfer maps learn from.")
    p.add_argument("--checkpoint", required=True, help=CHECKPOINT_HELP)
    p.add_argument("--revision", help="branch, tag or commit of a --checkpoint from the hub")
    p.add_argument("--out", default="out/responses.pt", help="file for the answers")
    p.add_argument("--count", type=positive, default=COUNT, help="number of prompts")
    p.add_argument("--new", type=positive, default=NEW, help="longest answer, in tokens")
    p.add_argument("--batch", type=positive, default=BATCH, help="prompts answered at a time")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, or auto")
    p.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 where it is fast, float32 elsewhere")
    args = p.parse_args()
    device = pick_device(args.device)
    dtype = DTYPES.get(args.dtype) or (torch.bfloat16 if has_fast_bfloat16(device) else torch.float32)
    writable_folder(Path(args.out).parent)
    model, tokenizer = load_checkpoint(args.checkpoint, dtype, device, args.revision)
    if tokenizer is None:
        raise ValueError(f"--checkpoint {args.checkpoint} has no tokenizer, so it cannot be asked anything")
    write_responses(model, tokenizer, args.out, args.count, args.new, args.seed, args.batch)


if __name__ == "__main__":
    run(main)

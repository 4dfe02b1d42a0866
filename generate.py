"""
Decoding: one loop over any drafter, and the command line.

    python generate.py                                          # the checkpoint that ships, its maps, a default prompt
    python generate.py --prompt "import os" --tree-size 64 --check --trace
    python generate.py --checkpoint SmolLM2-135M-Instruct.gguf --method autoregressive --chat --prompt "Name three colours."
"""
import argparse
import dataclasses
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baselines import METHODS, load_rivals
from chat import chat_prompt
from checkpoint import BASE, CHECKPOINT_HELP, DTYPES, load_checkpoint, load_transfer
from cli import Parser, pick_device, run
from display import Display, summary
from drafters import MAX_TREE_SIZE, Autoregressive, HiddenTransferDrafter, Round, usual_sources
from model import GPT, KVCache, causal_mask
from sampler import Sampler
from tree import Tree, walk, walk_rejection


@dataclass
class Generation:
    """What `generate` returns. forward_passes counts the prefill too, so plain decoding has a mean of 1.00."""
    token_ids: list[int] = field(default_factory=list)          # new tokens, an end token included
    prompt_tokens: int = 0
    new_tokens: int = 0
    forward_passes: int = 0
    mean_accepted_tokens: float = 0.0                           # new tokens / forward passes (Spec-Bench)
    accepted_per_pass: list[int] = field(default_factory=list)  # tokens each pass emitted, the model's own included
    finish_reason: str = ""                                     # "length", "end" or "context"
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    method: str = ""
    tree_size: int = 1
    seed: int = 0
    dtype: str = ""
    device: str = ""
    text: str | None = None                                     # with a tokenizer: the new text, without an end token


@dataclass
class Pass:
    """One verified pass, for streaming and tracing: accepted nodes of the tree, and the tokens it emitted."""
    tree: Tree
    path: list[int]
    emitted: list[int]      # drafted tokens, then (unless cut short) one that the model supplied


@torch.inference_mode()
def generate(model: GPT, prompt_ids: list[int], drafter=None, sampler: Sampler = Sampler(), max_new_tokens: int = 128,
             end_token=None, verify: str = "coupled", tokenizer=None, on_pass=None) -> Generation:
    """Continue prompt_ids (one sequence); returns exactly what plain decoding with the same sampler returns.

    drafter: None for plain decoding. end_token: the id that ends the text, or several, or None. verify: "coupled" (token
    for token) or "rejection" (same law, for drafters whose trees are sampled). on_pass: called with a Pass after each
    pass. ValueError for a prompt that is empty, too long, or holds ids outside the vocabulary.
    """
    check_request(model, prompt_ids, max_new_tokens, verify)
    drafter = drafter if drafter is not None else Autoregressive()
    ends = set() if end_token is None else {int(end_token)} if hasattr(end_token, "__index__") else set(end_token)
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    tokens = list(prompt_ids)
    # The last token emitted need not be fed, so a context of block_size leaves room for one token more.
    limit = min(max_new_tokens, model.config.block_size + 1 - len(tokens))
    result = Generation(prompt_tokens=len(tokens), method=drafter.method, tree_size=drafter.tree_size, seed=sampler.seed,
                        dtype=str(dtype).removeprefix("torch."), device=str(device))
    cache = KVCache(model.config, len(tokens) + limit + drafter.tree_size + drafter.rows, 1, dtype, device)
    dice = sampler.generator(0)                                             # for rejection sampling alone
    tree = Tree([tokens[-1]], [-1])
    synchronize(device)
    start = time.perf_counter()
    while not result.finish_reason and len(result.token_ids) < limit:
        ahead = len(tokens) - 1 - cache.length                              # rows before the root: the prompt, once
        fed, position_ids, mask = lay_out(tree, tokens, cache.length, device)
        logits, state = drafter.forward(model, fed, position_ids, mask, cache, slice(ahead, None))
        path, token = judge(tree, logits[0], len(tokens) - 1, sampler, verify, dice)
        cache.commit(list(range(ahead)) + [ahead + node for node in path])
        emitted = [tree.tokens[node] for node in path[1:]] + [token]
        if not ends.isdisjoint(emitted):
            emitted = emitted[:next(n for n, token in enumerate(emitted) if token in ends) + 1]
            result.finish_reason = "end"
        tokens += emitted
        result.token_ids += emitted
        result.accepted_per_pass.append(len(emitted))
        if on_pass:
            on_pass(Pass(tree, path, emitted))
        remaining = limit - len(result.token_ids)
        if remaining and not result.finish_reason:
            tree = drafter.propose(Round(model, cache, tokens, state, ahead + path[-1], sampler, remaining - 1))
            if max(tree.depth) > remaining - 1:                             # it would overshoot, or leave the context
                raise ValueError(f"the drafter proposed a tree of depth {max(tree.depth)}; Round.max_depth is {remaining - 1}")
    synchronize(device)
    result.seconds = time.perf_counter() - start
    result.finish_reason = result.finish_reason or ("length" if limit == max_new_tokens else "context")
    result.new_tokens, result.forward_passes = len(result.token_ids), len(result.accepted_per_pass)
    result.mean_accepted_tokens = result.new_tokens / max(1, result.forward_passes)
    result.tokens_per_second = result.new_tokens / result.seconds if result.new_tokens else 0.0
    if tokenizer is not None:
        result.text = tokenizer.decode(result.token_ids[:-1] if result.finish_reason == "end" else result.token_ids)
    return result


def lay_out(tree: Tree, tokens: list[int], committed: int, device):
    """What one pass is fed: (tokens (1, T), position_ids (T,), mask (T, committed + T)).

    T rows: what of `tokens` is neither committed nor the root (the prompt, in the first pass; nothing later), then
    the nodes of the tree.
    """
    ahead = len(tokens) - 1 - committed
    fed = torch.tensor([tokens[committed:-1] + tree.tokens], device=device)                         # (1, ahead + N)
    position_ids, mask = tree.position_ids(committed + ahead), tree.mask(committed + ahead)         # (N,), (N, S)
    if ahead:
        position_ids = torch.cat([torch.arange(committed, committed + ahead), position_ids])        # (ahead + N,)
        before = torch.cat([causal_mask(ahead, committed), mask.new_zeros(ahead, len(tree))], 1)    # (ahead, S)
        mask = torch.cat([before, mask])                                                            # (ahead + N, S)
    return fed, position_ids.to(device), mask.to(device)


def judge(tree, logits, position, sampler, verify, dice):
    """(accepted nodes, next token) by the rule asked for."""
    if verify == "coupled":
        return walk(tree, logits, position, sampler.choose)
    return walk_rejection(tree, lambda node: sampler.probs(logits[node].cpu()),
                          lambda chance: torch.rand((), generator=dice, dtype=torch.float64).item() < chance,
                          lambda p: int(torch.multinomial(p, 1, generator=dice)))


def check_request(model, prompt_ids, max_new_tokens, verify) -> None:
    if len(prompt_ids) == 0:
        raise ValueError("--prompt is empty: give at least one token")
    if isinstance(prompt_ids[0], (list, tuple)) or getattr(prompt_ids, "ndim", 1) > 1:
        raise ValueError("generate decodes one sequence at a time: prompt_ids must be a flat list of token ids")
    c = model.config
    if len(prompt_ids) > c.block_size:
        raise ValueError(f"--prompt has {len(prompt_ids)} tokens; the model's context holds {c.block_size}")
    for token in prompt_ids:
        if not 0 <= token < c.vocab_size:
            raise ValueError(f"--token-ids: {token} is out of range, the vocabulary has ids 0 to {c.vocab_size - 1}")
    if max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: it must be 0 or more")
    if verify not in ("coupled", "rejection"):
        raise ValueError(f"--verify {verify}: it must be coupled or rejection")


def synchronize(device) -> None:
    """Wait for the device, so that a clock reading includes the work that was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# ------------------------------------------------------------------------------------- the command line

PROMPT = 'def read_config(path):\n    """Read a configuration file and return a dictionary.'
QUESTION = "Why is the sky blue?"      # with --chat


def parse_args(argv=None):
    p = Parser("Generate text with hidden transfer; the output is exactly that of plain decoding.")
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue (a piece of Python if nothing is given)")
    prompt.add_argument("--prompt-file", help="file with the text to continue, UTF-8")
    prompt.add_argument("--token-ids", help="token ids to continue, as in 1,2,3")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--method", choices=["hidden-transfer", "autoregressive", *METHODS], default="hidden-transfer")
    p.add_argument("--rivals", default=str(BASE.parent), help="folder with the files of the other methods, from train.py --stage")
    p.add_argument("--tree-size", default="16",
                   help="nodes of the candidate tree, root included (16); auto: the fastest on this machine, measured")
    p.add_argument("--sources", type=int, help="how many of the likeliest nodes draft in the verifying pass; 0: none, drafts are made after "
                                               "the walk; if not given, what auto measures, or 4 on CPU and all elsewhere")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0: all")
    p.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens that sum to p; 1: all")
    p.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest; 0: none")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--verify", choices=["coupled", "rejection"], default="coupled",
                   help="coupled: token for token as plain decoding; rejection: the same distribution")
    p.add_argument("--chat", action="store_true", help="put the prompt into the model's own chat template, and stop where its turn ends")
    p.add_argument("--checkpoint", default=str(BASE), help=CHECKPOINT_HELP)
    p.add_argument("--revision", help="branch, tag or commit of a --checkpoint from the hub")
    p.add_argument("--transfer", help="its transfer maps, from train.py; if not given, those that ship for this base model")
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, or auto")
    p.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 on CUDA, float32 elsewhere")
    p.add_argument("--stop-at-end", action=argparse.BooleanOptionalAction, default=True, help="stop at the end-of-text token")
    p.add_argument("--check", action="store_true", help="decode plainly as well and compare; exit status 1 if they differ")
    p.add_argument("--json", action="store_true", help="one JSON object on the last line instead of the summary")
    p.add_argument("--trace", action="store_true", help="print the tree of each pass, with the accepted path")
    p.add_argument("--profile", action="store_true", help="print where the time of a decoding step goes")
    return p.parse_args(argv)


def main() -> None:
    args = parse_args()
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    if args.check and args.verify == "rejection":
        raise ValueError("--check compares token for token, which --verify rejection does not promise; use --verify coupled")
    model, tokenizer = load_checkpoint(args.checkpoint, DTYPES.get(args.dtype), pick_device(args.device), args.revision)
    prompt_ids, end_tokens = read_prompt(args, tokenizer)
    check_request(model, prompt_ids, args.max_new_tokens, args.verify)
    drafter = make_drafter(args, model, prompt_ids)
    settings = dict(sampler=sampler, max_new_tokens=args.max_new_tokens, end_token=end_tokens if args.stop_at_end else None,
                    tokenizer=tokenizer)
    generate(model, prompt_ids, drafter, sampler, min(2, args.max_new_tokens), verify=args.verify)     # warm-up: the first passes are slow
    show = Display(tokenizer, args)
    show.prompt(prompt_ids)
    result = generate(model, prompt_ids, drafter, verify=args.verify, on_pass=show, **settings)
    show.end()
    report = dataclasses.asdict(result)
    if args.check:
        plain = generate(model, prompt_ids, None, **settings)
        report |= {"identical": plain.token_ids == result.token_ids, "autoregressive_seconds": plain.seconds}
    if args.profile and result.new_tokens:
        from measure import profile
        print(profile(model, prompt_ids, drafter, settings | {"verify": args.verify}))
    print(json.dumps(report) if args.json else summary(report))
    if args.check and not report["identical"]:
        from measure import first_difference                                # measure.py builds on this file
        print(first_difference(model, prompt_ids, plain.token_ids, result.token_ids), file=sys.stderr)
        sys.exit(1)


def read_prompt(args, tokenizer) -> tuple[list[int], set[int]]:
    """(ids of the prompt, ids at which the text ends)"""
    if args.token_ids is not None:
        if args.chat:
            raise ValueError("--chat wraps text: give --prompt or --prompt-file instead of --token-ids")
        try:
            return [int(part) for part in args.token_ids.split(",")], tokenizer.end_tokens if tokenizer is not None else set()
        except ValueError:
            raise ValueError(f"--token-ids {args.token_ids}: give whole numbers with commas between, as in 1,2,3") from None
    if tokenizer is None:
        raise ValueError(f"--checkpoint {args.checkpoint} has no tokenizer: give the prompt as --token-ids")
    if args.prompt_file is not None:
        try:
            text = Path(args.prompt_file).read_bytes().decode()
        except UnicodeDecodeError:
            raise ValueError(f"--prompt-file {args.prompt_file}: not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"--prompt-file {args.prompt_file}: {error.strerror}") from None
    else:
        text = args.prompt if args.prompt is not None else QUESTION if args.chat else PROMPT
    if any("\ud800" <= character <= "\udfff" for character in text):        # what Python makes of raw bytes in an argument
        raise ValueError("--prompt: not UTF-8 text")
    if args.chat:
        return chat_prompt(tokenizer, text)
    return tokenizer.prefix + tokenizer.encode_ordinary(text), tokenizer.end_tokens


def make_drafter(args, model, prompt_ids):
    """The drafter that the command line asks for; with --tree-size auto the size that is fastest here."""
    size = None if args.tree_size == "auto" else parse_tree_size(args.tree_size)
    if args.method == "autoregressive":
        return Autoregressive()
    if args.method in METHODS:
        return make_rival(args, model, 16 if size is None else size)
    transfer, notes = load_transfer(args.transfer, model)

    def drafter_of(size, sources):
        return HiddenTransferDrafter(transfer, size, sources, "best-first", notes.get("acceptance"), args.verify == "rejection")

    if size is None and "tokens_per_pass" not in notes:
        raise ValueError(f"--transfer {args.transfer or ''} holds no measured table for --tree-size auto: give a number of nodes")
    if size is None:
        from measure import choose_tree_size                                # measure.py builds on this file
        size, sources, _ = choose_tree_size(model, drafter_of, notes["tokens_per_pass"], prompt_ids)
    else:
        sources = usual_sources(model, size)
    return drafter_of(size, sources if args.sources is None else args.sources)


def make_rival(args, model, size: int):
    rivals = load_rivals(model, args.rivals)
    if args.method not in rivals:
        raise ValueError(f"--method {args.method}: {args.rivals} holds no file of it for this base model (python train.py --stage ...)")
    if args.tree_size == "auto" or args.sources is not None:
        raise ValueError(f"--method {args.method} takes no --tree-size auto and no --sources; those are for hidden-transfer")
    return rivals[args.method](size, args.verify == "rejection")


def parse_tree_size(text: str) -> int:
    if not re.fullmatch("[0-9]+", text) or not 1 <= int(text) <= MAX_TREE_SIZE:
        raise ValueError(f"--tree-size {text}: it must be auto or a whole number from 1 (plain decoding) to {MAX_TREE_SIZE}")
    return int(text)


if __name__ == "__main__":
    run(main)

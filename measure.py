"""
Measuring: how many tokens a pass is worth by tree size, what a pass costs here, and where its time goes.

    python measure.py                               # paired speed ratios by tree size and place of drafting
    python measure.py --exactness --prompts 50      # float64: how many outputs differ from plain decoding
    python measure.py --bits-per-byte               # how good the base model is
"""
import statistics
import time

import torch
from tqdm import tqdm

from checkpoint import BASE, CHECKPOINT_HELP, DTYPES, load_checkpoint, load_transfer
from cli import Parser, pick_device, positive, run
from data import encode_texts, n_bytes, read_corpus
from drafters import HiddenTransferDrafter
from generate import generate, synchronize
from model import causal_mask
from pretrain import bits_per_byte
from replay import cut_prompts
from sampler import Sampler


def choose_tree_size(model, make_drafter, expected: dict[int, float], prompt_ids, passes: int = 16, repeats: int = 3):
    """The tree with the most tokens per second on this machine: (size, sources, {(size, sources): seconds per pass}).

    expected: tokens per pass by tree size (stored with the maps). What a pass costs is measured here, by decoding
    prompt_ids for `passes` tokens with make_drafter(size, sources), where the four likeliest nodes or all of them
    draft; the best of `repeats` turns counts. Size 1 is plain decoding, and a tree must promise a tenth more than that,
    since texts differ in how well they can be drafted. Sizes are tried upwards until they no longer pay.
    """
    costs, best, rates = {}, 0.0, {}
    generate(model, prompt_ids, make_drafter(4, 4), max_new_tokens=4)       # warm-up
    for size in sorted(expected):
        options = [(size, sources) for sources in (sorted({min(4, size), size}) if size > 1 else (0,))]
        turns = [[generate(model, prompt_ids, make_drafter(*option) if size > 1 else None, max_new_tokens=passes)
                  for option in options] for _ in range(repeats)]
        for option, runs in zip(options, zip(*turns)):
            costs[option] = min(run.seconds / run.forward_passes for run in runs)
            rates[option] = expected[size] / costs[option]
        best = max(best, *(rates[option] for option in options))
        if max(rates[option] for option in options) < 0.8 * best:
            break
    choice = max(rates, key=rates.get)
    return *(choice if rates[choice] > 1.1 * rates[1, 0] else (1, 0)), costs


def paired_speed(model, drafters: dict, prompts, max_new_tokens: int = 64, rounds: int = 5, sampler: Sampler = Sampler(),
                 bar=None, **settings):
    """Decode each prompt plainly and with each drafter, in turns (A B A B ...), `rounds` times after a warm-up.

    Returns {name: {"ratio": [plain seconds / seconds, one per round], "tokens": new tokens per pass, "ms": per pass,
    "per_second": new tokens, "runs": [round][prompt] -> Generation}}; both sides emit the same tokens, counted by the same
    code, so the ratio of seconds is the ratio of tokens/s. settings: what else generate is to be given; bar: a tqdm bar.
    """
    sides = {"plain": None} | drafters
    runs = {name: [[] for _ in range(rounds)] for name in sides}
    for round in range(-1, rounds):                                         # round -1 warms up
        for prompt in prompts if round >= 0 else prompts[:2]:
            for name, drafter in sides.items():
                run = generate(model, prompt, drafter, sampler, max_new_tokens, **settings)
                if round >= 0:
                    runs[name][round].append(run)
                if bar is not None:
                    bar.update()
    report, seconds_of = {}, {name: [sum(run.seconds for run in turn) for turn in turns] for name, turns in runs.items()}
    for name, seconds in seconds_of.items():
        new, passes = (sum(getattr(run, what) for turn in runs[name] for run in turn) for what in ("new_tokens", "forward_passes"))
        report[name] = {"ratio": [a / b for a, b in zip(seconds_of["plain"], seconds)], "tokens": new / passes, "ms": 1000 * sum(seconds) / passes,
                        "per_second": new / sum(seconds), "runs": runs[name]}
    return report


def profile(model, prompt_ids, drafter, settings: dict) -> str:
    """Where the time of a decoding step goes. The model's part is its pass over the tree and, where it is made after
    the walk, the pass that drafts; all else is the tree, the walk, the cache and the choice of tokens."""
    spent = {"model, pass over the tree": 0.0, "model, drafts": 0.0}

    def timed(part, function):
        def call(*inputs):
            synchronize(model.embedding.weight.device)
            start = time.perf_counter()
            output = function(*inputs)
            synchronize(model.embedding.weight.device)
            spent[part] += time.perf_counter() - start
            return output
        return call

    settings = settings | {"tokenizer": None}
    generate(model, prompt_ids, drafter, **settings)                        # warm-up
    drafter.forward = timed("model, pass over the tree", drafter.forward)   # on the instance: the class stays as it is
    if hasattr(drafter, "draft_logits"):
        drafter.draft_logits = timed("model, drafts", drafter.draft_logits)
    run = generate(model, prompt_ids, drafter, **settings)
    spent["outside the model"] = run.seconds - sum(spent.values())
    lines = [f"{part:28}{1000 * seconds / run.forward_passes:9.3f} ms/pass{seconds / run.seconds:8.1%}" for part, seconds in spent.items()]
    return "\n".join(["profile of a decoding step"] + lines)


def exactness(model, transfer, prompts, max_new_tokens: int, sizes=(4, 16, 64)) -> None:
    """Print, by sampler and tree size, how many outputs differ from plain decoding, and the mean accepted tokens."""
    samplers = {"greedy": Sampler(), "temperature 0.8": Sampler(0.8, seed=1), "temperature 1.0, top-p 0.9": Sampler(1.0, top_p=0.9, seed=2)}
    print(f"{'':28}" + "".join(f"{f'{size} nodes':>22}" for size in sizes) + f"\n{'':28}" + f"{'differ  tokens/pass':>22}" * len(sizes))
    with tqdm(total=len(samplers) * len(prompts) * (1 + len(sizes)), desc="exactness", leave=False, dynamic_ncols=True) as bar:
        for name, sampler in samplers.items():
            cells, plain = [], []
            for size in (1, *sizes):
                drafter = HiddenTransferDrafter(transfer, size) if size > 1 else None
                runs = []
                for prompt in prompts:
                    runs.append(generate(model, prompt, drafter, sampler, max_new_tokens))
                    bar.update()
                if size == 1:
                    plain = runs
                    continue
                differ = sum(a.token_ids != b.token_ids for a, b in zip(plain, runs))
                mean = sum(run.new_tokens for run in runs) / sum(run.forward_passes for run in runs)
                cells.append(f"{differ:>11}{mean:>11.2f}")
            tqdm.write(f"{name:28}" + "".join(cells))


def first_difference(model, prompt_ids, plain, other) -> str:
    """Where two outputs part, with the gap between the two best logits of the plain step there."""
    n, gap = difference(model, prompt_ids, plain, other)
    return f"first difference at new token {n}: plain {plain[n:n + 1]}, drafted {other[n:n + 1]}; top-2 gap {gap:.2e}"


@torch.inference_mode()
def difference(model, prompt_ids, plain, other, sampler: Sampler = Sampler()) -> tuple[int, float]:
    """(index of the first token that differs, gap there between the two best logits; when sampling, with the noise that
    chooses the token added to the log probabilities)."""
    n = next((n for n, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    tokens = prompt_ids + plain[:n]
    device = model.embedding.weight.device
    logits = model(torch.tensor([tokens], device=device), torch.arange(len(tokens), device=device),
                   causal_mask(len(tokens), device=device), read=slice(-1, None))[0, 0].double().cpu()         # (V,)
    if sampler.temperature > 0:
        logits = sampler.log_probs(logits) + sampler.noise(len(tokens), len(logits))
    best = logits.topk(2).values
    return n, (best[0] - best[1]).item()


def speed(model, transfer, notes, prompts, args) -> None:
    """Print paired speed ratios by tree size and place of drafting; the last line is what --tree-size auto picks."""
    def drafter_of(size, sources):
        return HiddenTransferDrafter(transfer, size, sources)

    size, sources, _ = choose_tree_size(model, drafter_of, notes["tokens_per_pass"], prompts[0])
    options = [(n, s) for n in (2, 4, 8, 16, 32, 64) for s in sorted({0, min(4, n), n})]
    sides = {f"{n} nodes, {place(n, s)}": drafter_of(n, s) for n, s in options}
    sides[f"auto: {size} nodes, {place(size, sources)}"] = drafter_of(size, sources) if size > 1 else None
    print(f"{args.dtype} on {args.device}, {torch.get_num_threads()} threads, {len(prompts)} held-out prompts, {args.max_new_tokens} new tokens each")
    print(f"{'tree, and who drafts':38}{'tokens/pass':>12}{'ms/pass':>9}{'tokens/s':>10}{'ratio to plain (median of ' + str(args.rounds) + ', range)':>36}")
    for name, r in paired_speed(model, sides, prompts, args.max_new_tokens, args.rounds, Sampler(args.temperature)).items():
        print(f"{name:38}{r['tokens']:12.2f}{r['ms']:9.2f}{r['per_second']:10.1f}{statistics.median(r['ratio']):18.2f}"
              f"  ({min(r['ratio']):.2f} to {max(r['ratio']):.2f})")


def place(size: int, sources: int) -> str:
    return "accepted node, afterwards" if sources == 0 else "every node" if sources >= size else f"{sources} likeliest nodes"


def main() -> None:
    p = Parser("Paired speed of hidden transfer against plain decoding, by tree size and place of drafting.")
    p.add_argument("--checkpoint", default=str(BASE), help=CHECKPOINT_HELP)
    p.add_argument("--revision", help="branch, tag or commit of a --checkpoint from the hub")
    p.add_argument("--transfer", help="its transfer maps, from train.py; if not given, those that ship for this base model")
    p.add_argument("--data", help="text to cut held-out prompts from; if not given, the Python standard library")
    p.add_argument("--prompts", type=positive, default=5, help="number of held-out prompts, 32 tokens each")
    p.add_argument("--max-new-tokens", type=positive, default=128)
    p.add_argument("--rounds", type=positive, default=5)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 on CUDA, float32 elsewhere")
    p.add_argument("--exactness", action="store_true", help="count outputs that differ from plain decoding instead (float64)")
    p.add_argument("--bits-per-byte", action="store_true", help="of the base model on held-out text, instead; minutes")
    args = p.parse_args()
    if args.exactness:
        args.dtype = "float64"
    args.device = pick_device(args.device)
    model, tokenizer = load_checkpoint(args.checkpoint, DTYPES.get(args.dtype), args.device, args.revision)
    args.dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    held_out = read_corpus(args.data)[1]
    stream = encode_texts(held_out, tokenizer)
    if args.bits_per_byte:
        print(f"{bits_per_byte(model, stream, n_bytes(held_out)):.3f} bits per byte on {n_bytes(held_out)} bytes of held-out text")
        return
    transfer, notes = load_transfer(args.transfer, model)
    prompts = cut_prompts(stream, args.prompts)
    if args.exactness:
        exactness(model, transfer, prompts, args.max_new_tokens)
    else:
        speed(model, transfer, notes, prompts, args)


if __name__ == "__main__":
    run(main)

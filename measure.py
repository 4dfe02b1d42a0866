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
from drafters import HiddenTransferDrafter, rank_drafts
from generate import generate, synchronize
from model import KVCache, causal_mask
from pretrain import bits_per_byte
from sampler import Sampler
from tree import best_first

TREE_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RANKS = (1, 2, 3, 5, 10)


def cut_prompts(stream, count: int = 50, length: int = 32) -> list[list[int]]:
    """`count` prompts of `length` tokens, cut at even distances from a stream of tokens (N,)."""
    if len(stream) < count * length:
        raise ValueError(f"--data: {len(stream)} held-out tokens are too few for {count} prompts of {length}")
    stride = (len(stream) - length) // count
    return [stream[i * stride:i * stride + length].tolist() for i in range(count)]


@torch.inference_mode()
def continue_greedily(model, prompts: list[list[int]], new: int) -> torch.Tensor:
    """Plain greedy decoding of prompts of one length as one batch: (B, length + new) tokens."""
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    tokens = torch.tensor(prompts, device=device)                           # (B, T)
    B, T = tokens.shape
    cache = KVCache(model.config, T + new, B, dtype, device)
    mask, fed = causal_mask(T, device=device), tokens
    for _ in range(new):
        position_ids = torch.arange(cache.length, cache.length + fed.shape[1], device=device)
        logits = model(fed, position_ids, mask, cache, slice(-1, None))     # (B, 1, V)
        cache.commit(list(range(fed.shape[1])))
        fed = logits.argmax(-1)                                             # (B, 1)
        tokens = torch.cat([tokens, fed], dim=1)
        mask = torch.ones(1, cache.length + 1, dtype=torch.bool, device=device)
    return tokens


@torch.inference_mode()
def draft_whole(model, transfer, tokens: torch.Tensor, count: int, first: int = 0):
    """Drafts from the rows of a sequence, tokens (T,), in one causal pass, as decoding would make them from that row.

    Returns scores and candidates, T - first lists of K lists of `count`, best first, and the model's own argmax (T - first,),
    for the rows from `first` on.
    """
    T, device = len(tokens), tokens.device
    x, pseudo, _ = transfer(model, tokens[None], torch.arange(T, device=device), causal_mask(T, device=device),
                            sources=torch.arange(first, T, device=device))
    K, scores, candidates = pseudo.shape[2], [], []
    for part in pseudo[0].split(256):                                       # at most 256 sources' logits at a time
        s, c = rank_drafts(transfer.read_out(model, part).flatten(0, 1), Sampler(), 0, count)       # (S, K, V) -> (S*K, V)
        scores += [s[k:k + K] for k in range(0, len(s), K)]
        candidates += [c[k:k + K] for k in range(0, len(c), K)]
    return scores, candidates, model.unembed(x[0, first:]).argmax(-1)


def accepted_depths(scores, candidates, truth: list[int], sizes) -> list[int]:
    """For each tree size: how deep the best-first tree from these drafts holds the true continuation.

    Trees of growing size are prefixes of one another, so one tree of the largest size answers for all.
    """
    parents, ranks = best_first(scores, max(sizes))
    depth, on_path, depths_by_node = [0], {0: 0}, []                        # on_path: node -> its depth, if right so far
    for node in range(1, len(parents)):
        d = depth[parents[node]]
        depth.append(d + 1)
        if parents[node] in on_path and d < len(truth) and candidates[d][ranks[node]] == truth[d]:
            on_path[node] = d + 1
            depths_by_node.append((node, d + 1))
    return [max([d for node, d in depths_by_node if node < size], default=0) for size in sizes]


def tokens_per_pass(model, transfer, responses, sizes=TREE_SIZES, new: int = 128) -> dict[int, float]:
    """Mean accepted tokens by tree size, over responses: pairs of tokens (T,) and how many of them are the prompt."""
    totals = [replay(model, transfer, tokens, prompt, sizes, new) for tokens, prompt in responses]
    emitted = sum(len(tokens) - prompt for tokens, prompt in responses)
    return {size: emitted / sum(passes) for size, passes in zip(sizes, zip(*totals))}


@torch.inference_mode()
def replay(model, transfer, tokens: torch.Tensor, prompt: int, sizes=TREE_SIZES, new: int = 128) -> list[int]:
    """How many passes greedy decoding takes for one response with trees of each size, by replaying it.

    What follows the prompt in tokens (T,) is the model's own greedy continuation, at most `new` tokens, less where it came to its
    end; so one causal pass gives every draft that decoding could ask for, and the replay visits exactly the rows that
    decoding would visit.
    """
    scores, candidates, _ = draft_whole(model, transfer, tokens, max(1, max(sizes) - 1), prompt - 1)
    last, sequence, depths = len(tokens) - 1, tokens.tolist(), []           # depths: by row, from the last row of the prompt on
    for n in range(prompt - 1, last):
        # Row n has just been accepted and token n + 1 chosen; the drafts made from row n are about n + 2, n + 3, ...
        # Decoding drafts no deeper than it can still emit, its own token behind the drafts included.
        room = max(0, prompt + new - (n + 2) - 1)
        at = n - prompt + 1
        depths.append(accepted_depths(scores[at][:room], candidates[at], sequence[n + 2:], sizes))
    counts = []
    for s in range(len(sizes)):
        n, passes = prompt - 1, 1                                           # the prefill emits one token
        while n + 1 < last:
            passes += 1
            n += 1 + depths[n - prompt + 1][s]
        counts.append(passes)
    return counts


def even_windows(stream, windows: int = 40, length: int = 256, device="cpu") -> list[tuple[torch.Tensor, int]]:
    """Windows (T,) at even distances from a stream of tokens (N,), as responses to a prompt of their first token."""
    length = min(length, len(stream))
    starts = torch.linspace(0, len(stream) - length, windows).long().tolist()
    return [(torch.from_numpy(stream[s:s + length].astype("int64")).to(device), 1) for s in starts]


@torch.inference_mode()
def agreement(model, transfer, responses) -> list[list[float]]:
    """K rows: how often the model's own argmax is among the first 1, 2, 3, 5, 10 of a step's draft, over responses: pairs of
    tokens (T,) and how many of them are the prompt."""
    hits, rows = [[0] * len(RANKS) for _ in transfer.layers], [0] * len(transfer.layers)
    for tokens, prompt in responses:
        _, candidates, own = draft_whole(model, transfer, tokens, max(RANKS), prompt - 1)
        for i in range(1, len(hits) + 1):
            for n, token in enumerate(own.tolist()[i:]):
                row, rows[i - 1] = candidates[n][i - 1], rows[i - 1] + 1
                rank = row.index(token) if token in row else max(RANKS)
                hits[i - 1] = [count + (rank < top) for count, top in zip(hits[i - 1], RANKS)]
    return [[count / max(1, total) for count in row] for row, total in zip(hits, rows)]


@torch.inference_mode()
def acceptance_by_rank(model, transfer, responses, count: int = 32) -> list[list[float]]:
    """K rows of `count`: how often the candidate of each rank is the token that greedy decoding emits (static trees)."""
    table, rows = [[0] * count for _ in transfer.layers], 0
    for tokens, prompt in responses:
        _, candidates, _ = draft_whole(model, transfer, tokens, count, prompt - 1)
        sequence = tokens.tolist()
        for n in range(prompt - 1, len(sequence) - 1 - len(table)):
            rows += 1
            for k, row in enumerate(candidates[n - prompt + 1]):
                if sequence[n + 2 + k] in row:
                    table[k][row.index(sequence[n + 2 + k])] += 1
    return [sorted((hits / max(1, rows) for hits in row), reverse=True) for row in table]   # far ranks are noisy; best_first wants them sorted


# ----------------------------------------------------------------------------------------------- speed

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


def paired_speed(model, drafters: dict, prompts, max_new_tokens: int = 64, rounds: int = 5, sampler: Sampler = Sampler()):
    """Decode all prompts plainly and with each drafter, in turns (A B A B ...), `rounds` times after a warm-up.

    Returns {name: {"ratio": [plain seconds / seconds, one per round], "tokens": new tokens per pass, "ms": per pass}};
    both sides emit the same tokens, counted by the same code, so the ratio of seconds is the ratio of tokens/s.
    """
    sides = {"plain": None} | drafters
    report = {name: {"seconds": [], "new": 0, "passes": 0} for name in sides}
    for round in range(-1, rounds):                                         # round -1 warms up
        for name, drafter in sides.items():
            runs = [generate(model, p, drafter, sampler, max_new_tokens) for p in (prompts if round >= 0 else prompts[:2])]
            if round >= 0:
                report[name]["seconds"].append(sum(run.seconds for run in runs))
                report[name]["new"] += sum(run.new_tokens for run in runs)
                report[name]["passes"] += sum(run.forward_passes for run in runs)
    plain = report["plain"]["seconds"]
    return {name: {"ratio": [a / b for a, b in zip(plain, r["seconds"])], "tokens": r["new"] / r["passes"],
                   "ms": 1000 * sum(r["seconds"]) / r["passes"], "per_second": r["new"] / sum(r["seconds"])}
            for name, r in report.items()}


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

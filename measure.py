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

from checkpoint import BASE, CHECKPOINT_HELP, DTYPES, TRANSFER, load_checkpoint, load_transfer
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
def draft_whole(model, transfer, tokens: torch.Tensor, count: int):
    """Drafts from every row of tokens (B, T) in one causal pass, as decoding would make them from that row.

    Returns scores and candidates, [B][T] -> K lists of `count`, best first, and the model's own argmax (B, T).
    """
    B, T = tokens.shape
    device = tokens.device
    scores, candidates, own = [], [], []
    for row in tokens:                                                      # one sequence at a time bounds the memory
        x, pseudo, _ = transfer(model, row[None], torch.arange(T, device=device), causal_mask(T, device=device))
        logits = transfer.read_out(model, pseudo[0]).flatten(0, 1)          # (T, K, V) -> (T*K, V)
        s, c = rank_drafts(logits, Sampler(), 0, count)
        K = pseudo.shape[2]
        scores.append([s[t * K:(t + 1) * K] for t in range(T)])
        candidates.append([c[t * K:(t + 1) * K] for t in range(T)])
        own.append(model.unembed(x[0]).argmax(-1))                          # (T,)
    return scores, candidates, torch.stack(own)


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


def tokens_per_pass(model, transfer, sequences: torch.Tensor, prompt: int, sizes=TREE_SIZES, acceptance=None) -> dict[int, float]:
    """Mean accepted tokens by tree size, by replaying greedy decoding on `sequences` (B, prompt + new).

    With `acceptance` (K rows of measured acceptance by rank) the trees are the static ones built from it.

    The sequences are the model's own greedy continuations, so one causal pass gives every draft that decoding
    could ask for, and the replay visits exactly the rows that decoding would visit.
    """
    scores, candidates, _ = draft_whole(model, transfer, sequences, max(1, max(sizes) - 1))
    last, passes = sequences.shape[1] - 1, [0] * len(sizes)
    for b, sequence in enumerate(sequences.tolist()):
        depths = []                                                         # by row, from the last row of the prompt on
        for n in range(prompt - 1, last):
            # Row n has just been accepted and token n + 1 chosen; the drafts made from row n are about n + 2, n + 3, ...
            # Decoding drafts no deeper than it can still emit, its own token behind the drafts included.
            truth = sequence[n + 2:]
            room = max(0, len(truth) - 1)
            depths.append(accepted_depths((acceptance or scores[b][n])[:room], candidates[b][n], truth, sizes))
        for s in range(len(sizes)):
            n = prompt - 1
            passes[s] += 1                                                  # the prefill emits one token
            while n + 1 < last:
                passes[s] += 1
                n += 1 + depths[n - prompt + 1][s]
    new = (last + 1 - prompt) * len(sequences)
    return {size: new / count for size, count in zip(sizes, passes)}


@torch.inference_mode()
def agreement(model, transfer, stream, windows: int = 40, length: int = 256) -> list[list[float]]:
    """K rows: how often the model's own argmax is among the first 1, 2, 3, 5, 10 of a step's draft (held-out text)."""
    length = min(length, model.config.block_size, len(stream))
    starts = torch.linspace(0, len(stream) - length, windows).long().tolist()
    tokens = torch.stack([torch.from_numpy(stream[s:s + length].astype("int64")) for s in starts])      # (B, T)
    _, candidates, own = draft_whole(model, transfer, tokens.to(model.embedding.weight.device), max(RANKS))
    table = []
    for i in range(1, len(transfer.layers) + 1):
        ranks = [candidates[b][n][i - 1].index(token) if token in candidates[b][n][i - 1] else max(RANKS)
                 for b in range(windows) for n, token in enumerate(own[b].tolist()[i:])]
        table.append([sum(rank < top for rank in ranks) / len(ranks) for top in RANKS])
    return table


@torch.inference_mode()
def acceptance_by_rank(model, transfer, sequences, prompt: int, count: int = 32) -> list[list[float]]:
    """K rows of `count`: how often the candidate of each rank is the token that greedy decoding emits (static trees)."""
    _, candidates, _ = draft_whole(model, transfer, sequences, count)
    table = [[0] * count for _ in transfer.layers]
    rows = 0
    for b, sequence in enumerate(sequences.tolist()):
        for n in range(prompt - 1, len(sequence) - 1 - len(table)):
            rows += 1
            for k, row in enumerate(candidates[b][n]):
                if sequence[n + 2 + k] in row:
                    table[k][row.index(sequence[n + 2 + k])] += 1
    return [sorted((hits / rows for hits in row), reverse=True) for row in table]       # far ranks are noisy; best_first wants them sorted


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
    report = {}
    for name in sides:
        seconds = [sum(run.seconds for run in turn) for turn in runs[name]]
        new, passes = (sum(getattr(run, what) for turn in runs[name] for run in turn) for what in ("new_tokens", "forward_passes"))
        plain = seconds if name == "plain" else plain                       # sides begin with plain decoding
        report[name] = {"ratio": [a / b for a, b in zip(plain, seconds)], "tokens": new / passes, "ms": 1000 * sum(seconds) / passes,
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
    p.add_argument("--transfer", default=str(TRANSFER))
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

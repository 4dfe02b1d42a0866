"""
What drafts are worth, by replay: when the model's own greedy continuation is known, one causal pass gives every draft that
decoding could ask for, so one pass answers for trees of all sizes, without decoding.
"""
from typing import NamedTuple

import torch

from drafters import rank_drafts
from model import KVCache, causal_mask
from sampler import Sampler
from tree import best_first

TREE_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RANKS = (1, 2, 3, 5, 10)


class Response(NamedTuple):
    tokens: torch.Tensor    # (T,) prompt and answer, with the end token where the answer came to its end
    prompt: int             # how many of them are the prompt


def cut_prompts(stream, count: int = 50, length: int = 32) -> list[list[int]]:
    """`count` prompts of `length` tokens, cut at even distances from a stream of tokens (N,)."""
    if len(stream) < count * length:
        raise ValueError(f"--data: {len(stream)} held-out tokens are too few for {count} prompts of {length}")
    stride = (len(stream) - length) // count
    return [stream[i * stride:i * stride + length].tolist() for i in range(count)]


@torch.inference_mode()
def answer(model, prompts: list[list[int]], ends: set[int], new: int, choose=lambda logits: logits.argmax(-1)) -> list[list[int]]:
    """Continuations of prompts of one length, up to `new` tokens or an end token, decoded as one batch; greedy unless `choose`,
    logits (B, 1, V) -> tokens (B, 1), says otherwise."""
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    fed = torch.tensor(prompts, device=device)                              # (B, T)
    cache = KVCache(model.config, fed.shape[1] + new, len(prompts), dtype, device)
    mask, alive, answers = causal_mask(fed.shape[1], device=device), list(range(len(prompts))), [[] for _ in prompts]
    for _ in range(new):
        position_ids = torch.arange(cache.length, cache.length + fed.shape[1], device=device)
        logits = model(fed, position_ids, mask, cache, slice(-1, None))     # (B, 1, V)
        cache.commit(list(range(fed.shape[1])))
        fed = choose(logits)                                                # (B, 1)
        for row, token in zip(alive, fed[:, 0].tolist()):
            if not answers[row] or answers[row][-1] not in ends:
                answers[row].append(token)
        going = [k for k, row in enumerate(alive) if answers[row][-1] not in ends]
        if not going:
            break
        if 4 * len(going) < 3 * len(alive):                                 # rows that have ended are carried along, but not for long
            alive, fed, cache.data = [alive[k] for k in going], fed[going], cache.data[:, :, going]
        mask = torch.ones(1, cache.length + 1, dtype=torch.bool, device=device)
    return answers


def continue_greedily(model, prompts: list[list[int]], new: int) -> torch.Tensor:
    """Prompts of one length with `new` tokens behind each, whatever these are: (B, length + new)."""
    rows = [prompt + tokens for prompt, tokens in zip(prompts, answer(model, prompts, set(), new))]
    return torch.tensor(rows, device=model.embedding.weight.device)


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


def tokens_per_pass(model, transfer, responses, sizes=TREE_SIZES, new: int = 128, acceptance=None) -> dict[int, float]:
    """Mean accepted tokens by tree size, over responses.

    With `acceptance` (K rows of measured acceptance by rank) the trees are the static ones built from it.
    """
    totals = [replay(model, transfer, tokens, prompt, sizes, new, acceptance) for tokens, prompt in responses]
    emitted = sum(len(tokens) - prompt for tokens, prompt in responses)
    return {size: emitted / sum(passes) for size, passes in zip(sizes, zip(*totals))}


@torch.inference_mode()
def replay(model, transfer, tokens: torch.Tensor, prompt: int, sizes=TREE_SIZES, new: int = 128, acceptance=None) -> list[int]:
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
        depths.append(accepted_depths((acceptance or scores[at])[:room], candidates[at], sequence[n + 2:], sizes))
    counts = []
    for s in range(len(sizes)):
        n, passes = prompt - 1, 1                                           # the prefill emits one token
        while n + 1 < last:
            passes += 1
            n += 1 + depths[n - prompt + 1][s]
        counts.append(passes)
    return counts


def even_windows(stream, windows: int = 40, length: int = 256, device="cpu") -> list[Response]:
    """Windows (T,) at even distances from a stream of tokens (N,), as responses to a prompt of their first token."""
    length = min(length, len(stream))
    starts = torch.linspace(0, len(stream) - length, windows).long().tolist()
    return [Response(torch.from_numpy(stream[s:s + length].astype("int64")).to(device), 1) for s in starts]


@torch.inference_mode()
def agreement(model, transfer, responses) -> list[list[float]]:
    """K rows: how often the model's own argmax is among the first 1, 2, 3, 5, 10 of a step's draft, over responses."""
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

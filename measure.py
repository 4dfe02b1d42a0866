"""
Measuring: how many tokens a pass is worth by tree size, what a pass costs here, and where its time goes.

    python measure.py             # paired speed ratios by tree size, and the breakdown of a decoding step
"""
import statistics
import time

import torch

from drafters import HiddenTransferDrafter, rank_drafts
from generate import generate, synchronize
from model import KVCache, causal_mask
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
        logits = model.unembed(pseudo[0].flatten(0, 1))                     # (T, K, C) -> (T*K, V)
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


def tokens_per_pass(model, transfer, sequences: torch.Tensor, prompt: int, sizes=TREE_SIZES) -> dict[int, float]:
    """Mean accepted tokens by tree size, by replaying greedy decoding on `sequences` (B, prompt + new).

    The sequences are the model's own greedy continuations, so one causal pass gives every draft that decoding
    could ask for, and the replay visits exactly the rows that decoding would visit.
    """
    scores, candidates, _ = draft_whole(model, transfer, sequences, min(32, max(sizes)))
    last, passes = sequences.shape[1] - 1, [0] * len(sizes)
    for b, sequence in enumerate(sequences.tolist()):
        # Row n has just been accepted and token n + 1 chosen: the drafts made from row n are about n + 2, n + 3, ...
        depths = [accepted_depths(scores[b][n], candidates[b][n], sequence[n + 2:], sizes) for n in range(prompt - 1, last)]
        for s in range(len(sizes)):
            n = prompt - 1
            passes[s] += 1                                                  # the prefill emits one token
            while n + 1 < last:
                passes[s] += 1
                n += 1 + min(depths[n - prompt + 1][s], last - n - 2)       # no deeper than what can still be emitted
    new = (last + 1 - prompt) * len(sequences)
    return {size: new / count for size, count in zip(sizes, passes)}


@torch.inference_mode()
def agreement(model, transfer, stream, windows: int = 40, length: int = 256) -> list[list[float]]:
    """K rows: how often the model's own argmax is among the first 1, 2, 3, 5, 10 of a step's draft (held-out text)."""
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
    return [sorted((hits / rows for hits in row), reverse=True) for row in table]


# ----------------------------------------------------------------------------------------------- speed

def choose_tree_size(model, make_drafter, expected: dict[int, float], prompt_ids, passes: int = 12, repeats: int = 3):
    """The tree size with the most tokens per second on this machine: (size, {size: seconds per pass}).

    expected: tokens per pass by tree size (stored with the maps). The seconds per pass are measured here, in turns
    over the sizes, by real decoding. Stops at the size from which on it only gets slower.
    """
    costs, best = {}, 0.0
    generate(model, prompt_ids, make_drafter(4), max_new_tokens=4)          # warm-up
    for size in sorted(expected):
        runs = [generate(model, prompt_ids, make_drafter(size), max_new_tokens=passes) for _ in range(repeats)]
        costs[size] = statistics.median(run.seconds / run.forward_passes for run in runs)
        rate = expected[size] / costs[size]
        best = max(best, rate)
        if rate < 0.8 * best:
            break
    return max(costs, key=lambda size: expected[size] / costs[size]), costs

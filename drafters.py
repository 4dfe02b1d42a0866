"""
Drafters. A drafter proposes and never decides what is emitted; `generate` is one loop over any of them:

    logits, state = drafter.forward(model, tokens, position_ids, mask, cache, read)     # one pass over the tree
    tree = drafter.propose(round)                                                       # after walk and commit

`rows` is how many rows one pass may stage in the cache beyond the tokens it is fed; `method` and `tree_size` are
for reports. Plain decoding is the drafter that proposes nothing.
"""
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hidden_transfer import HiddenTransfer
from model import GPT, KVCache
from sampler import Sampler
from tree import Tree, best_first, sample_tree

MAX_TREE_SIZE = 4096        # a pass feeds every node: far more than any machine does for the price of one


@dataclass
class Round:
    """What a drafter may look at when it proposes: the pass that was just verified and committed."""
    model: GPT
    cache: KVCache
    tokens: list[int]       # all tokens so far; the last one, the new root, is not in the cache yet
    state: Any              # what the drafter's forward returned
    row: int                # the last accepted row of that pass; it stands at position len(tokens) - 2
    sampler: Sampler
    max_depth: int          # deeper drafts could not be emitted any more (length or context limit)


class Autoregressive:
    method, tree_size, rows = "autoregressive", 1, 0

    def forward(self, model, tokens, position_ids, mask, cache, read):
        return model(tokens, position_ids, mask, cache, read), None

    def propose(self, round: Round) -> Tree:
        return Tree([round.tokens[-1]], [-1])


class HiddenTransferDrafter:
    """Drafts by hidden transfer, in trees of `tree_size` nodes (root included).

    Any module with HiddenTransfer's forward, draft, read_out and first takes its place: see baselines/.

    sources: how many of the likeliest nodes spawn pseudo rows within the verifying pass. tree_size gives the paper's
    single pass; 0 computes the pseudo rows after the walk, for the accepted node alone. The drafts are the same.
    shape: "best-first", "chain", or "static" (from `acceptance`, K rows of measured acceptance by rank).
    sampled: draw the children from the draft distribution, as rejection sampling needs it.
    """
    def __init__(self, transfer: HiddenTransfer, tree_size: int = 16, sources: int = 0, shape: str = "best-first",
                 acceptance: list[list[float]] | None = None, sampled: bool = False):
        if not 1 <= tree_size <= MAX_TREE_SIZE:
            raise ValueError(f"--tree-size {tree_size}: it must be from 1 (plain decoding) to {MAX_TREE_SIZE}")
        if shape not in ("best-first", "chain", "static"):
            raise ValueError(f"shape {shape!r}: it must be best-first, chain or static")
        if sources < 0:
            raise ValueError(f"--sources {sources}: it must be 0 or more")
        if (shape == "static" or sampled) and not acceptance:
            raise ValueError("a static tree needs the acceptance table that train.py stores with the maps")
        self.transfer = transfer.first(max(1, tree_size - 1))
        self.method, self.tree_size, self.sources = transfer.method, tree_size, min(sources, tree_size)
        self.shape, self.acceptance, self.sampled = shape, acceptance, sampled
        self.rows = len(self.transfer.layers) * max(1, self.sources)

    def forward(self, model, tokens, position_ids, mask, cache, read):
        first, end, _ = read.indices(tokens.shape[1])
        sources = torch.arange(first, min(first + self.sources, end), device=tokens.device)
        x, pseudo, taps = self.transfer(model, tokens, position_ids, mask, cache, sources)
        return model.unembed(x[:, read]), (pseudo, taps, first)

    def draft_logits(self, round: Round) -> torch.Tensor:
        """Logits (K, V) of the drafts at the positions behind the new root."""
        pseudo, taps, first = round.state
        source = round.row - first
        if source < pseudo.shape[1]:
            hidden = pseudo[0, source]                                      # (K, C), computed in the verifying pass
        else:
            hidden = self.transfer.draft(round.model, taps, round.row, len(round.tokens) - 2, round.cache)[0, 0]
        return self.transfer.read_out(round.model, hidden[:round.max_depth])        # (min(K, max_depth), V)

    def propose(self, round: Round) -> Tree:
        root, size = round.tokens[-1], self.tree_size
        if round.max_depth < 1 or size < 2:
            return Tree([root], [-1])
        logits = self.draft_logits(round)
        if self.sampled:
            q = torch.stack([round.sampler.probs(row) for row in logits]).cpu()             # (K, V)
            shape, _ = best_first(self.acceptance[:len(q)], size)
            return sample_tree(root, shape, q, round.sampler.generator(len(round.tokens)))
        scores, candidates = rank_drafts(logits, round.sampler, len(round.tokens), size - 1)
        if self.shape == "chain":
            scores = [row[:1] for row in scores]
        elif self.shape == "static":
            scores = [row[:len(tokens)] for row, tokens in zip(self.acceptance, candidates)]        # no rank beyond the vocabulary
        parents, ranks = best_first(scores, size)
        tokens, depth = [root], [0]
        for parent, rank in zip(parents[1:], ranks[1:]):
            tokens.append(candidates[depth[parent]][rank])
            depth.append(depth[parent] + 1)
        return Tree(tokens, parents)


def usual_sources(model: GPT, tree_size: int) -> int:
    """How many nodes draft in the verifying pass unless it is said: on a GPU rows are nearly free, on a CPU they are not (README, Speed)."""
    return min(4, tree_size) if model.embedding.weight.device.type == "cpu" else tree_size


def rank_drafts(logits: torch.Tensor, sampler: Sampler, position: int, count: int):
    """The `count` best candidates of each draft distribution: (scores, tokens), each K lists, best first.

    logits (K, V): row i is about the token at position + i. Above temperature 0 they are ranked with the noise that
    will choose the token there (common random numbers): if the draft distribution were the model's, rank 0 would
    be the token that will be drawn. Scaled by the temperature, the noise fades into the greedy ranking at 0.
    """
    logits = logits.float()
    if sampler.temperature > 0:
        noise = torch.stack([sampler.noise(position + i, logits.shape[1]) for i in range(len(logits))])     # (K, V)
        logits = logits + sampler.temperature * noise.to(logits.device, torch.float32)
    scores, tokens = F.softmax(logits, dim=-1).topk(min(count, logits.shape[1]), dim=-1)                    # (K, count)
    return scores.tolist(), tokens.tolist()

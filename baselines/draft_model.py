"""
Speculative decoding with a draft model (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): a small GPT with
the same vocabulary drafts a chain, one token a pass of its own, and the large model verifies it in one pass.

Departure: by default the drafts are chosen with the noise that chooses the large model's tokens, so that the output is plain
decoding's token for token; with sampled=True and `verify="rejection"` it is the papers' rejection sampling.

    python train.py --stage draft-model             # a GPT of two narrow blocks, distilled from the base; minutes
"""
import dataclasses

import torch

from baselines.chains import draft_chain
from drafters import MAX_TREE_SIZE, Round
from model import GPT, GPTConfig, KVCache, causal_mask
from tree import Tree

DEPTH = 4                   # of a chain
SMALL = {"n_layer": 2, "n_head": 3, "n_kv_head": 1, "n_embd": 192, "head_dim": 64, "mlp_width": 384, "rope_factors": None, "tie_head": True}


def small_config(config: GPTConfig) -> GPTConfig:
    """The base's kind and vocabulary, in the size of SMALL."""
    return dataclasses.replace(config, **SMALL)


class DraftModelDrafter:
    """A chain of `depth` drafts from a small GPT, which has a cache of its own; depth 0 is plain decoding."""
    method, rows = "draft-model", 0

    def __init__(self, small: GPT, depth: int = DEPTH, sampled: bool = False):
        if not 0 <= depth < MAX_TREE_SIZE:
            raise ValueError(f"draft model: depth is {depth}; it must be from 0 (plain decoding) to {MAX_TREE_SIZE - 1}")
        self.small, self.depth, self.sampled = small, depth, sampled
        self.tree_size = depth + 1
        self.cache, self.fed = None, []                                     # fed: the tokens whose rows are committed in it

    def forward(self, model, tokens, position_ids, mask, cache, read):
        if model.config.vocab_size != self.small.config.vocab_size:
            raise ValueError(f"the draft model has a vocabulary of {self.small.config.vocab_size} tokens, "
                             f"the model {model.config.vocab_size}: they must be the same")
        if cache.length == 0:                                               # a new text
            self.cache, self.fed = None, []
        return model(tokens, position_ids, mask, cache, read), None

    def propose(self, round: Round) -> Tree:
        room = self.small.config.block_size - len(round.tokens)             # its context may be the shorter one
        depth = min(self.depth, round.max_depth, room + 1)
        if depth < 1:
            return Tree([round.tokens[-1]], [-1])
        if self.cache is None:
            weight, capacity = self.small.embedding.weight, min(self.small.config.block_size, len(round.tokens) + round.max_depth)
            self.cache = KVCache(self.small.config, capacity, 1, weight.dtype, weight.device)
        kept = min(len(self.fed), len(round.tokens) - 1)                    # accepted drafts are in the cache already; the root is the model's own
        self.cache.truncate(kept)
        self.fed = round.tokens[:kept]
        return draft_chain(round, depth, lambda token, position: self.read(round.tokens[len(self.fed):] or [token]), self.sampled)

    def read(self, tokens: list[int]) -> torch.Tensor:
        """Feed tokens behind those fed before; the logits (V,) of what follows the last of them."""
        device, start = self.small.embedding.weight.device, len(self.fed)
        position_ids = torch.arange(start, start + len(tokens), device=device)
        mask = causal_mask(len(tokens), start, device)
        logits = self.small(torch.tensor([tokens], device=device), position_ids, mask, self.cache, slice(-1, None))[0, 0]
        self.cache.commit(list(range(len(tokens))))
        self.fed = self.fed + tokens
        return logits

"""
Decoding: one loop over any drafter, and the command line.

    python generate.py                                          # the checkpoint that ships, its maps, a default prompt
    python generate.py --prompt "import os" --tree-size 64 --check --trace
"""
import argparse
import codecs
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoint import BASE, DTYPES, TRANSFER, load_checkpoint, load_transfer
from drafters import Autoregressive, HiddenTransferDrafter, Round
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
             end_token: int | None = None, verify: str = "coupled", tokenizer=None, on_pass=None) -> Generation:
    """Continue prompt_ids (one sequence); returns exactly what plain decoding with the same sampler returns.

    drafter: None for plain decoding. verify: "coupled" (token for token) or "rejection" (same law, for drafters
    whose trees are sampled). on_pass: called with a Pass after each pass. ValueError for a prompt that is empty, too
    long, or holds ids outside the vocabulary.
    """
    check_request(model, prompt_ids, max_new_tokens, verify)
    drafter = drafter if drafter is not None else Autoregressive()
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    tokens, block_size = list(prompt_ids), model.config.block_size
    # The last token emitted need not be fed, so a context of block_size leaves room for one token more.
    limit = min(max_new_tokens, block_size + 1 - len(tokens))
    result = Generation(prompt_tokens=len(tokens), method=drafter.method, tree_size=drafter.tree_size, seed=sampler.seed,
                        dtype=str(dtype).removeprefix("torch."), device=str(device))
    cache = KVCache(model.config, len(tokens) + max(limit, 1) + drafter.tree_size + drafter.rows, 1, dtype, device)
    dice = torch.Generator().manual_seed(sampler.seed % 2 ** 63)            # for rejection sampling alone
    tree = Tree([tokens[-1]], [-1])
    synchronize(device)
    start = time.perf_counter()
    while not result.finish_reason:
        if len(result.token_ids) == limit:
            result.finish_reason = "length" if limit == max_new_tokens else "context"
            break
        ahead = len(tokens) - 1 - cache.length                              # rows before the root: the prompt, once
        fed = torch.tensor([tokens[cache.length:-1] + tree.tokens], device=device)                  # (1, ahead + N)
        position_ids = torch.cat([torch.arange(ahead), tree.position_ids(ahead)]) + cache.length    # (ahead + N,)
        mask = tree.mask(cache.length + ahead)                              # (N, committed + ahead + N)
        if ahead:
            before = torch.zeros(ahead, mask.shape[1], dtype=torch.bool)
            before[:, :ahead] = causal_mask(ahead)
            mask = torch.cat([before, mask])                                # (ahead + N, ahead + N)
        logits, state = drafter.forward(model, fed, position_ids.to(device), mask.to(device), cache, slice(ahead, None))
        position = len(tokens) - 1
        path, token = judge(tree, logits[0], position, sampler, verify, dice)
        cache.commit(list(range(ahead)) + [ahead + node for node in path])
        emitted = [tree.tokens[node] for node in path[1:]] + [token]
        if end_token in emitted:
            emitted = emitted[:emitted.index(end_token) + 1]
            result.finish_reason = "end"
        tokens += emitted
        result.token_ids += emitted
        result.accepted_per_pass.append(len(emitted))
        if on_pass:
            on_pass(Pass(tree, path, emitted))
        remaining = limit - len(result.token_ids)
        if remaining and not result.finish_reason:
            tree = drafter.propose(Round(model, cache, tokens, state, ahead + path[-1], sampler, remaining - 1))
    synchronize(device)
    result.seconds = time.perf_counter() - start
    result.new_tokens, result.forward_passes = len(result.token_ids), len(result.accepted_per_pass)
    result.mean_accepted_tokens = result.new_tokens / max(1, result.forward_passes)
    result.tokens_per_second = result.new_tokens / result.seconds if result.new_tokens else 0.0
    if tokenizer is not None:
        result.text = tokenizer.decode(result.token_ids[:-1] if result.finish_reason == "end" else result.token_ids)
    return result


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

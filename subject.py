"""
What figures.py is about: a base model, its drafts, and text, with what several figures need of them, computed once.
"""
import functools
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from closed_form import RidgeSums
from data import encode_texts
from distillation import PROMPTS, Exam, make_exam
from generate import synchronize
from hidden_transfer import HiddenTransfer
from model import GPT, KVCache, causal_mask
from replay import Response, acceptance_by_rank

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CLOSED_FORM = 60_000                                # tokens of text for the closed form of figures 3 and 4


@dataclass
class Subject:
    """What is measured: a base model, its drafts, and text."""
    model: GPT
    transfer: HiddenTransfer
    modules: dict[str, Any]         # name -> draft module, hidden transfer first
    tokenizer: Any
    training: list[str]             # texts
    held_out: np.ndarray            # tokens (N,)
    prompts: int = PROMPTS          # held-out prompts that are continued

    @functools.cached_property
    def exam(self) -> Exam:
        """Windows of held-out text, and the model's greedy continuations of held-out prompts."""
        return make_exam(self.model, self.held_out, self.prompts)

    @property
    def first_half(self) -> list[Response]:
        """Static trees are built on one half of the continuations, and measured on the other."""
        return self.exam.responses[:len(self.exam.responses) // 2]

    @property
    def second_half(self) -> list[Response]:
        return self.exam.responses[len(self.exam.responses) // 2:]

    @functools.cached_property
    def acceptance(self) -> list[list[float]]:
        """By step and rank, on the first half."""
        return acceptance_by_rank(self.model, self.transfer, self.first_half)

    @functools.cached_property
    def costs(self) -> dict[int, float]:
        return pass_costs(self.model)

    @functools.cached_property
    def sums(self) -> tuple[RidgeSums, RidgeSums]:
        """The closed form for two steps: of the states entering every block, and of the last hidden state."""
        config, device = self.model.config, self.model.embedding.weight.device
        sums, last = RidgeSums(config, 2, device, self.transfer.shift_positions), RidgeSums(config, 2, device, last=True)
        for window in tqdm(self.training_tokens(CLOSED_FORM).split(2), desc="closed form", leave=False, dynamic_ncols=True):
            sums.add(self.model, window)
            last.add(self.model, window)
        return sums, last

    def filled(self, layers: list[int]) -> HiddenTransfer:
        """Maps in closed form."""
        device = self.model.embedding.weight.device
        transfer = self.sums[0].fill(HiddenTransfer(self.model.config, layers, self.transfer.shift_positions).to(device))
        return transfer.to(self.model.embedding.weight).eval()

    def training_tokens(self, count: int) -> torch.Tensor:
        """(windows, length) of training text, from files picked by chance with a fixed seed."""
        length = min(256, self.model.config.block_size)
        texts, stream = random.Random(0).sample(self.training, len(self.training)), np.zeros(0, dtype=np.int64)
        while texts and len(stream) < count:
            stream = np.concatenate([stream, encode_texts([texts.pop()], self.tokenizer).astype(np.int64)])
        if len(stream) < length:
            raise ValueError(f"--data: {len(stream)} training tokens are fewer than one window of {length}")
        windows = min(count, len(stream)) // length
        return torch.from_numpy(stream[:windows * length]).view(windows, length).to(self.model.embedding.weight.device)     # (windows, length)


def windows_of(subject: Subject) -> str:
    return f"{len(subject.exam.text)} windows of {len(subject.exam.text[0].tokens)} tokens"


def machine(model) -> str:
    weight = model.embedding.weight
    return f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}, {torch.get_num_threads()} threads"


@torch.inference_mode()
def pass_costs(model, rows=ROWS, committed: int = 128, repeats: int = 15) -> dict[int, float]:
    """Seconds that a pass over n rows takes behind `committed` rows, the median of `repeats`, all n in turns."""
    weight = model.embedding.weight
    committed = min(committed, model.config.block_size // 2)
    cache = KVCache(model.config, committed + max(rows), 1, weight.dtype, weight.device)
    cache.commit(list(range(committed)))                                    # zeros cost as much as anything
    seconds = {n: [] for n in rows}
    for turn in tqdm(range(-2, repeats), desc=f"passes in {str(weight.dtype).removeprefix('torch.')}", leave=False, dynamic_ncols=True):
        for n in rows:
            tokens = torch.arange(n, device=weight.device)[None] % model.config.vocab_size      # (1, n)
            position_ids, mask = torch.full((n,), committed, device=weight.device), causal_mask(n, committed, weight.device)
            synchronize(weight.device)
            start = time.perf_counter()
            model(tokens, position_ids, mask, cache)                        # stages n rows, commits none
            synchronize(weight.device)
            if turn >= 0:                                                   # the first turns warm up
                seconds[n].append(time.perf_counter() - start)
    return {n: statistics.median(times) for n, times in seconds.items()}

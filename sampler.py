"""
Which token comes next: one function, used alike by plain decoding and by the walk over a candidate tree.
"""
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Sampler:
    """Temperature, filters and seed. temperature 0 is argmax; top_k 0, top_p 1 and min_p 0 switch a filter off.

    Above temperature 0 a draw is Gumbel-max, argmax(log p + G), which is an exact draw from p (Maddison et al.,
    arXiv 1411.0030, section 2). The noise G depends on (seed, position) alone, so the token at a position does not
    depend on how it was drafted: sampled output is the same with any tree and with none.
    """
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"--temperature {self.temperature}: it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: it must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: it must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"--min-p {self.min_p}: it must be at least 0 (off) and below 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2 ** 64:
            raise ValueError(f"--seed {self.seed}: it must be a whole number from 0 to 2**64 - 1")

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """The token at `position` (its index in the sequence), from the logits (V,) of the row before it."""
        if self.temperature == 0:
            return int(logits.argmax())
        return int((self.log_probs(logits) + self.noise(position, len(logits)).to(logits.device)).argmax())

    def noise(self, position: int, V: int) -> torch.Tensor:
        """Gumbel noise (V,) float64 of one position: a counter-based generator, keyed by seed, counted by position."""
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, position]))
        return torch.from_numpy(-np.log(generator.standard_exponential(V)))

    def generator(self, stream: int) -> torch.Generator:
        """A generator of its own for each (seed, stream); hashed, because torch's takes the low 32 bits of a seed alone."""
        return torch.Generator().manual_seed(int(np.random.SeedSequence([self.seed, stream]).generate_state(1)[0]))

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log probabilities (V,) float64 at this temperature, -inf where a filter removes the token.

        The filters follow one another as in the Hugging Face library: top-k, then top-p, then min-p, each on what
        the one before has left. temperature must be above 0.
        """
        logits = logits.double()
        logp = F.log_softmax((logits - logits.max()) / self.temperature, dim=-1)        # 0 at the best: no inf - inf however cold
        if 0 < self.top_k < len(logp):
            logp = logp.masked_fill(logp < logp.topk(self.top_k).values[-1], -math.inf)
        if self.top_p < 1:
            ordered, index = F.softmax(logp, dim=-1).sort(descending=True, stable=True)
            before = ordered.cumsum(0) - ordered                            # probability of all likelier tokens
            logp = logp.index_fill(0, index[before >= self.top_p], -math.inf)
        if self.min_p > 0:
            logp = logp.masked_fill(logp < logp.max() + math.log(self.min_p), -math.inf)
        return F.log_softmax(logp, dim=-1)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities (V,) float64; at temperature 0 all of it lies on the argmax."""
        if self.temperature == 0:
            return F.one_hot(logits.argmax(), len(logits)).double()
        return self.log_probs(logits).exp()

"""
Medusa-1 (Cai et al., arXiv 2401.10774, section 2.1): K heads on the last hidden state, the base model frozen.

Head i reads the state n of the last real row and says which token stands i places behind the next one:

    logits_i = U_i (n + SiLU(W_i n + b_i))          n = the model's own final norm of the row after the last block

Where the norm sits: as in the authors' code, a head reads the state *behind* the final norm, and its logits come from
the unembedding alone, with no norm in between. W_i and b_i start at zero, so every head starts as the model's own.

Three kinds, as draft modules (the interface of HiddenTransfer), so that trees, walk, training and tables are the same:
  * medusa        W_i, b_i are trained and U_i is the model's unembedding: as many parameters as K transfer maps;
  * medusa-full   each head trains an unembedding of its own as well, started from the model's: the paper's Medusa-1;
  * medusa-linear the same parameters as medusa without the SiLU: n + W_i n + b_i, Medusa's linear relative.

The closed-form start: the linear kind is filled by ridge regression from n to the n that is i places ahead, which is the
last point of hidden transfer's sweep over blocks; the full kind starts from the model's unembedding times that map, its
block staying at zero. SiLU(W n + b) is bounded from below and cannot be filled so, nor can a shared unembedding undo that,
which is why the linear kind stands beside the matched one, which starts as the paper has it.

Departures from the paper: the closed-form start of the full kind (--no-closed-form is the paper's); distillation from the
model's own distribution, with the data and the loss of hidden transfer (the paper's own loss is `own_loss`); trees are
best-first instead of static (drafters.py has both).

    python train.py --stage medusa                  # parameter-matched; --heads full, --heads linear
    python train.py --stage medusa --loss own       # cross-entropy on the text
"""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, check_inputs

KINDS = {"matched": "medusa", "full": "medusa-full", "linear": "medusa-linear"}


class MedusaHeads(nn.Module):
    """K heads on the last hidden state; letters as in model.py and hidden_transfer.py."""

    def __init__(self, config, steps: int, kind: str = "matched"):
        """kind: "matched", "full" or "linear" (above). ValueError for another kind or a number of steps that cannot be."""
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"--heads {kind}: it must be one of {', '.join(KINDS)}")
        if not 1 <= steps < config.block_size:
            raise ValueError(f"{steps} Medusa heads: it must be from 1 to {config.block_size - 1}, the context less one")
        C, V = config.n_embd, config.vocab_size
        self.kind, self.method = kind, KINDS[kind]
        self.layers = [config.n_layer] * steps                              # behind the last block: for reports
        self.maps = nn.ModuleList(nn.Linear(C, C) for _ in range(steps))
        for linear in self.maps:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.heads = nn.ModuleList(nn.Linear(C, V, bias=False) for _ in range(steps if kind == "full" else 0))

    def start(self, model: GPT, sums=None) -> "MedusaHeads":
        """Where training starts. sums: RidgeSums of the last hidden state, for the kinds that have a closed form."""
        for head in self.heads:
            head.weight.data.copy_(unembedding(model))
        for i, linear in enumerate(self.maps, start=1):
            if sums is not None and self.kind == "linear":
                solution = sums.solve(0, i)                                 # (C + 1, C), its last row the bias
                linear.weight.data.copy_(solution[:-1].T - torch.eye(len(linear.weight), device=solution.device))
                linear.bias.data.copy_(solution[-1])
            elif sums is not None and self.kind == "full":
                ahead = sums.solve(0, i, bias=False)                        # (C, C)
                self.heads[i - 1].weight.data.copy_(unembedding(model).double() @ ahead.T)
        return self

    def first(self, steps: int) -> "MedusaHeads":
        """The same heads without those behind step `steps`."""
        if steps >= len(self.layers):
            return self
        fewer = copy.deepcopy(self)
        fewer.maps, fewer.heads, fewer.layers = fewer.maps[:steps], fewer.heads[:steps], self.layers[:steps]
        return fewer

    def forward(self, model: GPT, tokens, position_ids, mask, cache=None, sources=None):
        """As HiddenTransfer.forward: x (B, T, C), pseudo (B, S, K, C), taps [K x (B, T, C)]; no row is added to the pass."""
        check_inputs(model, tokens, position_ids, mask, cache)
        x, rope = model.embed(tokens, position_ids), model.rope(position_ids)
        for layer, block in enumerate(model.blocks):
            x = block(x, rope, mask, cache, layer)                          # (B, T, C)
        return x, self.spawn(model, x if sources is None else x[:, sources]), [x] * len(self.layers)

    def draft(self, model: GPT, taps, row: int, position: int, cache):
        """The states that the heads make of one accepted row, (1, 1, K, C); position and cache are not needed."""
        return self.spawn(model, taps[0][:, row:row + 1])

    def draft_rows(self, model: GPT, taps, position_ids, cache):
        """The same for S rows at once, (1, S, K, C), as HiddenTransfer.draft_rows; taps [K x (1, S, C)]."""
        return self.spawn(model, taps[0])

    def spawn(self, model: GPT, x):
        """Rows after the last block (B, S, C) -> what the unembeddings read (B, S, K, C)."""
        n = model.norm(x)
        steps = [linear(n) if self.kind == "linear" else F.silu(linear(n)) for linear in self.maps]
        return torch.stack([n + step for step in steps], dim=2)

    def read_out(self, model: GPT, pseudo) -> torch.Tensor:
        """(..., K, C) -> logits (..., K, V): the shared unembedding, or one for each head."""
        if self.kind != "full":
            return F.linear(pseudo, unembedding(model))
        steps = zip(pseudo.unbind(-2), self.heads)                          # K x (..., C); fewer steps than heads may be asked for
        return torch.stack([head(state) for state, head in steps], dim=-2)


def unembedding(model: GPT) -> torch.Tensor:
    """(V, C)"""
    return model.embedding.weight if model.head is None else model.head.weight


def own_loss(drafts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Medusa's loss: the sum over the heads of 0.8^i times the cross-entropy of head i with the token n + 1 + i (section 2.2.1).

    drafts (B, N, K, V), tokens (B, N). Heads that reach past a short text take no part. ValueError if none is left.
    """
    N, losses = tokens.shape[1], []
    for i, draft in enumerate(drafts.unbind(2), start=1):                   # (B, N, V) each
        if i + 1 < N:
            logits = draft[:, :N - 1 - i].flatten(0, 1).float()             # (B * (N - 1 - i), V)
            losses.append(0.8 ** i * F.cross_entropy(logits, tokens[:, 1 + i:].flatten()))
    if not losses:
        raise ValueError(f"a text of {N} tokens has nothing to learn from: at least 3 are needed")
    return torch.stack(losses).sum()

"""
The closed-form start of the transfer maps: ridge regression from h[n, t] to h[n + i, t], one pass over some text.

A map W_i is linear, and "the hidden state i places ahead" is known for every row of a text, so the least-squares
map needs no gradients. What is accumulated, in float64, is X'X and X'Y per block and step (our addition to the paper).
"""
import torch

from hidden_transfer import HiddenTransfer, position_shift
from model import causal_mask


@torch.inference_mode()
def hidden_states(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The states entering every block, L x (B, T, C), of a causal pass over tokens (B, T)."""
    T, device = tokens.shape[1], tokens.device
    position_ids, mask, states = torch.arange(T, device=device), causal_mask(T, device=device), []
    x, rope = model.embed(tokens, position_ids), model.rope(position_ids)
    for layer, block in enumerate(model.blocks):
        states.append(x)
        x = block(x, rope, mask, None, layer)
    return states


@torch.inference_mode()
def last_hidden_state(model, tokens: torch.Tensor) -> torch.Tensor:
    """What the unembedding reads, behind the final norm, (B, T, C), of a causal pass over tokens (B, T)."""
    T, device = tokens.shape[1], tokens.device
    position_ids, mask = torch.arange(T, device=device), causal_mask(T, device=device)
    x, rope = model.embed(tokens, position_ids), model.rope(position_ids)
    for layer, block in enumerate(model.blocks):
        x = block(x, rope, mask, None, layer)
    return model.norm(x)


class RidgeSums:
    """X'X and X'Y for all blocks and steps; `add` a batch at a time, then `solve`."""

    def __init__(self, config, steps: int, device="cpu", shift_positions: bool = False, blocks=None, last: bool = False):
        """shift_positions: as for HiddenTransfer; the maps are then fitted to what the shift leaves. blocks: those that matter,
        all by default. last: instead of the states entering the blocks, the one that the unembedding reads, as t = 0 (Medusa's
        heads, baselines/medusa.py)."""
        C, L = config.n_embd, 1 if last else config.n_layer
        self.blocks = set(range(L)) if blocks is None else set(blocks)
        self.steps, self.rows, self.shift_positions, self.last = steps, 0, shift_positions, last
        self.xx = torch.zeros(L, C + 1, C + 1, dtype=torch.float64, device=device)           # with a 1 for the bias
        self.xy = torch.zeros(L, steps, C + 1, C, dtype=torch.float64, device=device)

    def add(self, model, tokens: torch.Tensor, first: int = 0) -> None:
        """tokens (B, T), of which the rows from `first` on count; the last `steps` have no full set of targets and are left out."""
        n = max(0, tokens.shape[1] - self.steps - first)
        for t, h in enumerate([last_hidden_state(model, tokens)] if self.last else hidden_states(model, tokens)):
            if t not in self.blocks:
                continue
            h = h[:, first:].double()                                       # (B, T - first, C)
            x = h[:, :n].flatten(0, 1)                                      # (B*n, C)
            x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)                # (B*n, C + 1)
            self.xx[t] += x.T @ x
            for i in range(1, self.steps + 1):
                y = h[:, i:n + i]                                           # (B, n, C)
                if self.shift_positions:
                    y = y - position_shift(model, torch.arange(first, first + n, device=h.device), i)
                self.xy[t, i - 1] += x.T @ y.flatten(0, 1)                  # (B*n, C)
        self.rows += len(tokens) * n

    def solve(self, t: int, i: int, ridge: float = 1e-3, bias: bool = True) -> torch.Tensor:
        """(C + 1, C): the map for step i at block t, its last row the bias, or (C, C) for the best map without one.
        ridge: share of the mean variance."""
        xx, xy = self.xx[t].clone(), self.xy[t, i - 1]
        strength = ridge * xx.diagonal()[:-1].mean()
        xx.diagonal()[:-1] += strength                                      # the bias is not shrunk
        return torch.linalg.solve(xx, xy) if bias else torch.linalg.solve(xx[:-1, :-1], xy[:-1])

    def fill(self, transfer: HiddenTransfer) -> HiddenTransfer:
        for i, (t, linear) in enumerate(zip(transfer.layers, transfer.maps), start=1):
            solution = self.solve(t, i)
            linear.weight.data.copy_(solution[:-1].T)
            linear.bias.data.copy_(solution[-1])
        return transfer

"""
The two ablations of hidden transfer (arXiv 2404.12022, section 4): what it owes to the blocks behind the transfer, and what to
the pseudo rows' sight of one another.

  * EarlyExit: the very maps of hidden transfer, read out by the model's norm and unembedding where they stand, at the
    input of block t_i, without the remaining blocks. Nothing is trained for it.
  * NoInteraction: pseudo rows that see what their source row sees and themselves, but no other step. Their maps are
    trained as hidden transfer's are, with the same start in closed form.

    python train.py --stage no-interaction
"""
import torch
import torch.nn as nn

from hidden_transfer import HiddenTransfer
from model import GPT


class EarlyExit(nn.Module):
    """A draft module made of trained transfer maps."""
    method = "early-exit"

    def __init__(self, transfer: HiddenTransfer):
        super().__init__()
        self.transfer, self.layers = transfer, transfer.layers

    def first(self, steps: int) -> "EarlyExit":
        return EarlyExit(self.transfer.first(steps))

    def forward(self, model: GPT, tokens, position_ids, mask, cache=None, sources=None):
        """As HiddenTransfer.forward: x (B, T, C), pseudo (B, S, K, C), taps; no row is added to the pass."""
        if sources is None:
            sources = torch.arange(tokens.shape[1], device=tokens.device)
        x, _, taps = self.transfer(model, tokens, position_ids, mask, cache, sources[:0])
        return x, self.spawn(model, [tap[:, sources] for tap in taps], position_ids[sources]), taps

    def draft(self, model: GPT, taps, row: int, position: int, cache):
        place = torch.tensor([position], device=taps[0].device)
        return self.spawn(model, [tap[:, row:row + 1] for tap in taps], place)              # (1, 1, K, C)

    def spawn(self, model, taps, position_ids):
        """taps K x (B, S, C) of rows at position_ids (S,) -> (B, S, K, C)"""
        return torch.stack([self.transfer.spawn(model, i, tap, position_ids) for i, tap in enumerate(taps, start=1)], dim=2)

    def read_out(self, model: GPT, pseudo) -> torch.Tensor:
        return model.unembed(pseudo)


class NoInteraction(HiddenTransfer):
    """Hidden transfer whose pseudo rows are blind to one another: the same maps, another mask."""
    method = "no-interaction"

    def grow_mask(self, mask, sources):
        grown = super().grow_mask(mask, sources)                            # (R, committed + R)
        added = len(grown) - len(mask)                                      # K * S pseudo rows, the last ones
        if added:
            grown[-added:, -added:] = torch.eye(added, dtype=torch.bool, device=mask.device)
        return grown

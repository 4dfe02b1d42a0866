"""
Hidden transfer (Wu et al., arXiv 2404.12022): drafting inside the model's own forward pass.

At the input of block t_i a linear map turns the hidden state of a known token n into a *pseudo hidden state* of
the token i places ahead. The pseudo row climbs through the remaining frozen blocks at position n + i; it attends to
what its source row attends to and to the pseudo rows j <= i of the same source. No real row ever attends to a
pseudo row, so the model's own logits are what they are without them. Norm and unembedding read the draft out.

Departures from the paper: the maps start from ridge regression in closed form (closed_form.py), and the pseudo rows of a
pass may be computed after the walk, for the accepted node alone (`draft`), which gives the same drafts for
fewer rows on machines where rows are not free.

Letters as in model.py, and  K transfer steps   S source rows   R = T + K*S rows in the upper blocks
"""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, check_inputs


class HiddenTransfer(nn.Module):
    """K linear maps C -> C, map i - 1 applied at the input of block layers[i - 1]; they start as the identity."""
    method = "hidden-transfer"

    def __init__(self, config, layers: list[int], shift_positions: bool = False):
        """shift_positions: add the difference of the two position embeddings (learned positions only)."""
        super().__init__()
        if not layers:
            raise ValueError("--transfer-layers: at least one block index is needed")
        if len(layers) >= config.block_size:
            raise ValueError(f"--transfer-layers: {len(layers)} steps are too many for a context of {config.block_size}")
        for t in layers:
            if not 0 <= t < config.n_layer:
                raise ValueError(f"--transfer-layers: {t} is out of range, the model has blocks 0 to {config.n_layer - 1}")
        if shift_positions and config.position != "learned":
            raise ValueError("shift_positions needs a model with learned positions")
        self.layers, self.shift_positions = list(layers), shift_positions
        self.maps = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in layers)
        for linear in self.maps:
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)
        # Rows are appended in this order, so that the rows present in a block are always the first ones.
        self.order = sorted(range(1, len(layers) + 1), key=lambda i: (layers[i - 1], i))

    def first(self, steps: int):
        """The same maps without those behind step `steps`: a tree of N nodes is at most N - 1 deep."""
        if steps >= len(self.layers):
            return self
        fewer = copy.deepcopy(self)
        fewer.maps, fewer.layers = fewer.maps[:steps], self.layers[:steps]
        fewer.order = [i for i in self.order if i <= steps]
        return fewer

    def spawn(self, model, i, h, position_ids):
        """Pseudo hidden states of step i from h (B, S, C), the states of rows at position_ids (S,): (B, S, C)."""
        p = self.maps[i - 1](h)
        return p + position_shift(model, position_ids, i) if self.shift_positions else p

    def forward(self, model: GPT, tokens, position_ids, mask, cache=None, sources=None):
        """One pass over T real rows that also computes the pseudo rows of the source rows.

        tokens (B, T), position_ids (T,), mask (T, S) bool as for GPT.forward; sources (S,) indices of real rows,
        all by default. Returns x (B, T, C), the real rows after the last block; pseudo (B, S, K, C), the pseudo rows
        after the last block (`read_out` gives their logits); taps [K x (B, T, C)], the real rows entering block t_i.
        """
        check_inputs(model, tokens, position_ids, mask, cache)
        T, device = tokens.shape[1], tokens.device
        if sources is None:
            sources = torch.arange(T, device=device)
        x = model.embed(tokens, position_ids)                               # (B, T, C)
        rope = model.rope(self.grow_positions(position_ids, sources))       # (2, R, D)
        mask = self.grow_mask(mask, sources)                                # (R, committed + R)
        x, taps = self.climb(model, x, T, rope, mask, cache, 0, None if len(sources) == 0 else
                             lambda i, tap: self.spawn(model, i, tap[:, sources], position_ids[sources]))
        return x[:, :T], self.by_step(x[:, T:], len(sources)), taps

    def draft(self, model: GPT, taps, row: int, position: int, cache):
        """The pseudo rows of one real row, computed after the walk: (1, 1, K, C).

        taps: from `forward`; row: the last accepted row in them; position: its position; cache: rows up to and
        including that row are committed. Only the blocks from the first transfer on run, on K rows instead of K
        times the tree. Equal to pseudo[:, row] of the one-pass forward.
        """
        return self.draft_rows(model, [tap[:, row:row + 1] for tap in taps], torch.tensor([position], device=taps[0].device), cache)

    def draft_rows(self, model: GPT, taps, position_ids, cache):
        """The pseudo rows of S real rows that an earlier pass has computed: (1, S, K, C).

        taps: K x (1, S, C), the states of these rows entering block t_i; position_ids (S,); cache: the rows 0, 1, 2, ...
        of the sequence, of which each source sees those up to its own.
        """
        sources, device = torch.arange(len(position_ids), device=position_ids.device), position_ids.device
        S = len(sources)
        seen = torch.arange(cache.length, device=device) <= position_ids[:, None]               # (S, committed)
        ahead = self.grow_positions(position_ids, sources)[S:]                                  # (K*S,)
        mask = self.grow_mask(seen, sources)[S:]                                                # (K*S, committed + K*S)
        x = taps[0][:, :0]                                                  # (1, 0, C): no real rows in this pass
        x, _ = self.climb(model, x, 0, model.rope(ahead), mask, cache, min(self.layers),
                          lambda i, _: self.spawn(model, i, taps[i - 1], position_ids))
        return self.by_step(x, S)

    def read_out(self, model: GPT, pseudo) -> torch.Tensor:
        """Pseudo states (..., K, C) -> logits (..., K, V), by the model's own norm and unembedding."""
        return model.unembed(pseudo)

    def climb(self, model, x, T, rope, mask, cache, first, spawn):
        """Blocks first .. L-1 on rows x (B, T, C), with spawn(i, x[:, :T]) appended at block t_i, if there is one."""
        committed, taps = mask.shape[1] - mask.shape[0], [None] * len(self.layers)
        for layer in range(first, len(model.blocks)):
            for i in self.order:
                if self.layers[i - 1] == layer:
                    taps[i - 1] = x[:, :T]
                    if spawn is not None:
                        x = torch.cat([x, spawn(i, taps[i - 1])], dim=1)    # (B, rows so far + S, C)
            R = x.shape[1]
            x = model.blocks[layer](x, rope if rope is None else rope[:, :R], mask[:R, :committed + R], cache, layer)
        return x, taps

    def by_step(self, x, S):
        """Pseudo rows in the order of appending (B, K*S, C) -> (B, S, K, C) in the order of steps."""
        x = x.unflatten(1, (len(self.layers), S))                           # (B, K, S, C)
        back = sorted(range(len(self.order)), key=lambda k: self.order[k])
        return x[:, back].transpose(1, 2)                                   # (B, S, K, C)

    def grow_positions(self, position_ids, sources):
        """(T,) -> (R,): pseudo row i of source n stands at n + i."""
        return torch.cat([position_ids] + [position_ids[sources] + i for i in self.order])

    def grow_mask(self, mask, sources):
        """(T, committed + T) -> (R, committed + R): pseudo rows repeat the mask of their source, and see the steps
        j <= i of the same source; real rows see no pseudo row."""
        S, K = len(sources), len(self.order)
        if S == 0:
            return mask
        order, same_source = torch.tensor(self.order, device=mask.device), torch.eye(S, dtype=torch.bool, device=mask.device)
        not_later = order[None, :] <= order[:, None]                        # (K, K)
        among = (not_later[:, None, :, None] & same_source[:, None]).reshape(K * S, K * S)      # (K, S, K, S) -> (K*S, K*S)
        real = torch.cat([mask, mask.new_zeros(len(mask), K * S)], dim=1)   # (T, committed + R)
        pseudo = torch.cat([mask[sources].repeat(K, 1), among], dim=1)      # (K*S, committed + R)
        return torch.cat([real, pseudo])


def position_shift(model: GPT, position_ids, i: int):
    """Learned positions: the embedding i places ahead minus that of position_ids (S,), (S, C); it stops at the last one."""
    ahead = (position_ids + i).clamp_max(model.config.block_size - 1)
    return model.positions(ahead) - model.positions(position_ids)


def distillation_loss(teacher: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Mean over the steps of KL(teacher[n + i] || draft[n, i]), each over its own valid rows n + i < N.

    teacher (B, N, V): the base model's logits; drafts (B, N, K, V): those of the pseudo rows, every row a source.
    Steps that reach past a short sequence have no valid row and take no part. ValueError if none has any.
    """
    N, losses = teacher.shape[1], []
    target = F.softmax(teacher.float(), dim=-1)
    entropy = torch.special.entr(target).sum(-1)                            # (B, N)
    for i, draft in enumerate(drafts.unbind(2), start=1):                   # (B, N, V) each: slices would make K full-size gradients
        if i < N:                                                           # KL = cross-entropy - entropy: fewer tensors of size V
            cross = F.cross_entropy(draft[:, :N - i].flatten(0, 1).float(), target[:, i:].flatten(0, 1))        # (B*(N - i), V) each
            losses.append(cross - entropy[:, i:].mean())
    if not losses:
        raise ValueError(f"a sequence of {N} token has no row to learn from: at least 2 are needed")
    return torch.stack(losses).mean()

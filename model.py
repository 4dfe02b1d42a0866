"""
A GPT in one file, for both families that the project meets: GPT-2 (learned positions, LayerNorm, GELU,
biases) and Llama (rotary positions, RMSNorm, SwiGLU, grouped key/value heads).

Three departures from nanoGPT, all of them because a candidate tree is no plain sequence:
  * position ids are an argument: two siblings in a tree stand at the same position;
  * the attention mask is an argument, boolean, over all committed and all new rows;
  * the cache separates *staged* rows (written by a pass) from *committed* ones (accepted).
Nothing is hidden on the model: what a pass depends on is what it is given.

Letters in the shape comments:
  B batch   T rows fed in this pass   S rows that can be seen (committed + T)   C width   V vocabulary
  H heads   G key/value heads         D width of one head                       L blocks
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    """Shape of a GPT; a 0 stands for the usual choice."""
    vocab_size: int = 4096
    block_size: int = 512           # longest context, in tokens
    n_layer: int = 8
    n_head: int = 6
    n_kv_head: int = 0              # fewer than n_head: grouped-query attention; 0: n_head
    n_embd: int = 384               # C, the width of a hidden state
    head_dim: int = 0               # D; 0: n_embd // n_head
    mlp_width: int = 0              # inner width of the MLP; 0: 4 * n_embd
    position: str = "rotary"        # "rotary" (every block sees the position) or "learned" (only the embedding)
    rope_theta: float = 10000.0
    rope_factors: list[float] | None = None     # D/2 divisors of the rotary frequencies, which stretch the context; None: all 1
    norm: str = "rmsnorm"           # or "layernorm"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"             # or "gelu" (exact) or "gelu_tanh"
    bias: bool = False              # biases in linear layers and LayerNorms
    tie_head: bool = True           # unembedding = token embedding

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // max(1, self.n_head)
        self.mlp_width = self.mlp_width or 4 * self.n_embd
        choices = {"position": ("rotary", "learned"), "norm": ("rmsnorm", "layernorm"),
                   "mlp": ("swiglu", "gelu", "gelu_tanh")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"GPTConfig.{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"GPTConfig.n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")
        if self.position == "rotary" and self.head_dim % 2:
            raise ValueError(f"GPTConfig.head_dim {self.head_dim} must be even for rotary positions")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(f"GPTConfig.rope_factors has {len(self.rope_factors)} numbers; head_dim {self.head_dim} needs half as many")


class KVCache:
    """Keys and values of the rows seen so far, in one preallocated tensor.

    A pass *stages* its rows behind `length` (`write`); the walk decides which of them stay (`commit`).
    Rows that are not committed are overwritten by the next pass, so a rejected draft costs nothing to undo.
    """

    def __init__(self, config: GPTConfig, capacity: int, batch: int = 1, dtype=torch.float32, device="cpu"):
        """capacity: rows per layer, committed and staged together. Memory: 2 * L * B * G * capacity * D numbers."""
        shape = (config.n_layer, 2, batch, config.n_kv_head, capacity, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)          # (L, 2, B, G, capacity, D)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.data.shape[4]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor):
        """Stage k, v (B, G, T, D) behind the committed rows; return views (B, G, length + T, D) over both."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"KVCache holds {self.capacity} rows, {end} are needed: allocate a larger capacity")
        keys, values = self.data[layer, 0], self.data[layer, 1]             # (B, G, capacity, D) each
        keys[:, :, self.length:end] = k
        values[:, :, self.length:end] = v
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, rows: list[int]) -> None:
        """Keep these staged rows (0 = first staged row), in this order. The only place where `length` grows."""
        start, end = self.length, self.length + len(rows)
        if end > self.capacity or not all(0 <= row < self.capacity - start for row in rows):
            raise ValueError(f"KVCache.commit({rows}): {start} rows are committed of {self.capacity} in all")
        if rows != list(range(len(rows))):                                  # a prefix lies where it belongs already
            index = torch.tensor(rows, device=self.data.device) + start
            self.data[..., start:end, :] = self.data.index_select(4, index)
        self.length = end

    def truncate(self, n: int) -> None:
        """Forget all committed rows from row n on."""
        if not 0 <= n <= self.length:
            raise ValueError(f"KVCache.truncate({n}): the cache holds {self.length} rows")
        self.length = n


def rotary_table(position_ids: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """cos and sin of the rotary angles (RoFormer, arXiv 2104.09864, eq. 34), (2, T, D), computed in float64.

    The half-split layout of Llama: component d is rotated together with component d + D/2.
    """
    d = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=position_ids.device)        # (D/2,)
    frequencies = config.rope_theta ** (-d / config.head_dim)                                        # (D/2,)
    if config.rope_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_factors, dtype=torch.float64, device=d.device)
    angles = position_ids.double()[:, None] * frequencies                                            # (T, D/2)
    angles = torch.cat([angles, angles], dim=1)                                                      # (T, D)
    return torch.stack([angles.cos(), angles.sin()])                                                 # (2, T, D)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate x (B, heads, T, D) by the table (2, T, D)."""
    first, second = x.chunk(2, dim=-1)                                      # (B, heads, T, D/2) each
    return x * rope[0] + torch.cat([-second, first], dim=-1) * rope[1]


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        heads = config.n_head + 2 * config.n_kv_head                        # queries, keys, values in one matrix
        self.qkv = nn.Linear(config.n_embd, heads * config.head_dim, bias=config.bias)
        self.out = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=config.bias)

    def forward(self, x, rope, mask, cache, layer):
        B, T, _ = x.shape
        c = self.config
        qkv = self.qkv(x).view(B, T, -1, c.head_dim).transpose(1, 2)        # (B, H + 2G, T, D)
        if rope is not None:                                                # queries and keys turn alike, values do not
            qk = rotate(qkv[:, :c.n_head + c.n_kv_head], rope)              # (B, H + G, T, D)
        else:
            qk = qkv[:, :c.n_head + c.n_kv_head]
        q, k = qk[:, :c.n_head], qk[:, c.n_head:]                           # (B, H, T, D), (B, G, T, D)
        v = qkv[:, c.n_head + c.n_kv_head:]                                 # (B, G, T, D)
        if cache is not None:
            k, v = cache.write(layer, k, v)                                 # (B, G, S, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=c.n_kv_head != c.n_head)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))                # (B, H, T, D) -> (B, T, H*D) -> (B, T, C)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.kind, width = config.mlp, config.mlp_width
        inner = 2 * width if self.kind == "swiglu" else width               # SwiGLU: gate and up in one matrix
        self.up = nn.Linear(config.n_embd, inner, bias=config.bias)
        self.down = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x):
        x = self.up(x)                                                      # (B, T, inner)
        if self.kind == "swiglu":                                           # arXiv 2002.05202
            gate, up = x.chunk(2, dim=-1)                                   # (B, T, width) each
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none"))


class Block(nn.Module):
    """One pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_1, self.attention = make_norm(config), Attention(config)
        self.norm_2, self.mlp = make_norm(config), MLP(config)

    def forward(self, x, rope, mask, cache, layer):
        x = x + self.attention(self.norm_1(x), rope, mask, cache, layer)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = None if config.tie_head else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for name, p in self.named_parameters():                             # GPT-2's initialisation
            if p.dim() == 2:
                shrink = math.sqrt(2 * config.n_layer) if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(p, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    # The pass in three parts, so that hidden transfer can add rows between the blocks.

    def embed(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """tokens (B, T), position_ids (T,) -> hidden states entering block 0, (B, T, C)."""
        x = self.embedding(tokens)                                          # (B, T, C)
        return x if self.positions is None else x + self.positions(position_ids)

    def rope(self, position_ids: torch.Tensor) -> torch.Tensor | None:
        """The rotary table (2, T, D) in the model's dtype; None for learned positions."""
        if self.positions is not None:
            return None
        return rotary_table(position_ids, self.config).to(self.embedding.weight.dtype)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last block (..., C) -> logits (..., V)."""
        return F.linear(self.norm(x), self.embedding.weight if self.head is None else self.head.weight)

    def forward(self, tokens, position_ids, mask, cache=None, read=slice(None)):
        """Logits of the rows in `read`, (B, T, V) by default.

        tokens (B, T) int; position_ids (T,) int; mask (T, S) bool, True where row t may look at row s, the S
        rows being the committed rows of the cache followed by the T new ones. The new rows are staged in the
        cache, not committed. `read` picks the rows that are unembedded (a prefill needs only the last).
        """
        check_inputs(self, tokens, position_ids, mask, cache)
        x, rope = self.embed(tokens, position_ids), self.rope(position_ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, mask, cache, layer)
        return self.unembed(x[:, read])


def check_inputs(model, tokens, position_ids, mask, cache) -> None:
    """Refuse what would be silently wrong: a float mask would be added instead of applied (ValueError)."""
    B, T = tokens.shape
    S = T + (cache.length if cache is not None else 0)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean (True = may look), not {mask.dtype}")
    if tuple(mask.shape) != (T, S):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; {T} rows that see {S} rows need ({T}, {S})")
    if tuple(position_ids.shape) != (T,):
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; {T} rows need ({T},)")
    if cache is not None and cache.data.shape[2] != B:
        raise ValueError(f"the cache is made for a batch of {cache.data.shape[2]}, tokens have a batch of {B}")


def causal_mask(T: int, committed: int = 0, device="cpu") -> torch.Tensor:
    """(T, committed + T) bool: every row sees all committed rows, the rows before it and itself."""
    return torch.ones(T, committed + T, dtype=torch.bool, device=device).tril(diagonal=committed)


def lay_out_for_cpu(module: nn.Module) -> nn.Module:
    """Store the matrices of a frozen module column by column, (in, out) contiguous; shapes and values stay the same.

    The matrix products of a pass over a few rows, which is what a candidate tree is, then run faster on CPUs, and
    those of one row no slower.
    """
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.data = part.weight.data.t().contiguous().t()        # (out, in) with strides (1, out)
    return module

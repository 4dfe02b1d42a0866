"""
What all tests share: two tiny random models, one of each family, and slow, obvious ways to compute what the fast
code computes. Equality is judged in float64, where a pass over many rows and one over a single row agree.

The references build their own masks and position ids, and run without a cache: they share no code with what
they check but the weights and, in `full_logits`, `model.forward` (which test_model.py checks against `slow_forward`).
"""
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)        # tiny matrices: a second thread costs more than it brings

from hidden_transfer import HiddenTransfer                      # noqa: E402  (after the path is set)
from model import GPT, GPTConfig                                # noqa: E402

VOCAB, BLOCK = 50, 64
CONFIGS = {
    # Llama's parts: rotary positions, RMSNorm, SwiGLU, grouped key/value heads, a head of its own.
    "rotary": dict(n_kv_head=2, mlp_width=48, tie_head=False),
    # GPT-2's parts: learned positions, LayerNorm, GELU, biases, a head tied to the embedding.
    "learned": dict(position="learned", norm="layernorm", mlp="gelu", bias=True, mlp_width=64),
}
KINDS = list(CONFIGS)
PROMPT = [3, 14, 15, 9, 26]


def make_model(kind: str, seed: int = 0, dtype=torch.float64, **changes) -> GPT:
    """A frozen random model, scaled so that its greedy text is lively.

    With GPT-2's initialisation (std 0.02) all logits are nearly equal, positions hardly matter, and the text is one
    token over and over: most faults would go unnoticed.
    """
    shape = dict(vocab_size=VOCAB, block_size=BLOCK, n_layer=4, n_head=4, n_embd=32) | CONFIGS[kind] | changes
    model, generator = GPT(GPTConfig(**shape)), torch.Generator().manual_seed(seed)
    tied = model.head is None
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if name == "embedding.weight":
            p.data = noise * (0.6 if tied else 1.0)
        elif name == "positions.weight":
            p.data = noise
        elif name == "head.weight":
            p.data = noise * 3 / math.sqrt(p.shape[1])
        elif p.dim() == 2:
            p.data = noise * 2 / math.sqrt(p.shape[1])
        else:                                                   # norms around 1, biases around 0
            p.data = noise * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model.to(dtype).eval().requires_grad_(False)


def make_transfer(model: GPT, layers: list[int], seed: int = 0, shift_positions: bool = False) -> HiddenTransfer:
    """Random maps in the model's dtype: near the identity, and far enough from it that each step says something else."""
    transfer, generator = HiddenTransfer(model.config, layers, shift_positions), torch.Generator().manual_seed(seed)
    for p in transfer.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data = p.data.double() + 0.3 * noise / (math.sqrt(p.shape[1]) if p.dim() == 2 else 1)
    return transfer.to(model.embedding.weight.dtype).eval().requires_grad_(False)


@pytest.fixture(scope="session", params=KINDS)
def model(request) -> GPT:
    """Every test that takes this fixture runs for both position kinds."""
    return make_model(request.param)


@pytest.fixture(scope="session")
def text(model) -> list[int]:
    """PROMPT with its true greedy continuation, up to the context limit."""
    return PROMPT + plain(model, PROMPT, BLOCK + 1 - len(PROMPT))


# ------------------------------------------------------------------------------------------ references

def full_logits(model: GPT, tokens: list[int]) -> torch.Tensor:
    """Causal forward without a cache: (T, V)."""
    T = len(tokens)
    return model(torch.tensor([tokens]), torch.arange(T), torch.ones(T, T, dtype=torch.bool).tril())[0]


def plain(model: GPT, prompt: list[int], count: int, choose=None) -> list[int]:
    """`count` new tokens, one at a time, with the whole sequence fed anew for each of them."""
    tokens = list(prompt)
    for _ in range(count):
        last = full_logits(model, tokens)[-1]
        tokens.append(choose(last, len(tokens)) if choose else int(last.argmax()))
    return tokens[len(prompt):]


def fresh_cache_rows(model: GPT, tokens: list[int]) -> torch.Tensor:
    """Keys and values of a plain causal prefill of `tokens`: (L, 2, B, G, T, D)."""
    from model import KVCache
    T = len(tokens)
    cache = KVCache(model.config, T, dtype=model.embedding.weight.dtype)
    model(torch.tensor([tokens]), torch.arange(T), torch.ones(T, T, dtype=torch.bool).tril(), cache)
    return cache.data


def turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate one head's vector (D,): components d and d + D/2 form a complex number, turned by position * theta^(-2d/D)."""
    half = len(x) // 2
    angles = torch.tensor([position * theta ** (-2 * d / len(x)) for d in range(half)], dtype=torch.float64)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def slow_forward(model: GPT, tokens: list[int], transfer: HiddenTransfer | None = None):
    """Row by row, head by head: (x, pseudo), the real rows after the last block, T vectors (C,), and the pseudo
    states of the *last* row after the last block, K vectors (C,). No mask: every row lists the rows it looks at.
    """
    c = model.config
    heads, groups, D = c.n_head, c.n_kv_head, c.head_dim
    layers = transfer.layers if transfer is not None else []
    real = [model.embedding.weight[token].clone() for token in tokens]
    if c.position == "learned":
        real = [x + model.positions.weight[position] for position, x in enumerate(real)]
    n, pseudo = len(tokens) - 1, {}                             # pseudo: step -> state
    for layer, block in enumerate(model.blocks):
        for i, t in enumerate(layers, start=1):
            if t == layer:
                linear = transfer.maps[i - 1]
                pseudo[i] = linear.weight @ real[n] + linear.bias
                if transfer.shift_positions:
                    pseudo[i] = pseudo[i] + model.positions.weight[n + i] - model.positions.weight[n]
        names = list(range(n + 1)) + [("step", i) for i in pseudo]
        states = dict(zip(names, real + list(pseudo.values())))
        place = {name: name if isinstance(name, int) else n + name[1] for name in names}
        queries, keys, values = {}, {}, {}
        for name in names:
            qkv = block.attention.qkv(block.norm_1(states[name])).view(heads + 2 * groups, D)
            if c.position == "rotary":
                turned = [turn(x, place[name], c.rope_theta) for x in qkv[:heads + groups]]
                queries[name], keys[name] = turned[:heads], turned[heads:]
            else:
                queries[name], keys[name] = list(qkv[:heads]), list(qkv[heads:heads + groups])
            values[name] = list(qkv[heads + groups:])
        after = {}
        for name in names:
            if isinstance(name, int):                           # a real row: itself and what stands before it
                seen = list(range(name + 1))
            else:                                               # a pseudo row: all that its source sees, and steps j <= i
                seen = list(range(n + 1)) + [other for other in names if not isinstance(other, int) and other[1] <= name[1]]
            parts = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = torch.stack([queries[name][head] @ keys[other][group] for other in seen]) / math.sqrt(D)
                parts.append(F.softmax(scores, dim=0) @ torch.stack([values[other][group] for other in seen]))
            x = states[name] + block.attention.out(torch.cat(parts))
            after[name] = x + block.mlp(block.norm_2(x))
        real = [after[m] for m in range(n + 1)]
        pseudo = {i: after["step", i] for i in pseudo}
    return real, [pseudo[i + 1] for i in range(len(layers))]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() < tolerance

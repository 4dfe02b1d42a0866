"""
Checkpoints of other projects: nanoGPT's ckpt.pt, folders in Hugging Face's layout (gpt2, llama), names on the hub, and
GGUF files of the Llama family.

Each opener returns (fields of GPTConfig, weights, tokenizer or None). Weights are functions that read one tensor of ours
from the file, so that checkpoint.build_model streams them: no file is ever held in memory as a whole. The libraries of
the formats are imported when such a file is opened (requirements-checkpoints.txt).

What has to be turned on the way: GPT-2 stores its matrices transposed (Conv1D); query, key and value are one matrix
here, and so are gate and up of SwiGLU; GGUF stores the rows of query and key in pairs for interleaved rotary positions.
"""
import contextlib
import math
import re
from pathlib import Path

import numpy as np
import torch

from checkpoint import read_torch, strip_prefixes
from foreign_tokenizer import from_folder, from_gguf, gpt2, need, read_json
from model import GPT, GPTConfig

# Our part of the model -> theirs; several are stacked, in this order. "blocks" is what stands before a block's parts.
GPT2 = {"embedding": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head", "blocks": "h.{}.",
        "norm_1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "norm_2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
LLAMA = {"embedding": "embed_tokens", "norm": "norm", "head": "lm_head", "blocks": "layers.{}.", "norm_1": "input_layernorm",
         "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attention.out": "self_attn.o_proj",
         "norm_2": "post_attention_layernorm", "mlp.up": "mlp.gate_proj mlp.up_proj", "mlp.down": "mlp.down_proj"}
GGUF = {"embedding": "token_embd", "norm": "output_norm", "head": "output", "blocks": "blk.{}.", "norm_1": "attn_norm",
        "attention.qkv": "attn_q attn_k attn_v", "attention.out": "attn_output",
        "norm_2": "ffn_norm", "mlp.up": "ffn_gate ffn_up", "mlp.down": "ffn_down"}
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq")   # no weights
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def arrange(fields: dict, table: dict, names, read, turn=lambda name, tensor: tensor, real_tokens: int | None = None,
            without_bias=()):
    """(fields, state) for build_model: which of their tensors make up each of ours.

    names: theirs, without a common prefix; read(name) -> tensor; turn(name, tensor): what is to be done to it.
    real_tokens: the size of the tokenizer's vocabulary; rows of embedding and head beyond it are padding and are left
    out, so that padded ids exist neither in plain decoding nor in drafts. without_bias: parts of the model that have no
    bias though others have; theirs are zero.
    """
    config = GPTConfig(**fields)
    with torch.device("meta"):
        ours = GPT(config).state_dict()
    left, state, head = {name for name in names if not BUFFERS.fullmatch(name)}, {}, f"{table['head']}.weight"
    padded = config.vocab_size
    real = min(real_tokens or padded, padded)
    query, key = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    rows = {2: [config.mlp_width] * 2, 3: [query, key, key]}                # of what is stacked, by their number

    def stacked(theirs):
        parts = [turn(name, read(name)) for name in theirs]
        if len(parts) == 1:
            return parts[0]
        if [len(part) for part in parts] != rows[len(parts)] or len({part.shape[1:] for part in parts}) > 1:
            raise RuntimeError(f"{', '.join(theirs)} have shapes {', '.join(str(tuple(part.shape)) for part in parts)}; "
                               f"the configuration needs {rows[len(parts)]} rows of one width")
        return torch.cat(parts)                                             # n x (rows, C) -> (sum of rows, C)

    def cut(theirs):
        tensor = stacked(theirs)                                            # (padded, C)
        if len(tensor) != padded:
            raise RuntimeError(f"{theirs[0]} has {len(tensor)} rows; the configuration needs {padded}")
        if fields["tie_head"] and head in names and not torch.equal(tensor, read(head)):
            raise RuntimeError(f"{head} differs from the embedding, though the configuration ties the two")
        return tensor[:real]                                                # (V, C)

    for name, p in ours.items():
        layer, part, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", name).groups()
        theirs = [(table["blocks"].format(layer) if layer else "") + f"{their}.{kind}" for their in table[part].split()]
        if kind == "bias" and part.split(".")[0] in without_bias:
            state[name] = torch.zeros(p.shape)
            continue
        missing = [their for their in theirs if their not in names]
        if missing:
            raise ValueError(f"its weights lack {missing[0]}")
        left.difference_update(theirs)
        state[name] = lambda theirs=theirs, make=cut if part in ("embedding", "head") else stacked: make(theirs)
    left -= {head} if fields["tie_head"] else set()
    if left:
        raise ValueError(f"{len(left)} of its weights have no place in the model, {sorted(left)[0]} for one")
    return fields | {"vocab_size": real}, state


# ------------------------------------------------------------------------------------------ configurations

def gpt2_fields(c: dict) -> dict:
    refuse_unless(c, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
    activation = c.get("activation_function", "gelu_new")
    if activation not in GELUS:
        raise ValueError(f"activation_function {activation!r} is not known; {', '.join(GELUS)} are")
    return dict(vocab_size=c["vocab_size"], block_size=c.get("n_positions") or c["n_ctx"], n_layer=c["n_layer"], n_head=c["n_head"],
                n_embd=c["n_embd"], mlp_width=c.get("n_inner") or 0, position="learned", norm="layernorm", bias=True,
                norm_eps=c.get("layer_norm_epsilon", 1e-5), mlp=GELUS[activation], tie_head=c.get("tie_word_embeddings", True))


def llama_fields(c: dict) -> dict:
    refuse_unless(c, {"hidden_act": "silu"})
    rope = (c.get("rope_scaling") or {}) | (c.get("rope_parameters") or {})
    theta = rope.get("rope_theta") or c.get("rope_theta") or 10000.0
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    refuse_unless(c | rope, {"partial_rotary_factor": 1.0})
    return dict(vocab_size=c["vocab_size"], block_size=c.get("max_position_embeddings", 2048), n_layer=c["num_hidden_layers"],
                n_head=c["num_attention_heads"], n_kv_head=c.get("num_key_value_heads") or 0, n_embd=c["hidden_size"],
                head_dim=head_dim, mlp_width=c["intermediate_size"], rope_theta=float(theta),
                rope_factors=rope_factors(rope, theta, head_dim), norm_eps=c.get("rms_norm_eps", 1e-6),
                bias=bool(c.get("attention_bias") or c.get("mlp_bias")), tie_head=c.get("tie_word_embeddings", False))


def refuse_unless(c: dict, supported: dict) -> None:
    for name, value in supported.items():
        if c.get(name, value) not in (value, None):
            raise ValueError(f"{name} {c[name]!r} is not supported, {value!r} alone is")


def rope_factors(scaling: dict, theta: float, head_dim: int) -> list[float] | None:
    """The divisors (D/2) of the rotary frequencies for a scaling as Hugging Face's configurations describe it."""
    kind, half = scaling.get("rope_type") or "default", head_dim // 2
    if kind == "default":
        kind = scaling.get("type") or "default"                             # the older name
    if kind == "default":
        return None
    if kind == "linear":                                                    # arXiv 2306.15595: all positions closer together
        return [float(scaling["factor"])] * half
    if kind != "llama3":
        raise ValueError(f"rope_scaling of type {kind!r} is not supported; linear and llama3 are")
    # Llama 3.1: long waves are stretched by `factor`, short ones stay, and between the two it fades from one to the other.
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for d in range(half):
        turns = scaling["original_max_position_embeddings"] * theta ** (-2 * d / head_dim) / (2 * math.pi)     # in the old context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)            # of the frequency as it was
        factors.append(1 / ((1 - share) / factor + share))
    return factors


# ------------------------------------------------------------------------------------------ Hugging Face

def open_folder(folder: Path):
    if not (folder / "config.json").is_file():
        raise ValueError("no such file; a folder is read if it holds a config.json, as Hugging Face's do")
    config = read_json(folder / "config.json")
    family = config.get("model_type")
    if family not in ("gpt2", "llama"):
        raise ValueError(f"architecture {family!r} is not known; gpt2 and llama are")
    if config.get("quantization_config"):
        raise ValueError("quantized weights (quantization_config) are not supported; use the original weights or a GGUF file")
    fields = gpt2_fields(config) if family == "gpt2" else llama_fields(config)
    files = {re.sub(r"^(transformer|model)\.", "", name): (file, name) for name, file in locate(folder).items()}
    tokenizer = from_folder(folder, config)
    without_bias = [part for part in ("attention", "mlp") if not config.get(f"{part}_bias")] if family == "llama" else []
    fields, state = arrange(fields, GPT2 if family == "gpt2" else LLAMA, files, lambda name: read_tensor(*files[name]),
                            untranspose if family == "gpt2" else keep, tokenizer and tokenizer.n_vocab, without_bias)
    return fields, state, tokenizer


def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def untranspose(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Conv1D (in, out) -> Linear (out, in); the square c_proj would pass every check of shapes as it is."""
    return tensor.t() if ".c_" in name and tensor.dim() == 2 else tensor


def locate(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor: one file, or shards that an index lists; safetensors where there are both."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return {name: folder / stem for name in names_in(folder / stem)}
        index = folder / f"{stem}.index.json"
        if index.is_file():
            files = {name: folder / file for name, file in read_json(index)["weight_map"].items()}
            for file in sorted(set(files.values())):
                if not file.is_file():
                    raise ValueError(f"{file.name}, which {index.name} lists, is missing")
            return files
    raise ValueError("there is no model.safetensors or pytorch_model.bin in it, nor an index of their parts")


def names_in(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with safetensors_errors(file), need("safetensors").safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    contents = read_torch(file, "--checkpoint", on_disk=True)
    if not isinstance(contents, dict) or not all(isinstance(value, torch.Tensor) for value in contents.values()):
        raise ValueError(f"{file.name} holds something else than named tensors")
    return list(contents)


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """One tensor. The file is opened anew each time, so that what was read of it does not stay in memory."""
    if file.suffix == ".safetensors":
        with safetensors_errors(file), need("safetensors").safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)
    return read_torch(file, "--checkpoint", on_disk=True)[name]


@contextlib.contextmanager
def safetensors_errors(file: Path):
    try:
        yield
    except need("safetensors").SafetensorError as error:
        raise ValueError(f"{file.name} is damaged, incomplete or no safetensors file ({error})") from None


def fetch(name: str, revision: str | None) -> Path:
    """The folder in which the hub's library keeps the files of a model, after it has fetched what is not there yet."""
    hub = need("huggingface_hub")
    small = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "*.index.json"]
    try:
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=small + ["model*.safetensors"]))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=small + ["pytorch_model*.bin"]))
    except Exception as error:                      # of the network, of the hub, of the disk: each library has its own
        missing = "NotFound" in type(error).__name__ and "LocalEntry" not in type(error).__name__
        at = f" at revision {revision}" if revision else ""
        if missing or "Gated" in type(error).__name__:
            raise ValueError(f"--checkpoint {name}: there is no such file or folder here, and the hub has no model of that name{at} "
                             "that may be read without asking") from None
        raise ValueError(f"--checkpoint {name}: there is no such file or folder here, and the model{at} could not be fetched from the hub "
                         f"({type(error).__name__}); without a network, copy the model's folder here and give its path") from None
    return folder


# ------------------------------------------------------------------------------------------ nanoGPT

def open_nanogpt(contents: dict, path: Path):
    args, weights = contents["model_args"], contents["model"]
    bias, vocab_size = bool(args.get("bias", True)), args["vocab_size"] or 50304
    fields = dict(vocab_size=vocab_size, block_size=args["block_size"], n_layer=args["n_layer"], n_head=args["n_head"],
                  n_embd=args["n_embd"], position="learned", norm="layernorm", mlp="gelu", bias=bias, tie_head=True)
    tokenizer = gpt2() if vocab_size in (50257, 50304) else None        # 50,304 is GPT-2's vocabulary, padded
    plain = strip_prefixes({name: name for name in weights})            # without prefixes -> with
    names = {name.removeprefix("transformer."): full for name, full in plain.items()}
    fields, state = arrange(fields, GPT2, names, lambda name: read_torch(path, "--checkpoint", on_disk=True)["model"][names[name]],
                            real_tokens=tokenizer and tokenizer.n_vocab)
    return fields, state, tokenizer


# ------------------------------------------------------------------------------------------ GGUF

def is_gguf(path: Path) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(4) == b"GGUF"
    return False


def open_gguf(path: Path):
    meta, tensors = read_gguf(path)
    family = meta["general.architecture"]
    if family != "llama":
        raise ValueError(f"architecture {family!r} is not known; of GGUF files llama alone is")
    c = {key.removeprefix("llama."): value for key, value in meta.items() if key.startswith("llama.")}
    if c.get("expert_count") or meta.get("split.count", 1) > 1:
        raise ValueError("mixtures of experts and files in several parts are not supported")
    heads, width = c["attention.head_count"], c["embedding_length"]
    kv_heads, head_dim = c.get("attention.head_count_kv", heads), c.get("attention.key_length", width // heads)
    refuse_unless(c, {"rope.dimension_count": head_dim, "attention.value_length": head_dim})
    theta = c.get("rope.freq_base", 10000.0)
    factors = rope_factors({"type": {"none": "default"}.get(kind := c.get("rope.scaling.type", "none"), kind),
                            "factor": c.get("rope.scaling.factor", 1.0)}, theta, head_dim)
    if "rope_freqs.weight" in tensors:                                  # how the format keeps Llama 3's scaling
        factors = dequantize(path, tensors.pop("rope_freqs.weight")).double().tolist()
    tokenizer = from_gguf(meta)
    fields = dict(vocab_size=tensors["token_embd.weight"][0][0], block_size=c["context_length"], n_layer=c["block_count"],
                  n_head=heads, n_kv_head=kv_heads, n_embd=width, head_dim=head_dim, mlp_width=c["feed_forward_length"],
                  rope_theta=theta, rope_factors=factors, norm_eps=c["attention.layer_norm_rms_epsilon"],
                  bias=any(name.endswith(".bias") for name in tensors), tie_head="output.weight" not in tensors)
    without_bias = [part for part, name in (("attention", "attn_q"), ("mlp", "ffn_up")) if f"blk.0.{name}.bias" not in tensors]

    def unpermute(name, tensor):
        """Rows (heads, D/2, 2), rotated in pairs, -> (heads, 2, D/2), component d rotated with d + D/2."""
        if ".attn_q." in name or ".attn_k." in name:
            shape = heads if ".attn_q." in name else kv_heads, -1, 2, *tensor.shape[1:]
            return tensor.view(shape).transpose(1, 2).reshape(tensor.shape)
        return tensor

    fields, state = arrange(fields, GGUF, tensors, lambda name: dequantize(path, tensors[name]), unpermute,
                            tokenizer.n_vocab, without_bias)
    return fields, state, tokenizer


def read_gguf(path: Path):
    """(metadata, {name: (shape, type, offset, bytes)}); nothing of the reader, which maps the whole file, is kept."""
    gguf = need("gguf")
    try:
        reader = gguf.GGUFReader(path)
        meta = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {t.name: (tuple(map(int, reversed(t.shape))), t.tensor_type, int(t.data_offset), int(t.n_bytes)) for t in reader.tensors}
    except Exception as error:                      # the reader trusts its input: a cut file fails anywhere
        raise ValueError(f"the file is damaged or incomplete ({type(error).__name__}: {error})") from None
    return meta, tensors


def dequantize(path: Path, tensor) -> torch.Tensor:
    shape, kind, offset, size = tensor
    raw = np.fromfile(path, np.uint8, size, offset=offset).reshape(*shape[:-1], -1)            # (rows, bytes of a row)
    try:
        return torch.from_numpy(need("gguf").quants.dequantize(raw, kind)).view(shape)
    except NotImplementedError:
        raise ValueError(f"weights of type {kind.name} cannot be read") from None

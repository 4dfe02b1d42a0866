"""
Checkpoints on disk: tensors and plain Python only, read with `weights_only=True`, so that opening a file never
runs code. Files are written whole or not at all.
"""
import dataclasses
import hashlib
import json
import warnings
from pathlib import Path

import torch

from cli import written_whole
from hidden_transfer import HiddenTransfer
from model import GPT, GPTConfig, lay_out_for_cpu
from tokenizer import load_tokenizer

ROOT = Path(__file__).parent
BASE = ROOT / "checkpoints" / "base.pt"             # the checkpoint that ships
TRANSFER = ROOT / "checkpoints" / "transfer.pt"     # its transfer maps
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_file(contents: dict, path) -> None:
    with written_whole(path) as beside:
        torch.save(contents, beside)


def load_file(path, kind: str, what: str) -> dict:
    """A dict with ["kind"] == kind. ValueError in one line if the file is missing, damaged, foreign or a pickle."""
    if not Path(path).is_file():
        raise ValueError(f"{what} {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                                 # torch would add to the one line below
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                      # zip, pickle and storage readers each raise their own kinds
        unsafe = "weights_only" in str(error).lower() or "Unsupported global" in str(error)
        reason = "it holds pickled code, which is never run" if unsafe else "it is damaged or no PyTorch file"
        raise ValueError(f"{what} {path} cannot be read: {reason}") from None
    if not isinstance(contents, dict) or contents.get("kind") != kind:
        raise ValueError(f"{what} {path} is not a file of this project's kind {kind!r}")
    return contents


def strip_prefixes(state: dict) -> dict:
    """Undo what torch.compile ("_orig_mod.") and DistributedDataParallel ("module.") put before every name."""
    while state and all(key.startswith(("_orig_mod.", "module.")) for key in state):
        state = {key.split(".", 1)[1]: value for key, value in state.items()}
    return state


def save_checkpoint(model: GPT, path, tokenizer_file: str | None, notes: dict | None = None) -> None:
    """float16 weights. tokenizer_file: name of a .tiktoken file in the same folder; notes: plain figures to keep."""
    state = {name: p.detach().to("cpu", torch.float16) for name, p in strip_prefixes(model.state_dict()).items()}
    save_file({"kind": "gpt", "config": dataclasses.asdict(model.config), "model": state,
               "tokenizer": tokenizer_file, "notes": notes or {}}, path)


def load_checkpoint(path=BASE, dtype=torch.float32, device="cpu"):
    """(model in eval mode with frozen weights, tokenizer or None) from a file of save_checkpoint."""
    contents = load_file(path, "gpt", "--checkpoint")
    try:
        model = build_model(GPTConfig(**contents["config"]), contents["model"], dtype, device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"--checkpoint {path}: {' '.join(str(error).split())}") from None
    name = contents.get("tokenizer")
    tokenizer = load_tokenizer(Path(path).parent / name) if name else None
    if tokenizer is not None and tokenizer.n_vocab != model.config.vocab_size:
        raise ValueError(f"--checkpoint {path}: {name} has {tokenizer.n_vocab} tokens, the model {model.config.vocab_size}")
    return model, tokenizer


def build_model(config: GPTConfig, state: dict, dtype=torch.float32, device="cpu") -> GPT:
    """A frozen GPT with the weights in `state`; any key missing, left over or of another shape raises."""
    with torch.device("meta"):
        model = GPT(config)
    state = {name: p.to(device, dtype) for name, p in strip_prefixes(state).items()}
    model.load_state_dict(state, strict=True, assign=True)
    model = model.eval().requires_grad_(False)
    return lay_out_for_cpu(model) if torch.device(device).type == "cpu" else model


def fingerprint(model: GPT) -> str:
    """A hash of configuration and weights, stored with whatever is trained on top of a base.

    Taken over weights rounded to bfloat16, so that it is the same in whichever dtype the base was loaded.
    """
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(model.config), sort_keys=True).encode())
    for name, p in sorted(strip_prefixes(model.state_dict()).items()):
        digest.update(name.encode())
        digest.update(p.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def save_transfer(transfer: HiddenTransfer, model: GPT, path, notes: dict | None = None) -> None:
    """Maps in float16, with the fingerprint of their base; notes: acceptance table and figures of the training."""
    state = {name: p.detach().to("cpu", torch.float16) for name, p in transfer.state_dict().items()}
    save_file({"kind": "transfer", "base": fingerprint(model), "layers": transfer.layers,
               "shift_positions": transfer.shift_positions, "maps": state, "notes": notes or {}}, path)


def load_transfer(path, model: GPT):
    """(HiddenTransfer in the model's dtype and device, notes). ValueError if the maps were made for another base."""
    contents = load_file(path, "transfer", "--transfer")
    if contents["base"] != fingerprint(model):
        raise ValueError(f"--transfer {path} was trained for another base model; train maps for this one: python train.py")
    try:
        transfer = HiddenTransfer(model.config, contents["layers"], contents["shift_positions"])
        transfer.load_state_dict(contents["maps"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"--transfer {path}: {error}") from None
    transfer = transfer.to(model.embedding.weight).requires_grad_(False).eval()
    return lay_out_for_cpu(transfer) if model.embedding.weight.device.type == "cpu" else transfer, contents["notes"]

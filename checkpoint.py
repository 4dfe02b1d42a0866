"""
Checkpoints on disk: tensors and plain Python only, read with `weights_only=True`, so that opening a file never
runs code. Files are written whole or not at all. Those of other projects are read by foreign.py.
"""
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import warnings
import zipfile
from pathlib import Path

import torch

from cli import written_whole
from hidden_transfer import HiddenTransfer
from model import GPT, GPTConfig, lay_out_for_cpu
from tokenizer import load_tokenizer

ROOT = Path(__file__).parent
BASE = ROOT / "checkpoints" / "base.pt"             # the checkpoint that ships
TRANSFER = ROOT / "checkpoints" / "transfer.pt"     # its transfer maps
CHECKPOINT_HELP = "base model: a file of this project, of nanoGPT or in GGUF, a folder in Hugging Face's layout, or a name on the hub"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_file(contents: dict, path) -> None:
    with written_whole(path) as beside:
        torch.save(contents, beside)


def read_torch(path, what: str, on_disk: bool = False):
    """What torch.save wrote. ValueError in one line if the file is missing, damaged or a pickle that would run code.

    on_disk: leave the tensors in the file until they are used, so that one can be read without the others.
    """
    if not Path(path).is_file():
        raise ValueError(f"{what} {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                                 # torch would add to the one line below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=on_disk and zipfile.is_zipfile(path))
    except Exception as error:                      # zip, pickle and storage readers each raise their own kinds
        with open(path, "rb") as file:
            pickled = file.read(1) in (b"\x80", b"P")                       # a pickle, or a zip file that holds one
        unsafe = pickled and ("weights_only" in str(error).lower() or "Unsupported global" in str(error))
        reason = "it holds pickled code, which is never run" if unsafe else "it is damaged or no PyTorch file"
        raise ValueError(f"{what} {path} cannot be read: {reason}") from None


def load_file(path, kind: str, what: str) -> dict:
    """A dict with ["kind"] == kind. ValueError in one line if the file is missing, damaged, foreign or a pickle."""
    return check_kind(read_torch(path, what), path, kind, what)


def check_kind(contents, path, kind: str, what: str) -> dict:
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


def load_checkpoint(name_or_path=BASE, dtype=None, device="cpu", revision: str | None = None):
    """(model in eval mode with frozen weights, tokenizer or None), from

      * a file of save_checkpoint, a nanoGPT ckpt.pt, or a GGUF file of the Llama family;
      * a folder in Hugging Face's layout, of the architecture gpt2 or llama;
      * a name on the Hugging Face hub (`revision`: branch, tag or commit).

    dtype: if not given, bfloat16 on CUDA and float32 elsewhere. ValueError in one line for what cannot be read.
    """
    path = Path(name_or_path)
    if dtype is None:
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    if revision and (path.exists() or not is_hub_name(str(name_or_path))):
        raise ValueError(f"--revision is for names on the hub; --checkpoint {name_or_path} is none")
    with naming(name_or_path):
        config, state, tokenizer = open_checkpoint(path, str(name_or_path), revision)
        return build_model(GPTConfig(**config), state, dtype, device), tokenizer


@contextlib.contextmanager
def naming(path):
    """Whatever is wrong with a checkpoint becomes one line that names it."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"--checkpoint {path}: there is no {error} in it") from None
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ValueError(line if line.startswith("--") else f"--checkpoint {path}: {line}") from None


def open_checkpoint(path: Path, name: str, revision: str | None):
    """(fields of GPTConfig, weights as build_model takes them, tokenizer or None), by what lies at the path."""
    import foreign                                              # foreign.py builds on this file
    if path.is_dir():
        return foreign.open_folder(path)
    if not path.exists() and is_hub_name(name):
        return foreign.open_folder(foreign.fetch(name, revision))
    if foreign.is_gguf(path):
        return foreign.open_gguf(path)
    contents = read_torch(path, "--checkpoint", on_disk=True)
    if isinstance(contents, dict) and "model_args" in contents:
        return foreign.open_nanogpt(contents, path)
    del contents
    contents = load_file(path, "gpt", "--checkpoint")
    config, weights, name = contents["config"], strip_prefixes(contents.pop("model")), contents.get("tokenizer")
    state = {key: functools.partial(weights.pop, key) for key in list(weights)}     # the file's copy shrinks as the model grows
    tokenizer = load_tokenizer(path.parent / name) if name else None
    if tokenizer is not None and tokenizer.n_vocab != config["vocab_size"]:
        raise ValueError(f"--checkpoint {path}: {name} has {tokenizer.n_vocab} tokens, the model {config['vocab_size']}")
    return config, state, tokenizer


def is_hub_name(name: str) -> bool:
    """"gpt2", "owner/model": what may be a name on the hub, by its form alone."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)) and not name.endswith((".pt", ".gguf", ".bin", ".safetensors"))


def build_model(config: GPTConfig, state: dict, dtype=torch.float32, device="cpu") -> GPT:
    """A frozen GPT with the weights in `state`; any key missing, left over or of another shape raises RuntimeError.

    state: our names -> tensors, or functions that read one. They are copied one by one into the dtype and layout
    wanted, the largest first: it is held twice while the model is still small, so the peak of memory stays near the
    size of the model.
    """
    with torch.device("meta"):
        model = GPT(config)
    state, wanted = strip_prefixes(state), model.state_dict()
    odd = {"missing": [name for name in wanted if name not in state], "unknown": [name for name in state if name not in wanted]}
    if any(odd.values()):
        raise RuntimeError("; ".join(f"{len(names)} {kind} weights: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
                                     for kind, names in odd.items() if names))
    on_cpu, weights = torch.device(device).type == "cpu", {}
    for name in sorted(wanted, key=lambda name: -wanted[name].numel()):
        source, shape = state[name]() if callable(state[name]) else state[name], wanted[name].shape
        if source.shape != shape:
            raise RuntimeError(f"{name} has shape {tuple(source.shape)}; the configuration needs {tuple(shape)}")
        by_columns = on_cpu and len(shape) == 2                             # as lay_out_for_cpu would lay it
        weights[name] = torch.empty(shape[::-1] if by_columns else shape, dtype=dtype, device=device)
        weights[name] = weights[name].t() if by_columns else weights[name]
        weights[name].copy_(source)
        del source
    model.load_state_dict(weights, strict=True, assign=True)
    model = model.eval().requires_grad_(False)
    return lay_out_for_cpu(model) if on_cpu else model


def fingerprint(model: GPT) -> str:
    """A hash of configuration and weights, stored with whatever is trained on top of a base.

    Taken over weights rounded to bfloat16, so that it is the same in whichever dtype the base was loaded.
    """
    config = {name: value for name, value in dataclasses.asdict(model.config).items() if value is not None}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
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
    """(HiddenTransfer in the model's dtype and device, notes). ValueError if the maps were made for another base.

    path: None stands for those in checkpoints/ that were made for this one.
    """
    base = fingerprint(model)
    if path is None:
        path = shipped_maps(base)
        if path is None:
            raise ValueError("--transfer: no maps for this base model ship with the code; train some (python train.py --checkpoint ...) "
                             "and name them, or decode plainly (--method autoregressive)")
    contents = load_file(path, "transfer", "--transfer")
    if contents.get("base") != base:
        raise ValueError(f"--transfer {path} was trained for another base model; "
                         "train maps for this one (python train.py --checkpoint ...) or decode plainly (--method autoregressive)")
    try:
        transfer = HiddenTransfer(model.config, contents["layers"], contents["shift_positions"])
        transfer.load_state_dict(contents["maps"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"--transfer {path}: {' '.join(str(error).split())}") from None
    transfer = transfer.to(model.embedding.weight).requires_grad_(False).eval()
    return lay_out_for_cpu(transfer) if model.embedding.weight.device.type == "cpu" else transfer, contents["notes"]


def shipped_maps(base: str) -> Path | None:
    """The file in checkpoints/ with the maps for the base of this fingerprint."""
    files = sorted(TRANSFER.parent.glob("transfer*.pt"))
    return next((file for file in files if load_file(file, "transfer", "--transfer").get("base") == base), None)


def save_module(module, model: GPT, path, method: str, options: dict, notes: dict | None = None) -> None:
    """A trained rival (baselines/): float16 weights, the fingerprint of its base, and the options that make it anew."""
    state = {name: p.detach().to("cpu", torch.float16) for name, p in module.state_dict().items()}
    save_file({"kind": method, "base": fingerprint(model), "options": options, "weights": state, "notes": notes or {}}, path)


def load_module(path, method: str, model: GPT, make):
    """(make(options) with the saved weights, in the model's dtype and device, notes). ValueError for another base's."""
    contents = load_file(path, method, "drafter")
    check_base(contents, path, model)
    try:
        module = make(contents["options"])
        module.load_state_dict(contents["weights"])
        notes = contents["notes"]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"drafter {path}: {' '.join(str(error).split())}") from None
    module = module.to(model.embedding.weight).requires_grad_(False).eval()
    return lay_out_for_cpu(module) if model.embedding.weight.device.type == "cpu" else module, notes


def check_base(contents: dict, path, model: GPT) -> None:
    if contents.get("base") != fingerprint(model):
        raise ValueError(f"drafter {path} was trained for another base model; train one for this one "
                         "(python train.py --stage ... --checkpoint ...) or leave it out")

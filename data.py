"""
The corpus. By default the Python standard library of the interpreter that runs: real text that everyone has,
so nothing is downloaded. `--data PATH` (a file or a folder of UTF-8 text) takes its place.

Files are split into training and held-out text by a hash of their relative path, so the split is the same on
every machine; a single file is split at nine tenths of its length.
"""
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

HELD_OUT_SHARE = 0.06       # of the files


def is_held_out(relative_path: str) -> bool:
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2 ** 32


def read_corpus(path: str | None = None) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts), in the order of their paths. ValueError if there is nothing to read."""
    if path is not None and not Path(path).exists():
        raise ValueError(f"--data {path}: no such file or folder")
    if path is not None and Path(path).is_file():
        text = read_text(Path(path))
        if text is None:
            raise ValueError(f"--data {path}: not UTF-8 text")
        cut = len(text) * 9 // 10
        return [text[:cut]], [text[cut:]]
    root = Path(path) if path else Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*" if path else "*.py"), key=lambda file: file.relative_to(root).as_posix())
    train, held_out = [], []
    for file in files:
        relative = file.relative_to(root)
        if not file.is_file() or {"site-packages", "dist-packages", "__pycache__"} & set(relative.parts):
            continue
        text = read_text(file)
        if text:
            (held_out if is_held_out(relative.as_posix()) else train).append(text)
    if not train or not held_out:
        raise ValueError(f"--data {root}: {len(train)} training and {len(held_out)} held-out text files; "
                         "both are needed: give one large file or a folder of at least a few dozen")
    return train, held_out


def read_text(file: Path) -> str | None:
    """The text of a file, None where it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def encode_texts(texts: list[str], tokenizer) -> np.ndarray:
    """All texts in one stream (N,) of uint16 or int32 ids, each behind an end-of-text token."""
    if tokenizer is None:
        raise ValueError("--checkpoint comes without a tokenizer, so no text can be read for it")
    end = tokenizer.prefix if tokenizer.eot_token is None else [tokenizer.eot_token]
    rows = [end + row for row in tokenizer.encode_ordinary_batch(texts, num_threads=2)]
    return np.concatenate([np.array(row, dtype=np.uint16 if tokenizer.n_vocab <= 2 ** 16 else np.int32) for row in rows])


def n_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)

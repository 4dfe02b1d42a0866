"""What the command lines share: one clear line and exit status 2 for bad input, devices, files written whole."""
import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

import torch


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows defaults, and reports an error in one line, without the usage text."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)

    def error(self, message: str):
        fail(message)


def fail(message) -> None:
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def run(main) -> None:
    """Call main() and turn what the user can put right into one line: ValueError and OSError are for the user."""
    try:
        main()
    except BrokenPipeError:                                                 # the reader of our output has left: no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        fail(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) == 0:
        raise ValueError
    return int(text)


positive.__name__ = "positive whole number"                                 # what argparse's error says


def pick_device(name: str) -> str:
    """The device asked for, "auto" being CUDA, MPS or CPU, whichever is there first. ValueError if it is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=torch.device(name)).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}); try --device cpu") from None
    return name


def has_fast_bfloat16(device: str) -> bool:
    """CUDA, or a CPU with matrix units for bfloat16 (AMX)."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return device.startswith("cuda") or device == "cpu" and amx()


def writable_folder(path) -> Path:
    """Make the folder and try a write now, rather than after an hour of training."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ValueError(f"--out {path}: cannot write there ({error.strerror})") from None


@contextlib.contextmanager
def written_whole(path):
    """Yields a path beside `path` to write to; it takes the place of `path` at the end, or vanishes if anything fails.

    A full disk or an interrupt so leaves the old file as it was. OSError and RuntimeError (torch's zip writer reports
    a full disk so) become a ValueError that names the file.
    """
    path = Path(path)
    beside = path.with_name(f"{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot write {path}: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)

"""
Tokenizers that come with other projects' checkpoints: tiktoken's gpt2, Hugging Face's tokenizer.json, and the byte-level
BPE inside a GGUF file.

All of them, and those of tokenizer.py, answer to the same few names, tiktoken's where tiktoken has one: encode_ordinary,
encode_ordinary_batch, encode_with_special, decode, decode_single_token_bytes, eot_token, n_vocab; and, as data:
  end_tokens      ids at which generation stops          special_tokens  text -> id, of those that no ordinary text yields
  prefix          ids that the model expects in front    chat_template   jinja2, or None        names   {"bos_token": text, ...}
"""
import importlib
import json
import re
from pathlib import Path

import tiktoken

from tokenizer import Encoding

# How a tokenizer splits text before merging, by the name that GGUF files give it (tokenizer.ggml.pre).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# GPT-2's on what lies between single digits: white space before a digit ends its part and so stays in one piece.
SMOLLM_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
PATTERNS = {"gpt-2": GPT2_PATTERN, "smollm": SMOLLM_PATTERN} | dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), LLAMA3_PATTERN)

# Byte-level BPE writes each byte as a visible character: its own where it has one, else one from 256 on.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(VISIBLE)))}


def need(module: str):
    """The library of a format, imported when the first such file is opened."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"the package {module} is needed for this: pip install -r requirements-checkpoints.txt") from None


def read_json(file: Path) -> dict:
    """The object in a JSON file; {} if there is no such file."""
    if not file.is_file():
        return {}
    try:
        contents = json.loads(file.read_bytes())
    except ValueError:
        raise ValueError(f"{file.name} is not valid JSON") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{file.name} does not hold a JSON object")
    return contents


# ------------------------------------------------------------------------------------------ tiktoken's gpt2

def gpt2() -> Encoding:
    try:
        inner = tiktoken.get_encoding("gpt2")
    except Exception as error:                      # of the network or the disk
        raise ValueError(f"GPT-2's vocabulary is not here and could not be fetched ({type(error).__name__}); run "
                         "python -c \"import tiktoken; tiktoken.get_encoding('gpt2')\" with TIKTOKEN_CACHE_DIR set to a folder "
                         "where there is a network, and set TIKTOKEN_CACHE_DIR to a copy of that folder here") from None
    return Encoding("gpt2", pat_str=inner._pat_str, mergeable_ranks=inner._mergeable_ranks, special_tokens=inner._special_tokens)


# ------------------------------------------------------------------------------------------ Hugging Face

class HuggingFaceTokenizer:
    """A tokenizer.json, read by the `tokenizers` library."""

    def __init__(self, file: Path, names: dict[str, str], ends: list[int], chat_template: str | None):
        library = need("tokenizers")
        contents = read_json(file)
        try:
            ends = list(dict.fromkeys(ends + [t["id"] for t in contents["added_tokens"] if t["content"] == names.get("eos_token")]))
            for added in contents["added_tokens"]:                          # an end token may be marked as an ordinary one
                added["special"] = added["special"] or added["id"] in ends
            self.inner = library.Tokenizer.from_str(json.dumps(contents))
        except Exception as error:                                          # the library raises Exception itself
            raise ValueError(f"{file.name} cannot be read ({error})") from None
        self.inner.no_truncation()
        self.inner.no_padding()
        added = self.inner.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        self.added, self.n_vocab = {id: token.content for id, token in added.items()}, max(self.inner.get_vocab().values()) + 1
        self.prefix = [id for id in self.inner.encode("").ids if id not in ends or id == self.special_tokens.get(names.get("bos_token"))]
        self.end_tokens, self.chat_template, self.names = set(ends), chat_template, names
        self.eot_token = self.special_tokens.get("<|endoftext|>", ends[0] if ends else None)
        self.byte_level = '"ByteLevel"' in json.dumps(contents.get("decoder"))

    def encode_ordinary(self, text: str) -> list[int]:
        return self.encode_ordinary_batch([text])[0]

    def encode_ordinary_batch(self, texts: list[str], num_threads: int | None = None) -> list[list[int]]:
        self.inner.encode_special_tokens = True                             # that is: as the text they look like
        return [encoding.ids for encoding in self.inner.encode_batch([checked(text) for text in texts], add_special_tokens=False)]

    def encode_with_special(self, text: str) -> list[int]:
        self.inner.encode_special_tokens = False
        return self.inner.encode(checked(text), add_special_tokens=False).ids

    def decode_single_token_bytes(self, token: int) -> bytes:
        text = self.inner.id_to_token(token)
        if text is None:
            raise KeyError(token)
        if token in self.added:
            return text.encode()
        if self.byte_level:
            return bytes(BYTE_OF[character] for character in text)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):                          # SentencePiece's way to write a byte
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()                         # and a space

    def decode(self, tokens: list[int]) -> str:
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode(errors="replace")


def checked(text: str) -> str:
    text.encode()                                   # UnicodeEncodeError for a lone surrogate, as everywhere else
    return text


def from_folder(folder: Path, config: dict):
    """The tokenizer of a folder in Hugging Face's layout; None if it has none that can be read."""
    generation, settings = read_json(folder / "generation_config.json"), read_json(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").is_file():
        return gpt2() if config.get("model_type") == "gpt2" and config.get("vocab_size") in (50257, 50304) else None
    names = {name: value["content"] if isinstance(value, dict) else value for name, value in settings.items()
             if name.endswith("_token") and isinstance(value, (str, dict))}
    ends = []
    for eos in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ends += eos if isinstance(eos, list) else [] if eos is None else [eos]
    template = settings.get("chat_template")
    if isinstance(template, list):                                          # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return HuggingFaceTokenizer(folder / "tokenizer.json", names, ends, template)


# ------------------------------------------------------------------------------------------ GGUF

CONTROL, USER_DEFINED = 3, 4            # kinds of token that GGUF knows besides ordinary ones; ordinary text yields neither


def from_gguf(meta: dict) -> Encoding:
    """The byte-level BPE in the metadata of a GGUF file. Its tokens stand in the order of their merges, so ids are ranks."""
    kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"its tokenizer is of the kind {kind!r}; byte-level BPE ('gpt2') alone is supported in GGUF files: "
                         "use the model's folder in Hugging Face's layout")
    if pre not in PATTERNS:
        raise ValueError(f"its tokenizer splits text by the rule {pre!r}, which is not known; {', '.join(PATTERNS)} are")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type", [])
    special = {token: id for id, (token, kind) in enumerate(zip(tokens, kinds)) if kind in (CONTROL, USER_DEFINED)}
    ranks, merged = {}, []
    for id, token in enumerate(tokens):
        if special.get(token) != id:
            if not all(character in BYTE_OF for character in token):
                raise ValueError(f"its token {id}, {token!r}, is none of byte-level BPE")
            ranks[bytes(BYTE_OF[character] for character in token)] = id
    for merge in meta["tokenizer.ggml.merges"]:
        merged.append(ranks.get(bytes(BYTE_OF[character] for character in merge.replace(" ", "")), -1))
    if merged != sorted(merged):
        raise ValueError("its tokens do not stand in the order of their merges, which is not supported in GGUF files: "
                         "use the model's folder in Hugging Face's layout")
    ids = {name: meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    ends = [id for name, id in ids.items() if id is not None and name != "bos"]
    add_bos = meta.get("tokenizer.ggml.add_bos_token", pre.startswith("llama")) and ids["bos"] is not None
    return Encoding("gguf", pat_str=PATTERNS[pre], mergeable_ranks=ranks, special_tokens=special,
                    eot_token=special.get("<|endoftext|>", ends[0] if ends else None), end_tokens=ends,
                    prefix=[ids["bos"]] if add_bos else [], chat_template=meta.get("tokenizer.chat_template"),
                    names={f"{name}_token": tokens[ids[name]] for name in ("bos", "eos") if ids[name] is not None})

"""
Byte-level BPE (Sennrich et al., arXiv 1508.07909) for the checkpoint that ships: a vocabulary is trained here,
stored in tiktoken's file format (one "base64-bytes rank" a line) and used through tiktoken.
"""
import base64
from collections import Counter, defaultdict
from pathlib import Path

import regex            # comes with tiktoken, which splits with the same syntax
import tiktoken

from cli import written_whole

# GPT-2's pattern without the English contractions and with at most three digits a piece. A line break and the
# indentation behind it form one piece, which suits Python source.
PATTERN = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END_OF_TEXT = "<|endoftext|>"


def train_bpe(texts, vocab_size: int) -> list[bytes]:
    """Byte-level BPE: the 256 bytes, then the most frequent pair, merged, again and again, up to vocab_size tokens."""
    counts = Counter(piece for text in texts for piece in regex.findall(PATTERN, text))
    words = [[bytes([b]) for b in piece.encode()] for piece in counts]      # every distinct piece once, with its count
    weights = list(counts.values())
    pairs, where = Counter(), defaultdict(set)
    for w, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += weights[w]
            where[pair].add(w)
    vocabulary = [bytes([b]) for b in range(256)]
    while len(vocabulary) < vocab_size and pairs:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))             # ties broken, so that a rerun gives the same
        if pairs[best] < 2:
            break
        vocabulary.append(best[0] + best[1])
        for w in where.pop(best):                                           # only the pieces that hold the pair change
            for pair in zip(words[w], words[w][1:]):
                pairs[pair] -= weights[w]
            words[w] = merge(words[w], best)
            for pair in zip(words[w], words[w][1:]):
                pairs[pair] += weights[w]
                where[pair].add(w)
        del pairs[best]
        if len(vocabulary) % 256 == 0:
            pairs = +pairs                                                  # drop the pairs that have died out
    return vocabulary


def merge(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged = []
    for part in word:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def save_tokenizer(vocabulary: list[bytes], path: Path) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(vocabulary))
    with written_whole(path) as beside:
        beside.write_text("".join(lines))


class Encoding(tiktoken.Encoding):
    """tiktoken's, with what else is known of a vocabulary (foreign_tokenizer.py lists it).

    Bytes that the vocabulary lacks are left out of a text, as by the `tokenizers` library; tiktoken alone would end the program.
    """

    def __init__(self, name: str, *, mergeable_ranks: dict[bytes, int], special_tokens: dict[str, int], eot_token: int | None = None,
                 end_tokens=None, prefix=(), chat_template: str | None = None, names: dict[str, str] | None = None, **fields):
        super().__init__(name, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens, **fields)
        self.special_tokens, self.prefix, self.chat_template, self.names = special_tokens, list(prefix), chat_template, names or {}
        self._eot_token = special_tokens.get(END_OF_TEXT) if eot_token is None else eot_token
        self.end_tokens = {self._eot_token} - {None} if end_tokens is None else set(end_tokens)
        self.lacking = bytes(byte for byte in range(256) if bytes([byte]) not in mergeable_ranks)

    @property
    def eot_token(self) -> int | None:
        return self._eot_token

    def encode_ordinary(self, text: str) -> list[int]:
        if not self.lacking or not set(text.encode(errors="replace")) & set(self.lacking):
            return super().encode_ordinary(text)
        pieces = (piece.encode().translate(None, self.lacking) for piece in regex.findall(self._pat_str, text))
        return [token for piece in pieces if piece for token in self._encode_single_piece(piece)]

    def encode_with_special(self, text: str) -> list[int]:
        """Text that comes with a checkpoint (a chat template), in which special tokens are meant."""
        ids = []
        for n, part in enumerate(split_special(text, self.special_tokens)):
            ids += [self.special_tokens[part]] if n % 2 else self.encode_ordinary(part)
        return ids


def split_special(text: str, special_tokens: dict[str, int]) -> list[str]:
    """Ordinary text at even places, special tokens at odd ones."""
    if not special_tokens:
        return [text]
    return regex.split("(" + "|".join(map(regex.escape, sorted(special_tokens, key=len, reverse=True))) + ")", text)


def load_tokenizer(path: Path) -> Encoding:
    """The vocabulary in a .tiktoken file, with the end-of-text token behind it as the last id."""
    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, Path(path).read_text().splitlines())}
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a tokenizer in tiktoken's format ({error})") from None
    return Encoding(Path(path).stem, pat_str=PATTERN, mergeable_ranks=ranks,
                    special_tokens={END_OF_TEXT: len(ranks)})

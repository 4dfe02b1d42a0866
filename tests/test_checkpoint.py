"""
Files: checkpoints and transfer maps (round trip, prefixes, damage, whole or not at all, maps of another base), the
checkpoint that ships, the tokenizer, the corpus. Numbers in brackets, as in [26], are those of the project's list of
pitfalls.
"""
import base64
import hashlib
import math
import pickle
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import cli
import data
from checkpoint import (BASE, TRANSFER, build_model, fingerprint, load_checkpoint, load_file, load_transfer, save_checkpoint,
                        save_file, save_transfer)
from conftest import KINDS, PROMPT, assert_close, full_logits, make_model, make_transfer
from data import encode_texts, is_held_out, n_bytes, read_corpus
from model import lay_out_for_cpu
from tokenizer import END_OF_TEXT, PATTERN, load_tokenizer, save_tokenizer, train_bpe

VOCABULARY_FILE = BASE.parent / "base.tiktoken"
ONE_LINE = r"\A[^\n]+\Z"


@pytest.fixture(scope="session")
def shipped_tokenizer():
    return load_tokenizer(VOCABULARY_FILE)


def half_precision(model) -> dict:
    """The weights of a model as a file keeps them."""
    return {name: p.half() for name, p in model.state_dict().items()}


# ------------------------------------------------------------------------------------------ round trip

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind, dtype, tmp_path):
    """What is loaded is what was saved, rounded to float16, frozen, in eval mode, with the same configuration."""
    model = make_model(kind)
    model.train()
    save_checkpoint(model, tmp_path / "a.pt", None, {"note": [1, 2.5, "x"]})
    loaded, tokenizer = load_checkpoint(tmp_path / "a.pt", dtype)
    assert tokenizer is None and loaded.config == model.config
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert list(loaded.state_dict()) == list(model.state_dict())
    for name, p in half_precision(model).items():
        assert torch.equal(loaded.state_dict()[name], p.to(dtype)), name
        assert loaded.state_dict()[name].dtype == dtype
    assert load_file(tmp_path / "a.pt", "gpt", "--checkpoint")["notes"] == {"note": [1, 2.5, "x"]}


def test_weights_are_float16_on_disk(tmp_path):
    model = make_model("rotary", n_layer=2)
    save_checkpoint(model, tmp_path / "a.pt", None)
    save_transfer(make_transfer(model, [1]), model, tmp_path / "t.pt")
    assert all(p.dtype == torch.float16 for p in torch.load(tmp_path / "a.pt", weights_only=True)["model"].values())
    assert all(p.dtype == torch.float16 for p in torch.load(tmp_path / "t.pt", weights_only=True)["maps"].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, shift", [("rotary", False), ("learned", True), ("learned", False)])
def test_round_trip_of_maps(kind, shift, dtype, tmp_path):
    model = make_model(kind, dtype=dtype)
    transfer = make_transfer(model, [2, 1, 3], shift_positions=shift)
    save_transfer(transfer, model, tmp_path / "t.pt", {"acceptance": [[0.5]]})
    loaded, notes = load_transfer(tmp_path / "t.pt", model)
    assert (loaded.layers, loaded.shift_positions, notes) == ([2, 1, 3], shift, {"acceptance": [[0.5]]})
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    for name, p in half_precision(transfer).items():
        assert torch.equal(loaded.state_dict()[name], p.to(dtype)), name


def test_the_tokenizer_lies_beside_the_checkpoint(tmp_path):
    save_tokenizer([bytes([b]) for b in range(256)] + [b"ab"], tmp_path / "own.tiktoken")
    save_checkpoint(make_model("rotary", vocab_size=258, n_layer=1), tmp_path / "a.pt", "own.tiktoken")
    _, tokenizer = load_checkpoint(tmp_path / "a.pt")
    assert tokenizer.encode_ordinary("abc") == [256, ord("c")] and tokenizer.n_vocab == 258


def test_missing_tokenizer_file(tmp_path):
    save_checkpoint(make_model("rotary", n_layer=1), tmp_path / "a.pt", "gone.tiktoken")
    with pytest.raises((OSError, ValueError), match="gone.tiktoken"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [b"hello\n", b"aGk= 0 7\n", b"aGk= x\n", b"\xff\xfe\x00\n", b"aGk 0\n"], ids=repr)
def test_foreign_tokenizer_file(content, tmp_path):
    (tmp_path / "bad.tiktoken").write_bytes(content)
    save_checkpoint(make_model("rotary", n_layer=1), tmp_path / "a.pt", "bad.tiktoken")
    with pytest.raises(ValueError, match="bad.tiktoken"):
        load_checkpoint(tmp_path / "a.pt")


# ------------------------------------------------------------------------------------------ keys

@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("kind", KINDS)
def test_prefixes(kind, prefix, tmp_path):
    """[26] Checkpoints of compiled and of distributed models, in either order: identical logits."""
    model = make_model(kind)
    save_checkpoint(model, tmp_path / "plain.pt", None)
    contents = torch.load(tmp_path / "plain.pt", weights_only=True)
    save_file(contents | {"model": {prefix + name: p for name, p in contents["model"].items()}}, tmp_path / "prefixed.pt")
    plain, prefixed = (load_checkpoint(tmp_path / f"{name}.pt", torch.float64)[0] for name in ("plain", "prefixed"))
    assert list(prefixed.state_dict()) == list(model.state_dict())
    assert torch.equal(full_logits(prefixed, PROMPT), full_logits(plain, PROMPT))
    assert fingerprint(prefixed) == fingerprint(plain)


class Wrapped(torch.nn.Module):
    """A model in a wrapper, as DistributedDataParallel makes one."""
    def __init__(self, module):
        super().__init__()
        self.module, self.config = module, module.config


def test_wrapped_models_are_saved_without_prefixes(tmp_path):
    """[26]"""
    model = make_model("learned")
    save_checkpoint(Wrapped(Wrapped(model)), tmp_path / "a.pt", None)
    assert list(torch.load(tmp_path / "a.pt", weights_only=True)["model"]) == list(model.state_dict())
    assert fingerprint(Wrapped(model)) == fingerprint(model)


@pytest.mark.parametrize("kind", KINDS)
def test_any_key_missing_raises(kind):
    """[26]"""
    model = make_model(kind, n_layer=2)
    state = half_precision(model)
    for name in state:
        with pytest.raises(RuntimeError, match=re.escape(name)):
            build_model(model.config, {other: p for other, p in state.items() if other != name})


def some_prefixed(state):
    return {("module." if n % 2 else "") + name: p for n, (name, p) in enumerate(state.items())}


@pytest.mark.parametrize("change, named", [
    (lambda state: state | {"blocks.9.norm_1.weight": torch.ones(32)}, "blocks.9.norm_1.weight"),
    (lambda state: state | {"extra": torch.ones(1)}, "extra"),
    (lambda state: state | {"norm.weight": torch.ones(33)}, "norm.weight"),
    (lambda state: state | {"blocks.0.attention.out.weight": torch.ones(16, 64)}, "blocks.0.attention.out.weight"),
    (lambda state: {name: p for name, p in state.items() if name != "head.weight"}, "head.weight"),
    (lambda state: {}, "embedding.weight"),
    (some_prefixed, "module."),
    (lambda state: {"other." + name: p for name, p in state.items()}, "other."),
], ids=["another block", "extra", "wrong shape", "wrong matrix", "no head", "empty", "prefixes on some", "another prefix"])
def test_wrong_keys_are_refused(change, named, tmp_path):
    """[26] Missing, left over or of another shape: one line that names the file and the key."""
    model = make_model("rotary")
    save_checkpoint(model, tmp_path / "a.pt", None)
    contents = torch.load(tmp_path / "a.pt", weights_only=True)
    save_file(contents | {"model": change(contents["model"])}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        load_checkpoint(tmp_path / "b.pt")
    assert "b.pt" in str(error.value) and named in str(error.value)


def test_a_tied_model_has_no_head_of_its_own(tmp_path):
    """[26] A left-over head.weight is refused as well: it would be ignored silently."""
    model = make_model("learned")
    state = half_precision(model)
    with pytest.raises(RuntimeError, match="head.weight"):
        build_model(model.config, state | {"head.weight": state["embedding.weight"]})


@pytest.mark.parametrize("config, named", [({"vocab_size": 0}, "vocab_size"), ({"norm": "batchnorm"}, "norm"),
                                           ({"colour": "red"}, "colour"), ({"n_layer": "x"}, ""),
                                           ({"n_head": 0, "head_dim": 0}, "n_head")])
def test_wrong_configurations_are_refused(config, named, tmp_path):
    save_checkpoint(make_model("rotary"), tmp_path / "a.pt", None)
    contents = torch.load(tmp_path / "a.pt", weights_only=True)
    save_file(contents | {"config": contents["config"] | config}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        load_checkpoint(tmp_path / "b.pt")
    assert named in str(error.value)


@pytest.mark.parametrize("change", [
    lambda contents: contents | {"maps": {name: p for name, p in contents["maps"].items() if name != "maps.1.bias"}},
    lambda contents: contents | {"maps": contents["maps"] | {"maps.2.bias": torch.ones(32)}},
    lambda contents: contents | {"maps": contents["maps"] | {"maps.0.weight": torch.ones(32, 31)}},
    lambda contents: contents | {"layers": [1]},
    lambda contents: {name: value for name, value in contents.items() if name != "maps"},
    lambda contents: {name: value for name, value in contents.items() if name != "base"},
], ids=["missing", "left over", "wrong shape", "fewer layers than maps", "no maps", "no base"])
def test_wrong_maps_are_refused(change, tmp_path):
    """[26] The same for maps."""
    model = make_model("rotary")
    save_transfer(make_transfer(model, [1, 2]), model, tmp_path / "t.pt")
    save_file(change(torch.load(tmp_path / "t.pt", weights_only=True)), tmp_path / "u.pt")
    with pytest.raises(ValueError, match="u.pt"):
        load_transfer(tmp_path / "u.pt", model)


# ------------------------------------------------------------------------------------------ damaged, foreign, unsafe

class Payload:
    """Unpickling it creates a file."""
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def truncated(path, good, share):
    path.write_bytes(good.read_bytes()[:int(share * good.stat().st_size)])


BAD_FILES = {
    "empty": lambda path, good, trap: path.write_bytes(b""),
    "first byte only": lambda path, good, trap: path.write_bytes(good.read_bytes()[:1]),
    "half of it": lambda path, good, trap: truncated(path, good, 0.5),
    "without its end": lambda path, good, trap: truncated(path, good, 0.999),
    "text": lambda path, good, trap: path.write_text("this is no checkpoint\n"),
    "noise": lambda path, good, trap: path.write_bytes(random.Random(0).randbytes(5000)),
    "another zip": lambda path, good, trap: shutil.make_archive(str(path), "zip", good.parent) and shutil.move(f"{path}.zip", path),
    "a list": lambda path, good, trap: torch.save([1, 2], path),
    "weights alone": lambda path, good, trap: torch.save({"embedding.weight": torch.ones(2, 2)}, path),
    "another kind": lambda path, good, trap: torch.save({"kind": "base-state", "model": {}}, path),
    "a TorchScript program": lambda path, good, trap: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path),
    "a pickle": lambda path, good, trap: path.write_bytes(pickle.dumps({"kind": "gpt", "x": Payload(trap)})),
    "a pickled model": lambda path, good, trap: torch.save({"kind": "gpt", "model": Payload(trap)}, path),
    "an old pickled model": lambda path, good, trap: torch.save({"kind": "transfer", "maps": Payload(trap)}, path,
                                                                _use_new_zipfile_serialization=False),
}


@pytest.mark.filterwarnings("ignore")           # torch's own, about old formats; test_cli.py counts them as lines on stderr
@pytest.mark.parametrize("read", [load_checkpoint, lambda path: load_transfer(path, make_model("rotary"))], ids=["base", "maps"])
@pytest.mark.parametrize("bad", BAD_FILES)
def test_bad_files_are_refused_and_run_nothing(bad, read, tmp_path):
    """[28] ValueError in one line that names the file; code in a pickle does not run."""
    path, trap, good = tmp_path / "bad.pt", tmp_path / "trap", tmp_path / "good" / "a.pt"
    save_checkpoint(make_model("rotary"), good, None)
    BAD_FILES[bad](path, good, trap)
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        read(path)
    assert "bad.pt" in str(error.value)
    assert not trap.exists()
    if "pickle" in bad:
        assert "pickled code" in str(error.value)


def test_the_payload_of_these_tests_is_live(tmp_path):
    """[28] Unpickled by a careless reader it does what it is made for; so its absence above means something."""
    torch.save({"kind": "gpt", "model": Payload(tmp_path / "trap")}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)["model"].close()
    assert (tmp_path / "trap").exists()


@pytest.mark.parametrize("path", ["nowhere.pt", "no/such/folder.pt", "."])
def test_missing_files(path, tmp_path):
    for read in (load_checkpoint, lambda path: load_transfer(path, make_model("rotary"))):
        with pytest.raises(ValueError, match="no such file"):
            read(tmp_path / path)


def test_each_kind_of_file_in_its_place(tmp_path):
    model = make_model("rotary")
    save_checkpoint(model, tmp_path / "a.pt", None)
    save_transfer(make_transfer(model, [1]), model, tmp_path / "t.pt")
    with pytest.raises(ValueError, match="--checkpoint .*t.pt is not"):
        load_checkpoint(tmp_path / "t.pt")
    with pytest.raises(ValueError, match="--transfer .*a.pt is not"):
        load_transfer(tmp_path / "a.pt", model)


# ------------------------------------------------------------------------------------------ whole or not at all

FAILURES = [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file"), KeyboardInterrupt()]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("old", [True, False])
def test_a_failed_write_leaves_the_old_file(failure, old, tmp_path, monkeypatch):
    """A full disk or an interrupt in the middle of writing: the old file is as it was, and nothing new lies about."""
    model, path = make_model("rotary", n_layer=1), tmp_path / "a.pt"
    if old:
        save_checkpoint(make_model("learned", n_layer=1), path, None)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def half(contents, file):
        if hasattr(file, "write"):
            file.write(b"half a file")
        else:
            Path(file).write_bytes(b"half a file")
        raise failure

    monkeypatch.setattr(torch, "save", half)
    for save in (lambda: save_checkpoint(model, path, None), lambda: save_transfer(make_transfer(model, [0]), model, path)):
        with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else ValueError, match=None) as error:
            save()
        if not isinstance(failure, KeyboardInterrupt):
            assert "a.pt" in str(error.value) and "\n" not in str(error.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_disk_that_is_really_full(tmp_path):
    """The same with the operating system's own refusal: files may grow to 20 kB only."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "a.pt"
    save_checkpoint(make_model("learned", n_layer=1), path, None)
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ValueError, match="a.pt"):
            save_checkpoint(make_model("rotary"), path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_the_place_is_taken_in_one_move(tmp_path, monkeypatch):
    """Until the very last call the old file is in its place, and the new one is whole by then."""
    path, seen = tmp_path / "a.pt", []
    save_checkpoint(make_model("learned", n_layer=1), path, None)
    before, replace = path.read_bytes(), cli.os.replace

    def watched(source, target):
        seen.append((path.read_bytes() == before, torch.load(source, weights_only=True)["kind"], Path(source).parent == tmp_path))
        replace(source, target)

    monkeypatch.setattr(cli.os, "replace", watched)
    save_checkpoint(make_model("rotary", n_layer=1), path, None)
    assert seen == [(True, "gpt", True)]
    assert load_checkpoint(path)[0].config.position == "rotary" and len(list(tmp_path.iterdir())) == 1


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot write"):
        save_checkpoint(make_model("rotary", n_layer=1), tmp_path / "file" / "a.pt", None)
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "in the way"


# ------------------------------------------------------------------------------------------ which base

@pytest.mark.parametrize("other", [dict(seed=1), dict(rope_theta=500.0), dict(norm_eps=1e-3), dict(n_layer=5)], ids=str)
def test_maps_of_another_base_are_refused(other, tmp_path):
    model = make_model("rotary")
    save_transfer(make_transfer(model, [1, 2]), model, tmp_path / "t.pt")
    load_transfer(tmp_path / "t.pt", make_model("rotary"))
    with pytest.raises(ValueError, match="t.pt was trained for another base"):
        load_transfer(tmp_path / "t.pt", make_model("rotary", **other))


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_is_the_same_in_every_dtype(kind, tmp_path):
    save_checkpoint(make_model(kind), tmp_path / "a.pt", None)
    prints = {fingerprint(load_checkpoint(tmp_path / "a.pt", dtype)[0])
              for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
    assert len(prints) == 1
    save_checkpoint(load_checkpoint(tmp_path / "a.pt")[0], tmp_path / "again.pt", None)
    assert fingerprint(load_checkpoint(tmp_path / "again.pt")[0]) in prints


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_changes_with_every_tensor(kind):
    """One number by one per cent, anywhere, is another base."""
    model = make_model(kind, n_layer=2)
    prints = {fingerprint(model)}
    for name, p in model.named_parameters():
        number = p.data.view(-1)[-1:]
        before = number.clone()
        number *= 1.01
        prints.add(fingerprint(model))
        number.copy_(before)
    assert len(prints) == 1 + len(list(model.parameters()))
    assert fingerprint(model) in prints


def test_fingerprint_does_not_depend_on_the_layout():
    model, other = make_model("rotary"), lay_out_for_cpu(make_model("rotary"))
    assert fingerprint(model) == fingerprint(other)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_changes_no_value(kind):
    """Column by column in memory; the same shapes, values and logits."""
    model, other = make_model(kind), make_model(kind)
    assert lay_out_for_cpu(other) is other
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(p, q), name
        if p.dim() == 2:
            assert q.stride() == (1, p.shape[0]), name
    assert_close(full_logits(other, PROMPT), full_logits(model, PROMPT))


# ------------------------------------------------------------------------------------------ what ships

def test_the_checkpoint_that_ships(shipped_tokenizer):
    """Real, small and safe to open: at most 25 MB with its tokenizer, float16, rotary, 8 blocks, a context of 512."""
    assert BASE.stat().st_size + VOCABULARY_FILE.stat().st_size <= 25_000_000
    contents = torch.load(BASE, weights_only=True)
    config = contents["config"]
    assert all(p.dtype == torch.float16 for p in contents["model"].values())
    assert all(torch.isfinite(p).all() for p in contents["model"].values())
    assert config["position"] == "rotary" and config["n_layer"] >= 8 and config["block_size"] >= 512
    assert contents["tokenizer"] == VOCABULARY_FILE.name
    assert config["vocab_size"] == shipped_tokenizer.n_vocab == 4096


def test_the_maps_that_ship_belong_to_it():
    model, _ = load_checkpoint()
    transfer, notes = load_transfer(TRANSFER, model)
    K = len(transfer.layers)
    assert {1, 4, 16, 64} <= set(notes["tokens_per_pass"]) and notes["tokens_per_pass"][1] == 1.0
    assert len(notes["acceptance"]) == K
    assert all(row == sorted(row, reverse=True) and 0 <= sum(row) <= 1 + 1e-9 for row in notes["acceptance"])
    assert all(torch.isfinite(p).all() for p in transfer.parameters())


# ------------------------------------------------------------------------------------------ tokenizer

HARD_TEXTS = ["", " ", "\t\tif x:\n\t\t\treturn\r\n", "日本語の文章、漢字とかな", "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u202eright to left", "a\x00b\x7f\ufeff",
              END_OF_TEXT, f"text {END_OF_TEXT} text", "<|endoftext", "x" * 5000, "\n" * 100 + " " * 100, "1234567 3.14e-10 0xFF",
              "don't naïve Ünïcode", "𝔘𝔫𝔦 \U0010ffff", "mixed 中文 and English混ざる🎉\n"]


@pytest.mark.parametrize("text", HARD_TEXTS, ids=lambda text: repr(text[:12]))
def test_text_survives_the_tokenizer(shipped_tokenizer, text):
    """Encoded and decoded again it is what it was; text that looks like the special token is ordinary text."""
    ids = shipped_tokenizer.encode_ordinary(text)
    assert shipped_tokenizer.decode(ids) == text
    assert shipped_tokenizer.eot_token not in ids and all(0 <= token < shipped_tokenizer.n_vocab for token in ids)


def test_end_of_text_is_the_last_id(shipped_tokenizer):
    assert shipped_tokenizer.eot_token == shipped_tokenizer.n_vocab - 1 == 4095
    assert shipped_tokenizer.decode([4095]) == END_OF_TEXT


def test_the_vocabulary_is_in_tiktokens_format(shipped_tokenizer):
    """One "base64-bytes rank" a line, ranks in order, no token twice, every byte there: any text can be encoded."""
    lines = VOCABULARY_FILE.read_text().splitlines()
    vocabulary = [base64.b64decode(line.split(" ")[0], validate=True) for line in lines]
    assert [int(line.split(" ")[1]) for line in lines] == list(range(4095))
    assert len(set(vocabulary)) == 4095 and {bytes([b]) for b in range(256)} <= set(vocabulary)
    assert all(shipped_tokenizer.decode_single_token_bytes(rank) == token for rank, token in enumerate(vocabulary))


def naive_bpe(texts, vocab_size):
    """All pairs counted anew before every merge; ties go to the larger pair of bytes."""
    import regex
    words = Counter(tuple(bytes([b]) for b in piece.encode()) for text in texts for piece in regex.findall(PATTERN, text))
    vocabulary = [bytes([b]) for b in range(256)]
    while len(vocabulary) < vocab_size:
        pairs = Counter()
        for word, count in words.items():
            for n in range(len(word) - 1):
                pairs[word[n], word[n + 1]] += count
        if not pairs or max(pairs.values()) < 2:
            break
        pair = max(pair for pair in pairs if pairs[pair] == max(pairs.values()))
        vocabulary.append(pair[0] + pair[1])
        merged = Counter()
        for word, count in words.items():
            new, n = [], 0
            while n < len(word):
                two = word[n:n + 2] == pair
                new.append(word[n] + word[n + 1] if two else word[n])
                n += 2 if two else 1
            merged[tuple(new)] += count
        words = merged
    return vocabulary


def random_texts(seed, letters, count=20):
    chance = random.Random(seed)
    return [" ".join("".join(chance.choices(letters, k=chance.randint(1, 12))) for _ in range(10)) + "\n" for _ in range(count)]


@pytest.mark.parametrize("texts", [random_texts(0, "ab"), random_texts(1, "abc"), random_texts(2, "aé日🎉 \n"), random_texts(3, "a"),
                                   ["aaaaaaaa aaaa aaa"] * 3, ["no pair twice"], [""]],
                         ids=["ab", "abc", "many bytes", "a", "runs", "nothing to merge", "nothing"])
def test_greedy_merges_equal_a_naive_implementation(texts):
    for vocab_size in (257, 262, 300, 420):
        assert train_bpe(texts, vocab_size) == naive_bpe(texts, vocab_size)


def test_a_trained_vocabulary_round_trip(tmp_path):
    """Saved and loaded it gives the ids that merging by rank gives."""
    texts = random_texts(4, "abcd")
    vocabulary = train_bpe(texts, 300)
    save_tokenizer(vocabulary, tmp_path / "v.tiktoken")
    tokenizer = load_tokenizer(tmp_path / "v.tiktoken")
    assert tokenizer.n_vocab == len(vocabulary) + 1 and tokenizer.eot_token == len(vocabulary)
    for word in ("abcdabcd", "aaaa", "dcba", "é"):
        parts = [bytes([b]) for b in word.encode()]
        while True:
            ranks = [vocabulary.index(a + b) if a + b in vocabulary else math.inf for a, b in zip(parts, parts[1:])]
            if not ranks or min(ranks) == math.inf:
                break
            n = ranks.index(min(ranks))
            parts[n:n + 2] = [parts[n] + parts[n + 1]]
        assert tokenizer.encode_ordinary(word) == [vocabulary.index(part) for part in parts]


def test_a_failed_write_of_a_vocabulary(tmp_path, monkeypatch):
    save_tokenizer([b"a"], tmp_path / "v.tiktoken")
    monkeypatch.setattr(cli.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match="v.tiktoken"):
        save_tokenizer([b"b"], tmp_path / "v.tiktoken")
    assert (tmp_path / "v.tiktoken").read_text() == "YQ== 0\n" and len(list(tmp_path.iterdir())) == 1


# ------------------------------------------------------------------------------------------ corpus

def write_files(folder, names, text="text of {}\n"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.format(name), encoding="utf-8")


def test_the_split_is_the_same_everywhere():
    """A hash of the relative path decides, and nothing else: not the machine, the order or the process."""
    assert [n for n in range(60) if is_held_out(f"file{n}.txt")] == [2, 5, 15]
    share = sum(is_held_out(f"{n}/x.py") for n in range(5000)) / 5000
    assert share == pytest.approx(0.06, abs=0.01)
    for path in ("json/decoder.py", "日本/ü.txt"):
        first = int(hashlib.sha256(path.encode()).hexdigest()[:8], 16)
        assert is_held_out(path) == (first / 2 ** 32 < 0.06)


def test_a_folder_is_split_by_file(tmp_path):
    """Training and held-out text never share a file, none is lost, and where the folder lies makes no difference."""
    names = [f"file{n}.txt" for n in range(30)] + [f"sub/deep/file{n}.md" for n in range(30)]
    for place in ("one", "two/elsewhere"):
        write_files(tmp_path / place, names)
    train, held_out = read_corpus(str(tmp_path / "one"))
    assert (train, held_out) == read_corpus(str(tmp_path / "two/elsewhere"))
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(f"text of {name}\n" for name in names)
    assert held_out == [f"text of {name}\n" for name in sorted(names) if is_held_out(name)]
    assert train == [f"text of {name}\n" for name in sorted(names) if not is_held_out(name)]


def test_files_that_are_no_text_are_left_out(tmp_path):
    """Not UTF-8, empty, or of installed packages."""
    write_files(tmp_path, [f"file{n}.txt" for n in range(6)])
    write_files(tmp_path, ["site-packages/a.py", "lib/dist-packages/b.py", "__pycache__/c.py"])
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "empty.txt").write_text("")
    train, held_out = read_corpus(str(tmp_path))
    assert sorted(train + held_out) == [f"text of file{n}.txt\n" for n in range(6)]


def test_a_file_is_split_at_nine_tenths(tmp_path):
    text = "".join(f"line {n} ü日\n" for n in range(997))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    (train,), (held_out,) = read_corpus(str(tmp_path / "one.txt"))
    assert train + held_out == text and len(train) == len(text) * 9 // 10


def test_the_standard_library_is_the_default(tmp_path, monkeypatch):
    """Python files only, none of installed packages, from the folder that sysconfig names."""
    write_files(tmp_path, [f"file{n}.py" for n in range(6)] + ["notes.txt", "site-packages/torch/a.py", "test/t.py"])
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    train, held_out = read_corpus()
    assert sorted(train + held_out) == [f"text of file{n}.py\n" for n in range(6)] + ["text of test/t.py\n"]


def test_corpora_that_cannot_be_read(tmp_path):
    (tmp_path / "empty folder").mkdir()
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    write_files(tmp_path / "too few", ["file0.txt", "file1.txt"])
    for name, reason in (("missing", "no such file"), ("empty folder", "0 training and 0 held-out"), ("latin.txt", "not UTF-8"),
                         ("too few", "2 training and 0 held-out")):
        with pytest.raises(ValueError, match=f"--data .*{name}.*{reason}"):
            read_corpus(str(tmp_path / name))


def test_texts_become_one_stream(shipped_tokenizer):
    """Every text behind an end-of-text token, in 16 bits, its own text of that kind not mistaken for one."""
    texts = ["import os\n", "", f"a {END_OF_TEXT} b", "日本"]
    stream = encode_texts(texts, shipped_tokenizer)
    expected = [token for text in texts for token in [4095] + shipped_tokenizer.encode_ordinary(text)]
    assert stream.tolist() == expected and stream.dtype == "uint16" and expected.count(4095) == len(texts)
    assert n_bytes(texts) == 10 + 0 + 17 + 6

"""
The command lines: what they print, and that bad input is one line on stderr and exit status 2. They run in this
process, through the same `run(main)` as from a shell; a few run as processes of their own, one without network or GPU.
"""
import argparse
import codecs
import contextlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import distillation
import generate
import measure
import replay
import responses
import train
import tree
from checkpoint import BASE, build_model, load_checkpoint, save_checkpoint, save_transfer
from cli import run
from closed_form import RidgeSums
from conftest import full_logits, make_model, make_transfer
from hidden_transfer import HiddenTransfer

ROOT = Path(__file__).resolve().parent.parent
TEXT = "def mean(values):\n    "
NEW = 24
END = 4095
FIELDS = {"text": str, "token_ids": list, "prompt_tokens": int, "new_tokens": int, "forward_passes": int,
          "mean_accepted_tokens": float, "accepted_per_pass": list, "finish_reason": str, "seconds": float,
          "tokens_per_second": float, "method": str, "tree_size": int, "seed": int, "dtype": str, "device": str}


class Payload:
    """Unpickling it creates a file."""
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a tiny base, maps that fit it, bases and maps that are wrong in many ways, and texts."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(BASE.parent / "base.tiktoken", folder / "tiny.tiktoken")
    shape = dict(vocab_size=4096, n_embd=48, n_layer=3, block_size=128)
    save_checkpoint(make_model("rotary", **shape), folder / "tiny.pt", "tiny.tiktoken")
    model, tokenizer = load_checkpoint(folder / "tiny.pt")
    # maps fitted to the very text that is decoded below: many drafts are right
    sums = RidgeSums(model.config, 2)
    sums.add(model, replay.continue_greedily(model, [tokenizer.encode_ordinary(TEXT)], NEW + 6))
    transfer = sums.fill(HiddenTransfer(model.config, [1, 2]))
    notes = {"tokens_per_pass": {1: 1.0, 2: 1.3, 4: 1.6}, "acceptance": [[0.5, 0.2, 0.1], [0.3, 0.1, 0.05]]}
    save_transfer(transfer, model, folder / "maps.pt", notes)

    save_checkpoint(make_model("rotary", seed=1, **shape), folder / "another.pt", "tiny.tiktoken")
    save_checkpoint(model, folder / "bare.pt", None)
    save_checkpoint(model, folder / "lost.pt", "gone.tiktoken")
    save_checkpoint(model, folder / "garbled.pt", "garbled.tiktoken")
    (folder / "garbled.tiktoken").write_text("no such format\n")
    save_transfer(transfer, model, folder / "unmeasured.pt")
    (folder / "cut").mkdir()
    shutil.copy(folder / "tiny.pt", folder / "cut")
    lines = (folder / "tiny.tiktoken").read_text().splitlines(keepends=True)
    (folder / "cut" / "tiny.tiktoken").write_text("".join(lines[:300]))
    for name in ("tiny", "maps"):
        content = (folder / f"{name}.pt").read_bytes()
        (folder / f"half {name}.pt").write_bytes(content[:len(content) // 2])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "text.pt").write_text("this is no checkpoint\n")
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save({"kind": "gpt", "model": Payload(folder / "trap")}, folder / "pickled.pt")
    (folder / "pickle.pt").write_bytes(pickle.dumps({"kind": "gpt", "model": Payload(folder / "trap")}))
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "script.pt")

    (folder / "prompt.txt").write_bytes("def f():\r\n\treturn '日本🎉'\n".encode())
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short")
    (folder / "folder").mkdir()
    (folder / "texts").mkdir()
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    for n in range(24):
        (folder / "texts" / f"file{n}.txt").write_text(source[n * 3000:(n + 1) * 3000], encoding="utf-8")
    return folder


class Terminal(io.StringIO):
    def isatty(self):
        return True


def call(main, *arguments, stdout=None):
    """A command line in this process: (exit status, stdout, stderr) as a shell would see them, warnings on stderr."""
    out, err = stdout or io.StringIO(), io.StringIO()
    with (pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          warnings.catch_warnings(record=True) as caught):
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        patch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, arguments)])
        try:
            run(main)
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    return status, out.getvalue(), err.getvalue() + "".join(f"warning: {warning.message}\n" for warning in caught)


def decode(files, *more, stdout=None):
    """generate.py on the tiny base. Later arguments take the place of the usual ones."""
    usual = ["--checkpoint", files / "tiny.pt", "--transfer", files / "maps.pt", "--tree-size", 4, "--max-new-tokens", NEW]
    if not {"--prompt", "--prompt-file", "--token-ids"} & set(more):
        usual += ["--prompt", TEXT]
    return call(generate.main, *usual, *more, stdout=stdout)


def decode_json(files, *more) -> dict:
    status, out, err = decode(files, "--json", *more)
    assert (status, err) == (0, "")
    return json.loads(out.splitlines()[-1])


# ------------------------------------------------------------------------------------------ bad input

def assert_refused(result, named):
    """Exit status 2, nothing on stdout, and one line on stderr that names what is wrong."""
    status, out, err = result
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert named in err


@pytest.mark.parametrize("arguments, named", [
    ("--checkpoint {}/nowhere.pt", "--checkpoint"), ("--checkpoint {}/folder", "--checkpoint"),
    ("--checkpoint no\nwhere.pt", "--checkpoint no where.pt"), ("--checkpoint {}/empty.pt", "--checkpoint"), ("--checkpoint {}/half~tiny.pt", "--checkpoint"),
    ("--checkpoint {}/text.pt", "--checkpoint"), ("--checkpoint {}/weights.pt", "--checkpoint"),
    ("--checkpoint {}/maps.pt", "--checkpoint"), ("--checkpoint {}/pickled.pt", "pickled code"),
    ("--checkpoint {}/pickle.pt", "pickled code"),
    ("--checkpoint {}/script.pt", "--checkpoint"),
    ("--checkpoint {}/lost.pt", "gone.tiktoken"), ("--checkpoint {}/garbled.pt", "garbled.tiktoken"),
    ("--checkpoint {}/cut/tiny.pt", "tiny.tiktoken"),
    ("--checkpoint {}/bare.pt", "--token-ids"),
    ("--transfer {}/nowhere.pt", "--transfer"), ("--transfer {}/half~maps.pt", "--transfer"), ("--transfer {}/text.pt", "--transfer"),
    ("--transfer {}/tiny.pt", "--transfer"), ("--transfer {}/pickled.pt", "pickled code"),
    ("--checkpoint {}/another.pt", "another base"),
    ("--transfer {}/unmeasured.pt --tree-size auto", "--transfer"),
    ("--method magic", "--method"), ("--dtype int8", "--dtype"), ("--verify magic", "--verify"), ("--magic", "--magic"),
    ("--device warp", "--device"), ("--device cuda:99", "--device"), ("--device ~", "--device"),
    ("--device meta", "--device"),
    ("--prompt=", "--prompt"), ("--prompt " + "word" * 500, "--prompt has"), ("--prompt a --prompt-file b", "--prompt"),
    ("--prompt a\udcff", "--prompt"),
    ("--prompt-file {}/nowhere.txt", "--prompt-file"), ("--prompt-file {}/latin.txt", "--prompt-file"),
    ("--prompt-file {}/folder", "--prompt-file"), ("--prompt-file {}/empty.txt", "--prompt"),
    ("--token-ids=", "--token-ids"), ("--token-ids 1,x", "--token-ids"), ("--token-ids 1,,2", "--token-ids"),
    ("--token-ids 1.5", "--token-ids"), ("--token-ids 4096", "--token-ids"), ("--token-ids 1,-1", "--token-ids"),
    ("--token-ids=-1,2", "--token-ids"), ("--token-ids " + "9" * 30, "--token-ids"),
    ("--token-ids " + ",".join("1" * 129), "--prompt has 129 tokens"),
    ("--tree-size 0", "--tree-size"), ("--tree-size -1", "--tree-size"), ("--tree-size abc", "--tree-size"),
    ("--tree-size=", "--tree-size"), ("--tree-size 1.5", "--tree-size"), ("--sources -1", "--sources"), ("--sources x", "--sources"),
    ("--tree-size 10000000000", "--tree-size"),
    ("--tree-size ²", "--tree-size"),
    ("--method autoregressive --tree-size 0", "--tree-size"),
    ("--temperature -1", "--temperature"), ("--temperature nan", "--temperature"), ("--temperature inf", "--temperature"),
    ("--temperature hot", "--temperature"), ("--top-p 0", "--top-p"), ("--top-p 1.5", "--top-p"), ("--top-p nan", "--top-p"),
    ("--top-k -1", "--top-k"), ("--top-k x", "--top-k"), ("--min-p 1", "--min-p"), ("--min-p -0.1", "--min-p"), ("--min-p nan", "--min-p"),
    ("--seed -1", "--seed"), ("--seed x", "--seed"), (f"--seed {2 ** 64}", "--seed"),
    ("--max-new-tokens -1", "--max-new-tokens"), ("--max-new-tokens many", "--max-new-tokens"),
    ("--check --verify rejection", "--check"),
])
def test_generate_refuses(files, arguments, named):
    """[23] [28] and every bad input that the project's description lists. ~ stands for a blank."""
    assert_refused(decode(files, *[part.format(files).replace("~", " ") for part in arguments.split(" ")]), named)
    assert not (files / "trap").exists()


def teach(files, out, *more):
    """train.py on the tiny base."""
    usual = ["--checkpoint", files / "tiny.pt", "--data", files / "texts", "--out", out, "--transfer-layers", "1,2", "--steps", 2,
             "--batch", 2, "--accumulate", 1, "--length", 32, "--warm-start-tokens", 200, "--own-tokens", 0, "--device", "cpu"]
    return call(train.main, *usual, *more)


@pytest.mark.parametrize("arguments, named", [
    ("--transfer-layers 3", "--transfer-layers"), ("--transfer-layers -1", "--transfer-layers"), ("--transfer-layers 0,1,99", "--transfer-layers"),
    ("--transfer-layers 1,x", "--transfer-layers"), ("--transfer-layers=", "--transfer-layers"), ("--transfer-layers 1,,2", "--transfer-layers"),
    ("--transfer-layers 1;2", "--transfer-layers"), ("--transfer-layers 1.0", "--transfer-layers"),
    ("--transfer-layers " + ",".join("1" * 128), "--transfer-layers"), ("--transfer-layers " + ",".join("1" * 32), "--length 32 is too short"),
    ("--data {}/nowhere", "--data"), ("--data {}/folder", "--data"), ("--data {}/latin.txt", "--data"), ("--data {}/short.txt", "--data"),
    ("--data {}/empty.txt", "--data"),
    ("--out {}/text.pt", "--out"), ("--out {}/text.pt/below", "--out"),
    ("--checkpoint {}/nowhere.pt", "--checkpoint"), ("--checkpoint {}/half~tiny.pt", "--checkpoint"), ("--checkpoint {}/pickled.pt", "pickled code"),
    ("--checkpoint {}/maps.pt", "--checkpoint"),
    ("--stage magic", "--stage"), ("--device warp", "--device"), ("--autocast maybe", "--autocast"), ("--magic", "--magic"),
    ("--steps 0", "--steps"), ("--steps -1", "--steps"), ("--steps x", "--steps"), ("--batch 0", "--batch"), ("--length 0", "--length"),
    ("--accumulate 0", "--accumulate"), ("--warm-start-tokens 0", "--warm-start-tokens"), ("--save-every 0", "--save-every"),
    ("--lr 0", "--lr"), ("--lr -1", "--lr"), ("--lr nan", "--lr"), ("--lr inf", "--lr"), ("--lr x", "--lr"), ("--seed x", "--seed"),
    ("--seed -1", "--seed"),
    ("--own-tokens -1", "--own-tokens"),
    ("--stage base --length 514", "--length"), ("--steps ²", "--steps"), ("--resume", "--resume"), ("--shift-positions", "positions"),
])
def test_train_refuses(files, tmp_path, arguments, named):
    """[30] One line, and no maps."""
    assert_refused(teach(files, tmp_path / "out", *[part.format(files).replace("~", " ") for part in arguments.split(" ")]), named)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert not (files / "trap").exists() and (files / "text.pt").read_text() == "this is no checkpoint\n"


@pytest.mark.parametrize("arguments, named", [
    ("--committed -1", "--committed"), ("--committed x", "--committed"), ("--magic", "--magic"),
    ("--plot {}/text.pt/picture.png", "picture.png"), ("--plot {}/picture.xyz", "xyz"),
])
def test_tree_refuses(files, arguments, named):
    status, _, err = call(tree.main, *arguments.format(files).split())
    assert status == 2 and err.count("\n") == 1 and err.startswith("error: ") and named in err
    assert not list(files.glob("picture*"))


@pytest.mark.parametrize("arguments, named", [
    ("--checkpoint {}/nowhere.pt", "--checkpoint"), ("--checkpoint {}/another.pt", "another base"), ("--device warp", "--device"),
    ("--data {}/nowhere", "--data"), ("--data {}/short.txt", "--data"), ("--dtype int8", "--dtype"), ("--temperature -1", "--temperature"),
    ("--prompts 0", "--prompts"),
])
def test_measure_refuses(files, arguments, named):
    usual = ["--checkpoint", files / "tiny.pt", "--transfer", files / "maps.pt", "--data", files / "texts", "--max-new-tokens", 2, "--rounds", 1,
             "--prompts", 2]
    status, _, err = call(measure.main, *usual, *arguments.format(files).split())
    assert status == 2 and err.count("\n") == 1 and err.startswith("error: ") and named in err


# ------------------------------------------------------------------------------------------ JSON

@pytest.mark.parametrize("arguments, expected", [
    ("", dict(method="hidden-transfer", tree_size=4, seed=0, dtype="float32", device="cpu")),
    ("--method autoregressive", dict(method="autoregressive", tree_size=1)),
    ("--tree-size 1", dict(method="hidden-transfer", tree_size=1)), ("--tree-size 64", dict(tree_size=64)),
    ("--temperature 0.8 --top-k 50 --top-p 0.9 --min-p 0.01 --seed 7", dict(seed=7)),
    ("--temperature 0.8 --verify rejection --seed 18446744073709551615", dict(seed=2 ** 64 - 1)),
    ("--dtype float64", dict(dtype="float64")), ("--dtype bfloat16", dict(dtype="bfloat16")), ("--dtype float16", dict(dtype="float16")),
    ("--device cpu --sources 2", dict(device="cpu")), ("--no-stop-at-end", {}), ("--check", dict(identical=True)),
])
def test_json(files, arguments, expected):
    """One object with the documented fields and no others, which agree with one another."""
    report = decode_json(files, *arguments.split())
    fields = FIELDS | ({"identical": bool, "autoregressive_seconds": float} if "--check" in arguments else {})
    assert {name: type(value) for name, value in report.items()} == fields
    assert report["new_tokens"] == len(report["token_ids"]) == sum(report["accepted_per_pass"]) == NEW
    assert report["forward_passes"] == len(report["accepted_per_pass"]) and min(report["accepted_per_pass"]) >= 1
    assert report["mean_accepted_tokens"] == pytest.approx(NEW / report["forward_passes"])
    assert report["tokens_per_second"] == pytest.approx(NEW / report["seconds"])
    assert report["finish_reason"] == "length"
    tokenizer = load_checkpoint(files / "tiny.pt")[1]
    assert report["text"] == tokenizer.decode(report["token_ids"]) and report["prompt_tokens"] == len(tokenizer.encode_ordinary(TEXT))
    for name, value in expected.items():
        assert report[name] == value, name


def test_json_is_all_that_is_printed(files):
    status, out, err = decode(files, "--json")
    assert (status, err) == (0, "") and out.count("\n") == 1 and out.startswith("{")


def test_drafts_are_accepted_in_these_tests(files):
    """And plain decoding takes a pass a token, to the same text."""
    drafted, plain = decode_json(files, "--dtype", "float64"), decode_json(files, "--dtype", "float64", "--method", "autoregressive")
    assert drafted["mean_accepted_tokens"] > 1.3 and plain["accepted_per_pass"] == [1] * NEW
    assert drafted["token_ids"] == plain["token_ids"]


def test_without_a_tokenizer(files):
    report = decode_json(files, "--checkpoint", files / "bare.pt", "--token-ids", "5,6,7")
    assert report["text"] is None and report["prompt_tokens"] == 3 and report["new_tokens"] == NEW
    assert decode(files, "--checkpoint", files / "bare.pt", "--token-ids", "5,6,7")[1].startswith(" 5 6 7 ")


# ------------------------------------------------------------------------------------------ --check

@pytest.mark.parametrize("tree_size", [4, 32])
@pytest.mark.parametrize("sampling", ["", "--temperature 0.8 --seed 3", "--temperature 1.0 --top-p 0.9"])
def test_check_in_float64(files, sampling, tree_size):
    """[1] Token for token the plain text."""
    report = decode_json(files, "--check", "--dtype", "float64", "--tree-size", tree_size, *sampling.split())
    assert report["identical"] is True and report["autoregressive_seconds"] > 0


@pytest.mark.parametrize("change, n, drafted", [
    (lambda ids: ids[:5] + [ids[5] ^ 1] + ids[6:], 5, "[{}]"), (lambda ids: [ids[0] ^ 1] + ids[1:], 0, "[{}]"), (lambda ids: ids[:7], 7, "[]"),
])
def test_check_of_outputs_that_differ(files, monkeypatch, change, n, drafted):
    """[1] Exit status 1, and on stderr where they part, with the gap between the two best logits of the plain step."""
    honest = generate.generate

    def dishonest(model, prompt_ids, drafter=None, *rest, **options):
        result = honest(model, prompt_ids, drafter, *rest, **options)
        if drafter is not None and len(result.token_ids) > 2:
            result.token_ids = change(result.token_ids)
        return result

    plain = decode_json(files, "--dtype", "float64", "--method", "autoregressive")["token_ids"]
    monkeypatch.setattr(generate, "generate", dishonest)
    status, out, err = decode(files, "--check", "--json", "--dtype", "float64")
    assert status == 1 and json.loads(out.splitlines()[-1])["identical"] is False
    assert err.count("\n") == 1 and err.startswith(f"first difference at new token {n}: plain [{plain[n]}], drafted {drafted.format(plain[n] ^ 1)};")
    model, tokenizer = load_checkpoint(files / "tiny.pt", torch.float64)
    best = full_logits(model, tokenizer.encode_ordinary(TEXT) + plain[:n])[-1].topk(2).values
    assert float(err.split("top-2 gap ")[1]) == pytest.approx((best[0] - best[1]).item(), rel=0.01)
    status, out, _ = decode(files, "--check", "--dtype", "float64")
    assert status == 1 and "DIFFERENT" in out


def test_check_without_json(files):
    status, out, err = decode(files, "--check", "--dtype", "float64")
    assert (status, err) == (0, "") and "plain decoding: the same tokens" in out and "ratio" in out


# ------------------------------------------------------------------------------------------ what is shown

def test_the_text_is_streamed(files):
    """Prompt and new text as they are, then the figures; no colours where no terminal is."""
    report, (status, out, err) = decode_json(files), decode(files)
    text, figures = out.split("\n\n", 1) if "\n\n" not in TEXT + report["text"] else out.rsplit("\n\n", 1)
    stream = codecs.getincrementaldecoder("utf-8")("replace")
    tokenizer = load_checkpoint(files / "tiny.pt")[1]
    expected = stream.decode(b"".join(map(tokenizer.decode_single_token_bytes, tokenizer.encode_ordinary(TEXT) + report["token_ids"])))
    assert (status, err) == (0, "") and out.startswith(TEXT) and text.rstrip("\n") == expected.rstrip("\n") and "\033" not in out
    assert f"{NEW} new tokens in {report['forward_passes']} forward passes" in figures
    assert f"{report['mean_accepted_tokens']:.2f} mean accepted tokens" in figures and "tokens/s" in figures


def test_drafted_tokens_are_coloured_on_a_terminal(files):
    """As many as there were drafted ones; without the colours it is the same text."""
    report = decode_json(files, "--no-stop-at-end")
    _, plain, _ = decode(files, "--no-stop-at-end")
    _, coloured, _ = decode(files, "--no-stop-at-end", stdout=Terminal())
    assert coloured.count("\033[32m") == coloured.count("\033[0m") == NEW - report["forward_passes"] > 0
    without = re.sub(r"\033\[\d+m", "", coloured)
    assert without.split("\n\n")[0] == plain.split("\n\n")[0]


def test_characters_of_several_tokens(files):
    """They are shown whole, though one token is only a part of them."""
    prompt = "# 日本語 🎉 é\n"
    assert decode(files, "--prompt", prompt)[1].startswith(prompt)


def test_trace(files):
    """Every pass: its tree, a * at each accepted node, and what it emitted; JSON still on the last line."""
    status, out, err = decode(files, "--trace", "--json", "--tree-size", 8)
    report = json.loads(out.splitlines()[-1])
    assert (status, err) == (0, "") and report["tree_size"] == 8
    passes = out.split("    emitted ")
    assert len(passes) - 1 == report["forward_passes"]
    tokenizer = load_checkpoint(files / "tiny.pt")[1]
    position = 0
    for before, after, count in zip(passes, passes[1:], report["accepted_per_pass"]):
        emitted = report["token_ids"][position:position + count]
        assert after.startswith(f"{count}: " + " ".join(repr(tokenizer.decode([token])) for token in emitted) + "\n")
        nodes = [line for line in before.splitlines() if re.match(r"  [* ] +['\"]", line)]
        accepted = [line for line in nodes if line.startswith("  * ")]
        assert len(accepted) == count and 1 <= len(nodes) <= 8
        assert [line.split(maxsplit=1)[1].strip() for line in accepted[1:]] == [repr(tokenizer.decode([token])) for token in emitted[:-1]]
        position += count
    assert max(report["accepted_per_pass"]) > 1


def test_profile(files):
    status, out, err = decode(files, "--profile")
    assert (status, err) == (0, "") and "profile of a decoding step" in out and "outside the model" in out


def test_profile_of_nothing(files):
    assert decode(files, "--profile", "--max-new-tokens", 0)[0] == 0


def test_tree_picture(files, tmp_path):
    """The example with mask and position ids, as text and as a picture."""
    status, out, err = call(tree.main, "--committed", 2, "--plot", tmp_path / "tree.png")
    rows = [line for line in out.splitlines() if "|" in line][1:]
    assert (status, err) == (0, "") and len(rows) == 7 and all(row.count("#") == 3 + int(row.split()[2]) - 2 for row in rows)
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("arguments, shown", [("--rounds 1", "ratio to plain"), ("--exactness", "temperature 1.0, top-p 0.9")])
def test_measure(files, arguments, shown):
    usual = ["--checkpoint", files / "tiny.pt", "--transfer", files / "maps.pt", "--data", files / "texts", "--max-new-tokens", 3, "--prompts", 2]
    status, out, _ = call(measure.main, *usual, *arguments.split())
    assert status == 0 and shown in out and "64 nodes" in out


@pytest.mark.parametrize("main", [generate.main, train.main, tree.main, measure.main, responses.main], ids=lambda main: main.__module__)
def test_help(main):
    """Every option is explained, with its default."""
    status, out, err = call(main, "--help")
    assert (status, err) == (0, "") and "--" in out and "default" in out


# ------------------------------------------------------------------------------------------ good input

def test_prompts_of_all_kinds(files):
    """The same prompt as text, as a file, as ids: the same continuation. A file is taken as it is, CR LF included."""
    text = (files / "prompt.txt").read_bytes().decode()
    assert "\r\n" in text
    ids = load_checkpoint(files / "tiny.pt")[1].encode_ordinary(text)
    reports = [decode_json(files, "--prompt-file", files / "prompt.txt"), decode_json(files, "--prompt", text),
               decode_json(files, "--token-ids", ",".join(map(str, ids))), decode_json(files, "--token-ids", ", ".join(map(str, ids)))]
    assert all(report["token_ids"] == reports[0]["token_ids"] and report["prompt_tokens"] == len(ids) for report in reports)


def test_text_that_looks_like_the_end_token(files):
    assert decode_json(files, "--prompt", "<|endoftext|>")["prompt_tokens"] > 1


@pytest.mark.parametrize("more", ["", "--method autoregressive", "--temperature 0.8", "--check", "--tree-size auto"])
def test_no_new_tokens(files, more):
    report = decode_json(files, "--max-new-tokens", 0, *more.split())
    assert (report["new_tokens"], report["forward_passes"], report["text"], report["accepted_per_pass"]) == (0, 0, "", [])
    assert report["finish_reason"] == "length" and report["tokens_per_second"] == 0


@pytest.mark.parametrize("count", [1, 2, 7])
def test_as_many_tokens_as_asked_for(files, count):
    """[13]"""
    assert decode_json(files, "--max-new-tokens", count)["token_ids"] == decode_json(files)["token_ids"][:count]


def test_context_limit(files):
    """[14] 120 tokens of a context of 128: 9 more, and the reason is given."""
    report = decode_json(files, "--token-ids", ",".join("7" * 120), "--no-stop-at-end", "--max-new-tokens", 50)
    assert (report["new_tokens"], report["finish_reason"]) == (9, "context")


def test_end_token(files, tmp_path):
    """[12] A base whose greedy text comes to the end token: it stops there, or goes on if it is told to.

    It is the tiny base with two rows of the vocabulary exchanged, those of the end token and of the 10th new one.
    """
    usual = decode_json(files, "--no-stop-at-end")
    ids = usual["token_ids"]
    k = next(n for n in range(5, NEW) if ids[n] not in ids[:n] + [END])
    model, tokenizer = load_checkpoint(files / "tiny.pt")
    assert ids[k] not in tokenizer.encode_ordinary(TEXT) and END not in ids
    order = torch.arange(4096)
    order[[END, ids[k]]] = order[[ids[k], END]]
    state = {name: p[order] if name in ("embedding.weight", "head.weight") else p for name, p in model.state_dict().items()}
    ending = build_model(model.config, state)
    shutil.copy(files / "tiny.tiktoken", tmp_path)
    save_checkpoint(ending, tmp_path / "ending.pt", "tiny.tiktoken")
    save_transfer(make_transfer(ending, [1, 2]), ending, tmp_path / "maps.pt")
    for method in ("hidden-transfer", "autoregressive"):
        arguments = ["--checkpoint", tmp_path / "ending.pt", "--transfer", tmp_path / "maps.pt", "--method", method]
        stopped, went_on = decode_json(files, *arguments), decode_json(files, *arguments, "--no-stop-at-end")
        assert stopped["token_ids"] == ids[:k] + [END] and stopped["finish_reason"] == "end" and stopped["new_tokens"] == k + 1
        assert stopped["text"] == tokenizer.decode(ids[:k])
        assert went_on["token_ids"] == [{END: ids[k], ids[k]: END}.get(token, token) for token in ids]
        assert went_on["finish_reason"] == "length" and decode_json(files, *arguments, "--stop-at-end")["token_ids"] == stopped["token_ids"]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_seeds(files, verify):
    """[24] The same seed gives the same text, other seeds others."""
    texts = [decode_json(files, "--temperature", 1.0, "--verify", verify, "--seed", seed)["token_ids"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len({tuple(text) for text in texts}) == 3


def test_rejection_at_temperature_0_is_greedy(files):
    assert decode_json(files, "--verify", "rejection", "--dtype", "float64")["token_ids"] == decode_json(files, "--dtype", "float64")["token_ids"]


@pytest.mark.parametrize("verify, rule", [("coupled", "walk"), ("rejection", "walk_rejection")])
def test_the_rule_asked_for_is_the_one_that_runs(files, monkeypatch, verify, rule):
    calls = {"walk": 0, "walk_rejection": 0}

    def counted(name):
        original = getattr(generate, name)

        def call(*inputs):
            calls[name] += 1
            return original(*inputs)
        return call

    for name in calls:
        monkeypatch.setattr(generate, name, counted(name))
    decode_json(files, "--temperature", 0.7, "--verify", verify)
    assert [name for name, count in calls.items() if count] == [rule]


def test_filters_reach_the_sampler(files):
    """One candidate only: the greedy text, at any temperature."""
    greedy = decode_json(files, "--dtype", "float64")["token_ids"]
    for option, value in (("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 0.9999999)):
        assert decode_json(files, "--dtype", "float64", "--temperature", 2.0, option, value)["token_ids"] == greedy
    assert decode_json(files, "--dtype", "float64", "--temperature", 2.0)["token_ids"] != greedy


def test_auto_takes_a_measured_size(files):
    """A size of the table that lies with the maps is measured and taken; the text is the same. Not given, it is 16 nodes."""
    report, usual = (decode_json(files, "--dtype", "float64", *more) for more in (["--tree-size", "auto"], []))
    assert report["tree_size"] in (1, 2, 4) and report["token_ids"] == usual["token_ids"]
    status, out, err = call(generate.main, "--checkpoint", files / "tiny.pt", "--transfer", files / "maps.pt", "--prompt", TEXT,
                            "--max-new-tokens", NEW, "--json")
    assert (status, err) == (0, "") and json.loads(out)["tree_size"] == 16


@pytest.mark.parametrize("sources", [0, 1, 3, 4, 99])
def test_sources_change_nothing(files, sources):
    report = decode_json(files, "--dtype", "float64", "--sources", sources)
    usual = decode_json(files, "--dtype", "float64")
    assert (report["token_ids"], report["accepted_per_pass"]) == (usual["token_ids"], usual["accepted_per_pass"])


def test_maps_from_training_are_taken(files, tmp_path, monkeypatch):
    """train.py, then generate.py with what it has written."""
    for name, value in {"PROMPTS": 2, "PROMPT": 8, "NEW": 8}.items():
        monkeypatch.setattr(distillation, name, value)
    monkeypatch.setattr(distillation, "even_windows", lambda stream, length, device: replay.even_windows(stream, 2, 32, device))
    status, out, _ = teach(files, tmp_path / "out")
    assert status == 0 and "python generate.py --transfer" in out
    report = decode_json(files, "--transfer", tmp_path / "out" / "transfer.pt", "--dtype", "float64", "--check", "--tree-size", "auto")
    assert report["identical"] is True


# ------------------------------------------------------------------------------------------ processes of their own

def shell(*command, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"} | environment
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, timeout=200)


@pytest.mark.parametrize("command, named", [
    (["generate.py", "--checkpoint", "{}/half tiny.pt"], "--checkpoint"),
    (["train.py", "--checkpoint", "{}/tiny.pt", "--data", "{}/texts", "--out", "{}/out", "--transfer-layers", "99"], "--transfer-layers"),
])
def test_a_real_process_that_refuses(files, command, named):
    done = shell(ROOT / command[0], *[part.format(files) for part in command[1:]])
    assert_refused((done.returncode, done.stdout, done.stderr), named)


# generate.py with no network, and a word about its memory at the end
OFFLINE = """
import atexit, runpy, socket, sys
def refuse(*_, **__):
    raise RuntimeError("there is no network")
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
def report():
    import torch
    print("cuda", torch.cuda.is_available(), file=sys.stderr)
    print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0] if sys.platform == "linux" else "", file=sys.stderr)
atexit.register(report)
sys.argv[0] = "generate.py"
runpy.run_path(ROOT, run_name="__main__")
"""


def test_the_shipped_model_without_network_and_gpu():
    """[29] A few tokens from what ships alone, in less than 1 GB; the text is the default prompt and goes on."""
    done = shell("-c", OFFLINE.replace("ROOT", repr(str(ROOT / "generate.py"))), "--max-new-tokens", 6, "--tree-size", 8, "--check", "--dtype", "float64",
                 TIKTOKEN_CACHE_DIR=str(ROOT / "nowhere"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(generate.PROMPT) and "6 new tokens" in done.stdout and "the same tokens" in done.stdout
    assert "cuda False" in done.stderr
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is None or int(peak[1]) < 1e6

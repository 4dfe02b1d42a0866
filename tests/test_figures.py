"""
What the figures show is measured again here by other means, on a tiny model; every figure is drawn, with the table beside it.
"""
import argparse
import itertools
import shutil
from pathlib import Path

import pytest
import torch

import evidence
import figures
import subject as subjects
from checkpoint import BASE, load_checkpoint, save_checkpoint, save_module, save_transfer
from conftest import KINDS, assert_close, make_model, make_transfer, slow_forward
from data import encode_texts
from drafters import HiddenTransferDrafter
from evidence import (LAST, NEIGHBOURS, accuracy_table, block_table, cost_table, promised, sampling_table, sight_table, similarity_table,
                      speed_table, states_by_block, tokens_table, tree_cost)
from generate import generate
from replay import RANKS, TREE_SIZES, agreement, even_windows, tokens_per_pass
from sampler import Sampler
from subject import Subject, pass_costs
from test_baselines import blind, make_heads
from test_cli import call
from tokenizer import load_tokenizer

SHAPE = dict(vocab_size=4096, n_embd=32, n_layer=3, block_size=96)


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = make_model("rotary", **SHAPE)
    tokenizer, source = load_tokenizer(BASE.parent / "base.tiktoken"), Path(argparse.__file__).read_text(encoding="utf-8")
    tokens = encode_texts([source], tokenizer)
    fitted = Subject(model, make_transfer(model, [1, 2]), {}, tokenizer, [source], tokens, prompts=6)
    transfer = fitted.filled([1, 2]).requires_grad_(False)                  # maps in closed form: some of the drafts are right
    modules = {"hidden-transfer": transfer, "medusa": make_heads(model, 2), "no-interaction": blind(model, [1, 2])}
    return Subject(model, transfer, modules, tokenizer, [source], tokens, prompts=6)


def column(rows, name, **where):
    return [row[name] for row in rows if all(row[key] == value for key, value in where.items())]


def test_cost_counts_the_rows_asked_for(subject, monkeypatch):
    """With a clock that moves by the rows of each pass, the costs are the rows."""
    now, forward = [0.0], type(subject.model).forward

    def timed(self, tokens, position_ids, mask, cache):
        assert mask.shape == (tokens.shape[1], cache.length + tokens.shape[1]) and cache.length == 48      # half of the context
        now[0] += tokens.shape[1]
        return forward(self, tokens, position_ids, mask, cache)
    monkeypatch.setattr(subjects.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(type(subject.model), "forward", timed)
    assert pass_costs(subject.model, (1, 2, 5), repeats=3) == {1: 1, 2: 2, 5: 5}
    rows, _ = cost_table(subject, subject.model)
    assert len(rows) == 2 * len(subjects.ROWS) and all(row["multiple of one row"] == row["rows"] == row["ms"] / 1000 for row in rows)


def test_accuracy_is_that_of_each_module(subject):
    rows, how = accuracy_table(subject)
    windows = even_windows(subject.held_out, 40, 96)
    assert "40 windows of 96 tokens" in how
    for name, module in subject.modules.items():
        expected = agreement(subject.model, module, windows)
        assert [[row[f"top-{rank}"] for rank in RANKS] for row in rows if row["drafts"] == name] == expected
    assert len({tuple(row.values())[2:] for row in rows}) == len(rows)      # no two lines alike: nobody's figures stand for another's


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [[1, 3], [2, 1], [2, 2]], ids=str)
def test_states_by_block(kind, layers):
    """Behind the last block: the states that a slow pass computes row by row. At the transfer: the map of the source's state."""
    model = make_model(kind)
    transfer, tokens = make_transfer(model, layers), [3, 14, 15, 9, 26, 5]
    states = states_by_block(model, transfer, torch.tensor([tokens]))
    assert len(states) == 5
    real, pseudo = states[-1]
    expected, steps = slow_forward(model, tokens, transfer)
    assert_close(real, torch.stack(expected), 1e-9)
    for i in (1, 2):
        assert_close(pseudo[i][-1], steps[i - 1], 1e-9)
        t = layers[i - 1]
        assert_close(states[t][1][i], transfer.maps[i - 1](states[t][0]), 1e-9)
        assert all((i in states[block][1]) == (block >= t) for block in range(5))


def test_similarity_of_maps_that_copy(subject):
    """A map that leaves the state as it is makes step 1 at the transfer as like the next true state as two neighbours are; one
    that is right makes the cosine 1."""
    copying = Subject(subject.model, make_transfer(subject.model, [1, 2]), {}, subject.tokenizer, subject.training, subject.held_out)
    for linear in copying.transfer.maps:
        torch.nn.init.eye_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    rows, _ = similarity_table(copying)
    for what in ("cosine", "centred cosine"):
        assert column(rows, what, states="step 1", block=1) == column(rows, what, states=NEIGHBOURS, block=1)
        assert all(-1 <= value < 0.99 for value in column(rows, what))
    assert column(rows, "block", states="step 2") == [2, 3] and column(rows, "block", states=NEIGHBOURS) == [0, 1, 2, 3]

    def know(model, transfer, tokens):
        """Pseudo states that are the true ones."""
        return [(real, {i: torch.cat([real[i:], real[:i]]) for i in pseudo}) for real, pseudo in states_by_block(model, transfer, tokens)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "states_by_block", know)
        rows, _ = similarity_table(copying)
    assert all(row[what] == pytest.approx(1, abs=1e-6) for row in rows for what in ("cosine", "centred cosine") if row["states"] != NEIGHBOURS)


def test_blocks_of_the_transfer(subject):
    """Every block and the last hidden state, each with what maps fitted there agree; step 2 with step 1 at its best block."""
    rows, how = block_table(subject)
    assert column(rows, "block") == [0, 1, 2, LAST] and f"{subject.sums[0].rows:,} rows" in how
    best = max(rows[:-1], key=lambda row: row["step 1, top-1"])["block"]
    for row in rows[:-1]:
        table = agreement(subject.model, subject.filled([best, row["block"]]), subject.exam.text)
        assert (row["step 2, top-1"], row["step 2, top-5"]) == (table[1][0], table[1][3])
        assert row["step 1, top-1"] == agreement(subject.model, subject.filled([row["block"]]), subject.exam.text)[0][0]


def test_sight(subject):
    """Step 1 sees no earlier step, so the same maps give the same with and without sight; step 2 does not."""
    rows, _ = sight_table(subject)
    for step, same in ((1, True), (2, False)):
        seeing, blinded = ([column(rows, f"top-{rank}", drafts=name, step=step) for rank in RANKS] for name in ("sees the earlier steps", "same maps, blind"))
        assert (seeing == blinded) == same
    assert column(rows, "tokens/pass, 16 nodes", drafts="blind, trained so", step=1) == [
        tokens_per_pass(subject.model, subject.modules["no-interaction"], subject.second_half, (16,), subject.exam.new)[16]]


def test_what_a_tree_promises():
    """By hand: 1 for the model's own token, and for each node the product of the chances down to it, the likeliest first."""
    scores = [[0.5, 0.3, 0.1], [0.4, 0.2]]
    nodes = [0.5, 0.3, 0.1, *(a * b for a, b in itertools.product(scores[0], scores[1]))]
    best = sorted(nodes, reverse=True)
    assert promised(scores, (1, 2, 4, 8)) == pytest.approx([1, 1.5, 1 + sum(best[:3]), 1 + sum(best[:7])])


def test_tokens_by_tree_size(subject):
    """Measured: what decoding with such trees takes, best-first and static ones."""
    rows, _ = tokens_table(subject)
    assert column(rows, "tree size") == list(TREE_SIZES)
    for size in (1, 4, 16):
        for shape in ("best-first", "static"):
            drafter = HiddenTransferDrafter(subject.transfer, size, 0, shape, subject.acceptance)
            runs = [generate(subject.model, tokens[:prompt].tolist(), drafter, max_new_tokens=96 - 32) for tokens, prompt in subject.second_half]
            mean = sum(run.new_tokens for run in runs) / sum(run.forward_passes for run in runs)
            assert column(rows, f"{shape}, measured", **{"tree size": size}) == [mean]
            assert column(rows, f"{shape}, expected", **{"tree size": size})[0] >= 1
    assert column(rows, "best-first, measured")[-1] > 1.02                  # the text is one that can be drafted


def test_the_halves_do_not_overlap(subject):
    """Static trees are built on one half of the responses and measured on the other."""
    assert len(subject.second_half) == 3 and not {tuple(t.tolist()) for t, _ in subject.second_half} & {tuple(t.tolist()) for t, _ in subject.first_half}


def test_cost_of_a_tree():
    """If a pass over n rows takes n seconds: nodes in every block, and the pseudo rows of each step from its block on."""
    costs = {1: 1.0, 100: 100.0}
    assert tree_cost(costs, 8, 0, [2, 3], 4) == 8
    assert tree_cost(costs, 8, 4, [2, 3], 4) == pytest.approx(8 + (0 + 0 + 4 + 8) / 4)


def test_speed(subject, monkeypatch):
    """Every tree size, with the tokens per pass of real decoding and the prediction from the costs by rows."""
    monkeypatch.setattr(evidence, "RAISED", (2, 8))
    subject.__dict__["costs"] = {n: 1 + n / 16 for n in subjects.ROWS}
    try:
        rows, _ = speed_table(subject, prompts=2, rounds=1, new=20)
    finally:
        del subject.__dict__["costs"]
    assert column(rows, "tree size") == [2, 8]
    for row in rows:
        nodes, sources = row["tree size"], min(4, row["tree size"])
        depth = min(2, nodes - 1)
        cost = (1 + (nodes + sum(sources * min(depth, max(0, block)) for block in range(3)) / 3) / 16) / (1 + 1 / 16)
        assert row["cost of a pass, predicted"] == pytest.approx(cost) and row["predicted"] == pytest.approx(row["tokens/pass"] / cost)
        assert 0 < row["lower quartile"] <= row["measured"] <= row["upper quartile"]


def test_sampling(subject, monkeypatch):
    """At temperature 0 there is no noise, so both ways of ranking are one; above it they are not, and the text is the same."""
    monkeypatch.setattr(evidence, "TEMPERATURES", (0.0, 0.9))
    rows, _ = sampling_table(subject, prompts=6, new=60, size=16)
    assert column(rows, "temperature") == [0.0, 0.9]
    assert rows[0]["coupled noise"] == rows[0]["without noise"] > 1 and rows[1]["coupled noise"] != rows[1]["without noise"]
    texts = [subject.held_out[:8].tolist()]
    runs = [generate(subject.model, texts[0], drafter, Sampler(0.9, seed=1), 20) for drafter in
            (HiddenTransferDrafter(subject.transfer, 6), evidence.WithoutNoise(subject.transfer, 6))]
    assert runs[0].token_ids == runs[1].token_ids


# ------------------------------------------------------------------------------------------ the pictures

@pytest.fixture(scope="module")
def files(tmp_path_factory, subject):
    folder = tmp_path_factory.mktemp("figures")
    shutil.copy(BASE.parent / "base.tiktoken", folder / "tiny.tiktoken")
    save_checkpoint(subject.model, folder / "tiny.pt", "tiny.tiktoken")
    save_checkpoint(subject.model, folder / "bare.pt", None)
    model, _ = load_checkpoint(folder / "tiny.pt")                          # rounded to float16
    (folder / "rivals").mkdir()
    save_transfer(subject.transfer, model, folder / "maps.pt")
    save_module(subject.modules["medusa"], model, folder / "rivals" / "medusa.pt", "medusa", {"steps": 2, "kind": "matched"})
    (folder / "texts").mkdir()
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    for n in range(24):
        (folder / "texts" / f"file{n}.txt").write_text(source[n * 4000:(n + 1) * 4000], encoding="utf-8")
    return folder


def command(files, *arguments):
    return call(figures.main, "--checkpoint", files / "tiny.pt", "--transfer", files / "maps.pt", "--rivals", files / "rivals", "--data", files / "texts",
                "--out", files / "out", "--device", "cpu", "--dtype", "float64", *arguments)


def test_a_table_and_its_picture(files):
    """Only the figures asked for; the table is the one that was measured."""
    status, out, error = command(files, 4, 2)
    names = ["2-accuracy", "4-blocks"]
    assert status == 0 and sorted(file.name for file in (files / "out").iterdir()) == [f"{name}.{kind}" for name in names for kind in ("md", "png")]
    for name in names:
        assert (files / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (files / "out" / "2-accuracy.md").read_text()
    assert "`python figures.py 2`" in text and [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")] == [
        "drafts", "---", "hidden-transfer", "hidden-transfer", "medusa", "medusa"]


@pytest.mark.parametrize("number", figures.FIGURES)
def test_every_picture_can_be_drawn(number, tmp_path, subject, monkeypatch):
    """From rows as they are measured; drawn by the real code, on the least of data."""
    monkeypatch.setattr(evidence, "TEMPERATURES", (0.0, 0.9))
    monkeypatch.setattr(evidence, "RAISED", (2, 8))
    name, title, measure, draw = figures.FIGURES[number]
    few = {7: dict(prompts=1, rounds=1, new=10), 8: dict(prompts=1, new=5)}
    monkeypatch.setitem(figures.FIGURES, number, (name, title, lambda subject: measure(subject, **few.get(number, {})), draw))
    figures.make(number, subject, tmp_path)
    assert (tmp_path / f"{number}-{name}.png").stat().st_size > 5000 and (tmp_path / f"{number}-{name}.md").read_text().count("\n|") > 2


@pytest.mark.parametrize("arguments, message", [
    ([9], "figure 9: there are figures 1 to 8"), (["two"], "numbers"), (["--rivals", "nowhere"], "--rivals nowhere: no such folder"),
    (["--data", "nowhere"], "--data nowhere"), (["--transfer", "nowhere.pt"], "--transfer nowhere.pt: no such file"),
    (["--checkpoint", "{files}/bare.pt"], "tokenizer"), (["--out", "{files}/tiny.pt"], "--out")])
def test_refusals(files, arguments, message):
    status, out, error = command(files, *(str(argument).format(files=files) for argument in arguments))
    assert status == 2 and message in error and error.startswith("error: ") and error.count("\n") == 1

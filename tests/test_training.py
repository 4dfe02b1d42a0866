"""
Training: the loss, the closed-form start, the loop (accumulation, several processes, interrupt and resume, losses
that are not finite), what is written, and what is refused. Numbers in brackets, as in [30], are those of the
project's list of pitfalls.

The base here is tiny and random, and so are the texts; train.py's own main() runs on them.
"""
import argparse
import contextlib
import functools
import io
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import closed_form
import distillation
import loop
import replay
import pretrain
import train
from checkpoint import BASE, load_checkpoint, load_file, load_transfer, save_checkpoint
from closed_form import RidgeSums, hidden_states
from conftest import KINDS, PROMPT, VOCAB, assert_close, full_logits, make_model, make_transfer
from generate import generate
from hidden_transfer import HiddenTransfer, distillation_loss
from model import GPT, GPTConfig, causal_mask
from sampler import Sampler

ROOT = Path(__file__).resolve().parent.parent
# fewer and shorter measurements than train.py makes at its end
QUICK = {"PROMPTS": 3, "PROMPT": 8, "NEW": 10, "even_windows": lambda stream, length, device: replay.even_windows(stream, 2, 32, device)}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A folder with a tiny base (tiny.pt), its tokenizer, and texts/ to train on: 21 files, and 3 held out."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copy(BASE.parent / "base.tiktoken", folder / "tiny.tiktoken")
    model = make_model("rotary", vocab_size=4096, n_embd=16, n_layer=3, block_size=256)
    save_checkpoint(model, folder / "tiny.pt", "tiny.tiktoken")
    (folder / "texts").mkdir()
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    for n in range(24):
        (folder / "texts" / f"file{n}.txt").write_text(source[n * 4000:(n + 1) * 4000], encoding="utf-8")
    return folder


def arguments(small, out, *more) -> list[str]:
    return ["--checkpoint", str(small / "tiny.pt"), "--data", str(small / "texts"), "--out", str(out), "--transfer-layers", "1,2",
            "--steps", "6", "--batch", "2", "--accumulate", "1", "--length", "32", "--warm-start-tokens", "600", "--own-tokens", "0",
            "--device", "cpu", "--autocast", "off", *map(str, more)]


def train_maps(small, out, *more) -> tuple[int, str]:
    """train.py in this process: (exit status, what it printed). Later arguments take the place of the usual ones."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        for name, value in QUICK.items():
            patch.setattr(distillation, name, value)
        patch.setattr(sys, "argv", ["train.py"] + arguments(small, out, *more))
        try:
            train.main()
            status = 0
        except SystemExit as stop:
            status = stop.code
    return status, printed.getvalue()


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """(folder, what was printed) of an uninterrupted run with the usual arguments."""
    out = tmp_path_factory.mktemp("trained") / "deep" / "out"
    status, printed = train_maps(small, out)
    assert status == 0
    return out, printed


def state_of(out, label="transfer") -> dict:
    return load_file(out / f"{label}-state.pt", f"{label}-state", "state")


def same(a, b) -> bool:
    """Equal to the bit, for nested dicts and lists of tensors and numbers."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def at_step(monkeypatch, step, action):
    """Call action(), once, when the training loop fetches the first text of this step."""
    def windows(stream, args, now, micro):
        if (now, micro) == (step, 0):
            action()
        return fetch(stream, args, now, micro)
    fetch = loop.windows
    for module in (distillation, pretrain):
        monkeypatch.setattr(module, "windows", windows)


@pytest.fixture
def interruptible():
    """SIGINT as in a program started from a terminal (a suite in the background may have it ignored)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------ the loss

def logits(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_loss(teacher, drafts):
    """Plain loops: the mean over the steps that have valid rows of the mean over their valid rows of KL(p || q)."""
    (B, N, V), K = teacher.shape, drafts.shape[2]
    p, q, steps = teacher.softmax(-1).tolist(), drafts.softmax(-1).tolist(), []
    for i in range(1, K + 1):
        divergences = []
        for b in range(B):
            for n in range(N):
                if n + i < N:
                    target, draft = p[b][n + i], q[b][n][i - 1]
                    divergences.append(sum(target[v] * math.log(target[v] / draft[v]) for v in range(V)))
        if divergences:
            steps.append(sum(divergences) / len(divergences))
    return sum(steps) / len(steps)


@pytest.mark.parametrize("B, N, K", [(2, 7, 3), (1, 7, 1), (3, 4, 3), (2, 3, 3), (2, 2, 3), (1, 2, 5), (1, 12, 11), (1, 12, 12)])
def test_loss_equals_plain_loops(B, N, K):
    """[30] Sequences shorter than the horizon too: steps without a valid row take no part."""
    teacher, drafts = logits(B, N, 11), logits(B, N, K, 11, seed=1)
    assert distillation_loss(teacher, drafts).item() == pytest.approx(slow_loss(teacher, drafts), rel=1e-5)


def test_each_step_averages_over_its_own_valid_rows():
    """[30] Step 1 perfect, step 2 of one constant divergence d: the loss is d / 2, however few rows step 2 has."""
    N, teacher = 4, torch.zeros(1, 4, 2)
    drafts = torch.zeros(1, N, 2, 2)
    drafts[:, :, 1, 0] = math.log(3)                                    # q = (3/4, 1/4) against p = (1/2, 1/2)
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert distillation_loss(teacher, drafts).item() == pytest.approx(divergence / 2, rel=1e-6)
    assert distillation_loss(teacher[:, :3], drafts[:, :3]).item() == pytest.approx(divergence / 2, rel=1e-6)
    assert distillation_loss(teacher[:, :2], drafts[:, :2]).item() == 0


def test_rows_that_reach_past_the_end_take_no_part():
    """[30] Whatever they hold, nan even."""
    teacher, drafts = logits(2, 6, 9), logits(2, 6, 3, 9, seed=1)
    loss = distillation_loss(teacher, drafts)
    for i in (1, 2, 3):
        drafts[:, 6 - i:, i - 1] = math.nan
    assert distillation_loss(teacher, drafts) == loss


def test_the_loss_is_a_divergence():
    """Zero where draft [n, i] is the teacher's row n + i, and positive else; the direction is KL(teacher || draft)."""
    teacher = logits(1, 6, 9)
    drafts = torch.stack([teacher.roll(-i, dims=1) for i in (1, 2)], dim=2)
    assert distillation_loss(teacher, drafts).abs().item() < 1e-6
    assert distillation_loss(teacher, drafts + 5).abs().item() < 1e-6               # logits are known up to a constant
    assert distillation_loss(teacher, drafts.roll(1, dims=2)).item() > 0.1
    sure, flat = torch.tensor([30.0, 0]).expand(1, 2, 2), torch.zeros(1, 2, 1, 2)
    assert distillation_loss(sure, flat).item() == pytest.approx(math.log(2), rel=1e-5)
    assert distillation_loss(torch.zeros(1, 2, 2), sure[:, :, None]).item() > 10


def test_nothing_to_learn_from():
    """[30]"""
    with pytest.raises(ValueError, match="at least 2"):
        distillation_loss(logits(3, 1, 9), logits(3, 1, 2, 9))


def test_gradients_reach_the_maps_alone(model):
    """Every map and bias gets one, of any step, and no weight of the base."""
    transfer = make_transfer(model, [2, 1, 3]).requires_grad_(True)
    tokens = torch.tensor([PROMPT * 2, PROMPT[::-1] * 2])
    x, pseudo, _ = transfer(model, tokens, torch.arange(10), causal_mask(10))
    distillation_loss(model.unembed(x), model.unembed(pseudo)).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in transfer.parameters())
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------------------------------ the closed form

def test_hidden_states_are_those_that_the_maps_read(model):
    """State t is what enters block t: the taps of a training pass, and the last one leads to the model's logits."""
    tokens = torch.tensor([PROMPT * 3, PROMPT[::-1] * 3])
    states = hidden_states(model, tokens)
    assert len(states) == 4
    _, _, taps = make_transfer(model, [0, 1, 2, 3])(model, tokens, torch.arange(15), causal_mask(15))
    for state, tap in zip(states, taps):
        assert_close(state, tap)
    last = model.blocks[3](states[3], model.rope(torch.arange(15)), causal_mask(15), None, 3)
    assert_close(model.unembed(last)[1], full_logits(model, tokens[1].tolist()))


def sums_over(monkeypatch, states, steps):
    """RidgeSums of given states (L, B, T, C), a sequence at a time."""
    L, B, T, C = states.shape
    monkeypatch.setattr(closed_form, "hidden_states", lambda model, tokens: list(states[:, tokens[:, 0]]))
    sums = RidgeSums(GPTConfig(n_layer=L, n_embd=C, n_head=1), steps)
    for b in range(B):
        sums.add(None, torch.full((1, T), b))
    return sums


def test_a_known_law_is_recovered(monkeypatch):
    """Where h[n+1] = A h[n] + b holds exactly, the map of step i is A^i with the bias that belongs to it."""
    L, B, T, C, K = 3, 7, 9, 4, 3
    states, laws = torch.zeros(L, B, T, C, dtype=torch.float64), []
    for t in range(L):
        A, b = torch.linalg.qr(logits(C, C, seed=t)).Q, logits(C, seed=10 + t)
        laws.append((A, b))
        states[t, :, 0] = logits(B, C, seed=20 + t)
        for n in range(1, T):
            states[t, :, n] = states[t, :, n - 1] @ A.T + b
    sums = sums_over(monkeypatch, states, K)
    assert sums.rows == B * (T - K)
    for t, (A, b) in enumerate(laws):
        power, bias = torch.eye(C, dtype=torch.float64), torch.zeros(C, dtype=torch.float64)
        for i in range(1, K + 1):
            power, bias = A @ power, A @ bias + b
            assert_close(sums.solve(t, i, ridge=0.0), torch.cat([power.T, bias[None]]), 1e-8)
    transfer = sums.fill(HiddenTransfer(GPTConfig(n_layer=L, n_embd=C, n_head=1), [2, 0, 2]).double())
    for i, t in enumerate([2, 0, 2], start=1):
        A, b = laws[t]
        h = logits(5, C, seed=99)
        ahead = h
        for _ in range(i):
            ahead = ahead @ A.T + b
        assert_close(transfer.maps[i - 1](h), ahead, 0.1)               # fill's ridge pulls a little towards zero
        assert_close(torch.cat([transfer.maps[i - 1].weight.T, transfer.maps[i - 1].bias[None]]), sums.solve(t, i))


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.5])
def test_the_closed_form_is_ridge_regression(monkeypatch, ridge):
    """Equal to numpy's least squares over all rows with a full set of targets; the bias is not shrunk."""
    L, B, T, C, K = 2, 5, 12, 4, 3
    states = logits(L, B, T, C) + 3
    sums = sums_over(monkeypatch, states, K)
    for t in range(L):
        x = states[t, :, :T - K].reshape(-1, C).numpy()
        strength = ridge * (x ** 2).sum(0).mean()
        for i in range(1, K + 1):
            y = states[t, :, i:T - K + i].reshape(-1, C).numpy()
            rows = np.vstack([np.hstack([x, np.ones((len(x), 1))]), np.hstack([math.sqrt(strength) * np.eye(C), np.zeros((C, 1))])])
            expected = np.linalg.lstsq(rows, np.vstack([y, np.zeros((C, C))]), rcond=None)[0]
            assert_close(sums.solve(t, i, ridge), torch.from_numpy(expected), 1e-8)


def own_texts(model, first, count, length=48):
    """(count, length) tokens that the model itself draws."""
    rows = [[s % VOCAB] + generate(model, [s % VOCAB], None, Sampler(1.0, seed=s), length - 1).token_ids for s in range(first, first + count)]
    return torch.tensor(rows)


def test_sums_do_not_depend_on_the_batches(model):
    tokens = own_texts(model, 0, 6, 20)
    one, many = RidgeSums(model.config, 2), RidgeSums(model.config, 2)
    one.add(model, tokens)
    for part in (tokens[:1], tokens[1:4], tokens[4:]):
        many.add(model, part)
    assert one.rows == many.rows == 6 * 18
    assert_close(one.xx, many.xx, 1e-9)
    assert_close(one.xy, many.xy, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_closed_form_beats_the_identity(kind):
    """On texts that it has not seen."""
    model = make_model(kind)
    sums, unseen = RidgeSums(model.config, 2), own_texts(model, 1000, 15)
    sums.add(model, own_texts(model, 0, 50))
    for layers in ([2, 2], [1, 3]):
        losses = []
        for transfer in (HiddenTransfer(model.config, layers).double(), sums.fill(HiddenTransfer(model.config, layers).double())):
            x, pseudo, _ = transfer(model, unseen, torch.arange(48), causal_mask(48))
            losses.append(distillation_loss(model.unembed(x), model.unembed(pseudo)).item())
        assert losses[1] < 0.99 * losses[0]


# ------------------------------------------------------------------------------------------ the loop

def fit_args(tmp_path, *more):
    args = train.parse_args(["--out", str(tmp_path), "--steps", "4", "--batch", "4", "--accumulate", "1", "--length", "12", *map(str, more)])
    train.settle(args, "transfer")
    args.device = "cpu"
    return args


def test_windows(tmp_path):
    """Windows of the right size, from everywhere in the text, decided by seed, step and micro-batch alone."""
    stream, args = np.arange(30, dtype=np.uint16), fit_args(tmp_path, "--batch", 300)
    one = loop.windows(stream, args, 3, 0)
    assert one.shape == (300, 12) and one.dtype == torch.int64
    assert (one == one[:, :1] + torch.arange(12)).all() and set(one[:, 0].tolist()) == set(range(19))
    torch.rand(5)
    assert torch.equal(one, loop.windows(stream, args, 3, 0))
    args_of_another_seed = fit_args(tmp_path, "--batch", 300, "--seed", 1)
    for other in (loop.windows(stream, args, 4, 0), loop.windows(stream, args, 3, 1), loop.windows(stream, args_of_another_seed, 3, 0)):
        assert not torch.equal(one, other)


def test_a_text_of_exactly_one_window(tmp_path):
    """[30]"""
    args = fit_args(tmp_path)
    assert loop.windows(np.arange(12, dtype=np.uint16), args, 0, 0).tolist() == [list(range(12))] * 4


@pytest.mark.parametrize("steps", [1, 2, 49, 50, 51, 500])
def test_learning_rate(steps):
    """Up to the peak at most, then down; never zero, never negative."""
    rates = [loop.schedule(step, steps) for step in range(steps)]
    top = rates.index(max(rates))
    assert 0 < min(rates) and 0.9 < max(rates) <= 1
    assert rates[:top + 1] == sorted(rates[:top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(1 / steps)


def test_accumulation_equals_one_large_batch(tmp_path):
    """Two micro-batches of two windows are one batch of four: the same weights to 1e-6, the same losses."""
    model, text = make_model("rotary"), own_texts(make_model("rotary"), 0, 16, 12)

    def run(batch, accumulate):
        transfer = make_transfer(model, [1, 2]).requires_grad_(True)

        def loss_of(tokens):
            assert len(tokens) == batch
            x, pseudo, _ = transfer(model, tokens, torch.arange(12), causal_mask(12))
            return distillation_loss(model.unembed(x), model.unembed(pseudo))

        optimizer = torch.optim.SGD(transfer.parameters(), lr=0.1)
        args = fit_args(tmp_path, "--batch", batch, "--accumulate", accumulate)
        return transfer, loop.fit(transfer, [optimizer], loss_of, lambda step, micro: text[4 * step + batch * micro:][:batch], args, "transfer")

    (one, history), (two, history_2), (four, history_4) = run(4, 1), run(2, 2), run(1, 4)
    start = make_transfer(model, [1, 2])
    for p, p_2, p_4, p_0 in zip(one.parameters(), two.parameters(), four.parameters(), start.parameters()):
        assert (p - p_0).abs().max() > 1e-3
        assert_close(p_2, p, 1e-6)
        assert_close(p_4, p, 1e-6)
    assert np.allclose(history, history_2, atol=1e-6) and np.allclose(history, history_4, atol=1e-6)
    assert [step for step, _ in history] == [0, 1, 2, 3]


def test_interrupts(interruptible):
    """The first Ctrl-C is a request, the second one is real; afterwards all is as before."""
    with loop.StopOnInterrupt() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with loop.StopOnInterrupt() as stop:
        pass
    assert not stop.asked and signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ------------------------------------------------------------------------------------------ a whole run

def test_what_a_run_writes(trained, small):
    """The maps, the picture and the state, all whole, and nothing else; the maps belong to the base and say what they are worth."""
    out, printed = trained
    assert sorted(file.name for file in out.iterdir()) == ["training.png", "transfer-state.pt", "transfer.pt"]
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (out / "training.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    transfer, notes = load_transfer(out / "transfer.pt", load_checkpoint(small / "tiny.pt")[0])
    assert transfer.layers == [1, 2] and set(notes["tokens_per_pass"]) == set(replay.TREE_SIZES)
    assert len(notes["acceptance"]) == len(notes["agreement"]) == 2 and notes["steps"] == 6
    state = state_of(out)
    assert state["step"] == 6 and [step for step, _ in state["history"]] == list(range(6))
    for name, p in transfer.state_dict().items():
        assert torch.equal(p, state["module"][name].half().float()), name
    assert "saved" in printed and "transfer.pt" in printed


def test_what_a_run_prints(trained):
    """A table per transfer step and tokens per pass by tree size, after the warm start and after distillation."""
    _, printed = trained
    titles = [line for line in printed.splitlines() if line.startswith("after")]
    assert [title.split()[:3] for title in titles] == [["after", "the", "warm"], ["after", "distillation"]]
    for table in printed.split("after ")[1:]:
        lines = table.splitlines()
        assert lines[2].split() == ["step", "block", "top-1", "top-2", "top-3", "top-5", "top-10"]
        for i, line in enumerate(lines[3:5], start=1):
            step, block, *shares = line.split()
            assert (int(step), int(block)) == (i, i)
            assert [float(share) for share in shares] == sorted(float(share) for share in shares) and 0 <= float(shares[0]) <= 1
        sizes, tokens = lines[6].split()[2:], lines[7].split()[1:]
        assert [int(size) for size in sizes] == list(replay.TREE_SIZES)
        assert float(tokens[0]) == 1 and all(float(a) <= float(b) for a, b in zip(tokens, tokens[1:]))


@pytest.mark.parametrize("shift_positions", [False, True])
def test_what_the_closed_form_leaves_is_unrelated_to_its_input(shift_positions):
    """The normal equations: with hardly any ridge, the error of the pseudo states is orthogonal to the states they come
    from and to 1. With a position shift the map must be fitted to what the shift leaves, not to all of it."""
    model, n = make_model("learned"), 10
    tokens = torch.randint(VOCAB, (40, n + 2), generator=torch.Generator().manual_seed(0))
    sums = RidgeSums(model.config, 2, shift_positions=shift_positions)
    sums.add(model, tokens)
    sums.solve = functools.partial(sums.solve, ridge=1e-12)
    transfer = sums.fill(HiddenTransfer(model.config, [1, 2], shift_positions).double())
    for i, t in ((1, 1), (2, 2)):
        h = hidden_states(model, tokens)[t]
        error = h[:, i:n + i] - transfer.spawn(model, i, h[:, :n], torch.arange(n))     # (B, n, C)
        x = torch.cat([h[:, :n], torch.ones(40, n, 1)], dim=2).flatten(0, 1)            # (B*n, C + 1)
        assert (x.T @ error.flatten(0, 1)).abs().max() < 1e-6 and error.abs().max() > 0.1


def test_training_starts_from_the_closed_form(small, tmp_path):
    """A run whose one step moves nothing ends at the ridge regression over --warm-start-tokens of the training text."""
    train_maps(small, tmp_path, "--steps", 1, "--lr", 1e-12)
    model, tokenizer = load_checkpoint(small / "tiny.pt")
    args = train.parse_args(arguments(small, tmp_path, "--steps", 1))
    stream = distillation.encode_texts(distillation.read_corpus(args.data)[0], tokenizer)
    sums, micro = RidgeSums(model.config, 2), 0
    while sums.rows < 600:
        sums.add(model, loop.windows(stream, args, 1, micro))      # windows of a step behind the last one
        micro += 1
    expected = sums.fill(HiddenTransfer(model.config, [1, 2]))
    for p, q in zip(load_transfer(tmp_path / "transfer.pt", model)[0].parameters(), expected.parameters()):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-3)          # float16 on disk


def test_training_improves_the_warm_start(small, tmp_path):
    """Many steps of distillation end below the loss of the closed form, on the same windows."""
    train_maps(small, tmp_path / "a", "--steps", 1, "--lr", 1e-12)
    train_maps(small, tmp_path / "b", "--steps", 60, "--lr", 3e-3)
    model, tokenizer = load_checkpoint(small / "tiny.pt")
    text = torch.tensor(tokenizer.encode_ordinary((small / "texts" / "file1.txt").read_text())[:800]).view(20, 40)
    losses = []
    for out in ("a", "b"):
        transfer, _ = load_transfer(tmp_path / out / "transfer.pt", model)
        x, pseudo, _ = transfer(model, text, torch.arange(40), causal_mask(40))
        losses.append(distillation_loss(model.unembed(x), model.unembed(pseudo)).item())
    assert losses[1] < 0.98 * losses[0]


def test_the_base_does_not_change(small, tmp_path, monkeypatch):
    """[30] To the byte, in memory and on disk."""
    model, tokenizer = load_checkpoint(small / "tiny.pt")
    before, on_disk = {name: p.clone() for name, p in model.state_dict().items()}, (small / "tiny.pt").read_bytes()
    monkeypatch.setattr(train, "load_checkpoint", lambda *_, **__: (model, tokenizer))
    assert train_maps(small, tmp_path)[0] == 0
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert (small / "tiny.pt").read_bytes() == on_disk


def test_the_same_run_twice(trained, small, tmp_path):
    """The same seed gives the same maps to the bit, whatever was drawn before; another seed other ones."""
    torch.rand(7)
    train_maps(small, tmp_path / "again")
    train_maps(small, tmp_path / "other", "--seed", 1)
    first, again, other = (state_of(out) for out in (trained[0], tmp_path / "again", tmp_path / "other"))
    assert same(first["module"], again["module"]) and same(first["history"], again["history"])
    assert not same(first["module"], other["module"])


def test_large_seeds(small, tmp_path):
    """Seeds beyond 64 bits count as well."""
    for seed in (5, 5 + 2 ** 32, 5 + 2 ** 70):
        train_maps(small, tmp_path / str(seed), "--seed", seed, "--steps", 1)
    histories = [state_of(out)["history"] for out in tmp_path.iterdir()]
    assert len(histories) == 3 and len({loss for ((_, loss),) in histories}) == 3


@pytest.mark.parametrize("autocast", ["on", "off"])
def test_autocast(small, tmp_path, autocast, monkeypatch):
    """bfloat16 where it is asked for, with a loss close to that of float32; the maps stay float32."""
    seen = []
    monkeypatch.setattr(distillation, "distillation_loss", lambda teacher, drafts: seen.append(teacher.dtype) or distillation_loss(teacher, drafts))
    train_maps(small, tmp_path, "--autocast", autocast, "--steps", 2)
    assert set(seen) == {torch.bfloat16 if autocast == "on" else torch.float32}
    state = state_of(tmp_path)
    assert all(p.dtype == torch.float32 for p in state["module"].values())
    assert all(0 < loss < 20 for _, loss in state["history"])


def test_sweep(small, tmp_path):
    """One line a block: tokens per pass by size and top-1 agreement by step; nothing is saved."""
    status, printed = train_maps(small, tmp_path, "--sweep")
    rows = [line.split() for line in printed.splitlines() if line.split() and line.split()[0].isdigit()]
    assert status == 0 and [int(row[0]) for row in rows] == [0, 1, 2] and not list(tmp_path.iterdir())
    for row in rows:
        assert len(row) == 1 + 3 + 2 and 1 <= float(row[1]) <= float(row[2]) <= float(row[3]) <= 3


@pytest.mark.parametrize("n_layer, block", [(1, 0), (2, 1), (3, 2), (4, 3), (8, 6), (12, 8), (30, 20)])
def test_the_usual_block_is_two_thirds_up(n_layer, block):
    """Unless --transfer-layers says otherwise four steps, the shipped base's at block 6 of 8; the shortest models have such a block too."""
    maps = train.make_module(GPTConfig(vocab_size=16, n_layer=n_layer, n_embd=8, n_head=2, n_kv_head=1, mlp_width=8), train.parse_args([]))
    assert maps.layers == [block] * 4


# ------------------------------------------------------------------------------------------ text of the model's own

def test_own_text(small, tmp_path):
    """Half of it is the model's greedy continuation of prompts from the text, the other half that text itself; windows
    then start at the beginning of a sequence."""
    model, tokenizer = load_checkpoint(small / "tiny.pt")
    stream = np.array(tokenizer.encode_ordinary((small / "texts" / "file1.txt").read_text()), dtype=np.uint16)
    args = fit_args(tmp_path, "--own-tokens", 200)
    rows = distillation.own_text(model, stream, args).reshape(-1, 12)
    assert len(rows) == 16 and args.align == 12                             # 2 * (200 // 24)
    text = " ".join(map(str, stream))
    for own, original in zip(rows[:8].tolist(), rows[8:].tolist()):
        assert " ".join(map(str, original)) in text and own[:6] == original[:6]
        assert own[6:] == generate(model, own[:6], None, max_new_tokens=6).token_ids
    windows = loop.windows(rows.flatten(), fit_args(tmp_path, "--batch", 200), 0, 0)
    assert {tuple(window) for window in windows.tolist()} - set(map(tuple, rows.tolist()))
    args.batch = 200
    assert {tuple(window) for window in loop.windows(rows.flatten(), args, 0, 0).tolist()} == set(map(tuple, rows.tolist()))


def test_interrupted_and_resumed_on_own_text(small, tmp_path, monkeypatch, interruptible):
    more = ["--own-tokens", 500, "--steps", 3]
    train_maps(small, tmp_path / "whole", *more)
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: signal.raise_signal(signal.SIGINT))
        assert train_maps(small, tmp_path / "parts", *more)[0] == 130
    train_maps(small, tmp_path / "parts", *more, "--resume")
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert same(whole["module"], parts["module"]) and same(whole["history"], parts["history"])


# ------------------------------------------------------------------------------------------ interrupt and resume

@pytest.mark.parametrize("step", [0, 3, 4])
def test_interrupted_and_resumed(trained, small, tmp_path, monkeypatch, interruptible, step):
    """Ctrl-C ends the step, saves and says how to go on; what follows is the uninterrupted run, to the bit."""
    with monkeypatch.context() as patch:
        at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        status, printed = train_maps(small, tmp_path)
    assert status == 130 and f"stopped after {step + 1} of 6 steps" in printed and "--resume" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["transfer-state.pt"] and state_of(tmp_path)["step"] == step + 1
    status, _ = train_maps(small, tmp_path, "--resume")
    assert status == 0
    whole, parts = state_of(trained[0]), state_of(tmp_path)
    for name in ("module", "optimizers", "history", "step"):
        assert same(whole[name], parts[name]), name
    maps = [load_file(out / "transfer.pt", "transfer", "maps") for out in (trained[0], tmp_path)]
    assert same(*maps)


def test_interrupted_twice_with_accumulation(small, tmp_path, monkeypatch, interruptible):
    train_maps(small, tmp_path / "whole", "--accumulate", 2)
    for n, step in enumerate((1, 3)):
        with monkeypatch.context() as patch:
            at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
            assert train_maps(small, tmp_path / "parts", "--accumulate", 2, *["--resume"] * n)[0] == 130
    assert train_maps(small, tmp_path / "parts", "--accumulate", 2, "--resume")[0] == 0
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert same(whole["module"], parts["module"]) and same(whole["history"], parts["history"])


def test_interrupted_in_the_last_step(trained, small, tmp_path, monkeypatch, interruptible):
    """The run is over then: it ends as ever."""
    at_step(monkeypatch, 5, lambda: signal.raise_signal(signal.SIGINT))
    assert train_maps(small, tmp_path)[0] == 0
    assert same(state_of(trained[0])["module"], state_of(tmp_path)["module"])


def test_a_crash_and_resume(trained, small, tmp_path, monkeypatch):
    """Killed between two saved states it goes on from the last one, to the same weights."""
    def crash():
        raise ZeroDivisionError("the power is gone")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, 5, crash)
        train_maps(small, tmp_path, "--save-every", 2)
    assert state_of(tmp_path)["step"] == 4
    train_maps(small, tmp_path, "--save-every", 2, "--resume")
    assert same(state_of(trained[0])["module"], state_of(tmp_path)["module"])


def test_resuming_a_finished_run(trained, small, tmp_path):
    shutil.copytree(trained[0], tmp_path / "out")
    assert train_maps(small, tmp_path / "out", "--resume")[0] == 0
    assert same(load_file(trained[0] / "transfer.pt", "transfer", ""), load_file(tmp_path / "out" / "transfer.pt", "transfer", ""))


@pytest.mark.parametrize("option, value", [
    ("--steps", 7), ("--batch", 3), ("--accumulate", 2), ("--length", 33), ("--lr", 0.002), ("--seed", 1), ("--data", "other"),
    ("--checkpoint", "other.pt"), ("--transfer-layers", "2,2"), ("--transfer-layers", "1,2,2"), ("--own-tokens", 500), ("--position", "learned"),
])
def test_resuming_with_another_plan_is_refused(trained, small, tmp_path, option, value):
    """It could not end at the weights of an uninterrupted run; the message names what differs."""
    shutil.copytree(trained[0], tmp_path / "out")
    shutil.copytree(small, tmp_path / "small")
    shutil.copytree(small / "texts", tmp_path / "other")
    shutil.copy(small / "tiny.pt", tmp_path / "small" / "other.pt")
    value = {"other": tmp_path / "other", "other.pt": tmp_path / "small" / "other.pt"}.get(value, value)
    with pytest.raises(ValueError, match=f"--resume.*{option}"):
        train_maps(small, tmp_path / "out", "--resume", option, value)


def test_resuming_without_a_good_state(small, tmp_path, trained):
    with pytest.raises(ValueError, match="--resume .*transfer-state.pt: no such file"):
        train_maps(small, tmp_path, "--resume")
    state = (trained[0] / "transfer-state.pt").read_bytes()
    (tmp_path / "transfer-state.pt").write_bytes(state[:len(state) // 2])
    with pytest.raises(ValueError, match="--resume .*transfer-state.pt cannot be read"):
        train_maps(small, tmp_path, "--resume")


# ------------------------------------------------------------------------------------------ other processes

# train.py as QUICK has it, with a line for every step
SCRIPT = r"""
import time
import cli, distillation, loop, replay, train
distillation.PROMPTS, distillation.PROMPT, distillation.NEW = 3, 8, 10
distillation.even_windows = lambda stream, length, device: replay.even_windows(stream, 2, 32, device)
fetch = loop.windows
def windows(stream, args, step, micro):
    print(f"step {step}\n", end="", flush=True)         # one write: two processes share the pipe
    time.sleep(PAUSE)
    return fetch(stream, args, step, micro)
distillation.windows = windows
cli.run(train.main)
"""


def script(tmp_path, pause=0.0) -> str:
    path = tmp_path / "quick_train.py"
    path.write_text(SCRIPT.replace("PAUSE", str(pause)))
    return str(path)


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_interrupt_of_a_real_process(small, tmp_path):
    """Ctrl-C from outside, resumed in another process: to the bit the weights of one run."""
    more = ["--steps", 20]
    command = [sys.executable, script(tmp_path, pause=0.1)] + arguments(small, tmp_path / "parts", *more)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "step 2\n":
                process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130, errors
    assert "to go on, run the same command with --resume" in lines[-1] and "Traceback" not in errors
    done = state_of(tmp_path / "parts")["step"]
    assert 3 <= done < 20
    train_maps(small, tmp_path / "parts", *more, "--resume")
    train_maps(small, tmp_path / "whole", *more)
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert same(whole["module"], parts["module"]) and same(whole["history"], parts["history"])


def test_two_processes_equal_one_with_accumulation(small, tmp_path):
    """torchrun over gloo; the second process neither prints nor writes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script(tmp_path)]
    with subprocess.Popen(command + arguments(small, tmp_path / "two"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=ENVIRONMENT, cwd=tmp_path) as process:
        try:
            printed, errors = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.terminate()                                 # torchrun passes it on to its two processes
            raise
    assert process.returncode == 0, errors[-2000:]
    assert printed.count("after distillation") == printed.count("saved ") == 1
    assert printed.count("step 3\n") == 2
    train_maps(small, tmp_path / "one", "--accumulate", 2)
    two, one = state_of(tmp_path / "two"), state_of(tmp_path / "one")
    assert np.allclose(two["history"], one["history"], rtol=1e-5)
    for name, p in one["module"].items():
        assert_close(two["module"][name], p, 1e-5)
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == ["training.png", "transfer-state.pt", "transfer.pt"]
    assert [load_file(tmp_path / run / "transfer.pt", "transfer", "")["notes"]["tokens"] for run in ("two", "one")] == [6 * 2 * 2 * 32] * 2


# ------------------------------------------------------------------------------------------ what is refused

@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_training(small, tmp_path, monkeypatch, value):
    """[30] The step is named; what was saved before is intact, and no maps are written."""
    calls = []

    def loss(teacher, drafts):
        calls.append(1)
        return distillation_loss(teacher, drafts) * (value if len(calls) == 4 else 1)

    monkeypatch.setattr(distillation, "distillation_loss", loss)
    with pytest.raises(ValueError, match=f"loss is {value} at step 3"):
        train_maps(small, tmp_path, "--save-every", 1)
    assert len(calls) == 4 and [file.name for file in tmp_path.iterdir()] == ["transfer-state.pt"]
    state = state_of(tmp_path)
    assert state["step"] == 3 and all(torch.isfinite(p).all() for p in state["module"].values())


def texts_of(monkeypatch, training: int, held_out: int):
    """Let the corpus be this many tokens."""
    streams = iter([np.arange(training, dtype=np.uint16), np.arange(held_out, dtype=np.uint16)])
    monkeypatch.setattr(distillation, "encode_texts", lambda *_: next(streams))


@pytest.mark.parametrize("length", [256, 9999])
def test_one_window_of_the_whole_context(small, tmp_path, monkeypatch, length):
    """[30] The text is one window at block_size, to which a longer --length is cut: a finite loss."""
    texts_of(monkeypatch, 256, 300)
    assert train_maps(small, tmp_path, "--length", length, "--steps", 2)[0] == 0
    state = state_of(tmp_path)
    assert state["plan"]["length"] == 256 and all(0 < loss < 20 for _, loss in state["history"])


@pytest.mark.parametrize("training, held_out, message", [(31, 300, "31 training tokens"), (0, 300, "0 training tokens"),
                                                         (300, 31, "31 held-out tokens"), (1, 1, "1 training tokens")])
def test_less_text_than_a_window(small, tmp_path, monkeypatch, training, held_out, message):
    """[30] A clear error before anything is trained or written."""
    texts_of(monkeypatch, training, held_out)
    with pytest.raises(ValueError, match=f"--data: {message} are fewer than one window of --length 32"):
        train_maps(small, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("length, layers, allowed", [(2, "1,2", False), (3, "1,2", True), (1, "1", False), (2, "1", True), (4, "1,1,1,1", False)])
def test_windows_shorter_than_the_horizon(small, tmp_path, length, layers, allowed):
    """[30] Every step needs a row to learn from; the shortest windows that have one do."""
    run = functools.partial(train_maps, small, tmp_path, "--length", length, "--transfer-layers", layers, "--steps", 2)
    if allowed:
        assert run()[0] == 0 and all(0 <= loss < 20 for _, loss in state_of(tmp_path)["history"])
    else:
        with pytest.raises(ValueError, match=f"--length {length} is too short for {len(layers.split(','))} transfer steps"):
            run()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_written(small, tmp_path, place):
    """Known before an hour of training, not after it; nothing is touched."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="--out .*cannot write"):
        train_maps(small, tmp_path / place)
    assert (tmp_path / "file").read_text() == "in the way" and len(list(tmp_path.iterdir())) == 1


def test_a_base_with_a_short_context(small, tmp_path, monkeypatch):
    """Learned positions end at block_size: measuring with the usual lengths must not go beyond it."""
    monkeypatch.setattr(distillation, "PROMPTS", 3)
    monkeypatch.setattr(distillation, "even_windows", functools.partial(replay.even_windows, windows=2))
    shutil.copy(small / "tiny.tiktoken", tmp_path)
    save_checkpoint(make_model("learned", vocab_size=4096, n_embd=16, n_layer=3, block_size=64), tmp_path / "short.pt", "tiny.tiktoken")
    monkeypatch.setattr(sys, "argv", ["train.py"] + arguments(small, tmp_path / "out", "--checkpoint", tmp_path / "short.pt", "--steps", 1))
    train.main()
    assert (tmp_path / "out" / "transfer.pt").exists()


def half_written(place, *_, **__):
    Path(place).write_bytes(b"half a file")
    raise OSError(28, "No space left on device")


def test_a_disk_full_at_the_end(small, tmp_path, monkeypatch):
    """Maps that cannot be written leave no half of them, and the state to resume from is whole."""
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda contents, place: half_written(place) if contents["kind"] == "transfer" else save(contents, place))
    with pytest.raises(ValueError, match="cannot write .*transfer.pt"):
        train_maps(small, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["transfer-state.pt"] and state_of(tmp_path)["step"] == 6


def test_a_disk_full_at_the_picture(small, tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    monkeypatch.setattr(Figure, "savefig", lambda self, place, **_: half_written(place))
    with pytest.raises(ValueError, match="cannot write .*training.png"):
        train_maps(small, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["transfer-state.pt", "transfer.pt"]


# ------------------------------------------------------------------------------------------ the base stage

@pytest.fixture
def tiny_base(monkeypatch, tmp_path):
    """The base stage, a thousand times smaller: run(out, *more) -> exit status."""
    monkeypatch.setattr(pretrain, "SHAPE", dict(block_size=64, n_layer=2, n_head=2, n_embd=8))
    monkeypatch.setattr(GPTConfig, "vocab_size", 300)           # the vocabulary that --new-tokenizer trains
    text = tmp_path / "text.txt"
    text.write_text(Path(functools.__file__).read_text(encoding="utf-8")[:12000], encoding="utf-8")

    def run(out, *more):
        command = ["--stage", "base", "--data", str(text), "--out", str(out), "--steps", "5", "--batch", "2", "--length", "33",
                   "--lr", "1e-3", "--new-tokenizer", "--device", "cpu", "--autocast", "off", *more]
        monkeypatch.setattr(sys, "argv", ["train.py"] + command)
        try:
            train.main()
        except SystemExit as stop:
            return stop.code
        return 0
    return run


def test_base_stage(tiny_base, tmp_path, monkeypatch, interruptible, capsys):
    """A model that generate() runs, with a tokenizer of its own; interrupted and resumed it is the same to the bit."""
    assert tiny_base(tmp_path / "whole") == 0
    assert "bits per byte" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "whole").iterdir()) == ["base-state.pt", "base.pt", "base.tiktoken"]
    model, tokenizer = load_checkpoint(tmp_path / "whole" / "base.pt")
    assert tokenizer.n_vocab == model.config.vocab_size == 300 and model.config.n_layer == 2
    assert 0 < load_file(tmp_path / "whole" / "base.pt", "gpt", "")["notes"]["bits_per_byte"] < 9
    assert len(generate(model, tokenizer.encode_ordinary("def "), None, max_new_tokens=4).token_ids) == 4
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: signal.raise_signal(signal.SIGINT))
        assert tiny_base(tmp_path / "parts") == 130
    assert tiny_base(tmp_path / "parts", "--resume") == 0
    whole, parts = state_of(tmp_path / "whole", "base"), state_of(tmp_path / "parts", "base")
    for name in ("module", "optimizers", "history"):
        assert same(whole[name], parts[name]), name


def test_base_stage_with_less_text_than_a_window(tiny_base, tmp_path):
    """[30]"""
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ValueError, match="--data: .* training tokens are fewer than one window of 33"):
        tiny_base(tmp_path / "out", "--data", str(tmp_path / "short.txt"))


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 18, 24, 25, 33, 34, 100])
def test_bits_per_byte_count_every_token_once(tokens):
    """All logits equal, every token but the first costs log2(V) bits, however the windows lie."""
    model = GPT(GPTConfig(vocab_size=32, block_size=16, n_layer=1, n_head=1, n_embd=4)).eval()
    model.embedding.weight.data.zero_()
    bits = pretrain.bits_per_byte(model, np.arange(tokens, dtype=np.uint16) % 32, 10)
    assert bits == pytest.approx((tokens - 1) * 5 / 10, rel=1e-5)


def test_bits_per_byte_of_one_window():
    """Within one context it is the model's own log probability of the text."""
    model, tokens = make_model("learned"), own_texts(make_model("learned"), 0, 1, 40)[0]
    logp = full_logits(model, tokens.tolist()).log_softmax(-1)
    nats = -sum(logp[n, tokens[n + 1]].item() for n in range(39))
    assert pretrain.bits_per_byte(model, tokens.numpy(), 7) == pytest.approx(nats / math.log(2) / 7, rel=1e-5)

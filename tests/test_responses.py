"""
Maps that learn from a model's own answers: the prompts, the answers decoded as a batch, their file, pseudo rows drafted
from kept rows of the base, and train.py on all of it.

The models here are tiny and random; what they "answer" is noise, and just as hard to get right.
"""
import argparse
import contextlib
import functools
import io
import math
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import distillation
import prompts
import responses
import train
from checkpoint import BASE, fingerprint, load_checkpoint, load_file, load_transfer, save_checkpoint
from cli import run
from closed_form import RidgeSums, hidden_states
from conftest import BLOCK, PROMPT, VOCAB, assert_close, fresh_cache_rows, make_model, make_transfer
from distillation import FromResponses, StoredRows
from generate import generate
from hidden_transfer import HiddenTransfer, distillation_loss
from model import KVCache, causal_mask
from responses import Response, ResponseFile, answer, batches_of_one_length, even_length, held_out, load_responses, write_responses
from tokenizer import load_tokenizer

LAYERS = [[1, 2], [2, 1], [0, 3, 3]]


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def whole_pass(model, transfer, tokens):
    T = len(tokens)
    return transfer(model, tokens[None], torch.arange(T), causal_mask(T))


# ------------------------------------------------------------------------------------------ pseudo rows of rows computed before

@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("kept", ["cache", "stored rows"])
@pytest.mark.parametrize("rows", [[0], [3, 4, 9, 18], list(range(19))], ids=["the first", "some", "all"])
def test_draft_rows_equals_the_one_pass_forward(model, layers, kept, rows):
    """Several sources in one pass behind all rows of the sequence: none sees what comes after it."""
    tokens, transfer, rows = random_tokens(19), make_transfer(model, layers), torch.tensor(rows)
    _, pseudo, taps = whole_pass(model, transfer, tokens)
    data = fresh_cache_rows(model, tokens.tolist())
    if kept == "cache":
        cache = KVCache(model.config, 19 + len(layers) * len(rows), dtype=torch.float64)
        cache.data[..., :19, :], cache.length = data, 19
    else:
        cache = StoredRows(data[min(layers):], min(layers))
    drafts = transfer.draft_rows(model, [tap[:, rows] for tap in taps], rows, cache)
    assert_close(drafts, pseudo[:, rows])
    assert cache.length == 19


def test_draft_rows_with_shifted_positions():
    model, tokens, rows = make_model("learned"), random_tokens(12), torch.tensor([2, 7, 11])
    transfer = make_transfer(model, [2, 1], shift_positions=True)
    _, pseudo, taps = whole_pass(model, transfer, tokens)
    stored = StoredRows(fresh_cache_rows(model, tokens.tolist())[1:], 1)
    assert_close(transfer.draft_rows(model, [tap[:, rows] for tap in taps], rows, stored), pseudo[:, rows])


# ------------------------------------------------------------------------------------------ the loss

def save_responses(path, model, rows) -> None:
    path.unlink(missing_ok=True)
    file = ResponseFile(path, {"base": fingerprint(model), "count": len(rows), "new": 0, "seed": 0})
    file.found = dict(enumerate(rows))
    file.save()


def lessons_of(model, folder, lengths=((5, 12), (4, 9), (7, 2), (6, 23)), keep_gb=1.0, steps=2) -> FromResponses:
    """FromResponses of random texts with these lengths of (prompt, answer), behind one that is held out."""
    rows = [Response(random_tokens(prompt + new, seed), prompt) for seed, (prompt, new) in enumerate([(3, 5), *lengths])]
    save_responses(folder / "responses.pt", model, rows)
    args = argparse.Namespace(responses=str(folder / "responses.pt"), autocast=False, seed=0, keep_gb=keep_gb, device="cpu", batch=2, steps=10)
    return FromResponses(model, None, args, steps)


def reference_loss(model, transfer, rows) -> torch.Tensor:
    """From a plain pass over each whole sequence. The mean over the responses, each by its number of tokens against
    the mean of all four above, (12 + 9 + 2 + 23) / 4."""
    total = 0
    for tokens, prompt in rows:
        x, pseudo, _ = whole_pass(model, transfer, tokens)
        sources = range(prompt - 1, len(tokens) - 1)                    # the row that chose the first token of the answer, and on
        total = total + distillation_loss(model.unembed(x[:, sources]), model.unembed(pseudo[:, sources])) * len(sources) / 11.5
    return total / len(rows)


@pytest.fixture
def exact_loss(monkeypatch):
    """The loss in float64: it else rounds to float32, and equality to 1e-10 would be luck."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("keep_gb", [1.0, 0.0], ids=["kept", "not kept"])
def test_loss_and_gradients_equal_a_plain_pass(model, layers, keep_gb, tmp_path, exact_loss):
    """Also where it comes from what was kept from the first use, with other maps by then."""
    lessons = lessons_of(model, tmp_path, keep_gb=keep_gb)
    for seed, batch in ((0, [1, 3]), (1, [3, 0, 1]), (2, [2])):         # the answer of response 2 is shorter than the transfers
        ours, plain = (make_transfer(model, layers, seed).requires_grad_(True) for _ in range(2))
        loss, expected = lessons.loss(ours, batch), reference_loss(model, plain, [lessons.responses[index] for index in batch])
        assert loss.item() == pytest.approx(expected.item(), abs=1e-10) and loss.item() > 0.1
        loss.backward()
        expected.backward()
        for p, q in zip(ours.parameters(), plain.parameters()):
            if q.grad is None or not q.grad.any():                      # the steps that reach past the end of response 2
                assert batch == [2] and (p.grad is None or not p.grad.any())
            else:
                assert_close(p.grad, q.grad)
    assert set(lessons.teachers) == ({0, 1, 2, 3} if keep_gb else set())
    assert all(p.grad is None for p in model.parameters())


def forwards(monkeypatch) -> list[int]:
    """The lengths of all sequences that go through a whole pass from now on."""
    lengths, forward = [], HiddenTransfer.forward
    monkeypatch.setattr(HiddenTransfer, "forward", lambda self, model, tokens, *rest: lengths.append(tokens.shape[1]) or forward(self, model, tokens, *rest))
    return lengths


def test_what_is_kept_is_not_computed_again(model, tmp_path, monkeypatch):
    lessons, transfer, lengths = lessons_of(model, tmp_path), make_transfer(model, [1, 2]), forwards(monkeypatch)
    first = lessons.loss(transfer, [0, 1, 0])
    assert lengths == [17, 13] and lessons.loss(transfer, [0, 1, 0]) == first and lengths == [17, 13]


def test_no_more_is_kept_than_there_is_room_for(model, tmp_path, monkeypatch):
    """Room for the first two: the others are computed each time, and give the same loss."""
    whole, transfer = lessons_of(model, tmp_path), make_transfer(model, [1, 2])
    losses = [whole.loss(transfer, [index]) for index in (0, 1, 2, 3)]
    sizes = [sum(part.nbytes for part in (*kept.taps, kept.x, kept.rows.data)) for kept in whole.teachers.values()]
    # three of four blocks, keys and values, and states of the answer's rows for two maps and the end
    assert sizes[0] == 8 * (3 * 2 * 17 * model.config.n_kv_head * model.config.head_dim + 3 * 12 * 32)
    small = lessons_of(model, tmp_path, keep_gb=(sizes[0] + sizes[1] + 100) / 1e9)
    lengths = forwards(monkeypatch)
    for _ in range(2):
        assert [small.loss(transfer, [index]) for index in (0, 1, 2, 3)] == losses
    assert lengths == [17, 13, 9, 29, 9, 29] and set(small.teachers) == {0, 1} and small.room >= 0


def test_draws(model, tmp_path):
    """Numbers of responses, all of them in time, decided by seed, step and micro-batch alone."""
    lessons = lessons_of(model, tmp_path)
    drawn = [lessons.draw(step, micro) for step in range(20) for micro in (0, 1)]
    assert all(len(batch) == 2 for batch in drawn) and {index for batch in drawn for index in batch} == {0, 1, 2, 3}
    torch.rand(3)
    assert drawn == [lessons.draw(step, micro) for step in range(20) for micro in (0, 1)]
    lessons.args.seed = 1
    assert drawn != [lessons.draw(step, micro) for step in range(20) for micro in (0, 1)] and drawn[::2] != drawn[1::2]


def test_the_exam_is_held_out(model, tmp_path):
    """Nothing that is trained on is measured on, and what is generated ends at NEW tokens."""
    lessons = lessons_of(model, tmp_path, lengths=[(4, 5)] * 30)
    trained = {tuple(tokens.tolist()) for tokens, _ in lessons.responses}
    for rows in (lessons.exam.text, lessons.exam.responses):
        assert rows and not trained & {tuple(tokens.tolist()) for tokens, _ in rows}
    assert len(lessons.exam.responses) == 2 and len(lessons.responses) == 30 - 1


# ------------------------------------------------------------------------------------------ the closed form

@pytest.mark.parametrize("shift_positions", [False, True])
def test_sums_over_some_blocks_and_rows(shift_positions):
    """X'X and X'Y of the rows from `first` on, and of these blocks alone; sequences without such a row add nothing."""
    model, tokens, first, steps = make_model("learned"), random_tokens(30).view(2, 15), 4, 3
    sums = RidgeSums(model.config, steps, shift_positions=shift_positions, blocks=[3, 1, 3])
    sums.add(model, tokens, first)
    states = hidden_states(model, tokens)
    for t in (0, 1, 2, 3):
        xx, xy = torch.zeros(33, 33, dtype=torch.float64), torch.zeros(steps, 33, 32, dtype=torch.float64)
        for b in range(2):
            for n in range(first, 15 - steps):
                x = torch.cat([states[t][b, n], torch.ones(1, dtype=torch.float64)])
                xx += torch.outer(x, x)
                for i in range(1, steps + 1):
                    shift = model.positions.weight[n + i] - model.positions.weight[n] if shift_positions else 0
                    xy[i - 1] += torch.outer(x, states[t][b, n + i] - shift)
        assert_close(sums.xx[t], xx if t in (1, 3) else 0 * xx)
        assert_close(sums.xy[t], xy if t in (1, 3) else 0 * xy)
    assert sums.rows == 2 * (15 - steps - first)
    before = sums.xx.clone(), sums.xy.clone()
    for late in (12, 13, 14):
        sums.add(model, tokens, late)
    assert sums.rows == 16 and torch.equal(sums.xx, before[0]) and torch.equal(sums.xy, before[1])


def test_the_closed_form_takes_the_rows_of_answers(model, tmp_path):
    lessons = lessons_of(model, tmp_path)
    lessons.draw = lambda step, n: [[0, 3], [1, 1]][n] if step == 10 else None          # 10: a step behind the last one
    sums, expected = RidgeSums(model.config, 2), RidgeSums(model.config, 2)
    for n in (0, 1):
        lessons.add_to(sums, n)
    for index in (0, 3, 1, 1):
        tokens, prompt = lessons.responses[index]
        expected.add(model, tokens[None], prompt - 1)
    assert sums.rows == 11 + 22 + 8 + 8                                 # an answer of n tokens has n rows, less one for each step but one
    assert torch.equal(sums.xx, expected.xx) and torch.equal(sums.xy, expected.xy)


# ------------------------------------------------------------------------------------------ answers

class Watched:
    """A model that notes how many rows each pass is fed."""
    def __init__(self, model):
        self.model, self.config, self.embedding, self.batches = model, model.config, model.embedding, []

    def __call__(self, tokens, *rest):
        self.batches.append(len(tokens))
        return self.model(tokens, *rest)


@pytest.fixture(scope="module")
def asked(model):
    """(prompts of one length, ids that end an answer, what generate makes of each prompt in 24 tokens)."""
    chance = random.Random(3)
    questions = [[chance.randrange(VOCAB) for _ in range(5)] for _ in range(16)]
    endless = [generate(model, ids, None, max_new_tokens=24).token_ids for ids in questions]
    for _ in range(500):                                                        # ends that some answers reach soon, some late, some never
        ends = set(chance.sample(range(VOCAB), 3))
        lengths = Counter(next((n for n, token in enumerate(row, start=1) if token in ends), 0) for row in endless)
        if lengths[1] and len(lengths) > 4 and 3 <= lengths[0] <= 8:
            return questions, ends, [generate(model, ids, None, max_new_tokens=24, end_token=ends).token_ids for ids in questions]
    raise AssertionError("no such ends")


def test_answers_equal_generate(model, asked):
    """Every prompt of a batch gets what it gets by itself, up to its end token, though others end sooner or never."""
    questions, ends, alone = asked
    watched = Watched(model)
    assert answer(watched, questions, ends, 24) == alone
    assert len(watched.batches) == 24 and watched.batches == sorted(watched.batches, reverse=True)
    assert watched.batches[0] == 16 > watched.batches[-1]                       # rows that have ended leave the batch
    never = {VOCAB}
    assert answer(model, questions[:3], never, 7) == [generate(model, ids, None, max_new_tokens=7).token_ids for ids in questions[:3]]


def test_answers_that_have_all_ended(model, asked):
    """No pass is made for nothing."""
    questions, ends, alone = asked
    some = [n for n, row in enumerate(alone) if len(row) < 24]
    watched = Watched(model)
    assert answer(watched, [questions[n] for n in some], ends, 24) == [alone[n] for n in some]
    assert len(watched.batches) == max(len(alone[n]) for n in some)


@pytest.mark.parametrize("new", [1, 2, 23])
def test_answers_are_no_longer_than_asked_for(model, asked, new):
    questions, ends, alone = asked
    assert answer(model, questions, ends, new) == [row[:new] for row in alone]


def test_answers_up_to_the_end_of_the_context(model):
    expected = generate(model, PROMPT, None, max_new_tokens=BLOCK + 1 - 5).token_ids
    assert answer(model, [PROMPT], set(), BLOCK + 1 - 5) == [expected] and len(expected) == BLOCK - 4


def test_batches_of_one_length():
    chance = random.Random(0)
    questions = {key: [0] * chance.choice([3, 4, 4, 4, 9]) for key in range(40)}
    batches = batches_of_one_length(questions, 6)
    assert sorted(key for keys in batches for key in keys) == list(range(40))
    assert all(len({len(questions[key]) for key in keys}) == 1 and len(keys) <= 6 for keys in batches)
    counts = Counter(map(len, questions.values()))
    assert len(batches) == sum(math.ceil(count / 6) for count in counts.values())      # none is left half empty
    assert batches_of_one_length({}, 6) == []


@pytest.mark.parametrize("limit", [64, 100, 200, 207, 1000])
def test_even_length(limit):
    """Short prompts stay as they are; long ones lose the least that makes their length a multiple of 16 within the limit."""
    for length in range(1, 420):
        ids = list(range(length))
        cut = even_length(ids, limit)
        if length <= 200 and length <= limit:
            assert cut == ids
        else:
            assert len(cut) % 16 == 0 and min(length, limit) - 16 < len(cut) <= min(length, limit)
            front = len(cut) // 2
            assert cut == ids[:front] + ids[-(len(cut) - front):]


def test_held_out():
    """No answer is in both parts, and none is lost but those with under two tokens."""
    rows = [Response(torch.arange(3 + n % 5), 3) for n in range(200)]                   # answers of 0 to 4 tokens
    training, apart = held_out(rows)
    assert {id(row) for row in training}.isdisjoint(map(id, apart))
    assert sorted(map(id, training + apart)) == sorted(id(row) for row in rows if len(row.tokens) > 4)
    assert len(apart) == 5                                                              # of 120, from the first on


# ------------------------------------------------------------------------------------------ the file of answers

COUNT, NEW = 40, 6


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A folder with a tiny base (tiny.pt), its tokenizer, another base, one without tokenizer, and a file of answers."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copy(BASE.parent / "base.tiktoken", folder / "tiny.tiktoken")
    shape = dict(vocab_size=4096, n_embd=16, n_layer=3, block_size=128)
    for name, seed, tokenizer in (("tiny", 0, "tiny.tiktoken"), ("another", 1, "tiny.tiktoken"), ("bare", 0, None)):
        save_checkpoint(make_model("rotary", seed, **shape), folder / f"{name}.pt", tokenizer)
    with contextlib.redirect_stdout(io.StringIO()):
        write_responses(*loaded(folder), folder / "responses.pt", COUNT, NEW)
    return folder


@functools.cache
def loaded(folder, name="tiny"):
    """(model in float64, tokenizer with two tokens that end an answer)"""
    model, tokenizer = load_checkpoint(folder / f"{name}.pt", torch.float64)
    if tokenizer is not None:
        tokenizer.end_tokens = END
    return model, tokenizer


END = {239, 3218}


def contents(path) -> dict:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in load_file(path, "responses", "").items()}


def test_what_the_file_holds(small):
    """An answer to every prompt, each what generate makes of it."""
    model, tokenizer = loaded(small)
    rows, ended = load_responses(small / "responses.pt", model), 0
    assert len(rows) == COUNT and len({tuple(tokens[:prompt].tolist()) for tokens, prompt in rows}) == COUNT
    for tokens, prompt in rows:
        run = generate(model, tokens[:prompt].tolist(), None, max_new_tokens=NEW, end_token=END)
        assert tokens[prompt:].tolist() == run.token_ids
        ended += run.finish_reason == "end"
    assert 0 < ended < COUNT
    texts = [tokenizer.decode(tokens[:prompt].tolist()) for tokens, prompt in rows]
    assert texts[:4] == [text + "\n\n" for text in prompts.passage_prompts(4)]
    assert texts[14:] == [text + "\n\n" for text in prompts.standalone_prompts(26)]
    passages = [tokenizer.decode([token for token in tokens[prompt:].tolist() if token not in END]) for tokens, prompt in rows[:4]]
    assert all(any(passage in text for passage in passages) for text in texts[4:14])


def test_the_file_does_not_depend_on_the_batches(small, tmp_path):
    write_responses(*loaded(small), tmp_path / "responses.pt", COUNT, NEW, batch=1)
    assert contents(tmp_path / "responses.pt") == contents(small / "responses.pt")


def interrupt_at(patch, batch: int, error=KeyboardInterrupt) -> list[list[int]]:
    """Raise in the answer to this batch, counted from 0; returns the prompts that have been answered, as they come."""
    done, calls = [], []

    def stopped(model, questions, ends, new):
        calls.append(1)
        if len(calls) == batch + 1:
            raise error
        done.extend(questions)
        return answer(model, questions, ends, new)

    patch.setattr(responses, "answer", stopped)
    return done


@pytest.mark.parametrize("batches", [0, 1, 5, 16, 22])
def test_interrupted_and_resumed(small, tmp_path, monkeypatch, capsys, batches):
    """Ctrl-C ends with status 130 and a file of what there is; what follows asks the rest alone, and ends at the same file."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        done = interrupt_at(patch, batches)
        write_responses(*loaded(small), tmp_path / "responses.pt", COUNT, NEW, batch=2)
    assert stop.value.code == 130 and f"stopped after {len(done)} of {COUNT} answers" in capsys.readouterr().out
    assert len(contents(tmp_path / "responses.pt")["keys"]) == len(done) < COUNT
    with monkeypatch.context() as patch:
        rest = interrupt_at(patch, 999)
        write_responses(*loaded(small), tmp_path / "responses.pt", COUNT, NEW, batch=2)
    assert contents(tmp_path / "responses.pt") == contents(small / "responses.pt")
    assert len(done) + len(rest) == COUNT and not {tuple(ids) for ids in done} & {tuple(ids) for ids in rest}
    with monkeypatch.context() as patch:                                                # a third time there is nothing to do
        assert interrupt_at(patch, 0) == []
        write_responses(*loaded(small), tmp_path / "responses.pt", COUNT, NEW, batch=2)


def test_a_crash_loses_little(small, tmp_path, monkeypatch):
    """The file is saved after each kind of prompt and every 20 batches."""
    for batch, kept in ((3, None), (4, 4), (33, 14), (34, 34)):
        path = tmp_path / f"{batch}.pt"
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            interrupt_at(patch, batch, ZeroDivisionError)
            write_responses(*loaded(small), path, COUNT, NEW, batch=1)
        assert (len(contents(path)["keys"]) if path.exists() else None) == kept


@pytest.mark.parametrize("change, named", [
    (dict(count=COUNT + 1), f"count {COUNT}"), (dict(new=NEW + 1), f"new {NEW}"), (dict(seed=1), "seed 0"), ("another", "of another model")])
def test_another_plan_is_refused(small, tmp_path, change, named):
    """What differs is named, nothing is asked, and the file stays as it is."""
    shutil.copy(small / "responses.pt", tmp_path)
    model, tokenizer = loaded(small, change if isinstance(change, str) else "tiny")
    plan = dict(count=COUNT, new=NEW, seed=0) | (change if isinstance(change, dict) else {})
    with pytest.raises(ValueError, match=rf"^--out .*responses.pt holds other answers \({named}\)") as refusal:
        write_responses(model, tokenizer, tmp_path / "responses.pt", **plan)
    assert "\n" not in str(refusal.value)
    assert (tmp_path / "responses.pt").read_bytes() == (small / "responses.pt").read_bytes() and len(list(tmp_path.iterdir())) == 1


def test_files_that_are_refused(small, tmp_path):
    model, _ = loaded(small)
    with pytest.raises(ValueError, match="--responses .*responses.pt was written by another model"):
        load_responses(small / "responses.pt", loaded(small, "another")[0])
    (tmp_path / "half.pt").write_bytes((small / "responses.pt").read_bytes()[:3000])
    (tmp_path / "empty.pt").write_bytes(b"")
    for file, message in ((tmp_path / "half.pt", "damaged"), (tmp_path / "empty.pt", "damaged"), (small / "tiny.pt", "not a file of this project's kind"),
                          (tmp_path / "nowhere.pt", "no such file")):
        with pytest.raises(ValueError, match=f"--responses .*{file.name}.*{message}"):
            load_responses(file, model)
        if file.exists():
            before = file.read_bytes()
            with pytest.raises(ValueError, match=f"--out .*{file.name}.*{message}"):
                ResponseFile(file, {})
            assert file.read_bytes() == before


def test_answers_are_the_same_in_every_dtype_of_the_base(small):
    """The file belongs to the weights, not to the dtype they were loaded in."""
    for dtype in (torch.float32, torch.bfloat16):
        assert len(load_responses(small / "responses.pt", load_checkpoint(small / "tiny.pt", dtype)[0])) == COUNT


def test_a_context_without_room_for_prompts(small, tmp_path):
    with pytest.raises(ValueError, match="--new 65 leaves no room for prompts in a context of 128 tokens"):
        write_responses(*loaded(small), tmp_path / "responses.pt", COUNT, 65)
    assert not list(tmp_path.iterdir())


def test_wrap(small):
    """In the chat template of a model that has one; other models go on with the text, in two new lines."""
    pytest.importorskip("jinja2")
    tokenizer = load_tokenizer(small / "tiny.tiktoken")
    tokenizer.prefix = [7]
    assert responses.wrap(tokenizer, "Why?") == ([7] + tokenizer.encode_ordinary("Why?\n\n"), {4095})
    tokenizer.chat_template = "{% for message in messages %}<{{ message.content }}><|endoftext|>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    assert responses.wrap(tokenizer, "Why?") == (tokenizer.encode_ordinary("<Why?>") + [4095] + tokenizer.encode_ordinary("!"), {4095})


# ------------------------------------------------------------------------------------------ prompts that the model invents

CHAT = "{% for message in messages %}<{{ message.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.fixture
def chatting(small):
    """The tiny base with a chat template, and a tokenizer of which every sixteenth token ends what is said."""
    pytest.importorskip("jinja2")
    model, _ = loaded(small)
    tokenizer = load_tokenizer(small / "tiny.tiktoken")
    tokenizer.chat_template, tokenizer.end_tokens = CHAT, set(range(7, 4096, 16))
    return model, tokenizer


def test_half_of_the_prompts_are_invented(chatting, tmp_path):
    """They stand behind those from templates, as what a user says; a second run makes the same ones, so it can go on."""
    model, tokenizer = chatting
    write_responses(model, tokenizer, tmp_path / "responses.pt", COUNT, NEW)
    rows = load_responses(tmp_path / "responses.pt", model)
    invented = responses.invented_prompts(model, tokenizer, COUNT // 2, 128 - NEW, 0, responses.BATCH)
    assert len(rows) == COUNT and len(set(invented)) == COUNT // 2 and all(text and text == text.strip() for text in invented)
    for text, (tokens, prompt) in zip(prompts.passage_prompts(2) + [None] * 5 + prompts.standalone_prompts(13) + invented, rows, strict=True):
        if text is not None:
            assert tokens[:prompt].tolist() == responses.wrap(tokenizer, text)[0]


def test_invented_prompts_are_drawn_from_the_model(chatting, monkeypatch):
    """Behind the opening of the user's turn, from the model's own distribution at the temperature; a prompt ends before the end token."""
    model, tokenizer = chatting
    opening, fed = responses.user_opening(tokenizer), []
    plain = responses.answer

    def watch(model, prompts, ends, new, choose):
        assert prompts == [opening] * 3 and ends == tokenizer.end_tokens | {4095}
        batch = plain(model, prompts, ends, new, choose)
        fed.extend(batch)
        return batch

    monkeypatch.setattr(responses, "answer", watch)
    found = responses.invented_prompts(model, tokenizer, 10, 40, 1, batch=3)
    whole = [row for row in fed if row[-1] in tokenizer.end_tokens | {4095}]
    texts = [text for text in (tokenizer.decode(row[:-1]).strip() for row in whole) if text]
    assert found == list(dict.fromkeys(texts))[:10] and found != responses.invented_prompts(model, tokenizer, 10, 40, 2, batch=3)
    assert max(map(len, fed)) <= 40 and len(whole) < len(fed)                          # some came to no end, and are left out


def test_what_is_drawn_follows_the_temperature(chatting, monkeypatch):
    """First tokens of many prompts against the softmax of the logits over the temperature: 4,000 draws, the 20 likeliest tokens."""
    _, tokenizer = chatting
    model = make_model("rotary", 0, vocab_size=4096, n_embd=16, n_layer=3, block_size=128)
    model.embedding.weight.data[:20] *= 40                                              # a distribution that is far from flat
    opening, first = responses.user_opening(tokenizer), []
    logits = model(torch.tensor([opening]), torch.arange(len(opening)), causal_mask(len(opening)))[0, -1].float()
    expected = (logits / responses.TEMPERATURE).softmax(-1)
    assert (expected - logits.softmax(-1)).abs().max() > 0.05                           # the temperature can be told

    def once(model, prompts, ends, new, choose):
        first.extend(choose(logits.expand(len(prompts), 1, -1))[:, 0].tolist())
        raise InterruptedError

    monkeypatch.setattr(responses, "answer", once)
    with pytest.raises(InterruptedError):
        responses.invented_prompts(model, tokenizer, 1, 40, 0, batch=4000)
    for token in expected.topk(20).indices.tolist():
        chance = expected[token].item()
        assert abs(first.count(token) / 4000 - chance) < 5 * math.sqrt(chance / 4000)


def test_a_model_that_invents_nothing_new(chatting, monkeypatch, tmp_path):
    """Without chance it says the same again and again, or never comes to an end: that is said, and what was answered is kept."""
    model, tokenizer = chatting
    monkeypatch.setattr(responses, "TEMPERATURE", 1e-6)
    with pytest.raises(ValueError, match="^--checkpoint invents no prompts that end within 122 tokens"):
        write_responses(model, tokenizer, tmp_path / "responses.pt", COUNT, NEW, batch=2)
    assert len(contents(tmp_path / "responses.pt")["keys"]) == COUNT // 2


# ------------------------------------------------------------------------------------------ prompts

DRAWS = {"standalone": prompts.standalone_prompts, "passages": prompts.passage_prompts,
         "about": functools.partial(prompts.prompts_about, ["First passage.", "Second {passage}.", "Third."])}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_prompts(draw):
    """As many as asked for, all different, decided by the seed alone, and no gap of a template is left open."""
    texts = draw(600)
    assert len(texts) == len(set(texts)) == 600 and draw(0) == []
    random.random()
    assert draw(600, 0) == texts and draw(100) == texts[:100]
    for other in (draw(600, 1), draw(600, 2)):
        assert len(set(other) & set(texts)) < 300
    for text in texts:
        assert text == text.strip("\n") and not re.search(r"[{}]", text.replace("{passage}", "")), text


def test_prompts_of_every_kind():
    """Each kind has its share, and every template of it can be filled."""
    rng, names = random.Random(0), dict(prompts.SHARES)
    for kind in names:
        assert len({prompts.single_prompt(kind, rng) for _ in range(300)}) > 100
    kinds = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "single_prompt", lambda kind, rng: kinds.append(kind) or f"{kind} {len(kinds)}")
        prompts.standalone_prompts(4000)
    for kind, count in Counter(kinds).items():
        assert count / 4000 == pytest.approx(names[kind] / sum(names.values()), abs=0.02)
    assert set(kinds) == set(names)


def test_prompts_about_passages_hold_them():
    passages = ["First passage.", "Second passage.", "Third."]
    texts = prompts.prompts_about(passages, 200)
    assert all(any(passage in text for passage in passages) for text in texts)
    assert {sum(text.count(passage) for passage in passages) for text in texts} >= {1, 2, 3}


# ------------------------------------------------------------------------------------------ train.py

def learn(small, out, *more) -> tuple[int, str, str]:
    """train.py in this process: (exit status, stdout, stderr)."""
    usual = ["--checkpoint", small / "tiny.pt", "--responses", small / "responses.pt", "--out", out, "--transfer-layers", "1,2", "--steps", 6,
             "--accumulate", 2, "--warm-start-tokens", 60, "--device", "cpu", "--autocast", "off"]
    printed, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        patch.setattr(sys, "argv", ["train.py", *map(str, usual), *map(str, more)])
        patch.setattr(train, "plot_training", lambda *_: None)                          # the picture is for test_training.py
        patch.setattr(train.evaluate, "__defaults__", ((1, 4, 16),))
        try:
            run(train.main)
            status = 0
        except SystemExit as stop:
            status = stop.code
    return status, printed.getvalue(), errors.getvalue()


def state_of(out) -> dict:
    return load_file(out / "transfer-state.pt", "transfer-state", "state")


def same_maps(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    status, printed, errors = learn(small, out)
    assert status == 0, errors
    return out, printed


def test_what_a_run_writes(trained, small):
    out, printed = trained
    assert sorted(file.name for file in out.iterdir()) == ["transfer-state.pt", "transfer.pt"]
    transfer, notes = load_transfer(out / "transfer.pt", load_checkpoint(small / "tiny.pt")[0])
    assert transfer.layers == [1, 2] and set(notes["tokens_per_pass"]) == {1, 4, 16} and len(notes["acceptance"]) == 2
    assert printed.count("2 held-out prompts, at most 6 new tokens each") == 2
    state = state_of(out)
    assert [step for step, _ in state["history"]] == list(range(6)) and state["plan"]["responses"] == str(small / "responses.pt")


def test_a_few_answers_are_learned_by_heart(small, tmp_path):
    """The loss falls, and held-out answers, which are the same few here, take fewer passes than after the warm start."""
    model, _ = loaded(small)
    few = [row for row in load_responses(small / "responses.pt", model) if len(row.tokens) - row.prompt == NEW][:4]
    few = [Response(torch.tensor((ids := tokens[:prompt].tolist()) + answer(model, [ids], set(), 20)[0]), prompt) for tokens, prompt in few]
    save_responses(tmp_path / "few.pt", model, few * 20)
    status, printed, errors = learn(small, tmp_path, "--responses", tmp_path / "few.pt", "--steps", 80, "--lr", 0.01)
    assert status == 0, errors
    losses = [loss for _, loss in state_of(tmp_path)["history"]]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    before, after = ([float(cell) for cell in line.split()[1:]] for line in printed.splitlines() if line.startswith("tokens   "))
    assert all(a >= b for a, b in zip(after, before)) and after[-1] > 1.1 * before[-1]


def test_interrupted_training_is_resumed(trained, small, tmp_path, monkeypatch):
    """To the bit the maps of an uninterrupted run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = FromResponses.draw
    with monkeypatch.context() as patch:
        patch.setattr(FromResponses, "draw", lambda self, step, micro: (signal.raise_signal(signal.SIGINT) if (step, micro) == (2, 1) else None)
                      or draw(self, step, micro))
        assert learn(small, tmp_path)[0] == 130
    signal.signal(signal.SIGINT, before)
    assert state_of(tmp_path)["step"] == 3
    assert learn(small, tmp_path, "--resume")[0] == 0
    whole, parts = state_of(trained[0]), state_of(tmp_path)
    assert same_maps(whole["module"], parts["module"]) and whole["history"] == parts["history"]


def test_keeping_less_changes_nothing(trained, small, tmp_path):
    assert learn(small, tmp_path, "--keep-gb", 0)[0] == 0
    assert same_maps(state_of(trained[0])["module"], state_of(tmp_path)["module"])


def test_resuming_on_other_answers_is_refused(trained, small, tmp_path):
    shutil.copytree(trained[0], tmp_path / "out")
    shutil.copy(small / "responses.pt", tmp_path / "others.pt")
    status, _, errors = learn(small, tmp_path / "out", "--resume", "--responses", tmp_path / "others.pt")
    assert status == 2 and "--resume" in errors and "--responses" in errors


def test_the_base_does_not_change(small, tmp_path, monkeypatch):
    model, tokenizer = load_checkpoint(small / "tiny.pt")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    monkeypatch.setattr(train, "load_checkpoint", lambda *_, **__: (model, tokenizer))
    assert learn(small, tmp_path)[0] == 0
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_autocast(small, tmp_path, monkeypatch):
    """bfloat16 where it is asked for, in what is kept too; the losses are close to those of float32, and the maps stay float32."""
    seen, kept, losses, teacher = [], [], {}, FromResponses.teacher
    monkeypatch.setattr(distillation, "distillation_loss", lambda target, drafts: seen.append(drafts.dtype) or distillation_loss(target, drafts))
    monkeypatch.setattr(FromResponses, "teacher", lambda *inputs: kept.append(teacher(*inputs)) or kept[-1])
    for autocast, dtype in (("off", torch.float32), ("on", torch.bfloat16)):
        assert learn(small, tmp_path / autocast, "--autocast", autocast, "--steps", 3)[0] == 0
        assert set(seen) == {dtype} and {one.rows.data.dtype for one in kept} == {dtype}
        assert all(p.dtype == torch.float32 for p in state_of(tmp_path / autocast)["module"].values())
        losses[autocast] = [loss for _, loss in state_of(tmp_path / autocast)["history"]]
        del seen[:], kept[:]
    assert losses["on"] == pytest.approx(losses["off"], rel=0.03) and losses["on"] != losses["off"]


def test_few_rows_through_a_wide_unembedding():
    """In a process of its own and with two threads: with matrices column by column this ends it, where there are bfloat16 units."""
    code = """
import torch
from distillation import matrices_in_bfloat16
from model import GPT, GPTConfig, lay_out_for_cpu
torch.set_num_threads(2)
model = lay_out_for_cpu(GPT(GPTConfig(vocab_size=49152, n_embd=576, n_head=9, n_layer=1)).requires_grad_(False))
fast, x = matrices_in_bfloat16(model), torch.randn(1, 32, 576, requires_grad=True)
with torch.autocast("cpu", torch.bfloat16):
    fast.unembed(x).float().square().mean().backward()
assert x.grad.isfinite().all() and x.grad.abs().max() > 0
assert all(part.weight.is_contiguous() for part in fast.modules() if isinstance(part, torch.nn.Linear))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=BASE.parent.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_sweep(small, tmp_path):
    status, printed, _ = learn(small, tmp_path, "--sweep")
    rows = [line.split() for line in printed.splitlines() if line.split() and line.split()[0].isdigit()]
    assert status == 0 and [int(row[0]) for row in rows] == [0, 1, 2] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, named", [
    (["--checkpoint", "{}/another.pt"], "was written by another model"), (["--checkpoint", "{}/bare.pt", "--responses", "{}/none.pt"], "without a tokenizer"),
    (["--responses", "{}/tiny.pt"], "--responses"), (["--responses", "{}/tiny.tiktoken"], "--responses"),
    (["--stage", "medusa", "--loss", "own"], "--loss own is the cross-entropy on text")])
def test_refusals(small, tmp_path, arguments, named):
    status, _, errors = learn(small, tmp_path, *[part.format(small) for part in arguments])
    assert status == 2 and errors.startswith("error: ") and errors.count("\n") == 1 and named in errors
    assert not list(tmp_path.iterdir()) and not (small / "none.pt").exists()


def test_a_file_of_too_few_answers(small, tmp_path):
    model, _ = loaded(small)
    for rows in ([], load_responses(small / "responses.pt", model)[:1]):
        save_responses(tmp_path / "few.pt", model, rows)
        status, _, errors = learn(small, tmp_path / "out", "--responses", tmp_path / "few.pt")
        assert status == 2 and "holds too few answers" in errors and errors.count("\n") == 1


def test_no_tokenizer_is_needed_for_answers_that_are_there(trained, small, tmp_path):
    assert learn(small, tmp_path, "--checkpoint", small / "bare.pt")[0] == 0
    assert same_maps(state_of(trained[0])["module"], state_of(tmp_path)["module"])


def few_answers(patch):
    """Let train.py ask for fewer and shorter answers than it would."""
    patch.setattr(distillation, "write_responses", functools.partial(write_responses, count=COUNT, new=NEW))


def test_answers_that_are_not_there_are_written_first(trained, small, tmp_path, monkeypatch):
    few_answers(monkeypatch)
    status, printed, errors = learn(small, tmp_path / "out", "--responses", tmp_path / "new.pt")
    assert status == 0 and f"{COUNT} answers with" in printed, errors
    model, _ = load_checkpoint(small / "tiny.pt")
    rows = load_responses(tmp_path / "new.pt", model)
    assert len(rows) == COUNT and all(0 < len(tokens) - prompt <= NEW for tokens, prompt in rows)
    with monkeypatch.context() as patch:                                                # and not asked again
        patch.setattr(distillation, "write_responses", None)
        assert learn(small, tmp_path / "again", "--responses", tmp_path / "new.pt")[0] == 0
    assert same_maps(state_of(tmp_path / "out")["module"], state_of(tmp_path / "again")["module"])


def test_answers_that_were_interrupted_are_completed(small, tmp_path, monkeypatch):
    """train.py stopped while the answers are written goes on with them: the same command, as it says."""
    few_answers(monkeypatch)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        status, printed, _ = learn(small, tmp_path / "out", "--responses", tmp_path / "new.pt")
    assert status == 130 and "the same command goes on" in printed and not (tmp_path / "out" / "transfer.pt").exists()
    assert 0 < len(contents(tmp_path / "new.pt")["keys"]) < COUNT
    assert learn(small, tmp_path / "out", "--responses", tmp_path / "new.pt")[0] == 0
    assert len(contents(tmp_path / "new.pt")["keys"]) == COUNT


@pytest.mark.parametrize("chat", [True, False])
def test_a_model_that_chats_learns_from_answers(small, tmp_path, monkeypatch, chat):
    """Unless it is given text; a model without a template learns from text."""
    few_answers(monkeypatch)
    seen = []
    model, tokenizer = load_checkpoint(small / "tiny.pt")
    tokenizer.chat_template = "a template" if chat else None
    monkeypatch.setattr(train, "load_checkpoint", lambda *_, **__: (model, tokenizer))

    class Stop(Exception):
        pass

    def stop(kind):
        def lessons(model, tokenizer, args, steps):
            seen.append((kind, args.responses, args.steps, args.batch, args.accumulate, args.lr))
            raise Stop
        return lessons

    monkeypatch.setattr(train, "FromText", stop("text"))
    monkeypatch.setattr(train, "FromResponses", stop("responses"))
    for more in ([], ["--data", str(tmp_path)], ["--responses", "some.pt"], ["--steps", "7", "--lr", "0.5"]):
        monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path), "--device", "cpu", *more])
        with pytest.raises(Stop):
            train.main()
    text, answers = ("text", None, 300, 2, 4, 3e-3), ("responses", str(tmp_path / "responses.pt"), 200, 1, 8, 1e-3)
    assert seen[0] == (answers if chat else text) and seen[1] == text and seen[2] == ("responses", "some.pt", *answers[2:])
    assert seen[3] == (answers[:2] + (7, 1, 8, 0.5) if chat else text[:2] + (7, 2, 4, 0.5))


# ------------------------------------------------------------------------------------------ the command line

def test_the_command_line(small, tmp_path):
    """responses.py writes what it says, and goes on after an interrupt."""
    def ask(*more):
        usual = ["--checkpoint", small / "tiny.pt", "--out", tmp_path / "deep" / "answers.pt", "--count", 20, "--new", 4, "--batch", 2,
                 "--device", "cpu", "--dtype", "float64"]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            patch.setattr(sys, "argv", ["responses.py", *map(str, usual), *map(str, more)])
            if "--interrupted" in more:
                patch.setattr(sys, "argv", sys.argv[:-1])
                interrupt_at(patch, 4)
            try:
                run(responses.main)
                return 0, out.getvalue(), err.getvalue()
            except SystemExit as stop:
                return stop.code, out.getvalue(), err.getvalue()

    status, printed, _ = ask("--interrupted")
    assert status == 130 and re.search(r"stopped after \d+ of 20 answers", printed)
    status, printed, _ = ask()
    rows = load_responses(tmp_path / "deep" / "answers.pt", load_checkpoint(small / "tiny.pt")[0])
    assert status == 0 and f"20 answers with {sum(len(tokens) - prompt for tokens, prompt in rows)} tokens" in printed and len(rows) == 20
    for arguments, named in ((["--new", 5], "new 4"), (["--checkpoint", small / "bare.pt"], "no tokenizer"), (["--count", 0], "--count"),
                             (["--new", 100, "--out", tmp_path / "b.pt"], "leaves no room"), (["--checkpoint", small / "nowhere.pt"], "--checkpoint"),
                             (["--out", small / "tiny.pt" / "below.pt"], "--out"), (["--device", "warp"], "--device")):
        status, _, errors = ask(*arguments)
        assert status == 2 and errors.count("\n") == 1 and errors.startswith("error: ") and named in errors, arguments

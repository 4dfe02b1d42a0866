"""
The comparison: what its columns say is counted again by hand, on tiny models and drafters that know what they do; the
questions are read and cut as promised; bad input is one line.
"""
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import compare
import measure
import replay
import questions
from checkpoint import BASE, load_checkpoint, save_checkpoint, save_transfer
from compare import LiveMemory, category_table, lines_of, main_table, trained_parameters, weigh
from conftest import PROMPT, full_logits, make_model, make_transfer, plain
from drafters import HiddenTransferDrafter
from drafters_for_tests import Adversary, Oracle, chain_shape
from generate import generate
from questions import Question, encode_question, read_questions, spread
from sampler import Sampler
from test_cli import call

NEW = 20


@pytest.fixture(scope="module")
def tiny():
    """(model, questions of two categories, drafters: one that is always right on the first, one never, random maps)."""
    model = make_model("rotary")
    text = PROMPT + plain(model, PROMPT, 40)
    asked = [Question("code", PROMPT, set()), Question("prose", PROMPT[:3], set()), Question("code", PROMPT, set())]
    return model, asked, text, {"maps": HiddenTransferDrafter(make_transfer(model, [2, 3]), 6, sources=2)}


# ------------------------------------------------------------------------------------------ the columns

def test_the_counts_add_up(tiny):
    """tokens/pass is one more than the sum of the accepted shares, and what generate counts."""
    model, asked, _, drafters = tiny
    report = compare.compare(model, drafters, asked, NEW, rounds=2)
    runs = [generate(model, question.ids, drafters["maps"], max_new_tokens=NEW) for question in asked]
    assert report["maps"]["mean_accepted_tokens"] == sum(run.new_tokens for run in runs) / sum(run.forward_passes for run in runs) > 1
    for r in report.values():
        assert r["mean_accepted_tokens"] == pytest.approx(1 + sum(r["accepted_by_depth"]), abs=1e-12)
        assert r["tokens_per_second"] > 0 and r["differ"] == 0 and r["largest_gap"] is None


def test_plain_decoding_is_the_unit(tiny):
    """By the same counter: 1.00 tokens a pass, one row a pass, exactly as fast as itself, nothing trained."""
    model, asked, _, _ = tiny
    r = compare.compare(model, {}, asked, NEW, rounds=2)["plain"]
    assert r["mean_accepted_tokens"] == 1.0 and r["accepted_by_depth"] == [] and r["trained_parameters"] == 0
    assert r["ratio"] == {"median": 1.0, "lower_quartile": 1.0, "upper_quartile": 1.0}
    assert r["rows_per_pass"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("drafter, accepted", [(Oracle, [0.8] * 3), (Adversary, [])])
def test_acceptance_by_depth(tiny, drafter, accepted):
    """A chain of 3 that is always right: 1 token by the prefill, then 4 a pass, so 17 tokens are 5 passes; never right: 17 passes."""
    model, asked, text, _ = tiny
    r = compare.compare(model, {"chain": drafter(text, chain_shape(3))}, asked[:1], 17, rounds=1)["chain"]
    assert r["accepted_by_depth"] == pytest.approx(accepted)
    assert r["mean_accepted_tokens"] == (17 / 5 if accepted else 1.0)
    assert r["rows_per_pass"] == pytest.approx(17 / 5 if accepted else (1 + 4 * 13 + 3 + 2 + 1) / 17)    # near the end chains are shorter


def test_rows_of_pseudo_rows(tiny):
    """Maps at blocks 2 and 3 of 4, 2 sources: in a pass over a tree 6 nodes, and 2 rows in the last two blocks and 2 in the last;
    where a node without pseudo rows is the last accepted one, its own 2 rows are computed afterwards."""
    model, _, _, _ = tiny
    passes, drafter = [], HiddenTransferDrafter(make_transfer(model, [2, 3]), 6, sources=2)
    run = generate(model, PROMPT, drafter, max_new_tokens=NEW, on_pass=passes.append)
    fed = [len(one.tree) for one in passes]
    rows = sum(nodes + min(2, nodes) * (2 / 4 + 1 / 4) for nodes in fed) + sum(one.path[-1] >= 2 for one in passes[:-1]) * (2 / 4 + 1 / 4)
    got, _ = weigh(model, drafter, [Question("", PROMPT, set())], NEW, Sampler())
    assert got == pytest.approx(rows / run.forward_passes) and max(fed) == 6
    afterwards, _ = weigh(model, HiddenTransferDrafter(make_transfer(model, [2, 3]), 6), [Question("", PROMPT, set())], NEW, Sampler())
    assert afterwards < got                                     # 0.75 rows for the accepted node instead of two sources' 1.5
    assert not any(block.mlp._forward_hooks for block in model.blocks)


def test_trained_parameters(tiny):
    model, _, _, drafters = tiny
    assert trained_parameters(model, drafters["maps"]) == 2 * (32 * 32 + 32)
    assert trained_parameters(model, SimpleNamespace(draws=model, number=3)) == 0                   # the model itself is not counted
    assert trained_parameters(model, SimpleNamespace(small=make_model("rotary", seed=1))) == sum(p.numel() for p in model.parameters())


@torch.inference_mode()
def test_live_memory():
    """Weights, then the most that is alive at one time: views cost nothing, what is dropped is given back."""
    linear = torch.nn.Linear(100, 100, bias=False)
    with LiveMemory([linear]) as memory:
        x = torch.zeros(10, 100)
        assert memory.now == 40_000 + 4_000
        y = x.view(5, 200).t() + 1
        y.mul_(2)
        linear.weight[0].sum()
        del x
        z = torch.zeros(500, dtype=torch.float64)
        assert memory.now == 40_000 + 4_000 + 4_000
        del y, z
    assert memory.peak == 40_000 + 8_000 + 4 and memory.now == 40_000          # x, y and the sum


def test_memory_counts_what_a_method_brings(tiny):
    model, asked, _, drafters = tiny
    peaks = {name: weigh(model, drafter, asked, NEW, Sampler())[1] for name, drafter in [("plain", None), *drafters.items()]}
    weights = sum(p.numel() * 8 for p in model.parameters())
    assert peaks["plain"] > weights and peaks["maps"] >= peaks["plain"] + 2 * (32 * 32 + 32) * 8


def test_ratio_and_its_middle_half(tiny, monkeypatch):
    """Twice as slow in one round, four times as fast in the other: the ratios are those of tokens/s, run by run."""
    model, asked, _, _ = tiny
    seconds = iter([1, 1, 1, 1] + [1, 2] * 3 + [1, 0.25] * 3)

    def decode(model, prompt, drafter, sampler, max_new_tokens, end_token):
        run = generate(model, prompt, None, sampler, max_new_tokens, end_token)
        run.seconds = next(seconds)
        run.tokens_per_second = run.new_tokens / run.seconds
        return run

    monkeypatch.setattr(measure, "generate", decode)
    monkeypatch.setattr(compare, "weigh", lambda *_: (1.0, 1))
    ratio = compare.compare(model, {"other": Adversary(PROMPT, chain_shape(1))}, asked, NEW, rounds=2)["other"]["ratio"]
    assert ratio == {"median": pytest.approx(2.25), "lower_quartile": pytest.approx(0.5), "upper_quartile": pytest.approx(4.0)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_that_differ_are_counted_with_the_gap(tiny, monkeypatch, temperature):
    """One of three outputs is changed at its fifth token: the gap is that between what plain decoding chose and its runner-up."""
    model, asked, _, drafters = tiny
    sampler = Sampler(temperature, seed=4)

    def decode(model, prompt, drafter, sampler, max_new_tokens, end_token):
        run = generate(model, prompt, drafter, sampler, max_new_tokens, end_token)
        if drafter is not None and prompt == PROMPT[:3]:
            run.token_ids[4] += 1
        return run

    monkeypatch.setattr(measure, "generate", decode)
    r = compare.compare(model, drafters, asked, NEW, 1, sampler)["maps"]
    tokens = PROMPT[:3] + generate(model, PROMPT[:3], None, sampler, 4).token_ids
    scores = full_logits(model, tokens)[-1]
    if temperature:
        scores = torch.log_softmax(scores / temperature, 0) + sampler.noise(len(tokens), len(scores))
    best, second = scores.sort(descending=True).values[:2].tolist()
    assert r["differ"] == 1 and r["largest_gap"] == pytest.approx(best - second, rel=1e-9)


def test_categories(tiny):
    """Each category has the figures of its own prompts, and a row in the table; the last row is over all."""
    model, asked, _, drafters = tiny
    report = compare.compare(model, drafters, asked, NEW, rounds=1)
    for category, there in (("code", [asked[0], asked[2]]), ("prose", [asked[1]])):
        alone = compare.compare(model, drafters, there, NEW, rounds=1)["maps"]
        r = report["maps"]["categories"][category]
        assert r["mean_accepted_tokens"] == alone["mean_accepted_tokens"] and r["prompts"] == len(there)
    table = category_table(report)
    assert [row[:2] for row in table] == [["category", "prompts"], ["code", "2"], ["prose", "1"], ["overall", "3"]]
    assert table[-1][2].startswith(f"{report['maps']['mean_accepted_tokens']:.2f}, ")
    assert [row[0] for row in main_table(report)] == ["method", "plain", "maps"]
    assert lines_of([["a", "b"], ["c", "1"]], True) == "| a | b |\n| --- | --- |\n| c | 1 |"


# ------------------------------------------------------------------------------------------ the questions

@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny base with a tokenizer, its maps and another base's, and questions."""
    folder = tmp_path_factory.mktemp("compare")
    shutil.copy(BASE.parent / "base.tiktoken", folder / "tiny.tiktoken")
    shape = dict(vocab_size=4096, n_embd=32, n_layer=3, block_size=96)
    model = make_model("rotary", **shape)
    save_checkpoint(model, folder / "tiny.pt", "tiny.tiktoken")
    save_checkpoint(model, folder / "bare.pt", None)
    model, _ = load_checkpoint(folder / "tiny.pt")
    save_transfer(make_transfer(model, [1, 2]), model, folder / "maps.pt")
    other = make_model("rotary", seed=1, **shape)
    save_transfer(make_transfer(other, [1, 2]), other, folder / "other maps.pt")
    asked = [{"question_id": n, "category": category, "turns": [f"def f{n}(x): return " + "x + " * 10 * n, "again"]}
             for n, category in enumerate(["code", "math", "code", "math", "math"], start=1)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(question) + "\n" for question in asked) + "\n")
    for name, lines in {"broken": json.dumps(asked[0]) + "\n\n{oops\n", "turnless": json.dumps(asked[0]) + '\n{"question_id": 2, "category": "a"}\n',
                        "no text": '{"question_id": 1, "category": "a", "turns": []}', "list": "[1]", "nameless": '{"turns": ["a"]}',
                        "empty": "", "blank": "\n \n"}.items():
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "latin.jsonl").write_bytes("é".encode("latin-1"))
    return folder


def command(files, *arguments):
    return call(compare.main, "--checkpoint", files / "tiny.pt", "--transfer", files / "maps.pt", "--methods", "hidden-transfer", "--rounds", 1,
                "--max-new-tokens", 8, "--tree-size", 4, "--device", "cpu", "--dtype", "float64", *arguments)


def test_all_questions_by_default(files):
    status, out, _ = command(files, "--questions", files / "asked.jsonl", "--json", "--plot", files / "plot.png")
    report = json.loads(out)
    assert status == 0 and report["prompts"] == 5 and report["tree_sizes"] == [4] and report["dtype"] == "float64"
    assert list(report["methods"]) == ["plain", "hidden-transfer"]
    for r in report["methods"].values():
        assert {name: c["prompts"] for name, c in r["categories"].items()} == {"code": 2, "math": 3} and r["differ"] == 0
    assert report["methods"]["hidden-transfer"]["trained_parameters"] == 2 * (32 * 32 + 32)
    assert (files / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_several_tree_sizes_and_a_few_questions_of_each_category(files):
    """A row for each method and size; of three questions on mathematics and two on code, two and two."""
    status, out, _ = command(files, "--questions", files / "asked.jsonl", "--per-category", 2, "--tree-size", "2,5", "--json")
    report = json.loads(out)
    assert status == 0 and report["tree_sizes"] == [2, 5] and list(report["methods"]) == ["plain", "hidden-transfer, 2 nodes", "hidden-transfer, 5 nodes"]
    for r in report["methods"].values():
        assert {category: of["prompts"] for category, of in r["categories"].items()} == {"code": 2, "math": 2} and r["differ"] == 0
    assert report["methods"]["hidden-transfer, 2 nodes"]["rows_per_pass"] < report["methods"]["hidden-transfer, 5 nodes"]["rows_per_pass"]


def test_one_category_in_markdown(files):
    status, out, _ = command(files, "--questions", files / "asked.jsonl", "--category", "math", "--prompts", 2, "--markdown", "--temperature", 0.7)
    assert status == 0 and "2 prompts, 8 new tokens" in out and "temperature 0.7" in out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows] == ["method", "---", "plain", "hidden-transfer", "category", "---", "math", "overall"]
    assert rows[2][1] == "1.00" and rows[2][7] == "1.00 (1.00 to 1.00)" and rows[3][8] == "0"


def test_held_out_text_by_default(files, monkeypatch):
    """Cut as replay.py cuts it."""
    text = (BASE.parent.parent / "measure.py").read_text(encoding="utf-8")
    monkeypatch.setattr(questions, "read_corpus", lambda: ([], [text]))
    _, tokenizer = load_checkpoint(files / "tiny.pt")
    got = questions.gather(SimpleNamespace(questions=None, chat=False, category=None, per_category=None, prompts=3), None, tokenizer)
    stream = questions.encode_texts([text], tokenizer)
    assert [question.ids for question in got] == replay.cut_prompts(stream, 3)
    assert command(files, "--prompts", 2)[0] == 0


@pytest.mark.parametrize("arguments, error", [
    (["--questions", "broken"], "line 3: not JSON"),
    (["--questions", "turnless"], "line 2: no turns"),
    (["--questions", "no text"], "line 1: no turns"),
    (["--questions", "list"], "line 1: no turns"),
    (["--questions", "nameless"], "line 1: no category"),
    (["--questions", "empty"], "the file holds no questions"),
    (["--questions", "blank"], "the file holds no questions"),
    (["--questions", "latin"], "not UTF-8 text"),
    (["--questions", "gone"], "No such file"),
    (["--questions", "asked", "--category", "code,maths"], "--category maths: there is none"),
    (["--questions", "asked", "--chat"], "without a chat template"),
    (["--questions", "asked", "--max-new-tokens", "97"], "leaves no room for a prompt"),
    (["--category", "code"], "--category is for --questions"),
    (["--per-category", "2"], "--per-category is for --questions"), (["--tree-size", "8,none"], "--tree-size none: "), (["--tree-size", ""], "--tree-size"),
    (["--chat"], "--chat is for --questions"),
    (["--questions", "asked", "--methods", "medusa,nonsense"], "--methods"),
    (["--questions", "asked", "--transfer", "other maps.pt"], "was trained for another base model"),
    (["--questions", "asked", "--checkpoint", "bare.pt"], "comes without a tokenizer"),
    (["--questions", "asked", "--tree-size", "0"], "--tree-size 0"),
    (["--questions", "asked", "--temperature", "-1"], "--temperature -1.0"),
    (["--questions", "asked", "--rounds", "0"], "--rounds"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line(files, arguments, error):
    paths = {"--questions": lambda name: files / f"{name}.jsonl", "--transfer": lambda name: files / name, "--checkpoint": lambda name: files / name}
    arguments = [paths[before](value) if before in paths else value for before, value in zip([None, *arguments], arguments)]
    status, out, err = command(files, *arguments)
    assert status == 2 and out == "" and len(err.splitlines()) == 1 and err.startswith("error: ") and error in err


class Letters:
    """A tokenizer of one token a letter, with a chat template of three tokens in front and one behind."""
    prefix, end_tokens, eot_token, n_vocab = [1], {2}, 2, 256

    def encode_ordinary(self, text):
        return list(text.encode())


@pytest.mark.parametrize("length", [1, 9, 10, 11, 50, 3000])
@pytest.mark.parametrize("chat", [True, False])
def test_long_questions_are_cut_at_the_end(monkeypatch, length, chat):
    """The template stays whole; as much of the user's text is kept as fits, or nearly."""
    monkeypatch.setattr(questions, "chat_prompt", lambda tokenizer, text: ([1, 2, 3, *text.encode(), 4], {7}))
    text = "".join(chr(97 + n % 26) for n in range(length))
    ids, ends = encode_question(Letters(), text, chat, 14)
    before, behind = ([1, 2, 3], [4]) if chat else ([1], [])
    kept = ids[len(before):len(ids) - len(behind)]
    assert ids[:len(before)] == before and ids[len(ids) - len(behind):] == behind and ends == ({7} if chat else {2})
    assert bytes(kept).decode() == text[:len(kept)] and len(kept) >= min(length, 14 - len(before) - len(behind) - 3)


def test_a_template_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(questions, "chat_prompt", lambda tokenizer, text: ([1] * 20 + list(text.encode()), set()))
    with pytest.raises(ValueError, match="the template alone is longer than the 14 tokens"):
        encode_question(Letters(), "hello", True, 14)


def test_spread():
    assert spread(list(range(10)), 4) == [0, 2, 5, 7] and spread([1, 2], 5) == [1, 2] and spread([1, 2, 3], None) == [1, 2, 3]


def test_answers_stop_at_their_end_tokens(tiny):
    """Both sides stop there, so the tokens are counted alike."""
    model, _, text, drafters = tiny
    end = text[len(PROMPT) + 6]
    stop = text.index(end, len(PROMPT)) - len(PROMPT) + 1
    report = compare.compare(model, drafters, [Question("", PROMPT, {end})], NEW, rounds=1)
    run = generate(model, PROMPT, drafters["maps"], max_new_tokens=NEW, end_token=end)
    assert run.new_tokens == stop and report["maps"]["mean_accepted_tokens"] == run.mean_accepted_tokens and report["maps"]["differ"] == 0


def test_reading_questions(files):
    assert [category for category, _ in read_questions(files / "asked.jsonl")] == ["code", "math", "code", "math", "math"]
    assert read_questions(files / "asked.jsonl")[0][1].startswith("def f1(x)")

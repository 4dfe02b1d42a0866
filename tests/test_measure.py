"""
Measuring: the replay that gives tokens per pass equals real decoding, the tables equal slow counts, the choice of a
tree size and the paired speeds do what they say. Numbers in brackets, as in [31], are those of the project's list of
pitfalls.
"""
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import measure
from closed_form import RidgeSums
from conftest import KINDS, PROMPT, VOCAB, full_logits, make_model, make_transfer, plain, slow_forward
from drafters import HiddenTransferDrafter, rank_drafts
from generate import generate
from hidden_transfer import HiddenTransfer
from measure import choose_tree_size, exactness, paired_speed, profile
from replay import (accepted_depths, acceptance_by_rank, agreement, continue_greedily, cut_prompts, draft_whole, even_windows, replay,
                    tokens_per_pass)
from sampler import Sampler
from tree import best_first

START, NEW = 5, 30


@pytest.fixture(scope="module", params=KINDS)
def measured(request):
    """(model, prompts, their greedy continuations (B, START + NEW), maps(layers)); the maps are fitted to such
    continuations, so that a good part of the drafts is accepted."""
    model, chance = make_model(request.param), random.Random(1)
    prompts = [[chance.randrange(VOCAB) for _ in range(START)] for _ in range(30)]
    sequences = continue_greedily(model, prompts, NEW)
    sums = RidgeSums(model.config, 3)
    sums.add(model, sequences)
    return model, prompts[:8], sequences[:8], lambda layers: sums.fill(HiddenTransfer(model.config, layers).double()).requires_grad_(False)


def responses(sequences, prompt=START):
    """Rows of (B, T) as replay.py takes them: each with the length of its prompt."""
    return [(row, prompt) for row in sequences]


# ------------------------------------------------------------------------------------------ the replay

def really_decoded(model, transfer, prompts, size):
    runs = [generate(model, prompt, HiddenTransferDrafter(transfer, size), max_new_tokens=NEW) for prompt in prompts]
    return sum(run.new_tokens for run in runs) / sum(run.forward_passes for run in runs)


@pytest.mark.parametrize("layers", [[2], [2, 2, 2], [1, 2, 3]], ids=str)
def test_tokens_per_pass_are_those_of_real_decoding(measured, layers):
    """To 1e-12: towards the end too, where there are fewer steps to draft and the whole tree is spent on them."""
    model, prompts, sequences, maps = measured
    transfer, sizes = maps(layers), (1, 2, 3, 4, 8, 16, 32)
    table = tokens_per_pass(model, transfer, responses(sequences), sizes, NEW)
    assert list(table) == list(sizes)
    for size in sizes:
        assert table[size] == pytest.approx(really_decoded(model, transfer, prompts, size), abs=1e-12), size
    assert table[sizes[-1]] > 1.1                               # otherwise nothing was tested


def test_tokens_per_pass_of_large_trees(measured):
    """With maps so poor that the true token often has a rank beyond 32."""
    model, prompts, sequences, _ = measured
    transfer = make_transfer(model, [2])
    assert tokens_per_pass(model, transfer, responses(sequences), (48,), NEW)[48] == pytest.approx(really_decoded(model, transfer, prompts, 48), abs=1e-12)


def test_one_new_token_is_one_pass(model):
    """The prefill alone: 1.00 whatever the tree."""
    sequences = continue_greedily(model, [PROMPT], 1)
    assert tokens_per_pass(model, make_transfer(model, [2, 2]), responses(sequences, len(PROMPT)), (1, 4), 1) == {1: 1.0, 4: 1.0}


@pytest.mark.parametrize("layers", [[2, 2, 2], [1, 2, 3]], ids=str)
def test_replay_of_responses_that_end(measured, layers):
    """A response that came to its end token before `new` tokens takes as many passes as its decoding: trees are laid out
    for the room there still was."""
    model, prompts, sequences, maps = measured
    transfer, sizes, lengths = maps(layers), (1, 4, 16), set()
    for prompt, sequence in zip(prompts, sequences.tolist()):
        for end in dict.fromkeys(sequence[START + place] for place in (0, 1, 2, 4, 9, 15)):
            ended = generate(model, prompt, None, max_new_tokens=NEW, end_token=end).token_ids
            lengths.add(len(ended))
            passes = replay(model, transfer, torch.tensor(prompt + ended), START, sizes, NEW)
            for size, count in zip(sizes, passes):
                run = generate(model, prompt, HiddenTransferDrafter(transfer, size), max_new_tokens=NEW, end_token=end)
                assert run.token_ids == ended and run.forward_passes == count, (len(ended), size)
    assert 1 in lengths and len(lengths) >= 3 and max(lengths) > 6


def test_tokens_per_pass_of_several_responses(measured):
    """All tokens over all passes, with prompts and answers of different lengths."""
    model, prompts, sequences, maps = measured
    transfer, rows = maps([2, 2]), []
    for n, (prompt, sequence) in enumerate(zip(prompts[:4], sequences)):
        rows.append((sequence[:START + NEW - 6 * n], START + n))
    passes = [replay(model, transfer, tokens, prompt, (1, 8), NEW) for tokens, prompt in rows]
    emitted = sum(len(tokens) - prompt for tokens, prompt in rows)
    assert emitted == 30 + 23 + 16 + 9 and [row[0] for row in passes] == [30, 23, 16, 9]
    assert tokens_per_pass(model, transfer, rows, (1, 8), NEW) == {1: 1.0, 8: emitted / sum(row[1] for row in passes)}


def all_nodes(scores):
    """Every node of the full tree over the candidates, as a path of ranks, likeliest first."""
    nodes = [()]
    for d in range(1, len(scores) + 1):
        nodes += itertools.product(*(range(len(row)) for row in scores[:d]))
    return sorted(nodes, key=lambda path: -float(np.prod([scores[d][rank] for d, rank in enumerate(path)])))


@pytest.mark.parametrize("seed", range(20))
def test_accepted_depths_by_brute_force(seed):
    """A tree of n nodes holds the n likeliest paths; it is accepted as deep as the true path is among them."""
    chance = random.Random(seed)
    K, width, sizes = chance.choice([1, 2, 3]), chance.choice([2, 4]), (1, 2, 3, 5, 8, 20)
    scores = [sorted((chance.random() for _ in range(width)), reverse=True) for _ in range(K)]
    candidates = [chance.sample(range(6), width) for _ in range(K)]
    nodes = all_nodes(scores)
    for truth in ([chance.randrange(6) for _ in range(K)], [row[0] for row in candidates], [row[-1] for row in candidates],
                  [row[0] for row in candidates][:1], []):
        expected = []
        for size in sizes:
            tokens = {tuple(candidates[d][rank] for d, rank in enumerate(path)) for path in nodes[:size]}
            expected.append(max(d for d in range(K + 1) if tuple(truth[:d]) in tokens and d <= len(truth)))
        assert accepted_depths(scores, candidates, truth, sizes) == expected


@pytest.mark.parametrize("seed", range(5))
def test_trees_are_nested_by_size(seed):
    """A smaller best-first tree is the beginning of a larger one."""
    chance = random.Random(seed)
    scores = [sorted((chance.random() for _ in range(6)), reverse=True) for _ in range(3)]
    parents, ranks = best_first(scores, 64)
    for size in (1, 2, 3, 7, 16, 40):
        assert best_first(scores, size) == (parents[:size], ranks[:size])


def test_continue_greedily_equals_generate(measured):
    """One batch, a cache, one token at a time: what every prompt gives by itself."""
    model, prompts, sequences, _ = measured
    assert sequences.shape == (8, START + NEW)
    for prompt, sequence in zip(prompts, sequences.tolist()):
        assert sequence == prompt + generate(model, prompt, None, max_new_tokens=NEW).token_ids
    assert sequences[0].tolist() == prompts[0] + plain(model, prompts[0], NEW)


def test_cut_prompts():
    stream = np.arange(1000, dtype=np.uint16)
    prompts = cut_prompts(stream, 9, 20)
    starts = [prompt[0] for prompt in prompts]
    assert prompts == [list(range(start, start + 20)) for start in starts]
    assert len(prompts) == 9 and starts[0] == 0 and len({b - a for a, b in zip(starts, starts[1:])}) == 1 and starts[-1] > 800
    assert len(cut_prompts(stream, 50, 20)) == 50
    with pytest.raises(ValueError, match="--data: 1000 held-out tokens are too few for 51 prompts of 20"):
        cut_prompts(stream, 51, 20)


# ------------------------------------------------------------------------------------------ the tables

def slow_drafts(model, transfer, tokens):
    """Drafts of every row by the row-by-row reference: [row][step] -> tokens, likeliest first."""
    drafts = []
    for n in range(len(tokens)):
        _, pseudo = slow_forward(model, tokens[:n + 1], transfer)
        drafts.append([model.unembed(x).float().argsort(descending=True).tolist() for x in pseudo])
    return drafts


def test_agreement_by_counting(measured):
    """How often the model's argmax n + i + 1 places on is among the first r drafts that step i makes at row n."""
    model, _, sequences, maps = measured
    transfer, length = maps([1, 2, 3]), 9
    stream = sequences.flatten().numpy().astype(np.uint16)
    table = agreement(model, transfer, even_windows(stream, windows=3, length=length))
    texts = [stream[start:start + length].tolist() for start in (0, (len(stream) - length) // 2, len(stream) - length)]
    for i in (1, 2, 3):
        ranks = []
        for text in texts:
            own, drafts = full_logits(model, text).argmax(-1).tolist(), slow_drafts(model, transfer, text)
            ranks += [drafts[n][i - 1].index(own[n + i]) for n in range(length - i)]
        assert table[i - 1] == pytest.approx([sum(rank < top for rank in ranks) / len(ranks) for top in (1, 2, 3, 5, 10)])
    assert table[0][0] > 0


def test_agreement_over_answers_alone(measured):
    """Rows of the prompt are not counted, its last one is; all rows of all responses weigh the same."""
    model, _, sequences, maps = measured
    transfer, rows = maps([1, 2]), [(sequences[0, :12], 5), (sequences[1, :9], 3), (sequences[2, :4], 3)]
    table = agreement(model, transfer, rows)
    for i in (1, 2):
        ranks = []
        for tokens, prompt in rows:
            own, drafts = full_logits(model, tokens.tolist()).argmax(-1).tolist(), slow_drafts(model, transfer, tokens.tolist())
            ranks += [drafts[n][i - 1].index(own[n + i]) for n in range(prompt - 1, len(tokens) - i)]
        assert len(ranks) == 7 + 6 + 1 - 3 * (i - 1)
        assert table[i - 1] == pytest.approx([sum(rank < top for rank in ranks) / len(ranks) for top in (1, 2, 3, 5, 10)])


def test_draft_whole_from_a_row_on():
    """The rows from `first` on, one by one as decoding drafts from them; long sequences are read out in parts."""
    model = make_model("rotary", n_layer=2, block_size=600)
    transfer = make_transfer(model, [1, 0])
    tokens = torch.randint(VOCAB, (560,), generator=torch.Generator().manual_seed(0))
    x, pseudo, _ = transfer(model, tokens[None], torch.arange(560), torch.ones(560, 560, dtype=torch.bool).tril())
    scores, candidates, own = draft_whole(model, transfer, tokens, 4, first=20)
    assert len(scores) == len(candidates) == len(own) == 540
    for n in (20, 21, 275, 276, 277, 531, 532, 559):
        for i in (0, 1):
            best = model.unembed(pseudo[0, n, i]).float().log_softmax(-1).topk(4)
            assert candidates[n - 20][i] == best.indices.tolist()
        assert own[n - 20] == model.unembed(x[0, n]).argmax()
        expected, _ = rank_drafts(model.unembed(pseudo[0, n]), Sampler(), 0, 4)
        assert np.allclose(scores[n - 20], expected)


def test_even_windows():
    """The first window at the beginning, the last at the end, all of one length; a short text is one window throughout."""
    stream = np.arange(1000, dtype=np.uint16)
    rows = even_windows(stream, 5, 100)
    assert [prompt for _, prompt in rows] == [1] * 5 and all(tokens.dtype == torch.int64 for tokens, _ in rows)
    assert [tokens.tolist() for tokens, _ in rows] == [list(range(start, start + 100)) for start in (0, 225, 450, 675, 900)]
    assert [tokens.tolist() for tokens, _ in even_windows(stream[:30], 2, 100)] == [list(range(30))] * 2


def test_acceptance_by_counting(measured):
    """How often the candidate of each rank is the token that greedy decoding emits, sorted as best_first wants it."""
    model, _, sequences, maps = measured
    transfer, K, sequences = maps([1, 2, 3]), 3, sequences[:2, :16]
    table = acceptance_by_rank(model, transfer, responses(sequences), count=12)
    hits, rows = [[0] * 12 for _ in range(K)], 0
    for sequence in sequences.tolist():
        drafts = slow_drafts(model, transfer, sequence)
        for n in range(START - 1, len(sequence) - 1 - K):
            rows += 1
            for k in range(K):
                rank = drafts[n][k].index(sequence[n + 2 + k])
                if rank < 12:
                    hits[k][rank] += 1
    assert table == [pytest.approx(sorted((h / rows for h in row), reverse=True)) for row in hits]


# ------------------------------------------------------------------------------------------ speed

EXPECTED = {1: 1.0, 2: 1.5, 4: 2.0, 16: 2.5, 64: 2.75}


def with_costs(monkeypatch, cost):
    """Let a pass over a tree of `size` nodes with `sources` sources cost cost(size, sources) seconds; returns what was asked for."""
    asked = []

    def decode(model, prompt_ids, drafter=None, sampler=None, max_new_tokens=0):
        option = drafter or (1, 0)
        asked.append(option)
        return SimpleNamespace(seconds=10 * cost(*option), forward_passes=10)

    monkeypatch.setattr(measure, "generate", decode)
    return asked


@pytest.mark.parametrize("cost, expected", [
    (lambda size, sources: 1.0, 64),                                            # rows are free: the largest tree
    (lambda size, sources: float(size), 1),                                     # every row costs a pass: plain decoding
    (lambda size, sources: 1 + size / 8, 4),                                    # 0.89, 1.20, 1.33, 0.83 tokens a second
    (lambda size, sources: 1 + size / 80, 16),                                  # 0.99, 1.46, 1.90, 2.08, 1.53
], ids=["free rows", "rows cost a pass", "small", "medium"])
@pytest.mark.parametrize("place", ["every node", "four likeliest"])
def test_the_size_with_most_tokens_per_second(monkeypatch, cost, expected, place):
    """[31] Plain decoding is a candidate, and a tree too large for the machine is not taken."""
    def by_place(size, sources):
        return cost(size, sources) * (1.3 if size > 4 and (sources == size) != (place == "every node") else 1)
    with_costs(monkeypatch, by_place)
    size, sources, costs = choose_tree_size(None, lambda *option: option, EXPECTED, [1, 2, 3])
    assert (size, sources) == (expected, 0 if expected == 1 else expected if place == "every node" else min(4, expected))
    assert (1, 0) in costs
    assert costs == {option: pytest.approx(by_place(*option)) for option in costs}


def test_a_tree_must_promise_a_tenth_more_than_plain_decoding(monkeypatch):
    """What the table promises is an average over texts: a small gain on paper may be a loss on the text at hand."""
    for cost, expected in ((1.9, 1), (1.7, 4)):                             # 1.05 and 1.18 tokens a second
        with_costs(monkeypatch, lambda size, sources: 1.0 if size == 1 else cost if size == 4 else 9.0)
        assert choose_tree_size(None, lambda *option: option, {1: 1.0, 4: 2.0}, [1, 2, 3])[0] == expected


def test_sizes_that_are_hopeless_are_not_tried(monkeypatch):
    asked = with_costs(monkeypatch, lambda size, sources: float(size))
    choose_tree_size(None, lambda *option: option, EXPECTED, [1, 2, 3])
    assert (64, 64) not in asked and (64, 4) not in asked


def test_choice_on_this_machine(model):
    """A size of the table, measured, with plain decoding among the candidates; close to the context limit too."""
    transfer = make_transfer(model, [2, 2])
    for prompt in (PROMPT, list(range(40)) + list(range(24))):
        size, sources, costs = choose_tree_size(model, lambda *option: HiddenTransferDrafter(transfer, *option), {1: 1.0, 2: 1.2, 4: 1.4}, prompt, 4, 1)
        assert size in (1, 2, 4) and sources in (0, 4, size) and (1, 0) in costs and (size, sources) in costs
        assert all(seconds > 0 for seconds in costs.values())


def test_paired_speed(measured):
    """[31] Tokens per pass by the same count as generate's; plain decoding is 1.00, and its ratio to itself 1."""
    model, prompts, _, maps = measured
    transfer = maps([2, 2, 2])
    report = paired_speed(model, {f"tree of {size}": HiddenTransferDrafter(transfer, size) for size in (4, 16)}, prompts[:3], NEW, rounds=2)
    assert list(report) == ["plain", "tree of 4", "tree of 16"]
    assert report["plain"]["tokens"] == 1.0 and report["plain"]["ratio"] == [1.0, 1.0]
    for size in (4, 16):
        row = report[f"tree of {size}"]
        assert row["tokens"] == pytest.approx(really_decoded(model, transfer, prompts[:3], size), abs=1e-12)
        assert len(row["ratio"]) == 2 and row["tokens"] == pytest.approx(row["per_second"] * row["ms"] / 1000)


def test_paired_speed_is_the_ratio_of_seconds(monkeypatch):
    """[31] Below 1 too: a drafter that takes twice as long for the same tokens has ratio 1/2."""
    order = []

    def decode(model, prompt, drafter, sampler, max_new_tokens):
        order.append(drafter)
        return SimpleNamespace(seconds=2.0 if drafter else 1.0, new_tokens=max_new_tokens, forward_passes=5 if drafter else max_new_tokens)

    monkeypatch.setattr(measure, "generate", decode)
    report = paired_speed(None, {"slow": "slow"}, [[1], [2], [3]], 10, rounds=4)
    assert report["slow"]["ratio"] == [0.5] * 4 and report["slow"]["tokens"] == 2.0 and report["slow"]["per_second"] == 5.0
    assert report["plain"]["per_second"] == 10.0 and report["slow"]["ms"] == 400
    assert order == [None, "slow"] * 2 + [None, "slow"] * 3 * 4             # in turns, after a warm-up


@pytest.mark.parametrize("drafted", [True, False])
def test_profile(measured, drafted):
    """The parts of a decoding step: they sum to the whole, and drafting is there where there is drafting."""
    model, prompts, _, maps = measured
    drafter = HiddenTransferDrafter(maps([2, 2]), 8) if drafted else measure_plain()
    lines = profile(model, prompts[0], drafter, dict(sampler=Sampler(), max_new_tokens=10, end_token=None, tokenizer=None)).splitlines()[1:]
    shares = {line[:28].strip(): float(line.split()[-1].rstrip("%")) for line in lines}
    assert sum(shares.values()) == pytest.approx(100, abs=0.2) and all(0 <= share <= 100 for share in shares.values())
    assert shares["model, pass over the tree"] > 0 and (shares["model, drafts"] > 0) == drafted and shares["outside the model"] > 0


def measure_plain():
    from drafters import Autoregressive
    return Autoregressive()


def test_exactness_counts_differences(measured, capsys, monkeypatch):
    """No differences in float64; one output that is not plain's is counted where it arises."""
    model, prompts, _, maps = measured
    transfer = maps([2, 2, 2])

    def counts():
        exactness(model, transfer, prompts[:3], 8, sizes=(2, 4))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("greedy", "temperature"))]
        assert len(lines) == 3
        return [[int(cell) for cell in line.split()[-4::2]] for line in lines]

    assert counts() == [[0, 0]] * 3

    def wrong(model, prompt, drafter, sampler, max_new_tokens):
        run = generate(model, prompt, drafter, sampler, max_new_tokens)
        if drafter and drafter.tree_size == 4 and prompt == prompts[1] and sampler.temperature == 0.8:
            run.token_ids[-1] += 1
        return run

    monkeypatch.setattr(measure, "generate", wrong)
    assert counts() == [[0, 0], [0, 1], [0, 0]]

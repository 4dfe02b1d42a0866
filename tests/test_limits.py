"""
Where decoding ends: lengths, end tokens, the context limit, tiny prompts and refused ones, and memory over many
calls. Numbers in brackets, as in [12], are those of the project's list of pitfalls.
"""
import gc

import pytest
import torch

from conftest import BLOCK, KINDS, PROMPT, VOCAB, make_model, make_transfer, plain
from drafters import Autoregressive, HiddenTransferDrafter
from drafters_for_tests import Adversary, Oracle, Scripted, Watch, bushy_shape, chain_shape
from generate import generate
from model import KVCache
from sampler import Sampler
from tree import Tree, chain

# A tree of 12 nodes and depth 3: the true path runs through the second child, the third below, and an only child.
TWELVE = [-1, 0, 0, 0, 1, 2, 2, 2, 3, 4, 7, 8]


def drafters_for(model, text, sources=(0, 12)):
    """One of each kind: plain, always right (on the second branch, and in a chain), never right, random maps."""
    transfer = make_transfer(model, [1, 2, 3])
    return [None, Oracle(text, TWELVE, 1), Oracle(text, chain_shape(4)), Adversary(text, TWELVE)] \
        + [HiddenTransferDrafter(transfer, 12, count) for count in sources]


def count_all(result) -> tuple[int, int, int]:
    """New tokens by three counts that must agree."""
    return len(result.token_ids), result.new_tokens, sum(result.accepted_per_pass)


# ------------------------------------------------------------------------------------------ length

@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 3, 5, 7])
def test_exact_lengths(model, text, max_new_tokens):
    """[13] An oracle of depth 4 could emit five tokens a pass: never more than asked for. [10] One and two, too."""
    for drafter in drafters_for(model, text):
        result = generate(model, PROMPT, drafter, max_new_tokens=max_new_tokens)
        assert result.token_ids == text[5:5 + max_new_tokens]
        assert count_all(result) == (max_new_tokens,) * 3 and result.finish_reason == "length"
    oracle = generate(model, PROMPT, Oracle(text, chain_shape(4)), max_new_tokens=max_new_tokens)
    assert oracle.accepted_per_pass == {0: [], 1: [1], 2: [1, 1], 3: [1, 2], 5: [1, 4], 7: [1, 5, 1]}[max_new_tokens]


def test_no_tokens_asked_for(model):
    """[13] No pass is made, and no figure is divided by zero."""
    result = generate(model, PROMPT, max_new_tokens=0)
    assert (result.forward_passes, result.mean_accepted_tokens, result.tokens_per_second) == (0, 0, 0)
    with pytest.raises(ValueError, match="max-new-tokens"):
        generate(model, PROMPT, max_new_tokens=-1)


def test_drafts_end_where_the_text_will(model, text):
    """[13] A drafter is told how deep a draft may be: what is left to emit, less the token that the model adds."""
    depths = []

    def note(round, tree):
        depths.append((round.max_depth, max(tree.depth)))
    generate(model, PROMPT, Watch(Oracle(text, chain_shape(4)), on_propose=note), max_new_tokens=14)
    assert depths == [(12, 4), (7, 4), (2, 2)]                  # after 1, 6 and 11 tokens


# ------------------------------------------------------------------------------------------ end token

@pytest.mark.parametrize("k", range(12))
def test_end_token_anywhere(model, text, k):
    """[12] Plain's token k is declared the end: same text up to it, nothing after it, and nothing after it counted."""
    end = text[5 + k]
    expected = text[5:5 + text[5:].index(end) + 1]              # where that token comes first
    for drafter in drafters_for(model, text):
        passes = []
        result = generate(model, PROMPT, drafter, max_new_tokens=20, end_token=end, on_pass=passes.append)
        assert result.token_ids == expected == sum((one.emitted for one in passes), [])
        assert count_all(result) == (len(expected),) * 3 and result.finish_reason == "end"
        assert result.forward_passes == len(result.accepted_per_pass)


def test_end_token_within_an_accepted_path(model, text):
    """[12] The cut is made at the first, the middle and the last token of a pass that was right throughout."""
    for k in range(1, 6):
        result = generate(model, PROMPT, Oracle(text, chain_shape(4)), max_new_tokens=20, end_token=text[5 + k])
        if text[5 + k] not in text[5:5 + k]:                    # else it came earlier
            assert result.accepted_per_pass == [1, k]


def test_first_token_is_the_end_token(model, text):
    """[10] The token that the prefill yields may be the end already."""
    for drafter in drafters_for(model, text):
        result = generate(model, PROMPT, drafter, max_new_tokens=9, end_token=text[5])
        assert result.token_ids == [text[5]] and result.finish_reason == "end" and result.forward_passes == 1


def test_end_token_as_the_last_one_asked_for(model, text):
    """[12] Both limits at once: the text is over, so it is the end."""
    k = next(k for k in range(3, 12) if text[5 + k] not in text[5:5 + k])
    for drafter in drafters_for(model, text):
        result = generate(model, PROMPT, drafter, max_new_tokens=k + 1, end_token=text[5 + k])
        assert result.token_ids == text[5:6 + k] and result.finish_reason == "end"


def test_end_token_in_the_prompt_or_nowhere(model, text):
    """[12] In the prompt it ends nothing; no end token, or one that never comes, works too."""
    never = next(token for token in range(VOCAB) if token not in text[5:25])
    in_prompt = next((token for token in PROMPT if token not in text[5:25]), never)
    for end in (None, never, in_prompt):
        for drafter in drafters_for(model, text):
            result = generate(model, PROMPT, drafter, max_new_tokens=20, end_token=end)
            assert result.token_ids == text[5:25] and result.finish_reason == "length"


def test_several_end_tokens(model, text):
    """[12] The text ends at whichever comes first, also within one pass; none in the list is no end token."""
    never = next(token for token in range(VOCAB) if token not in text[5:25])
    for ends in ([text[9], text[7], never], {text[7], text[9]}, (text[9], text[7])):
        expected = text[5:5 + min(text[5:].index(end) for end in ends if end != never) + 1]
        for drafter in drafters_for(model, text):
            result = generate(model, PROMPT, drafter, max_new_tokens=20, end_token=ends)
            assert result.token_ids == expected and result.finish_reason == "end"
            assert count_all(result) == (len(expected),) * 3
    assert generate(model, PROMPT, max_new_tokens=20, end_token=[]).token_ids == text[5:25]


def test_drafted_end_token_that_is_wrong(model, text):
    """[12] An end token among the rejected drafts ends nothing."""
    end = next(token for token in range(VOCAB) if token not in text[5:20])

    def beside_the_true_one(round, k):
        drafts = [end, text[len(round.tokens)]] if round.max_depth else []
        return Tree([round.tokens[-1]] + drafts, [-1, 0, 0][:1 + len(drafts)])
    result = generate(model, PROMPT, Scripted(beside_the_true_one), max_new_tokens=15, end_token=end)
    assert result.token_ids == text[5:20] and result.finish_reason == "length"


def test_token_zero_may_be_the_end_token():
    """[12] 0 is an id like any other, not "no end token"."""
    model = make_model("rotary", vocab_size=2)                  # two tokens: 0 comes soon
    expected = plain(model, [1, 1], 30)
    expected = expected[:expected.index(0) + 1]
    for drafter in (None, HiddenTransferDrafter(make_transfer(model, [1, 2]), 4)):
        assert generate(model, [1, 1], drafter, max_new_tokens=30, end_token=0).token_ids == expected


# ------------------------------------------------------------------------------------------ context

@pytest.fixture(scope="module", params=KINDS)
def small(request):
    """(model with a context of 16 tokens, 12 tokens of prompt for it)."""
    model = make_model(request.param, block_size=16)
    return model, [5, 17, 40, 2, 2, 33, 8, 21, 0, 49, 12, 7, 7, 30, 19, 1]


@pytest.mark.parametrize("length", [13, 14, 15, 16])
def test_context_limit(small, length):
    """[14] Position 15 is fed, 16 never; its token is emitted still. The tree shrinks, and the reason is told."""
    model, prompt = small[0], small[1][:length]
    expected = plain(model, prompt, 17 - length)                # the last of them needs no position of its own
    for drafter in drafters_for(model, prompt + expected):
        def fits(round, tree):
            assert max(tree.position_ids(round.cache.length).tolist()) <= 15
            assert round.max_depth == 16 - len(round.tokens)
        watch = Watch(drafter or Autoregressive(), on_propose=fits)
        result = generate(model, prompt, watch, max_new_tokens=50)
        assert result.token_ids == expected and result.finish_reason == "context"
        assert count_all(result) == (17 - length,) * 3
        fed = [position for positions in watch.positions for position in positions]
        assert max(fed) <= 15 and (drafter is not None or max(fed) == 15)


def test_context_limit_with_steps_beyond_it(small):
    """[14] More steps than places are left: drafts for places that do not exist are not read, in no mode."""
    model, prompt = small[0], small[1][:9]
    expected = plain(model, prompt, 8)
    for sources in (0, 1, 30):
        for layers in ([1, 2, 3, 3, 3, 3], [3, 3, 2, 2, 1, 1]):
            watch = Watch(HiddenTransferDrafter(make_transfer(model, layers), 30, sources))
            result = generate(model, prompt, watch, max_new_tokens=100)
            assert result.token_ids == expected and result.finish_reason == "context"
            assert max(max(positions) for positions in watch.positions) <= 15


def test_context_limit_with_shifted_positions():
    """[14] The position embedding of a place beyond the context is not looked up."""
    model = make_model("learned", block_size=16)
    prompt = list(range(10))
    for sources in (0, 12):
        drafter = HiddenTransferDrafter(make_transfer(model, [1, 2, 3], shift_positions=True), 12, sources)
        assert generate(model, prompt, drafter, max_new_tokens=50).token_ids == plain(model, prompt, 7)


@pytest.mark.parametrize("max_new_tokens, reason", [(3, "length"), (4, "length"), (5, "context")])
def test_length_and_context_limit_together(small, max_new_tokens, reason):
    """[14] 13 tokens of prompt leave room for 4: asking for 4 is no case of the context running out."""
    model, prompt = small[0], small[1][:13]
    expected = plain(model, prompt, 4)[:max_new_tokens]
    for drafter in drafters_for(model, prompt + plain(model, prompt, 4)):
        result = generate(model, prompt, drafter, max_new_tokens=max_new_tokens)
        assert result.token_ids == expected and result.finish_reason == reason


def test_end_token_beats_the_context_limit(small):
    """[14] The last token that fits is the end token: the text is whole."""
    model, prompt = small[0], small[1][:15]
    expected = plain(model, prompt, 2)
    for drafter in drafters_for(model, prompt + expected):
        result = generate(model, prompt, drafter, max_new_tokens=50, end_token=expected[1])
        assert result.finish_reason == "end"
        assert result.token_ids == expected[:expected.index(expected[1]) + 1]


def test_prompt_beyond_the_context(small):
    """[14] A clear error, the same in all modes, also where nothing is to be emitted."""
    model, prompt = small[0], small[1] + [3]
    for drafter in (None, HiddenTransferDrafter(make_transfer(model, [1, 2, 3]), 12)):
        for max_new_tokens in (0, 5):
            with pytest.raises(ValueError, match="17 tokens.*16"):
                generate(model, prompt, drafter, max_new_tokens=max_new_tokens)


def test_whole_context(model, text):
    """[14] From a short prompt to the last place, in long strides: the whole context is used."""
    assert len(text) == BLOCK + 1
    for drafter in (None, Oracle(text, bushy_shape(2, 3), 2), HiddenTransferDrafter(make_transfer(model, [1, 2]), 16, 4)):
        result = generate(model, PROMPT, drafter, max_new_tokens=1000)
        assert result.token_ids == text[5:] and result.finish_reason == "context"


# ------------------------------------------------------------------------------------------ trees that are too large

def test_tree_larger_than_the_context(small):
    """[14] 500 nodes in a context of 16: more nodes than places, never a place too many."""
    model, prompt = small[0], small[1][:6]
    for sources in (0, 500):
        watch = Watch(HiddenTransferDrafter(make_transfer(model, [1, 3]), 500, sources))
        result = generate(model, prompt, watch, max_new_tokens=50)
        assert result.token_ids == plain(model, prompt, 11) and len(watch.trees[0]) == 500
        assert max(max(positions) for positions in watch.positions) <= 15


def test_tree_larger_than_the_drafts(model, text):
    """[11] One step and a vocabulary of 50 make 51 nodes, whatever is asked for; so each first draft is right."""
    watch = Watch(HiddenTransferDrafter(make_transfer(model, [2]), 200))
    result = generate(model, PROMPT, watch, max_new_tokens=21)
    assert result.token_ids == text[5:26] and result.accepted_per_pass == [1] + [2] * 10
    assert {len(tree) for tree in watch.trees} == {51}


def test_drafter_that_understates_its_rows(model, text):
    """A tree larger than the drafter declared does not fit the cache, and is refused there: nothing is overwritten."""
    script = Scripted(lambda round, k: Tree([round.tokens[-1]] + list(range(40)), [-1] + [0] * 40), tree_size=2)
    with pytest.raises(ValueError, match="rows"):
        generate(model, PROMPT, script, max_new_tokens=20)


@pytest.mark.parametrize("arguments, message", [
    (dict(tree_size=0), "tree-size 0"), (dict(tree_size=-3), "tree-size"), (dict(tree_size=10 ** 6), "tree-size"),
    (dict(sources=-1), "sources -1"),
    (dict(shape="static"), "acceptance"), (dict(sampled=True), "acceptance")], ids=str)
def test_drafters_that_cannot_be_are_refused(model, arguments, message):
    """[11] At construction."""
    with pytest.raises(ValueError, match=message):
        HiddenTransferDrafter(make_transfer(model, [1]), **arguments)


# ------------------------------------------------------------------------------------------ prompts

@pytest.mark.parametrize("drafted", [False, True])
def test_empty_prompt(model, drafted):
    """[16] A clear error, the same in both modes."""
    drafter = HiddenTransferDrafter(make_transfer(model, [1, 2])) if drafted else None
    for empty in ([], torch.tensor([], dtype=torch.long)):
        with pytest.raises(ValueError, match="empty"):
            generate(model, empty, drafter)


@pytest.mark.parametrize("prompt", [[0], [49], [7, 7], [1, 2, 3]], ids=str)
def test_tiny_prompts(model, prompt):
    """[16] One token has no row before it."""
    expected = plain(model, prompt, 10)
    for drafter in drafters_for(model, prompt + expected):
        assert generate(model, prompt, drafter, max_new_tokens=10).token_ids == expected


@pytest.mark.parametrize("batch", [[[1, 2], [3, 4]], [[1, 2, 3]], [(1, 2)], torch.tensor([[1, 2], [3, 4]])], ids=str)
def test_batches_are_refused(model, batch):
    """[17] One sequence at a time, and the message says so."""
    for drafter in (None, HiddenTransferDrafter(make_transfer(model, [1, 2]))):
        with pytest.raises(ValueError, match="one sequence at a time"):
            generate(model, batch, drafter)


@pytest.mark.parametrize("token", [-1, VOCAB, 10 ** 6])
def test_ids_outside_the_vocabulary(model, token):
    """[16] Named, instead of an index error from within; at any place in the prompt."""
    for prompt in ([token], [1, 2, token], [token, 1]):
        with pytest.raises(ValueError, match=str(token)):
            generate(model, prompt)


def test_rule_that_does_not_exist(model):
    with pytest.raises(ValueError, match="verify"):
        generate(model, PROMPT, verify="typical")


def test_prompt_kinds(model, text):
    """[16] A tuple is as good as a list, and the caller's list is not extended."""
    prompt = list(PROMPT)
    assert generate(model, tuple(PROMPT), max_new_tokens=5).token_ids == text[5:10]
    assert generate(model, prompt, max_new_tokens=5).token_ids == text[5:10] and prompt == PROMPT


# ------------------------------------------------------------------------------------------ memory

@pytest.mark.parametrize("sources", [0, 4])
def test_capacity_is_what_is_needed(model, text, sources, monkeypatch):
    """The cache of a run: prompt, new tokens, one tree and its pseudo rows, and not more."""
    made = []

    class Noted(KVCache):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)
    monkeypatch.setattr("generate.KVCache", Noted)
    drafter = HiddenTransferDrafter(make_transfer(model, [1, 2, 3]), 8, sources)
    assert generate(model, PROMPT, drafter, max_new_tokens=20).token_ids == text[5:25]
    assert len(made) == 1 and made[0].data.dtype == torch.float64
    assert 5 + 20 + 8 + 3 * max(1, sources) - 2 <= made[0].capacity <= 5 + 20 + 8 + 3 * max(1, sources)
    generate(model, PROMPT, drafter, max_new_tokens=10 ** 9)    # bounded by the context, not by what is asked for
    assert made[1].capacity <= BLOCK + 1 + 8 + 3 * max(1, sources)


def test_memory_over_many_calls():
    """1000 calls leave nothing behind: as many tensors alive as before, and no collection that grows."""
    model = make_model("rotary", n_layer=1, n_head=1, n_kv_head=1, n_embd=8, mlp_width=8, block_size=8)
    drafters = [None, HiddenTransferDrafter(make_transfer(model, [0]), 20, 1)]

    def alive_after(calls):
        for k in range(calls):
            generate(model, [k % VOCAB], drafters[k % 2], Sampler(temperature=1.0, seed=k), max_new_tokens=3)
        gc.collect()
        things = gc.get_objects()
        return sum(issubclass(type(thing), torch.Tensor) for thing in things), len(things)
    tensors, objects = alive_after(100)                         # whatever is set up once is set up now
    tensors_later, objects_later = alive_after(1000)
    assert tensors_later == tensors and objects_later - objects < 100


def test_a_drafter_that_goes_too_deep_is_refused(model, text):
    """[13, 14] It would overshoot max_new_tokens, or feed a position that the model does not have."""
    def deep(round, k):
        return chain([round.tokens[-1]] + text[len(round.tokens):len(round.tokens) + 4])
    assert generate(model, PROMPT, Scripted(deep), max_new_tokens=6).token_ids == text[5:11]
    with pytest.raises(ValueError, match="depth 4; Round.max_depth is 1"):
        generate(model, PROMPT, Scripted(deep), max_new_tokens=3)


def test_more_ranks_than_the_vocabulary_has():
    """[11] A static tree from a table of three ranks, for two tokens."""
    small = make_model("rotary", vocab_size=2)
    drafter = HiddenTransferDrafter(make_transfer(small, [1, 2]), 8, shape="static", acceptance=[[.4, .3, .2], [.3]])
    assert generate(small, [0, 1], drafter, max_new_tokens=12).token_ids == plain(small, [0, 1], 12)
    with pytest.raises(ValueError, match="shape 'bushy'"):
        HiddenTransferDrafter(make_transfer(small, [1]), shape="bushy")


def test_commit_beyond_the_capacity(model):
    cache = KVCache(model.config, 4)
    for rows in ([0, 1, 2, 3, 4], [4], [-1]):
        with pytest.raises(ValueError, match="KVCache.commit"):
            cache.commit(rows)
    assert cache.length == 0

"""
What is decoded with a tree is what is decoded without one, token for token, for right, wrong and mixed drafts; and
what the cache holds and what the drafts are, round by round. The text to compare with is `plain` of conftest.py: one
token at a time, no cache, no code of generate.py. Numbers in brackets, as in [2], are those of the project's list of
pitfalls.
"""
import itertools
import random

import pytest
import torch

from conftest import (KINDS, PROMPT, VOCAB, assert_close, fresh_cache_rows, make_model, make_transfer, plain,
                      slow_forward)
from drafters import Autoregressive, HiddenTransferDrafter
from drafters_for_tests import (LOPSIDED, Adversary, Oracle, Scripted, Watch, WrongAt, bushy_shape, chain_shape)
from generate import generate
from sampler import Sampler
from tree import Tree, chain, tree_from_paths

SHAPES = {"root": [-1], "chain": chain_shape(3), "wide": [-1, 0, 0, 0], "2x2x2": bushy_shape(3, 2), "lopsided": LOPSIDED}
LONGEST = {"root": [1, 1, 1], "chain": [4, 4, 4], "wide": [2, 2, 2], "2x2x2": [4, 4, 4], "lopsided": [5, 2, 3]}  # by branch
PATHS = {"root": [], "chain": [(0,), (0, 0), (0, 0, 0)], "wide": [(0,), (1,), (2,)],
         "2x2x2": [path for depth in (1, 2, 3) for path in itertools.product((0, 1), repeat=depth)],
         "lopsided": [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (2, 0)]}
LAYERS = [[2, 2, 2], [1, 2, 3], [2, 1], [3, 1, 2]]              # equal, ascending, descending, mixed


def check_statistics(result, count):
    """The figures of a Generation agree with one another."""
    assert result.new_tokens == len(result.token_ids) == sum(result.accepted_per_pass) == count
    assert result.forward_passes == len(result.accepted_per_pass)
    assert result.mean_accepted_tokens == pytest.approx(count / max(1, result.forward_passes))


class PathDrafter(HiddenTransferDrafter):
    """Hidden transfer's drafts in a tree of given rank paths."""

    def __init__(self, transfer, paths, sources):
        super().__init__(transfer, len(paths) + 1, sources)
        self.paths = paths

    def propose(self, round):
        candidates = [row.topk(3).indices.tolist() for row in self.draft_logits(round)] if round.max_depth else []
        return tree_from_paths(round.tokens[-1], [path for path in self.paths if len(path) <= len(candidates)], candidates)


class OracleTrees(HiddenTransferDrafter):
    """Hidden transfer's pass and its pseudo rows, with trees from an oracle: accepted nodes lie deep in the tree.

    Each round the drafts are held against the row-by-row reference on the tokens emitted so far.
    """

    def __init__(self, transfer, oracle, sources):
        super().__init__(transfer, oracle.tree_size, sources)
        self.oracle, self.compared, self.after_the_walk = oracle, 0, 0

    def propose(self, round):
        if round.max_depth:
            drafts = self.draft_logits(round)
            _, expected = slow_forward(round.model, round.tokens[:-1], self.transfer)
            assert_close(drafts, round.model.unembed(torch.stack(expected))[:round.max_depth])
            pseudo, _, first = round.state
            self.compared += 1
            self.after_the_walk += round.row - first >= pseudo.shape[1]
        return self.oracle.propose(round)


# ------------------------------------------------------------------------------------------ plain decoding

def test_plain_decoding_equals_the_slow_reference(model, text):
    result = generate(model, PROMPT, max_new_tokens=40)
    assert result.token_ids == text[5:45]
    assert result.accepted_per_pass == [1] * 40 and result.mean_accepted_tokens == 1.0
    assert (result.method, result.tree_size, result.prompt_tokens) == ("autoregressive", 1, 5)
    assert (result.finish_reason, result.dtype, result.device, result.text) == ("length", "float64", "cpu", None)
    check_statistics(result, 40)


def test_an_empty_tree_is_plain_decoding(model, text):
    """[11] A drafter that proposes nothing, in three guises."""
    for drafter in (Autoregressive(), Scripted([]), HiddenTransferDrafter(make_transfer(model, [1, 2]), tree_size=1)):
        result = generate(model, PROMPT, drafter, max_new_tokens=12)
        assert result.token_ids == text[5:17] and result.accepted_per_pass == [1] * 12


# ------------------------------------------------------------------------------------------ drafts by an oracle

@pytest.mark.parametrize("branch", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_does_not_depend_on_the_tree(model, text, shape, branch):
    """[2] True drafts on any branch of any tree: plain's text in fewer passes. Below wrong nodes stand true tokens."""
    watch, longest = Watch(Oracle(text, SHAPES[shape], branch)), LONGEST[shape][branch]
    result = generate(model, PROMPT, watch, max_new_tokens=1 + 5 * longest)
    assert result.token_ids == text[5:6 + 5 * longest]
    assert result.accepted_per_pass == [1] + [longest] * 5      # the prefill has no tree yet
    assert watch.trees[0].parents == SHAPES[shape]
    check_statistics(result, 1 + 5 * longest)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_all_accepted(model, text, depth):
    """[7] Right every round: depth + 1 tokens a pass, and never one left out or told twice at the seam."""
    result = generate(model, PROMPT, Oracle(text, chain_shape(depth)), max_new_tokens=1 + 5 * (depth + 1))
    assert result.token_ids == text[5:5 + 1 + 5 * (depth + 1)]
    assert result.accepted_per_pass == [1] + [depth + 1] * 5    # the prefill has no tree yet


@pytest.mark.parametrize("wrong", [1, 2, 3, 4])
def test_wrong_at_one_depth(model, text, wrong):
    """[8] A chain of 3, wrong at depth 1, 2, 3 (4: nowhere): the next token comes from the last accepted row."""
    result = generate(model, PROMPT, WrongAt(text, 3, wrong), max_new_tokens=1 + 6 * wrong)
    assert result.token_ids == text[5:5 + 1 + 6 * wrong]
    assert result.accepted_per_pass == [1] + [wrong] * 6


def test_scripted_rounds(model, text):
    """[8] Root only, right, wrong, root only, ... in one run: no round leaves something for the next."""
    def script(round, k):
        n = len(round.tokens)
        drafts = [[], text[n:n + 3], [VOCAB - 1 - text[n], text[n + 1]], [], text[n:n + 1]][k % 5]
        return chain([round.tokens[-1]] + drafts[:round.max_depth])
    result = generate(model, PROMPT, Scripted(script), max_new_tokens=20)
    assert result.token_ids == text[5:25]
    assert result.accepted_per_pass == [1, 1, 4, 1, 1, 2, 1, 4, 1, 1, 2, 1]
    check_statistics(result, 20)


def test_list_of_trees(model, text):
    """[8] A script that ends: plain decoding from there on."""
    trees = [Tree([0] + text[6:9], [-1, 0, 1, 2]), Tree([0, 49 - text[10], text[10]], [-1, 0, 0])]
    result = generate(model, PROMPT, Scripted(trees), max_new_tokens=10)
    assert result.token_ids == text[5:15] and result.accepted_per_pass == [1, 4, 2, 1, 1, 1]


@pytest.mark.parametrize("shape", ["chain", "wide", "2x2x2"])
def test_adversary(model, text, shape):
    """[9] Never right: a token a round, and the cache grows by one row a round, whatever was staged."""
    lengths = []
    watch = Watch(Adversary(text, SHAPES[shape]), on_forward=lambda positions, mask, cache: lengths.append(cache.length))
    result = generate(model, PROMPT, watch, max_new_tokens=15)
    assert result.token_ids == text[5:20] and result.accepted_per_pass == [1] * 15
    assert lengths == [0] + list(range(5, 19))
    assert all(len(tree) == len(SHAPES[shape]) for tree in watch.trees[:10])


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_first_token(model, text, max_new_tokens):
    """[10] The token that the prefill yields is neither lost nor doubled."""
    for drafter in (None, Oracle(text, SHAPES["2x2x2"], 1), HiddenTransferDrafter(make_transfer(model, [1, 2]))):
        assert generate(model, PROMPT, drafter, max_new_tokens=max_new_tokens).token_ids == text[5:5 + max_new_tokens]


def test_passes_tell_what_was_emitted(model, text):
    """on_pass sees each pass once: its accepted nodes form a path, their tokens and the model's own make the text."""
    passes = []
    result = generate(model, PROMPT, Oracle(text, LOPSIDED, 2), max_new_tokens=20, on_pass=passes.append)
    assert sum((one.emitted for one in passes), []) == result.token_ids == text[5:25]
    for one in passes:
        assert one.path[0] == 0 and all(one.tree.parents[b] == a for a, b in zip(one.path, one.path[1:]))
        assert one.emitted[:-1] == [one.tree.tokens[node] for node in one.path[1:]]
    assert any(one.path == [0, 3, 7] for one in passes)         # the third child and what hangs below it


def test_nothing_is_left_on_the_model(model, text):
    """Two runs of the same, with another one in between, agree; weights and prompt are as they were."""
    weights, prompt = {name: p.clone() for name, p in model.state_dict().items()}, list(PROMPT)
    drafter = HiddenTransferDrafter(make_transfer(model, [2, 1]), 8, 8)
    first = generate(model, prompt, drafter, max_new_tokens=12)
    generate(model, [1, 2, 3], drafter, max_new_tokens=7)
    again = generate(model, prompt, drafter, max_new_tokens=12)
    assert first.token_ids == again.token_ids == text[5:17] and first.accepted_per_pass == again.accepted_per_pass
    assert prompt == PROMPT and all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())


# ------------------------------------------------------------------------------------------ the cache, round by round

def watch_cache(model, drafter):
    """The drafter, with the cache held against a fresh prefill after every round; the lengths seen are kept."""
    lengths = []

    def compare(round, tree):
        lengths.append(round.cache.length)
        assert round.cache.length == len(round.tokens) - 1      # [6] all but the last token, and no pseudo row
        assert_close(round.cache.data[..., :round.cache.length, :], fresh_cache_rows(model, round.tokens[:-1]))
        assert round.tokens[-1] == tree.tokens[0]
    watch = Watch(drafter, on_propose=compare)
    watch.lengths = lengths
    return watch


@pytest.mark.parametrize("shape, branch", [("2x2x2", 1), ("lopsided", 2), ("wide", 1), ("chain", 0)])
def test_cache_equals_a_fresh_prefill(model, text, shape, branch):
    """[4] Oracle on the second branch: accepted rows do not stand first, and must be gathered, in every layer."""
    watch = watch_cache(model, Oracle(text, SHAPES[shape], branch))
    longest = LONGEST[shape][branch]
    result = generate(model, PROMPT, watch, max_new_tokens=2 + 10 * longest)
    assert result.token_ids == text[5:7 + 10 * longest]
    assert watch.lengths == [5 + k * longest for k in range(11)]        # after the prefill and after ten rounds


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("sources", [0, 2, 15])
def test_cache_and_drafts_with_pseudo_rows(model, text, layers, sources):
    """[4, 6] The same with pseudo rows staged; and each round's drafts equal the reference, in or after the pass."""
    oracle = OracleTrees(make_transfer(model, layers), Oracle(text, SHAPES["2x2x2"], 1), sources)
    result = generate(model, PROMPT, watch_cache(model, oracle), max_new_tokens=29)
    assert result.token_ids == text[5:34]
    assert result.accepted_per_pass == [1] + [4] * 7
    assert oracle.compared == 7
    # The prefill has one node, which is a source where there is any; after that node 14 is accepted.
    assert oracle.after_the_walk == {0: 7, 2: 6, 15: 0}[sources]


# ------------------------------------------------------------------------------------------ drafts by hidden transfer

@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("tree_size, sources", [(1, 0), (2, 0), (2, 2), (4, 0), (4, 2), (4, 4), (16, 0), (16, 5), (16, 16)])
def test_random_maps(model, text, layers, tree_size, sources):
    """[2] Whatever the maps hold, the text is plain's; with 16 nodes for 50 tokens some drafts are right by chance."""
    watch = Watch(HiddenTransferDrafter(make_transfer(model, layers), tree_size, sources))
    result = generate(model, PROMPT, watch, max_new_tokens=25)
    assert result.token_ids == text[5:30]
    check_statistics(result, 25)
    # Trees are full while there is room for them, and no deeper than what may still be emitted.
    assert all(len(tree) == tree_size for tree in watch.trees[:-1])


@pytest.mark.parametrize("sources", [0, 4, 16])
def test_number_of_sources_does_not_change_the_drafts(model, text, sources):
    """Same trees, same passes: pseudo rows in the pass and after the walk are the same drafts."""
    transfer = make_transfer(model, [1, 2, 3])
    runs = []
    for count in (sources, 0):
        watch = Watch(HiddenTransferDrafter(transfer, 16, count))
        result = generate(model, PROMPT, watch, max_new_tokens=30)
        runs.append(([(tree.tokens, tree.parents) for tree in watch.trees], result.accepted_per_pass))
    assert runs[0] == runs[1]
    assert max(runs[0][1]) > 1                                  # some were right, so row > 0 was drafted from


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("sources", [0, 3])
def test_random_maps_in_any_tree(model, text, paths, sources):
    """[2] The drafts of hidden transfer in a chain, one level 3 wide, 2x2x2 and a lopsided tree."""
    result = generate(model, PROMPT, PathDrafter(make_transfer(model, [1, 2, 2]), PATHS[paths], sources), max_new_tokens=25)
    assert result.token_ids == text[5:30]


ACCEPTANCE = [[0.6, 0.2, 0.05], [0.5, 0.25], [0.4]]             # measured chances by depth and rank


@pytest.mark.parametrize("options, parents", [
    (dict(tree_size=3, shape="chain"), [-1, 0, 1]), (dict(tree_size=16, shape="chain"), [-1, 0, 1, 2]),
    (dict(tree_size=6, shape="static", acceptance=ACCEPTANCE), [-1, 0, 1, 0, 1, 2])], ids=["chain", "long chain", "static"])
def test_shapes_of_the_drafter(model, text, options, parents):
    """[2] A chain ends with the maps; a static tree takes what its table makes likeliest: .6, .3, .2, .15, .12."""
    watch = Watch(HiddenTransferDrafter(make_transfer(model, [1, 2, 3]), **options))
    assert generate(model, PROMPT, watch, max_new_tokens=20).token_ids == text[5:25]
    assert all(tree.parents == parents for tree in watch.trees[:10])


def test_ranks_are_those_of_the_drafts(model, text):
    """[11] In a static tree, rank r at depth d is the r-th best token of draft d."""
    def compare(round, tree):
        _, pseudo = slow_forward(model, round.tokens[:-1], transfer)
        best = [model.unembed(x).topk(2).indices.tolist() for x in pseudo]
        assert tree.tokens == [round.tokens[-1], best[0][0], best[1][0], best[0][1], best[1][1], best[2][0]]
        seen.append(len(tree))
    transfer, seen = make_transfer(model, [1, 2, 3]), []
    watch = Watch(HiddenTransferDrafter(transfer, 6, shape="static", acceptance=ACCEPTANCE),
                  on_propose=lambda round, tree: round.max_depth >= 3 and compare(round, tree))
    assert generate(model, PROMPT, watch, max_new_tokens=12).token_ids == text[5:17]
    assert len(seen) >= 3


def test_two_maps_and_a_table_of_four_steps(model, text):
    """[11] The table is measured for more steps than there are maps: the tree ends where the drafts end."""
    acceptance = [[0.9, 0.5]] * 4
    watch = Watch(HiddenTransferDrafter(make_transfer(model, [1, 2]), 30, shape="static", acceptance=acceptance))
    assert generate(model, PROMPT, watch, max_new_tokens=12).token_ids == text[5:17]
    assert max(max(tree.depth) for tree in watch.trees) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_prompts(kind):
    """[1] Float64, prompts of 1 to 20 tokens from another model: equal, all of them."""
    model, rng = make_model(kind, seed=5), random.Random(0)
    drafter, longest = HiddenTransferDrafter(make_transfer(model, [2, 2, 1]), 16, 4), 1
    for _ in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        result = generate(model, prompt, drafter, max_new_tokens=12)
        assert result.token_ids == plain(model, prompt, 12)
        longest = max(longest, *result.accepted_per_pass)
    assert longest > 1


@pytest.mark.parametrize("shape", ["chain", "wide", "2x2x2", "lopsided"])
def test_sampled_text_does_not_depend_on_the_tree(model, shape):
    """[2] At temperature 0.8 the noise is that of (seed, position), so this is an equality too."""
    sampler = Sampler(temperature=0.8, seed=3)
    sampled = PROMPT + plain(model, PROMPT, 30, sampler.choose)
    assert sampled[5:] != plain(model, PROMPT, 30)
    assert generate(model, PROMPT, None, sampler, 24).token_ids == sampled[5:29]
    oracle = generate(model, PROMPT, Oracle(sampled, SHAPES[shape], 1), sampler, 24)
    assert oracle.token_ids == sampled[5:29] and max(oracle.accepted_per_pass) > 1
    drafter = PathDrafter(make_transfer(model, [1, 2, 3]), PATHS[shape], 2)
    assert generate(model, PROMPT, drafter, sampler, 24).token_ids == sampled[5:29]


# ------------------------------------------------------------------------------------------ low precision

class Gaps(Autoregressive):
    """Plain decoding that keeps, for each new token, the gap between its two best logits."""

    def __init__(self):
        self.gaps = []

    def forward(self, model, tokens, position_ids, mask, cache, read):
        logits = model(tokens, position_ids, mask, cache, read)
        best = logits[0, -1].float().topk(2).values
        self.gaps.append((best[0] - best[1]).item())
        return logits, None


# Two passes over the same tokens round differently. On these models, whose logits have a standard deviation of 3, a
# logit differs between a pass over one row and one over a tree by up to 0.4 in bfloat16 and 4e-5 in float32, and texts
# part at gaps of up to 0.06. The median gap is about 1: a fault does not look like that for long.
TOLERANCE = {torch.bfloat16: 0.5, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_diverges_at_near_ties_only(kind, dtype):
    """[1] Where the text first differs from plain's, plain's two best logits were close; else rounding is no excuse."""
    model, rng = make_model(kind, dtype=dtype), random.Random(1)
    transfer, accepted = make_transfer(model, [1, 2, 3]), 0
    for _ in range(10):
        prompt, count = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))], 30
        gaps = Gaps()
        expected = generate(model, prompt, gaps, max_new_tokens=count).token_ids

        def honest(round, k, expected=prompt + expected):       # true drafts as the second child, also after a divergence
            n = len(round.tokens)
            true = expected[n:n + min(3, round.max_depth)]
            tokens, parents = [round.tokens[-1]], [-1]
            for token in true:
                parents += [max(0, len(tokens) - 1)] * 2
                tokens += [(token + 1) % VOCAB, token]
            return Tree(tokens, parents)
        for drafter in (Scripted(honest), HiddenTransferDrafter(transfer, 16, 16)):
            result = generate(model, prompt, drafter, max_new_tokens=count)
            accepted = max(accepted, *result.accepted_per_pass)
            assert len(result.token_ids) == count
            for step, (token, plain_token) in enumerate(zip(result.token_ids, expected)):
                if token != plain_token:
                    assert gaps.gaps[step] < TOLERANCE[dtype]
                    break
    assert accepted == 4

"""
Trees, and the pseudo rows that hang below their nodes: shape, mask and positions of a tree; a tree pass against
each path run alone; the walk; pseudo rows against a row-by-row reference, in training and in decoding. Numbers in
brackets, as in [3], are those of the project's list of pitfalls.
"""
import itertools
import random

import pytest
import torch

from conftest import PROMPT, VOCAB, assert_close, full_logits, make_model, make_transfer, slow_forward
from drafters_for_tests import LOPSIDED, bushy_shape, chain_shape
from model import KVCache
from hidden_transfer import HiddenTransfer
from tree import Tree, best_first, chain, tree_from_paths, walk

# Paths [0], [1], [0, 0], [1, 0]: node 2 is a sibling of node 1, and node 4 hangs below it.
SMALL = Tree([9, 20, 21, 22, 23], [-1, 0, 0, 1, 2])
SHAPES = {"root": [-1], "chain": chain_shape(4), "wide": [-1, 0, 0, 0], "2x2x2": bushy_shape(3, 2), "lopsided": LOPSIDED,
          "small": SMALL.parents}


def filled(shape, seed=0) -> Tree:
    """The shape with random tokens, siblings distinct."""
    rng = random.Random(seed)
    tokens = [rng.randrange(VOCAB) for _ in shape]
    taken = set()
    for node, parent in enumerate(shape):
        while (parent, tokens[node]) in taken:
            tokens[node] = rng.randrange(VOCAB)
        taken.add((parent, tokens[node]))
    return Tree(tokens, shape)


def path_to(tree, node) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, tree.parents[path[0]])
    return path


def tree_pass(model, tree, prefix, transfer=None, sources=None, position_ids=None):
    """The pass that generate makes over a tree behind a cached prefix: logits (N, V), or those and pseudo, taps, cache."""
    T, N = len(prefix), len(tree)
    rows = N * (1 + (len(transfer.layers) if transfer is not None else 0))
    cache = KVCache(model.config, T + rows, dtype=torch.float64)
    model(torch.tensor([prefix]), torch.arange(T), torch.ones(T, T, dtype=torch.bool).tril(), cache)
    cache.commit(list(range(T)))
    tokens, mask = torch.tensor([tree.tokens]), tree.mask(T)
    position_ids = tree.position_ids(T) if position_ids is None else position_ids
    if transfer is None:
        return model(tokens, position_ids, mask, cache)[0]
    x, pseudo, taps = transfer(model, tokens, position_ids, mask, cache, sources)
    return model.unembed(x)[0], pseudo[0], taps, cache


# ------------------------------------------------------------------------------------------ shape, mask, positions

def test_depth_mask_and_positions_by_hand():
    """[3] Siblings share a position, and a node sees its ancestors alone."""
    assert SMALL.depth == [0, 1, 1, 2, 2]
    assert SMALL.position_ids().tolist() == [0, 1, 1, 2, 2]
    assert SMALL.position_ids(7).tolist() == [7, 8, 8, 9, 9]
    assert SMALL.mask(2).int().tolist() == [[1, 1, 1, 0, 0, 0, 0],
                                            [1, 1, 1, 1, 0, 0, 0],
                                            [1, 1, 1, 0, 1, 0, 0],
                                            [1, 1, 1, 1, 0, 1, 0],
                                            [1, 1, 1, 0, 1, 0, 1]]
    assert torch.equal(SMALL.mask(), SMALL.mask(2)[:, 2:])
    assert SMALL.children == [{20: 1, 21: 2}, {22: 3}, {23: 4}, {}, {}]


@pytest.mark.parametrize("seed", range(5))
def test_mask_of_random_trees(seed):
    """[5] A node sees exactly the committed rows and the nodes on its path from the root."""
    rng = random.Random(seed)
    tree = filled([-1] + [rng.randrange(node) for node in range(1, 25)], seed)
    for node, row in enumerate(tree.mask(4).tolist()):
        assert row == [True] * 4 + [other in path_to(tree, node) for other in range(len(tree))]
        assert tree.position_ids(4)[node] == 4 + len(path_to(tree, node)) - 1


def test_chain_is_a_causal_sequence():
    tree = chain([4, 4, 4])                                     # the same token in a row is no pair of siblings
    assert tree.parents == [-1, 0, 1] and tree.position_ids(5).tolist() == [5, 6, 7]
    assert torch.equal(tree.mask(2), torch.ones(3, 5, dtype=torch.bool).tril(2))


# ------------------------------------------------------------------------------------------ the tree pass

@pytest.mark.parametrize("shape", SHAPES)
def test_each_node_equals_its_path_alone(model, shape):
    """[3] One pass over the tree says at each node what a plain pass over prefix and path says there."""
    tree = filled(SHAPES[shape])
    logits = tree_pass(model, tree, PROMPT)
    for node in range(len(tree)):
        alone = PROMPT + [tree.tokens[above] for above in path_to(tree, node)]
        assert_close(logits[node], full_logits(model, alone)[-1])


def test_row_indices_are_not_positions(model):
    """[3] The test above can fail: with row indices as positions, all but the nodes that a chain shares are off."""
    logits = tree_pass(model, SMALL, PROMPT)
    wrong = tree_pass(model, SMALL, PROMPT, position_ids=torch.arange(len(SMALL)) + len(PROMPT))
    error = (wrong - logits).abs().amax(dim=1)
    assert (error[:2] < 1e-10).all() and (error[2:] > 0.1).all()


@pytest.mark.parametrize("shape", ["2x2x2", "lopsided", "small"])
def test_a_changed_token_moves_its_descendants_only(model, shape):
    """[5] Leaking mask: whatever stands in a node concerns those that hang below it, and them it does concern."""
    tree = filled(SHAPES[shape])
    logits = tree_pass(model, tree, PROMPT)
    for node in range(len(tree)):
        tokens = list(tree.tokens)
        while tokens[node] in tree.tokens:
            tokens[node] = (tokens[node] + 1) % VOCAB
        moved = (tree_pass(model, Tree(tokens, tree.parents), PROMPT) - logits).abs().amax(dim=1)
        for other in range(len(tree)):
            if node in path_to(tree, other):
                assert moved[other] > 1e-3
            else:
                assert moved[other] < 1e-12


# ------------------------------------------------------------------------------------------ building trees

@pytest.mark.parametrize("tokens, parents", [
    ([], []), ([1], []), ([1, 2], [-1]), ([1], [0]),            # no root; not a parent each; a root with a parent
    ([1, 2], [-1, -1]),                                         # two roots
    ([1, 2], [-1, 1]), ([1, 2, 3], [-1, 2, 0]), ([1, 2], [-1, 7]),      # its own parent; a later one; none at all
    ([1, 2, 3], [-1, 0, -2]),
    ([1, 2, 2], [-1, 0, 0]), ([1, 5, 2, 2], [-1, 0, 1, 1])], ids=str)   # the same token twice below one parent
def test_malformed_trees_are_refused(tokens, parents):
    """[11] At construction, before a pass can be spent on them."""
    with pytest.raises(ValueError):
        Tree(tokens, parents)


def test_equal_tokens_below_different_parents_are_fine():
    """[11] Only siblings must differ."""
    assert len(Tree([1, 2, 3, 1, 1], [-1, 0, 0, 1, 2])) == 5


CANDIDATES = [[10, 11, 12], [20, 21]]                           # two steps: three ranks at depth 1, two at depth 2


def test_tree_from_paths():
    tree = tree_from_paths(9, [(1, 0), (0,), (1,), (0, 1)], CANDIDATES)         # in any order
    assert tree.tokens == [9, 10, 11, 21, 20] and tree.parents == [-1, 0, 0, 1, 2]
    assert tree_from_paths(9, [], CANDIDATES).tokens == [9]


@pytest.mark.parametrize("paths, message", [
    ([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], "2 steps"),       # two maps, a tree of depth 4
    ([(3,)], "3 candidates"), ([(0,), (0, 2)], "2 candidates"), # a rank that is not there
    ([(-1,)], "candidates"), ([()], "steps"),
    ([(0,), (1, 0)], "no parent"), ([(0,), (0,)], "twice")], ids=str)
def test_paths_that_cannot_be_are_refused(paths, message):
    """[11] Tree and drafter disagree."""
    with pytest.raises(ValueError, match=message):
        tree_from_paths(9, paths, CANDIDATES)


def test_equal_candidates_are_refused():
    """[11] Two ranks with the same token would be siblings with the same token."""
    with pytest.raises(ValueError, match="siblings"):
        tree_from_paths(9, [(0,), (1,)], [[10, 10]])


SCORES = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.15], [0.7, 0.25]]


def brute_force_nodes():
    """All rank paths with the product of their scores, likeliest first."""
    paths = [path for d in range(1, 4) for path in itertools.product(*(range(len(row)) for row in SCORES[:d]))]
    chance = {path: torch.tensor([SCORES[d][rank] for d, rank in enumerate(path)]).prod().item() for path in paths}
    return sorted(paths, key=lambda path: -chance[path]), chance


def rank_paths(parents, ranks):
    paths = [()]
    for parent, rank in zip(parents[1:], ranks[1:]):
        paths.append(paths[parent] + (rank,))
    return paths


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 30])
def test_best_first_takes_the_likeliest_nodes(size):
    """Among all paths, those with the largest products: no other tree of this size expects more accepted tokens."""
    ordered, chance = brute_force_nodes()
    parents, ranks = best_first(SCORES, size)
    paths = rank_paths(parents, ranks)
    assert len(set(paths)) == len(parents) == size
    best = sum(chance[path] for path in ordered[:size - 1])
    assert sum(chance[path] for path in paths[1:]) == pytest.approx(best)
    assert all(path[:-1] in paths for path in paths[1:])        # closed under prefixes
    assert all(parent < node for node, parent in enumerate(parents))


def test_best_first_ends_where_the_candidates_end():
    """A size beyond all nodes gives all nodes: 3 + 3 * 3 + 3 * 3 * 2 and the root."""
    parents, ranks = best_first(SCORES, 1000)
    assert len(parents) == 31 and len(set(rank_paths(parents, ranks))) == 31


@pytest.mark.parametrize("scores", [[], [[]]], ids=str)
def test_best_first_without_candidates_is_a_root(scores):
    """[11] The empty tree is plain decoding."""
    assert best_first(scores, 5) == ([-1], [-1])


def test_best_first_with_certain_and_impossible_drafts():
    """Probabilities of exactly 1 and 0, as half precision gives them, still make a well-formed tree."""
    parents, ranks = best_first([[1.0, 0.0], [1.0, 0.0]], 7)
    assert len(parents) == 7 and rank_paths(parents, ranks)[:3] == [(), (0,), (0, 0)]


# ------------------------------------------------------------------------------------------ the walk

def scripted_walk(tree, answers, position=10):
    """walk() with a chooser that answers per node: (path, token, [(node, position) asked for])."""
    asked = []

    def choose(row, position):
        asked.append((int(row[0]), position))
        return answers[int(row[0])]
    path, token = walk(tree, torch.arange(len(tree))[:, None], position, choose)
    return path, token, asked


def test_walk_follows_the_answers():
    """[8] The token behind the last accepted node comes from that node's own row, and each row is asked once."""
    assert scripted_walk(SMALL, {0: 21, 2: 23, 4: 40}) == ([0, 2, 4], 40, [(0, 11), (2, 12), (4, 13)])
    assert scripted_walk(SMALL, {0: 20, 1: 23}) == ([0, 1], 23, [(0, 11), (1, 12)])     # 23 hangs below the other node
    assert scripted_walk(SMALL, {0: 22}) == ([0], 22, [(0, 11)])                        # 22 is in the tree, deeper
    assert scripted_walk(Tree([9], [-1]), {0: 9}) == ([0], 9, [(0, 11)])                # root only


def test_walk_takes_the_same_token_again_and_again():
    """[7] A chain of equal tokens: node by node, not by looking a token up in the whole tree."""
    assert scripted_walk(chain([4, 4, 4, 4]), {0: 4, 1: 4, 2: 4, 3: 4})[:2] == ([0, 1, 2, 3], 4)


# ------------------------------------------------------------------------------------------ pseudo rows

LAYERS = [[1, 1, 1], [1, 2, 3], [0, 0], [3], [2, 1], [3, 1, 2], [0, 3, 0]]      # equal, ascending, descending, mixed


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_pseudo_rows_equal_row_by_row(model, layers):
    """Every node a source: position n + i, all that the source sees, steps j <= i, from its own map at its own block."""
    transfer, tree = make_transfer(model, layers), SMALL
    logits, pseudo, taps, _ = tree_pass(model, tree, PROMPT, transfer)
    assert pseudo.shape == (len(tree), len(layers), model.config.n_embd)
    for node in range(len(tree)):
        alone = PROMPT + [tree.tokens[above] for above in path_to(tree, node)]
        _, expected = slow_forward(model, alone, transfer)
        assert_close(pseudo[node], torch.stack(expected))
        assert_close(logits[node], full_logits(model, alone)[-1])


def test_shifted_positions():
    """With learned positions the map may be helped by the difference of the two position embeddings."""
    model = make_model("learned")
    transfer = make_transfer(model, [1, 2], shift_positions=True)
    _, pseudo, taps, cache = tree_pass(model, SMALL, PROMPT, transfer)
    for node in (0, 4):
        _, expected = slow_forward(model, PROMPT + [SMALL.tokens[above] for above in path_to(SMALL, node)], transfer)
        assert_close(pseudo[node], torch.stack(expected))
    cache.commit([0])
    assert_close(transfer.draft(model, taps, 0, len(PROMPT), cache)[0, 0], pseudo[0])


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_training_equals_decoding(model, layers):
    """All rows sources, causal, without a cache: the same pseudo rows as one node at a time behind a cache."""
    transfer, T = make_transfer(model, layers), 7
    tokens = [7, 3, 3, 41, 0, 12, 49]
    x, pseudo, taps = transfer(model, torch.tensor([tokens]), torch.arange(T), torch.ones(T, T, dtype=torch.bool).tril())
    assert_close(model.unembed(x)[0], full_logits(model, tokens))
    for n in range(1, T):
        logits, decoded, node_taps, _ = tree_pass(model, Tree([tokens[n]], [-1]), tokens[:n], transfer)
        assert_close(decoded[0], pseudo[0, n])
        assert_close(logits[0], full_logits(model, tokens[:n + 1])[-1])
        for tap, node_tap in zip(taps, node_taps):              # what the maps were given
            assert_close(node_tap[0, 0], tap[0, n])


@pytest.mark.parametrize("sources", [[], [0], [3], [4, 1], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("layers", [[1, 2], [2, 1]], ids=str)
def test_sources_are_picked_and_change_nothing_else(model, layers, sources):
    """Some rows as sources: their pseudo rows in the order asked for, and the same real rows whichever they are."""
    transfer = make_transfer(model, layers)
    everything = tree_pass(model, SMALL, PROMPT, transfer)
    some = tree_pass(model, SMALL, PROMPT, transfer, torch.tensor(sources, dtype=torch.long))
    assert_close(some[0], everything[0])
    assert some[1].shape == (len(sources), 2, model.config.n_embd)
    for k, source in enumerate(sources):
        assert_close(some[1][k], everything[1][source])


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2, 4]], ids=str)
def test_draft_after_the_walk_equals_the_single_pass(model, layers, path):
    """The K pseudo rows of the accepted node, computed when the path is committed, also where it is no prefix."""
    transfer = make_transfer(model, layers)
    _, pseudo, _, _ = tree_pass(model, SMALL, PROMPT, transfer)
    _, none, taps, cache = tree_pass(model, SMALL, PROMPT, transfer, torch.tensor([], dtype=torch.long))
    cache.commit(path)
    before = cache.data[..., :cache.length, :].clone()
    drafted = transfer.draft(model, taps, path[-1], len(PROMPT) + len(path) - 1, cache)
    assert none.shape[0] == 0 and drafted.shape == (1, 1, len(layers), model.config.n_embd)
    assert_close(drafted[0, 0], pseudo[path[-1]])
    # [6] Drafting stages rows, and commits none.
    assert cache.length == len(PROMPT) + len(path) and torch.equal(cache.data[..., :cache.length, :], before)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_maps_cannot_move_real_rows(model, layers):
    """[5] Every map times 1000: the drafts go wild, the real logits and the keys and values to be kept do not move."""
    transfer, wild = make_transfer(model, layers), make_transfer(model, layers)
    for p in wild.parameters():
        p.data *= 1000
    logits, pseudo, _, cache = tree_pass(model, SMALL, PROMPT, transfer)
    logits_wild, pseudo_wild, _, cache_wild = tree_pass(model, SMALL, PROMPT, wild)
    assert torch.equal(logits_wild, logits)
    assert_close(logits, tree_pass(model, SMALL, PROMPT), 1e-12)
    for one in (cache, cache_wild):
        one.commit([0, 2, 4])
    assert torch.equal(cache.data[..., :cache.length, :], cache_wild.data[..., :cache.length, :])
    assert (pseudo_wild - pseudo).abs().max() > 1


def test_a_step_sees_earlier_steps_and_no_later_one(model):
    """[5] Changing map j moves step i if and only if j <= i (all maps at one block, so all steps are there)."""
    transfer = make_transfer(model, [1, 1, 1])
    _, pseudo, _, _ = tree_pass(model, SMALL, PROMPT, transfer)
    for j in range(3):
        changed = make_transfer(model, [1, 1, 1])
        changed.maps[j].bias.data[::2] += 0.5                   # not all alike: LayerNorm would take that out again
        moved = (tree_pass(model, SMALL, PROMPT, changed)[1] - pseudo).abs().amax(dim=(0, 2))
        for i in range(3):
            assert (moved[i] > 1e-6) if j <= i else (moved[i] < 1e-12)


def test_pseudo_rows_of_one_source_do_not_see_those_of_another(model):
    """[5] Sibling nodes as sources: a changed token in one of them leaves the pseudo rows of the other alone."""
    transfer = make_transfer(model, [1, 2])
    _, pseudo, _, _ = tree_pass(model, SMALL, PROMPT, transfer)
    _, changed, _, _ = tree_pass(model, Tree([9, 40, 21, 22, 23], SMALL.parents), PROMPT, transfer)
    moved = (changed - pseudo).abs().amax(dim=(1, 2))
    assert (moved[[0, 2, 4]] < 1e-12).all() and (moved[[1, 3]] > 1e-3).all()


def test_steps_stand_at_n_plus_i():
    """[3] The positions that rotary blocks see, in the order of appending (blocks first, then steps)."""
    model, positions = make_model("rotary"), torch.tensor([5, 6, 6])
    equal, descending = make_transfer(model, [1, 1]), make_transfer(model, [2, 1])
    assert equal.grow_positions(positions, torch.tensor([0, 2])).tolist() == [5, 6, 6] + [6, 7] + [7, 8]
    assert descending.grow_positions(positions, torch.tensor([0, 2])).tolist() == [5, 6, 6] + [7, 8] + [6, 7]


def test_mask_of_pseudo_rows_by_hand():
    """[5] Two real rows, both sources, two steps: rows are real 0, real 1, then step 1 of both, then step 2 of both."""
    transfer = make_transfer(make_model("rotary"), [1, 1])
    siblings = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()      # behind one committed row
    mask = transfer.grow_mask(siblings, torch.tensor([0, 1]))
    assert mask.int().tolist() == [[1, 1, 0, 0, 0, 0, 0],
                                   [1, 0, 1, 0, 0, 0, 0],
                                   [1, 1, 0, 1, 0, 0, 0],
                                   [1, 0, 1, 0, 1, 0, 0],
                                   [1, 1, 0, 1, 0, 1, 0],
                                   [1, 0, 1, 0, 1, 0, 1]]


def test_pseudo_rows_of_a_batch(model):
    """[17] Training takes batches: each sequence as if alone."""
    transfer, T = make_transfer(model, [2, 1]), 6
    batch = torch.tensor([[1, 2, 3, 4, 5, 6], [40, 40, 7, 8, 8, 0]])
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    together = transfer(model, batch, torch.arange(T), causal)[1]
    for row in range(2):
        assert_close(together[row], transfer(model, batch[row:row + 1], torch.arange(T), causal)[1][0])


def test_maps_start_as_the_identity(model):
    transfer = HiddenTransfer(model.config, [1, 2]).double()
    h = torch.randn(1, 3, model.config.n_embd, dtype=torch.float64)
    for i in (1, 2):
        assert torch.equal(transfer.spawn(model, i, h, torch.arange(3)), h)


@pytest.mark.parametrize("layers, message", [([], "at least one"), ([1, 4], "4 is out of range"), ([-1], "out of range"),
                                             ([1] * 64, "too many")], ids=["none", "above", "below", "too many"])
def test_transfer_layers_that_cannot_be_are_refused(model, layers, message):
    with pytest.raises(ValueError, match=message):
        HiddenTransfer(model.config, layers)


def test_shifted_positions_need_learned_ones():
    with pytest.raises(ValueError, match="learned"):
        HiddenTransfer(make_model("rotary").config, [1], shift_positions=True)

"""
Sampling: the law of what is emitted, the filters, and the seeds.

Laws are checked exactly where that is possible: the chance moves of an experiment (coins, draws, sampled drafts) are
scripted, all their outcomes are enumerated with their weights, and the sum is compared with the target to 1e-12.
Statistics (fixed seeds) only check what scripting replaces: the real dice, the Gumbel noise, torch.multinomial.
Numbers of pitfalls refer to the list of faults reported in projects of this kind.
"""
import itertools
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

import drafters
import generate as generation
import tree as tree_module
from drafters import HiddenTransferDrafter, rank_drafts
from generate import generate
from hidden_transfer import HiddenTransfer
from model import GPT, GPTConfig, causal_mask
from sampler import Sampler
from tree import Tree, chain, residual, sample_tree, walk, walk_rejection


# ------------------------------------------------------------------------------------------ tools

def float64(values):
    return torch.tensor(values, dtype=torch.float64)


class Script:
    """Chance with a memory: repeats the decisions in `prefix`, then takes the first open option every time.

    `weight` is the probability of all that was decided, `alternatives` are the prefixes that lead elsewhere.
    """

    def __init__(self, prefix):
        self.prefix, self.taken, self.weight, self.alternatives = prefix, [], 1.0, []

    def decide(self, weights):
        assert all(w >= 0 for w in weights) and abs(sum(weights) - 1) < 1e-9, f"not a distribution: {weights}"
        options = [option for option, w in enumerate(weights) if w > 0]
        if len(self.taken) < len(self.prefix):
            choice = self.prefix[len(self.taken)]
        else:
            choice = options[0]
            self.alternatives += [self.taken + [other] for other in options[1:]]
        self.taken = self.taken + [choice]
        self.weight *= weights[choice]
        return choice

    def coin(self, a):
        return self.decide([1 - a, a]) == 1

    def draw(self, p):
        return self.decide(p.tolist())


def outcomes(experiment):
    """Every outcome of experiment(script), with its weight."""
    pending, total = [[]], 0.0
    while pending:
        script = Script(pending.pop())
        outcome = experiment(script)
        pending += script.alternatives
        total += script.weight
        yield outcome, script.weight
    assert abs(total - 1) < 1e-12                                   # nothing was left out or counted twice


def law_of(experiment):
    law = defaultdict(float)
    for outcome, weight in outcomes(experiment):
        law[outcome] += weight
    return law


def assert_same_law(law, target, tolerance=1e-12):
    for outcome in set(law) | set(target):
        assert abs(law.get(outcome, 0) - target.get(outcome, 0)) < tolerance, (outcome, dict(law), dict(target))


def scripted_tree(script, root, parents, q):
    """What sample_tree promises, written independently: one sibling after another, from q without those before it."""
    node_of, taken, depth, tokens, new_parents = {0: 0}, defaultdict(list), [0], [root], [-1]
    for node, parent in enumerate(parents):
        if node == 0:
            continue
        depth.append(depth[parent] + 1)
        left = q[depth[node] - 1].double().clone()
        left[taken[parent]] = 0
        if parent not in node_of or left.sum() == 0:
            continue
        token = script.draw(left / left.sum())
        taken[parent].append(token)
        node_of[node] = len(tokens)
        tokens.append(token)
        new_parents.append(node_of[parent])
    return Tree(tokens, new_parents, q)


def random_law(rng, V, zeros=0):
    p = rng.dirichlet(np.full(V, 0.7))
    p[rng.permutation(V)[:zeros]] = 0
    return torch.from_numpy(p / p.sum())


def random_target(seed, V, length, zeros=0):
    """A tiny language model: for every text of fewer than `length` tokens, a law (V,) of the next one."""
    rng = np.random.default_rng(seed)
    return {text: random_law(rng, V, zeros) for n in range(length) for text in itertools.product(range(V), repeat=n)}


def same_everywhere(p):
    return {(): p, **{(token,): p for token in range(len(p))}}


def law_of_texts(target, length):
    """The law of the first `length` tokens that plain sampling gives."""
    law, V = {}, len(target[()])
    for text in itertools.product(range(V), repeat=length):
        law[text] = math.prod(target[text[:i]][text[i]].item() for i in range(length))
    return law


def path_tokens(tree, node):
    """Tokens from below the root down to `node`."""
    return path_tokens(tree, tree.parents[node]) + (tree.tokens[node],) if node else ()


def by_rejection(tree, probs_of, script):
    return walk_rejection(tree, probs_of, script.coin, script.draw)


def by_choice(tree, probs_of, script):
    """The coupled rule, with a scripted draw in the place of the noise."""
    rows = torch.stack([probs_of(node) for node in range(len(tree))])
    return walk(tree, rows, 0, lambda p, position: script.draw(p))


def law_emitted(target, length, make_tree, verify=by_rejection):
    """Law of the first `length` tokens: those of one verified tree, then plain sampling from the target.

    make_tree(script) -> Tree; verify(tree, probs_of, script) -> (path, token).
    """
    law, V = defaultdict(float), len(target[()])

    def experiment(script):
        tree = make_tree(script)
        probs_of = lambda node: target[path_tokens(tree, node)].clone()
        path, token = verify(tree, probs_of, script)
        assert [tree.parents[node] for node in path[1:]] == path[:-1]       # a path from the root down
        return path_tokens(tree, path[-1]) + (token,)

    for text, weight in outcomes(experiment):
        for rest in itertools.product(range(V), repeat=max(0, length - len(text))):
            whole = text + rest
            after = math.prod(target[whole[:i]][whole[i]].item() for i in range(len(text), len(whole)))
            law[whole[:length]] += weight * after
    return law


def one_step(p, children, q=None):
    """Law (V,) of the first token when the root has these children and the model's law is p."""
    tree = Tree([0] + children, [-1] + [0] * len(children), q)
    law = law_emitted(same_everywhere(float64(p)), 1, lambda script: tree)
    return [law.get((token,), 0.0) for token in range(len(p))]


def chi_square(counts, law, n):
    """(Pearson's statistic, a limit that a right law exceeds less than once in a million); rare cells are merged."""
    assert sum(counts.values()) == n and all(law.get(cell, 0) > 0 for cell in counts), "an outcome of probability 0"
    cells, rare = [], [0, 0.0]
    for cell, p in law.items():
        if n * p >= 5:
            cells.append((counts[cell], n * p))
        else:
            rare = [rare[0] + counts[cell], rare[1] + n * p]
    if rare[1] >= 1:
        cells.append(rare)
    df = len(cells) - 1
    return sum((seen - due) ** 2 / due for seen, due in cells), df + 5 * math.sqrt(2 * df) + 15


def assert_drawn_from(samples, law):
    statistic, limit = chi_square(Counter(samples), law, len(samples))
    assert statistic < limit


def tiny_model(V, seed=0, block_size=48, spread=0.6):
    """A float64 GPT with large random weights, so that its laws are far from uniform, and random maps (two steps)."""
    config = GPTConfig(vocab_size=V, block_size=block_size, n_layer=2, n_head=2, n_embd=8, mlp_width=16)
    model, transfer = GPT(config).double().eval(), HiddenTransfer(config, [0, 1]).double()
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in [*model.parameters(), *transfer.parameters()]:
            if p.dim() == 2:
                p.normal_(std=spread, generator=dice)
    return model, transfer


@torch.no_grad()
def next_logits(model, tokens):
    """Logits (T, V) of the plain forward pass without cache."""
    return model(torch.tensor([tokens]), torch.arange(len(tokens)), causal_mask(len(tokens)))[0]


def model_target(model, prompt, length, probs):
    """The model's laws in the form of random_target: text behind the prompt -> probs(logits)."""
    texts = [text for n in range(length) for text in itertools.product(range(model.config.vocab_size), repeat=n)]
    return {text: probs(next_logits(model, prompt + list(text))[-1]) for text in texts}


def reference_probs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The filters, slowly: each looks at one token at a time, on the law that the one before it has left."""
    top = max(logits)
    p = [math.exp((x - top) / temperature) for x in logits]
    p = [x / sum(p) for x in p]
    if top_k:
        p = [x if sum(y > x for y in p) < top_k else 0.0 for x in p]
        p = [x / sum(p) for x in p]
    p = [x if sum(y for y in p if y > x) < top_p or top_p == 1 else 0.0 for x in p]
    p = [x / sum(p) for x in p]
    p = [x if x >= min_p * max(p) else 0.0 for x in p]
    return [x / sum(p) for x in p]


# ------------------------------------------------------------------------------------------ rejection sampling, exactly

def test_pitfall_18_a_picked_draft_is_a_point_mass():
    """Pitfall 18: p = q = [.51, .49] and the likeliest token as the draft. The law must stay [.51, .49]."""
    assert one_step([.51, .49], [0]) == pytest.approx([.51, .49], abs=1e-12)
    # The fault itself, to show that the enumeration sees it: the same tree that claims to be sampled from q.
    q = float64([[.51, .49]])
    assert one_step([.51, .49], [0], q) == pytest.approx([1, 0], abs=1e-12)


def paths_ab_ac_ad_ef():
    """The tree of pitfall 19 (a..f are 0..5) and the laws behind each text: p(a) = p(e) = .5."""
    a, b, c, d, e, f = range(6)
    tree = Tree([0, a, e, b, c, d, f], [-1, 0, 0, 1, 1, 1, 2])
    target = random_target(19, 6, 3)
    target[()] = float64([.5, 0, 0, 0, .5, 0])
    return tree, target


def test_pitfall_19_one_draw_per_node_rejection():
    """Pitfall 19: the paths ab, ac, ad, ef start with a half of the time (84% with a draw per path)."""
    tree, target = paths_ab_ac_ad_ef()
    law = law_emitted(target, 2, lambda script: tree)
    assert sum(weight for text, weight in law.items() if text[0] == 0) == pytest.approx(.5, abs=1e-12)
    assert_same_law(law, law_of_texts(target, 2))


def test_pitfall_19_one_draw_per_node_coupled():
    """Pitfall 19, coupled: choose is called once for each accepted node, with the position of the token behind it."""
    tree, target = paths_ab_ac_ad_ef()
    calls = []

    def verify(tree, probs_of, script):
        calls.clear()
        rows = torch.stack([probs_of(node) for node in range(len(tree))])
        path, token = walk(tree, rows, 7, lambda p, position: calls.append(position) or script.draw(p))
        assert calls == [8 + i for i in range(len(path))]
        return path, token

    law = law_emitted(target, 2, lambda script: tree, verify)
    assert sum(weight for text, weight in law.items() if text[0] == 0) == pytest.approx(.5, abs=1e-12)
    assert_same_law(law, law_of_texts(target, 2))


def test_pitfall_20_residual_is_not_a_softmax(monkeypatch):
    """Pitfall 20: p = [.6, .4, 0], q = [.2, .8, 0] gives [.6, .4, 0], not [.37, .51, .11]."""
    p, q = float64([.6, .4, 0]), float64([[.2, .8, 0]])
    assert residual(p, q[0]).tolist() == pytest.approx([1, 0, 0], abs=1e-12)

    def law():
        emitted = law_emitted(same_everywhere(p), 1, lambda script: scripted_tree(script, 0, [-1, 0], q))
        return [emitted.get((token,), 0) for token in range(3)]

    assert law() == pytest.approx([.6, .4, 0], abs=1e-12)
    monkeypatch.setattr(tree_module, "residual", lambda p, q: (p - q).clamp_min(0).softmax(-1))
    assert law() == pytest.approx([.37, .51, .11], abs=.006)        # the fault, as the enumeration sees it


def test_pitfall_21_the_rest_after_rejected_siblings(monkeypatch):
    """Pitfall 21: p = [.5, .3, .2], children 0 and 1: must be p; a bonus from the full p gives [.60, .36, .04]."""
    p = [.5, .3, .2]
    for children in ([0, 1], [1, 0], [2], [2, 1, 0]):
        assert one_step(p, children) == pytest.approx(p, abs=1e-12)
    # Each rejection uses up what it was about, and the token behind the last one is drawn from what is left.
    drawn = []
    walk_rejection(Tree([0, 0, 1], [-1, 0, 0]), lambda node: float64(p), lambda a: False,
                   lambda rest: drawn.append(rest.tolist()) or 2)
    assert drawn == [pytest.approx([0, 0, 1], abs=1e-12)]


@pytest.mark.parametrize("tokens, parents", [([9, 0, 0], [-1, 0, 0]), ([9, 1, 0, 2, 1], [-1, 0, 0, 2, 0]),
                                             ([9, 1, 3, 3], [-1, 0, 1, 1])])
def test_pitfall_21_no_child_twice(tokens, parents):
    """Pitfall 21: a child listed twice would be tried twice ([.875, .075, .05]); such a tree cannot be made."""
    with pytest.raises(ValueError, match="siblings with the same token"):
        Tree(tokens, parents)
    Tree(tokens, list(range(-1, len(tokens) - 1)))                  # the same tokens below one another are fine


def test_pitfall_22_filters_hold_on_the_models_side():
    """Pitfall 22: p = [.5, .3, .15, .05], top_p .75, children 2 then 0: [.625, .375, 0, 0], 2 never appears."""
    p = Sampler(1.0, top_p=.75).probs(float64([.5, .3, .15, .05]).log())
    law = one_step(p.tolist(), [2, 0])
    assert law == pytest.approx([.625, .375, 0, 0], abs=1e-12)
    assert law[2] == law[3] == 0


@pytest.mark.parametrize("V", [2, 3, 4, 5])
@pytest.mark.parametrize("zeros_p, zeros_q", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_first_token_with_sampled_siblings(V, zeros_p, zeros_q):
    """Siblings sampled from q without replacement, summed over all ordered samples: the first token follows p."""
    for seed in range(4):
        target = random_target(seed, V, 2, zeros_p)
        q = random_law(np.random.default_rng(100 + seed), V, zeros_q)[None]
        for siblings in range(1, min(V, 3) + 1):
            law = law_emitted(target, 1, lambda script: scripted_tree(script, 0, [-1] + [0] * siblings, q))
            assert_same_law(law, law_of_texts(target, 1))


@pytest.mark.parametrize("p, q", [
    ([.5, .5], [.5, .5]),                       # p = q is never rejected
    ([1, 0], [0, 1]), ([0, 0, 1], [.5, .5, 0]),     # nothing in common
    ([1, 0, 0], [1, 0, 0]),
    ([.2, .3, .5], [0, 1, 0]),                  # q is a point mass: no second sibling
    ([.6, .4, 0], [.2, .8, 0]),
    ([.7, .1, .1, .1], [.1, .1, .1, .7]),
    ([1e-9, 1 - 1e-9], [1 - 1e-9, 1e-9]),
])
def test_first_token_in_special_cases(p, q):
    p, q = float64(p), float64([q])
    for siblings in range(4):
        law = law_emitted(same_everywhere(p), 1, lambda script: scripted_tree(script, 0, [-1] + [0] * siblings, q))
        assert_same_law(law, {(token,): p[token].item() for token in range(len(p))})


SHAPES = {                                      # parents, vocabulary, tokens compared
    "chain of 2": ([-1, 0, 1], 3, 3),
    "chain of 3": ([-1, 0, 1, 2], 2, 4),
    "2 wide": ([-1, 0, 0], 3, 2),
    "2 + lopsided 1": ([-1, 0, 0, 1], 3, 3),
    "2 + lopsided 2": ([-1, 0, 0, 2, 2], 3, 3),
    "2 x 1": ([-1, 0, 0, 1, 2], 3, 3),
    "3 + 1": ([-1, 0, 0, 0, 3], 3, 3),
    "2 x 2": ([-1, 0, 0, 1, 1, 2, 2], 2, 3),
    "2 + 2 + 1": ([-1, 0, 0, 1, 1, 3], 2, 3),
    "order of nodes mixed": ([-1, 0, 1, 0, 1], 3, 2),
    "wide": ([-1, 0, 0, 0], 5, 1),
}


@pytest.mark.parametrize("zeros_p, zeros_q", [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_tokens_with_sampled_trees(shape, zeros_p, zeros_q):
    """Deeper trees: the joint law of the first one to four tokens, where p depends on all tokens before."""
    parents, V, length = SHAPES[shape]
    target = random_target(len(parents), V, 4, zeros_p)
    rng = np.random.default_rng(V)
    q = torch.stack([random_law(rng, V, zeros_q) for _ in range(3)])
    law = law_emitted(target, length, lambda script: scripted_tree(script, 0, parents, q))
    assert_same_law(law, law_of_texts(target, length))


POINT_MASSES = [                                # tokens, parents; the root's token takes no part
    ([0], [-1]), ([0, 2], [-1, 0]), ([0, 2, 1], [-1, 0, 0]), ([0, 0, 1, 2], [-1, 0, 0, 0]),
    ([1, 0, 0, 0], [-1, 0, 1, 2]), ([2, 1, 0, 2, 1], [-1, 0, 0, 1, 2]), ([2, 1, 0, 2, 1, 0, 1], [-1, 0, 0, 1, 1, 2, 5]),
]


@pytest.mark.parametrize("verify", [by_rejection, by_choice])
@pytest.mark.parametrize("zeros_p", [0, 1, 2])
@pytest.mark.parametrize("tokens, parents", POINT_MASSES)
def test_first_tokens_with_picked_trees(tokens, parents, zeros_p, verify):
    """Trees that were picked, not sampled (q None): by rejection and by the coupled rule, the law is the target's."""
    target = random_target(len(tokens), 3, 4, zeros_p)
    tree = Tree(tokens, parents)
    assert_same_law(law_emitted(target, 3, lambda script: tree, verify), law_of_texts(target, 3))


def test_first_tokens_where_q_ends_before_the_tree():
    """A tree may be sampled at depth 1 and picked below it: depths without a q are point masses."""
    target = random_target(5, 3, 3)
    q = random_law(np.random.default_rng(5), 3)[None]

    def make_tree(script):
        top = scripted_tree(script, 0, [-1, 0, 0], q)
        return Tree(top.tokens + [2, 1, 0], top.parents + [1, 1, 2], q)

    assert_same_law(law_emitted(target, 3, make_tree), law_of_texts(target, 3))


@pytest.mark.parametrize("filters", [dict(top_k=1), dict(top_k=2), dict(top_p=.6), dict(top_p=.9, top_k=3),
                                     dict(min_p=.3), dict(temperature=.5, top_p=.8)], ids=str)
@pytest.mark.parametrize("filtered_q", [True, False])
def test_first_tokens_with_filters(filters, filtered_q):
    """Pitfall 22: p through the filters, q filtered or not; the target comes from the slow reference."""
    sampler, rng = Sampler(**{"temperature": 1.0, **filters}), np.random.default_rng(3)
    texts = [text for n in range(2) for text in itertools.product(range(4), repeat=n)]
    logits = {text: torch.from_numpy(rng.normal(size=4) * 1.5) for text in texts}
    slow = {text: float64(reference_probs(row.tolist(), **filters)) for text, row in logits.items()}
    drafting = sampler if filtered_q else Sampler(1.0)
    q = torch.stack([drafting.probs(torch.from_numpy(rng.normal(size=4))) for _ in range(2)])
    fast = lambda tree: lambda node: sampler.probs(logits[path_tokens(tree, node)])
    trees = [lambda script: scripted_tree(script, 0, [-1, 0, 0], q), lambda script: chain([0, 3]),
             lambda script: Tree([0, 2, 0], [-1, 0, 0])]
    for make_tree in trees:
        law = law_emitted(slow, 2, make_tree, lambda tree, _, script: by_rejection(tree, fast(tree), script))
        assert_same_law(law, law_of_texts(slow, 2))


def test_rejection_asks_for_one_law_per_node_and_hands_out_laws():
    """probs_of is asked for accepted nodes only, once each; coins and draws get proper probabilities."""
    target, q = random_target(8, 4, 3), torch.stack([random_law(np.random.default_rng(s), 4) for s in range(2)])

    def experiment(script):
        asked = []
        tree = scripted_tree(script, 0, [-1, 0, 0, 1], q)
        before = q.clone()
        probs_of = lambda node: asked.append(node) or target[path_tokens(tree, node)]
        path, _ = walk_rejection(tree, probs_of, script.coin, script.draw)
        assert asked == path and torch.equal(q, before)             # and the tree's q is not written to
        return ()

    law_of(experiment)                                              # Script.decide checks every probability


# ------------------------------------------------------------------------------------------ sample_tree

@pytest.mark.parametrize("q", [[.5, .3, .15, .05], [.4, 0, .35, .25], [.25, .25, .25, .25], [.97, .01, .01, .01]])
def test_sample_tree_draws_siblings_without_replacement(q):
    """The law of ordered siblings: q(a) * q(b) / (1 - q(a)) * q(c) / (1 - q(a) - q(b))."""
    law = {}
    for a, b, c in itertools.permutations([token for token in range(4) if q[token]], 3):
        law[a, b, c] = q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
    assert sum(law.values()) == pytest.approx(1)
    dice, rows = torch.Generator().manual_seed(1), float64([q])
    assert_drawn_from([tuple(sample_tree(0, [-1, 0, 0, 0], rows, dice).tokens[1:]) for _ in range(3000)], law)


def test_sample_tree_joint_law_of_a_deeper_tree():
    """Each depth has its own q, cousins are independent, and node order within the shape does not matter."""
    q, parents = float64([[.6, .3, .1], [.1, .2, .7]]), [-1, 0, 1, 0, 3]
    law = law_of(lambda script: tuple(scripted_tree(script, 2, parents, q).tokens))
    dice = torch.Generator().manual_seed(2)
    trees = [sample_tree(2, parents, q, dice) for _ in range(5000)]
    assert all(tree.parents == parents and tree.tokens[0] == 2 and tree.q is q for tree in trees)
    assert_drawn_from([tuple(tree.tokens) for tree in trees], law)


@pytest.mark.parametrize("q, parents, expected", [
    ([[.5, .5, 0, 0]] * 2, [-1, 0, 0, 0, 0], [-1, 0, 0]),  # four siblings, two tokens
    ([[.5, .5, 0, 0]] * 2, [-1, 0, 0, 0, 3, 4, 2], [-1, 0, 0, 2]),  # what hangs below the surplus goes too
    ([[.5, .5, 0, 0]] * 3, [-1, 0, 0, 0, 2, 4], [-1, 0, 0, 2, 3]),  # nodes behind the surplus are numbered anew
    ([[1., 0, 0, 0]] * 2, [-1, 0, 0, 1, 1, 2], [-1, 0, 1]),  # a point mass, as at temperature 0
    ([[1., 0, 0, 0], [.2, .2, .3, .3]], [-1, 0, 0, 0, 2, 1, 1, 3], [-1, 0, 1, 1]),  # widths that differ by depth
])
def test_sample_tree_with_more_siblings_than_tokens(q, parents, expected):
    q = float64(q)
    for seed in range(20):
        tree = sample_tree(3, parents, q, torch.Generator().manual_seed(seed))
        assert tree.parents == expected
        assert all(q[tree.depth[node] - 1, tree.tokens[node]] > 0 for node in range(1, len(tree)))


def test_sample_tree_uses_its_generator_only():
    q = float64([[.4, .3, .2, .1]] * 2)
    draw = lambda: sample_tree(0, [-1, 0, 0, 1, 2], q, torch.Generator().manual_seed(5)).tokens
    first, state = draw(), torch.get_rng_state()
    torch.rand(3)
    assert draw() == first
    torch.set_rng_state(state)
    assert draw() == first and torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------ the coupled rule

@pytest.mark.parametrize("options", [dict(), dict(temperature=.5), dict(top_k=2), dict(top_p=.8), dict(min_p=.3)])
def test_choose_draws_from_the_filtered_law(options):
    """Gumbel-max: over the positions, the chosen tokens follow the law that the slow reference computes."""
    logits, options = [1.2, -.3, .4, 2.0, -1.5], {"temperature": 1.0, **options}
    law = dict(enumerate(reference_probs(logits, **options)))
    sampler, row = Sampler(**options, seed=11), float64(logits)
    samples = [sampler.choose(row, position) for position in range(4000)]
    assert_drawn_from(samples, {token: p for token, p in law.items() if p})


def test_choose_draws_from_the_law_over_seeds_too():
    logits = torch.tensor([.6, .3, .1]).log()
    samples = [Sampler(1.0, seed=seed).choose(logits, 3) for seed in range(4000)]
    assert_drawn_from(samples, {0: .6, 1: .3, 2: .1})


def test_noise_is_gumbel_noise():
    """Kolmogorov's distance to exp(-exp(-x)); 40000 values exceed 2.5 / sqrt(n) less than once in 100000."""
    x = np.sort(torch.cat([Sampler(1.0, seed=4).noise(position, 1000) for position in range(40)]).numpy())
    below = np.exp(-np.exp(-x))
    n = len(x)
    distance = max(np.abs(below - np.arange(n) / n).max(), np.abs(below - np.arange(1, n + 1) / n).max())
    assert distance < 2.5 / math.sqrt(n)


@pytest.mark.parametrize("seed", [0, 1, 12345, 2 ** 32, 2 ** 64 - 1])
def test_noise_is_keyed_by_seed_and_position(seed):
    """Recomputed another way: one stream per seed, in which the positions lie 2**192 steps apart."""
    for position in (0, 1, 2, 511, 100000):
        bits = np.random.Philox(key=seed)
        bits.advance(position << 192)
        expected = -np.log(np.random.Generator(bits).standard_exponential(50))
        noise = Sampler(1.0, seed=seed).noise(position, 50)
        assert noise.dtype == torch.float64 and noise.tolist() == expected.tolist()
        # choose is the argmax of what the law and this noise give
        logits = np.random.default_rng(position).normal(size=50)
        assert Sampler(1.0, seed=seed).choose(torch.from_numpy(logits), position) == int((logits + expected).argmax())


def test_noise_of_different_positions_and_seeds_is_uncorrelated():
    """Correlations of 3000 values stay below 5.5 / sqrt(3000), and no value occurs twice (streams that overlap)."""
    rows = [Sampler(1.0, seed=seed).noise(position, 3000) for seed in range(4) for position in range(12)]
    rows = torch.stack(rows)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows), dtype=torch.float64)
    assert correlation.abs().max() < 5.5 / math.sqrt(3000)
    assert len(set(rows.flatten().tolist())) == rows.numel()


def test_choose_with_noise_of_the_position_only():
    """Pitfall 24: the token at a position does not depend on which positions were asked before."""
    logits, sampler = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 8))), Sampler(1.0, seed=2)
    forward = [sampler.choose(logits[i], i) for i in range(30)]
    backward = [sampler.choose(logits[i], i) for i in reversed(range(30))][::-1]
    assert forward == backward
    assert len({sampler.choose(logits[0], i) for i in range(30)}) > 1


SETTINGS = [dict(temperature=.8), dict(temperature=1.0, top_p=.9), dict(temperature=1.0, top_k=3),
            dict(temperature=1.3, min_p=.1), dict(temperature=0.0)]
DRAFTERS = [dict(tree_size=12), dict(tree_size=12, sources=12), dict(tree_size=3, shape="chain"),
            dict(tree_size=7, shape="static", acceptance=[[.5, .3, .2], [.4, .3, .1]])]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("options", DRAFTERS, ids=str)
def test_coupled_output_is_plain_sampling_token_for_token(settings, options):
    """Random maps, a small vocabulary (so drafts are accepted): every token equals plain sampling's, for each seed."""
    model, transfer = tiny_model(6, seed=1)
    passes = 0
    for seed in range(3):
        prompt, sampler = [seed, 5, 2, 2], Sampler(**settings, seed=seed)
        plain = generate(model, prompt, None, sampler, 24)
        drafted = generate(model, prompt, HiddenTransferDrafter(transfer, **options), sampler, 24)
        assert drafted.token_ids == plain.token_ids
        passes += drafted.forward_passes
    assert passes < 3 * 24                                          # the accept path was taken


def test_plain_sampling_is_choose_on_the_models_logits():
    """Generation without any drafter, recomputed without cache: position and row are the right ones."""
    model, _ = tiny_model(6, seed=1)
    sampler, tokens = Sampler(.9, top_p=.95, seed=3), [1, 4, 0]
    for _ in range(12):
        tokens.append(sampler.choose(next_logits(model, tokens)[-1], len(tokens)))
    assert generate(model, [1, 4, 0], None, sampler, 12).token_ids == tokens[3:]


def sampled_drafter(transfer, size=5):
    return HiddenTransferDrafter(transfer, size, sampled=True, acceptance=[[.6, .3], [.5, .2]])


def drafter_for(verify, transfer):
    return sampled_drafter(transfer) if verify == "rejection" else HiddenTransferDrafter(transfer, 8)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_pitfall_24_seeds(verify):
    """Pitfall 24: the same seed gives the same text, different seeds give different ones."""
    model, transfer = tiny_model(6, seed=2)

    def text(seed):
        drafter = drafter_for(verify, transfer)
        return tuple(generate(model, [1, 2], drafter, Sampler(1.0, seed=seed), 20, verify=verify).token_ids)

    seeds = [0, 1, 2, 3, 1000, 2 ** 31, 2 ** 32 - 1]
    texts = [text(seed) for seed in seeds]
    assert texts == [text(seed) for seed in seeds]
    assert len(set(texts)) == len(seeds)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("other", [2 ** 32 + 1, 2 ** 63 + 1])
def test_pitfall_24_large_seeds_differ(verify, other):
    """Pitfall 24: seeds up to 2**64 - 1 are allowed, so all of their bits must count."""
    model, transfer = tiny_model(6, seed=2)

    def text(seed):
        drafter = drafter_for(verify, transfer)
        return generate(model, [1, 2], drafter, Sampler(1.0, seed=seed), 20, verify=verify).token_ids

    assert text(1) != text(other)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_pitfall_24_other_draws_change_nothing(verify):
    """Pitfall 24: draws from the global generators, before and during generation, change no token; nor is a global
    generator used up or reseeded by generate."""
    model, transfer = tiny_model(6, seed=2)

    def run(on_pass=None):
        return generate(model, [3, 1], drafter_for(verify, transfer), Sampler(1.0, seed=5), 20, verify=verify,
                        on_pass=on_pass).token_ids

    def disturb(_=None):
        torch.manual_seed(random.getrandbits(30))
        torch.rand(7), np.random.rand(3), random.random(), torch.multinomial(torch.ones(4), 2)

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = run()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1] and random.getstate() == states[2]
    disturb()
    assert run(disturb) == first


# ------------------------------------------------------------------------------------------ filters

@pytest.mark.parametrize("temperature", [.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3, 9, 40])
@pytest.mark.parametrize("top_p, min_p", [(1.0, 0.0), (.7, 0.0), (.95, 0.0), (1e-6, 0.0), (1.0, .05), (1.0, .5),
                                          (.8, .2)])
def test_filters_against_the_slow_reference(temperature, top_k, top_p, min_p):
    sampler = Sampler(temperature, top_k, top_p, min_p)
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(size=12) * 2
        p = sampler.probs(torch.from_numpy(logits))
        expected = reference_probs(logits.tolist(), temperature, top_k, top_p, min_p)
        assert p.tolist() == pytest.approx(expected, abs=1e-12)
        assert torch.allclose(sampler.log_probs(torch.from_numpy(logits)).exp(), p, atol=0)


@pytest.mark.parametrize("options, expected", [
    (dict(top_p=.75), [.625, .375, 0, 0]),                          # pitfall 22
    (dict(top_p=.5 - 1e-6), [1, 0, 0, 0]),
    (dict(top_p=.5 + 1e-6), [.625, .375, 0, 0]),
    (dict(top_p=.96), [.5, .3, .15, .05]),
    (dict(top_p=1.0), [.5, .3, .15, .05]),
    (dict(top_k=1), [1, 0, 0, 0]),
    (dict(top_k=2), [.625, .375, 0, 0]),
    (dict(top_k=4), [.5, .3, .15, .05]),
    (dict(top_k=99), [.5, .3, .15, .05]),
    (dict(min_p=.29), [.5 / .95, .3 / .95, .15 / .95, 0]),          # .15 is .3 of the best
    (dict(min_p=.31), [.625, .375, 0, 0]),
    (dict(top_k=2, top_p=.62), [1, 0, 0, 0]),                       # .62 of what top-k has left, not of the whole
    (dict(top_k=2, top_p=.63), [.625, .375, 0, 0]),
    (dict(top_p=.85, min_p=.29), [.5 / .95, .3 / .95, .15 / .95, 0]),
], ids=str)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_filters_by_hand(options, expected, order):
    logits = float64([.5, .3, .15, .05]).log() + 4    # logits are log probabilities up to a constant
    p = Sampler(1.0, **options).probs(logits[order])
    assert p.tolist() == pytest.approx([expected[i] for i in order], abs=1e-12)


def test_pitfall_23_temperature():
    """Pitfall 23: .5 on [.5, .3, .2] gives [.658, .237, .105]; 0 and 1e-6 are argmax, without nan."""
    logits = torch.tensor([.5, .3, .2]).log()
    assert Sampler(.5).probs(logits).tolist() == pytest.approx([.25 / .38, .09 / .38, .04 / .38], abs=1e-6)
    assert Sampler(.5).probs(logits).tolist() == pytest.approx([.658, .237, .105], abs=5e-4)
    for seed in range(10):
        row = torch.from_numpy(np.random.default_rng(seed).normal(size=20) * 30)
        for temperature in (0.0, 1e-6, 1e-30):
            for options in (dict(), dict(top_k=3), dict(top_p=.9), dict(min_p=.1)):
                sampler = Sampler(temperature, **options, seed=seed)
                assert sampler.probs(row).tolist() == [float(token == row.argmax()) for token in range(20)]
                assert all(sampler.choose(row, position) == row.argmax() for position in range(3))


@pytest.mark.parametrize("options, named", [
    (dict(temperature=-1.0), "temperature"), (dict(temperature=-1e-9), "temperature"),
    (dict(temperature=math.nan), "temperature"), (dict(temperature=math.inf), "temperature"),
    (dict(top_k=-1), "top-k"),
    (dict(top_p=0.0), "top-p"), (dict(top_p=-.1), "top-p"), (dict(top_p=1.1), "top-p"), (dict(top_p=math.nan), "top-p"),
    (dict(min_p=-.1), "min-p"), (dict(min_p=1.0), "min-p"), (dict(min_p=math.nan), "min-p"),
    (dict(seed=-1), "seed"), (dict(seed=2 ** 64), "seed"), (dict(seed=math.nan), "seed"),
], ids=str)
def test_pitfall_23_bad_settings_are_refused_by_name(options, named):
    """Pitfall 23: a negative or nan temperature is refused; so is everything else that has no meaning."""
    with pytest.raises(ValueError, match=named):
        Sampler(**{"temperature": 1.0, **options})


@pytest.mark.parametrize("options", [dict(), dict(top_k=2), dict(top_k=4), dict(top_p=.9), dict(min_p=.1),
                                     dict(temperature=.1)], ids=str)
def test_logits_of_minus_infinity(options):
    """A token that the model rules out has probability 0, whatever the filters, and is never chosen."""
    sampler, row = Sampler(**{"temperature": 1.0, **options}), torch.tensor([-math.inf, 1.0, -math.inf, .5, -math.inf])
    p = sampler.probs(row)
    assert p[[0, 2, 4]].tolist() == [0, 0, 0] and p.sum().item() == pytest.approx(1, abs=1e-12) and p[3] > 0
    assert {sampler.choose(row, position) for position in range(400)} <= {1, 3}
    assert Sampler(0.0).choose(row, 0) == 1 and Sampler(0.0).probs(row).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [dict(), dict(top_p=.9), dict(top_k=50), dict(min_p=.01), dict(temperature=0.0)],
                         ids=str)
def test_low_precision_logits_are_handled_in_float64(dtype, options):
    """Acceptance arithmetic in half precision is a known fault: the result is that of the same logits in float64."""
    row = (torch.from_numpy(np.random.default_rng(1).normal(size=2000)) * 3).to(dtype)
    sampler = Sampler(**{"temperature": .7, **options}, seed=3)
    p = sampler.probs(row)
    assert p.dtype == torch.float64 and torch.equal(p, sampler.probs(row.double())) and abs(p.sum().item() - 1) < 1e-12
    assert [sampler.choose(row, i) for i in range(20)] == [sampler.choose(row.double(), i) for i in range(20)]


# ------------------------------------------------------------------------------------------ generate by rejection

def generation_law(monkeypatch, model, prompt, drafter, sampler, length):
    """Exact law of generate(..., verify="rejection"): its dice, and those of sample_tree, are scripted."""
    def experiment(script):
        monkeypatch.setattr(generation, "walk_rejection", lambda tree, probs_of, coin, draw:
                            walk_rejection(tree, probs_of, script.coin, script.draw))
        monkeypatch.setattr(drafters, "sample_tree", lambda root, parents, q, dice:
                            scripted_tree(script, root, parents, q))
        result = generate(model, prompt, drafter, sampler, length, verify="rejection")
        depths.add(max(result.accepted_per_pass))
        return tuple(result.token_ids)

    depths = set()
    law = law_of(experiment)
    return law, max(depths)


@pytest.mark.parametrize("V, size, acceptance, length, options", [
    (2, 3, [[.6], [.5]], 5, dict()),                                # a chain of 2
    (2, 5, [[.6, .3], [.5, .2]], 4, dict()),                        # two siblings at both depths
    (2, 4, [[.6, .3, .2]], 3, dict()),                              # more siblings than tokens
    (3, 3, [[.6], [.5]], 4, dict()),
    (3, 3, [[.6, .3]], 3, dict()),
    (3, 4, [[.6, .3], [.5]], 4, dict(top_k=2)),
    (3, 4, [[.6, .3], [.5]], 3, dict(temperature=.7, top_p=.8)),
    (4, 3, [[.6, .3]], 3, dict(min_p=.2)),
], ids=str)
def test_rejection_through_generate_exactly(monkeypatch, V, size, acceptance, length, options):
    """Hidden transfer with sampled trees: all random outcomes of the whole loop, summed up, give the model's law."""
    model, transfer = tiny_model(V, seed=7, spread=.3)
    options = {"temperature": 1.0, **options}
    drafter = HiddenTransferDrafter(transfer, size, sampled=True, acceptance=acceptance)
    law, deepest = generation_law(monkeypatch, model, [0, 1], drafter, Sampler(**options), length)
    slow = lambda row: float64(reference_probs(row.tolist(), **options))
    assert_same_law(law, law_of_texts(model_target(model, [0, 1], length, slow), length), 1e-11)
    assert deepest >= 2                                             # drafts were accepted


@pytest.mark.parametrize("options", [dict(shape="best-first"), dict(shape="chain")], ids=str)
def test_pitfall_18_rejection_of_picked_drafts_through_generate(monkeypatch, options):
    """Pitfall 18: drafts that were ranked, not sampled, are point masses in rejection too."""
    model, transfer = tiny_model(3, seed=8, spread=.3)
    for seed in range(3):                                           # the seed moves the ranking, never the law
        drafter = HiddenTransferDrafter(transfer, 4, **options)
        law, deepest = generation_law(monkeypatch, model, [0, 1], drafter, Sampler(1.0, seed=seed), 3)
        assert_same_law(law, law_of_texts(model_target(model, [0, 1], 3, Sampler(1.0).probs), 3), 1e-11)
        assert deepest >= 2


@pytest.mark.parametrize("V, length, options, runs", [(3, 4, dict(), 2000), (4, 3, dict(top_p=.85), 1000)], ids=str)
def test_rejection_through_generate_with_real_dice(V, length, options, runs):
    """The same over many seeds, nothing scripted: coins, draws and sampled siblings come from generate's own dice."""
    model, transfer = tiny_model(V, seed=9, block_size=16, spread=.3)
    options, accepted = {"temperature": 1.0, **options}, Counter()
    drafter, texts = sampled_drafter(transfer), []
    for seed in range(runs):
        result = generate(model, [0, 1], drafter, Sampler(**options, seed=seed), length, verify="rejection")
        texts.append(tuple(result.token_ids))
        accepted.update(result.accepted_per_pass)
    slow = lambda row: float64(reference_probs(row.tolist(), **options))
    law = law_of_texts(model_target(model, [0, 1], length, slow), length)
    assert_drawn_from(texts, {text: p for text, p in law.items() if p})
    assert accepted[1] > runs and accepted[2] > runs / 5           # both outcomes occurred


def test_the_dice_of_rejection_are_not_the_noise_that_ranks_drafts():
    """A poor draft, picked with the noise of its position: judged with that same noise, [.05, .15, .8] would shift."""
    p, q, samples = float64([.05, .15, .8]), float64([[.8, .15, .05]]), []
    for seed in range(4000):
        sampler = Sampler(1.0, seed=seed)
        tree = chain([0, rank_drafts(q.log(), sampler, 5, 1)[1][0][0]])
        path, token = generation.judge(tree, torch.stack([p, p]).log(), 4, sampler, "rejection", sampler.generator(0))
        samples.append(tree.tokens[1] if path[1:] else token)
    assert_drawn_from(samples, dict(enumerate(p.tolist())))


def test_every_sampled_tree_has_dice_of_its_own(monkeypatch):
    """Siblings drawn with the same dice in pass after pass would follow what these dice have already let through."""
    model, transfer = tiny_model(6, seed=3)
    states = []
    monkeypatch.setattr(drafters, "sample_tree", lambda root, parents, q, dice:
                        states.append(dice.get_state().numpy().tobytes()) or sample_tree(root, parents, q, dice))
    for seed in range(3):
        generate(model, [0, 1], sampled_drafter(transfer), Sampler(1.0, seed=seed), 20, verify="rejection")
    assert len(states) > 20 and len(set(states)) == len(states)


def test_pitfall_22_filter_with_real_dice():
    """Pitfall 22 within generate: in rejection mode no token outside the filter ever appears."""
    model, transfer = tiny_model(6, seed=3)
    for options in (dict(top_k=1), dict(top_k=2), dict(top_p=.4)):
        for seed in range(6):
            sampler = Sampler(1.5, **options, seed=seed)
            tokens = generate(model, [0, 1], sampled_drafter(transfer), sampler, 20, verify="rejection").token_ids
            rows = next_logits(model, [0, 1] + tokens)[1:-1]
            for row, token in zip(rows, tokens, strict=True):
                assert reference_probs(row.tolist(), 1.5, **options)[token] > 0


@pytest.mark.parametrize("kind", ["sampled", "ranked", "no drafter"])
def test_rejection_at_temperature_0_is_greedy(kind):
    """All mass lies on the argmax, so that nothing is left to chance: token for token plain greedy."""
    make = {"sampled": sampled_drafter, "ranked": lambda transfer: HiddenTransferDrafter(transfer, 8),
            "no drafter": lambda transfer: None}[kind]
    passes = 0
    for seed in range(6):
        model, transfer = tiny_model(5, seed=seed)
        prompt = [seed % 5, 3, 1]
        plain = generate(model, prompt, None, Sampler(0.0), 20)
        drafted = generate(model, prompt, make(transfer), Sampler(0.0, seed=seed), 20, verify="rejection")
        assert drafted.token_ids == plain.token_ids
        passes += drafted.forward_passes
    assert kind == "no drafter" or passes < 6 * 20


@pytest.mark.parametrize("sampled", [True, False])
def test_the_tree_says_how_it_was_drafted(sampled):
    """q is the distribution that the children were sampled from, and None where they were picked (pitfall 18)."""
    model, transfer = tiny_model(4, seed=4)
    drafter = HiddenTransferDrafter(transfer, 5, sampled=sampled, acceptance=[[.6, .3], [.5, .2]])
    trees = []
    generate(model, [0, 1], drafter, Sampler(1.0, top_k=3), 12, on_pass=lambda done: trees.append(done.tree))
    trees = [tree for tree in trees if len(tree) > 1]
    assert trees
    for tree in trees:
        if sampled:
            assert tree.q.dtype == torch.float64 and len(tree.q) >= max(tree.depth)
            assert torch.allclose(tree.q.sum(1), torch.ones(len(tree.q)).double(), atol=1e-12)
        else:
            assert tree.q is None


def test_sampled_trees_follow_the_draft_law():
    """The siblings that the drafter proposes are sampled from its own q (over seeds), in drafting order."""
    model, transfer = tiny_model(3, seed=9, block_size=16, spread=.3)
    drafter, firsts, q = sampled_drafter(transfer, 3), [], {}

    def keep(done):
        if len(done.tree) > 1:
            q[done.tree.tokens[0]] = done.tree.q
            firsts.append((done.tree.tokens[0], tuple(done.tree.children[0])))

    for seed in range(1000):
        generate(model, [0, 1], drafter, Sampler(1.0, seed=seed), 3, verify="rejection", on_pass=keep)
    roots = Counter(root for root, _ in firsts)
    root = roots.most_common(1)[0][0]
    row = q[root][0]
    law = {(a, b): (row[a] * row[b] / (1 - row[a])).item() for a, b in itertools.permutations(range(3), 2)}
    assert_drawn_from([pair for r, pair in firsts if r == root and len(pair) == 2], law)


# ---------------------------------------------------------------------------------------- drafts ranked by common noise

@pytest.mark.parametrize("temperature", [0.0, .5, 1.0, 1.7])
def test_ranked_drafts_are_the_tokens_that_will_be_drawn(temperature):
    """If the draft distribution is the model's, rank 0 at each step is the token that choose will draw there."""
    for seed in range(40):
        logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 50)))
        sampler = Sampler(temperature, seed=seed)
        scores, tokens = rank_drafts(logits, sampler, 10 + seed, 5)
        assert [row[0] for row in tokens] == [sampler.choose(logits[i], 10 + seed + i) for i in range(3)]
        assert all(len(set(row)) == 5 for row in tokens)
        assert all(row == sorted(row, reverse=True) and 0 <= row[-1] and sum(row) <= 1 + 1e-6 for row in scores)


@pytest.mark.parametrize("settings", [dict(temperature=1.0), dict(temperature=.6), dict(temperature=0.0)], ids=str)
def test_perfect_drafts_are_all_accepted(settings):
    """Within generate: with the model's own logits as drafts, a chain of 2 gives 3 tokens a pass, but for the first."""
    model, transfer = tiny_model(8, seed=5)
    for seed in range(4):
        prompt, sampler = [seed, 1, 2], Sampler(**settings, seed=seed)
        plain = generate(model, prompt, None, sampler, 19).token_ids
        rows = next_logits(model, prompt + plain)

        class Perfect(HiddenTransferDrafter):
            def draft_logits(self, round):
                return rows[len(round.tokens) - 1:][:min(2, round.max_depth)]       # row n tells of token n + 1

        result = generate(model, prompt, Perfect(transfer, 3, shape="chain"), sampler, 19)
        assert result.token_ids == plain and result.accepted_per_pass == [1] + [3] * 6


def test_pitfall_23_the_coldest_temperature():
    """Pitfall 23: a temperature at which the logits themselves would overflow is argmax too, without nan."""
    sampler = Sampler(1e-308)
    assert sampler.probs(float64([1., 30.])).tolist() == [0, 1] and sampler.choose(float64([1., 30.]), 3) == 1


def test_a_token_without_probability_is_never_accepted():
    """0 / 0 is nan, and min(1, nan) is 1 in Python: a hand-made tree may hold a token that neither p nor q allows."""
    tree = Tree([0, 0], [-1, 0], float64([[0, 1]]))
    path, token = walk_rejection(tree, lambda node: float64([0, 1]), lambda chance: chance >= 1, lambda p: int(p.argmax()))
    assert (path, token) == ([0], 1)


def test_a_seed_is_a_whole_number():
    with pytest.raises(ValueError, match="--seed"):
        Sampler(seed=1.5)

"""
The rivals: lossless like hidden transfer, with drafts that are random and with drafts that are right; what each of them drafts,
held against a slow and obvious way to compute it; their rejection sampling, summed over every random outcome; what is
refused. Their training stages and files are in test_baselines_training.py.
"""
import copy
import math
import random

import pytest
import torch

import baselines.chains
from baselines.ablations import EarlyExit, NoInteraction
from baselines.draft_model import DraftModelDrafter
from baselines.medusa import KINDS as HEADS, MedusaHeads, own_loss, unembedding
from baselines.prompt_lookup import PromptLookupDrafter
from baselines.self_speculation import SelfSpeculationDrafter, Skip, draft_cost, search, skipping_pass, worth
from closed_form import RidgeSums, last_hidden_state
from conftest import (KINDS, PROMPT, VOCAB, assert_close, fresh_cache_rows, full_logits, make_model, make_transfer, plain,
                      slow_forward)
from drafters import HiddenTransferDrafter, Round
from drafters_for_tests import Watch
from generate import generate
from replay import continue_greedily, tokens_per_pass
from model import KVCache, causal_mask
from sampler import Sampler
from test_sampling import (assert_drawn_from, assert_same_law, generation_law, law_of_texts, model_target, tiny_model)

SAMPLER = Sampler(temperature=0.8, seed=3)


# ------------------------------------------------------------------------------------------ tools

def make_heads(model, steps=3, kind="matched", seed=0) -> MedusaHeads:
    """Random heads, far enough from the model's own that each says something else."""
    heads, dice = MedusaHeads(model.config, steps, kind).start(model).to(model.embedding.weight), torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p.data += 0.5 * torch.randn(p.shape, generator=dice, dtype=torch.float64).to(p) / (math.sqrt(p.shape[1]) if p.dim() == 2 else 1)
    return heads.eval().requires_grad_(False)


def blind(model, layers, seed=0, shift_positions=False) -> NoInteraction:
    transfer = make_transfer(model, layers, seed, shift_positions)
    module = NoInteraction(model.config, layers, shift_positions).to(model.embedding.weight)
    module.load_state_dict(transfer.state_dict())
    return module.eval().requires_grad_(False)


MODULES = {"medusa": make_heads, "medusa-full": lambda model: make_heads(model, 3, "full"),
           "medusa-linear": lambda model: make_heads(model, 3, "linear"), "early-exit": lambda model: EarlyExit(make_transfer(model, [1, 3, 2])),
           "no-interaction": lambda model: blind(model, [1, 2, 2])}


def nearly(model, noise: float, seed: int = 0):
    """The model with noise on its weights: a draft model that is often right, and often not."""
    other, dice = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for p in other.parameters():
        p.data = p.data + noise * p.data.std() * torch.randn(p.shape, generator=dice, dtype=p.dtype) if p.numel() > 1 else p.data
    return other


CHAINS = {"draft-model": lambda model: DraftModelDrafter(nearly(model, 0.05), 3),
          "self-speculation": lambda model: SelfSpeculationDrafter(Skip(attention=(1,), mlp=(2,), depth=3)),
          "self-speculation, early stop": lambda model: SelfSpeculationDrafter(Skip(mlp=(0, 3), depth=5, stop=0.5)),
          "prompt-lookup": lambda model: PromptLookupDrafter()}
DRAFTERS = {name: lambda model, make=make: HiddenTransferDrafter(make(model), 16, 0) for name, make in MODULES.items()} | CHAINS


def one_round(model, tokens, drafter=None, sampler=Sampler(), max_depth=10) -> Round:
    """The state of decoding after a pass that has accepted all of `tokens` but the last."""
    cache, T = KVCache(model.config, len(tokens) + 30, dtype=model.embedding.weight.dtype), len(tokens) - 1
    fed, positions, mask = torch.tensor([tokens[:-1]]), torch.arange(T), causal_mask(T)
    _, state = (drafter or PromptLookupDrafter()).forward(model, fed, positions, mask, cache, slice(0, None))
    cache.commit(list(range(T)))
    return Round(model, cache, list(tokens), state, T - 1, sampler, max_depth)


# ------------------------------------------------------------------------------------------ lossless

@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampler", [Sampler(), SAMPLER, Sampler(1.0, top_p=0.9, seed=5)], ids=["greedy", "0.8", "top-p"])
def test_output_is_that_of_plain_decoding(model, name, sampler):
    """Token for token; some drafts are right and some wrong, so both ways through the walk are taken."""
    drafter, accepted, depths = DRAFTERS[name](model), [], []
    for start in ([3, 14, 15, 9, 26], [7], [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]):
        watch = Watch(drafter)
        result = generate(model, start, watch, sampler, 25)
        assert result.token_ids == plain(model, start, 25, sampler.choose)
        assert (result.method, result.tree_size) == (name.split(",")[0], drafter.tree_size)
        accepted += result.accepted_per_pass[1:]
        depths += [max(tree.depth) for tree in watch.trees]
    assert max(accepted) > 1 and any(count <= depth for count, depth in zip(accepted, depths))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("tree_size, sources", [(1, 0), (2, 2), (4, 0), (16, 5), (16, 16)])
def test_draft_modules_in_trees_of_any_size(model, text, name, tree_size, sources):
    watch = Watch(HiddenTransferDrafter(MODULES[name](model), tree_size, sources))
    assert generate(model, PROMPT, watch, max_new_tokens=25).token_ids == text[5:30]
    assert all(len(tree) == tree_size for tree in watch.trees[:-1])


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("sources", [4, 16])
def test_drafts_within_the_pass_and_after_it_are_the_same(model, name, sources):
    module, runs = MODULES[name](model), []
    for count in (sources, 0):
        watch = Watch(HiddenTransferDrafter(module, 16, count))
        result = generate(model, PROMPT, watch, max_new_tokens=30)
        runs.append(([(tree.tokens, tree.parents) for tree in watch.trees], result.accepted_per_pass))
    assert runs[0] == runs[1] and max(runs[0][1]) > 1


@pytest.mark.parametrize("name", MODULES)
def test_the_models_own_rows_and_cache_are_untouched(model, text, name):
    """Real rows are the plain pass's with any sources; after each round the cache is that of a fresh prefill."""
    tokens, T = torch.tensor([text[:12]]), 12
    for sources in (None, torch.tensor([11]), torch.tensor([3, 7])):
        x, pseudo, _ = MODULES[name](model)(model, tokens, torch.arange(T), causal_mask(T), None, sources)
        assert_close(model.unembed(x)[0], full_logits(model, text[:12]))
        assert pseudo.shape == (1, T if sources is None else len(sources), 3, model.config.n_embd)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_cache_round_by_round(model, text, name):
    def compare(round, tree):
        assert round.cache.length == len(round.tokens) - 1
        assert_close(round.cache.data[..., :round.cache.length, :], fresh_cache_rows(model, round.tokens[:-1]))
    result = generate(model, PROMPT, Watch(DRAFTERS[name](model), on_propose=compare), max_new_tokens=20)
    assert result.token_ids == text[5:25]


@pytest.mark.parametrize("name", DRAFTERS)
def test_up_to_the_context_limit(model, text, name):
    """As many tokens as the context has room for, and no draft beyond them."""
    result = generate(model, PROMPT, DRAFTERS[name](model), max_new_tokens=1000)
    assert result.token_ids == text[5:] and result.finish_reason == "context"


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_run_leaves_nothing_for_the_next(model, name):
    """The same run twice, with another between, drafts the same; weights stay as they were."""
    drafter, weights, runs = DRAFTERS[name](model), {key: p.clone() for key, p in model.state_dict().items()}, []
    for prompt in (PROMPT, [3, 14, 15, 9, 27, 1], PROMPT):
        watch = Watch(drafter)
        result = generate(model, prompt, watch, max_new_tokens=15)
        runs.append((result.token_ids, result.accepted_per_pass, [(tree.tokens, tree.parents) for tree in watch.trees]))
    assert runs[0] == runs[2] != runs[1]
    assert all(torch.equal(p, weights[key]) for key, p in model.state_dict().items())


# ------------------------------------------------------------------------------------------ Medusa

@pytest.mark.parametrize("kind", HEADS)
def test_heads_by_hand(model, text, kind):
    """Head i on the normed last state of the last row, by loops over the reference's rows; fewer steps read the first heads."""
    heads = make_heads(model, 3, kind)
    real, _ = slow_forward(model, text[:9])
    expected = []
    for i in range(3):
        n = model.norm(real[-1])
        step = heads.maps[i].weight @ n + heads.maps[i].bias
        state = n + (step if kind == "linear" else step * torch.sigmoid(step))
        expected.append((heads.heads[i].weight if kind == "full" else unembedding(model)) @ state)
    _, pseudo, _ = heads(model, torch.tensor([text[:9]]), torch.arange(9), causal_mask(9))
    assert_close(heads.read_out(model, pseudo[0, -1]), torch.stack(expected))
    assert_close(heads.read_out(model, pseudo[:, :, :2])[0, -1], torch.stack(expected[:2]))
    assert_close(heads.first(2).read_out(model, heads.first(2)(model, torch.tensor([text[:9]]), torch.arange(9), causal_mask(9))[1])[0, -1],
                 torch.stack(expected[:2]))


@pytest.mark.parametrize("kind", HEADS)
def test_heads_start_as_the_models_own(model, text, kind):
    """As in the paper: untrained, every head says what the model says about the next token."""
    heads = MedusaHeads(model.config, 2, kind).double().start(model)
    _, pseudo, _ = heads(model, torch.tensor([text[:9]]), torch.arange(9), causal_mask(9))
    for i in range(2):
        assert_close(heads.read_out(model, pseudo)[0, :, i], full_logits(model, text[:9]))


def test_the_number_of_parameters(model):
    """The matched kinds train as many as the transfer maps of as many steps; the full one K unembeddings more."""
    C, V = model.config.n_embd, model.config.vocab_size
    count = lambda module: sum(p.numel() for p in module.parameters())
    maps = count(make_transfer(model, [1, 2, 3]))
    assert count(make_heads(model)) == count(make_heads(model, 3, "linear")) == maps == 3 * (C * C + C)
    assert count(make_heads(model, 3, "full")) == maps + 3 * C * V


def test_removing_heads_ends_in_plain_decoding(model, text):
    """A tree is no deeper than there are heads, and without any node to draft it is plain decoding."""
    heads = make_heads(model)
    for count in (3, 2, 1):
        watch = Watch(HiddenTransferDrafter(heads.first(count), 16))
        assert generate(model, PROMPT, watch, max_new_tokens=25).token_ids == text[5:30]
        assert max(max(tree.depth) for tree in watch.trees) == count
    result = generate(model, PROMPT, HiddenTransferDrafter(heads, 1), max_new_tokens=25)
    assert result.token_ids == text[5:30] and result.accepted_per_pass == [1] * 25


@pytest.fixture(scope="module", params=KINDS)
def texts(request):
    """(model, greedy continuations of random prompts (B, 35))"""
    model, chance = make_model(request.param), random.Random(1)
    return model, continue_greedily(model, [[chance.randrange(VOCAB) for _ in range(5)] for _ in range(30)], 30)


def test_the_closed_form_of_linear_heads(texts):
    """Least squares from the normed last state to that i places ahead, by numpy-like lstsq; its drafts are worth something."""
    model, sequences = texts
    sums = RidgeSums(model.config, 2, last=True)
    sums.add(model, sequences)
    heads = MedusaHeads(model.config, 2, "linear").double().start(model, sums)
    n = torch.stack([model.norm(torch.stack(slow_forward(model, row)[0])) for row in sequences[:2].tolist()])
    assert_close(last_hidden_state(model, sequences[:2]), n)
    states = last_hidden_state(model, sequences)                            # (B, T, C)
    B, T, C = states.shape
    x = states[:, :T - 2].reshape(-1, C)
    for i in (1, 2):
        strength = 1e-3 * (x ** 2).sum(0).mean()
        rows = torch.cat([torch.cat([x, torch.ones(len(x), 1)], 1), torch.cat([strength.sqrt() * torch.eye(C), torch.zeros(C, 1)], 1)])
        targets = torch.cat([states[:, i:T - 2 + i].reshape(-1, C), torch.zeros(C, C)])
        expected = torch.linalg.lstsq(rows, targets).solution
        heads_say = x @ (torch.eye(C) + heads.maps[i - 1].weight.data.T) + heads.maps[i - 1].bias.data
        assert_close(heads_say, x @ expected[:-1] + expected[-1], 1e-7)
    untrained = MedusaHeads(model.config, 2, "linear").double().start(model)
    before, after = (tokens_per_pass(model, module, [(row, 5) for row in sequences[:8]], (16,))[16] for module in (untrained, heads))
    assert after > before


def test_the_closed_form_of_full_heads(texts):
    """The unembedding times the best map without a bias: what the model would say of the state i places ahead."""
    model, sequences = texts
    sums = RidgeSums(model.config, 2, last=True)
    sums.add(model, sequences)
    heads, states = MedusaHeads(model.config, 2, "full").double().start(model, sums), last_hidden_state(model, sequences)
    B, T, C = states.shape
    x = states[:, :T - 2].reshape(-1, C)
    rows = torch.cat([x, (1e-3 * (x ** 2).sum(0).mean()).sqrt() * torch.eye(C)])
    for i in (1, 2):
        A = torch.linalg.lstsq(rows, torch.cat([states[:, i:T - 2 + i].reshape(-1, C), torch.zeros(C, C)])).solution
        assert_close(heads.heads[i - 1].weight.data, unembedding(model) @ A.T, 1e-7)
        assert (heads.maps[i - 1].weight == 0).all() and (heads.maps[i - 1].bias == 0).all()


@pytest.mark.parametrize("B, N, K", [(2, 7, 3), (1, 3, 1), (2, 4, 3), (1, 5, 4)])
def test_own_loss_equals_plain_loops(B, N, K):
    dice = torch.Generator().manual_seed(0)
    drafts, tokens = 2 * torch.randn(B, N, K, 11, generator=dice), torch.randint(11, (B, N), generator=dice)
    expected = 0.0
    for i in range(1, K + 1):
        losses = [-math.log(drafts[b, n, i - 1].double().softmax(-1)[tokens[b, n + 1 + i]]) for b in range(B) for n in range(N) if n + 1 + i < N]
        expected += 0.8 ** i * sum(losses) / len(losses) if losses else 0.0
    assert own_loss(drafts, tokens).item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="at least 3"):
        own_loss(drafts[:, :2], tokens[:, :2])


# ------------------------------------------------------------------------------------------ the ablations

@pytest.mark.parametrize("shift", [False, True])
def test_early_exit_by_hand(text, shift):
    """The map on the state that enters block t, read out at once."""
    model, layers = make_model("learned" if shift else "rotary"), [1, 3, 0]
    transfer, tokens = make_transfer(model, layers, shift_positions=shift), text[:8]
    _, pseudo, _ = EarlyExit(transfer)(model, torch.tensor([tokens]), torch.arange(8), causal_mask(8))
    for i, t in enumerate(layers, start=1):
        shallow = copy.deepcopy(model)
        shallow.blocks = shallow.blocks[:t]
        state = transfer.maps[i - 1](slow_forward(shallow, tokens)[0][-1])
        if shift:
            state = state + model.positions.weight[7 + i] - model.positions.weight[7]
        assert_close(pseudo[0, -1, i - 1], state)
        assert_close(EarlyExit(transfer).read_out(model, pseudo)[0, -1, i - 1], model.unembed(state))


@pytest.mark.parametrize("layers", [[2, 2, 2], [1, 3, 2]], ids=str)
def test_blind_rows_by_hand(model, text, layers):
    """Each pseudo row by itself, behind a cached prefill: it sees the source's rows and itself, at position n + i."""
    module, tokens, T = blind(model, layers), text[:9], 9
    _, pseudo, taps = module(model, torch.tensor([tokens]), torch.arange(T), causal_mask(T))
    sighted = make_transfer(model, layers)(model, torch.tensor([tokens]), torch.arange(T), causal_mask(T))[1]
    for i, t in enumerate(layers, start=1):
        cache = KVCache(model.config, T + 1, dtype=torch.float64)
        model(torch.tensor([tokens]), torch.arange(T), causal_mask(T), cache)
        cache.commit(list(range(T)))
        x, rope = module.maps[i - 1](taps[i - 1][:, -1:]), model.rope(torch.tensor([T - 1 + i]))
        for layer in range(t, len(model.blocks)):
            x = model.blocks[layer](x, rope, torch.ones(1, T + 1, dtype=torch.bool), cache, layer)
        assert_close(pseudo[0, -1, i - 1], x[0, 0])
    assert (pseudo - sighted).abs().max() > 1e-3                            # what they do see matters
    assert_close(pseudo[:, :, 0], sighted[:, :, 0]) if layers[0] == min(layers) else None


# ------------------------------------------------------------------------------------------ drafters that are right

RIGHT = {"draft model": lambda model, depth, sampled: DraftModelDrafter(copy.deepcopy(model), depth, sampled),
         "self-speculation": lambda model, depth, sampled: SelfSpeculationDrafter(Skip(depth=depth), sampled)}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("sampler", [Sampler(), SAMPLER], ids=["greedy", "0.8"])
def test_a_drafter_that_is_the_model_is_always_right(model, name, depth, sampler):
    """A draft model that is the model, and self-speculation that skips nothing: every draft is accepted."""
    count = 1 + 5 * (depth + 1)
    result = generate(model, PROMPT, RIGHT[name](model, depth, False), sampler, count)
    assert result.token_ids == plain(model, PROMPT, count, sampler.choose)
    assert result.accepted_per_pass == [1] + [depth + 1] * 5


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_rejected_where_both_laws_are_one(model, name):
    """Rejection sampling with q = p: every coin falls on acceptance."""
    for seed in range(5):
        result = generate(model, PROMPT, RIGHT[name](model, 3, True), Sampler(1.0, seed=seed), 1 + 3 * 4, verify="rejection")
        assert result.accepted_per_pass == [1] + [4] * 3


# ------------------------------------------------------------------------------------------ self-speculation

def test_the_skipping_pass_by_hand(model, text):
    """The same as a whole pass of a model in which the skipped sub-layers add nothing, on a cache of the whole model."""
    skip, without = Skip(attention=(0, 2), mlp=(2, 3)), copy.deepcopy(model)
    for part in [without.blocks[t].attention.out for t in skip.attention] + [without.blocks[t].mlp.down for t in skip.mlp]:
        part.weight.data.zero_()
        if part.bias is not None:
            part.bias.data.zero_()
    caches = []
    for _ in range(2):
        caches.append(KVCache(model.config, 12, dtype=torch.float64))
        model(torch.tensor([text[:9]]), torch.arange(9), causal_mask(9), caches[-1])
        caches[-1].commit(list(range(9)))
    seen = torch.ones(1, 10, dtype=torch.bool)
    expected = without(torch.tensor([text[9:10]]), torch.tensor([9]), seen, caches[0])[0, 0]
    assert_close(skipping_pass(model, skip, text[9], 9, caches[1]), expected)
    assert (expected - full_logits(model, text[:10])[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("stop", [0.0, 0.3, 0.9, 1.0])
def test_early_stop(model, text, stop):
    """A chain ends with its first draft below the threshold, and is whole without one."""
    lengths = []
    for n in range(6, 30):
        round = one_round(model, text[:n])
        probabilities, tokens = [], text[:n]
        probe = KVCache(model.config, 60, dtype=torch.float64)
        probe.data[..., :n - 1, :], probe.length = round.cache.data[..., :n - 1, :], n - 1
        for position in range(n - 1, n + 3):
            law = skipping_pass(model, Skip(mlp=(1,)), tokens[-1], position, probe).softmax(-1)
            probe.commit([0])
            tokens = tokens + [int(law.argmax())]
            probabilities.append(law.max().item())
        expected = next((k for k, p in enumerate(probabilities, start=1) if p < stop), 4)
        tree = SelfSpeculationDrafter(Skip(mlp=(1,), depth=4, stop=stop)).propose(round)
        assert tree.tokens == tokens[n - 1:n + expected] and tree.parents == list(range(-1, expected))
        lengths.append(expected)
    assert set(lengths) == {4} if stop == 0 else min(lengths) < 4


def test_modelled_speed(model):
    """Skipping nothing is exactly as fast as plain decoding; a skipped sub-layer saves the weights that it has."""
    assert draft_cost(model, Skip()) == 1 and worth(model, Skip(), [PROMPT], 21)["speed"] == 1
    size = lambda part: sum(p.numel() for p in part.parameters())
    whole = VOCAB * model.config.n_embd + 4 * (size(model.blocks[0].attention) + size(model.blocks[0].mlp))
    skip = Skip(attention=(1,), mlp=(0, 2), depth=2)
    assert draft_cost(model, skip) == pytest.approx(1 - (size(model.blocks[0].attention) + 2 * size(model.blocks[0].mlp)) / whole)
    watch = Watch(SelfSpeculationDrafter(skip))
    result = generate(model, PROMPT, watch, max_new_tokens=21)
    drafts = sum(len(tree) - 1 for tree in watch.trees)
    assert worth(model, skip, [PROMPT], 21) == pytest.approx({
        "speed": 21 / (result.forward_passes + drafts * draft_cost(model, skip)), "tokens_per_pass": result.mean_accepted_tokens,
        "accepted": (21 - result.forward_passes) / drafts})


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_finds_what_is_of_no_use(kind):
    """Sub-layers that add nothing are skipped: every draft stays right and costs less."""
    model = make_model(kind, n_layer=3)
    for part in (model.blocks[0].mlp.down, model.blocks[2].attention.out, model.blocks[1].mlp.down):
        part.weight.data.zero_()
        if part.bias is not None:
            part.bias.data.zero_()
    skip, value = search(model, [PROMPT, [7, 8]], 16)
    assert {0, 1} <= set(skip.mlp) and 2 in skip.attention
    assert value["speed"] > 1 and value == worth(model, skip, [PROMPT, [7, 8]], 16)


# ------------------------------------------------------------------------------------------ the draft model

def test_the_draft_models_cache(model, text):
    """Whatever was accepted, its cache holds the rows of the tokens it has been fed, and they are those of the text."""
    small, seen = nearly(model, 0.05), []

    def compare(round, tree):
        rows = drafter.cache.length
        assert rows == len(drafter.fed) == len(round.tokens) + len(tree) - 2        # all but the last draft
        assert drafter.fed == (round.tokens + tree.tokens[1:])[:rows]
        assert_close(drafter.cache.data[..., :rows, :], fresh_cache_rows(small, drafter.fed))
        likeliest = full_logits(small, round.tokens + tree.tokens[1:-1])[len(round.tokens) - 1:].argmax(-1).tolist()
        assert tree.tokens[1:] == likeliest
        seen.append(len(tree))
    drafter = DraftModelDrafter(small, 3)
    result = generate(model, PROMPT, Watch(drafter, on_propose=lambda round, tree: len(tree) > 1 and compare(round, tree)), max_new_tokens=40)
    assert result.token_ids == text[5:45] and len(seen) > 5
    assert {1, 4} <= set(result.accepted_per_pass[1:])                      # none and all of the drafts were right


def test_a_draft_model_with_a_shorter_context(model, text):
    """It drafts while its own context lasts, and then no more."""
    small = make_model("rotary", block_size=20)
    watch = Watch(DraftModelDrafter(small, 3))
    assert generate(model, PROMPT, watch, max_new_tokens=40).token_ids == text[5:45]
    lengths = [len(tree) for tree in watch.trees]
    assert lengths[0] == 4 and lengths[-10:] == [1] * 10


def test_a_draft_model_of_another_vocabulary_is_refused(model):
    with pytest.raises(ValueError, match="vocabulary of 49 tokens, the model 50"):
        generate(model, PROMPT, DraftModelDrafter(make_model("rotary", vocab_size=49)))


# ------------------------------------------------------------------------------------------ prompt lookup

def test_prompt_lookup_on_a_text_that_repeats_itself():
    """A model without attention and MLP says what follows from the last token alone, so its text runs in circles."""
    model = make_model("rotary", seed=2)
    for block in model.blocks:
        block.attention.out.weight.data.zero_()
        block.mlp.down.weight.data.zero_()
    expected = plain(model, PROMPT, 50)
    result = generate(model, PROMPT, PromptLookupDrafter(depth=4), max_new_tokens=50)
    assert result.token_ids == expected
    circle = next(n for n in range(1, 50) if expected[-n - 1] == expected[-1])
    assert circle < 20 and result.accepted_per_pass[-2] == 5                # once round, every draft is right


def places_by_hand(text, n):
    """Indices behind earlier places of the last n tokens, the latest first."""
    return [end for end in range(len(text) - 1, n - 1, -1) if text[end - n:end] == text[len(text) - n:]]


@pytest.mark.parametrize("seed", range(30))
def test_matches_by_brute_force(seed):
    chance = random.Random(seed)
    text, ngram = [chance.randrange(3) for _ in range(chance.randint(1, 25))], chance.choice([1, 2, 3, 5])
    expected = []
    for n in range(ngram, 0, -1):
        expected += [end for end in places_by_hand(text, n) if n < len(text) and end not in expected]
    assert list(PromptLookupDrafter(ngram).matches(text)) == expected


@pytest.mark.parametrize("size, tokens, parents", [
    (16, [2, 3, 9, 1, 2, 4, 1, 2], [-1, 0, 1, 2, 3, 1, 5, 6]), (4, [2, 3, 9, 1], [-1, 0, 1, 2]), (1, [2], [-1])])
def test_the_tree_of_prompt_lookup(model, size, tokens, parents):
    """After 1 2: first what followed it last (3 9 1 2), then what followed it before (3 4 1 2); 3 is shared."""
    text = [1, 2, 3, 4, 1, 2, 3, 9, 1, 2]
    tree = PromptLookupDrafter(3, 4, size).propose(one_round(model, text))
    assert (tree.tokens, tree.parents) == (tokens, parents)


def test_prompt_lookup_respects_the_room_left(model):
    text = [1, 2, 3, 4, 1, 2]
    for room in range(5):
        assert max(PromptLookupDrafter().propose(one_round(model, text, max_depth=room)).depth) == min(room, 4)
    assert PromptLookupDrafter().propose(one_round(model, [1, 2, 3])).tokens == [3]         # nothing stands twice


# ------------------------------------------------------------------------------------------ rejection sampling

def laws_agree(monkeypatch, model, drafter, length, **options):
    """The law of the first tokens, with every random outcome of drafts, coins and draws summed up, is the model's."""
    def scripted(*inputs):
        """generation_law scripts the walk; the drafts of a chain are drawn by the same script."""
        monkeypatch.setattr(baselines.chains, "draw", lambda law, dice: script_of[0].draw(law))
    script_of = [None]
    import test_sampling
    keep = test_sampling.law_of

    def law_of(experiment):
        def with_script(script):
            script_of[0] = script
            return experiment(script)
        return keep(with_script)
    scripted()
    monkeypatch.setattr(test_sampling, "law_of", law_of)
    sampler = Sampler(**{"temperature": 1.0} | options)
    law, deepest = generation_law(monkeypatch, model, [0, 1], drafter, sampler, length)
    assert_same_law(law, law_of_texts(model_target(model, [0, 1], length, sampler.probs), length), 1e-11)
    assert deepest >= 2                                                     # drafts were accepted


@pytest.mark.parametrize("V, depth, length, options", [(2, 2, 5, {}), (3, 1, 4, {}), (3, 2, 4, dict(top_k=2)), (4, 2, 3, dict(temperature=.7, top_p=.8))],
                         ids=str)
@pytest.mark.parametrize("name", ["draft model", "self-speculation", "early stop"])
def test_chains_by_rejection_have_the_models_law(monkeypatch, name, V, depth, length, options):
    model, small = tiny_model(V, seed=7, spread=.3)[0], tiny_model(V, seed=8, spread=.3)[0]
    drafter = DraftModelDrafter(small, depth, True) if name == "draft model" else \
        SelfSpeculationDrafter(Skip(mlp=(0,), attention=(1,), depth=depth, stop=0.5 if name == "early stop" else 0.0), True)
    laws_agree(monkeypatch, model, drafter, length, **options)


@pytest.mark.parametrize("name", ["medusa", "medusa-full", "early-exit", "no-interaction"])
def test_trees_by_rejection_have_the_models_law(monkeypatch, name):
    model, transfer = tiny_model(3, seed=7, spread=.3)
    module = {"medusa": lambda: make_heads(model, 2), "medusa-full": lambda: make_heads(model, 2, "full"),
              "early-exit": lambda: EarlyExit(transfer), "no-interaction": lambda: blind(model, [0, 1])}[name]()
    laws_agree(monkeypatch, model, HiddenTransferDrafter(module, 4, acceptance=[[.6, .3], [.5]], sampled=True), 3)


@pytest.mark.parametrize("name", ["draft model", "self-speculation"])
def test_chains_by_rejection_with_real_dice(name):
    """Nothing scripted: the texts of many seeds follow the model's law."""
    model, small = tiny_model(3, seed=9, block_size=16, spread=.3)[0], tiny_model(3, seed=10, block_size=16, spread=.3)[0]
    drafter = DraftModelDrafter(small, 2, True) if name == "draft model" else SelfSpeculationDrafter(Skip(mlp=(0, 1), depth=2), True)
    texts = [tuple(generate(model, [0, 1], drafter, Sampler(1.0, seed=seed), 4, verify="rejection").token_ids) for seed in range(1500)]
    assert_drawn_from(texts, law_of_texts(model_target(model, [0, 1], 4, Sampler(1.0).probs), 4))


def test_a_sampled_chain_carries_the_laws_it_was_drawn_from(model, text):
    """q row by row, filtered as the sampler filters; a chain that is not sampled carries none."""
    sampler, tokens = Sampler(0.9, top_p=0.8, seed=4), text[:9]
    tree = DraftModelDrafter(small := nearly(model, 0.3), 3, True).propose(one_round(model, tokens, sampler=sampler))
    assert len(tree) == 4 and tree.q.shape == (3, VOCAB)
    for k in range(3):
        assert_close(tree.q[k], sampler.probs(full_logits(small, tokens + tree.tokens[1:1 + k])[-1]))
        assert tree.q[k][tree.tokens[k + 1]] > 0
    assert DraftModelDrafter(small, 3).propose(one_round(model, tokens, sampler=sampler)).q is None


# ------------------------------------------------------------------------------------------ what is refused

@pytest.mark.parametrize("make, message", [
    (lambda model: MedusaHeads(model.config, 2, "half"), "--heads half: it must be one of matched, full, linear"),
    (lambda model: MedusaHeads(model.config, 0), "0 Medusa heads: it must be from 1 to 63"),
    (lambda model: MedusaHeads(model.config, 64), "64 Medusa heads"),
    (lambda model: DraftModelDrafter(model, -1), "draft model: depth is -1"),
    (lambda model: SelfSpeculationDrafter(Skip(depth=5000)), "self-speculation: depth is 5000"),
    (lambda model: SelfSpeculationDrafter(Skip(stop=1.5)), "self-speculation: stop is 1.5"),
    (lambda model: generate(model, PROMPT, SelfSpeculationDrafter(Skip(attention=(4,)))), "attention 4 cannot be skipped, the model has blocks 0 to 3"),
    (lambda model: generate(model, PROMPT, SelfSpeculationDrafter(Skip(mlp=(-1,)))), "mlp -1 cannot be skipped"),
    (lambda model: PromptLookupDrafter(ngram=0), "prompt lookup: ngram is 0"),
    (lambda model: PromptLookupDrafter(depth=0), "prompt lookup: depth is 0"),
    (lambda model: PromptLookupDrafter(tree_size=0), "--tree-size 0"),
])
def test_drafters_that_cannot_be_are_refused(model, make, message):
    with pytest.raises(ValueError) as error:
        make(model)
    assert message in str(error.value) and "\n" not in str(error.value)

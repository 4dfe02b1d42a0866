"""
The model and its cache: the forward pass against a row-by-row reference, cached against uncached, masks, limits of
the cache, and what a configuration refuses. Numbers in brackets, as in [15], are those of the project's list of
pitfalls.
"""
import pytest
import torch

from conftest import (BLOCK, CONFIGS, KINDS, PROMPT, VOCAB, assert_close, fresh_cache_rows, full_logits, make_model,
                      make_transfer, plain, slow_forward)
from model import GPT, GPTConfig, KVCache, causal_mask, lay_out_for_cpu, rotary_table
from tree import Tree

TOKENS = [7, 3, 3, 41, 0, 12, 49, 8, 8, 30, 22, 5, 17]          # with repeats: equal tokens at unequal positions


def feed(model, cache, tokens, commit=True):
    """One causal pass over `tokens` behind what the cache holds: logits (T, V)."""
    start, T = cache.length, len(tokens)
    mask = torch.ones(T, start + T, dtype=torch.bool).tril(start)
    logits = model(torch.tensor([tokens]), torch.arange(start, start + T), mask, cache)[0]
    if commit:
        cache.commit(list(range(T)))
    return logits


# ------------------------------------------------------------------------------------------ the pass

def test_the_tiny_models_are_no_trivial_ones(model, text):
    """The tests in this folder say little on a model whose logits are flat or whose text is one token over and over."""
    logits = full_logits(model, text[:-1])
    assert logits.std() > 1
    assert len(set(text[5:])) >= 15
    swapped = full_logits(model, [text[1], text[0]] + text[2:-1])
    assert (logits[-1] - swapped[-1]).abs().max() > 0.01        # positions matter, even far back


def test_forward_equals_row_by_row(model):
    """Grouped heads, rotation, norms and masks, all against python loops over single vectors."""
    logits = full_logits(model, TOKENS)
    rows, _ = slow_forward(model, TOKENS)
    assert_close(logits, torch.stack([model.unembed(x) for x in rows]))


@pytest.mark.parametrize("kind, changes", [
    ("rotary", dict(n_kv_head=1, head_dim=6)), ("rotary", dict(n_kv_head=4, tie_head=True)),
    ("rotary", dict(rope_theta=500.0)), ("rotary", dict(bias=True)), ("learned", dict(mlp="gelu_tanh", bias=False)),
    ("learned", dict(n_kv_head=2, tie_head=False)), ("learned", dict(mlp="swiglu", norm="rmsnorm"))])
def test_forward_of_other_shapes(kind, changes):
    model = make_model(kind, **changes)
    rows, _ = slow_forward(model, TOKENS[:6])
    assert_close(full_logits(model, TOKENS[:6]), torch.stack([model.unembed(x) for x in rows]))


def test_rotary_sees_differences_of_positions_only():
    model, T = make_model("rotary"), len(TOKENS)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    shifted = model(torch.tensor([TOKENS]), torch.arange(T) + 31, mask)[0]
    stretched = model(torch.tensor([TOKENS]), torch.arange(T) * 2, mask)[0]
    assert_close(shifted, full_logits(model, TOKENS))
    assert (stretched - shifted).abs().max() > 0.1


def test_rotary_factors_divide_the_frequencies():
    """All factors 2 at doubled positions are no factors at all; a factor for one pair of components turns that one."""
    T, mask = len(TOKENS), torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril()
    halved = make_model("rotary", rope_factors=[2.0] * 4)
    doubled = halved(torch.tensor([TOKENS]), torch.arange(T) * 2, mask)[0]
    assert_close(doubled, full_logits(make_model("rotary"), TOKENS))
    config = make_model("rotary", rope_factors=[1.0, 1.0, 4.0, 1.0]).config
    ratio = rotary_angles(config) / rotary_angles(make_model("rotary").config)
    assert_close(ratio, torch.tensor([1.0, 1.0, 0.25, 1.0] * 2, dtype=torch.float64))


def rotary_angles(config):
    """The angles (D,) at position 1, all of them below half a turn."""
    cos, sin = rotary_table(torch.tensor([1]), config)[:, 0]
    return torch.atan2(sin, cos)


def test_read_picks_rows(model):
    T = len(TOKENS)
    args = torch.tensor([TOKENS]), torch.arange(T), torch.ones(T, T, dtype=torch.bool).tril()
    assert_close(model(*args, read=slice(T - 2, None)), model(*args)[:, -2:])


@pytest.mark.parametrize("kind", KINDS)
def test_layout_in_memory_changes_no_value(kind):
    """Matrices stored column by column, a tied one too, are the same matrices."""
    model, expected = make_model(kind), full_logits(make_model(kind), TOKENS)
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    assert lay_out_for_cpu(model) is model and not model.blocks[0].mlp.up.weight.is_contiguous()
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())
    assert_close(full_logits(model, TOKENS), expected)


def test_batch_rows_are_independent(model):
    """[17] The model itself takes batches: each row as if alone, with and without a cache."""
    other = [9, 9, 1, 2, 3, 44, 45, 46, 0, 0, 1, 10, 11]
    batch, T = torch.tensor([TOKENS, other]), len(TOKENS)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    cache = KVCache(model.config, T, batch=2, dtype=torch.float64)
    first = model(batch[:, :8], torch.arange(8), causal[:8, :8], cache)
    cache.commit(list(range(8)))
    rest = model(batch[:, 8:], torch.arange(8, T), causal[8:], cache)
    for logits in (model(batch, torch.arange(T), causal), torch.cat([first, rest], dim=1)):
        assert_close(logits[0], full_logits(model, TOKENS))
        assert_close(logits[1], full_logits(model, other))


# ------------------------------------------------------------------------------------------ cached = uncached

@pytest.mark.parametrize("split", [[1] * 13, [2] * 6 + [1], [5, 5, 3], [13], [12, 1], [1, 12], [3, 1, 7, 2]], ids=str)
def test_cached_equals_uncached(model, split):
    """[15] Values, not only shapes: a cached pass that used is_causal would see key 0 alone, and nothing would crash."""
    assert sum(split) == len(TOKENS)
    cache, logits, done = KVCache(model.config, BLOCK, dtype=torch.float64), [], 0
    for size in split:
        logits.append(feed(model, cache, TOKENS[done:done + size]))
        done += size
    assert cache.length == len(TOKENS)
    assert_close(torch.cat(logits), full_logits(model, TOKENS))
    assert_close(cache.data[..., :len(TOKENS), :], fresh_cache_rows(model, TOKENS))


def test_cache_up_to_the_last_position(model):
    """[15] A sequence of block_size tokens, with a cache that has not one row to spare."""
    tokens = (TOKENS * 5)[:BLOCK]
    cache = KVCache(model.config, BLOCK, dtype=torch.float64)
    logits = torch.cat([feed(model, cache, tokens[:BLOCK - 1]), feed(model, cache, tokens[BLOCK - 1:])])
    assert_close(logits, full_logits(model, tokens))


def test_rejected_rows_leave_no_trace(model):
    """[6] Rows that were staged and not committed are as if they had never been fed, also where more were staged."""
    cache = KVCache(model.config, BLOCK, dtype=torch.float64)
    feed(model, cache, TOKENS[:4])
    for wrong in ([1, 2, 3, 4, 5, 6], [40]):
        feed(model, cache, wrong, commit=False)
        assert cache.length == 4
    assert_close(feed(model, cache, TOKENS[4:]), full_logits(model, TOKENS)[4:])


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, 2], [0, 2, 5], [0, 1, 4], [3, 1], []], ids=str)
def test_commit_gathers_rows(model, rows):
    """[4] The accepted rows, in the order given, whichever they are; the rows before them stay."""
    cache = KVCache(model.config, 12, dtype=torch.float64)
    feed(model, cache, [5, 6, 7])
    feed(model, cache, [10, 11, 12, 13, 14, 15], commit=False)
    before = cache.data.clone()
    cache.commit(rows)
    assert cache.length == 3 + len(rows)
    expected = torch.stack([before[..., row, :] for row in [0, 1, 2] + [3 + row for row in rows]], dim=-2)
    assert torch.equal(cache.data[..., :cache.length, :], expected)


def test_truncate(model):
    """[9] Going back and on again equals never having gone forward."""
    cache = KVCache(model.config, BLOCK, dtype=torch.float64)
    feed(model, cache, TOKENS[:5] + [1, 2, 3])
    cache.truncate(5)
    assert_close(feed(model, cache, TOKENS[5:]), full_logits(model, TOKENS)[5:])
    for n in (-1, len(TOKENS) + 1):
        with pytest.raises(ValueError, match="truncate"):
            cache.truncate(n)


# ------------------------------------------------------------------------------------------ size of the cache

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, size", [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_memory_of_the_cache(kind, dtype, size):
    """Bytes = 2 (keys, values) * blocks * batch * key/value heads * capacity * head width * bytes a number."""
    config = GPTConfig(vocab_size=9, n_layer=3, n_head=4, n_embd=32, **CONFIGS[kind])
    groups = {"rotary": 2, "learned": 4}[kind]                  # grouped heads halve the cache
    cache = KVCache(config, capacity=10, batch=2, dtype=dtype)
    assert cache.data.numel() * cache.data.element_size() == 2 * 3 * 2 * groups * 10 * 8 * size
    assert cache.capacity == 10 and cache.length == 0


def test_cache_neither_grows_nor_moves(model):
    """What a pass returns are views into one block of memory: nothing is copied as the text grows."""
    cache = KVCache(model.config, 20, dtype=torch.float64)
    address, shape = cache.data.data_ptr(), cache.data.shape
    for token in range(20):
        feed(model, cache, [token])
    nothing = torch.zeros(1, model.config.n_kv_head, 0, model.config.head_dim)
    keys, values = cache.write(0, nothing, nothing)             # views over the 20 committed rows
    assert cache.data.data_ptr() == address == keys.data_ptr() and cache.data.shape == shape
    assert keys.shape == values.shape == (1, model.config.n_kv_head, 20, model.config.head_dim)


def test_full_cache_is_refused(model):
    """A pass that does not fit says how many rows there are and how many it needs; the cache remains usable."""
    cache = KVCache(model.config, 6, dtype=torch.float64)
    feed(model, cache, TOKENS[:5])
    with pytest.raises(ValueError, match="6 rows, 7 are needed"):
        feed(model, cache, TOKENS[5:7])
    assert cache.length == 5
    assert_close(feed(model, cache, TOKENS[5:6]), full_logits(model, TOKENS[:6])[5:])


def test_pseudo_rows_need_room_too(model):
    """[6] Pseudo rows are staged as well: 2 tokens with 2 steps each are 6 rows."""
    transfer, mask = make_transfer(model, [1, 2]), torch.ones(2, 2, dtype=torch.bool).tril()
    args = model, torch.tensor([[1, 2]]), torch.arange(2), mask
    with pytest.raises(ValueError, match="5 rows, 6 are needed"):
        transfer(*args, KVCache(model.config, 5, dtype=torch.float64))
    transfer(*args, KVCache(model.config, 6, dtype=torch.float64))


# ------------------------------------------------------------------------------------------ masks

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8])
def test_masks_that_are_not_boolean_are_refused(model, dtype):
    """[25] A 0/1 float mask would be added to the scores, and hide nothing."""
    mask = torch.ones(3, 3).tril().to(dtype)
    with pytest.raises(ValueError, match="mask must be boolean"):
        model(torch.tensor([[1, 2, 3]]), torch.arange(3), mask)
    with pytest.raises(ValueError, match="mask must be boolean"):
        make_transfer(model, [1])(model, torch.tensor([[1, 2, 3]]), torch.arange(3), mask)


def test_a_row_that_may_see_nothing(model):
    """[25] Softmax over nothing is 0/0: there is no nan, and no other row is moved by the blind one."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    mask[3, 2] = False
    logits = model(torch.tensor([[5, 6, 7, 8]]), torch.arange(4), mask)[0]
    assert logits.isfinite().all()
    assert_close(logits[:2], full_logits(model, [5, 6]))
    changed = model(torch.tensor([[5, 6, 30, 8]]), torch.arange(4), mask)[0]
    assert_close(changed[[0, 1, 3]], logits[[0, 1, 3]])


def test_every_row_of_our_masks_sees_itself(model):
    """[25] So no pass of ours has a blind row."""
    tree = Tree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 3])
    grown = make_transfer(model, [2, 1, 2]).grow_mask(tree.mask(3), torch.tensor([0, 2]))
    for mask, committed in ((causal_mask(6), 0), (causal_mask(4, 3), 3), (tree.mask(), 0), (tree.mask(3), 3), (grown, 3)):
        T = mask.shape[0]
        assert mask.dtype == torch.bool and mask.shape == (T, committed + T)
        assert mask[:, committed:].diagonal().all()


def test_causal_mask():
    for T, committed in ((1, 0), (4, 0), (3, 5), (1, 5)):
        expected = [[column <= committed + row for column in range(committed + T)] for row in range(T)]
        assert causal_mask(T, committed).tolist() == expected


def test_wrong_shapes_are_refused(model):
    """[15] A mask over the new rows alone, with a cache, is the classic mistake."""
    cache = KVCache(model.config, 10, dtype=torch.float64)
    feed(model, cache, [1, 2, 3])
    tokens, positions, mask = torch.tensor([[4, 5]]), torch.arange(3, 5), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask has shape"):
        model(tokens, positions, mask[:, 3:], cache)
    with pytest.raises(ValueError, match="mask has shape"):
        model(tokens, positions, mask)                          # no cache, but a mask over five rows
    with pytest.raises(ValueError, match="position_ids has shape"):
        model(tokens, torch.arange(5), mask, cache)
    with pytest.raises(ValueError, match="position_ids has shape"):
        model(tokens, positions[None], mask, cache)
    with pytest.raises(ValueError, match="batch"):
        model(tokens.repeat(2, 1), positions, mask, cache)      # [17]


# ------------------------------------------------------------------------------------------ configuration

@pytest.mark.parametrize("wrong, message", [
    (dict(position="alibi"), "position"), (dict(norm="batchnorm"), "norm"), (dict(mlp="relu"), "mlp"),
    (dict(n_layer=0), "n_layer"), (dict(n_head=0), "n_head"), (dict(vocab_size=0), "vocab_size"),
    (dict(block_size=-1), "block_size"),
    (dict(n_embd=4, n_head=6), "head_dim"), (dict(n_head=6, n_kv_head=4), "n_kv_head"), (dict(n_kv_head=-1), "n_kv_head"),
    (dict(head_dim=7), "head_dim"), (dict(mlp_width=-3), "mlp_width"),
    (dict(n_embd=32, n_head=4, rope_factors=[1.0] * 3), "rope_factors")], ids=str)
def test_configurations_that_cannot_work(wrong, message):
    with pytest.raises(ValueError, match=f"GPTConfig.{message}"):
        GPTConfig(**wrong)


def test_usual_choices_of_a_configuration():
    config = GPTConfig(n_head=8, n_embd=64)
    assert (config.n_kv_head, config.head_dim, config.mlp_width) == (8, 8, 256)
    assert GPTConfig(head_dim=7, position="learned").head_dim == 7      # only rotary positions need pairs


def test_tied_head_is_one_matrix():
    tied, untied = make_model("learned"), make_model("rotary")
    assert tied.head is None and not any("head" in name for name in tied.state_dict())
    assert untied.head.weight.shape == untied.embedding.weight.shape
    assert not torch.equal(untied.head.weight, untied.embedding.weight)


def test_initialisation_is_seeded_and_its_logits_are_nearly_flat():
    """A fresh model, as training meets it: the loss starts at log(vocabulary)."""
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(GPT(GPTConfig(vocab_size=VOCAB, block_size=BLOCK, n_layer=2, n_head=2, n_embd=16)))
    assert torch.equal(models[0].embedding.weight, models[1].embedding.weight)
    assert not torch.equal(models[0].embedding.weight, models[2].embedding.weight)
    with torch.no_grad():
        assert full_logits(models[0], PROMPT).std() < 0.2


def test_plain_reference_continues_from_where_it_stands(model):
    """Guards the reference itself: plain(a + b) is the tail of plain(a)."""
    whole = plain(model, PROMPT, 8)
    assert plain(model, PROMPT + whole[:3], 5) == whole[3:]

"""
The checkpoint and the maps that ship: 20 held-out prompts, 64 tokens each, greedy and sampled, in float64: decoding
with a tree emits token for token what one token at a time gives.
"""
import sysconfig
from pathlib import Path

import pytest
import torch

from baselines import METHODS, load_rivals
from checkpoint import TRANSFER, fingerprint, load_checkpoint, load_file, load_transfer
from data import encode_texts, is_held_out
from drafters import HiddenTransferDrafter
from generate import generate
from model import KVCache
from replay import cut_prompts
from sampler import Sampler

COUNT, LENGTH, NEW = 20, 32, 64
# some files of the standard library that are held out from training
HELD_OUT = ["concurrent/futures/process.py", "copyreg.py", "html/parser.py", "multiprocessing/connection.py", "sched.py", "secrets.py", "traceback.py"]


@pytest.fixture(scope="module")
def shipped():
    """(model in float64, its maps, prompts from files of the standard library that no training has seen)."""
    assert all(map(is_held_out, HELD_OUT))
    before = torch.get_num_threads()
    torch.set_num_threads(2)                                    # this one is no tiny model
    model, tokenizer = load_checkpoint(dtype=torch.float64)
    transfer, _ = load_transfer(TRANSFER, model)
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [(root / name).read_text(encoding="utf-8") for name in HELD_OUT]
    yield model, transfer, cut_prompts(encode_texts(texts, tokenizer), COUNT, LENGTH)
    torch.set_num_threads(before)


@torch.inference_mode()
def one_token_at_a_time(model, prompts, sampler):
    """Plain decoding of all prompts side by side, with a loop of its own: lists of NEW tokens."""
    tokens = torch.tensor(prompts)
    B, T = tokens.shape
    cache, fed = KVCache(model.config, T + NEW, B, torch.float64), tokens
    while tokens.shape[1] < T + NEW:
        N, S = fed.shape[1], tokens.shape[1]
        mask = torch.ones(N, S, dtype=torch.bool).tril(S - N)
        logits = model(fed, torch.arange(S - N, S), mask, cache)[:, -1]
        cache.commit(list(range(N)))
        fed = torch.tensor([[sampler.choose(row, S)] for row in logits])
        tokens = torch.cat([tokens, fed], dim=1)
    return tokens[:, T:].tolist()


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8, seed=1), Sampler(1.0, top_p=0.9, seed=2)], ids=["greedy", "0.8", "1.0, top-p 0.9"])
def test_equal_to_plain_decoding(shipped, sampler):
    """Trees of 16 nodes; every fourth prompt with all drafts made in the verifying pass, the others after the walk."""
    model, transfer, prompts = shipped
    passes = 0
    for n, (prompt, expected) in enumerate(zip(prompts, one_token_at_a_time(model, prompts, sampler))):
        run = generate(model, prompt, HiddenTransferDrafter(transfer, 16, sources=0 if n % 4 else 16), sampler, NEW)
        assert run.token_ids == expected, f"prompt {n}"
        passes += run.forward_passes
    assert passes < 0.9 * COUNT * NEW                           # drafts are accepted


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8, seed=1)], ids=["greedy", "0.8"])
@pytest.mark.parametrize("method", METHODS)
def test_rivals_that_ship(shipped, method, sampler):
    """All of them are there, emit plain decoding's text, and get some of their drafts accepted."""
    model, _, prompts = shipped
    drafter, passes = load_rivals(model)[method](16), 0
    for prompt, expected in zip(prompts[:4], one_token_at_a_time(model, prompts[:4], sampler)):
        run = generate(model, prompt, drafter, sampler, NEW)
        assert run.token_ids == expected
        passes += run.forward_passes
    assert passes < 4 * NEW


def test_maps_of_the_instruct_model(shipped):
    """Those for SmolLM2-135M-Instruct (whose weights do not ship): four steps of its width, for another base than ours."""
    contents = load_file(TRANSFER.parent / "transfer-smollm2-135m-instruct.pt", "transfer", "--transfer")
    assert len(contents["layers"]) == 4 and all(0 <= t < 30 for t in contents["layers"])
    assert {name: tuple(p.shape) for name, p in contents["maps"].items()} == {
        f"maps.{i}.{kind}": shape for i in range(4) for kind, shape in (("weight", (576, 576)), ("bias", (576,)))}
    assert all(p.dtype == torch.float16 and p.isfinite().all() for p in contents["maps"].values())
    assert contents["base"] != fingerprint(shipped[0]) and contents["notes"]["tokens_per_pass"][16] > 2 and contents["notes"]["tokens"] > 0
    with pytest.raises(ValueError, match="trained for another base model"):
        load_transfer(TRANSFER.parent / "transfer-smollm2-135m-instruct.pt", shipped[0])

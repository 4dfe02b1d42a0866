"""
Checkpoints of other projects. What is loaded is held against the `transformers` library where it is installed, on small
random models that it saved itself; files of other kinds are written here. Nothing is ever fetched.
"""
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import foreign
from checkpoint import fingerprint, load_checkpoint
from conftest import assert_close, full_logits, make_transfer, plain
from drafters import HiddenTransferDrafter
from drafters_for_tests import Oracle, bushy_shape
from generate import generate
from sampler import Sampler
from tokenizer import Encoding

VOCAB = 61
GPT2 = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4)
LLAMA = dict(vocab_size=VOCAB, max_position_embeddings=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, other MLP": ("GPT2", GPT2 | dict(n_inner=40, activation_function="gelu", layer_norm_epsilon=1e-3)),
    "llama": ("Llama", LLAMA),
    "llama, tied": ("Llama", LLAMA | dict(tie_word_embeddings=True, rms_norm_eps=1e-3)),
    "llama, all heads": ("Llama", LLAMA | dict(num_key_value_heads=4)),
    "llama, head_dim": ("Llama", LLAMA | dict(head_dim=16)),
    "llama, theta": ("Llama", LLAMA | dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
    "llama, llama3 scaling": ("Llama", LLAMA | dict(rope_parameters=LLAMA3 | {"rope_theta": 500.0}, head_dim=16)),
    "llama, linear scaling": ("Llama", LLAMA | dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})),
    "llama, attention biases": ("Llama", LLAMA | dict(attention_bias=True)),
    "llama, MLP biases": ("Llama", LLAMA | dict(mlp_bias=True)),
}
TOKENS = torch.randint(VOCAB, (50,), generator=torch.Generator().manual_seed(0)).tolist()
ONE_LINE = r"\A[^\n]+\Z"


def twin(family: str, dtype=torch.float64):
    """A random model of the transformers library, lively enough that every weight and every position counts."""
    transformers = pytest.importorskip("transformers", reason="the reference, transformers, is not installed")
    kind, shape = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = (transformers.GPT2LMHeadModel if kind == "GPT2" else transformers.LlamaForCausalLM)(config).eval()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        scale = 0.3 if p.dim() > 1 else 0.2
        p.data += scale * torch.randn(p.shape, generator=generator)
    return model.to(dtype)


@contextlib.contextmanager
def in_float64():
    """Where the library asks for float32 whatever the model's dtype (norms, rotary angles), it gets float64 in here."""
    transformers = pytest.importorskip("transformers", reason="the reference, transformers, is not installed")
    import safetensors.torch                        # noqa: F401  (like the next line: imported while the names mean what they say)
    transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@torch.inference_mode()
def logits_of(theirs, tokens=TOKENS) -> torch.Tensor:
    return theirs(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=list(FAMILIES))
def saved(request, tmp_path_factory):
    """(folder that the library saved, the library's logits (T, V) in float64)"""
    folder = tmp_path_factory.mktemp("saved")
    with in_float64():
        model = twin(request.param)
        logits = logits_of(model)
    model.save_pretrained(folder)
    return folder, logits


def rewrite(file, change) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.fixture
def llama(tmp_path):
    """A folder with a small llama model, to be spoilt by the test."""
    twin("llama", torch.float32).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


# ------------------------------------------------------------------------------------------ logits

def test_float64(saved):
    """The library's own arithmetic, all of it in float64."""
    model, tokenizer = load_checkpoint(saved[0], torch.float64)
    assert tokenizer is None and not model.training and not any(p.requires_grad for p in model.parameters())
    assert saved[1].std() > 0.5
    assert_close(full_logits(model, TOKENS), saved[1], 1e-9)


def test_float32(saved):
    """As it is used: the folder read by both in float32. The library rounds its rotary angles, we do not."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved[0], dtype=torch.float32).eval()
    model, _ = load_checkpoint(saved[0])
    assert model.embedding.weight.dtype == torch.float32
    assert_close(full_logits(model, TOKENS), logits_of(theirs), 1e-4 * max(1, saved[1].abs().max().item() / 10))


def test_decoding_is_exact(saved):
    """Hidden transfer with random maps, and an oracle's trees: the text is the plain one, greedy and sampled."""
    model, _ = load_checkpoint(saved[0], torch.float64)
    prompt = TOKENS[:6]
    for sampler in (Sampler(), Sampler(0.9, top_p=0.95, seed=3)):
        expected = plain(model, prompt, 30, sampler.choose)
        oracle = generate(model, prompt, Oracle(prompt + expected, bushy_shape(3, 2), 1, VOCAB), sampler, 30)
        assert oracle.token_ids == expected and oracle.mean_accepted_tokens > 3
        for layers, sources in (([1, 1, 2], 0), ([0, 2], 6)):
            drafter = HiddenTransferDrafter(make_transfer(model, layers), 6, sources)
            assert generate(model, prompt, drafter, sampler, 30).token_ids == expected


@pytest.mark.parametrize("scaling", [LLAMA3, {"type": "linear", "factor": 4.0}, None], ids=lambda scaling: str(scaling and list(scaling)[0]))
def test_rope_scaling_of_either_age(llama, scaling):
    """Configurations have it under `rope_scaling`, with `rope_theta` beside it, or under `rope_parameters`."""
    rewrite(llama / "config.json", lambda c: c | {"rope_parameters": {"rope_type": "default"} | (scaling or {}) | {"rope_theta": 500.0}})
    new, _ = load_checkpoint(llama)
    rewrite(llama / "config.json", lambda c: {k: v for k, v in c.items() if k != "rope_parameters"} | {"rope_theta": 500.0, "rope_scaling": scaling})
    old, _ = load_checkpoint(llama)
    assert new.config == old.config and new.config.rope_theta == 500.0 and (new.config.rope_factors is None) == (scaling is None)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("how", ["shards", "bin", "sharded bin", "bare keys", "old buffers"])
def test_layouts_of_the_same_weights(family, how, tmp_path):
    model = twin(family, torch.float32)
    model.save_pretrained(tmp_path / "a", max_shard_size="10kB" if how == "shards" else "1GB")
    state, expected = dict(model.state_dict()), full_logits(load_checkpoint(tmp_path / "a")[0], TOKENS)
    if how == "shards":
        assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 2
        assert_close(expected, logits_of(model), 1e-4)
        return
    (tmp_path / "a" / "model.safetensors").unlink()
    if how == "bare keys":
        state = {name.removeprefix("transformer.").removeprefix("model."): p for name, p in state.items()}
    if how == "old buffers":
        state |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
                  "transformer.h.1.attn.bias": torch.ones(1, 1, 64, 64).bool()} if family == "gpt2" else \
                 {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    if how == "sharded bin":
        halves = {"pytorch_model-1.bin": list(state)[::2], "pytorch_model-2.bin": list(state)[1::2]}
        for file, names in halves.items():
            torch.save({name: state[name] for name in names}, tmp_path / "a" / file)
        index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
        (tmp_path / "a" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, tmp_path / "a" / "pytorch_model.bin")
    assert torch.equal(full_logits(load_checkpoint(tmp_path / "a")[0], TOKENS), expected)


def test_revision_and_hub_names(llama, monkeypatch):
    """A name goes to the hub's library, with the revision; a path never does."""
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(name, revision=None, allow_patterns=None):
        asked.append((name, revision))
        if name == "owner/gone":
            raise hub.errors.LocalEntryNotFoundError("offline")
        return str(llama)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    load_checkpoint("owner/model-1.0B", revision="v2")
    load_checkpoint("gpt2-of-mine")
    assert asked == [("owner/model-1.0B", "v2"), ("gpt2-of-mine", None)]
    load_checkpoint(str(llama))
    with pytest.raises(ValueError, match="without a network, copy the model's folder here and give its path"):
        load_checkpoint("owner/gone")
    with pytest.raises(ValueError, match="no such file"):
        load_checkpoint("owner/gone.pt")
    with pytest.raises(ValueError, match="--revision"):
        load_checkpoint(str(llama), revision="v2")
    assert len(asked) == 3


def test_dtypes(llama):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        model, _ = load_checkpoint(llama, dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.blocks[0].mlp.up.weight.stride() == (1, 96)            # laid out for the CPU


# ------------------------------------------------------------------------------------------ nanoGPT

def nanogpt_checkpoint(vocab_size=VOCAB, bias=True, prefix="_orig_mod.", n_embd=32, n_layer=2) -> dict:
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    C, weights = n_embd, {"wte.weight": random(vocab_size, n_embd) * 3, "wpe.weight": random(64, n_embd) * 3}
    for h in range(n_layer):
        shapes = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        weights |= {f"h.{h}.{name}.weight": 2 * random(*shape) for name, shape in shapes.items()}
        weights |= {f"h.{h}.{name}.bias": random(shape[0]) for name, shape in shapes.items()} if bias else {}
    weights |= {"ln_f.weight": random(C) + 1} | ({"ln_f.bias": random(C)} if bias else {})
    weights = {f"{prefix}transformer.{name}": p for name, p in weights.items()}
    args = dict(n_layer=n_layer, n_head=4, n_embd=C, block_size=64, bias=bias, vocab_size=vocab_size, dropout=0.0)
    return {"model": weights | {f"{prefix}lm_head.weight": weights[f"{prefix}transformer.wte.weight"]}, "model_args": args,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "iter_num": 5, "best_val_loss": torch.tensor(1.0), "config": {"batch_size": 12}}


def nanogpt_logits(contents: dict, tokens: list[int]) -> torch.Tensor:
    """nanoGPT's model.py, in float64, written down from its description: (T, V)."""
    w = {name.split("transformer.")[-1]: p.double() for name, p in contents["model"].items()}
    T, C, H = len(tokens), contents["model_args"]["n_embd"], contents["model_args"]["n_head"]

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, (C,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]
    for h in range(contents["model_args"]["n_layer"]):
        q, k, v = (part.view(T, H, C // H).transpose(0, 1) for part in linear(norm(x, f"h.{h}.ln_1"), f"h.{h}.attn.c_attn").split(C, dim=1))
        scores = (q @ k.transpose(1, 2) / (C // H) ** 0.5).masked_fill(~torch.ones(T, T).tril().bool(), float("-inf"))
        x = x + linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(T, C), f"h.{h}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"h.{h}.ln_2"), f"h.{h}.mlp.c_fc")), f"h.{h}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].t()


@pytest.mark.parametrize("bias, prefix", [(True, ""), (True, "_orig_mod."), (False, "module._orig_mod.")])
def test_nanogpt(bias, prefix, tmp_path):
    contents = nanogpt_checkpoint(bias=bias, prefix=prefix)
    torch.save(contents, tmp_path / "ckpt.pt")
    model, tokenizer = load_checkpoint(tmp_path / "ckpt.pt", torch.float64)
    assert tokenizer is None and fingerprint(model) == fingerprint(load_checkpoint(tmp_path / "ckpt.pt")[0])
    assert_close(full_logits(model, TOKENS), nanogpt_logits(contents, TOKENS))
    expected = plain(model, TOKENS[:6], 20)
    drafter = HiddenTransferDrafter(make_transfer(model, [1, 1]), 5)
    assert generate(model, TOKENS[:6], drafter, max_new_tokens=20).token_ids == expected


def test_padded_ids_do_not_exist(tmp_path, monkeypatch):
    """50,304 rows for 50,257 tokens: the padded ones are the likeliest everywhere here, and are never emitted nor drafted."""
    contents = nanogpt_checkpoint(50304, n_embd=8)
    contents["model"]["_orig_mod.transformer.wte.weight"][50257:] *= 100
    torch.save(contents, tmp_path / "ckpt.pt")
    stand_in = Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr(foreign, "gpt2", lambda: stand_in)
    model, tokenizer = load_checkpoint(tmp_path / "ckpt.pt", torch.float64)
    reference = nanogpt_logits(contents, TOKENS)
    assert (reference.argmax(-1) >= 50257).float().mean() > 0.5
    assert tokenizer.n_vocab == model.config.vocab_size == 50257
    assert_close(full_logits(model, TOKENS), reference[:, :50257], 1e-9)
    for sampler in (Sampler(), Sampler(1.0, seed=1)):
        trees = []
        plainly = generate(model, TOKENS[:6], None, sampler, 12)
        drafted = generate(model, TOKENS[:6], HiddenTransferDrafter(make_transfer(model, [1, 1]), 5), sampler, 12, on_pass=lambda p: trees.append(p.tree))
        assert drafted.token_ids == plainly.token_ids and max(token for tree in trees for token in tree.tokens) < 50257


def test_gpt2_vocabulary_without_a_network(tmp_path, monkeypatch):
    import tiktoken
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(ConnectionError("no route")))
    torch.save(nanogpt_checkpoint(50257, n_embd=8), tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        load_checkpoint(tmp_path / "ckpt.pt")
    assert "TIKTOKEN_CACHE_DIR" in str(error.value)


PEAK = """
import sys, torch
from checkpoint import load_checkpoint
def status(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) * 1024
load_checkpoint(sys.argv[1])                            # what is imported on first use is not counted
open("/proc/self/clear_refs", "w").write("5")           # the peak starts from here
before = status("VmRSS")
model, _ = load_checkpoint(sys.argv[2], getattr(torch, sys.argv[3]))
print((status("VmHWM") - before) / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory are read from Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_of_memory(dtype, tmp_path):
    """A float32 file of 67 MB, read into float32 and into bfloat16: at most 1.3 times what the model takes."""
    torch.save(nanogpt_checkpoint(), tmp_path / "small.pt")
    torch.save(nanogpt_checkpoint(8000, n_embd=576, n_layer=3), tmp_path / "large.pt")
    command = [sys.executable, "-c", PEAK, tmp_path / "small.pt", tmp_path / "large.pt", dtype]
    ratio = float(subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True).stdout)
    assert 0.9 < ratio < 1.3


def test_several_end_tokens(tmp_path):
    """The text ends at whichever of them comes first, in plain decoding and within an accepted path."""
    torch.save(nanogpt_checkpoint(), tmp_path / "ckpt.pt")
    model, _ = load_checkpoint(tmp_path / "ckpt.pt", torch.float64)
    prompt, text = TOKENS[:6], plain(model, TOKENS[:6], 30, Sampler(1.0, seed=4).choose)
    for ends in ({text[4], text[9]}, [text[20], VOCAB + 5], (text[0],), text[7], [], None):
        wanted = {ends} if isinstance(ends, int) else set(ends or ())
        first = next((n for n, token in enumerate(text) if token in wanted), len(text) - 1)
        for drafter in (None, Oracle(prompt + text, bushy_shape(3, 2), 1, VOCAB)):
            result = generate(model, prompt, drafter, Sampler(1.0, seed=4), 30, ends)
            assert result.token_ids == text[:first + 1] and result.finish_reason == ("end" if wanted else "length")


@pytest.mark.parametrize("options, message", [(["--chat"], "without a chat template"), (["--chat", "--token-ids", "1,2"], "--prompt"),
                                              (["--revision", "v2"], "--revision is for names on the hub")])
def test_command_line(options, message):
    command = [sys.executable, "generate.py", "--method", "autoregressive", *options]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------ what cannot be read

class Payload:
    """Unpickling it creates a file."""
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def cut(file, share=0.6):
    file.write_bytes(file.read_bytes()[:int(share * file.stat().st_size)])


def change_weights(folder, change):
    from safetensors.torch import load_file, save_file
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def as_bin(folder, contents):
    (folder / "model.safetensors").unlink()
    torch.save(contents, folder / "pytorch_model.bin")


Q = "model.layers.0.self_attn.q_proj.weight"
BAD_FOLDERS = {
    "truncated": (lambda folder: cut(folder / "model.safetensors"), "model.safetensors is damaged"),
    "header alone": (lambda folder: cut(folder / "model.safetensors", 0.01), "model.safetensors is damaged"),
    "no safetensors file": (lambda folder: (folder / "model.safetensors").write_text("hello"), "model.safetensors is damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "wrong shape": (lambda folder: change_weights(folder, lambda w: w | {Q: torch.ones(32, 31)}), "q_proj.weight, .* have shapes"),
    "too many rows": (lambda folder: change_weights(folder, lambda w: w | {Q: torch.ones(48, 32)}), "have shapes"),
    "another vocabulary": (lambda folder: change_weights(folder, lambda w: w | {"model.embed_tokens.weight": torch.ones(60, 32)}), "has 60 rows"),
    "missing weight": (lambda folder: change_weights(folder, lambda w: {k: v for k, v in w.items() if k != Q}), "lack layers.0.self_attn.q_proj"),
    "left-over weight": (lambda folder: change_weights(folder, lambda w: w | {"model.layers.7.x.weight": torch.ones(1)}), "layers.7.x.weight"),
    "head though tied": (lambda folder: rewrite(folder / "config.json", lambda c: c | {"tie_word_embeddings": True}), "ties the two"),
    "unknown architecture": (lambda folder: rewrite(folder / "config.json", lambda c: c | {"model_type": "mamba"}), "'mamba'"),
    "unknown activation": (lambda folder: rewrite(folder / "config.json", lambda c: c | {"hidden_act": "relu"}), "hidden_act 'relu'"),
    "unknown scaling": (lambda folder: rewrite(folder / "config.json", lambda c: c | {"rope_parameters": {"rope_type": "yarn", "factor": 2}}), "'yarn'"),
    "partial rotary": (lambda folder: rewrite(folder / "config.json", lambda c: c | {"rope_parameters": {"partial_rotary_factor": 0.5}}), "partial_rotary_factor"),
    "quantized": (lambda folder: rewrite(folder / "config.json", lambda c: c | {"quantization_config": {"bits": 4}}), "quantization_config"),
    "no width": (lambda folder: rewrite(folder / "config.json", lambda c: {k: v for k, v in c.items() if k != "hidden_size"}), "hidden_size"),
    "width of words": (lambda folder: rewrite(folder / "config.json", lambda c: c | {"hidden_size": "wide"}), ""),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json does not hold"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "no such file; .* config.json"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"added_tokens": []}'), "tokenizer.json cannot be read"),
    "pickled code": (lambda folder: as_bin(folder, {Q: Payload(folder / "trap")}), "pickled code, which is never run"),
    "no tensors": (lambda folder: as_bin(folder, {"a": 1}), "something else than named tensors"),
    "truncated bin": (lambda folder: (as_bin(folder, {Q: torch.ones(9)}), cut(folder / "pytorch_model.bin")), "pytorch_model.bin cannot be read"),
}


@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_bad_folders(bad, llama):
    """One line that names the folder and what is wrong with it; no code runs."""
    if bad == "broken tokenizer":
        pytest.importorskip("tokenizers")
    spoil, message = BAD_FOLDERS[bad]
    spoil(llama)
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        load_checkpoint(llama)
    assert str(error.value).startswith(f"--checkpoint {llama}") and str(error.value).count("--checkpoint") == 1
    assert re.search(message, str(error.value))
    assert not (llama / "trap").exists()


@pytest.mark.parametrize("spoil, message", [(lambda file: file.unlink(), "is missing"), (cut, "is damaged")], ids=["missing", "truncated"])
def test_bad_shards(spoil, message, tmp_path):
    twin("llama", torch.float32).save_pretrained(tmp_path / "a", max_shard_size="10kB")
    spoil(sorted((tmp_path / "a").glob("model-00002-of-*.safetensors"))[0])
    with pytest.raises(ValueError, match=f"model-00002-of.* {message}"):
        load_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("change, message", [
    (lambda c: c | {"model_args": {}}, "vocab_size"), (lambda c: {"model_args": c["model_args"]}, "'model'"),
    (lambda c: c | {"model": {}}, "lack"), (lambda c: c | {"model_args": c["model_args"] | {"n_head": 5}}, ""),
    (lambda c: c | {"model_args": c["model_args"] | {"bias": False}}, "no place in the model"), (lambda c: c | {"model_args": None}, ""),
    (lambda c: {"weights": c["model"]}, "is not a file of this project's kind"), (lambda c: [1], "is not a file of this project's kind")])
def test_bad_nanogpt_files(change, message, tmp_path):
    torch.save(change(nanogpt_checkpoint()), tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=ONE_LINE) as error:
        load_checkpoint(tmp_path / "ckpt.pt")
    assert message in str(error.value) and "ckpt.pt" in str(error.value)


def test_pickle_in_a_nanogpt_file(tmp_path):
    torch.save(nanogpt_checkpoint() | {"config": Payload(tmp_path / "trap")}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="pickled code, which is never run"):
        load_checkpoint(tmp_path / "ckpt.pt")
    assert not (tmp_path / "trap").exists()


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    """Without the extra, one line says what installs it; the import alone of foreign.py needs none of them."""
    for module in ("safetensors", "gguf", "huggingface_hub", "tokenizers", "jinja2"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for name, module in ((tmp_path, "safetensors"), (tmp_path / "a.gguf", "gguf"), ("owner/model", "huggingface_hub")):
        with pytest.raises(ValueError, match=f"package {module} is needed .*pip install -r requirements-checkpoints.txt"):
            load_checkpoint(name)

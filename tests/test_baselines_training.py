"""
The rivals' stages of train.py on a tiny base, the files they write, and how those are found again: in checkpoints/ or in a
folder that is given, made for this base or for another.
"""
import json
import shutil

import pytest
import torch

import generate as generation
import distillation
import train
from baselines import METHODS, load_modules, load_rivals
from baselines.medusa import KINDS as HEADS, unembedding
from checkpoint import fingerprint, load_checkpoint, load_file, save_checkpoint
from conftest import make_model
from generate import generate
from sampler import Sampler
from test_cli import call
from test_training import same, small, state_of, train_maps         # noqa: F401  (small is a fixture)

STAGES = {"medusa": ["--stage", "medusa"], "medusa-full": ["--stage", "medusa", "--heads", "full"],
          "medusa-linear": ["--stage", "medusa", "--heads", "linear"], "no-interaction": ["--stage", "no-interaction"],
          "draft-model": ["--stage", "draft-model"], "self-speculation": ["--stage", "self-speculation"]}


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """(folder with transfer.pt and every rival's file, {method: what its stage printed})"""
    out, printed = tmp_path_factory.mktemp("rivals"), {}
    for method, stage in {"transfer": [], **STAGES}.items():
        more = ["--batch", 2, "--length", 8] if method == "self-speculation" else ["--lr", 1e-2]
        status, printed[method] = train_maps(small, out, *stage, *more)
        assert status == 0
    return out, printed


def test_every_stage_writes_its_file(trained):
    out, printed = trained
    assert {f"{method}.pt" for method in STAGES} | {"transfer.pt"} <= {file.name for file in out.iterdir()}
    for method in STAGES:
        assert f"saved {out}/{method}.pt" in printed[method]


@pytest.mark.parametrize("method", [*HEADS.values(), "no-interaction", "draft-model"])
def test_every_stage_learns(small, tmp_path, method):
    """The losses of the last steps are below those of the first ones (steps see different windows, so several are taken)."""
    assert train_maps(small, tmp_path, *STAGES[method], "--lr", 3e-3, "--steps", 60, "--batch", 4, "--warm-start-tokens", 60)[0] == 0
    losses = [loss for _, loss in state_of(tmp_path, method)["history"]]
    assert len(losses) == 60 and sum(losses[-15:]) < 0.99 * sum(losses[:15])


def test_the_rivals_are_those_whose_files_are_there(trained, small, tmp_path):
    """In the order of the table; each decodes plain's text, greedy, sampled and by rejection."""
    model, _ = load_checkpoint(small / "tiny.pt", torch.float64)
    rivals = load_rivals(model, trained[0])
    assert tuple(rivals) == METHODS
    for sampler in (Sampler(), Sampler(1.0, seed=1)):
        plain = generate(model, [1, 2, 3], None, sampler, 12)
        for name, make in rivals.items():
            result = generate(model, [1, 2, 3], make(6), sampler, 12)
            assert result.token_ids == plain.token_ids and result.method == name and result.tree_size <= 6
            assert len(generate(model, [1, 2, 3], make(6, sampled=True), sampler, 12, verify="rejection").token_ids) == 12
    assert list(load_modules(model, trained[0])) == ["hidden-transfer", "medusa", "medusa-linear", "medusa-full", "early-exit", "no-interaction"]
    shutil.copy(trained[0] / "medusa-full.pt", tmp_path)
    assert list(load_rivals(model, tmp_path)) == ["medusa-full", "prompt-lookup"] and list(load_modules(model, tmp_path)) == ["medusa-full"]


@pytest.mark.parametrize("tree_size", [1, 2, 3, 9])
def test_no_tree_is_larger_than_asked_for(trained, small, tree_size):
    model, _ = load_checkpoint(small / "tiny.pt", torch.float64)
    for name, make in load_rivals(model, trained[0]).items():
        sizes = []
        result = generate(model, [1, 2, 3], make(tree_size), max_new_tokens=10, on_pass=lambda one: sizes.append(len(one.tree)))
        assert max(sizes) <= tree_size and result.tree_size <= tree_size, name


def test_files_hold_what_was_trained(trained, small):
    """Weights in float16, rounded from those of the last state; options and notes make the module anew."""
    model, _ = load_checkpoint(small / "tiny.pt")
    for method in [*HEADS.values(), "no-interaction"]:
        contents, state = load_file(trained[0] / f"{method}.pt", method, "drafter"), state_of(trained[0], method)
        assert same(contents["weights"], {name: p.half() for name, p in state["module"].items()}) and contents["base"] == fingerprint(model)
        module = load_modules(model, trained[0])[method]
        assert module.method == method and len(module.layers) == 2
        assert all(torch.equal(p, contents["weights"][name].float()) for name, p in module.state_dict().items())
        assert len(contents["notes"]["acceptance"]) == 2 and 1 <= contents["notes"]["tokens_per_pass"][16] <= 3


def test_where_the_heads_start(small, tmp_path):
    """A run that moves nothing: the model's own head, or the closed form where it was asked for."""
    model, _ = load_checkpoint(small / "tiny.pt")
    for method, more in (("medusa", []), ("medusa-full", ["--heads", "full"])):
        train_maps(small, tmp_path, "--stage", "medusa", *more, "--no-closed-form", "--steps", 1, "--lr", 1e-12)
        weights = load_file(tmp_path / f"{method}.pt", method, "drafter")["weights"]
        assert all((p == 0).all() for name, p in weights.items() if name.startswith("maps"))
        assert all(torch.allclose(p.float(), unembedding(model), atol=2e-3) for name, p in weights.items() if name.startswith("heads"))
    for more in (["--heads", "linear"], ["--heads", "full"]):
        _, printed = train_maps(small, tmp_path, "--stage", "medusa", *more, "--steps", 1, "--lr", 1e-12)
        weights = load_file(tmp_path / f"medusa-{more[1]}.pt", f"medusa-{more[1]}", "drafter")["weights"]
        moved = weights["maps.0.weight"].float() if more[1] == "linear" else weights["heads.0.weight"].float() - unembedding(model)
        assert moved.abs().max() > 0.05


def test_the_loss_asked_for_is_the_one_that_trains(small, tmp_path):
    """Medusa's own loss starts at the cross-entropy of the text, distillation at a divergence: two numbers."""
    losses = {}
    for loss in ("distillation", "own"):
        status, _ = train_maps(small, tmp_path / loss, "--stage", "medusa", "--loss", loss)
        assert status == 0
        losses[loss] = state_of(tmp_path / loss, "medusa")["history"]
    assert losses["own"][0][1] != losses["distillation"][0][1] and losses["own"][-1][1] < losses["own"][0][1]


def test_the_base_does_not_change(small, trained):
    model, _ = load_checkpoint(small / "tiny.pt")
    assert fingerprint(model) == load_file(trained[0] / "transfer.pt", "transfer", "--transfer")["base"]


@pytest.mark.parametrize("stage", ["medusa", "draft-model"])
def test_resumed_runs_end_at_the_same_weights(small, trained, tmp_path, stage):
    """From the state of step 3 to that of step 6: as an uninterrupted run."""
    status, _ = train_maps(small, tmp_path, *STAGES[stage], "--lr", 1e-2, "--save-every", 3)
    whole = state_of(tmp_path, stage)
    assert status == 0 and same(whole["module"], state_of(trained[0], stage)["module"])
    with pytest.MonkeyPatch.context() as patch:
        def windows(stream, args, step, micro):
            if step == 4:
                raise KeyboardInterrupt
            return fetch(stream, args, step, micro)
        fetch = distillation.windows
        patch.setattr(distillation, "windows", windows)
        with pytest.raises(KeyboardInterrupt):
            train_maps(small, tmp_path / "cut", *STAGES[stage], "--lr", 1e-2, "--save-every", 3)
    assert state_of(tmp_path / "cut", stage)["step"] == 3
    status, _ = train_maps(small, tmp_path / "cut", *STAGES[stage], "--lr", 1e-2, "--save-every", 3, "--resume")
    assert status == 0 and same(state_of(tmp_path / "cut", stage)["module"], whole["module"])


# ------------------------------------------------------------------------------------------ what is refused

@pytest.fixture(scope="module")
def other(small):
    """A base with the same shape and other weights."""
    path = small / "other.pt"
    save_checkpoint(make_model("rotary", seed=9, vocab_size=4096, n_embd=16, n_layer=3, block_size=256), path, "tiny.tiktoken")
    return path


def test_rivals_of_another_base(trained, other, tmp_path):
    """In a folder that is given: one line that names the file. In checkpoints/: passed over."""
    model, _ = load_checkpoint(other)
    for method in STAGES:
        folder = tmp_path / method
        folder.mkdir()
        shutil.copy(trained[0] / f"{method}.pt", folder)
        with pytest.raises(ValueError) as error:
            load_rivals(model, folder)
        assert f"{method}.pt was trained for another base model" in str(error.value) and "\n" not in str(error.value)
    assert list(load_rivals(model)) == ["prompt-lookup"] and load_modules(model) == {}


@pytest.mark.parametrize("method", STAGES)
@pytest.mark.parametrize("damage", ["cut", "kind", "options"])
def test_damaged_files(trained, small, tmp_path, method, damage):
    model, _ = load_checkpoint(small / "tiny.pt")
    file = tmp_path / f"{method}.pt"
    if damage == "cut":
        file.write_bytes((trained[0] / file.name).read_bytes()[:500])
    elif damage == "kind":
        shutil.copy(trained[0] / "transfer.pt", file)
    else:
        contents = load_file(trained[0] / file.name, method, "drafter")
        torch.save(contents | {"options": {"nonsense": 3}}, file)
    with pytest.raises(ValueError) as error:
        load_rivals(model, tmp_path)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_is_not_there(small):
    with pytest.raises(ValueError, match="--rivals nowhere: no such folder"):
        load_rivals(load_checkpoint(small / "tiny.pt")[0], "nowhere")


@pytest.mark.parametrize("arguments, message", [
    (["--heads", "full"], "--heads is for --stage medusa"), (["--loss", "own"], "--loss is for --stage medusa"),
    (["--no-closed-form"], "--closed-form is for --stage medusa"), (["--stage", "no-interaction", "--loss", "own"], "--loss is for"),
    (["--stage", "medusa", "--heads", "half"], "--heads"), (["--stage", "medusa", "--loss", "l2"], "--loss"), (["--stage", "eagle"], "--stage"),
    (["--stage", "draft-model", "--data", "nowhere"], "--data nowhere"), (["--stage", "self-speculation", "--data", "nowhere"], "--data nowhere")])
def test_train_refuses(small, tmp_path, arguments, message):
    status, printed, error = call(train.main, "--checkpoint", small / "tiny.pt", "--out", tmp_path, "--device", "cpu", *arguments)
    assert status == 2 and message in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("method", METHODS)
def test_the_command_line(small, trained, method):
    """generate.py --method: plain's text by each rival, checked in float64."""
    usual = ["--checkpoint", small / "tiny.pt", "--rivals", trained[0], "--dtype", "float64", "--device", "cpu", "--prompt", "import os",
             "--max-new-tokens", 16, "--json", "--method", method]
    status, printed, error = call(generation.main, *usual, "--tree-size", 6, "--check")
    report = json.loads(printed.splitlines()[-1])
    assert (status, error) == (0, "") and report["identical"] and report["method"] == method and report["tree_size"] <= 6
    assert call(generation.main, *usual, "--verify", "rejection", "--temperature", "1")[0] == 0


@pytest.mark.parametrize("arguments, message", [
    (["--method", "medusa", "--tree-size", "auto"], "no --tree-size auto"), (["--method", "draft-model", "--sources", "2"], "no --sources"),
    (["--method", "medusa", "--rivals", "nowhere"], "--rivals nowhere: no such folder"), (["--method", "medusa", "--rivals", "{empty}"], "holds no file of it")])
def test_generate_refuses(small, trained, tmp_path, arguments, message):
    arguments = [argument.format(empty=tmp_path) for argument in arguments]
    usual = ["--checkpoint", small / "tiny.pt", "--device", "cpu"] + ([] if "--rivals" in arguments else ["--rivals", trained[0]])
    status, printed, error = call(generation.main, *usual, *arguments)
    assert status == 2 and message in error and error.count("\n") == 1

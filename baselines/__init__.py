"""
The rivals of hidden transfer, each behind the interface of drafters.py, so that all of them are lossless by the same walk.

    rivals = load_rivals(model)                     # those whose files lie in checkpoints/ and were made for this model
    generate(model, prompt_ids, rivals["medusa"](tree_size=16))

What train.py saves for a rival is <method>.pt; early exit reads transfer.pt, and prompt lookup needs no file. A rival of one's own
is one more class with `forward` and `propose`, and one more line here.
"""
from dataclasses import replace
from pathlib import Path

from baselines.ablations import EarlyExit, NoInteraction
from baselines.draft_model import DraftModelDrafter
from baselines.medusa import KINDS, MedusaHeads
from baselines.prompt_lookup import PromptLookupDrafter
from baselines.self_speculation import SelfSpeculationDrafter, Skip, check_skip
from checkpoint import BASE, check_base, fingerprint, load_file, load_module, load_transfer, read_torch, shipped_maps
from drafters import HiddenTransferDrafter, usual_sources
from hidden_transfer import HiddenTransfer
from model import GPT, GPTConfig

METHODS = ("medusa", "medusa-linear", "medusa-full", "early-exit", "no-interaction", "self-speculation", "draft-model", "prompt-lookup")


def load_modules(model: GPT, folder=None) -> dict:
    """{name: draft module} of those whose files lie in the folder: hidden transfer, then the others in the order of METHODS.

    folder: checkpoints/ if not given, where files made for another base are passed over; in a folder that is given
    they are an error (ValueError in one line), as damaged files are anywhere.
    """
    return {name: module for name, (module, _) in open_modules(model, files_for(model, folder)).items()}


def load_rivals(model: GPT, folder=None) -> dict:
    """{name: make(tree_size, sampled=False) -> drafter}, in the order of METHODS; folder as for load_modules.

    tree_size counts the root; chains are no deeper than what was found best for them. sampled: for verify="rejection",
    drafts are drawn from the draft distribution (prompt lookup has none, its drafts stay what they are).
    """
    files = files_for(model, folder)
    rivals = {name: module_maker(model, module, notes) for name, (module, notes) in open_modules(model, files).items()}
    if "self-speculation" in files:
        skip = load_skip(files["self-speculation"], model)
        rivals["self-speculation"] = lambda tree_size, sampled=False: SelfSpeculationDrafter(
            replace(skip, depth=min(skip.depth, tree_size - 1)), sampled)
    if "draft-model" in files:
        small, notes = load_module(files["draft-model"], "draft-model", model, lambda options: GPT(GPTConfig(**options)))
        rivals["draft-model"] = lambda tree_size, sampled=False: DraftModelDrafter(small, min(notes["depth"], tree_size - 1), sampled)
    rivals["prompt-lookup"] = lambda tree_size, sampled=False: PromptLookupDrafter(tree_size=tree_size)
    return {name: rivals[name] for name in METHODS if name in rivals}


def files_for(model: GPT, folder) -> dict[str, Path]:
    """{method: its file}; hidden transfer and early exit share the maps, which lie in checkpoints/ for more than one base."""
    place = BASE.parent if folder is None else Path(folder)
    if not place.is_dir():
        raise ValueError(f"--rivals {folder}: no such folder")
    shipped, own = place.resolve() == BASE.parent.resolve(), fingerprint(model)
    maps = shipped_maps(own) if shipped else place / "transfer.pt"
    files = {method: maps if method in (HiddenTransfer.method, EarlyExit.method) else place / f"{method}.pt"
             for method in (HiddenTransfer.method, *METHODS)}
    files = {method: file for method, file in files.items() if file is not None and file.is_file()}
    return {method: file for method, file in files.items() if not shipped or read_torch(file, "drafter", on_disk=True).get("base") == own}


def open_modules(model: GPT, files: dict[str, Path]) -> dict:
    """{method: (draft module, notes)}"""
    config, modules = model.config, {}
    if HiddenTransfer.method in files:
        transfer, notes = load_transfer(files[HiddenTransfer.method], model)
        modules = {HiddenTransfer.method: (transfer, notes), EarlyExit.method: (EarlyExit(transfer), notes)}
    for method in KINDS.values():
        if method in files:
            modules[method] = load_module(files[method], method, model, lambda options: MedusaHeads(config, **options))
    if NoInteraction.method in files:
        modules[NoInteraction.method] = load_module(files[NoInteraction.method], NoInteraction.method, model,
                                                    lambda options: NoInteraction(config, **options))
    return {method: modules[method] for method in (HiddenTransfer.method, *METHODS) if method in modules}


def load_skip(file, model: GPT) -> Skip:
    contents = load_file(file, SelfSpeculationDrafter.method, "drafter")
    check_base(contents, file, model)
    try:
        skip = Skip(**contents["options"])
        check_skip(skip, model)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"drafter {file}: {error}") from None
    return skip


def module_maker(model: GPT, module, notes):
    """A maker of drafters from a draft module, with the usual sources; where no block is left to climb, drafts cost nothing but
    themselves and are made after the walk, for the accepted node alone."""
    def make(tree_size: int, sampled: bool = False):
        sources = usual_sources(model, tree_size) if isinstance(module, HiddenTransfer) else 0
        return HiddenTransferDrafter(module, tree_size, sources, acceptance=notes.get("acceptance"), sampled=sampled)
    return make

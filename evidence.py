"""
The measurements that figures.py draws. Each takes a Subject and returns (rows, settings): a list of dicts, one for each line of
the table, and a sentence on how it was measured. Nothing here draws, and nothing here is a number from elsewhere.
"""
import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from baselines.ablations import NoInteraction
from baselines.medusa import MedusaHeads
from compare import summary
from drafters import HiddenTransferDrafter, usual_sources
from generate import generate
from measure import paired_speed
from model import GPT, causal_mask
from questions import spread
from replay import RANKS, TREE_SIZES, Response, agreement, draft_whole, tokens_per_pass
from sampler import Sampler
from subject import Subject, machine, pass_costs, windows_of
from tree import best_first

RAISED = (2, 4, 8, 16, 32, 64)                      # tree sizes whose speed is measured
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
LAST = "last hidden state"                          # the end of the sweep over blocks: a linear map behind the final norm


# ------------------------------------------------------------------------------------- 1: cost of a pass

def cost_table(subject: Subject, other: GPT | None = None):
    """other: the same model in a second dtype."""
    table = []
    for model, costs in [(subject.model, subject.costs)] + ([(other, pass_costs(other))] if other is not None else []):
        dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
        table += [{"dtype": dtype, "rows": n, "ms": 1000 * s, "multiple of one row": s / costs[1]} for n, s in costs.items()]
    return table, f"{machine(subject.model)}; behind a context of {min(128, subject.model.config.block_size // 2)} tokens, median of 15 passes"


# ------------------------------------------------------------------------------------- 2, 5: accuracy

def accuracy_rows(name: str, subject: Subject, module) -> list[dict]:
    table = agreement(subject.model, module, subject.exam.text)
    return [{"drafts": name, "step": i} | {f"top-{rank}": share for rank, share in zip(RANKS, row)} for i, row in enumerate(table, start=1)]


def accuracy_table(subject: Subject):
    """How often the model's own argmax is among the first n candidates of a step, by method."""
    rows = []
    for name, module in tqdm(subject.modules.items(), desc="methods", leave=False, dynamic_ncols=True):
        rows += accuracy_rows(name, subject, module)
    return rows, f"share of the positions of held-out text, {windows_of(subject)}"


def sight_table(subject: Subject):
    """Hidden transfer with and without the sight of earlier pseudo states: on the same maps, and on maps trained without it."""
    same = NoInteraction(subject.model.config, subject.transfer.layers, subject.transfer.shift_positions)
    same.load_state_dict(subject.transfer.state_dict())
    sides = {"sees the earlier steps": subject.transfer, "same maps, blind": same.to(subject.model.embedding.weight).eval()}
    if "no-interaction" in subject.modules:
        sides["blind, trained so"] = subject.modules["no-interaction"]
    rows = []
    for name, module in tqdm(sides.items(), desc="sides", leave=False, dynamic_ncols=True):
        worth = tokens_per_pass(subject.model, module, subject.second_half, (16, 64), subject.exam.new)
        rows += [row | {f"tokens/pass, {size} nodes": worth[size] for size in worth} for row in accuracy_rows(name, subject, module)]
    return rows, f"held-out text, {windows_of(subject)}, and {len(subject.second_half)} greedy continuations for tokens per pass"


# ------------------------------------------------------------------------------------- 3: similarity

NEIGHBOURS = "two true states, side by side"


@torch.inference_mode()
def states_by_block(model, transfer, tokens: torch.Tensor):
    """What enters each block, and what leaves the last, in a pass over tokens (1, T) in which every row is a source:
    [(real (T, C), {step: pseudo (T, C)})], L + 1 of them; row n of a step stands for the token n + step."""
    T, device, entering = tokens.shape[1], tokens.device, []
    hooks = [block.register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0][0])) for block in model.blocks]
    try:
        x, pseudo, _ = transfer(model, tokens, torch.arange(T, device=device), causal_mask(T, device=device))
    finally:
        for hook in hooks:
            hook.remove()
    states = []
    for block, rows in enumerate(entering):                                 # (R, C): the real rows, then a group of T for each step present
        present = [i for i in transfer.order if transfer.layers[i - 1] <= block]
        states.append((rows[:T], {i: rows[T * n:T * (n + 1)] for n, i in enumerate(present, start=1)}))
    return states + [(x[0], {i: pseudo[0, :, i - 1] for i in transfer.order})]


def similarity_table(subject: Subject):
    """Mean cosine of a pseudo state and the true state that it stands for, block by block: as they are, and with the mean true
    state of the window taken from both, since all hidden states share a large part."""
    model = subject.model
    early, sums = model.config.n_layer // 4, {}                             # sums: (name, block) -> [(cosine, centred cosine)]
    sides = {"": subject.transfer, f", closed form at block {early}": subject.filled([early])}

    def note(name, block, these, those, mean):
        sums.setdefault((name, block), []).append([F.cosine_similarity(these - shift, those - shift, dim=-1).mean().item() for shift in (0, mean)])

    for tokens, _ in tqdm(subject.exam.text, desc="windows", leave=False, dynamic_ncols=True):
        for how, transfer in sides.items():
            for block, (real, pseudo) in enumerate(states_by_block(model, transfer, tokens[None])):
                real = real.float()
                for i, rows in sorted(pseudo.items()):
                    note(f"step {i}{how}", block, rows[:-i].float(), real[i:], real.mean(0))
                if not how:
                    note(NEIGHBOURS, block, real[:-1], real[1:], real.mean(0))
    names = sorted({name for name, _ in sums}, key=lambda name: (name == NEIGHBOURS, "," in name, name))
    rows = [{"states": name, "block": block, **dict(zip(("cosine", "centred cosine"), np.mean(sums[name, block], axis=0).tolist()))}
            for name in names for block in range(len(model.blocks) + 1) if (name, block) in sums]
    return rows, (f"means over held-out text, {windows_of(subject)}; block t: the states entering it, {len(model.blocks)}: those behind the last one; centred: "
                  "with the mean true state of the window taken from both; for comparison the true states of two tokens that stand side by side")


# ------------------------------------------------------------------------------------- 4: the block of the transfer

def block_table(subject: Subject):
    """Top-1 and top-5 agreement of maps in closed form, by the block of the transfer: step 1 alone, and step 2 with step 1 at its best block."""
    def shares(module, step):
        row = agreement(subject.model, module, subject.exam.text)[step - 1]
        return {f"step {step}, top-1": row[0], f"step {step}, top-5": row[RANKS.index(5)]}

    model, weight = subject.model, subject.model.embedding.weight
    rows = [{"block": t} for t in range(model.config.n_layer)] + [{"block": LAST}]
    end = MedusaHeads(model.config, 2, "linear").to(weight.device).start(model, subject.sums[1]).to(weight).eval()
    for row in tqdm(rows, desc="step 1", leave=False, dynamic_ncols=True):
        row |= shares(end if row["block"] == LAST else subject.filled([row["block"]]), 1)
    best = max(rows[:-1], key=lambda row: row["step 1, top-1"])["block"]
    for row in tqdm(rows, desc="step 2", leave=False, dynamic_ncols=True):
        row |= shares(end if row["block"] == LAST else subject.filled([best, row["block"]]), 2)
    return rows, (f"maps in closed form (ridge regression on {subject.sums[0].rows:,} rows of text), without distillation; step 2 with step 1 at block "
                  f"{best}; held-out text, {windows_of(subject)}; the last point is a linear map of the last hidden state, which sees no pseudo state")


# ------------------------------------------------------------------------------------- 6: tokens per pass

def promised(scores, sizes) -> list[float]:
    """What a best-first tree of each size should yield if rank r at depth d is right with chance scores[d - 1][r], whatever
    stands above it: 1 for the model's own token, and the chance of every node."""
    parents, ranks = best_first(scores, max(sizes))
    chance, depth = [1.0], [0]
    for parent, rank in zip(parents[1:], ranks[1:]):
        chance.append(chance[parent] * scores[depth[parent]][rank])
        depth.append(depth[parent] + 1)
    return [sum(chance[:size]) for size in sizes]


def tokens_table(subject: Subject):
    model, responses, largest = subject.model, subject.second_half, max(TREE_SIZES)
    best = tokens_per_pass(model, subject.transfer, responses, TREE_SIZES, subject.exam.new)
    static = tokens_per_pass(model, subject.transfer, responses, TREE_SIZES, subject.exam.new, subject.acceptance)
    scores = [rows for tokens, prompt in responses for rows in draft_whole(model, subject.transfer, tokens, largest, prompt - 1)[0]]
    promises = np.mean([promised(rows, TREE_SIZES) for rows in scores], axis=0)
    rows = [{"tree size": size, "best-first, measured": best[size], "best-first, expected": float(promise),
             "static, measured": static[size], "static, expected": expected}
            for size, promise, expected in zip(TREE_SIZES, promises, promised(subject.acceptance, TREE_SIZES))]
    return rows, (f"greedy, {len(responses)} held-out prompts; the static trees come from the acceptance on {len(subject.first_half)} others; "
                  "expected: the chances of the nodes added up, from the draft distributions (best-first) or the acceptance (static), as if the steps "
                  "were right or wrong independently")


# ------------------------------------------------------------------------------------- 7: speed

def tree_cost(costs: dict[int, float], size: int, sources: int, layers: list[int], n_layer: int) -> float:
    """Seconds of a pass over `size` nodes of which `sources` spawn pseudo rows at `layers`, from the costs by rows: each block
    at the price of the rows in it, straight lines between the measured row counts."""
    rows = [size + sources * sum(t <= block for t in layers) for block in range(n_layer)]
    return float(np.mean(np.interp(rows, list(costs), list(costs.values()))))


def speed_table(subject: Subject, prompts: int = 5, rounds: int = 3, new: int = 64):
    """Paired runs, and what the costs of figure 1 and the replay of figure 6, on the same prompts, say that they should give."""
    model, transfer = subject.model, subject.transfer
    sides = {size: HiddenTransferDrafter(transfer, size, usual_sources(model, size)) for size in RAISED}
    texts = [Response(tokens[:prompt + new], prompt) for tokens, prompt in spread(subject.second_half, prompts)]
    costs, replayed = subject.costs, tokens_per_pass(model, transfer, texts, RAISED, new)
    with tqdm(total=(len(sides) + 1) * (rounds * prompts + 2), desc="paired runs", leave=False, dynamic_ncols=True) as bar:
        report = paired_speed(model, sides, [tokens[:prompt].tolist() for tokens, prompt in texts], new, rounds, bar=bar)
    rows, plain = [], np.array(report["plain"]["runs"], dtype=object)       # (rounds, prompts)
    for size, drafter in sides.items():
        ratio = summary(np.array(report[size]["runs"], dtype=object), plain)["ratio"]
        cost = tree_cost(costs, size, drafter.sources, drafter.transfer.layers, model.config.n_layer) / costs[1]
        rows.append({"tree size": size, "measured": ratio["median"], "lower quartile": ratio["lower_quartile"], "upper quartile": ratio["upper_quartile"],
                     "predicted": replayed[size] / cost,
                     "tokens/pass": report[size]["tokens"], "cost of a pass, predicted": cost, "cost of a pass, measured": report[size]["ms"] / report["plain"]["ms"]})
    most = max(drafter.sources for drafter in sides.values())
    return rows, (f"{machine(model)}; {len(texts)} held-out prompts, {new} new tokens, {rounds} rounds in turns with plain decoding, "
                  f"at most the {most} likeliest nodes draft in the pass; predicted: the tokens per pass of these prompts "
                  "(as in figure 6) over the cost of the rows (figure 1), which leaves out reading the drafts out and all that is not the model")


# ------------------------------------------------------------------------------------- 8: sampling

class WithoutNoise(HiddenTransferDrafter):
    """Ranks its drafts by the draft distribution alone, not with the noise that will choose the token."""

    def propose(self, round):
        return super().propose(dataclasses.replace(round, sampler=Sampler()))


def sampling_table(subject: Subject, prompts: int = 20, new: int = 64, size: int = 16):
    """Mean accepted tokens by temperature. The first two emit the same text, the third another from the same distribution."""
    sides = {"coupled noise": (HiddenTransferDrafter(subject.transfer, size), "coupled"), "without noise": (WithoutNoise(subject.transfer, size), "coupled"),
             "rejection sampling": (HiddenTransferDrafter(subject.transfer, size, acceptance=subject.acceptance, sampled=True), "rejection")}
    texts, rows = [tokens[:prompt].tolist() for tokens, prompt in spread(subject.exam.responses, prompts)], []
    with tqdm(total=len(TEMPERATURES) * len(sides) * prompts, desc="sampling", leave=False, dynamic_ncols=True) as bar:
        for temperature in TEMPERATURES:
            row = {"temperature": temperature}
            for name, (drafter, verify) in sides.items():
                emitted, passes = 0, 0
                for seed, text in enumerate(texts):
                    run = generate(subject.model, text, drafter, Sampler(temperature, seed=seed), new, verify=verify)
                    emitted, passes = emitted + run.new_tokens, passes + run.forward_passes
                    bar.update()
                row[name] = emitted / passes
            rows.append(row)
    return rows, (f"{size} nodes, {prompts} held-out prompts, {new} new tokens each; coupled noise and without noise verify token for token, "
                  "with best-first trees; rejection sampling draws the children of a static tree, a chain at temperature 0")

"""
Training: transfer maps on a frozen base (the default), the rivals of baselines/ on the same data, or that base itself.

    python train.py                              # maps for the checkpoint that ships; minutes on a laptop
    python train.py --sweep                      # which block to transfer at: the closed form at every block
    python train.py --data my_texts/             # on text of your own
    python train.py --stage medusa               # a rival (baselines/medusa.py); also no-interaction
    python train.py --stage base                 # the base model, from nothing (pretrain.py)
    torchrun --nproc-per-node 2 train.py         # several processes

The maps start from ridge regression (closed_form.py) and are then distilled: the loss is the divergence between the
base model's own next-token distribution and the one read out of the pseudo row.
"""
import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from baselines.ablations import NoInteraction
from baselines.draft_model import train_draft_model
from baselines.medusa import KINDS, MedusaHeads, own_loss
from baselines.self_speculation import train_self_speculation
from checkpoint import BASE, CHECKPOINT_HELP, load_checkpoint, save_module, save_transfer
from cli import Parser, has_fast_bfloat16, pick_device, positive, run, writable_folder, written_whole
from closed_form import RidgeSums
from data import encode_texts, read_corpus
from hidden_transfer import HiddenTransfer, distillation_loss
from loop import fit, set_up_processes, windows
from measure import (RANKS, TREE_SIZES, acceptance_by_rank, agreement, continue_greedily, cut_prompts, tokens_per_pass)
from model import causal_mask
from pretrain import train_base

LAYERS = [6, 6, 6, 6]               # the block of each transfer step for the checkpoint that ships: see --sweep
PROMPTS, PROMPT, NEW = 50, 32, 128  # held-out prompts, their length and what is generated from them
DEFAULTS = {                        # per stage: what the command line leaves open
    "transfer": {"steps": 300, "batch": 2, "accumulate": 4, "length": 256, "lr": 3e-3, "save_every": 50},
    "medusa": {"steps": 300, "batch": 2, "accumulate": 4, "length": 256, "lr": 3e-3, "save_every": 50},
    "no-interaction": {"steps": 300, "batch": 2, "accumulate": 4, "length": 256, "lr": 3e-3, "save_every": 50},
    "draft-model": {"steps": 1200, "batch": 8, "accumulate": 1, "length": 256, "lr": 1e-2, "save_every": 100},
    "self-speculation": {"batch": 8, "length": 32},                         # prompts to search with, and their length
    "base": {"steps": 2000, "batch": 16, "accumulate": 1, "length": 513, "lr": 6e-3, "save_every": 100},
}


def train_transfer(args) -> None:
    """Warm start, distillation and a table after each; saves transfer.pt and training.png in the folder --out.

    The rivals that are draft modules go the same way: the same windows of the same text, the same loss and tables.
    """
    model, tokenizer = load_checkpoint(args.checkpoint, torch.float32, args.device, args.revision)
    args.length = min(args.length, model.config.block_size)
    stream, held_out = (encode_texts(texts, tokenizer) for texts in read_corpus(args.data))
    for kind, tokens in (("training", stream), ("held-out", held_out)):
        if len(tokens) < args.length:
            raise ValueError(f"--data: {len(tokens)} {kind} tokens are fewer than one window of --length {args.length}")
    transfer = make_module(model.config, args).to(args.device)
    if args.length <= len(transfer.layers):
        raise ValueError(f"--length {args.length} is too short for {len(transfer.layers)} transfer steps")
    main_process = not dist.is_initialized() or dist.get_rank() == 0
    if main_process:
        exam = make_exam(model, held_out)
    if args.own_tokens:
        stream = own_text(model, stream, args)
    if args.sweep:
        return sweep(model, stream, exam, args) if main_process else None
    if not args.resume:
        warm_start(model, transfer, stream, args)
        if main_process:
            print_tables("after the warm start (closed form)" if args.stage != "medusa" else "at the start", transfer.layers, *evaluate(model, transfer, exam))

    position_ids, mask = torch.arange(args.length, device=args.device), causal_mask(args.length, device=args.device)

    def loss_of(tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.autocast):
            x, pseudo, _ = transfer(model, tokens, position_ids, mask)
            if args.loss == "own":
                return own_loss(transfer.read_out(model, pseudo), tokens)
            return distillation_loss(model.unembed(x), transfer.read_out(model, pseudo))

    optimizer = torch.optim.AdamW(transfer.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    name = "transfer" if args.stage == "transfer" else transfer.method     # of the files, here and in checkpoints/
    history = fit(transfer, [optimizer], loss_of, stream, args, name)
    if main_process:
        rows, table = evaluate(model, transfer, exam)
        print_tables("after distillation", transfer.layers, rows, table)
        notes = {"agreement": rows, "tokens_per_pass": table, "steps": args.steps,
                 "tokens": args.steps * args.batch * args.accumulate * args.length,
                 "acceptance": acceptance_by_rank(model, transfer, exam.sequences, exam.prompt)}
        plot_training(history, rows, table, Path(args.out) / "training.png")
        if args.stage == "transfer":
            save_transfer(transfer, model, Path(args.out) / "transfer.pt", notes)
            print(f"saved {args.out}/transfer.pt and {args.out}/training.png; "
                  f"try: python generate.py --transfer {args.out}/transfer.pt")
        else:
            save_module(transfer, model, Path(args.out) / f"{name}.pt", name, module_options(transfer), notes)
            print(f"saved {args.out}/{name}.pt and {args.out}/training.png")


def make_module(config, args):
    """The draft module that this stage trains, before its warm start."""
    if args.stage == "medusa":
        return MedusaHeads(config, len(args.transfer_layers), args.heads)
    kind = NoInteraction if args.stage == "no-interaction" else HiddenTransfer
    return kind(config, args.transfer_layers, args.shift_positions)


def module_options(module) -> dict:
    """What the module is made of beside its weights, as baselines/__init__.py takes it."""
    if isinstance(module, MedusaHeads):
        return {"steps": len(module.layers), "kind": module.kind}
    return {"layers": module.layers, "shift_positions": module.shift_positions}


def warm_start(model, module, stream, args) -> None:
    if not isinstance(module, MedusaHeads):
        ridge_sums(model, stream, args, len(module.layers)).fill(module)
    elif module.kind == "linear" or args.closed_form:
        module.start(model, ridge_sums(model, stream, args, len(module.layers), last=True))
    else:
        module.start(model)


def own_text(model, stream, args):
    """Text that the model writes itself, (N,): half of it, the other half being the text it started from.

    The maps are used on what the model writes, so that is what they learn most from. Sequences of --length tokens: a
    prompt from the training text and its greedy continuation, then the same stretch of the training text. Windows are
    drawn at multiples of the length, one sequence each.
    """
    batch, sequences = 128, []
    count = max(1, args.own_tokens // (2 * args.length))
    prompt = min(PROMPT, args.length // 2)
    with tqdm(total=count * args.length, desc="own text", unit="token", dynamic_ncols=True) as bar:
        for micro in range(0, count, batch):
            wanted = argparse.Namespace(**vars(args) | {"batch": min(batch, count - micro)})
            text = windows(stream, wanted, args.steps + 1, micro)           # (B, length)
            own = continue_greedily(model, text[:, :prompt].tolist(), args.length - prompt).cpu()
            sequences += [own, text]
            bar.update(own.numel())
    args.align = args.length
    return torch.cat(sequences).flatten().numpy()                           # (2 * count, length) -> (N,)


def ridge_sums(model, stream, args, steps: int, last: bool = False) -> RidgeSums:
    """Accumulate the closed form over --warm-start-tokens tokens of the training text."""
    sums, micro = RidgeSums(model.config, steps, args.device, args.shift_positions and not last, last), 0
    with tqdm(total=args.warm_start_tokens, desc="warm start", unit="token", dynamic_ncols=True) as bar:
        while sums.rows < args.warm_start_tokens:
            before = sums.rows
            sums.add(model, windows(stream, args, args.steps, micro).to(args.device))     # windows no training step sees
            bar.update(sums.rows - before)
            micro += 1
    return sums


def sweep(model, stream, exam, args) -> None:
    """Print the worth of the closed form at every block: tokens per pass, and each step's top-1 agreement."""
    steps = len(args.transfer_layers)
    sums, sizes = ridge_sums(model, stream, args, steps), (4, 16, 64)
    print("block " + "".join(f"{f'{size} nodes':>10}" for size in sizes) + "".join(f"{f'step {i}':>9}" for i in range(1, steps + 1)))
    print("      " + f"{'tokens per pass':>{10 * len(sizes)}}" + f"{'top-1 agreement':>{9 * steps}}")
    for t in range(model.config.n_layer):
        transfer = sums.fill(HiddenTransfer(model.config, [t] * steps, args.shift_positions).to(args.device))
        rows, table = evaluate(model, transfer, exam, sizes)
        print(f"{t:5} " + "".join(f"{table[size]:10.3f}" for size in sizes) + "".join(f"{row[0]:9.3f}" for row in rows), flush=True)


class Exam(NamedTuple):
    """What the maps are measured on: held-out text (N,), and the base's greedy continuations (B, prompt + new) of it."""
    stream: np.ndarray
    sequences: torch.Tensor
    prompt: int


def make_exam(model, held_out) -> Exam:
    prompt = min(PROMPT, model.config.block_size // 2)                      # a short context leaves room for less
    new = min(NEW, model.config.block_size - prompt)
    return Exam(held_out, continue_greedily(model, cut_prompts(held_out, PROMPTS, prompt), new), prompt)


def evaluate(model, transfer, exam: Exam, sizes=TREE_SIZES):
    """(agreement by step and rank on held-out text, tokens per pass by tree size on held-out prompts)."""
    return agreement(model, transfer, exam.stream), tokens_per_pass(model, transfer, exam.sequences, exam.prompt, sizes)


def print_tables(title: str, layers, rows, table) -> None:
    print(f"\n{title}\nagreement of each transfer step's draft with the model's own argmax, held-out text\n"
          "step  block" + "".join(f"{f'top-{rank}':>8}" for rank in RANKS))
    for i, (t, row) in enumerate(zip(layers, rows), start=1):
        print(f"{i:4} {t:6}" + "".join(f"{share:8.3f}" for share in row))
    print(f"tokens per pass, greedy, {PROMPTS} held-out prompts, {NEW} new tokens each\n"
          "tree size" + "".join(f"{size:7}" for size in table) + "\n"
          "tokens   " + "".join(f"{tokens:7.2f}" for tokens in table.values()) + "\n", flush=True)


def plot_training(history, rows, table, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    steps, losses = zip(*history)
    left.plot(steps, losses, linewidth=0.8)
    left.set(title="distillation", xlabel="step", ylabel="KL divergence (nats)")
    for i, row in enumerate(rows, start=1):
        middle.plot(RANKS, row, marker="o", label=f"step {i}")
    middle.set(title="draft agreement, held-out text", xlabel="among the first n candidates", ylabel="share", ylim=(0, 1))
    middle.legend()
    right.plot(list(table), list(table.values()), marker="o")
    right.set(title="tokens per forward pass", xlabel="tree size (nodes)", ylabel="mean accepted tokens", xscale="log")
    with written_whole(path) as beside:
        figure.savefig(beside, dpi=110)
    plt.close(figure)


def parse_args(argv=None):
    p = Parser("Train transfer maps (or the base model they are for).")
    p.add_argument("--stage", choices=list(DEFAULTS), default="transfer", help="what to train")
    p.add_argument("--checkpoint", default=str(BASE), help=f"what the maps are for; {CHECKPOINT_HELP}")
    p.add_argument("--revision", help="branch, tag or commit of a --checkpoint from the hub")
    p.add_argument("--data", help="file or folder of UTF-8 text; if not given, the Python standard library")
    p.add_argument("--out", default="out", help="folder for what is saved")
    p.add_argument("--transfer-layers", type=layer_list, default=LAYERS, help="block of each transfer step, as in 6,6,6")
    p.add_argument("--shift-positions", action="store_true", help="add the difference of position embeddings (learned positions)")
    p.add_argument("--heads", choices=list(KINDS), default="matched", help="medusa stage: which heads (baselines/medusa.py)")
    p.add_argument("--loss", choices=["distillation", "own"], default="distillation", help="medusa stage: own is cross-entropy on the text, 0.8^k")
    p.add_argument("--closed-form", action="store_true", help="medusa stage: full heads start from ridge regression")
    p.add_argument("--sweep", action="store_true", help="print the worth of every transfer block, and stop")
    p.add_argument("--warm-start-tokens", type=positive, default=100_000, help="rows of text for the closed form")
    p.add_argument("--own-tokens", type=int, default=200_000, help="tokens of training text, half of them written by the model itself; 0: the text as it is")
    for name, help in (("steps", "optimiser steps"), ("batch", "windows per micro-batch"),
                       ("accumulate", "micro-batches per step and process"), ("length", "tokens per window"),
                       ("lr", "peak learning rate"), ("save_every", "steps between saved states")):
        usual = ", ".join(f"{stage}: {values[name]}" for stage, values in DEFAULTS.items() if name in values)
        p.add_argument(f"--{name.replace('_', '-')}", type=float if name == "lr" else positive, help=f"{help} ({usual})")
    p.add_argument("--seed", type=int, default=0, help="a whole number from 0 on")
    p.add_argument("--resume", action="store_true", help="continue the run whose state lies in --out")
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, or auto")
    p.add_argument("--autocast", choices=["auto", "on", "off"], default="auto", help="bfloat16 matrix products; auto: where they are fast")
    p.add_argument("--compile", action="store_true", help="base stage: torch.compile (needs a C++ compiler on CPU)")
    p.add_argument("--position", choices=["rotary", "learned"], default="rotary", help="base stage: kind of position")
    p.add_argument("--new-tokenizer", action="store_true", help="base stage: train a vocabulary on the corpus first")
    args = p.parse_args(argv)
    args.align = 1                                                          # windows start at multiples of this
    for name, value in DEFAULTS[args.stage].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("heads", "loss", "closed_form"):
        if args.stage != "medusa" and getattr(args, name) != p.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for --stage medusa")
    for name in ("seed", "own_tokens"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be 0 or more")
    if args.lr is not None and not 0 < args.lr < float("inf"):
        raise ValueError(f"--lr {args.lr}: it must be a positive number")
    return args


def layer_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


layer_list.__name__ = "list of block numbers"                               # what argparse's error says


def main() -> None:
    args = parse_args()
    writable_folder(args.out)
    args.device = set_up_processes(pick_device(args.device))
    args.autocast = args.autocast == "on" or args.autocast == "auto" and has_fast_bfloat16(args.device)
    try:
        {"base": train_base, "draft-model": lambda args: train_draft_model(args, own_text),
         "self-speculation": train_self_speculation}.get(args.stage, train_transfer)(args)
        if dist.is_initialized():
            dist.barrier()                                                  # a process that leaves early takes the others down
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

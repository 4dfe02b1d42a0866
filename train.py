"""
Training: transfer maps on a frozen base (the default), the rivals of baselines/ on the same data, or that base itself.

    python train.py                              # maps for the checkpoint that ships; minutes on a laptop
    python train.py --sweep                      # which block to transfer at: the closed form at every block
    python train.py --data my_texts/             # on text of your own
    python train.py --checkpoint MODEL           # another model; one with a chat template learns from its own answers
    python train.py --stage medusa               # a rival; also no-interaction, draft-model, self-speculation
    python train.py --stage base                 # the base model, from nothing (pretrain.py)
    torchrun --nproc-per-node 2 train.py         # several processes

The maps start from ridge regression (closed_form.py) and are then distilled: the loss is the divergence between the
base model's own next-token distribution and the one read out of the pseudo row.
"""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from baselines.ablations import NoInteraction
from baselines.medusa import KINDS, MedusaHeads
from baselines.training import train_draft_model, train_self_speculation
from checkpoint import BASE, CHECKPOINT_HELP, load_checkpoint, save_module, save_transfer
from cli import Parser, has_fast_bfloat16, pick_device, positive, run, writable_folder, written_whole
from closed_form import RidgeSums
from distillation import Exam, FromResponses, FromText
from hidden_transfer import HiddenTransfer
from loop import fit, set_up_processes
from pretrain import train_base
from replay import RANKS, TREE_SIZES, acceptance_by_rank, agreement, tokens_per_pass

STEPS = 4           # transfer steps, all at usual_block unless --transfer-layers says otherwise
DEFAULTS = {        # per stage, and for --responses: what the command line leaves open
    "transfer": {"steps": 300, "batch": 2, "accumulate": 4, "length": 256, "lr": 3e-3, "save_every": 50},
    "responses": {"steps": 200, "batch": 1, "accumulate": 8, "lr": 1e-3, "save_every": 50},
    "draft-model": {"steps": 1200, "batch": 8, "accumulate": 1, "length": 256, "lr": 1e-2, "save_every": 100},
    "self-speculation": {"batch": 8, "length": 32},                         # prompts to search with, and their length
    "base": {"steps": 2000, "batch": 16, "accumulate": 1, "length": 513, "lr": 6e-3, "save_every": 100},
}
HEADS_LR = {"matched": 3e-3, "full": 2e-3, "linear": 2e-3}                  # medusa stage: each the best of three, a factor of three apart


def train_transfer(args) -> None:
    """Warm start, distillation and a table after each; saves transfer.pt and training.png in the folder --out.

    The rivals that are draft modules go the same way: the same windows of the same text, the same loss and tables.
    """
    model, tokenizer = load_checkpoint(args.checkpoint, torch.float32, args.device, args.revision)
    if args.data is None and args.responses is None and getattr(tokenizer, "chat_template", None) is not None:
        args.responses = str(Path(args.out) / "responses.pt")
    if args.stage == "medusa" and args.lr is None:
        args.lr = HEADS_LR[args.heads]
    settle(args, "responses" if args.responses else "transfer")
    if args.responses and args.loss == "own":
        raise ValueError("--loss own is the cross-entropy on text: give --data, or leave it away to distil from --responses")
    transfer = make_module(model.config, args).to(args.device)
    layers = transfer.layers
    lessons = (FromResponses if args.responses else FromText)(model, tokenizer, args, len(layers))
    main_process, world = not dist.is_initialized() or dist.get_rank() == 0, dist.get_world_size() if dist.is_initialized() else 1
    if args.sweep:
        return sweep(model, lessons, len(layers), args) if main_process else None
    if not args.resume:
        warm_start(model, transfer, lessons, args)
        if main_process:
            title = "at the start" if args.stage == "medusa" else "after the warm start (closed form)"
            print_tables(title, layers, *evaluate(model, transfer, lessons.exam), lessons.exam)

    def loss_of(batch):
        with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.autocast):
            return lessons.loss(transfer, batch)

    optimizer = torch.optim.AdamW(transfer.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    name = "transfer" if args.stage == "transfer" else transfer.method     # of the files, here and in checkpoints/
    history = fit(transfer, [optimizer], loss_of, lessons.draw, args, name)
    if main_process:
        rows, table = evaluate(model, transfer, lessons.exam)
        print_tables("after distillation", layers, rows, table, lessons.exam)
        notes = {"agreement": rows, "tokens_per_pass": table, "steps": args.steps,
                 "tokens": round(args.steps * args.accumulate * world * lessons.rows),      # source rows
                 "acceptance": acceptance_by_rank(model, transfer, lessons.exam.responses)}
        if args.stage == "transfer":
            save_transfer(transfer, model, Path(args.out) / "transfer.pt", notes)
        else:
            save_module(transfer, model, Path(args.out) / f"{name}.pt", name, module_options(transfer), notes)
        plot_training(history, rows, table, Path(args.out) / "training.png")
        print(f"saved {args.out}/{name}.pt and {args.out}/training.png"
              + (f"; try: python generate.py --transfer {args.out}/transfer.pt" if args.stage == "transfer" else ""))


def make_module(config, args):
    """The draft module that this stage trains, before its warm start."""
    if args.stage == "medusa":
        return MedusaHeads(config, len(args.transfer_layers or STEPS * [0]), args.heads)
    kind = NoInteraction if args.stage == "no-interaction" else HiddenTransfer
    return kind(config, args.transfer_layers or [usual_block(config.n_layer)] * STEPS, args.shift_positions)


def usual_block(n_layer: int) -> int:
    """Two thirds of the blocks, rounded up: among the best of the model that ships (6 of 8) and of SmolLM2 (20 of 30), see --sweep."""
    return min(-(-2 * n_layer // 3), n_layer - 1)


def module_options(module) -> dict:
    """What the module is made of beside its weights, as baselines/__init__.py takes it."""
    if isinstance(module, MedusaHeads):
        return {"steps": len(module.layers), "kind": module.kind}
    return {"layers": module.layers, "shift_positions": module.shift_positions}


def warm_start(model, module, lessons, args) -> None:
    steps = len(module.layers)
    if not isinstance(module, MedusaHeads):
        ridge_sums(model, lessons, args, steps, module.layers).fill(module)
    elif module.kind != "matched" and args.closed_form:
        module.start(model, ridge_sums(model, lessons, args, steps, last=True))
    else:
        module.start(model)


def ridge_sums(model, lessons, args, steps: int, blocks=None, last: bool = False) -> RidgeSums:
    """Accumulate the closed form over --warm-start-tokens tokens that no training step sees."""
    sums, n = RidgeSums(model.config, steps, args.device, args.shift_positions and not last, blocks, last), 0
    with tqdm(total=args.warm_start_tokens, desc="warm start", unit="token", dynamic_ncols=True) as bar:
        while sums.rows < args.warm_start_tokens:
            before = sums.rows
            lessons.add_to(sums, n)
            bar.update(sums.rows - before)
            n += 1
    return sums


def sweep(model, lessons, steps: int, args) -> None:
    """Print the worth of the closed form at every block: tokens per pass, and each step's top-1 agreement."""
    sums, sizes = ridge_sums(model, lessons, args, steps), (4, 16, 64)
    print("block " + "".join(f"{f'{size} nodes':>10}" for size in sizes) + "".join(f"{f'step {i}':>9}" for i in range(1, steps + 1)))
    print("      " + f"{'tokens per pass':>{10 * len(sizes)}}" + f"{'top-1 agreement':>{9 * steps}}")

    def modules():                                                          # one at a time: they would not all fit beside a large base
        for t in range(model.config.n_layer):
            yield t, sums.fill(HiddenTransfer(model.config, [t] * steps, args.shift_positions).to(args.device))
        last = MedusaHeads(model.config, steps, "linear").to(args.device)   # behind all blocks: Medusa's linear relative
        yield "last", last.start(model, ridge_sums(model, lessons, args, steps, last=True))

    for t, module in modules():
        rows, table = evaluate(model, module, lessons.exam, sizes)
        print(f"{t:>5} " + "".join(f"{table[size]:10.3f}" for size in sizes) + "".join(f"{row[0]:9.3f}" for row in rows), flush=True)


def evaluate(model, transfer, exam: Exam, sizes=TREE_SIZES):
    """(agreement by step and rank on held-out text, tokens per pass by tree size on held-out prompts)."""
    return agreement(model, transfer, exam.text), tokens_per_pass(model, transfer, exam.responses, sizes, exam.new)


def print_tables(title: str, layers, rows, table, exam: Exam) -> None:
    print(f"\n{title}\nagreement of each transfer step's draft with the model's own argmax, held-out text\n"
          "step  block" + "".join(f"{f'top-{rank}':>8}" for rank in RANKS))
    for i, (t, row) in enumerate(zip(layers, rows), start=1):
        print(f"{i:4} {t:6}" + "".join(f"{share:8.3f}" for share in row))
    print(f"tokens per pass, greedy, {len(exam.responses)} held-out prompts, at most {exam.new} new tokens each\n"
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
    p.add_argument("--stage", choices=list(STAGES), default="transfer", help="what to train")
    p.add_argument("--checkpoint", default=str(BASE), help=f"what the maps are for; {CHECKPOINT_HELP}")
    p.add_argument("--revision", help="branch, tag or commit of a --checkpoint from the hub")
    p.add_argument("--data", help="file or folder of UTF-8 text; if not given, the Python standard library")
    p.add_argument("--responses", help="learn from the answers in this file, which responses.py writes (or this command, if it is not there); "
                                       "the default for a checkpoint with a chat template, as out/responses.pt, unless --data is given")
    p.add_argument("--keep-gb", type=float, default=4.0, help="--responses: memory for hidden states, keys and values of the base")
    p.add_argument("--out", default="out", help="folder for what is saved")
    p.add_argument("--transfer-layers", type=layer_list, help="block of each transfer step, as in 6,6,6; if not given, four steps at two thirds of the blocks")
    p.add_argument("--shift-positions", action="store_true", help="add the difference of position embeddings (learned positions)")
    p.add_argument("--heads", choices=list(KINDS), default="matched", help="medusa stage: which heads (baselines/medusa.py)")
    p.add_argument("--loss", choices=["distillation", "own"], default="distillation", help="medusa stage: own is cross-entropy on the text, 0.8^k")
    p.add_argument("--closed-form", action=argparse.BooleanOptionalAction, default=True,
                   help="medusa stage: linear and full heads start from ridge regression; else all start as the model's own head")
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
    for name in ("heads", "loss", "closed_form"):
        if args.stage != "medusa" and getattr(args, name) != p.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for --stage medusa")
    for name in ("seed", "own_tokens"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be 0 or more")
    if args.lr is not None and not 0 < args.lr < float("inf"):
        raise ValueError(f"--lr {args.lr}: it must be a positive number")
    return args


def settle(args, kind: str) -> None:
    """Fill in what the command line left open."""
    for name, value in DEFAULTS[kind].items():
        if getattr(args, name) is None:
            setattr(args, name, value)


STAGES = {"transfer": train_transfer, "medusa": train_transfer, "no-interaction": train_transfer, "draft-model": train_draft_model,
          "self-speculation": train_self_speculation, "base": train_base}


def layer_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


layer_list.__name__ = "list of block numbers"                               # what argparse's error says


def main() -> None:
    args = parse_args()
    writable_folder(args.out)
    args.device = set_up_processes(pick_device(args.device))
    args.autocast = args.autocast == "on" or args.autocast == "auto" and has_fast_bfloat16(args.device)
    try:
        if STAGES[args.stage] is not train_transfer:
            settle(args, args.stage)
        STAGES[args.stage](args)
        if dist.is_initialized():
            dist.barrier()                                                  # a process that leaves early takes the others down
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    run(main)

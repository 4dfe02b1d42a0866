"""
The paper's claims as pictures, redrawn from a checkpoint on the machine at hand, each with its table beside it.

    python figures.py                       # all of them, in out/figures; at most 3 minutes each on two cores
    python figures.py 2 4                   # the second and the fourth
    python figures.py --checkpoint SmolLM2-135M-Instruct.gguf --transfer out/transfer.pt --rivals out

  1  what a forward pass costs by its number of rows: why parallel decoding is nearly free, and where that ends here
  2  how good the drafts are, step by step: hidden transfer and its rivals
  3  how pseudo hidden states become like the true ones, block by block
  4  which block to transfer at, for step 1, and for step 2 with step 1 fixed
  5  what it is worth to the later steps that they see the earlier ones
  6  tokens per pass by tree size, expected and measured, static and best-first trees
  7  speed by tree size, measured, and predicted from 1 and 6
  8  sampling: coupled noise, drafts without the noise, and rejection sampling, by temperature

The measurements are in evidence.py, what they have in common in subject.py. Figures 1 and 7 are about this machine; the others come out alike everywhere.
"""
import io
from pathlib import Path

import torch
from tqdm import tqdm

from baselines import load_modules
from checkpoint import BASE, CHECKPOINT_HELP, DTYPES, TRANSFER, load_checkpoint, load_transfer
from cli import Parser, has_fast_bfloat16, pick_device, positive, run, writable_folder, written_whole
from compare import lines_of
from data import encode_texts, read_corpus
from evidence import (LAST, NEIGHBOURS, accuracy_table, block_table, cost_table, sampling_table, sight_table, similarity_table,
                      speed_table, tokens_table)
from replay import RANKS
from subject import Subject


# --------------------------------------------------------------------------------------------- drawing: rows -> a picture

def draw_cost(plt, rows):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of = [row for row in rows if row["dtype"] == dtype]
        n = [row["rows"] for row in of]
        left.plot(n, [row["ms"] for row in of], marker=".", label=dtype)
        right.plot(n, [row["multiple of one row"] for row in of], marker=".", label=dtype)
    right.plot(n, n, color="0.6", linestyle=":", label="as many passes of one row")
    left.set(title="cost of a forward pass", ylabel="milliseconds")
    right.set(title="as a multiple of a pass over one row", ylabel="multiple", ylim=(0, 1.1 * max(row["multiple of one row"] for row in rows)))
    for axes in (left, right):
        by_powers_of_two(axes, n)
        axes.set(xlabel="rows in the pass")
        axes.legend()
    return figure


def draw_accuracy(plt, rows):
    steps = sorted({row["step"] for row in rows})
    figure, panels = plt.subplots(1, len(steps), figsize=(1.2 + 2 * len(steps), 3.4), layout="constrained", sharey=True, squeeze=False)
    for step, axes in zip(steps, panels[0]):
        for n, row in enumerate(row for row in rows if row["step"] == step):
            axes.plot(RANKS, [row[f"top-{rank}"] for rank in RANKS], marker=".", label=row["drafts"], linewidth=2 if n == 0 else 1.2,
                      linestyle="--" if row["drafts"] == "no-interaction" else "-")           # it lies on hidden transfer's
        axes.set(title=f"step {step}", xlabel="among the first n drafts", xticks=RANKS)
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("share that hold the model's argmax")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def draw_similarity(plt, rows):
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharex=True)
    for axes, what in zip(panels, ("cosine", "centred cosine")):
        for name in dict.fromkeys(row["states"] for row in rows):
            of = [row for row in rows if row["states"] == name]
            style = {"color": "0.5", "linestyle": ":"} if name == NEIGHBOURS else {"linestyle": "--"} if "closed form" in name else {}
            axes.plot([row["block"] for row in of], [row[what] for row in of], marker=".", label=name, **style)
        axes.set(title=f"{what} with the true state", xlabel="block that the states enter (last: behind all)", ylabel="mean cosine")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    return figure


def draw_blocks(plt, rows):
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    places = list(range(len(rows)))
    ticks = [*places[:-1:1 + len(rows) // 16], places[-1]]
    for step, axes in zip((1, 2), panels):
        for top, style in (("top-1", "-"), ("top-5", "--")):
            axes.plot(places, [row[f"step {step}, {top}"] for row in rows], marker=".", color=f"C{step - 1}", linestyle=style, label=top)
        axes.set_xticks(ticks, ["last\nstate" if rows[n]["block"] == LAST else str(rows[n]["block"]) for n in ticks])
        axes.set(title="step 1" if step == 1 else "step 2, with step 1 at its best block", xlabel="block of the transfer",
                 ylabel="share that hold the argmax", ylim=(0, None))
        axes.legend()
    return figure


def draw_sight(plt, rows):
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    names, steps = list(dict.fromkeys(row["drafts"] for row in rows)), sorted({row["step"] for row in rows})
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        bars = axes.bar([step + (n - (len(names) - 1) / 2) * width for step in steps],
                        [row["top-1"] for row in rows if row["drafts"] == name], width, label=name)
        axes.bar_label(bars, fmt="%.3f", fontsize=7)
    axes.set(title="top-1 agreement, with and without sight of the earlier steps", xlabel="transfer step", xticks=steps, ylabel="share right")
    axes.legend(fontsize="small")
    return figure


def draw_tokens(plt, rows):
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name in list(rows[0])[1:]:
        kind, how = name.split(", ")
        axes.plot([row["tree size"] for row in rows], [row[name] for row in rows], marker=".", label=name,
                  color="C0" if kind == "best-first" else "C1", linestyle="-" if how == "measured" else ":")
    by_size(axes, rows, title="tokens per forward pass", ylabel="mean accepted tokens")
    return figure


def draw_speed(plt, rows):
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    sizes = [row["tree size"] for row in rows]
    axes.plot(sizes, [row["measured"] for row in rows], marker="o", label="measured (median, middle half)")
    axes.fill_between(sizes, [row["lower quartile"] for row in rows], [row["upper quartile"] for row in rows], alpha=0.2)
    axes.plot(sizes, [row["predicted"] for row in rows], marker=".", linestyle=":", color="C1", label="predicted from figures 1 and 6")
    axes.axhline(1, color="0.4", linewidth=0.8)
    by_size(axes, rows, title="speed against plain decoding", ylabel="tokens/s, as a multiple of plain decoding's")
    return figure


def by_size(axes, rows, **labels):
    by_powers_of_two(axes, [row["tree size"] for row in rows])
    axes.set(xlabel="tree size (nodes)", **labels)
    axes.legend(fontsize="small")


def by_powers_of_two(axes, numbers):
    axes.set_xscale("log", base=2)
    ticks = [n for n in numbers if n & (n - 1) == 0]
    axes.set_xticks(ticks, [str(n) for n in ticks])


def draw_sampling(plt, rows):
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name in list(rows[0])[1:]:
        axes.plot([row["temperature"] for row in rows], [row[name] for row in rows], marker=".", label=name)
    axes.set(title="sampling, 16 nodes", xlabel="temperature", ylabel="mean accepted tokens")
    axes.legend(fontsize="small")
    return figure


# --------------------------------------------------------------------------------------------- all of them

FIGURES = {                                             # number: name of the file, title, measurement, drawing
    1: ("cost", "Cost of a forward pass by its rows", cost_table, draw_cost),
    2: ("accuracy", "Accuracy of the drafts, step by step", accuracy_table, draw_accuracy),
    3: ("similarity", "Pseudo and true hidden states, block by block", similarity_table, draw_similarity),
    4: ("blocks", "Accuracy by the block of the transfer", block_table, draw_blocks),
    5: ("sight", "What seeing the earlier pseudo states is worth", sight_table, draw_sight),
    6: ("tokens", "Tokens per pass by tree size", tokens_table, draw_tokens),
    7: ("speed", "Speed by tree size, measured and predicted", speed_table, draw_speed),
    8: ("sampling", "Sampling: tokens per pass by temperature", sampling_table, draw_sampling),
}


def make(number: int, subject: Subject, folder: Path, **more) -> None:
    """Measure, then write <number>-<name>.md and <number>-<name>.png in the folder."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image                                                   # comes with matplotlib
    name, title, measurement, drawing = FIGURES[number]
    rows, how = measurement(subject, **more)
    with written_whole(folder / f"{number}-{name}.md") as beside:
        beside.write_text(f"# {number}. {title}\n\n`python figures.py {number}`: {how}.\n\n{lines_of(as_table(rows), True)}\n", encoding="utf-8")
    figure, drawn = drawing(plt, rows), io.BytesIO()
    figure.savefig(drawn, dpi=110)
    plt.close(figure)
    with written_whole(folder / f"{number}-{name}.png") as beside:
        Image.open(drawn).convert("RGB").quantize(64).save(beside, optimize=True)       # few colours: a third of the bytes


def as_table(rows: list[dict]) -> list[list[str]]:
    def cell(value):
        return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    return [list(rows[0])] + [[cell(value) for value in row.values()] for row in rows]


def load_subject(args) -> Subject:
    device = pick_device(args.device)
    model, tokenizer = load_checkpoint(args.checkpoint, DTYPES.get(args.dtype), device, args.revision)
    transfer, _ = load_transfer(args.transfer, model)
    modules = {"hidden-transfer": transfer} | {name: module for name, module in load_modules(model, args.rivals).items() if name != "hidden-transfer"}
    training, held_out = read_corpus(args.data)
    return Subject(model, transfer, modules, tokenizer, training, encode_texts(held_out, tokenizer))


def parse_args(argv=None):
    p = Parser("The paper's claims as pictures, each with its table beside it.")
    p.add_argument("numbers", nargs="*", type=positive, help="which figures, 1 to 8; if not given, all")
    p.add_argument("--checkpoint", default=str(BASE), help=CHECKPOINT_HELP)
    p.add_argument("--revision", help="branch, tag or commit of a --checkpoint from the hub")
    p.add_argument("--transfer", help="its transfer maps, from train.py; if not given, those that ship for this base model")
    p.add_argument("--rivals", default=str(TRANSFER.parent), help="folder with the rivals' files, from train.py")
    p.add_argument("--data", help="file or folder of UTF-8 text; if not given, the Python standard library")
    p.add_argument("--out", default="out/figures", help="folder for pictures and tables")
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, or auto")
    p.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 on CUDA, float32 elsewhere")
    args = p.parse_args(argv)
    for number in args.numbers:
        if number not in FIGURES:
            raise ValueError(f"figure {number}: there are figures 1 to {len(FIGURES)}")
    return args


def main() -> None:
    args = parse_args()
    folder, subject = writable_folder(args.out), load_subject(args)
    with tqdm(args.numbers or list(FIGURES), desc="figures", dynamic_ncols=True) as bar:
        for number in bar:
            bar.set_postfix_str(FIGURES[number][1])
            more = {}
            if number == 1 and subject.model.embedding.weight.dtype == torch.float32 and has_fast_bfloat16(pick_device(args.device)):
                more["other"] = load_checkpoint(args.checkpoint, torch.bfloat16, pick_device(args.device), args.revision)[0]
            make(number, subject, folder, **more)
            bar.write(f"saved {folder}/{number}-{FIGURES[number][0]}.png and .md")


if __name__ == "__main__":
    run(main)

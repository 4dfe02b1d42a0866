"""
Hidden transfer and its rivals side by side, on one checkpoint and one set of prompts.

    python compare.py                                        # the checkpoint that ships, 20 held-out prompts, every method there is
    python compare.py --methods hidden-transfer,medusa --tree-size 64 --markdown
    python compare.py --questions question.jsonl --chat --checkpoint SmolLM2-135M-Instruct.gguf --tree-size 8,16,32,64
    python compare.py --json --plot out/compare.png

All methods decode the same prompts, in one process and in turns, under the same budget of nodes, and verify by the same walk; one
counter counts the tokens of all of them. With --questions (see questions.py) there is a row for each category, too. The columns:

  tokens/pass  mean accepted tokens: new tokens / forward passes, the model's own token included (plain decoding: 1.00)
  accepted     share of the passes in which at least 1, 2, ... drafts were accepted; tokens/pass is one more than their sum
  rows/pass    rows that went through the model per pass, prompts left out; a row that takes part in half of the layers counts a
               half, so pseudo rows cost less than nodes. What a draft model reads in layers of its own is not in it.
  trained      parameters trained for the method
  memory       most bytes of tensors alive at one time: weights, cache and what a pass computes (not what libraries keep inside)
  ratio        tokens/s against plain decoding, paired run by run: median, and in brackets the middle half of the runs
  differ       outputs that are not plain decoding's, and the largest gap between plain's two best logits where they part: in
               float32 two near-equal logits may change places, in float64 nothing may differ
"""
import contextlib
import json
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from baselines import load_rivals, module_maker
from checkpoint import BASE, CHECKPOINT_HELP, DTYPES, TRANSFER, load_checkpoint, load_transfer
from cli import Parser, pick_device, positive, run, written_whole
from generate import check_request, generate, parse_tree_size
from measure import difference, paired_speed
from questions import Question, gather, spread
from sampler import Sampler

WEIGHED = 4                 # prompts on which rows and memory are counted, outside the timed runs


# --------------------------------------------------------------------------------------------- methods

def drafters_for(args, model) -> dict:
    """{name: drafter} of the methods asked for, or of all that have a file for this base. ValueError if one has none.
    With several tree sizes each method is there once for each: "hidden-transfer, 8 nodes"."""
    wanted, sizes = args.methods.split(",") if args.methods else None, tree_sizes(args)
    rivals, makers, drafters = load_rivals(model, args.rivals), {}, {}
    for name in wanted or ["hidden-transfer", *rivals]:
        if name == "hidden-transfer":
            makers[name] = module_maker(model, *load_transfer(args.transfer, model))
        elif name in rivals:
            makers[name] = rivals[name]
        elif name != "plain":                                               # plain decoding is always there
            raise ValueError(f"--methods {name}: not known, or {args.rivals} has no file of it for this base model; there are "
                             f"{', '.join(['hidden-transfer', *rivals])}")
    for name, make in makers.items():
        for size in sizes:
            drafters[name if len(sizes) == 1 else f"{name}, {size} nodes"] = make(size)
    return drafters


def tree_sizes(args) -> list[int]:
    return [parse_tree_size(size) for size in args.tree_size.split(",")]


def parts_of(drafter) -> list[torch.nn.Module]:
    """What a drafter brings along besides the model."""
    return [part for part in vars(drafter).values() if isinstance(part, torch.nn.Module)] if drafter is not None else []


def trained_parameters(model, drafter) -> int:
    """Parameters of the drafter's own that are not the model's."""
    own = {id(p): p.numel() for part in parts_of(drafter) for p in part.parameters()}
    return sum(own.values()) - sum(own.get(id(p), 0) for p in model.parameters())


# --------------------------------------------------------------------------------------------- measuring

class LiveMemory(TorchDispatchMode):
    """Within `with LiveMemory(modules) as memory`, memory.peak is the most bytes of tensors alive at one time: those of the
    modules, and all that operations make. The same count on every device; memory that an operation frees before it
    returns, and memory that an allocator keeps for later, are not in it."""

    def __init__(self, modules):
        super().__init__()
        self.known, self.now, self.peak = {}, 0, 0                          # known: storage -> bytes
        for module in modules:
            for tensor in [*module.parameters(), *module.buffers()]:
                self.see(tensor)

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:                                # views share a storage
            self.known[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, storage._cdata).atexit = False

    def forget(self, key):
        self.now -= self.known.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return output


@contextlib.contextmanager
def counting_rows(model):
    """Yields [n], the rows that have gone through the model's MLPs, divided by their number: rows of the whole model."""
    rows, blocks = [0.0], len(model.blocks)

    def count(module, inputs, output):
        rows[0] += inputs[0].shape[-2] / blocks                             # (B, T, C), B = 1

    hooks = [block.mlp.register_forward_hook(count) for block in model.blocks]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def weigh(model, drafter, questions, max_new_tokens, sampler) -> tuple[float, int]:
    """(rows per pass without those of the prompts, peak memory in bytes), on prompts at even distances."""
    passes, peak, before = 0, 0, 0
    with counting_rows(model) as rows:
        for question in spread(questions, WEIGHED):
            with LiveMemory([model, *parts_of(drafter)]) as memory:
                result = generate(model, question.ids, drafter, sampler, max_new_tokens, question.ends)
            passes, peak, before = passes + result.forward_passes, max(peak, memory.peak), before + len(question.ids) - 1
    return (rows[0] - before) / passes, peak


def compare(model, drafters: dict, questions: list[Question], max_new_tokens: int, rounds: int, sampler: Sampler = Sampler()) -> dict:
    """{"plain": figures, name: figures, ...}; figures are those of the columns, and "categories": {name: the same for its prompts}."""
    sides, prompts = {"plain": None} | drafters, [question.ids for question in questions]
    for prompt in prompts:
        check_request(model, prompt, max_new_tokens, "coupled")
    total = len(sides) * (rounds * len(prompts) + len(prompts[:2]))
    with tqdm(total=total + len(sides), desc="comparing", leave=False, dynamic_ncols=True) as bar:
        weights = {}
        for name, drafter in sides.items():
            weights[name] = weigh(model, drafter, questions, max_new_tokens, sampler)
            bar.update()
        speed = paired_speed(model, drafters, prompts, max_new_tokens, rounds, sampler, bar,
                             end_token=set().union(*(question.ends for question in questions)))
    categories, report = list(dict.fromkeys(question.category for question in questions)), {}
    for name, drafter in sides.items():
        runs, plain = np.array(speed[name]["runs"], dtype=object), np.array(speed["plain"]["runs"], dtype=object)      # (rounds, prompts)
        gaps = [difference(model, question.ids, a.token_ids, b.token_ids, sampler)[1]
                for question, a, b in zip(questions, plain[0], runs[0]) if a.token_ids != b.token_ids]
        report[name] = summary(runs, plain) | {"rows_per_pass": weights[name][0], "trained_parameters": trained_parameters(model, drafter),
                                               "peak_memory_bytes": weights[name][1], "differ": len(gaps), "largest_gap": max(gaps, default=None)}
        report[name]["categories"] = {}
        for category in categories:
            here = [n for n, question in enumerate(questions) if question.category == category]
            report[name]["categories"][category] = {"prompts": len(here)} | summary(runs[:, here], plain[:, here])
    return report


def summary(runs: np.ndarray, plain: np.ndarray) -> dict:
    """What the runs (rounds, prompts) of one method say, against plain decoding of the same prompts in the same rounds."""
    emitted = [n for run in runs.flat for n in run.accepted_per_pass]       # by pass, the model's own token included
    ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(runs.flat, plain.flat)]
    lower, median, upper = (float(x) for x in np.percentile(ratios, [25, 50, 75]))
    return {"mean_accepted_tokens": sum(run.new_tokens for run in runs.flat) / sum(run.forward_passes for run in runs.flat),
            "accepted_by_depth": [sum(n > depth for n in emitted) / len(emitted) for depth in range(1, max(emitted))],
            "tokens_per_second": sum(run.new_tokens for run in runs.flat) / sum(run.seconds for run in runs.flat),
            "ratio": {"median": median, "lower_quartile": lower, "upper_quartile": upper}}


# --------------------------------------------------------------------------------------------- showing

def main_table(report: dict) -> list[list[str]]:
    rows = [["method", "tokens/pass", "accepted at depth 1, 2, ...", "rows/pass", "trained", "memory (MB)", "tokens/s", "ratio to plain", "differ (gap)"]]
    for name, r in report.items():
        accepted = " ".join(f"{share:.2f}"[1:] if share < 1 else "1" for share in r["accepted_by_depth"][:8]) or "-"
        rows.append([name, f"{r['mean_accepted_tokens']:.2f}", accepted, f"{r['rows_per_pass']:.1f}", f"{r['trained_parameters']:,}",
                     f"{r['peak_memory_bytes'] / 1e6:.0f}", f"{r['tokens_per_second']:.1f}", ratio_cell(r["ratio"]),
                     f"{r['differ']}" + (f" ({r['largest_gap']:.0e})" if r["differ"] else "")])
    return rows


def category_table(report: dict) -> list[list[str]]:
    """A row per category and one over all: tokens per pass, and the ratio to plain decoding, of each method."""
    methods = [name for name in report if name != "plain"]
    rows = [["category", "prompts"] + [f"{name}: tokens/pass, ratio" for name in methods]]
    categories = report["plain"]["categories"]
    for category in [*categories, None]:
        of = {name: report[name]["categories"][category] if category else report[name] for name in methods}
        count = categories[category]["prompts"] if category else sum(c["prompts"] for c in categories.values())
        rows.append([category or "overall", str(count)] + [f"{of[name]['mean_accepted_tokens']:.2f}, {ratio_cell(of[name]['ratio'])}" for name in methods])
    return rows


def ratio_cell(ratio: dict) -> str:
    return f"{ratio['median']:.2f} ({ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f})"


def lines_of(table: list[list[str]], markdown: bool) -> str:
    if markdown:
        return "\n".join("| " + " | ".join(row) + " |" for row in [table[0], ["---"] * len(table[0]), *table[1:]])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]) for row in table)


def plot(report: dict, path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    names = list(report)[::-1]                                              # the first one on top
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 1 + 0.35 * len(names)), layout="constrained", sharey=True)
    left.barh(names, [report[name]["mean_accepted_tokens"] for name in names], color="C0")
    left.set(title="tokens per forward pass", xlabel="mean accepted tokens")
    ratios = [report[name]["ratio"] for name in names]
    medians = np.array([ratio["median"] for ratio in ratios])
    whiskers = [medians - [ratio["lower_quartile"] for ratio in ratios], [ratio["upper_quartile"] for ratio in ratios] - medians]
    right.barh(names, medians, xerr=np.maximum(whiskers, 0), color="C1", ecolor="0.3", capsize=3)
    right.axvline(1, color="0.3", linewidth=0.8)
    right.set(title="speed, and the middle half of the runs", xlabel="tokens/s as a multiple of plain decoding's")
    with written_whole(path) as beside:
        figure.savefig(beside, dpi=110)
    plt.close(figure)


def parse_args(argv=None):
    p = Parser("Hidden transfer and its rivals in one table.")
    p.add_argument("--checkpoint", default=str(BASE), help=CHECKPOINT_HELP)
    p.add_argument("--revision", help="branch, tag or commit of a --checkpoint from the hub")
    p.add_argument("--transfer", help="its transfer maps, from train.py; if not given, those that ship for this base model")
    p.add_argument("--rivals", default=str(TRANSFER.parent), help="folder with the rivals' files, from train.py")
    p.add_argument("--methods", help="names with commas between; if not given, all that have a file for this base model")
    p.add_argument("--tree-size", default="16", help="nodes that a method may have verified in one pass, root included; or several numbers, as in 8,16,32")
    p.add_argument("--questions", metavar="FILE", help="prompts in Spec-Bench's JSON lines; if not given, held-out text of 32 tokens each")
    p.add_argument("--chat", action="store_true", help="put each question into the model's own chat template")
    p.add_argument("--category", help="only these categories of the questions, with commas between")
    p.add_argument("--per-category", type=positive, metavar="N", help="only N questions of each category, at even distances")
    p.add_argument("--prompts", type=positive, help="how many (20 pieces of held-out text; all questions)")
    p.add_argument("--max-new-tokens", type=positive, default=128)
    p.add_argument("--rounds", type=positive, default=3, help="how often each prompt is decoded by each method")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps, or auto")
    p.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 on CUDA, float32 elsewhere")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    p.add_argument("--markdown", action="store_true", help="the table in markdown")
    p.add_argument("--plot", metavar="FILE", help="save a picture of it too")
    return p.parse_args(argv)


def main() -> None:
    args = parse_args()
    sampler = Sampler(args.temperature, seed=args.seed)
    model, tokenizer = load_checkpoint(args.checkpoint, DTYPES.get(args.dtype), pick_device(args.device), args.revision)
    questions, drafters = gather(args, model, tokenizer), drafters_for(args, model)
    report = compare(model, drafters, questions, args.max_new_tokens, args.rounds, sampler)
    setting = {"checkpoint": args.checkpoint, "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
               "device": str(model.embedding.weight.device), "threads": torch.get_num_threads(), "prompts": len(questions),
               "max_new_tokens": args.max_new_tokens, "tree_sizes": tree_sizes(args), "rounds": args.rounds,
               "temperature": args.temperature, "seed": args.seed}
    if args.plot:
        plot(report, args.plot)
    if args.json:
        print(json.dumps(setting | {"methods": report}))
        return
    print(f"{setting['dtype']} on {setting['device']}, {setting['threads']} threads, {len(questions)} prompts, {args.max_new_tokens} new tokens each, "
          f"trees of {args.tree_size}, {args.rounds} rounds, {f'temperature {args.temperature}' if args.temperature else 'greedy'}\n")
    print(lines_of(main_table(report), args.markdown))
    if args.questions is not None:
        print("\n" + lines_of(category_table(report), args.markdown))


if __name__ == "__main__":
    run(main)

"""
The training loop that every stage shares: gradient accumulation, several processes, a progress bar, Ctrl-C that
saves, and a resume that ends at the same weights as an uninterrupted run.
"""
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from checkpoint import load_file, save_file

# What stays fixed over a run and its resumptions.
PLAN = ("steps", "batch", "accumulate", "length", "lr", "seed", "data", "responses", "checkpoint", "revision", "position", "own_tokens",
        "transfer_layers", "shift_positions", "loss", "closed_form")


def fit(module, optimizers, loss_of, draw, args, label: str) -> list[tuple[int, float]]:
    """Minimise loss_of(draw(step, micro)), micro counting the micro-batches of a step; returns [(step, loss), ...].

    What draw gives depends on (seed, step, micro) alone, and the optimisers' state is saved, so a resumed run goes through
    the same numbers. `--accumulate n` and n processes see the same data. The state is kept in out/<label>-state.pt. Ctrl-C
    ends the step, saves, and exits with status 130. ValueError for a loss that is not finite.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    state_file = Path(args.out) / f"{label}-state.pt"
    parameters = [p for p in module.parameters() if p.requires_grad]
    peak = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    start, history = 0, []
    if args.resume:
        start, history = restore(state_file, module, optimizers, args, label)
    if world > 1:
        for p in parameters:                                                # the same start everywhere, to the bit
            dist.broadcast(p.data, 0)
    micro_batches = args.accumulate * world
    bar = tqdm(total=args.steps, initial=start, desc=label, disable=rank > 0, dynamic_ncols=True)
    with StopOnInterrupt() as stop, bar:
        for step in range(start, args.steps):
            total = 0.0
            for micro in range(rank, micro_batches, world):
                loss = loss_of(draw(step, micro)) / micro_batches
                loss.backward()
                total += loss.item()
            total, stopping = reduce_over_processes(parameters, total, stop.asked)
            if not math.isfinite(total):
                raise ValueError(f"the loss is {total} at step {step}: try a lower --lr")
            for optimizer, rates in zip(optimizers, peak):
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate * schedule(step, args.steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            history.append((step, total))
            bar.set_postfix_str(f"loss {total:.4f}", refresh=False)
            bar.update()
            due = args.save_every and (step + 1) % args.save_every == 0
            if rank == 0 and (stopping or due or step + 1 == args.steps):
                save_file({"kind": f"{label}-state", "plan": plan_of(args), "step": step + 1, "history": history,
                           "module": module.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}, state_file)
            if stopping and step + 1 < args.steps:
                bar.close()
                if rank == 0:
                    print(f"stopped after {step + 1} of {args.steps} steps; to go on, run the same command with --resume")
                sys.exit(130)
    return history


def restore(state_file, module, optimizers, args, label):
    saved = load_file(state_file, f"{label}-state", "--resume")
    for name, value in plan_of(args).items():
        if saved["plan"].get(name) != value:
            raise ValueError(f"--resume: the run in {state_file} has --{name.replace('_', '-')} {saved['plan'].get(name)}, not {value}")
    module.load_state_dict(saved["module"])
    for optimizer, state in zip(optimizers, saved["optimizers"]):
        optimizer.load_state_dict(state)
    return saved["step"], [tuple(pair) for pair in saved["history"]]


def plan_of(args) -> dict:
    return {name: getattr(args, name) for name in PLAN}


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: up over the first fiftieth of the run, then down to zero, both linearly."""
    return min((step + 1) / max(1, steps // 50), 1 - step / steps)


def generator_of(seed: int, step: int, micro: int) -> torch.Generator:
    """Randomness of one micro-batch of one step."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, step, micro]).generate_state(1)[0]))


def windows(stream, args, step: int, micro: int) -> torch.Tensor:
    """(batch, length) int64 token windows at random places of the stream (N,), at multiples of args.align."""
    generator = generator_of(args.seed, step, micro)
    places = (len(stream) - args.length) // args.align + 1
    starts = (torch.randint(places, (args.batch,), generator=generator) * args.align).tolist()
    return torch.stack([torch.from_numpy(stream[s:s + args.length].astype("int64")) for s in starts])


def reduce_over_processes(parameters, total: float, stopping: bool):
    """Sum gradients and losses over the processes; all stop if one was asked to, else they would wait for ever."""
    if not dist.is_initialized():
        return total, stopping
    for p in parameters:
        dist.all_reduce(p.grad)
    numbers = torch.tensor([total, float(stopping)], dtype=torch.float64, device=parameters[0].device)
    dist.all_reduce(numbers)
    return numbers[0].item(), numbers[1].item() > 0


class StopOnInterrupt:
    """Turns the first Ctrl-C into a request, so that no step is cut in half; the second one is a real interrupt."""

    def __enter__(self):
        self.asked, self.before = False, signal.signal(signal.SIGINT, self.handle)
        return self

    def handle(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, self.before)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)


def set_up_processes(device: str) -> str:
    """Join the process group that torchrun has announced, if any; returns this process's device."""
    if "RANK" not in os.environ:
        return device
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device

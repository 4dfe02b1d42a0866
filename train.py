"""
Training.

    python train.py                  # the transfer maps of the checkpoint that ships: minutes on a laptop
    python train.py --stage base     # that checkpoint itself, from nothing: about an hour and a half on 2 cores

Both stages share one loop (`fit`): a progress bar, Ctrl-C that saves, --resume that continues to the same weights
as an uninterrupted run, gradient accumulation, and several processes under torchrun.
"""
import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from checkpoint import BASE, load_checkpoint, load_file, save_checkpoint, save_file
from data import encode_texts, n_bytes, read_corpus
from model import GPT, GPTConfig, causal_mask
from tokenizer import load_tokenizer, save_tokenizer, train_bpe


# ---------------------------------------------------------------------------------------------- the loop

def fit(module, optimizers, loss_of, stream, args, device="cpu") -> list[tuple[int, float]]:
    """Minimise loss_of(tokens (B, T)) over windows of `stream`; returns [(step, loss), ...].

    Everything random in step s is drawn from a generator seeded with (seed, s), and the state of the optimisers
    is saved, so a resumed run goes through the same numbers as an uninterrupted one.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    state_file, history, start = Path(args.out) / f"{args.stage}-state.pt", [], 0
    if args.resume:
        saved = load_file(state_file, f"{args.stage}-state", "--resume")
        if saved["plan"] != plan_of(args):
            raise ValueError(f"--resume: {state_file} was made with {saved['plan']}, now {plan_of(args)}")
        module.load_state_dict(saved["module"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        history, start = [tuple(pair) for pair in saved["history"]], saved["step"]

    def save(step):
        if rank == 0:
            save_file({"kind": f"{args.stage}-state", "plan": plan_of(args), "step": step, "history": history,
                       "module": module.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}, state_file)

    step, params = start, [p for p in module.parameters() if p.requires_grad]
    bar = tqdm(total=args.steps, initial=start, desc=args.stage, disable=rank > 0, dynamic_ncols=True)
    try:
        for step in range(start, args.steps):
            total = 0.0
            for micro in range(rank, args.accumulate * world, world):
                tokens = windows(stream, args, step, micro).to(device)
                loss = loss_of(tokens) / (args.accumulate * world)
                loss.backward()
                total += loss.item()
            if world > 1:
                total = all_reduce(params, total)
            if not math.isfinite(total):
                raise ValueError(f"the loss is {total} at step {step}: lower --lr")
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * schedule(step, args)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            history.append((step, total))
            bar.set_postfix_str(f"loss {total:.3f}", refresh=False)
            bar.update()
            if args.save_every and (step + 1) % args.save_every == 0:
                save(step + 1)
    except KeyboardInterrupt:
        bar.close()
        save(step)
        print(f"\nstopped after {step} of {args.steps} steps; to go on: the same command with --resume")
        sys.exit(130)
    bar.close()
    return history


def plan_of(args) -> dict:
    """What must not change between a run and its continuation."""
    return {name: getattr(args, name) for name in ("steps", "batch", "accumulate", "length", "lr", "seed")}


def schedule(step, args) -> float:
    """Linear warm-up over the first hundredth, then linear to zero, as a share of the peak learning rate."""
    warmup = max(1, args.steps // 50)
    return min((step + 1) / warmup, 1 - step / args.steps)


def windows(stream, args, step, micro) -> torch.Tensor:
    """(B, length) int64 windows at random places of the stream (N,)."""
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 1_009 + micro)
    starts = torch.randint(len(stream) - args.length + 1, (args.batch,), generator=generator)
    return torch.stack([torch.from_numpy(stream[i:i + args.length].astype("int64")) for i in starts.tolist()])


def all_reduce(params, total) -> float:
    for p in params:
        dist.all_reduce(p.grad)
    loss = torch.tensor(total)
    dist.all_reduce(loss)
    return loss.item()


# ---------------------------------------------------------------------------------------------- the base stage

def train_base(args) -> None:
    """A GPT from nothing on the training half of the corpus. Muon for the matrices, AdamW for the rest."""
    texts, held_out = read_corpus(args.data)
    out = Path(args.out)
    if args.new_tokenizer:
        save_tokenizer(train_bpe(texts, GPTConfig.vocab_size - 1), out / "base.tiktoken")
    tokenizer = load_tokenizer(out / "base.tiktoken" if args.new_tokenizer else BASE.parent / "base.tiktoken")
    stream = encode_texts(texts, tokenizer)
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(vocab_size=tokenizer.n_vocab, n_kv_head=2, mlp_width=704)).to(args.device)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embedding" in name]
    optimizers = [torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=args.lr / 2, betas=(0.9, 0.95), weight_decay=0.0)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    position_ids, mask = torch.arange(args.length - 1), causal_mask(args.length - 1)

    def loss_of(tokens):
        with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
            logits = model(tokens[:, :-1], position_ids, mask)              # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())   # (B*T, V), (B*T,)

    fit(model, optimizers, torch.compile(loss_of) if args.compile else loss_of, stream, args, args.device)
    bits = bits_per_byte(model.eval(), encode_texts(held_out, tokenizer), n_bytes(held_out))
    save_checkpoint(model, out / "base.pt", "base.tiktoken", {"bits_per_byte": bits, "steps": args.steps})
    print(f"held-out bits per byte {bits:.4f}; saved {out / 'base.pt'}")


@torch.no_grad()
def bits_per_byte(model, stream, total_bytes) -> float:
    """Held-out bits per byte. Windows overlap by half, so that each token has at least half a context before it."""
    T = model.config.block_size
    position_ids, mask, nats = torch.arange(T), causal_mask(T), 0.0
    tokens = torch.from_numpy(stream.astype("int64"))
    for start in tqdm(range(0, len(tokens) - 1, T // 2), desc="bits per byte"):
        window = tokens[start:start + T + 1]
        n = len(window) - 1
        logits = model(window[None, :-1], position_ids[:n], mask[:n, :n])[0]
        losses = F.cross_entropy(logits.float(), window[1:], reduction="none")
        nats += losses[0 if start == 0 else T // 2:].sum().item()
    return nats / math.log(2) / total_bytes


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--stage", default="transfer"); p.add_argument("--out", default="out"); p.add_argument("--data")
    p.add_argument("--steps", type=int, default=3000); p.add_argument("--batch", type=int, default=16)
    p.add_argument("--accumulate", type=int, default=1); p.add_argument("--length", type=int, default=513)
    p.add_argument("--lr", type=float, default=6e-3); p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-every", type=int, default=100); p.add_argument("--resume", action="store_true")
    p.add_argument("--compile", action="store_true"); p.add_argument("--autocast", action="store_true")
    p.add_argument("--new-tokenizer", action="store_true"); p.add_argument("--device", default="cpu")
    args = p.parse_args()
    train_base(args)

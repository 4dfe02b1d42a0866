"""
The base stage: the small GPT that ships, trained from nothing on the training half of the corpus.

    python train.py --stage base --compile          # resumable: --resume; about an hour on 2 cores with bfloat16 units

Muon (Jordan et al., 2024) for the matrices, AdamW for embedding and norms: on a small corpus read three times it
reaches a given loss in far fewer steps than AdamW alone.
"""
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from checkpoint import BASE, save_checkpoint
from cli import written_whole
from data import encode_texts, n_bytes, read_corpus
from loop import fit, windows
from model import GPT, GPTConfig, causal_mask
from tokenizer import load_tokenizer, save_tokenizer, train_bpe

SHAPE = {"block_size": 512, "n_layer": 8, "n_head": 6, "n_kv_head": 2, "n_embd": 384, "mlp_width": 704}    # 11 million weights


def train_base(args) -> None:
    texts, held_out = read_corpus(args.data)
    if args.length > SHAPE["block_size"] + 1:
        raise ValueError(f"--length {args.length}: a window is at most {SHAPE['block_size'] + 1} tokens, the context and its last target")
    out, shipped = Path(args.out), BASE.parent / "base.tiktoken"
    out.mkdir(parents=True, exist_ok=True)
    vocabulary_file = out / "base.tiktoken"
    if args.new_tokenizer and not args.resume:
        print("training a vocabulary ...")
        save_tokenizer(train_bpe(texts, GPTConfig.vocab_size - 1), vocabulary_file)
    elif not vocabulary_file.exists():
        with written_whole(vocabulary_file) as beside:                      # a checkpoint's tokenizer lies beside it
            beside.write_bytes(shipped.read_bytes())
    tokenizer = load_tokenizer(vocabulary_file)
    stream = encode_texts(texts, tokenizer)
    if len(stream) < args.length:
        raise ValueError(f"--data: {len(stream)} training tokens are fewer than one window of {args.length}")
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(vocab_size=tokenizer.n_vocab, position=args.position, **SHAPE)).to(args.device)
    position_ids, mask = (x.to(args.device) for x in (torch.arange(args.length - 1), causal_mask(args.length - 1)))

    def loss_of(tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.autocast):
            logits = model(tokens[:, :-1], position_ids, mask)              # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())       # (B*T, V), (B*T,)

    history = fit(model, make_optimizers(model, args.lr), torch.compile(loss_of) if args.compile else loss_of,
                  lambda step, micro: windows(stream, args, step, micro).to(args.device), args, "base")
    bits = bits_per_byte(model.eval(), encode_texts(held_out, tokenizer), n_bytes(held_out))
    notes = {"bits_per_byte": bits, "tokens": args.steps * args.batch * args.accumulate * args.length, "final_loss": history[-1][1]}
    save_checkpoint(model, out / "base.pt", vocabulary_file.name, notes)
    print(f"held-out bits per byte {bits:.3f}; saved {out / 'base.pt'}")


def make_optimizers(model: GPT, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.blocks.named_parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr / 2, betas=(0.9, 0.95), weight_decay=0.0)]


@torch.inference_mode()
def bits_per_byte(model: GPT, stream, total_bytes: int) -> float:
    """Held-out bits per byte over stream (N,). Windows overlap by half, so that every token but the first ones is
    predicted with at least half a context before it; each token is counted once."""
    T, nats = model.config.block_size, 0.0
    device = model.embedding.weight.device
    tokens = torch.from_numpy(stream.astype("int64")).to(device)
    position_ids, mask = torch.arange(T, device=device), causal_mask(T, device=device)
    for start in tqdm(range(0, max(1, len(tokens) - 1 - T // 2), T // 2), desc="bits per byte", dynamic_ncols=True):
        window = tokens[start:start + T + 1]
        n = len(window) - 1
        logits = model(window[None, :-1], position_ids[:n], mask[:n, :n])[0]                # (n, V)
        losses = F.cross_entropy(logits.float(), window[1:], reduction="none")              # (n,)
        nats += losses[0 if start == 0 else T // 2:].sum().item()
    return nats / math.log(2) / total_bytes

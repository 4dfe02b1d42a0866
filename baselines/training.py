"""
The stages of train.py for the rivals that are no draft modules: the small GPT of draft_model.py is distilled, the skipped set of
self_speculation.py is searched for.
"""
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from baselines.draft_model import DEPTH, small_config
from baselines.self_speculation import search
from checkpoint import fingerprint, load_checkpoint, save_file, save_module
from data import encode_texts, read_corpus
from distillation import FromText
from loop import fit
from model import GPT, causal_mask
from pretrain import make_optimizers
from replay import cut_prompts


def train_draft_model(args) -> None:
    """Distil a small GPT from the base, on the text that the maps learn from; saves draft-model.pt in the folder --out.

    The loss is the divergence of the base's next-token distribution from the small model's, row by row.
    """
    model, tokenizer = load_checkpoint(args.checkpoint, torch.float32, args.device, args.revision)
    torch.manual_seed(args.seed)
    small = GPT(small_config(model.config)).to(args.device)
    lessons = FromText(model, tokenizer, args, 1)

    def loss_of(tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.autocast):
            teacher = lessons.model(tokens, lessons.position_ids, lessons.mask)                             # (B, T, V)
            student = small(tokens, lessons.position_ids, lessons.mask)
        teacher, student = F.log_softmax(teacher.float(), dim=-1), F.log_softmax(student.float(), dim=-1)
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean()

    history = fit(small, make_optimizers(small, args.lr), loss_of, lessons.draw, args, "draft-model")
    share = agreement_of(model, small.eval(), [tokens for tokens, _ in lessons.exam.text])
    notes = {"agreement": share, "depth": DEPTH, "tokens": args.steps * args.accumulate * lessons.rows, "final_loss": history[-1][1]}
    save_module(small, model, Path(args.out) / "draft-model.pt", "draft-model", asdict(small.config), notes)
    print(f"the small model's first choice is the base's on {share:.1%} of held-out text; saved {args.out}/draft-model.pt")


@torch.inference_mode()
def agreement_of(model, small, windows) -> float:
    """How often both models' likeliest next token is the same one, on windows (T,) of text."""
    def choices(one, tokens):
        T, device = len(tokens), tokens.device
        return one(tokens[None], torch.arange(T, device=device), causal_mask(T, device=device)).argmax(-1)      # (1, T)
    return torch.cat([choices(model, tokens) == choices(small, tokens) for tokens in windows], dim=1).double().mean().item()


def train_self_speculation(args) -> None:
    """Search the skipped set on held-out prompts; saves self-speculation.pt in the folder --out."""
    model, tokenizer = load_checkpoint(args.checkpoint, torch.float32, args.device, args.revision)
    stream = encode_texts(read_corpus(args.data)[1], tokenizer)
    prompt = min(args.length, model.config.block_size // 2)
    between = stream[len(stream) // (2 * args.batch):]                      # not at the places that tables and tests are made from
    prompts = cut_prompts(between, args.batch, prompt)
    skip, value = search(model, prompts, min(48, model.config.block_size - prompt))
    save_file({"kind": "self-speculation", "base": fingerprint(model), "options": asdict(skip), "notes": value},
              Path(args.out) / "self-speculation.pt")
    print(f"skips attention {list(skip.attention)} and MLP {list(skip.mlp)}; depth {skip.depth}, stops below {skip.stop}\n"
          f"modelled speed {value['speed']:.3f} of plain decoding, {value['tokens_per_pass']:.2f} tokens per pass, "
          f"{value['accepted']:.0%} of the drafts accepted; saved {args.out}/self-speculation.pt")

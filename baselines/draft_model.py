"""
Speculative decoding with a draft model (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): a small GPT with
the same vocabulary drafts a chain, one token a pass of its own, and the large model verifies it in one pass.

Departure: by default the drafts are chosen with the noise that chooses the large model's tokens, so that the output is plain
decoding's token for token; with sampled=True and `verify="rejection"` it is the papers' rejection sampling.

    python train.py --stage draft-model             # a GPT of two narrow blocks, distilled from the base; minutes
"""
import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F

from baselines.chains import draft_chain
from checkpoint import load_checkpoint, save_module
from data import encode_texts, read_corpus
from drafters import MAX_TREE_SIZE, Round
from loop import fit
from model import GPT, GPTConfig, KVCache, causal_mask
from pretrain import make_optimizers
from tree import Tree

DEPTH = 4                   # of a chain
SMALL = {"n_layer": 2, "n_head": 3, "n_kv_head": 1, "n_embd": 192, "head_dim": 64, "mlp_width": 384, "rope_factors": None, "tie_head": True}


class DraftModelDrafter:
    """A chain of `depth` drafts from a small GPT, which has a cache of its own; depth 0 is plain decoding."""
    method, rows = "draft-model", 0

    def __init__(self, small: GPT, depth: int = DEPTH, sampled: bool = False):
        if not 0 <= depth < MAX_TREE_SIZE:
            raise ValueError(f"draft model: depth is {depth}; it must be from 0 (plain decoding) to {MAX_TREE_SIZE - 1}")
        self.small, self.depth, self.sampled = small, depth, sampled
        self.tree_size = depth + 1
        self.cache, self.fed = None, []                                     # fed: the tokens whose rows are committed in it

    def forward(self, model, tokens, position_ids, mask, cache, read):
        if model.config.vocab_size != self.small.config.vocab_size:
            raise ValueError(f"the draft model has a vocabulary of {self.small.config.vocab_size} tokens, "
                             f"the model {model.config.vocab_size}: they must be the same")
        if cache.length == 0:                                               # a new text
            self.cache, self.fed = None, []
        return model(tokens, position_ids, mask, cache, read), None

    def propose(self, round: Round) -> Tree:
        room = self.small.config.block_size - len(round.tokens)             # its context may be the shorter one
        depth = min(self.depth, round.max_depth, room + 1)
        if depth < 1:
            return Tree([round.tokens[-1]], [-1])
        if self.cache is None:
            weight, capacity = self.small.embedding.weight, min(self.small.config.block_size, len(round.tokens) + round.max_depth)
            self.cache = KVCache(self.small.config, capacity, 1, weight.dtype, weight.device)
        kept = 0                                                            # drafts that were accepted are in the cache already
        while kept < min(len(self.fed), len(round.tokens) - 1) and self.fed[kept] == round.tokens[kept]:
            kept += 1
        self.cache.truncate(kept)
        self.fed = round.tokens[:kept]
        return draft_chain(round, depth, lambda token, position: self.read(round.tokens[len(self.fed):] or [token]), self.sampled)

    def read(self, tokens: list[int]) -> torch.Tensor:
        """Feed tokens behind those fed before; the logits (V,) of what follows the last of them."""
        device, start = self.small.embedding.weight.device, len(self.fed)
        position_ids = torch.arange(start, start + len(tokens), device=device)
        mask = causal_mask(len(tokens), start, device)
        logits = self.small(torch.tensor([tokens], device=device), position_ids, mask, self.cache, slice(-1, None))[0, 0]
        self.cache.commit(list(range(len(tokens))))
        self.fed = self.fed + tokens
        return logits


# ------------------------------------------------------------------------------------------ training

def train_draft_model(args, own_text) -> None:
    """The stage of train.py: distil a small GPT from the base; saves draft-model.pt in the folder --out.

    own_text(model, stream, args): text half of which the base writes itself, as for the transfer maps. The loss is
    the divergence of the base's next-token distribution from the small model's, row by row.
    """
    model, tokenizer = load_checkpoint(args.checkpoint, torch.float32, args.device, args.revision)
    args.length = min(args.length, model.config.block_size)
    stream, held_out = (encode_texts(texts, tokenizer) for texts in read_corpus(args.data))
    for kind, tokens in (("training", stream), ("held-out", held_out)):
        if len(tokens) < args.length:
            raise ValueError(f"--data: {len(tokens)} {kind} tokens are fewer than one window of --length {args.length}")
    torch.manual_seed(args.seed)
    small = GPT(small_config(model.config)).to(args.device)
    if args.own_tokens:
        stream = own_text(model, stream, args)
    position_ids, mask = torch.arange(args.length, device=args.device), causal_mask(args.length, device=args.device)

    def loss_of(tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.autocast):
            teacher, student = model(tokens, position_ids, mask), small(tokens, position_ids, mask)         # (B, T, V)
        teacher, student = F.log_softmax(teacher.float(), dim=-1), F.log_softmax(student.float(), dim=-1)
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean()

    history = fit(small, make_optimizers(small, args.lr), loss_of, stream, args, "draft-model")
    share = agreement_of(model, small.eval(), held_out, args.length)
    notes = {"agreement": share, "depth": DEPTH, "tokens": args.steps * args.batch * args.accumulate * args.length, "final_loss": history[-1][1]}
    save_module(small, model, Path(args.out) / "draft-model.pt", "draft-model", dataclasses.asdict(small.config), notes)
    print(f"the small model's first choice is the base's on {share:.1%} of held-out text; saved {args.out}/draft-model.pt")


def small_config(config: GPTConfig) -> GPTConfig:
    """The base's kind and vocabulary, in the size of SMALL."""
    return dataclasses.replace(config, **SMALL)


@torch.inference_mode()
def agreement_of(model, small, stream, length: int, windows: int = 40) -> float:
    """How often both models' likeliest next token is the same one, on windows of stream (N,)."""
    starts = torch.linspace(0, len(stream) - length, windows).long().tolist()
    tokens = torch.stack([torch.from_numpy(stream[s:s + length].astype("int64")) for s in starts]).to(model.embedding.weight.device)
    position_ids, mask = torch.arange(length, device=tokens.device), causal_mask(length, device=tokens.device)
    return torch.cat([model(row[None], position_ids, mask).argmax(-1) == small(row[None], position_ids, mask).argmax(-1)
                      for row in tokens]).double().mean().item()

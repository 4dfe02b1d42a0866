"""
Self-speculative decoding, "Draft & Verify" (Zhang et al., arXiv 2309.08168): the model drafts a chain for itself, faster because it
skips a set of its own attention and MLP sub-layers, and verifies it in one whole pass. No training and no more memory.

The draft passes read the rows that the whole model has committed, and stage their own behind them; those are dropped before
the verifying pass, which computes them whole. A draft of low confidence is the last of its chain.

Departures from the paper:
  * the threshold of confidence is found once, with the skipped set, instead of being adapted while decoding;
  * the skipped set is found by greedy search (`search`) instead of Bayesian optimisation: from nothing skipped, always skip
    the one more sub-layer that leaves the best modelled speed. A few dozen sub-layers need no better optimiser, and skipping
    nothing is a fixed point to start from: every draft is right, and the modelled speed is exactly that of plain decoding.

    python train.py --stage self-speculation        # search the skipped set; minutes
"""
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

from baselines.chains import draft_chain
from drafters import MAX_TREE_SIZE, Round
from model import GPT
from tree import Tree

SEARCH_DEPTH, DEPTHS, STOPS = 4, (1, 2, 3, 4, 6, 8), (0.0, 0.2, 0.4, 0.6, 0.8)
PATIENCE = 4                # turns without a better set before the search ends


@dataclass(frozen=True)
class Skip:
    """Blocks whose attention, and blocks whose MLP, a draft pass leaves out; how deep it drafts, and when it stops."""
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    depth: int = SEARCH_DEPTH
    stop: float = 0.0       # a draft of a probability below this is the last one


class SelfSpeculationDrafter:
    """A chain drafted by the model itself without the sub-layers in `skip`; sampled: drawn, for rejection sampling."""
    method, rows = "self-speculation", 0        # draft passes stage no more rows than the tree that they make has

    def __init__(self, skip: Skip, sampled: bool = False):
        if not 0 <= skip.depth < MAX_TREE_SIZE:
            raise ValueError(f"self-speculation: depth is {skip.depth}; it must be from 0 (plain decoding) to {MAX_TREE_SIZE - 1}")
        if not 0 <= skip.stop <= 1:
            raise ValueError(f"self-speculation: stop is {skip.stop}; it must be a probability from 0 (never stop early) to 1")
        self.skip, self.sampled, self.tree_size = skip, sampled, skip.depth + 1

    def forward(self, model, tokens, position_ids, mask, cache, read):
        check_skip(self.skip, model)
        return model(tokens, position_ids, mask, cache, read), None

    def propose(self, round: Round) -> Tree:
        committed = round.cache.length

        def read(token, position):
            logits = skipping_pass(round.model, self.skip, token, position, round.cache)
            round.cache.commit([0])                                         # for the next draft alone
            return logits

        tree = draft_chain(round, self.skip.depth, read, self.sampled, self.skip.stop)
        round.cache.truncate(committed)
        return tree


def skipping_pass(model: GPT, skip: Skip, token: int, position: int, cache) -> torch.Tensor:
    """Logits (V,) behind one token, which sees all committed rows; its own row is staged in the layers that attend."""
    device = model.embedding.weight.device
    position_ids = torch.tensor([position], device=device)
    mask = torch.ones(1, cache.length + 1, dtype=torch.bool, device=device)
    x, rope = model.embed(torch.tensor([[token]], device=device), position_ids), model.rope(position_ids)       # (1, 1, C)
    for layer, block in enumerate(model.blocks):
        if layer not in skip.attention:
            x = x + block.attention(block.norm_1(x), rope, mask, cache, layer)
        if layer not in skip.mlp:
            x = x + block.mlp(block.norm_2(x))
    return model.unembed(x)[0, 0]


def check_skip(skip: Skip, model: GPT) -> None:
    for name, layers in (("attention", skip.attention), ("mlp", skip.mlp)):
        for layer in layers:
            if not 0 <= layer < len(model.blocks):
                raise ValueError(f"self-speculation: {name} {layer} cannot be skipped, the model has blocks 0 to {len(model.blocks) - 1}")


# ------------------------------------------------------------------------------------------ the search

def draft_cost(model: GPT, skip: Skip) -> float:
    """A draft pass in units of a whole pass: the share of the weights that it reads (matrices of the blocks, unembedding).

    With one row or a few, a pass costs what its weights cost to read.
    """
    def size(module):
        return sum(p.numel() for p in module.parameters())
    head = model.config.vocab_size * model.config.n_embd
    whole = head + sum(size(block.attention) + size(block.mlp) for block in model.blocks)
    skipped = sum(size(model.blocks[t].attention) for t in skip.attention) + sum(size(model.blocks[t].mlp) for t in skip.mlp)
    return 1 - skipped / whole


def worth(model: GPT, skip: Skip, prompts, new: int) -> dict[str, float]:
    """Greedy decoding of the prompts: {"speed": modelled, plain decoding being 1; "tokens_per_pass"; "accepted": share of drafts}."""
    from generate import generate                                           # generate.py offers this drafter
    drafter, drafts, tokens, passes = SelfSpeculationDrafter(skip), 0, 0, 0

    def count(one):
        nonlocal drafts
        drafts += len(one.tree) - 1
    for prompt in prompts:
        result = generate(model, prompt, drafter, max_new_tokens=new, on_pass=count)
        tokens, passes = tokens + result.new_tokens, passes + result.forward_passes
    return {"speed": tokens / (passes + drafts * draft_cost(model, skip)), "tokens_per_pass": tokens / passes,
            "accepted": (tokens - passes) / max(1, drafts)}


def search(model: GPT, prompts, new: int = 48) -> tuple[Skip, dict[str, float]]:
    """The skipped set, depth and threshold with the best modelled speed on these prompts, and what it is worth.

    Greedy: each turn tries every sub-layer that is left and skips the best one, for PATIENCE turns beyond the best set,
    at depth SEARCH_DEPTH and without a threshold; then depth and threshold are chosen for that set.
    """
    def best_of(candidates):
        scored = []
        for skip in candidates:
            scored.append((worth(model, skip, prompts, new), skip))
            bar.update()
        return max(scored, key=lambda pair: pair[0]["speed"])

    L = len(model.blocks)
    with tqdm(desc="search", unit="set", dynamic_ncols=True) as bar:
        value, skip = best_of([replace(Skip(), attention=(t,)) for t in range(L)] + [replace(Skip(), mlp=(t,)) for t in range(L)])
        best, since = (value, skip), 0
        while since < PATIENCE and len(skip.attention) + len(skip.mlp) < 2 * L:
            value, skip = best_of([replace(skip, attention=skip.attention + (t,)) for t in range(L) if t not in skip.attention]
                                  + [replace(skip, mlp=skip.mlp + (t,)) for t in range(L) if t not in skip.mlp])
            best, since = ((value, skip), 0) if value["speed"] > best[0]["speed"] else (best, since + 1)
            bar.set_postfix_str(f"{best[0]['speed']:.3f} of plain, {len(best[1].attention)} attention and {len(best[1].mlp)} MLP skipped")
        value, skip = best_of([replace(best[1], depth=depth, stop=stop) for depth in DEPTHS for stop in STOPS])
    return replace(skip, attention=tuple(sorted(skip.attention)), mlp=tuple(sorted(skip.mlp))), value


def train_self_speculation(args) -> None:
    """The stage of train.py: search on held-out prompts, save self-speculation.pt in the folder --out."""
    from pathlib import Path

    from checkpoint import fingerprint, load_checkpoint, save_file
    from data import encode_texts, read_corpus
    from measure import cut_prompts
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

"""
Drafting a chain, token by token, with a model that is cheaper than the one it drafts for: what a draft model and
self-speculation have in common.
"""
import torch
import torch.nn.functional as F

from drafters import Round
from tree import Tree, chain


def draft_chain(round: Round, depth: int, read, sampled: bool = False, stop: float = 0.0) -> Tree:
    """A chain of at most `depth` drafts behind the last token.

    read(token, position) -> logits (V,) of what follows that token; called with the last token first, then with each
    draft that has one behind it. The drafts are what the sampler would choose from those logits with the noise that
    will choose the model's own token there; with `sampled` they are drawn from their distribution, which the tree
    then carries as q, for rejection sampling (arXiv 2211.17192, algorithm 1). A draft of a probability below `stop` is
    the last one (arXiv 2309.08168, section 4.2).
    """
    tokens, laws, dice = [round.tokens[-1]], [], round.sampler.generator(len(round.tokens))
    for _ in range(min(depth, round.max_depth)):
        position = len(round.tokens) - 1 + len(tokens)                      # of the draft to come
        logits = read(tokens[-1], position - 1)
        if sampled:
            laws.append(round.sampler.probs(logits).cpu())                  # (V,)
            tokens.append(draw(laws[-1], dice))
        else:
            tokens.append(round.sampler.choose(logits, position))
        if stop and F.softmax(logits.float(), dim=-1)[tokens[-1]] < stop:
            break
    tree = chain(tokens)
    tree.q = torch.stack(laws) if laws else None                            # (drafts, V)
    return tree


def draw(law: torch.Tensor, dice: torch.Generator) -> int:
    return int(torch.multinomial(law, 1, generator=dice))

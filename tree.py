"""
Candidate trees, and the two rules that decide how far a tree is accepted.

    python tree.py                  # a small tree with its mask and position ids
    python tree.py --plot tree.png  # the same as a picture

Node 0, the root, is the last emitted token, which the model has not seen yet. Every other node is a draft; a path
from the root is one candidate continuation. One forward pass reads all nodes: a node sees the committed rows, its
ancestors and itself, and stands at the position its depth says (SpecInfer, arXiv 2305.09781, section 4).
"""
import heapq
from dataclasses import dataclass, field

import numpy as np
import torch

from cli import Parser, run, written_whole


@dataclass
class Tree:
    """tokens (N,) and parents (N,); parents[0] is -1, and a parent always stands before its children.

    q: where the children were *sampled*, q[d - 1] (V,) is the distribution that nodes of depth d were drawn from,
    in order and without replacement among siblings; None where they were picked deterministically.
    """
    tokens: list[int]
    parents: list[int]
    q: torch.Tensor | None = None
    depth: list[int] = field(init=False)
    children: list[dict[int, int]] = field(init=False)      # per node: token -> child node, in drafting order

    def __post_init__(self):
        if not self.tokens or len(self.tokens) != len(self.parents) or self.parents[0] != -1:
            raise ValueError(f"a tree needs a root (parent -1) and a parent for each token; got {len(self.tokens)} "
                             f"tokens, parents {self.parents}")
        self.depth, self.children = [0], [{}]
        for node in range(1, len(self.tokens)):
            token, parent = self.tokens[node], self.parents[node]
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: a parent stands before its children")
            if token in self.children[parent]:
                raise ValueError(f"nodes {self.children[parent][token]} and {node} are siblings with the same token {token}")
            self.children[parent][token] = node
            self.children.append({})
            self.depth.append(self.depth[parent] + 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def mask(self, committed: int = 0) -> torch.Tensor:
        """(N, committed + N) bool: all committed rows, the node's ancestors, the node itself."""
        mask = np.zeros((len(self), committed + len(self)), dtype=bool)
        mask[0, :committed] = True
        for node, parent in enumerate(self.parents):
            if node:
                mask[node] = mask[parent]
            mask[node, committed + node] = True
        return torch.from_numpy(mask)

    def position_ids(self, committed: int = 0) -> torch.Tensor:
        """(N,): the root stands behind the committed rows, every other node one behind its parent."""
        return torch.tensor(self.depth) + committed


def chain(tokens: list[int]) -> Tree:
    """A tree without branches: the root and one draft per depth."""
    return Tree(tokens, list(range(-1, len(tokens) - 1)))


def best_first(scores: list[list[float]], size: int) -> tuple[list[int], list[int]]:
    """The `size` likeliest nodes, root included, of the tree in which rank r at depth d has probability scores[d-1][r].

    A node's probability is the product along its path, because the K drafts are independent given the context.
    scores: K rows in descending order. Returns (parents, ranks), each (N,), with -1 for the root. A parent is
    never less likely than its child, so taking nodes in order of probability keeps the set closed under prefixes.
    Given measured acceptance rates instead of probabilities it builds the static tree (Medusa, arXiv 2401.10774,
    section 2.3.3).
    """
    parents, ranks, depth, chance = [-1], [-1], [0], [1.0]
    queue = [(-scores[0][0], 0, 0)] if scores and scores[0] else []         # (-probability, parent, rank)
    while queue and len(parents) < size:
        negative, parent, rank = heapq.heappop(queue)
        node, d = len(parents), depth[parent]
        parents.append(parent)
        ranks.append(rank)
        depth.append(d + 1)
        chance.append(-negative)
        if rank + 1 < len(scores[d]):                                       # its next sibling ...
            heapq.heappush(queue, (-chance[parent] * scores[d][rank + 1], parent, rank + 1))
        if d + 1 < len(scores) and scores[d + 1]:                           # ... and its first child
            heapq.heappush(queue, (negative * scores[d + 1][0], node, 0))
    return parents, ranks


def tree_from_paths(root: int, paths: list[tuple[int, ...]], candidates: list[list[int]]) -> Tree:
    """A static tree from rank paths: (0, 2) is the third candidate at depth 2 below the first at depth 1.

    candidates: K lists of token ids, best first. ValueError for a path whose parent is missing, that is deeper
    than K, or that names a rank that depth d does not have.
    """
    nodes, tokens, parents = {(): 0}, [root], [-1]
    for path in sorted(paths, key=lambda path: (len(path), path)):
        if not 1 <= len(path) <= len(candidates):
            raise ValueError(f"path {path}: the drafter gives {len(candidates)} steps, so depth 1 to {len(candidates)}")
        if not 0 <= path[-1] < len(candidates[len(path) - 1]):
            raise ValueError(f"path {path}: depth {len(path)} has {len(candidates[len(path) - 1])} candidates")
        if path[:-1] not in nodes:
            raise ValueError(f"path {path} has no parent {path[:-1]}")
        if path in nodes:
            raise ValueError(f"path {path} is listed twice")
        nodes[path] = len(tokens)
        tokens.append(candidates[len(path) - 1][path[-1]])
        parents.append(nodes[path[:-1]])
    return Tree(tokens, parents)


# ------------------------------------------------------------------------------------------ verification

def walk(tree: Tree, logits: torch.Tensor, position: int, choose) -> tuple[list[int], int]:
    """How far the tree is right: (accepted nodes from the root on, the token behind the last of them).

    logits (N, V); position: that of the root; choose(logits (V,), position) -> token is what plain decoding calls,
    so the tokens accepted here are those that plain decoding would have emitted, whatever the tree holds.
    """
    path = [0]
    while True:
        node = path[-1]
        token = choose(logits[node], position + tree.depth[node] + 1)
        child = tree.children[node].get(token)
        if child is None:
            return path, token
        path.append(child)


def walk_rejection(tree: Tree, probs_of, coin, draw) -> tuple[list[int], int]:
    """The same by multi-round rejection sampling: the *law* of the output is that of plain sampling.

    Speculative sampling (arXiv 2211.17192, appendix A.1; 2302.01318, theorem 1), over trees as in SpecInfer (arXiv
    2305.09781, algorithm 2), here for siblings drawn without replacement: after a rejection the rejected token
    leaves q as well. probs_of(node) -> p (V,) float64, the filtered distribution of the model behind that node;
    coin(a) -> True with probability a; draw(p) -> a token from p.
    """
    path = [0]
    while True:
        node = path[-1]
        p, d = probs_of(node), tree.depth[node]
        q = tree.q[d].double() if tree.q is not None and d < len(tree.q) else None
        accepted = None
        for token, child in tree.children[node].items():
            proposal = q if q is not None else torch.zeros_like(p).index_fill_(0, torch.tensor(token), 1.0)
            if coin(min(1.0, (p[token] / proposal[token]).item()) if p[token] > 0 else 0.0):
                accepted = child
                break
            p = residual(p, proposal)
            if q is not None:                                               # the next sibling was drawn from what was left
                q = q.clone()
                q[token] = 0
                q = q / q.sum()
        if accepted is None:
            return path, draw(p)
        path.append(accepted)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """normalise(max(p - q, 0)), (V,): what p still owes after a draft from q was rejected."""
    rest = (p - q).clamp_min(0)
    total = rest.sum()
    return rest / total if total > 0 else p                                 # p = q is never rejected


def sample_tree(root: int, parents: list[int], q: torch.Tensor, generator: torch.Generator) -> Tree:
    """Fill a tree shape (parents as from best_first) with tokens sampled from q (K, V), distinct among siblings.

    Siblings are drawn one after another without replacement; a shape that asks for more siblings than q has tokens
    of positive probability loses the surplus, with all that hangs below.
    """
    wanted = [parents.count(node) for node in range(len(parents))]
    depth, kept, tokens, new_parents = [0], {0: 0}, [root], [-1]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    drawn: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if node == 0 or parent not in kept:
            continue
        if parent not in drawn:
            row = q[depth[parent]]
            count = min(wanted[parent], int((row > 0).sum()))
            drawn[parent] = torch.multinomial(row, count, replacement=False, generator=generator).tolist()
        if drawn[parent]:
            kept[node] = len(tokens)
            tokens.append(drawn[parent].pop(0))
            new_parents.append(kept[parent])
    return Tree(tokens, new_parents, q)


# ----------------------------------------------------------------------------------------------- a picture

EXAMPLE = (["the", "cat", "dog", "sat", "ran", "sat", "on"], [-1, 0, 0, 1, 1, 2, 3])


def depth_first(tree: Tree) -> list[int]:
    """The nodes in the order in which a tree is drawn: a node, then all that hangs below its first child, ..."""
    order, waiting = [], [0]
    while waiting:
        order.append(waiting.pop())
        waiting.extend(reversed(tree.children[order[-1]].values()))
    return order


def draw(tree: Tree, names: list[str], committed: int) -> str:
    """The tree, and behind each node its position id and its row of the mask (# may look, . may not)."""
    mask, position_ids = tree.mask(committed).tolist(), tree.position_ids(committed).tolist()
    lines = [f"{'tree':<16}{'node':>5}{'position id':>13}   mask: {committed} committed rows | {len(tree)} nodes"]
    for node in depth_first(tree):
        cells = ["#" if seen else "." for seen in mask[node]]
        label = "   " * tree.depth[node] + names[node]
        lines.append(f"{label:<16}{node:5}{position_ids[node]:13}         {' '.join(cells[:committed])} | {' '.join(cells[committed:])}")
    return "\n".join(lines)


def plot(tree: Tree, names: list[str], committed: int, path: str) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.3))
    leaves = [node for node in depth_first(tree) if not tree.children[node]]
    ancestors = tree.mask()
    below = {node: [leaf for leaf in leaves if ancestors[leaf, node]] for node in range(len(tree))}
    height = {node: sum(leaves.index(leaf) for leaf in below[node]) / len(below[node]) for node in below}
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            left.plot([tree.depth[parent], tree.depth[node]], [-height[parent], -height[node]], color="0.6", zorder=1)
        left.annotate(f"{names[node]}\n{node}", (tree.depth[node], -height[node]), ha="center", va="center", zorder=2,
                      bbox={"boxstyle": "round", "facecolor": "white"})
    left.set(title="candidate tree (node number below the token)", xticks=range(max(tree.depth) + 1), yticks=[],
             xlabel="depth", xlim=(-0.4, max(tree.depth) + 0.4), ylim=(0.6 - len(leaves), 0.6))
    right.imshow(tree.mask(committed), cmap="Greys", vmin=0, vmax=1.6)
    right.axvline(committed - 0.5, color="C1")
    labels = [f"{name} ({n}) at {position}" for n, (name, position) in enumerate(zip(names, tree.position_ids(committed).tolist()))]
    right.set(title="mask: who may look (row) at whom (column)", yticks=range(len(tree)), yticklabels=labels,
              xticks=range(committed + len(tree)), xticklabels=["past"] * committed + [str(n) for n in range(len(tree))])
    with written_whole(path) as beside:
        figure.savefig(beside, dpi=110)
    plt.close(figure)


def main() -> None:
    p = Parser("A small candidate tree, with its mask and position ids.")
    p.add_argument("--plot", metavar="FILE", help="save it as a picture too")
    p.add_argument("--committed", type=int, default=3, help="committed rows before the root")
    args = p.parse_args()
    if args.committed < 0:
        raise ValueError(f"--committed {args.committed}: it must be 0 or more")
    names, parents = EXAMPLE
    tree = Tree([names.index(name) for name in names], parents)
    print(draw(tree, names, args.committed))
    if args.plot:
        plot(tree, names, args.committed, args.plot)
        print(f"saved {args.plot}")


if __name__ == "__main__":
    run(main)

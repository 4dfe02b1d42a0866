"""
Drafters that know what they do, behind the interface of drafters.py. An untrained drafter is hardly ever right, so
with it the accept path would not run at all; with these a test says which drafts are right and where they stand.
"""
from tree import Tree


def chain_shape(depth: int) -> list[int]:
    """Parents of a chain: root, child, grandchild, ..."""
    return list(range(-1, depth))


def bushy_shape(depth: int, width: int) -> list[int]:
    """Parents of a tree in which every node above the last level has `width` children, level by level."""
    parents, level = [-1], [0]
    for _ in range(depth):
        nodes = [(len(parents) + k, node) for k, node in enumerate(n for n in level for _ in range(width))]
        parents += [parent for _, parent in nodes]
        level = [node for node, _ in nodes]
    return parents


LOPSIDED = [-1, 0, 0, 0, 1, 1, 4, 3, 6]     # one deep arm on the first child, one short on the third, none on the second


class PlainForward:
    """The model's own pass; subclasses add `propose`."""
    method, rows = "test", 0

    def __init__(self, tree_size: int):
        self.tree_size = tree_size

    def forward(self, model, tokens, position_ids, mask, cache, read):
        return model(tokens, position_ids, mask, cache, read), None


class Oracle(PlainForward):
    """Knows the text (prompt and true continuation) and places it in a tree of a given shape.

    branch: which child carries the true token, counted from 0, or the last one where there are fewer. Its siblings
    are wrong. Below a wrong node stand the *true* tokens of that depth: a rule that looks at tokens alone, and not at
    whose child they are, goes astray there.
    """

    def __init__(self, text: list[int], shape: list[int], branch: int = 0, vocab: int = 50):
        super().__init__(len(shape))
        self.text, self.shape, self.branch, self.vocab = text, shape, branch, vocab

    def token(self, position: int, child: int, of_how_many: int, parent_is_right: bool) -> tuple[int, bool]:
        """(token, is it right?) of a child: by default right at self.branch alone, below a right parent."""
        right = min(self.branch, of_how_many - 1) if parent_is_right else 0
        return (self.text[position] + child - right) % self.vocab, parent_is_right and child == right

    def propose(self, round) -> Tree:
        start = len(round.tokens)
        assert round.tokens == self.text[:start]                # otherwise the output is wrong already
        deepest = min(round.max_depth, len(self.text) - start)
        tokens, parents, is_right, depth, children = [round.tokens[-1]], [-1], [True], [0], [0]
        moved = {0: 0}                                          # node of the shape -> node of the tree
        for node, parent in enumerate(self.shape):
            if node == 0 or parent not in moved or depth[moved[parent]] == deepest:
                continue
            above, moved[node] = moved[parent], len(tokens)
            token, right = self.token(start + depth[above], children[above], self.shape.count(parent), is_right[above])
            children[above] += 1
            tokens.append(token)
            parents.append(above)
            is_right.append(right)
            depth.append(depth[above] + 1)
            children.append(0)
        return Tree(tokens, parents)


class Adversary(Oracle):
    """Never right: every first-level draft is wrong, with true tokens as decoys below."""

    def token(self, position, child, of_how_many, parent_is_right):
        return (self.text[position] + child + (1 if parent_is_right else 0)) % self.vocab, False


class WrongAt(Oracle):
    """A chain that is right above `depth`, wrong at it, and holds the true tokens again below."""

    def __init__(self, text: list[int], length: int, depth: int):
        super().__init__(text, chain_shape(length))
        self.wrong = depth

    def propose(self, round) -> Tree:
        tree = super().propose(round)
        if self.wrong < len(tree):
            tree.tokens[self.wrong] = (tree.tokens[self.wrong] + 1) % self.vocab
        return Tree(tree.tokens, tree.parents)


class Scripted(PlainForward):
    """Says what it is told: script(round, k) -> Tree in round k, or a list of trees, with plain decoding behind its end.

    The root of a tree in a list is replaced by the last token emitted.
    """

    def __init__(self, script, tree_size: int = 64):
        super().__init__(tree_size)
        self.script, self.k = script, 0

    def propose(self, round) -> Tree:
        k, self.k = self.k, self.k + 1
        if callable(self.script):
            return self.script(round, k)
        tree = self.script[k] if k < len(self.script) else Tree([0], [-1])
        return Tree([round.tokens[-1]] + tree.tokens[1:], tree.parents)


class Watch:
    """Any drafter, watched: on_forward(position_ids, mask, cache) before each pass, on_propose(round, tree) after each
    proposal. `positions` and `trees` keep what was fed and what was proposed."""

    def __init__(self, drafter, on_forward=None, on_propose=None):
        self.drafter, self.on_forward, self.on_propose = drafter, on_forward, on_propose
        self.method, self.tree_size, self.rows = drafter.method, drafter.tree_size, drafter.rows
        self.positions, self.trees = [], []

    def forward(self, model, tokens, position_ids, mask, cache, read):
        self.positions.append(position_ids.tolist())
        if self.on_forward:
            self.on_forward(position_ids, mask, cache)
        return self.drafter.forward(model, tokens, position_ids, mask, cache, read)

    def propose(self, round):
        tree = self.drafter.propose(round)
        self.trees.append(tree)
        if self.on_propose:
            self.on_propose(round, tree)
        return tree

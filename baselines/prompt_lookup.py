"""
Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding; in spirit LLMA, arXiv 2304.04487): what
followed the last few tokens when they stood in the text before is proposed again. No training, no second model.

Departure: the original proposes one chain, what followed the first match. Here a budget of nodes is filled with several:
the longest match first and, among matches of one length, the latest first; chains that begin alike share their nodes.
"""
from drafters import MAX_TREE_SIZE, Round
from tree import Tree


class PromptLookupDrafter:
    """Looks up the last `ngram` tokens, then fewer, down to one; drafts at most `depth` deep, in trees of `tree_size` nodes."""
    method, rows = "prompt-lookup", 0

    def __init__(self, ngram: int = 3, depth: int = 10, tree_size: int = 16):
        if not 1 <= tree_size <= MAX_TREE_SIZE:
            raise ValueError(f"--tree-size {tree_size}: it must be from 1 (plain decoding) to {MAX_TREE_SIZE}")
        for name, value in (("ngram", ngram), ("depth", depth)):
            if value < 1:
                raise ValueError(f"prompt lookup: {name} is {value}; it must be at least 1")
        self.ngram, self.depth, self.tree_size = ngram, depth, tree_size

    def forward(self, model, tokens, position_ids, mask, cache, read):
        return model(tokens, position_ids, mask, cache, read), None

    def propose(self, round: Round) -> Tree:
        text, deepest = round.tokens, min(self.depth, round.max_depth)
        tokens, parents, children = [text[-1]], [-1], [{}]
        for start in self.matches(text):
            node = 0
            for token in text[start:start + deepest]:                       # one chain, on top of those before it
                if token not in children[node]:
                    if len(tokens) == self.tree_size:
                        return Tree(tokens, parents)
                    children[node][token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    children.append({})
                node = children[node][token]
        return Tree(tokens, parents)

    def matches(self, text: list[int]):
        """Indices behind earlier places of the last n tokens of `text`, for n = ngram .. 1, the latest place first."""
        found = set()
        for n in range(min(self.ngram, len(text) - 1), 0, -1):
            tail = text[-n:]
            for end in range(len(text) - 1, n - 1, -1):                     # the match is text[end - n:end], before the end of the text
                if end not in found and text[end - 1] == tail[-1] and text[end - n:end] == tail:
                    found.add(end)
                    yield end

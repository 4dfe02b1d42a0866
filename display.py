"""What generate.py shows: text as it is accepted, trees with the accepted path, the closing figures."""
import codecs
import sys

from tree import depth_first

DRAFTED, PLAIN = "\033[32m", "\033[0m"      # drafted tokens in green, those that the model supplied as they are


class Display:
    """Streams the text as it is accepted, or with --trace the tree of each pass."""

    def __init__(self, tokenizer, args):
        self.tokenizer, self.trace, self.silent = tokenizer, args.trace, args.json and not args.trace
        self.colour = sys.stdout.isatty()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")     # a character may span two tokens

    def text_of(self, token: int) -> str:
        return self.decoder.decode(self.tokenizer.decode_single_token_bytes(token)) if self.tokenizer else f" {token}"

    def prompt(self, prompt_ids):
        if not self.silent:
            print("".join(map(self.text_of, prompt_ids)), end="\n" if self.trace else "", flush=True)

    def __call__(self, this):
        if self.silent:
            return
        if self.trace:
            print(draw_pass(this, self.tokenizer), flush=True)
            return
        for n, token in enumerate(this.emitted):
            drafted = n < len(this.path) - 1
            text = self.text_of(token)
            print(f"{DRAFTED}{text}{PLAIN}" if self.colour and drafted else text, end="", flush=True)

    def end(self):
        if not self.silent:
            print("\n")


def draw_pass(this, tokenizer) -> str:
    """The tree of a pass, a node a line, * before the accepted ones, and the token the model supplied."""
    name = (lambda token: repr(tokenizer.decode([token]))) if tokenizer else str
    lines = [f"  {'*' if node in this.path else ' '} {'    ' * this.tree.depth[node]}{name(this.tree.tokens[node])}"
             for node in depth_first(this.tree)]
    return "\n".join(lines + [f"    emitted {len(this.emitted)}: " + " ".join(map(name, this.emitted))])


def summary(report: dict) -> str:
    lines = [f"{report['method']}, tree of {report['tree_size']}, {report['dtype']} on {report['device']}, stopped by {report['finish_reason']}",
             f"{report['new_tokens']} new tokens in {report['forward_passes']} forward passes: "
             f"{report['mean_accepted_tokens']:.2f} mean accepted tokens, {report['tokens_per_second']:.1f} tokens/s"]
    if "identical" in report:
        ratio = report["autoregressive_seconds"] / report["seconds"] if report["seconds"] else float("nan")
        lines.append(f"plain decoding: {'the same tokens' if report['identical'] else 'DIFFERENT tokens'}, "
                     f"{report['autoregressive_seconds']:.2f} s against {report['seconds']:.2f} s, ratio {ratio:.2f} (one run each)")
    return "\n".join(lines)

"""
Is plain decoding a fair baseline? Tokens per second of this project's plain greedy decoding and of transformers' `generate`, on
the same weights, dtype, threads and prompts, in turns.

    pip install transformers accelerate && python tests/versus_transformers.py --checkpoint SmolLM2-135M-Instruct.gguf
"""
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checkpoint import CHECKPOINT_HELP, DTYPES, load_checkpoint     # noqa: E402  (after the path is set)
from cli import Parser, positive, run                               # noqa: E402
from generate import generate                                       # noqa: E402
from prompts import standalone_prompts                              # noqa: E402
from responses import wrap                                          # noqa: E402


def theirs(checkpoint: str, dtype):
    from transformers import AutoModelForCausalLM
    path = Path(checkpoint)
    where = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (checkpoint, {})
    return AutoModelForCausalLM.from_pretrained(where[0], dtype=dtype, **where[1]).eval()


def until_end(tokens: list[int], tokenizer) -> list[int]:
    """What comes before the end of the answer; behind it ours goes on, and theirs is not allowed to end (min_new_tokens)."""
    ends = [n for n, token in enumerate(tokens) if token in tokenizer.end_tokens]
    return tokens[:ends[0]] if ends else tokens


def main() -> None:
    p = Parser("Plain greedy decoding here against transformers' generate: paired tokens per second.")
    p.add_argument("--checkpoint", required=True, help=CHECKPOINT_HELP)
    p.add_argument("--dtype", choices=list(DTYPES), default="float32")
    p.add_argument("--prompts", type=positive, default=5)
    p.add_argument("--max-new-tokens", type=positive, default=128)
    p.add_argument("--rounds", type=positive, default=3)
    args = p.parse_args()
    model, tokenizer = load_checkpoint(args.checkpoint, DTYPES[args.dtype])
    other, new = theirs(args.checkpoint, DTYPES[args.dtype]), args.max_new_tokens

    @torch.inference_mode()
    def ours_on(prompt):
        return generate(model, prompt, None, max_new_tokens=new).token_ids

    @torch.inference_mode()
    def theirs_on(prompt):
        ids = torch.tensor([prompt])
        out = other.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
        return out[0, len(prompt):].tolist()

    ratios, same, rates = [], 0, {"ours": [], "theirs": []}
    for n, text in enumerate(standalone_prompts(args.prompts + 1, seed=1)):
        prompt, seconds = wrap(tokenizer, text)[0], {"ours": [], "theirs": []}
        for _ in range(args.rounds):
            tokens = {}
            for name, decode in (("ours", ours_on), ("theirs", theirs_on)):
                start = time.perf_counter()
                tokens[name] = decode(prompt)
                seconds[name].append((time.perf_counter() - start) / len(tokens[name]))
            if n == 0:                                                      # the first prompt is the warm-up
                break
        else:
            ours = until_end(tokens["ours"], tokenizer)
            same += ours == tokens["theirs"][:len(ours)]
            for name in rates:
                rates[name].append(1 / statistics.median(seconds[name]))
            ratios += [b / a for a, b in zip(seconds["ours"], seconds["theirs"])]
    print(f"{args.dtype}, {torch.get_num_threads()} threads, {args.prompts} prompts, {new} new tokens each, {args.rounds} rounds\n"
          f"tokens/s here {statistics.median(rates['ours']):.1f}, transformers {statistics.median(rates['theirs']):.1f}, "
          f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
          f"{same} of {args.prompts} answers are the same")


if __name__ == "__main__":
    run(main)

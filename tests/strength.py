"""
How strong is the suite? Each line below breaks the code on purpose, in a copy; the suite must fail for every one.

    python tests/strength.py            # all of them
    python tests/strength.py 3 7        # the third and the seventh
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# (what is broken, file, code, code in its place, test files that are run)
BREAKAGES = [
    ("position id = row index", "tree.py", "return torch.tensor(self.depth) + committed", "return torch.arange(len(self)) + committed", "tree exactness"),
    ("a node sees its neighbour, not its parent", "tree.py", "mask[node] = mask[parent]", "mask[node] = mask[node - 1]", "tree exactness"),
    ("cache keeps the first rows, not the accepted ones", "model.py", "if rows != list(range(len(rows))):", "if False:", "exactness model"),
    ("cache commits the whole tree", "generate.py", "[ahead + node for node in path]", "[ahead + node for node in range(len(tree))]", "exactness"),
    ("bonus token from the root's row", "tree.py", "token = choose(logits[node],", "token = choose(logits[0],", "exactness"),
    ("noise of the wrong position in the walk", "tree.py", "position + tree.depth[node] + 1)", "position + 1)", "sampling exactness"),
    ("real rows see pseudo rows", "hidden_transfer.py", "mask.new_zeros(len(mask), K * S)", "mask.new_ones(len(mask), K * S)", "exactness"),
    ("a pseudo row sees later steps", "hidden_transfer.py", "order[None, :] <= order[:, None]", "order[None, :] >= order[:, None]", "exactness"),
    ("pseudo row at its source's position", "hidden_transfer.py", "[position_ids[sources] + i for i", "[position_ids[sources] + 0 * i for i", "exactness"),
    ("drafts after the walk from the wrong row", "drafters.py", "taps, round.row, len(", "taps, 0 * round.row, len(", "exactness"),
    ("rotary keys turned by the values' share", "model.py", "qk = rotate(qkv[:, :c.n_head + c.n_kv_head], rope)", "qk = torch.cat([rotate(qkv[:, :c.n_head], rope), qkv[:, c.n_head:c.n_head + c.n_kv_head]], dim=1)", "model exactness"),
    ("text goes on behind the end token", "generate.py", "emitted = emitted[:next(n for n, token in enumerate(emitted) if token in ends) + 1]", "emitted = emitted", "limits"),
    ("a token past the context", "generate.py", "block_size + 1 - len(tokens)", "block_size + 2 - len(tokens)", "limits"),
    ("tree deeper than what may still be emitted", "generate.py", "sampler, remaining - 1)", "sampler, remaining + 3)", "limits"),
    ("float masks are let through", "model.py", "if mask.dtype != torch.bool:", "if False:", "model"),
    ("noise does not depend on the position", "sampler.py", "counter=[0, 0, 0, position]", "counter=[0, 0, 0, 0]", "sampling"),
    ("top-p cuts the token that crosses p", "sampler.py", "index[before >= self.top_p]", "index[before + ordered >= self.top_p]", "sampling"),
    ("residual through softmax", "tree.py", "return rest / total if total > 0 else p ", "return torch.softmax(rest, 0) if total > 0 else p ", "sampling"),
    ("a rejected sibling stays in q", "tree.py", "                q[token] = 0\n", "", "sampling"),
    ("bonus from the full distribution", "tree.py", "return path, draw(p)", "return path, draw(probs_of(node))", "sampling"),
    ("duplicate siblings", "tree.py", "if token in self.children[parent]:", "if False:", "tree sampling"),
    ("the loss compares with the wrong row", "hidden_transfer.py", "target[:, i:].flatten(0, 1))", "target[:, :N - i].flatten(0, 1))", "training"),
    ("resume forgets the optimiser", "loop.py", "        optimizer.load_state_dict(state)", "        pass", "training"),
    ("nan does not stop the training", "loop.py", "if not math.isfinite(total):", "if False:", "training"),
    ("checkpoints may run code", "checkpoint.py", "weights_only=True, mmap", "weights_only=False, mmap", "checkpoint"),
    ("maps of another base are taken", "checkpoint.py", 'if contents.get("base") != base:', "if False:", "checkpoint cli"),
    ("prefixes of compiled models stay", "checkpoint.py", "    while state and all(", "    while False and all(", "checkpoint"),
    ("files are written in place", "cli.py", 'beside = path.with_name(f"{path.stem}.{os.getpid()}.tmp{path.suffix}")', "beside = path", "checkpoint"),
    ("the replay accepts what could not be emitted", "replay.py", "room = max(0, prompt + new - (n + 2) - 1)", "room = max(0, prompt + new - (n + 2))", "measure"),
    ("Medusa's heads read the state before the norm", "baselines/medusa.py", "n = model.norm(x)", "n = x", "baselines"),
    ("blind pseudo rows see one another", "baselines/ablations.py", "        if added:", "        if False:", "baselines"),
    ("self-speculation keeps its drafts' rows", "baselines/self_speculation.py", "round.cache.truncate(committed)", "pass", "baselines"),
    ("the draft model keeps rejected drafts", "baselines/draft_model.py", "kept = min(len(self.fed), len(round.tokens) - 1)", "kept = min(len(self.fed), len(round.tokens))", "baselines"),
    ("sampled chains pose as picked ones", "baselines/chains.py", "torch.stack(laws) if laws else None", "None", "baselines"),
    ("drafts drawn with the noise of the next position", "baselines/chains.py", "round.sampler.choose(logits, position)", "round.sampler.choose(logits, position + 1)", "baselines"),
    ("prompt lookup finds the end of the text itself", "baselines/prompt_lookup.py", "range(len(text) - 1, n - 1, -1)", "range(len(text), n - 1, -1)", "baselines"),
    ("rivals of another base are taken", "checkpoint.py", "    check_base(contents, path, model)", "    pass", "baselines_training"),
    ("short answers weigh as much as long ones", "distillation.py", "loss * len(position_ids) / self.mean_rows", "loss", "responses"),
    ("invented prompts that came to no end are kept", "responses.py", "if tokens[-1] in ends and text and", "if text and", "responses"),
    ("prompts are invented without the temperature", "responses.py", ".float() / TEMPERATURE)", ".float())", "responses"),
    ("memory that is freed stays counted", "compare.py", "self.now -= self.known.pop(key)", "self.known.pop(key)", "compare"),
    ("rows of the prompts count as drafts", "compare.py", "(rows[0] - before) / passes", "rows[0] / passes", "compare"),
    ("pseudo states are compared with their source", "evidence.py", "rows[:-i].float(), real[i:]", "rows[:-i].float(), real[:-i]", "figures"),
    ("static trees are measured where they were found", "subject.py", "return self.exam.responses[len(self.exam.responses) // 2:]", "return self.exam.responses", "figures"),
]


def suite_fails(breakage) -> bool:
    what, file, old, new, tests = breakage
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "out", "__pycache__", ".venv"))
        code = (copy / file).read_text()
        if code.count(old) != 1:
            raise SystemExit(f"{what}: {old!r} stands {code.count(old)} times in {file}; bring this list up to date")
        (copy / file).write_text(code.replace(old, new))
        names = [f"tests/test_{name}.py" for name in tests.split()]
        run = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *names], cwd=copy, capture_output=True, text=True)
        # 1: tests failed; 2: so broken that collection failed, which would prove nothing about the tests
        print(f"{'caught' if run.returncode == 1 else 'NOT CAUGHT':10}  {what:50}  {next((l for l in run.stdout.splitlines() if l.startswith('FAILED')), '')[:110]}", flush=True)
        return run.returncode == 1


if __name__ == "__main__":
    chosen = [BREAKAGES[int(n) - 1] for n in sys.argv[1:]] or BREAKAGES
    missed = sum(not suite_fails(breakage) for breakage in chosen)
    print(f"{len(chosen) - missed} of {len(chosen)} breakages caught")
    sys.exit(missed > 0)

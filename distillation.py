"""
What the maps are distilled on: text (FromText), or a model's answers to prompts (FromResponses). Both offer the same:

    exam                        held-out data that maps are measured on
    rows                        source rows of a micro-batch, on average
    draw(step, micro)           the data of a micro-batch; depends on (--seed, step, micro) alone
    add_to(sums, n)             adds the n-th piece of data that no training step draws to the closed form
    loss(transfer, batch)       the distillation loss of what `draw` gave
"""
import argparse
import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from baselines.medusa import own_loss
from data import encode_texts, read_corpus
from hidden_transfer import distillation_loss
from loop import generator_of, windows
from model import KVCache, causal_mask
from replay import Response, continue_greedily, cut_prompts, even_windows
from responses import held_out, is_complete, load_responses, write_responses

PROMPTS, PROMPT, NEW = 50, 32, 128  # held-out prompts, their length and what is generated from them


class Exam(NamedTuple):
    """What maps are measured on: held-out text, for the agreement of drafts; and the model's own greedy responses to held-out
    prompts, for tokens per pass."""
    text: list[Response]
    responses: list[Response]

    @property
    def new(self) -> int:
        """Tokens of the longest response: as many as decoding was allowed."""
        return max(len(tokens) - prompt for tokens, prompt in self.responses)


class FromText:
    def __init__(self, model, tokenizer, args, steps: int):
        """steps: of the transfer. Reads --data; with --own-tokens the model writes half of the training text itself."""
        self.full, self.args = model, args
        args.length = min(args.length, model.config.block_size)
        self.stream, rest = (encode_texts(texts, tokenizer) for texts in read_corpus(args.data))
        for kind, tokens in (("training", self.stream), ("held-out", rest)):
            if len(tokens) < args.length:
                raise ValueError(f"--data: {len(tokens)} {kind} tokens are fewer than one window of --length {args.length}")
        if args.length <= steps:
            raise ValueError(f"--length {args.length} is too short for {steps} transfer steps")
        self.exam = make_exam(model, rest)
        if args.own_tokens:
            self.stream = own_text(model, self.stream, args)
        self.model = matrices_in_bfloat16(model) if args.autocast else model
        self.rows = args.batch * args.length
        self.position_ids, self.mask = torch.arange(args.length, device=args.device), causal_mask(args.length, device=args.device)

    def draw(self, step: int, micro: int) -> torch.Tensor:
        """(batch, length) tokens."""
        return windows(self.stream, self.args, step, micro).to(self.args.device)

    def add_to(self, sums, n: int) -> None:
        sums.add(self.full, self.draw(self.args.steps, n))

    def loss(self, transfer, tokens) -> torch.Tensor:
        """Every row is a source."""
        x, pseudo, _ = transfer(self.model, tokens, self.position_ids, self.mask)
        drafts = transfer.read_out(self.model, pseudo)                      # (B, T, K, V)
        return own_loss(drafts, tokens) if self.args.loss == "own" else distillation_loss(self.model.unembed(x), drafts)


def make_exam(model, stream, prompts: int | None = None) -> Exam:
    """prompts: how many pieces of the held-out stream (N,) are continued, PROMPTS if not given."""
    prompt = min(PROMPT, model.config.block_size // 2)                      # a short context leaves room for less
    new = min(NEW, model.config.block_size - prompt)
    sequences = continue_greedily(model, cut_prompts(stream, prompts or PROMPTS, prompt), new)
    windows = even_windows(stream, length=min(256, model.config.block_size), device=sequences.device)
    return Exam(windows, [Response(row, prompt) for row in sequences])


def matrices_in_bfloat16(model):
    """A copy whose matrices are what autocast would convert them to: it would do so anew in every pass, since they are frozen.

    They are laid row by row, not as lay_out_for_cpu lays them: with that layout the gradient of 32 rows through an unembedding of
    49,152 x 576 ends the process in a division by zero (torch 2.13, CPU with bfloat16 units, two threads).
    """
    fast = copy.deepcopy(model)
    head, dtype = (model.embedding if model.head is None else model.head).weight, torch.bfloat16
    fast.head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    fast.head.weight = torch.nn.Parameter(head.detach().to(dtype).contiguous(), requires_grad=False)
    for part in fast.blocks.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data = part.weight.data.to(dtype).contiguous()
    return fast


def own_text(model, stream, args):
    """Text that the model writes itself, (N,): half of it, the other half being the text it started from.

    The maps are used on what the model writes, so that is what they learn most from. Sequences of --length tokens: a
    prompt from the training text and its greedy continuation, then the same stretch of the training text. Windows are
    drawn at multiples of the length, one sequence each.
    """
    batch, sequences = 128, []
    count = max(1, args.own_tokens // (2 * args.length))
    prompt = min(PROMPT, args.length // 2)
    with tqdm(total=count * args.length, desc="own text", unit="token", dynamic_ncols=True) as bar:
        for micro in range(0, count, batch):
            wanted = argparse.Namespace(**vars(args) | {"batch": min(batch, count - micro)})
            text = windows(stream, wanted, args.steps + 1, micro)           # (B, length)
            own = continue_greedily(model, text[:, :prompt].tolist(), args.length - prompt).cpu()
            sequences += [own, text]
            bar.update(own.numel())
    args.align = args.length
    return torch.cat(sequences).flatten().numpy()                           # (2 * count, length) -> (N,)


# --------------------------------------------------------------------------------------------- responses

class Teacher(NamedTuple):
    """What distillation needs of the frozen model for one response, S source rows: computed once, then the blocks below the
    first transfer are never run again, and those above only for the pseudo rows."""
    taps: list[torch.Tensor]        # K x (1, S, C): the source rows entering block t_i
    x: torch.Tensor                 # (1, S, C): the source rows after the last block
    position_ids: torch.Tensor      # (S,)
    rows: "StoredRows"              # keys and values of all rows, prompt included


class StoredRows:
    """The reading half of a KVCache: what is written is put behind the stored rows in a new tensor, so gradients pass."""

    def __init__(self, data: torch.Tensor, first: int):
        """data: keys and values (L - first, 2, 1, G, T, D) of the blocks from `first` on."""
        self.data, self.first, self.length = data, first, data.shape[4]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor):
        keys, values = self.data[layer - self.first]                        # (1, G, T, D) each
        return torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)   # (1, G, T + K*S, D)


class FromResponses:
    """Only rows of the answers are sources: that is where a model drafts. The last row of a prompt is the first of them."""

    def __init__(self, model, tokenizer, args, steps: int):
        self.model, self.args = matrices_in_bfloat16(model) if args.autocast else model, args
        if not is_complete(args.responses):
            if tokenizer is None:
                raise ValueError("--checkpoint comes without a tokenizer, so it cannot be asked anything for --responses")
            if dist.is_initialized():
                raise ValueError(f"--responses {args.responses}: several processes do not write it; run python responses.py first")
            fast = copy.deepcopy(model).to(torch.bfloat16) if args.autocast else model
            write_responses(fast, tokenizer, args.responses)
        self.responses, rest = held_out(load_responses(args.responses, model))
        if not rest or not self.responses:
            raise ValueError(f"--responses {args.responses} holds too few answers: python responses.py --count ... writes more")
        self.mean_rows = sum(len(tokens) - prompt for tokens, prompt in self.responses) / len(self.responses)
        self.rows = args.batch * self.mean_rows
        rest = [Response(tokens[:prompt + NEW].to(args.device), prompt) for tokens, prompt in rest]
        self.exam = Exam(rest[::3], rest[:PROMPTS])
        self.teachers, self.room = {}, args.keep_gb * 1e9

    def draw(self, step: int, micro: int) -> list[int]:
        """`batch` numbers of responses."""
        return torch.randint(len(self.responses), (self.args.batch,), generator=generator_of(self.args.seed, step, micro)).tolist()

    def add_to(self, sums, n: int) -> None:
        for index in self.draw(self.args.steps, n):
            tokens, prompt = self.responses[index]
            with torch.autocast(torch.device(self.args.device).type, torch.bfloat16, enabled=self.args.autocast):
                sums.add(self.model, tokens[None].to(self.args.device), prompt - 1)

    def loss(self, transfer, batch: list[int]) -> torch.Tensor:
        """Every row of an answer weighs the same, in short ones and in long ones."""
        losses = []
        for index in batch:
            taps, x, position_ids, rows = self.teacher(transfer, index)
            pseudo = transfer.draft_rows(self.model, taps, position_ids, rows)              # (1, S, K, C)
            loss = distillation_loss(self.model.unembed(x), transfer.read_out(self.model, pseudo))
            losses.append(loss * len(position_ids) / self.mean_rows)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def teacher(self, transfer, index: int) -> Teacher:
        """Kept from one use to the next while there is room (--keep-gb)."""
        if index in self.teachers:
            return self.teachers[index]
        model, (tokens, prompt), first = self.model, self.responses[index], min(transfer.layers)
        T, device = len(tokens), self.args.device
        cache = KVCache(model.config, T, dtype=torch.bfloat16 if self.args.autocast else model.embedding.weight.dtype, device=device)
        x, _, taps = transfer(model, tokens[None].to(device), torch.arange(T, device=device), causal_mask(T, device=device), cache,
                              torch.arange(0, device=device))
        sources = slice(prompt - 1, T - 1)                                  # nothing is drafted behind the last token
        rows = StoredRows(cache.data[first:].clone(), first)
        teacher = Teacher([tap[:, sources].clone() for tap in taps], x[:, sources].clone(), torch.arange(prompt - 1, T - 1, device=device), rows)
        size = sum(part.nbytes for part in (*teacher.taps, teacher.x, rows.data))
        if size <= self.room:
            self.room -= size
            self.teachers[index] = teacher
        return teacher

"""Bytes per layer of models that choose their keys: predicted, and counted.

    python -m benchmarks.chosen              writes results/chosen.md
    python -m benchmarks.chosen --ranks 8    prints the rows of so many ranks only

The sizes are those of DeepSeek V3.2 (128 heads with keys of 128 + 64 and values of 128, made of
512 + 64 numbers per token; index keys of 128, 2,048 chosen keys) and of DeepSeek V4 (entries of 512
and index entries of 128 numbers, of 4 tokens each; entries of 128 tokens), in 16 bits. Bytes are
those that one rank receives: transformers' own indexers and compressors, and `weft.attention`, run
on it, on tensors without numbers, as one rank of torch's fake process group. That is the code of
real ranks, through to the messages that it hands to torch. Plans and formulas say the same bytes,
or nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV32Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32

import weft
from benchmarks.latents import DTYPE, HEADS, LATENT, NOPE, ROPE, VALUES, Projection
from weft import Expansion, Layout
from weft._torch import fake_ranks
from weft.inspect.words import nbytes
from weft.move.windows import TakePass
from weft.plan.choices import spreads_of
from weft_integrations.common import chunk_places
from weft_integrations.transformers import chosen_keys, compressed, running

RESULT = Path(__file__).parent / "results" / "chosen.md"
V32, V4 = DeepseekV32Config(), DeepseekV4Config()
#: Layouts, and tokens of a row.
ROWS = (
    ("tokens(zigzag): ring=8", 131072),
    ("tokens: ulysses=8", 131072),
    ("tokens: tile=2x4", 131072),
    ("tokens: seen=8", 131072),
    ("tokens(zigzag): ring=64", 1 << 20),
    ("tokens: ulysses=8 x ring=8", 1 << 20),
)
#: Queries at one time, on 64 ranks that have 1,048,576 tokens.
QUERIES = (1, 128, 1024, 8192)
#: Received bytes by tensor, as `weft.traffic()` names it.
Bytes = dict[str, int]
CSA, HCA = v4.DeepseekV4CSACompressor, v4.DeepseekV4HCACompressor


@dataclass(frozen=True)
class Row:
    """A layout, and the bytes of each kind of layer."""

    line: str
    tokens: int
    keys: int
    latents: int
    index: int
    lists: int | None
    choice: int
    sparse: Bytes
    heavy: Bytes
    window: int


@contextlib.contextmanager
def _call(line: str, tokens: int) -> Iterator[running.ModelCall]:
    """The call of a model on rank 1; rows of scores are made at once, since they hold nothing."""
    layout = Layout.parse(line)
    with fake_ranks(1, layout.world_size), mock.patch.object(running, "AT_ONCE", 1 << 62):
        call = running.ModelCall(layout.build("cpu"), "tokens", length=tokens)
        with running.during(call):
            yield call


def _states(call: running.ModelCall, *sizes: int) -> Tensor:
    """Tensors of rank 1's tokens, without numbers."""
    held = call.layout.local_length("tokens", call.length)
    return torch.empty((1, held, *sizes), dtype=DTYPE, device="meta")


def _received(call: running.ModelCall, run: Callable[[], object]) -> Bytes:
    """Bytes that rank 1 receives, by tensor; those that plans predict are as predicted."""
    with weft.traffic(call.layout) as moved:
        run()
    if not moved.as_predicted:
        raise RuntimeError(f"{call.layout.name}: predicted, counted {moved.differences()}")
    return dict(moved.by_tensor())


def _module(kind: type[nn.Module], *arguments: object) -> nn.Module:
    with torch.device("meta"):
        return kind(*arguments).to(DTYPE)


def index_keys(line: str, tokens: int) -> Bytes:
    """Bytes that DeepSeek V3.2's indexer receives: those of the others' index keys."""
    with _call(line, tokens) as call:
        indexer = _module(v32.DeepseekV32Indexer, V32, 0)
        hidden, residual = _states(call, V32.hidden_size), _states(call, V32.q_lora_rank)
        rotary = (_states(call, V32.qk_rope_head_dim),) * 2
        inputs = indexer, hidden, residual, rotary, call.sharded(weft.Causal(), (tokens, tokens))
        found = _received(call, lambda: chosen_keys.choose_tokens(*inputs))
        others = tokens - hidden.shape[1]
    _same(line, found, {"index": others * V32.index_head_dim * DTYPE.itemsize})
    return found


def entries(line: str, tokens: int, kind: type[nn.Module]) -> Bytes:
    """Bytes that a compressor of DeepSeek V4 receives in both passes, with those of its indexer.

    Of n tokens, a window for m of them: (n - n/P) d / m numbers of entries, as many of d_i of index
    entries, and the projections of the columns left of every piece. Backward the gradients that the
    others have for its entries, and those of the columns; none of the indexer's.
    """
    with _call(line, tokens) as call:
        compressor = _module(kind, V4)
        hidden, residual = _states(call, V4.hidden_size), _states(call, V4.q_lora_rank)
        inputs = compressor, hidden, residual, torch.zeros(1, 1), None, 0
        found = _received(call, lambda: compressed.compress(*inputs)[0].sum().backward())
        rest = compressed.OfRanks(call, compressor.compress_rate, kind is CSA)
        pieces, columns, layout = rest.pieces, rest.columns, call.layout
        rows = [len(rest.closing(each)) for each in chunk_places(layout, "tokens", tokens)]
        spread = spreads_of(layout.mesh, tuple(layout.mesh), layout.coords, rows)
        back = sum(received for _, _, received, _ in spread)
        left = pieces.plan.left(columns)
        chunk, others = pieces.chunk, sum(rows) - rows[pieces.chunk]
    size, of_index = (d * DTYPE.itemsize for d in (V4.head_dim, V4.index_head_dim))
    per_column = (4 if rest.overlap else 2) * size  # projections and gates, of two windows
    passes = [TakePass(left, chunk, per_column)] * 2
    wanted = {"entries": others * size, "dentries": back * size}
    if rest.overlap:
        wanted["index"] = others * of_index
        passes[0] = TakePass(left, chunk, per_column + 4 * of_index)
    for backward, name in enumerate(("halo", "dhalo")):
        wanted[name] = passes[backward].traffic(bool(backward)).bytes
    _same(line, found, wanted)
    return found


def attended(
    line: str,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None = None,
    count: int | None = None,
) -> Bytes:
    """Bytes of causal attention of so many heads of queries and keys, all of them by its plan.

    `dims` are those of keys and values; `count`, how many keys each query chooses.
    """
    with _call(line, tokens) as call, torch.no_grad():
        q, k = (_states(call, n, dims[0]).transpose(1, 2) for n in heads)
        v = _states(call, heads[1], dims[1]).transpose(1, 2)
        choice = None
        if count is not None:
            numbers = torch.empty((1, 1, q.shape[2], count), dtype=torch.int32, device="meta")
            choice = weft.ChosenKeys(numbers, check=False)
        place = call.layout, "tokens", weft.Causal(window=window)
        options = {"length": tokens, "choice": choice}
        return _received(call, lambda: weft.attention(q, k, v, *place, **options))


def expanded(line: str, tokens: int, travel: Literal["keys", "latents"]) -> int:
    """Bytes of causal attention whose keys and values, or whose latents, travel, by its plan."""
    with _call(line, tokens) as call, torch.no_grad():
        q, c, r = (
            _states(call, heads, dim).transpose(1, 2)
            for heads, dim in ((HEADS, NOPE + ROPE), (1, LATENT), (1, ROPE))
        )
        place = call.layout, "tokens", weft.Causal()
        expand = Expansion(Projection(), travel=travel)
        run = functools.partial(weft.attention, q, c, r, *place, length=tokens, expand=expand)
        return sum(_received(call, run).values())


def of_choice(line: str, tokens: int, queries: int, lists: bool) -> int:
    """Bytes by which so many queries choose by index heads, as the plan of `weft.choose` has them.

    By lists, index queries and lists; by rows, index keys.
    """
    data = {**Layout.parse(line).declaration}
    if lists:
        rules = [{"strategy": "choose_lists", "on": dim} for dim in data["mesh"]]
        data["choose"] = {"tokens": rules}
    layout = Layout.from_dict(data)
    with fake_ranks(0, layout.world_size):
        layout = layout.build("cpu")
        n, m = (layout.local_length("tokens", each) for each in (queries, tokens))
        shapes = (V32.index_n_heads, n, V32.index_head_dim), (1, m, V32.index_head_dim)
        iq, ik, weights = (
            torch.empty((1, *shape), dtype=DTYPE, device="meta")
            for shape in (*shapes, (V32.index_n_heads, n))
        )
        options = {"mask": weft.Causal(offset=tokens - queries), "length": (queries, tokens)}
        with weft.traffic(layout) as moved:
            weft.choose(iq, ik, weights, layout, "tokens", V32.index_topk, **options)
    if not moved.as_predicted:
        raise RuntimeError(f"{line}: predicted, counted {moved.differences()}")
    return moved.bytes


def _same(line: str, found: Bytes, wanted: Bytes) -> None:
    """Raise `RuntimeError` where counted bytes are not those of the formula."""
    if found != {name: n for name, n in wanted.items() if n}:
        raise RuntimeError(f"{line}: counted {found}, predicted {wanted}")


def row_of(line: str, tokens: int) -> Row:
    """All bytes of a layout, counted as predicted."""
    chosen = attended(line, tokens, (HEADS, HEADS), (NOPE + ROPE, VALUES), count=V32.index_topk)
    wide, dims = (V4.num_attention_heads, 1), (V4.head_dim, V4.head_dim)
    near = attended(line, tokens, wide, dims, window=V4.sliding_window)
    return Row(
        line,
        tokens,
        expanded(line, tokens, "keys"),
        expanded(line, tokens, "latents"),
        index_keys(line, tokens)["index"],
        of_choice(line, tokens, tokens, True) if "ring=8" in line and "x" not in line else None,
        chosen.get("choice", 0),
        entries(line, tokens, CSA),
        entries(line, tokens, HCA),
        sum(near.values()),
    )


def table(head: str, rows: list[list[str]]) -> str:
    """Rows of Markdown."""
    columns = head.count("|") + 1
    rule = " | ".join(["---", *["---:"] * (columns - 1)])
    return "\n".join(f"| {line} |" for line in (head, rule, *map(" | ".join, rows)))


def _bytes(number: int | None) -> str:
    return "-" if number is None else nbytes(number)


def page(rows: list[Row], queries: list[tuple[int, int, int]]) -> str:
    """The tables, of layouts and of few queries."""
    first, second = [], []
    few = [[f"{n:,}", nbytes(by_rows), nbytes(by_lists)] for n, by_rows, by_lists in queries]
    for r in rows:
        names = [f"`{r.line}`", f"{r.tokens:,}"]
        first.append([*names, *map(_bytes, (r.keys, r.latents, r.index, r.lists, r.choice))])
        sparse = [r.sparse.get(name, 0) for name in ("entries", "index", "halo", "dentries")]
        heavy = [r.heavy.get(name, 0) for name in ("entries", "halo", "dentries")]
        second.append([*names, *map(nbytes, (*sparse, *heavy, r.window))])
    return "\n\n".join(
        [
            "DeepSeek V3.2, forward:",
            table(
                "layout | tokens | attention, keys travel | latents travel | index keys"
                " | or index queries and lists | numbers of chosen keys",
                first,
            ),
            "DeepSeek V3.2, few queries of 1,048,576 tokens on `tokens: ring=64`, by rows and by"
            " lists:",
            table("queries | index keys | index queries and lists", few),
            "DeepSeek V4: entries of 4 tokens with overlap and their index entries, entries of 128"
            " tokens, columns to the left of windows, gradients of all entries on their way back,"
            " and attention to the 128 tokens before, forward:",
            table(
                "layout | tokens | entries of 4 | their index entries | left | gradients"
                " | entries of 128 | left | gradients | window",
                second,
            ),
        ]
    )


INTRODUCTION = """# Bytes of layers that choose their keys

Bytes that one rank, the second (of choices by lists the first), receives in one layer, in 16 bits,
at the sizes of DeepSeek V3.2 and V4 (`benchmarks/chosen.py` names them). Every number was counted
by a rank that ran the models' own indexers and compressors, and `weft.attention`, on tensors
without numbers, and is that of a plan or a formula to the byte. Attention is causal and has all of
its tensors: under Ulysses and tiles queries and outputs travel, too.

"""


def main() -> None:
    """Count and print the rows, and write the page of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="only layouts of so many ranks, printed")
    asked = parser.parse_args().ranks
    rows = []
    for line, tokens in ROWS:
        if asked is None or Layout.parse(line).world_size == asked:
            rows.append(row_of(line, tokens))
            print(f"{line}: counted as predicted", flush=True)
    few = []
    for n in QUERIES:
        both = (of_choice("tokens: ring=64", 1 << 20, n, lists) for lists in (False, True))
        few.append((n, *both))
    text = page(rows, few)
    print(text)
    if asked is None:
        RESULT.write_text(f"{INTRODUCTION}{text}\n\n`python -m benchmarks.chosen` writes it.\n")


if __name__ == "__main__":
    main()

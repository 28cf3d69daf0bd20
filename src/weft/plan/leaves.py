"""Blocks by blocks of scores: the units of reproducible attention, and the tree that merges them.

A leaf is one block of queries by one block of keys (`declare.blocks`), computed by the same kernel
calls wherever it is computed. Partial outputs of the key blocks merge in one fixed binary tree:

    key block     0   1   2   3          each rank merges the nodes of which it has both children,
                   \\ /     \\ /           and sends the others, its roots, as they are
                    *       *
                     \\_____/

so that no split of the keys changes the order of a merge.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..declare.blocks import block_edges
from ..declare.layout import LayoutDeclaration
from ..errors import UnsupportedError
from ..masks import Mask
from .heads import HeadShares
from .order import Span, Spans
from .problem import LocalProblem
from .tiles import KernelCall, Kind, in_row_blocks, tile_calls

#: A node of the tree: its level, from the leaves up, and its place there.
Node = tuple[int, int]


def fixed_edges(
    layout: LayoutDeclaration, problem: LocalProblem, shares: HeadShares, whole: Sequence[str]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """First positions of the blocks of queries and of keys in a reproducible layout; else None.

    Raises `UnsupportedError` for calls whose bits depend on how they are split.

    Args:
        shares: of heads, with the copies of key/value heads.
        whole: mesh dims on which one side rests whole.
    """
    p = problem
    if not layout.reproducible:
        return None
    wrong = None
    if whole:
        wrong = f"mesh dim {whole[0]!r} has one side whole on every rank; use ring, tile or ulysses"
    elif max(shares.counts) > 1:
        wrong = (
            f"{p.kv_heads} key/value heads would be repeated, and their gradients summed in "
            "another order; split the heads fewer ways"
        )
    elif p.bias_tensor:
        wrong = "a learned bias has its gradient by tile; use a weft.Bias of positions"
    elif p.choice is not None:
        wrong = "scores by which keys are chosen are not known to have the same bits"
    elif any(layout.shard_dims(axis) for axis in p.axes[1:]):
        wrong = f"axes {p.axes} are attended jointly, and more than the first one is split"
    if wrong is not None:
        raise UnsupportedError(f"{layout.source}: in a reproducible layout {wrong}")
    inner = [math.prod(pair[side] for pair in p.lengths[1:]) for side in (0, 1)]
    queries, keys = (
        tuple(edge * inner[side] for edge in block_edges(p.lengths[0][side])) for side in (0, 1)
    )
    return queries, keys


def depth(blocks: int) -> int:
    """The level of the tree's root, above this many leaves."""
    return max(0, blocks - 1).bit_length()


def roots(leaves: Collection[int], blocks: int) -> tuple[Node, ...]:
    """The nodes to which leaves merge without the others; those past the last one are empty.

    >>> roots({0, 1, 2}, 4), roots({2, 3, 4}, 5)
    (((1, 0), (0, 2)), ((1, 1), (2, 1)))
    """
    level, here, done = 0, sorted(leaves), []
    while here:
        above = []
        for i in here:
            sibling_is_empty = (i ^ 1) << level >= blocks
            if level < depth(blocks) and (sibling_is_empty or i ^ 1 in here):
                above.append(i >> 1)
            else:
                done.append((level, i))
        level, here = level + 1, sorted(set(above))
    return tuple(sorted(done, key=lambda node: node[1] << node[0]))


def blocks_of(spans: Spans, edges: tuple[int, ...]) -> list[tuple[int, int, Span]]:
    """(block, memory offset, positions) of every block in a chunk that consists of whole ones.

    Raises `UnsupportedError` for any other chunk.
    """
    parts, offset = [], 0
    for span in spans:
        first = bisect_left(edges, span.start)
        last = bisect_left(edges, span.start + span.count)
        ends = edges[min(first, len(edges) - 1)], edges[min(last, len(edges) - 1)]
        if span.step != 1 or ends != (span.start, span.start + span.count):
            raise UnsupportedError(
                f"positions {span.start} to {span.last} are no whole blocks of a reproducible "
                "layout; split the axis over fewer ranks, or use contiguous or zigzag order"
            )
        for block in range(first, last):
            low, high = edges[block], edges[block + 1]
            parts.append((block, offset + low - span.start, Span(low, high - low)))
        offset += span.count
    return parts


def whole_blocks(spans: Spans, edges: tuple[int, ...], rows: tuple[int, int]) -> tuple[int, int]:
    """Rows [low, high) of a chunk, and what else is in their blocks."""
    low, high = rows
    if low >= high:
        return rows
    touched = [
        (at, at + span.count)
        for _, at, span in blocks_of(spans, edges)
        if at < high and low < at + span.count
    ]
    return touched[0][0], touched[-1][1]


def leaf_calls(
    mask: Mask,
    q: Spans,
    k: Spans,
    edges: tuple[tuple[int, ...], tuple[int, ...]],
    row_block: int,
    biased: bool,
    rows_together: int,
) -> list[tuple[int, KernelCall]]:
    """(key block, kernel call within the tile) of all leaves of a tile.

    Args:
        edges: of the query blocks, and of the key blocks.
        rows_together: full leaves of one key block whose queries follow each other are one call
            where their blocks begin at multiples of this many rows; 0: never.
    """
    result: list[tuple[int, KernelCall]] = []
    queries = blocks_of(q, edges[0])
    for key_block, k0, keys in blocks_of(k, edges[1]):
        run_ends = -1  # row at which a run of full leaves ends that may go on
        for _, q0, rows in queries:
            calls = tile_calls(mask, (rows,), (keys,), row_block)
            if biased:
                calls = in_row_blocks(calls, row_block)
            joins = bool(rows_together) and not (
                rows.start % rows_together or rows.count % rows_together
            )
            joins = joins and calls == (KernelCall(0, rows.count, 0, keys.count, Kind.FULL),)
            if joins and run_ends == q0:
                result[-1] = key_block, replace(result[-1][1], q1=q0 + rows.count)
            else:
                result += ((key_block, _moved(call, q0, k0)) for call in calls)
            run_ends = result[-1][1].q1 if joins else -1
    return result


def _moved(call: KernelCall, rows: int, columns: int) -> KernelCall:
    return replace(
        call, q0=call.q0 + rows, q1=call.q1 + rows, k0=call.k0 + columns, k1=call.k1 + columns
    )

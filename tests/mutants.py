"""Planted bugs, and whether the tests notice them: `python -m tests.mutants`, not part of the suite.

Each bug is one change of one line, of the kind that people make: an index off by one, a wait left
out, groups swapped, a merge in the wrong dtype, a gradient dropped, a refusal lost. It is planted in
a copy of the source, and the test files that should notice it run on the copy: the test that
noticed it last, as `tests/mutants.md` records, before the others. The test that notices a bug must
pass without it. A bug that survives is a hole in the tests. Options: a word, to plant only bugs
whose file or name has it; `--open`, only those that the record does not have as caught; `--jobs N`;
`--write`, to record results in `tests/mutants.md` as they come.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".md")
#: Seconds that the tests of one bug may take.
LIMIT = 600


class Bug(NamedTuple):
    """One line changed: `old`, which stands once in `file`, becomes `new`; `tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


BUGS = (
    # -- recurrent layers of transformers
    Bug(
        "outputs of a convolution are those of the columns to its left",
        "weft_integrations/transformers/recurrences.py",
        "made.append(y[..., columns:])",
        "made.append(y[..., : x.shape[-1]])",
        "recurrences",
    ),
    Bug(
        "Mamba-2 decays by the mean over its tokens",
        "weft_integrations/transformers/recurrences.py",
        "maps.append((decay.sum(1).exp()[..., None, None], end.float()))",
        "maps.append((decay.mean(1).exp()[..., None, None], end.float()))",
        "recurrences",
    ),
    Bug(
        "a reset within a piece does not forget the state that came in",
        "weft_integrations/transformers/recurrent_modules.py",
        "(gate * ~starts).to(end.dtype)",
        "gate.to(end.dtype)",
        "recurrences",
    ),
    Bug(
        "a recomputed layer belongs to no call",
        "weft_integrations/transformers/replicated.py",
        "functools.partial(within, function), *args",
        "function, *args",
        "recurrences",
    ),
    Bug(
        "a cache gets the state that a rank's own tokens end with",
        "weft_integrations/transformers/cache_layers.py",
        'recurrent_states = self.shards.sum(recurrent_states.detach(), "state")',
        "recurrent_states = recurrent_states.detach()",
        "generation",
    ),
    Bug(
        "a cache of a split prompt forgets what came before the last piece",
        "weft_integrations/transformers/recurrences.py",
        "return b if piece.begins else apply(a, state) + b",
        "return b",
        "generation",
    ),
    Bug(
        "a cache of a split prompt gets a column too few",
        "weft_integrations/transformers/cache_layers.py",
        "count = length if self.record_past else min(length, taps)",
        "count = length if self.record_past else min(length, taps - 1)",
        "generation",
    ),
    Bug(
        "a split row behind a cache begins without its state",
        "weft_integrations/transformers/recurrences.py",
        'more = {"initial_state": before, "output_final_state": True}',
        'more = {"initial_state": None, "output_final_state": True}',
        "generation",
    ),
    Bug(
        "a split row behind a cache begins without its columns",
        "weft_integrations/transformers/recurrences.py",
        "if piece.begins and cached.shape[-1]:",
        "if False:",
        "generation",
    ),
    Bug(
        "a declared chain of states is ignored",
        "weft/carry/pieces.py",
        'return named == "chain"',
        'return named == "handed on"',
        "recurrences",
    ),
    Bug(
        "a delta rule in a chain begins without the state that enters",
        "weft_integrations/transformers/recurrences.py",
        '"initial_state": entering,',
        '"initial_state": 0 * entering,',
        "recurrences",
    ),
    # -- states and halos
    Bug(
        "the map of a fragment forgets what came before it",
        "weft/carry/fragments.py",
        "return self._piece(slot).begins",
        "return True",
        "carry",
    ),
    Bug(
        "maps compose in the order of ranks",
        "weft/carry/fragments.py",
        "sorted(range(len(self.slots)), key=lambda s: self._piece(s).start)",
        "range(len(self.slots))",
        "carry",
    ),
    Bug(
        "a document that starts inside a fragment does not cut it",
        "weft/carry/fragments.py",
        "Piece(low, high - low, i > 0 or first, high == end)",
        "Piece(low, high - low, first, high == end)",
        "carry",
    ),
    Bug(
        "a convolution reaches into the document before",
        "weft/carry/fragments.py",
        "bordered(a - document, b - document, length, window.border)",
        "bordered(a - document, b - document, edges[-1], window.border)",
        "carry",
    ),
    Bug(
        "columns to the left are zeros",
        "weft/carry/pieces.py",
        "strips = iter(halo.split(sizes, dim))",
        "strips = iter((0 * halo).split(sizes, dim))",
        "carry",
    ),
    Bug(
        "a rank keeps its own part of the gradient of its maps",
        "weft/carry/ops.py",
        "_sum([summands[i] for i in range(len(held))])",
        "parts[at]",
        "carry",
    ),
    Bug(
        "a column that two fragments read gets the gradient of one",
        "weft/relayout/fetch.py",
        "part, accumulate=True)",
        "part)",
        "carry",
    ),
    Bug(
        "a backward pass of states does not say of which pass",
        "weft/runtime/exchange.py",
        "channel = passing.exchange.backward(int(number))",
        "channel = passing.exchange.backward(1)",
        "carry",
    ),
    Bug(
        "a checkpoint stops before the exchanges of a forward pass are repeated",
        "weft/runtime/exchange.py",
        "return run(grad, *ctx.saved_tensors, ctx.shape, ctx.handle), None",
        "return run(grad, None, None, torch.tensor([1]), ctx.shape, ctx.handle), None",
        "carry",
    ),
    Bug(
        "a checkpoint stops before a rank has handed its state on again",
        "weft/carry/chain.py",
        "ctx.save_for_backward(baton)  # a checkpoint",
        "ctx.save_for_backward()  # a checkpoint",
        "carry",
    ),
    Bug(
        "a state that is handed on enters a document that begins",
        "weft/carry/chain.py",
        "state = zero if stage.begins else held[group]",
        "state = held[group]",
        "carry",
    ),
    Bug(
        "the gradient of a state that was handed on does not go back",
        "weft/carry/chain.py",
        "return None, None, grad, baton",
        "return None, None, torch.zeros_like(grad), baton",
        "carry",
    ),
    Bug(
        "a state takes the wrong one of two mesh dims first",
        "weft/carry/fragments.py",
        "source, at = (name, at[name]), {**at, name: goes}",
        "source, at = (name, goes), {**at, name: goes}",
        "symbolic",
    ),
    Bug(
        "heads of a rank are others than those that it has by Ulysses",
        "weft/carry/by_heads.py",
        "return x.narrow(0, (by_other.start - own.start) * n, by_other.count * n)",
        "return x.narrow(0, 0, by_other.count * n)",
        "recurrent",
    ),
    Bug(
        "a decay of one token too many",
        "weft/nn/recurrent.py",
        "left = (total[..., -1:] - total).exp()[..., None] * k",
        "left = (total[..., -1:] - total + decay).exp()[..., None] * k",
        "recurrent",
    ),
    Bug(
        "a rank that uses no state leaves the backward pass out",
        "weft/carry/pieces.py",
        "return _after(out, [t for group in received for t in group])",
        "return out",
        "carry",
    ),
    # -- token order, chunks, placement changes
    Bug(
        "zigzag: the back halves in the order of ranks",
        "weft/plan/order.py",
        "_starts(back[::-1])[::-1]",
        "_starts(back)",
        "order",
    ),
    Bug(
        "a span's last is one short",
        "weft/plan/order.py",
        "Span(self.start + low * self.step, high - low, self.step)",
        "Span(self.start + low * self.step, high - low, 1)",
        "order attention",
    ),
    Bug(
        "striped chunks of uneven sizes",
        "weft/plan/order.py",
        "Span(taken + rank, level - rounds, len(active))",
        "Span(taken + rank, level - rounds, len(sizes))",
        "order attention",
    ),
    Bug(
        "uneven chunks round down",
        "weft/plan/order.py",
        "size = math.ceil(length / parts) if length else 0",
        "size = -(-length // parts) - (length % parts == 1) if length else 0",
        "order layout",
    ),
    Bug(
        "gather forgets the order",
        "weft/plan/order.py",
        "return upload(torch.argsort(stored), device)",
        "return upload(stored, device)",
        "layout",
    ),
    Bug(
        "joint axes: minor axis first",
        "weft/plan/order.py",
        "return join(Span(row * inner_length + t.start, t.count, t.step) for row in rows for t in inner)",
        "return join(Span(row * inner_length + t.start, t.count, t.step) for t in inner for row in [*rows])",
        "order attention",
    ),
    Bug(
        "resharding joins peers' chunks in the wrong order",
        "weft/plan/resharding.py",
        "sides[move.source] = join(s for state in before for s in state.sides[move.source])",
        "sides[move.source] = join(s for state in before[::-1] for s in state.sides[move.source])",
        "packing attention",
    ),
    Bug(
        "resharding cuts one too late",
        "weft/plan/resharding.py",
        "low = sum(sizes[:index])",
        "low = sum(sizes[:index]) + (index > 0 and sizes[index] < sizes[0])",
        "packing attention",
    ),
    Bug(
        "sorted tokens get the inverse order",
        "weft/runtime/resharding.py",
        'index = torch.argsort(positions(arrival, "cpu"))[rank]',
        'index = torch.argsort(torch.argsort(positions(arrival, "cpu"))[rank])',
        "packing attention",
    ),
    Bug(
        "a chunk's owner is one off on the second dim",
        "weft/plan/geometry.py",
        "owner[dim.name] = (coords[dim.name] + digit) % dim.size",
        "owner[dim.name] = (coords[dim.name] - digit) % dim.size",
        "geometry attention",
    ),
    Bug(
        "rows that others need are taken for the same",
        "weft/plan/geometry.py",
        "if (rows != same)[chunks.owners != number].any():",
        "if (rows != same)[chunks.owners != number].all():",
        "geometry packed properties",
    ),
    Bug(
        "visible rows end one early",
        "weft/plan/intervals.py",
        "high = offset + _last(span, intervals) + 1",
        "high = offset + _last(span, intervals) + (span.count == 1)",
        "geometry attention",
    ),
    Bug(
        "what is passed on is not received",
        "weft/plan/plan.py",
        "low, high = (min(low, a), max(high, b)) if low < high else (a, b)",
        "low, high = (low, high) if low < high else (a, b)",
        "geometry attention properties",
    ),
    Bug(
        "partial results leave for the wrong neighbour",
        "weft/plan/plan.py",
        "sent, received = self.held(side, coords, t.source), self.held(side, source, t.source)",
        "sent, received = (self.held(side, coords, t.source),) * 2",
        "attention properties",
    ),
    Bug(
        "bias rows counted without those that are held",
        "weft/plan/plan.py",
        "return rows + self.held(side, self.plan.coords, number)[0]",
        "return rows",
        "bias attention",
    ),
    Bug(
        "redistribution sends from the first holder",
        "weft/relayout/plan.py",
        "chunk, coords[name] = divmod(chunk, sizes[name])",
        "chunk, coords[name] = chunk // sizes[name], 0",
        "redistribute",
    ),
    # -- masks and tiles
    Bug(
        "a window has one key more",
        "weft/masks/kinds.py",
        "return seen if self.window is None else seen & (q - k < self.window)",
        "return seen if self.window is None else seen & (q - k <= self.window)",
        "masks attention",
    ),
    Bug(
        "a window's tiles are taken for full too early",
        "weft/masks/kinds.py",
        "return self.window is None or q[1] + _first(self) - k[0] < self.window",
        "return self.window is None or q[1] + _first(self) - k[0] <= self.window",
        "masks tiles",
    ),
    Bug(
        "causal squares one off the diagonal are full",
        "weft/masks/kinds.py",
        "return q[0] + _first(self) >= k[1] and self._in_window(q, k)",
        "return q[0] + _first(self) >= k[1] - 1 and self._in_window(q, k)",
        "masks tiles attention",
    ),
    Bug(
        "a document sees the first token of the next",
        "weft/masks/kinds.py",
        "return self.numbers(b, q + _first(self)) == self.numbers(b, k)",
        "return self.numbers(b, q + _first(self)) == self.numbers(b, k - 1)",
        "masks packed",
    ),
    Bug(
        "documents: an offset moves no query",
        "weft/masks/kinds.py",
        "return self.numbers(b, q + _first(self)) == self.numbers(b, k)",
        "return self.numbers(b, q) == self.numbers(b, k)",
        "masks attention",
    ),
    Bug(
        "documents: an offset moves no tile",
        "weft/masks/kinds.py",
        "return _later(self._around(k), -_first(self))",
        "return self._around(k)",
        "masks attention",
    ),
    Bug(
        "an offset counts from 1",
        "weft/masks/kinds.py",
        "    return mask.offset or 0",
        "    return mask.offset + 1 if mask.offset else 0",
        "masks attention",
    ),
    Bug(
        "queries that see a key are looked for one later",
        "weft/masks/kinds.py",
        "low, high = _later(k, -_first(self))\n        return (low, FAR",
        "low, high = _later(k, 1 - _first(self))\n        return (low, FAR",
        "masks attention",
    ),
    Bug(
        "causal without an offset takes any number of keys",
        "weft/masks/kinds.py",
        "if n != m and self.offset is None:",
        "if n > m and self.offset is None:",
        "masks",
    ),
    Bug(
        "flex counts queries from 0 at an offset",
        "weft/kernels/flex_mods.py",
        "return s.q + mask.offset if mask.offset else s.q",
        "return s.q",
        "kernels",
    ),
    Bug(
        "the proof's offset is off by one",
        "weft/proof/coverage.py",
        "        rows = rows + (mask.offset or 0)\n        first",
        "        rows = rows + (mask.offset or 1)\n        first",
        "symbolic",
    ),
    Bug(
        "blocks at an offset are taken for the same",
        "weft/proof/representatives.py",
        "q = Parts(q.first + mask.offset, q.last + mask.offset)",
        "q = Parts(q.first + mask.offset, q.last)",
        "symbolic",
    ),
    Bug(
        "torch's upper left is aligned lower right",
        "weft/torch_interop/sdpa.py",
        "return Causal(offset=full[1] - full[0] if lower else 0)",
        "return Causal(offset=full[1] - full[0])",
        "sdpa",
    ),
    Bug(
        "lower right by this rank's lengths",
        "weft/torch_interop/sdpa.py",
        "return Causal(offset=full[1] - full[0] if lower else 0)",
        "return Causal(offset=m - n if lower else 0)",
        "sdpa",
    ),
    Bug(
        "documents: keys end one early",
        "weft/masks/kinds.py",
        "self._ends[last] - 1 if last < len(self._ends) else FAR",
        "self._ends[last] - 2 if last < len(self._ends) else FAR",
        "masks packed tiles",
    ),
    Bug(
        "first keys: the last is hidden",
        "weft/masks/kinds.py",
        "return (k < self.n) & (q >= 0)",
        "return (k < self.n - 1) & (q >= 0)",
        "masks attention",
    ),
    Bug(
        "first keys: the last is not sent",
        "weft/masks/kinds.py",
        "        return 0, self.n - 1",
        "        return 0, max(self.n - 2, 0)",
        "masks attention",
    ),
    Bug(
        "padding of another sequence",
        "weft/masks/kinds.py",
        "return lambda b, h, q, k: (k < valid[b]) & (q >= 0) & (h >= 0)",
        "return lambda b, h, q, k: (k < valid[b.flip(0)]) & (q >= 0) & (h >= 0)",
        "masks attention",
    ),
    Bug(
        "a bidirectional window is causal to the right",
        "weft/masks/kinds.py",
        "return (k >= q - self.left) & (k <= q + self.right)",
        "return (k >= q - self.left) & (k < q + self.right)",
        "masks attention",
    ),
    Bug(
        "masks do not check documents' sum",
        "weft/masks/kinds.py",
        'if total != length and (what == "keys" or self.offset is None):',
        'if total > length and (what == "keys" or self.offset is None):',
        "masks input",
    ),
    Bug(
        "a diagonal is shifted by one",
        "weft/plan/tiles.py",
        "return _around_diagonal(-((q.start + diagonal - k.start) // step), q0, q1, k0, k1)",
        "return _around_diagonal((k.start - q.start - diagonal) // step, q0, q1, k0, k1)",
        "tiles attention",
    ),
    Bug(
        "a tile of queries at an offset is a square too early",
        "weft/plan/tiles.py",
        "if diagonal is not None and _ascending(k) and _earlier(q, -diagonal) == k:",
        "if diagonal is not None and _ascending(k) and q == k:",
        "tiles",
    ),
    Bug(
        "rows below a causal square are dropped",
        "weft/plan/tiles.py",
        "if q0 + side < q1:",
        "if q0 + side + 1 < q1:",
        "tiles attention",
    ),
    Bug(
        "masked calls merge across a gap",
        "weft/plan/tiles.py",
        "(last.k0, last.k1, last.q1) == (call.k0, call.k1, call.q0)",
        "(last.k0, last.k1) == (call.k0, call.k1)",
        "tiles",
    ),
    Bug(
        "row blocks trimmed to the first block's keys",
        "weft/plan/tiles.py",
        "seen = visible_keys(mask, cut_spans(q, low, high), keys)",
        "seen = visible_keys(mask, cut_spans(q, q0, min(q0 + row_block, q1)), keys)",
        "tiles attention",
    ),
    Bug(
        "a group of calls shares columns",
        "weft/plan/tiles.py",
        "if same and _fits(its_rows, rows) and _fits(its_columns, columns):",
        "if same and _fits(its_rows, rows):",
        "packed tiles",
    ),
    Bug(
        "the dearer side travels forward",
        "weft/plan/plan.py",
        "return Role.KEY if queries < keys else Role.QUERY",
        "return Role.QUERY if queries < keys else Role.KEY",
        "plan_predict",
    ),
    Bug(
        "the logsumexp of queries that travel is free",
        "weft/plan/plan.py",
        "queries = p.heads * p.n * (q * forth + out * back)",
        "queries = p.heads * p.n * (q * forth + (out - 4) * back)",
        "plan_predict",
    ),
    # -- the pass
    Bug(
        "partial outputs merged in the input's dtype",
        "weft/runtime/merging.py",
        "out = empty_like_query(self.like, self.shape, self.accum_dtype).zero_()",
        "out = empty_like_query(self.like, self.shape, self.like.dtype).zero_()",
        "precision attention",
    ),
    Bug(
        "partial sums added in the input's dtype",
        "weft/runtime/merging.py",
        "self.total = empty_by_token(self.like, self.shape, self.accum_dtype).zero_()",
        "self.total = empty_by_token(self.like, self.shape, self.like.dtype).zero_()",
        "merging precision attention",
    ),
    Bug(
        "partial sums widened to the input's dtype",
        "weft/runtime/merging.py",
        "self.total = total.to(self.accum_dtype, copy=True)",
        "self.total = total.clone()",
        "precision",
    ),
    Bug(
        "a merge forgets what it had",
        "weft/runtime/merging.py",
        "weight = torch.sigmoid(lse - own_lse)",
        "weight = torch.sigmoid(lse - own_lse).round()",
        "merging attention",
    ),
    Bug(
        "rows that saw nothing become NaN",
        "weft/runtime/merging.py",
        ".masked_fill(torch.isneginf(lse), 0.0)",
        "",
        "merging attention not_finite",
    ),
    Bug(
        "a chunk is sent the wrong way round",
        "weft/runtime/tile_run.py",
        "batch.sends.append(((own - t.ring_offset) % size, self.sending[t]))",
        "batch.sends.append(((own + t.ring_offset) % size, self.sending[t]))",
        "attention",
    ),
    Bug(
        "a transfer is not waited for",
        "weft/runtime/tile_run.py",
        "        batch.wait()\n",
        "        batch.wait() if t.payload is Payload.Q else None\n",
        "attention seeded",
    ),
    Bug(
        "a buffer is used again while it is sent",
        "weft/runtime/buffers.py",
        "free = [t for t in self._retired if memory_of(t)[0] not in out]",
        "free = list(self._retired)",
        "packing seeded processes",
    ),
    Bug(
        "delta without the logsumexp's gradient",
        "weft/runtime/executor.py",
        "delta = delta - dlse.to(plan.accum_dtype)",
        "delta = delta + 0 * dlse.to(plan.accum_dtype)",
        "attention",
    ),
    Bug(
        "a bias tile's gradient keeps the last block only",
        "weft/runtime/executor.py",
        "self.dbias[entries, :, rows[:, None], columns] += ds",
        "self.dbias[entries, :, rows[:, None], columns] = ds",
        "bias attention",
    ),
    Bug(
        "dk of a replicated key is not summed",
        "weft/runtime/executor.py",
        'dk, dv = sum_over(transport, keys, [dk, dv], plan.accum_dtype, "dkv")',
        'dv = sum_over(transport, keys, [dv], plan.accum_dtype, "dkv")[0]',
        "attention",
    ),
    Bug(
        "parts over ranks are summed in the input's dtype",
        "weft/runtime/reduce.py",
        "return parts.to(accum_dtype).sum(0).to(parts.dtype)",
        "return sum(parts[1:], parts[0])",
        "precision",
    ),
    Bug(
        "repeated key heads: gradients of one copy only",
        "weft/runtime/resharding.py",
        "t.unflatten(1, (-1, repeat)).sum(2, dtype=accum_dtype).to(t.dtype)",
        "t.unflatten(1, (-1, repeat))[:, :, 0]",
        "attention packing",
    ),
    Bug(
        "the logsumexp's gradient is not resharded",
        "weft/runtime/resharding.py",
        "items.append((dlse.unsqueeze(-1), Side.QUERY))",
        "items.append((torch.zeros_like(dlse).unsqueeze(-1), Side.QUERY))",
        "attention",
    ),
    Bug(
        "a mask sees this rank's batch numbers",
        "weft/runtime/views.py",
        "b = positions(self.plan.compute.query.batch_spans, self.like.device)",
        "b = positions(self.plan.compute.query.batch_spans, self.like.device) * 0",
        "attention bias",
    ),
    Bug(
        "a mask sees this rank's head numbers",
        "weft/runtime/views.py",
        "h = positions(self.plan.compute.query.head_spans, self.like.device)",
        "h = torch.arange(self.plan.compute.query.heads, device=self.like.device)",
        "attention bias",
    ),
    # -- agreement, messages, failures
    Bug(
        "digests ignore the scale",
        "weft/plan/call.py",
        "parts = (_content(self.mask), self.scale, self.return_lse, self.softcap, self.kernel)",
        "parts = (_content(self.mask), self.return_lse, self.softcap, self.kernel)",
        "calls calls_of_users",
    ),
    Bug(
        "digests ignore the soft cap",
        "weft/plan/call.py",
        "parts = (_content(self.mask), self.scale, self.return_lse, self.softcap, self.kernel)",
        "parts = (_content(self.mask), self.scale, self.return_lse, self.kernel)",
        "calls calls_of_users",
    ),
    Bug(
        "a length of True is 1",
        "weft/masks/base.py",
        "if not isinstance(value, bool):",
        "if value is not None:",
        "masks",
    ),
    Bug(
        "a pass's number is not part of its tag",
        "weft/comm/channel.py",
        "self.tag = _tag(digest, number) if self.mesh_dims else 0",
        "self.tag = _tag(digest, 0) if self.mesh_dims else 0",
        "calls seeded meeting",
    ),
    Bug(
        "a result is handed out before ranks agree",
        "weft/comm/channel.py",
        "            self.check()\n\n    def _keep",
        "            pass\n\n    def _keep",
        "calls meeting processes",
    ),
    Bug(
        "votes along the wrong mesh dims",
        "weft/comm/channel.py",
        "                self.mesh_dims, digest if vote is None else vote, origin.numbers",
        "                self.mesh_dims[:1], digest if vote is None else vote, origin.numbers",
        "calls meeting",
    ),
    # -- layouts, gradients, training
    Bug(
        "shard takes queries' positions for keys",
        "weft/layout.py",
        "positions = self.positions(axis, x.shape[dim], x.device, keys=axis in keys)",
        "positions = self.positions(axis, x.shape[dim], x.device)",
        "layout attention bias",
    ),
    Bug(
        "an all-reduce's gradient is summed, too",
        "weft/comm/collectives.py",
        "        if ctx.backward_sum:\n",
        "        if ctx.backward_sum or True:\n",
        "layout nn train",
    ),
    Bug(
        "uneven chunks are gathered by this rank's size",
        "weft/comm/collectives.py",
        "low = sum(ctx.counts[: ctx.own])",
        "low = ctx.counts[0] * ctx.own - (ctx.counts[0] - ctx.counts[-1]) * (ctx.own > 1)",
        "layout",
    ),
    Bug(
        "a gradient that one rank lacks is dropped",
        "weft/gradients/sync.py",
        "        if present:\n",
        "        if present and p.grad is not None:\n",
        "gradients",
    ),
    Bug(
        "clipping counts heads of this rank only",
        "weft/gradients/clip.py",
        "squares, spread = layout.bound.all_reduce(both, tuple(layout.mesh))",
        "_, spread = layout.bound.all_reduce(both, tuple(layout.mesh))",
        "gradients train",
    ),
    Bug(
        "clipping ignores the largest allowed norm",
        "weft/gradients/clip.py",
        "factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)",
        "gradients train",
    ),
    Bug(
        "accumulation is a mean of means",
        "weft_models/train/step.py",
        "counted = sum(part.counted.sum() for part in parts)",
        "counted = len(parts) * parts[0].counted.sum()",
        "train gradients",
    ),
    Bug(
        "warmup starts at zero",
        "weft_models/train/step.py",
        "return (step + 1) / rise",
        "return step / rise",
        "train docs",
    ),
    Bug(
        "labels shift across documents",
        "weft_integrations/transformers/batches.py",
        'full["shift_labels"] = shift_labels(full["labels"], lengths)',
        'full["shift_labels"] = shift_labels(full["labels"], None)',
        "transformers transformers_losses",
    ),
    # -- losses
    Bug(
        "a sum's gradient is summed for a loss that all ranks compute",
        "weft/layout.py",
        "collectives.partial_to_invariant(x, self._along(axis), self.bound)",
        "collectives.partial_to_replicate(x, self._along(axis), self.bound)",
        "collectives",
    ),
    Bug(
        "a penalty of weights counts once per rank",
        "weft/layout.py",
        "return collectives.scale_backward(x, 1.0 / ranks) if ranks > 1 else x",
        "return x",
        "collectives",
    ),
    Bug(
        "micro-batches are divided by this rank's labels",
        "weft/losses/labels.py",
        "return collectives.partial_to_invariant(count, layout.data_dims, layout.bound)",
        "return count",
        "losses",
    ),
    Bug(
        "a cut vocabulary: this rank's words begin at 0",
        "weft/losses/head.py",
        "column = labels - self.first",
        "column = labels",
        "losses",
    ),
    Bug(
        "a cut vocabulary: gradients of hidden states are not summed",
        "weft/losses/head.py",
        "        if self.same:\n",
        "        if False:\n",
        "losses",
    ),
    Bug(
        "a head's gradient is added up in half precision",
        "weft/losses/head.py",
        "wide = torch.promote_types(weight.dtype, torch.float32)",
        "wide = weight.dtype",
        "losses",
    ),
    # -- full rows of transformers models
    Bug(
        "full rows: labels shift within chunks",
        "weft_integrations/transformers/rows.py",
        'full["shift_labels"] = shift_labels(full["labels"])',
        'full["shift_labels"] = full["labels"]',
        "rows",
    ),
    Bug(
        "full rows: scalars enter without the factor",
        "weft_integrations/transformers/rows.py",
        "return recorded(value, self.entered, factor(self.layout, self.axis))",
        "return recorded(value, self.entered)",
        "rows",
    ),
    Bug(
        "full rows: sync_gradients does not divide",
        "weft/gradients/sync.py",
        "local_tensor(p.grad).div_(ranks)",
        "pass",
        "rows",
    ),
    Bug(
        "full rows: FSDP2 sums",
        "weft/gradients/data_parallel.py",
        "divisor = float(mesh.size()) if averaged else 1.0",
        "divisor = 1.0",
        "rows",
    ),
    Bug(
        "full rows: chunks draw the same numbers",
        "weft_integrations/transformers/noise.py",
        "seed = number + layout.chunk(axis)",
        "seed = number",
        "rows",
    ),
    Bug(
        "full rows: NEFTune's noise is of a chunk",
        "weft_integrations/transformers/noise.py",
        "alpha * share**0.5",
        "alpha",
        "rows",
    ),
    Bug(
        "full rows: weights are not compared",
        "weft_integrations/transformers/consistency.py",
        "weights {' '.join(left)}",
        "weights",
        "rows",
    ),
    Bug(
        "full rows: entering gradients are not recorded",
        "weft_integrations/transformers/lazy.py",
        "recorded(rows, self.entered)[:",
        "rows[:",
        "rows",
    ),
    Bug(
        "lazy logits: a window begins at the first token",
        "weft_integrations/transformers/lazy.py",
        "ends = (self.start, self.length - self.stop)",
        "ends = (0, self.length - self.stop + self.start)",
        "rows",
    ),
    Bug(
        "lazy logits: what a window leaves out has a label",
        "weft_integrations/transformers/lazy.py",
        "labels = place.part(target, ignore_index)",
        "labels = place.part(target, 0)",
        "rows",
    ),
    Bug(
        "full rows: recomputed layers of a replicated call are split",
        "weft_integrations/transformers/replicated.py",
        "recomputed_within(model, lambda: _implementations(own))",
        "recomputed_within(model, contextlib.nullcontext)",
        "rows",
    ),
    # -- decoding
    Bug(
        "a decoded key stays with ranks before its own, too",
        "weft/decode/owners.py",
        "((offsets // block) % parts == part)",
        "((offsets // block) % parts >= part)",
        "decode_cache",
    ),
    Bug(
        "every rank keeps every decoded key",
        "weft_models/models/decode_cache.py",
        "self.own = self.held.next_positions(self.part, self.new)",
        "self.own = torch.arange(self.new)",
        "decode_cache",
    ),
    Bug(
        "a decoded token is turned by the angle of the one after",
        "weft/nn/attention.py",
        "places = torch.arange(first, first + x.shape",
        "places = 1 + torch.arange(first, first + x.shape",
        "decode_cache",
    ),
    Bug(
        "queries that follow kept keys are turned as the first",
        "weft/nn/geometry.py",
        "here + (first or {}).get(name, 0)",
        "here",
        "nn",
    ),
    Bug(
        "a decoded token sees all keys through a window",
        "weft_models/models/decode_cache.py",
        "if not mask.is_full((first, last), (0, last)):",
        "if self.new > 1:",
        "decode_cache",
    ),
    Bug(
        "samples are drawn for rows of one rank alone, decoding",
        "weft_models/models/sampling.py",
        "drawn[own.to(device)]",
        "drawn[: len(own)]",
        "decode_cache",
    ),
    Bug(
        "ranks do not compare the last token",
        "weft_models/models/token_pair.py",
        "        cache.agree(ids)\n        return",
        "        return",
        "decode_cache",
    ),
    Bug(
        "the last chunk of a prompt is taken for its last token",
        "weft_models/models/decode_cache.py",
        "== self.new - 1",
        "== self.layout.positions(self.axis, self.new, x.device).max()",
        "decode_cache",
    ),
    # -- kernels
    Bug(
        "soft cap: its slope is left out",
        "weft/kernels/math.py",
        "scores, slope = view.softcap * bent, 1 - bent.square()",
        "scores, slope = view.softcap * bent, None",
        "kernels attention",
    ),
    Bug(
        "grouped heads: gradients of the last of a group",
        "weft/kernels/math.py",
        "return t.unflatten(1, (groups, -1)).sum(2)",
        "return t.unflatten(1, (groups, -1))[:, :, -1]",
        "kernels attention",
    ),
    Bug(
        "causal rows counted from the block",
        "weft/kernels/math.py",
        "row = torch.arange(rows.start, rows.stop, device=q.device)",
        "row = torch.arange(rows.stop - rows.start, device=q.device)",
        "kernels",
    ),
    Bug(
        "hidden rows keep the kernel's logsumexp of 0",
        "weft/kernels/cpu_flash.py",
        'lse = lse.masked_fill(~seen, float("-inf"))',
        "pass",
        "kernels attention",
    ),
    Bug(
        "a logsumexp of 0 is taken for plain",
        "weft/kernels/cpu_flash.py",
        "return both if both[1].all() else None",
        "return both",
        "calls",
    ),
    Bug(
        "a bias is cast to the input's dtype",
        "weft/kernels/cpu_flash.py",
        "return additive(view, accumulate_dtype(q.dtype))",
        "return additive(view, q.dtype)",
        "bias precision kernels",
    ),
    Bug(
        "the surrogate ignores delta where out is missing",
        "weft/kernels/flash.py",
        "            out = surrogate_out(dout, delta)\n",
        "            out = torch.zeros_like(dout)\n",
        "kernels attention",
    ),
    Bug(
        "a negative scale loses its sign in dq",
        "weft/kernels/flash.py",
        "return dq * sign, dk, dv, ds",
        "return dq, *others",
        "kernels attention",
    ),
    # -- predictions
    Bug(
        "explain counts keys by query heads",
        "weft/plan/memory.py",
        "entry = plan.compute[payload.side]",
        "entry = plan.compute.query",
        "traffic call_plan",
    ),
    Bug(
        "explain forgets the logsumexp of queries in the backward pass",
        "weft/plan/program.py",
        "return row, row, (d, dtype), (e, dtype)",
        "return row, (d, dtype), (e, dtype)",
        "traffic call_plan",
    ),
    Bug(
        "sent and received bytes are swapped",
        "weft/plan/predict.py",
        "            whole.received.update(part.received)\n            whole.sent.update(part.sent)",
        "            whole.received.update(part.sent)\n            whole.sent.update(part.received)",
        "traffic call_plan",
    ),
    # -- files
    Bug(
        "each rank hashes one file only",
        "weft/checkpoint/run.py",
        "sorted(index.files)[layout.rank :: layout.world_size]",
        "sorted(index.files)[layout.rank : layout.rank + 1]",
        "cache",
    ),
    Bug(
        "a file's digest is not compared",
        "weft/checkpoint/folder.py",
        "if _hash(file) != written.sha256:",
        "if len(_hash(file)) != len(written.sha256):",
        "cache storage checkpoint",
    ),
    Bug(
        "an index does not cover its own text",
        "weft/checkpoint/folder.py",
        'if document["sha256"] != _text_hash',
        'if not document["sha256"] and _text_hash',
        "cache checkpoint",
    ),
    Bug(
        "blocks may overlap",
        "weft/checkpoint/folder.py",
        "if not self.blocks or not _make_up(self.blocks, self.shape):",
        "if not self.blocks or numbers != math.prod(self.shape):",
        "storage",
    ),
    Bug(
        "a block may be in a file that is not listed",
        "weft/checkpoint/folder.py",
        "                if block.file not in room:\n",
        "                if block.file not in room and not room.setdefault(block.file, 1 << 60):\n",
        "storage",
    ),
    Bug(
        "a pickle is executed before a weights file is refused",
        "weft_models/models/pretrained.py",
        "    path = _path(name_or_path)\n",
        "    path = _path(name_or_path)\n    try:\n        torch.load(path, weights_only=False)\n    except Exception:\n        pass\n",
        "storage",
    ),
    Bug(
        "weights that are not finite are taken",
        "weft_models/models/pretrained.py",
        "if not local.isfinite().all():",
        "if not local.numel():",
        "storage",
    ),
    Bug(
        "replicated state is compared with its own rank",
        "weft/checkpoint/replicated.py",
        "differ = value[:2] != other[:2]",
        "differ = value[:2] != value[:2]",
        "checkpoint",
    ),
    Bug(
        "a stored block is read at another rank's offset",
        "weft/checkpoint/folder.py",
        "slice(lo - a, hi - a) for (lo, hi), a in zip(spans, block.start)",
        "slice(lo - c, hi - c) for (lo, hi), c in zip(spans, start)",
        "checkpoint storage",
    ),
    Bug(
        "a cache's blocks forget the chunks before them",
        "weft_models/models/cache_folder.py",
        "before = place.chunks(i, length)[: place.chunk(i, layout.coords)]",
        "before = place.chunks(i, length)[:0]",
        "cache",
    ),
    Bug(
        "a late step overwrites a newer one",
        "weft/launch/trace.py",
        "if self.trace.steps - count < STEPS:",
        "if count:",
        "blackbox",
    ),
    Bug(
        "a terminal gets the escapes of a file",
        "weft/_terminal.py",
        "super().render_str(printable(text), **options)",
        "super().render_str(text, **options)",
        "terminal",
    ),
    # -- GPUs
    Bug(
        "cuDNN computes calls of one query",
        "weft/kernels/cudnn.py",
        "return 1 in (q.shape[2], k.shape[2])",
        "return k.shape[2] == 1",
        "kernels_cuda",
    ),
    Bug(
        "packed documents go to cuDNN",
        "weft/kernels/__init__.py",
        '_PACKED = {"cuda": ("flash-attn", "cuda-flash", "cudnn", "flex", "math")}',
        '_PACKED = {"cuda": ("flash-attn", "cudnn", "cuda-flash", "flex", "math")}',
        "kernels_cuda",
    ),
    Bug(
        "an index is brought to the GPU in every call",
        "weft/runtime/resharding.py",
        "@cached(128)",
        "",
        "packing fake_gpu",
    ),
    Bug(
        "ranks' first agreement is looked at a pass later",
        "weft/comm/channel.py",
        "self.deferred = kind is not None and transport.agreed_before(kind)",
        "self.deferred = kind is not None",
        "calls meeting",
    ),
    Bug(
        "FlashAttention is asked for deterministic gradients that it refuses",
        "weft/kernels/flash_attn.py",
        "if dim > load().deterministic:",
        "if dim > 256:",
        "kernels_cuda",
    ),
    Bug(
        "a broken package ends the choice of a kernel",
        "weft/kernels/flash_attn.py",
        "except Exception as error:  # packages",
        "except ImportError as error:  # packages",
        "kernels_cuda",
    ),
    Bug(
        "ranks that share a GPU are not noticed",
        "weft/comm/world.py",
        "if sharing > 1:  # ranks of several",
        "if sharing > 2:  # ranks of several",
        "world",
    ),
    Bug(
        "q, k and v: parts of an exchange come in the order of tensors",
        "weft/runtime/buffers.py",
        "parts[i :: len(items)]",
        "parts[i * size : (i + 1) * size]",
        "launches",
    ),
    Bug(
        "predictions count an exchange per tensor",
        "weft/plan/predict.py",
        "_add(moved, mesh_dim, label, sent, received, size - 1)",
        "_add(moved, mesh_dim, label, sent, received, len(items) * (size - 1))",
        "plan_predict",
    ),
    Bug(
        "learned routing reads the choice twice",
        "weft_models/routing/attention.py",
        "slots = routes.slots_of(choice, own, self.routing.top_k)  # b r i s",
        "slots = routes.slots_of(chosen.cpu(), own, self.routing.top_k)  # b r i s",
        "fake_gpu",
    ),
    # -- the clock of links
    Bug(
        "bytes of a level are those of the last message",
        "weft/plan/clock.py",
        "self.sent[level] += nbytes",
        "self.sent[level] = nbytes",
        "flow papers",
    ),
    Bug(
        "small messages reach a link's full rate",
        "weft/plan/clock.py",
        "self.clock.add(nbytes + half,",
        "self.clock.add(nbytes,",
        "flow rates",
    ),
    Bug(
        "works that share a link each have all of it",
        "weft/plan/clock.py",
        "left[r] = max(0.0, left[r] - share)",
        "left[r] = max(0.0, left[r])",
        "flow",
    ),
    Bug(
        "of layouts as fast as each other the first comes first",
        "weft_planner/search.py",
        "first = min(close, key=self._busy)",
        "first = made[0]",
        "search",
    ),
    Bug(
        "a layout may take twice the memory",
        "weft_planner/search.py",
        "if not self._fits(memory):",
        "if not self._fits(memory / 2):",
        "search",
    ),
    Bug(
        "no gap is left by candidates that nobody replayed",
        "weft_planner/search.py",
        "max(0.0, 1 - min(unseen, default=math.inf) / self._best()),",
        "0.0,",
        "search",
    ),
    Bug(
        "gradients take no memory",
        "weft_planner/search.py",
        "own = forecast_of(plan).rest_bytes * (1 if forward_only else 2)",
        "own = forecast_of(plan).rest_bytes",
        "search",
    ),
    # -- losses
    Bug(
        "labels of a later token cross the seam of two documents",
        "weft/losses/labels.py",
        "masks.allowed(row, torch.zeros_like(row), token, token + step)",
        "masks.allowed(row, torch.zeros_like(row), token, token + 1)",
        "losses",
    ),
    Bug(
        "rows of logits that are all -inf are not a number",
        "weft/losses/head.py",
        "peak = peak.masked_fill(peak == -torch.inf, 0.0)",
        "peak = peak + 0.0",
        "losses",
    ),
    Bug(
        "tokens of other ranks get this rank's numbers",
        "weft/losses/head.py",
        "return chunk[:, index * self.own :][:, :tokens]",
        "return chunk[:, :tokens]",
        "losses",
    ),
    Bug(
        "the label after the last word is taken",
        "weft/losses/call.py",
        "if share.lowest < 0 or share.highest >= words:",
        "if share.lowest < 0 or share.highest > words:",
        "losses",
    ),
    # -- the same bits
    Bug(
        "the bound of a sum is that of one row",
        "weft/same_bits/sums.py",
        "exponent = torch.frexp(most * count).exponent",
        "exponent = torch.frexp(most).exponent",
        "same_bits reproducible_training",
    ),
    Bug(
        "rows that several ranks have are bounded as often",
        "weft/same_bits/sums.py",
        "if not bool(counts.all()):",
        "if not len(counts):",
        "same_bits reproducible_training",
    ),
    Bug(
        "a sum over ranks is on every one of them",
        "weft/same_bits/sums.py",
        "first = all(self.transport.coords[d] == 0 for d in self.dims)",
        "first = True",
        "reproducible_training",
    ),
    Bug(
        "a bound of dk is that of one row",
        "weft/runtime/fixed_order.py",
        "rows = max(1, n * per_group)",
        "rows = 1",
        "same_bits",
    ),
    Bug(
        "key blocks merge in the order in which a rank meets them",
        "weft/runtime/fixed_order.py",
        "self.put((0, key_block), made)",
        "self.nodes[0, 0] = self._merged(self.nodes.get((0, 0)), made)",
        "same_bits",
    ),
    Bug(
        "partial outputs merge by torch's logaddexp",
        "weft/runtime/fixed_order.py",
        "total = base + torch.log(torch.exp(lse - base) + torch.exp(other_lse - base))",
        "total = torch.logaddexp(lse, other_lse)",
        "same_bits",
    ),
    Bug(
        "gradients are added in fp64 as they come",
        "weft/runtime/fixed_order.py",
        "part.to(torch.float64, copy=True).add_(offset).sub_(offset)",
        "part.to(torch.float64, copy=True)",
        "same_bits",
    ),
    Bug(
        "a gradient's bound is of this rank's tokens",
        "weft/runtime/fixed_order.py",
        "sizes = largest(transport, mesh_dim, sizes)",
        "sizes = sizes + 0",
        "same_bits",
    ),
    Bug(
        "a rank merges neighbours that have no parent in common",
        "weft/plan/leaves.py",
        "sibling_is_empty or i ^ 1 in here",
        "sibling_is_empty or i ^ 1 in here or i + 1 in here",
        "same_bits",
    ),
    Bug(
        "queries of any blocks are one kernel call",
        "weft/plan/leaves.py",
        "rows.start % rows_together or rows.count % rows_together",
        "rows.start % 1 or rows.count % 1",
        "same_bits",
    ),
    Bug(
        "a chunk is cut by its share of the length",
        "weft/declare/blocks.py",
        "ends = [edges[(len(edges) - 1) * i // cuts] for i in range(cuts + 1)]",
        "ends = [length * i // cuts for i in range(cuts + 1)]",
        "same_bits",
    ),
    Bug(
        "edges of long blocks are cut anywhere",
        "weft/declare/blocks.py",
        "unit = UNIT if length >= blocks * UNIT else 1",
        "unit = 1",
        "same_bits",
    ),
    Bug(
        "factors have so many bits that their sums round",
        "weft/same_bits/sums.py",
        "FACTOR_BITS = 26",
        "FACTOR_BITS = 30",
        "reproducible_training",
    ),
    Bug(
        "factors of a product are not rounded",
        "weft/same_bits/sums.py",
        "rows[:, :-1].add_(offset).sub_(offset)",
        "rows[:, :-1].add_(0.0 * offset)",
        "reproducible_training",
    ),
    Bug(
        "the largest number is this rank's",
        "weft/same_bits/sums.py",
        "sizes = largest(self.transport, mesh_dim, sizes)",
        "sizes = sizes + 0.0",
        "reproducible_training",
    ),
    Bug(
        "the norm is of this rank's tokens",
        "weft/same_bits/sums.py",
        "norm = self._sum(_squares(above, x, SQUARE_BITS // 2 - exponent)).sqrt()",
        "norm = _squares(above, x, SQUARE_BITS // 2 - exponent).sqrt()",
        "reproducible_training",
    ),
    Bug(
        "squares are added without being rounded",
        "weft/same_bits/sums.py",
        "rows.mul_(scale).square_().ceil_().sum(0)",
        "rows.mul_(scale).square_().sum(0)",
        "reproducible_training",
    ),
    Bug(
        "squares have more bits than fp32 adds",
        "weft/same_bits/sums.py",
        "SQUARE_BITS = 24 - CHUNK.bit_length() + 1",
        "SQUARE_BITS = 24",
        "reproducible_training",
    ),
    Bug(
        "the scale of small columns is infinite",
        "weft/same_bits/sums.py",
        ".exponent.clamp(min=SQUARE_BITS // 2 - 127)",
        ".exponent",
        "reproducible_training",
    ),
    Bug(
        "rows of zeros count in norms",
        "weft/same_bits/sums.py",
        "if not bool(counts.all()):",
        "if False:",
        "reproducible_training",
    ),
    Bug(
        "rows of a linear layer are not padded",
        "weft/same_bits/sums.py",
        "_padded(rows, ROWS)",
        "rows.contiguous()",
        "reproducible_training",
    ),
    Bug(
        "a linear layer's rows are added over ranks by torch",
        "weft/same_bits/modules.py",
        "    F.linear: _linear,\n",
        "",
        "reproducible_training",
    ),
    Bug(
        "silu is torch's",
        "weft/same_bits/modules.py",
        "    F.silu: _alone(activations.silu),\n",
        "",
        "reproducible_training reproducible_transformers",
    ),
    Bug(
        "gelu is torch's",
        "weft/same_bits/modules.py",
        "    F.gelu: _alone(activations.gelu),\n",
        "",
        "reproducible_training",
    ),
    Bug(
        "sigmoid's gradient is that of a line",
        "weft/same_bits/activations.py",
        "return (1.0 - s).mul_(s)",
        "return 1.0 - s",
        "reproducible_training reproducible_transformers",
    ),
    Bug(
        "a convolution's activation is SiLU",
        "weft_integrations/transformers/recurrences.py",
        "ACT2FN[activation](out)",
        "ACT2FN['silu'](out)",
        "reproducible_transformers",
    ),
    Bug(
        "a target counts on every rank of another axis",
        "weft_models/train/step.py",
        "first = all(layout.coords[d] == 0 for d in dims)",
        "first = True",
        "reproducible_training",
    ),
    Bug(
        "bits that are close are taken for the same",
        "weft_models/train/same_bits.py",
        "differ = _bits(one) != _bits(other)",
        "differ = ~torch.isclose(one, other)",
        "reproducible_training",
    ),
    # -- decoding
    Bug(
        "a part keeps positions that were cropped",
        "weft/decode/owners.py",
        "pieces.append(own[own < run.stop])",
        "pieces.append(own)",
        "generation decode_cache",
    ),
    Bug(
        "blocks of decoded tokens begin with rank 0",
        "weft/decode/owners.py",
        "offsets = torch.arange(first, first + count)",
        "offsets = torch.arange(count)",
        "generation decode_cache",
    ),
    Bug(
        "the past of a chunk has the chunk",
        "weft_integrations/transformers/cache_layers.py",
        "past = self.keys[:, :, :before], self.values[:, :, :before]",
        "past = self.keys, self.values",
        "generation decode_cache",
    ),
    # -- folders of checkpoints
    Bug(
        "files of an earlier save stay",
        "weft/checkpoint/folder.py",
        "if old.name not in index.files:",
        "if not index.files:",
        "checkpoint storage",
    ),
    Bug(
        "a block is read from where its part begins",
        "weft/checkpoint/folder.py",
        "spans = [(max(a, c), min(a + n, c + m)) for a, n, c, m in ends]",
        "spans = [(c, min(a + n, c + m)) for a, n, c, m in ends]",
        "checkpoint storage",
    ),
    Bug(
        "files that do not hold their blocks are taken",
        "weft/checkpoint/folder.py",
        "if room[block.file] < 0:",
        "if room[block.file] < -(2**40):",
        "checkpoint storage",
    ),
    Bug(
        "replicated weights that differ are saved",
        "weft/checkpoint/replicated.py",
        "if len({*everywhere(layout, lambda: text)}) == 1:",
        "if everywhere(layout, lambda: text):",
        "checkpoint storage",
    ),
    # -- recurrent layers
    Bug(
        "Mamba-1 decays by the mean over its tokens",
        "weft_integrations/transformers/recurrences.py",
        "maps.append(((A * step.sum(-1, keepdim=True)).exp(), end.float()))",
        "maps.append(((A * step.mean(-1, keepdim=True)).exp(), end.float()))",
        "recurrences",
    ),
    Bug(
        "an order with a fragment for every token is taken",
        "weft/carry/fragments.py",
        "if most > MOST_FRAGMENTS:",
        "if most > 2**30:",
        "carry",
    ),
    Bug(
        "a state of several groups of heads is one message",
        "weft/carry/fragments.py",
        "yield [PlannedMessage(*peer, nbytes, sends) for nbytes in self.nbytes]",
        "yield [PlannedMessage(*peer, sum(self.nbytes), sends)]",
        "carry symbolic",
    ),
    # -- words and commands
    Bug(
        "weft check passes if the last case does",
        "weft_cli/commands/check.py",
        "good = good and all(claim.ok for claim in claims)",
        "good = all(claim.ok for claim in claims)",
        "cli symbolic",
    ),
    Bug(
        "weft check does not look at gradients",
        "weft_cli/commands/check.py",
        "good = all(c.ok for compared in comparisons for c in compared)",
        "good = all(c.ok for compared in comparisons for c in compared[:2])",
        "cli",
    ),
)


class Failures:
    """A plugin of pytest that keeps the names of the tests that fail; processes run last."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items) -> None:
        items.sort(key=lambda item: "pool" in item.fixturenames)

    def pytest_collectreport(self, report) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def run_tests(copy: Path, tests: list[str], answer) -> None:
    """In a process that has imported torch but not weft: run tests on a copy, until one fails."""
    os.setsid()
    os.chdir(copy)
    path = [str(copy / "src"), str(copy)]
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    with open("output", "wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)

    failures = Failures()
    options = ["-n", "0", "-q", "-x", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    options += ["--timeout", "120"]  # a bug may make ranks wait for each other
    if "::" in tests[0]:  # named, and so run even if it is slow
        options += ["-m", "slow or not slow"]
    code = pytest.main([*options, *tests], plugins=[failures])
    answer.send((int(code), failures.names))


def outcome(copy: Path, tests: list[str]) -> str:
    """What tests say of a copy: `caught by` whom, "SURVIVED", or why they did not run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "pytest", "numpy"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(copy, tests, send))
    process.start()
    send.close()
    try:
        if not receive.poll(LIMIT):
            return f"no answer in {LIMIT} s"
        code, names = receive.recv()
    except EOFError:
        return "broken run: the process of the tests died"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if code == 1 and names:
        return f"caught by {names[0].removeprefix('tests/')}"
    return "SURVIVED" if code == 0 else f"broken run: {(copy / 'output').read_text()[-300:]}"


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A folder with every file of the repository, without those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        yield Path(folder)


@functools.cache
def without_bug(test: str) -> str:
    """The outcome of a test on a copy without any bug: "SURVIVED" if it is a good one."""
    with copied() as copy:
        return outcome(copy, [f"tests/{test}"])


def planted(bug: Bug, before: str = "") -> str:
    """Run a bug's tests on a copy of the source that has it, those that noticed it `before` first."""
    with copied() as copy:
        path = copy / "src" / bug.file
        text = path.read_text()
        if text.count(bug.old) != 1:
            return f"not planted: the line stands {text.count(bug.old)} times in {bug.file}"
        path.write_text(text.replace(bug.old, bug.new))
        files = [f"tests/test_{name}.py" for name in bug.tests.split()]
        noticed = before.removeprefix("caught by ")
        attempts = [files] if noticed == before else [[f"tests/{noticed}"], files]
        for tests in attempts:
            result = outcome(copy, tests)
            test = result.removeprefix("caught by ")
            if test != result and without_bug(test) != "SURVIVED":
                return f"broken run: {test} fails without the bug, too"
            if result.startswith("caught"):
                return result
        return result


def recorded() -> dict[str, str]:
    """Name of a bug -> the result in `tests/mutants.md`."""
    if not RECORD.exists():
        return {}
    rows = re.findall(r"^\| (.+?) \| `.+?` \| (.+?) \|$", RECORD.read_text(), re.MULTILINE)
    return dict(rows)


def table(results: dict[str, str]) -> str:
    """The results in Markdown."""
    results = {bug.name: results[bug.name] for bug in BUGS if bug.name in results}
    caught = sum(result.startswith("caught") for result in results.values())
    rows = [
        f"| {bug.name} | `{bug.file}` | {results[bug.name]} |"
        for bug in BUGS
        if bug.name in results
    ]
    head = (
        "`python -m tests.mutants --write` writes this table: which test notices which bug.\n\n"
        f"{caught} of {len(results)} planted bugs caught.\n\n| bug | file | |\n| --- | --- | --- |"
    )
    return "\n".join(["# Planted bugs", "", head, *rows, ""])


def main() -> None:
    """Plant the bugs that were asked for, and say which survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="plant bugs whose name or file has it")
    parser.add_argument("--open", action="store_true", help="only bugs that the record has as open")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="record the result")
    asked = parser.parse_args()
    bugs = [bug for bug in BUGS if asked.word in bug.name or asked.word in bug.file]
    before, results = recorded(), {}
    if asked.open:
        bugs = [bug for bug in bugs if not before.get(bug.name, "").startswith("caught")]
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        runs = pool.map(lambda bug: planted(bug, before.get(bug.name, "")), bugs)
        for bug, result in zip(bugs, runs):
            results[bug.name] = result
            print(f"{result:60.60}  {bug.file}: {bug.name}", flush=True)
            if asked.write:  # now: a run of all takes an hour, and may be cut short
                RECORD.write_text(table(before | results))
    survivors = [name for name, result in results.items() if not result.startswith("caught")]
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    main()

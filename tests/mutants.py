"""Planted bugs, and whether the tests notice them: `python -m tests.mutants`, not part of the suite.

Each bug is one change of one expression or statement, of the kind that people make: an index off by
one, a wait left out, groups swapped, a merge in the wrong dtype, a gradient dropped, a refusal lost.
It is anchored by its function and the expression in it, wherever they stand and however their lines
are broken (`tests/test_mutants.py` holds that each is found), and planted in a copy of the source, and the test files that should notice it run on the copy: the test that
noticed it last, as `tests/mutants.md` records, before the others. The test that notices a bug must
pass without it. A bug that survives is a hole in the tests. Options: a word, to plant only bugs
whose file or name has it; `--open`, only those that the record does not have as caught; `--jobs N`;
`--write`, to record results in `tests/mutants.md` as they come.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import functools
import itertools
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
    """An expression or statement changed: `old`, which stands once in `function`, becomes `new`.

    `file` is below `src`; a function that has left it is looked for in all files. "" is a module.
    """

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: str


BUGS = (
    # -- names of axes
    Bug(
        "lengths of unknown axes are ignored",
        "weft/plan/lengths.py",
        "_check_names",
        "name not in axes",
        "False",
        "lengths",
    ),
    Bug(
        "a resampled call with `to` ignores lengths of unknown axes",
        "weft/nn/windows.py",
        "Resample._refusal",
        "super()._refusal(lengths, options)",
        "''",
        "lengths",
    ),
    Bug(
        "a reflect border needs no position more than it has",
        "weft/nn/windows.py",
        "Convolution._misfit",
        'max(pads) + (border == "reflect")',
        "max(pads)",
        "nn_windows",
    ),
    # -- models on layouts
    Bug(
        "layers that round by a rank's tokens are taken",
        "weft_integrations/common.py",
        "refuse_scaled_by_tensor",
        "kind.__module__.startswith(_SCALED_BY_TENSOR)",
        "False",
        "parallelize",
    ),
    Bug(
        "a pickle meets weft's functions before the refusal",
        "weft_integrations/common.py",
        "Parallelized.put_on",
        '{"_weft": self} | attributes',
        'attributes | {"_weft": self}',
        "parallelize",
    ),
    # -- latents in the place of keys
    Bug(
        "the expansion's gradient is that of the first chunk",
        "weft/runtime/expand.py",
        "Expander.add",
        "total + grad",
        "total",
        "expand",
    ),
    Bug(
        "the expansion's gradient counts twice",
        "weft/runtime/expand.py",
        "Expander.add",
        "grad.to(dtype)",
        "2 * grad.to(dtype)",
        "expand",
    ),
    Bug(
        "gradients of a chunk of latents go back again with the next",
        "weft/runtime/expand.py",
        "ExpandedChunk.settle",
        "grads, self._grads = self._grads, []",
        "grads = self._grads",
        "expand",
    ),
    Bug(
        "a rank of Ulysses expands the first heads",
        "weft/runtime/expand.py",
        "heads_of",
        "at_rest.head_spans[0].start",
        "now.head_spans[0].start",
        "expand",
    ),
    Bug(
        "a rank that expands nothing has no gradient of the expansion",
        "weft/runtime/expand.py",
        "Expander.gradients",
        "torch.zeros_like(p)",
        "None",
        "expand",
    ),
    Bug(
        "a weight that changed between the passes expands again",
        "weft/runtime/expand.py",
        "Expander.begin_backward",
        "[p._version for p in self.parameters] != self._versions",
        "False",
        "expand",
    ),
    Bug(
        "a checkpoint saves what trying a token saves",
        "weft/runtime/expand.py",
        "Expansion._tried",
        "torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)",
        "torch.enable_grad()",
        "expand",
    ),
    Bug(
        "latents go back by the keys of the chunk before",
        "weft/runtime/executor.py",
        "_Backward._block",
        "block.keys.numbers != self.latents.numbers",
        "False",
        "expand",
    ),
    Bug(
        "latents travel however long their expansion takes",
        "weft/plan/travel.py",
        "Travel.latents",
        "not self.why and fewer and sooner",
        "not self.why and fewer",
        "travel",
    ),
    Bug(
        "the expansion of what arrives is free",
        "weft/plan/problem.py",
        "pass_costs",
        "(2.5 if backward else 1.0) * work / blocks / flops + expansion",
        "(2.5 if backward else 1.0) * work / blocks / flops",
        "travel",
    ),
    Bug(
        "latents rotate by positions within their chunk",
        "weft_integrations/transformers/calls.py",
        "Calls._positions",
        "positions[None]",
        "positions[None] - positions[0]",
        "latents",
    ),
    Bug(
        "latents are normed again as they leave",
        "weft_integrations/transformers/latents.py",
        "_expand_kv",
        "Unexpanded(c, r, _expansion(self))",
        "Unexpanded(self.kv_a_layernorm(c), r, _expansion(self))",
        "latents",
    ),
    Bug(
        "adapters that drop out expand latents",
        "weft_integrations/transformers/latents.py",
        "_travels",
        "isinstance(part, nn.Dropout) and part.training and part.p",
        "False",
        "latents",
    ),
    Bug(
        "a model is verified with its keys travelling",
        "weft_integrations/transformers/verification/verify.py",
        "verify",
        '"latents" if latents == "auto" else latents',
        "latents",
        "latents",
    ),
    # -- keys that a model chooses
    Bug(
        "attention drops a model's choice of tokens",
        "weft_integrations/transformers/interface.py",
        "_choice",
        "return ChosenKeys(tokens.unsqueeze(1), check=False)",
        "return None",
        "chosen_keys",
    ),
    Bug(
        "blocks that a model chose are taken for tokens",
        "weft_integrations/transformers/interface.py",
        "_choice",
        "module.indexer.block_size",
        "1",
        "chosen_keys",
    ),
    Bug(
        "sinks are dropped beside a choice",
        "weft_integrations/transformers/interface.py",
        "attend",
        '{"softcap": softcap, "sinks": s_aux, "choice": choice}',
        '{"softcap": softcap, "choice": choice}',
        "chosen_keys",
    ),
    Bug(
        "index keys are in the order of ranks",
        "weft_integrations/common.py",
        "_OfAll.forward",
        "torch.empty_like(rows).index_copy_(0, order, rows).movedim(0, dim)",
        "rows.movedim(0, dim)",
        "chosen_keys",
    ),
    Bug(
        "an indexer scores its own rank's keys only",
        "weft_integrations/transformers/chosen_keys.py",
        "OtherRanks._of_all",
        'of_all_ranks(keys.detach(), dim, places, call.layout, call.axis, "index")',
        "keys.narrow(dim, 0, 1).expand_as(keys).contiguous().repeat_interleave(2, dim)"
        ".narrow(dim, 0, call.length)",
        "chosen_keys",
    ),
    Bug(
        "an indexer sees keys that come later",
        "weft_integrations/transformers/chosen_keys.py",
        "_seen",
        "seen.expand(len(samples), len(queries), keys)",
        "torch.ones_like(seen).expand(len(samples), len(queries), keys)",
        "chosen_keys",
    ),
    Bug(
        "rows of scores have local positions",
        "weft_integrations/transformers/running.py",
        "ModelCall.rows_at_once",
        "self.layout.positions(self.axis, self.length, device)",
        "torch.arange(self.layout.local_length(self.axis, self.length), device=device)",
        "chosen_keys",
    ),
    Bug(
        "rows of scores are made at once",
        "weft_integrations/transformers/running.py",
        "ModelCall.rows_at_once",
        "AT_ONCE // max(1, per_row)",
        "AT_ONCE",
        "chosen_keys",
    ),
    Bug(
        "weights of keys get no gradient",
        "weft_integrations/transformers/chosen_keys.py",
        "as_scores",
        "weights[..., None]",
        "weights.detach()[..., None]",
        "chosen_keys",
    ),
    Bug(
        "rows of a choice arrive in the order of all-to-alls",
        "weft/runtime/choices.py",
        "to_tile",
        "numbers.index_select(2, sort_index(arrival, numbers.device))",
        "numbers",
        "choice chosen_keys",
    ),
    Bug(
        "heads of a rank choose as the first heads of all",
        "weft/runtime/views.py",
        "Views._choosers",
        "(heads - rest[0].start) * kind.rows // plan.problem.heads",
        "(heads - heads[0]) * kind.rows // plan.problem.heads",
        "choice",
    ),
    Bug(
        "a choice is cut to the first keys of a tile",
        "weft/choice.py",
        "chosen",
        "keys // block - low",
        "torch.arange(len(keys), device=keys.device) // block",
        "choice",
    ),
    Bug(
        "sequences with another mask choose as the first",
        "weft/runtime/views.py",
        "Views._of_rows",
        "numbers[slice(*call.samples)]",
        "numbers[: call.samples[1] - call.samples[0]]",
        "choice",
    ),
    Bug(
        "a compressed key has nothing of the window before",
        "weft_integrations/transformers/compressed.py",
        "OfRanks._extra",
        "int(self.overlap and windows.start > 0)",
        "0",
        "chosen_keys",
    ),
    Bug(
        "a compressed key is seen a window early",
        "weft_integrations/transformers/compressed.py",
        "compress",
        "positions.expand(len(hidden_states), -1)",
        "(positions + self.compress_rate).expand(len(hidden_states), -1)",
        "chosen_keys",
    ),
    Bug(
        "compressed keys of other ranks hand no gradient back",
        "weft_integrations/transformers/compressed.py",
        "OfRanks.gather",
        "of_all_ranks(entries, 1, places, layout, axis, counted_as)",
        "of_all_ranks(entries, 1, places, layout, axis, counted_as).detach()",
        "chosen_keys",
    ),
    Bug(
        "gradients of gathered entries do not add up",
        "weft_integrations/common.py",
        "_OfAll.backward",
        "ctx.layout.bound.all_reduce(apart, ctx.dims)",
        "grad",
        "chosen_keys",
    ),
    Bug(
        "a window that began on another rank has no compressed key",
        "weft_integrations/transformers/compressed.py",
        "OfRanks.windows",
        "piece.start // self.ratio",
        "(piece.start + self.ratio - 1) // self.ratio",
        "chosen_keys",
    ),
    Bug(
        "a tile is skipped whose first keys alone are chosen",
        "weft/runtime/views.py",
        "Views._without_keys",
        "rows >= first // kind.block",
        "rows > first // kind.block",
        "choice",
    ),
    Bug(
        "tiles without chosen keys are computed",
        "weft/runtime/views.py",
        "Views.chosen_works",
        "id(w.group) not in skipped",
        "True",
        "choice",
    ),
    Bug(
        "plain calls of a pass are not cut to a choice",
        "weft/plan/plan.py",
        "Pass._groups_of",
        "in_row_blocks(calls, row_block, self.plan.chosen)",
        "in_row_blocks(calls, row_block, False)",
        "choice symbolic",
    ),
    Bug(
        "rows of a choice are proven by their number",
        "weft/proof/choices.py",
        "moved_row_defects",
        "not np.array_equal(result, wanted)",
        "len(result) != len(wanted)",
        "symbolic",
    ),
    Bug(
        "calls of other queries' choices are proven",
        "weft/proof/choices.py",
        "uncut_calls",
        "not np.array_equal(rows[_in_tile(tile, block, call.q0, call.q1)], wanted)",
        "False",
        "symbolic",
    ),
    Bug(
        "numbers of no key are not refused",
        "weft/runtime/checks.py",
        "check_choice",
        "low < -1 or high >= blocks",
        "low < -1",
        "choice",
    ),
    # -- recurrent layers of transformers
    Bug(
        "outputs of a convolution are those of the columns to its left",
        "weft_integrations/transformers/recurrences.py",
        "convolution.run",
        "y[..., columns:]",
        "y[..., : x.shape[-1]]",
        "recurrences",
    ),
    Bug(
        "Mamba-2 decays by the mean over its tokens",
        "weft_integrations/transformers/recurrences.py",
        "mamba2.carried",
        "decay.sum",
        "decay.mean",
        "recurrences",
    ),
    Bug(
        "a reset within a piece does not forget the state that came in",
        "weft_integrations/transformers/recurrent_modules.py",
        "_lru",
        "(gate * ~starts).to",
        "gate.to",
        "recurrences",
    ),
    Bug(
        "a recomputed layer belongs to no call",
        "weft_integrations/transformers/replicated.py",
        "recomputed_within",
        "functools.partial(within, function)",
        "function",
        "recurrences",
    ),
    Bug(
        "a cache gets the state that a rank's own tokens end with",
        "weft_integrations/transformers/cache_layers.py",
        "StateLayer.update_recurrent_state",
        'self.shards.sum(recurrent_states.detach(), "state")',
        "recurrent_states.detach()",
        "generation",
    ),
    Bug(
        "a cache of a split prompt forgets what came before the last piece",
        "weft_integrations/transformers/recurrences.py",
        "_last_state",
        "b if piece.begins else apply(a, state) + b",
        "b",
        "generation",
    ),
    Bug(
        "a cache of a split prompt gets a column too few",
        "weft_integrations/transformers/cache_layers.py",
        "StateLayer.update_conv_state",
        "min(length, taps)",
        "min(length, taps - 1)",
        "generation",
    ),
    Bug(
        "a split row behind a cache begins without its state",
        "weft_integrations/transformers/recurrences.py",
        "delta_rule.carried",
        "before",
        "None",
        "generation",
    ),
    Bug(
        "a split row behind a cache begins without its columns",
        "weft_integrations/transformers/recurrences.py",
        "convolution.run",
        "piece.begins and cached.shape[-1]",
        "False",
        "generation",
    ),
    Bug(
        "a declared chain of states is ignored",
        "weft/carry/pieces.py",
        "LocalPieces.in_chain",
        'named == "chain"',
        'named == "handed on"',
        "recurrences",
    ),
    Bug(
        "a delta rule in a chain begins without the state that enters",
        "weft_integrations/transformers/recurrences.py",
        "delta_rule.carried.step",
        '{"initial_state": entering, "output_final_state": True}',
        '{"initial_state": 0 * entering, "output_final_state": True}',
        "recurrences",
    ),
    # -- states and halos
    Bug(
        "the map of a fragment forgets what came before it",
        "weft/carry/fragments.py",
        "Fragments.resets",
        "self._piece(slot).begins",
        "True",
        "carry",
    ),
    Bug(
        "maps compose in the order of ranks",
        "weft/carry/fragments.py",
        "Fragments.order",
        "sorted(range(len(self.slots)), key=lambda s: self._piece(s).start)",
        "range(len(self.slots))",
        "carry",
    ),
    Bug(
        "a document that starts inside a fragment does not cut it",
        "weft/carry/fragments.py",
        "_pieces",
        "i > 0 or first",
        "first",
        "carry",
    ),
    Bug(
        "a convolution reaches into the document before",
        "weft/carry/fragments.py",
        "_around",
        "bordered(a - document, b - document, length, window.border)",
        "bordered(a - document, b - document, edges[-1], window.border)",
        "carry",
    ),
    Bug(
        "columns to the left are zeros",
        "weft/carry/pieces.py",
        "LocalPieces.around",
        "halo.split",
        "(0 * halo).split",
        "carry",
    ),
    Bug(
        "a rank keeps its own part of the gradient of its maps",
        "weft/carry/ops.py",
        "StatesPassing.backward",
        "_sum([summands[i] for i in range(len(held))])",
        "parts[at]",
        "carry",
    ),
    Bug(
        "a column that two fragments read gets the gradient of one",
        "weft/relayout/fetch.py",
        "collect_together.add",
        "total.index_put_(_grid(overlap.taken, total.device), part, accumulate=True)",
        "total.index_put_(_grid(overlap.taken, total.device), part)",
        "carry",
    ),
    Bug(
        "a backward pass of states does not say of which pass",
        "weft/runtime/exchange.py",
        "pass_op.backward",
        "int(number)",
        "1",
        "carry",
    ),
    Bug(
        "a checkpoint stops before the exchanges of a forward pass are repeated",
        "weft/runtime/exchange.py",
        "pass_op.gradient",
        "*ctx.saved_tensors",
        "None, None, torch.tensor([1])",
        "carry",
    ),
    Bug(
        "a checkpoint stops before a rank has handed its state on again",
        "weft/carry/chain.py",
        "_Close.forward",
        "ctx.save_for_backward(baton)",
        "ctx.save_for_backward()",
        "carry",
    ),
    Bug(
        "a state that is handed on enters a document that begins",
        "weft/carry/chain.py",
        "chained",
        "zero if stage.begins else held[group]",
        "held[group]",
        "carry",
    ),
    Bug(
        "the gradient of a state that was handed on does not go back",
        "weft/carry/chain.py",
        "_Send.backward",
        "None, None, grad, baton",
        "None, None, torch.zeros_like(grad), baton",
        "carry",
    ),
    Bug(
        "a state takes the wrong one of two mesh dims first",
        "weft/carry/fragments.py",
        "_relay",
        "(name, at[name])",
        "(name, goes)",
        "symbolic",
    ),
    Bug(
        "heads of a rank are others than those that it has by Ulysses",
        "weft/carry/by_heads.py",
        "traded.cut",
        "(by_other.start - local.start) * n",
        "0",
        "recurrent",
    ),
    Bug(
        "a decay of one token too many",
        "weft/nn/recurrent.py",
        "_chunk",
        "total[..., -1:] - total",
        "total[..., -1:] - total + decay",
        "recurrent",
    ),
    Bug(
        "a rank that uses no state leaves the backward pass out",
        "weft/carry/pieces.py",
        "LocalPieces.join",
        "_after(out, [t for group in received for t in group])",
        "out",
        "carry",
    ),
    # -- token order, chunks, placement changes
    Bug(
        "zigzag: the back halves in the order of ranks",
        "weft/plan/order.py",
        "_zigzag",
        "_starts(back[::-1])[::-1]",
        "_starts(back)",
        "order",
    ),
    Bug(
        "a span's last is one short",
        "weft/plan/order.py",
        "Span.cut",
        "Span(self.start + low * self.step, high - low, self.step)",
        "Span(self.start + low * self.step, high - low, 1)",
        "order attention",
    ),
    Bug(
        "striped chunks of uneven sizes",
        "weft/plan/order.py",
        "_striped",
        "Span(taken + rank, level - rounds, len(active))",
        "Span(taken + rank, level - rounds, len(sizes))",
        "order attention",
    ),
    Bug(
        "uneven chunks round down",
        "weft/plan/order.py",
        "chunk_sizes",
        "math.ceil(length / parts)",
        "-(-length // parts) - (length % parts == 1)",
        "order layout",
    ),
    Bug(
        "gather forgets the order",
        "weft/plan/order.py",
        "gather_order",
        "torch.argsort(stored)",
        "stored",
        "layout",
    ),
    Bug(
        "joint axes: minor axis first",
        "weft/plan/order.py",
        "product",
        "(Span(row * inner_length + t.start, t.count, t.step) for row in rows for t in inner)",
        "(Span(row * inner_length + t.start, t.count, t.step) for t in inner for row in [*rows])",
        "order attention",
    ),
    Bug(
        "resharding joins peers' chunks in the wrong order",
        "weft/plan/resharding.py",
        "Resharding._state",
        "(s for state in before for s in state.sides[move.source])",
        "(s for state in before[::-1] for s in state.sides[move.source])",
        "packing attention",
    ),
    Bug(
        "resharding cuts one too late",
        "weft/plan/resharding.py",
        "Resharding._state",
        "sum(sizes[:index])",
        "sum(sizes[:index]) + (index > 0 and sizes[index] < sizes[0])",
        "packing attention",
    ),
    Bug(
        "sorted tokens get the inverse order",
        "weft/runtime/resharding.py",
        "sort_index",
        'torch.argsort(positions(arrival, "cpu"))[rank]',
        'torch.argsort(torch.argsort(positions(arrival, "cpu"))[rank])',
        "packing attention",
    ),
    Bug(
        "a chunk's owner is one off on the second dim",
        "weft/plan/geometry.py",
        "ChunkGeometry.owner",
        "coords[dim.name] + digit",
        "coords[dim.name] - digit",
        "geometry attention",
    ),
    Bug(
        "rows that others need are taken for the same",
        "weft/plan/geometry.py",
        "ChunkGeometry._ask_all",
        "(rows != same)[chunks.owners != number].any",
        "(rows != same)[chunks.owners != number].all",
        "geometry packed properties",
    ),
    Bug(
        "visible rows end one early",
        "weft/plan/intervals.py",
        "visible",
        "offset + _last(span, intervals) + 1",
        "offset + _last(span, intervals) + (span.count == 1)",
        "geometry attention",
    ),
    Bug(
        "what is passed on is not received",
        "weft/plan/plan.py",
        "Pass._used_or_passed_on",
        "(min(low, a), max(high, b))",
        "(low, high)",
        "geometry attention properties",
    ),
    Bug(
        "partial results leave for the wrong neighbour",
        "weft/plan/plan.py",
        "Pass.transfer_rows",
        "self.held(side, coords, t.source), self.held(side, source, t.source)",
        "(self.held(side, coords, t.source),) * 2",
        "attention properties",
    ),
    Bug(
        "bias rows counted without those that are held",
        "weft/plan/plan.py",
        "Pass.offset",
        "rows + self.held(side, self.plan.coords, number)[0]",
        "rows",
        "bias attention",
    ),
    Bug(
        "redistribution sends from the first holder",
        "weft/relayout/plan.py",
        "_nearest",
        "divmod(chunk, sizes[name])",
        "chunk // sizes[name], 0",
        "redistribute",
    ),
    # -- masks and tiles
    Bug(
        "a neighbourhood is cut off at the end of an axis instead of moved",
        "weft/masks/grid.py",
        "Near._seen",
        "min(max(i - before, 0), count - kernel)",
        "max(i - before, 0)",
        "masks",
    ),
    Bug(
        "an even neighbourhood leans the other way",
        "weft/masks/grid.py",
        "Near._allowed",
        "q // dilation - kernel // 2",
        "q // dilation - (kernel - 1) // 2",
        "masks",
    ),
    Bug(
        "dilated keys of another residue are seen",
        "weft/masks/grid.py",
        "Near._allowed",
        "seen if dilation == 1 else seen & (k % dilation == rest)",
        "seen",
        "masks",
    ),
    Bug(
        "boxes of a circular axis end at its end",
        "weft/masks/grid.py",
        "Boxes._allowed",
        "self.circular[axis]",
        "False",
        "masks",
    ),
    Bug(
        "boxes before the shift are joined to the first whole one",
        "weft/masks/grid.py",
        "Boxes._begin",
        "(size - shift) % size",
        "0",
        "masks",
    ),
    Bug(
        "a part of a grid is taken for rows of it",
        "weft/masks/grid.py",
        "_flat",
        "c * inner + end",
        "c * inner + inner - 1",
        "masks tiles",
    ),
    Bug(
        "keys of two masks are those of the first",
        "weft/masks/base.py",
        "Or.key_intervals",
        "self.left.key_intervals(q) + self.right.key_intervals(q)",
        "self.left.key_intervals(q)",
        "masks",
    ),
    Bug(
        "a window has one key more",
        "weft/masks/kinds.py",
        "Causal.allowed",
        "q - k < self.window",
        "q - k <= self.window",
        "masks attention",
    ),
    Bug(
        "a window's tiles are taken for full too early",
        "weft/masks/kinds.py",
        "Causal._in_window",
        "q[1] + _first(self) - k[0] < self.window",
        "q[1] + _first(self) - k[0] <= self.window",
        "masks tiles",
    ),
    Bug(
        "causal squares one off the diagonal are full",
        "weft/masks/kinds.py",
        "Causal.is_full",
        "q[0] + _first(self) >= k[1] and self._in_window(q, k)",
        "q[0] + _first(self) >= k[1] - 1 and self._in_window(q, k)",
        "masks tiles attention",
    ),
    Bug(
        "a document sees the first token of the next",
        "weft/masks/kinds.py",
        "Documents.allowed",
        "self.numbers(b, k)",
        "self.numbers(b, k - 1)",
        "masks packed",
    ),
    Bug(
        "documents: an offset moves no query",
        "weft/masks/kinds.py",
        "Documents.allowed",
        "q + _first(self)",
        "q",
        "masks attention",
    ),
    Bug(
        "documents: an offset moves no tile",
        "weft/masks/kinds.py",
        "Documents.queries",
        "_later(self._around(k), -_first(self))",
        "self._around(k)",
        "masks attention",
    ),
    Bug(
        "an offset counts from 1",
        "weft/masks/kinds.py",
        "_first",
        "mask.offset or 0",
        "mask.offset + 1 if mask.offset else 0",
        "masks attention",
    ),
    Bug(
        "queries that see a key are looked for one later",
        "weft/masks/kinds.py",
        "Causal.queries",
        "-_first(self)",
        "1 - _first(self)",
        "masks attention",
    ),
    Bug(
        "causal without an offset takes any number of keys",
        "weft/masks/kinds.py",
        "Causal.check",
        "n != m",
        "n > m",
        "masks",
    ),
    Bug(
        "flex counts queries from 0 at an offset",
        "weft/kernels/flex_mods.py",
        "_queries",
        "s.q + mask.offset if mask.offset else s.q",
        "s.q",
        "kernels",
    ),
    Bug(
        "the proof's offset is off by one",
        "weft/proof/coverage.py",
        "visible_ranges",
        "if isinstance(mask, Causal):\n    rows = rows + (mask.offset or 0)\n    first = -far if mask.window is None else rows - mask.window + 1\n    return [(first, rows)]",
        "if isinstance(mask, Causal):\n    rows = rows + (mask.offset or 1)\n    first = -far if mask.window is None else rows - mask.window + 1\n    return [(first, rows)]",
        "symbolic",
    ),
    Bug(
        "blocks at an offset are taken for the same",
        "weft/proof/representatives.py",
        "_relation",
        "q.last + mask.offset",
        "q.last",
        "symbolic",
    ),
    Bug(
        "torch's upper left is aligned lower right",
        "weft/torch_interop/sdpa.py",
        "sdpa._aligned",
        "full[1] - full[0] if lower else 0",
        "full[1] - full[0]",
        "sdpa",
    ),
    Bug(
        "lower right by this rank's lengths",
        "weft/torch_interop/sdpa.py",
        "sdpa._aligned",
        "full[1] - full[0]",
        "m - n",
        "sdpa",
    ),
    Bug(
        "documents: keys end one early",
        "weft/masks/kinds.py",
        "Documents._around",
        "self._ends[last] - 1",
        "self._ends[last] - 2",
        "masks packed tiles",
    ),
    Bug(
        "first keys: the last is hidden",
        "weft/masks/kinds.py",
        "FirstKeys.allowed",
        "self.n",
        "self.n - 1",
        "masks attention",
    ),
    Bug(
        "first keys: the last is not sent",
        "weft/masks/kinds.py",
        "FirstKeys.keys",
        "self.n - 1",
        "max(self.n - 2, 0)",
        "masks attention",
    ),
    Bug(
        "padding of another sequence",
        "weft/masks/kinds.py",
        "KeyPadding.prepared",
        "valid[b]",
        "valid[b.flip(0)]",
        "masks attention",
    ),
    Bug(
        "a bidirectional window is causal to the right",
        "weft/masks/kinds.py",
        "Window.allowed",
        "k <= q + self.right",
        "k < q + self.right",
        "masks attention",
    ),
    Bug(
        "masks do not check documents' sum",
        "weft/masks/kinds.py",
        "Documents.check",
        "total != length",
        "total > length",
        "masks input",
    ),
    Bug(
        "a diagonal is shifted by one",
        "weft/plan/tiles.py",
        "_classify",
        "-((q.start + diagonal - k.start) // step)",
        "(k.start - q.start - diagonal) // step",
        "tiles attention",
    ),
    Bug(
        "a tile of queries at an offset is a square too early",
        "weft/plan/tiles.py",
        "_calls_of",
        "_earlier(q, -diagonal)",
        "q",
        "tiles",
    ),
    Bug(
        "rows below a causal square are dropped",
        "weft/plan/tiles.py",
        "_around_diagonal",
        "q0 + side < q1",
        "q0 + side + 1 < q1",
        "tiles attention",
    ),
    Bug(
        "masked calls merge across a gap",
        "weft/plan/tiles.py",
        "_merge_rows",
        "(last.k0, last.k1, last.q1) == (call.k0, call.k1, call.q0)",
        "(last.k0, last.k1) == (call.k0, call.k1)",
        "tiles",
    ),
    Bug(
        "row blocks trimmed to the first block's keys",
        "weft/plan/tiles.py",
        "_row_blocks",
        "cut_spans(q, low, high)",
        "cut_spans(q, q0, min(q0 + row_block, q1))",
        "tiles attention",
    ),
    Bug(
        "a group of calls shares columns",
        "weft/plan/tiles.py",
        "grouped",
        "same and _fits(its_rows, rows) and _fits(its_columns, columns)",
        "same and _fits(its_rows, rows)",
        "packed tiles",
    ),
    Bug(
        "the dearer side travels forward",
        "weft/plan/plan.py",
        "Plan._cheaper_role",
        "Role.KEY if queries < keys else Role.QUERY",
        "Role.QUERY if queries < keys else Role.KEY",
        "plan_predict",
    ),
    Bug(
        "the logsumexp of queries that travel is free",
        "weft/plan/plan.py",
        "Plan._cheaper_role",
        "out * back",
        "(out - 4) * back",
        "plan_predict",
    ),
    # -- the pass
    Bug(
        "partial outputs merged in the input's dtype",
        "weft/runtime/merging.py",
        "PartialOutput._memory",
        "empty_like_query(self.like, self.shape, self.accum_dtype)",
        "empty_like_query(self.like, self.shape, self.like.dtype)",
        "merging precision attention",
    ),
    Bug(
        "partial sums added in the input's dtype",
        "weft/runtime/merging.py",
        "PartialSum._memory",
        "self.accum_dtype",
        "self.like.dtype",
        "merging precision attention",
    ),
    Bug(
        "partial sums widened to the input's dtype",
        "weft/runtime/merging.py",
        "_Accumulator._widened",
        "t.to(self.accum_dtype, copy=True)",
        "t.clone()",
        "precision merging",
    ),
    Bug(
        "parts that are held: four of a row wait",
        "weft/runtime/merging.py",
        "_Accumulator._hold",
        "count > self._kept",
        "count > self._kept + 1",
        "merging memory",
    ),
    Bug(
        "parts that are held: a run of rows takes parts from its first row",
        "weft/runtime/merging.py",
        "_Accumulator._runs",
        "low - first",
        "0",
        "merging",
    ),
    Bug(
        "parts that are held: rows of no part keep what memory had",
        "weft/runtime/merging.py",
        "_Accumulator._write",
        "self._clear(target)",
        "None",
        "merging",
    ),
    Bug(
        "parts that are held: a slice keeps the larger tensor",
        "weft/runtime/merging.py",
        "_Accumulator._hold",
        "not _alone(tensors)",
        "False",
        "merging memory",
    ),
    Bug(
        "the plan counts a part of a result too few",
        "weft/plan/steps.py",
        "_Compiler._begin",
        "self.parts[t.payload.side, receive.number] += 1",
        "pass",
        "merging",
    ),
    Bug(
        "a result that leaves is not taken from its buffer",
        "weft/runtime/tile_run.py",
        "TileRun._packed",
        "there is None",
        "True",
        "budgets",
    ),
    Bug(
        "gradients of values are not merged with those of keys",
        "weft/runtime/merging.py",
        "PartialSum._together",
        "zip(target, zip(*parts))",
        "zip(target[:1], zip(*parts))",
        "merging",
    ),
    Bug(
        "gradients of values are not added to those of keys",
        "weft/runtime/merging.py",
        "PartialSum._merge",
        "zip(total, part)",
        "zip(total[:1], part)",
        "attention",
    ),
    Bug(
        "keys and values without numbers are computed with",
        "weft/runtime/ops.py",
        "attend_eagerly",
        "bound.rest_shape(q, k, v)",
        "None",
        "calls",
    ),
    Bug(
        "a bias without numbers is added",
        "weft/runtime/ops.py",
        "attend_eagerly",
        'checks.check_place("the bias", bias, q)',
        "None",
        "calls",
    ),
    Bug(
        "a gather in an order takes any parts",
        "weft/layout.py",
        "Layout.gather",
        "local != chunk",
        "False",
        "collectives",
    ),
    Bug(
        "fetched keys are hidden by the structure of a mask",
        "weft/fetching/attend.py",
        "_Asked.of",
        "_visible(plan, mask, numbers, kind.block)",
        "_visible(plan, plan.problem.mask, numbers, kind.block)",
        "fetching",
    ),
    Bug(
        "an empty rank expands latents without gradients",
        "weft/runtime/expand.py",
        "Expansion.__call__",
        "t.sum(2, keepdim=True)",
        "t.new_zeros((*t.shape[:2], 1, t.shape[3]))",
        "expand",
    ),
    Bug(
        "a lost peer is the first of its batch",
        "weft/comm/processes.py",
        "ProcessTransport._guard",
        "peers[len(done)]",
        "peers[0]",
        "faults calls processes",
    ),
    Bug(
        "views of a received buffer outlive it",
        "weft/runtime/tile_run.py",
        "TileRun._free",
        "self.unpacked.pop(buffer, None)",
        "None",
        "memory",
    ),
    Bug(
        "a merge forgets what it had",
        "weft/runtime/merging.py",
        "merge_part",
        "torch.sigmoid(lse - local_lse).masked_fill",
        "torch.sigmoid(lse - local_lse).round().masked_fill",
        "merging attention",
    ),
    Bug(
        "rows that saw nothing become NaN",
        "weft/runtime/merging.py",
        "merge_part",
        "torch.sigmoid(lse - local_lse).masked_fill(torch.isneginf(lse), 0.0)",
        "torch.sigmoid(lse - local_lse)",
        "merging attention not_finite",
    ),
    Bug(
        "a chunk is sent the wrong way round",
        "weft/plan/steps.py",
        "_Compiler._begin",
        "here - t.ring_offset",
        "here + t.ring_offset",
        "attention",
    ),
    Bug(
        "a transfer is not waited for",
        "weft/runtime/tile_run.py",
        "TileRun._end",
        "batch.wait()",
        "batch.wait() if t.payload is Payload.Q else None",
        "late attention seeded",
    ),
    Bug(
        "what several ranks want is packed for each",
        "weft/plan/steps.py",
        "_Compiler._end",
        "not self.uses[content] and buffer in self.packed",
        "buffer in self.packed",
        "steps memory",
    ),
    Bug(
        "a merged row stands for the whole result",
        "weft/plan/steps.py",
        "_Compiler._merged_rows",
        "number, first + low, first + high",
        "number, low, high",
        "attention",
    ),
    Bug(
        "a buffer is used again while it is sent",
        "weft/plan/steps.py",
        "_Buffers.recycle",
        "(entry for entry in self.retired if entry[0] not in sending)",
        "self.retired",
        "late packing seeded processes",
    ),
    Bug(
        "the content of a call is kept though its functions see other values",
        "weft/runtime/calls.py",
        "BoundCall.content",
        "self.has_functions or not self._content",
        "not self._content",
        "calls",
    ),
    Bug(
        "delta without the logsumexp's gradient",
        "weft/runtime/executor.py",
        "backward",
        "delta - dlse.to(plan.accum_dtype)",
        "delta + 0 * dlse.to(plan.accum_dtype)",
        "attention",
    ),
    Bug(
        "a bias tile's gradient keeps the last block only",
        "weft/runtime/executor.py",
        "_Backward._add_bias_gradient",
        "self.dbias[entries, :, rows[:, None], columns] += ds",
        "self.dbias[entries, :, rows[:, None], columns] = ds",
        "bias attention",
    ),
    Bug(
        "dk of a replicated key is not summed",
        "weft/runtime/executor.py",
        "backward",
        'dk, dv = sum_over(transport, keys, [dk, dv], plan.accum_dtype, "dkv")',
        'dv = sum_over(transport, keys, [dv], plan.accum_dtype, "dkv")[0]',
        "attention",
    ),
    Bug(
        "parts over ranks are summed in the input's dtype",
        "weft/runtime/resharding.py",
        "sum_over.add",
        "parts.to(accum_dtype).sum(0).to(parts.dtype)",
        "sum(parts[1:], parts[0])",
        "precision",
    ),
    Bug(
        "repeated key heads: gradients of one copy only",
        "weft/runtime/resharding.py",
        "_copies_summed",
        "t.unflatten(1, (-1, repeat)).sum(2, dtype=accum_dtype).to(t.dtype)",
        "t.unflatten(1, (-1, repeat))[:, :, 0]",
        "attention packing",
    ),
    Bug(
        "the logsumexp's gradient is not resharded",
        "weft/runtime/resharding.py",
        "to_rest_adjoint",
        "dlse.unsqueeze",
        "torch.zeros_like(dlse).unsqueeze",
        "attention",
    ),
    Bug(
        "a mask sees this rank's batch numbers",
        "weft/runtime/views.py",
        "Views._samples",
        "positions(self.plan.compute.query.batch_spans, self.like.device)",
        "positions(self.plan.compute.query.batch_spans, self.like.device) * 0",
        "attention bias",
    ),
    Bug(
        "a mask sees this rank's head numbers",
        "weft/runtime/views.py",
        "Views._samples",
        "positions(self.plan.compute.query.head_spans, self.like.device)",
        "torch.arange(self.plan.compute.query.heads, device=self.like.device)",
        "attention bias",
    ),
    # -- agreement, messages, failures
    Bug(
        "digests ignore the scale",
        "weft/plan/call.py",
        "Call.content",
        "(_content(self.mask), self.scale, self.return_lse, self.softcap, self.kernel)",
        "(_content(self.mask), self.return_lse, self.softcap, self.kernel)",
        "calls calls_of_users",
    ),
    Bug(
        "digests ignore the soft cap",
        "weft/plan/call.py",
        "Call.content",
        "(_content(self.mask), self.scale, self.return_lse, self.softcap, self.kernel)",
        "(_content(self.mask), self.scale, self.return_lse, self.kernel)",
        "calls calls_of_users",
    ),
    Bug(
        "a length of True is 1",
        "weft/masks/base.py",
        "whole_number",
        "not isinstance(value, bool)",
        "value is not None",
        "masks",
    ),
    Bug(
        "a pass's number is not part of its tag",
        "weft/comm/channel.py",
        "Channel.__init__",
        "_tag(digest, number)",
        "_tag(digest, 0)",
        "calls seeded meeting",
    ),
    Bug(
        "a result is handed out before ranks agree",
        "weft/comm/channel.py",
        "Channel.finish",
        "self.check()",
        "pass",
        "calls meeting processes",
    ),
    Bug(
        "votes along the wrong mesh dims",
        "weft/comm/channel.py",
        "Channel.__init__",
        "transport.vote( self.mesh_dims, digest if vote is None else vote, origin.numbers )",
        "transport.vote( self.mesh_dims[:1], digest if vote is None else vote, origin.numbers )",
        "calls meeting",
    ),
    # -- layouts, gradients, training
    Bug(
        "shard takes queries' positions for keys",
        "weft/layout.py",
        "Layout.shard",
        "self.positions(axis, x.shape[dim], x.device, keys=axis in keys)",
        "self.positions(axis, x.shape[dim], x.device)",
        "layout attention bias",
    ),
    Bug(
        "an all-reduce's gradient is summed, too",
        "weft/comm/collectives.py",
        "_Sum.backward",
        "ctx.backward_sum",
        "ctx.backward_sum or True",
        "layout nn train",
    ),
    Bug(
        "uneven chunks are gathered by this rank's size",
        "weft/comm/collectives.py",
        "_Gather.backward",
        "sum(ctx.counts[: ctx.own])",
        "ctx.counts[0] * ctx.own - (ctx.counts[0] - ctx.counts[-1]) * (ctx.own > 1)",
        "layout",
    ),
    Bug(
        "a gradient that one rank lacks is dropped",
        "weft/gradients/sync.py",
        "_sum",
        "if present:\n    p.grad = grad",
        "if present and p.grad is not None:\n    p.grad = grad",
        "gradients",
    ),
    Bug(
        "the last bucket of gradients alone is summed",
        "weft/gradients/sync.py",
        "_sum",
        "[_sum_bucket(bucket, dims, transport) for bucket in rest]",
        "[bucket[0].sum() for bucket in rest]",
        "gradients",
    ),
    Bug(
        "clipping counts heads of this rank only",
        "weft/gradients/clip.py",
        "clip_grad_norm_",
        "squares, spread",
        "_, spread",
        "gradients train",
    ),
    Bug(
        "clipping ignores the largest allowed norm",
        "weft/gradients/clip.py",
        "clip_grad_norm_",
        "max_norm",
        "1.0",
        "gradients train",
    ),
    Bug(
        "accumulation is a mean of means",
        "weft_models/train/step.py",
        "take_step",
        "sum(part.counted.sum() for part in parts)",
        "len(parts) * parts[0].counted.sum()",
        "train gradients",
    ),
    Bug(
        "warmup starts at zero",
        "weft_models/train/step.py",
        "lr_schedule",
        "(step + 1) / rise",
        "step / rise",
        "train docs",
    ),
    Bug(
        "labels shift across documents",
        "weft_integrations/transformers/batches.py",
        "sharded",
        'shift_labels(full["labels"], lengths)',
        'shift_labels(full["labels"], None)',
        "transformers transformers_losses",
    ),
    # -- images with text
    Bug(
        "positions of the text decoder count the chunk",
        "weft_integrations/transformers/seam.py",
        "_cut",
        "layout.shard(value, {axis: -1}) if whole else call.positions[None]",
        "torch.arange(call.positions.shape[-1])[None]",
        "seam",
    ),
    Bug(
        "a decoder that takes positions gets none",
        "weft_integrations/transformers/seam.py",
        "cut_arguments",
        'given.setdefault("position_ids", None)',
        "pass",
        "seam",
    ),
    Bug(
        "packed documents are not read off the first of four rows",
        "weft_integrations/transformers/rows.py",
        "text_positions",
        "positions[0] if len(positions) == 4 else None",
        "None",
        "seam",
    ),
    Bug(
        "features of a layer go to the first tokens of images",
        "weft_integrations/transformers/seam.py",
        "_of_places",
        "features[layout.shard(numbers, {axis: 1})[local]]",
        "features[: int(local.sum())]",
        "seam",
    ),
    Bug(
        "an image's tokens see each other within a part of it",
        "weft_integrations/transformers/masks.py",
        "Blocks.prepared",
        "(of_q == of_k) & (of_q > 0) & (h >= 0)",
        "(of_q == of_k) & (of_q > 0) & (h >= 0) & (q // 7 == k // 7)",
        "seam transformers_images",
    ),
    Bug(
        "gradients of a tower on every rank are summed as well as averaged",
        "weft_integrations/transformers/seam.py",
        "_cut",
        "value = layout.shard(value, {axis: 1})",
        "value = layout.shard(value, {axis: 1})\n"
        "if value.is_floating_point() and value.requires_grad:\n"
        "    from weft.comm.collectives import scale_backward\n"
        "    value = scale_backward(value, float(layout.size(axis)))",
        "seam",
    ),
    Bug(
        "a call with images is computed by every rank",
        "weft_integrations/transformers/refused.py",
        "arguments",
        "images and not splits_inside",
        "images",
        "seam",
    ),
    # -- an encoder and a decoder
    Bug(
        "cross-attention leaves the encoder's padding out of its mask",
        "weft_integrations/transformers/interface.py",
        "_attend_across",
        "source.batch.mask",
        "None",
        "stacks",
    ),
    Bug(
        "a bias of distances counts a rank's queries from 0",
        "weft/attention.py",
        "tile_of_distances",
        "rows[:, None]",
        "torch.arange(len(rows))[:, None]",
        "stacks",
    ),
    Bug(
        "cross-attention is told by sizes",
        "weft_integrations/transformers/interface.py",
        "attend",
        "crosses(module)",
        "crosses(module) and key.shape[2] != query.shape[2]",
        "stacks",
    ),
    Bug(
        "an encoder runs in the call of its decoder",
        "weft_integrations/transformers/calls.py",
        "Calls.enter_encoder",
        "enter(during(source))",
        "None",
        "stacks",
    ),
    Bug(
        "layers of an encoder are computed again in the call of the decoder",
        "weft_integrations/transformers/calls.py",
        "Calls.enter_encoder",
        "enter(recomputed_within(encoder, lambda: during(source)))",
        "None",
        "stacks",
    ),
    Bug(
        "states of an encoder are made full rows of the decoder's length",
        "weft_integrations/transformers/rows.py",
        "Outputs._entry",
        "length = self.source",
        "pass",
        "stacks",
    ),
    Bug(
        "only eager attention takes the mean of tokens for padding",
        "weft_integrations/transformers/calls.py",
        "Calls.__init__",
        "eager or self.biases",
        "eager",
        "stacks",
    ),
    Bug(
        "logits of padding are read by labels alone",
        "weft_integrations/transformers/calls.py",
        "Calls._check_padding",
        'read or "the call has no labels, so that its logits are read"',
        "read",
        "stacks",
    ),
    Bug(
        "padding on the right always sees a token",
        "weft_integrations/transformers/batches.py",
        "sees_none",
        "counts - F.pad(counts, (window, 0))[:, : seen.shape[1]]",
        "counts",
        "rows",
    ),
    Bug(
        "layers of windows see padding as far as one key more",
        "weft_integrations/transformers/batches.py",
        "sees_none",
        "F.pad(counts, (window, 0))",
        "F.pad(counts, (window + 1, 0))",
        "rows",
    ),
    Bug(
        "a loss that leaves padding out by its mask is of padding, too",
        "weft_integrations/transformers/losses.py",
        "without_padding",
        "labels.masked_fill(mask.to(labels.device) == 0, IGNORED)",
        "labels",
        "seam",
    ),
    Bug(
        "convolved heads see nothing left of a piece",
        "weft_integrations/transformers/recurrent_modules.py",
        "convolved_heads",
        "min(columns, piece.start)",
        "0",
        "recurrences",
    ),
    Bug(
        "convolved heads of a row's first tokens see zeros for tokens",
        "weft_integrations/transformers/recurrent_modules.py",
        "convolved_heads",
        "min(columns, piece.start)",
        "columns",
        "recurrences",
    ),
    Bug(
        "towers attend by weft's attention",
        "weft_integrations/transformers/hooks.py",
        "_keep_towers",
        "config._attn_implementation = implementation",
        "pass",
        "seam",
    ),
    Bug(
        "features of another image",
        "weft_integrations/transformers/towers.py",
        "to_owners",
        "x = x[torch.cat(arriving).argsort().to(x.device)]",
        "x = x.flip(0)",
        "towers",
    ),
    Bug(
        "gradients of features on other ranks are dropped",
        "weft_integrations/transformers/towers.py",
        "_Exchange.backward",
        "_all_to_all(grad, *args)",
        "0 * _all_to_all(grad, *args)",
        "towers",
    ),
    Bug(
        "images are computed one after the other, far from their tokens",
        "weft_integrations/transformers/towers.py",
        "balanced",
        "best = min(range(len(work)), key=travelling)",
        "best = max(range(len(work)), key=travelling)",
        "towers",
    ),
    Bug(
        "a pooled output is a rank's own first state",
        "weft_integrations/transformers/whole.py",
        "_pools_first_state",
        "memory_of(pooled)[0] == memory_of(states)[0]",
        "False",
        "whole",
    ),
    Bug(
        "temperature of attention is by places in the chunk",
        "weft_integrations/transformers/whole.py",
        "CountsRow.arange",
        'call.layout.positions(call.axis, call.length, kwargs.get("device"))',
        "torch.arange(*args, **kwargs)",
        "whole",
    ),
    # -- losses
    Bug(
        "a sum's gradient is summed for a loss that all ranks compute",
        "weft/layout.py",
        "Layout.sum",
        "collectives.partial_to_invariant",
        "collectives.partial_to_replicate",
        "collectives",
    ),
    Bug(
        "a penalty of weights counts once per rank",
        "weft/layout.py",
        "Layout.once",
        "collectives.scale_backward(x, 1.0 / ranks) if ranks > 1 else x",
        "x",
        "collectives",
    ),
    Bug(
        "micro-batches are divided by this rank's labels",
        "weft/losses/labels.py",
        "num_items",
        "collectives.partial_to_invariant(count, layout.data_dims, layout.bound)",
        "count",
        "losses",
    ),
    Bug(
        "a cut vocabulary: this rank's words begin at 0",
        "weft/losses/head.py",
        "LossHead.label_columns",
        "labels - self.first",
        "labels",
        "losses",
    ),
    Bug(
        "a cut vocabulary: gradients of hidden states are not summed",
        "weft/losses/head.py",
        "LossHead.leave",
        'if self.same:\n    partial = self.transport.all_reduce(partial.contiguous(), self.same, "loss")',
        'if False:\n    partial = self.transport.all_reduce(partial.contiguous(), self.same, "loss")',
        "losses",
    ),
    Bug(
        "a head's gradient is added up in half precision",
        "weft/losses/head.py",
        "_backward",
        "torch.promote_types(weight.dtype, torch.float32)",
        "weight.dtype",
        "losses",
    ),
    # -- full rows of transformers models
    Bug(
        "full rows: labels shift within chunks",
        "weft_integrations/transformers/rows.py",
        "cut",
        'shift_labels(full["labels"])',
        'full["labels"]',
        "rows",
    ),
    Bug(
        "full rows: scalars enter without the factor",
        "weft_integrations/transformers/rows.py",
        "Outputs._tensor",
        "recorded(value, self.entered, factor(self.layout, self.axis))",
        "recorded(value, self.entered)",
        "rows",
    ),
    Bug(
        "full rows: a gradient of an input is a rank's part",
        "weft_integrations/transformers/rows.py",
        "with_full_gradients",
        "invariant_to_replicate(scale_backward(x, share), dims, layout.bound)",
        "x * 1",
        "rows",
    ),
    Bug(
        "full rows: a view of logits shares no memory with them",
        "weft_integrations/transformers/lazy.py",
        "_index",
        "_viewed(lazy(_Local.apply(rows), place, rows.stride()), rows, func, index)",
        "lazy(_Local.apply(rows), place, rows.stride())",
        "rows",
    ),
    Bug(
        "full rows: position ids are documents in encoders, too",
        "weft_integrations/transformers/masks.py",
        "looks_for_documents",
        "fn is hf.causal_mask_function",
        "fn in (hf.causal_mask_function, hf.bidirectional_mask_function)",
        "rows",
    ),
    Bug(
        "full rows: position ids are documents beside a cache, too",
        "weft_integrations/transformers/rows.py",
        "cut",
        "look and start_anew(kwargs)",
        "start_anew(kwargs)",
        "rows",
    ),
    Bug(
        "labels of a model's own cross-entropy are a rank's",
        "weft_integrations/transformers/losses.py",
        "_cross_entropy",
        "token_loss(logits, target, layout).to(logits.dtype)",
        "F.cross_entropy(logits, target)",
        "rows",
    ),
    Bug(
        "full rows: sync_gradients does not divide",
        "weft/gradients/sync.py",
        "sync",
        "local_tensor(p.grad).div_(ranks)",
        "pass",
        "rows",
    ),
    Bug(
        "full rows: FSDP2 sums",
        "weft/gradients/data_parallel.py",
        "data_parallel",
        "float(mesh.size()) if averaged else 1.0",
        "1.0",
        "rows",
    ),
    Bug(
        "full rows: chunks draw the same numbers",
        "weft_integrations/transformers/noise.py",
        "own_random_numbers",
        "number + layout.chunk(axis)",
        "number",
        "rows",
    ),
    Bug(
        "full rows: NEFTune's noise is of a chunk",
        "weft_integrations/transformers/noise.py",
        "neftune_scaled",
        "alpha * share**0.5",
        "alpha",
        "rows",
    ),
    Bug(
        "full rows: weights are not compared",
        "weft_integrations/transformers/consistency.py",
        "_of",
        "[next(left) for _ in heads]",
        "[next(left) for _ in heads][:0]",
        "rows",
    ),
    Bug(
        "full rows: a call that a GPU makes hands out outputs that nobody compared",
        "weft_integrations/transformers/calls.py",
        "leave",
        "output is not None and call.conclude is not None",
        "False",
        "transformers_consistency",
    ),
    Bug(
        "full rows: gradients are compared in no backward pass",
        "weft_integrations/transformers/consistency.py",
        "Entered.record",
        "self.compare(self.take(number))",
        "self.take(number)",
        "transformers_consistency",
    ),
    Bug(
        "full rows: gradients of a pass that failed are compared in the next",
        "weft_integrations/transformers/consistency.py",
        "Entered.record",
        "backward_pass()",
        "0",
        "transformers_consistency",
    ),
    Bug(
        "full rows: a GPU is waited for before the call is launched",
        "weft_integrations/transformers/calls.py",
        "Calls.enter",
        "compared.ahead",
        "False",
        "fake_gpu",
    ),
    Bug(
        "full rows: a mask of padding is taken for empty and never looked at",
        "weft_integrations/transformers/calls.py",
        "Calls._conclude",
        "call.check_masks()",
        "None",
        "transformers_consistency",
    ),
    Bug(
        "full rows: the last token of generate is compared by no rank",
        "weft_integrations/transformers/generation.py",
        "generate",
        "_agree(self, result, name)",
        "None",
        "transformers_consistency",
    ),
    Bug(
        "full rows: entering gradients are not recorded",
        "weft_integrations/transformers/lazy.py",
        "LazyPlace.gather",
        "recorded(rows, self.entered)",
        "rows",
        "rows",
    ),
    Bug(
        "lazy logits: a window begins at the first token",
        "weft_integrations/transformers/lazy.py",
        "LazyPlace.part",
        "(self.start, self.length - self.stop)",
        "(0, self.length - self.stop + self.start)",
        "rows",
    ),
    Bug(
        "lazy logits: what a window leaves out has a label",
        "weft_integrations/transformers/lazy.py",
        "_cross_entropy",
        "place.part(target, ignore_index)",
        "place.part(target, 0)",
        "rows",
    ),
    Bug(
        "full rows: recomputed layers of a replicated call are split",
        "weft_integrations/transformers/replicated.py",
        "own_attention",
        "lambda: _implementations(local)",
        "contextlib.nullcontext",
        "rows",
    ),
    # -- keys by halo
    Bug(
        "keys of a halo are taken in the fewest spans",
        "weft/plan/resharding.py",
        "Resharding.entry",
        "interleaved((*base.spans, *self.received(coords)))",
        "ascending((*base.spans, *self.received(coords)))",
        "seen",
    ),
    Bug(
        "a gradient of what other ranks sent is a constant",
        "weft/comm/once_differentiable.py",
        "once.decorate.run",
        "() if linear else (torch.empty(0, requires_grad=True),)",
        "()",
        "calls_of_users",
    ),
    Bug(
        "a halo of keys is one short",
        "weft/plan/seen.py",
        "_foreign",
        "max(low, start)",
        "max(low + 1, start)",
        "seen",
    ),
    Bug(
        "gradients of keys that came stay where they are",
        "weft/runtime/resharding.py",
        "with_seen_adjoint",
        'collect_together(came, owned, (2,), move, transport, dtype, "dkv")',
        "owned",
        "seen",
    ),
    Bug(
        "keys come that another rank's queries see",
        "weft/plan/seen.py",
        "SeenKeys.wanted",
        "[self._intervals(place) for place in group]",
        "[self._intervals(coords) for place in group]",
        "seen",
    ),
    Bug(
        "queries that travel are forgotten by a halo of keys",
        "weft/plan/seen.py",
        "SeenKeys._seen_under",
        "places(self.sizes, self.travelling, coords)",
        "[coords]",
        "seen",
    ),
    Bug(
        "a halo's keys are counted by the chunk",
        "weft/plan/memory.py",
        "seen_bytes",
        "count(plan.seen.spans(plan.coords))",
        "count(plan.compute.key.spans)",
        "seen",
    ),
    Bug(
        "a halo is predicted without its values",
        "weft/plan/predict.py",
        "_seen",
        "sum(plan.problem.dims(Side.KEY))",
        "plan.problem.dims(Side.KEY)[0]",
        "seen",
    ),
    Bug(
        "a halo's gradients are predicted as its keys",
        "weft/plan/predict.py",
        "_backward",
        '_seen(after, plan, "dkv", adjoint=True)',
        '_seen(after, plan, "dkv")',
        "seen",
    ),
    Bug(
        "keys come by halo however many they are",
        "weft/plan/seen.py",
        "SeenKeys.pays",
        "fewer and most <= 2 * largest",
        "fewer",
        "seen",
    ),
    Bug(
        "a backward pass has the keys without those that came",
        "weft/runtime/ops.py",
        "_setup_attention",
        "t if t.dim() > 1 else rest",
        "t if t.dim() > 4 else rest",
        "seen",
    ),
    Bug(
        "a proof allows queries that lack keys",
        "weft/proof/takes.py",
        "_lacking",
        "not np.array_equal(here, every)",
        "(here > every).any()",
        "seen",
    ),
    # -- decoding
    Bug(
        "a decoded key stays with ranks before its own, too",
        "weft/decode/owners.py",
        "_in_blocks",
        "(offsets // block) % parts == part",
        "(offsets // block) % parts >= part",
        "decode_cache",
    ),
    Bug(
        "every rank keeps every decoded key",
        "weft_models/models/decode_cache.py",
        "DecodeCache.begin",
        "self.held.next_positions(self.part, self.new)",
        "torch.arange(self.new)",
        "decode_cache",
    ),
    Bug(
        "a decoded token is turned by the angle of the one after",
        "weft/nn/attention.py",
        "MultiAxisAttention.decode",
        "torch.arange",
        "1 + torch.arange",
        "decode_cache",
    ),
    Bug(
        "queries that follow kept keys are turned as the first",
        "weft/nn/geometry.py",
        "Geometry.angles",
        "here + (first or {}).get(name, 0)",
        "here",
        "nn",
    ),
    Bug(
        "a decoded token sees all keys through a window",
        "weft_models/models/decode_cache.py",
        "DecodeCache._attend",
        "not mask.is_full((first, last), (0, last))",
        "self.new > 1",
        "decode_cache",
    ),
    Bug(
        "samples are drawn for rows of one rank alone, decoding",
        "weft_models/models/sampling.py",
        "Sampling.next_tokens",
        "drawn[local.to(device)]",
        "drawn[: len(local)]",
        "decode_cache",
    ),
    Bug(
        "ranks do not compare the last token",
        "weft_models/models/token_pair.py",
        "TokenModel.generate",
        "cache.agree(ids)",
        "pass",
        "decode_cache",
    ),
    Bug(
        "the last chunk of a prompt is taken for its last token",
        "weft_models/models/decode_cache.py",
        "DecodeCache.last",
        "self.new - 1",
        "self.layout.positions(self.axis, self.new, x.device).max()",
        "decode_cache",
    ),
    # -- kernels
    Bug(
        "soft cap: its slope is left out",
        "weft/kernels/math.py",
        "_scores",
        "1 - bent.square()",
        "None",
        "kernels attention",
    ),
    Bug(
        "grouped heads: gradients of the last of a group",
        "weft/kernels/math.py",
        "_fold",
        "t.unflatten(1, (groups, -1)).sum(2)",
        "t.unflatten(1, (groups, -1))[:, :, -1]",
        "kernels attention",
    ),
    Bug(
        "causal rows counted from the block",
        "weft/kernels/math.py",
        "_scores",
        "torch.arange(rows.start, rows.stop, device=q.device)",
        "torch.arange(rows.stop - rows.start, device=q.device)",
        "kernels",
    ),
    Bug(
        "hidden rows keep the kernel's logsumexp of 0",
        "weft/kernels/cpu_flash.py",
        "CpuFlash.run_forward",
        'lse = lse.masked_fill(~seen, float("-inf"))',
        "pass",
        "kernels attention",
    ),
    Bug(
        "a logsumexp of 0 is taken for plain",
        "weft/kernels/cpu_flash.py",
        "CpuFlash.differentiable",
        "both if _without_zeros(both[1]) else None",
        "both",
        "calls",
    ),
    Bug(
        "a bias is cast to the input's dtype",
        "weft/kernels/cpu_flash.py",
        "_float_mask",
        "accumulate_dtype(q.dtype)",
        "q.dtype",
        "bias precision kernels",
    ),
    Bug(
        "the surrogate ignores delta where out is missing",
        "weft/kernels/flash.py",
        "FlashKernel.backward",
        "surrogate_out(dout, delta)",
        "torch.zeros_like(dout)",
        "kernels attention",
    ),
    Bug(
        "a negative scale loses its sign in dq",
        "weft/kernels/flash.py",
        "FlashKernel.backward",
        "dq * sign, dk, dv, ds",
        "dq, *others",
        "kernels attention",
    ),
    # -- predictions
    Bug(
        "explain counts keys by query heads",
        "weft/plan/memory.py",
        "payload_shapes",
        "plan.compute[payload.side]",
        "plan.compute.query",
        "traffic call_plan",
    ),
    Bug(
        "explain forgets the logsumexp of queries in the backward pass",
        "weft/plan/program.py",
        "Payload.tensors",
        "row, row, (d, dtype), (e, dtype)",
        "row, (d, dtype), (e, dtype)",
        "traffic call_plan",
    ),
    Bug(
        "sent and received bytes are swapped",
        "weft/plan/predict.py",
        "Prediction.traffic",
        "for part in (self.before, self.program, self.after):\n    whole.received.update(part.received)\n    whole.sent.update(part.sent)\n    whole.calls.update(part.calls)",
        "for part in (self.before, self.program, self.after):\n    whole.received.update(part.sent)\n    whole.sent.update(part.received)\n    whole.calls.update(part.calls)",
        "traffic call_plan",
    ),
    # -- files
    Bug(
        "each rank hashes one file only",
        "weft/checkpoint/same_files.py",
        "agreed_index",
        "sorted(found[0].files)[place::count]",
        "sorted(found[0].files)[place : place + 1]",
        "cache same_files",
    ),
    Bug(
        "a file's digest is not compared",
        "weft/checkpoint/folder.py",
        "verify_folder",
        "_hash(file) != written.sha256",
        "len(_hash(file)) != len(written.sha256)",
        "cache storage checkpoint",
    ),
    Bug(
        "an index does not cover its own text",
        "weft/checkpoint/folder.py",
        "read_index",
        'document["sha256"] != _text_hash(text.partition(\',"index":\')[2][:-1])',
        'not document["sha256"] and _text_hash(text.partition(\',"index":\')[2][:-1])',
        "cache checkpoint",
    ),
    Bug(
        "blocks may overlap",
        "weft/checkpoint/folder.py",
        "Stored._check",
        "not _make_up(self.blocks, self.shape)",
        "numbers != math.prod(self.shape)",
        "storage",
    ),
    Bug(
        "a block may be in a file that is not listed",
        "weft/checkpoint/folder.py",
        "Index._check",
        "block.file not in room",
        "block.file not in room and not room.setdefault(block.file, 1 << 60)",
        "storage",
    ),
    Bug(
        "a pickle is executed before a weights file is refused",
        "weft_models/models/pretrained.py",
        "pretrained_spec",
        "path = _path(name_or_path)",
        "path = _path(name_or_path)\ntry:\n    torch.load(path, weights_only=False)\nexcept Exception:\n    pass",
        "storage",
    ),
    Bug(
        "weights that are not finite are taken",
        "weft_models/models/pretrained.py",
        "_fill",
        "local.isfinite().all",
        "local.numel",
        "storage",
    ),
    Bug(
        "replicated state is compared with its own rank",
        "weft/checkpoint/replicated.py",
        "refuse_differing",
        "other[:2]",
        "value[:2]",
        "checkpoint",
    ),
    Bug(
        "a stored block is read at another rank's offset",
        "weft/checkpoint/folder.py",
        "read_into",
        "(slice(lo - a, hi - a) for (lo, hi), a in zip(spans, block.start))",
        "(slice(lo - c, hi - c) for (lo, hi), c in zip(spans, start))",
        "checkpoint storage",
    ),
    Bug(
        "a cache's blocks forget the chunks before them",
        "weft_models/models/cache_folder.py",
        "write_cache",
        "place.chunks(i, length)[: place.chunk(i, layout.coords)]",
        "place.chunks(i, length)[:0]",
        "cache",
    ),
    Bug(
        "a late step overwrites a newer one",
        "weft/launch/trace.py",
        "TraceStep._write",
        "self.trace.steps - count < STEPS",
        "count",
        "blackbox",
    ),
    Bug(
        "a terminal gets the escapes of a file",
        "weft/_terminal.py",
        "Terminal.render_str",
        "printable(text)",
        "text",
        "terminal",
    ),
    # -- GPUs
    Bug(
        "cuDNN computes calls of one query",
        "weft/kernels/cudnn.py",
        "_one_row",
        "1 in (q.shape[2], k.shape[2])",
        "k.shape[2] == 1",
        "kernels_cuda",
    ),
    Bug(
        "packed documents go to cuDNN",
        "weft/kernels/__init__.py",
        "",
        '("flash-attn", "cuda-flash", "cudnn", "flex", "math")',
        '("flash-attn", "cudnn", "cuda-flash", "flex", "math")',
        "kernels_cuda",
    ),
    Bug(
        "an index is brought to the GPU in every call",
        "weft/runtime/resharding.py",
        "sort_index",
        "cached(128)",
        "lambda function: function",
        "packing fake_gpu",
    ),
    Bug(
        "ranks' first agreement is looked at a pass later",
        "weft/comm/channel.py",
        "Channel.__init__",
        "kind is not None and transport.agreed_before(kind)",
        "kind is not None",
        "calls meeting",
    ),
    Bug(
        "FlashAttention is asked for deterministic gradients that it refuses",
        "weft/kernels/flash_attn.py",
        "FlashAttn.backward",
        "load().deterministic",
        "256",
        "kernels_cuda",
    ),
    Bug(
        "a broken package ends the choice of a kernel",
        "weft/kernels/flash_attn.py",
        "_load",
        "Exception",
        "ImportError",
        "kernels_cuda",
    ),
    Bug(
        "ranks that share a GPU are not noticed",
        "weft/comm/world.py",
        "refuse_shared_gpu",
        "sharing > 1",
        "sharing > 2",
        "world",
    ),
    Bug(
        "q, k and v: parts of an exchange come in the order of tensors",
        "weft/plan/exchange.py",
        "_arrived",
        "strides.insert(item.joined, width)",
        "strides.insert(item.joined, math.prod(rest))",
        "launches",
    ),
    Bug(
        "predictions count an exchange per tensor",
        "weft/plan/predict.py",
        "_all_to_alls",
        "size - 1",
        "len(items) * (size - 1)",
        "plan_predict",
    ),
    Bug(
        "learned routing reads the choice twice",
        "weft_models/routing/attention.py",
        "_Run.__call__",
        "routes.slots_of(choice, local, self.routing.top_k)",
        "routes.slots_of(chosen.cpu(), local, self.routing.top_k)",
        "fake_gpu",
    ),
    # -- chosen keys: lists, fetches
    Bug(
        "lists merge ties in the order of ranks",
        "weft/declare/placements.py",
        "merge_top_k",
        "positions.argsort(dim=-1, stable=True)",
        "torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)",
        "placements choosing",
    ),
    Bug(
        "lists are judged by the ties of torch.topk",
        "weft/declare/placements.py",
        "merge_top_k",
        "scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]",
        "scores.topk(count, dim=-1).indices",
        "placements choosing",
    ),
    Bug(
        "-0.0 is below 0.0 in a list",
        "weft/declare/placements.py",
        "merge_top_k",
        "scores + 0.0",
        "torch.where(scores.eq(0) & scores.signbit(), -1e-300, scores)",
        "placements choosing",
    ),
    Bug(
        "ranks choose among their own keys only",
        "weft/choosing.py",
        "_lists",
        "_merged(plan, transport, scores, places) if plan.lists else (scores, places)",
        "(scores[:, : count(plan.own_queries(plan.coords))],"
        " places[:, : count(plan.own_queries(plan.coords))])",
        "choosing",
    ),
    Bug(
        "rows of scores are not in global order",
        "weft/choosing.py",
        "_lists",
        "keys.argsort()",
        "torch.arange(len(keys), device=keys.device)",
        "choosing",
    ),
    Bug(
        "an outer link carries lists that are not merged",
        "weft/plan/lists.py",
        "ListPlan.returns",
        "reversed(self.lists)",
        "self.lists",
        "choosing",
    ),
    Bug(
        "a NaN among scores is no matter",
        "weft/choosing.py",
        "choose",
        "bool(scores.isnan().any())",
        "False",
        "choosing",
    ),
    Bug(
        "chosen latents are expanded for all heads beside Ulysses",
        "weft/fetching/attend.py",
        "attend_fetched",
        "(picked(t, heads) for t in expand(k, v))",
        "expand(k, v)",
        "fetching",
    ),
    Bug(
        "an error of a pass before counts as a pass",
        "weft/comm/channel.py",
        "Channel.__init__",
        "transport.check_deferred()",
        "(transport.next_pass(self.mesh_dims), transport.check_deferred())",
        "transformers_consistency",
    ),
    Bug(
        "every query sees all that was fetched",
        "weft/fetching/attend.py",
        "_attended.seen",
        "bits.scatter_(-1, at.clamp_max(width), True)",
        "bits.fill_(True)",
        "fetching",
    ),
    Bug(
        "chosen blocks are attended by queries that chose others",
        "weft/fetching/attend.py",
        "_attended.seen",
        "bits.gather(-1, of_slots.clamp_max(width)[:, :, None].expand(*part.shape[:3], -1))",
        "bits[..., :width].any(2, keepdim=True).expand(-1, -1, part.shape[2], -1)",
        "fetching",
    ),
    Bug(
        "gradients of fetched keys are not sent back",
        "weft/fetching/fetch.py",
        "Fetch.backward",
        "reversed(route.steps)",
        "()",
        "fetching routing",
    ),
    Bug(
        "chosen keys travel that the mask hides",
        "weft/fetching/attend.py",
        "_visible",
        "torch.where(seen.expand_as(part), part, -1)",
        "part",
        "fetching",
    ),
    Bug(
        "bounds forget that queries may agree",
        "weft/fetching/bounds.py",
        "_tokens",
        "int(missing.max())",
        "int(missing.sum())",
        "fetching",
    ),
    # -- the clock of links
    Bug(
        "bytes of a level are those of the last message",
        "weft/plan/clock.py",
        "Network._move",
        "self.sent[level] += nbytes",
        "self.sent[level] = nbytes",
        "flow papers",
    ),
    Bug(
        "small messages reach a link's full rate",
        "weft/plan/clock.py",
        "Network._move.begin",
        "nbytes + half",
        "nbytes",
        "flow rates",
    ),
    Bug(
        "works that share a link each have all of it",
        "weft/plan/clock.py",
        "Clock._share",
        "left[r] - share",
        "left[r]",
        "flow",
    ),
    Bug(
        "of layouts as fast as each other the first comes first",
        "weft_planner/search.py",
        "Search.run",
        "sorted((c for c in result if self._seconds(c) <= limit), key=self._burden)",
        "[c for c in result if self._seconds(c) <= limit]",
        "search",
    ),
    Bug(
        "the gap that ends a search also chooses",
        "weft_planner/search.py",
        "Search.run",
        "(1 + min(gap, SAME)) * self._seconds(result[0])",
        "(1 + gap) * self._seconds(result[0])",
        "search",
    ),
    Bug(
        "a transformers model is offered split heads",
        "weft_planner/choices.py",
        "",
        "BINDABLE = ('ring', 'gather', 'burst', 'seen', 'pass_q', 'ulysses')",
        "BINDABLE = ('ring', 'gather', 'burst', 'seen', 'pass_q', 'ulysses', 'tp')",
        "groups",
    ),
    Bug(
        "a layout may take twice the memory",
        "weft_planner/search.py",
        "Search._choice",
        "self._fits(memory)",
        "self._fits(memory / 2)",
        "search",
    ),
    Bug(
        "no gap is left by candidates that nobody replayed",
        "weft_planner/search.py",
        "Search.run",
        "max(0.0, 1 - min(unseen, default=math.inf) / self._best())",
        "0.0",
        "search",
    ),
    Bug(
        "gradients take no memory",
        "weft_planner/search.py",
        "call_memory",
        "forecast_of(plan).rest_bytes * (1 if forward_only else 2)",
        "forecast_of(plan).rest_bytes",
        "search",
    ),
    # -- counted steps of transformers models
    Bug(
        "outputs are remembered whatever the strides of inputs",
        "weft_planner/meta_outputs.py",
        "_key",
        "value.shape, value.stride(), value.dtype",
        "value.shape, value.dtype",
        "meta_outputs",
    ),
    Bug(
        "a number and a truth are the same argument",
        "weft_planner/meta_outputs.py",
        "_key",
        "kind, value",
        "value",
        "meta_outputs",
    ),
    Bug(
        "views are remembered as new memory",
        "weft_planner/meta_outputs.py",
        "_is_pure",
        "name not in _VIEWS",
        "True",
        "meta_outputs",
    ),
    Bug(
        "weights are counted as activations",
        "weft_planner/live.py",
        "Live.__init__",
        "{memory_of(local_tensor(t))[0] for t in ignored}",
        "set()",
        "hf_step live",
    ),
    Bug(
        "layers that are recomputed keep all that they compute",
        "weft_planner/hf_step.py",
        "place",
        "(enable or model.gradient_checkpointing_enable)({'use_reentrant': False})",
        "pass",
        "hf_step",
    ),
    Bug(
        "loops over tokens are counted as kernels",
        "weft_integrations/transformers/shapes.py",
        "by_shapes",
        "None if _as_written.get() else SHAPES.get(name)",
        "SHAPES.get(name)",
        "hf_step",
    ),
    Bug(
        "logits in fp32 take no memory",
        "weft_planner/live.py",
        "Live._see",
        "not nbytes",
        "not nbytes or 'softmax' in name",
        "hf_step",
    ),
    # -- losses
    Bug(
        "labels of a later token cross the seam of two documents",
        "weft/losses/labels.py",
        "shift_labels",
        "token + step",
        "token + 1",
        "losses",
    ),
    Bug(
        "rows of logits that are all -inf are not a number",
        "weft/losses/head.py",
        "_of_logits",
        "peak.masked_fill(peak == -torch.inf, 0.0)",
        "peak + 0.0",
        "losses",
    ),
    Bug(
        "tokens of other ranks get this rank's numbers",
        "weft/losses/head.py",
        "LossHead.take",
        "chunk[:, index * self.own :][:, :tokens]",
        "chunk[:, :tokens]",
        "losses",
    ),
    Bug(
        "the label after the last word is taken",
        "weft/losses/call.py",
        "_check_shares",
        "share.highest >= words",
        "share.highest > words",
        "losses",
    ),
    # -- decoding
    Bug(
        "a part keeps positions that were cropped",
        "weft/decode/owners.py",
        "_positions",
        "local[local < run.stop]",
        "local",
        "generation decode_cache",
    ),
    Bug(
        "blocks of decoded tokens begin with rank 0",
        "weft/decode/owners.py",
        "_in_blocks",
        "torch.arange(first, first + count)",
        "torch.arange(count)",
        "generation decode_cache",
    ),
    Bug(
        "the past of a chunk has the chunk",
        "weft_integrations/transformers/cache_layers.py",
        "ShardedLayer.update",
        "self.keys[:, :, :before], self.values[:, :, :before]",
        "self.keys, self.values",
        "generation decode_cache",
    ),
    # -- folders of checkpoints
    Bug(
        "files of an earlier save stay",
        "weft/checkpoint/folder.py",
        "commit",
        "old.name not in index.files",
        "not index.files",
        "checkpoint storage",
    ),
    Bug(
        "a block is read from where its part begins",
        "weft/checkpoint/folder.py",
        "read_into",
        "max(a, c)",
        "c",
        "checkpoint storage",
    ),
    Bug(
        "files that do not hold their blocks are taken",
        "weft/checkpoint/folder.py",
        "Index._check",
        "room[block.file] < 0",
        "room[block.file] < -(2**40)",
        "checkpoint storage",
    ),
    Bug(
        "replicated weights that differ are saved",
        "weft/checkpoint/replicated.py",
        "refuse_differing",
        "len({*everywhere(layout, lambda: text)}) == 1",
        "everywhere(layout, lambda: text)",
        "checkpoint storage",
    ),
    # -- recurrent layers
    Bug(
        "Mamba-1 decays by the mean over its tokens",
        "weft_integrations/transformers/recurrences.py",
        "mamba1.carried",
        "step.sum",
        "step.mean",
        "recurrences",
    ),
    Bug(
        "an order with a fragment for every token is taken",
        "weft/carry/fragments.py",
        "fragments",
        "most > MOST_FRAGMENTS",
        "most > 2**30",
        "carry",
    ),
    Bug(
        "a state of several groups of heads is one message",
        "weft/carry/fragments.py",
        "ChainExchange.rounds",
        "[PlannedMessage(*peer, nbytes, sends) for nbytes in self.nbytes]",
        "[PlannedMessage(*peer, sum(self.nbytes), sends)]",
        "carry symbolic",
    ),
    # -- windows and fields
    Bug(
        "the gradient of a copy overwrites that of the owner",
        "weft/relayout/fetch.py",
        "collect_together.add",
        "total[overlap.taken_slices] += part",
        "total[overlap.taken_slices] = part",
        "windows fields redistribute",
    ),
    Bug(
        "gradients of a halo stay where they are",
        "weft/relayout/fetch.py",
        "collect_together",
        "[p for side in step.sends for p in side if p.source == plan.rank]",
        "[]",
        "windows fields redistribute",
    ),
    Bug(
        "a halo comes from the next rank alone",
        "weft/relayout/windows.py",
        "_overlaps",
        "sorted(taken.items())",
        "[(k, v) for k, v in sorted(taken.items()) if abs(k[0] - k[1]) < 2]",
        "windows fields",
    ),
    Bug(
        "windows with a stride are counted from the chunk's own start",
        "weft/fields/windows.py",
        "windowed",
        "window.ranges(edges)",
        "tuple((s + window.first, s + window.first + (b - a - 1) * window.stride + window.extent)"
        " if b > a else (0, 0) for s, a, b in zip(chunks.starts, edges, edges[1:]))",
        "fields",
    ),
    Bug(
        "corners of a box are zeros",
        "weft/fields/windows.py",
        "windowed",
        "joined_box(t, strips[-1:])",
        "joined_box(t, [strips[-1]._replace(before=strips[-1].before * 0,"
        " after=strips[-1].after * 0)])",
        "fields",
    ),
    Bug(
        "a variance is the mean of squares less the square of the mean",
        "weft/fields/norms.py",
        "merged_moments",
        "sum(squares + n * (part - mean).square() for n, part, squares in parts)",
        "sum(squares + n * part.square() for n, part, squares in parts) - total * mean.square()",
        "fields",
    ),
    Bug(
        "windows of a view are cut in place",
        "weft/fields/views.py",
        "_Regrouping._divide",
        "rechunked(t, d + self.place, chunks, nearest, region)",
        "(t.index_select(d + self.place, torch.arange(nearest[(c := region.layout.chunk("
        "chunks.axis)) + 1] - nearest[c]) % max(t.shape[d + self.place], 1)),"
        " Chunks(chunks.axis, tuple(nearest)))",
        "fields",
    ),
    Bug(
        "attention over an image sees a rank's own keys alone",
        "weft/fields/attention.py",
        "_over_split",
        "attention(q, k, v, region.layout, axes, mask, scale, lengths, bias=bias)",
        "F.scaled_dot_product_attention(q, k, v, scale=scale)",
        "fields",
    ),
    Bug(
        "windows of patches are centred on one position",
        "weft/nn/windows.py",
        "_pads_of",
        "max(extent - stride, 0) // 2",
        "(extent - 1) // 2",
        "nn_windows",
    ),
    Bug(
        "a mean counts positions beyond the end",
        "weft/nn/windows.py",
        "Pool._run",
        "y / share.to(y.dtype)",
        "y",
        "nn_windows",
    ),
    Bug(
        "outputs of a stride stay with the ranks of their middles",
        "weft/nn/windows.py",
        "OverAxes._turned",
        "y.rechunked().to_local()",
        "y.to_local()",
        "nn_windows",
    ),
    Bug(
        "later blocks know the lengths before a stride",
        "weft_models/models/trunk.py",
        "Trunk.forward",
        "_after(block, given)",
        "given",
        "nn_windows",
    ),
    Bug(
        "resampling back multiplies instead",
        "weft/nn/windows.py",
        "Resample._run",
        "{**self.lengths_after(lengths), **(to or {})}",
        "self.lengths_after(lengths)",
        "nn_windows",
    ),
    Bug(
        "every rank pads its own chunk with zeros",
        "weft/relayout/windows.py",
        "plan_ranges",
        "bordered(low, low + part.before, starts[-1], border)",
        "(nothing(part.before),)",
        "windows fields",
    ),
    Bug(
        "a circular border is zeros",
        "weft/relayout/windows.py",
        "bordered",
        "Span(part.start % length if n else 0, n, 1)",
        "nothing(n)",
        "windows fields",
    ),
    Bug(
        "windows of a chunk begin one position to the right",
        "weft/relayout/windows.py",
        "Windows.seen",
        "self.first + low * self.stride",
        "self.first + low * self.stride + (low > 0)",
        "windows fields",
    ),
    Bug(
        "a norm takes the mean of means of uneven chunks",
        "weft/fields/norms.py",
        "merged_moments",
        "n / total * part",
        "part / len(parts)",
        "fields",
    ),
    Bug(
        "squares about the means of chunks add up as if the means were one",
        "weft/fields/norms.py",
        "merged_moments",
        "squares + n * (part - mean).square()",
        "squares",
        "fields",
    ),
    Bug(
        "the gradient of a norm knows its own chunk alone",
        "weft/fields/norms.py",
        "_Normalize.backward",
        'summed(torch.stack(sums), of_dims, ctx.region, "dmoments")',
        "torch.stack(sums)",
        "fields",
    ),
    Bug(
        "moments of bf16 are computed in bf16",
        "weft/fields/norms.py",
        "merged_moments",
        "t.to(accumulate_dtype(t.dtype))",
        "t",
        "fields",
    ),
    Bug(
        "a group norm is that of each rank's chunk",
        "weft/fields/norms.py",
        "group_norm",
        "not any(map(is_split_dim, x._dims[2:]))",
        "True",
        "fields",
    ),
    Bug(
        "a max pool is padded by zeros",
        "weft/fields/windows.py",
        "_pool.pool",
        'float("-inf")',
        "0.0",
        "fields",
    ),
    Bug(
        "a roll stays within each rank",
        "weft/fields/windows.py",
        "roll",
        "not is_split_dim(x._dims[d])",
        "True",
        "fields",
    ),
    Bug(
        "a loss of fields counts once per copy",
        "weft/fields/exchange.py",
        "_Full.backward",
        "grad / copies",
        "grad * 1",
        "fields",
    ),
    Bug(
        "dropout of a field passes while training",
        "weft/fields/rules.py",
        "_dropped.dropout",
        "training and p > 0",
        "False",
        "fields",
    ),
    Bug(
        "a field that an autograd function returned is taken",
        "weft/fields/rules.py",
        "_check",
        "_GRAPH(field) is not None",
        "False",
        "fields",
    ),
    Bug(
        "tiles of a VAE are cut beside a split",
        "weft_integrations/fields.py",
        "_Calls._refuse_state",
        "getattr(self.model, flag, False)",
        "False",
        "fields",
    ),
    # -- words and commands
    Bug(
        "weft check passes if the last case does",
        "weft_cli/commands/check.py",
        "_prove",
        "good and all(claim.ok for claim in claims)",
        "all(claim.ok for claim in claims)",
        "cli symbolic",
    ),
    Bug(
        "weft check does not look at gradients",
        "weft_cli/commands/check.py",
        "_show",
        "(c.ok for compared in comparisons for c in compared)",
        "(c.ok for compared in comparisons for c in compared[:2])",
        "cli",
    ),
)


class Place(NamedTuple):
    """The source of a bug's file, and the part of it, in bytes, that the bug replaces."""

    path: Path
    source: bytes
    start: int
    end: int
    indent: int

    def planted(self, new: str) -> bytes:
        """The source with the part replaced."""
        text = new.replace("\n", "\n" + " " * self.indent)
        return self.source[: self.start] + text.encode() + self.source[self.end :]


def found(bug: Bug, src: Path) -> list[Place]:
    """All places of a bug in its function: one, if the anchor is good.

    >>> place, = found(BUGS[0], ROOT / "src")
    >>> place.source[place.start:place.end].decode() == BUGS[0].old
    True
    """
    files = [src / bug.file] if (src / bug.file).is_file() else []
    for path in (*files, *(f for f in sorted(src.rglob("*.py")) if f not in files)):
        for scope in _scopes(path).get(bug.function, ()):
            places = list(_places(bug, path, scope))
            if places or (path in files and bug.function):
                return places
        if path in files and not bug.function:
            return []
    return []


@functools.lru_cache(512)
def _scopes(path: Path) -> dict[str, list[ast.AST]]:
    """Functions and classes of a file by their qualified names, and the module itself."""
    tree = ast.parse(path.read_bytes())
    scopes: dict[str, list[ast.AST]] = {"": [tree]}

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
                scopes.setdefault(".".join(inner), []).append(child)
            walk(child, inner)

    walk(tree, ())
    return scopes


def _places(bug: Bug, path: Path, scope: ast.AST) -> Iterator[Place]:
    (old,) = ast.parse(bug.old).body
    wanted = _comparable(old.value if isinstance(old, ast.Expr) else old)
    source = path.read_bytes()
    lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    for node in ast.walk(scope):
        if isinstance(node, ast.expr | ast.stmt) and _comparable(node) == wanted:
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            yield Place(path, source, start, end, node.col_offset * isinstance(node, ast.stmt))


def _comparable(node: ast.AST) -> str:
    """A node without its place, whether it is read or assigned to."""
    return re.sub(r"ctx=(Load|Store|Del)\(\)", "", ast.dump(node))


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
    options += ["-m", "slow or not slow" if "::" in tests[0] else "not slow or few"]
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
        places = found(bug, copy / "src")
        if len(places) != 1:
            return f"not planted: {bug.old!r} stands {len(places)} times in {bug.function}"
        places[0].path.write_bytes(places[0].planted(bug.new))
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

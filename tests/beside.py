"""A function of torch on fields, beside the same function on whole tensors: one verdict per case.

A case is a function, its arguments, and for every tensor in them the dims that are split. It runs
once on one device and once per rank, with ranks that take turns (`seeded.py`), so that a rank that
waits for nothing is an error at once. Then values, shapes, dtypes, every gradient, the arguments
after the call and errors are compared, and writes into results that share storage on either side.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from seeded import run_seeded
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft import Field, Layout, UnsupportedError
from weft.errors import RankError

#: The grids of ranks, height by width.
GRIDS = ("2x2", "3x1", "1x5")
#: Verdicts that no case may get.
FAULTS = ("CRASH", "WRONG")
#: What sums in another order differ by, relative to the largest entry.
ROUNDS = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.01}
#: axis -> dim of one tensor.
Where = Mapping[str, int]


class Verdict(NamedTuple):
    """exact | both raise | refused | random | no field | CRASH | WRONG, and what was seen."""

    kind: str
    note: str = ""


@dataclass
class Run:
    """What one run gave: leaves of the result, gradients, arguments afterwards, or its error.

    Attributes:
        shares: whether a result shares storage with an argument.
        fields: whether a result is a field.
    """

    results: list[Any]
    grads: list[Tensor | None]
    after: list[Tensor]
    shares: bool = False
    fields: bool = False
    error: Exception | None = None


def grid(text: str) -> Layout:
    """The layout of height by width ranks, such as `2x2`; `z2x2` and `s2x2` are in other orders.

    >>> dict(grid("3x1").mesh)
    {'height_gather': 3}
    """
    order = {"z": "(zigzag)", "s": "(striped)"}.get(text[0], "")
    text = text.lstrip("zs")
    sizes = dict(zip(("height", "width"), map(int, text.split("x"))))
    return Layout.parse(
        "; ".join(f"{a}{order}: gather={n}" if n > 1 else f"{a}: local" for a, n in sizes.items())
    )


def drawn(
    rng: random.Random, tensors: Sequence[Tensor], layout: Layout, first: int = 1
) -> list[Where]:
    """Split dims for tensors of which the first few are the input: mostly alike, at times mixed."""
    for _ in range(9):
        mode, front = rng.choice(("input", "input", "all", "all", "mixed")), rng.random() < 0.4
        where = [_where(rng, t, mode, front, i < first) for i, t in enumerate(tensors)]
        if is_split(layout, where):
            break
    return where


def _where(rng: random.Random, t: Tensor, mode: str, front: bool, is_input: bool) -> Where:
    n = t.dim()
    if not n or (mode == "input" and not is_input):
        return {}
    if mode == "mixed" or n == 1:
        axes = rng.sample(("height", "width"), min(n, rng.randrange(0, 3) if n > 1 else 1))
        return dict(zip(axes, rng.sample(range(n), len(axes))))
    return {"height": 0, "width": 1} if front else {"height": n - 2, "width": n - 1}


def is_split(layout: Layout, where: Sequence[Where]) -> bool:
    """Whether ranks share any tensor."""
    return any(layout.size(axis) > 1 for at in where for axis in at)


def verdict(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    layout: Layout,
    where: Sequence[Where],
    grads: bool = True,
    tolerance: float = 1e-9,
    whole_loss: bool = True,
    chance: bool = False,
) -> Verdict:
    """The verdict of `fn(*args, **kwargs)`, whose tensors are split as `where` says, in order.

    A loss is computed of whole tensors on every rank, or of fields to its end. Results by chance
    have shapes and dtypes alone; torch's own are known by another seed.
    """
    sizes = layout.mesh
    if not is_split(layout, where):
        return Verdict("no field")
    right = _run(fn, args, kwargs, grads)
    if right.error is not None and grads:
        without = _run(fn, args, kwargs, False)
        grads, right = (True, right) if without.error else (False, without)
    again = _run(fn, args, kwargs, grads, seed=1)
    pairs = zip(right.results, again.results)
    chance = chance or any(different(a, b, tolerance) for a, b in pairs)

    def each(one: Callable[..., Run]) -> list[Run]:
        found = run_seeded(sizes, lambda t: one(layout.on(t)), 0)
        return [Run([], [], [], error=e) if e else r for e, r in zip(found.errors, found.results)]

    ranks = each(
        lambda bound: _run(fn, args, kwargs, grads, _placed(bound, where), whole_loss=whole_loss)
    )
    found = _errors(right, ranks)
    if found is not None:
        return found
    if chance:
        bad = [
            f"shape {b.shape} for {a.shape}"
            for r in ranks
            for a, b in zip(right.results, r.results)
            if isinstance(a, Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype)
        ]
        return Verdict("WRONG", bad[0]) if bad else Verdict("random")
    note = _compared(right, ranks, where, tolerance)
    if note:
        return Verdict("WRONG", note)
    if right.shares or any(r.shares for r in ranks):
        right = _run(fn, args, kwargs, False, write=True)
        ranks = each(lambda bound: _run(fn, args, kwargs, False, _placed(bound, where), write=True))
        found = _errors(right, ranks)
        if found is not None and found.kind not in ("refused", "both raise"):
            return Verdict(found.kind, f"written to: {found.note}")
        note = "" if found else _compared(right, ranks, where, tolerance)
        if note:
            return Verdict("WRONG", f"written to: {note}")
    return Verdict("exact")


def _placed(layout: Layout, where: Sequence[Where]) -> Callable[[int, Tensor], Tensor]:
    return lambda i, t: Field.distribute(t, layout, where[i]) if where[i] else t


def _run(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    grads: bool,
    place: Callable[[int, Tensor], Tensor] | None = None,
    seed: int = 0,
    write: bool = False,
    whole_loss: bool = False,
) -> Run:
    """One run on clones of the arguments; with `write`, results are changed in place at the end."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    wholes = [t.detach().clone() for t in leaves if isinstance(t, Tensor)]
    if place is None:
        torch.manual_seed(seed)
    try:
        for t in wholes:
            t.requires_grad_(grads and (t.is_floating_point() or t.is_complex()))
        given = [place(i, t) if place else t for i, t in enumerate(wholes)]
        tensors = iter(given)
        call = tree_unflatten([next(tensors) if isinstance(t, Tensor) else t for t in leaves], spec)
        with torch.set_grad_enabled(grads):
            results = tree_leaves(fn(*call[0], **call[1]))
        shares = bool(
            {*map(_storage, given)}
            & {_storage(y) for y in results if isinstance(y, Tensor)} - {None}
        )
        if write:
            for y in results:
                if isinstance(y, Tensor):
                    y.logical_not_() if y.dtype == torch.bool else y.mul_(3)
        if grads:
            loss = _loss(results, whole_loss)
            if loss is not None:
                loss.backward()
        fields = any(isinstance(y, Field) for y in results)
        outs, after = [_whole(y) for y in results], [_whole(t) for t in given]
        return Run(outs, [t.grad for t in wholes], after, shares, fields)
    except Exception as error:
        return Run([], [], [], error=error)


def _whole(y: Any) -> Any:
    y = y.full_tensor() if isinstance(y, Field) else y
    return y.detach().clone() if isinstance(y, Tensor) else y


def _storage(t: Tensor) -> int | None:
    """Where a tensor's numbers are, on this rank; None where it has none."""
    t = t.to_local() if isinstance(t, Field) else t
    if t.layout != torch.strided or not t.numel():
        return None
    return t.untyped_storage().data_ptr()


def _loss(results: list[Any], whole: bool) -> Tensor | None:
    """A sum of all that has gradients, with random weights: of fields, or of whole tensors."""
    terms = []
    for i, y in enumerate(results):
        if not isinstance(y, Tensor) or not y.requires_grad:
            continue
        y = y.full_tensor() if isinstance(y, Field) and (whole or y.is_complex()) else y
        y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
        w = torch.randn(y.shape, generator=torch.Generator().manual_seed(i), dtype=y.dtype)
        terms.append((y * w).sum())
    return sum(terms[1:], terms[0]) if terms else None


def _errors(right: Run, ranks: list[Run]) -> Verdict | None:
    """The verdict where someone raises; None where nobody does."""
    errors = [r.error for r in ranks]
    if right.error is None and not any(errors):
        return None
    odd = next((e for e in errors if isinstance(e, RankError)), None)
    if right.error is not None and odd is not None and all(errors):
        return Verdict("both raise", "on the rank whose number it is, and the others hear of it")
    if odd is not None or not all(errors):
        culprit = next((e for e in errors if e is not None and not isinstance(e, RankError)), odd)
        if not any(errors):
            if "not implemented for '" in str(right.error):  # a kernel of a dtype that it lacks
                return Verdict("both raise", _named(right.error))
            return Verdict(
                "WRONG", f"torch raises {_named(right.error)}, weft gives {_shapes(ranks[0])}"
            )
        if "not implemented for '" in str(culprit):
            return Verdict("refused", _named(culprit))
        return Verdict(
            "CRASH",
            f"{sum(e is not None for e in errors)} of {len(errors)} ranks: {_named(culprit)}",
        )
    if all(map(_is_refusal, errors)):
        return Verdict("refused", _named(errors[0]))
    if right.error is not None:
        return Verdict("both raise", _named(errors[0]))
    return Verdict("CRASH", _named(next(e for e in errors if not _is_refusal(e))))


def _is_refusal(error: Exception | None) -> bool:
    """Whether weft refuses by name, or torch lacks a kernel of a dtype for the parts.

    TorchScript keeps the text of no error that is raised within it.
    """
    known = "TorchScript interpreter", "not implemented for '"
    return isinstance(error, UnsupportedError) or any(text in str(error) for text in known)


def _named(error: Exception | None) -> str:
    """An error with the line of weft that raised it."""
    last = [f for f in traceback.extract_tb(error.__traceback__) if "/weft/" in f.filename]
    at = f" @ {last[-1].filename.rsplit('/', 1)[-1]}:{last[-1].name}" if last else ""
    text = re.sub(r"\s+", " ", str(error))[:160]
    return f"{type(error).__name__}: {text}{at}"


def _shapes(run: Run) -> str:
    return str([tuple(y.shape) if isinstance(y, Tensor) else y for y in run.results])[:120]


def _compared(right: Run, ranks: list[Run], where: Sequence[Where], tolerance: float) -> str:
    """What differs, or nothing."""
    for r, run in enumerate(ranks):
        if len(run.results) != len(right.results):
            return f"rank {r}: {len(run.results)} results for {len(right.results)}"
        for what, a, b in (
            ("result", run.results, right.results),
            ("argument", run.after, right.after),
        ):
            for i, (x, y) in enumerate(zip(a, b)):
                note = different(x, y, tolerance)
                if note:
                    return f"rank {r}: {what} {i}: {note}"
    for i, y in enumerate(right.grads):
        each = [run.grads[i] for run in ranks]
        # Of what was split every rank has the whole gradient; of what was not, a share, unless the
        # whole of the result is plain, too.
        shares = [g for g in each if g is not None]
        whole = where[i] or not (ranks[0].fields or any(_gradient(g, y, tolerance) for g in each))
        found = each if whole else [sum(shares[1:], shares[0]) if shares else None]
        for r, x in enumerate(found):
            note = _gradient(x, y, tolerance)
            if note:
                return f"rank {r}: gradient of argument {i}: {note}"
    return ""


def _gradient(x: Tensor | None, y: Tensor | None, tolerance: float) -> str:
    """As `different`, where None is as good as zeros."""
    if x is None or y is None:
        other = y if x is None else x
        return (
            ""
            if other is None or not other.any()
            else ("none" if x is None else "one where torch has none")
        )
    return different(x, y, tolerance)


def different(x: Any, y: Any, tolerance: float) -> str:
    """How what was found differs from what is right; nothing where it does not."""
    if not isinstance(y, Tensor):
        same = type(x) is type(y) and (x == y or (x != x and y != y))
        return (
            ""
            if same or not isinstance(y, int | float | complex | torch.Size)
            else f"{x!r} for {y!r}"
        )
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__} for a tensor"
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{tuple(x.shape)} {x.dtype} for {tuple(y.shape)} {y.dtype}"
    if y.layout != torch.strided or not y.numel():
        return ""
    if not (y.is_floating_point() or y.is_complex()):
        return "" if torch.equal(x, y) else f"{int((x != y).sum())} of {y.numel()} differ"
    if (x.isnan() != y.isnan()).any():
        return f"{int(x.isnan().sum())} nan for {int(y.isnan().sum())}"
    off = torch.where((x == y) | y.isnan(), 0.0, (x - y).abs().double())
    scale = torch.where(y.isfinite(), y.abs().double(), 0.0).max().clamp(min=1e-2)
    worst = float(off.max() / scale)
    return "" if worst <= max(tolerance, ROUNDS.get(y.dtype, 0)) else f"error {worst:.1e}"


def described(x: Any) -> str:
    """Arguments, short.

    >>> described(((torch.ones(2, 3), [1, 2]), {"dim": 0}))
    '((2, 3), [1, 2]), {dim=0}'
    """
    if isinstance(x, Tensor):
        kind = "" if x.dtype == torch.float64 else f":{str(x.dtype).removeprefix('torch.')}"
        return f"T{tuple(x.shape)}{kind}"
    if isinstance(x, list | tuple):
        inner = ", ".join(map(described, x))
        return f"[{inner}]" if isinstance(x, list) else f"({inner})"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k}={described(v)}" for k, v in x.items()) + "}"
    return repr(x)[:60]

"""Inputs and outputs of every module of a model, and where two recordings first differ.

The model is recorded on one device, and once per rank on shards. A tensor of one device is cut as
the layout says until it has the shape of the rank's; the first difference is found by module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.layout import Layout

from ..lazy import LazyRows


@dataclass
class Visit:
    """One call of a module: its path, how often it was called before, its inputs and outputs."""

    path: str
    nth: int
    module: nn.Module
    caller: Visit | None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def has_tokens(self, cut: Cut) -> bool:
        """True if its tensors are of all tokens, in their order.

        Not within experts, which get some of the tokens, or all of them sorted by expert.
        """
        if "experts" in self.path.split(".")[:-1]:
            return False
        sizes = {cut.length, cut.batch * cut.length}
        tensors_of = [*self.inputs.values(), *self.outputs.values()]
        return self.caller is None or any(sizes & set(t.shape) for t in tensors_of)


class TrialRecording:
    """Records all modules of a model while they run.

    `visits` has them in the order they ended, by path and by how often it was called before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.visits: dict[tuple[str, int], Visit] = {}
        self._open: list[Visit] = []
        self._counts: Counter[str] = Counter()
        for path, module in model.named_modules():
            module.__dict__["_recording"] = self
            module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    def _visit(self, path: str, module: nn.Module) -> Visit:
        self._counts[path] += 1
        caller = self._open[-1] if self._open else None
        return Visit(path, self._counts[path] - 1, module, caller)

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            visit = self._visit(path, module)
            visit.inputs = _copies((args, kwargs))
            if isinstance(ids := kwargs.get("position_ids"), Tensor):
                visit.inputs["position_ids"] = ids.double()
            self._open.append(visit)

        return enter

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        visit = self._open.pop()
        visit.outputs = _copies(output)
        self.visits[visit.path, visit.nth] = visit

    def attention(self, module: nn.Module, **qkv: Tensor) -> None:
        """Record the query, key and value that a module passes to attention as a visit."""
        visit = self._visit(f"{self._open[-1].path}.attention", module)
        visit.outputs = _copies(qkv)
        self.visits[visit.path, visit.nth] = visit


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every floating tensor in nested tuples, lists and mappings, with its place as its name."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from tensors(part, f"{name}[{i}]")


def _copies(value: Any) -> dict[str, Tensor]:
    return {name: as_full(t.detach()).clone() for name, t in tensors(value)}


def as_full(t: Tensor) -> Tensor:
    """Full rows as an ordinary tensor, while all ranks run."""
    return t.whole() if isinstance(t, LazyRows) else t


@dataclass(frozen=True)
class Cut:
    """A rank's rows and tokens of full tensors of `batch` sequences and `length` tokens."""

    batch: int
    length: int
    rows: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, layout: Layout, axis: str, batch: int, length: int) -> Cut:
        """The cut of a bound layout's rank."""
        return cls(batch, length, layout.positions("batch", batch), layout.positions(axis, length))

    def __call__(self, full: Tensor, shape: Sequence[int]) -> Tensor | None:
        """This rank's part, of a given shape, of a full tensor; None where no cut has it."""
        if full.dim() != len(shape):
            return None
        if full.dim() == 4 and full.shape[2:] == (self.length, self.length):
            return None  # scores: a rank's keys are in the order in which it computes
        flat = (self.rows[:, None] * self.length + self.tokens).flatten()
        ways = (self.length, self.tokens), (self.batch, self.rows), (self.batch * self.length, flat)
        for dim, (size, target) in enumerate(zip(full.shape, shape)):
            if size == target:
                continue
            index = next((i for total, i in ways if total == size and len(i) == target), None)
            if index is None:
                return None
            full = full.index_select(dim, index.to(full.device))
        return full


def gap(full: Tensor, local: Tensor, cut: Cut) -> float | None:
    """Largest error of a token's vector, relative to its norm plus the typical norm of vectors.

    None where no cut of the full tensor has the local shape.
    """
    expected = cut(full, local.shape)
    if expected is None or not expected.numel():
        return None if expected is None else 0.0
    if not torch.equal(expected.isfinite(), local.isfinite()):
        return float("inf")
    expected, local, full = (t.nan_to_num(0.0, 0.0, 0.0) for t in (expected, local, full))
    if expected.dim() < 2:
        off, size = (expected.double() - local).norm(), expected.double().norm()
        return (off / size.clamp_min(1e-12)).item()
    off, size, sizes = (
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64)
        for t in (expected - local, expected, full)
    )
    typical = sizes.square().mean().sqrt().clamp_min(1e-12)
    return (off / (size + typical)).max().item()


@dataclass(frozen=True)
class Difference:
    """An output of a visit that differs."""

    culprit: Visit  # the visit, or one that calls it
    error: float
    which: str  # output
    visit: Visit
    changed_input: str  # of the visit, which differed before


def first_difference(
    full: TrialRecording,
    ranks: Sequence[TrialRecording],
    cuts: Sequence[Cut],
    tolerance: float,
    source: tuple[str, Sequence[Cut]] | None = None,
) -> Difference | None:
    """The first module to end with another output; None if all modules agree.

    Modules of an encoder, whose path is that of `source`, have cuts of their own.
    Where its inputs differed, too, the module that called it did something between its children.
    """

    def off(visit: Visit, side: str) -> tuple[float, str]:
        """The largest gap of inputs or outputs that can be compared, and the tensor's name."""
        matches = [recording.visits.get((visit.path, visit.nth)) for recording in ranks]
        inside = source is not None and f"{visit.path}.".startswith(f"{source[0]}.")
        chosen = source[1] if source is not None and inside else cuts
        if None in matches or not visit.has_tokens(chosen[0]):
            return 0.0, ""
        gaps = [
            (error, name)
            for match, cut in zip(matches, chosen)
            for name, tensor in getattr(visit, side).items()
            if name in getattr(match, side)
            and (error := gap(tensor, getattr(match, side)[name], cut)) is not None
        ]
        return max(gaps, default=(0.0, ""))

    for visit in full.visits.values():
        error, which = off(visit, "outputs")
        if error <= tolerance:
            continue
        culprit = visit if visit.inputs or visit.caller is None else visit.caller
        while culprit.caller is not None and off(culprit, "inputs")[0] > tolerance:
            culprit = culprit.caller
        changed = "" if culprit is visit else off(visit, "inputs")[1]
        return Difference(culprit, error, which, visit, changed)
    return None


__all__ = [
    "Cut",
    "Difference",
    "TrialRecording",
    "Visit",
    "as_full",
    "first_difference",
    "gap",
    "tensors",
]

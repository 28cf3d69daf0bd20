"""Inputs and outputs of every module of a model, and where two recordings first differ.

A model is recorded whole, and once per rank on shards. A tensor of the whole model is cut as the
layout says until it has the shape that a rank has; what then differs is found by module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ....layout import Layout


@dataclass
class Visit:
    """One call of a module: its name in the model, which call of it, and what went in and out."""

    path: str
    nth: int
    module: nn.Module
    around: Visit | None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    given: tuple[tuple, dict] = ((), {})

    def has_tokens(self, cut: Cut) -> bool:
        """Whether it is about all tokens, in their order.

        An expert's share of them says nothing about ranks, nor do tokens sorted by expert.
        """
        if "experts" in self.path.split(".")[:-1]:
            return False
        sizes = {cut.length, cut.batch * cut.length}
        found = [*self.inputs.values(), *self.outputs.values()]
        return self.around is None or any(sizes & set(t.shape) for t in found)


class TrialRecording:
    """Records all modules of a model while they run; `visits` has them in the order they ended."""

    def __init__(self, model: nn.Module, keep_given: bool = False) -> None:
        self.visits: list[Visit] = []
        self.keep_given = keep_given
        self._open: list[Visit] = []
        self._counts: Counter[str] = Counter()
        for path, module in model.named_modules():
            module.__dict__["_recording"] = self
            module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    def _enter(self, path: str):
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            visit = Visit(path, self._counts[path], module, self._open[-1] if self._open else None)
            self._counts[path] += 1
            visit.inputs = _copies((args, kwargs))
            if isinstance(ids := kwargs.get("position_ids"), Tensor):
                visit.inputs["position_ids"] = ids.double()
            if self.keep_given:
                visit.given = args, kwargs
            self._open.append(visit)

        return enter

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        visit = self._open.pop()
        visit.outputs = _copies(output)
        self.visits.append(visit)

    def attention(self, module: nn.Module, **qkv: Tensor) -> None:
        """A module of the model attends: what it gives to attention is a visit too."""
        around = self._open[-1]
        path = f"{around.path}.attention"
        visit = Visit(path, self._counts[path], module, around, outputs=_copies(qkv))
        self._counts[path] += 1
        self.visits.append(visit)

    def by_key(self) -> dict[tuple[str, int], Visit]:
        """Visits by (path, which call of it)."""
        return {(visit.path, visit.nth): visit for visit in self.visits}


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
    return {name: t.detach().clone() for name, t in tensors(value)}


@dataclass(frozen=True)
class Cut:
    """How a rank's tensors are cut from whole ones of `batch` sequences and `length` tokens."""

    batch: int
    length: int
    rows: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, layout: Layout, axis: str, batch: int, length: int) -> Cut:
        """The cut of a bound layout's rank."""
        return cls(batch, length, layout.positions("batch", batch), layout.positions(axis, length))

    def __call__(self, whole: Tensor, shape: Sequence[int]) -> Tensor | None:
        """This rank's part of a whole tensor, or None where no cut has the wanted shape."""
        if whole.dim() != len(shape):
            return None
        flat = (self.rows[:, None] * self.length + self.tokens).flatten()
        ways = (self.length, self.tokens), (self.batch, self.rows)
        ways = (*ways, (self.batch * self.length, flat))
        for dim, (size, wanted) in enumerate(zip(whole.shape, shape)):
            if size == wanted:
                continue
            index = next((i for total, i in ways if total == size and len(i) == wanted), None)
            if index is None:
                return None
            whole = whole.index_select(dim, index.to(whole.device))
        return whole


def gap(whole: Tensor, local: Tensor, cut: Cut) -> float | None:
    """Largest error of a token's vector, relative to what such vectors are; None: no such cut."""
    wanted = cut(whole, local.shape)
    if wanted is None:
        return None
    if not wanted.numel():
        return 0.0
    if wanted.dim() > 1 and wanted.is_floating_point() and wanted.dtype == local.dtype:
        off, size, typical = (_norms(t) for t in (wanted - local, wanted, whole))
        if (off.sum() + typical.sum()).isfinite():  # nearly always, and three times as fast
            return _largest(off, size, typical)
    wanted, found = wanted.double(), local.double()
    both = wanted.isfinite() & found.isfinite()
    if not torch.equal(wanted.isfinite(), found.isfinite()):
        return float("inf")
    off = (wanted - found).masked_fill(~both, 0.0)
    size = wanted.masked_fill(~both, 0.0)
    if wanted.dim() < 2:
        return (off.norm() / size.norm().clamp_min(1e-12)).item()
    return _largest(*map(_norms, (off, size, whole.masked_fill(~whole.isfinite(), 0.0))))


def _norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)


def _largest(off: Tensor, size: Tensor, all_sizes: Tensor) -> float:
    """The largest relative error, of norms of errors, of their vectors, and of all vectors."""
    typical = all_sizes.square().mean().sqrt().clamp_min(1e-12)
    return (off / (size + typical)).max().item()


def worst(
    whole: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Tensor]], cuts: Sequence[Cut]
) -> tuple[float, str]:
    """The largest gap of tensors that can be compared, over all ranks, and the tensor's name."""
    gaps = [
        (gap(tensor, local[name], cut), name)
        for local, cut in zip(ranks, cuts)
        for name, tensor in whole.items()
        if name in local
    ]
    return max((g for g in gaps if g[0] is not None), default=(0.0, ""))


@dataclass(frozen=True)
class Difference:
    """`culprit` is to blame: output `which` of `seen`, itself or a module it calls, is off.

    Attributes:
        handed: the input of `seen` that was off already.
    """

    culprit: Visit
    error: float
    which: str
    seen: Visit
    handed: str


def first_difference(
    whole: TrialRecording, ranks: Sequence[TrialRecording], cuts: Sequence[Cut], tolerance: float
) -> Difference | None:
    """The module that is to blame, and how much what is off.

    The first module to end with another output is to blame, unless it was given other inputs: then
    the module that called it did something between its children. None if all modules agree.
    """
    theirs = [recording.by_key() for recording in ranks]

    def off(visit: Visit, side: str) -> tuple[float, str]:
        found = [their.get((visit.path, visit.nth)) for their in theirs]
        if any(f is None for f in found) or not visit.has_tokens(cuts[0]):
            return 0.0, ""
        return worst(getattr(visit, side), [getattr(f, side) for f in found], cuts)

    for visit in whole.visits:
        error, which = off(visit, "outputs")
        if error <= tolerance:
            continue
        culprit = visit if visit.inputs or visit.around is None else visit.around
        while culprit.around is not None and off(culprit, "inputs")[0] > tolerance:
            culprit = culprit.around
        handed = "" if culprit is visit else off(visit, "inputs")[1]
        return Difference(culprit, error, which, visit, handed)
    return None

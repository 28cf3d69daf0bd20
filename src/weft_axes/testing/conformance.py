"""Runs an attention on the standard cases, on threads or processes, and judges its results."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.declare.layout_file import HEADS
from weft.errors import ShapeError
from weft.launch import launcher
from weft.layout import Layout
from weft.plan.order import positions, shard_spans

from .cases import SIDES, Case, RankCall, shard, standard_cases
from .check import EXACT as EXACT_ERROR
from .reference import relative_error
from .report import EXACT, FAILED, REFUSED, WRONG, Finding, Report

Attend = Callable[[RankCall], Tensor]
#: Parts of gloo's messages when another rank is gone or silent, or sends an unexpected message.
_BROKEN = ("gloo/transport", "pair closure", "Timed out")


def conformance(
    attend: Attend,
    on: Layout | int,
    *,
    dtype: torch.dtype = torch.float64,
    limit: float | None = None,
    cases: Iterable[Case] | None = None,
    timeout: float = 30.0,
    name: str = "",
) -> Report:
    """Compare an attention over several ranks with softmax attention on one device.

    Every case of `standard_cases` is run forward and backward with a random gradient of the
    output: equal and uneven lengths, ranks without tokens, grouped heads, causal and padded keys,
    fully masked rows, any strides, two calls in flight. Output and all gradients are compared with
    plain softmax attention in fp64, inputs must be left as they were.

    Args:
        attend: called on every rank with a `RankCall`; returns this rank's output (b h n d). Ranks
            that are processes find it by its module and name. A case that it does not support it
            refuses by raising, on every rank.
        on: a layout, whose ranks are threads of this process (`call.layout` is bound); or a
            number of processes that torch.distributed's gloo joins.
        dtype: of the tensors.
        limit: the largest error allowed, relative to the largest entry of the full tensor;
            default 1e-11 in fp64, else 64 roundings of the dtype, 8 in 16 bits.
        cases: instead of the standard ones.
        timeout: seconds that a case may take.
        name: of the attention, for the report.

    Returns:
        A `Report`: print it, or call `assert_exact()` in a test.

    >>> import weft
    >>> def attend(call):
    ...     return weft.attention(call.q, call.k, call.v, call.layout, "tokens", call.mask,
    ...                           length=(call.n, call.m))
    >>> conformance(attend, weft.Layout.parse("tokens: ring=2")).ok
    True
    """
    ranks = on.world_size if isinstance(on, Layout) else on
    cases = standard_cases(ranks) if cases is None else list(cases)
    if limit is None:
        roundings = 8 if dtype.itemsize == 2 else 64
        limit = EXACT_ERROR if dtype == torch.float64 else roundings * torch.finfo(dtype).eps
    job = _Job(attend, ranks, dtype)

    def run(case: Case) -> list:
        if isinstance(on, Layout):
            return _threads(job, on, case, timeout)
        return _processes(job, case, timeout)

    findings = [_judge(case, job, limit, run(case)) for case in cases]
    name = name or getattr(attend, "__name__", str(attend))
    return Report(name, ranks, limit, tuple(findings))


@dataclass(frozen=True)
class CaseResult:
    """One rank's tensors of a case by name, or its exception; `changed` names modified inputs."""

    tensors: list[dict[str, Tensor]]
    layout: Layout | None = None
    raised: str = ""
    changed: str = ""


@dataclass(frozen=True)
class _Job:
    """Everything a rank needs to run a case."""

    attend: Attend
    ranks: int
    dtype: torch.dtype

    def run(self, case: Case, rank: int, layout: Layout | None = None) -> CaseResult:
        """A case on one rank; an exception is part of the result."""
        calls, before = [], []
        try:
            for seed in range(1 + case.twice):
                full = case.draw(self.dtype, seed)
                local = {n: self._laid_out(case, t, n, rank, layout) for n, t in full.items()}
                before.append({n: t.clone() for n, t in local.items()})
                q, k, v = leaves = [local[n].requires_grad_() for n in "qkv"]
                call = RankCall(
                    q, k, v, rank, self.ranks, case.queries, case.keys, case.mask, layout
                )
                calls.append((leaves, local["dout"], self.attend(call)))
            tensors, changed = [], ""
            for (leaves, dout, out), old in zip(calls, before):
                grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
                results = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads)))
                tensors.append({n: t for n, t in results.items() if t is not None})
                now = dict(zip(("q", "k", "v", "dout"), (*leaves, dout)))
                changed += "".join(n for n in now if not torch.equal(now[n], old[n]))
        except Exception as error:
            return CaseResult([], raised=f"{type(error).__name__}: {error}"[:500])
        return CaseResult(tensors, changed=changed)

    def part(self, case: Case, full: Tensor, name: str, rank: int, layout: Layout | None) -> Tensor:
        """One rank's part of a full tensor (b h n d)."""
        if layout is None:
            spans = shard_spans(full.shape[2], (self.ranks,))[rank]
            return full.index_select(2, positions(spans))
        for mesh_dim in layout.shard_dims(HEADS):
            heads, size = full.shape[1], layout.mesh[mesh_dim]
            if heads < size:  # raised on every rank, also on those that would have some
                raise ShapeError(f"{heads} heads cannot be split over {mesh_dim}={size}")
        return shard(layout, case.axes, case.lengths, full, SIDES[name])

    def _laid_out(
        self, case: Case, full: Tensor, name: str, rank: int, layout: Layout | None
    ) -> Tensor:
        part = self.part(case, full, name, rank, layout)
        if case.strided:
            return part.transpose(1, 2).contiguous().transpose(1, 2)
        return part.contiguous()


def _threads(job: _Job, layout: Layout, case: Case, timeout: float) -> list:
    from weft.threads import on_threads

    results: list[CaseResult | str] = [f"no answer in {timeout:.0f} s"] * job.ranks

    def rank(bound: Layout) -> None:
        result = job.run(case, bound.rank, bound)
        results[bound.rank] = replace(result, layout=bound)
        if result.raised:
            raise _Raised(result.raised)

    with contextlib.suppress(_Raised):
        on_threads(layout, rank, timeout=timeout)
    return results


def _processes(job: _Job, case: Case, timeout: float) -> list:
    """Every rank's result of a case; of ranks that gave none, a text that says why."""
    why = "gave no result"
    with tempfile.TemporaryDirectory(prefix="weft-testing-") as folder:
        try:
            launcher.run(_on_process, job, case, folder, timeout, ranks=job.ranks)
        except launcher.LaunchError as error:
            why = str(error)
        files = [Path(folder) / str(rank) for rank in range(job.ranks)]
        return [pickle.loads(f.read_bytes()) if f.exists() else why for f in files]


def _on_process(job: _Job, case: Case, folder: str, timeout: float) -> None:
    rank, limit = int(os.environ["RANK"]), datetime.timedelta(seconds=timeout)
    store = dist.FileStore(f"{folder}/store", job.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=limit)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(job.run(case, rank)))
    with contextlib.suppress(Exception):  # of ranks that are gone
        dist.barrier()


def _follows(raised: str) -> bool:
    """True if a rank's exception only follows from another rank's failure."""
    return raised.startswith("RankError") or any(sign in raised for sign in _BROKEN)


class _Raised(Exception):
    """An exception of `attend` on a rank that is a thread: it ends the waits of the others."""


def _judge(case: Case, job: _Job, limit: float, results: list) -> Finding:
    """A finding from every rank's result; a text says why a rank gave none."""
    raised = {r.raised for r in results if not isinstance(r, str) and r.raised}
    if lost := [f"rank {i}: {r}" for i, r in enumerate(results) if isinstance(r, str)]:
        also = f"; others raised {sorted(raised)[0]}" if raised else ""
        return Finding(case.name, FAILED, {}, f"{', '.join(lost)}{also}")
    if raised:
        everywhere = all(r.raised and not _follows(r.raised) for r in results)
        causes = sorted(raised, key=lambda text: (_follows(text), text))
        return Finding(case.name, REFUSED if everywhere else FAILED, {}, causes[0])
    errors: dict[str, float] = {}
    for seed in range(1 + case.twice):
        expected = case.wanted(case.draw(job.dtype, seed))
        del expected["lse"]
        for name, full in expected.items():
            for rank, r in enumerate(results):
                part = job.part(case, full, name, rank, r.layout)
                actual = r.tensors[seed].get(name, torch.zeros_like(part))
                error = relative_error(actual, part, full, smallest=1e-30)
                errors[name] = max(errors.get(name, 0.0), error)
    changed = "".join(sorted({c for r in results for c in r.changed}))
    detail = f"inputs were changed: {changed}" if changed else ""
    missing = [n for n in errors if any(n not in t for r in results for t in r.tensors)]
    if missing:
        detail = f"{detail}; no gradient: {', '.join(missing)}".strip("; ")
    good = not detail and all(value <= limit for value in errors.values())
    return Finding(case.name, EXACT if good else WRONG, errors, detail)

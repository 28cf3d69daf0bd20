"""Shared by all parts: the device they run on, and how a part reports that it cannot run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch


class CannotRun(Exception):
    """A part that this machine cannot run; the text says why."""


@dataclass(frozen=True)
class Where:
    """The device of a part, and whether it is only rehearsed there."""

    device: str

    @property
    def rehearsal(self) -> bool:
        """On a CPU sizes are tiny: that a part runs is all that is learned."""
        return self.device == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """In which speed is measured."""
        return torch.bfloat16

    def only_cuda(self, what: str) -> None:
        """Raise `CannotRun` unless there is a GPU."""
        if self.device != "cuda":
            raise CannotRun(f"{what} needs a GPU")


def rows(header: Sequence[str], found: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a markdown table, each as soon as its row is found; floats with three digits.

    >>> print(*rows(["kernel", "share"], [["math", 0.51234]]), sep="\n")
    | kernel | share |
    |---|---|
    | math | 0.512 |
    """
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in found:
        yield f"| {' | '.join(map(_shown, row))} |"


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

"""Monitoring of a training run: lines on the terminal, curves in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weft._terminal import Terminal
from weft.errors import WeftError
from weft.layout import Layout

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SMOOTHING = 0.95
#: Seconds between lines.
EVERY = 10.0


@dataclass(frozen=True)
class Record:
    """One training step.

    Attributes:
        step: its number, from 0.
        loss: mean over the counted targets of all ranks.
        accuracy: share of those targets that are right, 0 to 1.
        lr: learning rate.
        norm: norm of the gradient over all ranks, before clipping.
        bytes: bytes that this rank received.
        tokens: tokens (cells of a table, pairs) over all ranks.
        seconds: wall time.
        memory: bytes that this rank has held at most: of its GPU, else of its process.
        routing: quality of learned routing, if the model routes.

    >>> Record(0, 2.3, 0.1, lr=1e-3, norm=1.0, bytes=0, tokens=64, seconds=0.5).loss
    2.3
    """

    step: int
    loss: float
    accuracy: float
    lr: float
    norm: float
    bytes: int
    tokens: int
    seconds: float
    memory: int = 0
    routing: Mapping[str, float] = field(default_factory=dict)


class Monitor:
    """Shows records on rank 0; does nothing on the others. Use as a context manager."""

    def __init__(
        self,
        layout: Layout,
        steps: int,
        start: int = 0,
        log_dir: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        first = layout.rank == 0
        self.console = Terminal(quiet=quiet or not first)
        self.steps, self.every = steps, max(1, steps // 10)
        self.writer = _writer(log_dir, start) if first and log_dir is not None else None
        self.smooth: dict[str, float] = {}
        self.printed_at = time.monotonic()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def show(self, record: Record) -> None:
        """Adds one step."""
        rate = record.tokens / record.seconds
        loss, accuracy = self._smooth("loss", record.loss), self._smooth("acc", record.accuracy)
        speed = self._smooth("rate", rate)
        traffic = f"{record.bytes / 2**20:.1f} MiB/step"
        status = f"loss {loss:.3f}  acc {accuracy:.0%}  {speed:,.0f} tokens/s  {traffic}"
        if self._line_is_due(record.step):
            self.console.print(f"step {record.step + 1}/{self.steps}  {status}", highlight=False)
        if self.writer is not None:
            for name, value in _curves(record, rate).items():
                self.writer.add_scalar(name, value, record.step)

    def _line_is_due(self, step: int) -> bool:
        """Ten lines in a run, and one every 10 seconds."""
        now = time.monotonic()
        due = (step + 1) % self.every == 0 or now - self.printed_at >= EVERY
        self.printed_at = now if due else self.printed_at
        return due

    def due(self, step: int) -> bool:
        """True if routing is observed in this step."""
        return (step + 1) % self.every == 0

    def _smooth(self, name: str, value: float) -> float:
        old = self.smooth.get(name, value)
        self.smooth[name] = SMOOTHING * old + (1.0 - SMOOTHING) * value
        return self.smooth[name]


def _curves(record: Record, rate: float) -> dict[str, float]:
    return {
        "loss": record.loss,
        "accuracy": record.accuracy,
        "learning rate": record.lr,
        "gradient norm": record.norm,
        "bytes per step": record.bytes,
        "tokens per second": rate,
        "memory in MiB": record.memory / 2**20,
        **{f"routing/{name}": value for name, value in record.routing.items()},
    }


def _writer(log_dir: str | Path, start: int) -> SummaryWriter:
    """A TensorBoard writer that hides an earlier run's values from this step on."""
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(str(log_dir), purge_step=start)
    except OSError as error:
        raise WeftError(f"log_dir {log_dir} cannot be written: {error.strerror}") from error

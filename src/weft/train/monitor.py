"""What a run shows while it trains: a progress line on the terminal, curves in TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..layout import Layout

SMOOTHING = 0.95


@dataclass(frozen=True)
class Record:
    """One step: loss and accuracy over all ranks; `bytes` received by this rank; `tokens` in all.

    `norm` is the gradient norm before clipping, `seconds` the wall time of the step.
    """

    step: int
    loss: float
    accuracy: float
    lr: float
    norm: float
    bytes: int
    tokens: int
    seconds: float


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
        self.console = Console(quiet=quiet or not first)
        self.progress = _progress(self.console, disable=quiet or not first)
        self.task = self.progress.add_task("", total=steps, completed=start, said="")
        self.writer = _writer(log_dir) if first and log_dir is not None else None
        self.smooth: dict[str, float] = {}

    def __enter__(self) -> Monitor:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.writer is not None:
            self.writer.close()

    def show(self, record: Record) -> None:
        """Adds one step."""
        rate = record.tokens / record.seconds
        loss, accuracy = self._smooth("loss", record.loss), self._smooth("acc", record.accuracy)
        said = (
            f"loss {loss:.3f}  accuracy {100 * accuracy:.1f} %"
            f"  {self._smooth('rate', rate):,.0f} tokens/s  {record.bytes / 2**20:.2f} MiB/step"
        )
        self.progress.update(self.task, advance=1, said=said)
        if self.writer is not None:
            curves = {
                "loss": record.loss,
                "accuracy": record.accuracy,
                "learning rate": record.lr,
                "gradient norm": record.norm,
                "bytes per step": record.bytes,
                "tokens per second": rate,
            }
            for name, value in curves.items():
                self.writer.add_scalar(name, value, record.step)

    def print(self, what: RenderableType) -> None:
        """Prints on rank 0, below the progress line."""
        self.progress.stop()
        self.console.print(what)

    def _smooth(self, name: str, value: float) -> float:
        old = self.smooth.get(name, value)
        self.smooth[name] = SMOOTHING * old + (1.0 - SMOOTHING) * value
        return self.smooth[name]


def _progress(console: Console, *, disable: bool) -> Progress:
    return Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
        console=console,
        refresh_per_second=2,
        disable=disable,
    )


def _writer(log_dir: str | Path):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(log_dir))

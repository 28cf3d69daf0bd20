"""`weft.traffic()`: bytes that a block of code moved, predicted and counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..comm import Transport, Watch, alive
from ..declare.traffic import Traffic
from ..layout import Layout
from ..plan.memory import memory_bound
from ..plan.plan import Plan
from ..plan.predict import forecast_of
from .words import nbytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class TrafficReport(Traffic):
    """Counted bytes and messages, and in `predicted` what the plans of the same calls predict.

    Plans predict attention, states, halos, choices of keys, and fetched keys by what was chosen;
    sums of losses and gradients, and a router's summaries and weights, are counted only.
    The peaks are those of one pass of attention. All-to-alls before and after it, reductions over
    whole copies, and learned routing are in neither.

    Attributes:
        received: bytes, by (mesh dim, tensor).
        sent: bytes, by (mesh dim, tensor).
        calls: messages sent, by (mesh dim, tensor).
        predicted: the same three, from the plans.
        peak_bytes: the most bytes held for other ranks at one time: their chunks, buffers on their
            way in or out, and partial results of theirs that wait to leave.
        peak_bound: what the plan allows of it.

    >>> report = TrafficReport(received=Counter({("ring", "kv"): 4096}))
    >>> report.bytes, report.by_tensor(), report.as_predicted
    (4096, {'kv': 4096}, True)
    """

    predicted: Traffic = field(default_factory=Traffic)
    peak_bytes: int = 0
    peak_bound: int = 0

    @property
    def as_predicted(self) -> bool:
        """True if every byte and message that was predicted was counted, and no other."""
        return not self.differences()

    def differences(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """(what, mesh dim, tensor) -> (predicted, counted), where they differ."""
        different = {}
        for label in ("received", "sent", "calls"):
            predicted, counted = getattr(self.predicted, label), getattr(self, label)
            for key, number in predicted.items():
                if number != counted[key]:
                    different[label, *key] = (number, counted[key])
        return different

    def table(self) -> Table:
        """Bytes received per mesh dim and tensor, as a rich table."""
        from rich.table import Table

        table = Table("mesh dim", "tensor", title="received by this rank")
        for name in ("counted", "predicted", "messages"):
            table.add_column(name, justify="right")
        predicted = self.predicted.received
        for key in sorted({*self.received, *self.calls, *predicted}):
            table.add_row(
                *key,
                nbytes(self.received[key]),
                nbytes(predicted[key]) if key in predicted else "-",
                f"{self.calls[key]:,}",
            )
        table.add_section()
        total = nbytes(self.predicted.bytes) if self.predicted.received else "-"
        table.add_row("", "all", nbytes(self.bytes), total, f"{sum(self.calls.values()):,}")
        if self.peak_bound:
            held, allowed = nbytes(self.peak_bytes), nbytes(self.peak_bound)
            table.caption = f"held for others at one time: {held}, at most {allowed} by plan"
        return table

    def __rich__(self) -> Table:
        return self.table()

    def scalars(self) -> dict[str, float]:
        """Bytes by name, as TensorBoard takes them: traffic/row/kv, traffic/predicted.

        They are bytes received, but for traffic/peak: `peak_bytes`.
        """
        parts = {"/".join(("traffic", *key)): float(n) for key, n in self.received.items()}
        values = {"traffic/counted": self.bytes, "traffic/predicted": self.predicted.bytes}
        values["traffic/peak"] = self.peak_bytes
        return parts | {name: float(n) for name, n in values.items()}

    def log(self, writer: Any, step: int) -> None:
        """Add `scalars` to TensorBoard.

        Args:
            writer: a `torch.utils.tensorboard.SummaryWriter`.
            step: the training step.
        """
        for name, value in self.scalars().items():
            writer.add_scalar(name, value, step)


@contextlib.contextmanager
def traffic(*layouts: Layout) -> Iterator[TrafficReport]:
    """Count what this rank sends and receives inside the `with` block, per mesh dim and tensor.

    The report is filled when the block ends; `rich.print(report)` shows it as a table.

    Args:
        layouts: bound layouts whose messages are counted, once where several share a transport;
            default everything that weft moves in this process.

    >>> with traffic() as moved:
    ...     pass
    >>> moved.bytes
    0
    """
    watched: list[Transport] = [*dict.fromkeys(layout.bound for layout in layouts)] or alive()
    before = [(t.received.copy(), t.sent.copy(), t.calls.copy()) for t in watched]
    ran = [t.watches.begin() for t in watched]
    moved = TrafficReport()
    try:
        yield moved
    finally:
        for transport, (received, sent, calls), passes in zip(watched, before, ran):
            transport.watches.end(passes)
            moved.received.update(transport.received - received)
            moved.sent.update(transport.sent - sent)
            moved.calls.update(transport.calls - calls)
            _add_predictions(moved.predicted, passes)
            _add_peaks(moved, passes)


def _add_predictions(total: Traffic, passes: Counter) -> None:
    for (plan, backward), times in passes.items():
        if isinstance(plan, Plan):
            forecast = forecast_of(plan)
            per_call = (forecast.backward if backward else forecast.forward).traffic
        else:
            per_call = plan.traffic(backward)
        for label in ("received", "sent", "calls"):
            numbers = getattr(per_call, label)
            getattr(total, label).update({key: n * times for key, n in numbers.items() if n})


def _add_peaks(report: TrafficReport, passes: Watch) -> None:
    for (plan, backward), peak in passes.peaks.items():
        assert isinstance(plan, Plan)  # no other pass retains chunks
        allowed = memory_bound(plan.backward if backward else plan.forward).nbytes
        report.peak_bytes = max(report.peak_bytes, peak)
        report.peak_bound = max(report.peak_bound, allowed)

"""`weft plan model`: the layout for a whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.markup import escape

from weft.declare.hardware import Hardware
from weft.declare.one_line import to_toml
from weft.inspect import words
from weft.inspect.picture import writing
from weft.layout import Layout
from weft_models.declare.model_file import ModelSpec
from weft_planner.ledger import nearest
from weft_planner.model_search import ModelChoice, ModelSearch
from weft_planner.step_count import by_part
from weft_planner.work import lengths_of_model

from ..inspect.printer import console, print_table, say, working, wrote
from . import options


def model(
    model: options.ModelName,
    *,
    hardware: options.Machine,
    devices: options.Devices,
    length: options.ModelLength = None,
    batch: options.ModelBatch = None,
    dtype: options.DType = options.PLANNED_DTYPE,
    gradients: options.Gradients = None,
    memory: options.Memory = None,
    top: options.Top = 5,
    write: options.Write = None,
) -> None:
    """Find the layout of a model file's training step on a machine. Starts nothing.

    Every axis may be split: a step on each of the promising layouts is counted
    with the model's own code, resharding, sums and gradients with it, and its
    memory is that of the whole model.

    Times are predictions; the last line says against what they were checked.

    Examples:

        weft plan model tabular --length rows=150000,features=5 --devices 64 --hardware h100-8

        weft plan model mine.toml --devices 8 --hardware h100-8 --gradients fsdp --write plan.toml
    """
    spec = ModelSpec.load(model)
    lengths = lengths_of_model(spec, options.lengths_of_axes(length))
    search = ModelSearch(
        spec,
        batch or spec.train.batch,
        lengths,
        Hardware.load(hardware),
        devices,
        options.dtype_named(dtype),
        gradients or spec.train.gradients,
        memory,
    )
    sizes = ", ".join(f"{axis} {n:,}" for axis, n in lengths.items())
    console().print(
        f"[bold]{escape(spec.name)}[/] on {devices:,} devices: a training step of {search.batch} "
        f"examples, {sizes}; {str(search.dtype)[6:]}, gradients {search.gradients}\n",
        highlight=False,
    )
    with working("counting steps of the promising layouts") as tell:
        choices = search.run(tell=tell)
    _show(choices, top)
    say(*_why(choices))
    print_refused(search.refused, hardware, devices)
    if write is not None:
        about = f"Planned for model {model}, {devices} devices of {hardware}."
        write_layout(choices[0].layout, about, write)


def print_refused(refused: Mapping[str, int], hardware: str, devices: int) -> None:
    """Print refused candidates by reason, and the measurements that check predicted times."""
    if refused:
        most_first = sorted(refused.items(), key=lambda item: -item[1])
        say("\nRefused:", *(f"  {number:,}: {why}" for why, number in most_first))
    say(f"\n{nearest(hardware, devices) or 'not checked against anything measured'}")


def write_layout(layout: Layout, about: str, path: Path) -> None:
    """Write a new layout file that says what it was planned for, and name it."""
    with writing(path, new=True) as partial:
        partial.write_text(to_toml({**layout.declaration, "about": about}) + "\n")
    wrote("layout", path)


def _show(choices: Sequence[ModelChoice], top: int) -> None:
    best = choices[0].time.total
    columns = ("attention", "products", "the rest", "step", "x best", "received", "memory")
    print_table(
        "predicted",
        ("layout", *(f">{name}" for name in columns)),
        [
            (
                each.layout.name,
                *map(words.show_time, (time.attention, time.products, time.rest, time.total)),
                f"{time.total / best:.2f}",
                *map(words.nbytes, (each.count.nbytes, each.memory)),
            )
            for each in choices[:top]
            for time in [each.time]
        ],
        "the rest: resharding, sums and gradients, hidden by nothing. received: bytes of the "
        "busiest rank. memory: weights, gradients, optimizer, activations, held for others.",
    )


def _why(choices: Sequence[ModelChoice]) -> Iterator[str]:
    """The purposes of the best one's bytes, and the part in which the second is slower."""
    best = choices[0]
    parts = ", ".join(f"{label} {words.nbytes(n)}" for label, n in by_part(best.count).items() if n)
    yield f"{best.layout.name} receives: {parts or 'nothing'}."
    if len(choices) > 1:
        second = choices[1]
        extra = {
            label: getattr(second.time, label) - getattr(best.time, label)
            for label in ("attention", "products", "rest")
        }
        largest = max(extra, key=lambda label: extra[label])
        share = 100 * (second.time.total / best.time.total - 1)
        yield (
            f"{second.layout.name} is second, {words.digits(share)} % slower: {largest} takes "
            f"{words.show_time(max(0.0, extra[largest]))} longer."
        )
    yield f"{len(choices)} layouts were counted; others were only guessed at, in closed form."

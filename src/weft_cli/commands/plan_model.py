"""`weft plan MODEL`: the layout for a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

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

from ..inspect import tables
from . import options
from .options import console


def plan_model(
    model: str,
    hardware: str,
    devices: int,
    batch: int | None,
    length: str | None,
    dtype: torch.dtype,
    gradients: str | None,
    memory: float | None,
    top: int,
    write: Path | None,
) -> None:
    """Search a model's layouts, print the fastest, and write the best."""
    spec = ModelSpec.load(model)
    lengths = lengths_of_model(spec, options.lengths_of_axes(length))
    search = ModelSearch(
        spec,
        batch or spec.train.batch,
        lengths,
        Hardware.load(hardware),
        devices,
        dtype,
        gradients or spec.train.gradients,
        memory,
    )
    out = console()
    sizes = ", ".join(f"{axis} {n:,}" for axis, n in lengths.items())
    out.print(
        f"[bold]{escape(spec.name)}[/] on {devices:,} devices: a training step of {search.batch} "
        f"examples, {sizes}; {str(dtype)[6:]}, gradients {search.gradients}\n",
        highlight=False,
    )
    label = "counting steps of the promising layouts"
    with out.status(label) as status, options.still_here(label):

        def tell(done: int, most: int) -> None:
            status.update(f"{label}: {done + 1} of {most}")

        choices = search.run(tell=tell)
    out.print(_table(choices, top))
    for line in _why(choices):
        out.print(line, markup=False, highlight=False)
    print_refused(search.refused, hardware, devices)
    if write is not None:
        _write(choices[0], model, f"{devices} devices of {hardware}", write)


def print_refused(refused: Mapping[str, int], hardware: str, devices: int) -> None:
    """Print refused candidates by reason, and the measurements that check predicted times."""
    out = console()
    if refused:
        out.print("\nRefused:", highlight=False)
        for why, number in sorted(refused.items(), key=lambda item: -item[1]):
            out.print(f"  {number:,}: {why}", markup=False, highlight=False)
    checked = nearest(hardware, devices)
    out.print(f"\n{checked or 'not checked against anything measured'}", highlight=False)


def write_layout(layout: Layout, about: str, path: Path) -> None:
    """Write a new layout file that says what it was planned for."""
    with writing(path, new=True) as partial:
        partial.write_text(to_toml({**layout.declaration, "about": about}) + "\n")


def _table(choices: Sequence[ModelChoice], top: int) -> Table:
    columns = ("attention", "products", "the rest", "step", "x best", "received", "memory")
    result = tables.table("predicted", "layout", *columns, right=columns)
    best = choices[0].time.total
    for choice in choices[:top]:
        time = choice.time
        seconds = (time.attention, time.products, time.rest, time.total)
        result.add_row(
            escape(choice.name),
            *map(words.show_time, seconds),
            f"{time.total / best:.2f}",
            words.nbytes(choice.count.nbytes),
            words.nbytes(choice.memory),
        )
    result.caption = (
        "the rest: resharding, sums and gradients, hidden by nothing. received: bytes of the "
        "busiest rank. memory: weights, gradients, optimizer, activations, held for others."
    )
    result.caption_justify = "left"
    return result


def _why(choices: Sequence[ModelChoice]) -> list[str]:
    """The purposes of the best one's bytes, and the part in which the second is slower."""
    best = choices[0]
    parts = ", ".join(f"{label} {words.nbytes(n)}" for label, n in by_part(best.count).items() if n)
    lines = [f"{best.name} receives: {parts or 'nothing'}."]
    if len(choices) > 1:
        second = choices[1]
        extra = {
            label: getattr(second.time, label) - getattr(best.time, label)
            for label in ("attention", "products", "rest")
        }
        largest = max(extra, key=lambda label: extra[label])
        share = 100 * (second.time.total / best.time.total - 1)
        lines.append(
            f"{second.name} is second, {words.digits(share)} % slower: {largest} takes "
            f"{words.show_time(max(0.0, extra[largest]))} longer."
        )
    lines.append(
        f"{len(choices)} layouts were counted; others were only guessed at, in closed form."
    )
    return lines


def _write(choice: ModelChoice, model: str, where: str, path: Path) -> None:
    """The layout as a file, and those of blocks that have their own beside it."""
    about = f"Planned for model {model}, {where}."
    files = {path: choice.layout}
    for kind, layout in choice.layouts.items():
        files[path.with_suffix(f".{kind}{path.suffix}")] = layout
    for file, layout in files.items():
        write_layout(layout, about, file)
    out = console()
    out.print(f"layout: {path}", markup=False, soft_wrap=True)
    if choice.layouts:
        rest = ", ".join(
            f"{k!r}: {str(path.with_suffix(f'.{k}{path.suffix}'))!r}" for k in choice.layouts
        )
        call = f"weft.compose({model!r}, {str(path)!r}, layouts={{{rest}}})"
        out.print(f"run it with {call}", markup=False, soft_wrap=True)

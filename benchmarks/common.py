"""What benchmarks share: sides that take turns, so that other load affects all; tables; notes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.graph import saved_tensors_hooks

RESULTS = Path(__file__).parent / "results"


def interleaved(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every side, one call each per repeat, after one call each to warm up."""
    for side in sides.values():
        side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], side: str, yardstick: str) -> float:
    """The median over repeats of side / yardstick, each pair measured one after the other."""
    return statistics.median(a / b for a, b in zip(seconds[side], seconds[yardstick]))


def save(name: str, data: object) -> None:
    """Write results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; a column whose name ends with ":" stands on the right.

    >>> print(table("name | runs:", [("exact", 3)]))
    | name | runs |
    | --- | ---: |
    | exact | 3 |
    """
    names = [name.strip() for name in head.split("|")]
    under = ["---:" if name.endswith(":") else "---" for name in names]
    lines = [[name.removesuffix(":") for name in names], under]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (*lines, *rows))


def note(folder: str, **what: object) -> None:
    """One line of what happened; small appends do not mix."""
    with open(f"{folder}/notes", "a") as file:
        file.write(json.dumps({"time": time.time(), **what}) + "\n")


def notes(folder: str | Path) -> list[dict]:
    """All that ranks noted, in order."""
    path = Path(folder, "notes")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stored(path: Path) -> dict[str, Tensor]:
    """The full tensors of a checkpoint's folder."""
    import torch

    from weft.checkpoint.folder import read_index, read_into

    found = {}
    for name, tensor in read_index(path).tensors.items():
        found[name] = torch.zeros(tensor.shape, dtype=tensor.torch_dtype)
        read_into(path, name, tensor, found[name], (0,) * found[name].dim())
    return found


def saving(model: nn.Module, seen: dict[int, int]) -> saved_tensors_hooks:
    """Inside, bytes that autograd saves of tensors other than weights, in `seen` by memory."""
    import torch

    from weft._torch import memory_of

    weights = {memory_of(p)[0] for p in model.parameters()}

    def save(t: Tensor) -> Tensor:
        memory, nbytes = memory_of(t)
        if memory not in weights:
            seen[memory] = nbytes
        return t

    return torch.autograd.graph.saved_tensors_hooks(save, lambda t: t)

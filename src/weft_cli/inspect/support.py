"""The support matrix: which options of `weft.attention` each kernel supports.

Every cell comes from the kernel's own `refuses` on the requests that a feature makes; nothing is
written down twice. `weft list --support` prints it, `docs/support.md` holds a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from weft.kernels import KERNELS, named, refusal_of
from weft.kernels.base import Request


@dataclass(frozen=True)
class Feature:
    """Something a user can ask for, as changes to a plain request."""

    group: str
    name: str
    asks: dict = field(default_factory=dict)
    note: str = ""
    never: str = ""  # why no kernel at all does it


@dataclass(frozen=True)
class Column:
    """A kernel on a device, and the dtype in which features are asked for there."""

    kernel: str
    device: str
    dtype: torch.dtype

    @property
    def label(self) -> str:
        """`flex (cuda)`."""
        return (
            self.kernel if self.kernel.startswith(self.device) else f"{self.kernel} ({self.device})"
        )


COLUMNS = (
    Column("cpu-flash", "cpu", torch.float32),
    Column("math", "cpu", torch.float32),
    Column("flex", "cpu", torch.float32),
    Column("cudnn", "cuda", torch.bfloat16),
    Column("cuda-flash", "cuda", torch.bfloat16),
    Column("flex", "cuda", torch.bfloat16),
    Column("math", "cuda", torch.bfloat16),
)

DROPOUT = (
    "Dropout of probabilities is refused everywhere (`weft.attention` has no such argument): a "
    "kernel draws its random mask per tile, so the same seed would give another result on every "
    "layout, and the backward pass, whose tiles may differ, could not draw it again"
)

#: Masks of which every part is a full or plainly causal tile need no explicit mask.
_PLAIN = (
    "in parts that are full or causal; more than 48 segments in a chunk take a mask, except with "
    "`cuda-flash`, which computes up to 4,096 of a kind in one call"
)
_MASK = {"masked": True}

FEATURES = (
    Feature("mask", "full"),
    Feature("mask", "causal"),
    Feature("mask", "causal, queries at an offset", note=_PLAIN),
    Feature("mask", "documents", note=_PLAIN),
    Feature("mask", "documents, causal", note=_PLAIN),
    Feature("mask", "first keys", note=_PLAIN),
    Feature("mask", "prefix", note=_PLAIN),
    Feature("mask", "window", {"masked": True, "window": True}),
    Feature("mask", "key padding", _MASK),
    Feature("mask", "boxes and neighbourhoods of a grid", _MASK),
    Feature("mask", "MaskMod", _MASK),
    Feature("mask", "chosen keys", {"masked": True, "choice": True}),
    Feature("scores", "bias, a function of positions", {"bias": True}),
    Feature("scores", "bias, learned (with gradient)", {"bias": True, "bias_grad": True}),
    Feature("scores", "soft cap", {"softcap": True}),
    Feature("scores", "attention sinks", {"lse_grad": True}),
    Feature("scores", "dropout", note=DROPOUT, never=DROPOUT),
    Feature("shape", "grouped heads"),
    Feature("shape", "other number of keys than queries"),
    Feature("shape", "values of another head dim", {"value_dim": 48}),
    Feature("shape", "gradient through the logsumexp", {"lse_grad": True}),
    Feature("dtype", "fp64", {"dtype": torch.float64}),
    Feature("dtype", "fp32", {"dtype": torch.float32}),
    Feature("dtype", "bf16", {"dtype": torch.bfloat16}),
    Feature("dtype", "fp16", {"dtype": torch.float16}),
)

BEGIN, END = "<!-- support: weft list --support -->", "<!-- end of support -->"


def refusal(feature: Feature, column: Column) -> str | None:
    """Why a kernel cannot do something, or None if it can, exactly.

    >>> refusal(FEATURES[7], COLUMNS[0]) is None
    True
    """
    if feature.never:
        return feature.never
    plain = Request(column.device, column.dtype, head_dim=64, value_dim=64)
    return refusal_of(named(column.kernel), replace(plain, **feature.asks))


def matrix() -> Iterator[tuple[Feature, list[str | None]]]:
    """Every feature with the refusal of every column."""
    for feature in FEATURES:
        yield feature, [refusal(feature, column) for column in COLUMNS]


def reasons() -> dict[str, dict[str, list[str]]]:
    """Column label -> reason of the kernel -> the features refused for it."""
    refused: dict[str, dict[str, list[str]]] = {}
    for feature, refusals in matrix():
        for column, why in zip(COLUMNS, refusals):
            if why not in (None, feature.never):
                refused.setdefault(column.label, {}).setdefault(why, []).append(feature.name)
    return refused


def markdown() -> str:
    """The matrix as its page has it: a table, its notes, and the reasons of refusals."""
    notes = list(dict.fromkeys(f.note for f in FEATURES if f.note))
    rows = [["", "", *(c.label for c in COLUMNS)]]
    for feature, refusals in matrix():
        mark = f" [{notes.index(feature.note) + 1}]" if feature.note else ""
        group = "" if feature.group in (row[0] for row in rows) else feature.group
        rows.append([group, feature.name + mark, *("no" if why else "yes" for why in refusals)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |".rstrip() for row in rows]
    lines += ["", *(f"- [{i}] {note}." for i, note in enumerate(notes, 1)), ""]
    for label, whys in reasons().items():
        lines += [f"- `{label}` {why}: {', '.join(names)}" for why, names in whys.items()]
    return "\n".join(lines) + "\n"


def here() -> str:
    """The kernels that this machine has, with the implementations that run, and why others do not.

    >>> print(here().splitlines()[2])
    - `cpu-flash` runs
    """
    rows = ((kernel.label, kernel.missing()) for kernel in KERNELS)
    lines = [f"- `{label}` {why or 'runs'}" for label, why in rows]
    return "\n".join(["On this machine, on the devices it has:", "", *lines]) + "\n"

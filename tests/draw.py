"""Layouts made of any legal rules, for tests that draw them: strategies are files of our own."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from weft.layout import Layout

#: how a mesh dim cuts the work -> (query, key, out) while computing
COMPUTE = {
    "batch": ("S(batch)", "S(batch)", "S(batch)"),
    "head": ("S(head)", "S(head)", "S(head)"),
    "query": ("S(seq)", "R", "S(seq)"),
    "key": ("R", "S(seq)", "P(softmax)"),
    "none": ("R", "R", "R"),
}
MOVING = ("query", "key")

_KEPT = tempfile.TemporaryDirectory(prefix="weft-strategies-")  # until this process ends
_FOLDER = Path(_KEPT.name)


@dataclass(frozen=True)
class Dim:
    """A mesh dim: its size, what it splits at rest ("tokens", "heads", "batch", "" for nothing)
    and the rule it plays when tokens are attended (no rule: as it lies)."""

    size: int
    splits: str
    role: str | None = None
    key_whole: bool = False
    transport: str = "auto"
    backward: str | None = None
    forward: str | None = None

    @property
    def rest(self) -> str:
        """Where queries rest on this dim."""
        return {"heads": "S(head)", "batch": "S(batch)", "": "R"}.get(self.splits, "S(seq)")

    @property
    def rule(self) -> dict[str, str]:
        """The rule as a strategy file has it."""
        query, key, out = COMPUTE[self.role]
        key_rest = "R" if self.key_whole else self.rest
        rule = {
            "query": f"{self.rest} -> {query}",
            "key": f"{key_rest} -> {key}",
            "out": f"{out} -> {self.rest}",
        }
        if self.transport != "auto":
            rule["transport"] = self.transport
        if self.backward:
            rule["backward"] = self.backward
        if self.forward:
            rule["forward"] = self.forward
        return rule


def strategy_file(rule: dict[str, str]) -> str:
    """The path of a strategy file with one rule."""
    text = "[rule.it]\n" + "".join(f'{key} = "{value}"\n' for key, value in rule.items())
    path = _FOLDER / f"s{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"
    if not path.exists():
        path.write_text(text)
    return str(path)


def layout_of(dims: list[Dim], orders: dict[str, str] | None = None) -> Layout:
    """A layout with mesh dims d0, d1, ... outermost first; every axis it splits is attended."""
    names = [f"d{i}" for i in range(len(dims))]
    shard: dict[str, list[str]] = {}
    for name, dim in zip(names, dims):
        if dim.splits:
            shard.setdefault(dim.splits, []).append(name)
    axes = [a for a in shard if a not in ("heads", "batch")] or ["tokens"]
    attend: dict[str, list] = {axis: [] for axis in axes}
    for name, dim in zip(names, dims):
        if dim.role is not None:
            axis = dim.splits if dim.splits in axes else axes[0]
            attend[axis].append({"strategy": strategy_file(dim.rule), "on": name})
    declaration = {
        "mesh": {name: dim.size for name, dim in zip(names, dims)},
        "shard": shard,
        "replicate": [name for name, dim in zip(names, dims) if not dim.splits],
        "order": {a: o for a, o in (orders or {}).items() if a in shard},
        "attend": attend,
    }
    return Layout.from_dict(declaration, name="drawn")

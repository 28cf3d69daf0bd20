"""Layouts on one line: `"tokens: ulysses=2 x ring=4"`, and declarations written as TOML.

    line   = part ; part ; ...
    part   = axis : term x term ...          mesh dims from the outermost to the innermost
    axis   = name, or name(order)            order: contiguous, zigzag, striped
           | name+name: ...                  axes attended jointly, the first one outermost
    term   = strategy=size                   tokens: ring=4
           | strategy=size x size ...        tokens: tile=2x4, one size per rule of the strategy
           | mesh dim=size                   for the axes batch, heads and replicate
           | state=size                      carried by recurrent layers, and not attended
           | local                           attended, and whole on every rank

Mesh dims over which a strategy replicates queries (kv_parallel) are replicated ones.
Sizes within a term are joined by a bare x, terms by one with spaces around it. One size of the
line may be -1: the ranks that are left. Joint axes are split one by each size if there are as many
sizes as axes (`lat+lon: tile=2x2`), else the first axis is split by all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Replicate

from ..errors import DeclarationError, did_you_mean, shown
from . import catalog
from .layout_file import REPRODUCIBLE
from .orders import check_order
from .strategy import Rule, Strategy

ALIASES = {"tile": "mesh_tile"}
PLAIN_AXES = ("batch", "heads", "replicate")
EXAMPLES = (
    '"tokens: ring=4"',
    '"tokens(zigzag): ulysses=2 x ring=4"',
    '"batch: dp=2; heads: tp=2; rows: tile=2x4; features: local"',
    '"time: local; lat+lon: tile=2x2"',
)

_NAME = r"[A-Za-z_]\w*"
_AXIS = re.compile(rf"(?P<axis>{_NAME}(\s?\+\s?{_NAME})*)\s*(\(\s*(?P<order>\w*)\s*\))?")
_TERM = re.compile(r"(?P<name>[A-Za-z_][\w-]*)\s*=\s*(?P<sizes>-?[0-9]{1,9}(x-?[0-9]{1,9})*)")


def is_line(text: str) -> bool:
    """True if a layout is given on one line, and not by name or path."""
    try:
        return ":" in text and not Path(text).is_file()
    except (OSError, ValueError):  # longer than the name of any file
        return True


def declaration(line: str) -> dict[str, Any]:
    """The content of the layout file that a line stands for.

    >>> declaration("tokens: ring=4")["mesh"]
    {'ring': 4}
    """
    data: dict[str, Any] = {"mesh": {}, "shard": {}, "replicate": [], "order": {}, "attend": {}}
    data["carry"] = {}
    plain = " ".join(line.split())  # long runs of spaces would cost patterns their square
    parts = [part.strip() for part in plain.split(";") if part.strip()]
    if not parts:
        raise _wrong(line, "it names no axis")
    terms = [_part(line, part, data) for part in parts]
    repeated = _repeated(name for _, named in terms for name in {n for n, _, _ in named})
    for axis, named in terms:
        names, sizes = axis.split("+"), sum(len(sizes) for _, _, sizes in named)
        owners = iter(names if len(names) == sizes else names[:1] * sizes)
        for term in named:
            _add(line, data, axis, term, repeated, owners)
        for name in names[1:] if sizes else ():
            if name not in data["shard"]:
                data["order"].pop(name, None)
        if axis in data["carry"] and not data["attend"][axis]:
            del data["attend"][axis]
    return {key: value for key, value in data.items() if value}


def _part(line: str, part: str, data: dict) -> tuple[str, list]:
    """An axis and its terms as (name, strategy or None, sizes)."""
    head, colon, body = part.partition(":")
    match = _AXIS.fullmatch(head.strip())
    if part == "reproducible":
        raise _wrong(line, REPRODUCIBLE)
    if not colon or not match:
        raise _wrong(line, f"{shown(part)} is not 'axis: term x term'")
    axis, order = match["axis"].replace(" ", ""), match["order"]
    taken = {name for key in (*data["attend"], *data["shard"]) for name in key.split("+")}
    for name in axis.split("+"):
        if name in taken or axis.split("+").count(name) > 1:
            raise _wrong(line, f"axis {name!r} appears twice")
        if name in PLAIN_AXES and (order is not None or name != axis):
            raise _wrong(line, f"{name!r} is not attended and has no order")
        if order is not None:
            data["order"][name] = check_order(order)
    texts = [t.strip() for t in re.split(r"\s+[x×*]\s+", body.strip())]
    if axis not in PLAIN_AXES:
        data["attend"][axis] = []
        if texts == ["local"]:
            return axis, []
    elif axis != "replicate":
        data["shard"][axis] = []
    return axis, [_term(line, axis, text) for text in texts]


def _term(line: str, axis: str, text: str) -> tuple[str, Strategy | None, list[int]]:
    match = _TERM.fullmatch(text)
    if not match:
        raise _wrong(line, f"{shown(text)} under axis {axis!r} is not 'name=size'")
    name, sizes = match["name"], [int(s) for s in match["sizes"].split("x")]
    if axis in PLAIN_AXES:
        if len(sizes) != 1:
            raise _wrong(line, f"{text!r}: a mesh dim of axis {axis!r} has one size")
        return name, None, sizes
    full = ALIASES.get(name, name)
    names = catalog.names("strategies")
    if full not in names:
        raise _wrong(line, f"no strategy {shown(name)}{did_you_mean(name, [*names, *ALIASES])}")
    strategy = Strategy.load(full)
    if not strategy.all_rules:
        raise _wrong(line, f"{text!r}: strategy {full!r} has no rules and no size; write it alone")
    if len(sizes) != len(strategy.all_rules):
        want = f"takes {len(strategy.all_rules)} size(s): {'x'.join(strategy.all_rules)}"
        raise _wrong(line, f"{text!r}: strategy {full!r} {want}")
    return name, strategy, sizes


def _add(
    line: str, data: dict, axis: str, term: tuple, repeated: set[str], owners: Iterator[str]
) -> None:
    """A term's mesh dims: named after the strategy, or after its rules where it has several."""
    name, strategy, sizes = term
    mesh_dims = [name] if strategy is None or len(sizes) == 1 else list(strategy.all_rules)
    if strategy is not None and name in repeated:
        mesh_dims = [f"{axis.replace('+', '_')}_{mesh_dim}" for mesh_dim in mesh_dims]
    dims = [_free(mesh_dim, data["mesh"]) for mesh_dim in mesh_dims] if strategy else mesh_dims
    for mesh_dim, size in zip(dims, sizes):
        if mesh_dim in data["mesh"]:
            raise _wrong(line, f"mesh dim {mesh_dim!r} appears twice")
        data["mesh"][mesh_dim] = size
    if axis == "replicate":
        data["replicate"] += dims
        return
    rules = strategy.all_rules.values() if strategy else [None] * len(dims)
    for mesh_dim, rule in zip(dims, rules):
        owner = next(owners)
        if isinstance(rule, Rule) and rule.query.rest == Replicate():
            data["replicate"].append(mesh_dim)
        else:
            data["shard"].setdefault(owner, []).append(mesh_dim)
    if strategy is not None:
        on = dims[0] if len(dims) == 1 else dict(zip(strategy.all_rules, dims))
        table = data["carry" if strategy.state_rules else "attend"]
        table.setdefault(axis, []).append({"strategy": strategy.name, "on": on})


def _free(name: str, taken: Mapping[str, int]) -> str:
    """The name, with a number where it is taken."""
    if name not in taken:
        return name
    return next(f"{name}{i}" for i in range(2, len(taken) + 3) if f"{name}{i}" not in taken)


def _repeated(names: Iterable[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def _wrong(line: str, why: str) -> DeclarationError:
    return DeclarationError(
        f"layout {shown(line)}: {why}; write 'axis: strategy=size x strategy=size; axis: ...', "
        "such as "
        f"{', '.join(EXAMPLES)}"
    )


# -- TOML -----------------------------------------------------------------------------------------


def to_toml(data: Mapping[str, Any]) -> str:
    """A declaration as TOML: plain keys first, then tables; lists of tables inline.

    >>> print(to_toml({"mesh": {"ring": 4}, "about": "A ring."}))
    about = "A ring."
    <BLANKLINE>
    [mesh]
    ring = 4
    """
    lines = [f"{_key(k)} = {_value(v)}" for k, v in data.items() if not isinstance(v, Mapping)]
    for name, table in data.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(k)} = {_value(v)}" for k, v in table.items()]
    return "\n".join(lines).strip("\n")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        plain = "[" + ", ".join(_value(v) for v in value) + "]"
        if len(plain) <= 80 or not any(isinstance(v, Mapping) for v in value):
            return plain
        return "[\n" + "".join(f"    {_value(v)},\n" for v in value) + "]"
    # A JSON string is a TOML basic string but for DEL, which TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

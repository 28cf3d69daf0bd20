"""The pages of `docs/reference/`: keys of every kind of file, and every public name in Python.

    python docs/reference.py          writes the pages

What a key takes comes from its type, what it means from the docstring of its schema.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from weft.declare.layout_file import Entry, LayoutFile, MeasuredRates
from weft.declare.routing import Routing
from weft.declare.strategy import _ChoiceRuleFile, _RuleFile, _StateRuleFile, _StrategyFile
from weft_models.declare.model_blocks import (
    BIASES,
    MASKS,
    AttendBlock,
    CarryBlock,
    GroupBlock,
    MlpBlock,
    TriangleBlock,
)
from weft_models.declare.model_file import ContextSpec, ModelSpec, Sizes, TrainSpec
from weft_models.declare.run_file import RunSpec

HERE = Path(__file__).parent / "reference"

#: page -> title, what it is about, and its tables: heading -> schema
PAGES: dict[str, tuple[str, str, dict[str, type[BaseModel]]]] = {
    "strategy": (
        "Keys of a strategy file",
        "A strategy says what mesh dims do in attention. Those that ship are in `strategies/`.",
        {
            "At the top": _StrategyFile,
            "`[rule.NAME]`": _RuleFile,
            "`[rule.NAME]` of a recurrence": _StateRuleFile,
            "`[rule.NAME]` of a choice of keys": _ChoiceRuleFile,
            "`[routing]`": Routing,
        },
    ),
    "layout": (
        "Keys of a layout file",
        "A layout binds strategies to a mesh. Those that ship are in `layouts/`.",
        {
            "At the top": LayoutFile,
            "An entry of `[attend]`, `[carry]` or `[choose]`": Entry,
            "`[rates]`": MeasuredRates,
        },
    ),
    "model": (
        "Keys of a model file",
        "A model file lists blocks over named axes. Those that ship are in `models/`.",
        {
            "At the top": ModelSpec,
            "`[sizes]`": Sizes,
            "`[context.NAME]`": ContextSpec,
            "A `[[block]]` of attention": AttendBlock,
            "A `[[block]]` with a recurrence": CarryBlock,
            "A `[[block]]` with a perceptron": MlpBlock,
            "A `[[block]]` with a triangle multiplication": TriangleBlock,
            "A `[[block]]` of blocks": GroupBlock,
        },
    ),
    "training": (
        "How a model is trained: keys of `[train]`, and run files",
        "A model file says how it is trained. A run file, `weft train --config run.toml`, names a "
        "model and a layout and changes keys of `[train]`; what is typed wins over both. Every run "
        "leaves its own in its folder.",
        {"`[train]`": TrainSpec, "A run file, at the top": RunSpec},
    ),
}
#: a model's name is that of its file
HIDDEN = {(ModelSpec, "name")}
#: keys whose text is read by a function of their own
TAKES = {
    "attend": "text, or a list of text",
    "mask": "text, a table, or a list of these",
    "bias": "text or a table",
    "rope": "true, false, or a list of text",
    "on": "text, or a table of text",
}


def pages() -> dict[str, str]:
    """The content of every page by its file's name."""
    made = {f"{name}.md": _page(*content) for name, content in PAGES.items()}
    return {**made, "names.md": names()}


def names() -> str:
    """Every name that an API page has, with its signature and the first sentence about it."""
    rows = []
    for page in sorted((HERE.parent / "api").glob("*.md")):
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            thing = getattr(importlib.import_module(module), name, None)
            if thing is None:  # a module, whose names have entries on its page
                continue
            about = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
            cell = about.replace("|", "\\|")
            source = inspect.getsourcefile(inspect.unwrap(thing)) or ""
            file = Path(source).relative_to(HERE.parent.parent / "src")
            rows.append(f"| `{name}` | {cell} | `{file}` | {page.stem} |")
    head = "| name | what it does | file in `src/` | page |\n| --- | --- | --- | --- |\n"
    return f"# Python names\n\n{head}" + "\n".join(rows) + "\n"


def meanings(schema: type[BaseModel]) -> dict[str, str]:
    """What a schema's docstring says of each key: lines `key: text`, continued where indented more.

    >>> sorted(meanings(Entry))
    ['on', 'strategy']
    """
    found: dict[str, str] = {}
    last = None
    for line in (schema.__doc__ or "").splitlines()[1:]:
        key = re.match(r"    (\w+): (\S.*)", line)
        if key and key[1] in schema.model_fields:
            last = key[1]
            found[last] = key[2]
        elif last and line.startswith("        ") and line.strip():
            found[last] += f" {line.strip()}"
        else:
            last = None
    return found


def _page(title: str, about: str, tables: dict[str, type[BaseModel]]) -> str:
    parts = [f"# {title}", f"{about} This page is made from the schemas by `docs/reference.py`."]
    for heading, schema in tables.items():
        parts += [f"## {heading}", _table(schema)]
        if schema is AttendBlock:
            masks = (f"`{name}`: {takes or 'no parameters'}." for name, (takes, _) in MASKS.items())
            parts += ["Masks: " + " ".join(masks)]
            parts += ["Biases: " + ", ".join(f"`{name}`" for name in BIASES) + "."]
    return "\n\n".join(parts) + "\n"


def _table(schema: type[BaseModel]) -> str:
    texts = meanings(schema)
    rows = ["| key | takes | default | |", "|---|---|---|---|"]
    for name, field in schema.model_fields.items():
        if (schema, name) not in HIDDEN:
            takes = TAKES.get(name) if schema in (AttendBlock, Entry) else None
            takes = takes or _takes(field.annotation)
            text = texts.get(name, "").replace("|", "\\|")
            rows.append(f"| `{name}` | {takes} | {_default(field)} | {text} |")
    return "\n".join(rows)


def _takes(annotation: Any) -> str:
    """A type in a reader's words."""
    plain = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in plain:
        return plain[annotation]
    if origin is typing.Annotated:
        return _takes(inner[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_takes(a) for a in inner if a is not type(None)))
    if origin is tuple:
        two = "two " if inner == (inner[0],) * 2 else ""
        return f"a list of {two}{_several(inner[0])}"
    return "a table"


def _several(annotation: Any) -> str:
    words = {"text": "text", "a whole number": "whole numbers", "a number": "numbers"}
    return words.get(_takes(annotation), "tables")


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if value is None or value == () or isinstance(value, dict | BaseModel) or value == "":
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, content in pages().items():
        (HERE / name).write_text(content)

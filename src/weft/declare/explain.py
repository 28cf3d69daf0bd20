"""Explains a refused declaration: one line per error, with the file, the key and the fix.

Names of classes, validators and union members stay inside; a reader knows only the file's keys.
"""

from __future__ import annotations

import re
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import did_you_mean, shown
from .numbers import NotANumber

#: pydantic's names of union members that are no schemas, and of a table's keys.
_INSIDE = re.compile(r"([\w-]+\[.*\]|\[key\])", re.DOTALL)

_WANTED = {
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "tuple_type": "a list, such as [1, 2]",
    "list_type": "a list, such as [1, 2]",
    "dict_type": "a table, such as {{ key = value }}",
    "model_type": "a table, such as {{ key = value }}",
    "model_attributes_type": "a table, such as {{ key = value }}",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "one of {expected}",
    "too_short": "{min_length} values",
    "too_long": "{max_length} values",
}


def explain_validation(error: ValidationError, source: str, model: type[BaseModel]) -> str:
    """pydantic's findings in the file's own terms, each once; every line begins with `source`."""
    items = error.errors()
    # A list without its invalid values is too short as well: the values are what to mend.
    inner = {i["loc"][:n] for i in items for n in range(len(i["loc"]))}
    items = [i for i in items if i["type"] != "too_short" or i["loc"] not in inner]
    found = [(*_walk(item["loc"], model), item) for item in items]
    lines: dict[str, list[str]] = {}
    for path, names, item in found:
        # A value may be of several kinds: of a table only what is wrong within it.
        deeper = any(len(p) > len(path) and p[: len(path)] == path for p, _, _ in found)
        if not (deeper and item["type"] in _WANTED):
            where, finding = _line(path, names, item, source)
            lines.setdefault(where, []).append(finding)
    return "; ".join(where + _joined(findings) for where, findings in lines.items())


def _joined(findings: list[str]) -> str:
    """One sentence of a value that may be of several kinds.

    >>> _joined(["give a number", "give a table", "give a number"])
    'give a number or a table'
    """
    each = list(dict.fromkeys(findings))
    if all(finding.startswith("give ") for finding in each):
        return " or ".join([each[0], *(finding.removeprefix("give ") for finding in each[1:])])
    return "; ".join(each)


def _line(
    path: list[str], names: list[str], item: typing.Mapping[str, Any], source: str
) -> tuple[str, str]:
    """The place of an error with the value found there, and what is wrong with it."""
    key = ".".join(path)
    where = f"{source}: {key}" if key else source
    if item["type"] == "extra_forbidden":
        return f"{source}: ", f"unknown key {shown(key)}{did_you_mean(path[-1], names)}"
    if item["type"] == "missing":
        return f"{source}: ", f"key {shown(key)} is missing"
    if item["type"] == "value_error":
        error = item["ctx"]["error"]
        value = f" = {shown(item['input'])}" if isinstance(error, NotANumber) else ""
        return f"{where}{value}: ", str(error)
    expected = _WANTED.get(item["type"])
    problem = item["msg"] if expected is None else f"give {expected.format(**item.get('ctx', {}))}"
    return f"{where} = {shown(item['input'])}: ", problem


def _walk(loc: tuple, model: type[BaseModel]) -> tuple[list[str], list[str]]:
    """The keys of a file that a validation path goes through, and the keys known at its end."""
    path, models, names = [], [model], list(model.model_fields)
    for part in loc:
        fields = {n: f for m in models for n, f in m.model_fields.items()}
        names = list(fields) or names
        chosen = [m for m in models if m.__name__ == part]
        if chosen:  # a member of a union, by its tag
            models, names = chosen, list(chosen[0].model_fields)
            continue
        if part not in fields and _INSIDE.fullmatch(str(part)):
            continue
        path.append(str(part))
        if part in fields:
            models = _models(fields[part].annotation)
    return path, names


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The schemas that a type annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for inner in typing.get_args(annotation) for m in _models(inner)]

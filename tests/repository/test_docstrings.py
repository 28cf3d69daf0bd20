"""Public names say in Google's style what parameters are, and show an example; others are short."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from test_docs import PUBLIC as MODULES
from test_house import SOURCES, tree

import weft
import weft.models

#: What a parameter is documented under: arguments of a call, or attributes that a user reads.
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    ((?:\*{0,2}\w+(?:, )?)+):", re.MULTILINE)
PAGES = Path(__file__).parents[2] / "docs" / "api"
#: Modules that cannot be imported without a package of an optional extra.
NEED_PACKAGES = ("weft_integrations.transformers", "weft_integrations.tabular")


def public() -> dict[str, object]:
    """What `__all__` of the public modules names, and what has an entry on an API page."""
    found = {f"{m.__name__}.{name}": getattr(m, name) for m in MODULES for name in m.__all__}
    known = {id(value) for value in found.values()}
    for page in sorted(PAGES.glob("*.md")):
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            try:
                value = getattr(importlib.import_module(module), attribute)
            except ImportError:
                if not module.startswith(NEED_PACKAGES):
                    raise
                continue
            if id(value) not in known:
                found[name] = value
    return {name: value for name, value in found.items() if callable(value)}


PUBLIC = public()
#: Names whose example is a training step on real ranks, which a tutorial runs.
ON_RANKS = {
    "weft.data_parallel",
    "weft_models.train.data_parallel",
}


def undocumented(call: Callable, text: str | None) -> list[str]:
    """Parameters of a call that its docstring does not name."""
    sections = "".join(SECTION.findall(inspect.cleandoc(text or "") + "\n"))
    known = set(re.findall(r"\w+", " ".join(ENTRY.findall(sections))))
    parameters = inspect.signature(call).parameters
    return [name for name in parameters if name not in {"self", "cls"} | known]


def methods(kind: type) -> Iterator[tuple[str, Callable]]:
    """Public methods that a class has from weft, with a meaning of their own."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("weft")]
    for i, owner in enumerate(ours):
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            above = not function.__doc__ and any(hasattr(base, name) for base in ours[i + 1 :])
            if inspect.isfunction(function) and not name.startswith("_") and not above:
                yield name, function


def test_every_parameter_of_a_public_name_is_described():
    missing = {}
    for name, public in PUBLIC.items():
        if not inspect.isclass(public):
            missing[name] = undocumented(public, public.__doc__)
        elif not issubclass(public, Exception | enum.Enum):
            if public is not weft.models.ModelSpec:  # its attributes are the keys of a file
                missing[name] = undocumented(public, public.__doc__)
            for method, function in methods(public):
                missing[f"{name}.{method}"] = undocumented(function, function.__doc__)
    assert not {name: parameters for name, parameters in missing.items() if parameters}


def test_every_public_name_has_an_example():
    assert not [
        name
        for name, public in PUBLIC.items()
        if ">>>" not in (public.__doc__ or "")
        and name not in ON_RANKS
        and not (inspect.isclass(public) and issubclass(public, Exception))
    ]


HEADING = re.compile(r"^(Args|Attributes|Returns|Raises):$", re.MULTILINE)
#: Parts whose internal docstrings are not held to be short.
LONGER = re.compile(r"weft_axes\.fields\b|weft_axes\.nn\b|weft_integrations|weft_models")


def internal() -> Iterator[tuple[str, str]]:
    """Docstrings by where they stand, but those of the reference, help of commands and schemas."""
    kinds = [k for v in PUBLIC.values() for k in getattr(v, "__mro__", (inspect.unwrap(v),))]
    known = {(kind.__module__, kind.__qualname__) for kind in kinds}
    for module, path in SOURCES.items():
        for top in [] if LONGER.match(module) else tree(path).body:
            public = (module, getattr(top, "name", "")) in known
            for node in ast.walk(top):
                if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                    continue
                text = ast.get_docstring(node) or ""
                schema = "BaseModel" in map(ast.unparse, getattr(node, "bases", ()))
                command = module.startswith("weft_cli.commands") and "\nExamples:\n" in text
                if not (schema or command or (public and not node.name.startswith("_"))):
                    yield f"{path.name}:{node.lineno} {node.name}", text


def is_long(text: str) -> bool:
    """True for more than two sentences or five lines, beside drawings and examples; or sections."""
    lines = [x for x in text.split("\n>>>")[0].splitlines() if x and not x.startswith("    ")]
    ends = re.findall(r"(?<=[\w)\]\"'`])[.!?](?=\s|$)", "\n".join(lines))
    return len(ends) > 2 or len(lines) > 5 or bool(HEADING.search(text))


def test_internal_docstrings_are_a_sentence_and_why():
    assert not [where for where, text in internal() if is_long(text)]

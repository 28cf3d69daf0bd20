"""Public names say in Google's style what their parameters are, and show an example."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from test_docs import PUBLIC as MODULES

import weft
import weft.models

#: What a parameter is documented under: arguments of a call, or attributes that a user reads.
SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    ((?:\*{0,2}\w+(?:, )?)+):", re.MULTILINE)
PAGES = Path(__file__).parent.parent / "docs" / "api"
#: Modules that cannot be imported without a package of an optional extra.
NEED_PACKAGES = ("weft_integrations.transformers", "weft_integrations.tabular.tabpfn")


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
    "weft.torch_interop.module_styles.AttentionParallel",
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


def test_a_parameter_without_a_description_is_noticed():
    def call(one: int, two: int) -> None:
        """Does it.

        Args:
            one: the first.
        """

    assert undocumented(call, call.__doc__) == ["two"]

"""Doors from `weft` to the packages beside the engine: imported when first used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: The packages of this distribution: the engine, and those that stand beside it.
PACKAGES = (
    "weft",
    "weft_axes",
    "weft_models",
    "weft_integrations",
    "weft_planner",
    "weft_proof",
    "weft_cli",
)
#: Modules of `weft` that are others by another name: `weft.train` is `weft_models.train`.
MODULES = {name: f"weft_models.{name}" for name in ("models", "pair", "routing", "tables", "train")}
MODULES |= {
    name: f"weft_axes.{name}"
    for name in ("carry", "checkpoint", "fields", "losses", "nn", "testing", "torch_interop")
}
#: Names of `weft`, and the modules that define them.
NAMES = {
    "Field": "weft_axes.fields",
    "MultiAxisAttention": "weft_axes.nn",
    "TabularClassifier": "weft_models.tables.classifier",
    "choose": "weft_axes.fetching.choosing",
    "choose_layout": "weft_planner.search",
    "clip_grad_norm_": "weft_axes.gradients.clip",
    "compose": "weft_models.models",
    "context_parallel": "weft_axes.torch_interop.context_parallel",
    "data_parallel": "weft_axes.gradients.data_parallel",
    "halo": "weft_axes.carry.scan",
    "parallelize": "weft_integrations.parallelize",
    "register_head": "weft_models.declare.heads",
    "restore": "weft_integrations.parallelize",
    "scan": "weft_axes.carry.scan",
    "sdpa": "weft_axes.torch_interop.sdpa",
}
#: What functions of `weft` hand on to the packages beside it.
INNER = {
    "attend_fetched": "weft_axes.fetching.attend",
    "draw_score_matrix": "weft_cli.inspect.score_matrix",
    "draw_timeline": "weft_cli.inspect.timeline_picture",
    "is_of_shards": "weft_axes.gradients.sync",
    "owners": "weft_cli.inspect.score_matrix",
    "sync": "weft_axes.gradients.sync",
}


def opened(name: str) -> Any:
    """One of `INNER`, imported as it is called."""
    return getattr(import_module(INNER[name]), name)


class _Doors(MetaPathFinder, Loader):
    """Imports `weft.train`, and modules in it, as the very module that they stand for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        known = package == "weft" and inner.partition(".")[0] in MODULES
        return ModuleSpec(name, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _, door, *inner = spec.name.split(".")
        module = import_module(".".join((MODULES[door], *inner)))
        spec.loader_state = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def hang() -> None:
    """Have `import weft.train` find its module."""
    if not any(isinstance(finder, _Doors) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Doors())

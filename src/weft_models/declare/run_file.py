"""Run files: a model, a layout, a seed, and overrides of the model file's training settings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ConfigDict, Field, ValidationError

from weft.declare import catalog
from weft.declare.explain import explain_validation
from weft.declare.layout import LayoutDeclaration
from weft.declare.numbers import Whole
from weft.errors import DeclarationError, did_you_mean, shown

from .model_blocks import Frozen
from .model_file import ModelSpec, TrainSpec

#: In the folder of a run: what it was, and the weights that it ended with.
RUN_FILE, WEIGHTS = "run.toml", "model.safetensors"


class Elastic(Frozen):
    """Layouts of a run whose number of ranks may change.

    layouts: names, paths or lines; a start takes the first whose mesh fits its ranks. A mesh size
        of -1 takes all that are left.
    """

    layouts: list[str] = Field(min_length=1)


class RunSpec(Frozen):
    """One run of `weft train`.

    model: name or path of a model file.
    layout: name or path of a layout file, or a layout on one line; default one device.
    seed: of weights and data.
    dtype: of parameters and computation.
    elastic: layouts by number of ranks, in the place of `layout`.
    train: keys of the model file's `[train]` section that this run has otherwise.

    >>> RunSpec.from_dict({"model": "tabular", "train": {"steps": 7}}).resolved().train["batch"]
    8
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")  # clip = inf is no gap

    model: str
    layout: str | None = None
    seed: Whole = Field(0, ge=0, lt=1 << 63)
    dtype: str = "float32"
    elastic: Elastic | None = None
    train: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> RunSpec:
        """Read a run file."""
        return cls.from_dict(catalog.parse(Path(path)), str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "run") -> RunSpec:
        """A run from the content of its file; messages name `source`."""
        try:
            run = cls.model_validate(dict(data))
        except ValidationError as error:
            raise DeclarationError(explain_validation(error, source, cls)) from None
        run.spec(source)
        if run.elastic is not None and run.layout is not None:
            raise DeclarationError(
                f"{source}: layout = {shown(run.layout)} beside [elastic] layouts: name it among"
                " them"
            )
        return run

    def spec(self, source: str = "run") -> ModelSpec:
        """The model file, trained as this run says."""
        return ModelSpec.load(self.model).training(self.train, f"{source}: [train]")

    @property
    def layouts(self) -> list[str]:
        """Layouts from which a start takes the first that fits its ranks; none: one device."""
        if self.elastic is not None:
            return list(self.elastic.layouts)
        return [] if self.layout is None else [self.layout]

    def resolved(self) -> RunSpec:
        """The same run with every key of `[train]`, whatever the model file will say one day."""
        return self.model_copy(update={"train": self.spec().train.model_dump(mode="json")})

    def to_toml(self) -> str:
        """The file of this run.

        >>> RunSpec(model="tabular", train={"steps": 7}).to_toml().splitlines()[0]
        'model = "tabular"'
        """
        data = self.model_dump(mode="json", exclude_none=True)
        train = {key: value for key, value in data.pop("train").items() if value is not None}
        return tomli_w.dumps({**data, "train": train} if train else data)


def layout_for(layouts: Sequence[str], ranks: int) -> str:
    """The first of some layouts whose mesh fits a number of ranks.

    >>> layout_for(["tile-2x2", "tokens: ring=-1"], 3)
    'tokens: ring=-1'
    """
    wrong = []
    for text in layouts:
        try:
            LayoutDeclaration.named(text).resolve(ranks)
        except DeclarationError as error:
            wrong.append(str(error))
        else:
            return text
    raise DeclarationError(f"no layout fits {ranks} ranks: {'; '.join(wrong)}")


def changed(data: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The content of a run file with settings `KEY=VALUE` from a command line.

    A key of `[train]` needs no `train.` before it; a value that is not TOML is text; later ones
    win.

    >>> changed({"model": "tabular"}, ["lr=1e-3", "seed=2"])
    {'model': 'tabular', 'train': {'lr': 0.001}, 'seed': 2}
    """
    train = data.get("train", {})
    if not isinstance(train, Mapping):
        raise DeclarationError(f"train = {shown(train)}: give a table, such as {{ lr = 1e-3 }}")
    result = {**data, "train": dict(train)}
    keys = [*TrainSpec.model_fields, *(k for k in RunSpec.model_fields if k != "train")]
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        key, _, axis = key.removeprefix("train.").partition(".")
        if not equals:
            raise DeclarationError(f"--set {shown(setting)}: write KEY=VALUE, such as lr=1e-3")
        if key not in keys or (axis and key != "length"):
            raise DeclarationError(f"--set {shown(setting)}: no such key{did_you_mean(key, keys)}")
        if axis:
            result["train"]["length"] = {**result["train"].get("length", {}), axis: _value(text)}
        elif key in TrainSpec.model_fields:
            result["train"][key] = _value(text)
        else:
            result[key] = _value(text)
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text

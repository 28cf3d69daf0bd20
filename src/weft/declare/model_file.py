"""Model files: the axes of a model, its sizes and its blocks in order. They know of no mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import DeclarationError, shown
from . import catalog

Positive = Annotated[int, Field(ge=1)]
Range = tuple[Positive, Positive]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttendBlock(_Frozen):
    """Attention over one axis, or over several jointly.

    `routing` changes options of the layout's learned routing (`weft.declare.strategy.Routing`); a
    layout that does not route these axes computes full attention and does not read it.
    """

    attend: str | tuple[str, ...]
    mask: Literal["full", "causal", "context"] = "full"
    rope: bool = False
    qk_norm: bool = False
    similar: bool = False
    routing: dict[str, Any] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.attend,) if isinstance(self.attend, str) else self.attend

    @model_validator(mode="after")
    def _single_axis(self) -> AttendBlock:
        if len(self.axes) != 1 and (self.mask != "full" or self.rope):
            raise ValueError(
                f"attend = {list(self.axes)} with mask = {self.mask!r}, rope = {self.rope}:"
                " masks and rope need exactly one attended axis"
            )
        return self


class MlpBlock(_Frozen):
    """A two-layer perceptron on every token; the value is its hidden width."""

    mlp: Positive


class Sizes(_Frozen):
    """Widths of the model."""

    embed: Positive
    heads: Positive
    kv_heads: Positive | None = None
    classes: Positive | None = None
    vocabulary: Positive | None = None

    @model_validator(mode="after")
    def _divide(self) -> Sizes:
        if self.embed % self.heads:
            raise ValueError(f"embed = {self.embed} is not a multiple of heads = {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads={self.kv_heads}")
        return self


class TrainSpec(_Frozen):
    """What `weft train` uses unless told otherwise.

    `length` gives, per axis, the smallest and the largest global length that a step may draw.
    """

    steps: Positive = 300
    batch: Positive = 8
    length: dict[str, Range] = {}
    lr: float = Field(1e-3, gt=0)
    warmup: float = Field(0.1, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> TrainSpec:
        for axis, (low, high) in self.length.items():
            if low > high:
                raise ValueError(
                    f"length.{axis} = [{low}, {high}]: give the smallest length first, then the"
                    " largest"
                )
        return self


HEAD_SIZES = {
    "table": ("classes",),
    "tokens": ("vocabulary",),
    "pair": (),
    "facts": ("vocabulary", "classes"),
}
HEAD_AXES = {"table": 4, "tokens": 3, "pair": 4, "facts": 3}


class ModelSpec(_Frozen):
    """A model file, validated.

    `head` says what goes in and comes out: `table` (cells to a class per row), `tokens` (next
    token), `pair` (a number per pair), `facts` (keys and values to the value of a key). `axes` name
    the dims of the activations: batch first, embed last, for a table rows before features.

    Raises:
        DeclarationError: the message names the file, the key, the value and what would work.

    >>> spec = ModelSpec.load("tabular")
    >>> spec.axes
    ('batch', 'rows', 'features', 'embed')
    """

    name: str = "model"
    about: str = ""
    reference: str = ""
    head: Literal["table", "tokens", "pair", "facts"]
    axes: tuple[str, ...]
    sizes: Sizes
    repeat: Positive = 1
    block: tuple[AttendBlock | MlpBlock, ...]
    train: TrainSpec = TrainSpec()

    @classmethod
    def load(cls, name_or_path: str | Path) -> ModelSpec:
        """The model file of that name in `models/`, or at that path."""
        data, source = catalog.read("models", name_or_path)
        return cls.from_dict(data, name=Path(name_or_path).stem, source=source)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, name: str = "model", source: str = "model"
    ) -> ModelSpec:
        """The same from a dictionary; `source` opens error messages."""
        try:
            return cls.model_validate({"name": name, **data})
        except ValidationError as error:
            raise DeclarationError(_explain(error, source)) from None

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if len(self.axes) != HEAD_AXES[self.head] or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"axes = {list(self.axes)}: head = {self.head!r} needs"
                f" {HEAD_AXES[self.head]} different axes, batch first and the embedding last"
            )
        if "heads" in self.axes:
            raise ValueError(f"axes = {list(self.axes)}: 'heads' is reserved; rename that axis")
        for size in HEAD_SIZES[self.head]:
            if getattr(self.sizes, size) is None:
                raise ValueError(f"head = {self.head!r} needs sizes.{size}, e.g. {size} = 10")
        self._check_axis_names("block", [a for b in self.attends for a in b.axes], 1)
        self._check_axis_names("train.length", self.train.length, 0)
        return self

    def _check_axis_names(self, key: str, names, first: int) -> None:
        for name in names:
            if name not in self.axes[first:-1]:
                raise ValueError(
                    f"{key} names axis {name!r}; this model has {list(self.axes[first:-1])} there"
                )

    @property
    def attends(self) -> tuple[AttendBlock, ...]:
        """The attention blocks among `block`."""
        return tuple(b for b in self.block if isinstance(b, AttendBlock))


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        where = [str(p) for p in item["loc"] if p not in ("AttendBlock", "MlpBlock")]
        key = ".".join(where) or "file"
        if item["type"] == "extra_forbidden":
            said = f"unknown key, value {shown(item['input'])}; remove it or check its spelling"
        elif item["type"] == "missing":
            said = "missing; add it"
        elif item["type"] == "value_error":
            said = str(item["ctx"]["error"])
        else:
            said = f"{item['msg']}; found {shown(item['input'])}"
        lines.append(f"{source}: {key}: {said}")
    return "; ".join(lines)

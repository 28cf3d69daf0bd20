"""Model files: the axes of a model, its sizes and its blocks in order. They know of no mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from weft.declare import catalog
from weft.declare.explain import explain_validation
from weft.declare.numbers import Limit, Positive, Real, Width
from weft.errors import DeclarationError, did_you_mean, shown

from .heads import HEADS
from .model_blocks import (
    AXIS,
    GRID_MASKS,
    MOST_BLOCKS,
    AttendBlock,
    Block,
    CarryBlock,
    Frozen,
    MlpBlock,
    Plain,
    TriangleBlock,
    count_blocks,
    flatten,
)

#: Numbers in the weights of a model; the largest have a tenth of that.
MOST_WEIGHTS = 1 << 44

Range = tuple[Positive, Positive]
Beta = Annotated[Real, Field(ge=0, lt=1)]


class Sizes(Frozen):
    """Widths of the model, and the further sizes of its head.

    embed: width of a token.
    heads: query heads of every attention.
    kv_heads: key/value heads, default as many.
    classes: of the head `table`.
    vocabulary: of the head `tokens`.
    Other keys are those that a registered head says it needs.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Width]

    embed: Width
    heads: Width
    kv_heads: Width | None = None
    classes: Width | None = None
    vocabulary: Width | None = None

    @model_validator(mode="after")
    def _divide(self) -> Sizes:
        if self.embed % self.heads:
            raise ValueError(f"embed = {self.embed} is not a multiple of heads = {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads={self.kv_heads}")
        return self


#: Keys of `[train]` that are words.
WORDS = ("autocast", "gradients")


class TrainSpec(Frozen):
    """Training options of `weft train`.

    steps: length of a run.
    batch: examples per step, over all ranks.
    accumulate: parts that a batch is computed in, one after another; their gradients add up.
    length: per axis, the smallest and the largest global length that a step may draw.
    lr: peak learning rate of AdamW.
    warmup: share of the steps in which the learning rate rises to it; a cosine takes it to 0.
    betas: of AdamW.
    weight_decay: of AdamW.
    clip: largest norm of the gradient, over all ranks; inf: it is not clipped.
    autocast: the dtype of matrix products and attention, as `torch.autocast` has it, where that is
        not the parameters' own.
    gradients: what sums gradients over ranks: `"sync"` after the backward pass, `"ddp"` during it,
        `"fsdp"` likewise, with weights and optimizer states sharded over the ranks.
    checkpoint_every: steps between checkpoints; the last step is always saved.
    """

    steps: Positive = 300
    batch: Positive = 8
    accumulate: Positive = 1
    length: dict[str, Range] = Field(default_factory=dict)
    lr: Real = Field(1e-3, gt=0, allow_inf_nan=False)
    warmup: Real = Field(0.1, ge=0, lt=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Real = Field(0.01, ge=0, allow_inf_nan=False)
    clip: Limit = Field(1.0, gt=0)
    autocast: Literal["bfloat16"] | None = None
    gradients: Literal["sync", "ddp", "fsdp"] = "sync"
    checkpoint_every: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, Mapping) else ():
            if isinstance(value, str) and key not in WORDS:
                raise ValueError(f"{key} = {shown(value)}: give a number")
        return data

    @model_validator(mode="after")
    def _ordered(self) -> TrainSpec:
        for axis, (low, high) in self.length.items():
            if low > high:
                raise ValueError(
                    f"length.{axis} = [{low}, {high}]: give the smallest length first, then the"
                    " largest"
                )
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch = {self.batch} is not a multiple of accumulate = {self.accumulate}"
            )
        return self


class ContextSpec(Frozen):
    """A tensor given in the call, which blocks may take their keys and values from.

    axes: its dims, the embedding last. It is the same along axes of the model that it lacks.
    embed: its width, default that of the model.
    """

    axes: tuple[str, ...]
    embed: Width | None = None


class ModelSpec(Frozen):
    """A model file, validated.

    about: for `weft list` and readers.
    reference: where the model was published.
    head: what goes in and comes out: `table` (cells to a class per row), `tokens` (next token),
        `pair` (a number per pair), or a name given to `weft.register_head`. Without one the model
        is its blocks: embedded tensors in and out.
    axes: names of the dims of the activations, the embedding last; for a head the batch first.
    sizes: widths and numbers of heads.
    context: further input tensors, by name.
    norm: what normalises x before every block and at the end.
    repeat: how often the blocks run in order.
    block: the blocks.
    train: defaults of `weft train`.

    Raises:
        DeclarationError: the message names the file, the key, the value and what would work.

    >>> spec = ModelSpec.load("tabular")
    >>> spec.axes
    ('batch', 'rows', 'features', 'embed')
    """

    name: str = "model"
    about: str = ""
    reference: str = ""
    head: str | None = None
    axes: tuple[str, ...]
    sizes: Sizes
    context: dict[str, ContextSpec] = Field(default_factory=dict)
    norm: Literal["layer", "rms"] = "layer"
    repeat: Positive = 1
    block: tuple[Block, ...]
    train: TrainSpec = TrainSpec()  # type: ignore[call-arg]

    @classmethod
    def load(cls, name_or_path: str | Path) -> ModelSpec:
        """Read `models/NAME.toml`, or the file at a path.

        Args:
            name_or_path: the name, or the path.
        """
        data, source = catalog.read_declaration("models", name_or_path)
        return cls.from_dict(data, name=Path(name_or_path).stem, source=source)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, name: str = "model", source: str = "model"
    ) -> ModelSpec:
        """A model from the content of its file.

        Args:
            data: the content.
            name: what to call it.
            source: how to name it in messages.
        """
        try:
            return cls.model_validate({"name": name, **data})
        except ValidationError as error:
            raise DeclarationError(explain_validation(error, source, cls)) from None

    def training(self, changes: Mapping[str, Any], source: str = "train") -> ModelSpec:
        """The same model with other values in its `train` section.

        Args:
            changes: keys of `TrainSpec` with their values.
            source: how to name them in messages.

        Raises:
            DeclarationError: an unknown key, or a value that cannot be.

        >>> ModelSpec.load("tabular").training({"steps": 7}).train.steps
        7
        """
        lengths = changes.get("length")
        if isinstance(lengths, Mapping):  # of other axes they stay
            changes = {**changes, "length": {**self.train.length, **lengths}}
        try:
            train = TrainSpec.model_validate({**self.train.model_dump(), **changes})
        except ValidationError as error:
            raise DeclarationError(explain_validation(error, source, TrainSpec)) from None
        changed = self.model_copy(update={"train": train})
        try:
            changed._check_lengths()
        except ValueError as error:
            raise DeclarationError(f"{source}: {error}") from None
        return changed

    @property
    def blocks(self) -> tuple[Plain, ...]:
        """Every block in the order in which they run, repeats and groups written out."""
        return tuple(flatten(self.block) * self.repeat)

    @property
    def attends(self) -> tuple[AttendBlock, ...]:
        """The attention blocks among `blocks`."""
        return tuple(b for b in self.blocks if isinstance(b, AttendBlock))

    @property
    def carries(self) -> tuple[CarryBlock, ...]:
        """The recurrent blocks among `blocks`."""
        return tuple(b for b in self.blocks if isinstance(b, CarryBlock))

    @property
    def least_weights(self) -> int:
        """Numbers in the model's weights, at least: the products of blocks and head alone.

        >>> ModelSpec.load("tabular").least_weights
        148416
        """
        embed = self.sizes.embed
        count = embed * ((self.sizes.vocabulary or 0) + (self.sizes.classes or 0))
        for block in self.blocks:
            if isinstance(block, MlpBlock):
                count += 2 * embed * block.mlp
            elif isinstance(block, TriangleBlock):
                count += 2 * embed * (block.hidden or embed)
            elif isinstance(block, CarryBlock):
                heads = block.heads or self.sizes.heads
                count += 2 * embed * heads * (block.head_dim or embed // heads)
            else:
                count += 2 * embed * embed
        return count

    # -- whether the parts fit together --------------------------------------------------------

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        self._check_axes()
        self._check_head()
        if count_blocks(self.block) * self.repeat > MOST_BLOCKS:
            raise ValueError(f"repeat: a model has at most {MOST_BLOCKS:,} blocks")
        if not self.blocks:
            raise ValueError("block: a model has at least one [[block]]")
        for name, context in self.context.items():
            self._check_context(name, context)
        for block in flatten(self.block):
            if isinstance(block, AttendBlock):
                self._check_attend(block)
            elif isinstance(block, CarryBlock):
                self._check_carry(block)
            elif isinstance(block, TriangleBlock):
                self._check_pair(f"block with triangle = {block.triangle!r}")
        self._check_lengths()
        if self.least_weights > MOST_WEIGHTS:
            raise ValueError(
                f"sizes: its weights are {self.least_weights:,} numbers at least, and a model has"
                f" at most {MOST_WEIGHTS:,}; make embed, or the width of a block, smaller"
            )
        return self

    def _check_lengths(self) -> None:
        for name in self.train.length:
            if name not in self.axes[:-1]:
                raise ValueError(
                    f"train.length names axis {name!r}{did_you_mean(name, self.axes[:-1])}"
                )

    def _check_axes(self) -> None:
        if len(self.axes) < 2 or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"axes = {list(self.axes)}: name two or more different axes, the embedding last"
            )
        for name in self.axes:
            if not AXIS.fullmatch(name):
                raise ValueError(f"axes: {name!r} is no name; use letters, digits and _")
            if name == "heads":
                raise ValueError(f"axes = {list(self.axes)}: 'heads' is reserved; rename that axis")

    def _check_head(self) -> None:
        if self.head is not None and self.head not in HEADS:
            raise ValueError(
                f"head = {shown(self.head)}: there is no such head{did_you_mean(self.head, HEADS)};"
                " weft.register_head adds one, and without the key the model is its blocks"
            )
        head = HEADS.get(self.head or "")
        if head is not None and head.axes not in (None, len(self.axes)):
            raise ValueError(
                f"axes = {list(self.axes)}: head = {self.head!r} needs {head.axes} different axes,"
                " batch first and the embedding last"
            )
        required = () if head is None else head.sizes
        for size in required:
            if getattr(self.sizes, size, None) is None:
                raise ValueError(f"head = {self.head!r} needs sizes.{size}, e.g. {size} = 10")
        for size in self.sizes.model_extra or {}:
            if size not in required:
                names = [*type(self.sizes).model_fields, *required]
                raise ValueError(f"unknown key 'sizes.{size}'{did_you_mean(size, names)}")

    def _check_context(self, name: str, context: ContextSpec) -> None:
        if (
            len(context.axes) < 2
            or len(set(context.axes)) != len(context.axes)
            or "heads" in context.axes
        ):
            raise ValueError(
                f"context.{name}.axes = {list(context.axes)}: name different axes, the embedding"
                " last; 'heads' is reserved"
            )
        if name in self.axes:
            raise ValueError(f"context.{name}: {name!r} is an axis; give the context another name")

    def _check_attend(self, block: AttendBlock) -> None:
        where = f"block with attend = {'+'.join(block.attend)!r}"
        axes = self.axes[0 if self.head is None else 1 :]
        if block.context is not None:
            if block.context not in self.context:
                raise ValueError(
                    f"{where}: no context is called {block.context!r}"
                    f"{did_you_mean(block.context, self.context)}; declare it in [context]"
                )
            axes = self.context[block.context].axes
        for name in block.attend:
            if name not in axes[:-1]:
                raise ValueError(f"{where}: there is no axis {name!r}; attend one of {axes[:-1]}")
        if len(set(block.attend)) != len(block.attend):
            raise ValueError(f"{where}: an axis is named twice")
        if block.bias == ("triangle", None):
            self._check_pair(f"{where} and bias = 'triangle'")
            if block.context or len(block.attend) > 1 or block.attend[0] not in self.axes[1:3]:
                raise ValueError(
                    f"{where}: bias = 'triangle' is for attention over one pair axis of x,"
                    f" {self.axes[1]!r} or {self.axes[2]!r}"
                )
        for name, options in block.mask:
            if name in GRID_MASKS:
                self._check_grid(block, dict(options), where)
        self._check_distances(block, where)
        self._check_heads(block, where)

    def _check_grid(self, block: AttendBlock, options: Mapping[str, Any], where: str) -> None:
        """Refuses a mask of a grid that has other axes than the block attends."""
        if block.context is not None:
            raise ValueError(f"{where}: {next(iter(options))!r} is of x itself, not of a context")
        for key, value in options.items():
            if key == "circular":
                for name in value:
                    if name not in block.attend:
                        raise ValueError(
                            f"{where}: circular = {name!r}{did_you_mean(name, block.attend)}"
                        )
            elif isinstance(value, tuple) and len(value) != len(block.attend):
                raise ValueError(
                    f"{where}: {key} = {list(value)} needs one number per axis, {len(block.attend)}"
                )

    def _check_carry(self, block: CarryBlock) -> None:
        where, axes = (
            f"block with carry = {block.carry!r}",
            self.axes[0 if self.head is None else 1 :],
        )
        if block.carry not in axes[:-1]:
            raise ValueError(f"{where}: there is no axis {block.carry!r}; carry one of {axes[:-1]}")
        heads = block.heads or self.sizes.heads
        if block.head_dim is None and self.sizes.embed % heads:
            raise ValueError(
                f"{where}: embed = {self.sizes.embed} is not a multiple of heads = {heads}; say"
                " head_dim"
            )

    def _check_distances(self, block: AttendBlock, where: str) -> None:
        """Refuses distances to keys of a context along axes that those of queries do not match."""
        kind, reach = block.bias or ("", None)
        if kind != "relative" or block.context is None or set(block.attend) & set(self.axes):
            return
        of_context = self.context[block.context].axes
        queries = [name for name in self.axes[:-1] if name not in of_context]
        if len(queries) != len(block.attend):
            raise ValueError(
                f"{where}: relative = {reach} counts distances from the query axes {queries}, those"
                f" that context {block.context!r} lacks, to the key axes {list(block.attend)}, one"
                " by one: they must be equally many; write { pair = 'name', width = 16 } instead"
            )

    def _check_pair(self, where: str) -> None:
        if len(self.axes) != 4:
            raise ValueError(
                f"{where}: the model must have four axes, batch, two pair axes and the embedding;"
                f" found {list(self.axes)}"
            )

    def _check_heads(self, block: AttendBlock, where: str) -> None:
        heads = block.heads or self.sizes.heads
        kv_heads = block.kv_heads or (heads if block.heads else self.sizes.kv_heads) or heads
        if self.sizes.embed % heads or heads % kv_heads:
            raise ValueError(
                f"{where}: embed = {self.sizes.embed} must be a multiple of heads = {heads}, and"
                f" that of kv_heads = {kv_heads}"
            )
        rope = block.attend if block.rope is True else block.rope or ()
        dim = self.sizes.embed // heads
        if any(a not in block.attend for a in rope) or (rope and dim % (2 * len(rope))):
            raise ValueError(
                f"{where}: rope = {block.rope} needs attended axes and a head dim that is a"
                f" multiple of {2 * max(1, len(rope))}; the head dim is {dim}"
            )

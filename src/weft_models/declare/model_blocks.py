"""The blocks a model file may list: attention, recurrences, perceptrons, triangles, groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_serializer,
    field_validator,
)

from weft.declare.numbers import Positive, Real, Width
from weft.errors import did_you_mean, shown

#: Blocks of a model, repeats written out.
MOST_BLOCKS = 10_000

#: what a mask of that name takes in a file, and whether it may be left for the call
MASKS = {
    "full": ("", False),
    "causal": ("{ window = 4 }, or nothing", False),
    "window": ("[left, right], keys on either side of a query", False),
    "first-keys": ("how many leading positions are keys", True),
    "prefix": ("how many leading positions see each other both ways; the rest is causal", True),
    "documents": ("lengths of the sequences packed one after another", True),
    "padding": ("how many keys each sequence has", True),
    "given": ("a name; the call gives a weft.Mask under it", True),
    "near": ("how many keys a query sees around it, one number or one per attended axis", False),
    "boxes": ("the size of a box, one number or one per attended axis", False),
}
#: masks of a grid, with the keys that may stand beside them
GRID_MASKS = {"near": ("dilation", "circular"), "boxes": ("shift", "circular")}
BIASES = ("alibi", "relative", "pair", "triangle")


class Frozen(BaseModel):
    """Immutable, and strict about unknown keys."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")


class AttendBlock(Frozen):
    """`x + attention(norm(x))` over one axis, or over several jointly.

    attend: the attended axis, `"lat+lon"` or a list for several, the first one outermost.
    context: the name of a `[context]` that keys and values come from, default x itself.
    mask: by name, with its parameters: `"causal"`, `{ window = [4, 0] }`, `{ first-keys = 6 }`; a
        list joins several. Over a grid of axes `{ near = [7, 7], dilation = 2 }` is a neighbourhood
        and `{ boxes = [6, 12], shift = [3, 6] }` the windows of Swin; `circular = "lon"`, or a
        list, names axes without ends. `first-keys`, `prefix`, `documents` and `padding` without
        parameters, and `{ given = "name" }`, take theirs from the call. `padding` counts keys of
        every sequence over all ranks: one for each place on the axes that are not attended, the
        first axis outermost; of a replicated context, on those it shares with x.
    bias: of the scores: `"alibi"`; `{ relative = 8 }`, a learned number per head and distance up
        to 8, over a context that x lacks from each query axis to the key axis in its place;
        `{ pair = "name", width = 16 }`, a learned projection of a tensor over pairs of positions,
        given in the call; `"triangle"`, a learned projection of x itself, a pair tensor, where its
        other pair axis is the query and the attended one the key.
    rope: rotary positions, of all attended axes or of those in a list.
    gate: what heads give is multiplied by the sigmoid of another projection of x.
    qk_norm: queries and keys scaled to unit root mean square, with a learned gain.
    heads: instead of those in `[sizes]`.
    kv_heads: instead of those in `[sizes]`; default as many as heads, where these are given.
    scale: factor on the scores, default head dim ** -0.5.
    init_k_from_q: key projections start as copies of the query projections.
    routing: changes options of the layout's learned routing; a layout that does not route these
        axes computes full attention and does not read it.
    """

    attend: tuple[str, ...]
    context: str | None = None
    mask: tuple[tuple[str, Any], ...] = ()
    bias: tuple[str, Any] | None = None
    rope: bool | tuple[str, ...] = False
    gate: bool = False
    qk_norm: bool = False
    heads: Width | None = None
    kv_heads: Width | None = None
    scale: Real | None = Field(None, gt=0)
    init_k_from_q: bool = False
    routing: dict[str, Any] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The attended axes."""
        return self.attend

    @property
    def kind(self) -> str:
        """The name of the block where a layout is chosen for it."""
        return self.context or "+".join(self.attend)

    @property
    def masks_of_call(self) -> tuple[str, ...]:
        """The names under which the call gives what the mask leaves open.

        >>> AttendBlock(attend="t", mask=["causal", "documents", {"given": "mine"}]).masks_of_call
        ('documents', 'mine')
        """
        return tuple(
            value if name == "given" else name
            for name, value in self.mask
            if name == "given" or (value is None and MASKS[name][1])
        )

    @property
    def biases_of_call(self) -> tuple[str, ...]:
        """The names under which the call gives tensors for the bias."""
        return (self.bias[1][0],) if self.bias and self.bias[0] == "pair" else ()

    @field_validator("attend", mode="before")
    @classmethod
    def _axes(cls, value: Any) -> tuple[str, ...]:
        return axes_of(value)

    @field_validator("mask", mode="before")
    @classmethod
    def _masks(cls, value: Any) -> tuple[tuple[str, Any], ...]:
        parts = value if isinstance(value, list | tuple) else [value]
        return tuple(p for part in parts for p in _mask_parts(part))

    @field_validator("bias", mode="before")
    @classmethod
    def _bias(cls, value: Any) -> tuple[str, Any]:
        table = {value: None} if isinstance(value, str) else value
        kind = next((k for k in table if k in BIASES), None) if isinstance(table, Mapping) else None
        required: dict[str, set[str]] = {key: set() for key in BIASES} | {"pair": {"width"}}
        if kind is None or set(table) - {kind} != required[kind]:
            raise ValueError(
                f"{shown(value)} is no bias; write 'alibi', 'triangle', {{ relative = 8 }} or"
                " { pair = 'name', width = 16 }"
            )
        if kind == "pair":
            return kind, (str(table["pair"]), _count(table["width"], "width"))
        if kind == "relative":
            return kind, _count(table["relative"], "relative")
        if table[kind] is not None and table[kind] is not True:
            raise ValueError(f"{kind!r} takes nothing, found {shown(table[kind])}")
        return kind, None

    @field_serializer("mask")
    def _masks_as_written(self, parts: tuple[tuple[str, Any], ...]) -> list[Any]:
        return [
            dict(value) if name in GRID_MASKS else name if value is None else {name: value}
            for name, value in parts
        ]

    @field_serializer("bias")
    def _bias_as_written(self, bias: tuple[str, Any] | None) -> Any:
        if bias is None or bias[1] is None:
            return bias and bias[0]
        kind, value = bias
        return {kind: value[0], "width": value[1]} if kind == "pair" else {kind: value}

    @field_validator("rope", mode="before")
    @classmethod
    def _rope(cls, value: Any) -> bool | tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        listed = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
        if not isinstance(value, bool) and not listed:
            raise ValueError(f"{shown(value)}: write true, or a list of attended axes")
        return value if isinstance(value, bool) else tuple(names)


def _mask_parts(part: Any) -> list[tuple[str, Any]]:
    table = {part: None} if isinstance(part, str) else part
    if not isinstance(table, Mapping):
        raise ValueError(f"{shown(part)} is no mask; write 'causal', or {{ window = [4, 0] }}")
    grid = next((name for name in GRID_MASKS if name in table), None)
    if grid is not None:
        keys = (grid, *(key for key in GRID_MASKS[grid] if key in table))
        options = {
            key: _names(table[key])
            if key == "circular"
            else _counts(table, key, int(key in (grid, "dilation")))
            for key in keys
        }
        rest = {k: v for k, v in table.items() if k not in keys}
        return [(grid, tuple(options.items())), *(_mask_parts(rest) if rest else [])]
    for name, value in table.items():
        if name not in MASKS:
            raise ValueError(f"no mask is called {shown(name)}{did_you_mean(name, MASKS)}")
        if not _fits(name, value):
            raise ValueError(
                f"mask {name!r} takes {MASKS[name][0] or 'nothing'}, found {shown(value)}"
            )
    return [(name, _frozen(value)) for name, value in table.items() if name != "full"]


def _fits(name: str, value: Any) -> bool:
    number = _is_count(value, 0)
    several = isinstance(value, list | tuple) and all(_is_count(v, 0) for v in value)
    fits = {
        "full": value is None or value is True,
        "causal": value is None
        or value is True
        or (
            isinstance(value, Mapping)
            and set(value) == {"window"}
            and _is_count(value["window"], 1)
        ),
        "window": several and len(value) == 2,
        "first-keys": value is None or number,
        "prefix": value is None or number,
        "documents": value is None or several,
        "padding": value is None or several,
        "given": isinstance(value, str),
    }
    return bool(fits[name])


def _counts(table: Mapping, key: str, least: int) -> int | tuple[int, ...]:
    value = table[key]
    several = isinstance(value, list | tuple) and value and all(_is_count(v, least) for v in value)
    if not several and not _is_count(value, least):
        raise ValueError(
            f"{key} = {shown(value)}: give a whole number, {least} or more, or one per attended"
            " axis"
        )
    return tuple(value) if several else value


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"circular = {shown(value)}: name an attended axis, or a list of them")
    return tuple(names)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _count(value: Any, key: str) -> int:
    if not _is_count(value, 1):
        raise ValueError(f"{key} = {shown(value)}: give a whole number, 1 or more")
    return value


class MlpBlock(Frozen):
    """`x + W2 f(W1 norm(x))`, a two-layer perceptron on every token.

    mlp: its hidden width.
    activation: f.
    gated: multiply f(W1 x) by another projection of x (GLU, arXiv:2002.05202).
    """

    mlp: Width
    activation: Literal["gelu", "silu", "relu"] = "gelu"
    gated: bool = False


class TriangleBlock(Frozen):
    """`x + triangle(norm(x))`: every pair (i, j) from the pairs (i, k) and (j, k), for all k.

    triangle: `"outgoing"` or `"incoming"` edges. The model's axes are batch, two pair axes, embed.
    hidden: channels that are multiplied, default `embed`.
    """

    triangle: Literal["outgoing", "incoming"]
    hidden: Width | None = None


class CarryBlock(Frozen):
    """`x + recurrence(norm(x))` along one axis: Gated DeltaNet after a short convolution.

    carry: the axis, in whose order tokens are read; a token sees those before it.
    heads: instead of those in `[sizes]`.
    head_dim: of queries, keys and values, default embed / heads.
    conv: taps of the causal convolution.
    """

    carry: str
    heads: Width | None = None
    head_dim: Width | None = None
    conv: Width = 4


def axes_of(value: Any) -> tuple[str, ...]:
    """Axes as a file names them: `"lat"`, `"lat+lon"` or a list. Raises `ValueError` for others."""
    names = value.split("+") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{shown(value)} is no axis; write 'rows', or 'lat+lon' for several")
    return tuple(n.strip() for n in names)


class GroupBlock(Frozen):
    """Blocks that are repeated together.

    repeat: how often.
    block: the blocks, as at the top of the file.
    """

    repeat: Positive = 1
    block: tuple[Block, ...]


def _which(value: Any) -> str | None:
    if isinstance(value, BaseModel):
        return type(value).__name__
    kinds = {"attend": AttendBlock, "carry": CarryBlock, "mlp": MlpBlock}
    kinds |= {"triangle": TriangleBlock, "block": GroupBlock}
    names = [kinds[k].__name__ for k in kinds if isinstance(value, Mapping) and k in value]
    return names[0] if len(names) == 1 else None


Block = Annotated[
    Annotated[AttendBlock, Tag("AttendBlock")]
    | Annotated[CarryBlock, Tag("CarryBlock")]
    | Annotated[MlpBlock, Tag("MlpBlock")]
    | Annotated[TriangleBlock, Tag("TriangleBlock")]
    | Annotated[GroupBlock, Tag("GroupBlock")],
    Discriminator(
        _which,
        custom_error_type="block",
        custom_error_message=(
            "a block has exactly one of the keys attend, carry, mlp, triangle and block;"
            " convolutions, norms and pools are torch's own, on a weft.Field"
        ),
    ),
]

GroupBlock.model_rebuild()

AXIS = re.compile(r"[A-Za-z_]\w*")


def count_blocks(blocks: tuple) -> int:
    """The number of blocks that run, groups repeated.

    >>> count_blocks((GroupBlock(repeat=3, block=(MlpBlock(mlp=4), MlpBlock(mlp=4))),))
    6
    """
    return sum(
        count_blocks(block.block) * block.repeat if isinstance(block, GroupBlock) else 1
        for block in blocks
    )


#: A block that runs: groups are written out.
Plain = AttendBlock | CarryBlock | MlpBlock | TriangleBlock


def flatten(blocks: tuple) -> list[Plain]:
    """Blocks in the order in which they run, groups repeated."""
    return [
        one
        for block in blocks
        for one in (
            flatten(block.block) * block.repeat if isinstance(block, GroupBlock) else [block]
        )
    ]

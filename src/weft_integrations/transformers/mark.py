"""The `attention_mask` that layers get: masks of weft, which become tensors where used as such."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from weft._doors import PACKAGES
from weft._torch import pytree
from weft.errors import UnsupportedError
from weft.layout import Layout
from weft.masks import Mask


class Marked(type):
    """Gives a class every operator that tensors have: of the tensor that it is, or they refuse."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Marked:
        operators = (
            *("getitem", "setitem", "len", "iter", "bool", "invert", "neg", "add", "radd", "sub"),
            *("rsub", "mul", "rmul", "truediv", "and", "rand", "or", "ror", "lt", "le", "gt", "ge"),
        )
        for operator in operators:
            space.setdefault(f"__{operator}__", _of_tensor(f"__{operator}__"))
        return super().__new__(cls, name, bases, space)


def _of_tensor(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self._tensor(name), name)(*args, **kwargs)


_MASK = (
    "attention_mask as a tensor",
    "on a shard it is a mark that says who sees whom, for the attention interface only",
)


def touched(label: str, subject: tuple[str, str]) -> NoReturn:
    """Raise, naming the model's code that used a marker as a tensor.

    Args:
        label: the use.
        subject: what was used, and what it is.
    """
    frame = sys._getframe(2)
    libraries = tuple(f"{package}." for package in (*PACKAGES, "torch"))
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(libraries):
        frame = frame.f_back
    code = frame.f_code
    raise UnsupportedError(
        f"{frame.f_globals.get('__name__', code.co_filename)}, line {frame.f_lineno}, in "
        f"{code.co_name}: uses {subject[0]} ({label}); {subject[1]}, so weft cannot run this model"
    )


class Untouchable(metaclass=Marked):
    """An argument that is no tensor: used as one it raises `UnsupportedError` naming the code."""

    subject: tuple[str, str]

    def _tensor(self, name: str) -> Tensor:
        """The tensor that it is."""
        touched(name, self.subject)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tensor(f".{name}"), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))

        def tensor(x: Any) -> Any:
            return x._tensor(name) if isinstance(x, Untouchable) else x

        return func(*pytree.tree_map(tensor, args), **pytree.tree_map(tensor, kwargs or {}))


class Mark(Untouchable):
    """A mask that is no tensor."""

    subject = _MASK


@dataclass(frozen=True, eq=False)
class OfCache(Mark):
    """The `attention_mask` of layers where keys are a cache's.

    Attributes:
        function: of transformers, which query sees which key.
        rows: of the batch.
        queries: how many.
        first: the position of the first query.
        keys: how many positions of keys there are, and the first of them.
        padding: (rows, positions), those that are not padding; None: all.
        refusal: why this mask cannot be honoured.
    """

    function: Callable
    rows: int
    queries: int
    first: int
    keys: tuple[int, int]
    padding: Tensor | None
    refusal: str = ""


@dataclass(frozen=True)
class Sharded(Mark):
    """The `attention_mask` of layers: the mask, and the layout of its tokens.

    Attributes:
        layout: a bound layout.
        axis: its name for the tokens.
        mask: at positions of all tokens.
        lengths: of queries and keys.
        cached: keys and values go into a cache.
        past: the mask of keys that were in the cache before.
        refusal: why this mask cannot be honoured: raised by the first layer to use it.
        left_out: transformers' sdpa gets none, and is causal where a layer says so.
        make: the tensor that transformers makes of it, for code that uses it as one.
    """

    layout: Layout
    axis: str
    mask: Mask
    lengths: tuple[int, int]
    cached: bool = False
    past: OfCache | None = None
    refusal: str = ""
    left_out: bool = False
    make: Callable[[], Tensor] | None = field(default=None, compare=False)

    def __getitem__(self, index: Any) -> Any:
        """The same for the mask of one head, as all heads have: an indexer asks for it."""
        if index in ((slice(None), 0), (slice(None), 0, slice(None), slice(None))):
            return self
        return self._tensor("__getitem__")[index]

    def _tensor(self, name: str) -> Tensor:
        return super()._tensor(name) if self.make is None or self.refusal else self.make()

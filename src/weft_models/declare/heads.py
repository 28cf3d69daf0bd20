"""Heads by name: the embedding and output layers that a model file's `head` selects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import DeclarationError


@dataclass(frozen=True)
class Head:
    """A head: what makes the model, and what its model files must say.

    `make(spec, layout, generator)` returns a module; text "module:name" is imported when used.
    `sizes` are keys of `[sizes]` that it needs; `axes` is how many axes, None for any number.
    """

    make: Callable[..., Any] | str
    sizes: tuple[str, ...] = ()
    axes: int | None = None

    def maker(self) -> Callable[..., Any]:
        """The function that makes the model."""
        if not isinstance(self.make, str):
            return self.make
        module, _, name = self.make.partition(":")
        return getattr(importlib.import_module(module), name)


HEADS: dict[str, Head] = {
    "table": Head("weft_models.models.tabular:TableModel", ("classes",), 4),
    "tokens": Head("weft_models.models.token_pair:TokenModel", ("vocabulary",), 3),
    "pair": Head("weft_models.models.token_pair:PairModel", (), 4),
}


def register_head(
    name: str, make: Callable[..., Any], *, sizes: Sequence[str] = (), axes: int | None = None
) -> None:
    """Lets model files say `head = NAME`.

    Args:
        name: what the file says.
        make: called as `make(spec, layout, generator)`, returns the module that `weft.compose`
            returns: your embeddings and heads round `weft.models.Trunk(spec, layout, generator)`.
        sizes: keys of `[sizes]` that the head needs; the module finds them in `spec.sizes`.
        axes: how many axes the model must have, default any number.

    Raises:
        DeclarationError: the name is taken by another head.

    >>> class Mean(torch.nn.Module):
    ...     def __init__(self, spec, layout, generator):
    ...         super().__init__()
    ...         self.trunk = weft.models.Trunk(spec, layout, generator)
    ...         self.score = torch.nn.Linear(spec.sizes.embed, spec.sizes.targets)
    ...     def forward(self, x):
    ...         return self.score(self.trunk(x).mean(1))
    >>> weft.register_head("mean", Mean, sizes=["targets"])
    >>> spec = weft.models.ModelSpec.from_dict({
    ...     "head": "mean", "axes": ["batch", "tokens", "embed"],
    ...     "sizes": {"embed": 16, "heads": 2, "targets": 3}, "block": [{"attend": "tokens"}]})
    >>> weft.compose(spec)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 3])
    """
    if name in HEADS and HEADS[name].make is not make:
        raise DeclarationError(f"head {name!r} is taken; register yours under another name")
    HEADS[name] = Head(make, tuple(sizes), axes)

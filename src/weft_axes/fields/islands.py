"""Islands: modules that treat positions one by one, on local tensors in one step.

Routed experts promise it; of others their code proves it. A hook, a replaced `forward` or another
module within has an island run on fields, as all other modules do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from weft.errors import UnsupportedError

from .dims import Dim, is_split_dim, whole
from .field import Field, settled
from .index import FieldsAtHand, dims_of
from .proof import proof_of

#: The attribute of an island that has its proof.
PROOF = "_weft_proof"


def on_positions(name: str, run: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function of single positions, rows (..., d), on the rows that each rank holds.

    All tensors of as many rows are placed as the first field is; results have its rows, too.
    Raises `UnsupportedError` where features are split.
    """
    values = [*args, *kwargs.values()]
    first = next((v for v in values if isinstance(v, Field)), None)
    if first is None:
        return run(*args, **kwargs)
    lead: tuple[Dim, ...] = first._dims[:-1]
    look, n = FieldsAtHand(name, *values), len(lead)

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        rows = x.shape[:n] == first.shape[:n]
        rest = dims_of(x)[n if rows else 0 :]
        if any(map(is_split_dim, rest)):
            raise UnsupportedError(f"{name}: features of a weft.Field are split: {x}")
        return look.placed(x, [*lead, *rest]) if rows else look.local(x)

    result = run(*map(placed, args), **{k: placed(v) for k, v in kwargs.items()})
    here = tuple(map(look.region.local_size, lead))

    def back(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return type(t)(map(back, t)) if isinstance(t, list | tuple) else t
        if tuple(t.shape[:n]) != here:
            raise UnsupportedError(f"{name} gave {tuple(t.shape)} of {here} rows: no island")
        made = settled(t, [*lead, *(whole(m) for m in t.shape[n:])], look.region)
        made._trail = look.trail
        return made

    return back(result)


def proven_islands(model: nn.Module) -> Iterator[nn.Module]:
    """Modules of more than one function whose code proves it, which are given `on_rows`."""
    within: set[nn.Module] = set()
    for module in model.modules():
        if module in within or "forward" in vars(module):
            continue
        proof = proof_of(module)
        if proof is not None and proof.functions > 1:
            within |= {inner for inner, *_ in proof.modules}
            vars(module)[PROOF] = proof
            yield module


def on_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A module's `forward` of rows, on those that a rank holds where its proof holds."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if type(x) is not Field or not x._place.shape or is_split_dim(x._place.dims[-1]):
        return type(self).forward(self, *args, **kwargs)
    proof, trail = vars(self)[PROOF], x._trail
    if x._copied is None and not x._is_unpacked and proof.holds():
        y = (proof.run or type(self).forward)(self, x._checked()._local)
        places, key = x._region.places, (x._place, y.shape[-1])
        if key not in places:
            places[key] = x._region.place([*x._dims[:-1], whole(y.shape[-1])])
        made = Field(y, places[key])
    else:
        made = type(self).forward(self, x)
    if type(made) is Field:  # ranks may have other hooks, and agree nevertheless
        made._trail = hash((proof.digest, trail))
    return made


__all__ = ["PROOF", "on_positions", "on_rows", "proven_islands"]

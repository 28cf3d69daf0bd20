"""Islands: modules that treat positions one by one, on local tensors in one step.

Routed experts promise it; of others their code proves it. A hook, a replaced `forward` or another
module within has an island run on fields, as all other modules do. So do functions whose code
proves that they align tensors from their last dim on, such as those of rotary positions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from weft._torch import function_modes
from weft.errors import UnsupportedError

from .dims import Dim, dim_size, is_split_dim, whole
from .field import Field, settled
from .index import FieldsAtHand, dims_of
from .place import FieldPlace
from .proof import AlignedProof, proof_of

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
        dims = [*lead, *(whole(m) for m in t.shape[n:])]
        return settled(t, dims, look.region, look.trail)

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


def aligned_functions(forward: Callable) -> dict[str, Callable]:
    """Functions that a module's `forward` calls by name and that are islands: name -> that."""
    inner: Any = inspect.unwrap(forward)
    code, outside = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    names = [n for n in code.co_names if type(outside.get(n)) is types.FunctionType] if code else []
    proofs = {n: proof_of(outside[n]) for n in names}
    return {n: on_aligned(p, outside, n) for n, p in proofs.items() if p and p.functions > 3}


def on_aligned(proof: AlignedProof, outside: dict, name: str) -> Callable:
    """The function by a name, on what a rank holds where nothing is to move to align it.

    The first call of some places runs on fields, and says which places its results have.
    """
    function = proof.function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        are_fields = len(args) == proof.given and all(type(a) is Field for a in args)
        if kwargs or not are_fields or outside.get(name) is not function or function_modes():
            return outside[name](*args, **kwargs)
        region, places = args[0]._place.region, [a._place for a in args]
        key = (function, *places)
        kept = region.recipes.get(key)
        alone = all(a._copied is None and not a._is_unpacked for a in args)
        is_local = kept and alone and proof.holds()
        result = function(*((a._checked()._local for a in args) if is_local else args))
        made = result if isinstance(result, tuple) else (result,)
        if is_local:
            made = tuple(map(Field, made, kept))
        elif kept is None:
            aligned = all(p.region is region for p in places) and _is_aligned(proof, places)
            region.keep(key, tuple(x._place for x in made) if aligned else ())
        trail = hash((proof.digest, *(a._trail for a in args)))
        for x in made:
            x._trail = trail
        return made if isinstance(result, tuple) else made[0]

    return call


def _is_aligned(proof: AlignedProof, places: Sequence[FieldPlace]) -> bool:
    """True if tensors of some places split the same dims alike, from their last, whole one on."""
    rows = [[*place.dims] for place in places]
    for i, at in proof.inserted.items():
        rows[i].insert(at, whole(1))
    for column in itertools.zip_longest(*(row[::-1] for row in rows), fillvalue=whole(1)):
        split = {*filter(is_split_dim, column)}
        if len(split) > 1 or (split and any(dim_size(d) != 1 for d in {*column} - split)):
            return False
    return not any(is_split_dim(row[-1]) for row in rows)


__all__ = ["PROOF", "aligned_functions", "on_aligned", "on_positions", "on_rows", "proven_islands"]

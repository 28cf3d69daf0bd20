"""Rules of products: letters of an einsum, each of which is split by the first dim that has it.

b q d, b k d -> b q k       queries and keys split by one axis: keys come to every rank
b n c, b n e -> b c e       n is split: every rank has a share of the sum, shares are added
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.declare.strategy import Role
from weft.kernels import accumulate_dtype
from weft.runtime.autocast import without_autocast

from .dims import Dim, dim_size, is_split_dim, split_axes, whole
from .exchange import summed
from .registry import (
    Part,
    Recipe,
    both,
    cast_for_autocast,
    composite,
    on_locals,
    parts_in,
    refused,
    rule,
)
from .views import at

_Product = Callable[..., Tensor]


def contracted(
    parts: Sequence[Part], letters: Sequence[str], out: str, product: _Product, label: str
) -> Recipe:
    """The recipe of a product of tensors whose dims have letters.

    Args:
        parts: the tensors.
        letters: of every tensor, one per dim.
        out: those of the result; the others are summed over.
        product: of the local tensors.
        label: what users call.
    """
    every = list(dict.fromkeys("".join(letters)))
    dims = _dims_of_letters(parts, letters, [c for c in every if c in out], every, label)
    goals = {
        p.index: [
            dims[c] if p.shape[d] != 1 or dim_size(dims[c]) == 1 else whole(1)
            for d, c in enumerate(own)
        ]
        for p, own in zip(parts, letters)
    }
    shared = [dims[c] for c in every if c not in out and is_split_dim(dims[c])]
    region = parts[0].region
    placed = [dims[c] for c in out]
    if not shared:
        return on_locals(product, parts, placed, goals)

    def run(t: list[Any]) -> Tensor:
        tensors = cast_for_autocast(*(t[p.index] for p in parts))
        kind = tensors[0].dtype
        if kind.is_floating_point:
            wide = accumulate_dtype(kind)
            tensors = [x.to(wide) for x in tensors]
        exact = without_autocast(lambda *t: product(*t))(*tensors)
        return summed(exact, shared, region).to(kind)

    return Recipe(run, placed, goals)


def _dims_of_letters(
    parts: Sequence[Part], letters: Sequence[str], kept: list[str], every: list[str], label: str
) -> dict[str, Dim]:
    """The dim of each letter: an axis splits one, of the result's the first that has it."""
    found: dict[str, list[tuple[Part, Dim]]] = {c: [] for c in every}
    for p, own in zip(parts, letters):
        for d, c in enumerate(own):
            found[c].append((p, p.dims[d]))
    taken: set[str] = set()
    dims: dict[str, Dim] = {}
    for c in [*kept, *(c for c in every if c not in kept)]:
        large = [dim for _, dim in found[c] if dim_size(dim) != 1] or [found[c][0][1]]
        dims[c] = whole(dim_size(large[0]))
        for p, dim in found[c]:
            axes = {*split_axes(dim)}
            if not axes:
                continue
            if taken & axes:
                _check_keys_may_come(p, axes & taken, label)
            else:
                dims[c] = dim
                taken |= axes
                break
    return dims


def _check_keys_may_come(x: Part, axes: set[str], label: str) -> None:
    """Raise unless the layout, or a fallback, has keys come to the ranks that split queries."""
    if x.region.whole is not None:
        return
    layout = x.region.layout
    for axis in axes:
        rules = layout.rules(axis) if axis in layout.attend else {}
        roles = [rules[m].role for m in layout.shard_dims(axis) if m in rules]
        if not roles or any(role is not Role.QUERY for role in roles):
            raise refused(
                f"{label} of all positions with all along {axis}",
                x,
                ": attention that is written out needs keys that come to queries, such as"
                f" '{axis}: gather={layout.size(axis)}'; or take it from torch's"
                " scaled_dot_product_attention (attn_implementation='sdpa')",
            )


@rule(F.linear)
def _linear(x: Part, weight: Part, bias: Part | None = None) -> Recipe:
    lead = string.ascii_lowercase[: x.ndim - 1]
    of_one = weight.ndim == 1
    recipe = contracted(
        (x, weight),
        (f"{lead}Z", "Z" if of_one else "YZ"),
        lead if of_one else f"{lead}Y",
        F.linear,
        "linear",
    )
    if bias is None:
        return recipe
    if not any(x.is_split(d) for d in (x.ndim - 1,)) and not weight.is_field:
        return recipe._replace(run=lambda t: F.linear(t[x.index], t[weight.index], t[bias.index]))
    goals = {**recipe.goals, bias.index: list(recipe.out[-1:]) if not of_one else []}
    return Recipe(lambda t: recipe.run(t) + t[bias.index].to(t[x.index].dtype), recipe.out, goals)


@rule(*both("matmul", "bmm", "mm", "mv", "dot", "__matmul__"))
def matmul(a: Part, b: Part) -> Recipe:
    n = max(a.ndim, b.ndim) - 2
    batch = string.ascii_lowercase[: max(n, 0)]
    one = batch[max(n, 0) - (a.ndim - 2) :] + "YZ" if a.ndim > 1 else "Z"
    two = batch[max(n, 0) - (b.ndim - 2) :] + "ZX" if b.ndim > 1 else "Z"
    out = batch + ("Y" if a.ndim > 1 else "") + ("X" if b.ndim > 1 else "")
    return contracted((a, b), (one, two), out, torch.matmul, "a product")


@rule(Tensor.__rmatmul__)
def right_matmul(b: Part, a: Part) -> Recipe:
    return matmul(a, b)


@rule(torch.einsum, torch.functional.einsum)
def einsum(equation: str, *operands: Any) -> Recipe:
    parts = list(parts_in(operands))
    if not isinstance(equation, str):
        raise refused("einsum by lists of numbers", parts[0])
    kind = parts[0].dtype
    if not (kind.is_floating_point or kind.is_complex or kind == torch.int64):
        raise refused("einsum of small integers, whose dtype depends on sizes,", parts[0])
    given, _, result = equation.replace(" ", "").partition("->")
    spare = iter(c for c in string.ascii_letters if c not in equation)
    terms = given.split(",")
    extra = max(
        (p.ndim - len(t.replace("...", "")) for p, t in zip(parts, terms) if "..." in t), default=0
    )
    dots = "".join(itertools.islice(spare, extra))
    letters = []
    for p, term in zip(parts, terms):
        n = p.ndim - len(term.replace("...", ""))
        letters.append(term.replace("...", dots[extra - n :]))
        repeated = [c for c in letters[-1] if letters[-1].count(c) > 1]
        if any(p.is_split(d) for d, c in enumerate(letters[-1]) if c in repeated):
            raise refused("a diagonal of split dims in einsum", p)
    if "->" in equation:
        result = result.replace("...", dots)
    else:
        counted = "".join(letters)
        result = dots + "".join(sorted(c for c in {*counted} - {*dots} if counted.count(c) == 1))
    text = f"{','.join(letters)}->{result}"
    return contracted(parts, letters, result, lambda *t: torch.einsum(text, *t), "einsum")


# -- products that are written in others ----------------------------------------------------------


def _added(name: str, product: Callable[[Tensor, Tensor], Tensor]) -> None:
    @composite(*both(name))
    def added(
        input: Tensor, *pair: Tensor, beta: float = 1, alpha: float = 1, **named: Any
    ) -> Tensor:
        x, given = input, [*pair, *named.values()]
        if not x.is_floating_point() and not x.is_complex():
            raise refused(f"{name} of integers", x)
        if name not in ("addmv", "addr"):
            x, *given = cast_for_autocast(x, *given)
        y = product(given[0], given[1])
        y = y if alpha == 1 else alpha * y
        if not beta:
            return y + torch.zeros_like(x).expand_as(y) if y.shape != x.shape else y
        return (x if beta == 1 else beta * x) + y


_added("addmm", lambda a, b: torch.mm(a, b))
_added("addmv", lambda a, b: torch.mv(a, b))
_added("addbmm", lambda a, b: torch.bmm(a, b).sum(0))
_added("baddbmm", lambda a, b: torch.bmm(a, b))
_added("addr", lambda a, b: torch.outer(a, b))


@composite(*both("outer", "ger"))
def outer(a: Tensor, b: Tensor, *, out: None = None) -> Tensor:
    return a[:, None] * b[None, :]


@composite(*both("inner"))
def inner(a: Tensor, b: Tensor, *, out: None = None) -> Tensor:
    if not a.dim() or not b.dim():
        return a * b
    lead = string.ascii_lowercase
    one, two = lead[: a.dim() - 1], lead[13 : 13 + b.dim() - 1]
    return torch.einsum(f"{one}Z,{two}Z->{one}{two}", a, b)


@composite(torch.tensordot, torch.functional.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Tensor:
    a, b = cast_for_autocast(a, b)
    if isinstance(dims, int):
        pairs = [(a.dim() - dims + i, i) for i in range(dims)]
    else:
        pairs = [(at(i, a.dim()), at(j, b.dim())) for i, j in zip(*map(list, dims))]
    one = list(string.ascii_lowercase[: a.dim()])
    two = list(string.ascii_uppercase[: b.dim()])
    for i, j in pairs:
        two[j] = one[i]
    summed_ = {one[i] for i, _ in pairs}
    kept = "".join(c for c in (*one, *two) if c not in summed_)
    return torch.einsum(f"{''.join(one)},{''.join(two)}->{kept}", a, b)


@composite(torch.linalg.vecdot)
def vecdot(a: Tensor, b: Tensor, *, dim: int = -1, out: None = None) -> Tensor:
    return (a.conj() * b).sum(dim)


@composite(*both("vdot"))
def vdot(a: Tensor, b: Tensor, *, out: None = None) -> Tensor:
    return torch.dot(a.conj(), b)


@composite(F.bilinear)
def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = without_autocast(torch.einsum)("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else y + bias

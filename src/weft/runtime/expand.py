"""Latents that travel in the place of keys and values, which each rank makes of them on arrival.

    rest           c (b 1 m d'), r (b 1 m e')        latents and what all heads share of the keys
    travel         the same: one head, where keys and values are of h
    while computing k, v = expand(c, r)              of the chunk at hand, in either pass
    back           dc, dr: sums over ranks           of what goes back through the expansion

Each rank adds the gradients of the expansion's parameters over the blocks that it computes, so that
over all ranks every pair of a query and a key counts once, as it does where keys travel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import Observed
from ..errors import DeclarationError, ShapeError, UnsupportedError
from ..plan.call import Expanded
from ..plan.order import positions
from ..plan.plan import Plan
from ..plan.steps import Ranges
from .autocast import autocast_of

Travel = Literal["auto", "latents", "keys"]
Function = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Expansion:
    """Keys and values as a function of latents, so that latents may travel in their place.

    Multi-head latent attention projects one latent of each token to keys and values of all heads:

        k, v = expand(c, r)     c (b, 1, m, d'), r (b, 1, m, e') -> k (b, g, m, d), v (b, g, m, e)

    A token's keys and values depend on its own c and r alone. With `weft.attention(q, c, r, ...,
    expand=Expansion(...))` ranks send each other c and r, d' + e' numbers per token and not
    g (d + e), and each expands what arrives, again in the backward pass. Gradients of `parameters`
    are each rank's part, as those of any other weight: `layout.sync_gradients` adds them.

    Args:
        function: `(c, r) -> (k, v)`; a `torch.nn.Module` is one.
        parameters: tensors with gradients that the function uses, or the module that has them;
            default those of a function that is a module. Others are refused.
        travel: "latents", "keys" (which are expanded first, as without `expand`), or "auto": the
            latents where they are fewer bytes over both passes and the call takes at most 5 %
            longer by the planner's clock, which counts the repeated expansion.

    Raises:
        DeclarationError: another word for `travel`; parameters that are no tensors.

    >>> expand = torch.nn.Linear(8, 2 * 6)
    >>> def keys_and_values(c, r):
    ...     k, v = expand(c).unflatten(-1, (2, 6)).squeeze(1).transpose(1, 2).split([4, 2], -1)
    ...     return torch.cat([k, r.expand(-1, 2, -1, -1)], -1), v
    >>> both = Expansion(keys_and_values, expand, travel="latents")
    >>> k, v = both(torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 3))
    >>> k.shape, v.shape
    (torch.Size([1, 2, 5, 7]), torch.Size([1, 2, 5, 2]))
    """

    def __init__(
        self,
        function: Function,
        parameters: nn.Module | Iterable[Tensor] | None = None,
        travel: Travel = "auto",
    ) -> None:
        if travel not in ("auto", "latents", "keys"):
            raise DeclarationError(f"travel={travel!r}: known are 'auto', 'latents' and 'keys'")
        if not callable(function):
            raise DeclarationError(
                f"expand is a function of two tensors, found a {type(function).__name__}"
            )
        if parameters is None and isinstance(function, nn.Module):
            parameters = function
        self.function, self.travel = function, travel
        self.module = parameters if isinstance(parameters, nn.Module) else None
        given = () if parameters is None or self.module is not None else parameters
        self.given = tuple(given)  # type: ignore[arg-type]
        for t in self.given:
            if not isinstance(t, Tensor):
                raise DeclarationError(f"parameters are tensors, found a {type(t).__name__}")
        self._known: dict[tuple, Tried] = {}

    def __call__(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        none = c.shape[2] == 0  # of no token functions may not know the heads
        if none:
            c, r = (t.sum(2, keepdim=True) for t in (c, r))  # zeros, with the latents' gradients
        k, v = _checked(self.function(c, r), (c, r))
        return (k[:, :, :0], v[:, :, :0]) if none else (k, v)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}}  # which is of these very parameters

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Tensors that the function uses and that get gradients now."""
        every = self.given if self.module is None else self.module.parameters()
        return tuple(t for t in every if t.requires_grad)

    def tried(self, c: Tensor, r: Tensor) -> Tried:
        """The sizes of keys and values, and the parameters in use: of one token, tried once.

        Args:
            c: latents, of any tokens.
            r: likewise.

        Raises:
            ShapeError: the function does not make keys and values of tokens.
            UnsupportedError: it uses weights that are not among its parameters, or draws random
                numbers, which would be others in the backward pass.
        """
        parameters = self.parameters if torch.is_grad_enabled() else ()
        modules = () if self.module is None else tuple(m.training for m in self.module.modules())
        ids = tuple(map(id, parameters))
        key = (c.shape[1], c.shape[3], r.shape[3], c.dtype, c.device, ids, modules)
        if key not in self._known:
            if len(self._known) > 8:
                self._known.clear()
            self._known[key] = self._tried(c, r, parameters)
        return self._known[key]

    def _tried(self, c: Tensor, r: Tensor, parameters: Sequence[Tensor]) -> Tried:
        one = [t.new_zeros((1, t.shape[1], 1, t.shape[3])) for t in (c, r)]
        # Within a checkpoint the try is no part of what is recomputed.
        local = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
        with local, Observed() as observed:
            k, v = _checked(self.function(*one), one)
        if observed.draws:
            raise UnsupportedError(
                f"the expansion draws random numbers ({observed.draws[0]}), and the backward pass"
                " expands again: travel='keys' lets keys travel, or set its dropout to 0"
            )
        used, rest = _reached((k, v), parameters)
        if rest:
            raise UnsupportedError(
                "the expansion uses tensors with gradients that it was not given; name them:"
                " weft.Expansion(function, parameters)"
            )
        carried = c.shape[3], r.shape[3]
        sizes = Expanded(k.shape[1], k.shape[3], v.shape[3], carried, observed.flops)
        return Tried(sizes, tuple(p for i, p in enumerate(parameters) if i in used))


class Tried(NamedTuple):
    """The sizes of what an expansion makes, and the parameters with gradients that it uses."""

    sizes: Expanded
    parameters: tuple[Tensor, ...]


#: What `weft.attention` takes as `expand`.
Expand = Expansion | Function


def as_expansion(expand: Expand) -> Expansion:
    """An `Expansion`, of a function or a module."""
    return expand if isinstance(expand, Expansion) else Expansion(expand)


def _as_it_is(t: Tensor) -> Tensor:
    return t


def _checked(result: Any, latents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values, or `ShapeError` where the function made something else."""
    c = latents[0]
    fits = isinstance(result, tuple | list) and len(result) == 2
    if fits:
        k, v = result
        fits = all(isinstance(t, Tensor) and t.dim() == 4 and t.dtype == c.dtype for t in result)
        fits = fits and k.shape[:3] == v.shape[:3] == (len(c), k.shape[1], c.shape[2])
    if not fits:
        shapes = [tuple(getattr(t, "shape", ())) for t in result] if fits is False else result
        raise ShapeError(
            "the expansion makes keys (b, g, m, d) and values (b, g, m, e) of latents"
            f" {tuple(c.shape)} in their dtype, {c.dtype}, found {shapes!r:.80}"
        )
    return k, v


def _reached(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[set[int], bool]:
    """The parameters that gradients of some tensors reach, and True if these reach other leaves."""
    leaves = {id(p): i for i, p in enumerate(parameters) if p.grad_fn is None}
    result = {p.grad_fn: i for i, p in enumerate(parameters) if p.grad_fn is not None}
    nodes: list[Any] = [t.grad_fn for t in tensors]
    seen, used, rest = {None}, set[int](), False
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in result:
            used.add(result[node])
        elif hasattr(node, "variable"):
            known = leaves.get(id(node.variable))
            rest |= known is None
            used |= set() if known is None else {known}
        else:
            nodes += [after for after, _ in node.next_functions]
    return used, rest


class Expander:
    """An expansion as a call uses it in both passes, under the autocast of its forward pass."""

    def __init__(self, expansion: Expansion, parameters: tuple[Tensor, ...], like: Tensor) -> None:
        self.function, self.expansion, self.parameters = expansion.function, expansion, parameters
        self._versions = [p._version for p in self.parameters]
        self._autocast = autocast_of(like)
        self._sums: list[Tensor | None] = []

    def __call__(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return _checked(self.function(c, r), (c, r))

    def begin_backward(self) -> None:
        """Begin sums of gradients; raises where parameters are not those of the forward pass."""
        self._sums = [None] * len(self.parameters)
        same = {*map(id, self.parameters)} <= {*map(id, self.expansion.parameters)}
        if not same or [p._version for p in self.parameters] != self._versions:
            raise UnsupportedError(
                "the backward pass expands latents again, and the expansion's parameters have"
                " changed since the forward pass; run backward first, or let keys travel:"
                " travel='keys'"
            )

    def add(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> None:
        """Add gradients of the parameters, in a wider dtype."""
        for i, grad in enumerate(gradients):
            total = self._sums[i]
            if grad is not None:
                self._sums[i] = grad.to(dtype) if total is None else total + grad

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's part of the parameters' gradients."""
        both = zip(self._sums, self.parameters)
        return [torch.zeros_like(p) if t is None else t.to(p.dtype) for t, p in both]


class ExpandedChunk:
    """The chunk of latents at hand, expanded for the heads that a rank computes.

    In the backward pass gradients of its keys and values are added up, and go through the
    expansion when another chunk comes.
    """

    def __init__(self, expander: Expander, plan: Plan, backward: bool) -> None:
        self.expander, self.plan, self.backward = expander, plan, backward
        self.heads = heads_of(plan)
        self.numbers: tuple[int, ...] = ()
        self.leaves: list[Tensor] = []
        self.made: tuple[Tensor, Tensor] | None = None
        self._grads: list[Tensor] = []

    def expand(self, numbers: tuple[int, ...], c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of joined chunks, by their numbers; those at hand are not made again."""
        if self.made is None or numbers != self.numbers:
            assert not self._grads  # settled
            self.numbers, self.leaves = numbers, [c, r]
            if self.backward:
                self.leaves = [t.detach().requires_grad_() for t in (c, r)]
            with torch.set_grad_enabled(self.backward):
                k, v = self.expander(*self.leaves)
                self.made = picked(k, self.heads), picked(v, self.heads)
        k, v = self.made
        return k.detach(), v.detach()

    def add(
        self, columns: Ranges | None, dk: Tensor, dv: Tensor, samples: tuple[int, int] | None
    ) -> None:
        """Add gradients of some keys and values of the chunk at hand; `columns` None: of all."""
        assert self.made is not None
        if not self._grads:
            dtype = self.plan.accum_dtype
            self._grads = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t in self.made]
        rows, base = slice(None) if samples is None else slice(*samples), 0
        for low, high in columns or ((0, dk.shape[2]),):
            for total, part in zip(self._grads, (dk, dv)):
                total[rows, :, low:high] += part[:, :, base : base + high - low]
            base += high - low

    def settle(self) -> tuple[tuple[int, ...], Tensor, Tensor] | None:
        """Send the gradients at hand through the expansion: (numbers, dc, dr), if there are any."""
        grads, self._grads = self._grads, []
        result, self.made = self.made, None
        if not grads or result is None:
            return None
        inputs = [*self.leaves, *self.expander.parameters]
        above = [g.to(t.dtype) for g, t in zip(grads, result)]
        with torch.enable_grad():
            found = torch.autograd.grad(list(result), inputs, above, allow_unused=True)
        self.expander.add(found[2:], self.plan.accum_dtype)
        dc, dr = (
            torch.zeros_like(t) if grad is None else grad for t, grad in zip(self.leaves, found)
        )
        return self.numbers, dc, dr


def heads_of(plan: Plan) -> list[int]:
    """The expanded heads that this rank's queries see, as many queries to each of them."""
    p = plan.problem
    assert p.expanded is not None
    at_rest, now = plan.resharding.query.state(0, plan.coords), plan.compute.query
    local = positions(now.head_spans, "cpu") - at_rest.head_spans[0].start
    seen = Counter((local // (p.heads // p.expanded.heads)).tolist())
    each = math.gcd(*seen.values())
    return [head for head, count in seen.items() for _ in range(count // each)]


def picked(t: Tensor, heads: list[int]) -> Tensor:
    """Some heads, as a view where they are consecutive."""
    if heads == [*range(heads[0], heads[-1] + 1)]:
        return t[:, heads[0] : heads[-1] + 1]
    return t[:, heads]


__all__ = [
    *("Expand", "ExpandedChunk", "Expander", "Expansion", "as_expansion", "heads_of", "picked"),
]

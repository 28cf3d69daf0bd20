"""The module of learned top-k routing, and its behaviour in training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from weft.bias import Bias
from weft.declare.explain import explain_validation
from weft.declare.routing import Routing
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft.masks import Full, Mask
from weft.move import collectives
from weft_axes.nn.attention import MultiAxisAttention
from weft_axes.nn.geometry import Axis

from .attention import Routes, routed_attention
from .geometry import blocks_per_rank, check_routed
from .router import Router


class RoutedAttention(MultiAxisAttention):
    """Multi-head attention that looks at its own block of an axis and at the `top_k` that matter.

    A learned router weighs all other blocks of keys by a small summary of each; only the chosen
    ones travel. With `top_k` covering all blocks and a fresh router it is exact full attention.
    Everything else is as in `MultiAxisAttention`; `weft_models.routing.router` has the definition.

    Args:
        embed_dim: as for `MultiAxisAttention`.
        num_heads: as for `MultiAxisAttention`.
        axis: as for `MultiAxisAttention`.
        routing: options of `weft.declare.routing.Routing`, over those of the layout's strategy.
        observe: also record how much attention every block got (`Routes.attention_weight`).
        layout: as for `MultiAxisAttention`.
        kv_heads: as for `MultiAxisAttention`.
        generator: as for `MultiAxisAttention`.
        device: of the parameters.
        dtype: of the parameters.
        options: others of `MultiAxisAttention`.

    Attributes:
        last: how the latest call was routed; a copy of the module begins without.
        progress: how far training has come, from 0 to 1; `set_progress` sets it. During the first
            `warm_up` part of training more blocks than `top_k` are taken. It does not matter in
            evaluation.

    Raises:
        DeclarationError: no routing options, or ones that do not fit the layout.
        UnsupportedError: a layout that moves keys or queries along other mesh dims too.

    >>> tokens = RoutedAttention(32, 4, axis="tokens", routing={"top_k": 2, "chunks": 8})
    >>> out, routes = tokens(torch.randn(2, 40, 32), return_routes=True)
    >>> out.shape, routes.chosen.shape
    (torch.Size([2, 40, 32]), torch.Size([2, 1, 8, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        axis: Axis,
        routing: Routing | Mapping[str, Any] | None = None,
        observe: bool = False,
        layout: Layout | None = None,
        kv_heads: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        layout = Layout.single() if layout is None else layout
        place: dict[str, Any] = {"layout": layout, "device": device, "dtype": dtype}
        heads = num_heads if kv_heads is None else kv_heads
        super().__init__(
            embed_dim,
            num_heads,
            axis=axis,
            kv_heads=heads,
            generator=generator,
            **place,
            **options,
        )
        self.routing = routing_options(layout, self.axis, routing)
        dims = check_routed(layout, self.axis, Full())
        ranks = math.prod(layout.mesh[d] for d in dims)
        self.blocks = ranks * blocks_per_rank(self.routing, layout, dims)
        # A separate generator, so that all other weights are those of every other layout.
        local = torch.Generator().manual_seed(generator.initial_seed()) if generator else None
        sizes = (self.head_dim, num_heads, heads, self.routing.summary_dim)
        self.router = Router(*sizes, generator=local, **place)
        self.progress, self.observe = 1.0, observe
        self.last: Routes | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles begin without a latest call, whose graph torch refuses to copy."""
        return {**self.__dict__, "last": None}

    def forward(  # type: ignore[override]  # with the routes, where they are asked for
        self,
        x: Tensor,
        *args: Any,
        return_routes: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Routes]:
        """Attends as `MultiAxisAttention.forward` does.

        Args:
            x: local tensor with the dims `axes` names.
            args: others of `MultiAxisAttention.forward`.
            return_routes: also return how the call was routed.
            kwargs: others of `MultiAxisAttention.forward`.

        Raises:
            UnsupportedError: a bias.
        """
        out = super().forward(x, *args, **kwargs)
        if not return_routes:
            return out
        assert self.last is not None
        return out, self.last

    def current(self) -> Routing:
        """The options now: during warm-up, with more blocks and another temperature.

        All blocks until the middle of the warm-up, then fewer and fewer; the temperature moves
        from `warm_temperature` by equal factors.
        """
        r = self.routing
        done = 1.0 if not self.training or r.warm_up == 0 else min(1.0, self.progress / r.warm_up)
        extra = max(0, self.blocks - 1 - r.top_k) * min(1.0, 2.0 - 2.0 * done)
        start = r.temperature if r.warm_temperature is None else r.warm_temperature
        temperature = start ** (1.0 - done) * r.temperature**done
        changes = {"top_k": r.top_k + math.ceil(extra), "temperature": temperature}
        return r.model_copy(update=changes)

    def penalty(self) -> Tensor:
        """This rank's part of the penalties of the latest call (P): their sum is the penalty.

        Raises:
            DeclarationError: there was no call.
            UnsupportedError: it would train nothing: in training, the call ran without gradients.
        """
        if self.last is None:
            raise DeclarationError("there is no penalty before the first call")
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.router.parameters())
        if learns and self.training and not self.last.shares.requires_grad:
            raise UnsupportedError(
                "the latest call ran without gradients, so its penalty would train nothing: in"
                " training, recompute with checkpoint(..., use_reentrant=False); just to look at"
                " the penalty, ask for it under torch.no_grad(), too"
            )
        ranks = math.prod(self.layout.mesh[d] for d in _split_dims(self.layout))
        return self.last.penalty(self.routing) / ranks

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        length: Mapping[str, tuple[int, int]],
        bias: Bias | Tensor | None,
    ) -> Tensor:
        if bias is not None or self.geometry.own:
            raise UnsupportedError(
                "routing chooses among blocks of an axis that x has, without a bias of the scores"
            )
        now = self.current()
        imitates = self.training and self.routing.imitate > 0 and now.top_k > 1
        out, self.last = routed_attention(
            q,
            k,
            v,
            self.router,
            self.layout,
            self.axis,
            now,
            mask,
            self.scale,
            length,
            want_attention=self.observe or imitates,
        )
        return out


def routing_options(
    layout: Layout, axes: Sequence[str], changes: Routing | Mapping[str, Any] | None = None
) -> Routing:
    """The routing options of the layout's strategy on these axes, changed as given.

    >>> routing_options(Layout.load("routed-4"), ["tokens"], {"top_k": 2}).top_k
    2
    """
    found = layout.routing(tuple(axes))
    if isinstance(changes, Routing):
        return changes
    if found is None and changes is None:
        raise DeclarationError(
            f"{layout.source or 'the layout'} routes nothing along {'+'.join(axes)}: bind the "
            "strategy 'routed' to a mesh dim, or give routing={'top_k': ..., 'chunks': ...}"
        )
    base = {} if found is None else found.model_dump()
    if changes and "blocks" in changes:
        base.pop("chunks", None)
    try:
        return Routing.model_validate({**base, **(changes or {})})
    except ValidationError as error:
        raise DeclarationError(explain_validation(error, "routing", Routing)) from None


def routed_modules(model: nn.Module) -> list[RoutedAttention]:
    """The routed attentions in a model, in order.

    Args:
        model: any module.

    >>> tokens = RoutedAttention(32, 4, axis="tokens", routing={"top_k": 2, "chunks": 8})
    >>> len(routed_modules(torch.nn.Sequential(tokens, torch.nn.ReLU())))
    1
    """
    return [m for m in model.modules() if isinstance(m, RoutedAttention)]


def set_progress(model: nn.Module, progress: float) -> None:
    """Set how far training has come, in every routed attention of a model.

    Args:
        model: any module.
        progress: from 0 to 1.

    >>> tokens = RoutedAttention(32, 4, axis="tokens", routing={"top_k": 2, "chunks": 8})
    >>> set_progress(tokens, 0.5)
    >>> tokens.progress
    0.5
    """
    for module in routed_modules(model):
        module.progress = progress


def routing_penalty(model: nn.Module) -> Tensor | float:
    """The penalties of all routed attentions, to be added to the loss; 0 if there are none.

    It has the type of a loss from `layout.mean` (P -> I): the value is that of all ranks, and each
    rank has the gradient of its own part, which `sync_gradients` adds up. Ranks add their parts up
    here, so all of them call it.

        before    rank 0: p0        rank 1: p1
        after     both:   p0 + p1
        backward  both:   d    ->   both: d

    Args:
        model: any module, after its forward pass.

    Raises:
        DeclarationError: an attention was not called yet.
        UnsupportedError: the penalty would train nothing, as `RoutedAttention.penalty` says.

    >>> routing_penalty(torch.nn.Linear(2, 2))
    0.0
    """
    weighted = [m for m in routed_modules(model) if m.routing.penalised]
    by_layout: dict[Layout, Tensor] = {}
    for module in weighted:
        layout = module.layout
        by_layout[layout] = module.penalty() + by_layout.get(layout, 0.0)
    return sum(
        (
            collectives.partial_to_invariant(part, _split_dims(layout), layout.bound)
            for layout, part in by_layout.items()
        ),
        0.0,
    )


def _split_dims(layout: Layout) -> tuple[str, ...]:
    """Mesh dims whose ranks have parts of a penalty."""
    return tuple(d for d in layout.mesh if d not in layout.replicate)

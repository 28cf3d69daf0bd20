"""Attention over any named axis of a tensor, whatever mesh dims split it.

Shapes: b = every unattended axis flattened, h = query heads, g = key/value heads, n and m = local
queries and keys, d = head dim, e = embed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.attention import attention
from weft.bias import Bias
from weft.bias_tiles import tile_of_bias
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.masks import Full, Mask

from .geometry import NO_LENGTHS, Axis, Geometry
from .parameters import HeadWeight, local, replicate
from .rotary import rotate, rotated_axes
from .sequences import local_batches


class MultiAxisAttention(nn.Module):
    """Multi-head attention over one axis of a tensor, or over several of them jointly.

    `softmax(q k^T / sqrt(d)) v` per head (Vaswani et al., 2017), between linear projections. The
    axes that are not attended act as batch. With a layout, input and output are the local shards
    as they rest, and the result is the shard of what one device computes. Mesh dims that
    shard the reserved axis `heads` split the heads; on real ranks the projections are DTensors
    over these mesh dims.

    Args:
        embed_dim: size of the last axis of input and output.
        num_heads: query heads, over all ranks.
        axis: the attended axis: a name, an index into `axes` (negative ones too), or a tuple of
            these, which are attended jointly as one long sequence, the first axis outermost.
        axes: names of the input's dims, the embedding last. Default `("batch", "tokens", "embed")`.
        layout: how the axes are split over the mesh, bound. Default: one device.
        kv_heads: key/value heads, each shared by `num_heads / kv_heads` query heads.
        mask: who sees whom along the attended axis, unless `forward` is given another one.
        scale: factor on the scores, default `head_dim ** -0.5`.
        rope: rotate queries and keys by their global positions (Su et al., arXiv:2104.09864) along
            the attended axes, or along those of them named here. Several axes share the head dim
            in equal parts.
        qk_norm: scale every query and key to unit root mean square, with a learned gain.
        bias: added to the scores, a function of global positions along the attended axis, unless
            `forward` is given another one; `weft.alibi` makes one.
        gate: multiply the output of every head by the sigmoid of another projection of `x`.
        context_axes: names of the dims of `forward`'s `context`, the embedding last. Axes of `x`
            that it lacks see the same context, whose keys and values are computed once. If `x`
            lacks the attended axis, every token of `x` attends to it, and every rank holds it
            whole. Default: those of `x`.
        context_dim: size of the last axis of `context`, default `embed_dim`.
        init_k_from_q: start the key projections as copies of the query projections, so that the
            first scores are a similarity of tokens; a table model learns to compare rows much
            sooner.
        generator: the source of the initial weights; with the same state, a layout that splits
            heads starts from the slices of the weights one device starts from.
        device: of the parameters.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: an axis that `axes` does not name, sizes that do not divide.

    >>> rows = MultiAxisAttention(32, 4, axis="rows", axes=("batch", "rows", "features", "embed"))
    >>> rows(torch.randn(2, 10, 3, 32)).shape
    torch.Size([2, 10, 3, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        axis: Axis,
        axes: Sequence[str] = ("batch", "tokens", "embed"),
        layout: Layout | None = None,
        kv_heads: int | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        rope: bool | Sequence[str] = False,
        qk_norm: bool = False,
        bias: Bias | None = None,
        gate: bool = False,
        context_axes: Sequence[str] | None = None,
        context_dim: int | None = None,
        init_k_from_q: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        context_dim = embed_dim if context_dim is None else context_dim
        layout = Layout.single() if layout is None else layout
        self.layout, self.scale, self.bias = layout, scale, bias
        self.geometry = geometry = Geometry(axis, axes, context_axes, layout)
        self.axes, self.axis = geometry.axes, geometry.attended
        self.mask = Full() if mask is None else mask
        self.head_dim = _head_dim(embed_dim, num_heads, kv_heads)
        check_heads(num_heads, kv_heads, layout)
        self.rope = rotated_axes(rope, () if geometry.own else self.axis, self.head_dim)
        if init_k_from_q and context_dim != embed_dim:
            raise DeclarationError(
                f"init_k_from_q=True needs a context as wide as x: found embed_dim={embed_dim} and"
                f" context_dim={context_dim}"
            )
        draw = functools.partial(_draw, self.head_dim, generator)
        query = draw(embed_dim, num_heads)
        key = query[:: num_heads // kv_heads] if init_k_from_q else draw(context_dim, kv_heads)
        place = functools.partial(HeadWeight, layout=layout, device=device, dtype=dtype)
        self.query, self.key = place(query), place(key)
        self.value, self.out = place(draw(context_dim, kv_heads)), place(draw(embed_dim, num_heads))
        self.gate = place(draw(embed_dim, num_heads)) if gate else None
        gain = torch.ones(2, self.head_dim, device=device, dtype=dtype)
        self.gain = nn.Parameter(gain) if qk_norm else None
        replicate(self, layout)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask | None = None,
        lengths: Mapping[str, int] | None = None,
        context_lengths: Mapping[str, int] | None = None,
        *,
        bias: Bias | Tensor | None = None,
    ) -> Tensor:
        """Attends every token of `x` to the tokens of `context`, or to those of `x`.

        Args:
            x: local tensor with the dims `axes` names.
            context: the source of keys and values, with the dims `context_axes` names. The axes
                that are not attended must be as long as those of `x`. It is placed like `x`, unless
                the layout's strategy has keys `R` at rest (`shared_context`), or `x` lacks the
                attended axis: then every rank holds it whole, and gets its share of the gradient,
                such that the sum over these ranks is the gradient.
            mask: used instead of the module's mask.
            lengths: global lengths of the attended axes of `x`, and of all that a mask or bias
                counts along; needed where the mesh does not divide them, otherwise local length
                times the number of shards. Where `x` lacks the attended axis and a mask or bias is
                of samples, ranks wait for each other to say how many they hold of those that are
                not given, in every pass; `per_sample=False` where a function does not look at b.
            context_lengths: the same for `context`, default those of `x` if it has none.
            bias: used instead of the module's bias: a `weft.Bias`, or a learned tensor
                (batch or 1, heads or 1, queries, keys) over all positions, whole on every rank.
                Each rank gets the gradient of its own scores; their sum over the mesh dims that
                split data is the gradient.

        Returns:
            A tensor shaped like `x`.

        Raises:
            ShapeError: a tensor that does not have these axes, lengths of others, chunks that are
                uneven without `lengths`, or no `context` where the layout has keys `R` at rest.
        """
        geometry = self.geometry
        self._check(x, context)
        geometry.check_lengths(lengths=lengths, context_lengths=context_lengths)
        n = geometry.query_lengths(x.shape, lengths)
        m = n if context is None else geometry.key_lengths(context.shape, context_lengths)
        x = self.layout.enter(x, "heads")  # once, for all projections of x
        source = x if context is None else self.layout.enter(context, "heads")
        q = self._queries(x, self._angles(n, x.device, keys=False))
        k, v = self._keys_values(source, self._angles(m, x.device), of_x=context is None)
        if context is not None:
            self._share_gradients(k, v)
        mask, bias = self.mask if mask is None else mask, self.bias if bias is None else bias
        mask, bias = self._of_sequences(mask, bias, x, lengths)
        return self._attended(x, q, k, v, mask, bias, n, m, lengths)

    def _of_sequences(
        self, mask: Mask, bias: Bias | Tensor | None, x: Tensor, lengths: Mapping[str, int] | None
    ) -> tuple[Mask, Bias | Tensor | None]:
        """A mask and a bias of full tensors as the call on this rank counts sequences."""
        if self.geometry.own:
            return self.geometry.of_part(mask, bias, x.shape, lengths)
        mask_here = self.geometry.renumbered(mask, x.shape, lengths)
        assert isinstance(mask_here, Mask)
        if bias is None:
            return mask_here, None
        bias_here = self.geometry.renumbered(bias, x.shape, lengths)
        assert not isinstance(bias_here, Mask)
        return mask_here, bias_here

    def keys_values(
        self,
        x: Tensor,
        lengths: Mapping[str, int] | None = None,
        *,
        first: Mapping[str, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of `x`, for `attend` to use again.

        Args:
            x: local tensor with the dims `axes` names.
            lengths: as for `forward`.
            first: the position of the first token of `x` along each attended axis, by which rope
                turns keys; default 0.

        Returns:
            Keys and values, (b, kv heads, n, head dim): b are the axes that are not attended, n
            the attended ones.
        """
        self._check(x, None, cached=True)
        self.geometry.check_lengths(lengths=lengths, first=first)
        n = self.geometry.query_lengths(x.shape, lengths)
        turned = self._angles(n, x.device, first)
        return self._keys_values(self.layout.enter(x, "heads"), turned, of_x=True)

    def attend(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        key_lengths: Mapping[str, int],
        lengths: Mapping[str, int] | None = None,
        *,
        mask: Mask | None = None,
        first: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Attends every token of `x` to keys and values that `keys_values` made.

        Args:
            x: local tensor with the dims `axes` names.
            k: keys, as the layout says that keys rest.
            v: values, likewise.
            key_lengths: global lengths of the attended axes of the keys.
            lengths: as for `forward`.
            mask: of these queries and keys, such as `weft.Causal(offset=6)` where they follow six
                keys; needed where the module has a mask.
            first: the position among the keys of the first token of `x`, along each attended axis;
                needed where the module has rope.

        Returns:
            A tensor shaped like `x`.

        Raises:
            DeclarationError: the module has a bias, or a mask or rope that the call does not place.
            ShapeError: as for `forward`.

        >>> causal = MultiAxisAttention(8, 2, axis="tokens", mask=weft.Causal(), rope=True)
        >>> x, lengths, first = torch.randn(1, 5, 8), {"tokens": 5}, {"tokens": 3}
        >>> k, v = causal.keys_values(x)
        >>> last = causal.attend(x[:, 3:], k, v, lengths, mask=weft.Causal(offset=3), first=first)
        >>> torch.allclose(last, causal(x)[:, 3:], atol=1e-6)
        True
        """
        self._check_placed(mask, first)
        self._check(x, None, cached=True)
        self.geometry.check_lengths(lengths=lengths, key_lengths=key_lengths, first=first)
        n = self.geometry.query_lengths(x.shape, lengths)
        mask, _ = self._of_sequences(Full() if mask is None else mask, None, x, lengths)
        x = self.layout.enter(x, "heads")
        q = self._queries(x, self._angles(n, x.device, first, keys=False))
        return self._attended(x, q, k, v, mask, None, n, key_lengths, lengths)

    def _attended(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        bias: Bias | Tensor | None,
        n: Mapping[str, int],
        m: Mapping[str, int],
        lengths: Mapping[str, int] | None,
    ) -> Tensor:
        """From queries, keys and values to a tensor shaped like x."""
        layout, geometry = self.layout, self.geometry
        heads = q.shape[-3]
        plain = geometry.foldable and bias is None and not mask.per_sample
        q, k, v = geometry.broadcast(q, k, v, plain=plain)
        tile = self._tile(bias, n, m, x, lengths)
        try:
            out = self._attend(q, k, v, mask, geometry.pairs(n, m), tile)  # b h n d
        except ShapeError as error:
            if lengths is None and any(layout.size(name) > 1 for name in self.axis):
                raise ShapeError(f"{error}\n{NO_LENGTHS.format(self.axis)}") from None
            raise
        return self._projected(geometry.back(out, x.shape, heads, plain=plain), x)

    def _projected(self, out: Tensor, x: Tensor) -> Tensor:
        """From the output of this rank's heads, as the dims of x, to a tensor shaped like x."""
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate.split(x))
        return self.layout.sum(self.out.merge(out), "heads")

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        length: Mapping[str, tuple[int, int]],
        bias: Bias | Tensor | None,
    ) -> Tensor:
        layout, axis = self.geometry.layout, self.geometry.names
        return attention(
            q, k, v, layout, axis, mask=mask, scale=self.scale, length=length, bias=bias
        )

    def _tile(
        self,
        bias: Bias | Tensor | None,
        n: Mapping,
        m: Mapping,
        x: Tensor,
        lengths: Mapping[str, int] | None,
    ) -> Bias | Tensor | None:
        if not isinstance(bias, Tensor):
            return bias
        geometry = self.geometry
        wanted = tuple(math.prod([*lengths.values()]) for lengths in (n, m))
        if bias.dim() != 4 or tuple(bias.shape[2:]) != wanted:
            raise ShapeError(
                f"bias must be (batch or 1, heads or 1, {wanted[0]}, {wanted[1]}), found"
                f" {tuple(bias.shape)}"
            )
        bias = self.layout.enter(bias, "heads")
        alike = len(bias) == 1
        batches = () if alike else (len(bias),) * geometry.layout.world_size
        if not (alike or geometry.own):
            known = geometry.sequence_lengths(x.shape, lengths, len(bias))
            batches = local_batches(geometry.layout.unbound, known)
        pairs = geometry.pairs(n, m)
        return tile_of_bias(bias, geometry.layout, geometry.names, pairs, batches)

    def _check_placed(self, mask: Mask | None, first: Mapping[str, int] | None) -> None:
        """Refuses kept keys where the call does not say how queries stand to them."""
        lacks = {
            "a mask": (self.mask != Full() and mask is None, "give mask=, of these queries"),
            "a bias": (self.bias is not None, "call it with context= instead"),
            "rope": (bool(self.rope) and first is None, "give first=, where the queries begin"),
        }
        for label, (lacking, instead) in lacks.items():
            if lacking:
                raise DeclarationError(
                    f"this attention has {label}, which depends on where queries are among the keys"
                    f" that were kept: {instead}"
                )

    def _check(self, x: Tensor, context: Tensor | None, cached: bool = False) -> None:
        """Refuses tensors that do not fit; `cached`: keys may rest otherwise than x."""
        geometry = self.geometry
        given = [("x", x, self.axes, self.query.weight.shape[1])]
        if context is not None:
            given.append(("context", context, geometry.context_axes, self.key.weight.shape[1]))
        for name, t, axes, embed in given:
            if t.dim() != len(axes) or t.shape[-1] != embed:
                raise ShapeError(
                    f"{name} must have the axes {axes} and {axes[-1]} = {embed}, found shape"
                    f" {tuple(t.shape)}"
                )
        if context is not None:
            geometry.check_shared(x.shape, context.shape)
        elif geometry.own or geometry.context_axes != self.axes:
            raise ShapeError(
                f"this attention takes its keys from a context with the axes"
                f" {geometry.context_axes}: give context=..."
            )
        elif geometry.whole and not cached:
            raise ShapeError(
                f"layout {self.layout.name!r} splits axis {geometry.whole[0]!r} but has its keys R"
                " at rest: pass them whole on every rank, as context"
            )
        if geometry.split and not cached:
            raise ShapeError(
                f"layout {self.layout.name!r} has the queries of axis {geometry.split[0]!r} whole"
                " and their keys split: attend to a cache of keys, as Trunk.encode makes it"
            )

    def _angles(
        self,
        lengths: Mapping[str, int],
        device: torch.device,
        first: Mapping[str, int] | None = None,
        *,
        keys: bool = True,
    ) -> Tensor | None:
        """Rotary angles of local keys or queries, whose first one is at `first`; None: no rope."""
        if not self.rope:
            return None
        given = self.rope, lengths, self.head_dim
        return self.geometry.angles(*given, keys=keys, device=device, first=first)

    def _queries(self, x: Tensor, turned: Tensor | None) -> Tensor:
        """Queries with heads in front of the attended axis; x has entered the heads already."""
        q = self.geometry.to_heads(self.query.split(x), self.head_dim, keys=False)
        q = self._normed(q, 0)
        return q if turned is None else rotate(q, turned)

    def _keys_values(
        self, source: Tensor, turned: Tensor | None, *, of_x: bool
    ) -> tuple[Tensor, Tensor]:
        """The same of keys and values, from x or from a context."""
        k, v = (
            self.geometry.to_heads(w.split(source), self.head_dim, keys=not of_x)
            for w in (self.key, self.value)
        )
        k = self._normed(k, 1)
        return (k if turned is None else rotate(k, turned)), v

    def _normed(self, t: Tensor, which: int) -> Tensor:
        """Queries (0) or keys (1) of unit root mean square, where the block wants them so."""
        if self.gain is None:
            return t
        gain = self.layout.enter(local(self.gain)[which], "heads")
        return nn.functional.rms_norm(t, gain.shape, gain)

    def _share_gradients(self, *replicated: Tensor) -> None:
        """Attention gives every holder of a replicated key the whole gradient; keep a share."""
        holders = self.geometry.holders
        for t in replicated:
            if holders > 1 and t.requires_grad:
                t.register_hook(lambda grad: grad / holders)


def _draw(head_dim: int, generator: torch.Generator | None, embed_dim: int, heads: int) -> Tensor:
    bound = (3.0 / embed_dim) ** 0.5  # unit variance in, unit variance out
    return torch.empty(heads, head_dim, embed_dim).uniform_(-bound, bound, generator=generator)


def check_heads(num_heads: int, kv_heads: int, layout: Layout) -> None:
    """Refuses heads that the layout's mesh dims for `heads` cannot divide."""
    shards = layout.size("heads")
    for key, heads in (("num_heads", num_heads), ("kv_heads", kv_heads)):
        if heads % shards:
            raise DeclarationError(
                f"{key}={heads} does not divide over the {shards} shards that the layout makes of"
                f" heads (mesh dims {layout.shard_dims('heads')}); use a multiple of {shards}"
            )


def _head_dim(embed_dim: int, num_heads: int, kv_heads: int) -> int:
    if min(embed_dim, num_heads, kv_heads) < 1:
        raise DeclarationError(
            "embed_dim, num_heads and kv_heads are 1 or more, found "
            f"{embed_dim}, {num_heads} and {kv_heads}"
        )
    if embed_dim % num_heads:
        raise DeclarationError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}")
    if num_heads % kv_heads:
        raise DeclarationError(f"num_heads={num_heads} is not a multiple of kv_heads={kv_heads}")
    return embed_dim // num_heads

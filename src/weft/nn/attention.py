"""Attention over any named axis of a tensor, whatever mesh dims split it.

Shapes: b = every unattended axis flattened, h = query heads, g = key/value heads, n and m = local
queries and keys, d = head dim, e = embed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..attention import attention
from ..declare.placements import SEQ
from ..errors import DeclarationError, ShapeError
from ..layout import Layout
from ..masks import Full, Mask
from .parameters import HeadWeight, local, replicate

Axis = str | int | Sequence[str | int]


class MultiAxisAttention(nn.Module):
    """Multi-head attention over one axis of a tensor, or over several of them jointly.

    `softmax(q k^T / sqrt(d)) v` per head (Vaswani et al., 2017), between linear projections. The
    axes that are not attended act as batch. With a layout, input and output are the local shards
    as they lie at rest, and the result is the shard of what one device computes. Mesh dims that
    shard the reserved axis `heads` split the heads and their projections.

    Args:
        embed_dim: size of the last axis of input and output.
        num_heads: query heads, over all ranks.
        axis: the attended axis: a name, an index into `axes` (negative ones too), or a tuple of
            these, which are attended jointly as one long sequence, the first axis outermost.
        axes: names of the input's dims, the embedding last. Default `("batch", "tokens", "embed")`.
        layout: how the axes are split over the mesh. Default: one device.
        kv_heads: key/value heads, each shared by `num_heads / kv_heads` query heads.
        mask: who sees whom along the attended axis, unless `forward` is given another one.
        scale: factor on the scores, default `head_dim ** -0.5`.
        rope: rotate queries and keys by their global positions (Su et al., arXiv:2104.09864).
        qk_norm: scale every query and key to unit root mean square, with a learned gain.
        similar: start the key projections as copies of the query projections, so that the first
            scores are a similarity of tokens; a table model learns to compare rows much sooner.
        generator: the source of the initial weights; with the same state, a layout that splits
            heads starts from the slices of the weights one device starts from.

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
        rope: bool = False,
        qk_norm: bool = False,
        similar: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        layout = Layout.single() if layout is None else layout
        self.axes, self.layout, self.scale, self.rope = tuple(axes), layout, scale, rope
        self.axis = resolve_axes(axis, self.axes)
        self.mask = Full() if mask is None else mask
        self.head_dim = _head_dim(embed_dim, num_heads, kv_heads)
        check_heads(num_heads, kv_heads, layout)
        if rope and (len(self.axis) > 1 or self.head_dim % 2):
            raise DeclarationError(
                f"rope=True needs one attended axis and an even head dim; found axis={self.axis}"
                f" and head dim {self.head_dim}"
            )
        self._to_heads, self._from_heads = _patterns(self.axes, self.axis)
        draw = functools.partial(_draw, self.head_dim, embed_dim, generator)
        query = draw(num_heads)
        key = query[:: num_heads // kv_heads] if similar else draw(kv_heads)
        place = functools.partial(HeadWeight, layout=layout, device=device, dtype=dtype)
        self.query, self.key = place(query), place(key)
        self.value, self.out = place(draw(kv_heads)), place(draw(num_heads))
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
    ) -> Tensor:
        """Attends every token of `x` to the tokens of `context`, or to those of `x`.

        Args:
            x: local tensor with the dims `axes` names.
            context: the source of keys and values, with the same axes. Its other axes must be as
                long as those of `x`. It lies like `x`, unless the layout's strategy has keys `R`
                at rest (`shared_context`): then every rank holds it whole, and gets its share of
                the gradient, such that the sum over these ranks is the gradient.
            mask: used instead of the module's mask.
            lengths: global lengths of the attended axes of `x`; needed where the mesh does not
                divide them, otherwise local length times the number of shards.
            context_lengths: the same for `context`, default those of `x` if it has none.

        Returns:
            A tensor shaped like `x`.

        Raises:
            ShapeError: a tensor that does not have these axes, or no `context` where the layout
                has keys `R` at rest.
        """
        layout = self.layout
        self._check(x, context)
        n = self._lengths(x, lengths, layout.shard_dims)
        m = n if context is None else self._lengths(context, context_lengths, self._key_dims)
        q, k, v = self._project(x, context)
        if self.gain is not None:
            gain_q, gain_k = layout.enter_heads(local(self.gain))
            q = nn.functional.rms_norm(q, gain_q.shape, gain_q)
            k = nn.functional.rms_norm(k, gain_k.shape, gain_k)
        if self.rope:
            (axis,) = self.axis
            q = rotate(q, layout.positions(axis, n[axis]))
            k = rotate(k, self._key_positions(axis, m[axis]))
        if context is not None:
            self._share_gradients(k, v)
        length = {name: (n[name], m[name]) for name in self.axis}
        out = self._attend(q, k, v, self.mask if mask is None else mask, length)  # b h n d
        out = rearrange(out, self._from_heads, **self._axis_sizes(x))
        return layout.sum_heads(self.out.merge(out))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, length: Mapping[str, tuple[int, int]]
    ) -> Tensor:
        layout, axis = self.layout, self.axis
        return attention(q, k, v, layout, axis, mask=mask, scale=self.scale, length=length)

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        embed = self.query.weight.shape[1]
        for name, t in (("x", x), ("context", x if context is None else context)):
            if t.dim() != len(self.axes) or t.shape[-1] != embed:
                raise ShapeError(
                    f"{name} must have the axes {self.axes} and {self.axes[-1]} = {embed}, found"
                    f" shape {tuple(t.shape)}"
                )
        whole = [a for a in self.axis if self._key_dims(a) != list(self.layout.shard_dims(a))]
        if context is None and whole:
            raise ShapeError(
                f"layout {self.layout.name!r} splits axis {whole[0]!r} but has its keys R at rest:"
                " pass them whole on every rank, as context"
            )

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        x = self.layout.enter_heads(x)
        source = x if context is None else self.layout.enter_heads(context)
        pairs = ((self.query, x), (self.key, source), (self.value, source))
        return tuple(
            rearrange(weight.split(t), self._to_heads, d=self.head_dim) for weight, t in pairs
        )

    def _lengths(
        self, x: Tensor, given: Mapping[str, int] | None, dims: Callable[[str], Sequence[str]]
    ) -> dict[str, int]:
        """Global lengths of the attended axes: as given, or equal chunks over mesh dims `dims`."""
        mesh = self.layout.mesh
        even = {
            name: x.shape[self.axes.index(name)] * math.prod(mesh[d] for d in dims(name))
            for name in self.axis
        }
        return {name: (given or {}).get(name, length) for name, length in even.items()}

    def _key_dims(self, axis: str) -> list[str]:
        """Mesh dims that split the keys of an axis at rest."""
        rules = self.layout.rules(self.axis)
        return [d for d in self.layout.shard_dims(axis) if rules[d].key.rest == Shard(SEQ)]

    def _share_gradients(self, *replicated: Tensor) -> None:
        """Attention gives every holder of a replicated key the whole gradient; keep a share."""
        holders = math.prod(
            self.layout.size(name) // math.prod(self.layout.mesh[d] for d in self._key_dims(name))
            for name in self.axis
        )
        for t in replicated:
            if holders > 1 and t.requires_grad:
                t.register_hook(lambda grad: grad / holders)

    def _key_positions(self, axis: str, length: int) -> Tensor:
        if self._key_dims(axis) == list(self.layout.shard_dims(axis)):
            return self.layout.positions(axis, length)
        return torch.arange(length)

    def _axis_sizes(self, x: Tensor) -> dict[str, int]:
        return {f"a{i}": size for i, size in enumerate(x.shape[:-1])}


def _draw(head_dim: int, embed_dim: int, generator: torch.Generator | None, heads: int) -> Tensor:
    bound = (3.0 / embed_dim) ** 0.5  # unit variance in, unit variance out
    return torch.empty(heads, head_dim, embed_dim).uniform_(-bound, bound, generator=generator)


def resolve_axes(axis: Axis, axes: Sequence[str]) -> tuple[str, ...]:
    """Names of the attended axes, from names or indices.

    Raises:
        DeclarationError: an unknown, repeated or embedding axis.

    >>> resolve_axes(-2, ("batch", "rows", "features", "embed"))
    ('features',)
    """
    wanted = [axis] if isinstance(axis, str | int) else list(axis)
    names = []
    for item in wanted:
        if isinstance(item, int) and -len(axes) <= item < len(axes):
            item = axes[item]
        if item not in axes[:-1] or item in names:
            raise DeclarationError(
                f"axis={axis!r}: {item!r} cannot be attended; give different axes out of"
                f" {tuple(axes[:-1])} or their indices ({axes[-1]!r} is the embedding)"
            )
        names.append(item)
    if not names:
        raise DeclarationError(f"axis={axis!r} names no axis; choose from {tuple(axes[:-1])}")
    return tuple(names)


def check_heads(num_heads: int, kv_heads: int, layout: Layout) -> None:
    """Refuses heads that the layout's mesh dims for `heads` cannot divide."""
    shards = layout.size("heads")
    for key, heads in (("num_heads", num_heads), ("kv_heads", kv_heads)):
        if heads % shards:
            raise DeclarationError(
                f"{key}={heads} does not divide over the {shards} shards that the layout makes of"
                f" heads (mesh dims {layout.shard_dims('heads')}); use a multiple of {shards}"
            )


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding: turns each pair of dims of x (b h n d) by an angle ∝ its position (n,)."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angle = positions.to(x.device)[:, None] * base**-steps  # n d/2
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _head_dim(embed_dim: int, num_heads: int, kv_heads: int) -> int:
    if embed_dim % num_heads:
        raise DeclarationError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}")
    if num_heads % kv_heads:
        raise DeclarationError(f"num_heads={num_heads} is not a multiple of kv_heads={kv_heads}")
    return embed_dim // num_heads


def _patterns(axes: Sequence[str], attended: Sequence[str]) -> tuple[str, str]:
    symbols = {name: f"a{i}" for i, name in enumerate(axes[:-1])}
    sequence = " ".join(symbols[name] for name in attended)
    batch = " ".join(symbols[name] for name in axes[:-1] if name not in attended)
    grid, canonical = " ".join(symbols.values()), f"({batch}) h ({sequence}) d"
    return f"{grid} (h d) -> {canonical}", f"{canonical} -> {grid} (h d)"

"""A gated delta rule as a layer: a state per head that every token decays, corrects and reads.

Shapes: b = every other axis flattened, t = this rank's tokens, h = heads of this rank, k = key dim,
v = value dim, c = 2 k + v channels of the convolution per head, e = embed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from weft.comm.channel import refuse
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.masks import Documents
from weft.plan.lengths import check_axis_lengths

from ..carry.by_heads import traded
from ..carry.fragments import by_heads
from ..carry.pieces import LocalPieces
from ..carry.scan import halo
from .geometry import resolve_axes
from .parameters import HeadWeight, local, replicate

#: Tokens that are computed together, as one system of equations.
CHUNK = 64


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`S_t = e^decay_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`, `o_t = S_t^T q_t`.

    Computed in chunks of 64 tokens (Yang et al., arXiv:2412.06464, section 3.3): within one the
    updates solve a triangular system, from one to the next a state is handed on. In fp64 for fp64
    tensors, else in fp32.
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # b h t d
    decay, beta = (x.to(dtype).transpose(1, 2) for x in (decay, beta))  # b h t
    outs, state = [], state.to(dtype)
    if not v.shape[2]:  # nothing, and yet made of all, whose gradients are zeros
        out = v * (decay.exp() * beta)[..., None] + (q * k).sum(-1, keepdim=True)
        return out.transpose(1, 2), state
    for a, b, c, d, e in zip(*(x.split(CHUNK, 2) for x in (q, k, v, decay, beta))):
        out, state = _chunk(a, b, c, d, e, state)
        outs.append(out)
    return torch.cat(outs, 2).transpose(1, 2), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    total = decay.cumsum(-1)
    # Above the diagonal the exponent would be positive: it is left out before, not after.
    gaps = (total[..., :, None] - total[..., None, :]).tril()
    later = gaps.exp().tril()
    rate = beta[..., None]
    system = (rate * (k @ k.mT) * later).tril(-1)
    right = rate * (v - total.exp()[..., None] * (k @ state))
    updates = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = total.exp()[..., None] * (q @ state) + ((q @ k.mT) * later) @ updates
    left = (total[..., -1:] - total).exp()[..., None] * k
    return out, total[..., -1, None, None].exp() * state + left.mT @ updates


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet over one axis of a tensor, whatever mesh dims split it.

    `S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T` per head, read by queries,
    after a causal convolution of queries, keys and values; outputs are normalised, gated and
    projected (Yang et al., arXiv:2412.06464). The other axes act as batch. With a layout, input and
    output are the local shards as they are at rest, and the result is the shard of what one device
    computes. Mesh dims that split the reserved axis `heads` split the heads; `[carry]` of the
    layout says how states travel, or that `ulysses` gives ranks whole sequences of some heads.

    Args:
        embed_dim: size of the last axis of input and output.
        num_heads: heads, over all ranks.
        axis: the axis that the recurrence runs along: a name or an index into `axes`.
        axes: names of the input's dims, the embedding last.
        layout: how the axes are split over the mesh, bound. Default: one device.
        head_dim: of queries, keys and values; default `embed_dim / num_heads`.
        conv: taps of the convolution.
        generator: the source of the initial weights, as for `MultiAxisAttention`.
        device: of the parameters.
        dtype: of the parameters, default torch's.

    Raises:
        DeclarationError: an axis that `axes` does not name, sizes that do not divide.

    >>> layer = weft.nn.GatedDeltaNet(32, 4, axis="tokens")
    >>> layer(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        axis: str | int,
        axes: Sequence[str] = ("batch", "tokens", "embed"),
        layout: Layout | None = None,
        head_dim: int | None = None,
        conv: int = 4,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout = Layout.single() if layout is None else layout
        self.axes = tuple(axes)
        (self.axis,) = resolve_axes(axis, self.axes)
        if head_dim is None and embed_dim % num_heads:
            raise DeclarationError(
                f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}: say head_dim="
            )
        if conv < 1:
            raise DeclarationError(f"conv={conv}: a convolution has 1 tap or more")
        by = layout.carries_by_heads(self.axis)
        (by_heads(layout, self.axis) if by else layout).check_heads("heads", num_heads)
        self.heads, self.conv = num_heads, conv
        self.head_dim = head_dim = embed_dim // num_heads if head_dim is None else head_dim
        place = functools.partial(HeadWeight, layout=layout, device=device, dtype=dtype)

        def draw(*shape: int, fan: int) -> HeadWeight:
            bound = 1 / math.sqrt(fan)
            whole = torch.empty(num_heads, *shape)
            return place(whole.uniform_(-bound, bound, generator=generator))

        self.query, self.key, self.value, self.gate, self.out = (
            draw(head_dim, embed_dim, fan=embed_dim) for _ in range(5)
        )
        self.taps = draw(3 * head_dim, conv, fan=conv)
        self.decay, self.rate = (draw(1, embed_dim, fan=embed_dim) for _ in range(2))
        # Steps from 0.001 to 0.1 of a decay from 1 to 16, as Mamba-2 starts (arXiv:2405.21060).
        step = torch.empty(num_heads, 1, 1).uniform_(generator=generator)
        step = torch.exp(step * math.log(100.0) + math.log(1e-3))
        self.step = place(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        self.log_decay = place(
            torch.empty(num_heads, 1, 1).uniform_(1, 16, generator=generator).log()
        )
        self.gain = nn.Parameter(torch.ones(head_dim, device=device, dtype=dtype))
        replicate(self, layout)

    def forward(
        self,
        x: Tensor,
        lengths: Mapping[str, int] | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Runs the recurrence along the axis.

        Args:
            x: local tensor with the dims `axes` names.
            lengths: global length of the axis, needed where the mesh does not divide it.
            documents: packed one after another along the axis; nothing crosses to the next.

        Returns:
            A tensor shaped like `x`.

        Raises:
            ShapeError: a tensor that does not have these axes, lengths of others, chunks that are
                uneven without `lengths`.
        """
        embed = self.query.weight.shape[1]
        if x.dim() != len(self.axes) or x.shape[-1] != embed:
            raise ShapeError(
                f"x must have the axes {self.axes} and {self.axes[-1]} = {embed}, found shape"
                f" {tuple(x.shape)}"
            )
        try:
            check_axis_lengths("lengths", lengths, self.axes[:-1])
        except ShapeError as error:
            dims = [d for d in self.layout.shard_dims(self.axis) if self.layout.mesh[d] > 1]
            refuse(self.layout.bound, dims, "state", error)
            raise
        along = self.axes.index(self.axis)
        turned = x.movedim(along, -2)
        y = self.layout.enter(turned.flatten(0, -3) if x.dim() > 2 else turned[None], "heads")
        even = y.shape[1] * self.layout.size(self.axis)
        length = (lengths or {}).get(self.axis, even)
        out = self._recurrence(*self._inputs(y), length, documents)
        gain = self.layout.enter(local(self.gain), "heads")
        out = F.rms_norm(out, (self.head_dim,)).to(y.dtype) * gain
        out = rearrange(out, "b t h v -> b t (h v)") * F.silu(self.gate.split(y))
        return self.layout.sum(self.out.merge(out), "heads").view(turned.shape).movedim(-2, along)

    def _inputs(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels of the convolution (b t h c) and the gates (b t h), from (b t e)."""
        projections = (self.query, self.key, self.value)
        each = (p.split(y) for p in projections)
        channels = [rearrange(x, "b t (h d) -> b t h d", d=self.head_dim) for x in each]
        step = F.softplus(self.decay.split(y) + self.step.local[:, 0])
        decay = -self.log_decay.local[:, 0].exp() * step
        return torch.cat(channels, -1), decay, self.rate.split(y).sigmoid()

    def _recurrence(
        self,
        channels: Tensor,
        decay: Tensor,
        beta: Tensor,
        length: int,
        documents: Documents | None,
    ) -> Tensor:
        """Outputs (b t h v), over whole sequences of some heads where the layout says so."""
        taps = rearrange(self.taps.local, "(h c) k -> h c k", c=channels.shape[-1])

        def run(
            layout: Layout, channels: Tensor, decay: Tensor, beta: Tensor, taps: Tensor
        ) -> Tensor:
            return self._carried(layout, taps, channels, decay, beta, length, documents)

        return traded(self.layout, self.axis, length, run, (channels, decay, beta), (taps,))

    def _carried(
        self,
        layout: Layout,
        taps: Tensor,
        channels: Tensor,
        decay: Tensor,
        beta: Tensor,
        length: int,
        documents: Documents | None,
    ) -> Tensor:
        """Convolution and recurrence along the axis, as a layout says it is split."""
        taps = rearrange(taps, "h c k -> (h c) k")
        mixed = F.silu(self._convolved(layout, taps, channels, length, documents))
        q, k, v = mixed.view(channels.shape).split(self.head_dim, -1)
        q, k = F.normalize(q, dim=-1) * self.head_dim**-0.5, F.normalize(k, dim=-1)
        inputs = q, k, v, decay, beta
        pieces = LocalPieces(layout, self.axis, length, documents)
        return (_in_chain if pieces.in_chain() else _composed)(pieces, inputs).to(channels.dtype)

    def _convolved(
        self,
        layout: Layout,
        taps: Tensor,
        channels: Tensor,
        length: int,
        documents: Documents | None,
    ) -> Tensor:
        """The causal convolution along the axis, (b t h*c)."""
        flat = rearrange(channels, "b t h c -> b t (h c)")
        weight = taps[:, None]

        def run(part: Tensor) -> Tensor:
            return F.conv1d(part.transpose(1, 2), weight, groups=len(weight)).transpose(1, 2)

        return halo(run, flat, self.conv - 1, layout, self.axis, length=length, documents=documents)


def _zeros(v: Tensor, heads: int) -> Tensor:
    """A state of zeros, in the dtype of computation."""
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    return v.new_zeros(len(v), heads, v.shape[-1], v.shape[-1], dtype=dtype)


def _composed(pieces: LocalPieces, inputs: tuple[Tensor, ...]) -> Tensor:
    """All ranks at the same time: values widened by [0 | I] give the map of the state with them."""
    q, _, v, _, _ = inputs
    dim, start = v.shape[-1], _zeros(v, v.shape[2])
    eye = torch.eye(dim, dtype=start.dtype, device=v.device).expand_as(start)
    outs, maps = [], []
    for piece, (q, k, v, decay, beta) in zip(pieces.pieces, pieces.split(1, *inputs)):
        if piece.begins:  # its state is zero, whatever came before
            out, end = gated_delta_rule(q, k, v, decay, beta, start)
            maps.append((eye, end))
        else:
            state = torch.cat([start, eye], -1)
            out, end = gated_delta_rule(q, k, F.pad(v, (0, dim)), decay, beta, state)
            maps.append((end[..., dim:], end[..., :dim]))
        outs.append(out)
    states = pieces.states(maps, torch.matmul, of=inputs)
    result = [
        out if piece.begins else out[..., :dim] + torch.einsum("bthk,bhkv->bthv", out[..., dim:], s)
        for piece, out, s in zip(pieces.pieces, outs, states)
    ]
    return pieces.join(1, result, states)


def _in_chain(pieces: LocalPieces, inputs: tuple[Tensor, ...]) -> Tensor:
    """Rank after rank, a group of heads at a time."""
    *_, v, _, _ = inputs
    return pieces.chain_heads(gated_delta_rule, inputs, _zeros(v, v.shape[2]))


__all__ = ["GatedDeltaNet", "gated_delta_rule"]

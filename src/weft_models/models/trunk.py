"""The blocks of a model file as a module: any named axes, embedded tensors in and out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import DeclarationError, ShapeError, did_you_mean
from weft.layout import Layout
from weft.masks import Mask
from weft_axes.nn.parameters import replicate
from weft_axes.nn.sequences import gathered_lengths

from ..declare.model_blocks import (
    AttendBlock,
    CarryBlock,
    MlpBlock,
    TriangleBlock,
)
from ..declare.model_file import ModelSpec
from .blocks import Attend, BlockInputs, Carry, Mlp, Triangle, norm
from .cache import CacheRecording, KeyValueCache
from .encodable import encodable_blocks, is_mixed
from .model import Model
from .relayout import Lent, lend_inputs

KINDS: dict[type, Callable[..., nn.Module]] = {
    AttendBlock: Attend,
    CarryBlock: Carry,
    MlpBlock: Mlp,
    TriangleBlock: Triangle,
}


class Trunk(Model):
    """The blocks of a model file in order, and a last normalisation.

    Made by `weft.compose` from a model file without a `head`; heads of your own may hold one.

    Args:
        spec: the model file.
        layout: of the axes, bound.
        generator: the source of the initial weights.
        layouts: other layouts for kinds of blocks, bound on the same ranks.

    >>> spec = weft.models.ModelSpec.from_dict({
    ...     "axes": ["batch", "time", "lat", "lon", "embed"], "sizes": {"embed": 16, "heads": 2},
    ...     "block": [{"attend": "time", "mask": "causal", "rope": True},
    ...               {"attend": "lat+lon"}, {"mlp": 32}]})
    >>> weft.compose(spec)(torch.zeros(1, 3, 4, 5, 16)).shape
    torch.Size([1, 3, 4, 5, 16])
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        generator: torch.Generator,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.layout = spec, layout
        self.blocks, here = nn.ModuleList(), layout
        for block in spec.blocks:
            kind = KINDS[type(block)]
            if isinstance(block, AttendBlock):  # others run on any placement of x
                here = (layouts or {}).get(block.kind, layout)
            make = functools.partial(kind, spec, block)
            one = make(layout, generator) if here is layout else None
            self.blocks.append(one or Lent(make, layout, here, generator))
        self.norm = norm(spec)
        replicate(self, layout)

    def forward(
        self,
        x: Tensor,
        contexts: Mapping[str, Tensor] | None = None,
        *,
        lengths: Mapping[str, int] | None = None,
        masks: Mapping[str, Any] | None = None,
        biases: Mapping[str, Tensor] | None = None,
        within: Mask | None = None,
        cache: KeyValueCache | CacheRecording | None = None,
        only: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Runs the blocks.

        Args:
            x: local tensor with the model's axes.
            contexts: the tensors of `[context]`, local, by name.
            lengths: global lengths of axes, needed where the mesh does not divide them; those of a
                context that differ as `"name.axis"`.
            masks: parameters that masks of the model file leave open, by the mask's name:
                `{"first-keys": 6}`, `{"documents": (5, 7)}`; a `weft.Mask` under any name the file
                has as `given`.
            biases: the tensors of `bias = { pair = "name" }`, whole on every rank.
            within: a mask that every block's own is joined with, such as packed documents, with
                each of which a recurrence starts anew.
            cache: from `encode` of earlier positions of an axis: those of x attend to them,
                and not to each other.
            only: the one position of an axis that the caller reads, as `{"features": 3}`. After the
                last block that attends this axis the others are not computed. Of an axis that no
                rank splits, with a cache, without gradients.

        Returns:
            A tensor shaped like x, of length 1 along an axis in `only`.

        Raises:
            ShapeError: tensors without these axes, or a context that is missing.
            DeclarationError: a mask's parameter that neither the file nor the call has.
        """
        given = BlockInputs(lengths or {}, contexts or {}, masks or {}, biases or {}, within)
        self._check(x, given)
        cached = () if cache is None else self._cached(x, given, cache)
        here, lent = self.layout, {}
        only = only or {}
        last = self._checked_only(only, cache)
        for number, block in enumerate(self.blocks):
            for axis in [a for a in last if last[a] == number - 1]:
                assert isinstance(cache, KeyValueCache)
                x = x.narrow(self.spec.axes.index(axis), only[axis], 1)
                cache = cache.only(axis, only[axis])
                given = dataclasses.replace(given, lengths={**given.lengths, axis: 1})
            there = _layout_of(block)
            x, here = self._move(x, here, there, given), there
            if here is not self.layout and here not in lent:
                axes = {name: c.axes for name, c in self.spec.context.items()}
                lent[here] = lend_inputs(given, self.layout, here, axes)
            one = given if here is self.layout else lent[here]
            if number in cached:
                one = dataclasses.replace(one, cache=cache, number=number)
            x = block(x, one)
            if isinstance(cache, CacheRecording) and number == cached[-1]:
                return x  # nothing needs the later blocks
        return self.norm(self._move(x, here, self.layout, given))

    @torch.no_grad()
    def encode(
        self,
        x: Tensor,
        axis: str,
        contexts: Mapping[str, Tensor] | None = None,
        *,
        lengths: Mapping[str, int] | None = None,
        masks: Mapping[str, Any] | None = None,
        biases: Mapping[str, Tensor] | None = None,
    ) -> KeyValueCache:
        """Keys and values of the positions that all others attend to, such as training rows.

        With them in `forward`'s `cache`, further positions of the axis come out as they would in
        one pass behind those of x, with the mask `weft.FirstKeys` of their number.

        Args:
            x: local tensor with the model's axes.
            axis: all of whose blocks have `mask = "first-keys"`.
            contexts: as for `forward`.
            lengths: as for `forward`.
            masks: as for `forward`, of blocks that attend other axes.
            biases: as for `forward`.

        Raises:
            DeclarationError: a block lets positions of the axis see more than the encoded ones.

        >>> spec = weft.models.ModelSpec.from_dict({
        ...     "axes": ["rows", "embed"], "sizes": {"embed": 8, "heads": 2},
        ...     "block": [{"attend": "rows", "mask": "first-keys"}, {"mlp": 16}]})
        >>> trunk, x = weft.compose(spec), torch.randn(5, 8)
        >>> cache = trunk.encode(x[:3], "rows")
        >>> whole = trunk(x, masks={"first-keys": 3})
        >>> torch.allclose(trunk(x[3:], cache=cache), whole[3:], atol=1e-6)
        True
        """
        recording = self.recording(x.shape, axis, lengths)
        given = {"lengths": lengths, "masks": masks, "biases": biases}
        self(x, contexts, **given, cache=recording)
        return recording.finished(self)

    def recording(
        self, shape: Sequence[int], axis: str, lengths: Mapping[str, int] | None
    ) -> CacheRecording:
        """A cache that `forward` is to make, for models that hold a trunk.

        Args:
            shape: of x, local.
            axis: as for `encode`.
            lengths: as for `forward`; ranks ask each other for those of attended axes that are not
                given. Of other axes every rank may hold any number.

        Raises:
            ShapeError: on every rank, where ranks do not hold DTensor's chunks of an axis.
        """
        blocks = encodable_blocks(self.spec, self.blocks, axis)
        known = {} if lengths is None else lengths
        here = {
            name: n
            for name, n in zip(self.spec.axes[:-1], shape)
            if name in known or self.layout.size(name) == 1 or is_mixed(self.spec, name)
        }
        whole = gathered_lengths(self.layout, here, known)
        return CacheRecording(self.layout, self.spec.axes, axis, blocks, whole)

    def _cached(
        self, x: Tensor, given: BlockInputs, cache: KeyValueCache | CacheRecording
    ) -> tuple[int, ...]:
        """The numbers of the blocks that attend to the cache, which fits this model and x."""
        if given.within is not None:
            raise DeclarationError("within=... and a cache exclude each other")
        if isinstance(cache, CacheRecording):
            return cache.blocks
        cache.check_fit(self.spec, self.layout, x.shape, given.lengths)
        return encodable_blocks(self.spec, self.blocks, cache.axis)

    def _move(self, x: Tensor, before: Layout, after: Layout, given: BlockInputs) -> Tensor:
        if before is after:
            return x
        dims = {name: i for i, name in enumerate(self.spec.axes[:-1])}
        lengths = {name: given.lengths[name] for name in dims if name in given.lengths}
        return before.redistribute(x, after, dims, lengths)

    def _checked_only(
        self, only: Mapping[str, int], cache: KeyValueCache | CacheRecording | None
    ) -> dict[str, int]:
        """The number of the last block that mixes positions of each axis; -1 where none does."""
        last = {}
        for axis in only:
            layouts = [_layout_of(block) for block in self.blocks]
            if not isinstance(cache, KeyValueCache) or axis == cache.axis:
                raise DeclarationError(f"only={dict(only)} needs a cache of another axis")
            if any(layout.size(axis) > 1 for layout in layouts):
                raise DeclarationError(
                    f"only={dict(only)}: ranks split axis {axis!r}, and few hold this position"
                )
            last[axis] = -1
            for number, block in enumerate(self.spec.blocks):
                if not isinstance(block, MlpBlock) and axis in getattr(block, "attend", (axis,)):
                    last[axis] = number
        return last

    @property
    def mask_names(self) -> set[str]:
        """Names of masks that the model file leaves to the call."""
        return {name for block in self.spec.attends for name in block.masks_of_call}

    def _check_names(self, label: str, known: set[str], given: Mapping[str, Any]) -> None:
        for name in given:
            if name not in known:
                raise DeclarationError(
                    f"model {self.spec.name!r}: {label} has {name!r}, which no block asks for"
                    f"{did_you_mean(name, known)}"
                )

    def _check(self, x: Tensor, given: BlockInputs) -> None:
        spec = self.spec
        if x.dim() != len(spec.axes) or x.shape[-1] != spec.sizes.embed:
            raise ShapeError(
                f"model {spec.name!r}: x must have the axes {spec.axes} and {spec.axes[-1]} ="
                f" {spec.sizes.embed}, found shape {tuple(x.shape)}"
            )
        known = {b.context for b in spec.attends if b.context is not None}
        if known != set(given.contexts):
            raise ShapeError(
                f"model {spec.name!r} takes the contexts {sorted(known)}, found"
                f" {sorted(given.contexts)}"
            )
        self._check_names("masks", self.mask_names, given.masks)
        biases = {name for block in spec.attends for name in block.biases_of_call}
        self._check_names("biases", biases, given.biases)
        self._check_lengths(given.lengths)

    def _check_lengths(self, lengths: Mapping[str, int]) -> None:
        spec = self.spec
        axes = [*spec.axes[:-1], *(a for c in spec.context.values() for a in c.axes[:-1])]
        axes += [f"{name}.{a}" for name, c in spec.context.items() for a in c.axes[:-1]]
        for name in lengths:
            if name not in axes:
                raise DeclarationError(
                    f"model {spec.name!r}: lengths has {name!r}, which is no axis"
                    f"{did_you_mean(name, axes)}"
                )


def _layout_of(block: nn.Module) -> Layout:
    layout = block.layout
    assert isinstance(layout, Layout)
    return layout

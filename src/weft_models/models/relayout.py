"""A block with a layout other than its model's; activations are resharded around it.

    x on the model's layout  ->  redistribute  ->  block on its own  ->  redistribute back
    whole weights            ->  the heads that the block's layout wants of this rank

Its weights are placed by the model's layout, replicated, so that whatever completes the
model's gradients (`sync_gradients`, DDP, FSDP2) completes theirs: the backward pass sums them over
the block's layout and leaves each rank its share of that sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.declare.layout_file import HEADS
from weft.layout import Layout
from weft.move import collectives
from weft_axes.nn.parameters import HeadWeight, local

from .blocks import BlockInputs


class Lent(nn.Module):
    """The parts of a block of the model, run as another layout says.

    `make` makes the block for a layout from a generator of weights; `home`, the model's layout, and
    `away`, the block's, are bound on the same ranks.
    """

    def __init__(
        self,
        make: Callable[[Layout, torch.Generator], nn.Module],
        home: Layout,
        away: Layout,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        for name, part in make(Layout.single(), generator).named_children():
            self.add_module(name, part)
        runner = make(away, torch.Generator()).to("meta")
        self._runner = (runner,)  # in a tuple: its weights are not the model's
        self._split = {
            f"{name}.weight" for name, m in runner.named_modules() if isinstance(m, HeadWeight)
        }
        self.layout, self._home = away, home

    def forward(self, x: Tensor, given: BlockInputs) -> Tensor:
        """x and the block's inputs are placed by the block's layout."""
        weights = {name: self._weight(name, p) for name, p in self.named_parameters()}
        return functional_call(self._runner[0], weights, (x, given))

    def _weight(self, name: str, parameter: Tensor) -> Tensor:
        away = self.layout
        dims = (*away.data_dims, *(away.shard_dims(HEADS) if name in self._split else ()))
        weight = lend(local(parameter), self._home, away, dims)
        return away.shard(weight, {HEADS: 0}) if name in self._split else weight


def lend(t: Tensor, home: Layout, away: Layout, dims: Sequence[str]) -> Tensor:
    """A tensor that is whole on every rank, for use on another layout.

    Backward, the gradient is summed over `dims` of `away`, and each rank keeps such a share that
    the sum over the ranks that split data at home is the gradient.
    """
    shares = math.prod(home.mesh[d] for d in home.data_dims)
    shared = collectives.scale_backward(t, 1.0 / shares)
    return collectives.invariant_to_replicate(shared, dims, away.bound)


def lend_inputs(
    given: BlockInputs, home: Layout, away: Layout, context_axes: Mapping[str, Sequence[str]]
) -> BlockInputs:
    """Contexts and pair biases as `away` wants them."""
    contexts = {}
    for name, t in given.contexts.items():
        dims = {a: i for i, a in enumerate(context_axes[name][:-1])}
        every = dict.fromkeys([*home.sharding, *away.sharding]) | dims
        contexts[name] = home.redistribute(t, away, every, _lengths(given, name, dims))
    biases = {k: lend(t, home, away, away.data_dims) for k, t in given.biases.items()}
    return dataclasses.replace(given, contexts=contexts, biases=biases)


def _lengths(given: BlockInputs, context: str, axes: Mapping[str, int]) -> dict[str, int]:
    found = {a: given.lengths.get(f"{context}.{a}", given.lengths.get(a)) for a in axes}
    return {a: n for a, n in found.items() if n is not None}

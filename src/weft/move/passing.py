"""Movements outside attention: how ranks agree on one, and the custom ops that run it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._digest import number_of
from ..comm import Transport
from ..comm.channel import Channel, refuse
from ..errors import WeftError
from . import handles
from .handles import differentiable, op, shapes_of


@dataclass(frozen=True)
class Exchange:
    """A movement with a forward and a backward pass, which ranks agree on before each."""

    label: str  # for the trace and texts
    subject: str  # what users call, for errors
    transport: Transport
    mesh_dims: tuple[str, ...]
    content: str  # what ranks along `mesh_dims` must have in common
    described: str  # the same for people
    ahead: bool  # whether the CPU runs ahead of the device
    origin: str  # which module makes the call

    def forward(self) -> Channel:
        """The channel of the forward pass."""
        return self._of_pass(self.label, "", self.origin)

    def backward(self, number: int) -> Channel:
        """The channel of the backward pass of the forward pass of a number."""
        return self._of_pass(f"the backward pass of {self.label}", f", of pass {number}", "")

    def _of_pass(self, label: str, number: str, where: str) -> Channel:
        detail = f"{label} {self.described}{number}"
        return Channel(
            self.transport,
            self.mesh_dims,
            number_of(f"{label} {self.content}{number}"),
            label,
            lambda: detail,
            kind=number_of(f"{label} {self.content}") if self.ahead else None,
            subject=self.subject,
            origin=where,
        )

    def refuse(self, error: WeftError) -> None:
        """Tell the ranks that wait for this one that it refuses."""
        refuse(self.transport, self.mesh_dims, self.label, error, self.subject)


@dataclass(eq=False)
class Passing(abc.ABC):
    """One differentiable movement of a tensor, which the ops of `pass_op` get by its handle.

    `plan` holds its messages, and its `traffic` counts them.
    """

    plan: Any
    exchange: Exchange
    handle: str = field(default_factory=handles.new_name, kw_only=True)

    #: whether the backward pass reads the input and the result of the forward pass
    reads_forward = False

    @property
    def transport(self) -> Transport:
        """The transport of this rank."""
        return self.exchange.transport

    def keep_traced(self) -> str:
        """Its handle for a graph, which may keep it for as long as the process lives."""
        self.handle += f"-{number_of(self.exchange.content):x}"
        return handles.keep_traced(self)

    @abc.abstractmethod
    def forward(self, x: Tensor, channel: Channel) -> Tensor:
        """The result of the forward pass."""

    @abc.abstractmethod
    def backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        out: Tensor | None,
        shape: Sequence[int],
        channel: Channel,
    ) -> Tensor:
        """The gradient of x, of a shape; x and the result if `reads_forward`."""

    @abc.abstractmethod
    def shape(self, x: Tensor) -> Sequence[int]:
        """The shape of the result."""


def pass_op(name: str, subject: str) -> None:
    """Register `weft::NAME` and `weft::NAME_backward`, which run the two passes of a `Passing`.

    Ops have names, so that a policy of activation checkpointing that keeps their outputs repeats no
    communication, and `torch.compile` puts them into a graph.
    """

    @op(f"weft::{name}")
    def forward(x: Tensor, handle: str) -> tuple[Tensor, Tensor]:
        passing: Passing = handles.get(handle)
        channel = passing.exchange.forward()
        # Of a view, such as one of a buffer, autograd would refuse functions in place.
        out = passing.forward(x, channel).data
        channel.watches.note(passing.plan, False)
        channel.finish()
        # By its number the backward pass is told from others.
        return out, torch.tensor([channel.number], dtype=torch.int64, device="cpu")

    @op(f"weft::{name}_backward")
    def backward(
        grad: Tensor,
        x: Tensor | None,
        out: Tensor | None,
        number: Tensor,
        shape: list[int],
        handle: str,
    ) -> Tensor:
        passing: Passing = handles.get(handle)
        channel = passing.exchange.backward(int(number))
        result = passing.backward(grad, x, out, shape, channel)
        channel.watches.note(passing.plan, True)
        channel.finish()
        return result

    @shapes_of(forward)
    def _(x: Tensor, handle: str) -> tuple[Tensor, Tensor]:
        number = torch.empty(1, dtype=torch.int64, device="cpu")
        return x.new_empty(handles.get(handle).shape(x)), number

    @shapes_of(backward)
    def _(
        grad: Tensor, x: object, out: object, number: Tensor, shape: list[int], handle: str
    ) -> Tensor:
        return grad.new_empty(shape)

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, ctx.handle = inputs
        ctx.keep, ctx.shape = handles.get(ctx.handle), list(x.shape)
        read = (x, output[0]) if ctx.keep.reads_forward else (None, None)
        ctx.save_for_backward(*read, output[1])  # a checkpoint computes again as far as this

    def gradient(ctx: Any, grad: Tensor, _: Any) -> tuple:
        handles.keep(ctx.handle, ctx.keep)
        run = getattr(torch.ops.weft, f"{name}_backward")
        return run(grad, *ctx.saved_tensors, ctx.shape, ctx.handle), None

    differentiable(forward, backward, setup, gradient, subject)

"""diffusers' transformers on a layout: `parallelize(transformer, layout)`, and nothing else.

Every rank calls the transformer with whole inputs and gets the whole output. In between it holds
its own tokens: what is split where is diffusers' own declaration (`diffusers_plans`). Attention
within the blocks runs on the layout; cross-attention to text that every rank has whole stays as
it is.

    text  t0 t1 t2       image  i0 i1 i2 i3 i4        sequence of 8 tokens over 2 ranks: 4 each
    rank 0: t0 t1 | i0 i1         rank 1: t2 | i2 i3 i4

Shapes: b batch, h heads, n tokens of this rank, d head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..attention import attention
from ..comm import index_at
from ..errors import DeclarationError, ShapeError, UnsupportedError, WeftError
from ..layout import Layout
from ..masks import FULL, Mask, MaskMod
from ..plan.order import count, shard_spans
from .diffusers_plans import Plan, Split, read_plan
from .tabpfn_rows import scale_gradient

_SDPA = F.scaled_dot_product_attention


def parallelize(
    transformer: nn.Module,
    layout: Layout,
    axis: str = "tokens",
    text: Literal["sharded", "whole"] = "sharded",
) -> nn.Module:
    """Split the tokens of a diffusers transformer over a layout; returns the transformer.

    It is called as before, with whole inputs on every rank, and returns the whole output on every
    rank, for any number of tokens. After `backward`, which every rank calls on the same loss, call
    `layout.sync_gradients(transformer)`: the gradients are those of one process. Gradients of
    inputs are shares, whose sum over the ranks is the gradient.

    Text masks, such as Qwen-Image's and HunyuanVideo's, hide keys wherever they lie.

    Args:
        transformer: Flux, Wan, CogVideoX, HunyuanVideo or Qwen-Image.
        layout: a bound layout that splits tokens and nothing else.
        axis: the layout's name for the tokens.
        text: whether ranks compute with their part of the text, or each with all of it, for text
            of fewer tokens than there are ranks. Text that the image only attends to is whole on
            every rank anyway.

    Raises:
        UnsupportedError: another transformer, attention that is not torch's own, or dropout. In
            calls: gradient checkpointing, ControlNets, image prompts (IP-Adapter).
        DeclarationError: a layout that splits more than the tokens; a transformer that is
            parallelized already.

    >>> from diffusers import FluxTransformer2DModel
    >>> transformer = FluxTransformer2DModel(
    ...     in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
    ...     num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8,
    ...     axes_dims_rope=(2, 2, 4),
    ... )
    >>> transformer = parallelize(transformer, Layout.single())
    >>> transformer(
    ...     hidden_states=torch.randn(1, 6, 4), encoder_hidden_states=torch.randn(1, 3, 8),
    ...     pooled_projections=torch.randn(1, 8), timestep=torch.ones(1),
    ...     img_ids=torch.zeros(6, 3), txt_ids=torch.zeros(3, 3),
    ... ).sample.shape
    torch.Size([1, 6, 4])
    """
    if text not in ("sharded", "whole"):
        raise DeclarationError(f"text={text!r}: write 'sharded' or 'whole'")
    plan = read_plan(transformer)
    _check(transformer, layout, axis)
    undo: list[Callable[[], None]] = []
    state = _State(layout, axis, plan, text == "whole" and plan.family.joint)

    def before(module: nn.Module, hook: Callable) -> None:
        undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(module: nn.Module, hook: Callable, **options: bool) -> None:
        undo.append(module.register_forward_hook(hook, with_kwargs=True, **options).remove)

    before(transformer, state.enter)
    for module, name, splits in plan.inputs:
        before(module, state.split_input(name, splits))
    for module, index, splits in plan.outputs:
        after(module, state.split_output(index, splits))
    for module in transformer.modules():
        if hasattr(module, "processor"):
            before(module, state.enter_attention)
            after(module, state.leave_attention, always_call=True)
    after(plan.gather[0], state.gather_output)
    after(transformer, state.leave, always_call=True)
    transformer.__dict__["_weft"] = undo
    return transformer


def restore(transformer: nn.Module) -> nn.Module:
    """Undo `parallelize`: none of weft's hooks are left.

    Args:
        transformer: a parallelized transformer.

    Returns:
        The transformer.

    Raises:
        DeclarationError: a transformer that is not parallelized.

    >>> restore(nn.Linear(2, 2))
    Traceback (most recent call last):
    weft.errors.DeclarationError: Linear is not parallelized
    """
    undo = transformer.__dict__.pop("_weft", None)
    if undo is None:
        raise DeclarationError(f"{type(transformer).__name__} is not parallelized")
    for remove in undo:
        remove()
    return transformer


@dataclass
class _State:
    """One rank's part in the calls of a transformer.

    text, image: tokens of both streams in the running call, once they are known.
    apart: whether hidden states are split now.
    """

    layout: Layout
    axis: str
    plan: Plan
    whole_text: bool
    text: int = 0
    image: int | None = None
    apart: bool = False
    regions: list[_Region | None] = field(default_factory=list)

    # -- which tokens are whose ----------------------------------------------------------------

    @property
    def chunk(self) -> int:
        """Which chunk of the tokens is this rank's."""
        layout = self.layout
        return index_at(layout.mesh, layout.shard_dims(self.axis), layout.coords)

    def counts(self, length: int) -> list[int]:
        """Tokens per chunk of a sequence of some length, as the layout splits it."""
        parts = tuple(self.layout.mesh[d] for d in self.layout.shard_dims(self.axis))
        order = self.layout.order.get(self.axis, "contiguous")
        return [count(spans) for spans in shard_spans(length, parts, order)]

    def own(self, stream: str, length: int) -> tuple[int, int]:
        """Where this rank's tokens of a stream begin, and how many there are.

        A rank's tokens of both streams together are its chunk of the joined sequence.
        """
        text = self.counts(self.text)
        counts = text
        if stream == "image":
            counts = [n - t for n, t in zip(self.counts(self.text + length), text)]
        if min(counts) < (stream == "image" or not self.whole_text):
            raise ShapeError(
                f"{length} {stream} tokens leave a rank without any on mesh"
                f" {dict(self.layout.mesh)}: use fewer ranks"
                + (", or text='whole'" if stream == "text" else "")
            )
        return sum(counts[: self.chunk]), counts[self.chunk]

    def split(self, x: Tensor, split: Split, what: str) -> Tensor:
        """This rank's part of a whole tensor."""
        if split.ndim is not None and x.dim() != split.ndim:
            if split.optional:
                return x
            raise ShapeError(f"{what} must have {split.ndim} dims, found shape {tuple(x.shape)}")
        length = x.shape[split.dim]
        lengths = {"text": self.text}
        if "image" in split.streams:
            known = length - self.text * ("text" in split.streams)
            self.image = known if self.image is None else self.image
            lengths["image"] = self.image
        if length != sum(lengths[s] for s in split.streams):
            raise ShapeError(
                f"{what} of shape {tuple(x.shape)} is not about {'+'.join(split.streams)} tokens:"
                f" there are {lengths}"
            )
        parts = x.split([lengths[s] for s in split.streams], split.dim)
        whole = {"text"} if self.whole_text else set()
        mine = [
            part if s in whole else part.narrow(split.dim, *self.own(s, lengths[s]))
            for s, part in zip(split.streams, parts)
        ]
        return mine[0] if len(mine) == 1 else torch.cat(mine, split.dim)

    def joined(self, x: Tensor, stream: str, length: int, dim: int) -> Tensor:
        """All tokens of a stream on every rank; backward gives each rank the sum for its own.

        before  rank 0: x0        rank 1: x1
        after   both:   [x0 | x1]            backward: rank i gets (g0 + g1)'s part i
        """
        start, n = self.own(stream, length)
        index = torch.arange(start, start + n, device=x.device)
        shape = list(x.shape)
        shape[dim] = length
        whole = x.new_zeros(shape).index_copy(dim, index, x)
        return self.layout.sum(whole, self.axis)

    # -- hooks ---------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before the transformer: refuses on every rank what cannot be honoured."""
        given, failure = _named(module, args, kwargs), ""
        try:
            _refuse(module, given)
        except WeftError as error:
            failure = f"refused: {error}"
        shapes = {n: tuple(t.shape) for n, t in given.items() if isinstance(t, Tensor)}
        self.layout.bound.agree("a call of the transformer", failure or str(shapes))
        if failure:
            raise UnsupportedError(failure.removeprefix("refused: "))
        self.text = given["encoder_hidden_states"].shape[1] if self.plan.family.joint else 0
        self.image, self.apart = None, False
        return (), given

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """After the transformer, also where it raised."""
        self.image, self.apart = None, False
        while self.regions:
            self.leave_attention(module, (), {}, None)

    def split_input(self, name: str, splits: tuple[Split, ...]):
        """A pre-hook that splits an argument of a module."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            given = _named(module, args, kwargs)
            value, what = given.get(name), f"{name} of {type(module).__name__}"
            if isinstance(value, Tensor):
                given[name] = self._split_all((value,), splits, what)[0]
            elif value is not None:
                given[name] = type(value)(self._split_all(value, splits, what))
            self.apart = self.apart or name == "hidden_states"
            return (), given

        return hook

    def split_output(self, index: int, splits: tuple[Split, ...]):
        """A hook that splits one of a module's outputs."""

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            what = f"output {index} of {type(module).__name__}"
            parts = [output] if isinstance(output, Tensor) else list(output)
            parts[index] = self._split_all((parts[index],), splits, what)[0]
            return parts[0] if isinstance(output, Tensor) else tuple(parts)

        return hook

    def _split_all(self, values, splits: tuple[Split, ...], what: str) -> list[Tensor]:
        text_only = all(s.streams == ("text",) for s in splits)
        if text_only and self.whole_text:
            return list(values)
        return [self.split(x, s, what) for x, s in zip(values, splits, strict=True)]

    def gather_output(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        """What follows runs on every rank alike, and sync_gradients sums over the ranks."""
        whole = self.joined(output, "image", self.image, self.plan.gather[1])
        return scale_gradient(whole, 1.0 / self.layout.size(self.axis))

    def enter_attention(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before an attention module: one over tokens that are split runs on the layout."""
        given = _named(module, args, kwargs)
        crosses = not self.plan.family.joint and given.get("encoder_hidden_states") is not None
        region = _Region(self) if self.apart and not crosses else None
        self.regions.append(region)
        if region is not None:
            region.__enter__()

    def leave_attention(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """After an attention module, also where it raised."""
        region = self.regions.pop() if self.regions else None
        if region is not None:
            region.__exit__(None, None, None)
            if output is not None and not region.caught:
                raise UnsupportedError(
                    f"{type(module).__name__} did not take its attention from torch's "
                    "scaled_dot_product_attention; transformer.set_attention_backend('native')"
                )


class _Region(TorchFunctionMode):
    """Inside, `F.scaled_dot_product_attention` of this rank's tokens is that of all tokens."""

    def __init__(self, state: _State) -> None:
        super().__init__()
        self.state, self.caught = state, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not _SDPA:
            return func(*args, **(kwargs or {}))
        self.caught += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p or is_causal or enable_gqa:
            raise UnsupportedError(
                f"dropout_p={dropout_p}, is_causal={is_causal}, enable_gqa={enable_gqa} in "
                "attention: weft honours none of them in a diffusers transformer"
            )
        state = self.state
        length = state.text + state.image
        tensors = [query, key, value]
        if state.whole_text:
            tensors = [self._own_text(t, 2) for t in tensors]
        mask = FULL if attn_mask is None else self._mask(attn_mask, key.shape[2], length)
        out = attention(*tensors, state.layout, state.axis, mask, scale, length)
        return self._all_text(out) if state.whole_text else out

    def _own_text(self, t: Tensor, dim: int) -> Tensor:
        """Of the whole text and this rank's image tokens, this rank's of both."""
        state = self.state
        text, image = self._apart(t, state.text, dim)
        return torch.cat([text.narrow(dim, *state.own("text", state.text)), image], dim)

    def _all_text(self, out: Tensor) -> Tensor:
        """The output (b h n d) for the whole text and this rank's image tokens, in their order."""
        state = self.state
        n = state.own("text", state.text)[1]
        text, image = out[:, :, :n], out[:, :, n:]
        parts = [state.joined(text, "text", state.text, 2), image]
        return torch.cat(parts if state.plan.family.text_first else parts[::-1], 2)

    def _apart(self, t: Tensor, text: int, dim: int) -> tuple[Tensor, Tensor]:
        rest = t.shape[dim] - text
        if self.state.plan.family.text_first:
            return t.split([text, rest], dim)
        image, words = t.split([rest, text], dim)
        return words, image

    def _mask(self, given: Tensor, keys: int, length: int) -> Mask:
        """Which keys there are, over all ranks: (b or 1, 1, 1, keys) here."""
        if given.dtype != torch.bool or given.dim() != 4 or given.shape[1:] != (1, 1, keys):
            raise UnsupportedError(
                f"attn_mask of shape {tuple(given.shape)} and {given.dtype}: weft takes masks that "
                f"say which keys there are, bool and (batch, 1, 1, {keys})"
            )
        state = self.state
        mine = given[:, 0, 0]
        mine = self._own_text(mine, 1) if state.whole_text else mine
        there = state.layout.gather(mine.to(torch.uint8), {state.axis: 1}).bool()
        return FULL if bool(there.all()) else MaskMod(_Keys(there))


@dataclass(frozen=True, eq=False)
class _Keys:
    """Whether a key is there: (batch or 1, keys)."""

    there: Tensor

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.there[b if len(self.there) > 1 else b * 0, k] & (q >= 0)


def _named(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A module's arguments, all by name."""
    signature = inspect.signature(module.forward)
    given = signature.bind(*args, **kwargs).arguments
    extra = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    return given | given.pop(extra, {})


def _check(transformer: nn.Module, layout: Layout, axis: str) -> None:
    name = type(transformer).__name__
    _ = layout.bound
    if "_weft" in transformer.__dict__:
        raise DeclarationError(
            f"{name} is parallelized already; weft.integrations.diffusers.restore(transformer) "
            "undoes it"
        )
    if set(layout.data_dims) != set(layout.shard_dims(axis)):
        raise DeclarationError(
            f"{layout.source}: the tokens may be split, over {layout.shard_dims(axis)}, but "
            f"nothing else; found {layout.data_dims}"
        )
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in transformer.modules()):
        raise UnsupportedError(f"{name} with dropout: ranks would drop other tokens than one does")


def _refuse(transformer: nn.Module, given: dict[str, Any]) -> None:
    """What a call may ask for that is not split over tokens."""
    name = type(transformer).__name__
    if getattr(transformer, "gradient_checkpointing", False) and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} with gradient checkpointing: blocks that are computed again would attend this "
            "rank's tokens only; transformer.disable_gradient_checkpointing()"
        )
    options = given.get("joint_attention_kwargs") or given.get("attention_kwargs") or {}
    for key, value in [*given.items(), *options.items()]:
        if value is not None and key.startswith(("controlnet_", "ip_")):
            raise UnsupportedError(f"{name}: {key} is whole on every rank, and is not split")


__all__ = ["parallelize", "restore"]

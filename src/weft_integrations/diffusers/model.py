"""diffusers' transformers on a layout by `weft.parallelize`; the model is unmodified.

Every rank calls the transformer with whole inputs and gets the whole output. In between it holds
its own tokens: diffusers' declarations say which tensors are split where (`plans.py`). Attention
within the blocks runs on the layout; cross-attention to text that every rank has whole stays as
it is.

    text  t0 t1 t2       image  i0 i1 i2 i3 i4        sequence of 8 tokens over 2 ranks: 4 each
    rank 0: t0 t1 | i0 i1         rank 1: t2 | i2 i3 i4

Shapes: b batch, h heads, n tokens of this rank, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.errors import DeclarationError, UnsupportedError, WeftError
from weft.layout import Layout

from ..common import (
    Parallelized,
    check_not_placed,
    check_splits_only,
    named_arguments,
    refuse_scaled_by_tensor,
    scale_gradient,
)
from .attention import Region
from .plans import TokenSplit, read_plan
from .streams import Streams


def parallelize_diffusers(
    transformer: nn.Module,
    layout: Layout,
    axis: str = "tokens",
    text: Literal["sharded", "whole"] = "sharded",
    tokenwise: Sequence[str] = (),
) -> nn.Module:
    """Split the tokens of a diffusers transformer over a layout; returns the transformer.

    It is called as before, with whole inputs on every rank, and returns the whole output on every
    rank, for any number of tokens that gives every rank some. After `backward`, which every rank
    calls on the same loss, call `layout.sync_gradients(transformer)`: the gradients are those of
    one process. Gradients of inputs are shares, whose sum over the ranks is the gradient.

    Text masks, such as Qwen-Image's and HunyuanVideo's, hide keys on any rank.

    Args:
        transformer: Flux, Wan, CogVideoX, HunyuanVideo or Qwen-Image.
        layout: a bound layout that splits tokens and nothing else.
        axis: the layout's name for the tokens.
        text: whether ranks compute with their part of the text, or each with all of it, for text
            of fewer tokens than there are ranks. Text that the image only attends to is whole on
            every rank anyway.
        tokenwise: modules and attention processors of your own, by their paths, such as
            "transformer_blocks.0.ff", that treat every token by itself, but for torch's attention.

    Raises:
        UnsupportedError: another transformer, attention that is not torch's own, dropout; a module
            or processor of an unknown package, or a convolution or its like that the configuration
            does not have, unless `tokenwise` names it. In calls: gradient checkpointing,
            ControlNets, image prompts (IP-Adapter), caches (`enable_cache`).
        DeclarationError: a layout that splits more than the tokens; a transformer that is
            parallelized already; a path in `tokenwise` that there is not.
        ShapeError: in calls: tokens that leave a rank without any.

    >>> from diffusers import FluxTransformer2DModel
    >>> transformer = FluxTransformer2DModel(
    ...     in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
    ...     num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8,
    ...     axes_dims_rope=(2, 2, 4),
    ... )
    >>> transformer = parallelize_diffusers(transformer, Layout.single())
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
    _check_modules(transformer, (tokenwise,) if isinstance(tokenwise, str) else tuple(tokenwise))
    undo: list[Callable[[], object]] = []
    state = _Hooks(layout, axis, plan, text == "whole" and plan.family.joint)

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
    Parallelized(undo).put_on(transformer)
    return transformer


@dataclass
class _Hooks(Streams):
    """The hooks of a transformer on one rank.

    Attributes:
        apart: whether hidden states are split now.
    """

    apart: bool = False
    regions: list[Region | None] = field(default_factory=list)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before the transformer: refuses on every rank arguments that cannot be honoured."""
        arguments, failure = named_arguments(module, args, kwargs), ""
        try:
            refuse_scaled_by_tensor(module, self.layout, self.axis)
            _refuse(module, arguments)
        except WeftError as error:
            failure = f"refused: {error}"
        shapes = {n: tuple(t.shape) for n, t in arguments.items() if isinstance(t, Tensor)}
        self.layout.bound.agree("a call of the transformer", failure or str(shapes))
        if failure:
            raise UnsupportedError(failure.removeprefix("refused: "))
        self.text = arguments["encoder_hidden_states"].shape[1] if self.plan.family.joint else 0
        self.image, self.apart = None, False
        return (), arguments

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """After the transformer, also where it raised."""
        self.image, self.apart = None, False
        while self.regions:
            self.leave_attention(module, (), {}, None)

    def split_input(self, name: str, splits: tuple[TokenSplit, ...]) -> Callable:
        """A pre-hook that splits an argument of a module."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            arguments = named_arguments(module, args, kwargs)
            value, label = arguments.get(name), f"{name} of {type(module).__name__}"
            if isinstance(value, Tensor):
                arguments[name] = self._split_all((value,), splits, label)[0]
            elif value is not None:
                arguments[name] = type(value)(self._split_all(value, splits, label))
            self.apart = self.apart or name == "hidden_states"
            return (), arguments

        return hook

    def split_output(self, index: int, splits: tuple[TokenSplit, ...]) -> Callable:
        """A hook that splits one of a module's outputs."""

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            label = f"output {index} of {type(module).__name__}"
            parts = [output] if isinstance(output, Tensor) else list(output)
            parts[index] = self._split_all((parts[index],), splits, label)[0]
            return parts[0] if isinstance(output, Tensor) else tuple(parts)

        return hook

    def _split_all(self, values: Any, splits: tuple[TokenSplit, ...], label: str) -> list[Tensor]:
        text_only = all(s.streams == ("text",) for s in splits)
        if text_only and self.whole_text:
            return list(values)
        return [self.split(x, s, label) for x, s in zip(values, splits, strict=True)]

    def gather_output(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        """The full output: later layers are replicated, and sync_gradients sums over the ranks."""
        assert self.image is not None  # known since the model's input was split
        gathered = self.joined(output, "image", self.image, self.plan.gather[1])
        return scale_gradient(gathered, 1.0 / self.layout.size(self.axis))

    def enter_attention(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before an attention module: one over tokens that are split runs on the layout."""
        arguments = named_arguments(module, args, kwargs)
        crosses = not self.plan.family.joint and arguments.get("encoder_hidden_states") is not None
        region = Region(self) if self.apart and not crosses else None
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


def _check(transformer: nn.Module, layout: Layout, axis: str) -> None:
    name = type(transformer).__name__
    check_not_placed(transformer)
    check_splits_only(layout, axis, "tokens")
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in transformer.modules()):
        raise UnsupportedError(f"{name} with dropout: ranks would drop other tokens than one does")


#: Packages whose modules and processors belong into a diffusers transformer: each treats tokens as
#: the module does that it stands for.
_KNOWN = (
    *("diffusers", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao"),
    *("optimum", "gguf", "builtins", "typing", "abc", "collections"),
)


#: Where torch has modules that make of one token something else than of the same among others.
_MIXING = (
    *("batchnorm", "channelshuffle", "conv", "fold", "instancenorm", "padding", "pixelshuffle"),
    *("pooling", "rnn", "transformer", "upsampling"),
)


def _mixes(part: object) -> bool:
    """True for modules of torch that mix tokens, or features in groups."""
    places = {f"torch.nn.modules.{name}" for name in _MIXING}
    mixing = any(c.__module__ in places for c in type(part).mro())
    return mixing or isinstance(part, nn.GroupNorm | nn.MultiheadAttention)


def _check_modules(transformer: nn.Module, tokenwise: tuple[str, ...]) -> None:
    """Refuses modules and processors of nobody knows whom, which may mix tokens of this rank.

    So too modules of torch's that mix them, where the configuration has none.
    """
    parts: dict[str, object] = dict(transformer.named_modules(remove_duplicate=False))
    for path, module in list(parts.items()):
        if (processor := getattr(module, "processor", None)) is not None:
            parts[f"{path}.processor".lstrip(".")] = processor
    name = type(transformer).__name__
    if missing := [path for path in tokenwise if path not in parts]:
        raise DeclarationError(f"tokenwise={missing}: {name} has no such modules")
    with torch.device("meta"):
        kind: Any = type(transformer)  # one of diffusers' model classes
        built = dict(kind.from_config(transformer.config).named_modules())
    for path, part in parts.items():
        inside = any(path == local or path.startswith(f"{local}.") for local in tokenwise)
        unknown = any(c.__module__.split(".")[0] not in _KNOWN for c in type(part).mro())
        mixes = _mixes(part) and type(built.get(path)) is not type(part)
        if not inside and (unknown or mixes):
            raise UnsupportedError(
                f"{path or 'the root'} of {name} is a {type(part).__name__} of "
                f"{type(part).__module__}: it may mix tokens, of which a rank has its own only; "
                f"where it treats every token by itself, but for torch's attention, pass "
                f'tokenwise=("{path}",)'
            )


#: Where diffusers has hooks that compute something else on a rank's tokens, or on that rank alone:
#: all but those that move weights, cast them, or skip layers as they are told.
_REFUSED_HOOKS = tuple(
    f"diffusers.hooks.{name}"
    for name in (
        *("context_parallel", "faster_cache", "first_block_cache", "mag_cache", "sea_cache"),
        *("pyramid_attention_broadcast", "smoothed_energy_guidance_utils", "taylorseer_cache"),
        "text_kv_cache",
    )
)


def _hooks_of(module: nn.Module) -> Iterable[object]:
    """Hooks that diffusers has put into a module, by `enable_cache` and its like."""
    registry = getattr(module, "_diffusers_hook", None)
    return () if registry is None else registry.hooks.values()


def _refuse(transformer: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse arguments and hooks of a call that are not split over tokens."""
    name = type(transformer).__name__
    if getattr(transformer, "gradient_checkpointing", False) and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} with gradient checkpointing: blocks that are computed again would attend this "
            "rank's tokens only; transformer.disable_gradient_checkpointing()"
        )
    for path, module in transformer.named_modules():
        for hook in _hooks_of(module):
            if any(kind.__module__ in _REFUSED_HOOKS for kind in type(hook).mro()):
                raise UnsupportedError(
                    f"{name}: {path or 'the root'} has a {type(hook).__name__}, which goes by this "
                    "rank's tokens alone, or leaves out attention that ranks compute together; "
                    "transformer.disable_cache(), or remove the hook"
                )
    options = arguments.get("joint_attention_kwargs") or arguments.get("attention_kwargs") or {}
    for key, value in [*arguments.items(), *options.items()]:
        if value is not None and key.startswith(("controlnet_", "ip_")):
            raise UnsupportedError(f"{name}: {key} is whole on every rank, and is not split")


__all__ = ["parallelize_diffusers"]

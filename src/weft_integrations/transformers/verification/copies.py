"""Copies of a transformers model that share its weights, each ready for one trial.

A copy has separate modules, hooks, buffers and configurations around the same weights. In train
mode every source of dropout is disabled. Recurrent layers forget slowly in copies: random weights
forget within a few tokens, and a lost state would make no difference.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from weft.errors import DeclarationError, UnsupportedError

from ... import Foreign
from ..replicated import configurations
from .inputs import Trial, shorten

#: Models of fewer bytes in fp32 are checked in fp32, whatever their own dtype; likewise in fp64.
_UPCAST_LIMIT = 16 << 30
#: Gradients are compared for this many parameters, none of more numbers than this.
_TRACKED, _LARGEST = 12, 1 << 23
#: Parameters by whose exponential, or softplus, a recurrent layer forgets: their range in copies.
_DECAYS = {"A_log": (-5.0, -3.0), "recurrent_param": (-6.0, -4.0)}
#: Parameters that are not trained, up to this many numbers, are copied: train mode may write them.
_WRITTEN = 1 << 16


class Copies:
    """Makes copies of one model, and lets go of them.

    Half-precision weights are converted to `dtype`, and `fit_fp64` says whether fp64 fits. Weights
    that are not there, that are wrapped already, or of which there are too many, are refused.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_weights(model)
        self.model, self.tracked, self.dtype = model, _tracked(model), _dtype(model)
        numbers = sum(p.numel() for p in model.parameters())
        self.fit_fp64 = self.dtype is torch.float32 and 8 * numbers <= _UPCAST_LIMIT
        # Once for all copies: a model's size each.
        self._converted: dict[tuple[int, torch.dtype], Tensor] = {}
        self._aliases: list[nn.Parameter] = []

    def make(self, trial: Trial) -> Foreign:
        """A copy in the mode of a trial, with its options."""
        memo: dict[int, Any] = {}
        dtype = torch.float64 if trial.fp64 else self.dtype
        for name, p in self.model.named_parameters():
            slow = _DECAYS.get(name.rpartition(".")[2])
            numbers = p if slow is None else _drawn(p, *slow)
            memo[id(p)] = self._alias(numbers, name in self.tracked, dtype)
        model = copy.deepcopy(self.model, memo).eval()
        for buffer in model.buffers():
            if _narrower(buffer, dtype):
                buffer.data = buffer.data.to(dtype)
        shorten(model, trial)
        if trial.train:
            _train(model)
        return model

    def _alias(self, p: Tensor, tracked: bool, dtype: torch.dtype) -> Tensor:
        """The same numbers as a leaf of another graph; converted where the dtype is another."""
        if type(p) not in (nn.Parameter, Tensor) or not p.is_floating_point():
            return p
        numbers = p.detach()
        if _narrower(p, dtype):
            key = id(p), dtype
            if key not in self._converted:
                self._converted[key] = numbers.to(dtype)
            numbers = self._converted[key]
        if not p.requires_grad and p.numel() <= _WRITTEN:
            numbers = numbers.clone()
        self._aliases.append(nn.Parameter(numbers, requires_grad=tracked))
        return self._aliases[-1]

    def release(self) -> None:
        """Let go of the weights: hooks tie copies into cycles, which Python frees late."""
        self._converted.clear()
        for alias in self._aliases:
            alias.data = alias.data.new_empty(0)


class InFP64(TorchFunctionMode):
    """Casts to fp32 within a model's code are casts to fp64: in norms, softmax and scans."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def _narrower(t: Tensor, dtype: torch.dtype) -> bool:
    """True if numbers are to be converted to a dtype: half precision, and fp32 where it is fp64."""
    kinds = {torch.float16, torch.bfloat16, *([torch.float32] if dtype is torch.float64 else [])}
    return t.dtype in kinds and t.dtype != dtype


def _drawn(p: Tensor, low: float, high: float) -> Tensor:
    """A parameter like p, of numbers that are the same in every copy."""
    spread = torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    numbers = low + (high - low) * spread
    return nn.Parameter(numbers.to(p.device, p.dtype), requires_grad=p.requires_grad)


def _train(model: Foreign) -> None:
    """Train mode without dropout of any kind; nothing is computed again in backward."""
    model.train()
    for module in model.modules():
        _keep_all(module)
        if "drop" in type(module).__name__.lower() and isinstance(module.__dict__.get("p"), float):
            module.p = 0.0
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    for config in configurations(model):
        _keep_all(config)


def _keep_all(owner: Any) -> None:
    for name, value in list(owner.__dict__.items()):
        if type(value) in (int, float) and value and "drop" in name and "keep" not in name:
            setattr(owner, name, type(value)(0))


@contextlib.contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Leaves the random states of torch, Python and NumPy as they are."""
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype to check in, to which half-precision weights are converted."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if dtype not in (torch.float16, torch.bfloat16):
        return dtype
    fits = 4 * sum(p.numel() for p in model.parameters()) <= _UPCAST_LIMIT
    if not fits:
        raise UnsupportedError(
            f"{type(model).__name__} has more than {_UPCAST_LIMIT >> 32} billion weights of "
            f"{dtype}: too many to check in fp32. Check one with fewer layers of the same "
            "configuration (weft_integrations.transformers.verify), and pass verify=False"
        )
    return torch.float32


def _tracked(model: nn.Module) -> frozenset[str]:
    """Parameters whose gradients are compared: routers, decays, some from the first to the last."""
    fit = [
        n
        for n, p in model.named_parameters()
        if p.is_floating_point() and p.numel() <= _LARGEST and type(p) is nn.Parameter
    ]
    routers = [n for n in fit if "router" in n or n.endswith(".gate.weight")][:2]
    decays = [n for n in fit if n.rpartition(".")[2] in _DECAYS][:1]
    step = max(1, len(fit) // (_TRACKED - 2))
    return frozenset([*routers, *decays, *fit[::step], *fit[-1:]])


def _refuse_weights(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise DeclarationError(
                f"{name} is a DTensor: parallelize before FSDP or tensor parallelism wraps the "
                "weights, so that the model can be checked, or pass verify=False"
            )
        if p.is_meta:
            raise DeclarationError(
                f"{name} is on the meta device, so nothing can be checked: parallelize after "
                "the weights are made, or pass verify=False"
            )


__all__ = ["Copies", "InFP64", "random_states_kept"]

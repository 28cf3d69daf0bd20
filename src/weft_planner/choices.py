"""Choices of a training set-up, and what each keeps in memory."""

from __future__ import annotations

#: Strategies that `weft.parallelize` binds a transformers model to.
BINDABLE = ("ring", "gather", "burst", "seen", "pass_q", "ulysses")
#: Bytes of a number's weights, gradients and optimizer states.
OPTIMIZERS = {"adamw-fp32": (4, 4, 8), "adamw-bf16": (2, 2, 4)}
#: Activations that a layer keeps for the backward pass: all, its input, or its input on the host.
RECOMPUTE = ("none", "layers", "offload")
#: Bytes of CUDA's context, NCCL's buffers, workspaces and fragmentation: assumed, not measured.
OTHER = 4e9
#: How a loss has its logits: of some tokens at a time, or all at once.
LOSSES = ("chunked", "full")

__all__ = ["BINDABLE", "LOSSES", "OPTIMIZERS", "OTHER", "RECOMPUTE"]

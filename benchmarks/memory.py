"""Memory that a forward pass keeps for its backward pass."""

from __future__ import annotations

import torch
from torch import nn

from weft._torch import memory_of


def saving(model: nn.Module, seen: dict[int, int]) -> torch.autograd.graph.saved_tensors_hooks:
    """Inside, bytes that autograd saves of tensors other than the weights, in `seen` by memory."""
    weights = {memory_of(p)[0] for p in model.parameters()}

    def save(t: torch.Tensor) -> torch.Tensor:
        memory, nbytes = memory_of(t)
        if memory not in weights:
            seen[memory] = nbytes
        return t

    return torch.autograd.graph.saved_tensors_hooks(save, lambda t: t)

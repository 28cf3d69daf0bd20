"""Small tensors that masks, plans and kernels make on the CPU and need on a device.

A copy from ordinary memory makes the CPU wait for the GPU. From page-locked memory it does not, so
a step may be launched while the one before still computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._caching import cached


def upload(t: Tensor, device: torch.device | str) -> Tensor:
    """A CPU tensor on a device, without waiting for what the device computes.

    >>> upload(torch.arange(3), "cpu")
    tensor([0, 1, 2])
    """
    device = torch.device(device)
    if device.type == "cuda" and not t.is_cuda:
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


@cached(1024)
def uploaded(numbers: tuple, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers, or rows of them, as a tensor that is copied to a device once.

    >>> uploaded(((0, 5), (2, 6)), torch.device("cpu"))
    tensor([[0, 5],
            [2, 6]])
    """
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)

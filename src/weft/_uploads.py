"""Small tensors that masks, plans and kernels make on the CPU and need on a device; and back.

A copy from or to ordinary memory makes the CPU wait for the GPU. From and to page-locked memory it
does not, so a step may be launched while the one before still computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def download(tensors: Sequence[Tensor]) -> Callable[[], list[list]]:
    """Begin to copy numbers of 8 bytes to the CPU; the returned function waits and gives them.

    On CUDA it waits for what makes these tensors, and for nothing that is launched since.

    >>> download([torch.tensor([3, 1]), torch.tensor(0.5, dtype=torch.float64)])()
    [[3, 1], [0.5]]
    """
    sizes, dtypes = [t.numel() for t in tensors], [t.dtype for t in tensors]
    begun = []
    for device in dict.fromkeys(t.device for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.device == device]
        flat = [tensors[i].detach().reshape(-1).view(torch.int64) for i in places]
        begun.append((places, _landing(torch.cat(flat))))

    def arrived() -> list[list]:
        numbers: list[list] = [[] for _ in sizes]
        for places, wait in begun:
            for i, part in zip(places, wait().split([sizes[i] for i in places])):
                numbers[i] = part.view(dtypes[i]).tolist()
        return numbers

    return arrived


def _landing(packed: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; the returned function waits for it."""
    if not packed.is_cuda:
        return lambda: packed
    landed = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    landed.copy_(packed, non_blocking=True)
    event = torch.cuda.current_stream(packed.device).record_event()

    def wait() -> Tensor:
        event.synchronize()
        return landed

    return wait

"""Memory of a step as it runs: every storage from its birth to its death, on tensors of any kind.

The peak is that of eager PyTorch: what autograd keeps, temporaries, recomputation, gradients. On
device "meta" a step of any size is counted in seconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from weft._torch import TorchDispatchMode, grouped_mm, memory_of, part_in_memory
from weft.comm.consistency import local_tensor
from weft.errors import UnsupportedError
from weft_integrations.common import tensors_in

from .meta_outputs import on_shapes

#: Functions that move no bytes: views, and tensors whose numbers nobody writes.
_STILL = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze",
    "squeeze", "detach", "alias", "as_strided", "reshape", "split", "split_with_sizes", "chunk",
    "unbind", "empty", "new_empty", "empty_like", "empty_strided",
}  # fmt: skip


class Live(TorchDispatchMode):
    """Bytes of all storages made inside the block, products and traffic of everything else.

    >>> with Live() as live:
    ...     x = torch.ones(256, 256, device="meta")
    ...     y = x @ x
    ...     del x, y
    >>> live.peak // 1024, live.now, live.flops == 2 * 256**3
    (512, 0, True)
    """

    def __init__(self, ignored: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        #: bytes alive; of matrix products, 2 a multiply-add; bytes that others read and write
        self.now = self.flops = self.moved = 0
        #: most bytes alive as each function began to add some, by phase and function
        self.peaks: dict[str, int] = {}
        self.phase = ""  # that the caller is in
        self._held = [local_tensor(t) for t in ignored]  # or others may get their memory
        self._ignored: Collection[int] = {memory_of(part_in_memory(t))[0] for t in self._held}
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = on_shapes(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        outputs = [*map(local_tensor, tensors_in(out))]
        flops = product_flops(func, args, kwargs or {}, out)
        if flops is not None:
            self.flops += flops
        elif name not in _STILL and func.namespace != "c10d":
            self._check(func, args)
            self.moved += sum(
                t.nbytes for t in (*outputs, *map(local_tensor, tensors_in((args, kwargs))))
            )
        for t in outputs:
            self._see(t, name)
        return out

    def _check(self, func: Any, args: tuple) -> None:
        """Refuse a function of a weight and other numbers that is no product known by its count.

        Functions of single numbers and views are none; vectors are scales and biases.
        """
        schema = func._schema
        if (
            func.namespace == "weft"
            or "attention" in schema.name  # whose products are counted by pairs
            or torch.Tag.pointwise in func.tags
            or any(a.alias_info for a in (*schema.arguments, *schema.returns))
        ):
            return
        given = [t for t in map(local_tensor, tensors_in(args)) if t.is_floating_point()]
        weights = [t.dim() > 1 and memory_of(part_in_memory(t))[0] in self._ignored for t in given]
        if any(weights) and not all(weights):
            raise UnsupportedError(
                f"{func}: it takes a weight {tuple(given[weights.index(True)].shape)}, and how many"
                " products it computes is not known, so no time can be planned"
            )

    def _see(self, t: torch.Tensor, name: str) -> None:
        memory, nbytes = memory_of(part_in_memory(t))
        if memory in self._alive or memory in self._ignored or not nbytes:
            return
        self._alive[memory] = nbytes
        weakref.finalize(part_in_memory(t).untyped_storage(), self._gone, memory).atexit = False
        self.now += nbytes
        place = f"{self.phase}: {name}"
        self.peaks[place] = max(self.now, self.peaks.get(place, 0))

    @property
    def peak(self) -> int:
        """Most bytes alive at any time."""
        return max(self.peaks.values(), default=0)

    def _gone(self, memory: int) -> None:
        self.now -= self._alive.pop(memory)


def product_flops(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int | None:
    """Floating-point operations of a dispatched product, by torch's own formulas; None of others.

    >>> a = torch.ones(3, 4)
    >>> product_flops(torch.ops.aten.mm.default, (a, a.T), {}, a @ a.T)
    72
    """
    if func.overloadpacket is grouped_mm:
        groups = len(out) if args[0].dim() == args[1].dim() == 2 else 1
        return 2 * out.numel() * args[0].shape[-1] // groups
    formula = flop_registry.get(func.overloadpacket)
    return None if formula is None else formula(*args, **kwargs, out_val=out)

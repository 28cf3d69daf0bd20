"""A `parallelize_module` style for attention modules, used together with torch's own styles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from weft.errors import DeclarationError
from weft.layout import Layout
from weft.masks import Mask
from weft.plan.lengths import Length

from .sdpa import sdpa


class AttentionParallel(ParallelStyle):
    """Modules that call `F.scaled_dot_product_attention` attend the layout's whole axis.

    Inputs and outputs of the module are local shards, placed as at rest. The style adds
    nothing to parameters: other styles (`ColwiseParallel` for the projections on a `heads` mesh
    dim) and `fully_shard` combine with it. Recomputed modules (activation checkpointing) work.

    Args:
        layout: a built layout; the mesh given to `parallelize_module` is its mesh, or part of it.
        axis: the attended axis, as for `weft.attention`.
        mask: what queries see, by global positions; see `weft.sdpa`.
        length: of the whole axis, or (queries, keys); default equally many on every rank.

    Raises:
        DeclarationError: `parallelize_module` gets a mesh that is not the layout's.

    Example::

        plan = {"blocks.*.attention": AttentionParallel(layout, "tokens", weft.Causal())}
        parallelize_module(model, layout.device_mesh["ring"], plan)
    """

    def __init__(
        self,
        layout: Layout,
        axis: str | Sequence[str],
        mask: Mask | None = None,
        *,
        length: Length | None = None,
    ) -> None:
        super().__init__()
        self.layout, self.axis, self.mask, self.length = layout, axis, mask, length

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = device_mesh.mesh_dim_names or ()
        local = self.layout.device_dims(self.layout.mesh)
        if self.layout.device_mesh is None or not set(names) <= set(local) or not names:
            raise DeclarationError(
                f"{self.layout.source}: parallelize_module got mesh dims {names}, which are not of "
                f"the layout's mesh {local}; pass layout.device_mesh, or a slice"
            )
        open_regions: list[sdpa] = []

        def enter(module: nn.Module, args: tuple) -> None:
            region = sdpa(self.layout, self.axis, self.mask, length=self.length)
            region.__enter__()
            open_regions.append(region)

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if open_regions:
                open_regions.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module

"""Parameters of weft's modules: DTensors where a layout splits heads over real ranks.

    heads = ["tp"], 2 ranks      projections (h*d e)       everything else
    rank 0, 1 along tp           Shard(0): h/2 heads       Replicate: whole

The mesh of these DTensors is the part of the layout's mesh that splits heads. The other mesh dims
are free for FSDP2, which adds them, and `clip_grad_norm_`, `full_tensor`, optimisers and
distributed checkpoints know every placement. Modules compute with `local(parameter)`. On one
device, on threads, and where no mesh dim splits heads, parameters are plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft._torch import inference_linear
from weft.declare.layout_file import HEADS
from weft.errors import ShapeError, UnsupportedError
from weft.layout import Layout


def heads_mesh(layout: Layout) -> DeviceMesh | None:
    """The mesh dims that split heads, as a mesh of real ranks; None if there is none.

    >>> heads_mesh(Layout.single()) is None
    True
    """
    dims = layout.device_dims(layout.shard_dims(HEADS))
    return layout.device_mesh[dims] if dims and layout.device_mesh is not None else None


@overload
def local(parameter: Tensor, heads: Sequence[str] = ()) -> Tensor: ...
@overload
def local(parameter: None, heads: Sequence[str] = ()) -> None: ...
def local(parameter: Tensor | None, heads: Sequence[str] = ()) -> Tensor | None:
    """The local tensor of a parameter, to compute with; gradients return to its placement.

    `heads` are the mesh dims that split its heads.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    for i, place in enumerate(parameter.placements):
        name = mesh.mesh_dim_names[i] if mesh.mesh_dim_names else ""
        if not (place.is_replicate() or mesh.size(i) == 1 or name in heads):
            raise UnsupportedError(
                f"a weight of shape {tuple(parameter.shape)} is sharded, {parameter.placements}"
                f" on mesh dims {mesh.mesh_dim_names}, where this rank computes with all of its"
                " heads: fully_shard gathers weights while the forward() of its unit runs. Let a"
                " unit be a whole layer (weft.data_parallel(blocks=)), and register its other"
                " methods with torch.distributed.fsdp.register_fsdp_forward_method"
            )
    return parameter.to_local()


def split_heads(whole: Tensor, layout: Layout) -> nn.Parameter:
    """A parameter whose dim 0 is split over the mesh dims that split heads."""
    mine, mesh = layout.shard(whole, {HEADS: 0}).clone(), heads_mesh(layout)
    if mesh is None:
        return nn.Parameter(mine)
    return nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)] * mesh.ndim, run_check=False))


def replicate(module: nn.Module, layout: Layout) -> None:
    """Makes the plain parameters of a module DTensors too, replicated where heads are split.

    Only for modules that read their parameters through `local`.
    """
    mesh = heads_mesh(layout)
    if mesh is None:
        return
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                place = [Replicate()] * mesh.ndim
                whole = DTensor.from_local(parameter.detach(), mesh, place, run_check=False)
                setattr(part, name, nn.Parameter(whole, parameter.requires_grad))
                part.register_load_state_dict_pre_hook(_place_given)


def _place_given(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Lets `load_state_dict` take the plain tensors of one device for DTensor parameters."""
    for name, parameter in module.named_parameters(recurse=False):
        given = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or given is None or isinstance(given, DTensor):
            continue
        if given.shape == parameter.shape:
            given = given.to(parameter.device_mesh.device_type, parameter.dtype)
            state[prefix + name] = distribute_tensor(
                given, parameter.device_mesh, parameter.placements, src_data_rank=None
            )


class HeadWeight(nn.Module):
    """A projection between embed and the heads of this rank: (..., e) -> (..., h*d), and back.

    The weight is (h*d, e) for both, so that mesh dims that split heads always split dim 0.

    >>> HeadWeight(torch.ones(4, 8, 32), Layout.single()).split(torch.zeros(2, 32)).shape
    torch.Size([2, 32])
    """

    def __init__(
        self,
        full: Tensor,  # the weights of all heads (h, d, e)
        layout: Layout,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if full.shape[0] % layout.size(HEADS):
            raise ShapeError(
                f"{full.shape[0]} heads do not divide over {layout.size(HEADS)} ranks along mesh"
                f" dims {layout.shard_dims(HEADS)}"
            )
        self.layout = layout
        full = rearrange(full, "h d e -> (h d) e").to(device, dtype or torch.get_default_dtype())
        self.weight = split_heads(full, layout)
        self.register_load_state_dict_pre_hook(_place_given)
        self.register_load_state_dict_pre_hook(_cut_given)

    def extra_repr(self) -> str:
        rows, columns = self.local.shape
        return f"weight=({rows * self.layout.size(HEADS)}, {columns})"  # of all ranks

    @property
    def local(self) -> Tensor:
        """The weight of this rank's heads, a plain tensor: (h_local*d, e)."""
        return local(self.weight, self.layout.device_dims(self.layout.shard_dims(HEADS)))

    def split(self, x: Tensor) -> Tensor:
        """(..., e) -> (..., h*d)."""
        return inference_linear(x, self.local)

    def merge(self, x: Tensor) -> Tensor:
        """(..., h*d) -> (..., e); the ranks' results add up to the whole."""
        return inference_linear(x, self.local.mT)


def _cut_given(module: HeadWeight, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """On threads: lets `load_state_dict` take the weights of all heads."""
    given, weight, layout = state.get(prefix + "weight"), module.weight, module.layout
    if given is None or isinstance(weight, DTensor) or layout.size(HEADS) == 1:
        return
    if given.shape == (weight.shape[0] * layout.size(HEADS), *weight.shape[1:]):
        state[prefix + "weight"] = layout.shard(given, {HEADS: 0})


class Linear(nn.Linear):
    """`torch.nn.Linear`, whose parameters may be replicated DTensors."""

    def forward(self, x: Tensor) -> Tensor:
        return inference_linear(x, local(self.weight), local(self.bias))


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, whose parameters may be replicated DTensors."""

    def forward(self, x: Tensor) -> Tensor:
        shape, weight, bias = self.normalized_shape, local(self.weight), local(self.bias)
        return nn.functional.layer_norm(x, shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, whose parameters may be replicated DTensors."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, local(self.weight), self.eps)


class Embedding(nn.Embedding):
    """`torch.nn.Embedding`, whose parameters may be replicated DTensors."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, local(self.weight))


def linear(inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = True) -> Linear:
    """A linear layer drawn from `generator`, uniform within 1/sqrt(inputs), its bias zero."""
    here = torch.get_default_device()  # "meta" where only shapes are wanted
    layer = nn.utils.skip_init(Linear, inputs, outputs, bias=bias, device=here)
    with torch.no_grad():
        layer.weight.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
        if bias:
            layer.bias.zero_()
    return layer


def embedding(rows: int, embed: int, std: float, generator: torch.Generator) -> Embedding:
    """A table of `rows` vectors drawn from a normal distribution of that standard deviation."""
    weights = torch.empty(rows, embed).normal_(std=std, generator=generator)
    return Embedding.from_pretrained(weights, freeze=False)

"""torchtitan 0.3 models that attend as a weft layout says: `trainer(llama3_debugmodel(), layout)`.

Copy this file into your project; docs/trainers.md documents it.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torchtitan.config.override import override
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

import weft


class Attention(Module):
    """Inner attention: what torchtitan hands on as `attention_masks` is a layout and a mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Nothing to choose: the layout says it all."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False):
        """Queries, keys and values as torchtitan has them, (b, n, h, d)."""
        layout, mask = attention_masks
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return weft.attention(q, k, v, layout, "tokens", mask, scale).transpose(1, 2)


@override(target=FlexAttention.Config, exact=True, description="attention on a weft layout")
def attention(config: FlexAttention.Config) -> Attention.Config:
    """In the place of FlexAttention, whose sharding would gather keys over cp."""
    return Attention.Config()


class WeftTrainer(Trainer):
    """torchtitan's trainer, whose tokens are split over cp as a weft layout says."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The layout's mesh dims are those that cp consists of."""

        layout: str = "tokens(zigzag): ring=-1"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        layout = weft.Layout.parse(config.layout)
        mesh = self.parallel_dims.get_optional_mesh("cp")
        if mesh is None:
            self.layout = weft.Layout.single()
        elif len(layout.mesh) > 1:  # ranks of cp, as the layout's mesh dims
            mesh = mesh._unflatten(0, tuple(layout.mesh.values()), tuple(layout.mesh))
            self.layout = layout.bind(mesh)
        else:
            self.layout = layout.bind(mesh, rename={next(iter(layout.mesh)): "cp"})

    def post_dataloading_process(self, input_dict, labels):
        """This rank's tokens of rows that are packed each in its own way."""
        extra = {name: value for name, value in input_dict.items() if name != "input"}
        documents = weft.Documents([lengths(row) for row in extra["positions"]])
        tokens, labels, extra["positions"] = (
            self.layout.shard(x, {"tokens": 1})
            for x in (input_dict["input"], labels, extra["positions"])
        )
        extra["attention_masks"] = (self.layout, weft.Causal() & documents)
        self.ntokens_seen += labels.numel()
        if self.config.parallelism.spmd_backend == "spmd_types":
            return annotate_input_spmd_types(self.parallel_dims, tokens, labels, extra)
        return tokens, labels, extra


class WithoutContext:
    """torchtitan's mesh without its own context parallelism; ranks of cp still shard weights."""

    cp_enabled = False

    def __init__(self, parallel_dims) -> None:
        self._parallel_dims = parallel_dims

    def __getattr__(self, name):
        return getattr(self._parallel_dims, name)


def apart_from_cp(parallelize_fn, model, *, parallel_dims, parallelism, **options):
    """A model's `parallelize_fn` that does not wrap attention, which weft makes."""
    if parallelism.spmd_backend == "partial_dtensor":
        parallel_dims = WithoutContext(parallel_dims)
    return parallelize_fn(model, parallel_dims=parallel_dims, parallelism=parallelism, **options)


def lengths(positions: torch.Tensor) -> tuple[int, ...]:
    """Lengths of a row's documents, each of which begins at position 0."""
    starts = (positions == 0).nonzero().flatten()
    return tuple(starts.diff(append=starts.new_tensor([len(positions)])).tolist())


def trainer(config: Trainer.Config, layout: str) -> WeftTrainer.Config:
    """A torchtitan configuration on a weft layout.

    Args:
        config: of a model whose attention is FlexAttention, torchtitan's default.
        layout: one line; its mesh sizes multiply to `parallelism.context_parallel_degree`.
    """
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    spec = fields["model_spec"]
    parallelize = functools.partial(apart_from_cp, spec.parallelize_fn)
    fields["model_spec"] = dataclasses.replace(spec, parallelize_fn=parallelize)
    fields["override"].imports.append(f"{__name__}.attention")
    return WeftTrainer.Config(**fields, layout=layout)

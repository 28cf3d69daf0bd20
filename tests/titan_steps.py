"""Three AdamW steps of torchtitan's llama3 debug model on one rank; for `test_torchtitan.py`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch

# torchtitan takes a host without accelerators for one with CUDA; it asks while it is imported. And
# it reports memory, which torch.cpu does not.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda _: "cpu"
torch.cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1)
torch.cpu.memory_stats = lambda _: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None

import torchtitan_adapter  # noqa: E402
from torch.distributed.tensor import distribute_tensor  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

ROWS, LENGTH, STEPS = 3, 64, 3
DOCUMENTS = ((20, 44), (64,), (1, 13, 50))


class Tokenizer(BaseTokenizer):
    """Texts are not read here."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_) -> None:
        super().__init__()

    encode = decode = lambda self, *_: []

    def get_vocab_size(self) -> int:
        return 2048


class Loader(BaseDataLoader):
    """Rows that are packed each in its own way, the same on every rank of cp."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, **_) -> None:
        pass

    def __iter__(self):
        draw = torch.Generator().manual_seed(1)
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
        while True:
            tokens = torch.randint(0, 2000, (ROWS, LENGTH + 1), generator=draw)
            yield {"input": tokens[:, :-1], "positions": positions.clone()}, tokens[:, 1:].clone()

    def state_dict(self):
        return {}

    def load_state_dict(self, state) -> None:
        pass


def main(cp: int, layout: str, path: str) -> None:
    TORCH_DTYPE_MAP["float64"] = torch.float64
    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = Tokenizer.Config(), Loader.Config()
    del config.model_spec.model.layers[2:]
    config.training.local_batch_size, config.training.seq_len = ROWS, LENGTH
    config.training.steps = STEPS
    for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce"):
        setattr(config.training, name, "float64")
    config.parallelism.context_parallel_degree = cp
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a nightly of torch
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 0
    trainer = torchtitan_adapter.trainer(config, layout).build()
    (model,) = trainer.model_parts
    draw_weights(model)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(STEPS):
        trainer.step += 1
        trainer.train_step(batches)
    after = {name: (full(p), full(p.grad)) for name, p in model.named_parameters()}
    torch.save({name: [t.clone() for t in pair] for name, pair in after.items()}, path)
    trainer.close()


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """The same on any number of ranks, which torchtitan's own are not."""
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        whole = torch.randn(weight.shape, dtype=weight.dtype, generator=draw) * 0.05
        whole += weight.dim() == 1
        weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.detach()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

"""A training step of a transformers model: its counted peak beside what the GPU's allocator saw."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

import weft

from .messages import RANKS, ToItself, alone_with_nccl
from .parts import CannotRun, Where, rows

if TYPE_CHECKING:
    from weft_planner.hf_config import HFModel

MIB = 1 << 20
#: Llama-3.2-1B by its sizes, and a model for a rehearsal.
LARGE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 1 << 20, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = LARGE | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def model_of(where: Where) -> HFModel:
    """The model of a machine."""
    try:
        from transformers import LlamaConfig

        import weft_integrations.transformers  # noqa: F401
        from weft_planner.hf_config import HFModel
    except ImportError as error:
        raise CannotRun(f"transformers is missing or too old ({error})") from None
    return HFModel(LlamaConfig(**(SMALL if where.rehearsal else LARGE)), "llama")


def run(where: Where) -> Iterator[str]:
    """Peaks of one rank, alone and in a ring of eight that sends to itself."""
    model = model_of(where)
    tokens = 512 if where.rehearsal else 16384
    header = [
        "layout", "loss", "recomputed", "predicted MiB", "max_memory_allocated MiB", "error",
        "reserved MiB", "of the device MiB",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from rows(header, _peaks(where, model, tokens))
    yield (
        f"\n{model.numbers:.3g} weights, {model.layers} layers, {tokens} tokens a rank, bf16."
        " Predicted: `weft_planner.hf_step.count_model`, without numbers; allocated, less the"
        " weights. Of the device: all that this process keeps there less what its tensors take at"
        " the peak, which `weft plan` takes to be 4 GB with NCCL of many ranks."
    )
    if where.rehearsal:
        yield (
            "\nOn a CPU in place of the allocator's peak: bytes of all storages of a step of"
            " numbers."
        )


def _peaks(where: Where, model: HFModel, tokens: int) -> Iterator[tuple]:
    from weft_planner.hf_step import count_model

    for ranks, loss, recompute in itertools.product((1, RANKS), ("full", "chunked"), (True, False)):
        layout = weft.Layout.parse(f"tokens: ring={ranks}")
        options = {"loss": loss, "recompute": recompute, "free_gradients": False}
        predicted = count_model(model, layout, ranks * tokens, **options).peak  # type: ignore[arg-type]
        name = f"`{layout.name}`", loss, "yes" if recompute else "no", predicted / MIB
        try:
            with (
                nullcontext() if where.rehearsal else alone_with_nccl()
            ):  # the count starts its own
                peak, *beside = measured(where, model, layout, tokens, loss, recompute)
        except torch.cuda.OutOfMemoryError:
            yield (*name, "out of memory", "-", "-", "-")
            continue
        shown = [nbytes / MIB for nbytes in beside] or ["-", "-"]
        yield (*name, peak / MIB, f"{predicted / peak - 1:+.1%}", *shown)


def measured(
    where: Where, model: HFModel, layout: weft.Layout, tokens: int, loss: str, recompute: bool
) -> list[int]:
    """Bytes of a step at its peak, then those reserved and those that are no tensors'.

    On a CPU the first alone, of the storages that are alive.
    """
    from weft_planner.hf_step import forward_loss, place
    from weft_planner.live import Live

    on = layout.on(ToItself(layout.mesh, 0))
    built = place(model.build(where.dtype, where.device), on, loss, recompute)
    ids = torch.zeros(1, layout.world_size * tokens, dtype=torch.long, device=where.device)

    def step() -> None:
        built.zero_grad(set_to_none=True)
        forward_loss(built, on, ids, loss).backward()

    if where.rehearsal:
        with Live([*built.parameters(), *built.buffers()]) as live:
            step()
        return [live.peak]
    step()  # planned and compiled
    built.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    free, of_all = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    return [peak - before, torch.cuda.max_memory_reserved(), of_all - free - peak]

"""The cost of checking a model before it is used: `python -m benchmarks.verify [--layers N]`.

`weft_integrations.transformers.verify` on a random Llama of 1.2 billion weights ("tokens: ring=2"),
in fp32 and in bf16: seconds of wall time and of all cores' time, median of 3, and the growth
of the process. The aim is below 5 s on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft import Layout
from weft_integrations.transformers import verify

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}


def model(layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama of the sizes of 3.2 1B, quickly drawn."""
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES, **HEADS))
    made = made.to(dtype).to_empty(device="cpu")
    made.tie_weights()
    for p in made.parameters():
        p.data.uniform_(-0.02, 0.02) if p.dim() > 1 else p.data.fill_(1.0)
    rotary = made.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
    return made.eval()


def _memory(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 2**20


def main() -> None:
    """Print one line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    layers = parser.parse_args().layers
    for dtype in (torch.float32, torch.bfloat16):
        made, seconds = model(layers, dtype), []
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _memory("VmRSS")
        for _ in range(3):
            start = time.perf_counter(), time.process_time()
            verify(made, Layout.parse("tokens: ring=2"))
            seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        wall, cores = (statistics.median(column) for column in zip(*seconds))
        weights = sum(p.numel() for p in made.parameters()) / 1e9
        grown = _memory("VmHWM") - before
        print(
            f"{weights:.2f} billion weights, {dtype}, {torch.get_num_threads()} threads: "
            f"{wall:.1f} s, {cores:.1f} s of all cores; grows by {grown:.1f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()

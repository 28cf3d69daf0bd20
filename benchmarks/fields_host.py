"""Time of the CPU per function of torch on fields, and of a layer of Llama without its kernel.

    python -m benchmarks.fields_host              # a table; --write makes results/fields_host.md

Tiny tensors on one thread, so that Python is all there is. Time of the thread, not of the clock:
fields and their local tensors take turns, the least and the median of 60 runs of 20 calls.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import weft

from .common import RESULTS

RUNS, CALLS, TOKENS = 60, 20, 32


def llama_layer(layout: weft.Layout | None = None) -> nn.Module:
    """A decoder layer whose attention gives its queries back; on a layout as it is parallelized."""

    def no_kernel(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        return q.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("no_kernel", no_kernel)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model = model if layout is None else weft.parallelize(model, layout)
    layer = model.model.layers[0]
    layer.self_attn.config._attn_implementation = "no_kernel"
    return layer


def times(run: Callable[..., object], fields: tuple, local: tuple) -> tuple[float, ...]:
    """Least and median microseconds of both kinds of arguments, which take turns."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(RUNS):
        for taken, args in zip(found, (fields, local)):
            run(*args)
            start = time.thread_time()
            for _ in range(CALLS):
                run(*args)
            taken.append((time.thread_time() - start) / CALLS * 1e6)
    return tuple(of(side) for side in found for of in (min, statistics.median))


def functions(layout: weft.Layout) -> dict[str, tuple[Callable, tuple, tuple]]:
    """By name: a function, its arguments on fields, and the same on local tensors."""
    layer, islands = llama_layer(), llama_layer(layout)
    # As in a model that weft.parallelize has split: places know where functions run whole.
    split = weft.parallelize(nn.Identity(), layout, dims={"tokens": 1}, output="field")
    x, angles = split(torch.ones(1, TOKENS, 32)), split(torch.ones(1, TOKENS, 8))
    y, cos, sin = x * 2, angles.cos(), angles.sin()
    weight = layer.mlp.gate_proj.weight

    every: dict[str, tuple[Callable, tuple]] = {
        "x + y": (lambda x, y: x + y, (x, y)),
        "linear": (lambda x: F.linear(x, weight), (x,)),
        "view": (lambda x: x.view(1, x.shape[1], 4, 8), (x,)),
        "slice of features": (lambda x: x[..., :16], (x,)),
        "cat of features": (lambda x, y: torch.cat((x, y), -1), (x, y)),
        "MLP": (layer.mlp, (x,)),
        "RMSNorm": (layer.input_layernorm, (x,)),
        "layer without kernel": (lambda x, *cs: layer(x, position_embeddings=cs), (x, cos, sin)),
        "MLP, an island": (islands.mlp, (x,)),
        "RMSNorm, an island": (islands.input_layernorm, (x,)),
        "layer with islands": (lambda x, *cs: islands(x, position_embeddings=cs), (x, cos, sin)),
    }
    return {
        name: (run, args, tuple(a.to_local() for a in args)) for name, (run, args) in every.items()
    }


def measured(layout: weft.Layout) -> list[tuple[str, tuple[float, ...]]]:
    """The times of every function on the first rank."""
    with torch.no_grad():
        every = functions(layout).items()  # whose calls ranks compare
        return [(name, times(*one)) for name, one in every if layout.rank == 0]


def main() -> None:
    """Print, or write, the table."""
    torch.set_num_threads(1)
    layout = weft.Layout.parse("tokens: ring=2")
    lines = ["| | field, least | median | plain, least | median | ratio of least | above plain |"]
    lines += ["| --- " * 7 + "|"]
    for name, (a, b, c, d) in weft.on_threads(layout, measured)[0]:
        lines += [f"| {name} | {a:.1f} | {b:.1f} | {c:.1f} | {d:.1f} | {a / c:.1f} | {a - c:.1f} |"]
    head = (__doc__ or "").partition("\n")[0]
    made = f"`python -m benchmarks.fields_host`, in us of the CPU; torch {torch.__version__}"
    text = "\n".join([f"# {head}", "", f"{made}, load {os.getloadavg()[0]:.1f}.", "", *lines, ""])
    print(text)
    if "--write" in sys.argv:
        (RESULTS / "fields_host.md").write_text(text)


if __name__ == "__main__":
    main()

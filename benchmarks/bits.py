"""The same bits on every layout: a table of trainings, and their cost over the ordinary mode.

python -m benchmarks.bits --table --write                 # every model on every layout, 20 steps
python -m benchmarks.bits --cost --write                  # attention, and whole steps by layout
python -m benchmarks.bits --table --write --only tabular  # those whose name has the word

Ranks are threads of this process. Results are kept in benchmarks/results/bits.json, so that parts
of the table can be made one by one; benchmarks/results/bits.md is written from it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft
from weft import Causal, Layout
from weft.errors import WeftError
from weft_integrations.transformers import shard_batch
from weft_models.models import ModelSpec
from weft_models.train.same_bits import Trace, first_other_bits, trace

RESULTS = Path(__file__).parent / "results" / "bits.json"
STEPS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: Layouts of an axis {a}, by the name of their strategy.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ring": tuple(f"{{a}}: ring={n}" for n in (2, 3, 4, 6, 8)),
    "zigzag": tuple(f"{{a}}(zigzag): ring={n}" for n in (2, 3, 4, 6, 8)),
    "Ulysses": tuple(f"{{a}}: ulysses={n}" for n in (2, 3, 4, 6, 8)),
    "tile": tuple(f"{{a}}: tile={n}" for n in ("2x1", "3x1", "2x2", "2x3", "3x2", "2x4", "4x2")),
    "hierarchical": tuple(f"{{a}}: hierarchical={n}" for n in ("2x2", "2x3", "3x2", "2x4")),
    "head x ring": (
        *("{a}: ulysses=2 x ring=2", "{a}(zigzag): ulysses=2 x ring=3"),
        *("{a}: ulysses=3 x ring=2", "{a}(zigzag): ulysses=2 x ring=4"),
    ),
    "dp x tile": (
        *("batch: dp=2; {a}: tile=2x1", "batch: dp=3; {a}: tile=2x1"),
        *("batch: dp=2; {a}(zigzag): tile=3x1", "batch: dp=2; {a}: tile=2x2"),
    ),
}
#: Layouts of which the cost of a step is measured.
MEASURED = (
    *("{a}: ring=2", "{a}(zigzag): ring=4", "{a}: ulysses=4", "{a}: tile=2x2"),
    *("{a}: hierarchical=2x2", "{a}(zigzag): ulysses=2 x ring=2", "batch: dp=2; {a}: tile=2x1"),
)


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model that is trained on every layout.

    Attributes:
        axis: that layouts split.
        run: (layout, steps, dtype) to all that the training computed.
        about: its sizes.
    """

    axis: str
    run: Callable[[Layout, int, torch.dtype], Trace]
    about: str


def language_model(mask: Any, length: tuple[int, int]) -> Case:
    """A decoder with grouped heads."""
    content = {
        "head": "tokens",
        "axes": ["batch", "tokens", "embed"],
        "sizes": {"embed": 48, "heads": 12, "kv_heads": 6, "vocabulary": 19},
        "block": [
            {"attend": "tokens", "mask": mask, "rope": True, "qk_norm": True},
            {"mlp": 96},
        ],
    }
    spec = ModelSpec.from_dict(content, name="causal_lm")
    spec = spec.training({"batch": 3, "length": {"tokens": length}})
    about = f"12 heads of 4, 6 of keys and values, {length[0]} to {length[1]} tokens"
    return Case("tokens", lambda *of: _trained(spec, *of), about)


def table_model() -> Case:
    """Attention over the features and over the rows of tables."""
    content = {
        "head": "table",
        "axes": ["batch", "rows", "features", "embed"],
        "sizes": {"embed": 48, "heads": 24, "classes": 10},
        "block": [
            {"attend": "features"},
            {"attend": "rows", "init_k_from_q": True, "mask": "first-keys"},
            {"mlp": 96},
        ],
    }
    spec = ModelSpec.from_dict(content, name="tabular")
    spec = spec.training({"batch": 3, "length": {"rows": (17, 43), "features": (2, 4)}})
    return Case("rows", lambda *of: _trained(spec, *of), "24 heads of 2, 17 to 43 rows")


def hybrid() -> Case:
    """A recurrent layer with a convolution, then attention."""
    content = {
        "head": "tokens",
        "axes": ["batch", "tokens", "embed"],
        "sizes": {"embed": 48, "heads": 4, "kv_heads": 2, "vocabulary": 19},
        "block": [
            {"carry": "tokens"},
            {"attend": "tokens", "mask": "causal", "rope": True},
            {"mlp": 96, "activation": "silu", "gated": True},
        ],
    }
    spec = ModelSpec.from_dict(content, name="hybrid")
    spec = spec.training({"batch": 3, "length": {"tokens": (17, 43)}})
    about = "a gated delta rule of 4 heads, then attention of 4 heads, 2 of keys and values"
    return Case("tokens", lambda *of: _trained(spec, *of), about)


def _trained(spec: ModelSpec, layout: Layout, steps: int, dtype: torch.dtype) -> Trace:
    return trace(spec, layout, steps, dtype=dtype)


def of_transformers(kind: str) -> Case:
    """A model of transformers by `weft.parallelize` in a plain loop, on rows that are cut."""
    import transformers as hf

    sizes = {"vocab_size": 19, "hidden_size": 48, "intermediate_size": 64}
    if kind == "Llama":
        heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "num_hidden_layers": 1}
        config, cls = hf.LlamaConfig(**sizes, **heads), hf.LlamaForCausalLM
        about = "12 heads of 4, 6 of keys and values"
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
        layers = ["linear_attention", "full_attention"]
        config = hf.Qwen3_5TextConfig(**sizes, **heads, **linear, layer_types=layers)
        cls, about = (
            hf.Qwen3_5ForCausalLM,
            "a gated delta rule, then attention of 4 heads, 2 of keys",
        )
    torch.manual_seed(0)
    model = cls(config).train()
    return Case("tokens", lambda *of: _loop(model, *of), f"{about}; 17 to 43 tokens")


def _loop(model: nn.Module, layout: Layout, steps: int, dtype: torch.dtype) -> Trace:
    def rank(layout: Layout) -> Trace:
        own, made = copy.deepcopy(model).to(dtype), Trace()
        weft.parallelize(own, layout, rows="local", verify=False)
        optimizer = torch.optim.AdamW(own.parameters(), lr=3e-3)
        draw = torch.Generator().manual_seed(1)
        for step in range(steps):
            n = int(torch.randint(17, 44, (), generator=draw))
            ids = torch.randint(0, 19, (3, n), generator=draw)
            out = own(**shard_batch({"input_ids": ids, "labels": ids}, layout))
            out.loss.backward()
            layout.sync_gradients(own)
            made[f"step {step}: loss"] = out.loss.detach().clone()
            for name, p in own.named_parameters():
                made[f"step {step}: gradient of {name}"] = p.grad.clone()
            weft.clip_grad_norm_(own, 1.0, layout)
            optimizer.step()
            optimizer.zero_grad()
        for name, p in own.named_parameters():
            made[f"weight {name}"] = p.detach().clone()
        return made

    return weft.on_threads(layout, rank, timeout=300.0)[0]


CASES: dict[str, Callable[[], Case]] = {
    "causal_lm causal": lambda: language_model("causal", (17, 43)),
    "causal_lm full": lambda: language_model("full", (17, 43)),
    "causal_lm packed": lambda: language_model(["causal", {"documents": [5, 1, 20, 11]}], (37, 37)),
    "tabular": table_model,
    "hybrid": hybrid,
    "transformers Llama": lambda: of_transformers("Llama"),
    "transformers Qwen3.5": lambda: of_transformers("Qwen3.5"),
}


def lines(axis: str) -> list[tuple[str, str]]:
    """(strategy, layout on one line) of all layouts of an axis."""
    return [(name, line.format(a=axis)) for name, of in LAYOUTS.items() for line in of]


def compare(case: Case, dtype: torch.dtype, steps: int) -> dict[str, str]:
    """By layout "=", or what differs or is refused."""
    one, made = case.run(Layout.single(reproducible=True), steps, dtype), {}
    for _, line in lines(case.axis):
        began = time.perf_counter()
        try:
            other = first_other_bits(one, case.run(_layout(line), steps, dtype))
            made[line] = "=" if other is None else str(other)
        except WeftError as error:
            made[line] = f"refused: {error}"
        print(f"  {line}: {made[line]}  ({time.perf_counter() - began:.1f} s)", flush=True)
    return made


def _layout(line: str, reproducible: bool = True) -> Layout:
    return Layout.parse(f"{line}; reproducible" if reproducible else line)


def table(only: str, steps: int, write: bool) -> None:
    """Train every case on every layout."""
    for name, make in CASES.items():
        for short, dtype in DTYPES.items():
            title = f"{name}, {short}"
            if only not in title:
                continue
            print(title, flush=True)
            case = make()
            row = {"about": case.about, "steps": steps, "bits": compare(case, dtype, steps)}
            if write:
                _keep({"table": {title: row}})


# -- cost -----------------------------------------------------------------------------------------


HEADS, HEAD_DIM = 4, 64


def of_attention(length: int, rounds: int) -> list[dict[str, Any]]:
    """CPU seconds of both passes on one rank: ordinary, reproducible; sides take turns."""
    made = []
    for short, dtype in DTYPES.items():
        for name, mask in (("full", None), ("causal", Causal())):
            tensors = [torch.randn(1, HEADS, length, HEAD_DIM).to(dtype) for _ in range(4)]
            seconds = functools.partial(_attention_seconds, tensors, mask)
            sides = Layout.single(), Layout.single(reproducible=True)
            made.append({"what": f"{name}, {short}", **_in_turn(seconds, sides, rounds)})
            print(made[-1], flush=True)
    return made


def _attention_seconds(
    tensors: list[torch.Tensor], mask: weft.Mask | None, layout: Layout
) -> float:
    *inputs, dout = tensors
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    began = time.process_time()
    weft.attention(q, k, v, layout, "tokens", mask=mask).backward(dout)
    return time.process_time() - began


def _step_seconds(spec: ModelSpec, layout: Layout) -> float:
    began = time.process_time()
    trace(spec, layout, 1)
    return time.process_time() - began


def of_steps(length: int, rounds: int) -> list[dict[str, Any]]:
    """CPU seconds of a training step over all ranks, by layout."""
    content = {
        "head": "tokens",
        "axes": ["batch", "tokens", "embed"],
        "sizes": {"embed": 256, "heads": 4, "vocabulary": 256},
        "block": [{"attend": "tokens", "mask": "causal", "rope": True}, {"mlp": 1024}],
    }
    spec = ModelSpec.from_dict(content, name="step")
    made = []
    for line in (None, *(line.format(a="tokens") for line in MEASURED)):
        batch = 2 if line is not None and "batch" in line else 1
        sized = spec.training({"batch": batch, "length": {"tokens": (length, length)}})
        seconds = functools.partial(_step_seconds, sized)
        sides = [
            Layout.single(reproducible=fixed) if line is None else _layout(line, fixed)
            for fixed in (False, True)
        ]
        made.append({"what": line or "one device", **_in_turn(seconds, sides, rounds)})
        print(made[-1], flush=True)
    return made


def _in_turn(seconds: Callable[[Layout], float], sides: Any, rounds: int) -> dict[str, float]:
    measured = [[seconds(side) for side in sides] for _ in range(rounds + 1)]
    plain, fixed = map(statistics.median, zip(*measured[1:]))  # the first one plans
    return {"ordinary": round(plain, 3), "reproducible": round(fixed, 3)}


# -- what is written ------------------------------------------------------------------------------


def _keep(made: dict[str, dict]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part, rows in made.items():
        results[part] = results.get(part, {}) | rows
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(results))


def page(results: dict) -> str:
    """The results in words."""
    text = ["# The same bits on every layout", ""]
    every = results.get("table", {})
    if every:
        steps = sorted({str(row["steps"]) for row in every.values()})
        text += [
            f"`python -m benchmarks.bits --table --write`: {', '.join(steps)} steps of training on"
            " each layout and on one device. `=`: every",
            "block's output, loss, gradient of every step and every weight at the end is"
            " `torch.equal`. Ranks are threads.",
            "",
            *(f"- {title}: {row['about']}" for title, row in every.items() if "fp32" in title),
            "",
        ]
    notes: dict[str, int] = {}
    for axis in ("tokens", "rows"):
        of_axis = {t: r for t, r in every.items() if next(iter(r["bits"])).startswith(axis)}
        if not of_axis:
            continue
        text += [
            "| strategy | layout | " + " | ".join(of_axis) + " |",
            "|---|---|" + ":---:|" * len(of_axis),
        ]
        for strategy, line in lines(axis):
            cells = [_cell(row["bits"].get(line, ""), notes) for row in of_axis.values()]
            text.append(f"| {strategy} | `{line}` | {' | '.join(cells)} |")
        text.append("")
    text += [f"{number}. {note}" for note, number in notes.items()]
    for name, rows in results.get("cost", {}).items():
        text += ["", f"## {name}", "", "| | ordinary, s | reproducible, s | ratio |"]
        text.append("|---|---:|---:|---:|")
        for row in rows:
            plain, fixed = row["ordinary"], row["reproducible"]
            text.append(f"| {row['what']} | {plain:.2f} | {fixed:.2f} | {fixed / plain:.2f} |")
    return "\n".join(text) + "\n"


def _cell(what: str, notes: dict[str, int]) -> str:
    if what in ("=", ""):
        return what
    kind, _, note = what.partition(": ")
    if kind != "refused":
        return f"**{what}**"
    return f"refused ({notes.setdefault(note, len(notes) + 1)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--only", default="", help="those whose name has these letters")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        table(options.only, options.steps, options.write)
    n = f"{options.length:,} tokens, {HEADS} heads of {HEAD_DIM}"
    costs = {
        f"Cost of attention: {n}, both passes, one rank and thread, CPU seconds": of_attention,
        f"Cost of a training step: {n}, CPU seconds of all ranks": of_steps,
    }
    for title, measure in costs.items() if options.cost else ():
        if options.only in title:
            rows = measure(options.length, options.rounds)
            if options.write:
                _keep({"cost": {title: rows}})


if __name__ == "__main__":
    main()

"""Accuracy and traffic of learned routing: `python benchmarks/routing.py [--steps N]`.

Trains the model of tutorial 6 on 8 ranks (threads of this process, so that any machine can run it)
on the task of that tutorial, with
full attention on a ring, with learned routing, with random projections that stay as they are (what
they summarise still learns to suit them), and with projections drawn anew in every step, which
nothing can learn. Writes `benchmarks/results/routing.md`. Examples are drawn afresh in every step,
so the accuracy of the last steps is that on unseen ones. Bytes are those that rank 0's attention
received.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import weft
from weft.comm import run_threads
from weft.layout import Layout
from weft_models.models import ModelSpec
from weft_models.routing import routed_modules, routing_penalty, set_progress
from weft_models.routing.report import hit_rate
from weft_models.train import clip_grad_norm_
from weft_models.train.step import lr_schedule

TUTORIAL = Path(__file__).parents[1] / "tutorials" / "06_learned_routing.py"
BATCH, LR = 16, 3e-3
LAST = 40
RESULTS = Path(__file__).parent / "results" / "routing.md"
TENSORS = ("kv", "dkv", "summaries", "dsummaries", "routes")


@dataclass(frozen=True)
class Outcome:
    """Means over the last steps: accuracy, hit rate of the router, bytes by tensor."""

    name: str
    accuracy: float
    hit_rate: float | None
    bytes: Counter


def draw_router(model: torch.nn.Module, seed: int, scale: float) -> None:
    """Random key projections, the same on every rank, that no optimizer moves."""
    make = torch.Generator().manual_seed(seed)
    for module in routed_modules(model):
        with torch.no_grad():
            module.router.key.weight.normal_(std=scale, generator=make)
        module.router.requires_grad_(False)


@functools.cache
def task() -> tuple[ModelSpec, Callable[..., Any]]:
    """The model and the examples of the tutorial, by the two cells that define them."""
    cells = re.split(r"^# %%.*$", TUTORIAL.read_text(), flags=re.MULTILINE)
    defined: dict[str, Any] = {"np": np, "torch": torch, "weft": weft}
    for name in ("def draw", "class Retrieval"):
        (cell,) = (cell for cell in cells if f"\n{name}" in cell)
        exec(compile(cell, str(TUTORIAL), "exec"), defined)
    return defined["spec"], defined["draw"]


def run(name: str, layout: Layout, steps: int, router: str = "learned") -> Outcome:
    """Train on every rank of the layout; rank 0's outcome."""
    task()

    def rank(transport) -> Outcome:
        bound = layout.on(transport)
        model = weft.compose(task()[0], bound, seed=0)
        if router == "frozen":
            draw_router(model, 1, 1.0)
        return train(name, model, bound, steps, redraw=router == "random")

    return run_threads(layout.mesh, rank, timeout=600.0)[0]


def train(name: str, model: torch.nn.Module, layout: Layout, steps: int, redraw: bool) -> Outcome:
    """The trainer's loop without its reports."""
    draw = task()[1]
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    accuracies, hits, moved = [], [], Counter()
    for step in range(steps):
        set_progress(model, step / steps)
        if redraw:  # small, so that the bias stays near 0 and only the choice is random
            draw_router(model, step, 0.01)
        *both, sources = draw(0, step, BATCH)
        tokens, answers = (layout.shard(x, {"tokens": 1}) for x in both)
        asked = answers >= 0
        with weft.traffic(layout) as traffic:
            scores = model(tokens)[asked]
            sums = [cross_entropy(scores, answers[asked], reduction="sum")]
            sums.append((scores.argmax(-1) == answers[asked]).sum().to(scores.dtype))
            loss, accuracy = layout.mean(torch.stack(sums), asked.sum())
            optimizer.zero_grad()
            (loss + routing_penalty(model)).backward()
        layout.sync_gradients(model)
        clip_grad_norm_(model, 1.0, layout)
        for group in optimizer.param_groups:
            group["lr"] = LR * lr_schedule(step, steps, 0.1)
        optimizer.step()
        if step >= steps - LAST:
            accuracies.append(accuracy.item())
            hits += [hit_rate(m.last, sources) for m in routed_modules(model)]
            moved.update({t: n / LAST for t, n in traffic.by_tensor().items() if t in TENSORS})
    routed = sum(hits) / len(hits) if hits else None
    return Outcome(name, sum(accuracies) / len(accuracies), routed, moved)


def table(outcomes: list[Outcome], steps: int) -> str:
    """The outcomes as markdown."""
    ring = sum(outcomes[0].bytes.values())
    lines = [
        "# Learned routing on a retrieval task",
        "",
        f"`python benchmarks/routing.py --steps {steps}`: 8 chunks on 8 ranks, `top_k = 1`, means "
        f"over the last {LAST} of {steps} steps; bytes per step that rank 0's attention received, "
        "forward and backward, summaries and routing weights included. A guess is right 1 time "
        "in 16; with a block picked blindly, right 1 time in 7, 19.6 % of answers are right.",
        "",
        "Frozen projections: queries and keys learn to suit them. Random choices: the projections "
        "are drawn anew in every step.",
        "",
        "| | accuracy | right block | keys and values | summaries, weights | of ring's bytes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for o in outcomes:
        total, kv = sum(o.bytes.values()), o.bytes["kv"] + o.bytes["dkv"]
        right = "" if o.hit_rate is None else f"{o.hit_rate:.1%}"
        lines.append(
            f"| {o.name} | {o.accuracy:.1%} | {right} | {kv:,.0f} | {total - kv:,.0f} | "
            f"{total / ring:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all four and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    ring = Layout.from_dict(
        {
            "mesh": {"ring": 8},
            "shard": {"tokens": ["ring"]},
            "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
        }
    )
    routed = Layout.load("routed-8")
    outcomes = []
    for name, layout, router in (
        ("ring, full attention", ring, ""),
        ("learned routing", routed, "learned"),
        ("frozen random projections", routed, "frozen"),
        ("random choices", routed, "random"),
    ):
        outcomes.append(run(name, layout, steps, router))
        print(outcomes[-1], flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(table(outcomes, steps))
    print(table(outcomes, steps))


if __name__ == "__main__":
    main()

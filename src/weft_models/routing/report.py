"""Routing statistics as numbers and pictures: weights, choices, attention, hits, bytes saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attention import Routes
from .module import routed_modules
from .router import entropy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle


def observe(model: nn.Module, on: bool) -> None:
    """Let every routed attention of a model record the attention weight of its blocks, or not."""
    for module in routed_modules(model):
        module.observe = on


@torch.no_grad()
def measure_routing(model: nn.Module) -> dict[str, float]:
    """Means over the routed attentions of a model in their latest call; nothing if there are none.

    blocks taken: other blocks per query block. entropy: of the weights, relative to uniform ones.
    fan-out: query blocks that chose the most popular key block. bytes saved: share of a ring's
    keys and values that this rank did not receive. attention fetched, attention covered: share of
    attention that went to chosen blocks, and to the own block and the `top_k` heaviest; where
    recorded.
    """
    found = [_numbers(m.last, m.routing.top_k) for m in routed_modules(model) if m.last]
    names = dict.fromkeys(name for numbers in found for name in numbers)
    return {
        name: sum(n[name] for n in found if name in n) / sum(name in n for n in found)
        for name in names
    }


def _numbers(how: Routes, top_k: int) -> dict[str, float]:
    asking = how.eligible.any(-1)
    numbers = {
        "blocks taken": how.chosen.sum(-1)[..., asking].float().mean().item(),
        "entropy": entropy(how.matrix, how.eligible)[..., asking].mean().item(),
        "fan-out": how.fan_out.max(-1).values.float().mean().item(),
    }
    if how.all_bytes:
        numbers["bytes saved"] = 1.0 - sum(how.bytes.values()) / how.all_bytes
    if how.attention_weight is not None:
        local = torch.tensor(list(how.own), device=how.attention_weight.device)
        stays = how.attention_weight.gather(
            -1, local[:, None].expand(*how.attention_weight.shape[:-1], 1)
        )
        heaviest = heaviest_blocks(how, top_k)[:, :, local]
        covered = stays.squeeze(-1) + how.attention_weight.gather(-1, heaviest).sum(-1)
        numbers["attention fetched"] = 1.0 - stays.mean().item()
        numbers["attention covered"] = covered.mean().item()
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def heaviest_blocks(how: Routes, top_k: int) -> Tensor:
    """The `top_k` heaviest blocks of every query block: (b r I k), lowest first among equals."""
    scores = how.matrix.masked_fill(~how.eligible, -torch.inf)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def hit_rate(how: Routes, sources: Tensor) -> float:
    """Frequency with which the heaviest block is the true one, (b, I); -1 where none is."""
    if sources.shape[1] != how.matrix.shape[2]:
        return math.nan
    counted = (sources >= 0)[:, None].expand(how.matrix.shape[:3])
    right = heaviest_blocks(how, 1).squeeze(-1) == sources.to(how.matrix.device)[:, None]
    return right[counted].float().mean().item()


def weights_figure(how: Routes, sample: int = 0) -> Figure:
    """Routing weights of one sample (first route), its choices marked, and the fan-out below."""
    weights, chosen = how.weights[sample, 0].cpu(), how.chosen[sample, 0].cpu()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(weights.numpy(), vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(shown, ax=axes, label="routing weight")
    queries, keys = chosen.nonzero().T
    axes.scatter(keys, queries, marker="o", s=60, facecolors="none", edgecolors="tab:red")
    _label(axes, weights.shape, f"sample {sample}: circles are the chosen blocks")
    return figure


def scores_figure(how: Routes, sample: int = 0) -> Figure:
    """The score matrix in blocks: own ones, chosen ones, those never computed.

    The shade of a chosen block is how many samples chose it, so that favourites stand out.
    """
    rows, columns = how.eligible.shape
    share = how.chosen[:, 0].float().mean(0).cpu()
    diagonal = torch.eye(rows, columns).bool()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    shares = share.masked_fill(diagonal, float("nan")).numpy()
    shown = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(shown, ax=axes, label="share of samples that compute the block")
    for i in range(min(rows, columns)):
        axes.add_patch(_square(i, i, facecolor="tab:orange"))
    for i, j in how.chosen[sample, 0].nonzero().tolist():
        axes.add_patch(_square(i, j, facecolor="none", edgecolor="tab:red", linewidth=2))
    kept = (how.chosen.sum((2, 3)).float().mean() + min(rows, columns)) / (rows * columns)
    _label(axes, share.shape, f"{kept:.0%} of the scores; red: sample {sample}, orange: own")
    return figure


def _square(row: int, column: int, **style: Any) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, **style)


def _label(axes: Axes, shape: torch.Size, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("key block")
    axes.set_ylabel("query block")
    axes.set_xticks(range(shape[1]))
    axes.set_yticks(range(shape[0]))

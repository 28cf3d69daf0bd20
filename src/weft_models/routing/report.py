"""Routing statistics: weights, choices, attention, bytes saved."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .attention import Routes
from .module import routed_modules
from .router import entropy


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

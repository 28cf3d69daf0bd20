"""The choice between latents and the keys that are made of them: bytes against work.

keys      each rank expands its own tokens once, and g (d + e) numbers of a token travel
latents   d' + e' numbers travel, and each rank expands what arrives, in both passes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from .._caching import cached
from ..declare.layout import LayoutDeclaration
from ..declare.mesh import coordinates
from ..masks import FULL
from .plan import Pass, Plan
from .predict import Prediction, forecast_of
from .problem import AnyProblem, LocalProblem
from .timing import duration

AnyCall = TypeVar("AnyCall", bound=AnyProblem)
#: How much longer both passes may take for the fewer bytes: they hold less, and leave links free.
WORTH = 1.05


@dataclass(frozen=True)
class Travelling:
    """One of the two ways, of one rank without a mask: bytes and seconds of both passes."""

    received: int
    seconds: float  # at the layout's rates, with what is expanded


@dataclass(frozen=True)
class Travel:
    """The two ways, and which is taken.

    >>> from weft.plan.call import Expanded
    >>> from weft.plan.problem import Problem
    >>> mla = Expanded(heads=16, head_dim=24, value_dim=16, carried=(32, 8), work=2 * 32 * 16 * 32)
    >>> call = Problem.of("tokens", 65536, heads=16, kv_heads=1, head_dim=24, expanded=mla)
    >>> layout = LayoutDeclaration.load("ring-4")
    >>> travel = choose_travel(layout, call.on(layout, 0))
    >>> travel.latents, travel.if_keys.received // travel.if_latents.received
    (True, 16)
    """

    if_latents: Travelling
    if_keys: Travelling
    why: str = ""

    @property
    def latents(self) -> bool:
        """True if latents travel: fewer bytes, and not longer by more than `WORTH`."""
        fewer = self.if_latents.received < self.if_keys.received
        sooner = self.if_latents.seconds <= WORTH * self.if_keys.seconds
        return not self.why and fewer and sooner


def of_keys(problem: AnyCall) -> AnyCall:
    """The call of a problem with latents, if keys and values are expanded before it."""
    sizes = problem.expanded
    assert sizes is not None
    return replace(problem, kv_heads=sizes.heads, expanded=None)


@cached(256)
def _chosen(layout: LayoutDeclaration, problem: LocalProblem) -> Travel:
    sizes = problem.expanded
    assert sizes is not None
    coords = coordinates(layout.mesh, 0)
    keys = Plan(layout, of_keys(problem), coords)
    # Each rank expands its own tokens, and the gradients go back by two products.
    tokens = problem.batch * keys.resharding.key.state(0, coords).size(2)
    local = 3 * tokens * sizes.work / _rate(keys)
    if_keys = _travelling(keys, local)
    if keys.why_keys_travel:
        return Travel(if_keys, if_keys, keys.why_keys_travel)
    return Travel(_travelling(Plan(layout, problem, coords), 0.0), if_keys)


def _rate(plan: Plan) -> float:
    return plan.shifts.hardware.device.rate(plan.problem.n * plan.problem.m)


def _travelling(plan: Plan, work: float) -> Travelling:
    forecast = forecast_of(plan)
    received, seconds = 0, work
    both: tuple[tuple[Pass, Prediction], ...] = (
        (plan.forward, forecast.forward),
        (plan.backward, forecast.backward),
    )
    for tile, prediction in both:
        received += prediction.traffic.bytes
        seconds += duration(tile.program, plan.costs(tile.dims, tile.backward))
        for part in (prediction.before, prediction.after):
            for (mesh_dim, _), nbytes in part.received.items():
                seconds += plan.shifts.farthest(mesh_dim).seconds(nbytes)
    return Travelling(received, seconds)


def choose_travel(layout: LayoutDeclaration, problem: LocalProblem) -> Travel:
    """Both ways of a call with latents, without its mask, so that all ranks choose alike."""
    plain = replace(problem, mask=FULL, bias=False, bias_tensor=False, choice=None, kernel=None)
    return _chosen(layout, replace(plain, batches=(), batch_offset=0))


__all__ = ["WORTH", "Travel", "Travelling", "choose_travel", "of_keys"]

"""Options of learned routing: the `[routing]` table of a strategy whose keys are `R(top_k)`.

A strategy only has the table; what its options mean is known to `weft.routing`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from .numbers import Real, Whole, Width


class Routing(BaseModel):
    """Options of learned routing.

    top_k: how many other blocks a query block attends to.
    summary_dim: width of the learned summary of a block.
    blocks: blocks per rank.
    chunks: blocks over all ranks, instead of `blocks`.
    temperature: of the routing weights.
    per_head: each key/value head has its own routes.
    fan_out_cap: by how many query blocks a key block may be chosen.
    strict: routing reveals nothing to a query that the mask hides from it.
    warm_up: the part of training during which more blocks than `top_k` are taken: all of them at
        first, then fewer and fewer.
    warm_temperature: where the temperature starts meanwhile.
    imitate: weight of the penalty for routing weights unlike the attention that blocks then got,
        while more than one is taken; `weft.routing.routing_penalty` adds the penalties up.
    load: weight of the penalty for uneven choices.
    entropy: weight of the penalty for undecided weights.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    top_k: Whole = Field(ge=1)
    summary_dim: Width = 16
    blocks: Whole = Field(default=1, ge=1)
    chunks: Whole | None = Field(default=None, ge=1)
    temperature: Real = Field(default=1.0, gt=0)
    per_head: bool = False
    fan_out_cap: Whole | None = Field(default=None, ge=1)
    strict: bool = True
    warm_up: Real = Field(default=0.5, ge=0, le=1)
    warm_temperature: Real | None = Field(default=None, gt=0)
    imitate: Real = Field(default=1.0, ge=0)
    load: Real = Field(default=0.0, ge=0)
    entropy: Real = Field(default=0.0, ge=0)

    @property
    def penalised(self) -> bool:
        """True if any penalty has a weight."""
        return bool(self.imitate or self.load or self.entropy)

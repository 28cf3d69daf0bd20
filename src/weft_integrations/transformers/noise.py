"""Random numbers of a training call on full rows: each rank's tokens draw their own.

Ranks of a context group hold the same random state, as loaders, samplers and trainers need them to.
Left at that, every rank's chunk would get the same dropout mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from weft.layout import Layout

from .. import Foreign


@contextlib.contextmanager
def own_random_numbers(model: Foreign, layout: Layout, axis: str) -> Iterator[None]:
    """Run under generators seeded by the next number of torch's generator and by the chunk.

        outer state     s0  . . . . . . . . .  s1      the same on every rank; s0 if nobody drew
        inside          seed(number + chunk)           ranks with other tokens differ

    A model that draws nothing leaves the state as it was: draws outside of it, such as the order
    of rows, are then those of one process. Recomputed layers restore the inner state, as
    `torch.utils.checkpoint` does.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    number = _number(torch.default_generator.clone_state())
    seed = number + layout.chunk(axis)
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for generator in generators:
            generator.manual_seed(seed)
        before = [generator.get_state() for generator in generators]
        yield
        drew = any(not torch.equal(g.get_state(), b) for g, b in zip(generators, before))
    if drew:
        _number(torch.default_generator)


def _number(generator: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (), generator=generator))


@contextlib.contextmanager
def neftune_scaled(model: Foreign, share: float) -> Iterator[None]:
    """Scale NEFTune's noise, alpha / sqrt(n d), from a share of the row's tokens to all of them."""
    embeddings: Foreign = None
    with contextlib.suppress(NotImplementedError, AttributeError):  # models of no one embedding
        embeddings = model.get_input_embeddings()
    alpha = getattr(embeddings, "neftune_noise_alpha", None)
    if alpha is None:
        yield
        return
    embeddings.neftune_noise_alpha = alpha * share**0.5
    try:
        yield
    finally:
        embeddings.neftune_noise_alpha = alpha

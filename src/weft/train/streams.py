"""The stream of training data for each kind of model."""

from __future__ import annotations

from ..declare.model_file import ModelSpec
from ..errors import DeclarationError
from ..layout import Layout
from .data import PairStream, Stream, TableStream, TokenStream
from .retrieval import FactStream

#: The data of each head that ships.
KINDS = {"table": TableStream, "tokens": TokenStream, "pair": PairStream, "facts": FactStream}


def stream(spec: ModelSpec, layout: Layout, seed: int, batch: int | None = None) -> Stream:
    """The training data of a model.

    Args:
        spec: the model; its `head` decides the kind of data, its `train` the lengths.
        layout: whose local shards the batches are.
        seed: example i of a seed is the same whatever the layout.
        batch: examples per step over all ranks, default the model file's.

    >>> batch = stream(ModelSpec.load("tabular"), Layout.single(), seed=0).batch(step=3)
    >>> batch.inputs.shape[:2] == batch.targets.shape
    True
    """
    check_trains(spec)
    assert spec.head is not None
    return KINDS[spec.head](spec, layout, seed, batch)


def check_trains(spec: ModelSpec) -> None:
    """Raises `DeclarationError` for a model whose head has no training data here."""
    if spec.head not in KINDS:
        found = "no head" if spec.head is None else f"the head {spec.head!r}"
        raise DeclarationError(
            f"model {spec.name!r} has {found}, and weft has training data only for models with a "
            f"head of {', '.join(map(repr, KINDS))}; train others in a loop of your own, with "
            "weft.compose and layout.sync_gradients (see the tutorial 09_weather_model)"
        )

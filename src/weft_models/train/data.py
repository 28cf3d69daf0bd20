"""Training data of every head, drawn on the fly: example i of a seed is the same on any layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.errors import DeclarationError
from weft.layout import Layout
from weft.plan.order import shard_sizes

from ..declare.model_file import ModelSpec
from ..tables.prior import draw_training_table

SHAPES, EXAMPLES, CHAIN = 0, 1, 2  # independent random streams of one seed
SUCCESSORS = 4  # of a token in a chain


@dataclass(frozen=True)
class TrainingBatch:
    """One step's local shard of training data: `model(batch.inputs, **batch.given)`.

    Attributes:
        inputs: of the model, on this rank.
        targets: for its output, where `counted` is True.
        counted: bool, of the shape of `targets`.
        given: further keyword arguments of the model: global lengths, and how many rows train.
        tokens: tokens (cells of a table, pairs) of the step, over all ranks.

    >>> from weft.train import stream
    >>> batch = stream(ModelSpec.load("tabular"), Layout.single(), seed=0, batch=2).batch(0)
    >>> batch.targets.shape == batch.counted.shape, batch.targets.shape[0]
    (True, 2)
    """

    inputs: Tensor
    targets: Tensor
    counted: Tensor
    given: Mapping[str, object]
    tokens: int

    def to(self, device: torch.device) -> TrainingBatch:
        """The same batch with its tensors on a device.

        Args:
            device: of the tensors of the new batch.
        """
        inputs, targets, counted = (x.to(device) for x in (self.inputs, self.targets, self.counted))
        return TrainingBatch(inputs, targets, counted, self.given, self.tokens)


def check_batch(
    spec: ModelSpec, layout: Layout, batch: int | None = None, parts: int | None = None
) -> int:
    """Examples of one part of a batch; refuses ranks without any."""
    whole, parts = batch or spec.train.batch, parts or spec.train.accumulate
    size, shards = whole // parts, layout.size(spec.axes[0])
    if min(shard_sizes(size, (shards,))) == 0:
        raise DeclarationError(
            f"batch={whole} in {parts} parts leaves some of the {shards} ranks that split"
            f" axis {spec.axes[0]!r} without an example; use a multiple of {shards * parts}"
        )
    return size


class Stream:
    """Batches of one kind for a model on a layout; subclasses say how an example is drawn.

    Every rank draws the examples of its own batch shard whole and keeps its part of them, so no
    layout changes the meaning of the seed.
    """

    def __init__(
        self, spec: ModelSpec, layout: Layout, seed: int, batch: int | None = None
    ) -> None:
        self.spec, self.layout, self.seed = spec, layout, seed
        whole, self.parts = batch or spec.train.batch, spec.train.accumulate if not batch else 1
        self.size = check_batch(spec, layout, whole, self.parts)

    def batch(self, step: int, part: int = 0) -> TrainingBatch:
        """The local shard of the batch of one step, or of one of its `parts`."""
        raise NotImplementedError

    def _rng(self, stream: int, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream, index])

    def _lengths(self, rng: np.random.Generator) -> dict[str, int]:
        ranges = self.spec.train.length
        missing = [axis for axis in self._drawn_axes() if axis not in ranges]
        if missing:
            raise ValueError(
                f"model {self.spec.name!r} gives no train.length for {missing}; add e.g."
                f" length = {{ {missing[0]} = [64, 64] }} under [train]"
            )
        return {axis: int(rng.integers(*ranges[axis], endpoint=True)) for axis in ranges}

    def _drawn_axes(self) -> tuple[str, ...]:
        return self.spec.axes[1:-1]

    def _examples(self, step: int, part: int) -> list[int]:
        """Global indices of the examples in this rank's batch shard."""
        local = self.layout.positions(self.spec.axes[0], self.size)
        return [(step * self.parts + part) * self.size + int(i) for i in local]

    def _shard(self, x: Tensor) -> Tensor:
        """The local part of x, whose dims are the model's axes and whose batch is local already."""
        axes = self.spec.axes[1:-1]
        return self.layout.shard(x, {axis: 1 + i for i, axis in enumerate(axes[: x.ndim - 1])})


class TableStream(Stream):
    """Tables from random structural causal models; the training rows come first.

    All tables of a step have as many rows, uniform within `length`, and as many features,
    log-uniform within it: few features are likelier than many. 40 to 85 % of the rows train.
    """

    def batch(self, step: int, part: int = 0) -> TrainingBatch:
        rng = self._rng(SHAPES, step)
        lengths = self._lengths(rng)
        _, rows, features, _ = self.spec.axes
        low, high = np.log(self.spec.train.length[features])
        n, f = lengths[rows], round(np.exp(rng.uniform(low, high)))
        train = int(n * rng.uniform(0.4, 0.85))
        classes = self.spec.sizes.classes
        assert classes is not None  # every model of tables has them
        tables = [
            draw_training_table(self._rng(EXAMPLES, i), n, f, classes)
            for i in self._examples(step, part)
        ]
        x = torch.from_numpy(np.stack([table.x for table in tables]))  # b r f
        y = torch.from_numpy(np.stack([table.y for table in tables]))  # b r
        return self.shard_table(x, y, train)

    def shard_table(self, x: Tensor, y: Tensor, train: int) -> TrainingBatch:
        """The local shard of given tables: features (b, r, f) and classes (b, r), batch local.

        Classes of test rows are targets only: the model's input has NaN there.
        """
        _, rows, features, _ = self.spec.axes
        shown = y.to(x.dtype).clone()
        shown[:, train:] = float("nan")
        cells = torch.cat([x, shown[..., None]], dim=-1)  # b r f+1
        lengths = {rows: x.shape[1], features: cells.shape[2]}
        targets = self._shard(y)
        test = self.layout.positions(rows, x.shape[1]) >= train
        return TrainingBatch(
            inputs=self._shard(cells),
            targets=targets,
            counted=test.expand_as(targets),
            given={"train": train, "lengths": lengths},
            tokens=self.size * cells.shape[1] * cells.shape[2],
        )


class TokenStream(Stream):
    """A piece of a Markov chain, repeated to the end of the sequence.

    The chain belongs to the seed: every token has `SUCCESSORS` successors, equally likely. So the
    next token can be guessed from the last one, and known by looking one repetition back.
    """

    def batch(self, step: int, part: int = 0) -> TrainingBatch:
        lengths = self._lengths(self._rng(SHAPES, step))
        axis = self.spec.axes[1]
        examples = self._examples(step, part)
        drawn = [self._draw(self._rng(EXAMPLES, i), lengths[axis]) for i in examples]
        ids = torch.from_numpy(np.stack(drawn))  # b n+1
        targets = self._shard(ids[:, 1:].contiguous())
        return TrainingBatch(
            inputs=self._shard(ids[:, :-1].contiguous()),
            targets=targets,
            counted=torch.ones_like(targets, dtype=torch.bool),
            given={"lengths": lengths},
            tokens=self.size * lengths[axis],
        )

    @functools.cached_property
    def _chain(self) -> np.ndarray:
        size = self.spec.sizes.vocabulary
        assert size is not None  # every model of tokens has one
        return self._rng(CHAIN, 0).integers(size, size=(size, SUCCESSORS))

    def _draw(self, rng: np.random.Generator, length: int) -> np.ndarray:
        piece = [int(rng.integers(len(self._chain)))]
        for way in rng.integers(SUCCESSORS, size=rng.integers(8, max(9, length // 3))):
            piece.append(int(self._chain[piece[-1], way]))
        return np.resize(piece, length + 1)


class PairStream(Stream):
    """Distances between random points in space, some unknown: the unknown ones are the targets."""

    def batch(self, step: int, part: int = 0) -> TrainingBatch:
        _, rows, columns, _ = self.spec.axes
        lengths = self._lengths(self._rng(SHAPES, step))
        n = lengths[columns] = lengths[rows]
        drawn = [self._draw(self._rng(EXAMPLES, i), n) for i in self._examples(step, part)]
        distances = torch.from_numpy(np.stack([d for d, _ in drawn]))  # b i j
        hidden = torch.from_numpy(np.stack([h for _, h in drawn]))
        return TrainingBatch(
            inputs=self._shard(distances.masked_fill(hidden, float("nan"))),
            targets=self._shard(distances),
            counted=self._shard(hidden),
            given={"lengths": lengths},
            tokens=self.size * n * n,
        )

    def _draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        points = rng.normal(size=(n, 3))
        distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
        hidden = np.triu(rng.random((n, n)) < 0.4, 1)
        return distances.astype(np.float32), hidden | hidden.T


#: The data of each head that ships.
KINDS = {"table": TableStream, "tokens": TokenStream, "pair": PairStream}


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

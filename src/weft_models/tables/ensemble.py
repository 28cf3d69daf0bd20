"""Several views of one table: each is encoded once, then test rows stream past in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.errors import DeclarationError

from ..models import KeyValueCache
from .features import Features
from .source import Source

#: Cells that a rank computes with at once, of small tables and of batches of test rows.
CELLS = 1 << 14


@dataclass(frozen=True)
class Settings:
    """Settings of an ensemble: the mean of `n_estimators` views of a table.

    Scores are divided by `temperature` before the softmax. A mean is flatter than its summands: of
    the numbers from 0.5 to 1, 0.9 gave the best log loss on tables of the generator, which is also
    TabICL's. `batch_rows` are test rows of a batch; None for as many as `CELLS` holds. Keys and
    values of encoded rows take at most `cache_bytes` on a rank; members beyond are encoded again in
    every prediction.

    >>> Settings(n_estimators=2).temperature
    0.9
    """

    n_estimators: int = 4
    temperature: float = 0.9
    batch_rows: int | None = None
    cache_bytes: int = 4 << 30
    seed: int = 0


DEFAULTS = Settings()


@dataclass(frozen=True, eq=False)
class MemberView:
    """One member's view of a table: some features, in the order of `columns`.

    `ids` maps a class to the number that the model knows it by, `codes` a feature to the number
    that each of its codes becomes. `normal`: features are normal scores, and not as they are.
    """

    columns: np.ndarray
    ids: np.ndarray
    normal: bool
    codes: dict[int, np.ndarray] = field(default_factory=dict)

    def cells(self, tables: Sequence[np.ndarray]) -> np.ndarray:
        """Rows in this view, (rows, features), from both `tables` of `Features`."""
        table = tables[self.normal]
        found = table[:, self.columns]
        for i, column in enumerate(self.columns):
            if column in self.codes:
                known = ~np.isnan(found[:, i])
                found[known, i] = self.codes[column][table[known, column].astype(int)]
        return found


def draw_views(members: int, features: Features, classes: int, seed: int) -> list[MemberView]:
    """Features in random order, class ids turned by one from member to member.

    The features of every second member are normal scores (as members of TabPFN differ in how
    features are transformed, Hollmann et al., Nature 2025), which outliers do not move. From the
    third member on, codes without an order are in a random one.

    >>> views = draw_views(3, Features(np.eye(4), widest=10), classes=3, seed=0)
    >>> sorted(int(view.ids[0]) for view in views)       # a class is every number once
    [0, 1, 2]
    """
    rng = np.random.default_rng(seed)
    first, dealt = rng.permutation(classes), features.deal(members, rng)
    codes = [
        {j: rng.permutation(count) for j, count in features.codes.items() if i > 1}
        for i in range(members)
    ]
    return [
        MemberView(columns, (first + i) % classes, i % 2 == 1, codes[i])
        for i, columns in enumerate(dealt)
    ]


class Ensemble:
    """Probabilities of classes: softmax(mean over members of their scores / temperature).

    All ranks of the model's layout make it with the same rows and call it together; its keys and
    values are sharded by the layout, and every rank gets all probabilities.

    `x` (rows, columns) are training rows, NaN for missing values; `y` (rows,) their classes from 0,
    at most as many as the model of `source` knows; `unordered` as for `Features`.

    >>> x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    >>> ensemble = Ensemble(Source(weft.compose("tabular")), x[:20], y[:20], 3)
    >>> ensemble.predict(x[20:]).shape
    (10, 3)
    """

    def __init__(
        self,
        source: Source,
        x: np.ndarray,
        y: np.ndarray,
        classes: int,
        settings: Settings = DEFAULTS,
        unordered: Sequence[int] = (),
    ) -> None:
        self.source, self.classes, self.settings = source, classes, settings
        spec = source.model.spec
        widest = spec.train.length.get(spec.axes[2], (1, 100))[1]
        self.features = Features(x, widest, settings.seed, unordered)
        self.tables, self.y = self.features(x), y
        self.views = draw_views(settings.n_estimators, self.features, classes, settings.seed)
        self._kept: list[KeyValueCache] = []
        self._weights = ""
        seed = np.array([settings.seed, settings.n_estimators])
        _agree(source, "the training rows, n_estimators and random_state", *self.tables, y, seed)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": []}  # encoded again where it is needed

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps of encoded rows."""
        return sum(cache.nbytes for cache in self._kept)

    def encode(self) -> None:
        """Encodes the training rows of as many members as there is room for."""
        for number, _ in enumerate(self._encoded()):
            if len(self._kept) <= number:
                return

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of test rows, (rows, classes) float64, the same on every rank.

        `x` has the columns of the training rows.
        """
        tables, total = self.features(x), np.zeros((len(x), self.classes))
        _agree(self.source, "the test rows", *tables)
        rows = self._batch_rows()
        for group, cache in self._encoded() if len(x) else ():
            for start in range(0, len(x), rows):
                batch = slice(start, start + rows)
                total[batch] += self._scores(group, cache, [t[batch] for t in tables])
        self._check_finite(total)
        mean = torch.from_numpy(total) / len(self.views)
        return (mean / self.settings.temperature).softmax(-1).numpy()

    def _check_finite(self, scores: np.ndarray) -> None:
        """Refuses scores that name no class: the largest of NaN is the first."""
        odd = np.flatnonzero(~np.isfinite(scores).all(axis=1))
        if len(odd):
            model = self.source.model
            damaged = [n for n, p in model.named_parameters() if not p.isfinite().all()]
            why = f"its weights are not, such as {damaged[0]!r}" if damaged else "they overflow"
            narrow = not damaged and model.missing.dtype.itemsize < 4
            remedy = "dtype='float32'" if narrow else "another checkpoint"
            raise FloatingPointError(
                f"model {model.spec.name!r} gives {len(odd)} of {len(scores)} rows scores that are"
                f" not finite, the first of them row {odd[0]}: {why} ({model.missing.dtype}); use"
                f" {remedy}"
            )

    # -- members -----------------------------------------------------------------------------------

    def _encoded(self) -> Iterator[tuple[list[MemberView], KeyValueCache]]:
        """Groups of members with their training rows' keys and values, kept or made just now."""
        model, size = self.source.model, self._together()
        for number, start in enumerate(range(0, len(self.views), size)):
            group = self.views[start : start + size]
            if number < len(self._kept):
                yield group, self._kept[number]
                continue
            cells, lengths = self._cells(group, self.tables, self.y)
            cache = model.fit(cells, lengths=lengths)
            self._check_weights(cache)
            room = self.settings.cache_bytes - sum(max(c.bytes_per_rank) for c in self._kept)
            if number == len(self._kept) and max(cache.bytes_per_rank) <= room:
                self._kept.append(cache)
            yield group, cache

    def _check_weights(self, cache: KeyValueCache) -> None:
        """Raise if the weights changed since `encode`."""
        self._weights = self._weights or cache.model
        if cache.model != self._weights:
            raise DeclarationError(
                f"the weights of model {self.source.model.spec.name!r} are others than when the"
                " training rows were encoded; fit again"
            )

    def _together(self) -> int:
        """Members of a group: several of a small table, a multiple of the ranks that split them."""
        layout, spec = self.source.model.layout, self.source.model.spec
        shards = layout.size(spec.axes[0])
        fitting = CELLS // (max(1, len(self.y)) * (self.features.width + 1))
        return shards * max(1, min(fitting, -(-len(self.views) // shards)))

    def _batch_rows(self) -> int:
        if self.settings.batch_rows:
            return self.settings.batch_rows
        layout, spec = self.source.model.layout, self.source.model.spec
        local = self._together() // layout.size(spec.axes[0])
        return max(1, CELLS // (local * (self.features.width + 1))) * layout.size(spec.axes[1])

    def _cells(
        self, group: list[MemberView], tables: tuple | list, y: np.ndarray | None
    ) -> tuple[Tensor, dict[str, int]]:
        """This rank's cells of a group's tables, their classes last, and the global lengths.

        Where the mesh does not divide the group, its last member fills it up.
        """
        model = self.source.model
        layout, (batch, rows, features, _) = model.layout, model.spec.axes
        size = -(-len(group) // layout.size(batch)) * layout.size(batch)
        filled = group + group[-1:] * (size - len(group))
        mine = [filled[i] for i in layout.positions(batch, size).tolist()]
        whole = np.full(
            (len(mine), len(tables[0]), self.features.width + 1), np.nan, tables[0].dtype
        )
        for i, view in enumerate(mine):
            whole[i, :, :-1] = view.cells(tables)
            if y is not None:
                whole[i, :, -1] = view.ids[y]
        lengths = {batch: size, rows: whole.shape[1], features: whole.shape[2]}
        cells = layout.shard(torch.from_numpy(whole), {rows: 1, features: 2})
        return cells.to(next(model.parameters()).device), lengths

    def _scores(self, group: list[MemberView], cache: KeyValueCache, tables: list) -> np.ndarray:
        """The sum over a group's members of a batch's scores, (rows, classes)."""
        model = self.source.model
        cells, lengths = self._cells(group, tables, None)
        logits = model.predict(cells, cache, lengths=lengths)
        logits = model.layout.gather(logits, {model.spec.axes[0]: 0, model.spec.axes[1]: 1})
        found = logits[: len(group), :, : self.classes].double().cpu().numpy()
        return sum(one[:, view.ids] for one, view in zip(found, group))


def _agree(source: Source, label: str, *parts: np.ndarray) -> None:
    """Raises on every rank if ranks have other rows: each would predict another table."""
    layout = source.model.layout
    if layout.world_size > 1:
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        rows, columns = parts[0].shape
        layout.bound.agree(label, f"{rows} x {columns}, digest {digest.hexdigest()}")

"""The table transformer: every cell of a table is a token, the class of a row is its last cell."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft._caching import cached
from weft._torch import is_fsdp, version
from weft._uploads import upload
from weft.comm.consistency import fingerprint as fingerprint_of
from weft.comm.consistency import local_tensor as held_here
from weft.errors import DeclarationError, ShapeError
from weft.layout import Layout
from weft.masks.base import whole_number
from weft_axes.nn.parameters import embedding, linear, local, replicate

from ..declare.model_file import ModelSpec
from .cache import CacheRecording, KeyValueCache, model_fingerprint
from .model import Model
from .trunk import Trunk

#: What a rank may find wrong with a table, as all ranks raise it.
_KINDS: tuple[type[Exception], ...] = (ShapeError, DeclarationError, IndexError)

IDENTITY_SEED = 20_240


class TableModel(Model):
    """Predicts the classes of the test rows of a table from its training rows, in one pass.

    After TabPFN v2 (Hollmann et al., Nature 2025): a cell is embedded as its value, normalised with
    the statistics of the training rows, times a direction, plus an offset. Both are learned linear
    maps of a fixed random vector per column, so a sum of cells still distinguishes its columns. The
    last column holds the class, known for training rows only. No test row is ever a key, nor
    enters the statistics, so no test row's output depends on another's.

    Made by `weft.compose` from a model file with `head = "table"`.

    Args:
        spec: the model file.
        layout: of the axes, bound.
        generator: the source of the initial weights.

    >>> import weft
    >>> model = weft.compose("tabular")
    >>> cells = torch.randn(2, 20, 6)      # batch, rows, 5 features and the class
    >>> cells[:, :, -1] = torch.randint(3, (2, 20))
    >>> model(cells, train=12).shape       # batch, rows, classes
    torch.Size([2, 20, 10])
    """

    def __init__(self, spec: ModelSpec, layout: Layout, generator: torch.Generator) -> None:
        super().__init__()
        embed, classes = spec.sizes.embed, spec.sizes.classes
        _, self.rows, self.features, _ = spec.axes
        assert classes is not None  # a file with this head has them
        self.spec, self.layout, self.unknown = spec, layout, classes
        self.direction = linear(embed, embed, generator, bias=False)
        self.offset = linear(embed, embed, generator, bias=False)
        self.missing = nn.Parameter(torch.empty(embed).normal_(std=0.5, generator=generator))
        self.label = embedding(self.unknown + 1, embed, 0.5, generator)
        self.stack = Trunk(spec, layout, generator)
        self.hidden = linear(embed, 2 * embed, generator)
        self.classes = linear(2 * embed, classes, generator)
        self._known: tuple[tuple, str] | None = None
        replicate(self, layout)

    def forward(
        self,
        cells: Tensor,
        *,
        train: int,
        lengths: Mapping[str, int] | None = None,
        cache: KeyValueCache | CacheRecording | None = None,
    ) -> Tensor:
        """Class scores of every local row.

        Args:
            cells: (batch, rows, features + 1), local. NaN is a missing value. The last column is
                the class of the row; it is not read beyond the first `train` rows.
            train: global number of training rows, which come first. A training row whose class is
                NaN counts as a row without a known class.
            lengths: global lengths of the rows and features axes (the class column counts);
                default: even shards.
            cache: as `predict` has it, with which `train` is 0.

        Returns:
            Logits (batch, rows, classes); those of the training rows mean nothing. Ranks that split
            features have the same ones (R). Take the loss with `layout.mean(sum, count)` of each
            rank's own rows, which weighs that. A loss of `layout.gather(logits, {"rows": 1})` goes
            through `layout.once(loss, "features")`.

        Raises:
            ShapeError: cells of another shape.
            IndexError: a training row's class is none of 0 ... `sizes.classes` - 1; both on every
                rank that has a part of the table.
        """
        lengths, train, known, is_class = self._checked(cells, train, lengths, cache)
        columns = self.layout.positions(self.features, lengths[self.features], cells.device)
        dtype = self.missing.dtype
        values = cells.to(torch.promote_types(dtype, torch.float32))  # bf16 cannot tell years apart
        if isinstance(cache, KeyValueCache):
            statistics = (cache.tensors["mean"].local, cache.tensors["scale"].local)
        else:
            statistics = column_statistics(values, known, self.layout, self.rows)
        if isinstance(cache, CacheRecording):
            for name, t in zip(("mean", "scale"), statistics):
                cache.keep(name, t, (self.spec.axes[0], self.features))
        values = standardise_columns(values, *statistics).to(dtype)
        values = values.masked_fill(is_class, 0.0)[..., None]  # b r c 1
        labels = self._labels(cells, known, is_class)[:, :, None]  # b r 1 e
        tokens = self._embed(values, columns, is_class, lengths[self.features])
        tokens = tokens + labels * is_class.to(tokens.dtype)[:, None]
        masks = {"first-keys": train} if "first-keys" in self.stack.mask_names else {}
        given = {"lengths": lengths, "masks": masks, "cache": cache}
        if self._reads_one_column(cache):
            last = {self.features: lengths[self.features] - 1}
            tokens = self.stack(tokens, **given, only=last)  # b r 1 e
            return self.classes(nn.functional.gelu(self.hidden(tokens[:, :, 0])))
        tokens = self.stack(tokens, **given)  # b r c e
        if isinstance(cache, CacheRecording):
            return tokens
        answer = (tokens * is_class.to(tokens.dtype)[:, None]).sum(dim=2)  # b r e
        answer = self.layout.enter(self.layout.sum(answer, self.features), self.features)
        return self.classes(nn.functional.gelu(self.hidden(answer)))

    @torch.no_grad()
    def fit(self, cells: Tensor, *, lengths: Mapping[str, int] | None = None) -> KeyValueCache:
        """Encodes the training rows once, for `predict` to use any number of times.

        Args:
            cells: (batch, rows, features + 1), local, training rows alone, their classes last.
            lengths: as for `forward`. Ranks that split the batch need not have tables of equal
                sizes, unless the cache is to be saved or moved. Nor need they call this equally
                often, unless heads are split or weights sharded: all hash the weights together.

        Returns:
            The keys and values of the rows in every block that attends rows, sharded as the layout
            has keys at rest, and the statistics of the columns.

        Raises:
            IndexError: a class is not below `sizes.classes` of the model file.
            DeclarationError: a block of the model file attends rows without `mask = "first-keys"`.

        >>> import weft
        >>> model, cells = weft.compose("tabular"), torch.ones(1, 20, 6)
        >>> cache = model.fit(cells[:, :12])
        >>> together = model(cells, train=12)[:, 12:]
        >>> torch.allclose(model.predict(cells[:, 12:], cache), together, atol=1e-6)
        True
        """
        lengths, *_ = self._checked(cells, None, lengths, None)
        recording = self.stack.recording((*cells.shape, 0), self.rows, lengths)
        self(cells, train=lengths[self.rows], lengths=lengths, cache=recording)
        return recording.finished(self)

    @torch.no_grad()
    def predict(
        self, cells: Tensor, cache: KeyValueCache, *, lengths: Mapping[str, int] | None = None
    ) -> Tensor:
        """Class scores of test rows: those of one pass over the training rows and them.

        No test row sees another, so a table of any number of them is predicted batch by batch.

        Args:
            cells: (batch, rows, features + 1), local, test rows alone; the last column is not read.
            cache: of `fit`, on this model's layout.
            lengths: as for `forward`.

        Returns:
            Logits (batch, rows, classes).

        Raises:
            DeclarationError: the cache is of another model, or is sharded on another layout.
            ShapeError: another number of tables or columns.
        """
        if not isinstance(cache, KeyValueCache):
            raise DeclarationError(
                f"cache must be the result of fit, found a {type(cache).__name__}; without one use"
                " model(cells, train=...)"
            )
        now = self._fingerprint()
        if cache.model[:16] == now[:16] and cache.model != now:
            raise DeclarationError(
                f"the cache was made by other weights than model {self.spec.name!r} has now; fit"
                " again"
            )
        return self(cells, train=0, lengths=lengths, cache=cache)

    def _fingerprint(self) -> str:
        """Fingerprint of the weights, cached until one is written.

        Ranks work it out together. FSDP fills the same buffers with new weights, and no version of
        its tensors counts that: there each rank looks at the numbers that it holds, and a vote says
        whether those of any are others.
        """
        held = [(held_here(p), p) for p in self.parameters()]
        seen: tuple[tuple, ...]
        if any(map(is_fsdp, self.modules())):
            sums = torch.stack([fingerprint_of(t) for t, _ in held]).tolist()
            seen = tuple((tuple(t.shape), total) for (t, _), total in zip(held, sums))
            kept = self._known is not None and self._known[0] == seen
            kept = {*self.layout.bound.share("weights of a cache", str(kept)).values()} == {"True"}
        else:
            seen = tuple((t.data_ptr(), version(t), version(p)) for t, p in held)
            kept = self._known is not None and self._known[0] == seen
        if self._known is None or not kept:
            self._known = seen, model_fingerprint(self)
        return self._known[1]

    def _reads_one_column(self, cache: KeyValueCache | CacheRecording | None) -> bool:
        """True if only the class column is computed after the last attention over features.

        Where ranks split features only some of them hold the class column.
        """
        whole = self.layout.size(self.features) == 1
        return whole and isinstance(cache, KeyValueCache) and not torch.is_grad_enabled()

    def _checked(
        self,
        cells: Tensor,
        train: int | None,
        lengths: Mapping[str, int] | None,
        cache: KeyValueCache | CacheRecording | None,
    ) -> tuple[dict[str, int], int, Tensor, Tensor]:
        """Global lengths, how many rows train, which local ones do, and where classes are.

        What one rank finds wrong is raised on all that split the table, before they sum over it;
        ranks of other samples have other tables. Without `train` all rows are training rows.
        """
        error: Exception | None = None
        size: list[int] | None = None
        try:
            whole = self._global_lengths(cells, lengths)
            rows, columns = (
                self.layout.positions(axis, whole[axis], cells.device)
                for axis in (self.rows, self.features)
            )
            train = whole[self.rows] if train is None else whole_number(train, "train")
            known = rows < train
            is_class = columns == whole[self.features] - 1
            if train:  # else there are none, and looking for them would wait for the device
                self._check_classes(cells, known, is_class)
            if isinstance(cache, KeyValueCache):
                cache.check_fit(self.spec, self.layout, cells.shape, whole)
            size = [whole[self.rows], whole[self.features], train]
        except _KINDS as refused:
            error = refused
        number = next((i for i, kind in enumerate(_KINDS) if isinstance(error, kind)), None)
        dims = {d for axis in (self.rows, self.features) for d in self.layout.shard_dims(axis)}
        texts = self.layout.bound.share(
            "a table",
            json.dumps([number, str(error), size]),
            [d for d in self.layout.mesh if d in dims],
        )
        if error is not None:
            raise error
        found = {rank: json.loads(text) for rank, text in texts.items()}
        for rank, (number, message, _) in found.items():
            if number is not None:
                raise _KINDS[number](f"rank {self.layout.bound.world_ranks[rank]}: {message}")
        if any(theirs != size for _, _, theirs in found.values()):
            label = "the rows, columns and training rows of a table (lengths, train)"
            raise self.layout.bound.disagreement(label, {r: str(s) for r, (*_, s) in found.items()})
        assert train is not None
        return whole, train, known, is_class

    def _check_classes(self, cells: Tensor, known: Tensor, is_class: Tensor) -> None:
        if cells.is_meta:  # shapes alone
            return
        shown = cells[:, known][..., is_class]
        wrong = shown[(shown < 0) | (shown >= self.unknown) | (shown != shown.floor())]
        wrong = wrong[~wrong.isnan()]
        if wrong.numel():
            raise IndexError(
                f"a training row has class {wrong[0].item():g}; model {self.spec.name!r} knows"
                f" classes 0 to {self.unknown - 1}, and NaN for none"
            )

    def _global_lengths(self, cells: Tensor, lengths: Mapping[str, int] | None) -> dict[str, int]:
        if cells.dim() != 3:
            raise ShapeError(
                f"cells must be (batch, rows, features + 1), found shape {tuple(cells.shape)}"
            )
        whole = {
            self.rows: cells.shape[1] * self.layout.size(self.rows),
            self.features: cells.shape[2] * self.layout.size(self.features),
        }
        for axis, n in (lengths or {}).items():
            whole[axis] = whole_number(n, f"the length of axis {axis!r}")
        for dim, axis in ((1, self.rows), (2, self.features)):
            if cells.shape[dim] != self.layout.local_length(axis, whole[axis]):
                raise ShapeError(
                    f"cells have {cells.shape[dim]} local {axis}, and this rank's part of"
                    f" {whole[axis]} is {self.layout.local_length(axis, whole[axis])}"
                )
        return whole

    def _embed(self, values: Tensor, columns: Tensor, is_class: Tensor, total: int) -> Tensor:
        """Tokens (b r c e) of standardised values (b r c 1), without the classes."""
        missing = local(self.missing)
        gaps = values.isnan().to(missing.dtype)
        identity = _identities(total, len(missing), missing.dtype, missing.device)[columns]  # c e
        identity = identity.masked_fill(is_class[:, None], 0.0)
        direction, offset = self.direction(identity), self.offset(identity)
        return values.nan_to_num(0.0) * direction + offset + gaps * missing

    def _labels(self, cells: Tensor, known: Tensor, is_class: Tensor) -> Tensor:
        """Embedded classes (batch, rows, embed) of the rank that holds the class column."""
        ids = cells.nan_to_num(self.unknown).masked_fill(~is_class, 0.0).sum(dim=2)  # b r
        return self.label(ids.long().masked_fill(~known, self.unknown))


@cached(64)
def _identities(columns: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fixed random vector per column, the same on every rank: (columns, embed)."""
    generator = torch.Generator().manual_seed(IDENTITY_SEED)
    drawn = torch.randn(columns, width, generator=generator, device="cpu")
    return upload(drawn.to(dtype), device)


@torch.no_grad()
def column_statistics(
    cells: Tensor, known: Tensor, layout: Layout, rows: str = "rows"
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per column over the training rows, (batch, columns) each.

    `cells` are (batch, rows, columns), local; `known` (rows,) is True for training rows. Sums run
    over the mesh dims that split the rows, in two passes so that a large mean does not swallow a
    small deviation. NaN counts nowhere. A constant column has deviation 0.

    >>> known = torch.tensor([True, True, False])
    >>> column_statistics(torch.tensor([[[1.0], [3.0], [9.0]]]), known, Layout.single())
    (tensor([[2.]]), tensor([[1.]]))
    """
    counted = known[:, None] & ~cells.isnan()  # b r c
    kept = cells.masked_fill(~counted, 0.0)

    def over_rows(*values: Tensor) -> Tensor:
        return layout.sum(torch.stack([x.sum(1) for x in values]), rows)

    total = over_rows(counted.to(cells.dtype), kept)
    count = total[0].clamp(min=1.0)
    mean = total[1] / count  # b c
    centred = cells - mean[:, None]
    (squares,) = over_rows(centred.masked_fill(~counted, 0.0).square())
    scale = (squares / count).sqrt()
    return mean, scale.masked_fill(scale <= 1e-6 * mean.abs(), 0.0)


@torch.no_grad()
def standardise_columns(cells: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Zero mean and unit variance per column, then squashed to (-4, 4).

    NaN stays NaN; a constant column, of scale 0, becomes 0.

    >>> standardise_columns(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[2.0]]), torch.ones(1, 1))
    tensor([[[-0.9797],
             [ 0.9797]]])
    """
    constant = (scale == 0)[:, None]
    centred = (cells - mean[:, None]) / scale.masked_fill(scale == 0, 1.0)[:, None]
    return 4.0 * torch.tanh(centred.masked_fill(constant, 0.0) / 4.0)

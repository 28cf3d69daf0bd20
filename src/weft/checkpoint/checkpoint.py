"""Checkpoints of any module on a layout: safetensors with a JSON index, resumed on any layout.

A folder holds one run, and a folder `step-N` in it one checkpoint:

    runs/a/step-000300/index.json                         the content, and every file's hash
                       rank-00000-5be1f07a.safetensors    the parts that rank 0 is first to hold
                       rank-00001-5be1f07a.safetensors    ...

The index comes last, renamed into place: a checkpoint is there when its index is. Nothing is
pickled, on disk or between ranks.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import operator
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import WeftError
from ..layout import Layout
from . import files
from .consistency import refuse_differing
from .files import CheckpointError, Index
from .fit import check_fit, extra_tensors, make_states, optimizer_state
from .metadata import decode, encode
from .shards import Piece, called, extra_modules, pieces


@dataclass(frozen=True)
class Loaded:
    """Where a run goes on: what `Checkpoints.load` found.

    Attributes:
        step: steps done, 0 in a new run.
        notes: what `save` was given to keep.
        path: the checkpoint's folder, None in a new run.

    >>> Loaded().step, Loaded().path
    (0, None)
    """

    step: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


class Checkpoints:
    """The checkpoints of one training run, in one folder that all ranks of a layout share.

    Parameters, saved buffers and optimizer states are stored whole, whatever held them: a run goes
    on bitwise on the layout that it was saved on, and to rounding on any other. Parameters may be
    plain and replicated (also under `DistributedDataParallel`) or DTensors (split heads,
    `fully_shard`). torch's random generators go on, too, where there are as many ranks as before.
    Extra states of modules (`get_extra_state`) are kept where notes would be, and given to
    `set_extra_state`: one that a module unpickles by itself is unpickled there. Checkpoints of
    earlier versions have those alone that are tensors; others stay as they are, with a warning.

    Args:
        folder: where the `step-N` folders are; the first `save` makes it.
        layout: a bound layout, all of whose ranks call `save` and `load` together.

    >>> import tempfile
    >>> model, folder = nn.Linear(3, 1), tempfile.mkdtemp()
    >>> checkpoints = Checkpoints(folder, Layout.single())
    >>> checkpoints.load(model).step
    0
    >>> checkpoints.save(7, model, notes={"epoch": 2}).name
    'step-000007'
    >>> Checkpoints(folder, Layout.single()).load(nn.Linear(3, 1)).notes
    {'epoch': 2}
    """

    def __init__(self, folder: str | Path, layout: Layout) -> None:
        self.folder, self.layout, self._alone = Path(folder), layout, False

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending by number, as rank 0 sees them."""
        return self._on_first(lambda: files.complete_steps(self.folder))

    def check_writable(self) -> None:
        """Raises `CheckpointError` on every rank unless all can write to the folder: ask early."""

        def probe() -> None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()
            except OSError as error:
                raise CheckpointError(
                    f"{self.folder} cannot be written: {error.strerror}"
                ) from error

        self._everywhere(probe)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Makes the folder, and keeps other runs out: two would delete each other's files.

        `save` does so by itself while it writes. Raises `CheckpointError` on every rank if another
        run is in there.
        """
        if self._alone:
            yield
            return
        held: list[IO[str]] = []
        self._on_first(lambda: held.append(files.lock(self.folder)))
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            for file in held:
                file.close()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes the checkpoint of a step, whole or not at all, in place of one that is there.

        Replicas (layouts bound to slices of one mesh) do not share a folder: one of them saves,
        and all may load.

        Args:
            step: how many steps are done.
            model: any module on the layout.
            optimizer: of the model's parameters.
            notes: what else to keep: a scheduler's state, a seed, a place in the data. They come
                back equal: numbers, strings, None, bytes, lists, tuples, dicts with any keys,
                `Counter`s and small tensors, in one another. Ranks that give notes give the same
                ones.

        Returns:
            The checkpoint's folder.

        Raises:
            ShapeError: on every rank, where they are at different steps.
            CheckpointError: on every rank, where one of them could not write, or has notes, a
                module's extra state or an optimizer's options that cannot be kept; or where
                ranks' notes, or extra states, or tensors that lie whole on every rank differ, such
                as the statistics of a `BatchNorm`; or where other ranks of the world write to the
                folder, or wrote this step. On GPUs, ranks that do not split data may have other
                optimizer states, and weights and buffers within 1 % of their norm; vectors of
                weights that differ by more give a warning, and rank 0's are kept.
        """
        if self.layout.mesh:
            self.layout.bound.agree("the checkpoint", f"step {step}")
        extra: dict[str, Any] = {}

        def check() -> list[Any]:
            for name, module in extra_modules(model).items():
                extra[name] = encode(module.get_extra_state(), called(name))
            return _checked(step, model, optimizer, notes)

        number, kept = _same(self._everywhere(check))
        mine = pieces(model, optimizer, self.layout)
        doubt = refuse_differing(self.layout, self._everywhere, model, mine, extra)
        with self.alone():
            path = self._write(number, model, optimizer, kept, mine, extra)
        if doubt and self.layout.rank == 0:
            warnings.warn(doubt, stacklevel=2)
        return path

    def _write(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        notes: dict[str, Any],
        mine: Mapping[str, Piece],
        extra: dict[str, Any],
    ) -> Path:
        path, world = files.step_folder(self.folder, step), _world(self.layout)
        mine = {**mine, **_random(self.layout)}
        token = self._on_first(lambda: _prepared(path, world))
        name = f"rank-{self.layout.rank:05d}-{token}.safetensors"
        written = self._everywhere(lambda: [name, _written(path / name, mine)])

        def commit() -> None:
            index = Index(
                format=files.FORMAT,
                step=step,
                ranks=self.layout.world_size,
                world=world,
                notes=notes,
                extra=extra,
                optimizer=optimizer and optimizer_state(model, optimizer),
                files=dict(written),
                tensors=files.collect(path, dict(written)),
            )
            files.commit(path, index)

        self._on_first(commit)
        return path

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Loaded:
        """Reads the latest whole checkpoint into the model and its optimizer.

        One that is damaged is passed over for the one before it, with a warning on rank 0. A
        folder without any is a new run's: nothing changes.

        Args:
            model: any module on the layout, of the parameters that were saved.
            optimizer: of the model's parameters, where one was saved.

        Returns:
            The steps done and the notes that were saved with them.

        Raises:
            CheckpointError: on every rank, if all are damaged, or if the latest whole one is of
                another model or optimizer; nothing has changed then.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            path = files.step_folder(self.folder, step)
            errors = self._errors(lambda path=path: self._verify(path))
            if not errors:
                self._warn(damaged, path)
                return self._restore(path, model, optimizer)
            damaged.append(errors[0])
        if damaged:
            raise CheckpointError(f"{self.folder} has no whole checkpoint: {'; '.join(damaged)}")
        return Loaded()

    def _verify(self, path: Path) -> None:
        """Each rank looks at some of the files."""
        index = files.read_index(path)
        mine = sorted(index.files)[self.layout.rank :: self.layout.world_size]
        files.verify(path, index, mine)

    def _restore(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Loaded:
        index = files.read_index(path)
        self._everywhere(lambda: check_fit(path, index, model, optimizer, self.layout))
        modules, kept = extra_modules(model), set()
        random = {n: p for n, p in _random(self.layout).items() if n in index.tensors}
        if index.ranks != self.layout.world_size:
            random = {}

        def fill() -> None:
            if optimizer is not None:
                make_states(index, model, optimizer)
            wanted = pieces(model, optimizer, self.layout) | random
            for name, part in wanted.items():
                files.read_into(path, index.tensors[name], name, part)
            for name, state in _extra_states(path, index, model).items():
                modules[name].set_extra_state(state)
                kept.add(name)
            _set_random(random)

        self._everywhere(fill)
        left = [called(name) for name in modules if name not in kept]
        if left and self.layout.rank == 0:
            warnings.warn(
                f"{path} was written before extra states were kept:"
                f" {' and '.join(left)} {'stay as they are' if left[1:] else 'stays as it is'}",
                stacklevel=3,
            )
        return Loaded(index.step, decode(index.notes), path)

    # -- what all ranks do -------------------------------------------------------------------------

    def _on_first(self, do: Callable[[], Any]) -> Any:
        """Rank 0's result on every rank; an error there is raised on every rank."""
        return self._everywhere(lambda: do() if self.layout.rank == 0 else None)[0]

    def _everywhere(self, do: Callable[[], Any]) -> list[Any]:
        """Every rank's result, as JSON; an error on one of them is raised on every rank."""
        results, errors = self._gathered(do)
        if errors:
            raise CheckpointError(errors[0])
        return results

    def _errors(self, do: Callable[[], Any]) -> list[str]:
        return self._gathered(do)[1]

    def _gathered(self, do: Callable[[], Any]) -> tuple[list[Any], list[str]]:
        try:
            outcome = {"done": do()}
        except WeftError as error:
            outcome = {"failed": str(error)}
        answers = [
            json.loads(a) for a in self.layout.bound.all_gather_text(json.dumps(outcome)).values()
        ]
        errors = [answer["failed"] for answer in answers if "failed" in answer]
        return [answer.get("done") for answer in answers], errors

    def _warn(self, damaged: Sequence[str], path: Path) -> None:
        if damaged and self.layout.rank == 0:
            warnings.warn(f"{'; '.join(damaged)}; going on from {path}", stacklevel=3)


def missing(folder: Path) -> str:
    """Why a folder has nothing to resume from, and where something might be."""
    if not folder.is_dir():
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
        runs = [p.name for p in siblings if p.is_dir() and any(p.glob("step-*"))]
        near = difflib.get_close_matches(folder.name, runs, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"there is no folder {folder} to resume from{hint}"
    if (folder / files.INDEX).exists():
        return f"{folder} is one checkpoint; resume from the folder that it lies in"
    if any(folder.glob("step-*/.metadata")):
        return (
            f"{folder} has checkpoints of another format, which hold pickles; weft reads "
            "safetensors with a JSON index only"
        )
    return f"{folder} has no complete checkpoint to resume from"


def _checked(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    notes: Mapping[str, Any] | None,
) -> list[Any]:
    """The step's number, and the notes as JSON, {} if none; refuses what cannot be kept."""
    if not hasattr(step, "__index__") or not 0 <= operator.index(step) < 10**18:
        raise CheckpointError(f"step is {step!r}; a checkpoint's is a whole number from 0 on")
    if optimizer is not None:
        optimizer_state(model, optimizer)
    return [operator.index(step), encode(dict(notes or {}), "notes")]


def _extra_states(path: Path, index: Index, model: nn.Module) -> dict[str, Any]:
    """The modules' extra states that a checkpoint has."""
    if index.extra is not None:
        return {name: decode(value) for name, value in index.extra.items()}
    found = {}
    for name, key in extra_tensors(index, model).items():
        stored = index.tensors[key]
        found[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        start = (0,) * len(stored.shape)
        files.read_into(path, stored, key, Piece(found[name], tuple(stored.shape), start, True))
    return found


def _same(checked: Sequence[list[Any]]) -> list[Any]:
    """What every rank has, once those that give notes give the same ones."""
    given = [(rank, notes) for rank, (_, notes) in enumerate(checked) if notes]
    by_key = [(rank, _texts(notes)) for rank, notes in given]
    for rank, texts in by_key[1:]:
        first, other = by_key[0]
        for key in other | texts:
            a, b = other.get(key, "missing"), texts.get(key, "missing")
            if a != b:
                raise CheckpointError(
                    f"notes[{key!r}] is {a[:80]} on rank {first} and {b[:80]} on rank {rank}: a"
                    " checkpoint has one set of notes; gather what each rank has, and give that on"
                    " every rank, or on one"
                )
    return [checked[0][0], given[0][1] if given else {}]


def _texts(notes: dict[str, Any]) -> dict[Any, str]:
    """By key, what tells equal notes from others."""
    return {
        key: json.dumps(encode(value, "notes"), sort_keys=True)
        for key, value in decode(notes).items()
    }


def _world(layout: Layout) -> list[int]:
    """The numbers in the world of a layout's ranks."""
    if layout.mesh:
        return [*layout.bound.world_ranks]
    return [dist.get_rank() if dist.is_initialized() else 0]


def _prepared(path: Path, world: Sequence[int]) -> str:
    """Makes a checkpoint's folder; returns what tells this writing of it from any other."""
    files.check_owner(path, world)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be made: {error.strerror}") from error
    return secrets.token_hex(4)


def _written(path: Path, mine: Mapping[str, Piece]) -> dict:
    """Writes this rank's file into the folder that the first rank made."""
    try:
        return files.write_file(path, mine).model_dump()
    except CheckpointError as error:
        if path.parent.is_dir():
            raise
        raise CheckpointError(
            f"{path.parent} is not there on this rank, though rank 0 made it: all ranks write to"
            " one folder, which they share"
        ) from error


def _random(layout: Layout) -> dict[str, Piece]:
    """The states of this rank's random generators, which only it holds."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        f"random/{device}/{layout.rank}": Piece(state, tuple(state.shape), (0,), first=True)
        for device, state in states.items()
    }


def _set_random(states: Mapping[str, Piece]) -> None:
    for name, state in states.items():
        on_gpu = name.startswith("random/cuda")
        (torch.cuda.set_rng_state if on_gpu else torch.set_rng_state)(state.local)

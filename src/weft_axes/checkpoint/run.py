"""Checkpoints of a training run: any module on any layout, resumed on any other.

A folder holds one run, and a folder `step-N` in it one checkpoint, see `weft.checkpoint.folder`:

    runs/a/step-000300/index.json
                       rank-00000-5be1f07a.safetensors
                       ...

Tensors and values have the names that `torch.distributed.checkpoint` gives a state dict of "model",
"optimizer" and "step", so a program's own `dcp.save` and `dcp.load` write and read the same folders
(`SafetensorsWriter`, `SafetensorsReader`). Ranks agree through the layout, not through dcp: so that
slices of meshes and threads save, too, no rank waits without a limit, and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import operator
import secrets
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft._opening import check_folder, open_to_lock
from weft.layout import Layout

from . import folder as files
from .folder import INDEX, PICKLED, CheckpointError, Index, failing, read_index
from .replicated import refuse_differing
from .same_files import DifferentFilesError, agreed_index
from .shards import STATE, Shard, everywhere, is_extra, on_first, saved_state, shards
from .state import check_state_fits, fill_from
from .values import decode, encode

LOCK = ".lock"
#: Seconds that a run waits for a folder that another one has.
LIMIT = 5.0


@dataclass(frozen=True)
class Loaded:
    """The point from which a run goes on, as `Checkpoints.load` read it.

    Attributes:
        step: steps done, 0 in a new run.
        notes: those given to `save`.
        path: the checkpoint's folder, None in a new run.

    >>> Loaded().step, Loaded().path
    (0, None)
    """

    step: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


class Checkpoints:
    """The checkpoints of one training run, in one folder that all ranks of a layout share.

    A run goes on bitwise on the layout that it was saved on, and to rounding on any other.
    Parameters may be plain and replicated (also under `DistributedDataParallel`) or DTensors (split
    heads, `fully_shard`). torch's random generators go on, too, where there are as many ranks as
    before. Extra states of modules (`get_extra_state`) are kept as notes are, and given to
    `set_extra_state`: one that a module unpickles by itself is unpickled there.

    Digests in a checkpoint tell damage. They are no signature, see `weft.checkpoint.folder`.

    Args:
        folder: of the `step-N` folders; the first `save` makes it.
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
        return on_first(self.layout, lambda: complete_steps(self.folder))

    def check_writable(self) -> None:
        """Raises `CheckpointError` on every rank unless all can write to the folder: ask early."""

        def probe() -> None:
            with failing(self.folder, "written"):
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()

        everywhere(self.layout, probe)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Makes the folder, and keeps other runs out: two would delete each other's files.

        `save` does so by itself while it writes. Raises `CheckpointError` on every rank if another
        run is in there.
        """
        if self._alone:
            yield
            return
        locks: list[BinaryIO] = []
        on_first(self.layout, lambda: locks.append(_lock(self.folder)))
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            for file in locks:
                file.close()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes the checkpoint of a step completely or not at all, replacing one that is there.

        Replicas (layouts bound to slices of one mesh) do not share a folder: one of them saves,
        and all may load.

        Args:
            step: how many steps are done.
            model: any module on the layout.
            optimizer: of the model's parameters.
            notes: further values to keep: a scheduler's state, a seed, a place in the data. They
                come back equal: numbers, strings, None, bytes, lists, tuples, dicts with any keys,
                `Counter`s and small tensors, nested. Ranks that give notes give the same ones.

        Returns:
            The checkpoint's folder.

        Raises:
            ShapeError: on every rank, if they are at different steps.
            CheckpointError: on every rank, if one of them could not write, or has notes, extra
                states or options of an optimizer that cannot be kept; if notes, extra states or
                replicated tensors differ between ranks, such as the statistics of a `BatchNorm`; or
                if other ranks of the world write to the folder, or wrote this step. On GPUs, only
                ranks that split data are compared: others round differently, and rank 0's is kept.
        """
        if self.layout.mesh:
            self.layout.bound.agree("the checkpoint", f"step {step}")
        values: dict[str, Any] = {}

        def check() -> list[Any]:
            if not hasattr(step, "__index__") or not 0 <= operator.index(step) < 10**18:
                raise CheckpointError(f"step is {step!r}; it must be an integer from 0 on")
            for name, value in saved_state(model, optimizer).items():
                if is_extra(name) or not isinstance(value, Tensor):
                    values[name] = encode(value, name, tensors=not name.startswith(STATE))
            return [operator.index(step), encode(dict(notes or {}), "notes")]

        number, kept = _same_notes(everywhere(self.layout, check))
        parts = shards(model, optimizer, self.layout)
        refuse_differing(self.layout, model, parts, values)
        world = _world(self.layout)
        values |= {"step": number, "notes": kept, "ranks": self.layout.world_size, "world": world}
        if optimizer is not None:
            values["optimizer.kind"] = type(optimizer).__name__
        path = step_folder(self.folder, number)
        with self.alone():
            token = on_first(self.layout, lambda: _prepared(path, world))
            parts |= _random(self.layout)
            blocks = {
                name: (part.local, part.start, part.shape)
                for name, part in parts.items()
                if part.first and (part.local.numel() or 0 in part.shape)
            }
            name = files.file_name(self.layout.rank, token)
            written = everywhere(self.layout, lambda: files.write_file(path / name, blocks))
            on_first(self.layout, lambda: files.commit(path, written, values) and None)
        return path

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Loaded:
        """Reads the latest undamaged checkpoint into the model and its optimizer.

        A damaged one is passed over for the one before it, with a warning on rank 0. A folder
        without any is a new run's: nothing changes.

        Args:
            model: any module on the layout, of the parameters that were saved.
            optimizer: of the model's parameters, if one was saved.

        Returns:
            The steps done and the notes that were saved with them; of a checkpoint that a program
            wrote with `dcp.save`, the step in its folder's name if it has none, and no notes.

        Raises:
            CheckpointError: on every rank, if all are damaged, if ranks see folders of other
                contents, or if the latest undamaged one is of another model or optimizer; nothing
                has changed then.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            path = step_folder(self.folder, step)
            try:
                index = agreed_index(path, self.layout)
            except DifferentFilesError:
                raise  # an earlier step may differ as well
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            if damaged and self.layout.rank == 0:
                warnings.warn(f"{'; '.join(damaged)}; going on from {path}", stacklevel=2)
            return self._restore(path, index, model, optimizer)
        if damaged:
            raise CheckpointError(f"{self.folder} has no whole checkpoint: {'; '.join(damaged)}")
        return Loaded()

    def _restore(
        self, path: Path, index: Index, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Loaded:
        step, notes = index.values.get("step"), decode(index.values.get("notes", {}), f"{path}")
        everywhere(
            self.layout, lambda: check_state_fits(path, index, model, optimizer, self.layout)
        )
        random = {n: p for n, p in _random(self.layout).items() if n in index.tensors}
        if index.values.get("ranks") != self.layout.world_size:
            random = {}

        def fill() -> None:
            fill_from(path, index, model, optimizer, self.layout)
            for name, state in random.items():
                files.read_into(path, name, index.tensors[name], state.local, state.start)
                on_gpu = name.startswith("random.cuda")
                (torch.cuda.set_rng_state if on_gpu else torch.set_rng_state)(state.local)

        everywhere(self.layout, fill)
        number = step if isinstance(step, int) else int(path.name.removeprefix("step-"))
        return Loaded(number, notes if isinstance(notes, Mapping) else {}, path)


def complete_steps(folder: Path) -> list[int]:
    """The numbers of the `step-N` folders that have an index, ascending by number."""
    with failing(folder, "read"):
        if not folder.exists():
            return []
        names = [p.name.removeprefix("step-") for p in folder.iterdir() if p.name[:5] == "step-"]
        numbers = (int(n) for n in names if n.isdecimal() and n.isascii() and len(n) < 19)
        return sorted(n for n in set(numbers) if (step_folder(folder, n) / INDEX).exists())


def notes_of(path: Path) -> Mapping[str, Any]:
    """The notes of the checkpoint in a folder; raises `CheckpointError` for a damaged one."""
    notes = decode(read_index(path).values.get("notes", {}), f"{path}")
    return notes if isinstance(notes, Mapping) else {}


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint.

    >>> step_folder(Path("runs/a"), 12).name
    'step-000012'
    """
    return folder / f"step-{step:06d}"


def missing(folder: Path) -> str:
    """Why a folder has nothing to resume from, and where something might be."""
    if not folder.is_dir():
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
        runs = [p.name for p in siblings if p.is_dir() and any(p.glob("step-*"))]
        near = difflib.get_close_matches(folder.name, runs, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"there is no folder {folder} to resume from{hint}"
    if (folder / INDEX).exists():
        return f"{folder} is one checkpoint; resume from the folder that contains it"
    if any(folder.glob("step-*/.metadata")):
        return f"{folder} has checkpoints {PICKLED}"
    return f"{folder} has no complete checkpoint to resume from"


def _lock(folder: Path) -> BinaryIO:
    """Takes a run's folder: until the file is closed, or its process ends, no other run gets it."""
    with failing(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
    with failing(folder / LOCK, "written"):
        file = open_to_lock(folder / LOCK)
    until = time.monotonic() + LIMIT
    while not _taken(file):
        if time.monotonic() > until:
            file.close()
            raise CheckpointError(
                f"another run writes to {folder}; wait for it, or give this one another folder; of"
                " replicas, layouts bound to slices of one mesh, let one save"
            )
        time.sleep(0.1)
    return file


def _taken(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can be kept out
        return True
    return True


def _same_notes(checked: Sequence[list[Any]]) -> list[Any]:
    """The step and the notes of all ranks, once those that give notes give the same ones."""
    texts = [json.dumps(notes, sort_keys=True) if notes else "" for _, notes in checked]
    given = {rank: text for rank, text in enumerate(texts) if text}
    first = min(given, default=0)
    for rank, text in given.items():
        if text != given[first]:
            raise CheckpointError(
                f"notes are {given[first][:200]} on rank {first} and {text[:200]} on rank {rank}: a"
                " checkpoint stores one set of notes; gather every rank's, and give the same on"
                " every rank, or on one"
            )
    return [checked[0][0], checked[first][1]]


def _world(layout: Layout) -> list[int]:
    """The numbers in the world of a layout's ranks."""
    if layout.mesh:
        return [*layout.bound.world_ranks]
    return [dist.get_rank() if dist.is_initialized() else 0]


def _prepared(path: Path, world: Sequence[int]) -> str:
    """Makes a checkpoint's folder; returns the token that tells this writing of it from others."""
    try:
        wrote = read_index(path).values.get("world")
    except CheckpointError:  # none, or a damaged one: nothing is lost
        wrote = None
    if isinstance(wrote, list) and not any(rank in world for rank in wrote):
        raise CheckpointError(
            f"{path} was saved by ranks {wrote} of the world, and would be replaced by ranks"
            f" {[*world]}; of layouts bound to slices of one mesh, let one save, or give each"
            " another folder"
        )
    with failing(path, "made"):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
        check_folder(path)
    return secrets.token_hex(4)


def _random(layout: Layout) -> dict[str, Shard]:
    """The states of this rank's random generators, which only it holds."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        f"random.{device}.{layout.rank}": Shard(state, tuple(state.shape), (0,), first=True)
        for device, state in states.items()
    }

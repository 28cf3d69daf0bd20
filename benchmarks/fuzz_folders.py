"""Damaged and forged files of `benchmarks.fuzz`: checkpoints, weights and traces.

A damaged file must be refused, or give the same data as before. A forged one, whose digests were
made anew, may give other data, since digests without a key prove no origin; but like a damaged one
it must cost little, and raise nothing but weft's own errors.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import weft
from weft.checkpoint import Checkpoints, SafetensorsReader
from weft.launch.trace import Trace
from weft_cli.inspect.blackbox import describe_run, load_records
from weft_models.models import ModelSpec, compose, from_pretrained, save_pretrained

#: Values that take the place of any in a JSON document.
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 10**9, 10**30, 1.5, float("nan"), float("inf"), "", "x", "\x1b[2J",
    "../x", "float32", "int64", "rank-00000-0a.safetensors", "0-99999999", "#9", [], {}, [[]],
    [1] * 50, {"<tuple>": 3}, {"<tensor>": ["float32", [10**12], [1.0]]}, {"<dict>": [[[], 1]]},
)  # fmt: skip
DEEP = "[" * 100_000
INDEX = "index.json"


class Folders:
    """Makes a folder of each kind once; damages copies of them, and has them read."""

    def __init__(self, folder: Path) -> None:
        spec = ModelSpec.load("tabular")
        small = spec.sizes.model_copy(update={"embed": 16, "heads": 2, "kv_heads": 2})
        self.folder = folder / "made"
        self.model = compose(spec.model_copy(update={"sizes": small}))
        self.layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.layer.parameters())
        self.layer(torch.ones(4, 3)).sum().backward()
        self.optimizer.step()
        notes = {"order": [3, 1], "plan": {1: (2.5, torch.ones(2))}}
        run = Checkpoints(self.folder / "run", weft.Layout.single())
        weights = save_pretrained(self.model, self.folder / "weights" / "w.safetensors")
        made = {
            "checkpoint": run.save(1, self.layer, self.optimizer, notes),
            "weights": weights.parent,
            "trace": self._traces(),
        }
        self.files = {
            kind: {p.name: p.read_bytes() for p in sorted(path.iterdir())}
            for kind, path in made.items()
        }
        shutil.rmtree(self.folder)

    def _traces(self) -> Path:
        """Three ranks, of which one has failed and two wait."""
        traces = [Trace(rank, 3, "a1b2", self.folder) for rank in range(3)]
        for trace in traces:
            for number in range(6):
                trace.call("an attention call", number, ((0, 2),), number, "mask Causal")
                with trace.step("ring-3", "ring", "kv", number, 0, ((0, 1),), ((2, 2),), 512):
                    pass
            trace.collective("ring-3", "ring", "a vote", ((0, 2),), 0).__enter__()
        folder = traces[0].path.parent
        for rank, trace in enumerate(traces):
            lines = [line for line in trace.content().split(b"\n") if line.strip(b" \0")]
            top = json.dumps({"kind": "copy", "written": 5.0, "by": 0, "process": "gone"}).encode()
            (folder / f"weft-rank-{rank}.jsonl").write_bytes(b"\n".join([top, *lines, b""]))
            trace.close()
        return folder

    def feed(self, rng: random.Random) -> tuple[str, object, Callable[[], tuple[str, str]]]:
        """A kind of folder, its files, and what reads them."""
        kind = rng.choice([*self.files])
        files = dict(self.files[kind])
        name = rng.choice([*files])
        files[name] = _damaged(rng, files[name])
        forged = kind == "trace" or kind == "weights" or rng.random() < 0.5
        if forged and INDEX in files:
            _seal(files)
        shutil.rmtree(self.folder, ignore_errors=True)
        path, odd = self.folder / ("step-000001" if kind == "checkpoint" else kind), []
        path.mkdir(parents=True)
        for file, content in files.items():
            how = rng.random()
            if how > 0.06:
                (path / file).write_bytes(content)
            elif how > 0.02:
                odd.append(_put_odd(rng, path / file, content, self.folder))
        read = {
            "checkpoint": self._checkpoint,
            "weights": lambda path: from_pretrained(path / "w.safetensors") and None,
            "trace": lambda path: describe_run(load_records(path)) and None,
        }[kind]

        def call() -> tuple[str, str]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same = read(path)
            if same is False and not forged:
                return "other data", f"{kind}: a damaged folder was taken"
            if odd and not forged and same is not None:
                return "odd file", f"{kind}: {odd} was taken for a file"
            return "taken", ""

        return kind, {n: c for n, c in files.items() if c != self.files[kind].get(n)}, call

    def _checkpoint(self, path: Path) -> bool | None:
        """Reads it by weft, and by dcp; True if both give what was saved, None if none is there."""
        layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(layer.parameters())
        loaded = Checkpoints(self.folder, weft.Layout.single()).load(layer, optimizer)
        if loaded.path is None:
            return None
        same = [loaded.step == 1, str(optimizer.state_dict()) == str(self.optimizer.state_dict())]
        state = {"model": {k: torch.zeros_like(v) for k, v in self.layer.state_dict().items()}}
        SafetensorsReader(path).read_metadata()
        try:
            dcp.load(state, storage_reader=SafetensorsReader(path), no_dist=True)
        except CheckpointException as error:  # of torch, around that of weft
            raise next(iter(error.failures.values()))[0] from None
        for weights in (layer.state_dict(), state["model"]):
            same += [torch.equal(t, weights[n]) for n, t in self.layer.state_dict().items()]
        return all(same)


def _put_odd(rng: random.Random, path: Path, content: bytes, folder: Path) -> str:
    """Put a link to the content, a pipe, a folder or a very large file in place of a file."""
    kind = rng.choice(("link", "pipe", "folder", "hole"))
    if kind == "link":
        (folder / f"linked-{path.name}").write_bytes(content)
        path.symlink_to(folder / f"linked-{path.name}")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(30 << 30)
    return kind


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """A file with one to three changes, of bytes or of what its JSON says."""
    for _ in range(rng.randint(1, 3)):
        change = rng.choice((_bytes, _bytes, _json, _json, _header))
        data = change(rng, data)
    return data


def _bytes(rng: random.Random, data: bytes) -> bytes:
    at, other = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice(
        (
            data[:at] + data[other:],
            data[:at],
            data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:],
            data[:at] + data[at:other] * 2 + data[other:],
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            data[:at] + DEEP.encode() + data[at:],
            b"",
        )
    )


def _json(rng: random.Random, data: bytes) -> bytes:
    """One value of a JSON document, or of one of its lines, becomes another."""
    lines = data.split(b"\n")
    for _ in range(5):
        at = rng.randrange(len(lines))
        try:
            document = json.loads(lines[at])
        except (ValueError, RecursionError):
            continue
        lines[at] = json.dumps(_changed(rng, document)).encode()
        break
    return b"\n".join(lines)


def _header(rng: random.Random, data: bytes) -> bytes:
    """The header or the metadata of a safetensors file say something else, in the right length."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        metadata = header.get("__metadata__", {})
        if metadata and rng.random() < 0.5:
            key = rng.choice([*metadata])
            text = json.dumps(_changed(rng, json.loads(metadata[key])))
            metadata[key] = rng.choice((text, DEEP, "", "{}"))
        else:
            header = _changed(rng, header)
        text = json.dumps(header).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return data
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _changed(rng: random.Random, value: Any) -> Any:
    """A JSON value in which one value, key or entry is another."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        if isinstance(value, int) and rng.random() < 0.5:
            return value + rng.choice((-1, 1, 2**20))
        return rng.choice(ODD)
    if isinstance(value, dict):
        key = rng.choice([*value])
        how = rng.random()
        if how < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.16:
            other = rng.choice([*value, "x", "model.0.weight"])
            return {(other if k == key else k): v for k, v in value.items()}
        return value | {key: _changed(rng, value[key])}
    at = rng.randrange(len(value))
    if rng.random() < 0.1:
        return value[:at] + value[at + 1 :]
    return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]


def _seal(files: dict[str, bytes]) -> None:
    """Gives files and index the digests that they would have been written with."""
    try:
        index = json.loads(files[INDEX])["index"]
        for name, file in index["files"].items():
            content = files.get(name, b"")
            file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        text = json.dumps(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    digest = hashlib.sha256(text.encode()).hexdigest()
    files[INDEX] = f'{{"sha256":"{digest}","index":{text}}}'.encode()

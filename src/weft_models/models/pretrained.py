"""Trained weights in one safetensors file, with the model file that they belong to.

    save_pretrained     on any layout: complete tensors, in one file that rank 0 writes
    from_pretrained     on any layout: every rank reads its part of the same file

The file's metadata hold the model file and notes on the training, as JSON. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from weft._opening import replacing
from weft.declare import catalog
from weft.errors import DeclarationError, did_you_mean
from weft.layout import Layout
from weft_axes.checkpoint.folder import CheckpointError, failing, open_tensors
from weft_axes.checkpoint.same_files import agree_on_file
from weft_axes.checkpoint.shards import (
    MODEL,
    Shard,
    everywhere,
    extra_modules,
    gathered,
    in_words,
    on_first,
    shards,
)
from weft_axes.checkpoint.values import decode, encode

from ..declare.model_file import ModelSpec
from .composer import bound_layout, compose
from .model import Model

FORMAT = "weft weights 1"


def save_pretrained(model: Model, path: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
    """Writes a model's weights and its model file; all ranks of its layout call this.

    Args:
        model: of `weft.compose`, whatever holds its parameters: plain, split heads, FSDP2.
        path: of the file, which is replaced in one instant.
        notes: other plain values to store, rank 0's: how it was trained. They load unchanged.

    Returns:
        The path.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write, or has notes that cannot be kept; or
            if a module has an extra state, which `from_pretrained` could give to nobody.

    >>> import tempfile
    >>> path = save_pretrained(compose("tabular"), tempfile.mkdtemp() + "/weights.safetensors")
    >>> from_pretrained(path).spec.name
    'tabular'
    """
    path, layout = Path(path), model.layout
    tensors = {name: gathered(part, layout) for name, part in _weights(model, layout).items()}

    def write() -> None:
        for name in extra_modules(model):
            raise CheckpointError(
                f"{path} cannot be written: {in_words(name)} is no weight, and no module of a model"
                " file takes one; weft.checkpoint.Checkpoints keeps it"
            )
        facts = {
            "format": FORMAT,
            "model": model.spec.model_dump(mode="json", exclude_unset=True),
            "notes": encode(dict(notes or {}), f"{path} cannot be written: notes"),
        }
        with failing(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                save_file(tensors, partial, metadata={"weft": json.dumps(facts)})

    on_first(layout, write)
    return path


def from_pretrained(
    name_or_path: str | Path,
    layout: Layout | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A model with the weights of a file, on any layout.

    Args:
        name_or_path: a file of `save_pretrained`, or the name of weights that ship:
            `"table_classifier"`.
        layout: of the model, default one device; built if it was not yet.
        device: of the weights.
        dtype: of the weights, default the file's.

    Raises:
        DeclarationError: on every rank, if one of them has no such file.
        CheckpointError: on every rank, if ranks have files of other contents, or the file is
            damaged, not of weft, or has weights that are not finite.

    >>> import tempfile
    >>> path = save_pretrained(compose("pair"), tempfile.mkdtemp() + "/pair.safetensors")
    >>> from_pretrained(path, dtype=torch.float64).spec.head
    'pair'
    """
    layout = bound_layout(layout)
    everywhere(layout, lambda: pretrained_spec(name_or_path) and None)  # before all is read
    path = _path(name_or_path)
    agree_on_file(layout, path)
    spec = pretrained_spec(name_or_path)
    with failing(path, "read"), open_tensors(path, links=True) as file:
        if dtype is None:
            dtype = next((file.get_tensor(name).dtype for name in file.keys()), None)  # noqa: SIM118
    shapes = compose(spec, layout, device="meta", dtype=dtype)
    everywhere(shapes.layout, lambda: _check_shapes(path, _weights(shapes, shapes.layout)))
    model = compose(spec, shapes.layout, device=device, dtype=dtype)
    everywhere(model.layout, lambda: _fill(path, _weights(model, model.layout)))
    model.eval()
    return model


def pretrained_spec(name_or_path: str | Path) -> ModelSpec:
    """The model file that a file of weights has, without reading the weights.

    >>> pretrained_spec("table_classifier").axes
    ('batch', 'rows', 'features', 'embed')
    """
    path = _path(name_or_path)
    model = read_notes(path)["model"]
    model.get("train", {}).pop("evaluate_every", None)  # files of before may have it
    return ModelSpec.from_dict(model, source=f"{path}: its model file")


def read_notes(path: str | Path) -> dict[str, Any]:
    """Metadata of a file of weights: `model`, the model file, and `notes`."""
    with failing(Path(path), "read"):
        with open_tensors(Path(path), links=True) as file:
            facts = json.loads((file.metadata() or {}).get("weft", "{}"))
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is no file of weft.models.save_pretrained: its metadata do not say"
                f" {FORMAT!r}"
            )
        if not isinstance(facts.get("model"), dict):
            raise ValueError("its metadata hold no model file")
    return facts | {"notes": decode(facts.get("notes", {}), f"{path}: notes")}


def _weights(model: nn.Module, layout: Layout) -> dict[str, Shard]:
    return {n.removeprefix(MODEL): part for n, part in shards(model, None, layout).items()}


def _path(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".safetensors"):
        path = Path(text)
        if not path.is_file():
            raise DeclarationError(f"there is no file {text!r}")
        return path
    folder = catalog.folder("models")
    shipped = sorted(p.stem for p in folder.glob("*.safetensors"))
    if text not in shipped:
        raise DeclarationError(
            f"no weights {text!r} ship with weft{did_you_mean(text, shipped)}; or give a"
            " path to a .safetensors"
        )
    return folder / f"{text}.safetensors"


def _check_shapes(path: Path, parts: Mapping[str, Shard]) -> None:
    """Refuses a file with other tensors than its model's, before the model is made."""
    with failing(path, "read"), open_tensors(path, links=True) as file:
        names = {*file.keys()}
        if names != parts.keys():
            odd = sorted(names ^ parts.keys())[0]
            raise CheckpointError(f"{path} does not fit its model file: tensor {odd!r}")
        for name, part in parts.items():
            if (shape := tuple(file.get_slice(name).get_shape())) != part.shape:
                raise CheckpointError(f"{path}: {name!r} has shape {shape}, not {part.shape}")


@torch.no_grad()
def _fill(path: Path, parts: Mapping[str, Shard]) -> None:
    """Copies this rank's parts of the stored tensors into the model's; all must be finite."""
    with failing(path, "read"), open_tensors(path, links=True) as file:
        for name, part in parts.items():
            stored = file.get_slice(name)
            cut = tuple(slice(at, at + n) for at, n in zip(part.start, part.local.shape))
            local = stored[cut] if cut else file.get_tensor(name)
            if not local.isfinite().all():
                raise CheckpointError(
                    f"{path}: {name!r} has numbers that are not finite, so every prediction would"
                    " be NaN; train again from a checkpoint before that, with a lower learning rate"
                )
            part.local.copy_(local)

"""Trained weights in one safetensors file, with the model file that they belong to.

    save_pretrained     on any layout: every tensor whole, in one file that rank 0 writes
    load_pretrained     on any layout: every rank reads its part of the same file

The file's metadata hold the model file and what is known of the training, as JSON. Nothing is
pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..checkpoint.metadata import decode, encode
from ..checkpoint.shards import Piece, called, extra_modules, joined, pieces
from ..declare import catalog
from ..declare.model_file import ModelSpec
from ..errors import DeclarationError, WeftError, did_you_mean
from ..layout import Layout
from .composer import compose

FORMAT = "weft weights 1"


def save_pretrained(
    model: nn.Module, path: str | Path, notes: Mapping[str, Any] | None = None
) -> Path:
    """Writes a model's weights and its model file; all ranks of its layout call this.

    Args:
        model: of `weft.compose`, whatever holds its parameters: plain, split heads, FSDP2.
        path: of the file, which is replaced in one instant.
        notes: what else to keep, rank 0's: how it was trained. They come back equal.

    Returns:
        The path.

    Raises:
        WeftError: on every rank, where rank 0 cannot write, or has notes that cannot be kept; or
            where a module has an extra state, which `load_pretrained` could give to nobody.

    >>> import tempfile
    >>> path = save_pretrained(compose("tabular"), tempfile.mkdtemp() + "/weights.safetensors")
    >>> load_pretrained(path).spec.name
    'tabular'
    """
    path, layout = Path(path), model.layout
    whole = {name: joined(part, layout) for name, part in _weights(model, layout).items()}
    content = model.spec.model_dump(mode="json", exclude_unset=True)
    facts, failed = {"format": FORMAT, "model": content}, _refused(model)
    if layout.rank == 0 and not failed:
        try:
            facts["notes"] = encode(dict(notes or {}), "notes")
            path.parent.mkdir(parents=True, exist_ok=True)
            made = path.with_name(f"{path.name}.tmp")
            save_file(whole, made, metadata={"weft": json.dumps(facts)})
            made.replace(path)
        except (OSError, SafetensorError, WeftError) as error:
            failed = getattr(error, "strerror", None) or str(error)
    if layout.mesh:
        failed = next(filter(None, layout.bound.all_gather_text(failed).values()), "")
    if failed:
        raise WeftError(f"{path} cannot be written: {failed}")
    return path


def load_pretrained(
    name_or_path: str | Path,
    layout: Layout | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A model with the weights of a file, on any layout.

    Args:
        name_or_path: a file of `save_pretrained`, or the name of weights that ship:
            `"table_classifier"`.
        layout: where the model is to lie, default one device; built if it was not yet.
        device: of the weights.
        dtype: of the weights, default the file's.

    Raises:
        DeclarationError: no such file, or one that is damaged or not of weft.

    >>> import tempfile
    >>> path = save_pretrained(compose("pair"), tempfile.mkdtemp() + "/pair.safetensors")
    >>> load_pretrained(path, dtype=torch.float64).spec.head
    'pair'
    """
    path = _found(name_or_path)
    facts = read_notes(path)
    spec = ModelSpec.from_dict(facts["model"], source=f"{path}: its model file")
    try:
        with safe_open(path, "pt") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            if dtype is None and stored:
                dtype = file.get_tensor(next(iter(stored))).dtype
            model = compose(spec, layout, device=device, dtype=dtype)
            _fill(path, stored, _weights(model, model.layout), file)
    except (OSError, SafetensorError) as error:
        raise DeclarationError(f"{path} cannot be read: {error}") from None
    model.eval()
    return model


def read_notes(path: str | Path) -> dict[str, Any]:
    """What a file of weights says of itself: `model`, the model file, and `notes`.

    Args:
        path: of the file.

    Raises:
        DeclarationError: it is missing, damaged or not of weft.
    """
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get("weft", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise DeclarationError(f"{path} cannot be read: {error}") from None
    if facts.get("format") != FORMAT:
        raise DeclarationError(
            f"{path} is no file of weft.models.save_pretrained: its metadata do not say {FORMAT!r}"
        )
    return facts | {"notes": decode(facts.get("notes", {}))}


def _weights(model: nn.Module, layout: Layout) -> dict[str, Piece]:
    return {n.removeprefix("model/"): part for n, part in pieces(model, None, layout).items()}


def _refused(model: nn.Module) -> str:
    """Why a model's weights are not all that a file had to keep, or ""."""
    return next(
        (
            f"{called(name)} is no weight, and no module of a model file takes one; "
            "weft.checkpoint.Checkpoints keeps it"
            for name in extra_modules(model)
        ),
        "",
    )


def _found(name_or_path: str | Path) -> Path:
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
            f"no weights {text!r} ship with weft{did_you_mean(text, shipped)}; known are"
            f" {', '.join(shipped) or 'none'}, or give a path to a .safetensors"
        )
    return folder / f"{text}.safetensors"


@torch.no_grad()
def _fill(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Piece], file: Any) -> None:
    """Copies every rank's part of the stored tensors into the model's."""
    if stored.keys() != wanted.keys():
        odd = sorted(stored.keys() ^ wanted.keys())[0]
        raise DeclarationError(f"{path} does not fit its own model file: tensor {odd!r}")
    for name, part in wanted.items():
        shape = tuple(stored[name].get_shape())
        if shape != part.shape:
            raise DeclarationError(f"{path}: {name!r} has shape {shape}, not {part.shape}")
        cut = tuple(slice(at, at + n) for at, n in zip(part.start, part.local.shape))
        part.local.copy_(stored[name][cut] if cut else file.get_tensor(name))

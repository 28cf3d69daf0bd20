"""A config.json of anybody's: read as data, within bounds, without running what it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_module_registration_hook

from weft._opening import read_bytes
from weft.errors import DeclarationError, UnsupportedError, WeftError, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Bytes of a file (names of 100,000 classes are in some), layers that it may ask for, and modules
#: that a model may be made of.
MOST_BYTES, MOST_LAYERS, MOST_MODULES = 1 << 24, 1024, 1 << 18


def read_config(path: str | Path) -> PretrainedConfig:
    """The configuration of a folder or a file, of transformers' own class for its `model_type`.

    What names code (`auto_map`, implementations of attention and of experts) is left out: weft has
    its own, and transformers' classes stand for the copies that come with checkpoints.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file, data = read_data(path)
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise DeclarationError(f"{file}: no config of transformers, which has a 'model_type'")
    if kind not in CONFIG_MAPPING:
        own = ", and code of the checkpoint is not run" if data.get("auto_map") else ""
        raise UnsupportedError(
            f"{file}: transformers has no model type {shown(kind)}{own}; give one that it has"
        )
    with of_transformers(f"{file}: not a configuration of {kind}"):
        return CONFIG_MAPPING[kind].from_dict(_without_code(data, str(file)))


def read_data(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The file of a folder or a path, and the options that it holds, whatever they are."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        data = json.loads(read_bytes(file, MOST_BYTES, links=True).decode("utf-8-sig"))
    except FileNotFoundError:
        raise DeclarationError(
            f"no file {str(file)!r}: pass the folder of a transformers model, or its"
            " config.json (nothing is downloaded)"
        ) from None
    except OSError as error:
        raise DeclarationError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise DeclarationError(f"{file}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise DeclarationError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise DeclarationError(f"{file}: no config, which is an object, but {shown(data)}")
    return file, data


@contextmanager
def of_transformers(what: str) -> Iterator[None]:
    """Inside the block whatever transformers' code raises is a refusal of one line."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:  # checks of configurations raise what they like
        text = " ".join(str(error).split()) or "no reason given"
        raise UnsupportedError(f"{what}: {type(error).__name__}: {text[:300]}") from error


@contextmanager
def few_modules(what: str) -> Iterator[None]:
    """Inside the block a model of more than `MOST_MODULES` modules is refused as it is made."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > MOST_MODULES:
            raise UnsupportedError(f"{what}: more than {MOST_MODULES:,} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _without_code(value: Any, file: str) -> Any:
    if isinstance(value, list):
        return [_without_code(each, file) for each in value]
    if not isinstance(value, dict):
        return value
    for key, number in value.items():
        counts = "layer" in key and not key.endswith(("size", "input", "dim"))
        if counts and isinstance(number, int) and abs(number) > MOST_LAYERS:
            raise UnsupportedError(f"{file}: {key} {shown(number)}: at most {MOST_LAYERS} layers")
    named = (key for key in value if key != "auto_map" and "implementation" not in key)
    return {key: _without_code(value[key], file) for key in named}

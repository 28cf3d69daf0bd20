"""`weft verify`: is a transformers model exact on a layout?"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from weft.errors import DeclarationError, did_you_mean, lacks
from weft.layout import Layout
from weft_planner.config_file import read_data

from ..inspect.printer import console, still_here
from . import options

#: Options that give a number of layers: of a model, or of its encoder and its decoder.
_LAYERS = (
    *("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"),
)
#: Layers of a model that is made.
MOST_LAYERS = 1000


def verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_CLASS", help="A class of transformers, by its name.")
    ],
    config: Annotated[
        Path, typer.Argument(help="Its config.json, or the folder of a model that has one.")
    ],
    layout: options.LayoutName,
    axis: Annotated[
        str | None,
        options.of_call("The layout's name for the tokens.", show_default="the one it attends"),
    ] = None,
    layers: Annotated[
        int | None, options.of_call("Build this many layers only.", min=1, show_default=False)
    ] = None,
    small: Annotated[
        bool,
        options.of_call("Build a narrow copy of the same heads, of each kind of layers."),
    ] = False,
    seed: Annotated[
        int, options.of_call("Of the random weights.", min=0, max=options.MOST_SEED)
    ] = 0,
) -> None:
    """Compare a transformers model on a layout with itself on one device.

    Builds the model of a configuration with random weights, and runs it in
    fp64, whole and on virtual ranks, threads of this process (at most two
    along every mesh dim). Outputs, loss and every gradient must agree; where
    they do not, the first module or weight that differs is named.

    Exit code 1 if they do not, or the model is refused.

    Examples:

        weft verify LlamaForCausalLM ./llama/config.json ring-zigzag-4

        weft verify Qwen3ForCausalLM ./qwen3 "tokens: ulysses=8 x ring=4" --layers 4

        weft verify LlamaForCausalLM ./llama-405b plan.toml --small
    """
    if small and layers is not None:
        raise DeclarationError("--layers and --small: a small copy has layers of each kind")
    chosen = options.layout_named(layout, None, axis)
    axis = _axis(chosen, axis)
    built = build(model, config, layers, seed, small)
    from weft_integrations.transformers import verify as compare

    begin = time.perf_counter()
    with still_here("comparing"):
        found = compare(built, chosen, axis)
    out = console()
    out.print(f"[bold]{escape(str(found))}[/]", highlight=False)
    out.print(f"[green]exact[/], checked in {time.perf_counter() - begin:.1f} s")


def build(
    name: str, config: Path, layers: int | None = None, seed: int = 0, small: bool = False
) -> Any:
    """A model of a transformers class with random weights."""
    try:
        import transformers
    except ImportError as error:
        raise DeclarationError(lacks("weft verify", error)) from None
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name, None)
    path, data = read_data(config)
    if name.startswith("Auto") and hasattr(kind, "_model_mapping"):
        known = _classes(data, "name", name) or "; name the model's own class"
        raise DeclarationError(f"{name} does not name an architecture{known}")
    if kind is None or getattr(kind, "config_class", None) is None:
        models = [n for n in dir(transformers) if "For" in n or n.endswith("Model")]
        models = [n for n in models if not n.startswith("Auto")]
        raise DeclarationError(f"transformers has no model class {name!r}{_near(name, models)}")
    read = _of_class(kind, data, path)
    if layers is not None:
        read = _fewer_layers(read, layers)
    try:
        sizes = kind.config_class.from_dict(read)
        if small and getattr(sizes, "is_encoder_decoder", False):
            raise DeclarationError(
                f"{path}: {name} has an encoder and a decoder, of which there is no small copy;"
                " give --layers"
            )
        if small:
            from weft_planner.hf_config import HFModel

            sizes = HFModel(sizes, str(path)).small().config
        _check_room(kind, sizes, name, path)
        torch.manual_seed(seed)
        return kind(sizes).eval()
    except DeclarationError:
        raise
    except Exception as error:  # of whatever kind the configuration's own checks raise
        message = " ".join(str(error).split())
        raise DeclarationError(
            f"{path}: {name} cannot be made of it: {type(error).__name__}: {message}"
        ) from error


def _check_room(kind: Any, config: Any, name: str, path: Path) -> None:
    """Refuse a configuration of more weights than this machine holds, before they are made."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 0
    if not isinstance(layers, int) or layers > MOST_LAYERS:
        raise DeclarationError(f"{path}: {layers} layers, of at most {MOST_LAYERS}; give --layers")
    try:
        with torch.device("meta"):
            shapes = kind(config)
    except Exception:  # a model that cannot be made of shapes alone
        return
    least = sum(p.numel() * p.element_size() for p in shapes.parameters())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if least > memory:
        raise DeclarationError(
            f"{path}: {name} has {least / 2**30:,.0f} GiB of weights, and this machine"
            f" {memory / 2**30:,.0f} GiB of memory; give --layers, or --small"
        )


def _axis(layout: Layout, axis: str | None) -> str:
    """The axis given, or the only one that the layout attends."""
    if axis is not None:
        options.attended(layout, axis)
        return axis
    attended = list(layout.attend)
    if len(attended) > 1 and "tokens" not in attended:
        raise DeclarationError(
            f"{layout.source}: attends {', '.join(attended)}; say which is the tokens with --axis"
        )
    return attended[0] if len(attended) == 1 else "tokens"


def _of_class(kind: Any, read: dict[str, Any], path: Path) -> dict[str, Any]:
    """The part of a configuration that is the class's own: all, or that of its text."""
    wanted, found = kind.config_class.model_type, read.get("model_type")
    if found in (None, wanted) or kind.__name__ in (read.get("architectures") or ()):
        return read
    parts = [v for v in read.values() if isinstance(v, dict) and v.get("model_type") == wanted]
    parts += [read[key]] if (key := kind.config_class.base_config_key) in read else []
    if not parts:
        raise DeclarationError(
            f"{path}: model_type is {found!r}, but {kind.__name__} takes {wanted!r}"
            f"{_classes(read, 'this one is of')}"
        )
    return parts[0]


def _classes(read: dict[str, Any], lead: str, auto: str = "") -> str:
    """The classes that a configuration is of: in an auto class's table, or its `architectures`."""
    import transformers

    known, of = transformers.CONFIG_MAPPING, str(read.get("model_type"))
    tables = (auto,) if auto else ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
    found = [
        getattr(transformers, t)._model_mapping.get(known[of], None) for t in tables if of in known
    ]
    named = [n for n in read.get("architectures") or () if hasattr(transformers, str(n))]
    result = [kind.__name__ for kind in found if kind is not None]
    result = result or named if auto else named or result
    return f"; {lead} {' or '.join(dict.fromkeys(result))}" if result else ""


def _near(name: str, known: list[str]) -> str:
    near = did_you_mean(name, known)
    return near if near.startswith("; did") else ""


def _fewer_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The first layers of a model, with the settings that are listed by layer."""
    named = {n: v for n in _LAYERS if isinstance(v := config.get(n), int)}
    total = max(named.values(), default=None)
    if total is None or layers > total:
        name = max(named, key=named.__getitem__, default=_LAYERS[0])
        raise DeclarationError(f"--layers {layers}: the configuration has {name} = {total}")
    lengths = named.values()
    cut = {
        k: v[:layers] if isinstance(v, list) and len(v) in lengths else v for k, v in config.items()
    }
    return cut | {name: min(layers, number) for name, number in named.items()}

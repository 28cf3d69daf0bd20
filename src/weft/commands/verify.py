"""`weft verify`: is a transformers model exact on a layout?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ..errors import DeclarationError, did_you_mean
from . import options
from .options import console


def verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_CLASS", help="A class of transformers, by its name.")
    ],
    config: Annotated[
        Path, typer.Argument(help="Its config.json, or the folder of a model that has one.")
    ],
    layout: options.LayoutName,
    axis: Annotated[str, options.of_call("The layout's name for the tokens.")] = "tokens",
    layers: Annotated[
        int | None, options.of_call("Build this many layers only.", min=1, show_default=False)
    ] = None,
    seed: Annotated[
        int, options.of_call("Of the random weights.", min=0, max=options.MOST_SEED)
    ] = 0,
) -> None:
    """Compare a transformers model on a layout with itself on one device.

    Builds the model of a configuration with random weights, and runs it whole
    and on virtual ranks, threads of this process (at most two along every mesh
    dim). Outputs, loss and gradients must agree; where they do not, the first
    module that differs is named, with what it does.

    Exit code 1 if the model is refused.

    Examples:

        weft verify LlamaForCausalLM ./llama/config.json ring-zigzag-4

        weft verify Qwen3ForCausalLM ./qwen3 "tokens: ulysses=8 x ring=4" --layers 4
    """
    chosen = options.layout_named(layout, None, axis)
    built = build(model, config, layers, seed)
    from ..integrations.transformers import verify as compare

    begin = time.perf_counter()
    with options.still_here("comparing"):
        found = compare(built, chosen, axis)
    out = console()
    out.print(f"[bold]{escape(str(found))}[/]", highlight=False)
    out.print(f"[green]exact[/], checked in {time.perf_counter() - begin:.1f} s")


def build(name: str, config: Path, layers: int | None = None, seed: int = 0) -> Any:
    """A model of a transformers class with random weights."""
    try:
        import transformers
    except ImportError:
        raise DeclarationError(
            "weft verify needs transformers: pip install 'weft-attention[transformers]'"
        ) from None
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name, None)
    if getattr(kind, "config_class", None) is None:
        models = [n for n in dir(transformers) if "For" in n or n.endswith("Model")]
        raise DeclarationError(f"transformers has no model class {name!r}{_near(name, models)}")
    path = config / "config.json" if config.is_dir() else config
    if not path.is_file():
        raise DeclarationError(
            f"{config}: there is no configuration; give config.json or its folder"
        )
    try:
        options_ = json.loads(path.read_text())
    except ValueError as error:
        raise DeclarationError(f"{path}: not JSON: {error}") from None
    if layers is not None:
        options_ = _fewer_layers(options_, layers)
    torch.manual_seed(seed)
    return kind(kind.config_class.from_dict(options_)).eval()


def _near(name: str, known: list[str]) -> str:
    near = did_you_mean(name, known)
    return near if near.startswith("; did") else ""


def _fewer_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The first layers of a model, with what is listed by layer."""
    total = config.get("num_hidden_layers")
    if not isinstance(total, int) or layers > total:
        raise DeclarationError(
            f"--layers {layers}: the configuration has num_hidden_layers = {total}"
        )
    cut = {
        k: v[:layers] if isinstance(v, list) and len(v) == total else v for k, v in config.items()
    }
    return cut | {"num_hidden_layers": layers}

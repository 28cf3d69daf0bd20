"""Installs weft in a transformers model, and removes it again.

Everything is a hook or an attribute of the model's own modules; no class is changed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from weft._torch import MODULE_CALL, module_call
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft_axes.carry.fragments import fragments
from weft_axes.fields import WholeReport
from weft_axes.fields.islands import aligned_functions, on_rows, proven_islands
from weft_axes.gradients.sync import AVERAGED

from .. import Foreign
from ..common import Parallelized, check_axis, check_modules, check_not_placed
from ..fields import by_positions, is_experts
from . import calls, chosen_keys, generation, interface, latents, parts, towers
from .rebinding import calls as calls_of
from .rebinding import put, put_back, rebound
from .recurrences import FUNCTIONS, WITHOUT_STATE, of_device
from .recurrent_modules import MODULES
from .replicated import Own, configurations, with_nested


@dataclass(kw_only=True)
class _Installed(Parallelized):
    """Changes to a model, to be undone. A copy of the model has a copy of it.

    Attributes:
        implementation: of attention, before.
        layout: that the model is on.
        axis: the layout's name for the tokens.
        hooks: handles of hooks on the model and its modules.
        own: its configurations, and their attention before.
        recurrent: modules whose convolution or recurrence goes over ranks.
        of_rows: modules that count tokens or images, or choose keys, of full rows.
        calls: what begins and ends each forward pass.
    """

    implementation: Any
    layout: Layout
    axis: str
    hooks: list[RemovableHandle] = field(default_factory=list)
    own: list[Own] = field(default_factory=list)
    recurrent: list[nn.Module] = field(default_factory=list)
    of_rows: list[nn.Module] = field(default_factory=list)
    calls: calls.Calls | None = None

    def __deepcopy__(self, memo: dict) -> _Installed:
        memo[id(self)] = copied = object.__new__(_Installed)
        vars(copied).update(copy.deepcopy(vars(self) | {"steps": []}, memo))
        return copied

    def undo(self, model: Foreign) -> None:
        """Remove hooks, modules' functions and attributes of weft from a model."""
        for handle in self.hooks:
            handle.remove()
        for module in model.modules():
            put_back(module)
        model.set_attn_implementation(self.implementation)
        model.__dict__.pop(AVERAGED, None)
        super().undo(model)


def install(
    model: Foreign,
    layout: Layout,
    axis: str,
    embeddings: nn.Module | None = None,
    travel: latents.Latents = "auto",
    images: str = "whole",
    report: WholeReport | None = None,
) -> None:
    """Give a model weft's attention, mask and hooks."""
    embeddings = embeddings or find_embeddings(model)
    installed = _Installed(
        ran_whole=report,
        told=layout.rank > 0,
        implementation=model.config._attn_implementation,
        layout=layout,
        axis=axis,
    )
    try:
        _put_in(model, installed, embeddings, travel, images)
    except BaseException:  # the model stays as it was
        installed.undo(model)
        model.__dict__.pop("_weft", None)
        raise


def _put_in(
    model: Foreign,
    installed: _Installed,
    embeddings: nn.Module | None,
    travel: latents.Latents,
    images: str,
) -> None:
    layout, axis = installed.layout, installed.axis
    decoder = parts.text_decoder(model)
    spread = towers.methods(model, decoder) if images == "spread" else []
    installed.own = [(c, c._attn_implementation) for c in configurations(model)]
    installed.recurrent = _rebind(model, layout, axis)
    if not _attends_by_itself(model):
        _take_attention(model, installed, travel)
        if decoder is not None:
            _keep_towers(decoder, installed)
    installed.of_rows += _put_all(spread if layout.size(axis) > 1 else ())
    for module in filter(is_experts, model.modules()):
        put(module, by_positions)
        installed.of_rows.append(module)
    for module in proven_islands(model):
        put(module, on_rows)
    _align(model)
    installed.leave_graphs(model)
    check_modules(decoder or model, layout, axis)
    installed.put_on(model)
    _hook(model, installed, embeddings, decoder)
    setattr(model, AVERAGED, True)
    if hasattr(model, "generate"):
        put(model, generation.generate, "generate")


def _align(model: Foreign) -> None:
    """Have functions of rotary positions, which modules call by name, take a rank's own tokens."""
    known = {
        stock: aligned_functions(stock) for stock in {type(m).forward for m in model.modules()}
    }
    made = {stock: rebound(stock, values) for stock, values in known.items() if values}
    for module in model.modules():
        if type(module).forward in made and "forward" not in vars(module):
            put(module, made[type(module).forward])


#: Attributes of modules that choose keys for attention, or compress them.
_CHOICES = ("indexer", "compress_rate", "keep_window_size")


def _attends_by_itself(model: Foreign) -> bool:
    """True if a model's own attention runs on fields: it asks no interface, or chooses keys.

    Of keys that models choose, or compress, weft's attention knows some.
    """
    found = [(m, getattr(m, name, None)) for m in model.modules() for name in _CHOICES]
    choosers = (c if isinstance(c, nn.Module) else m for m, c in found if c is not None)
    known = all(map(chosen_keys.chooses_over_ranks, choosers))
    return not (known and model._can_set_attn_implementation())


def _take_attention(model: Foreign, installed: _Installed, travel: latents.Latents) -> None:
    """Have the model's attention, and what reads masks for it, be weft's."""
    for module in model.modules():
        if parts.biases_distances(module):
            put(module, parts.bias_of_tile, "compute_bias")
            installed.of_rows.append(module)
    choosing = (c for module in model.modules() for c in chosen_keys.replaced_methods(module))
    installed.of_rows += dict.fromkeys(_put_all(choosing))
    if travel != "keys" and installed.layout.size(installed.axis) > 1:
        for module in filter(latents.expands_latents, model.modules()):
            latents.hand_on(module, travel)
    model.set_attn_implementation(interface.NAME)


def _keep_towers(decoder: nn.Module, installed: _Installed) -> None:
    """Give configurations that the text decoder has no part of the attention they had before."""
    inside = {id(config) for config in configurations(decoder)}
    for config, implementation in installed.own:
        if not inside & {id(c) for c in with_nested([config])}:
            config._attn_implementation = implementation


def check_layout(layout: Layout, axis: str) -> None:
    """Raise unless a layout splits queries and keys of an axis in the same way."""
    check_axis(layout, axis)
    queries, keys = layout.shard_dims(axis), layout.key_dims(axis)
    if queries != keys:
        raise DeclarationError(
            f"{layout.source}: attention of a model over its own tokens needs queries and keys "
            f"that are split in the same way over {axis!r}, but {queries or 'no mesh dim'} splits "
            f"queries and {keys or 'no mesh dim'} keys; use a layout such as ring-4, ulysses-4 or "
            "tile-2x2"
        )


def check_kind(model: Foreign) -> None:
    """Raise unless weft can be put into a model."""
    if not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers model")
    check_not_placed(model)


def find_embeddings(model: Foreign) -> nn.Module | None:
    """The module that makes tokens of images, where the model has no text."""
    if getattr(model, "main_input_name", "") != "pixel_values":
        return None
    if parts.text_decoder(model) is not None or getattr(model.config, "is_encoder_decoder", False):
        return None  # its tokens are those of a text decoder, and its tower stays whole
    candidates = [m for path, m in model.named_modules() if path.rpartition(".")[2] == "embeddings"]
    if len(candidates) != 1:
        raise UnsupportedError(
            f"{type(model).__name__} makes its tokens of images, and not one but "
            f"{len(candidates)} of its submodules are named `embeddings`: name the one whose "
            "output (batch, tokens, embed) is to be split, "
            "parallelize(..., embeddings=model.patches)"
        )
    return candidates[0]


def _hook(
    model: Foreign, installed: _Installed, embeddings: nn.Module | None, decoder: nn.Module | None
) -> None:
    hooks = installed.hooks
    installed.calls = entered = calls.Calls(model, embeddings is not None, decoder)
    hooks.append(model.register_forward_pre_hook(entered.enter, with_kwargs=True))
    within = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model]
    if decoder is not None:  # towers are never split
        within = [m for m in within if m in {*decoder.modules()} or decoder in {*m.modules()}]
    for part in within:
        hooks.append(part.register_forward_pre_hook(entered.enter_part, with_kwargs=True))
    if embeddings is not None:
        hooks.append(embeddings.register_forward_hook(entered.split_made, with_kwargs=True))
    if decoder is not None:
        hooks.append(decoder.register_forward_pre_hook(entered.enter_decoder, with_kwargs=True))
    put(model, calls.whole_call, MODULE_CALL)
    for part in within:
        put(part, module_call, MODULE_CALL)
    for module in (*within, model):
        options = {"with_kwargs": True, "always_call": True}
        hooks.append(module.register_forward_hook(entered.leave, **options))


def _rebind(model: Foreign, layout: Layout, axis: str) -> list[nn.Module]:
    """Give recurrent layers functions that go over ranks; returns the modules that have them."""
    changes = [change for module in model.modules() for change in _changes(module)]
    if changes:
        _check_carried(model, layout, axis)
    return _put_all(changes)


def _put_all(changes: Iterable[tuple[nn.Module, Callable, str]]) -> list[nn.Module]:
    """Replace methods of modules: (module, function, method); returns the modules."""
    given = list(changes)
    for change in given:
        put(*change)
    return [module for module, *_ in given]


def _check_carried(model: Foreign, layout: Layout, axis: str) -> None:
    """Raise where a layout carries states in a way that the model's recurrent layers have not."""
    dims = layout.carries_by_heads(axis)
    if dims and layout.order.get(axis) == "striped":
        raise UnsupportedError(
            f"{layout.source}: [carry] splits the heads of recurrent layers along {list(dims)}, but"
            f" the convolutions of {type(model).__name__} see neighbouring tokens, which striped"
            " order has on other ranks; use contiguous or zigzag order"
        )
    fragments(layout, axis, layout.size(axis))  # refuses orders of too many
    if layout.state_transport(axis) != "chain":
        return
    for path, module in model.named_modules():
        for name in calls_of(module, WITHOUT_STATE):
            raise UnsupportedError(
                f"{layout.source}: [carry] hands states on in a chain, but {name} of {path}"
                f" ({type(module).__name__}) takes no state that enters; name the strategy 'state'"
            )


def recurrent(model: Foreign) -> bool:
    """True if a model has layers that carry a state along its tokens, or convolve them."""
    return any(_changes(module) for module in model.modules())


def run_on_cpu(model: Foreign) -> None:
    """Let a model that is not parallelized run on a CPU where Triton kernels are installed."""
    for module in model.modules():
        stock = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
        values = {name: of_device(stock[name]) for name in calls_of(module, FUNCTIONS)}
        if values:
            put(module, rebound(type(module).forward, values))


def _changes(module: Foreign) -> list[tuple[nn.Module, Callable, str]]:
    """Replaced methods of a module and of those within it: (module, function, method)."""
    for kind in {kind.__name__ for kind in type(module).__mro__} & MODULES.keys():
        return [(module.get_submodule(path), fn, name) for path, name, fn in MODULES[kind]]
    names = calls_of(module, FUNCTIONS)
    if not set(names) - {"apply_mask_to_padding_states"}:
        return []
    stock = inspect.unwrap(type(module).forward).__globals__
    values = {name: FUNCTIONS[name](of_device(stock[name])) for name in names}
    return [(module, rebound(type(module).forward, values), "forward")]

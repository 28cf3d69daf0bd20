"""Computations of transformers models over all tokens at once, made exact on shards.

Position ids that count tokens, embeddings scaled by how many are masked, rope parameters that
follow the length, statistics of routers and pooled outputs need more than a rank's own tokens. Each
gets exactly its inputs: the ids of all tokens, the last position, the router's logits and which
tokens are padding, or the hidden states that are pooled.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from weft._torch import memory_of
from weft.comm.collectives import partial_to_replicate
from weft.errors import UnsupportedError
from weft.layout import Layout

from .. import Foreign
from ..common import gathered_rows, named_arguments
from .batches import unpadded
from .losses import Constants, Replicated
from .rebinding import calls
from .running import now, running, while_split

_POSITIONS = "create_position_ids_from_input_ids"

#: Heads that pool the tokens of the model below them.
_POOLED_HEADS = (
    *("ForSequenceClassification", "ForImageClassification", "ForNextSentencePrediction"),
    *("ForImageClassificationWithTeacher", "ForMaskedImageModeling"),
)
#: Outputs (batch, tokens, ...); every output with routers' logits has one of them.
_BY_SEQUENCE = ("last_hidden_state", "logits")


# -- positions ------------------------------------------------------------------------------------


def _counter(module: Foreign) -> Callable | None:
    """The function by which an embedding counts positions of tokens that are not padding."""
    if not hasattr(module, "position_embeddings") or not hasattr(module, "padding_idx"):
        return None
    local = getattr(module, _POSITIONS, None)
    return local or getattr(sys.modules[type(module).__module__], _POSITIONS, None)


def counts_positions(module: Foreign) -> bool:
    """True if an embedding makes position ids by counting the tokens that are not padding."""
    return _counter(module) is not None


def makes_positions(model: Foreign) -> bool:
    """True if the model's position ids are not 0, 1, 2, ..., and it must make them itself."""
    return any(map(counts_positions, model.modules()))


@while_split
def count_positions(module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A pre-hook of such an embedding: position ids from all tokens, then this rank's."""
    call, arguments = now(type(module).__name__), named_arguments(module, args, kwargs)
    if arguments.get("position_ids") is not None:
        return (), arguments
    ids, layout, dims = arguments.get("input_ids"), call.layout, {call.axis: 1}
    if ids is None:
        embeds = arguments["inputs_embeds"]
        mark = torch.full(embeds.shape[:2], module.padding_idx + 1, device=embeds.device)
        ids = mark.long()
    all_ids = layout.gather(ids, dims)
    count, parts = _counter(module), all_ids.split(call.batch.documents or all_ids.shape[1], 1)
    assert count is not None  # the module counts positions
    counted = torch.cat([count(p, module.padding_idx) for p in parts], 1)
    return (), arguments | {"position_ids": layout.shard(counted, dims)}


def scales_by_masked(module: Foreign) -> bool:
    """True if an embedding is scaled by a row's number of masked tokens (`token_dropout`)."""
    return bool(getattr(module, "token_dropout", False)) and hasattr(module, "mask_token_id")


@while_split
def embed_all(module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A pre-hook of such an embedding: all tokens of a row go in."""
    call, arguments = now(type(module).__name__), named_arguments(module, args, kwargs)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if arguments.get(name) is not None:
            gathered = gathered_rows(arguments[name], call.layout, {call.axis: 1})
            arguments[name] = gathered
    seen = unpadded(call.batch.mask, gathered.shape[1])
    if seen is not None:
        seen = call.layout.shard(seen.to(gathered.device), {"batch": 0}).long()
    return (), arguments | {"attention_mask": seen}


@while_split
def split_embedded(module: Foreign, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
    """A hook of such an embedding: this rank's tokens come out."""
    call = now(type(module).__name__)
    return call.layout.shard(output, {call.axis: 1})


@while_split
def split_made(module: Foreign, args: tuple, kwargs: dict, output: Any) -> Tensor:
    """A hook of a submodule that makes tokens, of images: this rank's of them."""
    if not isinstance(output, Tensor) or output.dim() != 3:
        raise UnsupportedError(
            f"{type(module).__name__} gives {type(output).__name__} and not one tensor (batch, "
            "tokens, embed), so its tokens cannot be split"
        )
    call = now(type(module).__name__)
    call.length, call.last_position = output.shape[1], output.shape[1] - 1
    return call.layout.shard(output, {call.axis: 1})


def accepts_positions(model: Foreign) -> bool:
    """True if the model uses position ids that it is given, by name or in `**kwargs`."""
    names = inspect.signature(model.forward).parameters
    if "position_ids" in names:
        return True
    inner = [vars(kind)["forward"] for kind in type(model).__mro__[1:] if "forward" in vars(kind)]
    inner += [base(model).forward] if base(model) is not model else []
    open_ = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return open_ and any("position_ids" in inspect.signature(f).parameters for f in inner)


def encodes(model: Foreign) -> bool:
    """True if a model makes no causal masks, for all that its modules and configuration say."""
    parts = [m for m in model.modules() if hasattr(m, "config")]
    for part in parts:
        names = vars(sys.modules[type(part).__module__])
        causal = any(n.startswith("create_") and "causal_mask" in n for n in names)
        decoder = getattr(part.config, "is_decoder", None)
        if causal and not ("create_bidirectional_mask" in names and decoder is False):
            return False
    return True


def window_of(model: nn.Module) -> int | None:
    """The fewest keys that a query of a layer sees, with its own; None: no layer has a window.

    A chunk may begin at the query, and so may windows that are counted in another way.
    """
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    names = ("attention_chunk_size", "local_attention", "window_size")
    if any(isinstance(getattr(c, name, None), int) for c in configs for name in names):
        return 1
    sizes = [getattr(c, "sliding_window", None) for c in configs]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def takes_block_types(model: Foreign) -> list[str]:
    """Names of the token types that a model makes blocks of its masks of, and nothing else.

    Gemma 3 and 4 let the tokens of an image see each other so.
    """
    if not any(calls(module, ["get_block_sequence_ids_for_mask"]) for module in model.modules()):
        return []
    return ["token_type_ids", "mm_token_type_ids"]


def masks_see_positions(model: Foreign) -> bool:
    """True if a model gives position ids to the functions that make its causal masks.

    Without them transformers looks for no packed documents: GPT-OSS, OPT, BERT and BART as decoders
    and AFMoE give none. Read from the source of its classes; one that cannot be read gives them.
    """
    kinds = {type(m) for m in model.modules() if hasattr(m, "config")}
    given = [given for kind in kinds for given in _given_positions(kind)]
    return any(given) or not given


def _given_positions(kind: type) -> Iterator[bool]:
    """For each call of a function for causal masks in a class: is `position_ids` an argument?"""
    methods = [inspect.unwrap(m) for m in vars(kind).values() if inspect.isfunction(m)]
    for method in (m for m in methods if any("causal_mask" in n for n in m.__code__.co_names)):
        try:
            source = inspect.getsource(method)  # a class's is read by `ast`, which threads confuse
        except OSError:
            return
        for call in re.finditer(r"create_(?!bidirectional)\w*causal_mask\(", source):
            arguments = _until_closed(source, call.end())
            for name in re.findall(r"\*\*(\w+)", arguments):
                result = re.search(rf"{name} = {{", source)
                arguments += _until_closed(source, result.end()) if result else "position_ids"
            yield "position_ids" in arguments


def _until_closed(source: str, start: int) -> str:
    """The source from behind an opening bracket to the one that closes it."""
    depth, end = 1, start
    while depth and end < len(source):
        depth += (source[end] in "([{") - (source[end] in ")]}")
        end += 1
    return source[start:end]


def takes_positions(module: Foreign) -> bool:
    """True if a position table counts 0, 1, 2, ... itself where it is given no position ids."""
    if "PositionalEmbedding" not in type(module).__name__:
        return False
    return "position_ids" in inspect.signature(module.forward).parameters


def may_skip_padding(model: Foreign) -> bool:
    """True if a table of the model, given no position ids, may count tokens without padding."""
    tables = [module for module in model.modules() if takes_positions(module)]
    return any("attention_mask" in inspect.signature(t.forward).parameters for t in tables)


def leaves_padding_out(model: Foreign) -> bool:
    """True if recurrent layers of the model set padding to zero before it enters a state."""
    return any(calls(module, {"apply_mask_to_padding_states": None}) for module in model.modules())


@while_split
def give_positions(module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """A pre-hook of such a table: this rank's positions, as if they were the caller's."""
    arguments, local = named_arguments(module, args, kwargs), now(type(module).__name__).positions
    if local is None:  # a submodule makes the tokens
        return None
    ids = arguments.get("position_ids")
    arguments["position_ids"] = (
        local.reshape(-1, local.shape[-1])[0]  # counted within this rank's chunk, or given to us
        if ids is None or ids.dim() == 1
        else local.expand_as(ids)
    )
    return (), arguments


def tempers_by_place(module: Foreign) -> bool:
    """True if attention scales queries by places that it counts within the tokens it gets."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and bool(
        calls(module, ["torch"])
    )


class CountsRow:
    """torch, but `arange` over this rank's tokens counts their places in the full row."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def arange(self, *args: Any, **kwargs: Any) -> Tensor:
        """`torch.arange`."""
        call = running()
        if call is None or call.whole or not call.length:
            return torch.arange(*args, **kwargs)
        if args != (call.layout.local_length(call.axis, call.length),):
            raise UnsupportedError(f"arange{args} in attention, not of this rank's tokens")
        return call.layout.positions(call.axis, call.length, kwargs.get("device"))


_ROTARY = "apply_rotary_pos_emb"


def rotates_patches(module: Foreign) -> bool:
    """True if attention rotates the last tokens it gets, as many as its embeddings are of patches.

    Class and register tokens in front of them are left as they are.
    """
    rotary = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get(_ROTARY)
    code = getattr(rotary, "__code__", None)
    return bool(calls(module, [_ROTARY])) and "num_patches" in getattr(code, "co_varnames", ())


def counting_rows(module: Foreign) -> dict[str, Any]:
    """Globals for the `forward` of a module that counts places of tokens; none: it does not."""
    values: dict[str, Any] = {"torch": CountsRow()} if tempers_by_place(module) else {}
    if rotates_patches(module):
        forward = inspect.unwrap(type(module).forward)
        values[_ROTARY] = _of_all_patches(forward.__globals__[_ROTARY])
    return values


def _of_all_patches(rotary: Callable) -> Callable:
    """The same function, for this rank's tokens of an image: others' angles are cut off."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any) -> Any:
        call = running()
        if call is None or call.whole or not call.length:
            return rotary(q, k, cos, sin, **kwargs)
        ahead = (0, 0, call.length - cos.shape[-2], 0)  # tokens that are no patches: no angle
        angles = F.pad(cos, ahead, value=1.0), F.pad(sin, ahead)
        local = (call.layout.shard(t, {call.axis: t.dim() - 2}) for t in angles)
        return rotary(q, k, *local, **kwargs)

    return rotate


def follows_length(module: Foreign) -> bool:
    """True if a rotary embedding's parameters depend on the largest position there is."""
    kind = str(getattr(module, "rope_type", ""))
    return "dynamic" in kind or "longrope" in kind


@while_split
def show_last_position(module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A pre-hook of such an embedding: one more token, at the last position over all ranks."""
    arguments = named_arguments(module, args, kwargs)
    ids = arguments["position_ids"]
    end = ids.new_full((*ids.shape[:-1], 1), now(type(module).__name__).last_position)
    return (), arguments | {"position_ids": torch.cat([ids, end], -1)}


@while_split
def hide_last_position(module: Foreign, args: tuple, kwargs: dict, output: Any) -> Any:
    """A hook of such an embedding: the token that was added is cut off."""
    size = named_arguments(module, args, kwargs)["position_ids"].shape[-1]

    def cut(t: Tensor) -> Tensor:
        dim = max(d for d in range(t.dim() - 1) if t.shape[d] == size)
        return t.narrow(dim, 0, size - 1)

    return tuple(map(cut, output)) if isinstance(output, tuple) else cut(output)


# -- pools and statistics -------------------------------------------------------------------------


def balances(model: Foreign) -> bool:
    """True if the model's head has a loss that balances routers, of tokens that are no padding."""
    made_in = {kind.__module__ for kind in type(model).__mro__}
    modules = [sys.modules[name] for name in made_in if name in sys.modules]
    has = any(hasattr(module, "load_balancing_loss_func") for module in modules)
    return has and base(model) is not model and not pools(model)


def give_local(module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """A pre-hook of the model below a head that reads all tokens: this rank's inputs again."""
    call = running()
    if call is None or not call.local:
        return None
    arguments = named_arguments(module, args, kwargs)
    return (), arguments | {n: v for n, v in call.local.items() if n in arguments}


@while_split
def balance_next(module: Foreign, args: tuple, kwargs: dict, output: Any) -> None:
    """A hook of the model below a head that balances routers, whose loss the head makes now."""
    call = running()
    if call is not None and not call.constants:
        call.constants = True
        call.scope.enter_context(Constants())


def pools(model: Foreign) -> bool:
    """True if the model's head pools the tokens of the model below it."""
    return type(model).__name__.endswith(_POOLED_HEADS) and base(model) is not model


def base(model: Foreign) -> Foreign:
    """The model below a head; a model without head is its own."""
    below: Foreign = getattr(model, "base_model", model)
    if below is not model or not type(model).__name__.endswith(_POOLED_HEADS):
        return below
    return next((m for m in model.children() if hasattr(m, "set_attn_implementation")), model)


def text_decoder(model: Foreign) -> nn.Module | None:
    """The text decoder of a model that has towers of images or sound in front of it, else None."""
    try:
        config = model.config.get_text_config(decoder=True)
    except ValueError:  # of several
        return None
    if config is model.config or getattr(config, "is_encoder_decoder", False):
        return None
    for module in model.modules():  # a module comes before those within
        if module is model or not isinstance(module, PreTrainedModel):
            continue
        takes = "inputs_embeds" in inspect.signature(module.forward).parameters
        if takes and type(module.config) is type(config):
            return module
    return None


def poolers(model: Foreign) -> list[nn.Module]:
    """Modules that pool hidden states which they are given as (batch, tokens, embed)."""
    return [
        module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in ("pooler", "head", "attention_pool")
        and "pool" in type(module).__name__.lower()
    ]


def gather_hidden(layout: Layout, axis: str) -> Callable:
    """A pre-hook of a pooler: the hidden states of all tokens."""
    ways = layout.size(axis)

    @while_split
    def hook(module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        arguments = named_arguments(module, args, kwargs)
        name, hidden = next(iter(arguments.items()))
        return (), arguments | {name: gathered_rows(hidden, layout, {axis: 1}, ways)}

    return hook


def takes_first_token(path: str) -> bool:
    """True if a module may be given the first token's hidden state, cut out by its caller."""
    return path.rpartition(".")[2] == "post_layernorm"


def bring_first_token(layout: Layout, axis: str) -> Callable:
    """A pre-hook of such a module: broadcasts the first token's state from the rank that has it."""

    @while_split
    def hook(module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if args[0].dim() != 2:
            return None
        first, dims = layout.chunk(axis) == 0, layout.shard_dims(axis)
        return (partial_to_replicate(args[0] * float(first), dims, layout.bound),), kwargs

    return hook


def gather_base(layout: Layout, axis: str, pooled: bool) -> Callable:
    """A hook of a model, below its head if it has one: gathers outputs that the head reads."""
    ways = layout.size(axis)

    @while_split
    def hook(module: Foreign, args: tuple, kwargs: dict, output: Any) -> Any:
        if pooled and getattr(output, "last_hidden_state", None) is not None:
            gathered = gathered_rows(output.last_hidden_state, layout, {axis: 1}, ways)
            output["last_hidden_state"] = gathered
        logits = output.get("router_logits") if hasattr(output, "get") else None
        if logits:
            rows = len(next(t for name in _BY_SEQUENCE if (t := output.get(name)) is not None))
            parts = (_whole_router(t, rows, layout, axis) for t in logits)
            output["router_logits"] = tuple(parts)
        return output

    return hook


@while_split
def bring_first_state(
    entered: Foreign, module: Foreign, args: tuple, kwargs: dict, output: Any
) -> Any:
    """Make a pooled output that is the first state that of the first rank: a hook of a model."""
    if _pools_first_state(output):
        layout, axis = entered.layout, entered.axis
        first, dims = layout.chunk(axis) == 0, layout.shard_dims(axis)
        pooled = output.pooler_output * float(first)
        output["pooler_output"] = partial_to_replicate(pooled, dims, layout.bound)
    return output


def _pools_first_state(output: Any) -> bool:
    """True if a pooled output (b, d) is the first of the states (b, n, d), cut out of them."""
    pooled = getattr(output, "pooler_output", None)
    states = getattr(output, "last_hidden_state", None)
    if not isinstance(pooled, Tensor) or not isinstance(states, Tensor) or states.dim() != 3:
        return False
    first = states[:, 0]
    if pooled.shape != first.shape or pooled.storage_offset() != first.storage_offset():
        return False
    return memory_of(pooled)[0] == memory_of(states)[0]


def _whole_router(logits: Tensor, rows: int, layout: Layout, axis: str) -> Tensor:
    """(b n, experts) of this rank's tokens as (B N, experts) of all ranks'."""
    each = logits.reshape(rows, -1, logits.shape[-1])
    gathered = gathered_rows(each, layout, {"batch": 0, axis: 1}).as_subclass(Replicated)
    return gathered.flatten(0, 1) if logits.dim() == 2 else gathered

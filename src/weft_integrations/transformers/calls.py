"""One forward pass of a parallelized transformers model: hooks that begin and end it.

Before it, rows become fields, split over ranks; after it, outputs that have no parts become plain
tensors. In between the model's own code runs on fields, see `weft.Field`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from weft._digest import number_of
from weft._torch import active_ddp, in_transform, is_fsdp, module_call
from weft.comm.channel import Channel
from weft.comm.once_differentiable import transformed
from weft.errors import UnsupportedError, WeftError
from weft.masks import Documents
from weft.move.collectives import invariant_to_replicate, scale_backward
from weft.plan.call import reach
from weft.plan.held import Held
from weft_axes.carry.pieces import LocalPieces
from weft_axes.fields import Field, cut
from weft_axes.losses.labels import IGNORED, shift_labels

from .. import Foreign, consistency
from ..common import check_modules, in_outputs, named_arguments
from ..fields import generators
from ..units import let_fields_through
from . import refused
from .cache import ShardedCache
from .cache_layers import TAKES_COLUMNS
from .chosen_keys import chooses_over_ranks
from .defaults import (
    CACHES,
    Absent,
    asked,
    cache_name,
    differentiated,
    keeps_cache,
    put_cache,
    put_features,
)
from .facts import OTHER_INPUTS, VARLEN, RowFacts, padding_mask, sees_none, tokens_of
from .fused_head import fused_head_by_rows
from .mark import Mark
from .parts import attends_by_itself, base, biases_distances, encodes, rotates, window_of
from .rebinding import calls as calls_of
from .recurrences import WITHOUT_STATE
from .replicated import own_attention, recomputed_within
from .running import ModelCall, during, running

#: What ranks of a context group compare in each call.
_ROWS = (
    "a call of a parallelized model (all ranks of a context group pass the same rows, whole, "
    "and hold the same weights)"
)
#: What must be the same on ranks that generate the same tokens.
SAME_TOKENS = (
    "all ranks of a context group pass the same prompts and options, hold the same weights, and "
    "draw from the same seed: torch.manual_seed(seed) on each of them before generate"
)
#: What they compare at the end of a backward pass, and of a call that drew random numbers.
_BACKWARD = "a backward pass through the outputs of a parallelized model"
_DRAWN = (
    "the random numbers of a call of the model (ranks of a context group draw the same: give them"
    " one seed, torch.manual_seed(seed))"
)
_NO_LAST_STATES = (
    "recurrent states: its layers, or this version of transformers, do not take the states of split"
    " rows"
)
#: Caches that hold a prompt only if `generate` made them, or weft did.
_OF_GENERATE = ShardedCache, EncoderDecoderCache
#: Why the cache of an output that one device would have is not there.
_NOT_MADE = "a call makes none"
_IN_A_GRAPH = (
    "a call that may be differentiated is split without one; call the model within"
    " torch.no_grad(), or with use_cache=True, and every rank computes all of it"
)
#: Tokens for each rank from which those behind cached ones are split: fewer cost more in messages.
SPLIT_FROM = 16


class Calls:
    """Checks each call's arguments and completes them: fields, positions, a cache.

    A copy of the model has a copy of this, about the copied modules.
    """

    def __init__(self, model: Foreign, splits_inside: bool, decoder: nn.Module | None) -> None:
        placed = model._weft
        self.layout, self.axis, self.report = placed.layout, placed.axis, placed.ran_whole
        self.model, self.decoder, self.splits_inside = model, decoder, splits_inside
        self.stacks = bool(getattr(model.config, "is_encoder_decoder", False))
        self.implementation = model.config._attn_implementation
        self.configured = refused.configured(model, self.implementation)
        parameters = takes(model)
        self.names = tuple(parameters)
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.names_below = () if decoder is None else tuple(takes(decoder))
        parts = (model, decoder or base(model)) if self.open else (model,)
        self.takes_use_cache = any("use_cache" in takes(part) for part in parts)
        self.rotates = not self.stacks and rotates(model if decoder is None else decoder)
        self.sound_maskers = refused.sound_maskers(model)
        self.recurrent, self.of_rows = placed.recurrent, placed.of_rows
        self.choosers = [m for m in self.of_rows if chooses_over_ranks(m)]
        # For padding that sees no token, eager functions and masks that a bias is added to take the
        # mean of all tokens, and other functions give 0.
        self.biases = any(
            biases_distances(m) or hasattr(type(m), "prepare_dynamic_mask") for m in model.modules()
        )
        self.eager = any(implementation == "eager" for _, implementation in placed.own)
        self.attends_by_itself = self.implementation == placed.implementation or (
            not self.stacks and any(map(attends_by_itself, model.modules()))
        )
        self.fills_padding = not self.attends_by_itself and (self.eager or self.biases)
        skips = {"apply_mask_to_padding_states": None}
        self.states_of_padding = bool(self.recurrent) and not any(
            calls_of(module, skips) for module in self.recurrent
        )
        self.causal, self.window = self.stacks or not encodes(model), window_of(model)
        self.entered = consistency.Entered(self._compare_gradients, lambda: running() is not None)
        self.all_weights = consistency.AllWeights()
        self.generating = False  # tokens, of which a call gets one that the call before made
        self.warned: set[str] = set()

    # -- a call begins --------------------------------------------------------------------------

    def enter(self, module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before a forward pass."""
        kwargs = dict(zip(self.names, args)) | kwargs
        kwargs = {n: v.full_tensor() if isinstance(v, Field) else v for n, v in kwargs.items()}
        refused.exported(type(module).__name__, kwargs)
        call: ModelCall | WeftError
        compared = consistency.Compared()
        try:
            if in_transform():
                raise transformed(type(module).__name__)
            decodes = self.generating and _has_tokens(kwargs)
            if not decodes:
                check_modules(self.decoder or module, self.layout, self.axis)
            refused.another_attention(self.configured, self.implementation)
            refused.masked_sound(self.sound_maskers, self.layout, self.axis)
            refused.replaced_layers([*self.recurrent, *self.of_rows])
            if decodes:
                compared = consistency.of_tokens(kwargs)
            else:
                compared = consistency.of_call(module, kwargs, self.all_weights)
            call, kwargs = self._of_rows(kwargs, module)
        except WeftError as error:
            call = error
        channel, state = Channel(self.layout.bound, (), 0, "alone", str), consistency.NOTHING
        if self.layout.moves(self.axis):
            # All ranks learn of a refusal on one, or the others would wait for it.
            # Where there are labels, the loss asks all ranks.
            labelled = any(kwargs.get(n) is not None for n in ("labels", "shift_labels"))
            verdict, kind = f"a call of the model; labels {labelled}", None
            if compared.mode:
                verdict = f"{verdict}; {compared.mode}"
            if isinstance(call, WeftError):
                verdict = f"refused: {call}"
            elif compared.ahead:
                kind = number_of(f"a call {type(module).__name__} {call.held} {call.replicated}")
                verdict = f"{verdict}; {compared.described}; {call.how}"
                call.conclude = functools.partial(self._conclude, call, compared)
            else:
                state = compared.arrive()
                verdict = f"{verdict}; {state.text}; {call.how}"
            channel = self.agree(self._subject, verdict, state, kind)
        elif not isinstance(call, WeftError) and call.cache is not None:
            state = compared.arrive()
        if isinstance(call, WeftError):
            raise call
        if compared.mode and call.conclude is None:
            self.all_weights.count(module)
        if call.cache is not None and call.conclude is None:
            call.cache.record(state.text)
        if call.cache is not None:
            split = None if call.held else call.length
            call.scope.enter_context(call.cache.during(split, channel))
        self._open(call, module)
        return (), kwargs

    def enter_decoder(self, decoder: Foreign, args: tuple, kwargs: dict) -> tuple | None:
        """Before the text decoder of a model with images, in whose call rows are full so far."""
        call = running()
        if call is None or call.replicated:
            return None
        arguments = named_arguments(decoder.forward, args, kwargs)
        mask = arguments.get("attention_mask")
        if isinstance(mask, Mark):
            call.made_mask, arguments["attention_mask"] = mask, None
        elif not call.ahead:
            return None
        if call.ahead:
            call.ahead = False
            arguments = self._as_fields(call, arguments)
        return (), arguments

    def split_made(self, module: Foreign, args: tuple, kwargs: dict, output: Any) -> Any:
        """A hook of a submodule that makes tokens, of images: from here on they are split."""
        call = running()
        if call is None or call.replicated:
            return None
        if not isinstance(output, Tensor) or output.dim() != 3:
            raise UnsupportedError(
                f"{type(module).__name__} gives {type(output).__name__} and not one tensor (batch, "
                "tokens, embed), so its tokens cannot be split"
            )
        call.length, call.ahead = output.shape[1], False
        return cut(output, self.layout, {self.axis: 1}, self.report, True)

    def refuse(self, error: WeftError) -> None:
        """Tell the other ranks, which may be about to make a call, of a refusal on this one."""
        if self.layout.moves(self.axis):
            self.agree(_ROWS, f"refused: {error}")

    def _open(self, call: ModelCall, called: Foreign) -> None:
        """Enter the contexts that last until the end of the call of the model, or a part of it."""
        model, scope = self.model, call.scope
        if call.replicated:
            self._warn(call.replicated)
            scope.enter_context(own_attention(model, model._weft.own))
        elif call.held and call.unsplit:
            self._warn(call.unsplit)
        elif not call.held:
            scope.enter_context(self._same_numbers())
            for unit in filter(is_fsdp, model.modules()):
                let_fields_through(unit)
            # There may have been other calls of the model by then.
            scope.enter_context(recomputed_within(model, lambda: during(call)))
        call.model = called
        scope.enter_context(during(call))

    @contextlib.contextmanager
    def _same_numbers(self) -> Any:
        """Compare generators where a training call drew from them."""
        if not self.model.training or not self.layout.moves(self.axis):
            yield
            return
        before = generators()
        yield
        if before != generators():
            self.agree(_DRAWN, before)

    def _warn(self, reason: str) -> None:
        """Say once for each reason that a call is not split."""
        kind = reason.partition(":")[0]
        if kind in self.warned or not self.layout.moves(self.axis):
            return
        self.warned.add(kind)
        warnings.warn(
            f"{type(self.model).__name__}: every rank computes all of this call, which is not "
            f"split: {reason}",
            stacklevel=5,
        )

    def enter_part(self, part: Foreign, args: tuple, kwargs: dict) -> None:
        """Before a part of the model, which runs as it was where it is called by itself."""
        if running() is not None:
            return
        name = f"{type(part).__name__} of {type(self.model).__name__}"
        refused.adalora(self.model)
        reason = f"{name}: it is called outside of the forward pass of the model"
        self._open(ModelCall(self.layout, self.axis, replicated=reason), part)

    # -- what ranks compare ---------------------------------------------------------------------

    def agree(
        self,
        label: str,
        verdict: str,
        state: consistency.GroupState = consistency.NOTHING,
        kind: int | None = None,
    ) -> Channel:
        """Raise on all ranks of a context group unless all come here with the same."""
        dims = reach(self.layout.unbound, (self.axis,)).moving
        return consistency.agree(self.layout.bound, dims, label, verdict, state, kind)

    @property
    def _subject(self) -> str:
        return f"a call within generate ({SAME_TOKENS})" if self.generating else _ROWS

    def _conclude(self, call: ModelCall, compared: consistency.Compared) -> None:
        """Compare the state of a call that a GPU makes: all is launched, and nothing handed out."""
        state = compared.arrive()
        if call.cache is not None:
            call.cache.record(state.text)
        verdict = state.text or "no weights"
        kind = number_of("tokens") if self.generating and call.held else None
        self.agree(self._subject, verdict, state, kind)
        if compared.mode and call.model is not None:
            self.all_weights.count(call.model)

    def _compare_gradients(self, arrive: Any) -> None:
        """At the end of a backward pass, before an optimizer uses its gradients."""
        if self.layout.moves(self.axis):
            state = arrive()
            self.agree(_BACKWARD, state.text, state)

    # -- arguments ------------------------------------------------------------------------------

    def _of_rows(self, kwargs: dict, module: Foreign) -> tuple[ModelCall, dict]:
        """The call, and the arguments that the model's forward gets."""
        name = next((n for n in CACHES if kwargs.get(n) is not None), "")
        if isinstance(kwargs.get(name), Absent):
            kwargs[name].raise_()
        if isinstance(kwargs.get(name), ShardedCache):
            return self._with_cache(kwargs, module, name)
        if self.decoder is not None and refused.foreign(kwargs):
            refused.with_images(kwargs, self.layout)
        keeps = not name and keeps_cache(module, self.decoder, kwargs)
        cache, absent = self._new_cache(kwargs, module) if keeps else (None, "")
        local = dict(kwargs) if cache is None else _without_cache(kwargs)
        try:
            call, local = self._split(local, module, cached=cache is not None)
            if cache is not None:
                call.cache = cache
                local |= {cache_name(module): cache, "use_cache": True}
            call.absent, call.looks = absent, not keeps
            return call, local
        except UnsupportedError as error:
            return ModelCall(self.layout, self.axis, replicated=str(error)), kwargs

    def _new_cache(self, kwargs: dict, module: Foreign) -> tuple[ShardedCache | None, str]:
        """The cache that a call without one makes, or why a split call makes none."""
        if differentiated(module, kwargs):
            return None, _IN_A_GRAPH
        if self.choosers:
            return None, f"{_NOT_MADE} of a model that chooses its keys"
        if kwargs.get("cu_seq_lens_q") is not None:
            return None, f"{_NOT_MADE} of documents that are packed by cu_seq_lens_q"
        if (
            not cache_name(module)
            or not getattr(module, "_supports_default_dynamic_cache", lambda: True)()
        ):
            return None, f"{_NOT_MADE} of this model; weft.restore(model) gives one device's"
        if self.crosses:
            return None, f"{_NOT_MADE} of this model, which keeps keys of other states, too"
        try:
            cache = ShardedCache(module)
        except UnsupportedError as error:
            return None, str(error)
        if cache.recurrent and not self._gives_states(cache, 0):
            return None, _NO_LAST_STATES
        return cache, ""

    @property
    def crosses(self) -> bool:
        """True if layers keep keys of other states."""
        names = ("cross_attention_states", "encoder_hidden_states")
        return self.stacks or any(name in self.names_below for name in names)

    def _with_cache(self, kwargs: dict, module: Foreign, name: str) -> tuple[ModelCall, dict]:
        """The same of a call with a `ShardedCache`: split, or whole tokens on every rank."""
        refused.caches(kwargs, module)
        refused.caches_of_choices(self.choosers)
        cache, ids = kwargs[name], tokens_of(kwargs)
        cache.check(module, self.layout, None if ids is None else len(ids))
        past = cache.get_seq_length()
        held = ModelCall(self.layout, self.axis, cache=cache, held=True, past=past)
        if cache.recurrent and not self._gives_states(cache, past):
            held.unsplit = "" if past else _NO_LAST_STATES
            return held, kwargs
        local = _without_cache(kwargs)
        if past and (refused.foreign(kwargs) or not self._cut_past(held, cache, local)):
            return held, kwargs
        try:
            call, local = self._split(local, module, past, cached=True)
        except UnsupportedError as error:
            few = str(error).startswith("few tokens")  # as short prompts may have
            held.unsplit = "" if few else str(error)
            return held, kwargs
        call.cache, call.past, call.padding = cache, past, held.padding
        return call, local | {name: cache, "use_cache": True}

    def _split(self, kwargs: dict, module: Foreign, past: int = 0, cached: bool = False) -> tuple:
        """A call whose tokens are split, of arguments without those of a cache."""
        refused.arguments(kwargs, module)
        dims, share = self.layout.shard_dims(self.axis), 1 / self.layout.size(self.axis)
        kwargs = {
            n: invariant_to_replicate(scale_backward(v, share), dims, self.layout.bound)
            if isinstance(v, Tensor) and v.requires_grad and torch.is_grad_enabled()
            else v
            for n, v in kwargs.items()
        }
        named = kwargs.get("return_dict")
        as_tuple = not (getattr(self.model.config, "return_dict", True) if named is None else named)
        if as_tuple:  # until the end: weft reads outputs by name
            kwargs["return_dict"] = True
        if kwargs.get("fused_lm_head"):
            fused_head_by_rows()
        if self.takes_use_cache:
            refused.masks_of_caches(kwargs, module)
            kwargs["use_cache"] = False
        how: Any = {"report": self.report, "as_tuple": as_tuple, "eager": self.eager}
        call = ModelCall(self.layout, self.axis, **how)
        if self.splits_inside:
            call.ahead = True
            return call, kwargs
        call.facts = facts = RowFacts.of(kwargs)
        call.length, call.ids = facts.length, kwargs.get("input_ids")
        if min(Held.of(self.layout, self.axis, call.length).counts) == 0:
            raise UnsupportedError(
                f"few tokens: {call.length} leave a rank of mesh {dict(self.layout.mesh)} without"
                " any"
            )
        if self.attends_by_itself and (facts.documents is not None or facts.by_positions):
            raise UnsupportedError("documents packed in a row: the model makes masks by itself")
        if cached and facts.padding is not None:
            padding_mask(facts.padding)
        self._check_padding(kwargs, module)
        refused.padding_of_choices(self.choosers, facts)
        if self.recurrent:
            apart = facts.documents is not None and not facts.by_positions
            packed = Documents(facts.documents or ()) if apart else None
            call.state = LocalPieces(self.layout, self.axis, call.length, packed)
        if facts.documents is not None and not facts.by_positions:
            kwargs = {n: v for n, v in kwargs.items() if n not in VARLEN}
        call.ahead = self.decoder is not None and bool(refused.foreign(kwargs))
        if call.ahead:
            return call, kwargs
        return call, self._as_fields(call, kwargs, past)

    def _as_fields(self, call: ModelCall, kwargs: dict, past: int = 0) -> dict:
        """A call's arguments with those of tokens split: all whose second dim, (b, n, ...), is."""
        made = {n: self._field(call, n, v) for n, v in kwargs.items()}
        x = tokens_of(kwargs)
        if self.rotates and kwargs.get("position_ids") is None and x is not None:
            positions = torch.arange(past, past + call.length, device=x.device)[None]
            if self.attends_by_itself:  # and may look its angles up row by row
                positions = positions.expand(len(x), -1)
            made["position_ids"] = self._field(call, "position_ids", positions)
        names = "attention_mask", "decoder_attention_mask"
        masks = [n for n in names if kwargs.get(n) is not None]
        for name in masks:
            if isinstance(made[name], Field):
                made[name]._trail = number_of(name)
        mask = made["attention_mask"] if masks == ["attention_mask"] else None
        if isinstance(mask, Field) and not mask._local.is_inference():
            call.given, padding = mask, call.facts.padding
            with contextlib.suppress(UnsupportedError):  # of padding that only a tensor says
                known = None if padding is None else padding_mask(padding)
                alike: Any = mask, mask.bool(), mask.to(device=mask.device, dtype=torch.bool)
                ways = [call.history(x) for x in alike if not x.is_floating_point()]
                call.paddings = dict.fromkeys(ways, known)
        return made

    def _field(self, call: ModelCall, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Field) or value.dim() < 2:
            return value
        if name.startswith(OTHER_INPUTS) or (name == "labels" and not self.stacks):
            return (
                value  # of labels every rank takes those of its logits: none travel as they shift
            )
        if name == "position_ids":
            dim = value.dim() - 1
            return cut(value, self.layout, {self.axis: dim}, self.report, True)
        of_tokens = value.shape[1] == call.length or (self.stacks and not name.startswith("enc"))
        of_tokens &= value.shape[1] > 1
        return cut(value, self.layout, {self.axis: 1}, self.report, True) if of_tokens else value

    def _check_padding(self, kwargs: dict, module: Foreign) -> None:
        """Refuse a call that reads padding which sees no token, where weft gives other numbers."""
        masks = {n: kwargs.get(n) for n in ("attention_mask", "decoder_attention_mask")}
        for name, mask in masks.items() if self.biases else ():
            if isinstance(mask, Tensor):  # else a mask of all pairs meets a bias of a rank's tile
                refused.more_than_padding(name, mask)
        name = "decoder_attention_mask" if self.stacks else "attention_mask"
        mask = masks[name]
        if not self.fills_padding or mask is None or mask.dim() != 2:
            return
        blind = sees_none(mask.bool().cpu(), self.causal, self.window)
        if not blind.any():
            return
        states = asked(module, kwargs, "output_hidden_states")
        read = "output_hidden_states asks for its states" if states else ""
        read = "its recurrent layers take it in" if self.states_of_padding else read
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if labels is None and shifted is None and not self.generating:
            read = read or "the call has no labels, so that its logits are read"
        of_next = None if labels is None or self.stacks else shift_labels(labels)
        for each in (labels, of_next, shifted):
            if each is None or each.shape != blind.shape:
                continue
            if (blind.to(each.device) & (each != IGNORED)).any():
                read = "labels at padding, or of the first token behind it, count"
        if read:
            refused.padding_that_is_read(name, read, self.biases)

    def _gives_states(self, cache: ShardedCache, past: int) -> bool:
        """True if recurrent layers, split over ranks, hand a cache the states of full rows."""
        numbers = {getattr(module, "layer_idx", None) for module in self.recurrent}
        if past and any(calls_of(module, WITHOUT_STATE) for module in self.recurrent):
            return False
        return TAKES_COLUMNS and cache.recurrent <= numbers

    def _cut_past(self, held: ModelCall, cache: ShardedCache, local: dict) -> bool:
        """True if tokens after cached ones are split; cuts their padding off."""
        ids = tokens_of(local)
        config = self.model.config.get_text_config(decoder=True)
        chunked = getattr(config, "attention_chunk_size", None) is not None
        if ids is None or chunked or not (self.rotates or cache.recurrent):
            return False
        if ids.shape[1] < SPLIT_FROM * self.layout.size(self.axis):
            return False
        if cache.recurrent and 1 in Held.of(self.layout, self.axis, ids.shape[1]).counts:
            return False  # its layers take one token for a step of decoding
        padding = local.get("attention_mask")
        if padding is None:
            return True
        if padding.dim() != 2 or padding.shape[1] != held.past + ids.shape[1]:
            return False
        before, local["attention_mask"] = padding.bool().tensor_split([held.past], 1)
        held.padding = None if before.all() else before
        return True

    # -- outputs --------------------------------------------------------------------------------

    def leave(self, module: Foreign, args: tuple, kwargs: dict, output: Any) -> Any:
        """After a forward pass, also one that raised."""
        call = running()
        if call is None or call.model is not module:
            return None  # refused before it began
        call.scope.close()
        if output is not None and call.conclude is not None:
            call.conclude()
        if output is None or call.replicated or call.held:
            return None
        if isinstance(output, MutableMapping):
            if call.absent:
                put_cache(output, call.absent)
            if call.spread:
                put_features(output)
        output = in_outputs(output, self.handed_out)
        return output.to_tuple() if call.as_tuple else output

    def handed_out(self, x: Tensor) -> Tensor:
        """An output: a field without parts is a plain tensor, on every rank.

        Within `generate` all are: of logits of tokens that are guessed it makes its next call.
        """
        as_field = not self.generating and not _is_sunk()
        return self.entered.hand_out(x, as_field) if isinstance(x, Field) else x


def whole_call(self: Foreign, *args: Any, **kwargs: Any) -> Any:
    """A call of the model, whose modules leave the graphs of torch.compile."""
    self._weft.leave_graphs(self)
    return module_call(self, *args, **kwargs)


def takes(module: Foreign) -> Mapping[str, inspect.Parameter]:
    """The arguments of a module's forward."""
    return inspect.signature(module.forward).parameters


def _is_sunk() -> bool:
    """True where DDP hands outputs through a function of its own, which takes whole tensors."""
    ddp: Any = active_ddp()
    return ddp is not None and (ddp.find_unused_parameters or ddp.static_graph)


def _has_tokens(kwargs: dict) -> bool:
    """True for the cache of a prompt that `generate` read."""
    caches = (kwargs.get(name) for name in CACHES)
    return any(isinstance(c, _OF_GENERATE) and c.get_seq_length() for c in caches)


def _without_cache(kwargs: dict) -> dict:
    return {n: v for n, v in kwargs.items() if n not in (*CACHES, "use_cache")}

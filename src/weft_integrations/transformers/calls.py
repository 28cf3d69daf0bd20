"""One forward pass of a parallelized transformers model: hooks that begin and end it.

Before it, arguments are checked, cut where rows are whole, and completed; after it, outputs are
gathered.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from weft._digest import number_of
from weft._torch import outside_graphs
from weft._uploads import upload
from weft.carry.pieces import LocalPieces
from weft.comm.channel import Channel
from weft.errors import ShapeError, UnsupportedError, WeftError
from weft.layout import Layout, check_not_averaged
from weft.losses.labels import IGNORED, shift_labels
from weft.masks import Documents
from weft.plan.call import reach

from .. import Foreign
from ..common import named_arguments, refuse_scaled_by_tensor, tokens_per_chunk
from . import consistency, losses, refused, rows
from .batches import Batch, sees_none, tokens_of, unpadded
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
from .noise import neftune_scaled, own_random_numbers
from .rebinding import calls as calls_of
from .recurrences import WITHOUT_STATE
from .recurrent_modules import GIVE_NO_STATES
from .replicated import own_attention, own_implementations, recomputed_within
from .running import Fused, ModelCall, during, running
from .seam import OF_TOKENS, crossing, cut_arguments, without_mark
from .stacks import (
    OF_ENCODER,
    WHOLE,
    Stacks,
    biases_distances,
    of_decoder,
    with_decoder_ids,
)
from .whole import (
    accepts_positions,
    balances,
    encodes,
    follows_length,
    leaves_padding_out,
    makes_positions,
    masks_see_positions,
    may_skip_padding,
    pools,
    scales_by_masked,
    takes_block_types,
    window_of,
)

#: What ranks of a context group compare in each call.
_ROWS = (
    "a call of a model with rows='whole' (all ranks of a context group pass the same rows, whole, "
    "and hold the same weights)"
)
#: What must be the same on ranks that generate the same tokens.
SAME_TOKENS = (
    "all ranks of a context group pass the same prompts and options, hold the same weights, and "
    "draw from the same seed: torch.manual_seed(seed) on each of them before generate"
)
#: What they compare at the end of a backward pass.
_BACKWARD = "a backward pass through the outputs of a model with rows='whole'"
_NO_LAST_STATES = (
    "recurrent states: its layers, or this version of transformers, do not take the states of split"
    " rows"
)
#: Caches that hold a prompt only if `generate` made them, or weft did.
_OF_GENERATE = ShardedCache, EncoderDecoderCache
#: Why the cache of an output that one device would have is not there.
_MAKE_ONE = "cache=weft.ShardedCache(model) in every call of a loop gives one"
_NOT_MADE = "a call makes none"
_IN_A_GRAPH = (
    "a call that may be differentiated is split without one; call the model within"
    " torch.no_grad(), or with use_cache=True, and every rank computes all of it"
)
_OF_LOCAL_ROWS = "with rows='local' a model keeps no keys; parallelize with rows='whole'"
#: Said where one device takes no documents, and a user may think that it does.
_DOCUMENTS = (
    "position_ids start anew, and the call asks for a cache, as by config.use_cache: transformers"
    " takes them for packed documents only without one, so tokens see earlier documents; pass"
    " use_cache=False to keep documents apart"
)
_NOT_GIVEN = (
    "position_ids start anew, and the model gives its masks none, so transformers takes them for no"
    " documents: tokens see earlier ones; pass cu_seq_lens_q to keep documents apart"
)
_STATES = (
    "position_ids start anew, by which transformers keeps packed documents apart in attention only:"
    " states of recurrent layers go on from one to the next; cu_seq_lens_q lets them begin anew"
)
#: Tokens for each rank from which those behind cached ones are split: fewer cost more in messages.
SPLIT_FROM = 16


@outside_graphs
def leave(module: Foreign, args: tuple, kwargs: dict, output: Any) -> Any:
    """After a forward pass, also one that raised."""
    call = running()
    if call is None or call.model is not module:
        return None  # refused before it began
    call.scope.close()
    if output is not None and call.conclude is not None:
        call.conclude()
    if output is not None and call.seam == "ahead":
        raise UnsupportedError(
            f"{type(module).__name__}: its decoder was not called in a call whose decoder is split,"
            " so nothing was; call weft.restore(model) for such calls on one device"
        )
    if output is None or call.whole:
        return None
    if call.fused is not None:
        items, aux = call.fused.items, call.fused.aux
        output["loss"] = rows.fused_loss(output, items, call.layout, call.axis, aux)
    elif not call.pooled:
        if call.labels_behind is not None:
            targets = call.labels_behind
            output["loss"] = losses.loss_of(call.layout, call.labels, output.logits, targets, True)
            output.move_to_end("loss", last=False)
        losses.check_loss(output, type(module).__name__, call.labelled, call.outputs is not None)
    output = losses.plain(output)
    if call.absent:
        put_cache(output, call.absent)
    if call.outputs is not None:
        if call.spread:
            put_features(output)
        output = call.outputs(output, call.length)
        if call.fused is not None and call.fused.cut:
            output = rows.without_last(output)
    elif call.layout.size(call.axis) > 1:
        output = rows.share_outputs(output, call.pooled, call.layout.size(call.axis))
    return output.to_tuple() if call.as_tuple else output


class Calls:
    """Checks each call's arguments and completes them: positions, no cache, the loss's labels.

    A copy of the model has a copy of this, about the copied modules.
    """

    def __init__(
        self,
        model: Foreign,
        layout: Layout,
        axis: str,
        splits_inside: bool,
        full: bool,
        recurrent: Iterable[nn.Module] = (),
        of_rows: Iterable[nn.Module] = (),
        decoder: nn.Module | None = None,
        stacks: Stacks | None = None,
    ) -> None:
        self.layout, self.axis, self.splits_inside, self.whole = layout, axis, splits_inside, full
        self.model, self.decoder, self.stacks = model, decoder, stacks
        self.implementation = model.config._attn_implementation
        self.configured = refused.configured(model, self.implementation)
        parameters = inspect.signature(model.forward).parameters
        self.names = tuple(parameters)
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.own_positions = makes_positions(model if decoder is None else decoder)
        self.takes_positions = accepts_positions(model)
        self.crosses = decoder is not None and bool(crossing(decoder))
        below = () if decoder is None else inspect.signature(decoder.forward).parameters
        self.names_below = tuple(below)
        self.follows_length = any(map(follows_length, model.modules()))
        self.may_skip_padding = may_skip_padding(model)
        self.pooled, self.balances = pools(model), balances(model) and stacks is None
        self.labels, self.encoder = losses.labels_of(model), encodes(model)
        self.shifts_by_mask = losses.shifts_by_mask(model)
        flash = "flash" in str(model._weft.implementation)  # whose kernels look by themselves
        self.masks_see_positions = flash or masks_see_positions(model)
        self.scaling = next(filter(scales_by_masked, model.modules()), None)
        split = [model if decoder is None else decoder] if stacks is None else stacks.split
        self.sound_maskers = refused.sound_maskers(model)
        self.droppers = [m for part in split for m in refused.layer_droppers(part)]
        self.recurrent, self.of_rows = list(recurrent), list(of_rows)
        self.choosers = [m for m in self.of_rows if chooses_over_ranks(m)]
        self.leaves_padding_out = leaves_padding_out(model)
        # For padding that sees no token, eager functions and masks that a bias is added to take the
        # mean of all tokens, and other functions give 0.
        self.biases = any(map(biases_distances, split[-1].modules()))
        eager = "eager" in own_implementations(split[-1], model._weft.own)
        self.fills_padding = not self.pooled and (eager or self.biases)
        self.causal, self.window = stacks is not None or not self.encoder, window_of(split[-1])
        self.block_types = takes_block_types(model)
        self.entered = consistency.Entered(self._compare_gradients)
        self.all_weights = consistency.AllWeights()
        self.generating = False  # tokens, of which a call gets one that the call before made
        self.warned: set[str] = set()

    @outside_graphs
    def enter(self, module: Foreign, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before a forward pass."""
        kwargs = dict(zip(self.names, args)) | kwargs
        refused.exported(type(module).__name__, kwargs)
        call: ModelCall | WeftError
        compared = consistency.Compared()
        try:
            refused.transform(type(module).__name__)
            refused.another_attention(self.configured, self.implementation)
            refused.layer_drop(self.droppers, self.layout, self.axis)
            refused.masked_sound(self.sound_maskers, self.layout, self.axis)
            refused.replaced_layers([*self.recurrent, *self.of_rows])
            refuse_scaled_by_tensor(module, self.layout, self.axis)
            compared = self._compared(module, kwargs)
            if self.whole:
                call, kwargs = self._of_whole_rows(kwargs, module)
            else:
                call = self._of_local_rows(kwargs, module)
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
                verdict = f"{verdict}; {compared.described}"
                call.conclude = functools.partial(self._conclude, call, compared)
            else:
                state = compared.arrive()
                verdict = f"{verdict}; {state.text}".removesuffix("; ")
            if self.whole and not isinstance(call, WeftError):
                verdict = f"{verdict}; {call.how}"
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

    @outside_graphs
    def enter_decoder(self, decoder: Foreign, args: tuple, kwargs: dict) -> tuple | None:
        """Before the text decoder of a model with images, in whose call rows are full so far."""
        call = running()
        if call is None or call.replicated:
            return None
        arguments = named_arguments(decoder, args, kwargs)
        if not call.seam:
            return without_mark(call, arguments)
        cut = cut_arguments(call, decoder, arguments)
        if self.follows_length and arguments.get("position_ids") is not None:
            call.last_position = int(arguments["position_ids"].max())
        self._draw(call)
        return (), cut

    @outside_graphs
    def enter_encoder(self, encoder: Foreign, args: tuple, kwargs: dict) -> tuple | None:
        """Before the encoder of a model that has a decoder; `leave` ends it."""
        call = running()
        source = None if call is None else call.source
        if source is None:
            return None
        changed = None
        if not source.replicated:
            source.model = self.model
            changed = (), cut_arguments(source, encoder, named_arguments(encoder, args, kwargs))
        source.model, enter = encoder, source.scope.enter_context
        enter(during(source))
        if source.replicated:
            enter(own_attention(encoder, self.model._weft.own))
        else:
            enter(recomputed_within(encoder, lambda: during(source)))
            self._draw(source)
        return changed

    def _draw(self, call: ModelCall) -> None:
        """Let what is behind a seam draw this rank's own random numbers, in training."""
        if not self.model.training or self.layout.size(self.axis) == 1:
            return
        call.scope.enter_context(own_random_numbers(self.model, self.layout, self.axis))
        if self.stacks is not None:  # embeddings are behind it, too
            share = self.layout.local_length(self.axis, call.length) / call.length
            call.scope.enter_context(neftune_scaled(self.model, share))

    def refuse(self, error: WeftError) -> None:
        """Tell the other ranks, which may be about to make a call, of a refusal on this one."""
        if self.layout.moves(self.axis):
            self.agree(_ROWS, f"refused: {error}")

    def _open(self, call: ModelCall, called: Foreign) -> None:
        """Enter the contexts that last until the end of the call of the model, or a part of it."""
        model, scope = self.model, call.scope
        if call.replicated:
            self._warn(call.replicated)
            scope.enter_context(model._weft.own_model(model))
        elif call.held:
            if call.unsplit:
                self._warn(call.unsplit)
            scope.enter_context(model._weft.own_loss(model))
        elif call.seam:
            pass  # draws the same numbers on all ranks as far as the decoder, which enters its own
        elif self.whole and model.training and self.layout.size(self.axis) > 1:
            scope.enter_context(own_random_numbers(model, self.layout, self.axis))
            if call.length:
                share = self.layout.local_length(self.axis, call.length) / call.length
                scope.enter_context(neftune_scaled(model, share))
        # There may have been other calls of the model by then.
        if self.recurrent or self.of_rows or self.stacks is not None:
            scope.enter_context(recomputed_within(model, lambda: during(call)))
        call.model = called
        scope.enter_context(during(call))

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

    def _tell(self, text: str) -> None:
        """Warn once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(f"{type(self.model).__name__}: {text}", stacklevel=6)

    @outside_graphs
    def enter_part(self, part: Foreign, args: tuple, kwargs: dict) -> None:
        """Before a part of the model, which runs as it was where it is called by itself."""
        if running() is not None:
            return
        name = f"{type(part).__name__} of {type(self.model).__name__}"
        refused.adalora(self.model)
        if not self.whole:
            raise UnsupportedError(
                f"{name} is called outside of the forward pass of the model, which alone knows "
                "this rank's tokens with rows='local'; parallelize with rows='whole', or this "
                "part alone"
            )
        reason = f"{name}: it is called outside of the forward pass of the model"
        self._open(ModelCall(self.layout, self.axis, replicated=reason), part)

    def agree(
        self,
        label: str,
        verdict: str,
        state: consistency.GroupState = consistency.NOTHING,
        kind: int | None = None,
    ) -> Channel:
        """Raise on all ranks of a context group unless all come here with the same.

        A verdict, in words, begins with "refused" where this rank refuses; numbers of `state` may
        be close. The channel is the one by which they compare it. With a `kind`, on which ranks
        agreed before, they raise when the next pass begins, before its messages.
        """
        transport, dims = self.layout.bound, reach(self.layout.unbound, (self.axis,)).moving
        numbers = any(state.numbers)
        vote = number_of(f"{verdict} {numbers}")
        common = transport, dims, number_of(verdict), "a call of the model", lambda: verdict, vote
        channel = Channel(*common, kind=kind, subject=label)
        if kind is not None and not numbers:
            channel.finish()
        elif not channel.agrees() or numbers:
            every = channel.exchange(state.numbers)
            consistency.check_close(every, state, transport.world_ranks)
        return channel

    @property
    def _subject(self) -> str:
        if self.generating:
            return f"a call within generate ({SAME_TOKENS})"
        return _ROWS if self.whole else "a call of the model"

    def _compared(self, module: Foreign, kwargs: dict) -> consistency.Compared:
        """The state that ranks compare in a call."""
        if not self.whole:
            return consistency.of_local_rows(module, self.all_weights)
        caches = (kwargs.get(n) for n in CACHES)
        held = any(isinstance(c, _OF_GENERATE) and c.get_seq_length() for c in caches)
        if self.generating and held:
            return consistency.of_tokens(kwargs)
        return consistency.of_call(module, kwargs, self.all_weights)

    def _conclude(self, call: ModelCall, compared: consistency.Compared) -> None:
        """Compare the state of a call that a GPU makes: all is launched, and nothing handed out."""
        state = compared.arrive()
        if call.cache is not None:
            call.cache.record(state.text)
        verdict = state.text or "no weights"
        if (error := call.check_masks()) is not None:
            verdict = f"refused: {error}"
        kind = number_of("tokens") if self.generating and call.held and error is None else None
        self.agree(self._subject, verdict, state, kind)
        if error is not None:
            raise error
        if compared.mode and call.model is not None:
            self.all_weights.count(call.model)

    def _compare_gradients(self, arrive: Callable[[], consistency.GroupState]) -> None:
        """At the end of a backward pass, before an optimizer uses its gradients."""
        if self.layout.moves(self.axis):
            state = arrive()
            self.agree(_BACKWARD, state.text, state)

    def _of_local_rows(self, kwargs: dict, module: Foreign) -> ModelCall:
        batch = kwargs.pop("weft", None)
        if batch is None and not self.splits_inside:
            raise UnsupportedError(
                f"{type(module).__name__} was parallelized with rows='local', where a call carries "
                "the weft=Batch that shard_batch makes: without it full rows would be taken for "
                "this rank's chunk; call model(**shard_batch(batch, layout)), or parallelize with "
                "rows='whole' and pass full rows"
            )
        refused.arguments(kwargs, module, self.axis, self.splits_inside)
        refused.local_blocks(kwargs, self.block_types)
        if torch.is_grad_enabled():
            check_not_averaged(module, self.layout)  # its gradients are to be summed
        if self.splits_inside:
            kwargs |= rows.with_full_gradients(kwargs, self.layout, self.axis, averaged=False)
        keeps = keeps_cache(module, kwargs)
        call = self._complete(kwargs, batch or Batch(), type(module).__name__)
        call.absent = _OF_LOCAL_ROWS if keeps else ""
        if call.length and not self.splits_inside:
            given = {**kwargs, "shift_labels": kwargs.get("labels")}
            self._check_padding(given, call.batch, module, call.length)
        return call

    def _check_padding(
        self, kwargs: dict, batch: Batch, module: Foreign, length: int | None = None
    ) -> None:
        """Refuse a call that reads padding which sees no token, where weft gives other numbers.

        Of full rows or, with their length, of a rank's, whose labels are those of its outputs.
        """
        n = batch.length if length is None else length
        seen = unpadded(batch.mask, n) if self.fills_padding and n else None
        if seen is None or not (blind := sees_none(seen, self.causal, self.window)).any():
            return
        left = not seen[:, 0].all()
        targets, labels = kwargs.get("shift_labels"), kwargs.get("labels")
        if length is not None:
            blind = self.layout.shard(blind, {"batch": 0, self.axis: 1})
        elif labels is not None and labels.dim() == 2 and self.labels == losses.OWN:
            targets = labels
        elif labels is not None and labels.dim() == 2 and targets is None:
            targets = shift_labels(labels)
        names = ("output_hidden_states", *(() if self.balances else ("output_router_logits",)))
        read = next((f"{n} asks for its states" for n in names if asked(module, kwargs, n)), "")
        if targets is not None:
            counted = targets.as_subclass(Tensor) != IGNORED
            if (blind.to(counted.device) & counted).any():
                read = refused.LABELS[left and self.labels == losses.NEXT]
        elif self.stacks is not None:
            read = read or "the call has no labels, so that its logits are read"
        if read:
            refused.padding_that_is_read(read, self.biases, self.stacks is not None)

    def _of_whole_rows(self, kwargs: dict, module: Foreign) -> tuple[ModelCall, dict]:
        """The call, and the arguments that the model's forward gets."""
        if kwargs.get("weft") is not None:
            raise UnsupportedError(
                f"{type(module).__name__} was parallelized with rows='whole' and takes full rows, "
                "and shard_batch has cut these: pass them whole, or parallelize with rows='local'"
            )
        name = next((n for n in CACHES if kwargs.get(n) is not None), "")
        if isinstance(kwargs.get(name), Absent):
            kwargs[name].raise_()
        if isinstance(kwargs.get(name), ShardedCache):
            return self._with_cache(kwargs, module, name)
        if self.decoder is not None and refused.foreign(kwargs):
            refused.with_images(kwargs, self.layout)
        keeps = not name and keeps_cache(module, kwargs)
        cache, absent = self._new_cache(kwargs, module) if keeps else (None, "")
        local = dict(kwargs) if cache is None else _without_cache(kwargs)
        try:
            call, local = self._split(kwargs, local, module, cached=keeps)
            if cache is not None:
                call.cache = cache
                local |= {cache_name(module): cache, "use_cache": True}
            call.absent = absent
            if not self.encoder and rows.start_anew(kwargs):
                if not self.masks_see_positions:
                    self._tell(_NOT_GIVEN)
                elif keeps:
                    self._tell(_DOCUMENTS)
                elif self.recurrent and call.batch.by_positions:
                    self._tell(_STATES)
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
        if any(m.__dict__.get("_compiled_call_impl") is not None for m in module.modules()):
            return None, f"{_NOT_MADE} by compiled layers; {_MAKE_ONE}"
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
            call, local = self._split(kwargs, local, module, cached=True, past=past)
        except UnsupportedError as error:
            few = str(error).startswith("few tokens")  # as short prompts may have
            held.unsplit = "" if few else str(error)
            return held, kwargs
        call.cache, call.past, call.padding = cache, past, held.padding
        return call, local | {name: cache, "use_cache": True}

    def _split(
        self, kwargs: dict, local: dict, module: Foreign, cached: bool = False, past: int = 0
    ) -> tuple[ModelCall, dict]:
        """A call whose tokens are split, of arguments without those of a cache."""
        if self.stacks is not None:
            return self._split_stacks(local, module)
        keep = 0
        if kwargs.get("labels") is None and isinstance(kwargs.get("logits_to_keep"), int):
            keep = local.pop("logits_to_keep")
            if "logits_to_keep" not in (*self.names, *self.names_below):
                keep = 0  # on one device it is ignored
        ahead = self.decoder is not None and bool(refused.foreign(local)) and not self.pooled
        refused.arguments(local, module, self.axis, self.splits_inside or ahead)
        local = rows.with_full_gradients(local, self.layout, self.axis)
        if self.shifts_by_mask:
            local = losses.without_padding(local)
        if ahead:
            types, local = local, _of_tokens(local)
        else:
            types = self._whole_types(local, past)
        if not self.splits_inside:
            look = self.masks_see_positions and not cached
            local = rows.cut(local, self.layout, self.axis, look, self.encoder)
            labelled = losses.without_padding(kwargs) if self.shifts_by_mask else kwargs
            self._check_padding(labelled, local["weft"], module)
        call = self._complete(local, local.pop("weft", Batch()), type(module).__name__, past)
        call.outputs = rows.Outputs(self.layout, self.axis, self.entered, self.pooled)
        if self.shifts_by_mask:
            call.labels_behind = local.pop("labels", None)
        if keep:
            last = rows.Last.of(keep, call.length, self.layout, self.axis)
            call.outputs.last, local["logits_to_keep"] = last, last.local
        if local.get("fused_lm_head"):
            config = module.config.get_text_config()
            aux = getattr(config, "router_aux_loss_coef", 0.0)
            cut = kwargs.get("shift_labels") is None
            call.fused = Fused(kwargs.get("num_items_in_batch"), aux, cut)
        return call, self._ahead(call, local, types) if ahead else local | types

    def _split_stacks(self, full: dict, module: Foreign) -> tuple[ModelCall, dict]:
        """The same of a model of an encoder and a decoder, in front of both of which it is."""
        assert self.stacks is not None  # it has both
        refused.arguments(full, module, self.axis, splits_inside=True)
        full = with_decoder_ids(module, rows.with_full_gradients(full, self.layout, self.axis))
        local = rows.cut(of_decoder(full), self.layout, self.axis, look=False)
        self._check_padding(full, local["weft"], module)
        call = self._complete(local, local.pop("weft"), type(module).__name__)
        call.seam, call.source = "ahead", self._source(full)
        call.outputs = rows.Outputs(self.layout, self.axis, self.entered, self.pooled)
        call.outputs.source = call.source.length
        kept = ("labels", "use_cache", "return_dict")
        return call, full | {n: local[n] for n in kept if n in local}

    def _source(self, full: dict) -> ModelCall:
        """The call of the encoder, of arguments of full rows."""
        assert self.stacks is not None  # it is one of two
        if not self.stacks.splits:
            return ModelCall(self.layout, self.axis, replicated=WHOLE)
        tokens = {n: full[n] for n in OF_ENCODER if full.get(n) is not None}
        local = rows.cut(tokens, self.layout, self.axis, look=False)
        batch, x = local.pop("weft"), tokens_of(local)
        assert x is not None  # it was cut
        source = ModelCall(self.layout, self.axis, batch, batch.length, seam="ahead")
        source.positions = self.layout.positions(self.axis, source.length, x.device)
        source.last_position = source.length - 1
        return source

    def _ahead(self, call: ModelCall, local: dict, full: dict) -> dict:
        """Arguments of a model ahead of its decoder: full rows, and a rank's for its head."""
        call.seam, call.ids = "ahead", full.get("input_ids")
        kept = {n: v for n, v in local.items() if n not in OF_TOKENS or "labels" in n}
        full = {n: v for n, v in full.items() if n not in ("labels", "shift_labels")}
        if self.balances:  # its loss counts by the mask that the head gets
            call.local = {"attention_mask": full.pop("attention_mask", None)}
            kept["attention_mask"] = local.get("attention_mask")
        return full | kept

    def _whole_types(self, local: dict, past: int) -> dict[str, Tensor]:
        """Token types that masks alone read, which stay whole: blocks cross borders of ranks."""
        types = {n: local.pop(n) for n in self.block_types if local.get(n) is not None}
        x = tokens_of(local)
        for name, value in types.items():
            if past or x is None or value.shape != x.shape[:2]:
                raise UnsupportedError(
                    f"{name}: {tuple(value.shape)}, not of the tokens of full rows"
                )
        return types

    def _gives_states(self, cache: ShardedCache, past: int) -> bool:
        """True if recurrent layers, split over ranks, hand a cache the states of full rows."""
        numbers = {getattr(module, "layer_idx", None) for module in self.recurrent}
        if any(type(module).__name__ in GIVE_NO_STATES for module in self.recurrent):
            return False
        if past and any(calls_of(module, WITHOUT_STATE) for module in self.recurrent):
            return False
        return TAKES_COLUMNS and cache.recurrent <= numbers

    def _cut_past(self, held: ModelCall, cache: ShardedCache, local: dict) -> bool:
        """True if tokens after cached ones are split; cuts their padding off."""
        ids = tokens_of(local)
        config = self.model.config.get_text_config(decoder=True)
        chunked = getattr(config, "attention_chunk_size", None) is not None
        if ids is None or chunked or not self.takes_positions or self.own_positions:
            return False
        if ids.shape[1] < SPLIT_FROM * self.layout.size(self.axis) or self.scaling is not None:
            return False
        if cache.recurrent and 1 in tokens_per_chunk(self.layout, self.axis, ids.shape[1]):
            return False  # its layers take one token for a step of decoding
        padding = local.get("attention_mask")
        if padding is None:
            return True
        if padding.dim() != 2 or padding.shape[1] != held.past + ids.shape[1]:
            return False
        before, local["attention_mask"] = padding.bool().tensor_split([held.past], 1)
        held.padding = None if before.all() else before
        return True

    def _complete(self, kwargs: dict, batch: Batch, name: str, past: int = 0) -> ModelCall:
        named_outputs = kwargs.get("return_dict")
        if named_outputs is None:
            named_outputs = getattr(self.model.config, "return_dict", True)
        as_tuple = not named_outputs
        if as_tuple:  # until the end: weft reads outputs by name
            kwargs["return_dict"] = True
        refused.padded(kwargs)
        refused.documents(None if batch.by_positions else batch.documents, self.scaling)
        if self.pooled:
            refused.pooled_labels(kwargs, self.layout, name)
        else:
            losses.choose_labels(kwargs, self.labels, name, self.layout)
        keeps = bool(self.recurrent) or "use_cache" in self.names_below
        if "use_cache" in self.names or (keeps and self.open):
            kwargs["use_cache"] = False  # a recurrent layer would be asked for its last state
        length, positions, last = batch.length or 0, None, 0
        local: dict[str, Any] = {}
        if not self.splits_inside:
            x = tokens_of(kwargs)
            if x is None:
                raise ShapeError("the model needs input_ids or inputs_embeds, this rank's shard")
            length = length or x.shape[1] * self.layout.size(self.axis)
            self._check_length(x.shape[1], length)
            positions, last = self._positions(kwargs, length, batch, x.device, past)
            local = self._lift(kwargs, batch, length)
        call = ModelCall(self.layout, self.axis, batch, length, self.labels)
        if self.choosers:
            refused.padding_of_choices(self.choosers, batch, length)
        if self.recurrent:
            refused.mask_of_recurrent(batch.mask, name)
            if self.model._weft.implementation == "eager" and not self.leaves_padding_out:
                refused.left_padding_in_states(batch.mask, length, name)
            apart = batch.documents is not None and not batch.by_positions
            packed = Documents(batch.documents or ()) if apart else None
            call.state = LocalPieces(self.layout, self.axis, length, packed)
        call.pooled, call.local, call.as_tuple = self.pooled, local, as_tuple
        call.labelled = kwargs.get("labels") is not None
        call.positions, call.last_position = positions, last
        return call

    def _lift(self, kwargs: dict, batch: Batch, length: int) -> dict[str, Any]:
        """Give a head its inputs of all tokens; returns this rank's, for the model below it."""
        if not (self.balances or self.pooled):
            return {}
        local, seen = {}, unpadded(batch.mask, length)
        if self.pooled:
            local = {n: v for n, v in kwargs.items() if n not in ("labels", "use_cache")}
            for name in ("input_ids", "inputs_embeds"):
                if kwargs.get(name) is not None:
                    gathered = kwargs[name] = self.layout.gather(kwargs[name], {self.axis: 1})
        if seen is None:
            return local
        if self.pooled:  # of this rank's sequences, as the states that it pools
            kwargs["attention_mask"] = self.layout.shard(
                seen.to(gathered.device), {"batch": 0}
            ).long()
        else:  # for the loss of the routers, whose logits are of all ranks' sequences
            kwargs["attention_mask"] = seen.as_subclass(losses.Replicated)
        return local | {"attention_mask": None}

    def _check_length(self, local: int, length: int) -> None:
        if 0 in tokens_per_chunk(self.layout, self.axis, length):
            raise ShapeError(
                f"{length} tokens leave a rank without any on mesh {dict(self.layout.mesh)}, and "
                "transformers' models need one at least: pad, or use fewer ranks"
            )
        expected = self.layout.local_length(self.axis, length)
        if local != expected:
            raise ShapeError(
                f"the rank at {self.layout.coords} has {local} tokens, but its chunk of {length} "
                f"holds {expected}; shard with shard_batch, or pass weft=Batch(length=...)"
            )

    def _positions(
        self, kwargs: dict, length: int, batch: Batch, device: torch.device, past: int
    ) -> tuple[Tensor, int]:
        """This rank's position ids, from the start of each token's own document, and the last."""
        positions = self.layout.positions(self.axis, length, device) + past
        last = past + length - 1
        if batch.documents is not None:
            Documents(batch.documents).check(length, length, 1)
            positions = upload(_within_documents(batch.documents), device)[positions]
            last = max(batch.documents) - 1
        position_ids = kwargs.get("position_ids")
        if position_ids is None and self.may_skip_padding:
            refused.left_padding(batch.mask, length)
        takes = self.takes_positions
        if position_ids is not None and batch.last_position is not None and takes:
            return position_ids, batch.last_position  # cut from whole ones by shard_batch
        if position_ids is not None and not (position_ids.to(device) == positions).all():
            if not takes:
                raise UnsupportedError(
                    "position_ids: the model takes none, and on one device would not heed them; "
                    "leave them out"
                )
            raise ShapeError(
                "position_ids are not the global positions of this rank's tokens; leave them out, "
                "cut whole ones with shard_batch, and pass packed documents as "
                "weft=Batch(documents=...)"
            )
        if takes and not self.own_positions:
            kwargs["position_ids"] = positions[None]
        return positions, last


def _of_tokens(kwargs: dict) -> dict:
    """The arguments of a call with images of which a batch is made, and those that are no tensors.

    Position ids of several rows are the model's own; masks read documents off the text's.
    """
    foreign = refused.foreign(kwargs)
    kept = {
        n: v
        for n, v in kwargs.items()
        if n in OF_TOKENS or (n not in foreign and not _is_of_dims(v))
    }
    if "position_ids" in kept:
        kept["position_ids"] = rows.text_positions(kept["position_ids"])
    return kept


def _is_of_dims(value: object) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)


def _without_cache(kwargs: dict) -> dict:
    return {n: v for n, v in kwargs.items() if n not in (*CACHES, "use_cache")}


def _within_documents(documents: Iterable[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in documents])

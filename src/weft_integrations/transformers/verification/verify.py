"""Checks a parallelized transformers model against the same weights on one device.

The model runs on full rows and on virtual ranks, which are threads of this process, on one short
random input. Every rank has separate modules, hooks and buffers around the model's weights, which
are only read. Outputs, loss and the gradients of a few parameters are compared; where they differ,
the first module whose output differs is named.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from weft.errors import DeclarationError, UnsupportedError, WeftError
from weft.layout import Layout
from weft.threads import on_threads

from ... import Foreign
from ..batches import shard_batch, tokens_of
from ..defaults import CACHES, FEATURES
from ..hooks import check_kind, check_layout, find_embeddings, install, recurrent, run_on_cpu
from ..interface import attend, make_mask
from ..latents import Latents, taken
from ..rebinding import calls, put, rebound
from ..rows import check_context_group
from ..stacks import stacks_of
from ..whole import accepts_positions, base, text_decoder
from .copies import Copies, InFP64, random_states_kept
from .inputs import (
    Trial,
    check_split_heads,
    converted,
    options,
    random_batch,
    reduced,
    trial_of,
    trials,
)
from .recording import Cut, Difference, TrialRecording, as_full, first_difference, gap, tensors

#: Relative, in fp32: rounding was 4e-6 over 18 layers of a model of 1.2 billion weights.
TOLERANCE = 2e-4
#: The same where matrix products of fp32 are rounded to TF32 or bf16 on the way.
ROUGH_TOLERANCE = 4e-3
#: The same in fp64 all through.
FP64_TOLERANCE = 1e-7
_WITHOUT_CACHE: dict[str, Any] = {"use_cache": False}
_NOT_COMPARED = frozenset({*CACHES, "attentions", "hidden_states", "rope_deltas"})


@dataclass(frozen=True)
class Verified:
    """The result of `verify`.

    Attributes:
        model: the model's class.
        layout: the layout's name.
        trials: the inputs that were tried.
        outputs: the largest relative difference of an output.
        gradients: the largest relative difference of a gradient.

    >>> print(Verified("GPT2Model", "ring-2", ("16 tokens",), 1e-7, 3e-7))
    GPT2Model on ring-2: exact over 16 tokens; largest relative difference 1e-07 of outputs,
    3e-07 of gradients
    """

    model: str
    layout: str
    trials: tuple[Trial, ...]
    outputs: float
    gradients: float

    def __str__(self) -> str:
        return (
            f"{self.model} on {self.layout}: exact over {', '.join(map(str, self.trials))}; "
            f"largest relative difference {self.outputs:.0e} of outputs, "
            f"{self.gradients:.0e} of gradients"
        )


@dataclass
class _Run:
    """Outputs, chosen gradients and recorded modules of one run, on one device or on one rank."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]  # none on a rank whose gradients are those of another
    recording: TrialRecording


def verify(
    model: nn.Module,
    layout: Layout,
    axis: str = "tokens",
    embeddings: nn.Module | None = None,
    batch: Mapping[str, Any] | None = None,
    latents: Latents = "auto",
    images: str = "whole",
) -> Verified:
    """Compare a transformers model with itself on a layout; needs no process group.

    Runs on the model's device, in fp32 unless the model is larger than 16 GiB so. Mesh dims are
    cut down to two ranks each. Weights are read and shared, `.grad` and the random state are left
    as they are. The first trial compares outputs, loss and gradients in train mode, with dropout of
    all kinds set to 0; in eval mode where the model draws other random numbers in training, or does
    not run. Further ones, in eval mode, cross lengths at which the configuration changes behaviour:
    windows, chunks, the length that rope was trained for. One at least is in eval mode, but for
    models of more than 2^28 weights that are transformers' modules alone. A trial that differs is
    repeated in fp64, with the model's casts to fp32 to fp64: what was rounding agrees there to
    1e-7, as of a model whose attention is so sharp that it magnifies it.

    Trials are short: 26 and 22 tokens on two ranks. Behaviour that needs more of them, or other
    values (`if n >= 200: mix`, a gate that is 0 today), is not seen.

    Args:
        model: a transformers model, not parallelized yet, nor wrapped by FSDP.
        layout: built or not; any number of ranks.
        axis: the layout's name for the tokens.
        embeddings: as for `parallelize`.
        batch: a call of your own to compare instead, whole: what the processor of a model of images
            makes, with labels. It runs as with rows="whole", and is refused unless its attention
            is split.
        latents: likewise; with "auto" they travel, as in long rows.
        images: likewise, in a call of your own.

    Raises:
        DeclarationError: an axis that the layout does not attend.
        ShapeError: heads that the layout cannot split.
        UnsupportedError: the model on ranks differs from the model on one device; names the first
            module to differ.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2))
    >>> verify(model, Layout.load("ring-2")).outputs < 1e-5
    True
    """
    check_kind(model)
    check_layout(layout, axis)
    embeddings = embeddings or find_embeddings(model)
    inside = None if embeddings is None else _path(model, embeddings)
    if batch is not None or stacks_of(model) is not None:
        check_context_group(layout, axis)
    travel: Latents = "latents" if latents == "auto" else latents
    check = _Check(model, layout, axis, inside, batch, travel, images)
    with random_states_kept(model), _autocast_off(model):
        planned = trials(model, check.layout, axis) if batch is None else [trial_of(model, batch)]
        try:
            results = [check.run(trial) for trial in planned]
        finally:
            check.copies.release()
    tried, outputs, gradients = zip(*results)
    name = type(model).__name__
    return Verified(name, layout.name, tuple(dict.fromkeys(tried)), max(outputs), max(gradients))


@contextlib.contextmanager
def _autocast_off(model: nn.Module) -> Iterator[None]:
    """Autocast is per thread: on, it would round the reference, and not the ranks."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Check:
    """One model on one layout: its copies, and their runs."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        axis: str,
        embeddings: str | None,
        batch: Mapping[str, Any] | None = None,
        latents: Latents = "auto",
        images: str = "whole",
    ) -> None:
        self.latents, self.images = latents, images if batch is not None else "whole"
        self.model, self.axis, self.embeddings, self.batch = model, axis, embeddings, batch
        decoder = text_decoder(model)
        self.stacks = stacks_of(model)
        self.full = batch is not None or self.stacks is not None  # rows on ranks are whole
        self.decoder = "" if decoder is None else _path(model, decoder)
        self.declared = layout
        self.layout = reduced(layout, axis if recurrent(model) else None)
        self.copies = Copies(model)
        self.name = f"{type(model).__name__} on {layout.name}"
        rough = torch.get_float32_matmul_precision() != "highest"
        self.tolerance = ROUGH_TOLERANCE if rough else TOLERANCE

    def run(self, trial: Trial) -> tuple[Trial, float, float]:
        """Compare one trial: returns it with the largest differences of outputs and gradients.

        In eval mode where two runs in train mode differ, or fail. Then in fp64, where a difference
        that is rounding is none.
        """
        batch = self._inputs(trial, self.copies.dtype)
        try:
            return self._compare(batch, trial)
        except UnsupportedError:
            if trial.train and not self._repeats(batch, trial):
                return self.run(replace(trial, train=False))
            if self.copies.fit_fp64:
                wide = replace(trial, fp64=True)
                with contextlib.suppress(Exception):  # kernels that know no fp64, among others
                    return self._compare(self._inputs(wide, torch.float64), wide)
            raise

    def _inputs(self, trial: Trial, dtype: torch.dtype) -> dict[str, Any]:
        """The full inputs of a trial: random ones, or those of the call that is to be compared."""
        if self.batch is None:
            return random_batch(self.model, trial, dtype)
        return converted(self.batch, next(self.model.parameters()).device, dtype)

    def _repeats(self, batch: dict[str, Tensor], trial: Trial) -> bool:
        """True if the model gives the same outputs twice."""
        with contextlib.suppress(Exception):
            one, other = (self._on_one_device(batch, trial)[0].outputs for _ in range(2))
            off = self.tolerance
            return all(torch.allclose(t, other[n], off, off, True) for n, t in one.items())
        return False

    def _compare(self, batch: dict[str, Tensor], trial: Trial) -> tuple[Trial, float, float]:
        name = type(self.model).__name__
        with _explained(f"{name} could not be run on a random input, so nothing was checked"):
            full, weights, length = self._on_one_device(batch, trial)
        check_split_heads(self.model, self.declared, self.axis, full.recording, self.decoder)
        with _explained(f"{self.name} is not the model: on ranks it fails"):
            ranks = on_threads(self.layout, self._on_rank, batch, trial, weights, length)
        cuts = on_threads(self.layout, Cut.of, self.axis, trial.batch, length)
        recordings = [r.recording for r in ranks]
        tolerance = FP64_TOLERANCE if trial.fp64 else self.tolerance
        difference, source = None, None
        if self.stacks is not None and self.stacks.splits:
            tokens = tokens_of(batch)
            assert tokens is not None  # of the encoder
            size = trial.batch, tokens.shape[1]
            own_cuts = on_threads(self.layout, Cut.of, self.axis, *size)
            source = _path(self.model, self.stacks.encoder), own_cuts
        if self.images == "whole":  # else a rank's towers see other images
            difference = first_difference(full.recording, recordings, cuts, tolerance, source)
        outputs, which = _largest_gap(full, ranks, cuts)
        if trial.padding and outputs <= tolerance:
            difference = None  # modules may differ at padding, which nothing reads
        if difference is not None:
            raise UnsupportedError(self._refusal(difference, trial, length, ranks))
        if outputs > tolerance:
            raise UnsupportedError(
                f"{self.name} is not the model: every module agrees, but {which} differs "
                f"({_size(outputs)}); the model computes it from this rank's tokens, after its "
                f"last module ({trial})"
            )
        averaged = len(ranks) if self.full else 1
        gradients, which = _largest_gradient_gap(full, ranks, averaged)
        if gradients > tolerance:
            raise UnsupportedError(
                f"{self.name} is not the model: outputs agree, but the gradient of {which} is off "
                f"by {gradients:.1e}; its use counts this rank's tokens only ({trial})"
            )
        return trial, outputs, gradients

    def _on_one_device(
        self, batch: dict[str, Tensor], trial: Trial
    ) -> tuple[_Run, dict[str, Tensor], int]:
        """The reference run, the weights of its outputs in the objective, its number of tokens."""
        model = self.copies.make(trial)
        run_on_cpu(model)
        _be_eager(model)
        recording = TrialRecording(model)
        masks = [batch["attention_mask"].bool()] if trial.left else []
        generator, weights = torch.Generator().manual_seed(1), {}
        with _mode(trial):
            extra = options(model, batch) if self.batch is None else _WITHOUT_CACHE
            outputs = self._compared(_outputs(model, extra | batch, masks))
            for name, t in outputs.items():
                drawn = torch.randn(t.shape, generator=generator) / max(t.numel(), 1) ** 0.5
                weights[name] = drawn.to(t) if t.dim() else torch.ones_like(t)
            run = _Run(_detached(outputs), _gradients(model, outputs, weights), recording)
        length = trial.length
        if self.embeddings is not None:
            visit = recording.visits[self.embeddings, 0]
            length = next(iter(visit.outputs.values())).shape[1]
        return run, weights, length

    def _on_rank(
        self,
        layout: Layout,
        batch: dict[str, Tensor],
        trial: Trial,
        weights: dict[str, Tensor],
        length: int,
    ) -> _Run:
        model = self.copies.make(trial)
        inside = None if self.embeddings is None else model.get_submodule(self.embeddings)
        full = self.full
        rows = "whole" if full else "local"
        install(model, layout, self.axis, inside, _ON_RANKS, rows, self.latents, self.images)
        recording = TrialRecording(model)
        cut = Cut.of(layout, self.axis, trial.batch, length)
        if full:
            extra = options(model, batch) if self.batch is None else _WITHOUT_CACHE
            local = extra | batch
        elif inside is None:
            local = options(model, batch) | shard_batch(batch, layout, self.axis)
        else:
            local = {name: layout.shard(t, {"batch": 0}) for name, t in batch.items()}
        masks = [batch["attention_mask"].bool()] if trial.left else []
        masks += [layout.shard(t, {"batch": 0, self.axis: 1}) for t in masks]
        with _mode(trial):
            outputs = self._compared(_outputs(model, local, masks))
            if full:
                self._check_split(model, recording)
            held = {n: cut(weights[n], t.shape) for n, t in outputs.items() if n in weights}
            gradients = _gradients(model, outputs, held)
        counts = all(layout.coords[d] == 0 for d in layout.mesh if d not in layout.data_dims)
        return _Run(_detached(outputs), gradients if counts or full else {}, recording)

    def _compared(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs without features of images, where ranks have their tokens' only."""
        skipped = FEATURES if self.images == "spread" else ()
        return {n: t for n, t in outputs.items() if not n.startswith(skipped)}

    def _check_split(self, model: Foreign, recording: TrialRecording) -> None:
        """Raise where ranks computed all of a call, which is exact and tells nothing."""
        if not any(path.endswith(".attention") for path, _ in recording.visits):
            reasons = "; ".join(sorted(model._weft.calls.warned))
            raise UnsupportedError(f"{self.name} does not split this call: {reasons}")

    def _refusal(
        self, difference: Difference, trial: Trial, length: int, ranks: Sequence[_Run]
    ) -> str:
        """The module to blame, and the reason that its name and tensors suggest."""
        culprit, visit = difference.culprit, difference.visit
        inner = base(self.model)
        if inner is not self.model and accepts_positions(inner):
            path = _path(self.model, inner)
            entry = ranks[0].recording.visits.get((path, 0))
            by_positions = difference.changed_input == "position_ids" or culprit.path == path
            if entry is not None and "position_ids" not in entry.inputs and by_positions:
                return (
                    f"{self.name} is not the model: its forward does not hand position_ids on to "
                    f"{path!r} ({type(inner).__name__}), which then counts every rank's tokens "
                    "from 0: name position_ids in the signature of forward, and pass them on"
                )
        name = type(culprit.module).__name__
        where = f"{culprit.path!r} ({name})" if culprit.path else name
        output = visit.outputs[difference.which]
        if difference.changed_input == "position_ids":
            reason = f"passes local position_ids to {visit.path!r}"
        elif "BatchNorm" in name:
            reason = (
                "takes its statistics in train mode from this rank's tokens and sequences only; "
                "use a norm of each token (LayerNorm, RMSNorm), or verify=False for a model that "
                "is never trained"
            )
        elif culprit is visit and output.dim() < 3 and length not in output.shape:
            reason = f"pools: {difference.which or 'its output'} depends on tokens of other ranks"
        else:
            reason = "mixes tokens, or uses their local positions or number, outside of attention"
            if visit is not culprit:
                differs = difference.changed_input or difference.which
                reason += f": its input to {visit.path!r} ({differs}) differs"
        return (
            f"{self.name} is not the model: {where} is the first module whose output differs "
            f"({_size(difference.error)}): it {reason} ({trial}). verify=False skips this check, "
            "and the ranks then compute another model"
        )


def _largest_gap(full: _Run, ranks: Sequence[_Run], cuts: Sequence[Cut]) -> tuple[float, str]:
    """The largest error of an output of any rank, and its name; infinite for another shape."""
    gaps = [(0.0, "")]
    for name, tensor in full.outputs.items():
        for run, cut in zip(ranks, cuts):
            if name in run.outputs:
                error = gap(tensor, run.outputs[name], cut)
                gaps.append((float("inf") if error is None else error, name))
    return max(gaps)


def _largest_gradient_gap(full: _Run, ranks: Sequence[_Run], of: int = 1) -> tuple[float, str]:
    """The largest error of parameters' gradients, summed over ranks as `sync_gradients` does.

    Or averaged `of` so many ranks.
    """
    gaps = [(0.0, "")]
    sizes = {name: g.norm().item() for name, g in full.gradients.items()}
    scale = max(sizes.values(), default=0.0)
    for name, expected in full.gradients.items():
        parts = [r.gradients[name] for r in ranks if name in r.gradients]
        off = (sum(parts) / of - expected).norm().item()
        # A gradient that is rounding itself (a key's bias) is measured on the largest one.
        gaps.append((off / max(sizes[name], 1e-3 * scale, 1e-30), name))
    return max(gaps)


@contextlib.contextmanager
def _explained(refusal: str) -> Iterator[None]:
    """Turn an error of a model's code into a refusal with the place where it was raised."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        library = str(Path(torch.__file__).parent)
        last = [f for f in frames if not f.filename.startswith(library)][-1]
        raise UnsupportedError(
            f"{refusal} ({Path(last.filename).name}, line {last.lineno}, in {last.name}): "
            f"{type(error).__name__}: {error}"
        ) from error


# -- attention, recorded --------------------------------------------------------------------------

#: The first is for models without an eager function: transformers' sdpa, with a mask.
_FULL, _ON_RANKS = "weft_full", "weft_on_ranks"


def _be_eager(model: Foreign) -> None:
    """Let a model run its own eager path, as transformers names it, and record attention.

    Models that choose their keys put the choice into the mask for "eager" and "sdpa" only, and hand
    it to functions of other names as an argument, which their eager function drops.
    """
    eager = [(module, _eager_functions(module)) for module in model.modules()]
    nameless = any(calls(m, ["ALL_ATTENTION_FUNCTIONS"]) and not local for m, local in eager)
    model.set_attn_implementation(_FULL if nameless else "eager")
    for module, functions in eager if not nameless else []:
        values = {name: _recorded(function) for name, function in functions.items()}
        with contextlib.suppress(UnsupportedError):  # a replaced forward runs, unrecorded
            if values:
                put(module, rebound(type(module).forward, values))


def _eager_functions(module: Foreign) -> dict[str, Callable]:
    """The functions of eager attention that a module's `forward` calls."""
    stock = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    named = [name for name in stock if name.endswith("eager_attention_forward")]
    return {name: stock[name] for name in calls(module, named)}


def _recorded(attention: Callable) -> Callable:
    """The same attention, of which query, key and value are recorded."""

    def attend_and_record(
        module: Foreign, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        module._recording.attention(module, query=query, key=key, value=value)
        return attention(module, query, key, value, *args, **kwargs)

    return attend_and_record


def _attend_on_ranks(
    module: Foreign,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    with torch.no_grad():
        own_keys, own_values, _ = taken(key, value, whole=True)
    module._recording.attention(module, query=query, key=own_keys, value=own_values)
    return attend(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_FULL, _recorded(sdpa_attention_forward))
AttentionMaskInterface.register(_FULL, eager_mask)
AttentionInterface.register(_ON_RANKS, _attend_on_ranks)
AttentionMaskInterface.register(_ON_RANKS, make_mask)


@contextlib.contextmanager
def _mode(trial: Trial) -> Iterator[None]:
    """With or without gradients, and in fp64 all through where a trial is."""
    fp64 = InFP64() if trial.fp64 else contextlib.nullcontext()
    with torch.set_grad_enabled(trial.gradients), fp64:
        yield


def _outputs(model: Foreign, batch: dict[str, Any], masks: Sequence[Tensor]) -> dict[str, Tensor]:
    """A model's outputs; those of tokens that a mask (b, n), full or local, hides are zero."""
    named = {k: v for k, v in model(**batch).items() if k not in _NOT_COMPARED}
    return {n: _unmasked(as_full(t), masks) for n, t in tensors(named)}


def _detached(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in outputs.items()}


def _gradients(
    model: nn.Module, outputs: dict[str, Tensor], weights: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the outputs; none where gradients are off."""
    if not torch.is_grad_enabled():
        return {}
    terms = ((outputs[n].float() * w).sum() for n, w in weights.items() if w is not None)
    objective = sum(terms, torch.zeros(()))
    chosen = {n: p for n, p in model.named_parameters() if p.requires_grad}
    # On the calling thread: ranks that share a device would wait for each other on one.
    with torch.autograd.set_multithreading_enabled(False):
        grads = torch.autograd.grad(objective, list(chosen.values()), allow_unused=True)
    return {n: g for n, g in zip(chosen, grads) if g is not None}


def _unmasked(t: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """A tensor (b, n, ...) or, of routers, (b n, experts), zero where a mask of its tokens is."""
    for each in masks:
        mask = each if t.shape[:2] == each.shape else each.flatten()
        if t.dim() > 1 and t.shape[: mask.dim()] == mask.shape:
            return t.masked_fill(~mask.view(*mask.shape, *[1] * (t.dim() - mask.dim())), 0.0)
    return t


def _path(model: nn.Module, module: nn.Module) -> str:
    path = next((name for name, m in model.named_modules() if m is module), None)
    if path is None:
        raise DeclarationError(f"embeddings={type(module).__name__} is not part of the model")
    return path


def _size(error: float) -> str:
    return "of another shape or not finite" if error == float("inf") else f"by {error:.1e}"


__all__ = ["Verified", "verify"]

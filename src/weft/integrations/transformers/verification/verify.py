"""Checks a parallelized transformers model against the same weights on one device.

The model runs whole and on virtual ranks, which are threads of this process, on one short random
input. Every rank has its own modules, hooks and buffers, but all hold the model's own weights,
which are only read. Outputs, loss and the gradients of a few parameters are compared; where they
differ, the first module whose output differs is named.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from ....errors import DeclarationError, UnsupportedError, WeftError
from ....layout import Layout
from ....threads import on_threads
from ..batches import shard_batch
from ..hooks import check_kind, check_layout, find_embeddings, install, recurrent
from ..interface import attend, make_mask
from ..refused import CACHES
from ..whole import accepts_positions, base
from .behaviour import behaviour
from .copies import Copies, random_state, random_states_kept
from .inputs import Trial, options, random_batch, trials
from .recording import Cut, Difference, TrialRecording, first_difference, gap, tensors
from .stand_in import Heads, check_split_heads, reduced

#: Relative, in fp32: rounding was 4e-6 over 18 layers of a model of 1.2 billion weights.
TOLERANCE = 2e-4
#: The same where matrix products of fp32 are rounded to TF32 or bf16 on the way.
ROUGH_TOLERANCE = 4e-3


@dataclass(frozen=True)
class Verified:
    """What `verify` saw.

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
    """What the whole model, or one rank, gave: outputs, chosen gradients, every module's visit."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    recording: TrialRecording
    cut: Cut | None = None
    counts: bool = True  # whether its gradients are to be summed: not of a second, equal rank


def verify(
    model: nn.Module, layout: Layout, axis: str = "tokens", embeddings: nn.Module | None = None
) -> Verified:
    """Compare a transformers model with itself on a layout; needs no process group.

    Runs on the model's device, in fp32 unless the model is larger than 16 GiB so. Mesh dims are
    cut down to two ranks each. Weights are read and shared, `.grad` and the random state are left
    as they are. The first trial compares outputs, loss and gradients in train mode, with dropout of
    all kinds set to 0; in eval mode where the model draws other random numbers in training, or does
    not run. Further ones, in eval mode, cross what the configuration says changes behaviour:
    windows, chunks, the length that rope was trained for. One at least is in eval mode, but for
    models of more than 2^28 weights that are transformers' own modules alone.

    Trials are short: 26 and 22 tokens on two ranks. What a model does only with more of them, or
    only with other values (`if n >= 200: mix`, a gate that is 0 today), they cannot see.

    Args:
        model: a transformers model, not parallelized yet, nor wrapped by FSDP.
        layout: built or not; any number of ranks.
        axis: the layout's name for the tokens.
        embeddings: as for `parallelize`.

    Raises:
        DeclarationError: an axis that the layout does not attend.
        ShapeError: heads that the layout cannot split.
        UnsupportedError: the model on ranks is not the model on one device. Says which module is
            the first to differ, and what it does.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2))
    >>> verify(model, Layout.load("ring-2")).outputs < 1e-5
    True
    """
    check_kind(model)
    check_layout(layout, axis)
    embeddings = embeddings or find_embeddings(model)
    check = _Check(model, layout, axis, _path(model, embeddings))
    with random_states_kept(model), _autocast_off(model):
        try:
            found = [check.run(trial) for trial in trials(model, check.layout, axis)]
        finally:
            check.copies.release()
    tried, outputs, gradients = zip(*found)
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
    """One model on one layout: its copies, and what they compute."""

    def __init__(self, model: nn.Module, layout: Layout, axis: str, embeddings: str | None):
        self.model, self.axis, self.embeddings = model, axis, embeddings
        self.declared = layout
        self.layout = reduced(layout, axis if recurrent(model) else None)
        self.copies = Copies(model)
        self.heads: frozenset[Heads] = frozenset()
        rough = torch.get_float32_matmul_precision() != "highest"
        self.tolerance = ROUGH_TOLERANCE if rough else TOLERANCE

    def run(self, trial: Trial) -> tuple[Trial, float, float]:
        """Compare one trial; what was tried, the largest differences of outputs and gradients."""
        batch = random_batch(self.model, trial, self.copies.dtype)
        name = type(self.model).__name__
        trial, (whole, weights, length) = self._reference(batch, trial)
        self.heads |= check_split_heads(
            self.model, self.declared, self.axis, whole.recording, self.heads
        )
        with _explained(f"{name} on {self.layout.name} is not the model: on ranks it fails"):
            ranks = on_threads(self.layout, self._rank, batch, trial, weights, length)
        cuts = [r.cut for r in ranks]
        found = first_difference(
            whole.recording, [r.recording for r in ranks], cuts, self.tolerance
        )
        outputs, which = self._outputs(whole, ranks)
        if trial.padding and outputs <= self.tolerance:
            found = None  # modules differ in what they make of padding, which nothing reads
        if found is not None or outputs > self.tolerance:
            reason = self._positions_lost(found, ranks)
            raise UnsupportedError(reason or self._blame(found, outputs, which, trial, cuts))
        gradients, which = self._gradients(whole, ranks)
        if gradients > self.tolerance:
            raise UnsupportedError(
                f"{type(self.model).__name__} on {self.layout.name} is not the model: outputs "
                f"agree, but the gradient of {which} is off by {gradients:.1e}; what it is used "
                f"for counts this rank's tokens only ({trial})"
            )
        return trial, outputs, gradients

    def _reference(self, batch: dict, trial: Trial) -> tuple[Trial, tuple]:
        """The whole model's run, in eval mode where one in train mode is not like another."""
        if trial.train:
            with contextlib.suppress(Exception):
                before = random_state(self.model)
                made = self._whole(batch, trial)
                drawn = random_state(self.model) != before
                if not drawn or self._alike(made[0], self._whole(batch, trial)[0]):
                    return trial, made
            trial = replace(trial, train=False)
        name = type(self.model).__name__
        with _explained(f"{name} could not be run on a random input, so nothing was checked"):
            return trial, self._whole(batch, trial)

    def _alike(self, a: _Run, b: _Run) -> bool:
        """Whether two runs gave the same outputs, though random numbers were drawn."""
        close = {"rtol": self.tolerance, "atol": self.tolerance, "equal_nan": True}
        return all(torch.allclose(t, b.outputs[name], **close) for name, t in a.outputs.items())

    def _positions_lost(self, found: Difference | None, ranks: Sequence[_Run]) -> str:
        """Why position ids do not reach the model within a wrapper of its forward, if so."""
        inner = base(self.model)
        if found is None or inner is self.model or not accepts_positions(inner):
            return ""
        path = _path(self.model, inner)
        visit = ranks[0].recording.by_key().get((path, 0))
        local = found.handed == "position_ids" or found.culprit.path == path
        if visit is None or "position_ids" in visit.inputs or not local:
            return ""
        return (
            f"{type(self.model).__name__} on {self.layout.name} is not the model: its forward does "
            f"not hand position_ids on to {path!r} ({type(inner).__name__}), which then counts "
            "every rank's tokens from 0: name position_ids in the signature of forward, and pass "
            "them on"
        )

    def _whole(self, batch: dict, trial: Trial) -> tuple[_Run, dict[str, Tensor], int]:
        """The whole model's run, the weights of its outputs' sum, and its number of tokens."""
        model = self.copies.make(trial)
        model.set_attn_implementation(_WHOLE)
        recording = TrialRecording(model, keep_given=True)
        generator = torch.Generator().manual_seed(1)
        weights: dict[str, Tensor] = {}

        def weigh(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            for name, t in outputs.items():
                drawn = torch.randn(t.shape, generator=generator) / max(t.numel(), 1) ** 0.5
                weights[name] = drawn.to(t) if t.dim() else torch.ones_like(t)
            return weights

        seen = [batch["attention_mask"].bool()] if trial.left else []
        run = _forward(model, batch | options(model, batch), trial, recording, weigh, seen)
        length = trial.length
        if self.embeddings is not None:
            visit = recording.by_key()[self.embeddings, 0]
            length = next(iter(visit.outputs.values())).shape[1]
        return run, weights, length

    def _rank(self, layout: Layout, batch: dict, trial: Trial, weights: dict, length: int) -> _Run:
        model = self.copies.make(trial)
        inside = None if self.embeddings is None else model.get_submodule(self.embeddings)
        install(model, layout, self.axis, inside, _ON_RANKS)
        recording = TrialRecording(model)
        cut = Cut.of(layout, self.axis, trial.batch, length)
        if inside is None:
            local = options(model, batch) | shard_batch(batch, layout, self.axis)
        else:
            local = {name: layout.shard(t, {"batch": 0}) for name, t in batch.items()}

        def weigh(outputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
            return {n: cut(weights[n], t.shape) for n, t in outputs.items() if n in weights}

        seen = [batch["attention_mask"].bool()] if trial.left else []
        seen += [layout.shard(t, {"batch": 0, self.axis: 1}) for t in seen]
        run = _forward(model, local, trial, recording, weigh, seen)
        run.cut = cut
        run.counts = all(layout.coords[d] == 0 for d in layout.mesh if d not in layout.data_dims)
        return run

    def _outputs(self, whole: _Run, ranks: Sequence[_Run]) -> tuple[float, str]:
        found = [(0.0, "")]
        for name, tensor in whole.outputs.items():
            for run in ranks:
                if name not in run.outputs:
                    continue
                error = gap(tensor, run.outputs[name], run.cut)
                found.append((float("inf") if error is None else error, name))
        return max(found)

    def _gradients(self, whole: _Run, ranks: Sequence[_Run]) -> tuple[float, str]:
        """Parameters' gradients summed over ranks, as `sync_gradients` does."""
        found = [(0.0, "")]
        sizes = {name: g.norm().item() for name, g in whole.gradients.items()}
        scale = max(sizes.values(), default=0.0)
        for name, wanted in whole.gradients.items():
            parts = [r.gradients[name] for r in ranks if r.counts and name in r.gradients]
            off = (sum(parts) - wanted).norm().item()
            # A gradient that is rounding itself (a key's bias) is measured on the largest one.
            found.append((off / max(sizes[name], 1e-3 * scale, 1e-30), name))
        return max(found)

    def _blame(
        self,
        found: Difference | None,
        error: float,
        which: str,
        trial: Trial,
        cuts: Sequence[Cut],
    ) -> str:
        model, layout = type(self.model).__name__, self.layout.name
        if found is None:
            return (
                f"{model} on {layout} is not the model: every module agrees, but {which} differs "
                f"({_size(error)}); the model reads it off this rank's tokens, after its last "
                f"module ({trial})"
            )
        culprit = found.culprit
        where = f"{culprit.path!r} ({type(culprit.module).__name__})" if culprit.path else model
        return (
            f"{model} on {layout} is not the model: {where} is the first module whose output "
            f"differs ({_size(found.error)}): it {behaviour(found, cuts[-1])} ({trial}). "
            "verify=False skips this check, and what is computed is then another model"
        )


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """What a model's own code raises, as a refusal that says where it was raised."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        library = str(Path(torch.__file__).parent)
        last = [f for f in frames if not f.filename.startswith(library)][-1]
        raise UnsupportedError(
            f"{what} ({Path(last.filename).name}, line {last.lineno}, in {last.name}): "
            f"{type(error).__name__}: {error}"
        ) from error


# -- attention, recorded --------------------------------------------------------------------------

_WHOLE, _ON_RANKS = "weft_whole", "weft_on_ranks"


def _attend_whole(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs
):
    """The model's own eager attention."""
    module._recording.attention(module, query=query, key=key, value=value)
    own = inspect.unwrap(type(module).forward).__globals__
    attention = own.get("eager_attention_forward", sdpa_attention_forward)
    return attention(module, query, key, value, attention_mask, **kwargs)


def _attend_on_ranks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs
):
    module._recording.attention(module, query=query, key=key, value=value)
    return attend(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_WHOLE, _attend_whole)
AttentionMaskInterface.register(_WHOLE, eager_mask)
AttentionInterface.register(_ON_RANKS, _attend_on_ranks)
AttentionMaskInterface.register(_ON_RANKS, make_mask)


# -- copies ---------------------------------------------------------------------------------------


def _forward(
    model: nn.Module,
    batch: dict,
    trial: Trial,
    recording: TrialRecording,
    weigh: Callable[[dict[str, Tensor]], dict[str, Any]],
    seen: Sequence[Tensor],
) -> _Run:
    """A model's run; outputs of tokens that are not `seen` (b, n), whole or local, are zero."""
    with torch.set_grad_enabled(trial.gradients):
        made = model(**batch)
        made = {k: v for k, v in made.items() if k not in _NOT_COMPARED}
        outputs = {n: _of_seen(t, seen) for n, t in tensors(made)}
        if not trial.gradients:
            return _Run(outputs, {}, recording)
        weights = weigh(outputs)
        objective = sum((outputs[n].float() * w).sum() for n, w in weights.items() if w is not None)
        chosen = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # On the calling thread: ranks that share a device would wait for each other on one.
        with torch.autograd.set_multithreading_enabled(False):
            grads = torch.autograd.grad(objective, list(chosen.values()), allow_unused=True)
    detached = {n: t.detach() for n, t in outputs.items()}
    return _Run(detached, {n: g for n, g in zip(chosen, grads) if g is not None}, recording)


def _of_seen(t: Tensor, seen: Sequence[Tensor]) -> Tensor:
    """What is of tokens that are seen; (b, n, ...) or, of routers, (b n, experts)."""
    for each in seen:
        mask = each if t.shape[:2] == each.shape else each.flatten()
        if t.dim() > 1 and t.shape[: mask.dim()] == mask.shape:
            return t.masked_fill(~mask.view(*mask.shape, *[1] * (t.dim() - mask.dim())), 0.0)
    return t


_NOT_COMPARED = frozenset({*CACHES, "attentions", "hidden_states", "rope_deltas"})


def _path(model: nn.Module, module: nn.Module | None) -> str | None:
    if module is None:
        return None
    path = next((name for name, m in model.named_modules() if m is module), None)
    if path is None:
        raise DeclarationError(f"embeddings={type(module).__name__} is not part of the model")
    return path


def _size(error: float) -> str:
    return "of another shape or not finite" if error == float("inf") else f"by {error:.1e}"


__all__ = ["Verified", "verify"]

"""Random inputs for a transformers model, of the lengths at which its behaviour changes.

Every contiguous piece of tokens that a rank holds has a prime number of them, and the trials have
two different primes. Mixing within blocks of neighbouring tokens, or by a position's remainder, is
hidden only if the block size divides both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UnsupportedError, WeftError
from weft.layout import Layout
from weft.plan.rest import head_shares

from ... import Foreign
from ..batches import tokens_of
from ..losses import NEXT, OWN, labels_of
from ..replicated import configurations
from ..stacks import stacks_of
from ..whole import accepts_positions, balances, leaves_padding_out, may_skip_padding, pools
from .recording import TrialRecording

#: Options that give a number of tokens, or a position, after which something changes.
_LENGTHS = frozenset(
    {
        *("sliding_window", "attention_chunk_size", "chunk_size", "window_size", "local_attention"),
        *("block_size", "chunk_length", "floor_scale", "index_block_size"),
        *("index_topk", "keep_window_size", "indexer_budget", "compress_rate"),
    }
)
#: Options by which a model chooses its keys: the trial that has them shorter compares gradients.
_CHOICES = frozenset(
    {"index_topk", "keep_window_size", "indexer_budget", "index_topk_blocks", "compress_rate"}
)
#: Parameters with a row for each token of an option of modules.
_ROWS = {"compress_rate": "position_bias"}
#: Options that give a number of blocks of tokens, which is 1 where they are shortened.
_BLOCKS = frozenset({"index_topk_blocks"})
#: Names under which modules keep options, where they are others than the configuration's.
_KEPT_AS = {
    "index_block_size": "block_size",
    "index_topk_blocks": "topk_blocks",
    "indexer_budget": "token_budget",
}
#: Models of so many weights are tried twice; larger ones are to be checked in seconds, too.
_SMALL = 1 << 28
#: Tokens that an encoder has more than its decoder.
_MORE = 9
#: Options that give a position after which rope changes.
_POSITIONS = frozenset({"original_max_position_embeddings", "max_position_embeddings"})


@dataclass(frozen=True)
class Trial:
    """One comparison."""

    batch: int  # sequences
    length: int  # tokens of each; 0: images; of an encoder-decoder those of its decoder
    start: int = 0  # the first position
    gradients: bool = True
    short: tuple[tuple[str, int], ...] = ()  # options that are set to fewer tokens than there are
    padding: int = 0  # tokens at the end of the last row; earlier rows have fewer
    train: bool = False  # train mode, without dropout; else eval mode
    left: bool = False  # padding is at the start, with any ids under it
    fp64: bool = False  # all through; else fp32

    def __str__(self) -> str:
        mode = (" in train mode" if self.train else "") + (" in fp64" if self.fp64 else "")
        if not self.length:
            return f"{self.batch} image" + "s" * (self.batch > 1) + mode
        at = f" from position {self.start}" if self.start else ""
        at += "".join(f", {name} = {value}" for name, value in self.short)
        side = " on the left" if self.left else ""
        at += f", {self.padding} of them padding{side}" if self.padding else ""
        return f"{self.batch} x {self.length} tokens{at}{mode}"


def trials(model: Foreign, layout: Layout, axis: str) -> list[Trial]:
    """The inputs to try: a short one, one across every length, and one around each position.

    The first is in train mode and has gradients, the others are in eval mode. One at least is, with
    pieces of another prime (mixing in blocks of 13 is not seen in pieces of 13), but for large
    models of transformers' own modules, of which smaller ones are tried, too.
    A window of thousands of tokens needs thousands of tokens to be seen. Instead, the copies that
    are compared all get a window of a few.
    """
    batch = max(1, layout.size("batch"))
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names and stacks_of(model) is None:
        again = [Trial(batch, 0, gradients=False)] if _is_tried_twice(model) else []
        return [Trial(batch, 0, train=True), *again]
    first, length = lengths(layout, axis)
    planned = [Trial(batch, first, train=True)]
    rates = {m.compress_rate for m in model.modules() if type(_rate_of(m)) is int}
    numbers = {*_numbers(model.config.to_dict()), *(("compress_rate", rate) for rate in rates)}
    if balances(model) or pools(model):
        # Statistics leave padding out. Every token sees one that is no padding.
        windows = [n - 1 for name, n in numbers if name in _LENGTHS and n > 0]
        padding = min([length // 4, *windows])
        planned += [Trial(batch, length, padding=padding)] if padding else []
    if leaves_padding_out(model) and not may_skip_padding(model):
        planned.append(Trial(batch, length, padding=length // 4, left=True))
    longer = {name for name, n in numbers if name in _LENGTHS and n > first // 2}
    short = dict.fromkeys(longer, length // 3)
    short |= {name: 1 for name, n in numbers if name in _BLOCKS and n > 1}
    if rates and "index_topk" in short:  # of entries, of which there are fewer than tokens
        short["index_topk"] = max(1, length // 3 // min(rates))
    if short:
        compared = not _CHOICES.isdisjoint(short)
        planned.append(Trial(batch, length, gradients=compared, short=tuple(sorted(short.items()))))
    if accepts_positions(model) and _dynamic(model.config):
        ends = {n for name, n in numbers if name in _POSITIONS}
        starts = {n - length // 2 for n in ends if n > length}
        planned += [Trial(batch, length, start, False) for start in sorted(starts)]
    if len(planned) == 1 and _is_tried_twice(model):
        planned.append(Trial(batch, length, gradients=False))
    return planned


def _is_tried_twice(model: nn.Module) -> bool:
    """True if a model is small, or has modules of other packages than torch and transformers."""
    packages = {type(m).__module__.split(".")[0] for m in model.modules()}
    small = sum(p.numel() for p in model.parameters()) <= _SMALL
    return small or not packages <= {"torch", "transformers"}


def lengths(layout: Layout, axis: str) -> tuple[int, int]:
    """Tokens of the first trial and of the others: pieces of 13 and 11, of 7 and 5 if many.

    >>> lengths(Layout.parse("tokens: ring=2"), "tokens")
    (26, 22)
    >>> lengths(Layout.parse("tokens(zigzag): ring=2"), "tokens")
    (28, 20)
    """
    pieces = layout.size(axis) * (2 if layout.order.get(axis) == "zigzag" else 1)
    return (13 * pieces, 11 * pieces) if pieces < 4 else (7 * pieces, 5 * pieces)


def shorten(model: nn.Module, trial: Trial) -> None:
    """Set the options of a trial, in the model's configurations and where modules copied them."""
    for owner in (*configurations(model), *model.modules()):
        for option, value in trial.short:
            for name in (option, _KEPT_AS.get(option, option)):
                number = owner.__dict__.get(name)
                if isinstance(number, int | float) and number > value:
                    setattr(owner, name, value)
                    rows = getattr(owner, _ROWS.get(name, ""), None)
                    if isinstance(rows, nn.Parameter):
                        rows.data = rows.data[:value].clone()


def _rate_of(module: nn.Module) -> object:
    return module.__dict__.get("compress_rate")


def _dynamic(config: Any) -> bool:
    """True if rope parameters depend on the largest position."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return "dynamic" in str(parameters) or "longrope" in str(parameters)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Every integer option in a configuration as nested dicts and lists, with its name."""
    if isinstance(value, dict):
        for key, option in value.items():
            yield from _numbers(option, key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, name)
    elif type(value) is int:
        yield name, value


def random_batch(model: Foreign, trial: Trial, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole inputs of a trial, the same for the same trial."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    names = inspect.signature(model.forward).parameters
    if stacks_of(model) is not None:
        return {n: t.to(device) for n, t in _two_rows(model, trial, dtype, generator).items()}
    if "input_ids" in names:
        config = model.config.get_text_config()
        size = int(getattr(config, "vocab_size", 0) or 2)
        ids = torch.randint(0, size, (trial.batch, trial.length), generator=generator)
        pad = getattr(config, "pad_token_id", None)
        if pad is not None:
            ids[ids == pad] = (pad + 1) % size
        mask = getattr(config, "mask_token_id", None)
        if mask is not None and mask < size:  # in the first third: ranks have other shares of them
            ids[:, : trial.length // 3 : 2] = mask
        rows = torch.arange(1, trial.batch + 1)[:, None]
        places = torch.arange(trial.length)
        places = places.flip(0) if trial.left else places
        seen = places < trial.length - trial.padding * rows // trial.batch
        if not trial.left and pad is not None and 0 <= pad < size:
            ids[~seen] = pad
        batch = {"input_ids": ids.to(device)}
        batch |= {n: t.to(device) for n, t in _labels(model, batch).items()}
        if trial.left and "labels" in batch:  # of no token that padding is, or predicts
            unseen = ~seen | (seen.cumsum(1) == 1)
            batch["labels"] = batch["labels"].masked_fill(unseen.to(device), -100)
        if trial.padding:
            batch["attention_mask"] = seen.long().to(device)
        if trial.start:
            ids = torch.arange(trial.start, trial.start + trial.length)
            batch["position_ids"] = ids[None].to(device)
        return batch
    if "pixel_values" in names:
        batch = {"pixel_values": _pixels(model, trial, generator).to(device, dtype)}
        return batch | {n: t.to(device) for n, t in _labels(model, batch).items()}
    raise _no_input(model)


def _no_input(model: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} takes neither input_ids nor pixel_values, so weft cannot make an "
        "input to check it with; pass verify=False and compare it yourself"
    )


def _two_rows(
    model: Foreign, trial: Trial, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor]:
    """Inputs of an encoder and a decoder: rows of other lengths, the first with padding."""
    config = model.config
    pad = getattr(config, "pad_token_id", None) or 0

    def draw(length: int) -> Tensor:
        size = int(getattr(config.get_text_config(), "vocab_size", 0) or 2)
        ids = torch.randint(0, size, (trial.batch, length), generator=generator)
        return ids.where(ids != pad, (pad + 1) % size)  # padding is where the mask says

    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        length = trial.length + _MORE
        seen = torch.arange(length) < length - _MORE * torch.arange(trial.batch)[:, None]
        seen[-1, length - _MORE // 2 :] = False
        batch = {"input_ids": draw(length), "attention_mask": seen.long()}
    elif "input_features" in names and hasattr(config, "num_mel_bins"):
        stem = [m.stride[0] for m in model.get_encoder().modules() if isinstance(m, nn.Conv1d)]
        frames = math.prod(stem) * config.max_source_positions
        shape = trial.batch, config.num_mel_bins, frames
        batch = {"input_features": torch.randn(shape, generator=generator).to(dtype)}
    else:
        raise _no_input(model)
    other = draw(trial.length)
    labelled = "labels" in names and labels_of(model) == OWN
    labelled = labelled and getattr(config, "decoder_start_token_id", None) is not None
    return batch | ({"labels": other} if labelled else {"decoder_input_ids": other})


def trial_of(model: Foreign, batch: Mapping[str, Any]) -> Trial:
    """The trial of a call of the user's own, of full rows."""
    if stacks_of(model) is not None:
        given = (batch.get(n) for n in ("decoder_input_ids", "decoder_inputs_embeds", "labels"))
        target = next((t for t in given if t is not None), None)
        if target is None or batch.get("encoder_outputs") is not None:
            raise UnsupportedError("batch: a call with labels, or ids of a decoder, is compared")
        return Trial(target.shape[0], target.shape[1], train=True)
    tokens = tokens_of(batch)
    if tokens is None:
        raise UnsupportedError("batch: a call of input_ids or inputs_embeds, whole, is compared")
    mask, left, padding = batch.get("attention_mask"), False, 0
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.all():
        left, padding = not mask[:, 0].all(), int((mask == 0).sum(1).max())
    rows, length = tokens.shape[:2]
    return Trial(rows, length, train=True, left=left, padding=padding)


def converted(batch: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The tensors of a call on a device, and real numbers in a dtype, as copies."""

    def one(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(one, value))
        if not isinstance(value, Tensor):
            return value
        kind = dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device, kind, copy=True)

    return {name: one(value) for name, value in batch.items()}


def options(model: Foreign, batch: dict[str, Tensor]) -> dict[str, bool]:
    """More arguments of a model: it computes the statistics of its routers, and keeps no cache."""
    chosen = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        chosen["use_cache"] = False
    if (
        "input_ids" in batch
        and stacks_of(model) is None
        and hasattr(model.config.get_text_config(), "output_router_logits")
    ):
        chosen["output_router_logits"] = True
    return chosen


def _labels(model: Foreign, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Labels, where the model's loss is one that weft computes over all ranks."""
    names = inspect.signature(model.forward).parameters
    rows = len(next(iter(batch.values())))
    if "labels" not in names:
        return {}
    if pools(model):
        return {"labels": torch.zeros(rows, dtype=torch.long)} if rows == 1 else {}
    kind = labels_of(model)
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    if kind not in (NEXT, OWN) or "self.loss_function(" not in source or "input_ids" not in batch:
        return {}
    classes = getattr(model.config, "num_labels", 2)
    of_tokens = model.loss_type == "ForTokenClassification"
    return {"labels": batch["input_ids"] % classes if of_tokens else batch["input_ids"]}


def _pixels(model: Foreign, trial: Trial, generator: torch.Generator) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (trial.batch, getattr(config, "num_channels", 3), height, width)
    return torch.randn(shape, generator=generator)


# -- layouts --------------------------------------------------------------------------------------


def reduced(layout: Layout, states: str | None = None) -> Layout:
    """The same layout with at most two ranks along every mesh dim.

    `states` is the axis of a model's recurrent layers, if it has some. A state that passes through
    a rank needs a rank on both sides: one mesh dim keeps four ranks where fragments are fewer.

    >>> reduced(Layout.parse("tokens: ulysses=8 x ring=16")).mesh
    {'ulysses': 2, 'ring': 2}
    >>> reduced(Layout.parse("tokens: ring=16"), "tokens").mesh
    {'ring': 4}
    """
    if not layout.mesh:
        return layout
    mesh = {d: 1 if size == 1 else 2 for d, size in layout.mesh.items()}
    if states is not None:
        dims = layout.shard_dims(states)
        few = layout.order.get(states) != "zigzag" and sum(mesh[d] > 1 for d in dims) == 1
        mesh |= {d: min(4, layout.mesh[d]) for d in dims if few and layout.mesh[d] > 2}
    return _with_mesh(layout, mesh)


def _with_mesh(layout: Layout, mesh: dict[str, int]) -> Layout:
    return Layout.from_dict({**layout.declaration, "mesh": mesh}, layout.name, layout.source)


def check_split_heads(
    model: nn.Module, layout: Layout, axis: str, recording: TrialRecording, within: str = ""
) -> None:
    """Raise where a layout, not reduced, cannot split the heads that a model's attention has.

    Of modules whose path begins so: those of towers stay whole.
    """
    if not layout.mesh:
        return
    mesh = {d: max(1, size) for d, size in layout.mesh.items()}  # -1: as many as there are
    full = _with_mesh(layout, mesh)
    heads: dict[tuple[int, int], str] = {}
    for visit in recording.visits.values():
        query, key = (visit.outputs.get(side) for side in ("query", "key"))
        if not visit.path.startswith(within):
            continue
        if visit.path.endswith(".attention") and query is not None and key is not None:
            path = visit.path.removesuffix(".attention")
            heads.setdefault((query.shape[1], key.shape[1]), path)
    for (h, g), path in heads.items():
        try:
            head_shares(full.rules(axis), mesh, h, g)
        except WeftError as error:
            raise type(error)(
                f"{type(model).__name__} cannot run on {layout.name}: {path!r}: {error}"
            ) from None

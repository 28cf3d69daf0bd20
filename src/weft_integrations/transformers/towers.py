"""Towers of images spread over ranks: each computes some images, and features go where they belong.

    images of a call     0  1  2  3        one unit of work each; frames of a video are units, too
    rank 0 computes      0     2           balanced by patches squared
    rank 1 computes         1     3
    features (F, d)      to ranks whose tokens are their placeholders, one all-to-all per mesh dim

A rank gets zeros for features of other ranks' tokens, which are cut away at the text decoder. A
rank without images computes one and leaves it out, as FSDP2 and DDP wait for every rank.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ShapeError, UnsupportedError
from weft.layout import Layout
from weft.plan.held import Held
from weft.plan.order import Span, Spans, count
from weft_axes.fields.exchange import take_positions
from weft_axes.fields.place import region_of

from .. import Foreign
from ..common import chunk_places, named_arguments
from .running import ModelCall, running

#: Families whose towers see one image at a time, and one video, or one frame of it.
_SEE_ONE = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "frame"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "qwen3_omni_moe_thinker"), "video"),
    **dict.fromkeys(("gemma3", "gemma4", "paligemma", "llava", "llava_next"), "image"),
    **dict.fromkeys(("llava_onevision", "internvl", "mistral3", "aya_vision"), "image"),
}
_FEATURES = {"get_image_features": "image", "get_video_features": "video"}


def methods(model: Foreign, decoder: nn.Module | None) -> list[tuple[nn.Module, Callable, str]]:
    """Replacements of methods that make features: (module, function, name).

    Raises for families whose towers are not known to see one image at a time.
    """
    kind = model.config.model_type
    if decoder is None or kind not in _SEE_ONE:
        raise UnsupportedError(
            f"images='spread': the tower of {type(model).__name__} ({kind}) is not known to see one"
            f" image at a time; known are {', '.join(sorted(_SEE_ONE))}. Leave images='whole'"
        )
    owner = next(m for m in model.modules() if any(c is decoder for c in m.children()))
    by = _SEE_ONE[kind]
    return [
        (owner, _spreading(getattr(type(owner), name), label, by == "frame"), name)
        for name, label in _FEATURES.items()
        if hasattr(owner, name) and (label == "image" or by != "image")
    ]


def _spreading(stock: Callable, label: str, by_frames: bool) -> Callable:
    """A method like `stock`, that computes the features of this rank's images."""

    @functools.wraps(stock)  # `generate` reads the signature: which arguments it is to encode
    def features(self: Foreign, *args: Any, **kwargs: Any) -> Any:
        call = running()
        if call is None or not call.ahead or call.spreading:
            return stock(self, *args, **kwargs)
        arguments = named_arguments(types.MethodType(stock, self), args, kwargs)
        call.spreading = True
        try:
            with _own_random_numbers(call.layout.chunk(call.axis), self.training):
                return _features(call, self, stock, arguments, label, by_frames)
        finally:
            call.spreading, call.spread = False, True

    return features


@contextlib.contextmanager
def _own_random_numbers(chunk: int, training: bool) -> Iterator[None]:
    """Draw numbers of a rank's own, and leave generators as on the other ranks."""
    if not training:
        yield
        return
    seed = int(torch.randint(1 << 62, ())) + chunk
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class _Units:
    """The images of a call: arguments by name, and how to pick some.

    Attributes:
        arguments: of the method that makes features.
        pixels: the name of the pixels.
        grid: (units, 3), the size of each in patches; None: all images have one size.
        count: how many there are.
    """

    arguments: Mapping[str, Any]
    pixels: str
    grid: Tensor | None
    count: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], by_frames: bool) -> _Units:
        """The units of a call; raises where images of a sample are treated together."""
        together = arguments.get("batch_num_images")
        if together is not None and bool((together != 1).any()):
            raise UnsupportedError(
                "images='spread': batch_num_images of several images in a sample"
            )
        pixels = next(n for n in arguments if n.startswith("pixel_values"))
        name = next((n for n in arguments if n.endswith("grid_thw")), "")
        grid = arguments.get(name)
        if grid is None:
            return cls(arguments, pixels, None, len(arguments[pixels]))
        if by_frames:
            frames = grid[:, 0]
            sizes = grid[:, 1:].repeat_interleave(frames, 0)
            grid = torch.cat([torch.ones_like(sizes[:, :1]), sizes], 1)
        return cls({**arguments, name: grid}, pixels, grid, len(grid))

    @functools.cached_property
    def patches(self) -> list[int]:
        """Patches of each unit, or numbers in proportion."""
        return [1] * self.count if self.grid is None else self.grid.prod(-1).tolist()

    def pick(self, chosen: Sequence[int]) -> dict[str, Any]:
        """The arguments for some units."""
        index = torch.tensor(chosen)
        picked = {
            n: v[index.to(v.device)]
            if isinstance(v, Tensor) and v.dim() > 0 and len(v) == self.count
            else v
            for n, v in self.arguments.items()
        }
        if self.grid is not None:
            parts = self.arguments[self.pixels].split(self.patches)
            picked[self.pixels] = torch.cat([parts[i] for i in chosen])
        return picked


def _features(
    call: ModelCall,
    owner: Foreign,
    stock: Callable,
    arguments: dict[str, Any],
    label: str,
    by_frames: bool,
) -> Any:
    """The output of `stock`, whose features are those of this rank's tokens, and zeros else."""
    layout, axis = call.layout, call.axis
    units = _Units.of(arguments, by_frames)
    content = f"{units.count} of {units.patches} patches"
    layout.bound.agree(
        f"features of {label}s, of images='spread',", content, layout.shard_dims(axis)
    )
    places = _placeholders(call, owner, label)  # once: ids may be read from a GPU
    goals = _owners(call, places)
    guessed = _tokens_of(units, places)
    sources = balanced(units.patches, guessed, goals, layout, axis)
    local = [i for i, source in enumerate(sources) if source == layout.chunk(axis)]
    cheapest = min(range(units.count), key=units.patches.__getitem__)
    out = stock(owner, **units.pick(local or [cheapest]))
    deep = out.get("deepstack_features") or []
    joined = torch.cat([_rows(x) for x in (out.pooler_output, *deep)], -1)
    counts = _counts(out.pooler_output, len(local or [cheapest]))
    lengths = _agreed(counts, local, units.count, joined.device, layout, axis)
    if sum(lengths) != len(goals):
        raise ShapeError(f"{len(goals)} placeholders of {label}s, and features of {sum(lengths)}")
    source = torch.tensor(sources).repeat_interleave(torch.tensor(lengths))
    got, index = to_owners(joined, source, goals, layout, axis)
    full = got.new_zeros(len(goals), got.shape[1]).index_copy(0, index.to(got.device), got)
    grid = next((v for n, v in arguments.items() if n.endswith("grid_thw")), None)
    if grid is not None:  # of images and videos again
        lengths = (grid.prod(-1) * sum(lengths) // grid.prod(-1).sum()).tolist()
    widths = [_rows(x).shape[-1] for x in (out.pooler_output, *deep)]
    whole = [
        _like(x, t, lengths) for x, t in zip((out.pooler_output, *deep), full.split(widths, -1))
    ]
    out["pooler_output"] = whole[0]
    if deep:
        out["deepstack_features"] = whole[1:]
    return out


# -- forms of features -----------------------------------------------------------------------------


def _rows(x: Any) -> Tensor:
    """Features (F, d) of all images: one tensor of each, (images, tokens, d), or flat already."""
    if isinstance(x, list | tuple):
        return torch.cat(list(x))
    return x.flatten(0, -2)


def _counts(x: Any, units: int) -> list[int]:
    """Features of each image."""
    if isinstance(x, list | tuple):
        return [len(t) for t in x]
    return [x[..., 0].numel() // units] * units


def _like(x: Any, flat: Tensor, lengths: list[int]) -> Any:
    """Features (F, d) in the form of others, of images of these lengths."""
    if isinstance(x, list | tuple):
        return type(x)(flat.split(lengths))
    return flat if x.dim() == 2 else flat.view(-1, *x.shape[1:])


# -- who computes what, and who needs it -----------------------------------------------------------


def _placeholders(call: ModelCall, owner: Foreign, label: str) -> Tensor:
    """The mask (b, n) of placeholders of features in full rows."""
    names = (f"{label}_token_id", f"{label}_token_index")
    token = next((v for n in names if (v := getattr(owner.config, n, None)) is not None), None)
    if call.ids is None or token is None:
        raise UnsupportedError(
            f"images='spread': a call without input_ids, whose placeholders of {label}s are not"
            " known; pass input_ids, or parallelize with images='whole'"
        )
    return call.ids.cpu() == token


def _owners(call: ModelCall, places: Tensor) -> Tensor:
    """The chunk that each placeholder's token falls to, in row-major order."""
    chunk_of = torch.empty(call.length, dtype=torch.long)
    for number, held in enumerate(chunk_places(call.layout, call.axis, call.length)):
        chunk_of[held] = number
    return chunk_of.expand(places.shape)[places]


def _tokens_of(units: _Units, places: Tensor) -> list[int]:
    """Tokens of each unit: by its patches, or by the runs of placeholders, or equally many."""
    total, patches = int(places.sum()), units.patches
    if units.grid is None:
        starts = places & ~torch.nn.functional.pad(places, (1, 0))[:, :-1]
        runs = starts.flatten().cumsum(0)[places.flatten()].bincount()[1:].tolist()
        if len(runs) == units.count:
            return runs
    return [total * p // sum(patches) for p in patches]


def balanced(
    patches: Sequence[int], tokens: Sequence[int], goals: Tensor, layout: Layout, axis: str
) -> list[int]:
    """The chunk whose rank computes each unit: even by patches squared, near the placeholders.

    The largest unit goes to the rank with the least work so far. Of all shifts of ranks, that is
    taken by which the fewest features travel: at most their mean, F (1 - 1/size) summed over mesh
    dims.
    """
    sizes = tuple(layout.mesh[d] for d in layout.shard_dims(axis))

    def at(chunks: Tensor) -> Tensor:
        """Coordinates of chunks along the mesh dims."""
        return torch.stack(torch.unravel_index(chunks, sizes))

    work = [0] * layout.size(axis)
    chosen = [0] * len(patches)
    for unit in sorted(range(len(patches)), key=lambda i: (-patches[i], i)):
        chosen[unit] = min(range(len(work)), key=lambda r: (work[r], r))
        work[chosen[unit]] += patches[unit] ** 2
    if sum(tokens) != len(goals):
        return chosen
    each, goal = torch.tensor(chosen).repeat_interleave(torch.tensor(tokens)), at(goals)

    def travelling(shift: int) -> int:
        return int((at((each + shift) % len(work)) != goal).sum())

    best = min(range(len(work)), key=travelling)
    return [(chunk + best) % len(work) for chunk in chosen]


def _agreed(
    counts: list[int],
    here: Sequence[int],
    units: int,
    device: torch.device,
    layout: Layout,
    axis: str,
) -> list[int]:
    """Features of all images, of which a rank knows its own: one small sum."""
    every = torch.zeros(units, dtype=torch.long)
    for unit, features in zip(here, counts):
        every[unit] = features
    return layout.bound.all_reduce(every.to(device), layout.shard_dims(axis)).tolist()


# -- features on their way -------------------------------------------------------------------------


def to_owners(
    x: Tensor, source: Tensor, goal: Tensor, layout: Layout, axis: str
) -> tuple[Tensor, Tensor]:
    """Rows of which this rank has those with its `source`, to the ranks of `goal`, and in order.

    Further rows of x, of an image that a rank without any computed, are left out.

    before  rank 0: rows of source 0        rank 1: rows of source 1        in order
    after   rank 0: rows of goal 0          rank 1: rows of goal 1          in order

    Returns this rank's rows, and their numbers.
    """
    ranks = Held.of(layout, axis, 0)
    held, wanted = ([_runs(of == r) for r in range(len(ranks))] for of in (source, goal))
    mine = x[: count(held[layout.chunk(axis)])]
    region = region_of(layout, (axis,))
    got = take_positions(mine, 0, ranks.having(held), tuple(wanted), region, "features")
    return got, (goal == layout.chunk(axis)).nonzero().flatten()


def _runs(here: Tensor) -> Spans:
    """Numbers of the rows that are here, as runs."""
    rows = here.nonzero().flatten()
    runs = rows.tensor_split(((rows.diff() != 1).nonzero().flatten() + 1).tolist())
    return tuple(Span(int(run[0]), len(run)) for run in runs if len(run))


__all__ = ["balanced", "methods", "to_owners"]

"""Families of the installed transformers on fields: which are exact, and what runs whole.

    python -m benchmarks.fields_families                    # all; writes results/fields_families.md
    python -m benchmarks.fields_families --kind masked      # one kind anew; the page keeps others
    python -m benchmarks.fields_families llama bert         # some, printed

Every family is built with random weights and a tiny configuration, as in `benchmarks.families`, and
`weft.parallelize` runs it as it is, with `use_cache=False`: text by `dims={"tokens": 1}` in zigzag
order, images by height. Logits, loss and all gradients are compared with one device, in fp64
where its kernels have it.
"""

from __future__ import annotations

import argparse
import copy
import logging
import resource
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import weft
from weft.errors import RankError, WeftError

from . import encoder_families, image_families
from .common import RESULTS
from .families import KINDS, TooLong, built, limited, model_name, one_line

LAYOUT, OF_IMAGES = "tokens(zigzag): ring=2", "height: ring=2"
SECONDS, MEMORY = 150, 60 << 30
PAGE = RESULTS / "fields_families.md"


class Row(NamedTuple):
    """A family's verdict, what refuses it, and the functions that ran whole."""

    family: str
    verdict: str
    note: str


class Case(NamedTuple):
    """A model, a call with labels, and how it is put on a layout."""

    model: nn.Module
    given: dict[str, Any]
    layout: str
    options: dict[str, Any]


def case_of(kind: str, family: str) -> Case:
    """A family's model and a call of it."""
    generator = torch.Generator().manual_seed(1)
    if kind == "vision":
        model = built(family, model_name(kind, family))
        size = _image_size(model.config)
        given = {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
        return Case(model, given | {"labels": torch.tensor([0, 1])}, OF_IMAGES, {})
    if kind == "image-text":
        model, given = image_families.built(family), image_families.example(family)
    elif kind == "encoder-decoder":
        known = family in encoder_families.OPTIONS
        own = encoder_families.built
        model = own(family) if known else built(family, model_name(kind, family))
        given = encoder_families.example(family if known else "bart")
    else:
        model = built(family, model_name(kind, family))
        ids = torch.randint(5, 90, (2, 32), generator=generator)
        given = {"input_ids": ids, "labels": ids}
    lengths = {given[n].shape[1] for n in ("input_ids", "labels") if n in given}
    split = tuple(
        name
        for name, t in given.items()
        if isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] in lengths
    )
    return Case(model, given, LAYOUT, {"dims": {"tokens": 1}, "inputs": split})


def _image_size(config: Any) -> int:
    size = getattr(config, "image_size", None)
    size = size or getattr(getattr(config, "vision_config", None), "image_size", None) or 64
    return int(size if isinstance(size, int) else size[0])


def compared(family: str, case: Case) -> Row:
    """A model on fields beside itself on one device."""
    case.model.config.use_cache = False
    case.model.config.get_text_config().use_cache = False

    def run(model: nn.Module) -> Any:
        dtype = next(model.parameters()).dtype
        given = {n: t.to(dtype) if _is_real(t) else t for n, t in case.given.items()}
        out = model(**given)
        out.loss.backward()
        return out

    try:
        alone = copy.deepcopy(case.model).double()
        out, limit = run(alone), (1e-6, 1e-4)
    except RuntimeError:  # kernels without fp64
        alone = copy.deepcopy(case.model).float()
        out, limit = run(alone), (1e-4, 1e-3)
    wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    if not all(torch.isfinite(t).all() for t in (out.logits, out.loss, *wanted.values())):
        return Row(family, "not run", "one device gives numbers that are not finite")
    largest = max(float(g.abs().max()) for g in wanted.values())

    def rank(layout: weft.Layout) -> tuple[float, float, list[str]]:
        own = copy.deepcopy(case.model).to(next(alone.parameters()).dtype)
        split = weft.parallelize(own, layout, **case.options)
        found = run(split)
        layout.sync_gradients(split)
        grads = dict(split.named_parameters())
        errors = [_error(grads[n].grad, g) / largest for n, g in wanted.items()]
        results = _error(found.logits, out.logits) / float(out.logits.abs().max())
        results = max(results, _error(found.loss, out.loss) / 10)
        return results, max(errors), sorted(split._weft.ran_whole.calls)

    result, gradient, whole = weft.on_threads(weft.Layout.parse(case.layout), rank, timeout=90)[-1]
    exact = result < limit[0] and gradient < limit[1]
    if not exact and max(result, gradient) < 1e-3:  # models that compute in fp32 whatever they are
        near = copy.deepcopy(case.model).to(next(alone.parameters()).dtype)
        for p in near.parameters():
            p.data *= 1 + 1e-8 * torch.randn_like(p)
        again = run(near)
        noise = _error(again.logits, out.logits) / float(out.logits.abs().max())
        exact = result < 10 * noise and gradient < limit[1]
    note = f"runs whole: {', '.join(name.split('.')[-1] for name in whole)}" if whole else ""
    found = f"{result:.0e}, {gradient:.0e}"
    return Row(family, "exact" if exact else "WRONG", (note if exact else "") or found)


def _is_real(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def _error(found: Tensor | None, right: Tensor) -> float:
    return float("inf") if found is None else float((found - right).detach().abs().max())


def judge(kind: str, family: str) -> Row:
    """A family's row, whatever it raises."""
    try:
        with limited(SECONDS):
            return compared(family, case_of(kind, family))
    except TooLong:
        return Row(family, "late", f"{SECONDS} s")
    except (WeftError, RankError) as error:
        return Row(family, "refused", one_line(error)[:200])
    except Exception as error:
        return Row(family, "not run", f"{type(error).__name__}: {one_line(error)[:120]}")


def written() -> dict[str, list[Row]]:
    """The rows of the page as it is, by kind."""
    kinds: dict[str, list[Row]] = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            kind = line[3:]
            kinds[kind] = []
        elif line.startswith("| ") and not line.startswith(("| family", "| ---")):
            kinds[kind].append(Row(*(cell.strip() for cell in line.strip("| ").split(" | ", 2))))
    return kinds


def page(kinds: dict[str, list[Row]]) -> str:
    """The tables as a page."""
    lines = [f"# {(__doc__ or '').partition(chr(10))[0]}", ""]
    lines += [f"`python -m benchmarks.fields_families`, {LAYOUT}; images {OF_IMAGES}."]
    for kind in (kind for kind in KINDS if kind in kinds):
        rows = kinds[kind]
        counts = Counter(row.verdict for row in rows)
        summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
        lines += ["", f"## {kind}", "", f"{len(rows)} families: {summary}.", ""]
        lines += ["| family | verdict | |", "| --- | --- | --- |"]
        lines += [f"| {r.family} | {r.verdict} | {r.note.replace('|', '/')} |" for r in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print rows; of whole kinds write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--kind", choices=KINDS, action="append")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # a configuration that is not tiny
    kinds = written()
    for kind in args.kind or KINDS:
        rows = []
        for family in sorted(KINDS[kind]):
            if not args.families or family in args.families:
                rows.append(judge(kind, family))
                print(kind, *rows[-1], sep=" | ", flush=True)
        if not args.families:
            kinds[kind] = rows
            PAGE.write_text(page(kinds))


if __name__ == "__main__":
    main()

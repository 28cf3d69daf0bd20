"""Causal families of the installed transformers on fields: which are exact, and what runs whole.

    python -m benchmarks.fields_families            # all; writes results/fields_families.md
    python -m benchmarks.fields_families llama bert # some, printed

Every family is built with random weights and a tiny configuration, as in `benchmarks.families`, and
`weft.parallelize(model, layout, dims={"tokens": 1})` runs it as it is, in zigzag order:
logits, loss and all gradients beside one device, in fp64 where its kernels have it.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

import weft
from weft.errors import RankError, WeftError

from .common import RESULTS
from .families import KINDS, TooLong, built, limited, model_name, one_line

LAYOUT = "tokens(zigzag): ring=2"
SECONDS = 150


class Row(NamedTuple):
    """A family's verdict, what refuses it, and the functions that ran whole."""

    family: str
    verdict: str
    note: str


def compared(family: str, model: nn.Module) -> Row:
    """A model on fields beside itself on one device."""
    ids = torch.randint(5, 90, (2, 32), generator=torch.Generator().manual_seed(1))
    model.config.use_cache = False
    given = {"input_ids": ids, "labels": ids}
    try:
        alone = copy.deepcopy(model).double()
        out = alone(**given)
        limit = 1e-6, 1e-4
    except RuntimeError:  # kernels without fp64
        alone = copy.deepcopy(model)
        out = alone(**given)
        limit = 1e-4, 1e-3
    out.loss.backward()
    wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in wanted.values())

    def rank(layout: weft.Layout) -> tuple[float, float, list[str]]:
        own = copy.deepcopy(model).to(next(alone.parameters()).dtype)
        split = weft.parallelize(own, layout, dims={"tokens": 1})
        found = split(**given)
        found.loss.backward()
        layout.sync_gradients(split)
        grads = dict(split.named_parameters())
        errors = [_error(grads[n].grad, g) / largest for n, g in wanted.items()]
        results = _error(found.logits, out.logits) / float(out.logits.abs().max())
        results = max(results, _error(found.loss, out.loss) / 10)
        return results, max(errors), sorted(split._weft.ran_whole.calls)

    result, gradient, whole = weft.on_threads(weft.Layout.parse(LAYOUT), rank, timeout=90)[-1]
    exact = result < limit[0] and gradient < limit[1]
    note = f"runs whole: {', '.join(name.split('.')[-1] for name in whole)}" if whole else ""
    return Row(family, "exact" if exact else "WRONG", note or f"{result:.0e}, {gradient:.0e}")


def _error(found: Tensor | None, right: Tensor) -> float:
    return float("inf") if found is None else float((found - right).detach().abs().max())


def judge(family: str) -> Row:
    """A family's row, whatever it raises."""
    try:
        with limited(SECONDS):
            model = built(family, model_name("causal", family))
            return compared(family, model)
    except TooLong:
        return Row(family, "late", f"{SECONDS} s")
    except (WeftError, RankError) as error:
        return Row(family, "refused", one_line(error)[:160])
    except Exception as error:
        return Row(family, "not run", f"{type(error).__name__}: {one_line(error)[:120]}")


def main() -> None:
    """Print rows; of all families write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*")
    asked = parser.parse_args().families
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for family in asked or KINDS["causal"]:
        rows.append(judge(family))
        print(*rows[-1], sep=" | ", flush=True)
    counts = Counter(row.verdict for row in rows)
    summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
    print(summary)
    if not asked:
        head = (__doc__ or "").partition("\n\n")[0]
        lines = [
            f"# {head}",
            "",
            f"`python -m benchmarks.fields_families`, {LAYOUT}: {summary}.",
            "",
        ]
        lines += ["| family | verdict | |", "| --- | --- | --- |"]
        lines += [f"| {r.family} | {r.verdict} | {r.note.replace('|', '/')} |" for r in rows]
        (RESULTS / "fields_families.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""torch's own database of functions (OpInfo), as cases of `beside.py`.

python tests/opinfo.py                 a table, function by function, of all samples
python tests/opinfo.py --write 'conv'  of functions with a word; to `benchmarks/results`
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import multiprocessing
import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from beside import FAULTS, GRIDS, Verdict, described, drawn, grid, verdict
from few import spread
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

#: The dtype of a function's samples: the first that it takes.
DTYPES = (torch.float64, torch.int64, torch.bool, torch.float32)

#: Samples of a function's further variants: as a method, in place, by other names.
SAMPLES = 6
#: What their results hold nobody knows.
EMPTY = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided")


class Case(NamedTuple):
    """A sample of a function, on a grid."""

    function: str
    label: str
    call: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    grads: bool

    def on(self, text: str) -> tuple[Verdict, str]:
        """Its verdict on a grid, with splits drawn from its label; and the case in words."""
        rng = random.Random(f"{self.label} {text}")
        tensors = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]
        first = sum(isinstance(t, Tensor) for t in tree_leaves(self.args[:1]))
        where = drawn(rng, tensors, grid(text), first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = verdict(
                *(self.call, self.args, self.kwargs, grid(text), where, self.grads),
                whole_loss=rng.random() < 0.5,
                chance=self.function in EMPTY,
            )
        what = f"{self.label} {text} {described(self.args)} {described(self.kwargs)} split {where}"
        return found, what


def functions() -> dict[str, Any]:
    """Name -> a function's entry in torch's database, of those that take tensors of numbers."""
    named = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    return {name: op for name, op in named.items() if not op.is_factory_function and _dtype(op)}


def _dtype(op: Any) -> torch.dtype | None:
    return next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)


def variants(op: Any) -> dict[str, Callable]:
    """Ways to call a function: itself, a method, in place, an operator, and other names of it."""
    found = {"": op.get_op(), "method": op.get_method(), "operator": op.get_operator()}
    found |= {alias.name: alias.op for alias in op.aliases}
    for name, fn in (("inplace", op.get_inplace()), ("ioperator", op.get_inplace_operator())):
        found[name] = _on_a_copy(fn) if fn else None
    return {name: fn for name, fn in found.items() if fn}


def _on_a_copy(fn: Callable) -> Callable:
    """Changes a copy of the first argument in place, and gives it beside the result."""

    def changed(x: Any, *args: Any, **kwargs: Any) -> Any:
        x = x.clone() if isinstance(x, Tensor) else [t.clone() for t in x]
        return fn(x, *args, **kwargs), x

    return changed


def cases(name: str, op: Any) -> Iterator[Case]:
    """All samples of a function in every variant of it, and those at which torch raises."""
    dtype = _dtype(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = list(_sampled(lambda: op.sample_inputs("cpu", dtype)))
        wrong = list(_sampled(lambda: (e.sample_input for e in op.error_inputs("cpu"))))
    grads = op.supports_autograd and dtype.is_floating_point
    for kind, some in (("", samples), (" error", wrong)):
        for variant, fn in variants(op).items():
            count = len(some) if not variant else min(len(some), SAMPLES)
            for i in sorted(spread(len(some))[:count]):
                s = some[i]
                label = f"{name}{f'[{variant}]' if variant else ''}{kind} #{i}"
                with_grads = (
                    grads
                    and not kind
                    and (op.supports_inplace_autograd or variant not in ("inplace", "ioperator"))
                )
                if _is_dense((s.input, s.args, s.kwargs)):
                    yield Case(name, label, fn, (s.input, *s.args), dict(s.kwargs), with_grads)


def _sampled(make: Callable[[], Iterator]) -> Iterator:
    """Samples up to the first that torch cannot make here."""
    with contextlib.suppress(Exception):
        yield from make()


def _is_dense(tree: Any) -> bool:
    return all(
        t.layout == torch.strided and not t.is_nested
        for t in tree_leaves(tree)
        if isinstance(t, Tensor)
    )


# -- the table -------------------------------------------------------------------------------------

KINDS = ("exact", "random", "both raise", "refused", *FAULTS)


def counted(name: str) -> tuple[str, collections.Counter, list[str]]:
    """Verdicts of all cases of a function, and the faults in words."""
    torch.set_num_threads(1)
    counts, faults = collections.Counter(), []
    for case in cases(name, functions()[name]):
        for text in GRIDS:
            found, words = case.on(text)
            counts[found.kind] += 1
            if found.kind in FAULTS:
                faults.append(f"{found.kind} {words}: {found.note}")
    return name, counts, faults


def table(rows: list[tuple[str, collections.Counter, list[str]]]) -> str:
    """The table of counts: a row per function that has an answer, and the names of the others."""
    total = sum((counts for _, counts, _ in rows), collections.Counter())
    answered = [
        row for row in rows if any(row[1][k] for k in KINDS if k not in ("refused", "both raise"))
    ]
    refused = [name for name, *_ in rows if name not in {row[0] for row in answered}]
    lines = [
        f"# Functions of torch {torch.__version__.split('+')[0]} on fields",
        "",
        "torch's own samples (OpInfo, with those at which it raises, as functions, methods, in"
        f" place and by other names) on {', '.join(GRIDS)} ranks, beside one device: values,"
        " dtypes, every gradient, writes into results; by `python tests/opinfo.py --write`.",
        "",
        f"| function | {' | '.join(KINDS)} |",
        "| --- |" + " ---: |" * len(KINDS),
    ]
    for name, counts, _ in [("all", total, []), *answered]:
        lines.append(f"| {name} | {' | '.join(str(counts[k] or '') for k in KINDS)} |")
    return "\n".join([*lines, "", f"Always refused, by name: {', '.join(refused)}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="functions with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    args = parser.parse_args()
    names = [name for name in functions() if re.search(args.word, name)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        rows = list(pool.map(counted, names, chunksize=4))
    text = table(rows)
    print(text, *(fault for row in rows for fault in row[2]), sep="\n")
    if args.write:
        release = ".".join(torch.__version__.split(".")[:2])
        results = Path(__file__).parent.parent / "benchmarks/results"
        (results / f"opinfo_{release}.md").write_text(text)


if __name__ == "__main__":
    main()

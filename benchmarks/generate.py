"""`generate` of every causal family that is exact under weft, token by token against one device.

Families are those that docs/families.md calls exact, with random weights in fp64 and a tiny
configuration. Ranks are threads. A prompt is split by ring, tile or Ulysses, and tokens are decoded
against a cache of which every rank holds a part.

    python -m benchmarks.generate --write              # all that benchmarks/results lacks; the page
    python -m benchmarks.generate llama --quick        # one, fewer tokens, printed
    python -m benchmarks.generate --write --seconds 500   # as far as the time goes
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import re
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import transformers

import weft
from benchmarks.families import KINDS, limited, one_line, tiny_config
from weft.errors import WeftError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/generate.json"
PAGE = RESULTS.with_suffix(".md")
#: How the prompt is split, and on how many ranks.
LAYOUTS = (
    *("tokens(zigzag): ring=2", "tokens: ulysses=2"),
    *("tokens(zigzag): ring=4", "tokens: tile=2x2", "tokens: ulysses=4"),
)
PROMPT, TOKENS, QUICK = 45, 200, 12
#: The releases that make a row.
_BY = f"transformers {transformers.__version__}, weft {weft.__version__}"


def exact_families() -> list[str]:
    """The causal families that docs/families.md calls exact."""
    text = (ROOT / "docs" / "families.md").read_text()
    causal = text.split("## Causal")[1].split("\n## ")[0]
    return re.findall(r"^\| (\S+) \| \S+ \| exact \|", causal, re.M)


def build(family: str) -> torch.nn.Module:
    """A tiny model in fp64 whose tokens do not repeat themselves at once."""
    name = KINDS["causal"][family]
    name = name[0] if isinstance(name, tuple) else name
    torch.manual_seed(0)
    config = tiny_config(family, name)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = getattr(transformers, name)(config).double().eval()
    for p in model.parameters():
        if p.dim() > 1 and p.std() > 0:
            p.data *= 0.3 / p.std()
        elif p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product has no fp64
    return model


def judge(family: str, count: int) -> dict:
    """The tokens of `generate` on every layout, compared with those of one device."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    ids = torch.randint(5, 97, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def generate(model: torch.nn.Module) -> torch.Tensor:
        return model.generate(ids, max_new_tokens=count, **options)[0, ids.shape[1] :]

    try:
        with limited(60):
            model = build(family)
            want = generate(model)
    except Exception as error:
        return {"one device": f"{type(error).__name__}: {one_line(error)}"[:300], "by": _BY}
    row: dict = {"different tokens": len(set(want.tolist())), "by": _BY}

    def rank(layout: weft.Layout) -> torch.Tensor:
        return generate(weft.parallelize(copy.deepcopy(model), layout))

    for line in LAYOUTS:
        try:
            with limited(120):
                made = weft.on_threads(weft.Layout.parse(line), rank)
        except WeftError as error:
            row[line] = f"refused: {one_line(error)}"[:300]
            continue
        except Exception as error:
            row[line] = f"FAILED: {type(error).__name__}: {one_line(error)}"[:300]
            continue
        wrong = [t for t in made if not torch.equal(t, want)]
        first = min((int((t != want).nonzero()[0]) for t in wrong), default=None)
        row[line] = f"{count} equal" if not wrong else f"FAILED: token {first} differs"
    return row


def page(rows: dict[str, dict]) -> str:
    """The table as a page of the docs."""
    verdicts = Counter(_verdict(row) for row in rows.values())
    summary = ", ".join(f"{n} {v}" for v, n in verdicts.most_common())
    layouts = ", ".join(f"`{line}`" for line in LAYOUTS)
    lines = ["| family | on every layout | distinct tokens |", "|---|---|---|"]
    for family, row in sorted(rows.items()):
        cells = [_cell(row.get(line, row.get("one device", ""))) for line in LAYOUTS]
        if len(set(cells)) == 1:
            text = cells[0]
        else:
            text = "; ".join(f"`{line}`: {cell}" for line, cell in zip(LAYOUTS, cells))
        lines.append(f"| {family} | {text} | {row.get('different tokens', '')} |")
    return (
        "# Generation, by model family\n\n"
        f"{len(rows)} of the {len(exact_families())} causal families that "
        f"[model families](../../docs/families.md) calls exact, of transformers "
        f"{transformers.__version__}: a tiny configuration, random weights in fp64, a prompt of "
        f"{PROMPT} tokens, greedy, on {layouts}. Tokens of `generate` on ranks are compared with "
        f'those of one device; "{TOKENS} equal": the first {TOKENS} are the same on every rank. '
        "Where a text has few distinct tokens, the comparison shows less. A prompt is split as "
        "the layout says, and tokens are decoded against keys of which every rank holds a part. "
        f"Made by `python -m benchmarks.generate --write`; ranks are threads. {_older(rows)}\n\n"
        f"{summary[:1].upper()}{summary[1:]}.\n\n" + "\n".join(lines) + "\n"
    )


def _older(rows: dict[str, dict]) -> str:
    """Families whose rows another release of transformers or of weft made, or that have none."""
    older = [family for family, row in rows.items() if row.get("by") != _BY]
    missing = [family for family in exact_families() if family not in rows]
    texts = {"Of an earlier release": sorted(older), "Not tried": sorted(missing)}
    return " ".join(f"{text}: {', '.join(names)}." for text, names in texts.items() if names)


def _verdict(row: dict) -> str:
    cells = [str(row.get(line, "")) for line in LAYOUTS]
    if "one device" in row:
        return "not tried, as one device does not generate"
    if any(cell.startswith("FAILED") for cell in cells):
        return "FAILED"
    if all(cell.endswith("equal") for cell in cells):
        return "equal on all layouts"
    return "equal on some layouts" if any(c.endswith("equal") for c in cells) else "refused"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS} and {PAGE}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} tokens")
    parser.add_argument("--again", action="store_true", help="those that have results, too")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    start = time.monotonic()
    count = QUICK if args.quick else TOKENS
    wanted = [f for f in exact_families() if args.again or f not in rows]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=spawned) as pool:
        begun = {pool.submit(judge, f, count): f for f in args.families or wanted}
        for done in as_completed(begun):
            if done.cancelled():
                continue
            rows[begun[done]] = done.result()
            seconds = time.monotonic() - start
            print(begun[done], done.result(), f"{seconds:.0f} s", flush=True)
            if args.write:
                RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
                PAGE.write_text(page(rows))
            if seconds > args.seconds:
                for other in begun:
                    other.cancel()
    print(dict(Counter(map(_verdict, rows.values()))))
    if any(_verdict(row) == "FAILED" for row in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

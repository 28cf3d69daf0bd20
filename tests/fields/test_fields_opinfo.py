"""torch's own samples of its functions on fields: exact, as torch raises, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from beside import FAULTS, GRIDS
from opinfo import Case, cases, functions

from weft_axes.fields.place import FieldRegion, WholeReport

FUNCTIONS = functions()
#: Parts of the whole table.
PARTS = 24


def check(drawn: Iterable[tuple[Case, str]]) -> None:
    """No case of these, each on a grid, is wrong or an error of another kind."""
    found = [(case.on(text)) for case, text in drawn]
    faults = [f"{v.kind} {v.note}\n    {words}" for v, words in found if v.kind in FAULTS]
    assert not faults, f"{len(faults)} of {len(found)} cases:\n" + "\n".join(faults[:20])
    assert found


@pytest.mark.parametrize("part", range(3))
def test_drawn_samples_are_exact_or_refused(part):
    rng = random.Random(f"OpInfo {part}")
    names = [*FUNCTIONS][part::24]
    samples = ([*cases(n, FUNCTIONS[n])] for n in names)
    check((rng.choice(some), rng.choice(GRIDS)) for some in samples if some)


@pytest.mark.filterwarnings("ignore:.*it runs whole")
@pytest.mark.parametrize("part", range(2))
def test_what_has_no_rule_is_exact_whole_or_refused(part, monkeypatch):
    """Within models of any package: a copy on every rank stands for what has no rule."""
    stock = FieldRegion.__init__
    monkeypatch.setattr(
        FieldRegion, "__init__", lambda *args: stock(*args[:3], WholeReport(), args[4])
    )
    rng = random.Random(f"whole {part}")
    names = [*FUNCTIONS][part::12]
    samples = ([*cases(n, FUNCTIONS[n])] for n in names)
    check((rng.choice(some), rng.choice(GRIDS)) for some in samples if some)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_samples_are_exact_or_refused(part):
    names = [*FUNCTIONS][part::PARTS]
    check((case, text) for n in names for case in cases(n, FUNCTIONS[n]) for text in GRIDS)

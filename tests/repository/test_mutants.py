"""Planted bugs are found in the source, and change it: `python -m tests.mutants` plants them."""

from __future__ import annotations

import ast
import re

import mutants
import pytest


@pytest.mark.few(20)
@pytest.mark.parametrize("bug", mutants.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_changes_its_function(bug: mutants.Bug):
    (place,) = mutants.found(bug, mutants.ROOT / "src")
    planted = place.planted(bug.new)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(place.source))
    assert all(mutants.test_file(f"test_{name}.py") for name in bug.tests.split())


def test_the_test_that_noticed_a_planted_bug_is_there():
    """A bug whose catcher went or got another name is planted again, `--write`."""
    for name, result in mutants.recorded().items():
        caught = re.match(r"caught by (test_\w+\.py)::(?:\w+::)?(\w+)", result)
        if caught is None:  # open: `python -m tests.mutants --open --write`
            continue
        source = (mutants.ROOT / mutants.test_file(caught[1])).read_text()
        assert re.search(rf"def {caught[2]}\(", source), f"{name!r}: no {caught[2]} in {caught[1]}"


def test_names_of_planted_bugs_are_unique():
    names = [bug.name for bug in mutants.BUGS]
    assert len(names) == len({*names})

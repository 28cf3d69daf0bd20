"""Planted bugs are found in the source, and change it: `python -m tests.mutants` plants them."""

from __future__ import annotations

import ast

import mutants
import pytest


@pytest.mark.few(20)
@pytest.mark.parametrize("bug", mutants.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_changes_its_function(bug: mutants.Bug):
    (place,) = mutants.found(bug, mutants.ROOT / "src")
    planted = place.planted(bug.new)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(place.source))
    assert all((mutants.ROOT / f"tests/test_{name}.py").is_file() for name in bug.tests.split())


def test_names_of_planted_bugs_are_unique():
    names = [bug.name for bug in mutants.BUGS]
    assert len(names) == len({*names})

"""Parts in which ranks' texts of a call differ are shown by name."""

from __future__ import annotations

import pytest

from weft.comm.differences import differences

CALL = "labels True; training mode True, input_ids (2, 13) daf26c71, labels (2, 13) 14a665db; split"
ATTENTION = (
    "an attention call, layout 'heads: ulysses=2, tokens: ring=2', mask Doc((3, 4), b='x, y'),"
    " lengths (queries, keys) ((13, 13),), batch 2, torch.float64, cpu [143ff6ab]"
)
SHOWN = [
    (
        CALL,
        "daf26c71",
        "e5b67475",
        "input_ids (2, 13) daf26c71 (rank 0), (2, 13) e5b67475 (rank 1)",
    ),
    (CALL, "mode True", "mode False", "training mode True (rank 0), False (rank 1)"),
    (CALL, ", labels (2, 13) 14a665db", "", "labels (2, 13) 14a665db (rank 0), none (rank 1)"),
    (
        CALL,
        "; split",
        "; split, 0 tokens in a cache",
        "none (rank 0), 0 tokens in a cache (rank 1)",
    ),
    (CALL, "; split", ", use_cache=True; split", "none (rank 0), use_cache=True (rank 1)"),
    (CALL, "; split", "; all weights [92808d0f]; split", "all weights none (rank 0), [92808d0f]"),
    (ATTENTION, "((13, 13),)", "((13, 9),)", "lengths (queries, keys) ((13, 13),) (rank 0), (que"),
    (ATTENTION, "ring=2'", "ring=4'", "layout 'heads: ulysses=2, tokens: ring=2' (rank 0), 'heads"),
    (ATTENTION, "'x, y'", "'x, z'", "mask Doc((3, 4), b='x, y') (rank 0), Doc((3, 4), b='x, z')"),
    (ATTENTION, "float64", "float32", "torch.float64 (rank 0), torch.float32 (rank 1)"),
]


@pytest.mark.parametrize(("text", "old", "new", "shown"), SHOWN)
def test_parts_that_differ_are_shown_by_name(text, old, new, shown):
    assert old in text
    other = text.replace(old, new, 1).replace("143ff6ab", "00000000")
    found = differences({text: [0], other: [1]})
    assert found.startswith(shown), found
    assert ";" not in found


def test_two_parts_that_differ_are_each_of_all_ranks():
    other = CALL.replace("True, ", "False, ").replace("daf", "abc")
    found = differences({CALL: [0, 2], other: [1]})
    first, second = "training mode True (rank 0, 2), False (rank 1)", "input_ids (2, 13) daf26c71"
    assert found.startswith(f"{first}; {second} (rank 0, 2), (2, 13) abc26c71 (rank 1)"), found


def test_other_calls_are_not_compared_by_parts():
    assert differences({CALL: [0], ATTENTION: [1]}) == ""
    assert differences({CALL: [0], "refused: no, not here; leave it": [1]}) == ""
    assert differences({ATTENTION: [0], ATTENTION.replace("143ff6ab", "00000000"): [1]}) == ""

"""The named parts in which ranks' texts of a call differ.

A text is a list of parts, apart by `, ` or `; ` outside of brackets and quotes. A part is a name
and a value, as in `mask Causal()`, `input_ids (2, 13) daf26c71`, `scale=0.5`, or a value alone.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence

from ..launch.failures import rank_list

#: A digest of all that is in a text, at its end; one of all weights is a value.
_DIGEST = re.compile(r"(?<!weights) \[[0-9a-f]{8}\](?=$|, called by )")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
#: Beginnings of texts of ranks that refuse.
_REFUSALS = ("refused", "unsupported")
#: Said of a rank whose text has no part of a name.
_NONE = "none"


def differences(texts: Mapping[str, Sequence[int]]) -> str:
    """Name the parts that differ between texts, each of some ranks; "" if most of them do.

    >>> print(differences({"n (2, 4), mask full, bf16": [0], "n (2, 6), mask full, bf16": [1]}))
    n (2, 4) (rank 0), (2, 6) (rank 1)
    >>> print(differences({"call; n 4, mask full, bf16": [0], "call; n 4, bf16": [1, 2]}))
    mask full (rank 0), none (rank 1, 2)
    """
    rows = _aligned([parts(_DIGEST.sub("", text)) for text in texts])
    wrong = _unequal(rows)
    if len(rows) < 3 or 2 * len(wrong) > len(rows):
        return ""
    return "; ".join(_shown(row, [*texts.values()]) for row in wrong)


def parts(text: str) -> list[str]:
    """The parts of a text; separators within brackets and quotes are none.

    >>> parts("ids (2, 13) da, layout 'tokens: ring=2, heads: ring=2'; weights [a, b], bf16")
    ['ids (2, 13) da', "layout 'tokens: ring=2, heads: ring=2'", 'weights [a, b]', 'bf16']
    """
    found, begin, depth, quote = [], 0, 0, ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and not text[i - 1 : i].isalnum():  # an apostrophe follows a letter
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth = max(0, depth - 1)
        elif depth == 0 and letter in ",;" and text[i + 1 : i + 2] == " ":
            found.append(text[begin:i])
            begin = i + 2
    return [*found, text[begin:]]


def out_of_step(texts: Mapping[int, str]) -> str:
    """Advice where some ranks run a backward pass and others do not; "" otherwise.

    >>> print(out_of_step({0: "the backward pass of a gather, n 4", 1: "a call; n 4"})[:59])
    rank 1 began a call while rank 0 ran the backward pass of a
    """
    doing: dict[str, list[int]] = {}
    for rank, text in texts.items():
        doing.setdefault(parts(text)[0], []).append(rank)
    late = {call: who for call, who in doing.items() if "backward pass" in call}
    ahead = {call: who for call, who in doing.items() if call not in late}
    if not late or not ahead or any(call.startswith(_REFUSALS) for call in ahead):
        return ""
    early, behind = (
        " and ".join(f"rank {rank_list(who)}" for who in calls.values()) for calls in (ahead, late)
    )
    return (
        f"{early} began {next(iter(ahead))} while {behind} ran {next(iter(late))}: every rank must"
        " read the same outputs of a call (the loss, or the logits), call backward() of the same"
        " loss, and only then make its next call"
    )


def _aligned(every: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows of the parts that stand for each other: by name, or in order if fewer differ so."""
    named = [_by_name(each) for each in every]
    names = dict.fromkeys(name for each in named for name in each)
    by_name = [tuple(each.get(name, _NONE) for each in named) for name in names]
    in_order = [*zip(*every)] if len({len(each) for each in every}) == 1 else by_name
    return min(by_name, in_order, key=lambda rows: len(_unequal(rows)))


def _unequal(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [row for row in rows if len(set(row)) > 1]


def _by_name(each: Sequence[str]) -> dict[tuple[str, int], str]:
    """Parts by their first word, and how many before have the same one."""
    counts: collections.Counter[str] = collections.Counter()
    named = {}
    for part in each:
        name = re.split("[ =]", part, maxsplit=1)[0]
        named[name, counts[name]] = part
        counts[name] += 1
    return named


def _shown(row: Sequence[str], ranks: Sequence[Sequence[int]]) -> str:
    """A row of parts as its name, and the value of each rank."""
    given = [part.split(" ") for part in row if part != _NONE]
    size, most = 0, min(len(words) for words in given) - 1
    while size < most and len({words[size] for words in given}) == 1:
        if not _NAME.fullmatch(given[0][size]):
            break
        size += 1
    name = " ".join(given[0][:size])
    by_value: dict[str, list[int]] = {}
    for part, who in zip(row, ranks):
        value = part if part == _NONE else " ".join(part.split(" ")[size:])
        by_value.setdefault(value, []).extend(who)
    values = ", ".join(
        f"{value} (rank {rank_list(sorted(who))})" for value, who in by_value.items()
    )
    return f"{name} {values}".lstrip()

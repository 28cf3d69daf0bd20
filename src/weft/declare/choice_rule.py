"""The rule of a mesh dim along which a model chooses keys, `[choose]` of a layout."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DeclarationError, shown

#: (index, choice) of the two ways in which the keys of a whole sequence can be chosen.
ROWS = "S(seq) -> R", "S(seq)"
LISTS = "S(seq)", "P(top_k) -> S(seq)"


@dataclass(frozen=True)
class ChoiceRule:
    """The role of a mesh dim that splits tokens, where index queries choose among index keys.

    By rows index keys come to every rank, `S(seq) -> R`, which scores its own queries by all keys:
    whole rows, of which `torch.topk` takes what it takes on one device. By lists index keys stay
    and index queries come to them; each rank's best keys are a list of (score, position), and lists
    merge by highest score, then lowest position: `P(top_k) -> S(seq)`.

    Attributes:
        lists: whether index queries travel and lists merge.

    >>> ChoiceRule.parse("S(seq)", "P(top_k) -> S(seq)").describe()
    'index S(seq), choice P(top_k) -> S(seq)'
    """

    lists: bool = False

    @classmethod
    def parse(cls, index: str, choice: str) -> ChoiceRule:
        """Read a rule.

        Args:
            index: where index keys are, at rest -> while computing.
            choice: what a rank has of the choices of queries -> where they rest.

        Raises:
            DeclarationError: anything but the two ways; the message has the reason.
        """
        found = _plain(index), _plain(choice)
        for lists, legal in enumerate((ROWS, LISTS)):
            if found == (_plain(legal[0]), _plain(legal[1])):
                return cls(bool(lists))
        given = f"index = {shown(index)} with choice = {shown(choice)}"
        ways = (
            f"write index = {ROWS[0]!r} with choice = {ROWS[1]!r}, or index = {LISTS[0]!r} with"
            f" choice = {LISTS[1]!r}"
        )
        raise DeclarationError(f"{given}: {_why_illegal(*found)}; {ways}")

    def describe(self) -> str:
        """The rule in the grammar's words, on one line."""
        index, choice = LISTS if self.lists else ROWS
        return f"index {index}, choice {choice}"


def _why_illegal(index: str, choice: str) -> str:
    if index == choice == "S(seq)":
        return "every rank would choose among its own keys only"
    if (index, choice) == ("S(seq)->R", "P(top_k)->S(seq)"):
        return "lists of the same keys would merge, each key once for every rank"
    return "the keys of a whole sequence are chosen by whole rows, or by lists that merge"


def _plain(text: str) -> str:
    return "".join(text.split())


__all__ = ["LISTS", "ROWS", "ChoiceRule"]

"""The rule of a mesh dim along which the state of a recurrence is carried."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DeclarationError, did_you_mean, shown

STATE, HALO = "P(affine) -> S(seq)", "S(seq) + left(k - 1)"
#: How states get to the ranks that need them.
TRANSPORTS = ("auto", "gather", "chain")


@dataclass(frozen=True)
class StateRule:
    """The role of a mesh dim that splits tokens in a recurrence and in a short convolution.

    Every rank's tokens are an affine map of the state that enters them; composed in order, the maps
    before a rank's are that state, `P(affine) -> S(seq)`. A convolution of k taps takes the last
    k - 1 columns of the tokens to the left, `S(seq) + left(k - 1)`.

    Attributes:
        transport: "gather": all maps come to every rank, and ranks compute at the same time;
            "chain": the state is handed on in order, a group of heads at a time, with the bits of
            one device; "auto": gather on up to 8 ranks, a chain on more.

    >>> StateRule.parse("P(affine) -> S(seq)", "S(seq) + left(k - 1)").describe()
    'state P(affine) -> S(seq), halo S(seq) + left(k - 1)'
    """

    transport: str = "auto"

    @classmethod
    def parse(cls, state: str, halo: str = HALO, transport: str = "auto") -> StateRule:
        """Read a rule.

        Args:
            state: where the state is while computing -> where it enters.
            halo: what short convolutions see.
            transport: "auto", "gather" or "chain".

        Raises:
            DeclarationError: anything but the one way in which a recurrence may be split.
        """
        for name, found, legal in (("state", state, STATE), ("halo", halo, HALO)):
            if _plain(found) != _plain(legal):
                raise DeclarationError(
                    f"{name} = {shown(found)}: a recurrence that is split along its tokens is"
                    f" {name} = {legal!r} and nothing else would be exact"
                )
        if transport not in TRANSPORTS:
            raise DeclarationError(f"transport {transport!r}{did_you_mean(transport, TRANSPORTS)}")
        return cls(transport)

    def describe(self) -> str:
        """The rule in the grammar's words, on one line."""
        return f"state {STATE}, halo {HALO}"


def _plain(text: str) -> str:
    return "".join(text.split())

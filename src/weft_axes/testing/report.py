"""The results of a conformance run: a row for every case and tensor."""

from __future__ import annotations

from dataclasses import dataclass

#: What a case may end as, from good to bad.
EXACT, REFUSED, WRONG, FAILED = "exact", "refused", "WRONG", "FAILED"


@dataclass(frozen=True)
class Finding:
    """The outcome of one case.

    Attributes:
        case: its name.
        verdict: "exact", "refused" (raised on every rank), "WRONG" (a number is off, an input was
            changed, a gradient is missing) or "FAILED" (some ranks raised, hung or died).
        errors: per tensor the largest error over all ranks, relative to the largest entry of the
            whole.
        detail: the exception, or any other error.

    >>> Finding("causal", "WRONG", {"dk": 0.4}).describe()
    'causal: WRONG; dk 4.0e-01'
    """

    case: str
    verdict: str
    errors: dict[str, float]
    detail: str = ""

    def describe(self) -> str:
        """One line: the tensors that differ, and by how much."""
        off = ", ".join(f"{name} {value:.1e}" for name, value in self.errors.items())
        return f"{self.case}: {self.verdict}; {'; '.join(filter(None, (off, self.detail)))}"


@dataclass(frozen=True)
class Report:
    """All findings of a conformance run; printed, it is a table.

    Attributes:
        name: of the attention.
        ranks: on how many.
        limit: the largest error allowed, relative to the largest entry of the whole.
        findings: one per case.

    >>> report = Report("mine", 2, 1e-11, (Finding("causal", "WRONG", {"dk": 0.4}),))
    >>> report.ok
    False
    """

    name: str
    ranks: int
    limit: float
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if every case is exact or refused."""
        return all(f.verdict in (EXACT, REFUSED) for f in self.findings)

    def of(self, case: str) -> Finding:
        """The finding of a case.

        Args:
            case: its name.
        """
        return next(f for f in self.findings if f.case == case)

    def assert_exact(self, refusing: tuple[str, ...] = ()) -> None:
        """Raise an `AssertionError` that lists the cases that are not exact.

        Args:
            refusing: names of cases that may be refused.

        >>> Report("mine", 2, 1e-11, (Finding("causal", "exact", {}),)).assert_exact()
        """
        bad = [
            f
            for f in self.findings
            if f.verdict != EXACT and not (f.verdict == REFUSED and f.case in refusing)
        ]
        lines = "\n".join(f"  {f.describe()}" for f in bad)
        assert not bad, f"{self.name} on {self.ranks} ranks (allowed {self.limit:.0e}):\n{lines}"

    def markdown(self) -> str:
        """The findings as a Markdown table."""
        lines = ["| case | | out | dq | dk | dv | detail |", "| --- " * 7 + "|"]
        for f in self.findings:
            numbers = [_shown(f.errors.get(name)) for name in ("out", "dq", "dk", "dv")]
            detail = " ".join(f.detail.split())[:90].replace("|", "/")
            lines.append(f"| {' | '.join([f.case, f.verdict, *numbers, detail])} |")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.name}, {self.ranks} ranks, allowed {self.limit:.0e}\n\n{self.markdown()}"


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.0e}"

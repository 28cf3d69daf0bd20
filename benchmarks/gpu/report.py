"""The report of a machine, part by part: on disk after every row, whatever ends the command."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PART = re.compile(r"^<!-- part: (\S+) (\S+) -->$", re.MULTILINE)
DONE, BEGUN, FAILED = "done", "begun", "failed"


class Report:
    """A markdown file of a heading and sections, one per part.

    What is on disk under the same heading (the same machine and releases) is kept: a later call of
    the command adds what is missing. Every change is on disk when the method returns, as one file
    in place of the other.

    Args:
        path: of the file.
        heading: what ran where.
        order: of the parts.
    """

    def __init__(self, path: Path, heading: str, order: list[str]) -> None:
        self.path, self.heading, self.order = path, heading, order
        self.sections: dict[str, tuple[str, str]] = {}  # part -> (state, text)
        text = path.read_text() if path.exists() else ""
        marks = [*_PART.finditer(text)]
        if marks and text[: marks[0].start()].strip() == heading:
            ends = [mark.start() for mark in marks[1:]] + [len(text)]
            for mark, end in zip(marks, ends):
                self.sections[mark[1]] = mark[2], text[mark.end() : end].strip()

    def missing(self) -> list[str]:
        """Parts that no call has finished, in order; then those that failed, or took too long."""
        open_ = [name for name in self.order if self._state(name) not in (DONE, FAILED)]
        return [*open_, *self.failed()]

    def failed(self) -> list[str]:
        """Parts that failed, or took too long, in order."""
        return [name for name in self.order if self._state(name) == FAILED]

    def wrong(self) -> list[str]:
        """Parts that found something wrong, in order."""
        return [name for name, (_, text) in self.sections.items() if "**WRONG**" in text]

    def _state(self, name: str) -> str:
        return self.sections.get(name, ("", ""))[0]

    def begin(self, name: str, title: str) -> None:
        """A part begins: what an earlier call found goes."""
        self.sections[name] = BEGUN, f"## {title}\n"
        self._write()

    def add(self, name: str, line: str) -> None:
        """A line of a part."""
        state, text = self.sections[name]
        self.sections[name] = state, f"{text}\n{line}"
        self._write()

    def end(self, name: str, line: str, failed: bool = False) -> None:
        """A part has ended, well or not; the line says how."""
        self.sections[name] = FAILED if failed else DONE, f"{self.sections[name][1]}\n\n{line}"
        self._write()

    def _write(self) -> None:
        parts = [
            f"<!-- part: {name} {self.sections[name][0]} -->\n\n{self.sections[name][1]}"
            for name in self.order
            if name in self.sections
        ]
        self.path.parent.mkdir(exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text("\n\n".join([self.heading, *parts]) + "\n")
        os.replace(new, self.path)

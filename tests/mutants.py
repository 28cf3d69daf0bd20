"""Planted bugs, and whether tests notice them: `python -m tests.mutants`, not part of the suite.

Each bug is one change of one expression or statement, of the kind that people make: an index off
by one, a wait left out, groups swapped, a merge in the wrong dtype, a gradient or a refusal lost.
It stands in `tests/mutants.toml`, anchored by its function and the expression in it, wherever they
stand and however their lines are broken (`test_mutants.py` holds that each is found). It is
planted in a copy of the source, on which run the test files that should notice it; the test that
noticed it last, as recorded beside it, before the others. The test that notices a bug must pass
without it. A bug that survives is a hole in the tests. Options: a word, to plant only bugs whose
file or name has it; `--open`, only those that the record does not have as caught; `--jobs N`;
`--write`, to record results beside the bugs as they come.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
BUGS_FILE = Path(__file__).with_suffix(".toml")
#: Seconds that the tests of one bug may take.
LIMIT = 600


class Bug(NamedTuple):
    """An expression or statement changed: `old`, which stands once in `function`, becomes `new`.

    `file` is below `src`; a function that has left it is looked for in all files. "" is a module.
    """

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: str


BUGS = tuple(
    Bug(name, *row["in"].split(": ", 1), *row["change"], row["tests"])
    for name, row in tomllib.loads(BUGS_FILE.read_text()).items()
)


class Place(NamedTuple):
    """The source of a bug's file, and the part of it, in bytes, that the bug replaces."""

    path: Path
    source: bytes
    start: int
    end: int
    indent: int

    def planted(self, new: str) -> bytes:
        """The source with the part replaced."""
        text = new.replace("\n", "\n" + " " * self.indent)
        return self.source[: self.start] + text.encode() + self.source[self.end :]


def found(bug: Bug, src: Path) -> list[Place]:
    """All places of a bug in its function: one, if the anchor is good.

    >>> place, = found(BUGS[0], ROOT / "src")
    >>> place.source[place.start:place.end].decode() == BUGS[0].old
    True
    """
    files = [src / bug.file] if (src / bug.file).is_file() else []
    for path in (*files, *(f for f in sorted(src.rglob("*.py")) if f not in files)):
        for scope in _scopes(path).get(bug.function, ()):
            places = list(_places(bug, path, scope))
            if places or (path in files and bug.function):
                return places
        if path in files and not bug.function:
            return []
    return []


@functools.lru_cache(512)
def _scopes(path: Path) -> dict[str, list[ast.AST]]:
    """Functions and classes of a file by their qualified names, and the module itself."""
    tree = ast.parse(path.read_bytes())
    scopes: dict[str, list[ast.AST]] = {"": [tree]}

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
                scopes.setdefault(".".join(inner), []).append(child)
            walk(child, inner)

    walk(tree, ())
    return scopes


def _places(bug: Bug, path: Path, scope: ast.AST) -> Iterator[Place]:
    (old,) = ast.parse(bug.old).body
    wanted = _comparable(old.value if isinstance(old, ast.Expr) else old)
    source = path.read_bytes()
    lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    for node in ast.walk(scope):
        if isinstance(node, ast.expr | ast.stmt) and _comparable(node) == wanted:
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            yield Place(path, source, start, end, node.col_offset * isinstance(node, ast.stmt))


def _comparable(node: ast.AST) -> str:
    """A node without its place, whether it is read or assigned to."""
    return re.sub(r"ctx=(Load|Store|Del)\(\)", "", ast.dump(node))


_FOLDERS = re.compile(r"^(\w+/)+")


def test_file(test: str) -> str:
    """A test, or a file of tests, with the folder that has it."""
    (found,) = (ROOT / "tests").rglob(test.partition("::")[0])
    return f"{found.parent.relative_to(ROOT)}/{test}"


class Failures:
    """A plugin of pytest that keeps the names of the tests that fail; processes run last."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items) -> None:
        items.sort(key=lambda item: "pool" in item.fixturenames)

    def pytest_collectreport(self, report) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def run_tests(copy: Path, tests: list[str], answer) -> None:
    """In a process that has imported torch but not weft: run tests on a copy, until one fails."""
    os.setsid()
    os.chdir(copy)
    path = [str(copy / "src"), str(copy)]
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    with open("output", "wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)

    failures = Failures()
    options = ["-n", "0", "-q", "-x", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    options += ["--timeout", "120"]  # a bug may make ranks wait for each other
    options += ["-m", "slow or not slow" if "::" in tests[0] else "not slow or few"]
    code = pytest.main([*options, *tests], plugins=[failures])
    answer.send((int(code), failures.names))


def outcome(copy: Path, tests: list[str]) -> str:
    """What tests say of a copy: `caught by` whom, "SURVIVED", or why they did not run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "pytest", "numpy"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(copy, tests, send))
    process.start()
    send.close()
    try:
        if not receive.poll(LIMIT):
            return f"no answer in {LIMIT} s"
        code, names = receive.recv()
    except EOFError:
        return "broken run: the process of the tests died"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if code == 1 and names:
        return f"caught by {_FOLDERS.sub('', names[0])}"
    return "SURVIVED" if code == 0 else f"broken run: {(copy / 'output').read_text()[-300:]}"


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A folder with every file of the repository, without those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        yield Path(folder)


@functools.cache
def without_bug(test: str) -> str:
    """The outcome of a test on a copy without any bug: "SURVIVED" if it is a good one."""
    with copied() as copy:
        return outcome(copy, [test_file(test)])


def planted(bug: Bug, before: str = "") -> str:
    """Run a bug's tests on a copy of the source that has it, those of `before` first."""
    with copied() as copy:
        places = found(bug, copy / "src")
        if len(places) != 1:
            return f"not planted: {bug.old!r} stands {len(places)} times in {bug.function}"
        places[0].path.write_bytes(places[0].planted(bug.new))
        files = [test_file(f"test_{name}.py") for name in bug.tests.split()]
        noticed = before.removeprefix("caught by ")
        attempts = [files] if noticed == before else [[test_file(noticed)], files]
        for tests in attempts:
            result = outcome(copy, tests)
            test = result.removeprefix("caught by ")
            if test != result and without_bug(test) != "SURVIVED":
                return f"broken run: {test} fails without the bug, too"
            if result.startswith("caught"):
                return result
        return result


def recorded() -> dict[str, str]:
    """Name of a bug -> the result that stands beside it."""
    rows = tomllib.loads(BUGS_FILE.read_text())
    return {name: row.get("caught", "") for name, row in rows.items()}


def record(results: dict[str, str]) -> None:
    """Write results beside their bugs, and leave every other line as it is."""
    name, lines = "", []
    for line in BUGS_FILE.read_text().splitlines(keepends=True):
        if line.startswith("["):
            (name,) = tomllib.loads(line)
        if name not in results or not line.startswith("caught = "):
            lines.append(line)
        if name in results and line.startswith("tests = "):
            lines.append(f"caught = {json.dumps(results[name], ensure_ascii=False)}\n")
    BUGS_FILE.write_text("".join(lines))


def main() -> None:
    """Plant the bugs that were asked for, and say which survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="plant bugs whose name or file has it")
    parser.add_argument("--open", action="store_true", help="only bugs that the record has as open")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="record the result")
    asked = parser.parse_args()
    bugs = [bug for bug in BUGS if asked.word in bug.name or asked.word in bug.file]
    before, results = recorded(), {}
    if asked.open:
        bugs = [bug for bug in bugs if not before.get(bug.name, "").startswith("caught")]
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        runs = pool.map(lambda bug: planted(bug, before.get(bug.name, "")), bugs)
        for bug, result in zip(bugs, runs):
            results[bug.name] = result
            print(f"{result:60.60}  {bug.file}: {bug.name}", flush=True)
            if asked.write:  # now: a run of all takes an hour, and may be cut short
                record(results)
    survivors = [name for name, result in results.items() if not result.startswith("caught")]
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    main()

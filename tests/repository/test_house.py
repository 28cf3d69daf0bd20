"""Nothing in a lower room imports a higher one, nothing imports in a circle, and nothing grows."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from few import cases

from weft._doors import PACKAGES

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

#: Rooms from low to high, by the beginning of their modules' names; those of one line know nothing
#: of each other. Of a room with plans and what carries them out, each part has its place.
ROOMS = (
    ("errors", "_opening", "_version", "_doors", "_caching"),
    ("_terminal", "_pointwise"),
    ("_torch", "_uploads"),
    ("_compile",),
    ("masks", "bias", "choice"),
    ("declare",),
    ("_digest",),
    ("launch",),
    ("comm",),
    ("kernels",),
    ("plan.order",),
    ("plan.held",),
    ("move.plan",),
    ("move.windows",),
    ("plan",),
    ("packing",),
    ("move",),
    ("runtime",),
    ("layout",),
    ("dtensors", "sinks", "bias_tiles"),
    ("asked",),
    ("attention", "threads"),
    ("inspect",),
    ("weft",),
    ("weft_axes.same_ranks",),
    ("weft_axes.carry", "weft_axes.fetching", "weft_axes.testing"),
    ("weft_axes.decode",),
    ("weft_axes.torch_interop",),
    ("weft_axes.nn", "weft_axes.losses"),
    ("weft_axes.fields",),
    ("weft_axes.checkpoint",),
    ("weft_axes.gradients",),
    ("weft_axes",),
    ("weft_proof",),
    ("weft_models.declare",),
    ("weft_models.pair", "weft_models.routing"),
    ("weft_models.models",),
    ("weft_models.tables",),
    ("weft_models.train",),
    ("weft_models",),
    ("weft_integrations",),
    ("weft_planner",),
    ("weft_cli.inspect", "weft_cli.mask_names"),
    ("weft_cli.commands",),
    ("weft_cli",),
    ("__main__",),
)
LEVEL = {
    room if room.startswith("weft") else f"weft.{room}": level
    for level, rooms in enumerate(ROOMS)
    for room in rooms
}
#: Methods of a room that hand out what a higher one makes, and import it when they are called.
DOORS = {("weft.layout", "weft.inspect.call_plan")}
#: What plans are made of; everything that touches a tensor or a rank is above them.
BELOW_PLANS = (
    "errors",
    "_caching",
    "_digest",
    "_torch",
    "_uploads",
    "bias",
    "choice",
    "declare",
    "masks",
    "kernels",
    "plan",
)
#: And parts of a room above them, which are plans too: messages of listed positions.
PLANS_BELOW = ("weft.move.plan", "weft.move.windows")


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}


@functools.cache
def room_of(module: str) -> str | None:
    """The room of a module: the longest name in `ROOMS` that its own begins with."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    name = next((name for name in names if name in LEVEL), None)
    return name if name != "weft" or module == "weft" else None


def imports(module: str, types: bool = False) -> Iterator[tuple[str, bool]]:
    """Modules of weft that a module imports, and whether when it is loaded; or also for `types`."""
    path = SOURCES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def walk(node: ast.AST, loading: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if for_types and not types:
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, loading) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                name = ".".join([*base, *filter(None, [child.module])])
                for alias in child.names:
                    inner = f"{name}.{alias.name}"
                    yield inner if inner in SOURCES else name, loading
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, loading and not inside)

    found = walk(tree(path), True)
    return ((name, loading) for name, loading in found if name.split(".")[0] in PACKAGES)


@functools.cache
def edges(types: bool = False) -> dict[str, dict[str, bool]]:
    """module -> module that it imports -> whether when it is loaded."""
    made: dict[str, dict[str, bool]] = defaultdict(dict)
    for module in SOURCES:
        for target, loading in imports(module, types):
            made[module][target] = made[module].get(target, False) or loading
    return made


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def test_every_module_has_a_room():
    assert {room_of(module) for module in SOURCES} == set(LEVEL)
    assert {module.split(".")[0] for module in SOURCES} == set(PACKAGES)


def test_the_engine_imports_no_package_beside_it():
    """Its doors are texts, imported when used; `python -m weft` is the command line."""
    beside = re.compile(r"\bweft_(axes|models|integrations|planner|proof|cli)\b")
    found = {
        module
        for module, path in SOURCES.items()
        if module.split(".")[0] == "weft" and beside.search(path.read_text())
    }
    assert found == {"weft.__main__", "weft._doors"}


def test_plans_are_made_of_declarations_masks_and_kernels():
    allowed = {f"weft.{room}" for room in BELOW_PLANS}
    found = {
        f"{module} imports {target}"
        for module, targets in edges().items()
        if module.startswith("weft.plan")
        for target in targets
        if ".".join(target.split(".")[:2]) not in allowed and target not in PLANS_BELOW
    }
    assert not found


def test_messages_are_posted_in_one_room():
    """Carriers have what they carry, rates measure them; everything else is a movement's."""
    posted = re.compile(r"\b(P2PBatch|Shuffle)\(")
    found = {m for m, path in SOURCES.items() if posted.search(path.read_text())}
    kinds = {f"weft.move.{kind}" for kind in ("rotate", "trade", "gather", "hand_on")}
    assert {m for m in found if not m.startswith(("weft.comm.", "weft_planner."))} == kinds


def test_a_room_imports_lower_rooms_only():
    upward = {
        f"{module} imports {target}"
        for module, targets in edges().items()
        for target in targets
        if room_of(module) != room_of(target)
        and LEVEL[room_of(target) or "weft"] >= LEVEL[room_of(module) or "weft"]
        and (module, target) not in DOORS
    }
    assert not upward


def drawn() -> tuple[dict[str, str], dict[str, set[str]]]:
    """The picture in CONTRIBUTING.md: the box of each room, and the arrows of each box."""
    (picture,) = re.findall(
        r"```mermaid\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    boxes = re.findall(r'(\w+)\["(.*)"\]', picture)
    arrows: dict[str, set[str]] = {box: set() for box, _ in boxes}
    for box, target in re.findall(r"(\w+) --> (\w+)", picture):
        arrows[box].add(target)
    rooms = {room: box for box, names in boxes for room in names.split(", ")}
    return {r if r.startswith("weft") else f"weft.{r}": box for r, box in rooms.items()}, arrows


def arrows_of_imports(box: dict[str, str]) -> dict[str, set[str]]:
    """The arrows between boxes of rooms by the imports: those that follow from others left out."""
    straight: dict[str, set[str]] = {name: set() for name in box.values()}
    for module, targets in edges().items():
        ends = {box[str(room_of(target))] for target in targets if (module, target) not in DOORS}
        straight[box[str(room_of(module))]] |= ends - {box[str(room_of(module))]}

    def below(name: str) -> set[str]:
        return straight[name].union(*(below(target) for target in straight[name]))

    return {
        name: targets - set().union(*(below(target) for target in targets))
        for name, targets in straight.items()
    }


def test_the_house_is_as_contributing_draws_it():
    """A circle of boxes would not end, an arrow back up stands in no line of the picture."""
    box, arrows = drawn()
    assert set(box) == set(LEVEL)
    assert arrows_of_imports(box) == arrows
    order = [*arrows]
    assert all(order.index(target) < order.index(b) for b in arrows for target in arrows[b])


def test_doors_are_used_and_open_late():
    for module, target in DOORS:
        assert edges()[module][target] is False


def test_no_module_imports_in_a_circle():
    """Within a room too, and also of what is imported when a function runs, or for types."""
    reached: dict[str, set[str]] = {}

    def below(module: str, path: tuple[str, ...]) -> set[str]:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in reached:
            targets = set(edges(types=True).get(module, {})) - {module}
            reached[module] = targets.union(*(below(t, (*path, module)) for t in targets))
        return reached[module]

    for module in SOURCES:
        if SOURCES[module].name != "__init__.py":
            below(module, ())


def test_a_circle_and_a_step_upward_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    more = {m: dict(t) for m, t in edges().items()}
    more["weft.errors"] = {"weft.masks": True}
    monkeypatch.setitem(globals(), "edges", lambda types=False: more)
    with pytest.raises(AssertionError, match=r"weft\.errors"):
        test_a_room_imports_lower_rooms_only()
    with pytest.raises(AssertionError, match=r"weft\.errors"):
        test_no_module_imports_in_a_circle()


def test_a_public_name_is_defined_once():
    """Commands are functions of the command line's names, and do not count."""
    homes: dict[str, set[str]] = defaultdict(set)  # overloads are in one file
    for module, path in SOURCES.items():
        for node in tree(path).body:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef)
            if named and not node.name.startswith("_") and room_of(module) != "weft_cli.commands":
                homes[node.name].add(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_few_cases_have_every_value_of_their_parameters():
    """Three of nine pairs have all six values; of one parameter, both ends and the middle."""
    pairs = [{"mask": mask, "layout": line} for mask in "abc" for line in "xyz"]
    chosen = [pairs[i] for i in cases(pairs, 3)]
    assert {v for pair in chosen for v in pair.values()} == {*"abcxyz"}
    assert cases([{"n": n} for n in range(9)], 3) == {0, 4, 8}
    assert cases(pairs, 20) == {*range(9)}


#: Code lines, docstrings and comments apart. These numbers only fall: who takes lines away, lowers
#: them; who needs more, finds what can go.
BUDGET = {
    "src/weft": 16_940,
    "src/weft_axes": 11_140,
    "src/weft_models": 4_690,
    "src/weft_integrations": 5_500,
    "src/weft_planner": 3_090,
    "src/weft_proof": 980,
    "src/weft_cli": 3_690,
    "tests": 40_400,
    "benchmarks": 8_950,
}


def code_lines(path: Path) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1) if token.string.strip() else ())
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


@pytest.mark.parametrize("folder", BUDGET)
def test_code_lines_are_within_their_budget(folder):
    lines = sum(map(code_lines, (ROOT / folder).rglob("*.py")))
    assert lines <= BUDGET[folder], f"{folder} has {lines} code lines"


if __name__ == "__main__":
    for name, targets in arrows_of_imports(drawn()[0]).items():
        for target in sorted(targets):
            print(f"  {name} --> {target}")

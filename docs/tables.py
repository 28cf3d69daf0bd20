"""The shipped strategies and layouts as pages, made from their TOML files."""

from __future__ import annotations

import re

from weft import Layout, Strategy
from weft.declare import catalog
from weft_cli.inspect.rule_words import rule_in_words


def strategies() -> str:
    """Every strategy with its rules, as declared and in words."""
    parts = [
        "# Strategies",
        "A strategy is one or more rules; a rule names the placements of query, key and output on "
        "one mesh dim, at rest and while computing. [Tutorial 2](tutorials/02_strategies.md) "
        "explains how to read them and how to write your own. This page is made from the files in "
        "`strategies/`.",
    ]
    for name in catalog.names("strategies"):
        strategy = Strategy.load(name)
        parts += [f"## {name}", strategy.about]
        if strategy.rules:
            parts.append(_rules(strategy))
        if strategy.routing is not None:
            options = strategy.routing.model_dump().items()
            parts.append("Routing: " + ", ".join(f"`{k} = {v}`" for k, v in options) + ".")
        if strategy.reference:
            parts.append("Reference: " + _references(strategy.reference) + ".")
    return "\n\n".join(parts) + "\n"


def _rules(strategy: Strategy) -> str:
    lines = ["| rule | query | key, value | output | in words |", "|---|---|---|---|---|"]
    declared, _ = catalog.read_declaration("strategies", strategy.name)
    for name, rule in strategy.rules.items():
        text = declared["rule"][name]
        cells = (f"`{text[side]}`" for side in ("query", "key", "out"))
        lines.append(f"| {name} | {' | '.join(cells)} | {rule_in_words(rule)} |")
    return "\n".join(lines)


def _references(text: str) -> str:
    links = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
    return re.sub(r"\b(arXiv|doi):([\w./-]*\w)", lambda m: f"[{m[0]}]({links[m[1]]}{m[2]})", text)


def layouts() -> str:
    """Every layout with its mesh, what it splits, and its file."""
    parts = [
        "# Layouts",
        "A layout names the dims of a mesh, says which axes they split, and stacks strategies on "
        "the attended axes. Layouts of your own are TOML files like these; `Layout.parse` reads "
        "one from a single line. This page is made from the files in `layouts/`.",
        "| layout | mesh | splits | attends | about |\n|---|---|---|---|---|\n"
        + "\n".join(_row(name) for name in catalog.names("layouts")),
    ]
    for name in catalog.names("layouts"):
        toml = (catalog.folder("layouts") / f"{name}.toml").read_text().rstrip()
        parts += [f"## {name}", f"```toml\n{toml}\n```"]
    return "\n\n".join(parts) + "\n"


def _row(name: str) -> str:
    layout = Layout.load(name)
    mesh = " × ".join(f"{d} {size}" for d, size in layout.mesh.items())
    splits = "; ".join(f"{axis} over {', '.join(d)}" for axis, d in layout.sharding.items())
    attends = "; ".join(
        f"{axis}: {' + '.join(b.strategy.name for b in bindings) or 'not split'}"
        for axis, bindings in layout.attend.items()
    )
    return f"| [{name}](#{name}) | {mesh} | {splits} | {attends} | {layout.about} |"

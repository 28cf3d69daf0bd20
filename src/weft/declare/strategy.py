"""Rules and strategies: the role of each mesh dim in attention, declared as placements.

While computing, a mesh dim cuts one side of the box batch x head x query x key, or none. The five
legal triples of placements (`_ROLES`) are `Role`; any other drops scores or counts them twice.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationError
from torch.distributed.tensor import Placement, Replicate, Shard

from ..errors import DeclarationError, did_you_mean
from . import catalog
from .choice_rule import ChoiceRule
from .explain import explain_validation
from .placements import BATCH, HEAD, SEEN, SEQ, Arrow, SoftmaxPartial, parse_arrow, show
from .routing import Routing
from .state_rule import HALO, StateRule

TRANSPORTS = ("auto", "ring", "gather", "halo")


class Role(enum.StrEnum):
    """The side of the box batch x head x query x key that a mesh dim cuts while computing.

    BATCH and HEAD need no traffic. With QUERY a rank owns rows of the score matrix, and keys come
    to it. With KEY it owns columns: queries come to it, and partial outputs leave. NONE repeats
    the work on every rank.

    >>> Role("query"), Rule.parse(query="R", key="S(seq)", out="P(softmax) -> R").role
    (<Role.QUERY: 'query'>, <Role.KEY: 'key'>)
    """

    BATCH = "batch"
    HEAD = "head"
    QUERY = "query"
    KEY = "key"
    NONE = "none"


_ROLES: dict[tuple[Placement, Placement, Placement], Role] = {
    (Shard(BATCH), Shard(BATCH), Shard(BATCH)): Role.BATCH,
    (Shard(HEAD), Shard(HEAD), Shard(HEAD)): Role.HEAD,
    (Shard(SEQ), Replicate(), Shard(SEQ)): Role.QUERY,
    (Replicate(), Shard(SEQ), SoftmaxPartial()): Role.KEY,
    (Replicate(), Replicate(), Replicate()): Role.NONE,
}


def _why_illegal(query: Placement, key: Placement, out: Placement) -> str:
    if query == Shard(SEQ) and key == Shard(SEQ):
        return "query S(seq) with key S(seq) would drop the scores between different chunks"
    if query == Replicate() and key == Shard(SEQ):
        return (
            f"each rank sees some of the keys, so out must be P(softmax) while computing, "
            f"not {show(out)}"
        )
    if out == SoftmaxPartial():
        return "out P(softmax) needs query R and key S(seq): else whole outputs would be merged"
    same: dict[tuple[Placement, Placement], str] = {
        (Shard(SEQ), Replicate()): "S(seq)",
        (Replicate(), Replicate()): "R",
    }
    if (query, key) in same:
        return f"out must be {same[query, key]} while computing, not {show(out)}"
    if query == key:
        return f"out must be {show(query)} while computing, as query and key are, not {show(out)}"
    return (
        f"query {show(query)} with key {show(key)} would pair parts that do not belong together: "
        "a mesh dim cuts batch, heads, queries or keys, one of them"
    )


@dataclass(frozen=True)
class Rule:
    """The role of one mesh dim: placements of query, key (and value) and output.

    Make one with `Rule.parse`:

    >>> rule = Rule.parse(query="S(seq)", key="S(seq) -> R", out="S(seq)")
    >>> rule.role
    <Role.QUERY: 'query'>

    Attributes:
        query: placement of queries.
        key: placement of keys and values.
        out: placement of the output.
        role: the side of the work that the mesh dim cuts while computing.
        backward_role: the same in the backward pass. Ring forward with pass-Q backward has role
            QUERY and backward_role KEY. None: whichever of the two moves fewer bytes.
        transport: "ring", "gather", "halo" or "auto".
        forward_role: `role`, or None: whichever of QUERY and KEY moves fewer bytes in a call.
        windows: whether the mesh dim is declared to split an axis that windows run over.
    """

    query: Arrow
    key: Arrow
    out: Arrow
    role: Role
    backward_role: Role | None
    transport: str
    forward_role: Role | None
    windows: bool = False

    @classmethod
    def parse(
        cls,
        query: str,
        key: str,
        out: str,
        transport: str = "auto",
        backward: str | None = None,
        forward: str | None = None,
        input: str | None = None,
        norm: str | None = None,
    ) -> Rule:
        """Read a rule in the grammar of `weft.declare.placements`.

        Args:
            query: placement of queries, at rest -> while computing.
            key: placement of keys and values, likewise.
            out: placement of the output, while computing -> at rest.
            transport: how moving chunks travel: "ring", "gather" or "auto"; of a key
                'S(seq) + seen' "halo", or "auto": by halo where that moves fewer bytes.
            backward: the role in the backward pass: "query", "key", "auto", or as in the forward
                pass.
            forward: "auto" lets every call choose the role that moves fewer bytes, whichever of
                the two is written; default the one that is written.
            input: of windows along the axis: "S(seq) + around".
            norm: of norms over the axis: "P(moments) -> R".

        Raises:
            DeclarationError: the rule is illegal; the message has the reason.

        >>> few_queries = Rule.parse("S(seq)", "S(seq) -> R", "S(seq)", forward="auto")
        >>> few_queries.forward_role, few_queries.backward_role
        (None, None)
        """
        q, k, o = parse_arrow(query), parse_arrow(key), parse_arrow(out, reverse=True)
        if isinstance(q.rest, SoftmaxPartial) or isinstance(k.rest, SoftmaxPartial):
            raise DeclarationError("P(softmax) is a placement of outputs, not of query or key")
        if isinstance(o.rest, SoftmaxPartial):
            raise DeclarationError("out may not rest as P(softmax): write 'P(softmax) -> S(seq)'")
        role = _ROLES.get((q.compute, k.compute, o.compute))
        if q.seen or o.seen or (k.seen and role is not Role.QUERY):
            raise DeclarationError(f"{SEEN} belongs to key, in a rule whose query is S(seq)")
        if role is None:
            raise DeclarationError(_why_illegal(q.compute, k.compute, o.compute))
        if o.rest != q.rest:
            raise DeclarationError(
                f"out rests as {show(o.rest)} but query as {show(q.rest)}: "
                "attention returns its output placed like the query"
            )
        if q.top_k or o.top_k or (k.top_k and role is not Role.QUERY):
            raise DeclarationError("R(top_k) belongs to key, in a rule whose query is S(seq)")
        if role is Role.NONE and not q.rest == k.rest == Replicate():
            raise DeclarationError(
                f"query and key R while computing is the same work on every rank; it needs both at "
                f"rest as R too, but they rest as {show(q.rest)} and {show(k.rest)}"
            )
        moving = role in (Role.QUERY, Role.KEY)
        if transport not in TRANSPORTS:
            raise DeclarationError(f"transport {transport!r}{did_you_mean(transport, TRANSPORTS)}")
        if transport != "auto" and not moving:
            raise DeclarationError(
                f"transport {transport!r} is for rules that move keys or queries; this one cuts "
                f"{role.value}"
            )
        if k.seen != (transport == "halo") and transport != "auto":
            raise DeclarationError(
                f"transport {transport!r} with key {key!r}: 'halo' brings what queries see,"
                f" 'S(seq) -> {SEEN}'; 'ring' and 'gather' bring whole chunks, 'S(seq) -> R'"
            )
        if k.seen and (forward or backward):
            raise DeclarationError(
                f"key {SEEN} has one role in both passes: the keys that came are kept, and their"
                " gradients go back; leave out forward and backward"
            )
        if forward not in (None, "auto"):
            raise DeclarationError(
                f"forward {forward!r}: 'auto', or nothing for the role that the placements say"
            )
        either = role if forward is None else _other_role("forward", role, "auto", q, k)
        if either is None and k.top_k:
            raise DeclarationError("R(top_k) routes keys to queries: forward 'auto' is not for it")
        if k.top_k and (backward or transport != "auto"):
            raise DeclarationError(
                "R(top_k) moves chosen keys in one exchange, and their gradients back the same way:"
                " leave out transport and backward"
            )
        backward = backward or forward
        after = role if backward is None else _other_role("backward", role, backward, q, k)
        windows = input is not None or norm is not None
        _check_windows(input, norm, q, role)
        return cls(q, k, o, role, after, transport, either, windows)

    @property
    def top_k(self) -> bool:
        """True if only those keys travel that a router or the model chose."""
        return self.key.top_k

    def describe(self) -> str:
        """The rule in the grammar's words, on one line."""

        def arrow(first: Placement, last: Placement, part: str = "") -> str:
            if first == last and not part:
                return show(first)
            return f"{show(first)} -> {part or show(last)}"

        part = "R(top_k)" if self.top_k else SEEN if self.key.seen else ""

        text = (
            f"query {arrow(self.query.rest, self.query.compute)}, "
            f"key {arrow(self.key.rest, self.key.compute, part)}, "
            f"out {arrow(self.out.compute, self.out.rest)}"
        )
        if self.windows:
            text = f"{text}, input {INPUT}, norm {NORM}"
        if self.forward_role is None:
            text = f"{text}, forward auto"
        if self.backward_role is None:
            return f"{text}, backward auto"
        return text if self.backward_role == self.role else f"{text}, backward {self.backward_role}"


#: What windows see, and what norms merge, on a mesh dim that splits their axis.
INPUT, NORM = "S(seq) + around", "P(moments) -> R"


def _check_windows(input: str | None, norm: str | None, query: Arrow, role: Role) -> None:
    """Raise unless windows and norms are written in the one way in which they are exact."""
    for name, found, legal in (("input", input, INPUT), ("norm", norm, NORM)):
        if found is not None and "".join(found.split()) != "".join(legal.split()):
            raise DeclarationError(
                f"{name} = {found!r}: along an axis that is split it is {name} = {legal!r} and"
                " nothing else would be exact"
            )
    if (input is None) != (norm is None):
        raise DeclarationError(f"windows have both: input = {INPUT!r} and norm = {NORM!r}")
    if input is not None and (query.rest != Shard(SEQ) or role is not Role.QUERY):
        raise DeclarationError(
            "input and norm belong to a rule whose query is S(seq), at rest and while computing"
        )


def _other_role(which: str, role: Role, asked: str, q: Arrow, k: Arrow) -> Role | None:
    """The role that a rule's `forward` or `backward` asks for; None: the cheaper one."""
    if asked not in ("query", "key", "auto"):
        raise DeclarationError(f"{which} {asked!r}{did_you_mean(asked, ['query', 'key', 'auto'])}")
    if role not in (Role.QUERY, Role.KEY):
        raise DeclarationError(f"{which} is for rules that cut queries or keys, not {role.value}")
    if asked != role.value and Replicate() in (q.rest, k.rest):
        raise DeclarationError(
            f"a different role in the {which} pass needs query and key split at rest; "
            f"here query rests as {show(q.rest)} and key as {show(k.rest)}"
        )
    return None if asked == "auto" else Role(asked)


class _RuleFile(BaseModel):
    """The role of one mesh dim: `S(batch)`, `S(head)`, `S(seq)` or `R`; `->` while computing.

    query: of the queries, at rest -> while computing.
    key: of keys and values, likewise; `R(top_k)` where only those travel that somebody there chose,
        `S(seq) + seen` where only those do that queries see.
    out: of the output, while computing -> at rest; `P(softmax)` are partial outputs.
    transport: how what moves travels: `ring`, `gather`, `halo` or `auto`.
    backward: the role in the backward pass: `query`, `key` or `auto`; default that of the forward.
    forward: `auto`: in every call the role that moves fewer bytes; default that of the placements.
    input: of windows along the axis, such as convolutions: `S(seq) + around`.
    norm: of norms over the axis: `P(moments) -> R`.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    query: str
    key: str
    out: str
    transport: str = "auto"
    backward: str | None = None
    forward: str | None = None
    input: str | None = None
    norm: str | None = None


class _StateRuleFile(BaseModel):
    """The role of a mesh dim in a recurrence along the axis, and in short convolutions.

    state: of the recurrence, `P(affine) -> S(seq)`.
    halo: of convolutions, `S(seq) + left(k - 1)`.
    transport: how states travel: `gather`, `chain` or `auto`.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    state: str
    halo: str = HALO
    transport: str = "auto"


class _ChoiceRuleFile(BaseModel):
    """The role of a mesh dim where index queries choose among index keys.

    index: of index keys, at rest -> while computing: `S(seq) -> R`, or `S(seq)`.
    choice: of the choices, while computing -> at rest: `S(seq)`, or `P(top_k) -> S(seq)`.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    index: str
    choice: str


#: A rule's first word that no rule of attention has -> its schema.
_KINDS = {"state": "_StateRuleFile", "index": "_ChoiceRuleFile", "choice": "_ChoiceRuleFile"}


def _which(value: Any) -> str:
    words = value if isinstance(value, Mapping) else ()
    return next((kind for word, kind in _KINDS.items() if word in words), "_RuleFile")


class _StrategyFile(BaseModel):
    """Rules that a layout binds to mesh dims.

    about: for `weft list` and readers.
    reference: where the strategy was published.
    rule: the rules by name.
    routing: options of learned routing, where a rule's key is `R(top_k)` and a router chooses;
        without them the model chooses.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)
    about: str = ""
    reference: str = ""
    rule: dict[
        str,
        Annotated[
            Annotated[_RuleFile, Tag("_RuleFile")]
            | Annotated[_StateRuleFile, Tag("_StateRuleFile")]
            | Annotated[_ChoiceRuleFile, Tag("_ChoiceRuleFile")],
            Discriminator(_which),
        ],
    ] = {}
    routing: Routing | None = None


@dataclass(frozen=True)
class Strategy:
    """Named rules; a layout binds each to a mesh dim.

    Attributes:
        name: what the strategy was loaded as.
        rules: the rules of attention by name.
        state_rules: those of recurrences.
        about: what the file says about itself.
        reference: where the strategy was published.
        routing: options of learned routing, where a router chooses which keys `R(top_k)` are.
        source: where it was declared, for messages.
        choice_rules: those of index keys and choices.

    >>> sorted(Strategy.load("mesh_tile").rules)
    ['col', 'row']
    """

    name: str
    rules: Mapping[str, Rule]
    state_rules: Mapping[str, StateRule] = field(default_factory=dict)
    about: str = ""
    reference: str = ""
    routing: Routing | None = None
    source: str = field(default="", compare=False)
    choice_rules: Mapping[str, ChoiceRule] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.all_rules.items())))

    @property
    def all_rules(self) -> dict[str, Rule | StateRule | ChoiceRule]:
        """The rules of all kinds by name; a strategy has one kind."""
        return {**self.rules, **self.state_rules, **self.choice_rules}

    @property
    def content(self) -> dict[str, Any]:
        """The strategy as plain data: its rules and options, without its name."""
        rules = {
            name: rule.describe()
            + ("" if isinstance(rule, ChoiceRule) else f", transport {rule.transport}")
            for name, rule in sorted(self.all_rules.items())
        }
        return {"rules": rules, "routing": self.routing and self.routing.model_dump()}

    @classmethod
    def load(cls, name_or_path: str | Path) -> Strategy:
        """Read `strategies/NAME.toml`, or the file at a path.

        Args:
            name_or_path: the name, or the path.

        Raises:
            DeclarationError: there is no such file, or its content is not a strategy.
        """
        data, source = catalog.read_declaration("strategies", name_or_path)
        return cls.from_dict(data, name=Path(source).stem, source=source)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], name: str = "unnamed", source: str = ""
    ) -> Strategy:
        """A strategy from the content of its file.

        Args:
            data: the content.
            name: what to call it.
            source: how to name it in messages.

        Raises:
            DeclarationError: the message names the file, the rule and the reason.
        """
        source = source or f"strategy {name}"
        try:
            parsed = _StrategyFile.model_validate(dict(data))
        except ValidationError as error:
            raise DeclarationError(explain_validation(error, source, _StrategyFile)) from None
        rules: dict[str, Rule] = {}
        states: dict[str, StateRule] = {}
        choices: dict[str, ChoiceRule] = {}
        for rule_name, text in parsed.rule.items():
            try:
                if isinstance(text, _StateRuleFile):
                    states[rule_name] = StateRule.parse(**text.model_dump())
                elif isinstance(text, _ChoiceRuleFile):
                    choices[rule_name] = ChoiceRule.parse(**text.model_dump())
                else:
                    rules[rule_name] = Rule.parse(**text.model_dump())
            except DeclarationError as error:
                raise DeclarationError(f"{source}: [rule.{rule_name}]: {error}") from None
        kinds = (
            (rules, "of attention", "[attend]"),
            (states, "of a recurrence", "[carry]"),
            (choices, "of a choice of keys", "[choose]"),
        )
        found = [(sorted(named), noun, table) for named, noun, table in kinds if named]
        if len(found) > 1:
            (first, one, here), (second, other, there) = found[:2]
            raise DeclarationError(
                f"{source}: rules {first} are {one} and {second} {other}; write two strategies, for"
                f" {here} and for {there}"
            )
        if parsed.routing is not None and not any(rule.top_k for rule in rules.values()):
            raise DeclarationError(f"{source}: [routing] is given but no rule has key 'R(top_k)'")
        described = parsed.about, parsed.reference, parsed.routing, source
        return cls(name, rules, states, *described, choices)

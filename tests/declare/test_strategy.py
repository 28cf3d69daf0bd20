"""Rules and strategies: five roles are legal, everything else is refused with its reason."""

import itertools
import re

import pytest
from draw import COMPUTE, MOVING, Dim, layout_of
from exact import Case, assert_exact, tokens

import weft
from weft.declare import catalog
from weft.declare.strategy import Role, Rule, Strategy
from weft.errors import DeclarationError

WORDS = ("S(batch)", "S(head)", "S(seq)", "R", "P(softmax)")
LEGAL = {words: role for role, words in COMPUTE.items()}

SHIPPED = {
    "local": [],
    "head_parallel": ["head"],
    "ulysses": ["head"],
    "axial": ["batch"],
    "ring": ["query"],
    "gather": ["query"],
    "pass_q": ["key"],
    "burst": ["query"],
    "adaptive": ["query"],
    "mesh_tile": ["query", "key"],
    "hierarchical": ["query", "query"],
    "shared_context": ["query"],
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_strategies_have_the_roles_of_their_names(name):
    strategy = Strategy.load(name)
    assert [rule.role.value for rule in strategy.rules.values()] == SHIPPED[name]
    assert strategy.about


def test_burst_plays_another_role_backward():
    (rule,) = Strategy.load("burst").rules.values()
    assert (rule.role, rule.backward_role) == (Role.QUERY, Role.KEY)


def test_an_adaptive_rule_leaves_both_roles_to_the_call():
    (rule,) = Strategy.load("adaptive").rules.values()
    assert (rule.role, rule.forward_role, rule.backward_role) == (Role.QUERY, None, None)
    assert "forward auto, backward auto" in rule.describe()
    kept = Rule.parse("S(seq)", "S(seq) -> R", "S(seq)", forward="auto", backward="query")
    assert kept.backward_role is Role.QUERY


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("S(seq)", "S(seq) -> R", "S(seq)", "key"), "'auto', or nothing"),
        (("S(head)", "S(head)", "S(head)", "auto"), "cut queries or keys"),
        (("R", "S(seq)", "P(softmax) -> R", "auto"), "split at rest"),
        (("S(seq)", "S(seq) -> R(top_k)", "S(seq)", "auto"), "not for it"),
    ],
)
def test_a_forward_role_that_cannot_be_left_open_is_refused(given, reason):
    *words, forward = given
    with pytest.raises(DeclarationError, match=reason):
        Rule.parse(*words, forward=forward)


@pytest.mark.parametrize(("words", "role"), LEGAL.items())
@pytest.mark.parametrize("rest", ["S(batch)", "S(head)", "S(seq)", "R"])
def test_every_role_is_legal_from_every_possible_rest(words, role, rest):
    query, key, out = words
    texts = {"query": f"{rest} -> {query}", "key": f"{rest} -> {key}", "out": f"{out} -> {rest}"}
    if role == "none" and rest != "R":
        with pytest.raises(DeclarationError, match="needs both at rest as R"):
            Rule.parse(**texts)
        return
    rule = Rule.parse(**texts)
    assert rule.role.value == rule.backward_role.value == role
    assert rule.describe().startswith(f"query {rest}" if rest == query else f"query {rest} -> ")


def _reason(query: str, key: str, out: str) -> str:
    if "P(softmax)" in (query, key):
        return "placement of outputs, not of query or key"
    if query == key == "S(seq)":
        return "would drop the scores between different chunks"
    if (query, key) == ("R", "S(seq)"):
        return "so out must be P(softmax) while computing"
    if out == "P(softmax)":
        return "out P(softmax) needs query R and key S(seq)"
    if (query, key) in (("S(seq)", "R"), ("R", "R")) or query == key:
        return "out must be"
    return "would pair parts that do not belong together"


@pytest.mark.parametrize("words", sorted(set(itertools.product(WORDS, repeat=3)) - set(LEGAL)))
def test_every_other_combination_is_refused_with_its_reason(words):
    query, key, out = words
    rest = "S(seq)" if out == "P(softmax)" else out
    with pytest.raises(DeclarationError, match=re.escape(_reason(*words))):
        Rule.parse(query, key, f"{out} -> {rest}")


RING = {"query": "S(seq)", "key": "S(seq) -> R", "out": "S(seq)"}
HEADS = {"query": "S(head)", "key": "S(head)", "out": "S(head)"}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (RING | {"out": "S(seq) -> R"}, "returns its output placed like the query"),
        (RING | {"out": "S(seq) -> P(softmax)"}, "out may not rest as P(softmax)"),
        (RING | {"transport": "rign"}, "did you mean 'ring'"),
        (HEADS | {"transport": "ring"}, "is for rules that move keys or queries"),
        (RING | {"backward": "head"}, "backward 'head'"),
        (HEADS | {"backward": "key"}, "backward is for rules that cut queries or keys"),
        (RING | {"key": "R", "backward": "key"}, "needs query and key split at rest"),
        (HEADS | {"key": "S(head) -> R(top_k)"}, "would pair parts"),
        (
            RING | {"query": "S(seq) -> R(top_k)", "key": "R", "out": "R -> S(seq)"},
            "belongs to key",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(rule, reason):
    with pytest.raises(DeclarationError, match=re.escape(reason)):
        Rule.parse(**rule)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"rules": {}}, "rule"),
        ({"rule": {"r": RING | {"qery": "R"}}}, "query"),
        ({"rule": {"r": {"query": "S(seq)", "key": "R"}}}, "out"),
        ({"rule": {"r": RING | {"key": "S(seq)"}}}, "[rule.r]: query S(seq) with key S(seq)"),
        (
            {"rule": {"r": RING | {"key": "S(seq) -> R(top_k)", "transport": "ring"}}},
            "leave out transport and backward",
        ),
        ({"rule": {"r": RING}, "routing": {"top_k": 2}}, "no rule has key 'R(top_k)'"),
        ({"routing": {"top_k": True}}, "routing.top_k = True: give a whole number"),
        ({"routing": {"top_k": 2, "load": True}}, "routing.load = True: give a number"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_key(data, reason):
    with pytest.raises(DeclarationError, match=re.escape(reason)) as caught:
        Strategy.from_dict(data, source="my/strategy.toml")
    assert "my/strategy.toml" in str(caught.value)


def test_files_are_read_by_path_and_near_misses_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((catalog.folder("strategies") / "pass_q.toml").read_text())
    assert Strategy.load(path).rules == Strategy.load("pass_q").rules
    with pytest.raises(DeclarationError, match="did you mean 'ulysses'"):
        Strategy.load("ulises")
    path.write_text("rule = [")
    with pytest.raises(DeclarationError, match="not valid TOML"):
        Strategy.load(path)


OWN = [
    Dim(3, "tokens", role, key_whole, transport, backward)
    for key_whole in (False, True)
    for role, transport, backward in [
        *((role, "auto", None) for role in ("head", "batch")),
        *itertools.product(MOVING, ("ring", "gather"), (None, "query", "key", "auto")),
    ]
    if not (key_whole and backward)
]


@pytest.mark.few(10)
@pytest.mark.parametrize("dim", OWN, ids=lambda d: " ".join(str(v) for v in vars(d).values()))
def test_a_strategy_of_ones_own_runs_exactly(dim):
    case = Case(lengths=tokens(13), heads=6, kv_heads=2, mask=weft.Causal())
    assert_exact(layout_of([dim], {"tokens": "zigzag"}), case)


@pytest.mark.parametrize("splits", ["batch", "heads", ""])
@pytest.mark.parametrize("role", COMPUTE)
def test_dims_that_split_something_else_be_traded_for_any_side(splits, role):
    dim = Dim(3, splits, role, key_whole=not splits)
    case = Case(lengths=tokens(7, 10), batch=4, heads=9, kv_heads=3, seed=1)
    if role == "none" and splits:
        with pytest.raises(DeclarationError, match="needs both at rest as R"):
            layout_of([dim, Dim(2, "tokens", "query")])
    else:
        assert_exact(layout_of([dim, Dim(2, "tokens", "query")]), case)


# -- recurrences ----------------------------------------------------------------------------------

WINDOW = {"query": "S(seq)", "key": "S(seq) -> R", "out": "S(seq)"}
WINDOW |= {"input": "S(seq) + around", "norm": "P(moments) -> R"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": "S(seq) + left(k - 1)"}, "nothing else would be exact"),
        ({"norm": "P(sum) -> R"}, "nothing else would be exact"),
        ({"norm": None}, "windows have both"),
        ({"query": "S(seq) -> R", "key": "S(seq)", "out": "P(softmax) -> S(seq)"}, "query is S"),
    ],
)
def test_windows_are_declared_in_one_way(changes, message):
    assert Rule.parse(**WINDOW).windows
    with pytest.raises(DeclarationError, match=message):
        Rule.parse(**{**WINDOW, **changes})


CARRY = {"state": "P(affine) -> S(seq)", "halo": "S(seq) + left(k - 1)"}


def test_rules_of_recurrences_are_loaded_and_describe_themselves():
    found = {name: Strategy.load(name).state_rules["carry"] for name in ("state", "state_chain")}
    assert [rule.transport for rule in found.values()] == ["auto", "chain"]
    assert found["state"].describe() == "state P(affine) -> S(seq), halo S(seq) + left(k - 1)"
    assert Strategy.load("state") != Strategy.load("state_chain")
    assert Strategy.load("state").content != Strategy.load("state_chain").content
    rule = Strategy.from_dict({"rule": {"r": {"state": "P(affine)->S(seq)"}}}).state_rules["r"]
    assert rule == found["state"]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (CARRY | {"state": "P(affine)"}, "state = 'P(affine)': a recurrence"),
        (CARRY | {"halo": "S(seq) + left(k)"}, "halo = 'S(seq) + left(k)': a recurrence"),
        (CARRY | {"transport": "tree"}, "transport 'tree'; known: auto, chain, gather"),
        (CARRY | {"query": "R"}, "unknown key 'rule.r.query'; known: halo, state, transport"),
        ({"halo": CARRY["halo"]}, "unknown key 'rule.r.halo'"),
    ],
)
def test_other_rules_of_recurrences_are_refused(rule, reason):
    with pytest.raises(DeclarationError) as caught:
        Strategy.from_dict({"rule": {"r": rule}})
    assert reason in str(caught.value)


def test_a_strategy_is_of_attention_or_of_recurrences():
    ring = {"query": "S(seq)", "key": "S(seq) -> R", "out": "S(seq)"}
    with pytest.raises(DeclarationError, match="write two strategies"):
        Strategy.from_dict({"rule": {"a": ring, "b": CARRY}})

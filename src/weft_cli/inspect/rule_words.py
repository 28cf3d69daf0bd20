"""Rules, transfers and bounds in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate, Shard

from weft.declare.placements import entry_placement
from weft.declare.strategy import Role, Rule
from weft.inspect.words import nbytes
from weft.plan.memory import MemoryBound

ROLES = {
    Role.BATCH: "Each rank attends its part of the batch.",
    Role.HEAD: "Each rank computes some of the heads, over the whole sequence of this dim.",
    Role.QUERY: "Each rank computes rows of scores: its queries meet all keys and values",
    Role.KEY: "Each rank computes columns of scores: all queries meet its keys and values",
    Role.NONE: "Every rank does the same work.",
}

HOW = {
    "ring": ". They come a chunk at a time, while the one before is computed with.",
    "gather": ". They come all at once, straight from their owners.",
    "auto": ". They come a chunk at a time, or all at once where blocks are small.",
    "halo": ". Only those come that some of its queries see, at once, straight from their owners.",
}

SIDES = {0: "batch", 1: "heads", 2: "sequence"}

#: What travels under a label, (label, backward) -> words.
PAYLOAD = {
    ("qkv", False): "queries, keys and values",
    ("q", False): "queries",
    ("choice", False): "numbers of chosen keys",
    ("kv", False): "keys and values",
    ("out", False): "outputs",
    ("dout", True): "gradient of the output",
    ("q", True): "q, dO, logsumexp, delta",
    ("kv", True): "keys and values",
    ("dq", True): "gradients of queries",
    ("dkv", True): "gradients of keys and values",
    ("dqkv", True): "gradients of q, k, v",
    ("wanted", False): "bits of wanted keys",
    ("summaries", False): "summaries of blocks",
    ("dsummaries", True): "gradients of summaries",
    ("routes", False): "routing weights",
    ("sum", False): "routing logits",
    ("sum", True): "gradients of logits",
}


#: A rule of `[choose]` by lists; by rows is said of no mesh dim.
LISTS = (
    "Where a model chooses keys, index queries travel to the index keys, and every rank's list of"
    " the best keys returns to the query's owner, where lists merge."
)


def rule_in_words(rule: Rule) -> str:
    """Describes a mesh dim under a rule, forward and backward, in a few sentences.

    >>> rule_in_words(Rule.parse("S(head)", "S(head)", "S(head)"))
    'Each rank computes some of the heads, over the whole sequence of this dim.'
    """
    sentences = [*_all_to_all(rule), _role(rule)]
    if rule.role is Role.KEY and not isinstance(rule.query.rest, Replicate):
        sentences.append(
            "Partial outputs return to their owners with their logsumexp and merge there."
        )
    if rule.forward_role is None:
        sentences.append("Or the other side travels, where that moves less in a call.")
    if rule.backward_role is None:
        sentences.append("Backward: as rows or as columns, whichever moves less.")
    elif rule.backward_role != rule.role:
        side = "columns" if rule.backward_role is Role.KEY else "rows"
        sentences.append(f"Backward it computes {side} instead: {_backward(rule.backward_role)}.")
    return " ".join(sentences)


def _role(rule: Rule) -> str:
    if rule.top_k:
        return (
            "Queries meet the keys that a router or the model chooses for them; only those travel."
        )
    text = ROLES[rule.role]
    if rule.role not in (Role.QUERY, Role.KEY):
        return text
    if rule.role is Role.QUERY and isinstance(rule.key.rest, Replicate):
        return f"{text}, which every rank holds; gradients of keys and values are summed."
    if rule.role is Role.KEY and isinstance(rule.query.rest, Replicate):
        return (
            f"{text}. Every rank holds all queries, and partial outputs merge on every rank by "
            "their logsumexp; gradients of queries are summed."
        )
    travels = "Keys and values" if rule.role is Role.QUERY else "Queries"
    return text + HOW[rule.transport].replace("They", travels)


def _all_to_all(rule: Rule) -> list[str]:
    rest, entry = rule.query.rest, entry_placement(rule.query)
    if rest == entry or not isinstance(entry, Shard):
        return []
    if not isinstance(rest, Shard):
        return [f"Each rank keeps its share of the {SIDES[entry.dim]}; outputs are gathered after."]
    return [
        f"An all-to-all trades the split of the {SIDES[rest.dim]} for one of the "
        f"{SIDES[entry.dim]}, and back after."
    ]


def _backward(role: Role) -> str:
    if role is Role.KEY:
        return "q, dO, logsumexp and delta travel, gradients of queries come back"
    return "keys and values travel, their gradients come back"


def limit(bounds: Sequence[MemoryBound]) -> str:
    """The most bytes that a pass holds for other ranks, on any of the ranks with these bounds.

    >>> limit([MemoryBound(2, 0, 1024), MemoryBound(2, 3, 4096)])
    '2 chunks and 3 partial results, 4.0 KiB'
    """
    chunks, results, most = (
        max(getattr(b, name) for b in bounds) for name in ("chunks", "results", "nbytes")
    )
    outstanding = f" and {results} partial result{'s' * (results != 1)}" if results else ""
    return f"{chunks} chunk{'s' * (chunks != 1)}{outstanding}, {nbytes(most)}"

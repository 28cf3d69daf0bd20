"""The proof from plans: right layouts are proven, and a program with one step changed is found."""

import dataclasses
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import weft
from benchmarks.fuzz import run_command
from weft import Layout
from weft.carry.fragments import Fragments, fragments
from weft.choice import ChoiceKind
from weft.plan import plan as plan_module
from weft.plan.order import Span
from weft.plan.predict import plans_for
from weft.plan.problem import Problem
from weft.plan.tiles import KernelCall, Kind
from weft_cli.mask_names import MASKS, mask_named
from weft_proof import choices as choice_proof
from weft_proof import representatives, symbolic
from weft_proof.coverage import count_visible, tile_defects, visible_ranges
from weft_proof.flow import program_defects
from weft_proof.rendezvous import rendezvous
from weft_proof.representatives import covering
from weft_proof.states import chain_defects, composition_defects, place_defects, prove_states

LINES = (
    "tokens: ring=4",
    "tokens(zigzag): ring=3",
    "tokens(striped): pass_q=3",
    "tokens: tile=2x3",
    "tokens: burst=4",
    "tokens: gather=3",
    "tokens: hierarchical=2x2",
    "tokens(zigzag): ulysses=2 x tile=2x2",
    "heads: tp=2; batch: dp=2; tokens: ring=2",
    "tokens: shared_context=2",
    "replicate: r=2; tokens: pass_q=2",
)
NAMED = ("full", "causal", "window:5", "window:3:4", "first-keys:9", "documents",
         "causal-documents", "prefix:9", "padding", "near:6:3", "boxes:5:2:1")  # fmt: skip


#: of queries that are fewer than keys, or more
OFFSETS = ("causal:16", "causal:-5", "window:5:0:12", "window:3:4:20", "prefix:20:14")


def problem(mask="full", n=37, batch=2, m=None):
    m = n if m is None else m
    made = mask_named(mask, n, m, batch)
    return Problem(("tokens",), ((n, m),), batch, 8, 4, 4, 4, torch.float32, "cpu", made)


@pytest.mark.few(24)
@pytest.mark.parametrize("mask", NAMED)
@pytest.mark.parametrize("line", LINES)
def test_right_layouts_are_proven(line, mask):
    found = symbolic.prove(Layout.parse(line), problem(mask))
    assert not [(c.what, c.defects) for c in found if not c.ok]


@pytest.mark.few(14)
@pytest.mark.parametrize("mask", OFFSETS)
@pytest.mark.parametrize("line", LINES)
def test_right_layouts_of_queries_at_an_offset_are_proven(line, mask):
    for n, m in ((21, 37), (37, 21)):
        found = symbolic.prove(Layout.parse(line), problem(mask, n, m=m))
        assert not [(c.what, c.defects) for c in found if not c.ok]


@pytest.mark.parametrize("mask", [*NAMED, *OFFSETS])
def test_visible_ranges_are_what_the_mask_allows(mask):
    made, n = mask_named(mask, 37, 37, 2), 37
    index = torch.arange(n)
    seen = torch.stack(
        [
            made.allowed(torch.tensor(b), torch.tensor(0), index[:, None], index).expand(n, n)
            for b in range(2)
        ]
    )
    rows = np.arange(n)
    for keys in ((Span(0, 37),), (Span(3, 8, 4), Span(1, 2))):
        columns = torch.cat([torch.arange(s.start, s.last + 1, s.step) for s in keys])
        for widest, allowed in ((True, seen.any(0)), (False, seen.all(0))):
            found = count_visible(visible_ranges(made, rows, widest), keys)
            assert found.tolist() == allowed[:, columns].sum(1).tolist()
    assert {m.split(":")[0] for m in MASKS} == {m.split(":")[0] for m in NAMED}


#: masks of a grid, and others that let more rows be seen
GRIDS = {
    "near:3:4": "near:4:4",
    "near:2:3:1:2:0:1": "near:3:3:1:2:0:1",
    "near:4:7:2:1": "near:4:7:1:1:1:0",
    "boxes:4:3:1:2:0:1": "boxes:4:3:3:2:0:1",
    "boxes:3:9": "boxes:4:9",
}


@pytest.mark.parametrize("mask", GRIDS)
def test_masks_of_a_grid_are_proven_and_wrong_ones_found(mask):
    made = mask_named(mask, 9 * 7, 9 * 7, 1, (9, 7))
    seen = made.allowed(*torch.zeros(2, 1, 1).long(), torch.arange(63)[:, None], torch.arange(63))
    counted = count_visible(visible_ranges(made, np.arange(63)), [Span(0, 63)])
    assert counted.tolist() == seen.sum(1).tolist()
    layout = Layout.from_dict(
        {
            "mesh": {"y": 3, "x": 2},
            "shard": {"lat": ["y"], "lon": ["x"]},
            "attend": {"lat+lon": [{"strategy": s, "on": d} for s, d in GRID_RULES]},
        }
    )
    sizes = ("lat", "lon"), ((9, 9), (7, 7)), 2, 8, 4, 4, 4, torch.float32, "cpu"
    found = symbolic.prove(layout, Problem(*sizes, made))
    assert not [(c.what, c.defects) for c in found if not c.ok]
    plans = list(plans_for(layout, Problem(*sizes, made), range(6)))
    assert not any(tile_defects(plan.forward) for plan in plans)
    for plan in plans:
        (run,) = plan.runs
        plan.runs = (run._replace(mask=mask_named(GRIDS[mask], 63, 63, 1, (9, 7))),)
    assert any(tile_defects(plan.forward) for plan in plans)


GRID_RULES = (("ring", "y"), ("pass_q", "x"))


def tiles(line, mask="causal", n=37, m=None):
    layout = Layout.parse(line)
    plans = list(plans_for(layout, problem(mask, n, m=m), range(layout.world_size)))
    return layout, plans


def mutants(program, rng):
    """The program with one part removed, doubled or swapped, and what was done."""
    steps = list(program.steps)
    parts = [
        (i, kind, k)
        for i, step in enumerate(steps)
        for kind in ("begin", "blocks", "end")
        for k in range(len(getattr(step, kind)))
    ]

    def changed(i, kind, items):
        new = [*steps]
        new[i] = replace(steps[i], **{kind: tuple(items)})
        return replace(program, steps=tuple(new))

    for i, kind, k in rng.sample(parts, min(len(parts), 12)):
        items = list(getattr(steps[i], kind))
        yield f"removed {kind} {k} of step {i}", changed(i, kind, items[:k] + items[k + 1 :])
        yield f"doubled {kind} {k} of step {i}", changed(i, kind, [*items, items[k]])
        if kind == "begin":
            for field in ("source", "target"):
                sides = program.a if items[k].payload in ("q", "out", "dq") else program.b
                value = (getattr(items[k], field) + 1) % sides
                items[k] = replace(items[k], **{field: value})
                other = changed(i, kind, items)
                if value != getattr(steps[i].begin[k], field):
                    yield f"{field} of begin {k} of step {i}", other
    for i in range(len(steps) - 1):
        swapped = [*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]]
        yield f"swapped steps {i} and {i + 1}", replace(program, steps=tuple(swapped))


def matters(program, mutant):
    """Whether swapped steps depend on each other: else the mutant is as right as the program."""
    pairs = [(a, b) for a, b in zip(program.steps, mutant.steps) if a != b]
    if len(pairs) != 2 or pairs[0] != pairs[1][::-1]:
        return True
    first, second = pairs[0]
    needed = {(t.payload, t.source) for t in second.begin}
    needed |= {("q", n) for b in second.blocks for n in b.q}
    needed |= {("kv", n) for b in second.blocks for n in b.kv}
    ended = {(t.payload, t.target) for t in first.end}
    return bool(needed & ended) or bool(set(first.begin) & set(second.end))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: pass_q=3", "tokens: tile=3x2",
                                  "tokens: burst=3", "tokens: hierarchical=2x3"])  # fmt: skip
def test_a_program_with_one_step_changed_is_found(line, backward):
    _, plans = tiles(line, "full")
    tile = plans[0].backward if backward else plans[0].forward
    assert not program_defects(tile.program, tile.dims, backward)
    tried = 0
    for what, mutant in mutants(tile.program, random.Random(3)):
        if matters(tile.program, mutant):
            tried += 1
            assert program_defects(mutant, tile.dims, backward), what
    assert tried > 8


def test_a_change_on_one_rank_alone_is_found():
    layout, plans = tiles("tokens: ring=4", "full")
    steps = plans[2].forward.program.steps
    late = replace(plans[2].forward.program, steps=steps[1:])
    object.__setattr__(plans[2].forward, "program", late)
    found = symbolic.claims(layout, plans, "all 4 ranks")
    assert any("programs differ" in d for c in found for d in c.defects)
    assert any("wait" in d or "without" in d for c in found for d in c.defects)


def test_orders_that_deadlock_are_found():
    """Rank 0 waits for its first chunk before it offers its own; so do the others."""
    _, plans = tiles("tokens: ring=3", "full")
    for plan in plans:
        tile = plan.forward
        first = next(s for s in tile.program.steps if s.begin)
        at = tile.program.steps.index(first)
        late = [replace(first, begin=(), end=first.begin), replace(first, end=())]
        steps = (*tile.program.steps[:at], *late, *tile.program.steps[at + 1 :])
        object.__setattr__(tile, "program", replace(tile.program, steps=steps))
    found = rendezvous([plan.forward for plan in plans])
    assert "which it has not begun" in found[0]


def test_other_bytes_on_the_two_ends_are_found():
    _, plans = tiles("tokens: ring=3", "full")
    tile = plans[1].forward
    t = tile.program.transfers[0]
    send, receive = tile.transfer_rows(t)
    rows = tile.transfer_rows
    wrong = (send[0], send[1] - 1), receive
    other_rows = lambda other: wrong if other == t else rows(other)  # noqa: E731
    object.__setattr__(tile, "transfer_rows", other_rows)
    assert "meets" in rendezvous([plan.forward for plan in plans])[0]


@pytest.mark.parametrize(
    ("mask", "other"), [("causal:16", 17), ("causal:16", 15), ("window:5:0:16", 17)]
)
def test_an_offset_that_is_off_by_one_is_found(mask, other):
    _, plans = tiles("tokens: ring=3", mask, 21, 37)
    assert not any(tile_defects(plan.forward) for plan in plans)  # and the calls are made
    for plan in plans:
        (run,) = plan.runs
        plan.runs = (run._replace(mask=replace(run.mask, offset=other)),)
    assert any(tile_defects(plan.forward) for plan in plans)


@pytest.mark.parametrize("mask", ["causal", "window:5", "documents", "padding"])
def test_calls_that_miss_double_or_add_scores_are_found(mask):
    _, plans = tiles("tokens: ring=3", mask)
    tried = 0
    for tile in [plan.forward for plan in plans]:
        assert not tile_defects(tile)
        blocks = {block: tile.block(block) for block in tile.program.blocks}
        object.__setattr__(tile, "block", blocks.__getitem__)
        for block, made in list(blocks.items()):
            for at in range(len(made.groups)):
                call = made.groups[at].calls[0]
                fewer = replace(call, q0=(call.q0 + call.q1 + 1) // 2)  # not its first rows
                more = KernelCall(0, len(made.calls) and call.q1, 0, call.k1 + 1, Kind.FULL)
                for calls in ((), (fewer,), (call, call), (more,)):
                    group = [dataclasses.replace(made.groups[at], calls=(c,)) for c in calls]
                    groups = (*made.groups[:at], *group, *made.groups[at + 1 :])
                    blocks[block] = replace(made, groups=groups)
                    tried += 1
                    assert tile_defects(tile), (block, call, calls)
                blocks[block] = made
    assert tried > 10


@pytest.mark.few(16)
@pytest.mark.parametrize(
    ("mask", "n"),
    [
        *((mask, 96) for mask in ("causal", "window:5", "window:3:4", "documents")),
        ("causal-documents", 96),
        ("causal:56", 40),
        ("causal:-9", 40),
        ("window:3:4:50", 40),
    ],
)
@pytest.mark.parametrize(
    "line",
    ["tokens: ring=8", "tokens(zigzag): ring=6", "tokens(striped): ring=5", "tokens: gather=6",
     "tokens(zigzag): tile=3x3"],
)  # fmt: skip
def test_blocks_that_are_same_up_to_symmetry_make_same_calls(line, mask, n, monkeypatch):
    """What stands for all ranks beyond `FEW_BLOCKS`: every other rank has no other calls."""
    monkeypatch.setattr(representatives, "FEW_BLOCKS", 1)
    layout, plans = tiles(line, mask, n, 96)
    monkeypatch.setattr(representatives, "FEW_BLOCKS", 10_000)
    chosen = covering(layout, plans[0], plans[0].forward, plans[0].problem.mask)

    def calls(plan):
        tile = plan.forward
        return {tile.block(b).calls for step in tile.program.steps for b in step.blocks}

    kinds = set().union(*(calls(plans[r]) for r in chosen))
    for plan in plans:
        assert calls(plan) <= kinds
    if line == "tokens: ring=8" and mask in ("causal", "window:5"):
        assert len(chosen) < 8


#: Layouts whose passes compute the same rows, in which rows of numbers come by each of the ways.
CHOOSING = ("tokens: ring=4", "tokens(striped): pass_q=3", "tokens(zigzag): ulysses=2 x tile=2x2",
            "tokens: tile=2x3", "tokens: ulysses=3", "tokens: seen=3",
            "heads: tp=2; batch: dp=2; tokens: ring=2", "tokens: kv_parallel=2")  # fmt: skip


def choosing(mask="causal", n=37, rows=1):
    return replace(problem(mask, n), choice=ChoiceKind(rows, 3, check=False))


def refuted(found):
    return [claim.what for claim in found if not claim.ok]


@pytest.mark.few(8)
@pytest.mark.parametrize("mask", ["full", "causal", "window:5", "padding", "causal-documents"])
@pytest.mark.parametrize("line", CHOOSING)
def test_choices_of_keys_are_proven_whatever_they_are(line, mask):
    found = symbolic.prove(Layout.parse(line), choosing(mask))
    assert not refuted(found)
    assert sum("choose" in c.what or "chosen" in c.what for c in found) == 3


#: Queries travel along two mesh dims.
TWO_WAYS = {
    "mesh": {"a": 2, "b": 2},
    "shard": {"tokens": ["a", "b"]},
    "attend": {"tokens": [{"strategy": "pass_q", "on": d} for d in "ab"]},
}
ROWS_COME, CALLS_CUT = "every row of numbers", "every kernel call cut to what"


def moves(change):
    """Another way of the rows of numbers."""
    stock = choice_proof.row_moves
    return choice_proof, "row_moves", lambda *given: change(stock(*given))


#: A mistake -> layout, what of the plan is replaced by what, and the claim that does not hold.
MISTAKES = {
    "rows stay": ("tokens: tile=2x3", lambda: moves(lambda way: ()), ROWS_COME),
    "rows unsorted": (
        "tokens(zigzag): ulysses=2 x tile=2x2",
        lambda: moves(lambda way: tuple(m for m in way if m[0])),
        ROWS_COME,
    ),
    "rows by the wrong rank": (
        "queries two ways",
        lambda: moves(lambda way: tuple((m[0][::-1], m[1]) for m in way)),
        ROWS_COME,
    ),
    "another number of rows": (
        "tokens(striped): pass_q=3",
        lambda: moves(lambda way: tuple((d, (n[0] + 1, *n[1:])) for d, n in way)),
        ROWS_COME,
    ),
    "full calls": (
        "tokens: ring=4",
        lambda: (plan_module, "in_row_blocks", lambda calls, rows, masked: calls),
        CALLS_CUT,
    ),
    "rows of the tile from 0": (
        "tokens: pass_q=3",
        lambda: (plan_module.Pass, "offset", lambda *given: 0),
        CALLS_CUT,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_choices_that_do_not_reach_their_scores_are_found(mistake, monkeypatch):
    line, replaced, claim = MISTAKES[mistake]
    layout = Layout.from_dict(TWO_WAYS) if line == "queries two ways" else Layout.parse(line)
    n = 41 + [*MISTAKES].index(mistake)  # plans are remembered by their sizes
    assert not refuted(symbolic.prove(layout, choosing(n=n + 100)))
    monkeypatch.setattr(*replaced())
    found = symbolic.prove(layout, choosing(n=n))
    assert any(claim in label for label in refuted(found)), refuted(found)


def test_the_command_proves_choices_and_refuses_the_rest():
    words = ["check", "tile-2x2", "--symbolic", "--choose", "5", "--mask", "causal"]
    assert run_command(words) == ("taken", "")
    for words, message in (
        (["routed-4", "--choose", "5"], "has a router, which chooses the keys"),
        (["burst-4", "--symbolic", "--choose", "5"], "other rows in the backward pass"),
    ):
        how, text = run_command(["check", *words])
        assert how == "refused"
        assert message in " ".join(text.split())


@pytest.mark.slow
def test_thousands_of_ranks_are_proven_by_symmetry():
    found = symbolic.prove(Layout.parse("tokens: ring=512"), problem("causal", 2048))
    assert all(c.ok for c in found)
    assert "2 ranks that have every kind of block of all 512" in found[1].how


def test_masks_of_no_known_structure_are_not_proven():
    mask = weft.MaskMod(lambda b, h, q, k: q == k)
    with pytest.raises(weft.UnsupportedError, match="nothing is proven"):
        symbolic.prove(Layout.parse("tokens: ring=2"), replace(problem(), mask=mask))


def test_the_command_proves():
    line = "tokens(zigzag): ring=4"
    assert run_command(["check", line, "--symbolic", "--mask", "causal"]) == ("taken", "")


# -- states and columns ---------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=3", "tokens: tile=2x2", "tokens: state=5"])
@pytest.mark.parametrize("length", [1, 3, 37])
def test_right_states_are_proven(line, length):
    claims = prove_states(Layout.parse(line), "tokens", length)
    assert len(claims) == 2
    assert all(claim.ok for claim in claims)


class Unordered(Fragments):
    """Maps in the order of ranks."""

    order = property(lambda self: tuple(range(len(self.slots))))


class Forgetful(Fragments):
    """Every map forgets what came before it."""

    def resets(self, slot):
        return True


class Unsent(Fragments):
    """The first rank keeps its state."""

    def relay(self, chunk):
        stages = super().relay(chunk)
        return tuple(s._replace(target=None) for s in stages) if chunk == 0 else stages


class Swapped(Fragments):
    """The last two stages of a rank change places."""

    def relay(self, chunk):
        *stages, a, b = super().relay(chunk)
        return (*stages, b, a)


@pytest.mark.parametrize(
    ("wrong", "find"),
    [
        (Unordered, composition_defects),
        (Forgetful, composition_defects),
        (Unsent, chain_defects),
        (Swapped, chain_defects),
    ],
)
def test_wrong_states_are_found(wrong, find):
    layout = Layout.parse("tokens(zigzag): tile=2x2")
    plan = fragments(layout, "tokens", 37)
    assert not list(find(plan))
    assert list(find(wrong(plan.mesh, plan.chunks)))


def test_documents_that_are_not_cut_are_found():
    layout = Layout.parse("tokens: ring=3")
    plan = fragments(layout, "tokens", 12)
    missing = (*plan.chunks[:2], (plan.chunks[2][0]._replace(count=3),))
    assert list(place_defects(type(plan)(plan.mesh, missing), layout, "tokens", 12))

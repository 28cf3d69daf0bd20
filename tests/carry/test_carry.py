"""Recurrences and short convolutions over ranks, beside the same over the whole sequence.

A layer of both (a causal convolution of four taps, then a gated delta rule whose states decay
slowly) is written twice: over full tensors, a token at a time; and over this rank's pieces. States
that decay quickly would hide what is wrong: a map of A = 0 would pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import strides
import torch
import torch.utils.checkpoint
from covering import covering
from seeded import run_seeded
from torch import Tensor
from torch.nn import functional as F

import weft
from weft.carry.fragments import StateExchange, by_heads, fragments
from weft.carry.pieces import LocalPieces
from weft.declare.layout_file import Binding
from weft.declare.orders import TokenOrder
from weft.declare.strategy import Strategy
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.move.windows import TakePass

HEADS, KEY, VALUE, TAPS = 2, 3, 4, 4
WIDTH = HEADS * (2 * KEY + VALUE)
AXIS = {"tokens": 1}

#: layouts of at least three fragments: a ring of two never applies an A
LAYOUTS = (
    "tokens: ring=3",
    "tokens(zigzag): ring=3",
    "tokens: tile=2x2",
    "tokens(zigzag): tile=2x2",
    "tokens: hierarchical=2x3",
    "tokens: ulysses=2 x ring=2",
    "batch: dp=2; tokens(zigzag): ring=2",
)
#: uneven, even, shorter than the convolution on a rank, with ranks that have none, one token
LENGTHS = (23, 24, 5, 3, 1)
DOCUMENTS = (None, (5, 1, 9, 8), (2, 1, 1, 19), (12, 11))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """S_t = e^decay (I - beta k k^T) S_{t-1} + beta k v^T, o_t = S_t^T q_t, a token at a time.

    q, k (b t h d), v (b t h e), decay and beta (b t h), state (b h d e).
    """
    outs = []
    for q_t, k_t, v_t, decay_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, decay, beta))):
        state = state * decay_t.exp()[..., None, None]
        seen = torch.einsum("bhde,bhd->bhe", state, k_t)
        state = state + torch.einsum("bhd,bhe,bh->bhde", k_t, v_t - seen, beta_t)
        outs.append(torch.einsum("bhde,bhd->bhe", state, q_t))
    return torch.stack(outs, 1) if outs else torch.zeros_like(v), state


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution per channel, (b t c) with zeros to the left; weight (c, taps)."""
    x = F.pad(x, (0, 0, weight.shape[1] - 1, 0))
    return F.conv1d(x.transpose(1, 2), weight[:, None], groups=len(weight)).transpose(1, 2)


def inputs_of(y: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    """q, k, v, decay and beta of what the convolution gives and two gates per head."""
    b, t, _ = y.shape
    q, k, v = y.split([HEADS * KEY, HEADS * KEY, HEADS * VALUE], -1)
    q, k = (F.normalize(x.reshape(b, t, HEADS, KEY), dim=-1) for x in (q, k))
    decay, beta = gates.unbind(-1)
    return q, k, v.reshape(b, t, HEADS, VALUE), -0.02 * F.softplus(decay), beta.sigmoid()


def whole(x: Tensor, gates: Tensor, weight: Tensor, documents: Sequence[int]) -> Tensor:
    """The layer over whole sequences, a document at a time."""
    y = torch.cat([convolution(part, weight) for part in x.split(list(documents), 1)], 1)
    outs = []
    for parts in zip(*(t.split(list(documents), 1) for t in inputs_of(y, gates))):
        outs.append(delta_rule(*parts, x.new_zeros(len(x), HEADS, KEY, VALUE))[0])
    return torch.cat(outs, 1)


def on_pieces(pieces: LocalPieces, x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """The layer over this rank's tokens: values widened by [0 | I], so that A comes out with b."""
    columns = TAPS - 1
    left, parts = pieces.left(x, columns, 1), pieces.split(1, x)
    wide = [torch.cat([before, part], 1) for before, (part,) in zip(left, parts)]
    y = pieces.join(1, [convolution(t, weight)[:, columns:] for t in wide], left)
    inputs = inputs_of(y, gates)
    start = torch.cat([x.new_zeros(KEY, VALUE), torch.eye(KEY, dtype=x.dtype)], 1)
    start = start.expand(len(x), HEADS, KEY, KEY + VALUE)
    outs, maps = [], []
    for q, k, v, decay, beta in pieces.split(1, *inputs):
        out, end = delta_rule(q, k, F.pad(v, (0, KEY)), decay, beta, start)
        outs.append(out)
        maps.append((end[..., VALUE:], end[..., :VALUE]))
    states = pieces.states(maps, torch.matmul, of=inputs)
    made = [
        out[..., :VALUE] + torch.einsum("bthd,bhde->bthe", out[..., VALUE:], state)
        for out, state in zip(outs, states)
    ]
    return pieces.join(1, made, states)


def on_chain(pieces: LocalPieces, x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """The layer from the true states, a head at a time."""
    run = partial(_convolved, weight=weight)
    options = {"length": pieces.length, "documents": pieces.documents}
    y = weft.halo(run, x, TAPS - 1, pieces.layout, "tokens", **options)
    inputs = inputs_of(y, gates)
    parts = pieces.split(1, *inputs)

    def step(piece: int, head: int, state: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule(*(t[:, :, head : head + 1] for t in parts[piece]), state)

    zeros = [x.new_zeros(len(x), 1, KEY, VALUE) for _ in range(HEADS)]
    return pieces.join(1, [torch.cat(outs, 2) for outs in pieces.chain(step, zeros, inputs)])


def _convolved(run: Tensor, weight: Tensor) -> Tensor:
    return convolution(run, weight)[:, weight.shape[1] - 1 :]


LAYERS = {"gather": on_pieces, "chain": on_chain}


def carried(layout: Layout, way: str) -> Layout:
    """The layout, with states that travel in a way."""
    strategy = Strategy.load(f"state_{way}")
    bindings = (Binding(strategy, {"carry": d}) for d in layout.shard_dims("tokens"))
    return replace(layout, carry={"tokens": tuple(bindings)})


def tensors(length: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, ...]:
    """x, gates, weight and the gradient of the output, in fp64."""
    make = torch.Generator().manual_seed(seed)
    shapes = (batch, length, WIDTH), (batch, length, HEADS, 2), (WIDTH, TAPS)
    shapes = (*shapes, (batch, length, HEADS, VALUE))
    return tuple(torch.randn(s, dtype=torch.float64, generator=make) for s in shapes)


def _laid(t: Tensor, stride: str) -> Tensor:
    """Strides as users' tensors have them: those of `strides` are for four dims."""
    return strides.lay(t[None], stride)[0] if t.dim() == 3 else strides.lay(t, stride)


def errors(
    layout: Layout,
    length: int,
    documents: Sequence[int] | None = None,
    layer: Callable[..., Tensor] = on_pieces,
    stride: str = "contiguous",
) -> dict[str, float]:
    """How far the output and every gradient are from those of one device."""
    x, gates, weight, above = tensors(length)
    leaves = [t.clone().requires_grad_() for t in (x, gates, weight)]
    out = whole(*leaves, documents or (length,))
    wanted = [out, *torch.autograd.grad((out * above).sum(), leaves)]

    def rank(layout: Layout) -> list[Tensor]:
        given = None if documents is None else weft.Documents(documents)
        pieces = LocalPieces(layout, "tokens", length, given)
        cut = {"batch": 0, **AXIS}
        local = [_laid(layout.shard(t, cut), stride) for t in (x, gates)]
        local = [t.requires_grad_() for t in (*local, weight.clone())]
        with weft.traffic(layout) as moved:
            out = layer(pieces, *local)
            (out * layout.shard(above, cut)).sum().backward()
        assert moved.as_predicted, moved.differences()
        assert moved.predicted.bytes == moved.bytes
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in local]
        shares = [layout.gather(t.detach(), cut) for t in (out, *grads[:2])]
        return [*shares, grads[2]]

    results = weft.on_threads(layout, rank, timeout=30)
    found = [*results[0][:3], sum(result[3] for result in results)]
    names = ("out", "dx", "dgates", "dweight")
    return {n: (a - b).abs().max().item() for n, a, b in zip(names, found, wanted)}


def check(layout: Layout, length: int, documents: Sequence[int] | None = None, **more) -> None:
    found = errors(layout, length, documents, **more)
    assert max(found.values()) < 1e-11, found


# -- exact ----------------------------------------------------------------------------------------


@pytest.mark.few(10)
@covering("length line way", LENGTHS, LAYOUTS, LAYERS)
def test_outputs_and_gradients_are_those_of_one_device(line, length, way):
    check(carried(Layout.parse(line), way), length, layer=LAYERS[way])


@pytest.mark.few(7)
@covering("documents line way", DOCUMENTS[1:], LAYOUTS, LAYERS)
def test_nothing_crosses_from_one_document_to_the_next(line, documents, way):
    check(carried(Layout.parse(line), way), sum(documents), documents, layer=LAYERS[way])


@pytest.mark.parametrize("stride", ["sliced", "shifted", "spaced rows"])
def test_strides_do_not_matter(stride):
    check(Layout.parse("tokens(zigzag): ring=3"), 23, stride=stride)


def test_an_order_that_is_data():
    order = TokenOrder((((9, 2), (0, 4)), ((4, 3), (11, 3)), ((14, 3), (7, 2))))
    layout = Layout.parse("tokens: ring=3").reorder("tokens", order)
    assert [len(chunk) for chunk in fragments(layout, "tokens", 17).chunks] == [2, 2, 2]
    for way, layer in LAYERS.items():
        check(carried(layout, way), 17, layer=layer)
        check(carried(layout, way), 17, (6, 11), layer=layer)


def test_documents_packed_by_a_layout():
    layout, lengths = Layout.parse("tokens: ring=3"), (3, 1, 8, 11)
    for way, layer in LAYERS.items():
        packed = carried(layout, way).reorder("tokens", layout.pack(lengths).order)
        check(packed, 23, lengths, layer=layer)


def test_columns_may_come_from_many_ranks():
    """A rank with one token gets its columns from as many ranks as there are to its left."""

    def rank(layout):
        x = layout.shard(torch.arange(1.0, 5.0)[None], AXIS)
        return LocalPieces(layout, "tokens", 4).left(x, 5, 1)[0].tolist()

    assert weft.on_threads(Layout.parse("tokens: tile=2x2"), rank)[3] == [[0, 0, 1, 2, 3]]


def test_by_heads_whole_sequences_of_some_heads():
    x, gates, _, above = tensors(23)
    layout = Layout.parse("tokens(striped): ring=2 x ulysses=2")
    leaves = [t.clone().requires_grad_() for t in (x, gates)]
    inputs = inputs_of(leaves[0], leaves[1])
    out = delta_rule(*inputs, x.new_zeros(2, HEADS, KEY, VALUE))[0]
    wanted = [out, *torch.autograd.grad((out * above).sum(), leaves)]

    def rank(layout):
        other, dims = by_heads(layout, "tokens"), {"tokens": 1, "heads": 2}
        lengths = {"tokens": 23, "heads": HEADS}
        local = [layout.shard(t, AXIS).requires_grad_() for t in (x, gates)]
        moved = [layout.redistribute(t, other, dims, lengths) for t in inputs_of(*local)]
        pieces = LocalPieces(other, "tokens", 23)
        assert len(pieces.pieces) == 1
        assert moved[0].shape[2] == HEADS // 2
        eye = torch.eye(KEY, dtype=x.dtype).expand(2, 1, KEY, KEY)
        start = torch.cat([eye.new_zeros(2, 1, KEY, VALUE), eye], -1)
        q, k, v, decay, beta = moved
        wide, end = delta_rule(q, k, F.pad(v, (0, KEY)), decay, beta, start)
        (state,) = pieces.states([(end[..., VALUE:], end[..., :VALUE])], torch.matmul)
        out = wide[..., :VALUE] + torch.einsum("bthd,bhde->bthe", wide[..., VALUE:], state)
        out = other.redistribute(out, layout, dims, lengths)
        (out * layout.shard(above, AXIS)).sum().backward()
        return [layout.gather(t.detach(), AXIS) for t in (out, *(t.grad for t in local))]

    for found, right in zip(weft.on_threads(layout, rank)[0], wanted):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-11)


# -- weft.scan and weft.halo ----------------------------------------------------------------------

#: shapes of decays of an update (b t h k v), and whether they are matrices
DECAYS = {"head": (2,), "row": (2, 3), "entry": (2, 3, 4), "matrix": (2, 3, 3)}


def scanned(decay: Tensor, update: Tensor, matrix: bool) -> Tensor:
    """S_t = decay_t S_{t-1} + update_t, a token at a time."""
    states = [torch.zeros_like(update[:, 0])]
    for decay_t, update_t in zip(decay.unbind(1), update.unbind(1)):
        more = (1,) * (update_t.dim() - decay_t.dim())
        before = (
            decay_t @ states[-1] if matrix else decay_t.reshape(*decay_t.shape, *more) * states[-1]
        )
        states.append(before + update_t)
    return torch.stack(states[1:], 1)


def decays(kind: str, length: int) -> tuple[Tensor, Tensor]:
    """A decay near 1 and an update, in fp64."""
    make = torch.Generator().manual_seed(3)
    draw = torch.rand(2, length, *DECAYS[kind], dtype=torch.float64, generator=make)
    decay = 1 - 0.1 * draw if kind != "matrix" else 0.9 * torch.eye(3) + 0.1 * (draw - 0.5)
    return decay, torch.randn(2, length, 2, 3, 4, dtype=torch.float64, generator=make)


@covering(
    "tokens line kind",
    [(17, None), (3, None), (17, (4, 1, 12))],
    ["tokens: ring=3", "tokens(zigzag): ring=3", "tokens: tile=2x2"],
    DECAYS,
)
def test_scan(kind, line, tokens):
    length, documents = tokens
    whole = [t.requires_grad_() for t in decays(kind, length)]
    parts = zip(*(t.split(list(documents or (length,)), 1) for t in whole))
    out = torch.cat([scanned(*part, kind == "matrix") for part in parts], 1)
    above = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
    wanted = [out, *torch.autograd.grad((out * above).sum(), whole)]

    def rank(layout):
        local = [layout.shard(t.detach(), AXIS).requires_grad_() for t in whole]
        options = {"length": length, "documents": documents and weft.Documents(documents)}
        out = weft.scan(*local, layout, "tokens", matrix=kind == "matrix", **options)
        (out * layout.shard(above, AXIS)).sum().backward()
        return [layout.gather(t.detach(), AXIS) for t in (out, *(t.grad for t in local))]

    for found, right in zip(weft.on_threads(Layout.parse(line), rank)[0], wanted):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("line", ["tokens: ring=3", "tokens(zigzag): ring=3", "tokens: tile=2x2"])
@pytest.mark.parametrize(("length", "documents"), [(17, None), (2, None), (17, (4, 1, 12))])
def test_halo(line, length, documents):
    x, _, weight, _ = tensors(length)
    whole = [x.transpose(1, 2).requires_grad_(), weight.requires_grad_()]

    def layer(run: Tensor, weight: Tensor) -> Tensor:
        return F.conv1d(run, weight[:, None], groups=len(weight))

    padded = [F.pad(t, (TAPS - 1, 0)) for t in whole[0].split(list(documents or (length,)), 2)]
    out = torch.cat([layer(t, whole[1]) for t in padded], 2)
    wanted = [out, *torch.autograd.grad(out.square().sum(), whole)]

    def rank(layout):
        local = layout.shard(whole[0].detach(), {"tokens": 2}).requires_grad_()
        own = weight.detach().clone().requires_grad_()
        options = {"length": length, "documents": documents and weft.Documents(documents)}
        run = partial(layer, weight=own)
        out = weft.halo(run, local, TAPS - 1, layout, "tokens", dim=-1, **options)
        out.square().sum().backward()
        shares = [layout.gather(t.detach(), {"tokens": 2}) for t in (out, local.grad)]
        return [*shares, layout.sum(own.grad, "tokens")]

    for found, right in zip(weft.on_threads(Layout.parse(line), rank)[0], wanted):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-11)


def test_what_is_no_recurrence_is_refused():
    layout, update = Layout.single(), torch.ones(1, 3, 2, 2)
    with pytest.raises(ShapeError, match="leading dims of update"):
        weft.scan(torch.ones(1, 3, 3), update, layout, "tokens")
    with pytest.raises(ShapeError, match=r"\(..., k, k\)"):
        weft.scan(torch.ones(1, 3, 2, 3), update, layout, "tokens", matrix=True)
    with pytest.raises(ShapeError, match="one floating dtype"):
        weft.scan(torch.ones(1, 3, dtype=torch.float64), update, layout, "tokens")
    with pytest.raises(ShapeError, match="0 or more"):
        weft.halo(torch.relu, update, -1, layout, "tokens")
    with pytest.raises(ShapeError, match=r"columns = 1\.0"):
        weft.halo(torch.relu, update, 1.0, layout, "tokens")
    for length in (3.0, True, "3"):
        with pytest.raises(ShapeError, match="whole number, found"):
            weft.scan(update, update, layout, "tokens", length=length)
    with pytest.raises(ShapeError, match="one per token: a convolution of 2 taps"):
        weft.halo(torch.relu, update, 1, layout, "tokens")
    with pytest.raises(DeclarationError, match=r"weft\.Layout\.single"):
        weft.scan(update, update, None, "tokens")
    with pytest.raises(DeclarationError, match="'tokens' is"):
        fragments(Layout.parse("tokens: ring=2"), "token", 3)


# -- as programs use it ---------------------------------------------------------------------------


def only_a_scan(pieces: LocalPieces, x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """A layer that saves nothing on a rank after what it sends to others."""
    decay, update = gates[..., 0].sigmoid(), x.unflatten(2, (HEADS, -1))
    return weft.scan(decay, update, pieces.layout, "tokens", length=pieces.length)


@pytest.mark.few(2)
@pytest.mark.parametrize(("way", "layer"), [*LAYERS.items(), ("gather", only_a_scan)])
def test_two_forwards_before_one_backward_and_checkpointing(way, layer):
    x, gates, weight, _ = tensors(23)

    def rank(layout, layer):
        pieces = LocalPieces(layout, "tokens", 23)
        local = [layout.shard(t, AXIS).requires_grad_() for t in (x, gates)]
        outs = [layer(pieces, *(t * s for t in local), weight) for s in (1.0, 0.5)]
        (outs[0].square() - 2 * outs[1]).sum().backward()
        return [t.grad for t in local]

    def checkpointed(*args, reentrant):
        return torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=reentrant)

    for line in ("tokens(zigzag): ring=3", "tokens: ring=3"):
        layout = carried(Layout.parse(line), way)
        plain = weft.on_threads(layout, rank, layer)
        for reentrant in (False, True):
            run = partial(checkpointed, reentrant=reentrant)
            again = weft.on_threads(layout, rank, run, timeout=20)
            assert all(
                torch.equal(a, b) for one, two in zip(plain, again) for a, b in zip(one, two)
            )


@pytest.mark.parametrize("movement", ["scan", "halo", "redistribute"])
def test_ranks_that_run_equal_backward_passes_in_other_orders_refused(movement):
    other = Layout.parse("tokens(zigzag): ring=2")

    def run(layout, x):
        if movement == "scan":
            return weft.scan(x, x, layout, "tokens")
        if movement == "halo":
            return weft.halo(lambda part: part[:, 1:] + part[:, :-1], x, 1, layout, "tokens")
        return layout.redistribute(x, other.on(layout.transport), {"tokens": 1})

    def rank(layout):
        x = torch.ones(1, 4, 1, requires_grad=True)
        outs = [run(layout, x) for _ in range(2)]
        for out in outs if layout.rank else outs[::-1]:
            out.sum().backward()

    with pytest.raises(ShapeError, match=r"backward pass of .*, of pass 1"):
        weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=20)


def test_ranks_without_states_take_part_in_backward_passes():
    """The first piece of all needs no state, and its kernel may be called without one."""

    def rank(layout):
        pieces = LocalPieces(layout, "tokens", 6)
        x = torch.ones(1, 2, 1, requires_grad=True)
        for _ in range(2):
            states = pieces.states([(x[:, 0], x[:, 1])], torch.mul)
            (piece,) = pieces.pieces
            pieces.join(1, [x if piece.begins else x + states[0]], states).sum().backward()
        return x.grad.flatten().tolist()

    found = weft.on_threads(Layout.parse("tokens: ring=3"), rank, timeout=20)
    assert found == [[2.0, 10.0], [6.0, 6.0], [2.0, 2.0]]


@pytest.mark.parametrize("way", LAYERS)
@pytest.mark.parametrize("seed", range(4))
def test_messages_may_be_late_and_in_any_order(way, seed):
    x, gates, weight, above = tensors(23)
    layout = carried(Layout.parse("tokens(zigzag): tile=2x2"), way)

    def rank(layout):
        pieces = LocalPieces(layout, "tokens", 23)
        local = [layout.shard(t, AXIS).requires_grad_() for t in (x, gates)]
        out = LAYERS[way](pieces, *local, weight)
        (out * layout.shard(above, AXIS)).sum().backward()
        return [out.detach(), *(t.grad for t in local)]

    run = run_seeded(layout.mesh, lambda transport: rank(layout.on(transport)), seed)
    assert run.errors == [None] * 4
    for found, wanted in zip(run.results, weft.on_threads(layout, rank)):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))


# -- on processes ---------------------------------------------------------------------------------


def _layer_on_a_process(rank: int, line: str, way: str) -> float:
    x, gates, weight, above = tensors(22)
    leaves = [t.requires_grad_() for t in (x, gates, weight)]
    out = whole(*leaves, (9, 13))
    wanted = [out, *torch.autograd.grad((out * above).sum(), leaves)]
    layout = carried(Layout.parse(line), way).build("cpu", timeout=60)
    pieces = LocalPieces(layout, "tokens", 22, weft.Documents((9, 13)))
    local = [layout.shard(t.detach(), AXIS).requires_grad_() for t in (x, gates)]
    own = weight.detach().clone().requires_grad_()
    with weft.traffic(layout) as moved:
        out = LAYERS[way](pieces, *local, own)
        (out * layout.shard(above, AXIS)).sum().backward()
    assert moved.as_predicted, moved.differences()
    found = [layout.gather(t.detach(), AXIS) for t in (out, *(t.grad for t in local))]
    found.append(layout.sum(own.grad, "tokens"))
    return max((a - b).abs().max().item() for a, b in zip(found, wanted))


@pytest.mark.parametrize("line", ["tokens(zigzag): ring=4", "tokens: tile=2x2"])
@pytest.mark.parametrize("way", LAYERS)
def test_processes(pool, line, way):
    assert max(pool.run(_layer_on_a_process, line, way)) < 1e-11


def _dtensors(rank: int) -> list[float]:
    layout = Layout.load("tile-2x2").build("cpu", timeout=60)
    decay, update = (layout.distribute(t, AXIS).requires_grad_() for t in decays("row", 10))
    states = weft.scan(decay, update, layout, "tokens")
    sums = weft.halo(lambda run: run[:, 2:] - run[:, :-2], states, 2, layout, "tokens")
    assert sums.placements == update.placements
    (sums.to_local() ** 2).sum().backward()
    whole = [t.requires_grad_() for t in decays("row", 10)]
    wanted = scanned(*whole, False)
    wanted = wanted - F.pad(wanted, (0, 0, 0, 0, 0, 0, 2, 0))[:, :-2]
    wanted.square().sum().backward()
    pairs = [(sums, wanted), *((t.grad, w.grad) for t, w in zip((decay, update), whole))]
    with pytest.raises(ShapeError, match="DTensors carry"):
        weft.scan(decay, update, layout, "tokens", length=10)
    with pytest.raises(ShapeError, match="decay is not"):
        weft.scan(decay.to_local(), update, layout, "tokens")
    with pytest.raises(ShapeError, match=r"alone split axis 'tokens', in dim 0"):
        weft.scan(decay, update, layout, "tokens", dim=0)
    return [(layout.gather(a.to_local(), AXIS) - b).abs().max().item() for a, b in pairs]


def test_dtensors_in_and_out(pool):
    assert max(map(max, pool.run(_dtensors))) < 1e-11


def _another_call(rank: int) -> str:
    layout = Layout.load("ring-4").build("cpu", timeout=30)
    x = torch.ones(1, 2, 1, requires_grad=True)
    try:
        if rank == 2:
            weft.halo(torch.relu, x, 1, layout, "tokens")
        weft.scan(x, x, layout, "tokens")
    except ShapeError as error:
        return str(error)
    return ""


def test_a_process_that_does_something_else_is_refused(pool):
    for message in pool.run(_another_call, timeout=40):
        assert "halo of layout 'ring-4'" in message
        assert "state of layout 'ring-4'" in message


# -- refused --------------------------------------------------------------------------------------


def test_striped_order_is_refused_with_another_way():
    layout = Layout.parse("tokens(striped): ring=3")
    with pytest.raises(UnsupportedError, match=r"fragment for every token.*zigzag.*ulysses"):
        fragments(layout, "tokens", 24)
    many = tuple(tuple((2 * i + c, 1) for i in range(100)) for c in range(2))
    layout = Layout.parse("tokens: ring=2").reorder("tokens", TokenOrder(many))
    with pytest.raises(UnsupportedError, match="100 fragments, of 64 at most"):
        fragments(layout, "tokens", 200)


def test_documents_that_do_not_fit():
    layout = Layout.parse("tokens: ring=2")
    with pytest.raises(ShapeError, match="differ by row"):
        fragments(layout, "tokens", 6, weft.Documents([(3, 3), (6,)]))
    with pytest.raises(ShapeError):
        fragments(layout, "tokens", 7, weft.Documents((3, 3)))


def test_by_heads_refuses_other_mesh_dims():
    with pytest.raises(DeclarationError, match="do not split axis 'tokens'"):
        by_heads(Layout.parse("tokens: ring=2"), "tokens", ["u"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    {
        "another call": "halo",
        "other documents": "documents",
        "another shape": r"A \(1, 3\)",
        "too few tokens": "has 1 local tokens",
        "two shapes": "one shape and one dtype",
        "gradients": "gradients none",
        "another convolution": "4 columns",
        "wrong documents": "Documents",
    }.items(),
)
def test_ranks_that_differ_are_refused_everywhere(wrong, message):
    def call(layout):
        odd = layout.rank == 1
        x = torch.ones(
            1, 2, 1, dtype=torch.float64, requires_grad=not (odd and wrong == "gradients")
        )
        documents = None
        if odd and wrong in ("other documents", "wrong documents"):
            documents = weft.Documents((4, 2) if wrong == "other documents" else (3, 4))
        pieces = LocalPieces(layout, "tokens", 6, documents)
        if wrong == "another convolution":
            pieces.left(x, 4 if odd else 3, 1)
        if odd and wrong == "another call":
            pieces.left(x, 1, 1)
        if odd and wrong == "too few tokens":
            pieces.split(1, x[:, :1])
        update = x[:, 0].expand(1, 3) if odd and wrong == "another shape" else x[:, 0]
        matrix = update.float() if odd and wrong == "two shapes" else update
        pieces.states([(matrix, update)], torch.mul)

    def rank(layout):
        with pytest.raises(ShapeError, match=message):
            call(layout)
        return True

    assert weft.on_threads(Layout.parse("tokens: ring=3"), rank, timeout=20) == [True] * 3


# -- the way that a layout leaves open ------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "chain"), [(8, False), (9, True)])
def test_many_ranks_hand_states_on(ranks, chain, monkeypatch):
    """In a graph maps are composed, which are ops."""
    layout = Layout.parse(f"tokens(zigzag): ring={ranks}")

    def rank(layout):
        return LocalPieces(layout, "tokens", 7).in_chain()

    assert weft.on_threads(layout, rank) == [chain] * ranks
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert weft.on_threads(layout, rank) == [False] * ranks


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "per_rank"), [("tokens: ring=4", 1), ("tokens(zigzag): ring=4", 2)]
)
def test_bytes_do_not_grow_with_the_sequence(line, per_rank):
    heads, key, value, channels, layout = 16, 128, 128, 8192, Layout.parse(line)
    map_bytes, column_bytes = 4 * heads * key * (key + value), 2 * channels
    for length in (1024, 16384, 65536):
        plan = fragments(layout, "tokens", length)
        states, halos = [], []
        for chunk in range(4):
            state = StateExchange(plan, chunk, map_bytes)
            left = plan.left(TAPS - 1)
            halo = TakePass(left, chunk, column_bytes)
            states += [state.traffic(backward).bytes for backward in (False, True)]
            halos.append(halo.traffic(False).bytes)
        # Rank 3 holds both middle sub-chunks of zigzag order, which are one fragment.
        slots = 4 * per_rank - (per_rank - 1)
        assert sum(states[::2]) == sum(states[1::2]) == 3 * slots * map_bytes
        assert sum(halos) == (slots - 1) * (TAPS - 1) * column_bytes


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_gradients_of_states_cross_slow_links_summed(nodes):
    """A node of 8 ranks receives the sum for each of its ranks from every other node."""
    plan = fragments(Layout.parse(f"tokens: hierarchical={nodes}x8"), "tokens", 1 << 14)
    received = StateExchange(plan, 0, 1).traffic(True).received
    assert {dim: n for (dim, _), n in received.items()} == {"inter": nodes - 1, "intra": 7 * nodes}

"""What users do with calls, on real processes: threads and one process hide what ranks see."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from refusals import refused
from torch import nn
from torch.autograd import forward_ad
from world import draw

import weft
from weft import Causal, Full, Layout, MaskMod
from weft.comm import P2PBatch, run_threads, threads
from weft.comm.channel import Channel

F64 = torch.float64
DIMS = {"tokens": 2}


# -- tensors --------------------------------------------------------------------------------------


def _numbers_of_numpy(rank: int) -> float:
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    q = layout.shard(draw(1, 2, 14, 4), DIMS)
    plain = weft.attention(q, q, q, layout, "tokens", Full(), scale=0.5, length=14)
    worst = 0.0
    for options in (
        {"mask": None, "length": np.int64(14)},
        {"length": [14, 14], "scale": np.float32(0.5)},
        {"length": {"tokens": np.int32(14)}},
        {"mask": weft.Documents(np.array([14])), "length": (np.int16(14), 14)},
    ):
        given = {"scale": np.float64(0.5)} | options
        out = weft.attention(q, q, q, layout, "tokens", **given)
        worst = max(worst, (out - plain).abs().max().item() if out.numel() else 0.0)
    return worst


def test_numbers_of_numpy_lists_and_none_are_taken(pool):
    assert max(pool.run(_numbers_of_numpy)) < 1e-14


# -- derivatives ----------------------------------------------------------------------------------


def _derivatives(rank: int, line: str) -> list[str]:
    """The refusals of derivatives other than those of `backward`."""
    layout = Layout.parse(line).build("cpu", timeout=30)
    q, weight = (layout.shard(draw(1, 4, 8, 4, seed=s), DIMS) for s in (0, 1))

    def f(x):
        return (weft.attention(x, x, x, layout, "tokens", Causal()) * weight).sum()

    said = [refused(lambda: torch.func.grad(f)(q)), refused(lambda: torch.func.vmap(f)(q[None]))]
    with forward_ad.dual_level():
        said.append(refused(lambda: f(forward_ad.make_dual(q, q))))
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    said.append(refused(grad.sum().backward))
    dist.barrier()
    f(q)  # nobody waits for a refusal of before
    return said


@pytest.mark.parametrize("line", ["tokens: ring=4", "tokens: ulysses=4", "tokens: tile=2x2"])
def test_derivatives_other_than_those_of_backward_are_refused(pool, line):
    for grad, mapped, forward_mode, second in pool.run(_derivatives, line):
        assert "within a transform of torch.func" in grad
        assert "put a mapped dim into the batch" in mapped
        assert "forward-mode tangent" in forward_mode
        assert "no second derivative" in second


def _through_gather(rank: int) -> float:
    """A loss that every rank computes of the whole: its gradient here is that of one device."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    whole = draw(1, 2, 10, 4).requires_grad_()
    want = weft.attention(whole, whole, whole, Layout.single(), "tokens")
    (want.cumsum(2) ** 2).sum().backward()
    mine = layout.shard(whole.detach(), DIMS).requires_grad_()
    out = weft.attention(mine, mine, mine, layout, "tokens", length=10)
    seen = layout.gather(out, DIMS)
    (seen.cumsum(2) ** 2).sum().backward()
    looked = layout.gather(out.detach(), DIMS)  # for a look alone
    assert not looked.requires_grad
    assert torch.equal(looked, seen)
    gaps = (seen - want, mine.grad - layout.shard(whole.grad, DIMS))
    return max(gap.abs().max().item() for gap in gaps if gap.numel())


def test_a_gradient_goes_through_what_is_gathered(pool):
    assert max(pool.run(_through_gather)) < 1e-11


# -- copies ---------------------------------------------------------------------------------------


# -- layouts --------------------------------------------------------------------------------------


_STRATEGY = '[rule.x]\nquery = "S(seq) -> {query}"\nkey = "S(seq) -> {key}"\nout = "{out}"\n'


def _other_file(rank: int, folder: str) -> str:
    """The same layout on every rank, and on rank 2 another strategy behind the same name."""
    ways = {"query": "S(seq)", "key": "R", "out": "S(seq)"}
    if rank == 2:
        ways = {"query": "R", "key": "S(seq)", "out": "P(softmax) -> S(seq)"}
    path = f"{folder}/mine.toml"
    for writing in range(4):
        if writing == rank:
            with open(path, "w") as file:
                file.write(_STRATEGY.format(**ways))
            layout = Layout.from_dict(
                {
                    "mesh": {"x": 4},
                    "shard": {"tokens": ["x"]},
                    "attend": {"tokens": [{"strategy": path, "on": "x"}]},
                }
            )
        dist.barrier()
    return refused(lambda: layout.build("cpu", timeout=20))


def test_a_strategy_file_that_differs_is_refused_on_all(pool, tmp_path):
    for said in pool.run(_other_file, str(tmp_path)):
        assert said.startswith("ShapeError: the layout must be the same on every rank")
        assert "\n  rank 2: " in said


# -- agreement ------------------------------------------------------------------------------------


def _differing_table(rank: int, how: str) -> str:
    """Tables of 4,000 entries whose text in short is the same: rank 2 has another entry within."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=20)
    q = layout.shard(draw(1, 2, 16, 8), DIMS)
    table = torch.ones(4000, dtype=torch.bool)
    table[2000] = rank != 2
    if how == "captured":
        mask = MaskMod(lambda b, h, q, k: table[k] & (q >= 0))
    else:
        mask = MaskMod(_Table(table))
    said = refused(lambda: weft.attention(q, q, q, layout, "tokens", mask))
    dist.barrier()
    return said


class _Table:
    """A function of the user's with its table in a field."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, b, h, q, k):
        return self.table[k] & (q >= 0)


@pytest.mark.parametrize("how", ["captured", "field"])
def test_a_single_entry_of_a_large_table_is_seen(pool, how):
    for said in pool.run(_differing_table, how):
        assert said.startswith("ShapeError")
        assert "rank 2: " in said


def _as_on_cuda(rank: int, then: str) -> list[str]:
    """Whether a disagreement is noticed at once, and whether by the next call; likewise later.

    On CUDA the CPU runs ahead, so the answer may be late where ranks agreed on such a call before.
    """
    layout = Layout.parse("tokens: ulysses=4").build("cpu", timeout=20)
    x = layout.shard(draw(1, 4, 16, 8), DIMS)
    first, weight = Channel.__init__, nn.Linear(2, 2)
    weight.weight.grad = torch.ones(2, 2)
    kinds = itertools.repeat(1)

    def ahead(self, *given, **named):
        first(self, *given, **{**named, "kind": next(kinds)})

    def call(mask: weft.Mask) -> str:
        return refused(lambda: weft.attention(x, x, x, layout, "tokens", mask))

    Channel.__init__ = ahead
    # Messages along a dim of one length go together on NCCL, whatever call they are of.
    layout.bound._on_gpu, layout.bound._wait = True, lambda work: work.wait(layout.bound.timeout)
    said = []
    try:
        differing = Causal() if rank == 2 else Full()
        said.append(call(differing))  # a kind that ranks never agreed on
        kinds = itertools.repeat(2)
        said.append(call(Full()))
        sent = sum(layout.bound.sent.values())
        said.append(call(differing))  # as if all had agreed on both
        assert sum(layout.bound.sent.values()) > sent
        said.append(
            refused(
                {
                    "a call": lambda: weft.attention(x, x, x, layout, "tokens"),
                    "a sum of gradients": lambda: layout.sync_gradients(weight),
                }[then]
            )
        )
        said.append(call(Full()))
    finally:
        Channel.__init__ = first
        layout.bound._on_gpu = False
    dist.barrier()
    return said


@pytest.mark.parametrize("then", ["a call", "a sum of gradients"])
def test_disagreement_is_noticed_at_once_or_by_the_next_call(pool, then):
    wrong = "ShapeError: an attention call must be the same on every rank"
    for new, agreed, known, later, after in pool.run(_as_on_cuda, then):
        assert new.startswith(wrong)
        assert agreed == known == after == "not refused"
        assert later.startswith(wrong)
        assert "Causal()" in later


class Counting(threads.ThreadTransport):
    """Notes what is asked of it, in order."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.asked: list[str] = []

    def start(self, *given):
        self.asked.append("message")
        return super().start(*given)

    def _vote(self, *given):
        answer = super()._vote(*given)

        def look() -> bool:
            self.asked.append("answer")
            return answer()

        return look


def test_on_cuda_new_kinds_are_agreed_on_before_messages() -> None:
    """What makes NCCL wait for messages that nobody sends is refused before any is sent."""

    def rank(transport) -> list[str]:
        own = Counting(transport.sizes, transport.rank, transport.post)
        for kind in (5, 5, 6, None):
            channel = Channel(own, ("ring",), 3, "a call", lambda: "it", kind=kind)
            x = torch.ones(2)
            channel.start(P2PBatch("ring", "q", [(1 - own.rank, x)], [(1 - own.rank, x * 2)]))()
            channel.finish()
            own.asked.append("|")
        own.check_deferred()
        return own.asked

    new, known, on_cpu = ["answer", "message"], ["message"], ["message", "answer"]
    before = ["answer"]  # of the pass before, which was late
    wanted = [*new, "|", *known, "|", *before, *new, "|", *on_cpu, "|"]
    assert run_threads({"ring": 2}, rank) == [wanted] * 2


class Asking(threads.ThreadTransport):
    """Counts how often texts of all ranks are asked for."""

    texts = 0

    def _all_gather_text(self, *given):
        self.texts += 1
        return super()._all_gather_text(*given)


def test_batches_are_asked_for_once_per_shape() -> None:
    """Masks of single sequences, others in every call; rank 0 has as many as before throughout."""
    layout = Layout.parse("batch: dp=2; tokens: ring=1")
    batches = [(2, 2), (2, 2), (2, 1), (2, 1), (2, 2), (2, 2)]

    def rank(transport) -> list[tuple[float, int]]:
        own = Asking(transport.sizes, transport.rank, transport.post)
        on, found = layout.on(own), []
        for step, sizes in enumerate(batches):
            whole = draw(sum(sizes), 2, 6, 4, seed=step)
            lengths = tuple(1 + (b + step) % 6 for b in range(sum(sizes)))
            mine = whole.split(sizes)[own.rank]
            before = own.texts
            out = weft.attention(mine, mine, mine, on, "tokens", weft.KeyPadding(lengths))
            wanted = weft.attention(
                whole, whole, whole, Layout.single(), "tokens", weft.KeyPadding(lengths)
            )
            gap = (out - wanted.split(sizes)[own.rank]).abs().max().item()
            found.append((gap, own.texts - before))
        return found

    for found in run_threads(layout.mesh, rank):
        assert max(gap for gap, _ in found) < 1e-12
        texts = [count for _, count in found]
        assert texts[1] == texts[3] == texts[5] == 0
        assert texts[0] == texts[2] == texts[4] == 1


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("wrong", ["refused", "another mask"])
def test_what_one_rank_refuses_refused_on_all_whether_batches_known(wrong, known) -> None:
    layout = Layout.parse("batch: dp=2; tokens: ring=1")
    x, mask = draw(2, 2, 6, 4), weft.KeyPadding((6, 5, 4, 3))

    def rank(transport) -> tuple[str, str]:
        on = layout.on(transport)
        if known:
            weft.attention(x, x, x, on, "tokens", mask)
        keys, other = x, mask
        if transport.rank == 1:
            keys = x[:, :, :, :3] if wrong == "refused" else x
            other = mask if wrong == "refused" else weft.KeyPadding((6, 5, 4, 2))
        said = refused(lambda: weft.attention(x, keys, x, on, "tokens", other))
        return said, refused(lambda: weft.attention(x, x, x, on, "tokens", mask))

    for said, after in run_threads(layout.mesh, rank, timeout=20.0):
        assert said.startswith("ShapeError")
        assert after == "not refused"


def _never_unpickled(rank: int) -> str:
    """Builds, calls, sums, gathers and a refusal, where nothing of a peer's may be unpickled."""

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    def work():
        layout = Layout.parse("batch: dp=2; tokens: ring=2").build("cpu", timeout=20)
        x = layout.shard(draw(2, 2, 8, 4), {"batch": 0, **DIMS}).requires_grad_()
        module = nn.Linear(4, 4).double()
        lengths = weft.KeyPadding((8, 5))
        out = weft.attention(module(x), x, x, layout, "tokens", lengths, length=8)
        out.sum().backward()
        layout.sync_gradients(module)
        layout.gather(out, {"batch": 0, **DIMS})
        mask = Causal() if rank % 2 else Full()  # one of each ring
        return refused(lambda: weft.attention(x, x, x, layout, "tokens", mask, length=8))

    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(dist, name, refuse)
        for name in ("loads", "load", "Unpickler"):
            patched.setattr(pickle, name, refuse)
        said = work()
    dist.barrier()
    return said


def test_nothing_of_a_peer_is_unpickled(pool):
    for said in pool.run(_never_unpickled):
        assert said.startswith("ShapeError")


# -- compiling ------------------------------------------------------------------------------------


def _graph(rank: int) -> float:
    """One graph takes other lengths and scales, also after many other calls with functions."""
    torch._dynamo.reset()
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=60)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(q, scale, length):
        return weft.attention(q, q, q, layout, "tokens", Causal(), scale, length)

    def gap(n, scale):
        q = layout.shard(draw(1, 2, n, 4), DIMS)
        want = weft.attention(q, q, q, layout, "tokens", Causal(), scale, n)
        return (block(q, scale, n) - want).abs().max().item()

    found = [gap(8, 0.5)]
    q = layout.shard(draw(1, 1, 4, 2), DIMS)
    for number in range(60):
        mask = MaskMod(lambda b, h, q, k, number=number: q >= k - number)
        weft.attention(q, q, q, layout, "tokens", mask)
    return max(
        found + [gap(n, scale) for n, scale in ((8, 0.25), (12, 0.25), (16, 0.125), (8, 0.5))]
    )


def test_a_graph_takes_other_lengths_and_scales(pool):
    assert max(pool.run(_graph, timeout=150.0)) < 1e-13


# -- losses and functions of some ranks alone ------------------------------------------------------


def _loss_of_the_logsumexp(rank: int, line: str) -> float:
    """A z-loss on some ranks, as where there is padding: rows elsewhere have no gradient of out."""
    layout = Layout.parse(line).build("cpu", timeout=30)
    n, worst = 8, 0.0
    for dtype in (F64, torch.float32):
        whole = [draw(1, 4, n, 8, seed=s).to(dtype).requires_grad_() for s in range(3)]
        out, lse = weft.attention(*whole, Layout.single(), "tokens", return_lse=True)
        penalised = (torch.arange(n) < n // 4)[None, None]
        (lse.square() * penalised).sum().backward(retain_graph=True)
        (out.square() * ~penalised[..., None]).sum().backward()
        mine = [layout.shard(t.detach(), DIMS).requires_grad_() for t in whole]
        found, its_lse = weft.attention(*mine, layout, "tokens", return_lse=True)
        (its_lse.square() if layout.rank == 0 else found.square()).sum().backward()
        for ours, theirs in zip(mine, whole):
            gap = (
                ours.grad - layout.shard(theirs.grad, DIMS)
            ).abs().max() / theirs.grad.abs().max()
            worst = max(worst, gap.item() * (1.0 if dtype == F64 else 1e-6))
    return worst


@pytest.mark.parametrize("line", ["tokens: pass_q=4", "tokens: burst=4", "tokens: ring=4"])
def test_ranks_may_differ_in_whether_their_loss_is_of_logsumexp(pool, line):
    assert max(pool.run(_loss_of_the_logsumexp, line)) < 1e-11


def _refilled(rank: int, how: str) -> list[str]:
    """A buffer that a mask reads, written to in ways that torch does not count."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=20)
    x = layout.shard(draw(1, 2, 8, 4), DIMS).requires_grad_()
    table = torch.ones(40_000, dtype=torch.int64)
    mask = MaskMod(lambda b, h, q, k: (table[k] > 0) & (q >= 0))
    first = weft.attention(x, x, x, layout, "tokens", mask)
    version = table._version
    if how == "collective":
        new = table.clone()
        new[3] = 0
        given = [new.clone() for _ in range(4)]
        dist.all_to_all_single(table, torch.cat(given)[: len(table)])  # each a quarter
    else:
        table.numpy()[3] = 0
    assert table._version == version
    said = [refused(first.sum().backward)]
    if rank == 2:
        table.numpy()[5] = 0
    said.append(refused(lambda: weft.attention(x, x, x, layout, "tokens", mask)))
    dist.barrier()
    return said


@pytest.mark.parametrize("how", ["collective", "numpy"])
def test_a_buffer_that_is_refilled_uncounted_is_seen(pool, how):
    for of_backward, of_ranks in pool.run(_refilled, how):
        assert "have changed since the forward pass" in of_backward
        assert of_ranks.startswith("ShapeError")
        assert "rank 2: " in of_ranks


def _some_in_a_graph(rank: int) -> float:
    """One rank compiles, the others do not, in training and in evaluation of two kinds."""
    layout, worst = Layout.parse("tokens: ring=4").build("cpu", timeout=60), 0.0
    whole = draw(1, 4, 8, 4)

    def twice(x):
        y = 2 * x
        return weft.attention(y, y, y, layout, "tokens")

    run = torch.compile(twice, backend="aot_eager") if rank == 1 else twice
    want = layout.shard(weft.attention(*[2 * whole] * 3, Layout.single(), "tokens", Full()), DIMS)
    x = layout.shard(whole, DIMS)
    for leaf, context in (
        (x.clone().requires_grad_(), torch.enable_grad()),
        (x, torch.enable_grad()),
        (x, torch.no_grad()),
        (x.clone().requires_grad_(), torch.no_grad()),
        (x.float().requires_grad_(), torch.no_grad()),
    ):
        with context, torch.autocast("cpu", torch.bfloat16, leaf.dtype == torch.float32):
            out = run(leaf)
        if leaf.dtype == torch.float32:
            continue
        if out.requires_grad:
            out.sum().backward()
        worst = max(worst, (out - want).abs().max().item())
    return worst


def test_rank_may_compile_what_others_do_not_in_evaluation_too(pool):
    assert max(pool.run(_some_in_a_graph, timeout=120.0)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [None, "math", "flex"])
def test_alibi_is_as_exact_as_its_call_whatever_torchs_default(default, kernel):
    n, heads = 600, 12
    q = draw(1, heads, n, 4)
    i = torch.arange(n)
    slopes = torch.exp2(torch.arange(1, heads + 1, dtype=F64) * (-8.0 / heads))
    scores = q @ q.mT / 2.0 - slopes[:, None, None] * (i[:, None] - i).abs()
    want = torch.softmax(scores, -1) @ q
    torch.set_default_dtype(default)
    try:
        for dtype, limit in ((F64, 1e-12), (torch.float32, 1e-5)):
            x = q.to(dtype)
            out = weft.attention(
                x, x, x, Layout.single(), "tokens", bias=weft.alibi(heads), kernel=kernel
            )
            assert (out - want).abs().max() < limit
    finally:
        torch.set_default_dtype(torch.float32)


# -- what equal masks are --------------------------------------------------------------------------


def test_a_bias_is_asked_for_gradients_in_every_call():
    table = nn.Parameter(torch.zeros(16, dtype=F64), requires_grad=False)
    bias = weft.Bias(lambda b, h, q, k: table[(q - k).abs()])
    x = draw(1, 1, 6, 4).requires_grad_()
    weft.attention(x, x, x, Layout.single(), "tokens", bias=bias)
    table.requires_grad_(True)
    with pytest.raises(weft.ShapeError, match="a learned bias is given as a tensor"):
        weft.attention(x, x, x, Layout.single(), "tokens", bias=bias)


@dataclass(frozen=True)
class Blocks(weft.Mask):
    """A field that cannot be hashed."""

    ids: list

    def allowed(self, b, h, q, k):
        numbers = torch.tensor(self.ids, device=q.device)
        return numbers[q] == numbers[k]


@pytest.mark.parametrize("kernel", ["math", "flex"])
def test_a_mask_of_lists_is_taken_by_every_kernel(kernel):
    q = draw(1, 1, 6, 4)
    seen = torch.tensor([0, 0, 1, 1, 1, 2])
    for ids in (seen, seen.flip(0)):
        scores = (q @ q.mT / 2.0).masked_fill(ids[:, None] != ids, float("-inf"))
        mask = Blocks(ids.tolist())
        out = weft.attention(q, q, q, Layout.single(), "tokens", mask, kernel=kernel)
        assert (out - torch.softmax(scores, -1) @ q).abs().max() < 1e-12


@pytest.mark.parametrize("size", [1e-4, 1.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_through_logsumexp_of_any_size_stay_within_the_dtype(dtype, size):
    n, d = 8, 64
    draws = [torch.randn(1, 1, n, d, generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    leaves = [*(t.to(dtype) for t in draws), torch.full((1, 1, n, d), 30.0, dtype=dtype)]
    found = {}
    for kernel in ("cpu-flash", "math"):
        q, k, v = (t.clone().requires_grad_() for t in leaves)
        out, lse = weft.attention(
            q, k, v, Layout.single(), "tokens", return_lse=True, kernel=kernel
        )
        given = torch.full_like(out, size), torch.full_like(lse, size)
        torch.autograd.backward((out, lse), given)
        found[kernel] = [t.grad.float() for t in (q, k, v)]
    for ours, plain in zip(found["cpu-flash"], found["math"]):
        assert ours.isfinite().all()
        assert (ours - plain).abs().max() <= 0.02 * plain.abs().max() + 1e-3 * size

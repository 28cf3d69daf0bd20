"""weft beside torch's own parallelism, on real processes: losses and gradients as on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint
from world import draw

import weft
from weft import Causal, Documents, Layout

F64 = torch.float64
N, WIDTH, HEADS = 12, 8, 2


class Block(nn.Module):
    """Attention over tokens and a feed-forward layer; whole on one device without a layout."""

    def __init__(self, layout: Layout | None, axis: str = "tokens", heads: int = HEADS) -> None:
        super().__init__()
        self.layout, self.axis, self.heads = layout, axis, heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: weft.Mask | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        layout = Layout.single() if self.layout is None else self.layout
        y = weft.attention(q, k, v, layout, self.axis, Causal() if mask is None else mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + torch.tanh(self.ff(x))


def blocks(count: int, layout: Layout | None, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(layout) for _ in range(count))).to(F64)


def worst(pairs) -> float:
    return max((a - b).abs().max().item() for a, b in pairs)


# -- pipelines ------------------------------------------------------------------------------------

LAYERS = (1, 3)  # of the two stages


def _pipeline(rank: int) -> float:
    """1F1B over two stages, each a ring of its own; micro-batches of both are in flight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    stage, _ = mesh.get_coordinate()
    ring = Layout.parse("tokens(zigzag): ring=2").bind(mesh, rename={"ring": "cp"}, timeout=30)
    whole = blocks(sum(LAYERS), None)
    mine = blocks(sum(LAYERS), ring)[slice(*((0, 1), (1, 4))[stage])]
    x, target = draw(4, N, WIDTH, seed=1), draw(4, N, WIDTH, seed=2)

    loss = F.mse_loss(whole(x), target, reduction="sum")
    loss.backward()

    dims = {"tokens": 1}
    local, wanted = ring.shard(x, dims), ring.shard(target, dims)
    group = mesh.get_group("pp")
    pipe = PipelineStage(mine, stage, 2, torch.device("cpu"), group=group)
    total = lambda y, t: F.mse_loss(y, t, reduction="sum")  # noqa: E731
    schedule = Schedule1F1B(pipe, n_microbatches=4, loss_fn=total, scale_grads=False)
    losses: list[Tensor] = []
    if stage == 0:
        schedule.step(local)
    else:
        schedule.step(target=wanted, losses=losses)
    ring.sync_gradients(mine)
    pairs = [
        (p.grad, q.grad)
        for p, q in zip(mine.parameters(), whole[slice(*((0, 1), (1, 4))[stage])].parameters())
    ]
    if stage == 1:
        found = torch.stack(losses).sum()
        dist.all_reduce(found, group=mesh.get_group("cp"))
        pairs.append((found, loss.detach()))
    return worst(pairs)


def test_stages_of_a_pipeline_are_rings_of_their_own(pool):
    assert max(pool.run(_pipeline)) < 1e-10


# -- sharded parameters ---------------------------------------------------------------------------


def _fsdp(rank: int, sizes: tuple[int, int, int]) -> float:
    """FSDP2 over the flattened data dims of a mesh whose inner dim splits heads."""
    names = ("dp", "cp", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    declared = {
        "mesh": dict(zip(names, sizes)),
        "shard": {"batch": ["dp"], "tokens": ["cp"], "heads": ["tp"]},
        "attend": {"tokens": [{"strategy": "ring", "on": "cp"}]},
    }
    layout = Layout.from_dict(declared).bind(mesh)
    x, target = draw(2, N, WIDTH, seed=3), draw(2, N, WIDTH, seed=4)
    axes = ("batch", "tokens", "embed")

    def make(on: Layout) -> nn.Module:
        torch.manual_seed(5)
        one = weft.MultiAxisAttention(
            WIDTH, HEADS, axis="tokens", axes=axes, layout=Layout.single()
        )
        two = weft.MultiAxisAttention(WIDTH, HEADS, axis="tokens", axes=axes, layout=on)
        two.load_state_dict(one.state_dict())
        return two.to(F64)

    whole, mine = make(Layout.single()), make(layout)
    loss = F.mse_loss(whole(x), target, reduction="sum")
    loss.backward()
    data = mesh["dp", "cp"]._flatten("dp_cp")
    fully_shard(mine, mesh=data)
    mine.set_gradient_divide_factor(1.0)
    dims = {"tokens": 1, "batch": 0}
    y = mine(layout.shard(x, dims), lengths={"tokens": N})
    found = F.mse_loss(y, layout.shard(target, dims), reduction="sum")
    found.backward()
    total = found.detach()
    dist.all_reduce(total, group=data.get_group())
    pairs = [(total, loss.detach())]
    for p, q in zip(mine.parameters(), whole.parameters()):
        pairs.append((p.grad.full_tensor(), q.grad))
    return worst(pairs)


# -- experts --------------------------------------------------------------------------------------


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


def _experts(rank: int) -> float:
    """Every second token goes to the other expert, over the group that attention uses too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ring = Layout.parse("tokens: ring=2").bind(mesh, rename={"ring": "cp"})
    group, index = mesh.get_group("cp"), mesh.get_coordinate()[1]
    experts = draw(2, WIDTH, WIDTH, seed=6)
    x = draw(1, N, WIDTH, seed=7 + mesh.get_coordinate()[0])
    first, second = blocks(1, None, 8), blocks(1, None, 9)
    h = first(x)
    choice = torch.arange(N) % 2
    want = second(h + torch.einsum("bnd,nde->bne", h, experts[choice]))
    want.square().sum().backward()

    one, two = blocks(1, ring, 8), blocks(1, ring, 9)
    h = one(ring.shard(x, {"tokens": 1}))
    sent = torch.cat([h[:, 0::2], h[:, 1::2]], 1).transpose(0, 1)  # by expert, its tokens first
    got = _AllToAll.apply(sent, group)
    back = _AllToAll.apply(got @ experts[index], group).transpose(0, 1)
    half = h.shape[1] // 2
    made = torch.stack([back[:, :half], back[:, half:]], 2).flatten(1, 2)
    out = two(h + made)
    out.square().sum().backward()
    ring.sync_gradients(nn.ModuleList([one, two]))
    pairs = [(out, ring.shard(want, {"tokens": 1}))]
    pairs += [
        (p.grad, q.grad)
        for ours, theirs in ((one, first), (two, second))
        for p, q in zip(ours.parameters(), theirs.parameters())
    ]
    return worst(pairs)


def test_experts_move_tokens_between_attention_layers(pool):
    assert max(pool.run(_experts)) < 1e-10


# -- several layouts ------------------------------------------------------------------------------


def _two_layouts(rank: int) -> float:
    """A tile over all ranks, then a ring over an inner slice whose rows are replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))
    tile = Layout.parse("tokens: tile=2x2").bind(mesh)
    ring = Layout.parse("tokens: ring=2").bind(mesh, rename={"ring": "col"})
    x = draw(1, N, WIDTH, seed=11)
    one, two = blocks(1, None, 12), blocks(1, None, 13)
    want = two(one(x))
    want.square().sum().backward()
    ours = blocks(1, tile, 12), blocks(1, ring, 13)
    h = tile.gather(ours[0](tile.shard(x, {"tokens": 1})), {"tokens": 1})
    out = ring.gather(ours[1](ring.shard(h, {"tokens": 1})), {"tokens": 1})
    pairs = [(out, want)]
    # Each by itself, of the whole on every rank: a chunk of a chunk has a part of the gradient.
    between = [t.detach() for t in (x, h)]
    for on, mine, whole, given in zip((tile, ring), ours, (one, two), between):
        found = on.gather(mine(on.shard(given, {"tokens": 1})), {"tokens": 1})
        found.square().sum().backward()
        on.sync_gradients(mine)
        whole.zero_grad()
        whole(given).square().sum().backward()
        pairs += [(p.grad, q.grad) for p, q in zip(mine.parameters(), whole.parameters())]
    return worst(pairs)


def test_two_layouts_of_other_sizes_share_a_mesh(pool):
    assert max(pool.run(_two_layouts)) < 1e-11


# -- checkpointing and compiling, a new packing in every step -----------------------------------


def _packings(rank: int, how: str) -> float:
    layout = Layout.parse("tokens(zigzag): ring=4").build("cpu", timeout=60)
    torch._dynamo.reset()
    whole, mine = blocks(1, None, 14)[0], blocks(1, layout, 14)[0]
    run = {
        "checkpoint": lambda x, mask: checkpoint(mine, x, mask, use_reentrant=False),
        "compile": torch.compile(mine, backend="aot_eager"),
    }[how]
    found = 0.0
    for step, lengths in enumerate(((5, 11), (16,), (1, 2, 13), (8, 8))):
        mask = Documents(lengths) & Causal()
        x = draw(2, 16, WIDTH, seed=20 + step)
        whole.zero_grad()
        mine.zero_grad()
        want = whole(x, mask)
        want.square().sum().backward()
        out = run(layout.shard(x, {"tokens": 1}), mask)
        out.square().sum().backward()
        layout.sync_gradients(mine)
        pairs = [(out, layout.shard(want, {"tokens": 1}))]
        pairs += [(p.grad, q.grad) for p, q in zip(mine.parameters(), whole.parameters())]
        found = max(found, worst(pairs))
    return found


@pytest.mark.parametrize("how", ["checkpoint", "compile"])
def test_a_new_packing_in_every_step(pool, how):
    assert max(pool.run(_packings, how, timeout=150.0)) < 1e-10


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (2, 1, 2)])
def test_fsdp_shards_what_heads_and_tokens_split(pool, sizes):
    assert max(pool.run(_fsdp, sizes)) < 1e-10

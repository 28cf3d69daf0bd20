"""`weft.data_parallel` on models of users: ties, lists in lists, buffers, units of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import weft
from weft import Layout, ShapeError, UnsupportedError
from weft_models.train import clip_grad_norm_, data_parallel

RING = "tokens: ring=4"
WIDTH = 8


def built(line: str) -> Layout:
    return Layout.parse(line).build("cpu", timeout=60)


def attending(layout: Layout) -> weft.MultiAxisAttention:
    torch.manual_seed(0)  # the same weights on every rank, and inputs that are drawn next
    axes = ("batch", "tokens", "embed")
    return weft.MultiAxisAttention(WIDTH, 4, axis="tokens", axes=axes, layout=layout)


class Text(nn.Module):
    """Blocks in lists of lists, and an output layer that is the embedding."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ends = nn.ModuleList([nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)])
        pairs = ([attending(layout), nn.Linear(WIDTH, WIDTH)] for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attention": attention, "linear": linear})
            if i
            else nn.ModuleList([attention, linear])
            for i, (attention, linear) in enumerate(pairs)
        )
        self.ends[1].weight = self.ends[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ends[0](ids)
        for block in self.blocks:
            attention, linear = block.values() if isinstance(block, nn.ModuleDict) else block
            x = x + attention(x)
            x = x + torch.tanh(linear(x))
        return self.ends[1](x)


def _tied(rank: int, way: str) -> float:
    layout, single = built(RING), Layout.single()
    ids = torch.arange(16)[None] * 7 % 16
    whole, mine = Text(single), Text(layout)
    whole(ids).square().sum().backward()
    trained = mine if way == "sync" else data_parallel(mine, layout, way)
    assert mine.ends[1].weight is mine.ends[0].weight
    if way == "fsdp":
        units = {name for name, part in mine.named_modules() if isinstance(part, FSDPModule)}
        inner = {
            f"blocks.{i}.{kind}" for i, kind in ((0, 0), (0, 1), (1, "attention"), (1, "linear"))
        }
        assert units == {"", *inner}
    trained(layout.shard(ids, {"tokens": 1})).square().sum().backward()
    if way == "sync":
        layout.sync_gradients(mine)
    worst = 0.0
    for (name, a), (other, b) in zip(mine.named_parameters(), whole.named_parameters()):
        assert name == other
        found = a.grad.full_tensor() if way == "fsdp" else a.grad
        worst = max(worst, ((found - b.grad).abs().max() / b.grad.abs().max()).item())
    return worst


@pytest.mark.parametrize("way", ["sync", "ddp", "fsdp"])
def test_tied_weights_stay_tied_and_lists_may_be_in_lists(pool, way):
    assert max(pool.run(_tied, way)) < 1e-4


def _ungathered(rank: int, how: str) -> str:
    layout = built("tokens: ring=2; heads: tp=2" if how == "heads" else RING)
    x = layout.shard(torch.ones(1, 8, WIDTH), {"tokens": 1})

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([attending(layout)])

        def forward(self, x: Tensor) -> Tensor:
            keys, values = self.layers[0].keys_values(x)
            return self.layers[0].attend(x, keys, values, {"tokens": 8})

    if how == "leaves":
        model, leaf = attending(layout), lambda m: any(True for _ in m.parameters(recurse=False))
        model = data_parallel(model, layout, blocks=leaf)
    else:
        model = data_parallel(Around(), layout)
    with pytest.raises(UnsupportedError) as refused:
        model(x)
    return str(refused.value)


@pytest.mark.parametrize("how", ["leaves", "methods", "heads"])
def test_weights_that_fsdp_has_not_gathered_are_refused(pool, how):
    for said in pool.run(_ungathered, how):
        assert "is sharded" in said
        assert "register_fsdp_forward_method" in said


class Positioned(nn.Module):
    """Knows its rank's tokens by a buffer of its own."""

    def __init__(self, layout: Layout, length: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.attention, self.embedding = attending(layout), nn.Embedding(length, WIDTH)
        self.register_buffer("at", layout.positions("tokens", length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x + self.embedding(self.at), lengths={"tokens": 13})


def _own_buffers(rank: int) -> tuple[str, float]:
    layout, x = built(RING), torch.randn(1, 13, WIDTH, generator=torch.Generator().manual_seed(3))
    with pytest.raises(UnsupportedError) as refused:
        data_parallel(Positioned(layout, 13), layout, "ddp")
    model = data_parallel(Positioned(layout, 13), layout, "ddp", broadcast_buffers=False)
    ignoring = Positioned(layout, 13)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["at"])
    data_parallel(ignoring, layout, "ddp")
    found = layout.gather(model(layout.shard(x, {"tokens": 1})).detach(), {"tokens": 1})
    want = Positioned(Layout.single(), 13)(x)
    return str(refused.value), (found - want).abs().max().item()


def test_buffers_of_each_ranks_own_are_not_overwritten(pool):
    for said, gap in pool.run(_own_buffers):
        assert "broadcast_buffers=False" in said
        assert "'at'" in said
        assert gap < 1e-5


def _unsummed_heads(rank: int) -> float:
    layout = built("tokens: ring=2; heads: tp=2")
    model, x = attending(layout), torch.randn(1, 8, WIDTH)
    model(layout.shard(x, {"tokens": 1})).square().sum().backward()
    with pytest.raises(UnsupportedError, match="differ between ranks"):
        clip_grad_norm_(model, 1.0, layout)
    layout.sync_gradients(model)
    return clip_grad_norm_(model, 1e9, layout).item()


def test_norm_of_split_heads_that_are_not_summed_is_refused(pool):
    assert len(set(pool.run(_unsummed_heads))) == 1


def _partial_sums(rank: int, of_all: bool) -> str:
    layout = built(RING)
    linear = distribute_module(nn.Linear(WIDTH, WIDTH, bias=False), layout.device_mesh)
    x = layout.distribute(torch.ones(1, 8, WIDTH), {"tokens": 1})
    linear(x).sum().backward()
    assert any(place.is_partial() for place in linear.weight.grad.placements)
    if rank == 1 and not of_all:
        linear.weight.grad = None
    with pytest.raises(UnsupportedError) as refused:
        layout.sync_gradients(linear)
    return str(refused.value)


def test_gradients_that_torch_will_sum_are_refused(pool):
    for said in pool.run(_partial_sums, True):
        assert "the gradient of 'weight' is a DTensor of partial sums over mesh dims" in said
    for said in pool.run(_partial_sums, False):
        assert "partial sums on some ranks only" in said
        assert "rank 1: [], over ('ring',) []" in said


def _placed_on_some(rank: int) -> str:
    layout = built(RING)
    linear = distribute_module(nn.Linear(WIDTH, WIDTH, bias=False), layout.device_mesh)
    if rank == 1:
        linear.weight = nn.Parameter(linear.weight.to_local())
    with pytest.raises(ShapeError) as refused:
        layout.sync_gradients(linear)
    return str(refused.value)


def test_weights_that_are_dtensors_on_some_ranks_only_are_refused(pool):
    for said in pool.run(_placed_on_some):
        assert "rank 1: 'weight', float32;" in f"{said};"
        assert "'weight', float32 DTensor" in said


def _sums_over_others(rank: int, given: str) -> float:
    """Norms of torch's sequence parallelism over tp: its sums are torch's, those over ring ours."""
    layout = built("tokens: ring=2; heads: tp=2")
    torch.manual_seed(5)
    norm = nn.LayerNorm(WIDTH)
    x = torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(6))
    norm(x[:, : 4 if given == "half" else 8]).pow(3).sum().backward()
    wanted, norm.weight.grad, norm.bias.grad = norm.weight.grad.clone(), None, None
    parallelize_module(norm, layout.device_mesh["tp"], SequenceParallel())
    out = norm(layout.shard(x, {"tokens": 1}).chunk(2, 1)[layout.coords["tp"]])
    out.to_local().pow(3).sum().backward()
    kept = norm.weight.grad
    if rank == 1:
        norm.weight.grad = None
    with pytest.raises(UnsupportedError, match=r"(?s)partial sums on some ranks only.*rank 1: "):
        layout.sync_gradients(norm)
    norm.weight.grad = kept
    if given == "half" and layout.coords["ring"]:
        norm.weight.grad = norm.bias.grad = None
    layout.sync_gradients(norm)
    assert clip_grad_norm_(norm, 1e9, layout) > 0
    return (norm.weight.grad.full_tensor() - wanted).abs().max().item()


@pytest.mark.parametrize("given", ["all", "half"])
def test_partial_sums_over_other_ranks_are_summed(pool, given):
    assert max(pool.run(_sums_over_others, given)) < 1e-4


def _given_whole(rank: int) -> float:
    """Weights as DTensors on the whole mesh, and FSDP2 over one rank: all of a rank's heads."""
    layout = built("tokens: ring=2; heads: tp=2")
    torch.manual_seed(7)
    model, x = attending(layout), torch.ones(1, 4, WIDTH)
    want = model(x)
    state = model.state_dict()
    for name, t in state.items():
        if isinstance(t, DTensor) and t.placements[0].is_shard():
            state[name] = layout.distribute(t.full_tensor(), {"heads": 0})
    model.load_state_dict(state, assign=True)
    gap = (model(x) - want).abs().max().item()
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("world", "one"))["one"]
    single = attending(Layout.single())
    keys = single.keys_values(x)[0]
    fully_shard(single, mesh=alone)
    return max(gap, (single.keys_values(x)[0] - keys).abs().max().item())


def test_weights_that_lie_whole_are_taken_however_they_are_placed(pool):
    assert max(pool.run(_given_whole)) < 1e-6


def _two_on_one_mesh(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    declared = Layout.parse("batch: dp=1; tokens: ring=2")
    sizes = []
    for other in ("cp", "tp", "cp"):
        layout = declared.bind(mesh["dp", other], rename={"ring": other}, timeout=30)
        model = data_parallel(attending(layout), layout)
        sizes.append(next(model.parameters()).device_mesh.size())
    return sizes


def test_layouts_of_two_data_dims_each_share_a_mesh(pool):
    assert pool.run(_two_on_one_mesh) == [[2, 2, 2]] * 4


# -- norms over meshes of more dims ---------------------------------------------------------------


def _clipped_beside_tp(rank: int, names: tuple[str, str]) -> float:
    """How far the norm is from one device's: weights split over tp, gradients summed over cp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    layout = Layout.parse("tokens: ring=2").bind(mesh["cp"], {"ring": "cp"}, timeout=30)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8))

    whole, model = made(), made()
    x = torch.randn(4, 8)
    (whole(x).square().sum() * 10).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    data_parallel(model, layout, "fsdp")
    (model(x.chunk(2)[layout.coords["ring"]]).square().sum() * 10).backward()
    return abs(clip_grad_norm_(model, 1.0, layout) / wanted - 1).item()


@pytest.mark.parametrize("names", [("tp", "cp"), ("cp", "tp")], ids="-".join)
def test_norms_are_right_whichever_dim_of_the_mesh_comes_first(pool, names):
    assert max(pool.run(_clipped_beside_tp, names)) < 1e-5


def _clipped_stages(rank: int) -> tuple[str, float, float]:
    """What is said without `stages`; how far norm and gradients are from one device's with them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    layout = Layout.parse("tokens: ring=2").bind(mesh["cp"], {"ring": "cp"}, timeout=30)
    torch.manual_seed(0)
    whole = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    stage = nn.Linear(4, 4)
    stage.load_state_dict(whole[mesh["pp"].get_local_rank()].state_dict())
    for i, p in enumerate(whole.parameters()):
        p.grad = torch.full_like(p, i + 1.0)
    for p, q in zip(stage.parameters(), whole[mesh["pp"].get_local_rank()].parameters()):
        p.grad = q.grad.clone()
    with pytest.raises(UnsupportedError) as refused:
        clip_grad_norm_(stage, 1.0, layout)
    found = clip_grad_norm_(stage, 1.0, layout, stages=mesh["pp"])
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    pairs = zip(stage.parameters(), whole[mesh["pp"].get_local_rank()].parameters())
    gap = max((p.grad - q.grad).abs().max().item() for p, q in pairs)
    return str(refused.value), abs(found - wanted).item(), gap


def test_norms_over_pipeline_stages_refused_or_of_all_of_them(pool):
    for message, of_norm, of_gradients in pool.run(_clipped_stages):
        assert "stages=mesh['pp']" in message
        assert max(of_norm, of_gradients) < 1e-5


def _penalized(rank: int, way: str) -> tuple[float, str]:
    """How far gradients with a penalty are from one device's; what a penalty of all weights says.

    The second is made after the model was called, when FSDP2 still has its root's weights whole.
    """
    layout, single = built(RING), Layout.single()
    ids = torch.arange(16)[None] * 7 % 16
    whole, mine = Text(single), Text(layout)
    penalty = sum(p.square().sum() for p in whole.parameters())
    (whole(ids).square().sum() + penalty).backward()
    trained = mine if way == "sync" else data_parallel(mine, layout, way)
    penalty = layout.once(sum(p.square().sum() for p in mine.parameters()))
    (trained(layout.shard(ids, {"tokens": 1})).square().sum() + penalty).backward()
    if way == "sync":
        layout.sync_gradients(mine)
    gap = 0.0
    for p, q in zip(mine.parameters(), whole.parameters()):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        gap = max(gap, ((grad - q.grad).abs().max() / q.grad.abs().max()).item())
    trained(layout.shard(ids, {"tokens": 1}))
    squares = [p.square().sum() for p in mine.parameters()]
    numbers = [x.full_tensor() if isinstance(x, DTensor) else x for x in squares]
    try:
        layout.once(sum(numbers))
    except UnsupportedError as refused:
        return gap, str(refused)
    return gap, ""


@pytest.mark.parametrize("way", ["sync", "ddp", "fsdp"])
def test_a_penalty_of_weights_counts_once_whole_or_sharded(pool, way):
    for gap, message in pool.run(_penalized, way):
        assert gap < 1e-5
        assert ("before the model is called" in message) == (way == "fsdp"), message


def _skips(rank: int, way: str) -> str:
    """Rank 1 skips its optimizer's first step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CHECK", "step")
        layout = built(RING)
        model = data_parallel(attending(layout), layout, way)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            for step in range(3):
                model(torch.ones(1, 2, WIDTH)).square().sum().backward()
                if step or layout.rank != 1:
                    optimizer.step()
                optimizer.zero_grad()
        except ShapeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_checked_steps_name_weights_that_differ(pool, way):
    for message in pool.run(_skips, way):
        assert ("skipped its optimizer's step" in message) == (way == "ddp"), message

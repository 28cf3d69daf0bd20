"""torch's own tools around weft: each gives the numbers of one process, on real gloo processes."""

import tempfile
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import weft
from weft.layout import Layout
from weft.torch_interop.checkpointing import keeping_attention

# fp64; gradients of parameters are sums over 2 x 24 tokens of numbers of order one.
TOLERANCE = 1e-11
TILE = "tokens: tile=2x2"


class Attention(nn.Module):
    """Causal attention that knows nothing of weft; as many heads as its projections give it."""

    def __init__(self, embed=32, head_dim=8):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.out = (nn.Linear(embed, embed, bias=False) for _ in range(4))

    def forward(self, x):
        heads = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self.inputs())
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))

    def inputs(self):
        return self.q, self.k, self.v


class Block(nn.Module):
    def __init__(self, embed=32):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(embed), Attention(embed)
        self.up, self.down = nn.Linear(embed, 64), nn.Linear(64, embed)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


def build(blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


def draw():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 2, 24, 32, dtype=torch.float64, generator=generator).unbind(0)


def one_process():
    """Output, input gradient, and parameter gradients of the loss (out * grad_output).sum()."""
    model, (x, grad_output) = build(), draw()
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(grad_output)
    return out.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}


DIMS = {"batch": 0, "tokens": 1}


def setup(line, rename=None):
    layout = Layout.parse(line)
    if rename is None:
        layout = layout.build("cpu", timeout=30)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(rename.values()))
        layout = layout.bind(mesh, rename, timeout=30)
    x, grad_output = (layout.shard(t, DIMS).clone() for t in draw())
    return layout, x.requires_grad_(), grad_output


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def errors(layout, out, x, model):
    want_out, want_x, want = one_process()
    grads = {n: off(whole(p.grad), want[n]) for n, p in model.named_parameters()}
    found = [off(layout.gather(out, DIMS), want_out), off(layout.gather(x.grad, DIMS), want_x)]
    assert grads.keys() == want.keys()
    return max(*found, *grads.values())


def assert_exact(pool, fn, *args):
    for rank, error in enumerate(pool.run(fn, *args, timeout=150)):
        assert error < TOLERANCE, f"rank {rank}"


def _dtensors(rank, line):
    layout, _, _ = setup(line)
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, h, 23, 8) for h in (4, 2, 2, 4)]
    whole = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    want = [t.clone().requires_grad_() for t in whole[:3]]
    options = {"is_causal": True, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*want, **options)
    expected.backward(whole[3])
    dims = {"batch": 0, "heads": 1, "tokens": 2}
    q, k, v, grad_output = (layout.distribute(t, dims) for t in whole)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with weft.sdpa(layout, "tokens"):
        out = F.scaled_dot_product_attention(*leaves, **options)
    assert out.placements == q.placements
    out.backward(grad_output)
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(leaves, want))]
    return max(off(layout.gather(a.to_local(), dims), b.detach()) for a, b in pairs)


@pytest.mark.parametrize("line", [TILE, "heads: tp=2; tokens(zigzag): ring=2"])
def test_dtensors_under_sdpa_are_one_process(pool, line):
    assert_exact(pool, _dtensors, line)


# -- FSDP2 and tensor parallelism on the same mesh ------------------------------------------------


def _fsdp(rank, line, dims):
    layout, x, grad_output = setup(line)
    model = build()
    mesh = layout.device_mesh[dims]
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (*model, model):
        # The loss counts every token once, over all ranks: gradients are sums, not means.
        module.set_gradient_divide_factor(1.0)
    with weft.sdpa(layout, "tokens"):
        out = model(x)
    out.backward(grad_output)
    return errors(layout, out, x, model)


@pytest.mark.parametrize(
    ("line", "dims"),
    [
        ("batch: dp=2; tokens: ring=2", ("dp", "ring")),
        (TILE, ("row", "col")),
        ("tokens(zigzag): ring=4", "ring"),
    ],
)
def test_fully_shard_over_the_layouts_mesh_is_one_process(pool, line, dims):
    assert_exact(pool, _fsdp, line, dims)


def _tensor_parallel(rank):
    layout, x, grad_output = setup("heads: tp=2; tokens(zigzag): ring=2")
    model = build()
    plan = {f"*.attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"*.attention.out": RowwiseParallel()}
    plan |= {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(model, layout.device_mesh["tp"], plan)
    for block in model:
        fully_shard(block, mesh=layout.device_mesh["ring"])
        block.set_gradient_divide_factor(1.0)
    with weft.sdpa(layout, "tokens"):
        out = model(x)
    out.backward(grad_output)
    return errors(layout, out, x, model)


def test_tensor_parallel_heads_and_fsdp_beside_ring_are_one_process(pool):
    assert_exact(pool, _tensor_parallel)


# -- torch.compile --------------------------------------------------------------------------------


class Woven(Block):
    """A block that calls weft itself."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def forward(self, x):
        inputs = self.attention.inputs()
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, 8)).transpose(1, 2) for p in inputs)
        out = weft.attention(q, k, v, self.layout, "tokens", weft.Causal(), length=24)
        x = x + self.attention.out(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def woven(layout):
    model = nn.Sequential(Woven(layout), Woven(layout)).double()
    model.load_state_dict(build().state_dict())
    return model


def _compiled(rank, line):
    layout, x, grad_output = setup(line)
    model = woven(layout)
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second call runs what the first one compiled
        model.zero_grad()
        x.grad = None
        out = model(x)
        out.backward(grad_output)
    layout.sync_gradients(model)
    return errors(layout, out, x, model)


@pytest.mark.parametrize(
    "line", [TILE, pytest.param("tokens: ulysses=2 x ring=2", marks=pytest.mark.sample)]
)
def test_a_compiled_block_is_one_process(pool, line):
    assert_exact(pool, _compiled, line)


def _compiled_region(rank, line):
    layout, x, grad_output = setup(line)
    model = build()
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        with weft.sdpa(layout, "tokens"):
            out = model(x)
        out.backward(grad_output)
    layout.sync_gradients(model)
    return errors(layout, out, x, model)


def test_compiled_blocks_are_caught(pool):
    assert_exact(pool, _compiled_region, TILE)


# -- activation checkpointing ---------------------------------------------------------------------


def _recomputed(rank, line, keep):
    layout, x, grad_output = setup(line)
    model, context = woven(layout), {"context_fn": keeping_attention} if keep else {}
    out = x
    with weft.traffic(layout) as forward:
        for block in model:
            out = checkpoint(block, out, use_reentrant=False, **context)
    with weft.traffic(layout) as backward:
        out.backward(grad_output)
    layout.sync_gradients(model)
    return errors(layout, out, x, model), forward.by_tensor(), backward.by_tensor()


@pytest.mark.parametrize("line", [TILE, "tokens: ulysses=2 x ring=2"])
def test_kept_attention_outputs_are_neither_computed_nor_moved_again(pool, line):
    kept, again = (pool.run(_recomputed, line, keep, timeout=150) for keep in (True, False))
    assert any(forward for _, forward, _ in kept)
    for (error, forward, backward), (error_again, _, backward_again) in zip(kept, again):
        assert max(error, error_again) < TOLERANCE
        # Without the policy, what the forward pass moved is moved once more.
        assert Counter(backward_again) == Counter(backward) + Counter(forward)


# -- distributed checkpoints ----------------------------------------------------------------------


def _save(rank, folder):
    layout, _, _ = setup("batch: dp=2; tokens: ring=2")
    activation = layout.distribute(draw()[0], DIMS)
    model = build()
    for block in model:
        fully_shard(block, mesh=layout.device_mesh["ring"])
    state = {"activation": activation, "model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return 0.0


def _load(rank, folder):
    layout, _, _ = setup(TILE)
    activation = layout.distribute(torch.zeros(2, 24, 32, dtype=torch.float64), DIMS)
    model = build()
    for p in model.parameters():
        nn.init.zeros_(p)
    for block in model:
        fully_shard(block, mesh=layout.device_mesh["row", "col"])
    state = {"activation": activation, "model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    want = build().state_dict()
    exact = all(torch.equal(whole(t), want[n]) for n, t in state["model"].items())
    local = torch.equal(activation.to_local(), layout.shard(draw()[0], DIMS))
    return 0.0 if exact and local else 1.0


def test_a_checkpoint_moves_between_layouts(pool):
    with tempfile.TemporaryDirectory() as folder:
        assert_exact(pool, _save, folder)
        assert_exact(pool, _load, folder)


# -- profiler and communication counts ------------------------------------------------------------


def _profiled(rank, line):
    layout, x, grad_output = setup(line)
    model = build(1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, weft.sdpa(layout, "tokens"):
        model(x).backward(grad_output)
        layout.sync_gradients(model)
    return {event.key: event.count for event in recorded.key_averages() if "weft" in event.key}


def test_the_profiler_names_operators_and_movements(pool):
    for rank, events in enumerate(pool.run(_profiled, TILE, timeout=60)):
        assert events["weft::attention"] == 1
        assert events["weft::attention_backward"] == 1
        assert events["weft/sum/gradients on row+col"] == 1
        named = [name for name in events if name.startswith("weft/")]
        # A tile has queries come along one mesh dim, keys and values along the other.
        for pass_ in ("forward", "backward"):
            mine = [name for name in named if name.startswith(f"weft/{pass_}/rank {rank}/")]
            for dim in ("row", "col"):
                begun = {n for n in mine if "/begin/" in n and n.endswith(f" on {dim}")}
                waited = {n.split("/wait/")[1] for n in mine if "/wait/" in n}
                assert begun
                assert {n.split("/begin/")[1] for n in begun} <= waited
            assert any("/compute/" in name for name in mine)
    for events in pool.run(_profiled, "tokens: ulysses=4", timeout=60):
        named = " ".join(events)
        assert "reshard/move/qkv on ulysses" in named
        assert "reshard/move/dqkv on ulysses" in named


def _world(rank):
    return dist.get_world_size(), dist.get_backend()


def test_all_of_this_ran_on_four_gloo_processes(pool):
    assert pool.run(_world) == [(4, "gloo")] * 4

"""Models that nobody prepared, on tensors that know that they are split: one device's numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import Field, Layout, ShapeError, UnsupportedError
from weft_axes.fields import run as running
from weft_integrations.chunked import on_chunks

LAYOUTS = (
    "tokens(zigzag): ring=2",
    "tokens(zigzag): tile=2x2",
    "tokens(striped): ring=2 x ulysses=2",
    "tokens: ulysses=4",
    "tokens(zigzag): gather=3",
)


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)

        def turned(t: Tensor) -> Tensor:
            one, two = t.chunk(2, -1)
            return t * cos + torch.cat([-two, one], -1) * sin

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.behind(x))


class Decoder(nn.Module):
    """A decoder of torch's own functions: rotary positions, shifted labels, a loss."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1], dtype=x.dtype)[:, None] / 10 ** torch.arange(4)
        angles = torch.cat([angles, angles], -1)
        for block in self.blocks:
            given = block, x, angles.cos(), angles.sin()
            x = checkpoint(*given, use_reentrant=False) if self.checkpoints else block(*given[1:])
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _parallelized(model: nn.Module, layout: Layout) -> nn.Module:
    return weft.parallelize(model, layout, dims={"tokens": 1})


def errors(model: nn.Module, line: str, run, make=_parallelized) -> tuple[float, float]:
    """The largest errors of results and of gradients of weights, on the last rank."""
    alone = copy.deepcopy(model)
    wanted = run(alone)
    wanted[0].backward()
    wanted = [t.detach() for t in wanted]

    def rank(layout: Layout) -> tuple[float, float]:
        split = make(copy.deepcopy(model), layout)
        found = run(split)
        assert not split._weft.ran_whole.calls
        found[0].backward()
        layout.sync_gradients(split)
        pairs = zip(split.parameters(), alone.parameters())
        grads = [(p.grad - q.grad).abs().max() for p, q in pairs if q.grad is not None]
        results = [(a.detach() - b).abs().max() for a, b in zip(found, wanted)]
        return float(max(results)), float(max(grads))

    return weft.on_threads(Layout.parse(line), rank)[-1]


@pytest.mark.parametrize("line", LAYOUTS)
def test_a_decoder_of_torch_alone_equals_one_device(line):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 29))
    found = errors(Decoder().double(), line, lambda m: (m(ids, ids), m(ids)))
    assert max(found) < 1e-12, found


class Stacks(nn.Module):
    """Torch's own encoder and decoder, padded on the right and causal."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
        encoder = nn.TransformerEncoderLayer(16, 4, 32, norm_first=True, **options)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, **options)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(n, dtype=x.dtype)
        padded = torch.arange(n) >= torch.tensor([[n], [n - 4]])
        hidden = torch.ones(n, n, dtype=torch.bool).triu(3)
        states = self.encoder(x, hidden, padded)
        return self.decoder(x, states, causal, tgt_is_causal=True, memory_key_padding_mask=padded)


@pytest.mark.parametrize("line", LAYOUTS[:2])
def test_torchs_own_layers_equal_one_device(line):
    torch.manual_seed(0)
    x = torch.randn(2, 23, 16, dtype=torch.float64)

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(x)
        return out.square().mean(), out.full_tensor() if isinstance(out, weft.Field) else out

    assert max(errors(Stacks(), line, run)) < 1e-12


def _transformers(name: str) -> nn.Module:
    import transformers as t

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False}
    sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    experts["experts_implementation"] = "eager"  # the others take no fp64
    linear = {f"linear_{x}_head_dim": 8 for x in ("key", "value")} | {"head_dim": 8}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"layer_types": ["linear_attention", "full_attention"]}
    models = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**sizes, sliding_window=5)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=8)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**sizes)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**sizes)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**sizes | experts)),
        "qwen3_next": lambda: t.Qwen3NextForCausalLM(t.Qwen3NextConfig(**sizes | experts | linear)),
    }
    return models[name]().double().eval()


@pytest.mark.few(2)
@pytest.mark.parametrize("line", LAYOUTS[:2])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "bert"])
def test_a_model_of_transformers_equals_one_device(name, line):
    """Its loss is computed in fp32, as on one device."""
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 29))

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(input_ids=ids, labels=ids)
        return out.loss, out.logits

    result, gradients = errors(_transformers(name), line, run)
    assert result < 1e-6
    assert gradients < 1e-12


def _full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _trains(rank: int, way: str, reshards: bool, checkpoints: bool) -> float:
    """The largest error of losses, norms, gradients and weights in three clipped steps."""
    torch.manual_seed(0)
    alone = Decoder(checkpoints).double()
    split, replicas = copy.deepcopy(alone), 1
    if way == "weft":
        layout = Layout.parse("tokens(zigzag): tile=2x2").build("cpu", timeout=60)
        weft.parallelize(split, layout, dims={"tokens": 1})
        weft.data_parallel(split, layout, reshard_after_forward=reshards)
    else:
        replicas, mesh = 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))
        layout = Layout.parse("tokens(zigzag): ring=2").bind(mesh["ring"], timeout=60)
        weft.parallelize(split, layout, dims={"tokens": 1})
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        for unit in (*split.blocks, split):
            fully_shard(unit, mesh=world, reshard_after_forward=reshards)
    models = split, alone
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in models]
    ids = torch.randint(0, 50, (2, 29))
    worst = []
    for _ in range(3):
        mine = ids if replicas == 1 else ids[rank // 2 : rank // 2 + 1]
        loss = split(mine, mine)
        loss.backward()
        right = alone(ids, ids)
        right.backward()
        if replicas == 1:
            worst.append(loss - right)
        pairs = list(zip(split.parameters(), alone.parameters(), strict=True))
        worst += [(_full(p.grad) - q.grad).abs().max() for p, q in pairs]
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.25) for m in models]
        assert norms[1] > 0.25
        worst.append(_full(norms[0]) - norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst += [(_full(p) - q).abs().max() for p, q in pairs]
    return max(abs(float(e)) for e in worst)


@pytest.mark.parametrize(
    ("way", "reshards", "checkpoints"),
    [("weft", True, True), ("weft", False, False), ("torch", True, False), ("torch", False, True)],
)
def test_units_of_fsdp2_in_a_model_train_as_one_device(pool, way, reshards, checkpoints):
    """Torch's own over ranks of fields and data: a mean over data, sums over fields."""
    assert max(pool.run(_trains, way, reshards, checkpoints, timeout=200)) < 1e-12


def _averages(rank: int, way: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))
    layout = Layout.parse("tokens: ring=2").bind(mesh["ring"], timeout=60)
    model = weft.parallelize(Decoder(), layout, dims={"tokens": 1})
    if way == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:  # over other ranks than those of a field
        fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(UnsupportedError) as refusal:
        model(torch.zeros(1, 8, dtype=torch.long))
    return str(refusal.value)


@pytest.mark.parametrize("way", ["DDP", "fully_shard"])
def test_reductions_that_make_other_gradients_are_refused(pool, way):
    assert all("has a share of the gradients" in m for m in pool.run(_averages, way))


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x, dim=1).abs()


def test_a_function_without_a_rule_runs_whole_and_is_named():
    x = torch.randn(2, 9, 4, dtype=torch.float64)

    def rank(layout: Layout) -> tuple[Tensor, Tensor, dict[str, int], str]:
        model = weft.parallelize(Spectrum(), layout, dims={"tokens": 1})
        whole = x.clone().requires_grad_()
        y = model(whole)
        y.square().sum().backward()
        refusing = weft.parallelize(Spectrum(), layout, dims={"tokens": 1}, fallback="refuse")
        with pytest.raises(UnsupportedError, match="rfft has no rule") as refusal:
            refusing(x)
        return y.detach(), whole.grad, model._weft.ran_whole.calls, str(refusal.value)

    right = x.clone().requires_grad_()
    wanted = Spectrum()(right)
    wanted.square().sum().backward()
    with pytest.warns(UserWarning, match="runs whole on every rank"):
        ranks = weft.on_threads(Layout.parse("tokens(zigzag): ring=3"), rank)
    for y, grad, calls, _ in ranks:
        torch.testing.assert_close(y, wanted.detach())
        torch.testing.assert_close(grad, right.grad)
        assert list(calls.values()) == [1]


class Writes(nn.Module):
    """Fields written into plain tensors and at positions, and a penalty of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * self.scale
        table = torch.zeros(9, 4, dtype=x.dtype)
        table[:, :2] = y[0, :, 2:]
        table[2:4].copy_(y[1, 5:7])
        for i in range(3, 9):  # each of the sums before it: one rank has the position
            y[:, i] = y[:, i].clone() + (y[:, :i].clone() * y[:, i : i + 1].clone()).sum(1) / 9
        return y * table, table.square(), self.scale.square().sum()


def test_fields_are_written_into_plain_tensors_whole():
    x = torch.randn(2, 9, 4, dtype=torch.float64)

    def run(model: nn.Module) -> list[Tensor]:
        own = x.clone().requires_grad_()
        y, table, penalty = model(own)
        (y.square().sum() + table.sum() + penalty).backward()
        return [y.detach(), table.detach(), own.grad]

    right = Writes()
    wanted = [*run(right), right.scale.grad]

    def rank(layout: Layout) -> list[Tensor]:
        split = weft.parallelize(Writes(), layout, dims={"tokens": 1})
        found = run(split)
        layout.sync_gradients(split)
        return [*found, split.scale.grad]

    for found in weft.on_threads(Layout.parse("tokens(zigzag): ring=3"), rank):
        torch.testing.assert_close(found, wanted)


class Diagonal(nn.Module):
    """Writes into a view that a function without a rule makes: of what ran whole it is none."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        (y[:, 1].hsplit(2)[0] if x.shape[0] == 1 else y.diagonal(0, 1, 2)).add_(1)
        return y


@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.parametrize("batch", [1, 2])
def test_writes_into_a_view_of_what_ran_whole_are_refused(batch):
    def rank(layout: Layout) -> None:
        split = weft.parallelize(Diagonal(), layout, dims={"tokens": 1})
        with pytest.raises(UnsupportedError, match="which is a copy"):
            split(torch.ones(batch, 4, 4))

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


class WholeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return (x.full_tensor() if isinstance(x, Field) else x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(2, 9, 4)


@pytest.mark.parametrize("meets", [False, True])
def test_a_function_of_ones_own_that_gives_a_plain_tensor_is_refused(meets):
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            total = WholeSum.apply(x * self.w)
            return x * total if meets else total

    def rank(layout: Layout) -> None:
        weft.parallelize(Sums(), layout, dims={"tokens": 1})(torch.ones(2, 9, 4))

    with pytest.raises(UnsupportedError, match="whose gradient would be lost"):
        weft.on_threads(Layout.parse("tokens: ring=2"), rank)


@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.parametrize("kept", [False, True], ids=["a copy of what is gone", "of what is not"])
@pytest.mark.parametrize(
    "alias",
    [
        lambda x: x,
        lambda x: x.detach(),
        lambda x: x[:, :1],
        lambda x: x.detach()[:, 1],
        lambda x: x[:, :1][..., 0],
        lambda x: x.reshape(1, 6, 4)[:, 0].view(2, 2)[0],
    ],
)
def test_a_copy_may_be_written_once_what_it_was_copied_of_is_gone(kept, alias):
    class Shifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            held = alias(y) if kept else None
            y = torch.reshape(y, (1, 6, 4))[:, :, 1:]  # whole, as it cuts ranks' parts elsewhere
            y *= 3
            return y if held is None else y.sum() + held.sum()

    x = torch.arange(24.0).view(1, 4, 6)
    split = {"dims": {"tokens": 1}}

    def rank(layout: Layout) -> Tensor:
        return weft.parallelize(Shifts(), layout, **split)(x)

    if kept:
        with pytest.raises(UnsupportedError, match="which is a copy"):
            weft.on_threads(Layout.parse("tokens: ring=3"), rank)
    else:
        for found in weft.on_threads(Layout.parse("tokens: ring=3"), rank):
            torch.testing.assert_close(found, Shifts()(x), rtol=0, atol=0)


LOSSES = (
    lambda x, whole: (x * whole.mean()).sum(),
    lambda x, whole: x.sum() + whole.square().sum(),
    lambda x, whole: (x - whole * 2).square().mean() + whole.sum() * 0.1,
    lambda x, whole: (x[:, torch.tensor([1, 4])] * whole[:, 2:3]).sum(),
)


@pytest.mark.parametrize("case", range(len(LOSSES)))
def test_a_loss_of_a_field_and_its_whole_tensor_is_one_devices(case):
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    right = x.clone().requires_grad_()
    LOSSES[case](right * 3, right * 3).backward()

    def rank(layout: Layout) -> Tensor:
        own = x.clone().requires_grad_()
        field = Field.distribute(own, layout, {"tokens": 1}) * 3
        LOSSES[case](field, field.full_tensor()).backward()
        return own.grad

    for grad in weft.on_threads(Layout.parse("tokens(zigzag): ring=3"), rank):
        torch.testing.assert_close(grad, right.grad)


class Noisy(nn.Module):
    """Dropout of split and of whole tensors, in place, of channels, and other random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(x, 0.3, self.training) * 2 + torch.randn_like(x)
        y = F.dropout(y.transpose(1, 2), 0.2, self.training, inplace=True).transpose(1, 2)
        y = F.dropout1d(y, 0.5, self.training) + F.dropout(x.mean(1, keepdim=True), 0.5)
        return y + torch.bernoulli(torch.sigmoid(x)) + F.alpha_dropout(x, 0.4, self.training)


class LowRank(nn.Module):
    """Draws a projection."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.svd_lowrank(x, 2)[1]


def _draws(rank: int, line: str) -> tuple[float, float, str]:
    x = torch.randn(2, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layout = Layout.parse(line).build("cpu", timeout=60)
    results = []
    for module in (Noisy(), weft.parallelize(Noisy(), layout, dims={"tokens": 1})):
        torch.manual_seed(7)
        own = x.clone().requires_grad_()
        y = checkpoint(module, own, use_reentrant=False)
        y.square().sum().backward()
        results.append((y.detach(), own.grad))
    torch.manual_seed(rank)
    field = Field.distribute(x, layout, {"tokens": 1})
    with pytest.raises(ShapeError) as refusal:  # whole, and nothing is exchanged afterwards
        F.dropout(field.mean(1), 0.5)
    unseen = weft.parallelize(LowRank(), layout, dims={"tokens": 1})
    unlisted = mock.patch.object(running, "_RANDOM", ())
    with unlisted, pytest.raises(UnsupportedError, match="draws random numbers"):
        unseen(x)
    error, gradient = ((a - b).abs().max() for a, b in zip(*results))
    return float(error), float(gradient), str(refusal.value)


@pytest.mark.parametrize("line", ["tokens(zigzag): tile=2x2", "tokens: ring=4"])
def test_dropout_draws_what_one_device_draws(pool, line):
    for error, gradient, refusal in pool.run(_draws, line):
        assert max(error, gradient) < 1e-13
        assert "the generator of torch's dropout: give ranks one seed" in refusal


def test_slices_joins_rolls_and_flips_move_nothing():
    x = torch.randn(2, 13, 3, dtype=torch.float64)

    def rank(layout: Layout) -> int:
        field = Field.distribute(x, layout, {"tokens": 1})
        with weft.traffic(layout) as moved:
            y = torch.cat([field[:, 3:].flip(1), F.pad(field[:, ::2], (0, 0, 2, 1))], 1).roll(4, 1)
        assert not moved.received
        right = torch.cat([x[:, 3:].flip(1), F.pad(x[:, ::2], (0, 0, 2, 1))], 1).roll(4, 1)
        torch.testing.assert_close(y.full_tensor(), right)
        return len(y.positions("tokens"))

    found = weft.on_threads(Layout.parse("tokens(zigzag): ring=3"), rank)
    assert sum(found) == 10 + 7 + 3


class Norm(nn.Module):
    """Several functions of rows."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(d, dtype=torch.float64)), 1e-6

    def scaled(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        y = self.scaled(x.double()).type_as(x)
        return (1.0 + self.weight) * y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = Norm(8), nn.SiLU()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x):
        x = self.norm(x)
        return self.down(self.act(self.gate(x)) * self.up(x))


def mixed(x: Tensor) -> Tensor:
    return x + x.cumsum(1)


class Mixing(nn.Linear):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        nn.init.constant_(self.weight, 0.1)
        nn.init.constant_(self.bias, 0.1)

    def forward(self, x):
        return mixed(super().forward(x))


class Around(nn.Module):
    """No island, as it asks for a size."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if x.shape[1] else x


class OfAll(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


class OfTheFirst(nn.Module):
    def forward(self, x):
        return x * x[:, :1]


class OfSizes(nn.Module):
    def forward(self, x):
        return x / x.shape[1]


class Scaled(nn.Module):
    def forward(self, x):
        return nn.functional.linear(x, self.weight) * 2

    @property
    def weight(self):
        return torch.eye(12, dtype=torch.float64)


def _hooked(m: Gated) -> None:
    m.up.register_forward_hook(lambda _, args, y: mixed(y))


def _hooked_before(m: Gated) -> None:
    m.up.register_forward_pre_hook(lambda _, args: (mixed(args[0]),))


def _put(name: str, make: Callable[[], object]) -> Callable[[Gated], None]:
    owner, _, attribute = name.rpartition(".")
    return lambda m: setattr(m.get_submodule(owner), attribute, make())


#: A change of an island, before or after it is installed, and whether it is one still.
PLANTED: dict[str, tuple[Callable[[Gated], object], bool]] = {
    "nothing": (lambda m: None, True),
    "its own hook": (lambda m: m.register_forward_hook(lambda _, args, y: mixed(y)), True),
    "a number": (_put("norm.eps", lambda: 0.5), True),
    "a hook": (_hooked, False),
    "a hook before": (_hooked_before, False),
    "a forward": (
        _put("up.forward", lambda: lambda x: mixed(F.linear(x, torch.ones(12, 8).double()))),
        False,
    ),
    "a method": (_put("norm.scaled", lambda: mixed), False),
    "a module of a subclass": (_put("up", lambda: Mixing(8, 12)), False),
    "a mean of all": (_put("act", OfAll), False),
    "the first position": (_put("act", OfTheFirst), False),
    "a size": (_put("act", OfSizes), False),
    "a property": (_put("act", Scaled), False),
    "a softmax over positions": (_put("act", lambda: nn.Softmax(1)), False),
    "a function in its place": (lambda m: vars(m).update(act=mixed), False),
    "a norm over positions": (_put("act", lambda: nn.LayerNorm((11, 12))), False),
    "a number that is a tensor": (
        _put("norm.eps", lambda: torch.arange(11.0).view(1, 11, 1).double()),
        False,
    ),
    "a parametrization": (
        lambda m: nn.utils.parametrize.register_parametrization(m.up, "weight", nn.Tanh()),
        False,
    ),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", PLANTED)
def test_islands_are_one_step_and_mixers_in_them_are_noticed(what, late):
    plant, is_island = PLANTED[what]
    torch.manual_seed(0)
    alone = Gated().double()
    x = torch.randn(2, 11, 8, dtype=torch.float64)

    def changed(model: nn.Module) -> nn.Module:
        plant(model)
        return model.double()

    def rank(layout: Layout) -> tuple[Tensor, list[Tensor]]:
        model = copy.deepcopy(alone)
        model = model if late else changed(model)
        split = weft.parallelize(Around(model), layout, dims={"tokens": 1})
        model = changed(model) if late else model
        given = x.clone().requires_grad_()
        y = split(given)
        y.square().sum().backward()
        layout.sync_gradients(split)
        regions = vars(layout)["_regions"].values()
        on_fields = any(key[0] is F.linear for region in regions for key in region.recipes)
        assert on_fields != is_island
        return y.detach(), [given.grad, *(p.grad for p in split.parameters())]

    whole = changed(copy.deepcopy(alone))
    leaf = x.clone().requires_grad_()
    wanted = whole(leaf)
    wanted.square().sum().backward()
    found, gradients = weft.on_threads(Layout.parse("tokens(zigzag): ring=2"), rank)[1]
    torch.testing.assert_close(found, wanted.detach())
    for one, other in zip(gradients, [leaf.grad, *(p.grad for p in whole.parameters())]):
        torch.testing.assert_close(one, other)


def _itself(model: nn.Module, **options) -> nn.Module:
    model.compile(**options)
    return model


def _forward(model: nn.Module, **options) -> nn.Module:
    model.forward = torch.compile(model.forward, **options)
    return model


def _checkpointed(model: nn.Module, **options) -> nn.Module:
    model.train().gradient_checkpointing_enable()
    return torch.compile(model, **options)


def _within(end: str, compiled: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def change(model: nn.Module, **options) -> nn.Module:
        for path in [path for path, _ in model.named_modules() if path.endswith(end)]:
            model.set_submodule(path, compiled(model.get_submodule(path), **options))
        return model

    return change


#: Name -> a model, what compiles it, whether before it is parallelized, and least graphs of a rank.
COMPILED = {
    "around": ("llama", torch.compile, False, 2),
    "around, in checkpoints": ("llama", _checkpointed, False, 2),
    "itself": ("bert", _itself, False, 2),
    "itself, before": ("qwen3", _itself, True, 2),
    "its forward": ("llama", _forward, False, 2),
    "layers": ("llama", _within(".1", _itself), False, 2),
    "layers, before": ("mixtral", _within(".1", _itself), True, 1),
    "layers in others": ("bert", _within(".1", torch.compile), False, 1),
    "layers in others, before": ("gpt2", _within(".1", torch.compile), True, 1),
    "around a hybrid": ("qwen3_next", torch.compile, False, 2),
    "around a module of one's own": ("own", torch.compile, False, 0),  # whose code proves nothing
    "layers of one's own": ("own", _within("blocks.1", _itself), True, 1),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("line", ["tokens(zigzag): ring=2", "tokens: ring=2 x ulysses=2"])
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_model_equals_one_device_and_says_what_is_in_graphs(name, line, caplog):
    kind, compiled, before, wanted = COMPILED[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Decoder().double() if kind == "own" else _transformers(kind)
    ids, found = torch.randint(0, 50, (2, 29)), Counter()

    def compiles(split: nn.Module, now: bool) -> nn.Module:
        rank = threading.get_ident()

        def counted(graph: torch.fx.GraphModule, _: list) -> Callable:
            found[rank] += 1
            return make_boxed_func(graph)

        return compiled(split, backend=aot_autograd(fw_compiler=counted)) if now else split

    def make(model: nn.Module, layout: Layout) -> nn.Module:
        options = {"dims": {"tokens": 1}} if kind == "own" else {}
        return weft.parallelize(compiles(model, before), layout, **options)

    def run(model: nn.Module) -> tuple[Tensor, ...]:
        call = compiles(model, not before and hasattr(model, "_weft"))
        out = call(ids, labels=ids)
        if kind == "own":
            return (out,)
        return out.loss, getattr(out.logits, "full_tensor", lambda: out.logits)()

    result, gradients = errors(model, line, run, make)
    assert result < 1e-6  # losses of transformers are of fp32
    assert gradients < (1e-7 if kind == "qwen3_next" else 1e-12)
    assert min(found.values(), default=0) >= 2 * wanted  # forward and backward
    assert sum("graphs of torch.compile break" in r.message for r in caplog.records) == 1


#: Name -> what compiles a parallelized model as one graph, and what is said; None: it is one graph.
WHOLE = {
    "around": (torch.compile, "ranks compare the calls of a model .* without fullgraph"),
    "itself": (_itself, "ranks compare the calls of a model .* without fullgraph"),
    "a layer": (_within("layers.1", _itself), r"model\.layers\.1 is compiled with fullgraph=True"),
    "an MLP": (_within("mlp", _itself), None),
    "an MLP in another": (_within("layers.1.mlp", torch.compile), r"layers\.1\.mlp is compiled"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_fullgraph_is_for_islands_alone(name):
    compiled, said = WHOLE[name]
    ids, kept = torch.arange(14)[None], []
    alone = _transformers("llama")
    model = weft.parallelize(copy.deepcopy(alone), Layout.single())
    call = compiled(model, backend=lambda graph, _: kept.append(0) or graph, fullgraph=True)
    with pytest.raises(UnsupportedError, match=said) if said else contextlib.nullcontext():
        torch.testing.assert_close(call(input_ids=ids).logits, alone(input_ids=ids).logits)
    assert bool(kept) == (said is None)


def test_restored_layers_are_compiled_as_before():
    model = _transformers("llama")
    layer = _itself(model.model.layers[0], backend="eager")
    was = layer._compiled_call_impl
    weft.parallelize(model, Layout.single())(input_ids=torch.arange(14)[None])
    assert layer._compiled_call_impl is not was
    assert weft.restore(model).model.layers[0]._compiled_call_impl is was
    assert not [name for name in vars(layer.mlp) if "weft" in name]


def test_sizes_that_are_tensors_run_whole_or_are_refused_by_name():
    def rank(layout: Layout) -> None:
        x = Field.distribute(torch.ones(1, 6, 4), layout, {"tokens": 1})
        n = (x[0, :, 0] > 0).sum()
        for name, run in {
            "a view": lambda: x.view(1, n, 4),
            "new_zeros": lambda: x.new_zeros((n, 4)),
        }.items():
            with pytest.raises(UnsupportedError, match=f"{name} of sizes that are tensors"):
                run()

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


#: Name -> a function of x (1, 12, 3) fp32, split in zigzag order over two ranks, and the bytes that
#: rank 0, which has positions 0 1 2 9 10 11, receives in its forward pass.
TRAFFIC: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a shift": (lambda x: x[:, 1:] - x[:, :-1], 4 * 3),
    "arithmetic": (lambda x: x * x + 1, 0),
    "features": (lambda x: x.softmax(-1) @ torch.ones(3, 3), 0),
    "a whole tensor": (lambda x: x.full_tensor(), 4 * 3 * 6),
    "windows": (lambda x: F.max_pool1d(x.mT, 1), 4 * 3 * 3),
    "one position, of another rank": (lambda x: x[:, 4], 4 * 3),
    "one position of its own": (lambda x: x[:, 0], 0),
    "a sum": (lambda x: x.sum(1), 4 * 3),
    "all keys": (lambda x: x @ x.mT, 4 * 3 * 6),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_are_those_counted_by_hand(name):
    run, wanted = TRAFFIC[name]

    def rank(layout: Layout) -> int:
        x = Field.distribute(torch.randn(1, 12, 3), layout, {"tokens": 1})
        with weft.traffic(layout) as moved:
            run(x)
        return sum(moved.received.values())

    assert weft.on_threads(Layout.parse("tokens(zigzag): gather=2"), rank)[0] == wanted


def test_a_backward_hook_in_a_model_of_transformers_is_refused_by_name():
    model = weft.parallelize(_transformers("llama"), Layout.single())
    model.model.layers[0].mlp.register_full_backward_hook(lambda *given: None)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp has a backward hook"):
        model(input_ids=torch.arange(14)[None])


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.w = nn.Linear(8, 8), nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, given: dict | None = None) -> Tensor:
        y = F.softmax(self.q(x) * self.w, 1).cumsum(1)
        return y if given is None else y * given["scale"]


def _flip(p: Tensor) -> None:
    p.data.copy_(p.data.flip(0).clone())


#: What rank 1 passes, or does to its model, of x.
OTHER: dict[str, Callable[[nn.Module, Tensor, bool], Tensor]] = {
    "rows in another order": lambda m, x, other: m(x.flip(0) if other else x),
    "tokens in another order": lambda m, x, other: m(x.flip(1) if other else x),
    "features in another order": lambda m, x, other: m(x.flip(2) if other else x),
    "rows of a weight in another order": lambda m, x, other: (other and _flip(m.q.weight), m(x))[1],
    "a tensor in a dict": lambda m, x, other: m(x, {"scale": torch.ones(8) + other}),
    "what a layer before made": lambda m, x, other: m(x.requires_grad_() * (1 + other)),
}


@pytest.mark.parametrize("name", OTHER)
def test_ranks_with_other_numbers_are_refused(name):
    model, x = Part(), torch.randn(4, 7, 8)

    def rank(layout: Layout) -> Tensor:
        split = weft.parallelize(copy.deepcopy(model), layout, dims={"tokens": 1})
        return OTHER[name](split, x.clone(), bool(layout.rank))

    with pytest.raises(ShapeError, match=r"same on every rank|differs between"):
        weft.on_threads(Layout.parse("tokens: ring=2"), rank)


LABELS = torch.arange(28).view(4, 7) % 8
#: A loss of an output (4, 7, 8), where rank 1 may have something else.
OTHER_LOSS: dict[str, Callable[[Any, bool], Any]] = {
    "labels": lambda y, other: F.cross_entropy(
        y.transpose(1, 2), LABELS.where(torch.tensor(not other), LABELS.flip(1))
    ),
    "one label": lambda y, other: F.cross_entropy(
        y.flatten(0, 1), (LABELS + other * F.one_hot(torch.tensor(5), 28).view(4, 7)).flatten()
    ),
    "weights of tokens": lambda y, other: (y * torch.linspace(0, 1 + other, 7)[:, None]).sum(),
    "a factor": lambda y, other: y.square().mean() * (1.1 if other else 1.0),
    "a part": lambda y, other: y.mean() * y.detach().mean((0, 1))[4 * other : 4 * other + 4].sum(),
}


@pytest.mark.parametrize("output", ["whole", "field"])
@pytest.mark.parametrize("name", OTHER_LOSS)
def test_ranks_with_other_losses_are_refused_by_the_end_of_backward(name, output):
    model, x = Part(), torch.randn(4, 7, 8)
    options: Any = {"dims": {"tokens": 1}, "output": output}

    def rank(layout: Layout, differs: bool) -> None:
        split = weft.parallelize(copy.deepcopy(model), layout, **options)
        OTHER_LOSS[name](split(x), differs and layout.rank == 1).backward()
        return split.w.grad

    weft.on_threads(Layout.parse("tokens: ring=2"), lambda layout: rank(layout, False))
    with pytest.raises(ShapeError, match=r"same on every rank|differ between"):
        weft.on_threads(Layout.parse("tokens: ring=2"), lambda layout: rank(layout, True))


#: What puts a model on a layout, and calls it, so that some gradients would be off by the ranks.
TWO_SUMS: dict[str, tuple[type[Exception], str, Callable[[Layout, Tensor], Any]]] = {
    "a part first": (
        weft.DeclarationError,
        "Linear, a part of Sequential, is parallelized already",
        lambda layout, x: _dims(nn.Sequential(_dims(nn.Linear(8, 8), layout)), layout),
    ),
    "a part later": (
        UnsupportedError,
        "0 is parallelized within",
        lambda layout, x: _outer_first(layout)(x),
    ),
    "one sum of both": (
        UnsupportedError,
        "ModuleList holds parallelized models of transformers",
        lambda layout, x: layout.sync_gradients(
            nn.ModuleList([_dims(nn.Linear(8, 8), layout), _llama(layout)])
        ),
    ),
    "one loss of both": (
        UnsupportedError,
        "gets weft.Fields of a transformers model",
        lambda layout, x: (
            _llama(layout)(input_ids=LABELS).logits
            * _dims(nn.Linear(8, 50), layout, output="field")(x)
        ),
    ),
}


def _dims(model: nn.Module, layout: Layout, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    return weft.parallelize(model, layout, dims={"tokens": 1}, **options)


def _outer_first(layout: Layout) -> nn.Module:
    model = _dims(nn.Sequential(nn.Linear(8, 8)), layout)
    _dims(model[0], layout)
    return model


@functools.cache
def _tiny_llama() -> nn.Module:
    return _transformers("llama").float()


def _llama(layout: Layout) -> nn.Module:
    return weft.parallelize(copy.deepcopy(_tiny_llama()), layout)


@pytest.mark.parametrize("name", TWO_SUMS)
def test_gradients_that_are_averaged_and_added_up_do_not_mix(name):
    error, message, run = TWO_SUMS[name]
    _tiny_llama()  # before there are threads
    with pytest.raises(error, match=message):
        weft.on_threads(Layout.parse("tokens: ring=2"), run, torch.ones(4, 7, 8))


@pytest.mark.parametrize("output", ["whole", "field"])
@pytest.mark.parametrize("order", ["layer, model", "model, layer", "layer, layer", "model, model"])
def test_models_behind_one_another_have_one_devices_gradients(order, output):
    torch.manual_seed(0)
    sizes = (8, 32, 50) if order.startswith("layer") else (32, 50, 32)
    x = torch.randn(2, 7, sizes[0])
    kinds = [kind.strip() for kind in order.split(",")]
    whole = [
        copy.deepcopy(_tiny_llama()) if kind == "model" else nn.Linear(*sizes[i : i + 2])
        for i, kind in enumerate(kinds)
    ]
    if order == "model, model":
        whole.insert(1, nn.Linear(50, 32))

    def train(models: list[nn.Module]) -> None:
        y = x
        for m in models:
            y = m(y) if isinstance(m, nn.Linear) else m(inputs_embeds=y).logits
        y.square().mean().backward()

    def rank(layout: Layout) -> float:
        models = [copy.deepcopy(m) for m in whole]
        for m in models:
            options: Any = {"dims": {"tokens": 1}, "output": output}
            weft.parallelize(m, layout, **options if isinstance(m, nn.Linear) else {})
        train(models)
        for m in models:
            layout.sync_gradients(m)
        every = zip(nn.ModuleList(models).parameters(), nn.ModuleList(whole).parameters())
        every = [(p, q) for p, q in every if q.grad is not None]
        return max(((p.grad - q.grad).norm() / (q.grad.norm() + 1e-9)).item() for p, q in every)

    train(whole)
    for line in LAYOUTS[:2]:
        assert max(weft.on_threads(Layout.parse(line), rank)) < 1e-5


def test_a_layer_on_outputs_whose_gradients_are_not_summed_is_refused_in_the_next_step():
    def rank(layout: Layout, together: bool) -> None:
        model, head = _llama(layout), nn.Linear(50, 1)
        for p in head.parameters():
            nn.init.constant_(p, 0.1)
        optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            head(model(input_ids=LABELS).logits * torch.arange(7.0)[:, None]).sum().backward()
            layout.sync_gradients(nn.ModuleList([model, head] if together else [model]))
            optimizer.step()
            model.zero_grad()

    _tiny_llama()  # before there are threads
    weft.on_threads(Layout.parse("tokens: ring=2"), rank, True)
    with pytest.raises(ShapeError, match="weights of layers on outputs, which sync_gradients of"):
        weft.on_threads(Layout.parse("tokens: ring=2"), rank, False)


@pytest.mark.parametrize("output", ["whole", "field"])
def test_ranks_may_take_other_parts_of_the_same_numbers(output):
    """As trainers take the part of their process of what all gathered."""
    model, x = Part(), torch.randn(4, 7, 8)

    def rank(layout: Layout) -> Tensor:
        split = weft.parallelize(copy.deepcopy(model), layout, dims={"tokens": 1}, output=output)
        y, first = split(x), 4 * layout.rank
        gathered = (y.detach() * 0).sum((0, 1)) + 2
        (y.square().mean() * gathered[first : first + 4].sum()).backward()
        layout.sync_gradients(split)
        return split.w.grad

    one, two = weft.on_threads(Layout.parse("tokens: ring=2"), rank)
    assert torch.equal(one, two)


def test_gradients_that_hardly_differ_are_a_warning():
    model, x = Part(), torch.randn(4, 7, 8)

    def rank(layout: Layout) -> None:
        split = weft.parallelize(copy.deepcopy(model), layout, dims={"tokens": 1})
        (split(x) * (1 + 1e-4 * layout.rank)).sum().backward()

    with pytest.warns(UserWarning, match="a few labels that are not the same on every rank"):
        weft.on_threads(Layout.parse("tokens: ring=2"), rank)


def test_what_a_layer_before_made_is_compared_to_rounding():
    model, x = Part().double(), torch.randn(4, 7, 8, dtype=torch.float64)

    def rank(layout: Layout) -> Tensor:
        split = weft.parallelize(copy.deepcopy(model), layout, dims={"tokens": 1})
        return split(x.clone().requires_grad_() * (1 + 1e-15 * layout.rank)).detach()

    torch.testing.assert_close(weft.on_threads(Layout.parse("tokens: ring=2"), rank)[1], model(x))


@pytest.mark.parametrize("tokens", [1, 2])
def test_fewer_tokens_than_ranks(tokens):
    gaps = errors(Part().double(), "tokens: ring=3", lambda m: [m(_TINY[:, :tokens]).sin().sum()])
    assert max(gaps) < 1e-12


_TINY = torch.linspace(-2, 2, 48, dtype=torch.float64).view(2, 3, 8)

#: What becomes of a model, and what a refusal says.
REFUSED: dict[str, tuple[Callable, Callable, str]] = {
    "a backward hook": (
        lambda m: m.q.register_full_backward_hook(lambda *given: None),
        lambda m, x: m(x),
        "q has a backward hook",
    ),
    "a map around it": (lambda m: None, lambda m, x: torch.func.vmap(m)(x[None]), "torch.func"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_fields_do_not_reach_is_refused_by_name(name):
    change, call, words = REFUSED[name]

    def rank(layout: Layout) -> None:
        model = Part().double()
        change(model)
        call(weft.parallelize(model, layout, dims={"tokens": 1}), _TINY)

    with pytest.raises(UnsupportedError, match=words):
        weft.on_threads(Layout.parse("tokens: ring=2"), rank)


def test_a_function_in_the_place_of_torchs_is_refused(monkeypatch):
    """It would run around the one of torch, and around what that one is on a rank."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda x, *given: softmax(x / 2, *given))

    def rank(layout: Layout) -> None:
        weft.parallelize(Part().double(), layout, dims={"tokens": 1})(_TINY)

    with pytest.raises(UnsupportedError, match=r"softmax is <function .* not torch's"):
        weft.on_threads(Layout.parse("tokens: ring=2"), rank)


def test_engines_on_chunks_hold_no_field_when_they_are_done():
    """A closure that calls itself would, until Python looks for cycles: memory of every layer."""

    def rank(layout: Layout) -> bool:
        field = Field.distribute(torch.ones(1, 6, 2), layout, {"tokens": 1})
        held = weakref.ref(field)
        on_chunks(lambda x: x[0] * 2, "tokens", ([field],), {})
        del field
        return held() is None

    gc.disable()
    try:
        assert all(weft.on_threads(Layout.parse("tokens: ring=2"), rank))
    finally:
        gc.enable()

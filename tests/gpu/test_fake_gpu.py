"""What runs on a GPU, without one: every rank's part with fake CUDA tensors, nothing copied twice.

A second call copies nothing to the GPU and waits for no text of other ranks: indices, offsets and
tables are there with the plan. Kernels are torch's flash kernel by its shape function, and the
formula where there is a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from fake_gpu import OneOf, backward, both_passes, fake_gpu

import weft
import weft.pair
from weft import _uploads
from weft.errors import UnsupportedError
from weft.losses.tokens import sequence_sums
from weft.plan.call import Call
from weft.runtime.calls import BoundCall
from weft_axes.gradients import sync as sums
from weft_models.models import cache

N = 77
CASES = {
    "zigzag": ("tokens(zigzag): ring=4", weft.Causal(), None),
    "documents": ("tokens: tile=2x2", weft.Documents((20, 30, 27)) & weft.Causal(), None),
    "ulysses x ring": ("tokens(zigzag): ulysses=2 x ring=2", weft.Causal(), None),
    "heads": ("heads: head_parallel=2; tokens: ring=2", weft.Causal(), None),
    "context": ("tokens: ring=4", weft.FirstKeys(30), None),
    "key padding": ("tokens: ring=4", weft.KeyPadding((40, 77)), "math"),
    "window": ("tokens: ring=4", weft.Causal(window=9), "math"),
}


def attention(name: str) -> list[list[str]]:
    line, mask, kernel = CASES[name]
    second = []
    layout = weft.Layout.parse(line)
    for rank in (1, layout.world_size - 1):
        on = layout.on(OneOf(layout.mesh, rank))
        local = on.local_length("tokens", N)
        bound = BoundCall(on, Call(("tokens",), mask, length=((N, N),), kernel=kernel))
        heads = 8 // layout.size("heads")
        with fake_gpu() as crossings:
            q = torch.empty(2, heads, local, 64, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.empty(2, heads // 2, local, 64, device="cuda").to(q) for _ in range(2))
            for _ in range(2):
                crossings.found.clear()
                results = both_passes(bound, q, k, v)
                assert [t.shape for t in results] == [q.shape, q.shape, k.shape, v.shape]
                assert all(t.is_cuda for t in results)
            second.append(crossings.found)
    return second


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("heads", "window") else n for n in CASES],
)
def test_a_second_call_copies_nothing_to_the_gpu(name: str, apart) -> None:
    assert apart(attention, name) == [[], []]


def modules(name: str) -> list[tuple[list[str], int]]:
    line, make = MODULES[name]
    layout = weft.Layout.load(line) if ":" not in line else weft.Layout.parse(line)
    second = []
    for rank in (0, layout.world_size - 1):
        transport = OneOf(layout.mesh, rank)
        on = layout.on(transport)
        call = make(on)
        with fake_gpu() as crossings:
            crossings.read = _each_chooses_the_next if name in WAITS else None
            for _ in range(2):
                crossings.found.clear()
                transport.asked = 0
                call()
            second.append((crossings.found, transport.asked))
    return second


def _each_chooses_the_next(chosen: torch.Size) -> torch.Tensor:
    """The one thing that learned routing reads: which query block chose which key block."""
    *shape, blocks = chosen
    return torch.eye(blocks, dtype=torch.bool).roll(1, 1).expand(*shape, blocks).clone()


def _to_gpu(module: torch.nn.Module) -> None:
    for part in module.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            there = torch.empty(weight.shape, device="cuda", dtype=weight.dtype)
            setattr(part, name, torch.nn.Parameter(there))


def _both(module: torch.nn.Module, *shape: int, **named):
    """Forward and backward pass of a module, which is put on the GPU when it is first called."""

    def move(*_) -> None:
        moved.remove()
        _to_gpu(module)

    def call() -> None:
        x = torch.empty(shape, device="cuda", requires_grad=True)
        out = module(x, **named)
        grads = backward(out, torch.empty_like(out))
        assert grads[id(x)].shape == x.shape
        assert grads.keys() == {id(x), *map(id, module.parameters())}
        assert all(t is not None and t.is_cuda for t in grads.values())

    moved = module.register_forward_pre_hook(move)
    return call


def _triangle_multiplication(on: weft.Layout):
    return _both(weft.pair.TriangleMultiplication(32, "outgoing", layout=on), 1, 6, 6, 32)


def _triangle_attention(on: weft.Layout):
    return _both(weft.pair.TriangleAttention(32, 4, axis="columns", layout=on), 1, 6, 6, 32)


def _rope(on: weft.Layout):
    axes = ("batch", "tokens", "embed")
    module = weft.MultiAxisAttention(32, 4, axis="tokens", axes=axes, layout=on, rope=True)
    return _both(module, 2, on.local_length("tokens", N), 32, lengths={"tokens": N})


def _routed(on: weft.Layout):
    module = weft.routing.RoutedAttention(32, 4, axis="tokens", layout=on, routing={"top_k": 1})
    moved, local = [], on.local_length("tokens", N)

    def call() -> None:
        with torch.no_grad():
            if not moved:
                moved.append(_to_gpu(module))
            module(torch.empty(2, local, 32, device="cuda"), lengths={"tokens": N})

    return call


def _cache(on: weft.Layout):
    model, kept = weft.compose("tabular", on, dtype=torch.bfloat16), []
    digest = cache.spec_digest(model.spec) + "weights"
    model._fingerprint = lambda: digest
    model._check_classes = lambda *_: None  # `fit` reads the classes, and hashes the weights, once

    def call() -> None:
        with torch.no_grad(), mock.patch.object(cache, "model_fingerprint", return_value=digest):
            if not kept:
                _to_gpu(model)
                kept.append(model.fit(torch.empty(1, 10, 4, device="cuda").bfloat16()))
            cells = torch.empty(1, 4, 4, device="cuda").bfloat16()
            assert model.predict(cells, *kept).is_cuda

    return call


def _redistribute(on: weft.Layout):
    other = weft.Layout.parse("tokens(striped): ring=4")
    other = other.on(OneOf(other.mesh, on.rank))
    local = on.local_length("tokens", N)

    def call() -> None:
        x = torch.empty(2, local, 8, device="cuda")
        moved = on.redistribute(x, other, {"tokens": 1}, {"tokens": N})
        other.redistribute(moved, on, {"tokens": 1}, {"tokens": N})

    return call


def _gather(on: weft.Layout):
    local = on.local_length("tokens", N - 1)
    return lambda: on.gather(torch.empty(2, local, 8, device="cuda"), {"tokens": 1})


def _sequence_sums(on: weft.Layout):
    local, documents = on.local_length("tokens", N), (20, 30, 27)

    def call() -> None:
        values = torch.empty(2, local, device="cuda")
        assert sequence_sums(values, on, documents=documents).shape == (2, 3)

    return call


def _per_sample(on: weft.Layout):
    local = on.local_length("tokens", N)
    mask = weft.KeyPadding((40, 77, 60, 50))

    def call() -> None:
        q = torch.empty(2, 4, local, 64, device="cuda", dtype=torch.bfloat16)
        weft.attention(q, q, q, on, "tokens", mask, length=N, kernel="math")

    return call


MODULES = {
    "triangle multiplication": ("pair-2x2", _triangle_multiplication),
    "triangle attention": ("pair-2x2", _triangle_attention),
    "rope": ("tokens(zigzag): ring=4", _rope),
    "redistribute": ("tokens(zigzag): ring=4", _redistribute),
    "gather": ("tokens(zigzag): ring=4", _gather),
    "routed": ("routed-4", _routed),
    "routed, heads within": ("head-x-routed", _routed),
    "cache": ("rows: shared_context=2", _cache),
    "sums of documents": ("tokens(zigzag): ring=2", _sequence_sums),
    "masks of single sequences": ("batch: dp=2; tokens: ring=2", _per_sample),
}


#: Learned routing waits for the GPU once a call, to read which blocks it chose, and brings there
#: the rows to fetch and to send, and the slots that hold them: what depends on the choice alone.
WAITS = {"routed", "routed, heads within"}
#: Only the others know how much of a tensor they have to gather, and whether they refuse a table.
ASKS = {"gather", "cache"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n == "routed, heads within" else n
        for n in MODULES
    ],
)
def test_a_second_pass_copies_nothing_and_asks_no_rank(name: str, apart) -> None:
    for crossings, asked in apart(modules, name):
        assert asked == (name in ASKS)
        reads = [found for found in crossings if "to the CPU" in found]
        assert len(reads) == (name in WAITS)
        assert len(crossings) - len(reads) == 3 * (name in WAITS), crossings


def sums_of_gradients() -> list[str]:
    """Crossings of the second sum of gradients, but of their total, which the next step reads."""
    layout = weft.Layout.parse("tokens: ring=2")
    on, module = layout.on(OneOf(layout.mesh, 0)), torch.nn.Linear(4, 3)
    with fake_gpu() as crossings, mock.patch.object(sums, "download"):
        _to_gpu(module)
        for _ in range(2):
            grads = [torch.empty(3, 4, device="cuda"), torch.empty(3, device="cuda")]
            crossings.found.clear()
            sums._sum_all(module, grads, ("ring",), on.bound)
        return list(crossings.found)


def test_sums_of_gradients_wait_for_nothing(apart) -> None:
    assert apart(sums_of_gradients) == []


def captured() -> list[str]:
    """What calls say while a CUDA graph is captured: along mesh dims, and on one rank."""
    said = []
    for line in ("tokens: ring=2", "tokens: ulysses=2", ""):
        layout = weft.Layout.parse(line) if line else weft.Layout.single()
        on = layout.on(OneOf(layout.mesh, 0)) if line else layout
        with fake_gpu(capturing=True), torch.no_grad():
            q = torch.empty(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
            try:
                weft.attention(q, q, q, on, "tokens")
                said.append("")
            except UnsupportedError as error:
                said.append(str(error))
        assert not line or sum(on.bound.sent.values()) == 0
    return said


def movements_captured() -> list[str]:
    """The same of movements outside attention."""
    on, other = (weft.Layout.parse(f"tokens{order}: ring=2") for order in ("", "(zigzag)"))
    on, other = (layout.on(OneOf(layout.mesh, 0)) for layout in (on, other))
    with fake_gpu(capturing=True), torch.no_grad():
        x = torch.empty(1, 8, 4, device="cuda")
        calls = (
            lambda: on.redistribute(x, other, {"tokens": 1}),
            lambda: weft.scan(x, x, on, "tokens"),
            lambda: weft.halo(lambda run: run[:, 1:], x, 1, on, "tokens"),
        )
        said = []
        for call in calls:
            with pytest.raises(UnsupportedError) as error:
                call()
            said.append(str(error.value))
    assert sum(on.bound.sent.values()) == 0
    return said


def test_calls_of_several_ranks_are_not_captured_in_cuda_graph(apart) -> None:
    ring, ulysses, alone = apart(captured)
    assert "cannot be captured in a CUDA graph" in ring
    assert "cannot be captured in a CUDA graph" in ulysses
    assert alone == ""
    assert all("cannot be captured in a CUDA graph" in text for text in apart(movements_captured))
    tags = torch.ops.weft.attention.default.tags
    assert not hasattr(torch.Tag, "cudagraph_unsafe") or torch.Tag.cudagraph_unsafe in tags


@contextmanager
def llama_on_gpu(order: list[str]) -> Iterator[tuple]:
    """A parallelized Llama on a fake GPU, its transport, and what crosses.

    `order` gets numbers that are compared as they begin to travel and as they have arrived, and the
    model's head, which is launched last.
    """
    import transformers as hf

    from weft_integrations.transformers import refused

    layout = weft.Layout.parse("tokens(zigzag): ring=4")
    transport = OneOf(layout.mesh, 1)
    on = layout.on(transport)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads)).bfloat16().eval()
    weft.parallelize(model, on)
    model.lm_head.register_forward_hook(lambda *_: order.append("head"))

    def landing(packed):
        assert packed.is_cuda
        order.append(f"{packed.numel()} numbers")
        return lambda: order.append("arrived") or torch.zeros(packed.shape, dtype=torch.int64)

    torch.cuda.default_generators = (torch.Generator(),)
    with (
        mock.patch.object(_uploads, "_landing", landing),
        mock.patch.object(refused, "exported"),  # fake tensors are what a trace has
        fake_gpu() as crossings,
        torch.no_grad(),
    ):
        crossings.read = lambda shape: torch.ones(shape, dtype=torch.bool)
        crossings.number = lambda dtype: False if dtype == torch.bool else 63
        for part in model.modules():
            for name, t in [*part.named_parameters(recurse=False)]:
                there = torch.empty(t.shape, device="cuda", dtype=t.dtype)
                setattr(part, name, torch.nn.Parameter(there))
            for name, t in [*part.named_buffers(recurse=False)]:
                setattr(part, name, torch.empty(t.shape, device="cuda", dtype=t.dtype))
        yield model, transport, crossings


#: Arguments of a call beside ids, and how often it waits for the GPU with nothing launched yet:
#: padding and documents are part of the plan.
GIVEN = {"ids": 0, "labels": 0, "attention_mask": 1, "position_ids": 1}


def model_waits() -> dict[str, tuple]:
    """Waits of the second call of a kind: for the GPU, for texts, and the order of events."""
    order: list[str] = []
    found = {}
    with llama_on_gpu(order) as (model, transport, crossings):
        ids = torch.empty(1, 64, dtype=torch.int64, device="cuda")
        for name in GIVEN:
            given = {"input_ids": ids, "use_cache": False, name: ids}
            given.pop("ids", None)
            for _ in range(2):
                order.clear()
                crossings.found.clear()
                transport.asked = 0
                model(**given)
            found[name] = len(crossings.found), transport.asked, [*order]
    return found


def test_a_parallelized_model_is_launched_before_its_gpu_answers(apart) -> None:
    """Waits that docs/gpu.md lists; ids, labels and weights arrive when the head is launched."""
    found = apart(model_waits)
    assert {name: waits for name, (waits, _, _) in found.items()} == GIVEN
    for name, (_, asked, order) in found.items():
        compared = 64 + 3 * 64 + 64 * (name != "ids")
        assert (asked, order) == (0, [f"{compared} numbers", "head", "arrived"]), name


def decoded() -> tuple[list[str], int, list[str]]:
    """Waits of the second token of `generate`."""
    from weft_integrations.transformers import cache

    order: list[str] = []
    with (
        llama_on_gpu(order) as (model, transport, crossings),
    ):
        kept = cache.ShardedCache(model)
        model._weft.calls.generating = True
        model(input_ids=torch.empty(1, 64, dtype=torch.int64, device="cuda"), cache=kept)
        for _ in range(2):
            order.clear()
            crossings.found.clear()
            transport.asked = 0
            model(input_ids=torch.empty(1, 1, dtype=torch.int64, device="cuda"), cache=kept)
        assert transport.deferred is not None  # the vote, which the next token reads
    return crossings.found, transport.asked, order


def test_decoding_compares_the_token_alone_and_awaits_no_vote(apart) -> None:
    assert apart(decoded) == ([], 0, ["1 numbers", "head", "arrived"])


def gradients() -> tuple[list[str], int, list[str]]:
    """Waits in a backward pass, whose engine is a stand-in."""
    from weft_integrations import consistency

    order: list[str] = []
    ends: list[Callable] = []
    with (
        mock.patch.object(consistency, "backward_pass", return_value=7),
        mock.patch.object(consistency, "at_end_of_backward", ends.append),
        llama_on_gpu(order) as (model, transport, crossings),
    ):
        for n in (1, 2000):
            model._weft.calls.entered.record(torch.empty(n, device="cuda"))
        order.append("launched")
        (end,) = ends
        end()
    return crossings.found, transport.asked, order


def test_gradients_are_compared_when_their_backward_pass_is_launched(apart) -> None:
    found, asked, order = apart(gradients)
    assert order == ["1 numbers", "5 numbers", "launched", "arrived", "arrived"]
    assert (found, asked) == ([], 1)

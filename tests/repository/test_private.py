"""What weft takes from torch without a promise: all of it exists and behaves, in one place."""

import ast
import datetime
import re
import subprocess
import sys
import textwrap
import time
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from weft import _torch as private


def test_nothing_private_of_torch_is_used_elsewhere():
    folder = Path(private.__file__).parents[1]  # of all packages
    found = []
    for path in sorted(folder.rglob("*.py")):
        if path.name == "_torch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                found += [f"{path.name}: {node.module}" for n in names if n.startswith("_")]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("torch")]
                found += [f"{path.name}: {name}" for name in names if "._" in name]
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.match(r"(torch|Tensor|F)\.", name):
                parts = name.split(".")
                found += [f"{path.name}: {'.'.join(parts)}" for p in parts if _is_private(p)]
    assert not found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_cpu_flash_kernel_reports_zero_for_rows_that_see_nothing():
    """Why `CpuFlash` sets those rows itself; if this ever fails, that code can go."""
    q = torch.randn(1, 1, 2, 4)
    mask = torch.tensor([[float("-inf")] * 2, [0.0] * 2])
    _, lse = private.cpu_flash_forward(q, q, q, 0.0, False, attn_mask=mask, scale=1.0)
    assert lse[0, 0, 0].item() == 0.0


def test_the_cuda_ops_have_the_arguments_that_are_passed():
    for op, wanted in (
        (private.cuda_flash_forward, ["query", "key", "value", "cum_seq_q", "cum_seq_k"]),
        (private.cuda_flash_backward, ["grad_out", "query", "key", "value", "out", "logsumexp"]),
        (private.cudnn_forward, ["query", "key", "value", "attn_bias", "compute_log_sumexp"]),
        (private.cudnn_backward, ["grad_out", "query", "key", "value", "out", "logsumexp"]),
    ):
        op = getattr(op, "__wrapped__", op)
        names = [argument.name for argument in op.default._schema.arguments]
        assert names[: len(wanted)] == wanted
        assert {"dropout_p", "is_causal", "scale"} <= set(names)


def _own_limits(rank: int) -> list[int]:
    """A limit of an exchange goes before the group's, which is shorter."""
    short, long = (datetime.timedelta(seconds=n) for n in (0.3, 30))
    group = private.gloo_group("own limits", rank, 4, short)
    if rank == 1:
        time.sleep(0.6)
    mine = torch.full((4,), rank)
    votes = torch.empty_like(mine)
    private.exchange_equal(votes, mine, group, long).wait(long)
    return votes.tolist()


def test_exchanges_of_a_gloo_group_have_limits_of_their_own(pool):
    assert pool.run(_own_limits) == [[0, 1, 2, 3]] * 4


def test_the_profiler_is_noticed():
    assert not private.profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiling()
    assert private.every_thread() is not None


@pytest.mark.slow
def test_threads_may_trace_one_after_the_other():
    """In a process of its own, as a crash would end it."""
    lines = """
        import threading
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from weft._torch import trace_on_threads

        def trace():
            with FakeTensorMode():
                torch.zeros(3)

        trace_on_threads()
        for _ in range(3):
            thread = threading.Thread(target=trace)
            thread.start()
            thread.join()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], check=True, timeout=100)


def test_method_constant_in_graphs_and_id_of_its_object_guard():
    """The object need not be a constant to torch: 2.11 refuses one as an argument."""

    @dataclass(frozen=True)
    class Number:
        value: int

        @private.constant_in_graphs
        def read(self) -> int:
            return self.value

    def add(x, number):
        id(number)
        return x + number.read()

    whole = torch.compile(add, backend="eager", fullgraph=True)
    found = [whole(torch.zeros(()), number).item() for number in (Number(1), Number(2))]
    assert found == [1, 2]


def test_defaults_of_arguments_are_kinds_inside_a_block():
    whole = torch.compile(lambda x, fn: fn(x), backend="eager")
    shifts = [lambda x, by=by: x + by for by in range(3)]
    with private.compiles(99):
        assert [whole(torch.zeros(()), shift).item() for shift in shifts] == [0, 1, 2]


def test_a_mode_that_looks_at_ops_is_seen():
    x = torch.randn(2)
    assert not private.dispatched(x, torch.nn.Parameter(x))
    assert private.dispatched(x, x.to("meta"))
    with FlopCounterMode(display=False):
        assert private.dispatched(x)


def test_all_attention_operators_of_torch_are_known():
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    names = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    parts = ("attention", "attn", "fmha", "transformer")
    attending = {name for name in names if any(part in name for part in parts)}
    attending = {name for name in attending if not name.endswith("_backward")}
    assert attending - {"scaled_dot_product_attention"} <= set(private.other_attention.values())
    assert torch.nn.functional.scaled_dot_product_attention in private.sdpa_forms
    assert torch.ops.aten.scaled_dot_product_attention.default in private.sdpa_forms


def test_kernels_are_called_past_torch_function_modes():
    class Counts(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 1, 4, 8)
    with Counts() as counts:
        private.cpu_flash_forward(q, q, q)
    assert counts.seen == 0


def test_another_threads_compiling_makes_no_graph_of_this_threads_calls(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # one for all threads
    assert torch.compiler.is_compiling()
    assert not private.in_graph(torch.ones(2))
    with FakeTensorMode():
        assert private.in_graph(torch.ones(2))


def test_reentrant_checkpoints_are_found_while_their_forward_passes_run():
    found = []

    def block(x):
        found.append(private.reentrant_checkpoints())
        return 2 * x

    def outer(x):
        return checkpoint(block, block(x), use_reentrant=True)

    x = torch.ones(2, requires_grad=True)
    y = checkpoint(outer, x, use_reentrant=True)
    assert [len(contexts) for contexts in found] == [1, 2]
    assert found[1][1] is found[0][0]
    assert found[1][1].run_function is outer
    found[0][0].run_function = lambda x: 5 * x
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 5.0))
    assert private.reentrant_checkpoints() == []


@pytest.mark.filterwarnings("ignore:TF32")  # torch's own, of `flags`
def test_inference_multiplies_by_onednn_where_that_is_faster(monkeypatch):
    torch.manual_seed(0)
    product, taken = private._onednn_linear(), []

    def counted(x, *rest):
        taken.append(tuple(x.shape))
        assert rest[2:] == ("none", [], "")
        return torch.nn.functional.linear(x, *rest[:2]) if product is None else product(x, *rest)

    monkeypatch.setattr(private, "_onednn_linear", lambda: counted)
    weight, bias = torch.randn(24, 40, requires_grad=True), torch.randn(24)
    x = torch.randn(3, 70, 2, 40)[:, :, 1]

    def check(x, weight=weight, bias=bias):
        taken.clear()
        out = private.inference_linear(x, weight, bias)
        wanted = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(out, wanted)
        assert out.requires_grad == wanted.requires_grad
        return bool(taken)

    assert not check(x)  # with gradients
    with torch.no_grad():
        assert check(x)
        assert check(x, bias=None)
        assert check(torch.randn(64, 24), torch.randn(24, 40).mT, None)
        assert not check(x[:1, :63])  # few rows
        assert not check(x[:0])
        assert not check(x.double(), weight.double(), bias.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert not check(x)
        with torch.backends.mkldnn.flags(enabled=False):
            assert not check(x)
        with FlopCounterMode(display=False) as counter:
            assert not check(x)
        assert counter.get_total_flops() == 2 * 2 * x.numel() * 24
        compiled = torch.compile(private.inference_linear, backend="eager", fullgraph=True)
        taken.clear()
        torch.testing.assert_close(compiled(x, weight, bias), x @ weight.mT + bias)
        mapped = torch.func.vmap(lambda one: private.inference_linear(one, weight, bias))(x)
        assert not taken
        torch.testing.assert_close(mapped, torch.nn.functional.linear(x, weight, bias))


def test_numbers_are_counted_as_torch_counts_them():
    assert torch.nn.functional.one_hot is private.one_hot
    assert private.local_scalar.name() == "aten::_local_scalar_dense"
    assert private.grouped_mm.default.name() == "aten::_grouped_mm"
    assert private.tensor_is_all_true(torch.tensor([True, True]))


def test_what_torch_compiled_of_a_module_and_how():
    module = torch.nn.Linear(2, 2)
    module.forward = torch.jit.script(plus_one)
    assert not private.compiled_method(module)
    module.compile(backend="eager", fullgraph=True)
    assert private.compiled_method(module) == "_compiled_call_impl"
    compiler, run, is_whole = private.compiler_of(module._compiled_call_impl)
    assert is_whole
    assert (run(torch.ones(2)) == 2).all()
    assert compiler(plus_one)(torch.zeros(1)) == 1
    assert private.compiled_method(torch.compile(module, backend="eager")) == "forward"
    assert private.compiler_around() is None


def plus_one(x: torch.Tensor):
    return x + 1


def test_half_imported_modules_of_torch_are_none(monkeypatch):
    """Another thread may be importing them."""
    for name in ("torch._dynamo", "torch.distributed.fsdp"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert not private.is_fsdp(torch.nn.Linear(1, 1))
    assert private.outside_graphs(lambda: 3)() == 3

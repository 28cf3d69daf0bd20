"""The private names of torch that weft uses, in one place with its own test."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch._guards import TracingContext
from torch._higher_order_ops.flex_attention import flex_attention as _flex_operator

# torch's operators that take functions (`torch.cond`, a checkpoint in a graph) are of this class.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from .errors import UnsupportedError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: torch has no public names for these.
pytree = torch.utils._pytree
one_hot = torch._C._nn.one_hot
tensor_is_all_true = Tensor._is_all_true
local_scalar = torch.ops.aten._local_scalar_dense.default
grouped_mm = torch.ops.aten._grouped_mm
without_modes = torch.utils._python_dispatch._disable_current_modes

Fn = TypeVar("Fn", bound=Callable)
Params = ParamSpec("Params")
Result = TypeVar("Result")


def in_local_tensor_mode() -> bool:
    """True within torch's `LocalTensorMode`, whose module is not imported to ask."""
    local = sys.modules.get("torch.distributed._local_tensor")
    return local is not None and local.local_tensor_mode() is not None


def is_block_mask(value: object) -> bool:
    """True for a block mask of FlexAttention, whose module is not imported to ask."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(value, flex.BlockMask)


def active_flash() -> str | None:
    """The implementation in the place of torch's own flash kernel: "FA3", "FA4"; None for that.

    Releases of torch without `activate_flash_attention_impl` have no other.
    """
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def _past_modes(op: Callable) -> Callable:
    """An operator that no torch function mode sees: `weft.sdpa` refuses it to anybody else."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return op(*args, **kwargs)

    call.__wrapped__ = op  # type: ignore[attr-defined]
    return call


#: As `F.scaled_dot_product_attention` calls it: `torch.ops` takes 2 us more.
cpu_flash_forward = _past_modes(torch._scaled_dot_product_flash_attention_for_cpu)
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
cuda_flash_forward = _past_modes(torch.ops.aten._flash_attention_forward)
cuda_flash_backward = torch.ops.aten._flash_attention_backward
cudnn_forward = _past_modes(torch.ops.aten._scaled_dot_product_cudnn_attention)
cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

_OTHER_ATTENTION = """
    _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
    _flash_attention_forward_no_dropout_inplace _efficient_attention_forward
    _cudnn_attention_forward _cudnn_attention_forward_no_dropout_inplace
    _native_multi_head_attention _triton_scaled_dot_attention _triton_multi_head_attention
    _transformer_encoder_layer_fwd
"""

# torch 2.13 renamed the call; both names do the same.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def constant_in_graphs(fn: Fn) -> Fn:
    """`torch.compiler.assume_constant_result`, which loads torch's compiler: 1 s of an import."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def outside_graphs(fn: Callable[Params, Result], reason: str = "") -> Callable[Params, Result]:
    """`torch.compiler.disable` without loading the compiler: a graph breaks where `fn` is called.

    A graph that is to be whole is refused; `compiler_around` is what makes the others.
    """

    @functools.wraps(fn)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        around = _frames.get_eval_frame_callback()
        if around is None:
            return fn(*args, **kwargs)
        maker = type(getattr(around, "_torchdynamo_orig_backend", None))
        if maker.__name__ == "ConvertFrameAssert":  # of fullgraph=True
            why = reason or "compile without fullgraph=True"
            raise UnsupportedError(f"{fn.__qualname__} is part of no whole graph: {why}")
        token = _around.set(around)
        try:
            return _compiled_by(None, fn, *args, **kwargs)
        finally:
            _around.reset(token)

    made: Any = call
    _frames.set_code_exec_strategy(made.__code__, _SKIPPED)
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, reason or None
    return call


def kept_outside_graphs(fn: Callable[Params, Result]) -> Callable[Params, Result]:
    """`outside_graphs` of a function that costs no frame more, and breaks whole graphs as torch."""
    made: Any = fn
    _frames.set_code_exec_strategy(made.__code__, _NEVER)
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, None
    return fn


def _compiled_by(maker: Any, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """A function's result, of whose frames something makes graphs, or nothing does."""
    before = _frames.set_eval_frame(maker)
    try:
        return fn(*args, **kwargs)
    finally:
        _frames.set_eval_frame(before)


_frames: Any = torch._C._dynamo.eval_frame
#: Of a function's own frame; those of the functions that it calls are compiled.
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
_frames.set_code_exec_strategy(_compiled_by.__code__, _SKIPPED)
#: Of a function's frame and those of the functions that it calls.
_NEVER = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
#: What makes graphs around functions outside of them, on this thread.
_around: contextvars.ContextVar[Any] = contextvars.ContextVar("around", default=None)


def compiler_around() -> Callable[[Callable], Callable] | None:
    """What compiles functions as `torch.compile` does around `outside_graphs`, if it does."""
    around = _around.get()
    return None if around is None else lambda fn: functools.partial(_compiled_by, around, fn)


def compiled_method(module: torch.nn.Module) -> str:
    """The attribute of a module that `torch.compile` made: its call or its `forward`, or none."""
    own = vars(module)
    for name in ("_compiled_call_impl", "forward"):
        held = getattr(own.get(name), "__dict__", ())
        if "_torchdynamo_inline" in held and "_torchdynamo_orig_callable" in held:
            return name  # scripts have the first alone
    return ""


def compiler_of(call: Any) -> tuple[Any, Callable, bool]:
    """Of what `torch.compile` made: what compiles so, what it compiled, if graphs are whole."""
    compiler = inspect.getclosurevars(call).nonlocals["self"]
    return compiler, call._torchdynamo_orig_callable, compiler.fullgraph


def all_gather_flat(
    out: Tensor, tensor: Tensor, group: ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Equal contiguous tensors of all ranks into `out`, rank after rank."""
    return _all_gather(out, tensor, group=group, async_op=async_op)


def all_gather_stacked(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Equal tensors of all ranks stacked on a new dim 0."""
    size = dist.get_world_size(group)
    out = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    all_gather_flat(out, tensor.contiguous(), group)
    return out.view(size, *tensor.shape)


def gloo_group(name: str, rank: int, size: int, timeout: datetime.timedelta) -> Backend:
    """A gloo group by a `name` that only its members know, and that ends with its last reference.

    `dist.new_group` either waits for every rank of the world or names a group by how many this
    process has made, which need not be the same number on all of its members.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(name, default_store()), rank, size, timeout)


def exchange_equal(
    outputs: Tensor, tensor: Tensor, group: Backend, timeout: datetime.timedelta
) -> dist.Work:
    """Begin an exchange in a `gloo_group`: row i of `tensor` goes to rank i; `outputs` are by rank.

    `timeout` takes precedence over the group's.
    """
    options = distributed_c10d.AllToAllOptions()
    options.timeout = timeout
    return group.alltoall_base(  # type: ignore[attr-defined]  # in no stub
        outputs, tensor, [], [], options
    )


def default_store() -> dist.Store:
    """The key-value store that this process group was made with."""
    return distributed_c10d._get_default_store()


def nccl_options(timeout: datetime.timedelta) -> dist.ProcessGroupNCCL.Options:
    """Options of an NCCL group: its limit, and a stream with priority over kernels."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    return options


@contextlib.contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """Inside the block this process is one of `size` ranks of torch's fake process group.

    The others are not there: messages end at once, what is received stays as it was, and a gather
    finds this rank's own tensor in every rank's place.

    >>> with fake_ranks(3, 4096):
    ...     dist.get_rank(), dist.get_world_size()
    (3, 4096)
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch's next one puts the rank before every line, each time again
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def is_fake(group: ProcessGroup | None) -> bool:
    """True if a process group is torch's fake one."""
    return any(part.split(":")[-1] == "fake" for part in dist.get_backend(group).split(","))


def in_forward_mode() -> bool:
    """True within a level of forward-mode differentiation."""
    return torch.autograd.forward_ad._current_level >= 0


def with_tangent(**tensors: Tensor) -> str | None:
    """The name of a tensor that carries a tangent of forward-mode differentiation, or None."""
    if not in_forward_mode():
        return None
    unpack = torch.autograd.forward_ad.unpack_dual
    duals = (name for name, t in tensors.items() if unpack(t).tangent is not None)
    return next(duals, None)


def active_ddp() -> torch.nn.parallel.DistributedDataParallel | None:
    """The DDP wrapper whose forward pass runs."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def ignored_by_ddp(model: torch.nn.Module) -> set[str]:
    """Names of parameters and buffers that DDP is told to leave alone."""
    return {*getattr(model, "_ddp_params_and_buffers_to_ignore", ())}


def is_fsdp(module: torch.nn.Module) -> TypeGuard[Any]:
    """True for a unit of FSDP2. Who never loaded that has none, nor who is loading it now."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def fsdp_hooks(unit: Any) -> Iterator[tuple[dict, int, bool]]:
    """FSDP2's hooks around the forward passes of a unit: where they are kept, true of those before.

    Of modules that are one unit, `fully_shard([a, b])`, those of all.
    """
    state = unit._get_fsdp_state()
    handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
    ids = {one.id for handle in handles for one in getattr(handle, "handles", (handle,))}
    for module in state._modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in ids & hooks.keys():
                yield hooks, key, hooks is module._forward_pre_hooks


def fsdp_groups(unit: Any) -> list[tuple[list[int], float | None]]:
    """Ranks over which a unit of FSDP2 adds up gradients, and what it divides them by, if set."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [
        (group.mesh_info.mesh.mesh.flatten().tolist(), group.gradient_divide_factor)
        for group in groups
        if group is not None
    ]


_level_of_transforms = torch._C._functorch.maybe_current_level


def in_transform() -> bool:
    """True inside a transform of `torch.func`."""
    return _level_of_transforms() is not None


#: `any_autocast()`: True inside `torch.autocast` of any kind of device.
any_autocast = torch._C._is_any_autocast_enabled
#: Classes of tensors that intercept no op.
_PLAIN = (Tensor, torch.nn.Parameter)


def dispatched(*tensors: Tensor) -> bool:
    """True if a mode or a tensor's class intercepts the ops that run on it."""
    for t in tensors:
        if type(t) not in _PLAIN or t.is_meta:
            return True
    return torch._C._len_torch_dispatch_stack() > 0


def is_hooked(module: torch.nn.Module) -> bool:
    """True if a hook sees what a module takes or gives, or its gradients."""
    own = vars(module)
    after = own["_forward_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(after or own["_forward_pre_hooks"] or _has_any_global_hook())


_has_any_global_hook = torch.nn.modules.module._has_any_global_hook
#: Of a class with `__torch_dispatch__`: a tensor that has a shape, and no numbers.
make_wrapper: Any = Tensor._make_wrapper_subclass
#: How many modes see functions of torch.
function_modes = torch._C._len_torch_function_stack
#: A block past `__torch_function__` of the tensors' classes.
past_classes = torch._C.DisableTorchFunctionSubclass


def as_torch_does(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function of torch past `__torch_function__` of the tensors' classes."""
    with past_classes():
        return func(*args, **kwargs)


#: What autograd runs below `__torch_function__` on a saved tensor that a hook has unpacked.
OF_UNPACKED = torch.ops.aten.detach.default


def traced(tensor: Tensor) -> bool:
    """True if a tensor stands for another while torch traces or compiles."""
    return isinstance(tensor, FakeTensor)


def in_graph(tensor: Tensor) -> bool:
    """True if ops on a tensor go into a graph, of `torch.compile` or `torch.export`.

    `torch.compiler.is_compiling` alone is true wherever another thread compiles; it reads this
    flag.
    """
    compiler = torch.compiler
    return compiler.is_dynamo_compiling() or (compiler._is_compiling_flag and traced(tensor))


class Observed(TorchDispatchMode):
    """Counts the operations of products, and names ops that draw random numbers, on this thread.

    >>> with Observed() as observed:
    ...     _ = torch.nn.functional.dropout(torch.ones(3, 4) @ torch.ones(4, 5), 0.5)
    >>> observed.flops, observed.draws
    (120, ['aten.bernoulli_.float'])
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # it loads Triton

        super().__init__()
        self.flops, self.draws, self._counts = 0, list[str](), flop_registry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.append(str(func))
        out = func(*args, **(kwargs or {}))
        count = self._counts.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def trace_on_threads() -> None:
    """To be called on a thread that lives on, before others trace or compile.

    Where torch 2.11 is built for CUDA and there is no GPU, the stand-in that the first thread to
    trace puts in CUDA's place ends with it, and the next thread that traces crashes.
    """
    if torch.version.cuda and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def is_traced() -> bool:
    """True while torch.compile traces a function on this thread."""
    return TracingContext.try_get() is not None


def is_module_call(code: CodeType) -> bool:
    """True for the code by which every module is called, with the module as its `self`."""
    return code is module_call.__code__


#: What a module's `__call__` calls: hooks around `forward`; an instance may have another.
MODULE_CALL = "_call_impl"
module_call = torch.nn.Module._call_impl


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Autograd on, even inside a custom op, whose body runs below autograd."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def compiles(kinds: int) -> contextlib.AbstractContextManager:
    """Inside the block a compiled function is compiled anew for up to this many kinds of arguments.

    Beyond that it raises, in this thread, where torch would fall back to running it uncompiled.
    """
    return torch._dynamo.config.patch(
        recompile_limit=kinds,
        accumulated_recompile_limit=8 * kinds,
        fail_on_recompile_limit_hit=True,
        # Without it torch 2.11 runs the graph of one function for another with other defaults.
        skip_guards_on_constant_func_defaults=False,
    )


def flex_unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: BlockMask,
    buffers: Iterable[Tensor],
) -> tuple[Tensor, Tensor]:
    """FlexAttention by plain matrix products, out and natural-log lse, with its gradient on CPU.

    `torch.nn.attention.flex_attention` refuses tensors that require gradients on the CPU; the
    operator below it does not.
    """
    out, lse2, _ = _flex_operator(
        q, k, v, score_mod, block_mask.as_tuple(), 1.0, {}, tuple(buffers), ()
    )
    return out, lse2 * math.log(2)


def dtensor_chunk(t: DTensor) -> tuple[int, ...]:
    """The offset of a DTensor's local shard in the global tensor, per dim."""
    (chunk,) = t.__create_chunk_list__()
    return tuple(chunk.offsets)


def version(t: Tensor) -> int:
    """The number of times that a tensor was written in place; 0 where torch does not count."""
    return 0 if t.is_inference() else t._version


def backward_pass() -> int:
    """The number of the backward pass that calls this, which no other of the process has."""
    return torch._C._current_graph_task_id()


def function_of_node(node: Any) -> type | None:
    """The `torch.autograd.Function` that a node of autograd's graph is of, or None."""
    return getattr(node, "_forward_cls", None)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that calls this has run; what it raises is raised."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is a slice of, or itself."""
    return mesh._get_root_mesh()


def one_dim(mesh: DeviceMesh, dims: tuple[str, ...], name: str) -> DeviceMesh:
    """Dims of a mesh as one dim; all its ranks call this.

    Where they are the whole world it is a separate mesh: of a mesh that has flattened dims,
    torch 2.13 joins DTensors with uneven chunks along them in a wrong order (`full_tensor`).
    """
    if len(dims) == 1:
        return mesh[dims]
    world = range(dist.get_world_size())
    if mesh.mesh.flatten().tolist() == [*world] and set(dims) == set(mesh.mesh_dim_names or ()):
        world_group = dist.group.WORLD
        assert world_group is not None  # a mesh has a process group
        return DeviceMesh.from_group(world_group, mesh.device_type, mesh_dim_names=(name,))
    return mesh[dims]._flatten(name)


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose fp32 products without gradients are oneDNN's on CPUs with AVX-512.

    For processors other than Intel's, torch's MKL has no AVX-512 kernels; oneDNN's take half the
    time, and longer to set up where rows are few.
    """
    if in_graph(x):
        return torch.nn.functional.linear(x, weight, bias)
    product = _onednn_linear()
    plain = (
        product is not None
        and not torch.is_grad_enabled()
        and x.numel() >= 64 * x.shape[-1]
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )
    if product is None or not plain or in_transform() or dispatched(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    return product(x, weight, bias, "none", [], "")


@functools.cache
def _onednn_linear() -> Callable | None:
    """torch's operator for oneDNN's product of a dense matrix and weights, on CPUs with AVX-512."""
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return op.default if has_avx512 and op is not None else None


def part_in_memory(t: Tensor) -> Tensor:
    """A rank's part of a field, which has memory; another tensor as it is."""
    return getattr(t, "_local", t)


def memory_of(t: Tensor) -> tuple[int, int]:
    """The memory behind a tensor: a number that tells it from any other, and its bytes."""
    storage = t.untyped_storage()
    return storage._cdata, storage.nbytes()


def profiling() -> bool:
    """True if a torch profiler runs in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def every_thread() -> torch._C._profiler._ExperimentalConfig:
    """The profiler option to record ranges of all threads, not only of the one that starts it."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def _forms(name: str) -> list:
    """An aten operator in all forms in which Python calls it."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return []
    ops = [packet, *(getattr(packet, overload) for overload in packet.overloads())]
    return ops + [getattr(place, name) for place in (torch, torch._C._nn) if hasattr(place, name)]


#: `F.scaled_dot_product_attention`, in all forms in which Python calls it.
sdpa_forms = frozenset(_forms("scaled_dot_product_attention"))
#: torch's other operators that compute attention, in all forms: what they are called.
other_attention = {op: name for name in _OTHER_ATTENTION.split() for op in _forms(name)}
other_attention[_flex_operator] = "flex_attention"

#: The classes of torch's operators, `torch.ops.aten.add` and `torch.ops.aten.add.Tensor`.
OPERATORS = (OpOverload, OpOverloadPacket)

#: What a reentrant checkpoint reads of its inputs, where function modes see it, once its context
#: holds `run_function` and before it calls that. Functions compiled before show modes nothing.
read_by_checkpoints = Tensor.device.__get__


def reentrant_checkpoints() -> list:
    """The contexts of the reentrant checkpoints whose forward passes run here, innermost first.

    Their forward passes turn gradients off, so where they are on, nobody looks.
    """
    frame: FrameType | None = None if torch.is_grad_enabled() else sys._getframe(1)
    nodes = []
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            nodes.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return nodes


def shares_storage(one: Tensor, two: Tensor) -> bool:
    """True if two tensors are views of one storage, of any device, meta included."""
    return one.untyped_storage()._cdata == two.untyped_storage()._cdata

"""Functions around attention, computed so that no layout changes a bit of them.

While a module on a reproducible layout runs forward, a mode of torch stands in for the functions
whose bits, or whose weights' gradients, depend on which tokens a rank has:

    linear, x @ matrix       rows in one routine; weight gradients as exact sums over all ranks
    norms                    without weights; these are multiplied afterwards
    x + w, x * w, where ...  a weight spread over tokens; its gradient as an exact sum
    embedding                likewise
    silu, sigmoid, gelu ...  by exp, log and erf, which no vector's end rounds otherwise

Any other function of a weight and of tokens is refused by name, before it is computed, and so are
functions of tokens that torch computes otherwise at a vector's end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..carry.scan import halo
from ..declare.layout_file import HEADS
from ..errors import UnsupportedError
from ..layout import Layout
from ..masks import Documents
from . import activations
from .sums import ExactSums, exact_linear, lookup, spread

#: On a tensor that was made of weights alone.
_OF_WEIGHTS = "weft_of_weights"


def exact_sums(layout: Layout, *axes: str) -> ExactSums:
    """Sums over the ranks that split some axes, default all that split data."""
    dims = {d for axis in axes for d in layout.shard_dims(axis)} if axes else layout.data_dims
    return ExactSums(layout.bound, tuple(d for d in layout.mesh if d in dims))


def make_reproducible(model: nn.Module, layout: Layout) -> nn.Module:
    """Has a module compute the same bits as on any other reproducible layout; the same module.

    Its loss sums over tokens by `exact_sums`. Raises `UnsupportedError` if heads are split, so that
    projections are sums over ranks; or, in a forward pass, if a weight meets tokens in a function
    that has no rule here.

    >>> layout = Layout.single(reproducible=True)
    >>> layer = make_reproducible(nn.Linear(4, 2), layout)
    >>> layer(torch.ones(3, 4)).sum().backward()
    >>> layer.bias.grad
    tensor([3., 3.])
    """
    hooks(model, layout)
    return model


def hooks(model: nn.Module, layout: Layout) -> list[RemovableHandle]:
    """Hooks that `make_reproducible` registers on a model and its modules, and its refusals.

    On all modules, as those that are computed again in a backward pass are not within the model's.
    """
    split = layout.shard_dims(HEADS)
    if split:
        raise UnsupportedError(
            f"{layout.source}: mesh dims {split} split heads, whose projections are sums over ranks"
            " in another order on each layout; in a reproducible layout split heads by ulysses,"
            " within attention alone, or call weft.attention with this layout yourself"
        )
    mode, within, seen = _Reproducible(exact_sums(layout)), list[nn.Module](), set[str]()

    def enter(module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                f"{type(module).__name__} is compiled, and graphs have torch's own functions, whose"
                " bits depend on the layout; leave out torch.compile on a reproducible layout"
            )
        if not within:
            mode.__enter__()
        within.append(module)

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        if within and within[-1] is module:  # another hook may have raised before `enter`
            within.pop()
            if not within:
                mode.__exit__(None, None, None)
                if not seen and output is not None and torch.is_grad_enabled():
                    check_graph(output)
                    seen.add("its graph")

    result = []
    for module in model.modules():
        result.append(module.register_forward_pre_hook(enter))
        result.append(module.register_forward_hook(leave, always_call=True))
    return result


def causal_convolution(
    x: Tensor,
    taps: Tensor,
    layout: Layout,
    axis: str,
    length: int,
    documents: Documents | None = None,
) -> Tensor:
    """A causal convolution per channel, (b, t, c) to (b, t, c), the same bits on every layout.

    `taps` are (c, k), the last one of the token itself; `length` is global. Tap by tap: of the
    gradient of a token every tap gives one summand, on whichever rank its tokens are, and these are
    added up on the token's own rank.

    >>> x, layout = torch.ones(1, 4, 1), Layout.single(reproducible=True)
    >>> causal_convolution(x, torch.tensor([[1.0, 2.0]]), layout, "tokens", 4).flatten()
    tensor([2., 3., 3., 3.])
    """
    width = taps.shape[1]
    by_tap = torch.stack([x] * width, -1).flatten(2)

    def run(columns: Tensor) -> Tensor:
        tokens = columns.shape[1] - width + 1
        shifted = enumerate(columns.unflatten(2, (-1, width)).unbind(-1))
        return torch.stack([part.narrow(1, at, tokens) for at, part in shifted], -1).flatten(2)

    parts = halo(
        run, by_tap, width - 1, layout, axis, length=length, documents=documents
    ).unflatten(2, (-1, width))
    terms = [part * tap for part, tap in zip(parts.unbind(-1), taps.unbind(-1))]
    return functools.reduce(torch.add, terms)


#: Nodes of autograd that sum the gradient of a weight over the tokens of all ranks.
_SUMS = ("_LinearBackward", "_SpreadBackward", "_LookupBackward")


def check_graph(output: Any) -> None:
    """Raise if weights meet tokens in a function of autograd that no mode of torch sees.

    Such are fused kernels, whose gradients are sums over this rank's tokens in torch's order.
    """
    roots = [t.grad_fn for t in _tensors([output]) if t.grad_fn is not None]
    of_weights: dict[Any, bool] = {}  # by node; False: tokens enter it
    pending = list(roots)
    while pending:
        node = pending[-1]
        below = [n for n, _ in node.next_functions if n is not None]
        missing = [n for n in below if n not in of_weights]
        if missing and node not in of_weights:
            pending += missing
            continue
        pending.pop()
        if node in of_weights:
            continue
        if hasattr(node, "variable"):
            of_weights[node] = isinstance(node.variable, nn.Parameter)
            continue
        kinds = {of_weights[n] for n in below}
        if node.name() not in _SUMS and len(kinds) == 2:
            raise UnsupportedError(
                f"a weight meets tokens in {node.name().removesuffix('Backward')}, a function of"
                " autograd whose gradient is a sum over this rank's tokens in an order of its own;"
                " on a reproducible layout use torch's functions (linear, norms, embedding)"
            )
        of_weights[node] = node.name() not in _SUMS and kinds == {True}


class _Reproducible(TorchFunctionMode):
    """Stands in for functions of torch, by `_RULES`."""

    def __init__(self, sums: ExactSums) -> None:
        super().__init__()
        self.sums = sums

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _RANDOM and kwargs.get("generator") is None:
            raise _drawn(name)
        if func in _RULES:
            result = _RULES[func](self.sums, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors = [*_tensors((*args, *kwargs.values()))]
        weights = [t for t in tensors if _is_of_weights(t)]
        if len(weights) < len(tensors):
            _check_steady(name, args, tensors)
        if not weights:
            return func(*args, **kwargs)
        shape = tuple(weights[0].shape)
        if all(_is_of_weights(t) or _is_constant_of(t, shape) for t in tensors):
            if name == "__getitem__" and not all(map(_of_all_ranks, _flat(args[1:]))):
                raise UnsupportedError(
                    f"part of a weight of shape {shape} may be another one on each rank, so that"
                    " its gradient has no reproducible sum; use a whole weight, or embedding"
                )
            result = func(*args, **kwargs)
            for t in _tensors((result,)):
                if t.requires_grad:
                    setattr(t, _OF_WEIGHTS, True)
            return result
        if name not in _ELEMENTWISE:
            raise UnsupportedError(
                f"torch's {name} of a weight of shape {shape} and of tokens has a gradient whose"
                " bits depend on the layout; reproducible layouts know linear, norms, embedding"
                " and functions element by element"
            )
        whole = torch.broadcast_shapes(*(t.shape for t in tensors))
        args = tuple(_over(self.sums, a, whole) for a in args)
        return func(*args, **{key: _over(self.sums, a, whole) for key, a in kwargs.items()})


def _drawn(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch's {name} draws other numbers for a token on each layout; on a reproducible layout "
        "set dropout to 0, and draw noise before the model is called, for all tokens"
    )


def _over(sums: ExactSums, x: Any, shape: Sequence[int]) -> Any:
    """A weight spread over tokens; anything else as it is."""
    return spread(x, shape, sums) if isinstance(x, Tensor) and _is_of_weights(x) else x


def _is_of_weights(t: Tensor) -> bool:
    return t.requires_grad and (isinstance(t, nn.Parameter) or hasattr(t, _OF_WEIGHTS))


def _is_constant_of(t: Tensor, shape: tuple[int, ...]) -> bool:
    """True for a tensor without tokens: one number, or of a weight's shape, such as its norm."""
    return not t.requires_grad and (t.dim() == 0 or tuple(t.shape) == shape)


def _check_steady(name: str, args: tuple, tensors: Sequence[Tensor]) -> None:
    """Raise for a function of tokens whose bits depend on where in memory a token is."""
    floats = [t for t in tensors if t.is_floating_point() and t.dim() > 1]  # of one dim: constants
    if not floats:
        return
    plain = name.strip("_")
    if plain in _POWERS:
        power = args[1] if len(args) > 1 else None
        small = any(t.element_size() < 4 for t in floats)
        steady = not isinstance(power, Tensor) and power in _STEADY_POWERS[small]
    elif plain == "rsqrt":
        steady = all(t.element_size() >= 4 for t in floats)
    else:
        frozen = any(isinstance(t, nn.Parameter) and not t.requires_grad for t in tensors)
        steady = plain not in _UNSTEADY and name not in _IN_PLACE
        steady &= not (frozen and plain in _PRODUCTS)
    if not steady:
        raise UnsupportedError(
            f"torch's {name} rounds a number by its place in memory, so that its bits depend on the"
            " layout; on a reproducible layout use linear, and functions such as silu, gelu,"
            " sigmoid, softplus, tanh, exp, log, sqrt, and x ** 2 or x ** 3"
        )


def _of_all_ranks(index: Any) -> bool:
    """True if an index selects the same part of a weight on every rank."""
    return isinstance(index, int) or index in (None, Ellipsis, slice(None))


def _flat(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, tuple | list | Mapping):
            yield from _flat(value)
        else:
            yield value


def _tensors(values: Any) -> Iterator[Tensor]:
    return (t for t in _flat(values) if isinstance(t, Tensor))


_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "exponential_"),
    *("dropout_", "alpha_dropout_", "feature_dropout", "feature_dropout_", "rrelu", "rrelu_"),
    *("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"),
}

_ELEMENTWISE = {
    *(
        f"{front}{name}{back}"
        for name, (front, back) in itertools.product(
            ("add", "sub", "mul", "div", "truediv", "radd", "rsub", "rmul", "rtruediv"),
            (("", ""), ("__", "__")),
        )
    ),
    *("rsub", "true_divide", "subtract", "multiply", "divide", "where", "maximum", "minimum"),
}

#: Functions that torch computes by other instructions at the end of a vector, forward or backward.
_UNSTEADY = {
    *("elu", "celu", "selu", "mish", "sinh", "cosh", "exp2", "float_power", "rpow", "i0e"),
    *("logaddexp", "logaddexp2", "atan2", "arctan2", "special_i0e", "special_exp2"),
    *("expit", "special_expit", "cdist"),
    *(f"{front}{name}" for front in ("a", "arc") for name in ("cos", "sin", "cosh", "sinh")),
    *("atanh", "arctanh"),
}
#: Products with a frozen weight that have no rule.
_PRODUCTS = {
    *("matmul", "mm", "bmm", "mv", "einsum", "tensordot", "inner", "bilinear", "baddbmm", "addmm"),
    *("conv1d", "conv2d", "conv3d"),
}
#: Those that have a rule, in place.
_IN_PLACE = {"sigmoid_", "silu_"}
_POWERS = {"pow", "ipow"}
#: Powers that are products, quotients and roots; of numbers of less than 4 bytes fewer are.
_STEADY_POWERS = {False: (-1, -0.5, 0.5, 1, 2, 3), True: (-1, 1, 2, 3)}


# -- rules: (sums, the function, its arguments); NotImplemented leaves a call to the others --------


def _linear(
    sums: ExactSums, func: Callable, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return exact_linear(input, weight, sums, bias)


def _matmul(sums: ExactSums, func: Callable, x: Any, matrix: Any) -> Any:
    """Product with a weight, or with a matrix without gradient: frozen, or a buffer."""
    if not isinstance(x, Tensor) or not isinstance(matrix, Tensor) or _is_of_weights(x):
        return NotImplemented
    if x.dim() < 2 or not x.is_floating_point() or matrix.dim() not in (1, 2):
        return NotImplemented
    if matrix.requires_grad and not _is_of_weights(matrix):
        return NotImplemented
    if matrix.dim() == 1:
        return exact_linear(x, matrix[None], sums)[..., 0]
    return exact_linear(x, matrix.t(), sums)


def _weighted(sums: ExactSums, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        out = out * _over(sums, weight, out.shape)
    if bias is not None:
        out = out + _over(sums, bias, out.shape)
    return out


def _layer_norm(
    sums: ExactSums,
    func: Callable,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    plain = func(input.contiguous(), normalized_shape, None, None, eps)
    return _weighted(sums, plain, weight, bias)


def _rms_norm(
    sums: ExactSums,
    func: Callable,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    plain = func(input.contiguous(), normalized_shape, None, eps)
    return _weighted(sums, plain, weight, None)


def _embedding(
    sums: ExactSums,
    func: Callable,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedError(
            "an embedding with max_norm or scale_grad_by_freq depends on which tokens a rank has"
        )
    return lookup(input, weight, sums, padding_idx)


def _dropout(
    sums: ExactSums,
    func: Callable,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if p and training:
        raise _drawn(func.__name__)
    return input


def _addmm(
    sums: ExactSums, func: Callable, input: Tensor, x: Tensor, weight: Tensor, **factors: float
) -> Any:
    result = NotImplemented if factors else _matmul(sums, func, x, weight)
    return result if result is NotImplemented else _weighted(sums, result, None, input)


def _alone(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule of a function of single numbers, which needs no sums."""
    return lambda sums, func, *args, **kwargs: function(*args, **kwargs)


_RULES: dict[Callable, Callable] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    torch.dropout: _dropout,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    F.silu: _alone(activations.silu),
    F.gelu: _alone(activations.gelu),
    F.softplus: _alone(activations.softplus),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid), _alone(activations.sigmoid)),
}

"""Modules that try to fool fields: exact beside one device, refused, or as torch raises."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import different, grid, verdict
from fp64 import whole
from torch import Tensor
from world import draw

import weft
from weft import Field, Layout, WeftError

torch.manual_seed(0)
X = torch.randn(2, 16, 16, dtype=torch.float64)
IDS = torch.randint(0, 9, (2, 16))
TABLE = 3 * torch.randn(9, 4, dtype=torch.float64)


class Double(torch.autograd.Function):
    """Mixes positions forward and backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.mean(1, keepdim=True) + (g * x).mean(1, keepdim=True)


class Sized(torch.autograd.Function):
    """Treats positions alike forward, and reads how many there are backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * g.shape[1]


def hooked(y: Tensor) -> Tensor:
    """Squares the gradient that comes to it."""
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * gradient)
    return y


def written(write: Callable[[Tensor], object]) -> Callable:
    """Gives a copy after a write into it."""

    def after(x, *_):
        y = x.clone()
        write(y)
        return y

    return after


def into_buffer(x, i, w):
    buffer = torch.zeros(2, 16, 16, dtype=x.dtype)
    torch.mul(x, 2, out=buffer)
    return buffer + x


def added_to_buffer(x, i, w):
    buffer = torch.zeros(16, 16, dtype=x.dtype)
    buffer += x[0]
    return buffer + x


def slice_of_buffer(x, i, w):
    buffer = torch.zeros(2, 16, 16, dtype=x.dtype)
    buffer[:, 2:5] = x[:, 2:5]
    return buffer + x


def set_data(x, i, w):
    y = x * 1
    y.data = x * 3
    return y


def rand_by_shape(x, i, w):
    torch.manual_seed(5)
    return x + torch.rand(x.shape, dtype=x.dtype)


def positions(x):
    return torch.arange(16, dtype=x.dtype)[:, None]


#: Name -> a function of x (2, 16, 16) and ids (2, 16), whose dim 1 is split, and a plain table.
MODULES: dict[str, Callable] = {
    "outer product of one axis": lambda x, i, w: (
        (x[:, :, None, :1] - x[:, None, :, :1]).square().sum((1, 2)) * x[:, :1, :1]
    ),
    "outer sum over one": lambda x, i, w: (x[:, :, None] * x[:, None, :]).sum(2),
    "x * x.transpose": lambda x, i, w: x * x.transpose(1, 2),
    "x + x.mT then softmax": lambda x, i, w: (x + x.mT).softmax(-1),
    "cross entropy over split classes": lambda x, i, w: (
        F.cross_entropy(x[:, :, 0], torch.tensor([3, 12])) * x
    ),
    "nll_loss": lambda x, i, w: F.nll_loss(x[:, :, 0].log_softmax(-1), torch.tensor([3, 12])) * x,
    "kl_div batchmean": lambda x, i, w: (
        F.kl_div(x.log_softmax(-1), x.softmax(-1) * 0.5, reduction="batchmean") * x
    ),
    "mse mean": lambda x, i, w: F.mse_loss(x, x * 2) * x,
    "cosine similarity of tokens": lambda x, i, w: (
        F.cosine_similarity(x, x * 2 + 1, dim=1)[:, None] * x
    ),
    "data-dependent if": lambda x, i, w: x * 2 if (x > 2.5).any() else x * 3,
    "item": lambda x, i, w: x * int(x.abs().max().item() * 7),
    "tolist": lambda x, i, w: x * sum(i[0].tolist()),
    "numpy": lambda x, i, w: x * float(np.asarray(i).sum()),
    ".numpy()": lambda x, i, w: x * float(i.numpy().sum()),
    "iterate": lambda x, i, w: torch.stack([r * 2 for r in x]),
    "rand_like": lambda x, i, w: x + torch.rand_like(x),
    "bernoulli": lambda x, i, w: x * torch.bernoulli(x.sigmoid()),
    "empty_like().normal_()": lambda x, i, w: x + torch.empty_like(x).normal_(),
    "dropout": lambda x, i, w: F.dropout(x, 0.5, True),
    "gumbel": lambda x, i, w: F.gumbel_softmax(x),
    "multinomial": lambda x, i, w: torch.multinomial(x[:, 0].softmax(-1), 1) + x,
    "rand(shape), one seed": rand_by_shape,
    "out= a plain buffer": into_buffer,
    "+= a plain buffer": added_to_buffer,
    "write into a plain slice": slice_of_buffer,
    ".data.add_": written(lambda y: y.data.add_(1)),
    "x.data = y": set_data,
    "resize_": written(lambda y: y.resize_(2, 8, 32)),
    "embedding max_norm": lambda x, i, w: (
        F.embedding(i, w.detach().clone(), max_norm=1.0).sum(-1, keepdim=True) * x
    ),
    "embedding scale_grad_by_freq": lambda x, i, w: F.embedding(i, w, scale_grad_by_freq=True),
    "embedding padding_idx": lambda x, i, w: F.embedding(i, w, 3),
    "custom function with mean": lambda x, i, w: Double.apply(x),
    "custom function, then +": lambda x, i, w: Double.apply(x) + x,
    "custom function, local": lambda x, i, w: Sized.apply(x) + x,
    "data_ptr": lambda x, i, w: x * (x.data_ptr() != 0),
    "storage": lambda x, i, w: x * x.untyped_storage().nbytes(),
    "numel, shape": lambda x, i, w: x / x.numel() * x.shape[1] * len(x),
    "compile": lambda x, i, w: torch.compile(
        lambda a: (a * 2).sin().mean(1, keepdim=True) * a, backend="eager"
    )(x),
    "jit": lambda x, i, w: torch.jit.trace(
        lambda a: a * a.shape[1], torch.ones(2, 16, 16, dtype=torch.float64)
    )(x),
    "vmap": lambda x, i, w: torch.vmap(lambda a: a * a.mean(0))(x),
    "func.grad": lambda x, i, w: torch.func.grad(lambda a: (a * a.mean(1, keepdim=True)).sum())(x),
    "view dtype": lambda x, i, w: x.view(torch.int64).double(),
    "prelu": lambda x, i, w: F.prelu(x, w.flatten()[:16]),
    "where plain n": lambda x, i, w: torch.where(positions(x) > 7, x, 0.0),
    "x @ x.mT": lambda x, i, w: (x @ x.mT).softmax(-1) @ x,
    "sums of parts": lambda x, i, w: torch.cat([p.sum(1, keepdim=True) for p in x.split(5, 1)], 1),
    "set a position": written(lambda y: y.__setitem__((slice(None), 3), 0.0)),
    "write into a slice": written(lambda y: y[:, 2:9].mul_(0)),
    "write at True": written(lambda y: y.__setitem__(True, 2.0)),
    "write at a number that is a tensor": written(lambda y: y[:, torch.tensor(3)].mul_(0)),
    "write into features": written(lambda y: y[..., :3].mul_(0)),
    "write into a transposed one": written(lambda y: y.transpose(1, 2)[:, :3].zero_()),
    "write into a position": written(lambda y: y[:, 3].mul_(0)),
    "write into a reshaped one": written(lambda y: y.view(2, 8, 2, 16).mul_(0)),
    "write into a part of windows": written(lambda y: y.view(2, 2, 8, 16)[:, 0].mul_(0)),
    "write into a flipped one": written(lambda y: y.flip(1).mul_(0)),
}
#: Their results are of chance: a field draws other numbers than one device.
RANDOM = {"rand_like", "bernoulli", "empty_like().normal_()", "dropout", "gumbel", "multinomial"}


@pytest.mark.parametrize("line", ["tokens: ring=2", "tokens: ring=3", "tokens(zigzag): ring=2"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_do_not_fool_fields(name, line):
    at = {"tokens": 1}
    found = verdict(MODULES[name], (X, IDS, TABLE), {}, Layout.parse(line), [at, at, {}])
    assert found.kind in ("exact", "both raise", "refused", *(["random"] * (name in RANDOM))), found


IMAGE = torch.arange(2.0 * 3 * 7 * 5, dtype=torch.float64).view(2, 3, 7, 5) / 7 - 11
ROWS = torch.arange(1.0, 7.0, dtype=torch.float64).view(1, 1, 6, 1)
TIES = torch.tensor([5.0, 1, 0, 5, 5, 2], dtype=torch.float64).view(1, 1, 6, 1)


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def each(write):
    """Applies a write to every part."""

    def all_of(parts):
        for part in parts:
            write(part)

    return all_of


#: Writes into a result, after which x is read: views share storage, copies do not.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "x[:, :, 0]": lambda x: x[:, :, 0].zero_(),
    "x[:, :, -1]": lambda x: x[:, :, -1].mul_(2),
    "x[:, :, 1:2]": lambda x: x[:, :, 1:2].zero_(),
    "x[:, :, 2:5]": lambda x: x[:, :, 2:5].zero_(),
    "x[None]": lambda x: x[None].mul_(3),
    "select": lambda x: x.select(2, 3).fill_(5),
    "unbind": lambda x: each(lambda r: r.mul_(2))(x.unbind(2)),
    "chunk": lambda x: each(lambda r: r.add_(1))(x.chunk(2, 2)),
    "split": lambda x: each(lambda r: r.add_(1))(x.split(3, 2)),
    "flatten": lambda x: x.flatten(2).zero_(),
    "view that merges": lambda x: x.view(2, 3, 35).add_(1),
    "view of others": lambda x: x.view(6, 7, 5).add_(1),
    "view of windows": lambda x: x[:, :, :6].unflatten(2, (3, 2))[:, :, :, 0].zero_(),
    "permute": lambda x: x.permute(0, 2, 3, 1).mul_(3),
    "transpose": lambda x: x.transpose(2, 3).mul_(3),
    "mT": lambda x: x.mT.mul_(3),
    "unsqueeze": lambda x: x.unsqueeze(0).mul_(3),
    "detach": lambda x: x.detach().mul_(3),
    "data": lambda x: x.data.mul_(3),
    "narrow": lambda x: x.narrow(2, 1, 3).neg_(),
    "contiguous": lambda x: x.contiguous().zero_(),
    "to": lambda x: x.to(torch.float64).zero_(),
    "double": lambda x: x.double().zero_(),
    "float": lambda x: x.float().zero_(),
    "reshape": lambda x: x.reshape(2, 3, 7, 5).zero_(),
    "pad by nothing": lambda x: F.pad(x, (0, 0, 0, 0)).zero_(),
    "relu in place": lambda x: F.relu(x, inplace=True),
    "silu in place": lambda x: F.silu(x, inplace=True),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, False).zero_(),
    "clone": lambda x: x.clone().zero_(),
    "roll": lambda x: x.roll(0, 2).zero_(),
    "x += x.mean()": lambda x: x.__iadd__(x.mean()),
    "x *= plain": lambda x: x.__imul__(torch.arange(35.0).view(7, 5).double()),
}


@pytest.mark.parametrize("text", ["2x2", "3x1", "z2x1"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_into_results_are_those_of_one_device(name, text):
    def run(x):
        WRITES[name](x)
        return x * 1

    where = [{"height": 2, "width": 3}]
    found = verdict(run, (IMAGE,), {}, grid(text), where, grads=False)
    assert found.kind in ("exact", "both raise", "refused"), found


def filled(y: Tensor, x: Tensor, index=None) -> Tensor:
    """A tensor after a write to it where it is expanded."""
    y.expand_as(x).fill_(2) if index is None else y.expand_as(x).__setitem__(index, 2)
    return y


def at(n: int, *dims: int) -> list[dict[str, int]]:
    """The first n tensors split along two dims, height and width."""
    return [dict(zip(("height", "width"), dims or (2, 3)))] * n + [{}] * 3


Q, K, V = draw(3, 2, 4, 12, 8).unbind(0)
SEEN = (draw(2, 1, 12, 12, seed=1) > -0.5) | torch.eye(12).bool()
GATE = draw(3, 3, 6, 1)
FEW = draw(1, 2, 2, 3)
ALL_KEYS = [{"height": 2}] * 3
BESIDE = {
    "height beside width": [{"height": 2}, {"width": 3}],
    "both beside height": [{"height": 2, "width": 3}, {"height": 2}],
    "height beside both": [{"height": 2}, {"height": 2, "width": 3}],
}

#: Name -> a function of an image, or (function, tensors, their splits): as torch gives, or raises.
CALLS: dict[str, Callable | tuple] = {
    "where of one argument": lambda x: torch.where(x > 0),
    "expand": lambda x: x[None].expand(2, 2, 3, 7, 5),
    "a row out of range": lambda x: x[:, :, 7],
    "negative step": lambda x: x[:, :, ::-1],
    "index by True": lambda x: x[True],
    "unflatten with 0": lambda x: x[:, :, :0].unflatten(2, (0, 2)),
    "mean of integers": lambda x: x.long().mean(),
    "sum in fp32": (lambda x: x.sum(dtype=torch.float32), [IMAGE.round()], at(1)),
    "extreme of nan": lambda x: x.masked_fill(x > 5, float("nan")).amax((2, 3)),
    "a list of negative indices": lambda x: x[:, :, [-1, 2, -3]],
    "a square by its transpose": lambda x: x[..., :5, :] * x[..., :5, :].transpose(2, 3),
    "two fractions": lambda x: x * 1.25 - x * 1.75,
    "a mean, then of integers": lambda x: x.mean(2) + x.long().mean(2),
    "a loss of split targets": lambda x: F.cross_entropy(
        x, (x[:, 0] > -8).long() * 102 - 100, ignore_index=-100
    ),
    "norm of matrices": lambda x: torch.linalg.norm(x[0, 0], 1),
    "norm with a nan": lambda x: torch.linalg.vector_norm(
        x.masked_fill(x > 5, float("nan")), 2.0, (2, 3)
    ),
    "prelu of weights by ranks": lambda x: F.prelu(x.permute(0, 3, 1, 2).contiguous(), x[0, 0, 0]),
    "negative dilation": lambda x: F.conv2d(x, ones(4, 3, 1, 1), dilation=-1),
    "max with indices": lambda x: tuple(x.max(1)),
    "take of one": (lambda x: (x.take(torch.tensor(0)).mul_(3), x)[1], [draw(1)], [{"height": 0}]),
    "nan_to_num_ of complex numbers": lambda x: (x * 1j).nan_to_num_().abs(),
    "shares of no classes": lambda x: F.cross_entropy(x[:, :0], x[:, :0]),
    "convolution of other groups": lambda x: F.conv2d(x, ones(4, 1, 3, 3), groups=3),
    "roll of nothing over no dim": lambda x: x[:, :, :0].roll((1, 1), (0, 9)),
    "cumsum": lambda x: x.cumsum(2),
    "softmax": lambda x: x.softmax(2),
    "repeat of fewer dims": lambda x: x.repeat(2),
    "strides": lambda x: x.contiguous().stride(),
    "is_contiguous": lambda x: x.permute(0, 2, 3, 1).is_contiguous(),
    "iterate": lambda x: list(x.permute(2, 0, 1, 3))[6],
    "len": lambda x: len(x.permute(2, 0, 1, 3)),
    "float": lambda x: float(x.sum()),
    "format": lambda x: f"{x.mean():.3f}",
    "cat along rows": lambda x: torch.cat([x, x], 2),
    "to device and dtype": (lambda x: x.to("cpu", torch.float32), [IMAGE.round()], at(1)),
    "to another field": (lambda x: x.to(x.float()), [IMAGE.round()], at(1)),
    "pixel_shuffle without a batch": lambda x: F.pixel_shuffle(x.flatten(0, 1)[:4], 2),
    "pixel_unshuffle that does not fit": lambda x: F.pixel_unshuffle(x, 2),
    "plain positions": lambda x: x + torch.arange(x.shape[2]).view(-1, 1),
    "one row, kept as a dim": (lambda x: x - x[:, :, :1], [ROWS], at(1)),
    "largest of negatives": (lambda x: x.amax(2), [draw(1, 2, 2, 3) - 9], at(1)),
    "ties of amax": (lambda x: x.amax((2, 3)), [TIES], at(1)),
    "ties of amin": (lambda x: (-x).amin((2, 3)), [TIES], at(1)),
    "ties of max": (lambda x: x.max(), [TIES], at(1)),
    "gate of a convolution over all rows": (
        lambda x, w: x * F.conv2d(x, w).sigmoid(),
        [draw(2, 3, 6, 5), GATE],
        at(1),
    ),
    "the same, of a plain image": (
        lambda y, x, w: y * F.conv2d(x, w).sigmoid(),
        [draw(2, 3, 6, 5), draw(2, 3, 6, 5), GATE],
        [{}, *at(1)],
    ),
    "expand of it": (
        lambda x, w: F.conv2d(x, w).expand(2, 3, 6, 5),
        [draw(2, 3, 6, 5), GATE],
        at(1),
    ),
    "squeeze of it": (lambda x, w: F.conv2d(x, w).squeeze(2), [draw(2, 3, 6, 5), GATE], at(1)),
    "cat with an empty one": (
        lambda a, b: torch.cat([a, b], 1),
        [ones(0), draw(5, 5)],
        [{"height": 0}, {"height": 0, "width": 1}],
    ),
    "cat with a plain empty one": (
        lambda a, b: torch.cat([a, b], 1),
        [ones(0), draw(5, 5)],
        [{}, {"height": 0, "width": 1}],
    ),
    "cat of two empty ones": (lambda a: torch.cat([a, a]), [ones(0)], [{"height": 0}]),
    "batch norm of one dim": (
        lambda x: F.batch_norm(x, None, None, training=True),
        [draw(6)],
        [{"height": 0}],
    ),
    "pool of few channels": (lambda x: F.max_pool2d(x, 2), [draw(1, 2, 6, 6)], at(1, 1, 2)),
    "attention, keys whole and values split": (
        F.scaled_dot_product_attention,
        [Q, K, V],
        [{}, {}, {"height": 2}],
    ),
    "attention, keys whole, the others split": (
        F.scaled_dot_product_attention,
        [Q, K, V],
        [{"height": 2}, {}, {"height": 2}],
    ),
    "attention with a mask per sample": (
        F.scaled_dot_product_attention,
        [Q, K, V, SEEN],
        [*ALL_KEYS, {}],
    ),
    "attention with one mask": (
        F.scaled_dot_product_attention,
        [Q, K, V, SEEN[:1]],
        [*ALL_KEYS, {}],
    ),
    "gradients of complex numbers": lambda x: (
        torch.complex(x, x * 2).cumsum(2).roll(1, 2) * x
    ).abs(),
    "gradients of complex sums": lambda x: (torch.complex(x, x * x) * 1j).sum((2, 3)).abs(),
    "a sum of small integers": lambda x: (x * 100).long().sum(2, dtype=torch.int8),
    "a running sum of small integers": lambda x: (x > 0).cumsum(2, dtype=torch.int8),
    "a hook on gradients": lambda x: hooked(x * 2) * x,
    "a hook on the gradient of a mean": lambda x: hooked(x.mean((2, 3), True)) * x,
    "causal attention to fewer keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [Q, K[:, :, :7], V[:, :, :7]],
        ALL_KEYS,
    ),
}
CALLS |= {
    "write into an expanded one": (lambda x: x[:, :, :1].expand_as(x).mul_(2), [FEW], at(1)),
    "fill an expanded one": (lambda x: filled(x.mean(2, True), x), [FEW], at(1)),
    "set in an expanded one": (lambda x: filled(x.mean(2, True), x, ...), [FEW], at(1)),
    "mask behind an ellipsis": lambda x: x[..., x[0, 0, 0] > -11],
    "index by no positions": lambda x: x[:, []],
    "unbind of nothing": lambda x: x[:, :, :0].unbind(2),
    "take_along_dim out of range": lambda x: x.take_along_dim(torch.tensor([[[[8]]]]), 1),
    "in place after a convolution over all rows": (
        lambda x, w: F.relu(F.conv2d(x, w), inplace=True),
        [draw(2, 3, 6, 5), GATE],
        at(1),
    ),
    "index into no positions": lambda x: x[:, :0, [0, 9]],
    "adaptive pool of nothing": lambda x: F.adaptive_avg_pool2d(x[:, :, :0], (None, 1)),
    "circular pad of nothing": lambda x: F.pad(x[:, :, :1], (1, 1, -1, 1), "circular"),
    "instance norm of no channels": lambda x: F.instance_norm(x[:, :0]),
    "einsum of booleans": lambda x: torch.einsum("bchw,bchv->bchv", x > 0, x[..., :1] > 0),
    "tensordot of small integers": lambda x: torch.tensordot(x[:1].int(), x.int(), ([0], [0])),
    "logsumexp of booleans": lambda x: (x > 0).logsumexp(2),
    "softmin of small integers": lambda x: F.softmin(x.to(torch.uint8), 2, dtype=torch.float64),
    "addbmm of small integers": lambda x: torch.addbmm(
        ones(7, 7).int(), x[:, 0].int(), x[:, 0].int().mT
    ),
    "vecdot of complex numbers": lambda x: torch.linalg.vecdot(x * 1j + x, x + 2j, dim=2).real,
    "rms norm of complex numbers": lambda x: F.rms_norm(x * 1j + x, (7, 5)).abs(),
    "std of equal numbers": lambda x: (x * 0).std((2, 3)) + x.std((2, 3)),
    "masked_scatter into a plain one": lambda x: ones(2).masked_scatter(ones(2) > 0, x),
    "attention with a mask that splits keys": (
        F.scaled_dot_product_attention,
        [draw(2, 2, 3, 4), draw(2, 2, 6, 4), draw(2, 2, 6, 4), draw(3, 6)],
        [{"height": 0}, {}, {}, {"height": 1}],
    ),
}
CALLS |= {
    f"circular pads {pads}": (
        lambda x, pads=pads: F.pad(x, pads, "circular"),
        [torch.arange(8.0).double().view(1, 1, 2, 4)],
        at(1),
    )
    for pads in (
        [-1, 1, 0, 0],
        [-1, 2, 0, 0],
        [1, -1, 0, 0],
        [-2, 1, 0, 0],
        [0, 0, -1, 1],
        [-1, -1, 0, 0],
    )
}
CALLS |= {
    f"interpolate by 1.2, {mode}": (
        lambda x, mode=mode: F.interpolate(x, scale_factor=1.2, mode=mode),
        [torch.arange(4.0).double().view(1, 1, 4, 1).expand(1, 1, 4, 2).contiguous()],
        at(1),
    )
    for mode in ("nearest", "nearest-exact", "bilinear")
}
CALLS |= {
    f"index {n}": lambda x, index=index: x[index]
    for n, index in enumerate(
        [
            (0, None, torch.tensor([-1, 1])),
            (0, None, torch.tensor([-1, 1]), 1),
            (slice(None), 1, None, torch.tensor([-1, 2, -2])),
            (0, slice(None), torch.tensor([1, 2])),
            (slice(None), torch.tensor([0, 1]), slice(None), 0),
            (torch.tensor([0]), None, 1, torch.tensor([1, 2])),
            (slice(None), torch.tensor([0, 1]), 1, torch.tensor([1, 2])),
        ]
    )
}
CALLS |= {
    f"{name} by numpy's names": fn
    for name, fn in {
        "sort": lambda x: x.sort(axis=2)[0],
        "argsort": lambda x: torch.argsort(x, axis=-2),
        "median": lambda x: x.median(axis=2, keepdims=True)[0],
        "sum": lambda x: x.sum(axis=(2, 3), keepdims=True),
        "cat": lambda x: torch.cat([x, x], axis=2),
    }.items()
}
CALLS |= {
    f"{name}, {place}": (fn, [draw(1, 2, 6, 4), draw(1, 2, 6, 4, seed=1)], where)
    for place, where in BESIDE.items()
    for name, fn in {
        "x + y": lambda x, y: x + y,
        "y + x": lambda x, y: y + x,
        "cat([x, y])": lambda x, y: torch.cat([x, y], 1),
        "cat([y, x])": lambda x, y: torch.cat([y, x], 1),
        "mean of a sum": lambda x, y: (x + y).mean((2, 3)),
        "norm of a product": lambda x, y: F.group_norm(x * y, 1),
        "x + a row of y": lambda x, y: x + y[:, :, :1],
        "sum of two means": lambda x, y: x.mean() + y.mean(),
        "pool of a sum": lambda x, y: F.avg_pool2d(x + y, 3, 1, 1),
    }.items()
}


@pytest.mark.parametrize("text", ["2x2", "3x1", "z2x1"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_give_what_torch_gives_or_raise(name, text):
    given = CALLS[name]
    fn, tensors, where = (given, [IMAGE], at(1)) if callable(given) else given
    found = verdict(fn, tuple(tensors), {}, grid(text), where[: len(tensors)])
    assert found.kind in ("exact", "both raise", "refused", "no field"), found


@pytest.mark.parametrize("text", ["2x2", "z3x1"])
def test_gradients_of_what_every_rank_holds_are_those_of_all(text):
    def of_mean(x):
        mean = (x * x).mean((2, 3))
        mean.retain_grad()
        loss = (mean**3).sum()
        loss.backward(retain_graph=True)
        return torch.stack([torch.autograd.grad(loss, mean)[0], mean.grad])

    def rank(layout):
        x = Field.distribute(IMAGE.clone().requires_grad_(), layout, at(1)[0])
        return of_mean(x).full_tensor()

    want = of_mean(IMAGE.clone().requires_grad_())
    for found in weft.on_threads(grid(text), rank):
        torch.testing.assert_close(found, want)


TANGENTS = threading.Lock()  # torch's levels of tangents are those of a process


def with_tangent(x: Tensor) -> Tensor:
    with TANGENTS:
        return torch.func.jvp(torch.sin, (x,), (x,))[1]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (with_tangent, "a transform of torch.func"),
        (lambda x: torch.nested.as_nested_tensor([x[0], x[0, :1]]), "sparse or nested"),
        (lambda x: x.to_sparse(), "sparse or nested"),
    ],
)
def test_what_no_field_can_be_is_refused_within_a_model(fn, said):
    def rank(layout):
        split = weft.parallelize(Chosen(fn), layout, dims={"height": 2, "width": 3})
        with pytest.raises(weft.WeftError, match=said):
            split(IMAGE.clone())
        return True

    assert all(weft.on_threads(grid("2x2"), rank))


def test_a_compiled_loss_of_fields_is_one_devices():
    """Graphs break where fields run, also where torch's compiler would read a field's own code."""
    x, labels = torch.randn(2, 12, 7).double(), torch.arange(24).view(2, 12) % 7

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.square().mean()

    def run(compiled, make):
        own = x.clone().requires_grad_()
        value = compiled(make(own) * 1)
        value.backward()
        return whole(value).detach(), own.grad

    want = run(loss, lambda own: own)

    def rank(layout):
        compiled = torch.compile(loss, backend="eager")
        return run(compiled, lambda own: Field.distribute(own, layout, {"height": 1}))

    for found in weft.on_threads(Layout.parse("height(zigzag): ring=2"), rank):
        torch.testing.assert_close(found, want)


class Adapted(torch.nn.Module):
    """A step of gradient descent within the forward pass, whose own gradient counts, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(6, 6).double() for _ in range(2))

    def forward(self, x):
        inner = self.a(self.b(x)).square().mean()
        (step,) = torch.autograd.grad(inner, self.a.weight, create_graph=True)
        return x @ (self.a.weight - step).T


@pytest.mark.parametrize("line", ["height(zigzag): ring=2", "height: tile=2x2"])
def test_gradients_of_weights_within_a_model_are_those_of_all_ranks(line):
    x, module = torch.randn(2, 9, 6).double(), Adapted()

    def run(module, layout=None):
        y = whole(module(x))
        y.square().mean().backward()
        if layout is not None:
            layout.sync_gradients(module)
        return [y.detach(), *(p.grad for p in module.parameters())]

    def rank(layout):
        split = weft.parallelize(copy.deepcopy(module), layout, dims={"height": 1})
        return run(split, layout)

    want = run(copy.deepcopy(module))
    for found in weft.on_threads(Layout.parse(line), rank):
        torch.testing.assert_close(found, want)


#: Writes that may run on a copy on every rank, and reads of memory.
MEMORY = {
    "another shape": lambda x: x.detach().resize_(1, 2),
    "statistics": lambda x: torch._foreach_zero_([x]),
    "of a norm": lambda x: F.batch_norm(ones(2, 105), *x.flatten(1), training=True),
    "numpy": lambda x: x.numpy().__setitem__(0, 0),
    "an array": lambda x: np.asarray(x).__setitem__(0, 0),
    "dlpack": lambda x: torch.from_dlpack(x).zero_(),
    "its storage": lambda x: x.untyped_storage().fill_(0),
    "an offset": lambda x: x.add_(x[:, :, 2:].storage_offset()),
    "an address": lambda x: x.add_(x.data_ptr()),
    "a version": lambda x: x.zero_().add_(x._version),
}


@pytest.mark.parametrize("write", MEMORY.values(), ids=MEMORY)
def test_memory_is_the_field_s_or_refused(write):
    """Also within a model, where what has no rule runs on a copy on every rank."""
    x = IMAGE.clone()
    write(x)

    def rank(layout):
        def own(field):
            write(field)
            return field * 1

        split = weft.parallelize(Chosen(own), layout, dims={"height": 2, "width": 3})
        try:
            return split(IMAGE.clone())
        except (weft.WeftError, ValueError):
            return x

    for found in weft.on_threads(grid("2x2"), rank):
        torch.testing.assert_close(whole(found), x)


class Three:
    """No tensor, and one to functions of torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(torch.tensor(3.0) if isinstance(a, cls) else a for a in args))


@pytest.mark.parametrize("fn", [lambda x: x + Three(), lambda x: torch.mul(Three(), x)])
def test_what_is_a_tensor_to_torch_is_one_to_fields(fn):
    assert verdict(fn, (IMAGE,), {}, grid("2x2"), at(1)).kind == "exact"


@pytest.mark.parametrize("line", ["height(zigzag): ring=2", "height: ring=2 x ulysses=2"])
@pytest.mark.parametrize("low", [torch.finfo(torch.float64).min, -1e14])
def test_rows_in_which_scores_vanish_are_means_of_all_keys(line, low):
    """As of padding that sees no token, in masks of numbers: parts of a row are of unequal size."""
    mask = torch.zeros(2, 1, 12, 11).double()
    mask[1, :, :3], mask[:, :, 3:, :2] = low, low
    args = Q, K[:, :, :11], V[:, :, :11], mask
    found = verdict(F.scaled_dot_product_attention, args, {}, Layout.parse(line), [*ALL_KEYS, {}])
    assert found.kind == "exact", found


@pytest.mark.parametrize("ranks", [2, 3])
def test_autocast_has_one_dtype_where_a_rank_is_empty(ranks):
    conv = torch.nn.Conv2d(4, 4, 3, padding=1)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.conv2d(x, conv.weight, conv.bias, padding=1)

    x = torch.randn(1, 4, 4, 6)
    found = verdict(run, (x,), {}, grid(f"{ranks}x1"), at(1)[:1], tolerance=0.02)
    assert found.kind == "exact", found


MODEL = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1),
    torch.nn.GroupNorm(4, 8),
    torch.nn.SiLU(),
    torch.nn.Conv2d(8, 3, 3, padding=1),
).double()


class Chosen(torch.nn.Module):
    """Calls a function."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


#: What rank 1 has otherwise -> the change of a model on it, and of its image.
DIFFERENT: dict[str, Callable] = {
    "weight": lambda m, x: m[0].weight.data[0, 0, 0, 0].add_(1),
    "image": lambda m, x: x.add_(0.5),
    "eps": lambda m, x: setattr(m[1], "eps", 0.1),
    "activation": lambda m, x: m.__setitem__(2, torch.nn.Identity()),
    "pad value": lambda m, x: m.__setitem__(0, Chosen(lambda h: F.pad(h, (1, 1), value=1.0))),
    "pool": lambda m, x: m.__setitem__(0, Chosen(lambda h: F.avg_pool2d(h, 3, 1, 1))),
}
OTHERWISE = {
    "pad value": Chosen(lambda h: F.pad(h, (1, 1))),
    "pool": Chosen(lambda h: F.max_pool2d(h, 3, 1, 1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_in_inference_are_refused(name):
    def rank(layout):
        model, x = copy.deepcopy(MODEL), draw(1, 3, 22, 18).clone()
        if name in OTHERWISE:
            model = torch.nn.Sequential(OTHERWISE[name], torch.nn.Identity())
        if layout.rank:
            DIFFERENT[name](model, x)
        with torch.no_grad():
            return weft.parallelize(model, layout)(x)

    with pytest.raises(WeftError):
        weft.on_threads(Layout.parse("height: halo=2"), rank, timeout=20)


def test_a_model_of_ids_alone_is_refused_or_exact():
    """Ids alone are split where the call says so, or the gradients would count once per rank."""
    table = torch.nn.Embedding(9, 4).double()
    ids = torch.randint(0, 9, (2, 6))
    table(ids).square().sum().backward()

    def rank(layout):
        model = copy.deepcopy(table)
        model.weight.grad = None
        weft.parallelize(model, layout, dims={"tokens": 1})(ids).square().sum().backward()
        layout.sync_gradients(model)
        return model.weight.grad

    try:
        found = weft.on_threads(Layout.parse("tokens: ring=2"), rank, timeout=20)
    except WeftError:
        return
    assert not any(different(g, table.weight.grad, 1e-12) for g in found)


@pytest.mark.parametrize("name", ["scan", "halo"])
def test_documents_are_a_list_of_lengths_or_refused(name):
    x = torch.randn(1, 8, 4)
    calls = {
        "scan": lambda layout: weft.scan(
            torch.ones(1, 8, 4), torch.randn(1, 8, 4, 2), layout, "tokens", documents=[3, 5]
        ),
        "halo": lambda layout: weft.halo(
            lambda run: run[:, 1:], x, 1, layout, "tokens", documents=[3, 5]
        ),
    }
    try:
        calls[name](Layout.single())
    except WeftError as error:
        assert "documents" in str(error)  # noqa: PT017


def test_a_square_by_its_transpose_is_split_once():
    x = torch.arange(36.0).view(6, 6)

    def rank(layout):
        field = Field.distribute(x, layout, {"height": 0})
        return (field * field.transpose(0, 1)).full_tensor()

    assert torch.equal(weft.on_threads(Layout.parse("height: gather=2"), rank)[1], x * x.T)


#: Functions over a split dim.
ROUNDING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "softmin": lambda x: F.softmin(x, 1),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True),
    "norm": lambda x: x.norm(dim=1, keepdim=True),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, 1, keepdim=True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUNDING)
def test_what_kernels_compute_in_fp32_rounds_as_torchs(name, dtype):
    fn = ROUNDING[name]
    x, g = ((3 * torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(n))) for n in (0, 1))
    x, g = x.to(dtype), g.to(dtype)

    def both(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = fn(x)
        (y * g).sum().backward()
        return y.detach(), x.grad

    right, torchs = both(x.double(), g.double()), both(x, g)

    def rank(layout: Layout) -> tuple[Tensor, Tensor]:
        own = x.clone().requires_grad_()
        field, weights = (Field.distribute(t, layout, {"t": 1}) for t in (own, g))
        y = fn(field)
        (y * weights).sum().backward()
        return y.full_tensor().detach(), own.grad

    for found in weft.on_threads(Layout.parse("t: ring=2"), rank):
        for mine, theirs, exact in zip(found, torchs, right):
            assert mine.dtype == theirs.dtype
            assert (mine - exact).norm() < 1.2 * (theirs - exact).norm()

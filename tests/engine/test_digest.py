"""Values as text: equal where values are, in every process; other where they are not."""

from __future__ import annotations

import abc
import copy
import functools
import operator
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft import Bias, Causal, Documents, KeyPadding, Layout, MaskMod, Window
from weft._digest import describe_value, is_plain
from weft.masks import Mask

WINDOW, KIND = 4, "causal"
config = SimpleNamespace(window=4, other=threading.Lock())


class Settings:
    window = 4


def helper(q):
    return q < WINDOW


def capturing(value):
    return lambda b, h, q, k: (q - k < 3) & (value is not None)


def method_of(n: int, **others):
    class Rule:
        def __init__(self):
            self.n, self.others = n, others

        @property
        def twice(self):
            return 2 * self.n

        def sees(self, b, h, q, k):
            return self._below(k) & any(self.twice > x for x in (1, 2))

        def _below(self, k):
            return k < self.n

    return Rule().sees


def inherited(n: int):
    class Base:
        def sees(self, q):
            return q < self.n

    class Rule(Base):
        def __init__(self):
            self.n = n

        def sees(self, q):
            return super().sees(q)

    return Rule().sees


def nested(n: int, steps: int):
    def outer(q):
        return [(lambda: i < n)() for i in range(q)] + steps * [q]

    return outer


def chain(first: Mask) -> Mask:
    """A deep tree of masks."""
    return functools.reduce(operator.and_, (Window(90 + i, 90) for i in range(12)), first)


def class_of(n: int) -> type:
    class Rule:
        def __call__(self, b, h, q, k):
            return k < n

    return Rule


class Wrapping:
    """Looks like another function, and holds more than that."""

    def __init__(self, n):
        functools.update_wrapper(self, helper)
        self.n = n


class Near(NamedTuple):
    n: int

    def __call__(self, b, h, q, k):
        return abs(q - k) < self.n


class Far(NamedTuple):
    n: int

    def __call__(self, b, h, q, k):
        return abs(q - k) >= self.n


class Slope(abc.ABC):  # noqa: B024
    def __init__(self, n):
        self.n = n

    def __call__(self, b, h, q, k):
        return -0.1 * self.n * (q - k).abs()


@dataclass(frozen=True)
class Slots:
    __slots__ = ("n",)
    n: int


@pytest.mark.parametrize(
    "make",
    [
        lambda n: capturing(np.bool_(n)),
        lambda n: capturing(range(n)),
        lambda n: capturing(slice(n)),
        lambda n: capturing(Slots(n)),
        lambda n: capturing({"n": n}.get),
        lambda n: capturing(np.array([n, "a"], dtype=object)),
        lambda n: capturing(np.array([n])),
        lambda n: capturing(np.float32(n)),
        lambda n: capturing(torch.tensor([n])),
        lambda n: capturing(torch.tensor([[0, n]]).to_sparse()),
        lambda n: capturing(nn.Parameter(torch.tensor([float(n)]))),
        lambda n: capturing([[[[[[[[[[[[[[[[n]]]]]]]]]]]]]]]]),
        lambda n: capturing(functools.partial(divmod, n)),
        lambda n: capturing(functools.lru_cache(lambda q: q < n)),
        lambda n: capturing(class_of(n)),
        lambda n: capturing(class_of(n)()),
        lambda n: capturing((np.add, np.multiply)[n]),
        lambda n: capturing((torch.ops.aten.add, torch.ops.aten.mul)[n]),
        lambda n: capturing((torch.where, torch.add)[n]),
        lambda n: method_of(n),
        lambda n: capturing(Wrapping(n)),
        lambda n: capturing((Near(2), Far(2))[n]),
        lambda n: Bias(Slope(n)),
        lambda n: inherited(n),
        lambda n: nested(n, 0),
        lambda n: chain(Documents((1 + n, 9))),
        lambda n: chain(MaskMod(capturing(n))),
        lambda n: Bias(class_of(n)()),
        lambda n: lambda q, last=n: q < last,
        lambda n: (lambda q: q in {"a", "b"}, lambda q: q in {"a", "c"})[n],
    ],
)
def test_equal_values_have_equal_texts_and_others_have_others(make):
    assert describe_value(make(0)) == describe_value(make(0))
    assert describe_value(make(0)) != describe_value(make(1))


@pytest.mark.parametrize(
    ("change", "fn"),
    [
        ("WINDOW", lambda q: q < WINDOW),
        ("WINDOW", lambda q: helper(q)),
        ("Settings.window", lambda q: q < Settings.window),
        ("Settings.window", lambda q: q < Settings().window),
        ("here.WINDOW", lambda q: q < here.WINDOW),
    ],
)
def test_global_that_a_function_reads_is_a_part_of_it(monkeypatch, change, fn):
    before = describe_value(fn)
    assert describe_value(fn) == before
    monkeypatch.setattr(f"{__name__}.{change}".replace("here.", ""), 5)
    assert describe_value(fn) != before


here = sys.modules[__name__]
device = "cpu"


def test_an_attribute_is_no_global_of_the_same_name(monkeypatch):
    def moved(q):
        return q.to(q.device)

    before = describe_value(moved)
    monkeypatch.setattr(f"{__name__}.device", "other")
    assert describe_value(moved) == before


def test_ranks_have_numbers_of_their_own():
    one, two = (capturing(torch.device("cuda", i)) for i in range(2))
    assert describe_value(one) == describe_value(two)
    assert describe_value(one) != describe_value(capturing(torch.device("cpu")))


def test_sharing_is_no_part_of_a_value():
    a, b = [1, 2], [1, 2]
    assert describe_value([a, a]) == describe_value([a, b])


def recursive(n: int):
    def count(q):
        return n if q < 1 else count(q - 1)

    return count


def test_functions_may_call_themselves():
    assert describe_value(recursive(3)) == describe_value(recursive(3))
    assert describe_value(recursive(3)) != describe_value(recursive(4))


def test_texts_grow_with_values_not_with_the_paths_to_them():
    value = [torch.ones(3)]
    for _ in range(60):
        value = [value, value]
    assert len(describe_value(value)) < 1000


around: list = [1]
around.append(around)


@pytest.mark.parametrize(
    "held",
    [
        threading.Lock(),
        sys.stdout,
        (x for x in [1]),
        SimpleNamespace(window=4),
        deque([1]),
        operator.itemgetter(0),
        np.vectorize(abs),
        nn.Flatten(),
        Layout.single(),
        around,
    ],
    ids=lambda held: type(held).__name__,
)
def test_what_is_no_plain_data_is_refused(held):
    with pytest.raises(weft.UnsupportedError, match=r"which ranks cannot compare by value.*Mask"):
        describe_value(capturing(held))


def test_a_global_that_is_no_plain_data_is_refused():
    with pytest.raises(weft.UnsupportedError, match="refers to a SimpleNamespace"):
        describe_value(lambda q: q < config.window)


def _numbers() -> list[str]:
    def named(b, h, q, k):
        return q >= k if KIND in {"causal", "prefix", "window", "chunk"} else q >= 0

    held = {"b": 1, "a": {"x", "y", "z"}, "c": np.array(["x", None], dtype=object)}
    return [*map(describe_value, (named, capturing(held), method_of(3), class_of(4), inherited(2)))]


@pytest.mark.sample
def test_texts_are_the_same_in_every_process():
    code = "import test_digest; print(test_digest._numbers())"
    known = {**os.environ, "PYTHONHASHSEED": "7"}
    known["PYTHONPATH"] = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *sys.path])
    found = subprocess.run(
        [sys.executable, "-c", code], env=known, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == str(_numbers()), found.stderr


def test_scripted_functions_are_refused():
    with pytest.raises(weft.UnsupportedError, match="ScriptFunction"):
        describe_value(torch.jit.trace(lambda q: q < 3, torch.zeros(3)))


def test_writes_through_data_are_seen():
    t = torch.ones(3)
    before = describe_value(t)
    t.data.fill_(7)
    assert describe_value(t) != before
    large = torch.ones(1 << 13)
    before = describe_value(large)
    large.data = torch.zeros(1 << 13)
    assert describe_value(large) != before


def test_tuples_that_can_be_called_are_masks_of_their_own():
    x, i = whole(6), torch.arange(6)
    for fn in (Near(2), Far(2)):
        visible = fn(0, 0, i[:, None], i)
        want = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=visible)
        got = weft.attention(x, x, x, Layout.single(), "tokens", MaskMod(fn))
        assert (got - want).abs().max() < 1e-12


def test_what_can_be_called_is_no_plain_data():
    @dataclass(frozen=True)
    class Below:
        n: int
        note: str = field(default="", compare=False)

    assert is_plain(Documents((1, 2)))
    assert is_plain(chain(Causal()))
    assert not is_plain(weft.alibi(8))
    assert not is_plain(MaskMod(capturing(1)))
    assert not is_plain(Below(3))  # two that differ in their notes are equal


# -- in calls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decay:
    rate: float

    def __call__(self, b, h, q, k):
        return -float(self.rate) * (q - k).abs()


class Below:
    def __init__(self, n):
        self.n = n

    def __call__(self, b, h, q, k):
        return (k < self.n) & (q >= 0)


@dataclass(frozen=True)
class FrozenBelow:
    n: int

    def __call__(self, b, h, q, k):
        return (k < self.n) & (q >= 0)


def whole(n: int = 16) -> torch.Tensor:
    made = torch.Generator().manual_seed(3)
    return torch.randn(1, 2, n, 8, dtype=torch.float64, generator=made)


def _differs(x, layout=None, **options):
    at = [
        weft.attention(x, x, x, layout or Layout.single(), "tokens", kernel=kernel, **options)
        for kernel in ("flex", "math")
    ]
    return (at[0] - at[1]).abs().max()


def test_functions_of_equal_fields_alone_are_not_mixed_up():
    for rate in (0.1, 2.0):
        assert _differs(whole(), bias=Bias(Decay(rate))) < 1e-12
    for n in (3, 12):
        assert _differs(whole(), mask=MaskMod(FrozenBelow(n))) < 1e-12
        assert _differs(whole(), mask=MaskMod(FrozenBelow(n)), bias=Bias(Decay(n))) < 1e-12


def test_one_mask_on_layouts_with_other_token_orders():
    mask, x = MaskMod(lambda b, h, q, k: (q - k) % 3 != 1), whole()
    want = weft.attention(x, x, x, Layout.single(), "tokens", mask, kernel="math")

    def run(layout):
        q = layout.shard(x, {"tokens": 2})
        return layout.gather(
            weft.attention(q, q, q, layout, "tokens", mask, kernel="flex"), {"tokens": 2}
        )

    for line in ("tokens: ring=2", "tokens(striped): ring=2", "tokens(zigzag): ring=2"):
        for out in weft.on_threads(Layout.parse(line), run):
            assert (out - want).abs().max() < 1e-12, line


def test_a_kept_mask_over_a_tensor_that_changes_between_steps():
    seen, x = torch.tensor(3), whole(256)
    mask = MaskMod(lambda b, h, q, k: (k < seen) & ((q + k) % 2 == 0))
    for n in (3, 200):
        seen.fill_(n)
        assert _differs(x, mask=mask) < 1e-12
    blocks = [
        context.cache[x.device].to_dense().tolist()
        for kept in vars(mask)["_contexts"].values()
        for context in kept.values()
    ]
    assert blocks == [[2 * [[row, row]]] for row in ([1], [1, 1])]  # of the keys that are seen


def test_copy_of_mask_in_a_compiled_function_is_another_mask():
    x, first, layout = whole(), MaskMod(Below(3)), Layout.single()
    compiled = torch.compile(
        lambda x, m: weft.attention(x, x, x, layout, "tokens", m),
        backend="eager",
        fullgraph=True,
    )
    compiled(x, first)
    second = copy.deepcopy(first)
    second.fn.n = 7
    for mask in (first, second):
        want = weft.attention(x, x, x, layout, "tokens", mask)
        assert (compiled(x, mask) - want).abs().max() < 1e-12


def test_masks_are_pickled_without_what_kernels_made_of_them():
    mask, x = MaskMod(Below(3)), whole()
    want = weft.attention(x, x, x, Layout.single(), "tokens", mask, kernel="flex")
    again = pickle.loads(pickle.dumps(mask))
    assert set(vars(again)) == {"fn"}
    got = weft.attention(x, x, x, Layout.single(), "tokens", again, kernel="flex")
    assert torch.equal(got, want)


def test_masks_over_tensors_of_inference_mode():
    with torch.inference_mode():
        seen, x = torch.arange(16) < 5, whole()
        mask = MaskMod(lambda b, h, q, k: seen[k] & (q >= 0))
        got = weft.attention(x, x, x, Layout.single(), "tokens", mask)
        want = weft.attention(x, x, x, Layout.single(), "tokens", KeyPadding((5,)))
    assert (got - want).abs().max() < 1e-12


class Block(nn.Module):
    """Holds its layout, which counts what it moves, and counts its own steps."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout, self.window, self.steps = layout, 4, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = self.window
        near = MaskMod(lambda b, h, q, k: (q - k).abs() < window)
        out = weft.attention(x, x, x, self.layout, "tokens", near)
        self.steps += 1
        return out


def _masks_of_modules(rank: int) -> list:
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    x, kind, mine, first = whole(), "prefix", torch.device("cuda", rank), rank + 9
    want = Block(Layout.single())(x)
    q = layout.shard(x, {"tokens": 2}).requires_grad_()
    out = Block(layout)(q)
    out.sum().backward()
    errors = [(layout.gather(out, {"tokens": 2}) - want).abs().max().item()]
    equal = MaskMod(lambda b, h, q, k: (q >= k) & (mine.type != "") & (kind in {"a", "prefix"}))
    weft.attention(q, q, q, layout, "tokens", equal)
    refused = []
    others = [
        MaskMod(lambda b, h, q, k: (k < first) & (q >= 0)),
        chain(MaskMod(lambda b, h, q, k, n=rank: (k < n + 9) & (q >= 0))),
        MaskMod(capturing(np.bool_(rank))),
        MaskMod(capturing(threading.Lock()) if rank == 1 else capturing(3)),
    ]
    for mask in others:
        try:
            weft.attention(q, q, q, layout, "tokens", mask)
            refused.append("not refused")
        except weft.WeftError as error:
            refused.append(f"{type(error).__name__}: {error}")
    return [errors, refused]


def test_functions_made_within_modules_are_compared_by_what_they_capture(pool):
    for errors, refused in pool.run(_masks_of_modules):
        assert max(errors) < 1e-12
        assert all("must be the same on every rank" in text for text in refused[:3]), refused
        assert "a mask or bias refers to a lock" in refused[3], refused


def test_a_rank_without_queries_takes_functions_too():
    x, context = torch.randn(1, 2, 8), torch.randn(1, 5, 8)
    mask = MaskMod(lambda b, h, q, k: k <= q + 1)

    def attend(layout):
        axes = {"axes": ("batch", "rows", "embed"), "context_axes": ("batch", "notes", "embed")}
        return weft.MultiAxisAttention(8, 2, axis="notes", layout=layout, **axes)

    def run(layout):
        mine = attend(layout)
        mine.load_state_dict(one.state_dict())
        out = mine(layout.shard(x, {"rows": 1}), context, mask=mask, lengths={"rows": 2})
        return layout.gather(out, {"rows": 1})

    one = attend(Layout.single())
    want = one(x, context, mask=mask)
    for out in weft.on_threads(Layout.parse("rows: ring=4"), run):
        assert torch.allclose(out, want, atol=1e-6)

"""A call of a parallelized model by its modules: what is split, what runs whole, what is sent.

    model.layers.0-31   LlamaDecoderLayer   32   ring   30 by rule, 21 in islands   48.0 MiB

A mode of torch sees every function; hooks of modules, and of gradients of what they take and give,
say whose it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.layout import Layout
from weft.plan.plan import Plan
from weft_axes.fields import Field, WholeReport
from weft_axes.fields.islands import PROOF

from .common import tensors_in

#: What is counted beside numbers of functions that ran whole, by their names: functions of torch
#: that give tensors, bytes sent, passes of attention.
COUNTED = ("by rule", "in islands", "whole", "forward", "backward", "attention")


@dataclass
class ModuleShare:
    """What a module did in a call on one rank: its path, class, how many are alike, and counts."""

    path: str
    kind: str
    times: int = 1
    counts: Counter[str] = field(default_factory=Counter)


def strategies(layout: Layout) -> str:
    """The strategies by which a layout attends its axes.

    >>> strategies(Layout.parse("tokens: ulysses=2 x ring=4"))
    'ulysses x ring'
    """
    bindings = layout._bindings(tuple(layout.attend))
    named = {d: b.strategy.name for b in bindings for d in b.on.values() if layout.mesh[d] != 1}
    return " x ".join(dict.fromkeys(named[d] for d in layout.mesh if d in named))


def shares(model: nn.Module, layout: Layout, loss: Callable[[], Tensor]) -> list[ModuleShare]:
    """The shares of a call that makes a loss, and of its backward pass, on this rank."""
    watch = _Watch(model, layout)
    with contextlib.ExitStack() as scope:
        watch.enter(scope)
        with watch:
            made = loss()
        watch.turn(watch.rest)
        watch.phase = "backward"
        watch.before = watch.counted()
        made.backward()
        watch.turn(watch.rest)
    found: list[ModuleShare] = []
    for share in (*watch.shares.values(), watch.rest):
        owner, _, number = share.path.rpartition(".")
        last = found[-1] if found else share
        alike = replace(last, path="", times=1) == replace(share, path="")
        if found and alike and number.isdigit() and owner == last.path.rpartition(".")[0]:
            last.times += 1
            last.path = f"{last.path.partition('-')[0]}-{number}"
        elif share.counts:
            found.append(share)
    return found


class _Watch(TorchFunctionMode):
    """Counts of the share that is at hand."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.model, self.transport, self.phase = model, layout.bound, "forward"
        self.report: WholeReport = vars(model)["_weft"].ran_whole or WholeReport()
        self.shares = {m: ModuleShare(path, type(m).__name__) for path, m in _modules(model, "")}
        self.now = self.rest = ModuleShare("", "the rest")
        self.in_islands, self.plans = 0, Counter[Any]()
        self.before = self.counted()

    def counted(self) -> Counter[str]:
        """All bytes, passes and whole functions until now."""
        passes = (n for (p, back), n in self.plans.items() if isinstance(p, Plan) and not back)
        found = Counter({self.phase: sum(self.transport.sent.values()), "attention": sum(passes)})
        return found + Counter({"whole": sum(self.report.calls.values())} | self.report.numbers)

    def turn(self, share: ModuleShare, after: ModuleShare | None = None) -> None:
        """Count what ran for the share at hand; from now on another is, if it comes `after`."""
        if after is None or self.now is after:
            now = self.counted()
            self.now.counts += now - self.before
            self.before, self.now = now, share

    def enter(self, scope: contextlib.ExitStack) -> None:
        """Put hooks around modules, and a count around islands."""
        self.plans = self.transport.watches.begin()
        scope.callback(self.transport.watches.end, self.plans)
        for module, share in self.shares.items():
            for put, hook in (
                (module.register_forward_pre_hook, self.entered),
                (module.register_forward_hook, self.left),
            ):
                scope.callback(put(functools.partial(hook, share), with_kwargs=True).remove)
        for module in self.model.modules():
            own = vars(module)
            if "forward" in own and (PROOF in own or hasattr(module, "_is_expert_parallel")):
                scope.callback(own.__setitem__, "forward", own["forward"])
                island: Any = functools.partial(self.island, own["forward"])
                island.__func__ = own["forward"].__func__  # by which the model knows its own
                own["forward"] = island

    def island(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """An island, within which functions take local tensors."""
        self.in_islands += 1
        try:
            return run(*args, **kwargs)
        finally:
            self.in_islands -= 1

    def entered(self, share: ModuleShare, module: Any, args: tuple, kwargs: dict) -> None:
        """Before a module, whose backward pass ends when its input has its gradient."""
        self.turn(share)
        # The module before may have begun with the gradient of the same tensor.
        self.when_gradient([args, kwargs], lambda _: self.turn(self.rest, share))

    def left(self, share: ModuleShare, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        """After a module, whose backward pass begins when its output has its gradient."""
        self.turn(self.rest)
        self.when_gradient(output, lambda _: self.turn(share))

    def when_gradient(self, values: Any, hook: Callable) -> None:
        """A hook of the first tensor that gets a gradient."""
        locals_ = (x._local if isinstance(x, Field) else x for x in tensors_in(values))
        if (first := next((x for x in locals_ if x.grad_fn is not None), None)) is not None:
            first.register_hook(hook)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        whole = sum(self.report.calls.values())
        result = func(*args, **(kwargs or {}))
        of_field = any(isinstance(x, Field) for x in tensors_in(args, kwargs))
        if sum(self.report.calls.values()) == whole and tensors_in(result):
            kind = "by rule" if of_field else "in islands" if self.in_islands else ""
            self.now.counts += Counter([kind] if kind else [])
        return result


def _modules(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Elements of lists of modules, and the modules beside these."""
    for name, module in model.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if isinstance(module, nn.ModuleList):
            yield from ((f"{inner}.{i}", layer) for i, layer in module.named_children())
        elif PROOF not in vars(module) and any(
            isinstance(m, nn.ModuleList) for m in module.modules()
        ):
            yield from _modules(module, inner)
        else:
            yield inner, module


__all__ = ["COUNTED", "ModuleShare", "shares", "strategies"]

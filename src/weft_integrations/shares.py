"""A call of a parallelized model by its modules: what is split, what runs whole, what is sent.

    model.layers.0-31   LlamaDecoderLayer   32   ring   28 by rule, 18 in islands, 0 whole   1.0 MiB

A mode of torch sees every function, hooks of modules and of what they give say whose it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.layout import Layout
from weft.plan.plan import Plan
from weft_axes.fields import Field, WholeReport
from weft_axes.fields.islands import PROOF


@dataclass
class Part:
    """What a module did in a call, on one rank.

    Attributes:
        path: its name in the model; of equal ones "layers.0-3", "" for what is outside of modules.
        kind: its class.
        times: how many there are.
        functions: of torch that give tensors, "by rule", "in islands", or "whole".
        whole: functions that ran whole -> numbers that they brought to every rank.
        sent: bytes, "forward" and "backward".
        attends: passes of attention of the layout's strategies.
    """

    path: str
    kind: str
    times: int = 1
    functions: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    attends: int = 0


def strategies(layout: Layout) -> str:
    """The strategies by which a layout attends its axes.

    >>> strategies(Layout.parse("tokens: ulysses=2 x ring=4"))
    'ulysses x ring'
    """
    bindings = layout._bindings(tuple(layout.attend))
    named = {d: b.strategy.name for b in bindings for d in b.on.values() if layout.mesh[d] != 1}
    return " x ".join(dict.fromkeys(named[d] for d in layout.mesh if d in named))


def parts_of_call(model: nn.Module, layout: Layout, run: Callable[[], Tensor]) -> list[Part]:
    """The parts of a call and its backward pass on this rank; `run` makes the loss."""
    watch = _Watch(model, layout)
    with contextlib.ExitStack() as scope:
        watch.enter(scope)
        with watch:
            loss = run()
        watch.turn(watch.rest)
        watch.phase = "backward"
        loss.backward()
        watch.turn(watch.rest)
    return _merged([*watch.parts.values(), watch.rest])


class _Watch(TorchFunctionMode):
    """Functions of torch by the part that is at hand."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.model, self.transport = model, layout.bound
        self.report: WholeReport = vars(model)["_weft"].ran_whole or WholeReport()
        self.parts = {m: Part(path, type(m).__name__) for path, m in _modules(model, "")}
        self.now = self.rest = Part("", "the rest")
        self.phase, self.in_islands = "forward", 0
        self.plans: Counter = Counter()
        self.before = self.counted()

    def counted(self) -> tuple[Counter, Counter, int, int]:
        """Of all that ran: numbers and calls of whole functions, bytes, passes of attention."""
        passes = (
            n for (plan, back), n in self.plans.items() if isinstance(plan, Plan) and not back
        )
        numbers, calls = Counter(self.report.numbers), Counter(self.report.calls)
        return numbers, calls, sum(self.transport.sent.values()), sum(passes)

    def turn(self, part: Part, after: Part | None = None) -> None:
        """All that ran is of the part at hand, and from now on another is, if it comes `after`."""
        if after is not None and self.now is not after:
            return
        now = self.counted()
        self.now.whole += now[0] - self.before[0]
        self.now.functions["whole"] += (now[1] - self.before[1]).total()
        self.now.sent[self.phase] += now[2] - self.before[2]
        self.now.attends += now[3] - self.before[3]
        self.before, self.now = now, part

    def enter(self, scope: contextlib.ExitStack) -> None:
        """Put hooks around parts, and a count around islands."""
        self.plans = self.transport.watches.begin()
        scope.callback(self.transport.watches.end, self.plans)
        for module in self.parts:
            for hook in (
                module.register_forward_pre_hook(self.entered, with_kwargs=True),
                module.register_forward_hook(self.left, with_kwargs=True),
            ):
                scope.callback(hook.remove)
        for module in self.model.modules():
            own = vars(module)
            if "forward" in own and (PROOF in own or hasattr(module, "_is_expert_parallel")):
                scope.callback(own.__setitem__, "forward", own["forward"])
                counted: Any = functools.partial(self.on_island, own["forward"])
                counted.__func__ = own["forward"].__func__  # by which the model knows its own
                own["forward"] = counted

    def on_island(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """An island, within which functions take local tensors."""
        self.in_islands += 1
        try:
            return run(*args, **kwargs)
        finally:
            self.in_islands -= 1

    def entered(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a part, whose backward pass is over when its input has its gradient."""
        part = self.parts[module]
        self.turn(part)
        # The part before may have begun with the gradient of the same tensor.
        self.with_gradient([*args, kwargs], lambda _: self.turn(self.rest, part))

    def left(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """After a part, whose backward pass begins when its output has its gradient."""
        part = self.parts[module]
        self.turn(self.rest)
        self.with_gradient(output, lambda _: self.turn(part))

    def with_gradient(self, values: Any, hook: Callable) -> None:
        """A hook of the first tensor that gets a gradient."""
        locals_ = (x._local if isinstance(x, Field) else x for x in _tensors(values))
        first = next((x for x in locals_ if x.grad_fn is not None), None)
        if first is not None:
            first.register_hook(hook)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        whole = sum(self.report.calls.values())
        result = func(*args, **(kwargs or {}))
        of_field = any(isinstance(x, Field) for x in _tensors([args, kwargs]))
        if sum(self.report.calls.values()) == whole and next(_tensors(result), None) is not None:
            self.now.functions["by rule"] += of_field
            self.now.functions["in islands"] += bool(self.in_islands) and not of_field
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    items: Any = value.values() if isinstance(value, Mapping) else ()
    for each in value if isinstance(value, list | tuple) else items:
        yield from _tensors(each)


def _modules(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Layers, elements of lists of modules, and the modules beside these."""
    for name, module in model.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if _is_list(module):
            yield from ((f"{inner}.{i}", layer) for i, layer in module.named_children())
        elif PROOF not in vars(module) and any(map(_is_list, module.modules())):
            yield from _modules(module, inner)
        else:
            yield inner, module


def _is_list(module: nn.Module) -> bool:
    """True of a list of modules, and of a sequence of several of one class that is no torch's."""
    kinds = {type(m) for m in module.children()}
    alike = len(kinds) == 1 and len([*module.children()]) > 1
    alike = alike and not next(iter(kinds)).__module__.startswith("torch.")
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and alike)


def _merged(parts: Iterable[Part]) -> list[Part]:
    """Parts that did something; equal ones one after another are one."""
    found: list[Part] = []
    for part in parts:
        if not (part.functions or +part.sent or part.attends):
            continue
        last = found[-1] if found else part
        owner, _, number = part.path.rpartition(".")
        alike = replace(last, path="", times=1) == replace(part, path="") and number.isdigit()
        if found and alike and owner == last.path.rpartition(".")[0]:
            last.times += 1
            last.path = f"{last.path.partition('-')[0]}-{number}"
        else:
            found.append(part)
    return found


__all__ = ["Part", "parts_of_call", "strategies"]

"""Every mask and bias of weft goes through Inductor's lowering of FlexAttention, which CUDA needs.

`aot_eager`, with which `test_flex` runs what CUDA compiles, stops before the lowering. There a mod
may not make a tensor ("Buffers cannot be created while lowering a pointwise subgraph"), on the CPU
as on CUDA. Nothing is compiled to machine code here: that takes seconds a class, and torch's CPU
template has errors of its own.
"""

from __future__ import annotations

import ast
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._inductor import config
from torch._inductor.graph import GraphLowering

import weft
from weft.bias import alibi
from weft.kernels import TileView, flex
from weft.kernels.base import MaskContext
from weft.kernels.flex_mods import score_mod
from weft.masks.given import Visible, VisibleBlocks
from weft.masks.part import OfPart, Renumbered
from weft.nn.sequences import FunctionOfPart
from weft_axes.fields.stored import _Keys, _Numbers
from weft_integrations.transformers.facts import KeySpans
from weft_integrations.transformers.masks import Blocks

SRC = Path(weft.__file__).parent.parent
N, BATCH, HEADS = 24, 2, 4

SPANS = KeySpans(((0, 12), (3, 20)))
#: Masks in which every class of masks occurs; those whose `prepared` matters are lowered alone.
MASKS = {
    "plain": weft.Causal(window=5)
    & weft.Window(9, 2)
    & (weft.FirstKeys(9) | _Numbers(((4, 20),), ((0, 5), (8, 30))))
    & (weft.Documents((6, 18)) | weft.KeyPadding((12, 20)))
    & weft.Full(),
    "spans": SPANS | weft.Causal(),
    "blocks": weft.Causal() | Blocks((((2, 4), (7, 9)), ((0, 5),))),
    "grid": weft.Near((4, 6), (3, 2), (1, 2)) & weft.Boxes((4, 6), 3, 1, (False, True))
    | weft.Near((4, 6), 3, circular=True),
    "function": weft.MaskMod(lambda b, h, q, k: (q * 3 + k * b + h) % 2 == 0),
    "keys": weft.MaskMod(_Keys(torch.arange(BATCH * N).view(BATCH, N) % 3 > 0)),
    "tensor": Visible(torch.arange(N * N).view(N, N) % 5 > 1),
    "block mask": VisibleBlocks(
        *(torch.rand(2, 1, 1, 3, 4) < 0.5), lambda b, h, q, k: q >= k, (8, 6), (N, N)
    ),
    "part": OfPart(SPANS & weft.Documents((6, 18)), (1, 0), tuple(range(N)), BATCH, N),
    "renumbered": Renumbered(weft.KeyPadding((12, 20)), (1, 0), BATCH),
}
#: Biases of positions, likewise.
FUNCTIONS = {"part": FunctionOfPart(alibi(HEADS).fn, (1, 0), tuple(range(N)))}
#: Without a question of pairs: stand for a function while intervals are looked at.
NONE = {"Unknown", "Slices", "Mask", "_Grid"}


class Lowered(Exception):
    """Lowering went well; machine code is not wanted."""


@pytest.fixture
def lowering(monkeypatch):
    """Inductor up to its own code, without what earlier runs left on disk."""

    def stop(*_, **__):
        raise Lowered

    monkeypatch.setattr(GraphLowering, "compile_to_module", stop)
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def lower(mask: weft.Mask | None, function=None, bias=None, softcap=None) -> None:
    """One rectangle as CUDA compiles it, up to machine code; without the logsumexp, on the CPU."""
    at = MaskContext(*(torch.arange(size) for size in (N, N, BATCH, HEADS)), mask, function)
    view = TileView(0.3, mask_context=at, bias=bias, softcap=softcap)
    q, k = torch.randn(BATCH, HEADS, N, 16), torch.randn(BATCH, 2, N, 16)
    block_mask, mod = flex._block_mask(q, k, view), score_mod(view, q.device)
    mod = mod if bias is None else flex._with_bias(mod, bias)
    compiled = flex.compile_any_size(torch_flex.flex_attention, fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="Lowered"):
        compiled(q, k, k, score_mod=mod, block_mask=block_mask, scale=1.0, enable_gqa=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.sample) if n in ("spans", "grid") else n for n in MASKS],
)
def test_every_mask_is_lowered(lowering, name: str) -> None:
    lower(MASKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_bias_of_positions_is_lowered(lowering, name: str) -> None:
    lower(None, FUNCTIONS[name])


def test_a_learned_bias_and_a_soft_cap_are_lowered(lowering) -> None:
    lower(MASKS["renumbered"], bias=torch.randn(1, HEADS, N, N), softcap=2.0)


def test_a_mask_that_makes_a_tensor_is_not(lowering) -> None:
    """The check itself can fail."""
    made = weft.MaskMod(lambda b, h, q, k: k < torch.tensor((12, 20))[b])
    with pytest.raises(AssertionError, match="LoweringException"):
        lower(made)


def _parts(value) -> set[str]:
    """Classes of a mask or function, and of all that it is made of."""
    inside = [v for v in vars(value).values() if is_dataclass(v)]
    return {type(value).__name__}.union(*map(_parts, inside))


def _classes() -> set[str]:
    """Classes of weft that are masks, or functions of (b, h, q, k), from their sources."""
    masks, functions = {"Mask"}, set()
    nodes = [
        node
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    for _ in range(3):  # subclasses of subclasses
        masks |= {n.name for n in nodes if {ast.unparse(b).split(".")[-1] for b in n.bases} & masks}
    for node in nodes:
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__call__":
                arguments = [a.arg for a in method.args.args]
                if arguments[:5] == ["self", "b", "h", "q", "k"]:
                    functions.add(node.name)
    return masks | functions


def test_every_class_is_in_the_list() -> None:
    joined = set().union(*map(_parts, (*MASKS.values(), *FUNCTIONS.values())))
    assert _classes() - NONE == joined, "a new mask or bias joins MASKS or FUNCTIONS"

"""Hybrid models of transformers, made so that what a state carries is seen, and their answers.

States of random weights die within a few tokens, and what is wrong across ranks then differs by
nothing: decays are drawn slow (`slow`), and models are compared in fp64 all through (`InFP64`).
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import torch
import transformers as hf
from fp64 import InFP64, whole
from torch import Tensor
from torch.nn import functional as F

from benchmarks import families
from weft import parallelize
from weft.comm import run_threads
from weft.layout import Layout
from weft.losses import shift_labels
from weft.losses.labels import IGNORED

VOCABULARY = families.TINY["vocab_size"]


def slow(model: torch.nn.Module) -> None:
    """Decays that let a state live on through a sequence, and no zeros that hide anything."""
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.uniform_(-5, -3)
        elif name.endswith("recurrent_param"):
            p.data.uniform_(-6, -4)
        elif p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)


def build(family: str, dtype: torch.dtype = torch.float64, **options) -> torch.nn.Module:
    """A small model of a family in train mode."""
    name = families.KINDS["causal"][family]
    config = families.tiny_config(family, name)
    for option in ("chunk_size", "mamba_chunk_size", "mamba2_chunk_size", "block_size"):
        if isinstance(getattr(config, option, None), int):
            setattr(config, option, 8)
    for option, value in options.items():
        setattr(config, option, value)
    config._experts_implementation = "eager"  # the fused one knows no fp64
    torch.manual_seed(0)
    model = getattr(hf, name)(config).to(dtype).train()
    slow(model)
    for module in model.modules():  # made in fp32
        if hasattr(module, "decay_factors") and dtype is torch.float64:
            module.slope_rate = module.slope_rate.double()
            decays = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = decays
    return model


def ids(batch: int = 2, length: int = 43) -> Tensor:
    """Token ids, among them every id that could stand for padding."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def packed(tokens: Tensor, documents: tuple[int, ...]) -> dict[str, Tensor]:
    """A call of one row of documents, whose first tokens are no labels."""
    ends = torch.tensor([0, *itertools.accumulate(documents)])
    labels = tokens.clone()
    labels[:, ends[:-1]] = IGNORED
    positions = torch.cat([torch.arange(n) for n in documents])[None]
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": positions,
        "cu_seq_lens_q": ends,
        "use_cache": False,
    }


@dataclass(frozen=True)
class Answer:
    """What a model gives: logits, the mean loss, and its parameters' gradients."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]

    def off(self, want: Answer, seen: Tensor | None = None) -> tuple[float, str]:
        """The largest relative difference, and of what; logits only where tokens are seen."""
        assert self.gradients.keys() == want.gradients.keys()
        pairs = {"loss": (self.loss, want.loss), "logits": (self.logits, want.logits)}
        if seen is not None:
            pairs["logits"] = (self.logits[seen], want.logits[seen])
        pairs |= {n: (g, want.gradients[n]) for n, g in self.gradients.items()}
        scale = max(g.norm() for g in want.gradients.values())
        floor = {n: 1e-3 * scale if n in want.gradients else 0.0 for n in pairs}
        return max(
            (((a - b).norm() / b.norm().clamp_min(floor[n])).item(), n)
            for n, (a, b) in pairs.items()
        )


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def one_device(
    model: torch.nn.Module, tokens: Tensor, documents: tuple[int, ...] | None = None, **batch
) -> Answer:
    """The model in one process; each document by itself."""
    model = copy.deepcopy(model)
    mode = InFP64() if next(model.parameters()).dtype is torch.float64 else torch.enable_grad()
    with mode:
        parts = tokens.split(documents or tokens.shape[1], 1)
        made = [model(input_ids=part, use_cache=False, **batch).logits for part in parts]
        logits = torch.cat(made, 1)
        labels = shift_labels(batch.pop("labels", tokens), documents)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
    return Answer(logits.detach(), loss.detach(), _gradients(model))


def on_layout(
    model: torch.nn.Module,
    line: str | Layout,
    tokens: Tensor,
    documents: tuple[int, ...] | None = None,
    step=None,
    **batch,
) -> Answer:
    """The same on ranks that are threads, gradients summed: of the last rank."""
    layout = line
    if isinstance(line, str):
        layout = Layout.parse(line) if ":" in line else Layout.load(line)
    dtype = next(model.parameters()).dtype
    call = (
        {"input_ids": tokens, "labels": tokens} if documents is None else packed(tokens, documents)
    )

    def rank(transport):
        with InFP64() if dtype is torch.float64 else torch.enable_grad():
            bound = layout.on(transport)
            mine = parallelize(copy.deepcopy(model), bound)
            if step is None:
                out = mine(**call | batch)
                out.loss.backward()
            else:
                out = step(mine)
            bound.sync_gradients(mine)
            logits = whole(out.logits).detach()
        return Answer(logits, out.loss.detach(), _gradients(mine))

    return run_threads(layout.mesh, rank, timeout=60)[-1]

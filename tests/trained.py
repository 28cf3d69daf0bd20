"""Other people's trainers on tiny models and data made here: one step by step record of a run.

Everything runs in ranks of `pool`: on all of them as the trainer's processes, and on rank 0 as if
it were the only one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn

WORDS = 97
PAD, EOS = 0, 1
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def llama(kind: type = hf.LlamaForCausalLM, **changes: Any) -> nn.Module:
    """A tiny model in fp32, the same wherever it is made."""
    return model_of(kind, hf.LlamaConfig(**SMALL | {"attn_implementation": "eager"} | changes))


def model_of(kind: type, config: hf.PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config))
    with torch.no_grad():  # larger than a fresh model's, so that attention matters
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(8.0)
    return model


def rows(count: int, longest: int = 44, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of unequal length, whose labels begin anywhere: from one label to all."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        length = draw.randint(longest // 2, longest)
        ids = [draw.randrange(2, WORDS) for _ in range(length)]
        begin = draw.randrange(length - 1)
        made.append({"input_ids": ids, "labels": [-100] * begin + ids[begin:]})
    return made


def collate(batch: list[dict]) -> dict[str, Tensor]:
    """Rows padded on the right."""
    length = max(len(row["input_ids"]) for row in batch)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in batch])

    mask = [[1] * len(r["input_ids"]) + [0] * (length - len(r["input_ids"])) for r in batch]
    return {
        "input_ids": padded("input_ids", PAD),
        "labels": padded("labels", -100),
        "attention_mask": torch.tensor(mask),
    }


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Words w2, w3, ... are their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, WORDS)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w2"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="w2"
    )


def text(draw: random.Random, shortest: int, longest: int) -> str:
    return " ".join(f"w{draw.randrange(2, WORDS)}" for _ in range(draw.randint(shortest, longest)))


@dataclass
class Run:
    """What a run logged at each step, and the weights that it ended with."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    extra: Any = None

    def series(self, name: str) -> list[float]:
        return [entry[name] for entry in self.logs if name in entry]


def same_folder(rank_writes: Callable[[str], None]) -> str:
    """A folder that the first process writes, for all."""
    first = not dist.is_initialized() or os.environ.get("RANK", "0") == "0"
    name = [tempfile.mkdtemp(prefix="weft-trained-") if first else ""]
    if first:
        rank_writes(name[0])
    if "RANK" in os.environ:
        dist.broadcast_object_list(name)
    return name[0]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def run(trainer: hf.Trainer, extra: Any = None, resume: str | None = None) -> Run:
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return Run(trainer.state.log_history, weights_of(trainer.model), extra)


@contextlib.contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """accelerate sees these processes, as torchrun tells it; with one it sees no launcher."""
    from accelerate.state import AcceleratorState, GradientState

    before = {name: os.environ.pop(name, None) for name in LAUNCHER}
    if size > 1:
        os.environ.update(zip(LAUNCHER, map(str, (rank, size, rank, size))))
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def arguments(kind: type = hf.TrainingArguments, **changes: Any) -> Any:
    """Arguments of a trainer that logs every step, and downloads and reports nothing."""
    settings = {
        "output_dir": tempfile.mkdtemp(prefix="weft-trained-"),
        "use_cpu": True,
        "report_to": "none",
        "bf16": False,  # TRL's default is True
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
        "lr_scheduler_type": "constant",
        "dataloader_pin_memory": False,
    }
    return kind(**settings | changes)


def alone(rank: int, build: Callable, *args: Any) -> Any:
    """What `build` gives in a world of one process, on rank 0; None on the others, which wait."""
    made, failure = None, [None]
    if rank == 0:
        with world(0, 1):
            try:
                made = build(*args)
            except Exception:
                failure = [traceback.format_exc()]
    if dist.is_initialized():
        dist.broadcast_object_list(failure)
    assert failure[0] is None, failure[0]
    return made


def together(rank: int, build: Callable, *args: Any) -> Any:
    with world(rank, dist.get_world_size()):
        return build(*args)


#: What a trainer logs of time, and of the run.
_OF_TIME = ("runtime", "per_second", "epoch", "learning_rate", "total_flos", "_time")


def gaps(one: Run, many: Run) -> dict[str, float]:
    """The largest differences: of each number logged, of its size; of weights, absolute."""
    names = {n for entry in one.logs for n in entry if not n.endswith(_OF_TIME)}
    assert {"loss", "grad_norm"} <= names, names
    found = {}
    for name in sorted(names):
        a, b = one.series(name), many.series(name)
        assert len(a) == len(b), (name, a, b)
        # What is not a loss may be a small difference of sums of logarithms.
        least = 0.1 if name in ("loss", "grad_norm") else 1.0
        found[name] = max(abs(x - y) / max(abs(x), least) for x, y in zip(a, b))
    assert one.weights.keys() == many.weights.keys()
    ends = [(w - many.weights[n]).abs().max().item() for n, w in one.weights.items()]
    return found | {"weights": max(ends)}

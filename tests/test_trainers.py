"""Other people's trainers on a sequence-sharded model: every step is one process's step."""

import importlib.util

import pytest

for package in ("transformers", "accelerate", "trl", "peft"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"NOT RUN: {package} is not installed", allow_module_level=True)

import random

import torch
import transformers as hf
from pool import Pool
from trained import (
    alone,
    arguments,
    collate,
    gaps,
    llama,
    rows,
    run,
    text,
    together,
    tokenizer,
)

from weft.integrations import trainers

RING, FOUR = "tokens(zigzag): ring=2", "tokens: ring=2 x ulysses=2"
LAYOUTS = {"dp 2 x P 2": RING, "P 4": FOUR}
PRELOAD = ("transformers.trainer", "accelerate", "trl", "peft", "datasets", "trained")


@pytest.fixture(scope="module")
def four():
    with Pool(4, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def two():
    with Pool(2, preload=PRELOAD) as pool:
        yield pool


def kind(cls, line):
    """A class of trainers: as it is, or on the layout of a line."""
    return cls if line is None else trainers.of(cls, trainers.layout(line))


def compare(rank, build, line, batch, *args):
    """The run of one process and of all, whose rows of a step are the same; rank 0 compares."""
    one = alone(rank, build, None, batch, *args)
    layout = trainers.layout(line)
    groups = torch.distributed.get_world_size() // layout.world_size
    many = together(rank, build, line, batch // groups, *args)
    return None if one is None else gaps(one, many)


# transformers' Trainer


def trainer_run(line, per_rank, changes, options):
    args = arguments(per_device_train_batch_size=per_rank, **changes)
    return run(
        kind(hf.Trainer, line)(
            model=llama(), args=args, train_dataset=rows(20), data_collator=collate, **options
        )
    )


def summed(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own: cross-entropy of squared logits, by the number of items."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits + logits.square(), targets, reduction="sum")
    return loss / num_items_in_batch


SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.5, "num_train_epochs": 1}
TRAINER = {
    "every batch": (SGD, {}),
    "accumulation": (SGD | {"gradient_accumulation_steps": 3}, {}),
    "smoothing": (SGD | {"label_smoothing_factor": 0.1}, {}),
    "own loss": (SGD, {"compute_loss_func": summed}),
    "checkpointing": (SGD | {"activation_checkpointing": True}, {}),
    "find_unused": (SGD | {"ddp_find_unused_parameters": True}, {}),
    "not find_unused": (SGD | {"ddp_find_unused_parameters": False}, {}),
}


@pytest.mark.parametrize("case", TRAINER)
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_trainer(four, line, case):
    found = four.run(compare, trainer_run, line, 4, *TRAINER[case])
    print(found)
    assert max(found[0].values()) < 1e-6


@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_trainer_by_default_arguments(four, line):
    found = four.run(compare, trainer_run, line, 4, {"num_train_epochs": 2}, {})
    print(found)
    assert max(found[0].values()) < 1e-4  # Adam divides by roundings where gradients are small


# TRL


def documents(count, prompts=False):
    from datasets import Dataset

    draw = random.Random(1)
    if prompts:
        made = [
            {"prompt": text(draw, 3, 20), "completion": " " + text(draw, 1, 24)}
            for _ in range(count)
        ]
    else:
        made = [{"text": text(draw, 5, 40)} for _ in range(count)]
    return Dataset.from_list(made)


def lora():
    import peft

    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )


def sft_run(line, per_rank, changes, prompts, adapter):
    from trl import SFTConfig, SFTTrainer

    args = arguments(
        SFTConfig, per_device_train_batch_size=per_rank, max_length=64, **SGD, **changes
    )
    trainer = kind(SFTTrainer, line)(
        model=llama(),
        args=args,
        train_dataset=documents(16, prompts),
        processing_class=tokenizer(),
        peft_config=lora() if adapter else None,
    )
    return run(trainer)


SFT = {
    "padded": ({}, True, False),
    "packing": ({"packing": True}, False, False),
    "dft": ({"loss_type": "dft"}, True, False),
    "lora": ({"gradient_accumulation_steps": 2}, True, True),
}


@pytest.mark.parametrize("case", SFT)
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_sft(four, line, case):
    found = four.run(compare, sft_run, line, 4, *SFT[case])
    print(found)
    assert max(found[0].values()) < 1e-6


def pairs(count):
    from datasets import Dataset

    draw = random.Random(2)
    return Dataset.from_list(
        [
            {"prompt": text(draw, 3, 20)}
            | {name: " " + text(draw, 1, 24) for name in ("chosen", "rejected")}
            for _ in range(count)
        ]
    )


def dpo_run(line, per_rank, changes, adapter):
    from trl import DPOConfig, DPOTrainer

    args = arguments(
        DPOConfig, per_device_train_batch_size=per_rank, max_length=64, beta=0.5, **SGD, **changes
    )
    trainer = kind(DPOTrainer, line)(
        model=llama(),
        args=args,
        train_dataset=pairs(12),
        processing_class=tokenizer(),
        peft_config=lora() if adapter else None,
    )
    return run(trainer)


DPO = {
    "sigmoid": ({}, False),
    "ipo": ({"loss_type": ["ipo"]}, False),
    "precomputed": ({"precompute_ref_log_probs": True}, False),
    "lora": ({}, True),
}


@pytest.mark.parametrize("case", DPO)
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_dpo(four, line, case):
    found = four.run(compare, dpo_run, line, 4, *DPO[case])
    print(found)
    assert max(found[0].values()) < 1e-6


def reward_run(line, per_rank):
    from trl import RewardConfig, RewardTrainer

    args = arguments(RewardConfig, per_device_train_batch_size=per_rank, max_length=64, **SGD)
    trainer = kind(RewardTrainer, line)(
        model=llama(hf.LlamaForSequenceClassification, num_labels=1),
        args=args,
        train_dataset=pairs(12),
        processing_class=tokenizer(),
    )
    return run(trainer)


@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_reward(four, line):
    found = four.run(compare, reward_run, line, 4)
    print(found)
    assert max(found[0].values()) < 1e-6


def kto_run(line, per_rank):
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    draw = random.Random(3)
    data = [
        {"prompt": text(draw, 3, 20), "completion": " " + text(draw, 2, 24), "label": i % 3 > 0}
        for i in range(12)
    ]
    args = arguments(KTOConfig, per_device_train_batch_size=per_rank, max_length=64, **SGD)
    trainer = kind(KTOTrainer, line)(
        model=llama(),
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    return run(trainer)


def test_kto(four):
    # One group: over several, TRL pairs prompts with others' completions within a rank's batch.
    found = four.run(compare, kto_run, FOUR, 4)
    print(found)
    assert max(found[0].values()) < 1e-6

"""Other people's trainers on a sequence-sharded model: every step is one process's step."""

import importlib.util
import os
import random

import pytest
import torch

if any(importlib.util.find_spec(p) is None for p in ("transformers", "trl", "peft")):
    pytest.skip("NOT RUN: transformers, trl or peft is not installed", allow_module_level=True)

import transformers as hf
from pool import Pool
from refusals import refused as refusal
from trained import (
    SMALL,
    alone,
    arguments,
    collate,
    gaps,
    llama,
    model_of,
    rows,
    run,
    same_folder,
    text,
    together,
    tokenizer,
    world,
)

import weft
from weft.errors import UnsupportedError
from weft.integrations import trainers
from weft.integrations.trainers import refused

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


def numbers(model):
    """All weights as plain numbers, which pass between processes."""
    return [x for p in model.parameters() for x in p.detach().flatten().tolist()]


def kind(cls, line):
    """A class of trainers: as it is, or on the layout of a line."""
    return cls if line is None else trainers.of(cls, trainers.layout(line, "cpu", timeout=30))


def assert_same(found, exact=1e-6):
    """Losses, norms and weights of one process to 1e-6; other numbers logged to fp32's sums."""
    print(found)
    assert max(found.pop(name) for name in ("loss", "grad_norm", "weights")) < exact
    assert max(found.values()) < 1e-5


def compare(rank, build, line, batch, *args):
    """The run of one process and of all, whose rows of a step are the same; rank 0 compares."""
    one = alone(rank, build, None, batch, *args)
    layout = trainers.layout(line, "cpu", timeout=30)
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
    assert_same(found[0])


@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_trainer_by_default_arguments(four, line):
    found = four.run(compare, trainer_run, line, 4, {"num_train_epochs": 2}, {})
    assert_same(found[0], 1e-4)  # Adam divides by roundings where gradients are small


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
    assert_same(found[0])


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
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer

    args = arguments(
        DPOConfig, per_device_train_batch_size=per_rank, max_length=64, beta=0.5, **SGD, **changes
    )
    # From a file: TRL caches precomputed numbers beside it, for all processes.
    data = load_from_disk(same_folder(pairs(12).save_to_disk))
    trainer = kind(DPOTrainer, line)(
        model=llama(),
        ref_model=None if adapter else llama(),
        args=args,
        train_dataset=data,
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
    if case == "precomputed" and found[0]:  # rewards are 0 but for roundings at the first step
        assert found[0].pop("rewards/accuracies") <= 1
    assert_same(found[0])


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
    assert_same(found[0])


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
        ref_model=llama(),
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    return run(trainer)


def test_kto(four):
    # One group: over several, TRL pairs prompts with others' completions within a rank's batch.
    found = four.run(compare, kto_run, FOUR, 4)
    assert_same(found[0])


# Trainers that generate


def completions(prompt_ids, count):
    """Completions that depend on the prompt and on which of its generations they are."""
    made, seen = [], {}
    for ids in prompt_ids:
        number = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
        draw = random.Random(f"{list(ids)} {number % count}")
        made.append([draw.randrange(2, 97) for _ in range(draw.randint(3, 9))])
    return made


def evenness(completion_ids, **_):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def seeing(kept):
    """A reward that keeps the prompts and completions that it is asked about."""

    def reward(prompts, completion_ids, **_):
        kept.append((list(prompts), [list(ids) for ids in completion_ids]))
        return evenness(completion_ids)

    return reward


def online_run(line, per_rank, name, changes, own):
    import trl

    cls = getattr(trl, f"{name}Trainer")
    if own:  # a user's subclass: both worlds train on the same completions

        class Fed(cls):
            def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                return completions(prompt_ids, self.num_generations), None

            if name == "RLOO":

                def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                    return completions(prompt_ids, self.num_generations)

        cls = Fed
    kept = []
    draw = random.Random(4)
    from datasets import Dataset

    prompts = [{"prompt": text(draw, 3, 12)} for _ in range(8)]
    settings = {"num_generations": 2, "max_completion_length": 9} | SGD | changes
    args = arguments(
        getattr(trl, f"{name}Config"), per_device_train_batch_size=per_rank, **settings
    )
    model = llama()
    model.config._name_or_path = same_folder(model.save_pretrained)  # of the reference
    trainer = kind(cls, line)(
        model=model,
        reward_funcs=seeing(kept),
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer(),
    )
    return run(trainer, kept)


ONLINE = {
    "dapo": ("GRPO", {"loss_type": "dapo"}),
    "grpo with a reference": ("GRPO", {"loss_type": "grpo", "beta": 0.04}),
    "steps per generation": (
        "GRPO",
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2},
    ),
    "four generations": ("GRPO", {"num_generations": 4, "gradient_accumulation_steps": 2}),
    "rloo": ("RLOO", {"beta": 0.04}),
}


@pytest.mark.parametrize("case", ONLINE)
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_trainers_that_generate(four, line, case):
    name, changes = ONLINE[case]
    batch = 8 if line == RING else 4
    found = four.run(compare, online_run, line, batch, name, changes, True)
    assert_same(found[0])


def generated(rank, line):
    return together(rank, online_run, line, 4, "GRPO", {"temperature": 1.0}, False).extra


def test_a_context_group_trains_on_the_completions_of_its_first_rank(four):
    kept = four.run(generated, RING)
    assert kept[0] == kept[1]
    assert kept[2] == kept[3]
    drawn = [p for group in (kept[0], kept[2]) for prompts, _ in group for p in prompts]
    assert sorted(drawn) == sorted(2 * [*set(drawn)])  # every prompt once, with two generations
    assert len(set(drawn)) == 8
    assert kept[0][0][1] != kept[2][0][1]
    for _, made in kept[0]:
        assert made[0] != made[1]  # two generations of a prompt are two draws


# Evaluation, saving, resuming


def evaluate(line, per_rank):
    kept = {}

    def accuracy(seen):
        kept["predictions"], kept["labels"] = map(torch.as_tensor, seen)
        guesses, labels = kept["predictions"][:, :-1].argmax(-1), kept["labels"][:, 1:]
        return {"accuracy": (guesses == labels)[labels != -100].double().mean().item()}

    trainer = kind(hf.Trainer, line)(
        model=llama(),
        args=arguments(per_device_eval_batch_size=per_rank),
        eval_dataset=rows(11, seed=5),
        data_collator=collate,
        compute_metrics=accuracy,
    )
    return trainer.evaluate(), kept


def compare_evaluation(rank, line, groups):
    one = alone(rank, evaluate, None, 4)
    metrics, kept = together(rank, evaluate, line, 4 // groups)
    if one is None:
        return None
    assert kept["labels"].shape == one[1]["labels"].shape
    assert len(kept["labels"]) == 11
    return {
        "rows": (kept["labels"] == one[1]["labels"]).all().item(),
        "accuracy": (metrics["eval_accuracy"], one[0]["eval_accuracy"]),
        "predictions": (kept["predictions"] - one[1]["predictions"]).abs().max().item(),
        "loss": abs(metrics["eval_loss"] - one[0]["eval_loss"]),
    }


@pytest.mark.parametrize(("line", "groups"), [(RING, 2), (FOUR, 1)], ids=LAYOUTS)
def test_evaluation_counts_each_row_once(four, line, groups):
    found = four.run(compare_evaluation, line, groups)[0]
    print(found)
    assert found["rows"]
    assert found["accuracy"][0] == found["accuracy"][1]
    assert found["predictions"] < 1e-5
    if groups == 1:  # over groups the Trainer takes the mean of their means
        assert found["loss"] < 1e-6


def six_steps(rank, line, folder, resume):
    def build():
        args = arguments(
            per_device_train_batch_size=2,
            max_steps=6,
            save_strategy="steps",
            save_steps=3,
            output_dir=folder,
        )
        trainer = kind(hf.Trainer, line)(
            model=llama(), args=args, train_dataset=rows(40), data_collator=collate
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
        trainer.save_model(f"{folder}/end")
        torch.distributed.barrier()
        return numbers(trainer.model)

    return together(rank, build)


def test_a_run_resumes_bitwise_and_its_model_is_a_plain_one(four, tmp_path):
    through = four.run(six_steps, RING, str(tmp_path), False)[0]
    resumed = four.run(six_steps, RING, str(tmp_path), True)[0]
    assert resumed == through
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert numbers(plain) == through
    assert plain.config._attn_implementation == "sdpa"


# Loops around accelerate and Lightning Fabric


def accelerate_loop(line, per_rank):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from weft.integrations.transformers import parallelize

    model, accelerator = llama(), Accelerator(cpu=True, gradient_accumulation_steps=2)
    if line is not None:
        layout = trainers.layout(line, "cpu", timeout=30)
        parallelize(model, layout)
        trainers.attach(accelerator, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    torch.manual_seed(11)
    loader = DataLoader(rows(16), batch_size=per_rank, shuffle=True, collate_fn=collate)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, norms, seen = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        seen += accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
    return losses, norms, seen, numbers(accelerator.unwrap_model(model)), schedule.get_last_lr()[0]


def compare_loops(rank, line, groups):
    one = alone(rank, accelerate_loop, None, 4)
    many = together(rank, accelerate_loop, line, 4 // groups)
    return None if one is None else (one, many)


def test_a_loop_around_accelerate(four):
    one, many = four.run(compare_loops, FOUR, 1)[0]
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert many[1] == pytest.approx(one[1], rel=1e-6)
    assert many[2] == one[2]
    assert many[3] == pytest.approx(one[3], abs=1e-6)
    assert many[4] == one[4] == 0.1 * 0.9**2


def test_accelerate_counts_and_schedules_by_groups(four):
    one, many = four.run(compare_loops, RING, 2)[0]
    assert sorted(many[2]) == sorted(one[2])  # each of 16 rows once
    assert len(many[2]) == 16
    assert many[4] == pytest.approx(0.1 * 0.9**4)  # two steps at once, as accelerate has it


def fabric_loop(line, per_rank):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    from weft.integrations.transformers import parallelize

    model, data = llama(), rows(16)
    if line is None:
        fabric = Fabric(accelerator="cpu", devices=1)
        sampler = torch.utils.data.DistributedSampler(data, 1, 0, shuffle=True, seed=3)
    else:
        layout = trainers.layout(line, "cpu", timeout=30)
        parallelize(model, layout)
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
        world = torch.distributed.get_world_size()
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        sampler = trainers.sampler(data, layout, shuffle=True, seed=3)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(
        DataLoader(data, per_rank, sampler=sampler, collate_fn=collate),
        use_distributed_sampler=False,
    )
    losses = []
    for batch in loader:
        out = model(**batch)
        count = (batch["labels"][:, 1:] != -100).sum()
        total = fabric.all_reduce(count.double(), reduce_op="mean")
        loss = out.loss * (count / total).float()  # of all rows' tokens, not a mean of means
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    return losses, numbers(model.module)


def compare_fabric(rank, line, groups):
    world = torch.distributed.get_world_size()
    one = alone(rank, fabric_loop, None, 4)
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    assert world % groups == 0
    many = together(rank, fabric_loop, line, 4 // groups)
    return None if one is None else (one, many)


@pytest.mark.parametrize(("line", "groups"), [(RING, 2), (FOUR, 1)], ids=LAYOUTS)
def test_a_loop_around_fabric(four, line, groups):
    pytest.importorskip("lightning")
    one, many = four.run(compare_fabric, line, groups)[0]
    assert many[1] == pytest.approx(one[1], abs=1e-6)
    assert many[0] == pytest.approx(one[0], rel=1e-6)


# Mistakes are an error on every rank


def other_rows(rank):
    """A loader that accelerate prepared for ranks, and not for groups."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from weft.integrations.transformers import parallelize

    def build():
        model, accelerator = llama(), Accelerator(cpu=True)
        parallelize(model, trainers.layout(RING, "cpu", timeout=30))
        model, loader = accelerator.prepare(model, DataLoader(rows(16), 2, collate_fn=collate))
        for batch in loader:
            model(**batch).loss.backward()

    together(rank, build)


def chunks_as_rows(rank):
    from weft.integrations.transformers import parallelize, shard_batch

    layout = trainers.layout(RING, "cpu", timeout=30)
    model = parallelize(llama(), layout)
    local = shard_batch({"input_ids": collate(rows(2))["input_ids"]}, layout)
    model(input_ids=local["input_ids"])


def nobody_averages(rank):
    from weft.integrations.transformers import parallelize

    model = parallelize(llama(), trainers.layout(RING, "cpu", timeout=30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**collate(rows(2))).loss.backward()
        optimizer.step()


def other_advantages(rank):
    from torch.nn.parallel import DistributedDataParallel

    from weft.integrations.transformers import parallelize

    model = DistributedDataParallel(parallelize(llama(), trainers.layout(RING, "cpu", timeout=30)))
    for _ in range(2):
        (model(**collate(rows(2))).loss * (1.0 + rank)).backward()


MISTAKES = {
    other_rows: "input_ids",
    chunks_as_rows: "input_ids",
    nobody_averages: "weights",
    other_advantages: "gradients that entered",
}


@pytest.mark.parametrize(
    ("mistake", "words"), MISTAKES.items(), ids=lambda m: getattr(m, "__name__", "")
)
def test_a_mistake_is_an_error_on_every_rank(four, mistake, words):
    for raised in four.attempt(mistake, timeout=60):
        assert raised.kind == "ShapeError", raised
        assert words in raised.message


def without_the_factor(rank, *args):
    """Gradients as a sum over ranks would need them, and averaged nevertheless."""
    from weft.integrations.transformers import rows as transformers_rows

    factor, transformers_rows.factor = transformers_rows.factor, lambda layout, axis: 1.0
    try:
        return compare(rank, *args)
    finally:
        transformers_rows.factor = factor


def test_the_comparison_sees_a_gradient_that_is_too_small(four):
    found = four.run(without_the_factor, trainer_run, RING, 4, SGD, {})[0]
    print(found)
    assert found["loss"] > 1e-5
    assert found["grad_norm"] > 0.4


# What others got wrong


def masked(line, per_rank, keep):
    """A step on rows padded on both sides, and one that sees the padding."""

    def collate_both_sides(batch):
        made = collate(batch)
        for i, row in enumerate(batch):
            by = (made["input_ids"].shape[1] - len(row["input_ids"])) // 2
            made = {n: t.clone() for n, t in made.items()}
            for t in made.values():
                t[i] = t[i].roll(by)
        if not keep:
            del made["attention_mask"]
        return made

    args = arguments(per_device_train_batch_size=per_rank, max_steps=1, **SGD)
    return run(
        kind(hf.Trainer, line)(
            model=llama(), args=args, train_dataset=rows(8), data_collator=collate_both_sides
        )
    )


def compare_masked(rank):
    same = compare(rank, masked, RING, 4, True)
    unmasked = alone(rank, masked, None, 4, False)
    seen = alone(rank, masked, None, 4, True)
    return same, None if rank else gaps(seen, unmasked)


def test_accelerate_4177_masks_of_padding_are_kept(four):
    """Context parallelism of accelerate drops every attention mask."""
    same, dropped = four.run(compare_masked)[0]
    assert_same(same)
    assert dropped["loss"] > 1e-4


def test_trl_6843_packed_documents_do_not_see_each_other(four):
    """Under context parallelism TRL's packed documents attend to their neighbours."""
    same = four.run(compare, sft_run, RING, 4, *SFT["packing"])[0]
    assert_same(same)
    seen = four.run(without_documents)[0]
    assert seen["loss"] > 1e-4


def without_documents(rank):
    """Packed rows on one process, and the same with positions that do not start anew."""
    packed = alone(rank, sft_run, None, 4, *SFT["packing"])
    before = hf.LlamaForCausalLM.forward

    def joined(self, *args, position_ids=None, **kwargs):
        return before(self, *args, **kwargs)

    hf.LlamaForCausalLM.forward = joined
    try:
        one_text = alone(rank, sft_run, None, 4, *SFT["packing"])
    finally:
        hf.LlamaForCausalLM.forward = before
    return None if rank else gaps(packed, one_text)


def logged_losses(rank):
    one = alone(rank, trainer_run, None, 4, SGD, {})
    many = together(rank, trainer_run, FOUR, 4, SGD, {})
    return (many if one is None else one).series("loss"), many.series("loss")


def test_transformers_46775_the_loss_is_not_scaled_by_the_ranks_of_a_sequence(four):
    """Sequence parallelism in a Trainer logged a loss that was scaled by its size."""
    for one, many in four.run(logged_losses):
        assert many == pytest.approx(one, rel=1e-6)


# Many steps, other models


def window(layers):
    return {"sliding_window": 8, "layer_types": layers}


FAMILIES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 8}),
    "gpt-oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        window(["sliding_attention", "full_attention"])
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "gemma 3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        window(["sliding_attention", "full_attention"]) | {"head_dim": 8},
    ),
}


def fifty_steps(line, per_rank, family):
    cls, config, changes = FAMILIES[family]
    model = model_of(cls, config(**SMALL | {"attn_implementation": "eager"} | changes))
    settings = {"learning_rate": 0.02, "max_grad_norm": 1.0, "max_steps": 50, "optim": "sgd"}
    args = arguments(per_device_train_batch_size=per_rank, **settings)
    return run(
        kind(hf.Trainer, line)(
            model=model, args=args, train_dataset=rows(40), data_collator=collate
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_fifty_steps_on_four_ranks(four, line, family):
    assert_same(four.run(compare, fifty_steps, line, 4, family, timeout=280)[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps_on_two_ranks(two, family):
    assert_same(two.run(compare, fifty_steps, RING, 4, family, timeout=280)[0])


# Refusals


def refused_arguments(changes):
    args = arguments()
    for name, value in changes.items():
        setattr(args, name, value)
    refused.arguments(args)


class Sizes:
    cp_size, sp_size, tp_size = 2, 1, 1


ARGUMENTS = {
    "ParallelismConfig": {"parallelism_config": Sizes},
    "deepspeed": {"deepspeed": "zero.json"},
    "torch_compile": {"torch_compile": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "fused cross-entropy": {"use_liger_kernel": True},
    "GPUs in one process": {"_n_gpu": 2},
}


@pytest.mark.parametrize(("words", "changes"), ARGUMENTS.items(), ids=ARGUMENTS)
def test_refuses_arguments_by_name(words, changes):
    refused_arguments({})
    with pytest.raises(UnsupportedError, match=words):
        refused_arguments(changes)


def test_refuses_batches_dealt_by_the_first_rank():
    args = arguments(accelerator_config={"dispatch_batches": True})
    with pytest.raises(UnsupportedError, match="dispatch_batches"):
        refused.arguments(args)


def test_refuses_other_trainers_of_trl():
    from trl.experimental.orpo import ORPOTrainer

    with pytest.raises(UnsupportedError, match="ORPOTrainer was not tried"):
        trainers.of(ORPOTrainer, weft.Layout.single())


def test_refuses_a_layout_that_splits_rows():
    with pytest.raises(UnsupportedError, match="split rows"):
        trainers.layout("batch: dp=2; tokens: ring=2", "cpu")


def refused_on_ranks(rank):
    """What each of these says."""
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh
    from trl import GRPOConfig, GRPOTrainer

    from weft.integrations.transformers import parallelize

    layout = trainers.layout(RING, "cpu", timeout=30)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "dp"))

    def accelerated(model):
        accelerator = trainers.attach(Accelerator(cpu=True), layout)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def one_process():
        with world(0, 1):
            trainers.attach(Accelerator(cpu=True), layout)

    def late():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.utils.data.DataLoader(rows(4)))
        trainers.attach(accelerator, layout)

    def online(**changes):
        args = arguments(GRPOConfig, per_device_train_batch_size=2, num_generations=2, **changes)
        trainers.of(GRPOTrainer, layout)(model=llama(), reward_funcs=evenness, args=args)

    calls = {
        "not parallelized": lambda: accelerated(llama()),
        "rows=['local']": lambda: accelerated(parallelize(llama(), layout, rows="local")),
        "use_cpu=True": one_process,
        "attach before": late,
        "consecutive": lambda: trainers.of(hf.Trainer, weft.Layout.parse(RING).bind(mesh["ring"])),
        "torch_compile": lambda: trainers.of(hf.Trainer, layout)(
            model=llama(), args=arguments(torch_compile=True)
        ),
        "scale_rewards='batch'": lambda: online(scale_rewards="batch"),
        "top_entropy_quantile": lambda: online(top_entropy_quantile=0.5),
        "no multiple": lambda: trainers.layout("tokens: ring=3", "cpu"),
    }
    with world(rank, 4):
        return {words: refusal(call) for words, call in calls.items()}


def test_refuses_on_every_rank_before_the_first_step(four):
    for said in four.run(refused_on_ranks):
        for words, message in said.items():
            assert words.split(" before")[0] in message, (words, message)


def test_private_methods_of_trl_are_as_they_were():
    import inspect

    from trl import GRPOTrainer, RLOOTrainer

    from weft.integrations.trainers.generation import SEAMS

    for cls in (GRPOTrainer, RLOOTrainer):
        for name, parameters in SEAMS.items():
            assert tuple(inspect.signature(getattr(cls, name)).parameters) == parameters


def test_a_subclass_has_the_name_of_its_class():
    cls = trainers.of(hf.Trainer, weft.Layout.single())
    assert issubclass(cls, hf.Trainer)
    assert cls.__name__ == "Trainer"
    assert cls.__init__.__doc__ == hf.Trainer.__init__.__doc__

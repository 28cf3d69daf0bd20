"""Runs of other people's trainers, on one process and on a layout, and mistakes that users make."""

from __future__ import annotations

import os
import random

import torch
import transformers as hf
from trained import (
    SMALL,
    alone,
    arguments,
    collate,
    gaps,
    llama,
    rows,
    run,
    same_folder,
    text,
    together,
    tokenizer,
)

from benchmarks import image_families
from weft_integrations import trainers

RING, FOUR = "tokens(zigzag): ring=2", "tokens: ring=2 x ulysses=2"


LAYOUTS = {"dp 2 x P 2": RING, "P 4": FOUR}


def numbers(model):
    """All weights as plain numbers, which pass between processes."""
    return [x for p in model.parameters() for x in p.detach().flatten().tolist()]


def kind(cls, line):
    """A class of trainers: as it is, or on the layout of a line."""
    return cls if line is None else trainers.of(cls, trainers.layout(line, "cpu", timeout=30))


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


def hybrid_run(line, per_rank):
    """Two layers of Qwen3.5: one carries a state that decays slowly, one attends."""
    config = hf.Qwen3_5TextConfig(
        **SMALL,
        layer_types=["linear_attention", "full_attention"],
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    torch.manual_seed(0)
    model = hf.Qwen3_5ForCausalLM(config)
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.uniform_(-5, -3)
    args = arguments(per_device_train_batch_size=per_rank, **SGD)
    return run(
        kind(hf.Trainer, line)(
            model=model, args=args, train_dataset=rows(20), data_collator=collate
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
    "compiled": (
        SGD | {"torch_compile_backend": "aot_eager", "activation_checkpointing": True},
        {},
    ),
    "find_unused": (SGD | {"ddp_find_unused_parameters": True}, {}),
    "not find_unused": (SGD | {"ddp_find_unused_parameters": False}, {}),
}


# images


def collate_images(batch):
    """The calls of these seeds, as one."""
    family, seeds = batch[0]["family"], [row["seed"] for row in batch]
    call = image_families.together([image_families.example(family, seed=s) for s in seeds])
    call["attention_mask"] = torch.ones_like(call["input_ids"])
    return {n: t.float() if t.is_floating_point() else t for n, t in call.items()}


def images_run(line, per_rank, family, trl):
    """Four rows of images with text, by transformers' Trainer or by TRL's."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    more = {"dataset_kwargs": {"skip_prepare_dataset": True}} if trl else {}
    args = arguments(
        SFTConfig if trl else hf.TrainingArguments,
        per_device_train_batch_size=per_rank,
        remove_unused_columns=False,
        **SGD,
        **more,
    )
    data = Dataset.from_list([{"family": family, "seed": seed} for seed in range(4)])
    trainer = kind(SFTTrainer if trl else hf.Trainer, line)(
        model=image_families.built(family).float(),
        args=args,
        train_dataset=data,
        data_collator=collate_images,
        processing_class=tokenizer(),
    )
    return run(trainer)


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
        DPOConfig, per_device_train_batch_size=per_rank, max_length=64, **SGD, **changes
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


# Trainers that generate


def completions(prompt_ids, count, noise=""):
    """Completions that depend on the prompt and on which of its generations they are."""
    made, seen = [], {}
    for ids in prompt_ids:
        number = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
        draw = random.Random(f"{list(ids)} {number % count}{noise}")
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


def generated(rank, line):
    changes = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
    return together(rank, online_run, line, 4, "GRPO", changes, False).extra


def by_rank(rank, line):
    """Completions and a judge of whom every rank has others; what the ranks saw, and trained on."""
    from trl import GRPOConfig, GRPOTrainer

    class Noisy(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return completions(prompt_ids, self.num_generations, f" of rank {rank}"), None

    kept = []

    def judge(completion_ids, **_):
        kept.append([list(ids) for ids in completion_ids])
        return [x + random.Random(f"{rank} {x}").random() for x in evenness(completion_ids)]

    def build():
        settings = {"num_generations": 2, "max_completion_length": 9, "beta": 0.04} | SGD
        args = arguments(GRPOConfig, per_device_train_batch_size=4, **settings)
        model = llama()
        model.config._name_or_path = same_folder(model.save_pretrained)
        trainer = kind(Noisy, line)(
            model=model,
            reward_funcs=judge,
            args=args,
            train_dataset=documents(8, prompts=True),
            processing_class=tokenizer(),
        )
        trainer.train()
        split = ["_weft" in m.__dict__ for m in trainer.ref_model.modules()].count(True)
        return kept, numbers(trainer.model), split

    return together(rank, build)


def drawn_by_workers(rank, line):
    """What collators drew in processes that load rows, and the rows of a step by the arguments."""

    def build():
        args = arguments(per_device_train_batch_size=2, dataloader_num_workers=2)
        trainer = kind(hf.Trainer, line)(
            model=llama(), args=args, train_dataset=rows(16), data_collator=drop_some
        )
        batches = [batch["input_ids"].tolist() for batch in trainer.get_train_dataloader()]
        return batches, trainer.get_total_train_batch_size(args)

    return together(rank, build)


def drop_some(batch):
    made = collate(batch)
    made["input_ids"] *= torch.rand(made["input_ids"].shape) < 0.8
    return made


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
    labelled = kept["labels"] != -100  # beyond a row's end it is as long as its batch
    return {
        "rows": (kept["labels"] == one[1]["labels"]).all().item(),
        "accuracy": (metrics["eval_accuracy"], one[0]["eval_accuracy"]),
        "predictions": (kept["predictions"] - one[1]["predictions"])[labelled].abs().max().item(),
        "loss": abs(metrics["eval_loss"] - one[0]["eval_loss"]),
    }


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


# Loops around accelerate and Lightning Fabric


def accelerate_loop(line, per_rank, fsdp2=False, hybrid=()):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import DistributedType
    from torch.utils.data import DataLoader

    from weft import parallelize

    model, accelerator = llama(), Accelerator(cpu=True, gradient_accumulation_steps=2)
    if fsdp2:  # on CPUs accelerate drops the plugin without a word: what it does for GPUs, by hand
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
    if hybrid:
        sizes = ParallelismConfig(**dict(hybrid))
        accelerator.state.parallelism_config = sizes
        accelerator.state.device_mesh = sizes.get_device_mesh("cpu")
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
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                norms.append((norm.full_tensor() if fsdp2 else norm).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        seen += accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
    if fsdp2:
        assert type(model).__name__.startswith("FSDP")
        meshes = {p.device_mesh.shape for p in model.parameters()}
        assert not hybrid or meshes == {tuple(size for _, size in hybrid)}
        weights = [x for p in model.parameters() for x in p.full_tensor().flatten().tolist()]
    else:
        weights = numbers(accelerator.unwrap_model(model))
    return losses, norms, seen, weights, schedule.get_last_lr()[0]


def compare_loops(rank, line, groups, fsdp2=False, hybrid=()):
    one = alone(rank, accelerate_loop, None, 4)
    many = together(rank, accelerate_loop, line, 4 // groups, fsdp2, hybrid)
    return None if one is None else (one, many)


def fabric_loop(line, per_rank):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    from weft import parallelize

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
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    assert world % groups == 0
    many = together(rank, fabric_loop, line, 4 // groups)
    return None if one is None else (one, many)


# Mistakes are an error on every rank


def other_rows(rank):
    """A loader that accelerate prepared for ranks, and not for groups."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from weft import parallelize

    def build():
        model, accelerator = llama(), Accelerator(cpu=True)
        parallelize(model, trainers.layout(RING, "cpu", timeout=30))
        model, loader = accelerator.prepare(model, DataLoader(rows(16), 2, collate_fn=collate))
        for batch in loader:
            model(**batch).loss.backward()

    together(rank, build)


def other_arguments(rank, **changes):
    """One rank has other arguments, which change how many calls it makes."""

    def build():
        changed = changes if rank == 1 else {}
        args = arguments(per_device_train_batch_size=2, max_steps=2, **changed)
        make = kind(hf.Trainer, RING)
        make(llama(), args, train_dataset=rows(16), data_collator=collate).train()

    together(rank, build)


def other_accumulation(rank):
    other_arguments(rank, gradient_accumulation_steps=2)


def other_evaluation(rank):
    other_arguments(rank, eval_on_start=True, logging_steps=2)


def other_accelerators(rank):
    from accelerate import Accelerator

    def build():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 + (rank == 1))
        trainers.attach(accelerator, trainers.layout(RING, "cpu", timeout=30))

    together(rank, build)


def chunks_as_rows(rank):
    from weft import parallelize

    layout = trainers.layout(RING, "cpu", timeout=30)
    model = parallelize(llama(), layout)
    model(input_ids=layout.shard(collate(rows(2))["input_ids"], {"tokens": 1}))


def nobody_averages(rank):
    from weft import parallelize

    model = parallelize(llama(), trainers.layout(RING, "cpu", timeout=30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**collate(rows(2))).loss.backward()
        optimizer.step()


def other_advantages(rank):
    from torch.nn.parallel import DistributedDataParallel

    from weft import parallelize

    model = DistributedDataParallel(parallelize(llama(), trainers.layout(RING, "cpu", timeout=30)))
    for _ in range(2):
        (model(**collate(rows(2))).loss * (1.0 + rank)).backward()

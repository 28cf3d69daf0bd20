"""Other people's trainers on a sequence-sharded model: every step is one process's step."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if any(importlib.util.find_spec(p) is None for p in ("transformers", "trl", "peft")):
    pytest.skip("NOT RUN: transformers, trl or peft is not installed", allow_module_level=True)

import trainer_cases as cases
import transformers as hf
from pool import Pool
from refusals import refused as refusal
from trained import arguments, llama, rows, tokenizer, world
from trainer_cases import FOUR, LAYOUTS, RING

import weft
from weft.errors import UnsupportedError
from weft_integrations import trainers
from weft_integrations.trainers import refused

slow = pytest.mark.slow
DP, P4 = LAYOUTS
#: What ranks import, once for all of them.
PRELOAD = ("transformers.trainer", "accelerate", "trl", "peft", "datasets", "trainer_cases")


@pytest.fixture(scope="module")
def four():
    with Pool(4, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def two():
    with Pool(2, preload=PRELOAD) as pool:
        yield pool


def table(names, sample=(), without=()):
    """Every case on every layout: all slow; a `sample` runs in `.ci/run`."""

    def marks(case):
        return pytest.mark.sample if case in sample else slow

    return pytest.mark.parametrize(
        ("line", "case"),
        [
            pytest.param(line, name, id=f"{way}, {name}", marks=marks((way, name)))
            for way, line in LAYOUTS.items()
            for name in names
            if (way, name) not in without
        ],
    )


def assert_same(found, exact=1e-6):
    """Losses, norms and weights of one process to 1e-6; what else is logged to fp32's sums."""
    print(found)
    assert max(found.pop(name) for name in ("loss", "grad_norm", "weights")) < exact
    assert max(found.values()) < 1e-5


@table(cases.TRAINER, {(P4, "smoothing"), (DP, "compiled")})
def test_trainer(four, line, case):
    found = four.run(cases.compare, cases.trainer_run, line, 4, *cases.TRAINER[case])
    assert_same(found[0])


@pytest.mark.slow
def test_trainer_of_a_hybrid(two):
    """In rows padded on the right, of which two ranks have a half each."""
    found = two.run(cases.compare, cases.hybrid_run, "tokens(zigzag): ring=2", 4)
    assert_same(found[0])


@slow
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_trainer_by_default_arguments(four, line):
    found = four.run(cases.compare, cases.trainer_run, line, 4, {"num_train_epochs": 2}, {})
    assert_same(found[0], 1e-4)  # Adam divides by roundings where gradients are small


@pytest.mark.parametrize(
    ("family", "trl"),
    [
        pytest.param("gemma3", True, marks=pytest.mark.sample),
        pytest.param("qwen3_vl", True, marks=slow),
        pytest.param("qwen3_vl", False, marks=slow),
    ],
)
def test_images_with_text(two, family, trl):
    found = two.run(cases.compare, cases.images_run, RING, 2, family, trl)
    assert_same(found[0], 1e-5)


@table(cases.SFT, {(DP, "lora")})
def test_sft(four, line, case):
    found = four.run(cases.compare, cases.sft_run, line, 4, *cases.SFT[case])
    assert_same(found[0])


@pytest.mark.slow
@table(cases.DPO)
def test_dpo(four, line, case):
    found = four.run(cases.compare, cases.dpo_run, line, 4, *cases.DPO[case])
    if case == "precomputed" and found[0]:  # rewards are 0 but for roundings at the first step
        assert found[0].pop("rewards/accuracies") <= 1
    # Four sums of logarithms, of sizes up to 256, are rounded by 2^-17 each; beta is 0.1.
    assert_same(found[0], 0.1 * 4 * 2**-17)


@slow
@pytest.mark.parametrize("line", LAYOUTS.values(), ids=LAYOUTS)
def test_reward(four, line):
    found = four.run(cases.compare, cases.reward_run, line, 4)
    assert_same(found[0])


@slow
def test_kto(four):
    # One group: over several, TRL pairs prompts with others' completions in a rank's batch.
    found = four.run(cases.compare, cases.kto_run, FOUR, 4)
    assert_same(found[0])


# Slices of one generation are shuffled on each rank, so other rows meet in a step of two groups.
@table(
    cases.ONLINE,
    {(DP, "grpo with a reference")},
    without={(DP, "steps per generation"), (DP, "four generations")},
)
def test_trainers_that_generate(four, line, case):
    name, changes = cases.ONLINE[case]
    batch = 8 if line == RING else 4
    found = four.run(cases.compare, cases.online_run, line, batch, name, changes, True)
    assert_same(found[0])


def test_context_group_trains_on_the_completions_of_its_first_rank(four):
    kept = four.run(cases.generated, RING)
    assert kept[0] == kept[1]
    assert kept[2] == kept[3]
    drawn = [p for group in (kept[0], kept[2]) for prompts, _ in group for p in prompts]
    assert sorted(drawn) == sorted(2 * [*set(drawn)])  # every prompt once, with two generations
    assert len(set(drawn)) == 8
    assert kept[0][0][1] != kept[2][0][1]
    for _, made in kept[0]:
        assert made[0] != made[1]  # two generations of a prompt are two draws


def test_completions_and_rewards_are_those_of_a_groups_first_rank(four):
    (kept, weights, split), *others = four.run(cases.by_rank, RING)
    assert others[0] == (kept, weights, split)  # what rank 1 generates and judges counts nowhere
    assert others[1][0] != kept
    assert split == 1  # the reference model


def test_workers_of_a_group_draw_the_same(four):
    found = four.run(cases.drawn_by_workers, RING)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][0] != found[2][0]
    assert {total for _, total in found} == {4}  # two rows on each of two groups


@pytest.mark.few(1)
@pytest.mark.parametrize(("line", "groups"), [(RING, 2), (FOUR, 1)], ids=LAYOUTS)
def test_evaluation_counts_each_row_once(four, line, groups):
    found = four.run(cases.compare_evaluation, line, groups)[0]
    print(found)
    assert found["rows"]
    assert found["accuracy"][0] == found["accuracy"][1]
    assert found["predictions"] < 1e-5
    if groups == 1:  # over groups the Trainer takes the mean of their means
        assert found["loss"] < 1e-6


def test_run_resumes_bitwise_and_its_model_is_a_plain_one(four, tmp_path):
    through = four.run(cases.six_steps, RING, str(tmp_path), False)[0]
    resumed = four.run(cases.six_steps, RING, str(tmp_path), True)[0]
    assert resumed == through
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert cases.numbers(plain) == through
    assert plain.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_loop_around_accelerate(four):
    one, many = four.run(cases.compare_loops, FOUR, 1)[0]
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert many[1] == pytest.approx(one[1], rel=1e-6)
    assert many[2] == one[2]
    assert many[3] == pytest.approx(one[3], abs=1e-6)
    assert many[4] == one[4] == 0.1 * 0.9**2


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_around_accelerates_fsdp2(request, ranks):
    pool, line = request.getfixturevalue({2: "two", 4: "four"}[ranks]), {2: RING, 4: FOUR}[ranks]
    one, many = pool.run(cases.compare_loops, line, 1, True)[0]
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert many[1] == pytest.approx(one[1], rel=1e-6)
    assert many[2] == one[2]
    assert many[3] == pytest.approx(one[3], abs=1e-6)


def test_a_loop_around_accelerates_hybrid_fsdp2(four):
    """What `weft plan` says to type: sharded over a node, replicated over nodes."""
    hybrid = (("dp_replicate_size", 2), ("dp_shard_size", 2))
    one, many = four.run(cases.compare_loops, FOUR, 1, True, hybrid)[0]
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert many[1] == pytest.approx(one[1], rel=1e-6)
    assert many[3] == pytest.approx(one[3], abs=1e-6)


def test_accelerate_counts_and_schedules_by_groups(four):
    one, many = four.run(cases.compare_loops, RING, 2)[0]
    assert sorted(many[2]) == sorted(one[2])  # each of 16 rows once
    assert len(many[2]) == 16
    assert many[4] == pytest.approx(0.1 * 0.9**4)  # two steps at once, as accelerate has it


@slow
@pytest.mark.parametrize(("line", "groups"), [(RING, 2), (FOUR, 1)], ids=LAYOUTS)
def test_a_loop_around_fabric(four, line, groups):
    pytest.importorskip("lightning")
    one, many = four.run(cases.compare_fabric, line, groups)[0]
    assert many[1] == pytest.approx(one[1], abs=1e-6)
    assert many[0] == pytest.approx(one[0], rel=1e-6)


MISTAKES = {
    cases.other_rows: "input_ids",
    cases.chunks_as_rows: "input_ids",
    cases.nobody_averages: "weights",
    cases.other_advantages: "gradients that entered",
    cases.other_accumulation: "rank 1: gradient_accumulation_steps=2",
    cases.other_evaluation: "rank 1: logging_steps=2, eval_on_start=True",
    cases.other_accelerators: "rank 1: gradient_accumulation_steps=2",
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("mistake", "words"), MISTAKES.items(), ids=lambda m: getattr(m, "__name__", "")
)
def test_a_mistake_is_an_error_on_every_rank(four, mistake, words):
    for raised in four.attempt(mistake, timeout=60):
        assert raised.kind == "ShapeError", raised
        assert words in raised.message


# Refusals


def refused_arguments(changes):
    args = arguments()
    for name, value in changes.items():
        setattr(args, name, value)
    refused.trainer_arguments(args)


class Sizes:
    cp_size, sp_size, tp_size = 2, 1, 1


ARGUMENTS = {
    "ParallelismConfig": {"parallelism_config": Sizes},
    "deepspeed": {"deepspeed": "zero.json"},
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
        refused.trainer_arguments(args)


@pytest.mark.slow
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
    from accelerate.utils import TorchDynamoPlugin
    from torch.distributed.device_mesh import init_device_mesh
    from trl import GRPOConfig, GRPOTrainer

    layout = trainers.layout(RING, "cpu", timeout=30)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "dp"))

    def compiled(**options):
        accelerator = Accelerator(cpu=True)
        accelerator.state.dynamo_plugin = TorchDynamoPlugin("eager", **options)
        trainers.attach(accelerator, layout)

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
        trainers.of(GRPOTrainer, layout)(
            model=llama(),
            reward_funcs=cases.evenness,
            args=args,
            train_dataset=cases.documents(4, prompts=True),
            processing_class=tokenizer(),
        )

    calls = {
        "not parallelized": lambda: accelerated(llama()),
        "use_cpu=True": one_process,
        "attach before": late,
        "consecutive": lambda: trainers.of(hf.Trainer, weft.Layout.parse(RING).bind(mesh["ring"])),
        "scale_rewards='batch'": lambda: online(scale_rewards="batch"),
        "top_entropy_quantile": lambda: online(top_entropy_quantile=0.5),
        "no multiple": lambda: trainers.layout("tokens: ring=3", "cpu"),
        "use_regional_compilation": lambda: compiled(use_regional_compilation=True),
        "fullgraph": lambda: compiled(fullgraph=True),
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

    from weft_integrations.trainers.generation import SEAMS

    for cls in (GRPOTrainer, RLOOTrainer):
        for name, parameters in SEAMS.items():
            assert tuple(inspect.signature(getattr(cls, name)).parameters) == parameters


def test_a_subclass_has_the_name_of_its_class():
    cls = trainers.of(hf.Trainer, weft.Layout.single())
    assert issubclass(cls, hf.Trainer)
    assert cls.__name__ == "Trainer"
    assert cls.__init__.__doc__ == hf.Trainer.__init__.__doc__


@slow
def test_script_of_planning_trains_on_two_processes(tmp_path):
    """The page's `train.py`, with the changes that it names for a laptop and a small model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    (script,) = re.findall(r"^```python\n(from datasets.*?)^```", page, re.M | re.S)
    for old, new in (
        ("ring=2 x ulysses=8", "ring=2"),
        ("bf16=True,", "bf16=False, use_cpu=True, max_steps=2, report_to='none',"),
    ):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script)
    folder = tmp_path / "Meta-Llama-3-8B"
    words = {name: i for i, name in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(30))])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **ends).save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=8, **sizes)).save_pretrained(
        folder
    )
    text = json.dumps({"text": " ".join(f"w{i % 30}" for i in range(75))})
    (tmp_path / "data.jsonl").write_text("\n".join([text] * 4))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "train_loss" in done.stdout

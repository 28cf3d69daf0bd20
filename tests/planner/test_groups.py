"""Groups, layouts, recomputation and sharding of a transformers model: rows that bind and fit."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest
import torch
from world import cli

import weft
from weft import Layout
from weft.declare.hardware import Hardware
from weft_planner.choices import OPTIMIZERS, OTHER

hf = pytest.importorskip("transformers")

from weft_cli.commands import plan_config  # noqa: E402
from weft_planner.groups import Groups  # noqa: E402
from weft_planner.hf_config import HFModel  # noqa: E402
from weft_planner.hf_step import count_model  # noqa: E402

H100 = Hardware.load("h100-8")
WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 512,
    "num_key_value_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 1 << 17,
}  # fmt: skip


def search(kind: str = "llama", tokens: int = 16384, devices: int = 4, **options) -> Groups:
    model = HFModel(hf.AutoConfig.for_model(kind, **WIDE), kind)
    return Groups(model, tokens, H100, devices, **options)


@pytest.mark.slow
def test_rows_are_every_group_size_and_choice():
    found = search()
    rows = found.rows()
    assert {row.layout.world_size for row in rows} == {1, 2, 4}
    assert {row.recompute for row in rows} == {"none", "layers", "offload"}
    assert {row.shards for row in rows} == {1, 4}
    assert {row.loss for row in rows} == {"chunked", "full"}
    assert all(row.groups * row.layout.world_size == 4 for row in rows)
    rates = [row.rate for row in rows]
    assert rates[0] > 0.98 * max(rates)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_printed_layouts_bind_to_the_model(kind):
    """Of a hybrid none is striped, and no mesh dim repeats another's work."""
    found = search(kind, recompute=["layers"], losses=["chunked"])
    layouts = {row.layout for row in found.rows()}
    alone = count_model(found.model, Layout.parse("tokens: local"), 4096, layers=4).flops
    for layout in layouts:
        assert layout.declaration == Layout.parse(layout.name).declaration
        if kind != "llama":
            assert "striped" not in layout.order.values()
            continue
        flops = count_model(found.model, layout, 4096, layers=4).flops
        assert tuple(n * layout.world_size for n in flops) == alone


def test_memory_is_state_and_gathered_weights_and_activations():
    found = search(recompute=["layers"], losses=["chunked"])
    for row in found.rows():
        weights, gradients, states = OPTIMIZERS[row.optimizer]
        numbers = found.model.numbers
        early = numbers * (weights + states) / row.shards
        assert early <= row.memory["state"] <= early + numbers * gradients / row.shards
        counted = found.count(row.layout, row.loss, True)
        assert row.memory["activations"] == counted.peak
        assert row.memory["other"] == OTHER
        assert row.nbytes == sum(row.memory.values())


@pytest.mark.slow
def test_bf16_states_tried_only_where_fp32_ones_do_not_fit():
    roomy = search(recompute=["layers"])
    assert {row.optimizer for row in roomy.rows()} == {"adamw-fp32"}
    least = min(row.nbytes for row in roomy.tried)
    tight = search(recompute=["layers"], memory=least - 1)
    assert {row.optimizer for row in tight.rows()} == {"adamw-fp32", "adamw-bf16"}


@pytest.mark.slow
def test_longest_row_fits_and_a_longer_one_does_not():
    found = search(recompute=["layers"], losses=["chunked"], memory=OTHER + 1.5e9)
    row = found.rows()[0]
    assert found.fits(row)
    longest = found.longest(row)
    assert longest > found.tokens
    for tokens, fits in ((longest // 8 * 8, True), ((longest + 2000) // 8 * 8, False)):
        again = search(
            tokens=tokens, recompute=["layers"], losses=["chunked"], memory=found.limit,
            layouts=[row.layout],
        )  # fmt: skip
        same = [r for r in again.rows() if (r.shards, r.optimizer) == (row.shards, row.optimizer)]
        assert again.fits(same[0]) is fits


@pytest.mark.slow
def test_windows_are_priced_by_masks_of_their_own():
    """The same layers, all of them windowed, attend for a part of the time."""
    options = {
        "recompute": ["layers"],
        "losses": ["chunked"],
        "layouts": [Layout.parse("tokens: ring=2")],
    }
    full, windowed = (
        Groups(
            HFModel(hf.AutoConfig.for_model("mistral", **WIDE, sliding_window=window), "mistral"),
            65536,
            H100,
            2,
            **options,
        ).rows()[0]
        for window in (None, 512)
    )
    assert windowed.seconds["attention"] < 0.5 * full.seconds["attention"]
    assert windowed.seconds["products"] == full.seconds["products"]


def test_models_with_windows_are_offered_keys_by_halo():
    """Layers of both kinds: the layout that suits whole ones is tried with halos for the others."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = hf.AutoConfig.for_model(
        "gemma3_text", **WIDE, head_dim=64, sliding_window=512, layer_types=kinds
    )
    options = {"recompute": ["layers"], "losses": ["chunked"], "only": ("ring", "seen")}
    rows = Groups(HFModel(config, "gemma3"), 16384, H100, 2, **options).rows()
    seconds = {row.layout.name: row.seconds["attention"] for row in rows}
    assert seconds["tokens(zigzag): seen=2"] < seconds["tokens(zigzag): ring=2"]


# -- the command ----------------------------------------------------------------------------------


def asked(**more) -> plan_config.Asked:
    given = {
        "tokens": 16384, "hardware": "h100-8", "devices": 4, "memory": None, "write": None
    }  # fmt: skip
    return plan_config.Asked(**given | more)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    hf.AutoConfig.for_model("llama", **WIDE).save_pretrained(folder)
    return str(folder)


@pytest.mark.sample
def test_command_says_what_fits_and_what_to_type(config, tmp_path):
    path = tmp_path / "plan.toml"
    told = cli(
        "plan", "config", config, "--tokens", "16384", "--devices", "2", "--hardware", "h100-8",
        "--recompute", "layers", "--only", "ring", "--write", str(path),
    )  # fmt: skip
    assert "exact on ranks (a copy of 2 layers was verified)" in told
    assert "torchrun --nproc-per-node 2 train.py" in told
    assert "longest row that fits so:" in told
    assert "SFTConfig(max_length=16384, per_device_train_batch_size=1, gradient_check" in told
    assert Layout.load(path).world_size in (1, 2)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["none", "offload"])
def test_printed_arguments_are_those_of_trl(shards, recompute, tmp_path):
    """Also a hybrid: sharded over a node of two, replicated twice."""
    trl, accelerate = pytest.importorskip("trl"), pytest.importorskip("accelerate")
    row = replace(
        search(recompute=["layers"], losses=["chunked"], devices=2).rows()[0],
        shards=shards,
        recompute=recompute,
    )
    text = ", ".join(plan_config._arguments(row, asked(devices=4)))
    given = eval(f"dict({text})", {"ParallelismConfig": accelerate.ParallelismConfig})
    read = trl.SFTConfig(str(tmp_path), **given | {"bf16": False, "use_cpu": True})
    assert read.gradient_checkpointing is (recompute == "offload")
    assert bool(read.fsdp) is (shards > 1)
    sizes = read.parallelism_config
    assert (sizes and (sizes.dp_replicate_size, sizes.dp_shard_size)) == {2: (2, 2)}.get(shards)


def test_printed_commands_run(config):
    """As they stand: the layout proven, the small copy verified on it."""
    found = search(
        recompute=["layers"], losses=["chunked"], layouts=[Layout.parse("tokens: ring=2")]
    )
    found.model.name = config
    found.rows()
    lines = plan_config._advice(found.tried[0], found, asked(devices=4))
    commands = [line.split("weft ", 1)[1] for line in lines if re.search("^(check:)? +weft ", line)]
    assert [words.split()[0] for words in commands] == ["check", "verify"]
    for words in commands:
        cli(*shlex.split(words))


def test_machine_of_unknown_memory_has_no_longest_row(config, tmp_path):
    """A file of `weft rates` on CPUs names no memory: everything fits, as far as anybody knows."""
    machine = tmp_path / "measured.toml"
    machine.write_text(
        "[device]\nflops = 2e10\nkernels = 'cpu'\n"
        "[[level]]\nname = 'links'\nranks = -1\nrate = 1e8\nlatency = 1e-5\n"
    )
    words = ["--tokens", "512", "--devices", "2", "--hardware", str(machine), "--only", "ring"]
    told = cli("plan", "config", config, *words, "--recompute", "layers", "--loss", "chunked")
    assert "what fits is not known" in told
    assert "pass --memory" in told
    assert "inf" not in told
    assert "torchrun --nproc-per-node 2 -m weft rates" in told or "no layout" in told


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--loss", "chunky"], "--loss 'chunky'; did you mean 'chunked'?"),
        (["--tokens", "1"], "--tokens '1': a row to train on has 2 tokens or more"),
        (["--only", "tp"], "--only 'tp': a transformers model is bound to ring"),
    ],
)
def test_command_refuses_what_a_config_does_not_take(config, words, refused):
    given = {"--tokens": "4096"} | dict(zip(words[::2], words[1::2]))
    flat = [word for pair in given.items() for word in pair]
    assert refused in cli(
        "plan", "config", config, *flat, "--devices", "2", "--hardware", "h100-8", code=1
    )


def test_counting_leaves_no_process_group_and_no_dispatch_mode():
    search(devices=2).rows()
    assert not torch.distributed.is_initialized()
    assert weft.Layout.parse("tokens: local").world_size == 1

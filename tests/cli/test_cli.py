"""The commands: what they show, refuse and start."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from world import cli, typed

import weft.testing.check
from weft import Layout
from weft.declare import catalog
from weft.declare.one_line import to_toml
from weft.errors import ShapeError, WeftError
from weft.launch import environment as place
from weft.launch import launcher as launch
from weft.launch.environment import slurm_variables
from weft.testing.reference import relative_error
from weft_cli.cli import COMMANDS, parser_of
from weft_cli.commands.options import device_for, lengths_of, ranks_of
from weft_cli.inspect import printer
from weft_cli.mask_names import MASKS
from weft_models.declare.run_file import layout_for
from weft_models.models import from_pretrained
from weft_proof.symbolic import Claim

ROUTED = [
    name
    for name in catalog.names("layouts")
    if any(
        rule.top_k for a in Layout.load(name).attend for rule in Layout.load(name).rules(a).values()
    )
]
DENSE = [name for name in catalog.names("layouts") if name not in ROUTED]


# -- diff -----------------------------------------------------------------------------------------


def test_diff_names_the_first_tensor_beyond_the_tolerance():
    call = "diff", "tokens: ring=2", "tokens(zigzag): ring=3", "--steps", "1", "--batch", "1"
    call = *call, "--length", "tokens=21"
    assert "same to 1e-09: 67 tensors of 1 step of causal_lm" in cli(*call)
    assert "differs first: step 0: block " in cli(*call, "--tolerance", "0", code=1)


# -- help and list --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    ["heads", "kv_heads", "head_dim", "batch", "mask", "keys", "order"],
)
def test_a_size_has_one_default_in_all_commands(size: str):
    commands = {name: parser_of(name) for name in COMMANDS}
    defaults = {
        name: (parameter.default, parameter.show_default)
        for name, command in commands.items()
        for parameter in command.params
        if parameter.name == size
        if name != "train" and "model" not in name  # sizes of their files
    }
    assert len(defaults) > 1
    assert len(set(defaults.values())) <= 1, defaults


@pytest.mark.parametrize("words", ["--heads 4", "--mask causal", "--axis rows"])
def test_a_model_refuses_options_of_a_call(words: str):
    shown = cli("explain", "model", "causal_lm", "ring-2", *words.split(), code=2)
    assert f"No such option: {words.split()[0]}" in shown


def test_a_group_names_its_commands():
    shown = cli("explain", "tile-2x2", code=2)
    assert "'tile-2x2'; there are weft explain call, weft explain model" in shown


def test_list_shows_everything_that_ships():
    shown = cli("list")
    for kind in catalog.KINDS:
        for name in catalog.names(kind):
            assert f" {name} " in shown


def test_list_takes_a_kind_and_refuses_another():
    assert "tile-2x2" not in cli("list", "models")
    assert "strategies, layouts, models, masks" in cli("list", "layers", code=2)


def test_list_says_every_mask_as_it_is_typed():
    shown = cli("list", "masks")
    assert all(f" {name} " in shown for name in MASKS)
    assert "documents:A:B:..." in shown


# -- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_explain_says_rules_bytes_memory_and_work(name: str):
    shown = cli("explain", "call", name, "--length", "64", "--heads", "8")
    for mesh_dim in Layout.load(name).mesh:
        assert mesh_dim in shown
    for text in ("forward: ", "backward: ", "at rest", "scores, forward", "busiest / mean"):
        assert text in shown


def test_explain_counts_chosen_keys():
    sizes = ("--length", "1024", "--heads", "8", "--choose", "64")
    shown = cli("explain", "call", "tokens: ulysses=4", *sizes, "--dtype", "float32")
    assert "numbers of chosen keys 192.0 KiB" in shown  # 768 rows of 64 numbers of 4 bytes
    assert "lists merge" in cli("explain", "call", "lists-4", *sizes, "--dtype", "float32")
    shown = cli("explain", "call", "tokens: ring=4", *sizes)
    assert "numbers of chosen keys" not in shown


def test_explain_bounds_the_bytes_of_fetched_keys():
    sizes = ("--mask", "causal", "--length", "1024")
    shown = cli("explain", "call", "chosen-4", *sizes, "--choose", "16")
    assert "bits of wanted keys 384 B" in shown  # of three ranks, 1,024 bits
    assert "keys and values 0 B 0 B to 3.0 MiB" in shown  # rank 0 sees its own keys alone
    assert "60.0 KiB to 3.0 MiB" in shown  # the 257th query takes 15 keys of rank 0, or all do
    assert "by --choose" in cli("explain", "call", "chosen-4", code=1)
    assert "other rows in the backward pass" in cli(
        "explain", "call", "burst-4", "--choose", "4", code=1
    )
    assert "router's weights" in cli("explain", "call", "routed-4", "--choose", "4", code=1)
    assert "depends on the choice" in cli(
        "explain", "call", "chosen-4", "--choose", "4", "--hardware", "h100-8", code=1
    )
    latents = ("--heads", "16", "--head-dim", "24", "--value-dim", "16", "--latents", "32+8")
    assert "made of latents" in cli(
        "explain", "call", "chosen-4", *sizes, "--choose", "16", *latents
    )


def test_explain_counts_a_ring_to_the_byte():
    """3 chunks of K and V of 16 tokens, 8 heads, 64 dims, 2 bytes: 96 KiB; twice that backward."""
    shown = cli("explain", "call", "ring-4", "--length", "64", "--heads", "8")
    assert "all 96.0 KiB 96.0 KiB 96.0 KiB" in shown
    assert "all 192.0 KiB 192.0 KiB 192.0 KiB" in shown


def test_explain_counts_what_arrives_and_not_what_leaves():
    """Rank 0's window ends at its own first token: it sends its chunk on, and receives none."""
    shown = cli(
        "explain", "call", "ring-4", "--length", "64", "--heads", "8", "--mask", "window:17"
    )
    forward, backward = shown.split("backward: bytes that each rank receives")
    assert "ring keys and values 0 B 0 B 32.0 KiB 0.00 1" in forward
    assert "all 0 B 0 B 32.0 KiB" in forward
    gradients = "ring gradients of keys and values 32.0 KiB 0 B 32.0 KiB"
    assert gradients in backward


def test_explain_says_what_a_rank_holds_for_others_at_most():
    """2 chunks of 32 KiB, and its own packed to send; backward also gradients of others' keys."""
    shown = cli("explain", "call", "ring-4", "--length", "64", "--heads", "8")
    assert "forward, held for others at one time: at most 2 chunks, 96.0 KiB" in shown
    text = r"backward, held for others at one time: at most 2 chunks and \d+ partial results, \d"
    assert re.search(text, shown)


def test_explain_draws(tmp_path):
    pictures = tmp_path / "scores.png", tmp_path / "program.png"
    asked = "--score-matrix", str(pictures[0]), "--timeline", str(pictures[1])
    cli("explain", "call", "tile-2x2", *asked)
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_explain_balances_the_work_of_a_mask(tmp_path):
    drawn = "--order", "balanced", "--score-matrix", str(tmp_path / "scores.png")
    line = "tokens: ulysses=2 x ring=4"
    shown = cli("explain", "call", line, "--mask", "prefix:100", "--length", "400", *drawn)
    busiest = re.findall(r"scores, \w+(?: [\d.]+ k){3} ([\d.]+)", shown)
    assert [float(x) <= 1.05 for x in busiest] == [True, True], shown


@pytest.mark.parametrize("command", ["explain call", "check"])
def test_picture_that_cannot_be_written_is_refused_before_anything_runs(command: str, tmp_path):
    for path, text in (("a.jpg", "ends in .png, .pdf, .svg"), ("b/c.png", "no folder")):
        assert text in cli(*command.split(), "tile-2x2", "--timeline", str(tmp_path / path), code=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["tokens: ulysses=2 x ring=4", "tokens(zigzag): ring=-1"])
def test_explain_shows_the_file_that_a_line_stands_for(line: str):
    shown = cli("explain", "call", line, "--length", "64", "--nproc", "8")
    assert re.sub(r"\s+", " ", Layout.parse(line).to_toml()) in shown
    assert "stands for" not in cli("explain", "call", "ring-4", "--length", "64")


def test_explain_says_which_mesh_dims_stay_inside_a_node(tmp_path):
    shipped = (catalog.folder("layouts") / "hierarchical-2x2.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(shipped.replace("# inside_node", "inside_node"))
    text = "inside_node: a launch that puts ranks along intra on several nodes is refused"
    assert text in cli("explain", "call", str(path), "--length", "64")
    assert "inside_node" not in cli("explain", "call", "hierarchical-2x2", "--length", "64")


def test_explain_predicts_times_where_the_layout_has_rates(tmp_path):
    path = tmp_path / "measured.toml"
    declared = Layout.load("ring-2").declaration | {"rates": {"flops": 1e9, "bandwidth": 1e8}}
    path.write_text(to_toml(declared))
    shown = cli("explain", "call", str(path), "--length", "64", "--heads", "1", "--head-dim", "8")
    assert "predicted times at the layout's rates; latency assumed" in shown
    # 32 x 64 scores of 2 x (8 + 8) operations; a block, and the other chunk that comes meanwhile
    block, message = 64 * 32 * 32 / 1e3, 32 * 32 / 1e2 + 100
    assert f"forward {block:.3g} us {message + block / 2:.3g} us" in shown
    assert "predicted times" not in cli("explain", "call", "ring-2")


def test_explain_fills_a_mesh_with_nproc(tmp_path):
    path = tmp_path / "any.toml"
    path.write_text(Layout.load("ring-4").to_toml().replace("ring = 4", "ring = -1"))
    assert "--nproc" in cli("explain", "call", str(path), code=1)
    assert "ring 6" in cli("explain", "call", str(path), "--nproc", "6", "--length", "64")


def test_what_a_routed_layout_moves_is_bounded():
    shown = cli("explain", "call", "routed-8", "--mask", "causal")
    assert "to 1 of 7 others" in shown
    assert "route keys and values 0 B 0 B to 2.0 MiB" in shown
    assert "gradients of keys and values 2.0 MiB to 14.0 MiB 0 B to 14.0 MiB" in shown
    assert "All of them would be 14.0 MiB to rank 0" in shown
    drawn = cli("explain", "call", "routed-4", "--score-matrix", "scores.png", code=1)
    assert "--score-matrix: what a routed layout moves and computes depends on" in drawn


# -- check ----------------------------------------------------------------------------------------


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [*DENSE, *ROUTED])
def test_every_shipped_layout_is_exact(name: str):
    shown = cli("check", name, "--threads")
    assert "WRONG" not in shown
    layout = Layout.load(name)
    routers = [layout.routing(tuple(axis.split("+"))) for axis in layout.attend]
    assert shown.count(" ok") == sum(5 if router is None else 7 for router in routers)


@pytest.mark.parametrize(
    ("mask", "order"), zip(MASKS, itertools.cycle(["contiguous", "zigzag", "striped"]))
)
def test_every_mask_and_order_is_taken(mask: str, order: str):
    mask = mask.replace("W", "5").replace("L:R", "3:4").replace("N", "9")
    mask = mask.replace("K", "5").replace("B", "5")
    assert "WRONG" not in cli("check", "tile-2x2", "--threads", "--mask", mask, "--order", order)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("tile-2x4", "float32"), ("head-x-ring", "bfloat16"), ("burst-4", "float16")],
)
def test_other_dtypes_are_as_good_as_one_device(name: str, dtype: str):
    cli("check", name, "--threads", "--dtype", dtype, "--mask", "causal", "--length", "200")


def test_check_takes_other_keys_and_joint_axes(tmp_path):
    cli("check", "ring-4", "--threads", "--length", "11", "--keys", "26")
    path = tmp_path / "joint.toml"
    path.write_text(
        '[mesh]\nr = 2\nc = 2\n[shard]\nrows = ["r"]\nfeatures = ["c"]\n'
        '[attend]\n"rows+features" = [{ strategy = "ring", on = "r" }, '
        '{ strategy = "pass_q", on = "c" }]\n'
    )
    cli("check", str(path), "--threads", "--length", "rows=7,features=5")
    assert "an axis is named twice" in cli("check", str(path), "--axis", "rows+rows", code=1)
    assert "6x6" in cli("check", str(path), "--threads")
    assert "needs rows=N,features=N" in cli("check", str(path), "--length", "rows=3", code=1)


JOINT = "lat+lon: tile=2x2"


@pytest.mark.slow
def test_a_proof_takes_a_batch_that_its_layout_divides():
    """Ranks with other parts of a batch may run other programs, which too large a mesh refuses."""
    layout = "batch: dp=2; tokens: tile=32x32"
    result = typed("check", layout, "--symbolic", "--length", "30000")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain call field-2x2 --mask near:7:7", "of 500,000,000 queries takes more than 16,384"),
        ("check field-2x2 --symbolic --mask near:7:7", "than the 16,777,216 of a rank"),
        ("check y:ring=65537 --symbolic", "65,537 ranks are more than the 65,536 whose plans"),
    ],
)
def test_what_is_too_large_to_be_planned_or_proven_is_refused(words: str, said: str):
    of = "height=1000000000,width=1000000000" if "field" in words else "37"
    assert said in cli(*words.split(), "--length", of, code=1)


@pytest.mark.parametrize("words", ["check", "check --symbolic", "explain call", "rates"])
def test_a_layout_that_attends_nothing_is_no_exact_one(words: str):
    shown = cli(*words.split(), "heads: ring=2", code=1)
    assert "attends no axis, so there is no attention to look at; name one" in shown


@pytest.mark.parametrize("way", ["--symbolic", "--threads"])
def test_a_check_has_the_sequences_that_its_mask_names(way: str):
    words = ("batch: dp=2; tokens: ring=2", way, "--length", "37", "--mask", "padding:37:20")
    assert "batch 2" in cli("check", *words) or way == "--symbolic"
    shown = cli("check", *words, "--batch", "3", code=1)
    assert "KeyPadding has 2 lengths for a batch of 3 sequences" in shown


@pytest.mark.parametrize("wrong", [0, 1])
def test_proof_that_fails_exit_code_whichever_axis_it_is_of(wrong: int, monkeypatch):
    """rows and features are two cases of one command."""
    defects = [("a score is missing",) if i == wrong else () for i in range(2)]
    claims = iter([[Claim("every visible score once", "each rank", d)] for d in defects])
    monkeypatch.setattr("weft_cli.commands.check.prove", lambda layout, problem: next(claims))
    shown = cli("check", "tabular-2x2", "--symbolic", code=1)
    assert "a score is missing" in shown
    assert "not proven" in shown


@pytest.mark.parametrize("words", [("explain", "call"), ("check",), ("check", "--symbolic")])
def test_keys_of_joint_axes_are_refused(words: tuple[str, ...]):
    shown = cli(*words, JOINT, "--length", "64", "--keys", "10", code=1)
    assert "--keys 10: 'lat+lon' attends several axes jointly" in shown


@pytest.mark.parametrize(
    ("text", "axis", "wanted"),
    [
        ("37", "tokens", (37,)),
        ("tokens=37", "tokens", (37,)),
        ("rows=4096, features=10", "rows", (4096,)),
        ("rows=4096,features=10", "features", (10,)),
        ("features=3,rows=8", "rows+features", (8, 3)),
        ("37", "lat+lon", (6, 6)),
    ],
)
def test_a_length_is_that_of_its_axis(text: str, axis: str, wanted: tuple[int, ...]):
    assert lengths_of(text, axis) == wanted


@pytest.mark.parametrize(
    ("text", "axis", "known", "message"),
    [
        ("row=64", "tokens", (), "axis 'tokens' needs a number, or tokens=N"),
        ("row=64", "rows", ("rows", "features"), "no axis 'row'; did you mean 'rows'?"),
        ("rows=64,feature=2", "rows", ("rows", "features"), "no axis 'feature'; did you mean"),
        ("rows=3", "rows+features", (), "needs rows=N,features=N"),
        ("rows=3,4", "rows", (), "axis 'rows' needs a number, or rows=N"),
        ("3,4", "rows", (), "--length '3,4': axis 'rows' needs a number, or rows=N"),
        ("=4", "rows", (), "axis 'rows' needs a number, or rows=N"),
        ("rows=3,rows=4", "rows", (), "names an axis twice"),
        ("rows=-3", "rows", (), "lengths are 0 to"),
    ],
)
def test_a_length_without_its_axis_is_refused(text, axis, known, message: str):
    with pytest.raises(ShapeError) as raised:
        lengths_of(text, axis, known)
    assert message in str(raised.value)


@pytest.mark.parametrize("command", ["explain call", "check"])
def test_commands_know_which_axes_a_length_may_name(command: str):
    shown = cli(*command.split(), "tokens: ring=2", "--length", "token=64", code=1)
    assert "--length 'token=64': no axis 'token'; did you mean 'tokens'?" in shown


@pytest.mark.parametrize("wrong", ["out", "lse", "dq", "dk", "dv"])
def test_check_finds_a_small_error_in_any_tensor(wrong: str, monkeypatch):
    """One entry off by 1e-9 on one rank is enough."""
    truth = weft.testing.check.results_of

    def perturbed(layout, *rest):
        results = truth(layout, *rest)
        if layout.rank == 2:
            tensor = results[wrong]
            tensor[(0,) * (tensor.dim() - 1)][-1] += 1e-9 * tensor.abs().max()
        return results

    monkeypatch.setattr(weft.testing.check, "results_of", perturbed)
    shown = cli("check", "ring-4", "--threads", code=1)
    assert re.search(rf"{wrong} \S+ \S+ WRONG", shown)
    assert shown.count("WRONG") == 1


def test_threads_wait_for_each_other_as_long_as_timeout_says(monkeypatch):
    truth = weft.testing.check.results_of

    def late(layout, *rest):
        time.sleep(2.0 * (layout.rank == 1))
        return truth(layout, *rest)

    monkeypatch.setattr(weft.testing.check, "results_of", late)
    assert "within 1 s" in cli("check", "ring-2", "--threads", "--timeout", "1", code=1)
    assert "exact" in cli("check", "ring-2", "--threads", "--timeout", "30")


def test_check_takes_nan_and_wrong_infinities_for_errors():
    want = torch.tensor([1.0, -torch.inf])
    for got in ([torch.nan, -torch.inf], [1.0, 0.0], [-torch.inf, -torch.inf]):
        assert relative_error(torch.tensor(got), want, want) == torch.inf
    assert relative_error(want, want, want) == 0.0


REFUSED = {
    "no layouts declaration 'rnig-4'; did you mean 'ring-4'?": ("rnig-4",),
    "3 local heads cannot be split 4 ways": ("ulysses-4", "--heads", "3"),
    "5 query heads cannot share 2 key/value heads": ("ring-4", "--heads", "5", "--kv-heads", "2"),
    "has 4 ranks, but there are 3": ("ring-4", "--nproc", "3"),
    "no axis 'tokns'; did you mean 'tokens'?": ("ring-4", "--axis", "tokns"),
    "mask 'cuasal'; did you mean 'causal'?": ("ring-4", "--mask", "cuasal"),
    "only integers may follow a colon": ("ring-4", "--mask", "window:many"),
    "has the wrong number of integers": ("ring-4", "--mask", "window:1:2:3:4"),
    "add up to 9": ("ring-4", "--mask", "documents:4:5"),
    "as many keys as queries": ("ring-4", "--mask", "causal", "--keys", "50"),
    "dtype 'int8'": ("ring-4", "--dtype", "int8"),
    "order 'zig'": ("ring-4", "--order", "zig"),
    "needs a number": ("ring-4", "--length", "many"),
    "--device 'tpu'": ("ring-4", "--device", "tpu"),
    "by learned weights": ("routed-4", "--symbolic"),
    "in float64 only": ("routed-4", "--dtype", "bfloat16"),
    "which depends on the sample": ("routed-4", "--mask", "padding"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.items(), ids=str)
def test_check_refuses_before_any_rank_starts(text: str, words: tuple[str, ...], monkeypatch):
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("ranks were started"))
    shown = cli("check", *words, code=1)
    assert text in shown
    assert "Traceback" not in shown


# -- train ----------------------------------------------------------------------------------------


def test_train_runs_in_this_process_on_one_device(tmp_path):
    shown = cli(
        *("train", "causal_lm", "--steps", "2", "--batch", "2"),
        *("--log-dir", str(tmp_path / "log"), "--checkpoint-dir", str(tmp_path / "saved")),
    )
    assert "trained in" in shown
    assert list((tmp_path / "log").glob("events*"))
    assert list((tmp_path / "saved").iterdir())


def test_a_link_in_the_place_of_a_run_s_folder_is_refused(tmp_path, monkeypatch):
    """A name that weft makes up: who may write to `runs` could have it replace other files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "causal_lm-one-device").symlink_to("../elsewhere")
    words = ("train", "causal_lm", "--steps", "1", "--batch", "1")
    assert "causal_lm-one-device is a link" in cli(*words, code=1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_s_folder_describes_it_unless_refused(tmp_path):
    words = ("train", "causal_lm", "--batch", "2", "--log-dir", str(tmp_path / "log"))
    words = (*words, "--checkpoint-dir", str(tmp_path / "saved"))
    cli(*words, "--steps", "2", "--set", "warmup=0.5")
    written = (tmp_path / "log" / "run.toml").read_text()
    assert {"warmup = 0.5", "batch = 2", 'model = "causal_lm"'} <= set(written.splitlines())
    assert "seed 0, not 5" in cli(*words, "--resume", "--seed", "5", code=1)
    assert (tmp_path / "log" / "run.toml").read_text() == written
    again = ("train", "--config", str(tmp_path / "log" / "run.toml"), "--steps", "1")
    cli(*again, "--log-dir", str(tmp_path / "again"))
    assert "steps = 1" in (tmp_path / "again" / "run.toml").read_text().splitlines()
    assert from_pretrained(tmp_path / "again" / "model.safetensors").spec.name == "causal_lm"


ELASTIC = ("--checkpoint-dir", "a", "--checkpoint-every", "2", "--restarts", "1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tokens: ring=-1", "--elastic", "4:2", *ELASTIC), "write MIN:MAX"),
        (("tokens: ring=-1", "--elastic", "2:4"), "needs --checkpoint-dir and --checkpoint-every"),
        (("tokens: ring=-1", "--elastic", "2:4", *ELASTIC[:4]), "--elastic needs --restarts"),
        (("--elastic", "2:4", *ELASTIC), "--elastic needs a LAYOUT"),
        (("tokens: ring=-1", "--elastic", "2:4", *ELASTIC, "--nproc", "4"), "--nproc beside"),
        (("ring-4", "--elastic", "3:4", *ELASTIC), "3 ranks: no layout fits 3 ranks"),
        (("heads: tp=-1", "--elastic", "1:3", *ELASTIC), "3 ranks: .*does not divide over the 3"),
        (("batch: dp=-1", "--elastic", "8:9", *ELASTIC), "9 ranks: .*without an example"),
    ],
)
def test_train_refuses_numbers_of_ranks_that_no_layout_fits(words, said):
    shown = cli("train", "causal_lm", *words, code=2 if "ranks: " not in said else 1)
    assert re.search(said, re.sub("[│ ]+", " ", shown)), shown


@pytest.mark.parametrize(("started", "layout"), [(4, "tile"), (3, "ring=3"), (2, None)])
def test_train_takes_the_layout_of_the_ranks_that_started(started, layout, monkeypatch, tmp_path):
    from weft_cli.commands import train

    monkeypatch.setattr(
        train.launch,
        "run",
        lambda rank, spec, layouts, *_, **given: chosen.append(
            (layout_for(layouts, given["ranks"]), given["fewest"])
        ),
    )
    chosen: list = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(started))
    config = tmp_path / "run.toml"
    config.write_text(
        'model = "causal_lm"\nelastic = { layouts = ["tile-2x2", "tokens: ring=3"] }\n'
        "train = { checkpoint_every = 2 }\n"
    )
    words = ("train", "--config", str(config), "--elastic", "3:4", "--checkpoint-dir", "a")
    shown = cli(*words, "--log-dir", str(tmp_path), code=0 if layout else 1)
    if layout is None:
        assert "--elastic 3:4, but torchrun started 2 ranks" in shown
    else:
        ((text, fewest),) = chosen
        assert (layout in text, fewest) == (True, 3)


def test_train_refuses_what_it_cannot_do():
    assert "--checkpoint-dir" in cli("train", "causal_lm", "--resume", code=2)
    assert "did you mean 'tabular'" in cli("train", "tabula", code=1)


# -- starting ranks -------------------------------------------------------------------------------


def _place() -> tuple[str, str, int]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()


def _fail() -> None:
    """Rank 1 fails; the other waits for it."""
    if os.environ["RANK"] == "1":
        raise ShapeError("rank one does not fit")
    time.sleep(3600)  # longer than a test may take


@pytest.mark.slow
def test_ranks_are_started_and_rank_zero_answers(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch.run(_place, ranks=2) == ("0", "2", launch.threads_per_rank(2))


@pytest.mark.slow
def test_a_failing_rank_ends_all_and_is_named_once():
    """Exit codes and deaths, and who is named of several: `CAUSES` of `test_launch`."""
    before, began = set(multiprocessing.active_children()), time.monotonic()
    with pytest.raises(launch.LaunchError) as raised:
        launch.run(_fail, ranks=2)
    assert str(raised.value) == "rank 1: ShapeError: rank one does not fit"
    assert time.monotonic() - began < 240  # the other rank did not sleep its hour out
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
def test_check_on_real_processes_from_a_shell():
    command = [sys.executable, "-m", "weft", "check", "ring-2", "--mask", "causal"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu" in done.stdout
    assert done.stdout.count(" ok") == 5


@pytest.mark.parametrize("after", [0.3, pytest.param(4.0, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_no_process_behind(after: float, tmp_path):
    """Whatever the ranks are at: starting, importing, at work."""
    words = ["train", "causal_lm", "ring-2", "--steps", "100000", "--log-dir", str(tmp_path)]
    shell = subprocess.Popen(
        [sys.executable, "-m", "weft", *words],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert "2 ranks on cpu" in shell.stdout.readline()
        time.sleep(after)
        os.killpg(shell.pid, signal.SIGINT)  # as a terminal does: to the ranks as well
        shown, _ = shell.communicate(timeout=100)
        assert shell.returncode == 130
        assert shown.strip().endswith("stopped")
        # An interrupt that comes while Python runs a callback of a weak reference is said there.
        shown = re.sub(r"Exception ignored in.*?KeyboardInterrupt: *\n", "", shown, flags=re.DOTALL)
        assert "Traceback" not in shown
        until = time.monotonic() + 60  # killed ones may still be on their way out
        while _running(shell.pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert not _running(shell.pid)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)


def _running(session: int) -> str:
    listed = subprocess.run(["ps", "-eo", "sid=,pid=,stat=,args="], capture_output=True, text=True)
    lines = [line for line in listed.stdout.splitlines() if line.split()[0] == str(session)]
    return "\n".join(line for line in lines if not line.split()[2].startswith("Z"))


SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


def test_torchrun_and_slurm_ranks_run_as_they_are():
    assert place.already_launched({}) is None
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    assert place.already_launched(torchrun) == place.Place(2, 4, 0, "torchrun")
    assert place.already_launched(SLURM) == place.Place(3, 8, 1, "slurm")


def test_slurm_gives_torch_a_place_to_meet():
    job = SLURM | {"SLURM_JOB_NODELIST": "rack[02-04],b1", "SLURM_JOB_ID": "71234"}
    assert slurm_variables(job) == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "rack02",
        "MASTER_PORT": "26578",
    }
    assert "MASTER_ADDR" not in slurm_variables(job | {"MASTER_ADDR": "here"})


def test_a_step_meets_at_its_own_first_node_and_port():
    job = SLURM | {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "71234", "SLURM_STEP_ID": "0"}
    step = job | {"SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_ID": "1"}
    places = [slurm_variables(each) for each in (job, step, step | {"SLURM_PROCID": "4"})]
    assert [place["MASTER_ADDR"] for place in places] == ["n1", "n2", "n2"]
    first, second, same = (place["MASTER_PORT"] for place in places)
    assert first != second == same


def test_steps_at_a_time_do_not_share_a_port():
    numbers = [(str(job), str(step)) for job in range(71234, 71274) for step in range(40)]
    steps = [SLURM | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job, step in numbers]
    ports = {int(slurm_variables(step)["MASTER_PORT"]) for step in steps}
    assert len(ports) == len(numbers)
    assert min(ports) >= 20000
    assert max(ports) < 32768  # where Linux gives out ports itself


@pytest.mark.parametrize("command", ["explain call", "check", "rates"])
@pytest.mark.parametrize("option", ["--heads", "--head-dim"])
def test_sizes_below_one_are_refused_where_they_are_typed(command: str, option: str):
    text = cli(*command.split(), "ring-2", option, "0", code=2)
    assert f"Invalid value for '{option}'" in text


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WeftError, match="takes 4 ranks, but torchrun started 2"):
        launch.run(_place, ranks=4)


def test_cores_are_shared_among_ranks(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 6)
    assert [launch.threads_per_rank(n) for n in (1, 2, 4, 8)] == [6, 3, 1, 1]


@pytest.mark.parametrize(("gpus", "place"), [(0, "cpu"), (3, "cpu"), (4, "cuda")])
def test_auto_cuda_where_every_rank_of_this_machine_has_gpu(gpus, place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device_for("auto", 4) == place
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert device_for("auto", 16) == place


@pytest.mark.parametrize(
    ("shown", "place"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "4"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, "cpu"),  # all the same one
        ({}, "cpu"),
    ],
)
def test_auto_cuda_where_srun_shows_each_task_its_own_gpu(shown, place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (SLURM | {"SLURM_TASKS_PER_NODE": "4(x2)"} | shown).items():
        monkeypatch.setenv(name, value)
    assert device_for("auto", 8) == place
    monkeypatch.delenv("SLURM_PROCID")
    assert device_for("auto", 4) == "cpu"  # a plain shell, whose ranks would share it


def test_cuda_without_a_gpu_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("check", "rates"):
        assert "finds no GPU" in cli(command, "ring-2", "--device", "cuda", code=1)


def test_a_launcher_fills_a_mesh_size_of_minus_1(monkeypatch):
    layout = Layout.from_dict({**Layout.load("ring-4").declaration, "mesh": {"ring": -1}})
    with pytest.raises(WeftError, match="--nproc"):
        ranks_of(layout, None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_of(layout, None) == 6
    assert ranks_of(Layout.load("ring-4"), None) == 4  # which launch.run then compares


def test_where_there_no_terminal_line_says_how_long_it_takes(capsys, monkeypatch):
    monkeypatch.setattr(printer, "EVERY", 0.05)
    text, until = "", time.monotonic() + 60
    with printer.still_here("checking on 4 ranks"):
        while text.count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
            text += capsys.readouterr().err
    text += capsys.readouterr().err
    assert [re.sub(r"\d+ s", "0 s", line) for line in text.splitlines()[:2]] == [
        "checking on 4 ranks: 0 s"
    ] * 2
    time.sleep(0.1)
    assert not capsys.readouterr().err


def _helped() -> list[tuple[str, str]]:
    """Each command with the help of each of its options and arguments."""
    return [
        (name, param.help)
        for name in COMMANDS
        for param in parser_of(name).params
        if getattr(param, "help", None)
    ]


@pytest.mark.parametrize("name", sorted({name for name, _ in _helped()}))
def test_help_shows_the_words_as_they_are_written(name: str):
    """Neither markup nor emoji codes eat words such as [train] or padding:A:B."""
    shown = typed(*name.split(), "--help", columns=4000).output
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    for _, text in (each for each in _helped() if each[0] == name):
        assert " ".join(text.replace("\\[", "[").split()) in shown


def test_tables_in_a_pipe_are_not_cut_at_eighty_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    about = weft.Layout.load("tabular-axial-2x2").about
    assert about in cli("list", "layouts")


def test_explain_predicts_times_on_hardware(tmp_path):
    """A file of the user's own; uplinks that are half as fast cost more; images stand for ranks."""
    text = """
        device = { flops = 5e10 }
        level = [{ name = "node", ranks = 4, rate = 1e8 },
                 { name = "cluster", through = true, uplink = UPLINK }]"""
    seconds = []
    for uplink in ("1e8", "1e7"):
        (tmp_path / "mine.toml").write_text(text.replace("UPLINK", uplink))
        shown = cli("explain", "call", "tokens: ring=8", "--hardware", str(tmp_path / "mine.toml"))
        found = re.search(r"both +\S+ \S+ +(\S+) (\w+)", shown)
        seconds.append(float(found[1]) * {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}[found[2]])
    assert seconds[1] > 1.2 * seconds[0]
    many = (
        "explain",
        "call",
        "tokens: ring=64 x ulysses=8",
        "--heads",
        "64",
        "--hardware",
        "h100-8",
    )
    assert "8 ranks replayed, the others are their images" in cli(*many)
    causal = cli(*many, "--mask", "causal", code=1)
    assert "take an order of tokens that balances work" in causal
    unknown = cli("explain", "call", "ring-2", "--hardware", "h100", code=1)
    assert "no hardware declaration 'h100'" in unknown

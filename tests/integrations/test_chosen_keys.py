"""Models that choose their keys are one device's on every layout: outputs, loss and gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from covering import pairs
from fp64 import InFP64, whole
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import weft
from benchmarks import chosen as chosen_bytes
from benchmarks import families
from weft import ChosenKeys, Layout
from weft._torch import fake_ranks
from weft.errors import UnsupportedError
from weft_integrations.transformers import chosen_keys, compressed, interface, running

#: Families whose tiny models take less than a second.
FAMILIES = (
    "deepseek_v32",
    "glm_moe_dsa",
    "axk2",
    "hy_v4",
    "minimax_m3_vl_text",
    "doge",
    "deepseek_v4",
)
LAYOUTS = (
    "tokens(zigzag): ring=2",
    "tokens: ring=4",
    "tokens: tile=2x2",
    "tokens: ulysses=2",
    "tokens: hierarchical=2x2",
    "tokens: ulysses=2 x ring=2",
    "tokens: ring=1",
)
LENGTHS = (32, 29, 13)
MODES = ("eval", "train", "checkpointed")


def built(family: str) -> torch.nn.Module:
    """A tiny model whose choices drop keys, in fp64."""
    model = families.built(family, families.model_name("causal", family)).double()
    for p in model.parameters():  # large enough to choose by
        if p.dim() > 1:
            p.data.mul_(5.0)
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def results(model: torch.nn.Module, batch: dict, mode: str) -> tuple[Tensor, Tensor, dict]:
    """Logits, loss and gradients of a model in a mode."""
    model.train(mode != "eval")
    if mode == "checkpointed":  # again in fp64
        contexts = lambda: (contextlib.nullcontext(), InFP64())  # noqa: E731
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    with InFP64(), torch.autograd.set_multithreading_enabled(False):
        out = model(**batch)
        out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return whole(out.logits).detach(), out.loss.detach(), gradients


def largest_gap(model, line: str | Layout, batch: dict, mode: str = "eval") -> float:
    """The largest difference between ranks and one device, on the largest number of a tensor."""
    logits, loss, gradients = results(copy.deepcopy(model), batch, mode)

    def rank(layout: Layout) -> tuple:
        split = weft.parallelize(copy.deepcopy(model), layout)
        return results(split, batch, mode)

    layout = Layout.parse(line) if isinstance(line, str) else line
    ranks = weft.on_threads(layout, rank, timeout=20)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    gaps = [(t[0][kept], logits[kept]) for t in ranks] + [(t[1], loss) for t in ranks]
    for name, gradient in gradients.items():
        parts = [t[2].get(name, torch.zeros_like(gradient)) for t in ranks]
        if gradient.abs().max() > 1e-9:
            gaps.append((sum(parts) / len(ranks), gradient))
    further = [g for t in ranks for name, g in t[2].items() if name not in gradients]
    assert not any(g.any() for g in further)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in gaps)


def rows(length: int, batch: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


def case(family: str, line: str, length: int, mode: str) -> pytest.param:
    """A case; those of four ranks, or of many kinds of layers, take seconds; some are alike."""
    alike = family in ("glm_moe_dsa", "axk2") and "zigzag" not in line
    many = Layout.parse(line).world_size > 2 or family == "deepseek_v4" or alike
    marks = [pytest.mark.slow] if many else []
    return pytest.param(family, line, length, mode, marks=marks)


CASES = [case(*row) for row in pairs(FAMILIES, LAYOUTS, LENGTHS, MODES)]


@pytest.mark.few(10)
@pytest.mark.parametrize(("family", "line", "length", "mode"), CASES)
def test_models_that_choose_keys_are_exact(family, line, length, mode) -> None:
    assert largest_gap(built(family), line, rows(length), mode) < 1e-11


@pytest.mark.few(1)
@pytest.mark.parametrize("line", ["tokens(zigzag): chosen=2", "tokens: chosen=2 x chosen=2"])
@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4", "minimax_m3_vl_text"])
def test_models_fetch_the_keys_that_they_choose(family, line) -> None:
    if "x" in line:
        layout = Layout.parse("tokens: hierarchical=2x2")
        entries = [{"strategy": "chosen", "on": dim} for dim in layout.mesh]
        line = Layout.from_dict({**layout.declaration, "attend": {"tokens": entries}})
    assert largest_gap(built(family), line, rows(29), "train") < 1e-11


def test_lists_are_refused_where_a_model_has_its_own_topk() -> None:
    model = built("deepseek_v32")
    with pytest.raises(UnsupportedError, match=r"leave \[choose\] out"):
        weft.on_threads(
            Layout.load("lists-4"), lambda layout: weft.parallelize(copy.deepcopy(model), layout)
        )


#: Chunks shorter than a window; a rank of one token, which no other row tells from decoding.
SHORT = {"tokens: ring=3": 7, "tokens(zigzag): ring=2": 13}


@pytest.mark.parametrize("line", SHORT)
def test_windows_of_compressed_keys_close_on_any_rank(line, monkeypatch) -> None:
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    options = families.EXTRA["deepseek_v4"] | {"layer_types": kinds, "num_hidden_layers": 2}
    monkeypatch.setitem(families.EXTRA, "deepseek_v4", options)
    assert largest_gap(built("deepseek_v4"), line, rows(SHORT[line])) < 1e-11


def dense(module, *qkv, attention_mask=None, indices=None, block_indices=None, **options):
    """Attention on ranks to every key, whatever a model chose."""
    *qkv, where = qkv if attention_mask is None else (*qkv, attention_mask)
    if isinstance(where, chosen_keys.Weighed):
        where = replace(where, choice=None)
    return interface.attend(module, *qkv, where, **options)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek_v4"])
def test_choices_drop_keys_that_matter(family, monkeypatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, interface.NAME, dense)
    assert largest_gap(built(family), "tokens: ring=1", rows(29)) > 1e-3


def right_padded(length: int) -> dict[str, Tensor]:
    batch = rows(length)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 21:], mask[1, 26:] = 0, 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask, "labels": labels}


def packed(length: int) -> dict[str, Tensor]:
    places = torch.cat([torch.arange(11), torch.arange(length - 11)])
    return rows(length) | {"position_ids": places.expand(2, -1), "use_cache": False}


@pytest.mark.parametrize(
    ("family", "made"),
    [
        ("deepseek_v32", packed),
        ("deepseek_v32", right_padded),
        ("minimax_m3_vl_text", right_padded),
        ("doge", right_padded),
        ("doge", packed),
    ],
)
def test_padded_and_packed_rows_choose_their_own_keys(family, made) -> None:
    assert largest_gap(built(family), "tokens(zigzag): ring=2", made(29)) < 1e-11


def test_padding_that_sees_no_token_is_one_devices_where_keys_have_weights() -> None:
    """It predicts the first token of the second row."""
    model, batch = built("doge"), rows(29)
    model.set_attn_implementation("sdpa")
    batch["attention_mask"] = (torch.arange(29) >= torch.tensor([[0], [6]])).long()
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    assert largest_gap(model, "tokens(zigzag): ring=2", batch) < 1e-11


def on_ranks(family: str, act, line: str = "tokens: ring=2", **options) -> list:
    model = built(family)

    def rank(layout: Layout):
        split = weft.parallelize(copy.deepcopy(model), layout, **options)
        return act(split, layout)

    return weft.on_threads(Layout.parse(line), rank, timeout=20)


def test_packed_rows_of_blocks_run_whole_with_a_warning() -> None:
    def act(split, layout):
        return whole(split(**packed(29)).logits).detach()

    wanted = built("minimax_m3_vl_text")(**packed(29)).logits
    with pytest.warns(UserWarning, match="blocks of keys are counted from the first place"):
        found = on_ranks("minimax_m3_vl_text", act)
    for logits in found:
        torch.testing.assert_close(logits, wanted.detach(), equal_nan=True)  # eager: no key


NOT_CACHED = {
    "doge": "DogeAttention chooses keys",
    "deepseek_v32": "DynamicIndexedLayer",
    "deepseek_v4": "DeepseekV4HCACache",
    "minimax_m3_vl_text": "MiniMaxM3VLSparseCacheLayer",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("family", NOT_CACHED)
def test_generate_refuses_caches_of_chosen_keys_and_runs_without(family) -> None:
    ids, options = rows(13)["input_ids"], {"max_new_tokens": 2, "do_sample": False}
    wanted = built(family).eval().generate(ids, use_cache=False, **options)

    def act(split, layout):
        with pytest.raises(UnsupportedError, match=NOT_CACHED[family]):
            split.generate(ids, **options)
        return split.eval().generate(ids, use_cache=False, **options)

    assert all(torch.equal(found, wanted) for found in on_ranks(family, act))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", NOT_CACHED)
def test_calls_with_caches_of_chosen_keys_run_whole(family) -> None:
    ids, model = rows(13)["input_ids"], built(family).eval()

    def two_calls(model) -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        first = model(input_ids=ids, past_key_values=cache).logits + 0
        more = model(input_ids=ids[:, :2], past_key_values=cache)
        return [first.detach(), more.logits.detach() + 0]

    wanted = two_calls(model)
    with pytest.warns(UserWarning, match="every rank computes all of this call"):
        found = on_ranks(family, lambda split, layout: two_calls(split.eval()))
    for logits in found:
        torch.testing.assert_close(logits, wanted, rtol=1e-11, atol=1e-11)


def test_calls_without_gradients_keep_no_cache_of_choices() -> None:
    batch = {"input_ids": rows(29)["input_ids"]}
    model = built("deepseek_v32")
    wanted = model(**batch).logits

    def act(split, layout):
        with torch.no_grad(), weft.traffic() as report:
            logits = split(**batch).logits
        return whole(logits), report.by_tensor()["index"]

    for logits, received in on_ranks("deepseek_v32", act):
        torch.testing.assert_close(logits, wanted.detach(), rtol=0, atol=1e-5)
        assert received in {4 * 2 * n * 8 * 8 for n in (14, 15)}  # layers, rows, tokens, d_i, fp64


def test_bytes_of_entries_are_those_of_others_windows() -> None:
    batch, length = {"input_ids": rows(29)["input_ids"]}, 29

    def act(split, layout):
        with torch.no_grad(), weft.traffic() as report:
            split(**batch)
        return tuple(report.by_tensor()[label] for label in ("entries", "index"))

    own = [set(range(0, 15)), set(range(15, length))]
    received = []
    for held in own:
        closed = {m: sum((p + 1) % m == 0 and p not in held for p in range(length)) for m in (4, 8)}
        # two layers of each kind, two rows, fp64: entries of 512 numbers, index entries of 8
        each = 2 * 2 * 8
        received.append((each * 512 * (closed[4] + closed[8]), each * 8 * closed[4]))
    assert on_ranks("deepseek_v4", act) == received


def test_a_restored_model_chooses_as_before() -> None:
    model = built("glm_moe_dsa")
    before = {type(m).__name__: m.forward.__func__ for m in model.modules() if hasattr(m, "wq_b")}

    def act(split, layout):
        weft.restore(split)
        names = {
            type(m).__name__: m.forward.__func__ for m in split.modules() if hasattr(m, "wq_b")
        }
        assert names == before

    on_ranks("glm_moe_dsa", act, "tokens: ring=1")


def test_rows_of_scores_are_made_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(running, "AT_ONCE", 2 * 4 * 29 * 5)  # five rows of four heads
    assert largest_gap(built("deepseek_v32"), "tokens(zigzag): ring=2", rows(29)) < 1e-11
    assert largest_gap(built("minimax_m3_vl_text"), "tokens: ring=2", rows(29)) < 1e-11


@pytest.mark.parametrize("heads", [1, 2])
def test_ties_are_those_of_one_device(heads, monkeypatch) -> None:
    monkeypatch.setitem(families.TINY, "index_n_heads", heads)
    model = few_scores(built("deepseek_v32"))
    ids = torch.randint(3, 6, (2, 29), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    assert largest_gap(model, "tokens(zigzag): ring=2", batch) < 1e-11


# -- memory: 4,096 rows of 65,536 keys -------------------------------------------------------------

MANY, KEYS = 4096, 65536


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that operators make."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.nbytes = max(self.nbytes, *made, 0)
        return out


@contextlib.contextmanager
def one_of_16(line: str):
    """A call of 65,536 tokens on a rank that has 4,096 of them, without numbers."""
    with fake_ranks(1, 16):
        call = running.ModelCall(Layout.parse(line).build("cpu"), "tokens", length=KEYS)
        with running.during(call):
            yield call


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def index_of_deepseek(call, heads: int = 64) -> int:
    """The largest tensor of DeepSeek V3.2's indexer, of so many heads."""
    config = copy.deepcopy(chosen_bytes.V32)
    config.index_n_heads = heads
    with torch.device("meta"):
        indexer = chosen_bytes.v32.DeepseekV32Indexer(config, 0).bfloat16()
    hidden, residual = empty(1, MANY, config.hidden_size), empty(1, MANY, config.q_lora_rank)
    inputs = hidden, residual, (empty(1, MANY, 64),) * 2, call.sharded(weft.Causal(), (KEYS, KEYS))
    with Largest() as largest:
        chosen_keys.choose_tokens(indexer, *inputs)
    return largest.nbytes


def compressor_of_deepseek(call, kind) -> int:
    """The largest tensor of a compressor of DeepSeek V4, with its indexer of 64 heads."""
    config = chosen_bytes.V4
    with torch.device("meta"):
        module = kind(config).bfloat16()
    hidden, residual = empty(1, MANY, config.hidden_size), empty(1, MANY, config.q_lora_rank)
    with Largest() as largest:
        compressed.compress(module, hidden, residual, torch.zeros(1, 1), None, 0)
    return largest.nbytes


TRACED = {
    "indexer": index_of_deepseek,
    "indexer of 4 heads": functools.partial(index_of_deepseek, heads=4),
    "entries of 4": functools.partial(compressor_of_deepseek, kind=chosen_bytes.CSA),
    "entries of 128": functools.partial(compressor_of_deepseek, kind=chosen_bytes.HCA),
}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("indexer", marks=pytest.mark.slow),
        "indexer of 4 heads",
        pytest.param("entries of 4", marks=pytest.mark.slow),
        "entries of 128",
    ],
)
def test_modules_make_no_scores_of_all_rows_at_once(module) -> None:
    with one_of_16("tokens(zigzag): ring=16") as call:
        assert TRACED[module](call) <= 4 * running.AT_ONCE  # and with all rows 64 times as much


def grown(run) -> int:
    """Bytes by which this process grows at most while it runs something."""

    def status(name: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", text)[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def index_few_heads() -> None:
    """An indexer of 4 heads on the first of 16 ranks; the others hand it their index keys."""
    sizes = {"hidden_size": 32, "q_lora_rank": 32, "index_n_heads": 4, "index_topk": 512}
    config = chosen_bytes.DeepseekV32Config(index_head_dim=16, qk_rope_head_dim=8, **sizes)
    indexer = chosen_bytes.v32.DeepseekV32Indexer(config, 0)

    def rank(layout: Layout) -> None:
        call = running.ModelCall(layout, "tokens", length=KEYS)
        hidden, angles = torch.randn(1, MANY, 32), torch.randn(1, MANY, 8)
        if layout.coords["ring"]:
            chosen_keys.OtherRanks(call).update_indexer(hidden[..., :16], 0)
            return
        with running.during(call):
            inputs = hidden, hidden, (angles, angles), call.sharded(weft.Causal(), (KEYS, KEYS))
            assert chosen_keys.choose_tokens(indexer, *inputs).shape == (1, MANY, 512)

    weft.on_threads(Layout.parse("tokens(zigzag): ring=16"), rank, timeout=200)


def attend_few_heads() -> None:
    """Attention of 4 heads on one rank, both passes."""
    q, k, v = (torch.randn(1, 4, n, 8, requires_grad=True) for n in (MANY, KEYS, KEYS))
    choice = ChosenKeys(torch.randint(0, KEYS, (1, 1, MANY, 512), dtype=torch.int32))
    options = {"length": (MANY, KEYS), "choice": choice}
    mask = weft.Causal(offset=KEYS - MANY)
    weft.attention(q, k, v, Layout.single(), "tokens", mask, **options).sum().backward()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the highest mark of memory in /proc")
@pytest.mark.parametrize("run", [index_few_heads, attend_few_heads])
def test_memory_is_a_fraction_of_all_scores(run) -> None:
    assert grown(run) < MANY * KEYS * 4 * 4 / 4  # 0.7 and 0.4 GiB of 4 GiB


def few_scores(model) -> torch.nn.Module:
    """The same model, whose indexers often score equally: small whole numbers, many of them 0."""
    for module in model.modules():
        if hasattr(module, "wq_b"):
            for p in (module.wq_b.weight, module.wk.weight, module.weights_proj.weight):
                p.data.copy_(p.data.sign() * (p.data.abs() > p.data.abs().median()))
    return model

"""`generate` on ranks gives the tokens of one device, from a cache that no rank holds whole."""

import copy
import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from fp64 import whole
from tiny import SMALL, draw_ids, on_ranks, seeded

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.plan.held import Held
from weft.plan.order import shard_spans
from weft_axes.decode import attend as held
from weft_axes.decode.owners import Owners
from weft_axes.fetching import rectangles

if importlib.util.find_spec("transformers") is None:
    pytest.skip(
        "NOT RUN: transformers is not installed, so nothing here says that its models generate; "
        "pip install -e '.[transformers]'",
        allow_module_level=True,
    )

import hybrids
import tokenizers
import transformers as hf

from weft_integrations.transformers import ShardedCache, decoding, parallelize

hf.logging.set_verbosity_error()

SIZES = SMALL | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,  # so that tokens are many different ones
}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=7)),
    # A layer that sees everything and one with a window.
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=1024, initializer_range=0.4
        )
    ),
    # A logit that every query sees beside the keys.
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **SIZES, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    # Keys and values that are kept as latents; of experts, one is shared.
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **SIZES | {"num_key_value_heads": 4, "num_attention_heads": 4},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4},
            **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1},
            **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        )
    ),
    # Attends to the keys of a cache by itself: every rank computes all of it.
    "git": lambda: hf.GitForCausalLM(
        hf.GitConfig(
            **SIZES,
            vision_config=dict.fromkeys(("hidden_size", "image_size", "patch_size"), 8)
            | dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
        )
    ),
}
RING = Layout.parse("tokens(zigzag): ring=2")
LAYOUTS = {
    "ring-zigzag": RING,
    "tile": Layout.parse("tokens: tile=2x2"),
    "ulysses": Layout.parse("tokens: ulysses=2"),
}
OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 16}


def build(name):
    model = seeded(MODELS[name])
    if name in ("gpt_oss", "deepseek_v3"):  # torch's grouped product has no fp64
        model.set_experts_implementation("eager")
    return model


def draw(rows=1, length=37):
    return draw_ids(rows, length, 3)


def padded(lengths, length=37):
    """Ids padded on the left, and their mask."""
    mask = torch.stack([torch.arange(length) >= length - n for n in lengths]).long()
    return draw(len(lengths), length) * mask, mask


def assert_same(model, layout, ids, **options):
    options = OPTIONS | options
    want = model.generate(ids, **copy.deepcopy(options))
    assert len(set(want[0, ids.shape[1] :].tolist())) > 3
    got = on_ranks(model, layout, lambda mine: mine.generate(ids, **copy.deepcopy(options)))
    for tokens in got:
        assert torch.equal(tokens, want)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_one_device(name):
    assert_same(build(name), RING, draw())


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_split_the_prompt_and_the_cache(layout):
    """Longer than a block of decoded tokens on every rank; a model with both kinds of layers."""
    assert_same(build("qwen2"), layout, draw(), max_new_tokens=72)


WAYS = {
    "left-padded rows": (padded([28, 36]), {}),
    "padding between tokens": ((draw(), (torch.arange(37) // 5 != 2)[None].long()), {}),
    "beams": (padded([37, 30]), {"num_beams": 3, "num_return_sequences": 2}),
    "a prompt in chunks": (padded([37, 30]), {"prefill_chunk_size": 8}),
    "a prompt of one token": ((draw(1, 1), None), {}),
    "a prompt shorter than its windows": ((draw(1, 4), None), {}),
    "tokens of the prompt, guessed": (
        (draw().repeat(1, 2), None),
        {"prompt_lookup_num_tokens": 4},
    ),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate(way, name):
    (ids, mask), options = WAYS[way]
    assert_same(build(name), RING, ids, attention_mask=mask, **options)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("qwen2", "tokens(zigzag): ring=2"),
        ("deepseek_v3", "tokens(striped): ring=2"),
        ("gpt_oss", "tokens: tile=2x2"),
    ],
)
def test_chunks_behind_others_are_split_too(name, line, monkeypatch):
    """Keys come to queries behind a short prefix, and queries go to keys behind a long one."""
    layout, ways = Layout.parse(line), []
    size = 20 * layout.world_size
    ids, mask = padded([6 * size + 7, 6 * size - 11], 6 * size + 7)
    for name_ in ("gathered_parts", "merge_rows"):
        own = getattr(decoding, name_)
        watched = lambda *args, own=own, name_=name_: ways.append(name_) or own(*args)  # noqa: E731
        monkeypatch.setattr(decoding, name_, watched)
    assert_same(
        build(name), layout, ids, attention_mask=mask, prefill_chunk_size=size, max_new_tokens=8
    )
    assert ways.count("merge_rows") > 0
    assert ways.count("gathered_parts") > ways.count("merge_rows")


def hybrid(family):
    """A hybrid whose states last, and whose tokens are many different ones."""
    model = hybrids.build(family).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data *= 0.3 / p.std()
    return model


def carried(strategy, carry):
    """Two ranks that attend by one strategy and carry states by another."""
    rules = {
        name: {"tokens": [{"strategy": s, "on": "m"}]}
        for name, s in (("attend", strategy), ("carry", carry))
    }
    return Layout.from_dict({"mesh": {"m": 2}, "shard": {"tokens": ["m"]}, **rules})


def states(cache):
    """What recurrent layers keep of a row: states, and columns of convolutions."""
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    kept = [[*layer.conv_states.values(), *layer.recurrent_states.values()] for layer in layers]
    return [t for tensors in kept for t in tensors if t is not None]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "line", "lengths"),
    [
        ("qwen3_next", "tokens(zigzag): ring=2", [43]),
        ("qwen3_next", "tokens: ring=3", [43, 40]),  # padded on the left
        pytest.param("lfm2", "tokens: ring=3", [43], marks=pytest.mark.slow),
        ("lfm2", "tokens: ring=4", [10]),  # the last columns are on several ranks
        ("nemotron_h", "tokens: tile=2x2", [43]),
        ("kimi_linear", "tokens(zigzag): ring=3", [43]),
        ("falcon_h1", "tokens: ring=3", [43]),  # layers that attend and carry a state
        pytest.param("zamba2", "tokens(zigzag): ring=2", [43, 37], marks=pytest.mark.slow),
        ("jamba", "tokens: ring=2", [43]),
        pytest.param("bamba", "tokens: tile=2x2", [43], marks=pytest.mark.slow),
        ("qwen3_next", ("ulysses", "ulysses"), [43]),
        ("nemotron_h", ("ring", "state_chain"), [43]),
    ],
)
def test_prompts_of_hybrids_split_and_every_rank_gets_last_states(family, line, lengths):
    layout = Layout.parse(line) if isinstance(line, str) else carried(*line)
    model, more = hybrid(family), draw(len(lengths), 16 * layout.world_size + 5)
    ids, mask = padded(lengths, max(lengths))
    both = torch.cat([mask, torch.ones_like(more)], 1)

    def read_again(mine, cache, *turns):
        """What a cache keeps after tokens that are read behind each other."""
        kept = []
        with hybrids.InFP64(), torch.no_grad():
            for part, seen in turns:
                mine(part, attention_mask=seen, use_cache=True, past_key_values=cache)
                kept += [t.clone() for t in states(cache)]
        return kept

    second = family != "jamba"  # whose scan takes no state, also on one device
    want = []
    for row in [(ids, mask), (torch.cat([ids, more], 1), both)][: 1 + second]:
        want += read_again(model, hf.DynamicCache(config=model.config), row)

    def work(mine):
        cache = ShardedCache(mine)
        got = read_again(mine, cache, (ids, mask), (more, both))
        split = [run.chunks is not None for run in cache.sharded()[0].held.runs]
        assert split == [True, second]
        kept = [t.clone() for t in states(cache)]
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0]))
        assert all(torch.equal(a, b[:1]) for a, b in zip(states(cache), kept, strict=True))
        return got[: len(want)]

    for got in on_ranks(model, layout, work):
        assert len(got) == len(want) > 0
        for mine, expected in zip(got, want):
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-11)
    options = OPTIONS | {"max_new_tokens": 30}
    assert_same(model, layout, ids, attention_mask=mask, **options)


def test_latents_of_ranks_that_have_none():
    """A prompt of one token is on one rank: the others' modules expand a latent that none sees."""
    assert_same(build("deepseek_v3"), LAYOUTS["tile"], draw(1, 1))


def test_guesses_are_taken_back(monkeypatch):
    """Rejected tokens are cropped off the shards, or the test above would test nothing."""
    cropped = []
    own = ShardedCache.crop
    monkeypatch.setattr(ShardedCache, "crop", lambda self, n: cropped.append(n) or own(self, n))
    assert_same(build("llama"), RING, draw().repeat(1, 2), prompt_lookup_num_tokens=4)
    assert min(cropped) < -1


def test_an_assistant_guesses():
    model = build("llama")
    torch.manual_seed(0)
    assistant = MODELS["llama"]().double().eval()
    assistant.lm_head.weight.data.add_(0.05 * torch.randn_like(assistant.lm_head.weight))
    assert_same(model, RING, draw(), assistant_model=assistant)


def test_an_assistant_on_ranks_takes_back_what_windows_saw():
    model = build("qwen2")
    want = model.generate(draw(), **OPTIONS)

    def work(mine):
        drafts = parallelize(copy.deepcopy(model), mine._weft.layout)
        return mine.generate(draw(), assistant_model=drafts, **OPTIONS)

    for tokens in on_ranks(model, RING, work):
        assert torch.equal(tokens, want)


class Listener(hf.generation.streamers.BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.flatten().tolist())

    def end(self):
        self.heard.append("end")


def test_streamers_and_stopping_criteria_see_one_device_s_values():
    model = build("llama")

    def generate(mine):
        def long_enough(ids, scores, **kwargs):
            return torch.full((len(ids),), ids.shape[1] >= 50)

        listener = Listener()
        with torch.inference_mode():
            mine.generate(draw(), streamer=listener, stopping_criteria=[long_enough], **OPTIONS)
        return listener.heard

    want = generate(model)
    assert want[-1] == "end"
    assert len(want) == 1 + 13 + 1
    assert on_ranks(model, RING, generate) == [want, want]


def test_strings_that_stop_a_text():
    """`generate` hands its tokenizer on to every call of the model."""
    model = build("llama")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:97]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=made)
    text = tokenizer.decode(model.generate(draw(), **OPTIONS)[0, 42:])
    stop = next(letter for letter in text if letter.isascii() and letter.isalnum())
    options = {"stop_strings": [stop], "tokenizer": tokenizer}
    want = model.generate(draw(), **options, **OPTIONS)
    assert want.shape[1] < 37 + OPTIONS["max_new_tokens"]
    for got in on_ranks(model, RING, lambda mine: mine.generate(draw(), **options, **OPTIONS)):
        assert torch.equal(got, want)


def test_a_conversation_goes_on_with_one_cache():
    model = build("llama")

    def talk(mine):
        parallel = hasattr(mine, "_weft")
        cache = ShardedCache(mine) if parallel else hf.DynamicCache(config=mine.config)
        ids = draw(2)
        for turn in range(3):
            ids = mine.generate(ids, past_key_values=cache, **OPTIONS | {"max_new_tokens": 7})
            ids = torch.cat([ids, draw(2, 4 + turn)], 1)
        return ids

    want = talk(model)
    for ids in on_ranks(model, LAYOUTS["tile"], talk):
        assert torch.equal(ids, want)


def test_cache_that_older_checkpoints_name_is_left_to_the_model():
    model = build("qwen2")
    model.generation_config.cache_implementation = "hybrid"  # as Gemma's checkpoints have it
    assert_same(model, RING, draw())


# -- a cache that is kept -------------------------------------------------------------------------

MORE = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(2))


def read(model, ids, cache):
    with torch.no_grad():
        return whole(model(input_ids=ids, past_key_values=cache).logits)


def test_position_ids_with_gaps_no_documents_where_keys_are_cached():
    model, ids = build("llama"), draw(2, 80)

    def steps(mine):
        parallel, logits, start = hasattr(mine, "_weft"), [], 0
        cache = ShardedCache(mine) if parallel else hf.DynamicCache(config=mine.config)
        for count in (37, 1, 40, 2):
            at = 2 * torch.arange(start, start + count)[None]
            new = ids[:, start : start + count]
            with torch.no_grad():
                out = mine(input_ids=new, position_ids=at, past_key_values=cache)
            logits.append(whole(out.logits))
            start += count
        return torch.cat(logits, 1)

    for logits in on_ranks(model, RING, steps):
        torch.testing.assert_close(logits, steps(model), rtol=0, atol=1e-11)


def test_prefix_is_forked_cropped_and_continues_as_cold_run():
    model, prefix = build("qwen2"), draw(1, 90)
    ids = torch.cat([prefix, MORE], 1)
    want = model.generate(ids, **OPTIONS)

    def work(mine):
        cache = ShardedCache(mine, block=4)
        cache.activate_past_recording()  # or windows could not be cropped
        read(mine, prefix, cache)
        longer = copy.deepcopy(cache)
        read(mine, MORE.flip(1), longer)  # other tokens, taken back
        longer.crop(-MORE.shape[1])
        made = [mine.generate(ids, past_key_values=c, **OPTIONS) for c in (longer, cache)]
        cache.crop(90 - cache.get_seq_length())
        sizes = [layer.keys.shape[2] for layer in cache.sharded()]
        assert cache.get_seq_length() == 90
        cache.shards.layout = Layout.single()
        with pytest.raises(DeclarationError, match="read the prefix there"):
            mine.generate(ids, past_key_values=cache, **OPTIONS)
        return made, sizes

    ranks = on_ranks(model, Layout.parse("tokens(zigzag): ring=4"), work)
    for made, _ in ranks:
        for tokens in made:
            assert torch.equal(tokens, want)
    assert sum(sizes[0] for _, sizes in ranks) == 90


def test_keys_lie_where_their_positions_say():
    """After decoding and cropping."""
    model, ids = build("llama"), draw(1, 170)
    whole = hf.DynamicCache(config=model.config)
    read(model, ids, whole)

    def check(cache):
        for got, want in zip(cache.layers, whole.layers):
            at = got.positions("cpu")
            assert got.keys.shape[2] == len(at)
            torch.testing.assert_close(got.keys, want.keys[:, :, at])
            torch.testing.assert_close(got.values, want.values[:, :, at])

    def work(mine):
        cache = ShardedCache(mine, block=4)
        for start, stop in ((0, 80), (80, 87), (87, 160)):
            read(mine, ids[:, start:stop], cache)
        read(mine, ids[:, :9], cache)
        cache.crop(-9)
        read(mine, ids[:, 160:], cache)
        check(cache)
        return True

    assert all(on_ranks(model, Layout.parse("tokens(zigzag): ring=4"), work))


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_every_position_is_with_one_rank(order):
    def split(length):
        return Held("tokens", (("ring", 3),), shard_spans(length, (3,), order))

    held = Owners(3, 4).split(split(20)).grown(17).cropped(31)
    held = held.split(split(5)).grown(2)
    parts = [held.positions(p) for p in range(3)]
    assert torch.cat(parts).sort().values.tolist() == list(range(held.length)) == list(range(38))
    for part in range(3):  # closed forms agree
        new = held.next_positions(part, 30) + 38
        assert torch.equal(held.grown(30).positions(part)[len(parts[part]) :], new)


@pytest.mark.slow
def test_memory_per_rank_is_a_share_and_a_block():
    model, ids = build("llama"), draw(1, 64)
    options = OPTIONS | {"max_new_tokens": 150}
    whole = hf.DynamicCache(config=model.config)
    model.generate(ids, past_key_values=whole, **options)
    nbytes = sum(k.nbytes + v.nbytes for k, v, _ in whole)
    block = nbytes // whole.get_seq_length() * 32

    def work(mine):
        cache = ShardedCache(mine, block=32)
        mine.generate(ids, past_key_values=cache, **options)
        return cache.nbytes

    for each in on_ranks(model, Layout.parse("tokens(zigzag): ring=4"), work):
        assert each <= nbytes / 4 + block


def test_masks_of_many_tokens_are_made_in_pieces(monkeypatch):
    """Of all tokens of a long row and all keys there would be more numbers than memory."""
    model, most, own = build("llama"), [], rectangles.TileView
    watched = lambda *args, mask=None, **kw: (  # noqa: E731
        most.append(0 if mask is None else mask.shape[2]) or own(*args, mask=mask, **kw)
    )
    monkeypatch.setattr(rectangles, "TileView", watched)
    monkeypatch.setattr(held, "_ROWS", 16)
    ids, mask = padded([170, 150], 170)  # padding asks for masks of keys before chunks, too
    assert_same(model, RING, ids, attention_mask=mask, prefill_chunk_size=70, max_new_tokens=4)
    assert max(most) == 16


def test_bytes_of_a_token_are_the_formula_whatever_is_cached():
    """(P - 1) b h (d + 1) numbers a layer, for queries of one token."""
    model = build("llama")
    ways, heads, dim = 2, 4, 8

    def work(mine):
        layout, moved = mine._weft.layout, []
        for length in (20, 200):
            cache = ShardedCache(mine)
            read(mine, draw(1, length), cache)
            with weft.traffic(layout) as traffic:
                read(mine, draw(1, 1), cache)
            moved.append(traffic.bytes)
        return moved

    wanted = 2 * (ways - 1) * heads * (dim + 1) * 8  # two layers, fp64
    assert on_ranks(model, RING, work) == [[wanted, wanted]] * 2


def test_the_page_about_it_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "generate.md"
    first, second = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {}
    exec(compile(first, str(page), "exec"), names)
    sizes = [int(line) for line in capsys.readouterr().out.split()]
    whole = 539 * 2 * 2 * 2 * 16 * 8  # tokens, layers, keys and values, heads, head dim, bytes
    assert len(sizes) == 4
    assert max(sizes) <= whole / 4 + whole / 539 * 32
    compile(second, str(page), "exec")


# -- refused --------------------------------------------------------------------------------------


def refuses(model, error, match, call, layout=RING):
    def work(mine):
        with pytest.raises(error, match=match):
            call(mine)
        return True

    assert all(on_ranks(model, layout, work))


def test_refuses_caches_that_have_no_parts():
    model, ids = build("llama"), draw()
    static = hf.StaticCache(config=model.config, max_cache_len=64)
    for options, match in (
        ({"cache_implementation": "static"}, "'static': a cache of one size"),
        ({"cache_implementation": "quantized"}, "'quantized': .* every rank holds its part"),
        ({"past_key_values": static}, "StaticCache has no parts"),
        ({"output_attentions": True}, "no rank ever holds"),
    ):
        refuses(
            model,
            UnsupportedError,
            match,
            lambda mine, o=options: mine.generate(ids, **o, **OPTIONS),
        )
    refuses(model, ValueError, "weft is not supported", lambda m: m.generate_batch([[1]]))


def test_refuses_what_one_rank_alone_asks_for():
    """On the others, too, which would wait for it: other options, or a cache of other tokens."""
    model, ids, more = build("llama"), draw(), draw(1, 60)

    def forks(mine):
        rank, cache = mine._weft.layout.rank, ShardedCache(mine)
        read(mine, ids, cache)
        fork = copy.deepcopy(cache)
        read(mine, more[:, :3], cache)
        read(mine, more[:, 3:6], fork)
        read(mine, more[:, 6:7], fork if rank else cache)

    def blocks(mine):
        read(mine, ids, ShardedCache(mine, block=2 + mine._weft.layout.rank))

    def static(mine):
        kind = "static" if mine._weft.layout.rank else None
        mine.generate(ids, cache_implementation=kind, **OPTIONS)

    for call in (forks, blocks, static):
        refuses(model, (ShapeError, UnsupportedError), "the same on every rank|one size", call)


def test_refuses_rows_that_are_not_those_of_the_cache():
    def call(mine):
        cache = ShardedCache(mine)
        read(mine, draw(2), cache)
        read(mine, draw(3), cache)

    refuses(build("llama"), ShapeError, r"3 rows behind a cache of 2: .*select_indices", call)


def test_refuses_packed_documents_behind_a_cache():
    bounds = torch.tensor([0, 20, 37], dtype=torch.int32)
    refuses(
        build("llama"),
        UnsupportedError,
        "give each document a row",
        lambda mine: mine.generate(draw(), cu_seq_lens_q=bounds, **OPTIONS),
    )


def test_refuses_a_cache_of_another_model_or_dtype():
    model, ids = build("llama"), draw()
    other = build("llama")
    other.lm_head.weight.data += 1.0

    def call(mine):
        layout = mine._weft.layout
        for made_by in (other, build("llama").float()):
            stranger = parallelize(copy.deepcopy(made_by), layout)
            with pytest.raises(DeclarationError, match="for another model than this Llama"):
                mine.generate(ids, past_key_values=ShardedCache(stranger), **OPTIONS)
        return True

    assert all(on_ranks(model, RING, call))
    with pytest.raises(DeclarationError, match="not parallelized"):
        ShardedCache(model)


def test_refuses_gradients_through_a_cache():
    refuses(
        build("llama"),
        UnsupportedError,
        "keeps no graph",
        lambda mine: mine(input_ids=draw(), past_key_values=ShardedCache(mine)),
    )


def test_refuses_layers_whose_cache_has_no_parts():
    kinds = {
        "indexed_attention": "layer 1 caches with DynamicIndexedLayer",
        "hybrid_sliding": "layer 1 caches with LinearAttentionAndSlidingWindowAttentionLayer",
    }
    for kind, match in kinds.items():
        config = hf.LlamaConfig(**SIZES)
        config.layer_types, config.sliding_window = ["full_attention", kind], 8
        model = hf.LlamaForCausalLM(config).eval()
        refuses(model, UnsupportedError, match, lambda mine: mine.generate(draw(), **OPTIONS))
    looped = hf.LlamaConfig(**SIZES, recurrent_kv_cache_mode="per_loop")  # as Dory's
    model = hf.LlamaForCausalLM(looped).eval()
    refuses(model, UnsupportedError, "several times", lambda mine: mine.generate(draw()))
    config.layer_types = ["conv", "conv"]
    model = hf.LlamaForCausalLM(config).eval()
    refuses(model, UnsupportedError, "none of its layers", lambda mine: mine.generate(draw()))


@pytest.mark.parametrize("change", ["key * 1", "key.mul_(1.0)", "value[:, :, :1]"])
def test_refuses_a_model_that_changes_what_the_cache_returned(change, monkeypatch):
    from transformers import AttentionInterface

    own = AttentionInterface._global_mapping["weft"]

    def changing(module, query, key, value, *args, **kwargs):
        key = key * 1 if change == "key * 1" else key
        key = key.mul_(1.0) if change == "key.mul_(1.0)" else key
        value = value[:, :, :1] if change == "value[:, :, :1]" else value
        return own(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "weft", changing)
    refuses(
        build("llama"),
        UnsupportedError,
        "LlamaAttention: its keys or values are not those",
        lambda mine: mine.generate(draw(), **OPTIONS),
    )


def test_ranks_that_choose_other_tokens_are_told_at_once():
    """One rank's logits favour another token: in the middle, and as the last one."""
    model, ids = build("llama"), draw()

    def work(mine, step):
        layout = mine._weft.layout

        def favour(sequences, scores):
            if layout.rank == 1 and sequences.shape[1] == ids.shape[1] + step:
                scores[:, 5] += 1e9
            return scores

        with pytest.raises(ShapeError, match="must be the same on every rank"):
            mine.generate(ids, logits_processor=hf.LogitsProcessorList([favour]), **OPTIONS)
        return True

    for step in (7, OPTIONS["max_new_tokens"] - 1):
        assert all(on_ranks(model, RING, lambda mine, s=step: work(mine, s)))


# -- processes ------------------------------------------------------------------------------------


def _ranks(timeout=60.0):
    """The model on the pool's four processes, and the same on one device."""
    model = build("llama")
    layout = Layout.parse("tokens(zigzag): ring=4").build("cpu", timeout)
    return parallelize(copy.deepcopy(model), layout), model


def _sampled(rank, options):
    made = []
    for model in _ranks():
        torch.manual_seed(3)
        ids, mask = padded([37, 30])
        made.append(model.generate(ids, attention_mask=mask, **options))
    return torch.equal(*made), len(set(made[0].flatten().tolist()))


@pytest.mark.slow
def test_samples_are_those_of_one_device_with_its_seed(pool):
    """On processes, as threads draw from one generator."""
    options = OPTIONS | {"do_sample": True, "num_return_sequences": 2, "temperature": 0.9}
    for same, different in pool.run(_sampled, options):
        assert same
        assert different > 20


def _killed(rank, options):
    mine, _ = _ranks(4.0)

    def die(sequences, scores):
        if rank == 2 and sequences.shape[1] == 42:
            os.kill(os.getpid(), 9)
        return scores

    mine.generate(draw(), logits_processor=hf.LogitsProcessorList([die]), **options)


def test_a_rank_that_is_killed_while_decoding_is_named(pool):
    for rank, result in enumerate(pool.attempt(_killed, OPTIONS, dying=(2,))):
        if rank != 2:
            assert (result.kind, "rank 2 ended" in result.message) == ("RankError", True), result

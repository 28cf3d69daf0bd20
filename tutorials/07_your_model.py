# %% [markdown]
# # 7. Bring your own model
#
# You have a model already, and it knows nothing of weft. It should stay that way:
#
# - a module of your own: `weft.parallelize(model, layout, dims={"tokens": 1})`,
# - a model from Hugging Face transformers: `weft.parallelize(model, layout)`.
#
# Both keep the model's file, its weights and its state dict as they are. For the second part you
# need `pip install -e ".[transformers]"`. Nothing is downloaded: models are made from
# their configuration, with random weights.

# %%
import copy
import warnings

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import nn

import weft

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## A model of your own
#
# Here is a small one, in plain PyTorch: torch's own layers, a causal mask and a loss. First on one
# device.


# %%
class Small(nn.Module):
    def __init__(self, vocabulary=50, width=32, length=64):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        n = ids.shape[1]
        x = self.token(ids) + self.place(torch.arange(n))
        causal = nn.Transformer.generate_square_subsequent_mask(n)
        return self.loss(self.layers(x, mask=causal, is_causal=True), ids)

    def loss(self, x, ids):
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def on_one_device(model):
    alone = copy.deepcopy(model)
    loss = alone(ids)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in alone.named_parameters()}


small = Small().double()
ids = torch.randint(50, (2, 64))
loss, grads = on_one_device(small)
print(f"loss on one device: {loss:.12f}")

# %% [markdown]
# Then on four ranks, here threads of this process. `dims` says which dim of the tensors is which
# axis. The model takes whole rows on every rank and gives the loss of whole rows. A rank's
# gradients are its share of the whole; `layout.sync_gradients` adds the shares up.
#
# What is split? Inside of the model tensors are `weft.Field`s. They have the shape of whole rows,
# so the model's code reads as before, and each rank holds its own tokens. A hook looks at one.


# %%
def step(layout, model, fallback="whole"):
    split = weft.parallelize(copy.deepcopy(model), layout, dims={"tokens": 1}, fallback=fallback)
    seen = []
    split.layers.register_forward_hook(
        lambda _, inputs, x: seen.append(f"{tuple(x.to_local().shape)} of {x}")
    )
    with weft.traffic() as moved:
        loss = split(ids)
        loss.backward()
    layout.sync_gradients(split)
    grads = {name: p.grad for name, p in split.named_parameters()}
    return loss.item(), grads, seen[0], split._weft.ran_whole.calls, moved.by_tensor()


def same(result, loss, grads):
    assert abs(result[0] - loss) < 1e-12
    for name, grad in grads.items():
        torch.testing.assert_close(result[1][name], grad, rtol=0, atol=1e-12)


tile = weft.Layout.parse("tokens(zigzag): tile=2x2")
results = weft.on_threads(tile, step, small)
for result in results:
    same(result, loss, grads)
_, _, seen, whole, received = results[0]
assert not whole
print(f"loss on four ranks: {results[0][0]:.12f}, all {len(grads)} gradients agree")
print("rank 0 held", seen)
print("rank 0 received bytes", received)

# %% [markdown]
# Nothing in the model says where a token is, and yet it is right. Plain tensors that meet a field,
# such as the embeddings of `torch.arange(n)`, are cut to each rank's positions. `is_causal=True`
# means causal in global positions. The shift by one brings each rank the labels that it lacks
# (`align`), and of the loss only sums travel. What costs is attention: queries, keys, values and
# outputs, and the gradients of these (`dq`, `dkv`). Other layers send nothing.
#
# ## A function that weft does not know
#
# Functions of torch are split by rules. One without a rule runs whole on every rank: its fields are
# gathered first. That is exact. A warning names it, once, and `model._weft.ran_whole` counts it.
# Here the loss also asks for smooth rows, by a Fourier transform along tokens.


# %%
class Smooth(Small):
    def loss(self, x, ids):
        waves = torch.fft.rfft(x, dim=1)
        return super().loss(x, ids) + waves[:, 8:].abs().mean() / 64


smooth = Smooth().double()
loss, grads = on_one_device(smooth)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    results = weft.on_threads(tile, step, smooth)
for result in results:
    same(result, loss, grads)
_, _, _, whole, more = results[0]
assert [*whole] == ["torch's fft_rfft"]
print(said[0].message)
print(f"loss {results[0][0]:.12f} of {loss:.12f}, ran whole: {whole}")
added = {name: n - received.get(name, 0) for name, n in more.items()}
print("more bytes:", {name: n for name, n in added.items() if n})
assert added["align"] == added["dalign"] == 2 * 64 * 32 * 8  # all tokens, numbers, bytes

# %% [markdown]
# It costs the bytes of all tokens, there and back, and in this function each rank needs the time
# and memory of one device. For a long row that may be what you wanted to avoid.
# `fallback="refuse"` makes it an error, by name, on every rank:

# %%
try:
    weft.on_threads(tile, step, smooth, "refuse")
except weft.UnsupportedError as error:
    message = str(error)
print(message)
assert "fft_rfft" in message

# %% [markdown]
# `docs/any_model.md` has the rest: what is refused in any case, and what fields cost in Python.
#
# ## Attention by hand
#
# Code that holds plain tensors, each rank its own tokens, runs inside `with weft.sdpa(layout,
# axis):`. There `F.scaled_dot_product_attention` looks beyond the rank, and `is_causal=True` means
# causal in global positions. All else is yours to place, such as positions:
# `layout.positions("tokens", 64)`.


# %%
def by_hand(layout):
    mine = [layout.shard(t, {"tokens": 2}) for t in (q, k, v)]
    with weft.sdpa(layout, "tokens"):
        out = F.scaled_dot_product_attention(*mine, is_causal=True)
    return layout.gather(out, {"tokens": 2})


q, k, v = torch.randn(3, 1, 4, 64, 8).double()
for out in weft.on_threads(tile, by_hand):
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))

# %% [markdown]
# ## A Llama, sequence-parallel
#
# Now a model from transformers: two layers of Llama, with grouped-query heads and rotary positions.
# First on one device, with its own attention and its own loss.

# %%
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="eager",
)
llama = LlamaForCausalLM(config).double()
ids = torch.randint(97, (1, 48))
batch = {"input_ids": ids, "labels": ids}

alone = copy.deepcopy(llama)
expected = alone(**batch)
expected.loss.backward()
print(f"loss on one device: {expected.loss.item():.12f}")

# %% [markdown]
# Then on a mesh. Two lines differ from a usual training step, and both are outside of the model:
#
# 1. `parallelize(model, layout)` once. From then on every rank passes the same full rows, computes
#    its own tokens of them, and gets full outputs and the loss of full rows back.
# 2. Gradients are averaged over ranks, as in data parallelism. Here `layout.sync_gradients(model)`
#    does it after `backward`; between processes `DistributedDataParallel` does it by itself.


# %%
def step(layout):
    model = weft.parallelize(copy.deepcopy(llama), layout)
    out = model(**batch)
    out.loss.backward()
    layout.sync_gradients(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    logits = out.logits.detach().full_tensor()  # a field, gathered only where one asks for all
    return out.loss.item(), logits, grads


for line in ("tokens(zigzag): ring=2", "tokens(striped): tile=2x2", "tokens: ulysses=2 x ring=2"):
    results = weft.on_threads(weft.Layout.parse(line), step)
    for loss, logits, grads in results:
        assert abs(loss - expected.loss.item()) < 1e-5
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-5)
    print(f"{line:27} loss {results[0][0]:.12f}, all {len(results[0][2])} gradients agree")

# %% [markdown]
# (The tolerance is that of single precision, because Llama's own code computes rotary angles, norms
# and its softmax in it, whatever its weights are.)
#
# ## Packed documents
#
# Several short documents in one row: position ids start anew in each of them, as in transformers,
# and tokens see only their own document. The first token of a document has no label, or the token
# before it would predict it.

# %%
documents = (20, 28)
positions = torch.cat([torch.arange(n) for n in documents])[None]
within = ids.masked_fill(positions == 0, -100)


def packed(layout):
    model = weft.parallelize(copy.deepcopy(llama), layout)
    inputs = {"input_ids": ids, "position_ids": positions, "labels": within}
    return model(**inputs, use_cache=False).loss.item()  # a cache would see one document


with torch.no_grad():
    totals = [
        alone(input_ids=part, labels=part).loss * (part.shape[1] - 1)
        for part in ids.split(documents, dim=1)
    ]
    apart = sum(totals).item() / (48 - len(documents))
    together = weft.on_threads(weft.Layout.parse("tokens(striped): tile=2x2"), packed)
assert all(abs(loss - apart) < 1e-5 for loss in together)
print(f"two calls on one device {apart:.9f}, packed on four ranks {together[0]:.9f}")

# %% [markdown]
# ## A model that chooses its keys
#
# DeepSeek V3.2 does not attend to every token before it. A small *indexer* scores each query
# against each key, and the query sees the keys of the best scores. On ranks a query has to choose
# among the keys of *all* of them, or it is another model. `parallelize` brings the index keys of
# all ranks to the model's own indexer, in the order of the sequence, so that it picks what it picks
# on one device. Here the best 6 of up to 48:

# %%
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

sparse = DeepseekV32ForCausalLM(
    DeepseekV32Config(
        **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 2},
        **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
        **{"v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 6},
        attn_implementation="eager",
    )
)
alone = copy.deepcopy(sparse)
expected = alone(**batch)
expected.loss.backward()


def sparse_step(layout):
    model = weft.parallelize(copy.deepcopy(sparse), layout)
    with weft.traffic() as moved:
        out = model(**batch)
    out.loss.backward()
    layout.sync_gradients(model)
    return out.loss.item(), {n: p.grad for n, p in model.named_parameters()}, moved.by_tensor()


for line in ("tokens(zigzag): ring=4", "tokens: tile=2x2"):
    for loss, grads, received in weft.on_threads(weft.Layout.parse(line), sparse_step):
        assert abs(loss - expected.loss.item()) < 1e-5
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-5)
        assert received["index"] == 2 * 36 * 8 * 4  # layers, tokens of others, numbers, bytes
    print(f"{line:23} loss {loss:.9f} of {expected.loss.item():.9f}, received {received}")

# %% [markdown]
# (An indexer has no gradient: which keys are best is no smooth function of anything.)
#
# In a module of your own `weft.choose` does the same, and `weft.attention` takes what it gives: the
# positions of the keys that each query may see, besides the mask. They rest with their queries and
# go where these go.

# %%
draw = torch.Generator().manual_seed(0)
q, k, v, index_q = (torch.randn(1, 4, 48, 8, generator=draw) for _ in range(4))
index_k, weights = (
    torch.randn(1, 1, 48, 8, generator=draw),
    torch.rand(1, 4, 48, generator=draw),
)


def choosing(layout):
    mine = [layout.shard(t, {"tokens": 2}) for t in (q, k, v, index_q, index_k, weights)]
    choice = weft.choose(*mine[3:], layout, "tokens", 6, weft.Causal())
    out = weft.attention(*mine[:3], layout, "tokens", weft.Causal(), choice=choice)
    return choice.numbers[0, 0].long(), layout.positions("tokens", 48), out


whole = weft.on_threads(weft.Layout.single(), choosing)[0]
fig, ax = plt.subplots(figsize=(3.6, 3.6), constrained_layout=True)
order = "tokens(zigzag): ring=4"
for rank, (numbers, mine, out) in enumerate(weft.on_threads(weft.Layout.parse(order), choosing)):
    torch.testing.assert_close(out, whole[2][:, :, mine])
    assert torch.equal(numbers.sort().values, whole[0][mine].sort().values)
    rows = mine[:, None].expand_as(numbers)[numbers >= 0]
    color = plt.get_cmap("Set2").colors[rank]
    ax.scatter(numbers[numbers >= 0], rows, s=6, marker="s", color=color, label=f"rank {rank}")
ax.set(title="chosen keys", xlabel="key", ylabel="query", xlim=(-1, 48), ylim=(48, -1))
ax.legend(fontsize=7)

# %% [markdown]
# `docs/sparse.md` has the rules, the families and the bytes: DeepSeek V3.2 and V4, MiniMax M3, Doge
# and others.
#
# ## To remember
#
# - `weft.parallelize(model, layout, dims=...)` for a module of your own: gradients are added up.
# - `weft.parallelize(model, layout)` for models from transformers: gradients are averaged.
# - What has no rule runs whole, exactly, and is named; or is refused, if you say so.
# - Keys that a model chooses are chosen among those of all ranks.
# - `with weft.sdpa(layout, axis):` where you place tokens yourself.
#
# So far ranks were threads. Last: [from a laptop to a cluster](08_laptop_to_cluster.ipynb).

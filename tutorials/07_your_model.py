# %% [markdown]
# # 7. Bring your own model
#
# You have a model already, and it knows nothing of weft. It should stay that way. There are two
# ways:
#
# - your code calls `F.scaled_dot_product_attention`: run it inside `with weft.sdpa(layout, axis):`,
# - the model comes from Hugging Face transformers: `parallelize(model, layout)`, and that is all.
#
# Both keep the model's file, its weights and its state dict as they are. For the second part you
# need `pip install "weft-attention[transformers]"`. Nothing is downloaded: models are made from
# their configuration, with random weights.

# %%
import copy

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
# Here is a small one, in plain PyTorch.


# %%
class Tiny(nn.Module):
    def __init__(self, vocabulary=50, embed=32, heads=4, length=64):
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocabulary, embed)
        self.place = nn.Embedding(length, embed)
        self.qkv = nn.Linear(embed, 3 * embed)
        self.out = nn.Linear(embed, embed)
        self.head = nn.Linear(embed, vocabulary)

    def forward(self, ids, positions):
        x = self.token(ids) + self.place(positions)
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # batch, tokens, 3, heads, dim
        q, k, v = (t.transpose(1, 2) for t in split.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(attended.transpose(1, 2).flatten(2)))


model = Tiny().double()
ids = torch.randint(50, (2, 64))
expected = model(ids, torch.arange(64))

# %% [markdown]
# Everything in it works on one token at a time, but for attention. So ranks can each run it on
# their own tokens, if attention looks beyond them. Inside `weft.sdpa` it does. One more thing is
# needed that is true of every sequence-parallel model: a token must know its **global** position.
# `layout.positions` gives it.

# %%
layout = weft.Layout.load("ring-zigzag-4")


def forward(layout):
    my_ids = layout.shard(ids, {"tokens": 1})
    my_positions = layout.positions("tokens", 64)
    with weft.sdpa(layout, "tokens"):
        my_logits = model(my_ids, my_positions)
    return my_positions.tolist(), layout.gather(my_logits, {"tokens": 1})


results = weft.on_threads(layout, forward)
for _, logits in results:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-13)
print("rank 0 held tokens", results[0][0])

# %% [markdown]
# Inside the `with` block `is_causal=True` means causal in global positions. Nothing in PyTorch is
# patched: outside of the block, and in other threads, the function is what it always was. What weft
# cannot do exactly, it refuses by name:


# %%
def masked(layout):
    q = torch.randn(1, 4, 16, 8)
    with weft.sdpa(layout, "tokens"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(16, 16).bool())


try:
    weft.on_threads(layout, masked)
except weft.UnsupportedError as error:
    message = str(error)
print(message)
assert "attn_mask" in message

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
    logits = out.logits.detach() + 0  # logits are gathered only where all of them are asked for
    return out.loss.item(), logits, grads, layout.positions("tokens", 48)


for line in ("tokens(zigzag): ring=2", "tokens(striped): tile=2x2", "tokens: ulysses=2 x ring=2"):
    results = weft.on_threads(weft.Layout.parse(line), step)
    for loss, logits, grads, _ in results:
        assert abs(loss - expected.loss.item()) < 1e-5
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-5)
    print(f"{line:27} loss {results[0][0]:.12f}, all {len(results[0][2])} gradients agree")

# %% [markdown]
# (The tolerance is that of single precision, because Llama's own code computes rotary angles, norms
# and its softmax in it, whatever its weights are.)
#
# Where were the tokens? In the last layout each rank has twelve neighbours; in the striped tile
# they were dealt out. Here is the loss of each token, colored by the rank that computed it.

# %%
labels = ids[0, 1:]
per_token = F.cross_entropy(expected.logits[0, :-1], labels, reduction="none").detach()

fig, axes = plt.subplots(2, 1, figsize=(7, 3.6), sharex=True)
for ax, line in zip(axes, ("tokens(zigzag): ring=2", "tokens(striped): tile=2x2")):
    for rank, (_, logits, _, mine) in enumerate(weft.on_threads(weft.Layout.parse(line), step)):
        mine = mine[mine < 47]  # the last token has no label
        losses = F.cross_entropy(logits[0, mine], labels[mine], reduction="none")
        torch.testing.assert_close(losses, per_token[mine], rtol=0, atol=1e-5)
        ax.bar(
            mine.tolist(),
            losses.tolist(),
            color=plt.get_cmap("Set2").colors[rank],
            label=f"rank {rank}",
        )
    ax.set(title=line, ylabel="loss", ylim=(4, None))
    ax.legend(ncols=4, fontsize=7, loc="upper left")
axes[-1].set_xlabel("token")
fig.tight_layout()

# %% [markdown]
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
# - `with weft.sdpa(layout, axis):` for code that calls PyTorch's attention.
# - `parallelize` for models from transformers: full rows in, full rows out, gradients averaged.
# - Keys that a model chooses are chosen among those of all ranks.
# - Whatever runs on single tokens needs no change; what asks *where am I* needs
#   `layout.positions`.
#
# So far ranks were threads. Last: [from a laptop to a cluster](08_laptop_to_cluster.ipynb).

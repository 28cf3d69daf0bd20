# %% [markdown]
# # 1. Your first ring, in five minutes
#
# A sequence is too long for one device. We cut it into four chunks, give each chunk to a rank, and
# still want *exact* attention: every token sees every other token, on any rank.
#
# In this tutorial you will
#
# - load a layout and see what it says,
# - run attention on four ranks and get the numbers of one,
# - see in a picture who computes what, and when,
# - get gradients, and a causal mask, without further work.
#
# You need no GPU and no cluster. In these notebooks the ranks of a mesh are **threads** of one
# Python process: `weft.on_threads(layout, fn)` calls `fn` once per rank. The same `fn` runs
# unchanged on real processes and real GPUs; the [last tutorial](08_laptop_to_cluster.ipynb) shows
# it.

# %%
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import weft

torch.manual_seed(0)
torch.set_num_threads(1)
# %% [markdown]
# ## One device
#
# First the plain thing. Tensors are `(batch, heads, tokens, dim)`, as everywhere in PyTorch.
# We use double precision here, so that "equal" can mean equal to many digits.

# %%
q, k, v = torch.randn(3, 1, 4, 64, 16, dtype=torch.float64).unbind(0)
expected = F.scaled_dot_product_attention(q, k, v)
expected.shape

# %% [markdown]
# ## Four ranks
#
# A **layout** places tensors on a mesh of ranks, and says how each axis is attended. Layouts are
# small TOML files; weft ships some, and you write your own. Here is one of them.

# %%
layout = weft.Layout.load("ring-4")
print(layout.to_toml())

# %% [markdown]
# Read it aloud: *the mesh has one dimension, called `ring`, of 4 ranks. It splits the axis
# `tokens`. When tokens are attended, use the strategy `ring` on it.*
#
# Now write what **one rank** does. It takes its own chunk, attends, and returns its own chunk of
# the output.


# %%
def attend(layout):
    my_q, my_k, my_v = (layout.shard(x, {"tokens": 2}) for x in (q, k, v))
    my_out = weft.attention(my_q, my_k, my_v, layout, axis="tokens")
    print(f"rank {layout.rank}: q {tuple(my_q.shape)} -> out {tuple(my_out.shape)}\n", end="")
    return layout.gather(my_out, {"tokens": 2})  # only to compare; a model never needs this


outputs = weft.on_threads(layout, attend)

# %% [markdown]
# `{"tokens": 2}` says that the axis `tokens` is dim 2 of the tensor. `layout.shard` cuts a full
# tensor, `layout.gather` puts it back.
#
# Every rank had 16 of 64 tokens. Is the result what one device computes?

# %%
for out in outputs:
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
print(f"largest difference: {max((w - expected).abs().max().item() for w in outputs):.1e}")

# %% [markdown]
# ## The steps
#
# Attention is one big table of scores: a row per query, a column per key. Rank 0 holds the first
# quarter of the queries, so it owns the first quarter of the rows. But it holds only a quarter of
# the keys. The others come to it round the ring: while a rank computes with the keys and values at
# hand, it passes them to its neighbour and receives the next ones.
#
# So the table is filled in four steps. Numbers in the picture say at which step a block is
# computed; colours say by which rank.

# %%
ranks = 4
fig, axes = plt.subplots(1, 2, figsize=(8, 4))
colors = plt.get_cmap("Set2").colors
for ax, name in zip(axes, ["every key is seen", "causal: the lower triangle"]):
    for i in range(ranks):
        for j in range(ranks):
            seen = ax is axes[0] or j <= i
            color = colors[i] if seen else "white"
            ax.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=color, edgecolor="gray"))
            if seen:
                ax.text(j + 0.5, i + 0.5, (j - i) % ranks, ha="center", va="center")
    ax.set(xlim=(0, ranks), ylim=(ranks, 0), aspect="equal", title=name)
    ax.set_xticks([j + 0.5 for j in range(ranks)], [f"keys of\nrank {j}" for j in range(ranks)])
    ax.set_yticks([i + 0.5 for i in range(ranks)], [f"queries of\nrank {i}" for i in range(ranks)])
    ax.tick_params(length=0)
fig.tight_layout()

# %% [markdown]
# Each block gives an output over *some* of the keys. How can these be put together? With its
# output, a block returns the logarithm of its softmax denominator, the **logsumexp**. Two partial
# results merge exactly:
#
# ```
# lse = log(exp(lse1) + exp(lse2))
# out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2
# ```
#
# Nothing is approximated. Let us check this by hand, once: attend to the first half of the keys,
# then to the second, then merge.

# %%
single = weft.Layout.single()  # the layout of one device: no mesh
halves = [
    weft.attention(q, k[:, :, rows], v[:, :, rows], single, "tokens", return_lse=True)
    for rows in (slice(0, 32), slice(32, 64))
]
(out1, lse1), (out2, lse2) = halves
lse = torch.logaddexp(lse1, lse2)
merged = (lse1 - lse).exp()[..., None] * out1 + (lse2 - lse).exp()[..., None] * out2
torch.testing.assert_close(merged, expected, rtol=0, atol=1e-14)

# %% [markdown]
# ## A causal mask
#
# Masks are about *global* positions, so they mean the same on every layout. In the right-hand
# picture half of the blocks are white: nobody computes them, and keys that no query of a rank can
# see are not sent to it either. `weft.traffic` counts the bytes.


# %%
def attend_and_count(layout, mask):
    my_q, my_k, my_v = (layout.shard(x, {"tokens": 2}) for x in (q, k, v))
    with weft.traffic(layout) as moved:
        my_out = weft.attention(my_q, my_k, my_v, layout, "tokens", mask)
    return layout.gather(my_out, {"tokens": 2}), moved.bytes


for mask in (weft.Full(), weft.Causal()):
    results = weft.on_threads(layout, attend_and_count, mask)
    print(f"{mask}: bytes received by ranks 0 to 3: {[received for _, received in results]}")

causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(results[0][0], causal, rtol=0, atol=1e-14)

chunk = 2 * 4 * 16 * 16 * 8  # keys and values, 4 heads, 16 tokens, dim 16, 8 bytes each
assert [received for _, received in results] == [0, chunk, 2 * chunk, 3 * chunk]

# %% [markdown]
# Rank 0 has the first tokens and needs no other rank; rank 3 needs them all, and also has more
# work. [Tutorial 5](05_what_moves.ipynb) shows the orders `zigzag` and `striped`, which give all
# ranks equal work.
#
# ## Gradients
#
# Call `backward` as always. Each rank gets the gradient of its own chunk.

# %%
grad_out = torch.randn_like(q)  # any gradient of the output


def gradients(layout):
    mine = [layout.shard(x, {"tokens": 2}).requires_grad_() for x in (q, k, v)]
    out = weft.attention(*mine, layout, "tokens", weft.Causal())
    out.backward(layout.shard(grad_out, {"tokens": 2}))
    return [layout.gather(x.grad, {"tokens": 2}) for x in mine]


full = [x.clone().requires_grad_() for x in (q, k, v)]
F.scaled_dot_product_attention(*full, is_causal=True).backward(grad_out)

for name, got, want in zip("qkv", weft.on_threads(layout, gradients)[0], full):
    torch.testing.assert_close(got, want.grad, rtol=0, atol=1e-13)
    print(f"gradient of {name}: largest difference {(got - want.grad).abs().max():.1e}")

# %% [markdown]
# ## Uneven lengths
#
# Four divides 64. A length of 61 works as well: chunks are cut as PyTorch's DTensor cuts them, here
# 16, 16, 16 and 13 tokens. Then pass the global `length`, because a rank cannot know it from its
# own chunk.

# %%
q, k, v = torch.randn(3, 1, 4, 61, 16, dtype=torch.float64).unbind(0)


def uneven(layout):
    mine = [layout.shard(x, {"tokens": 2}) for x in (q, k, v)]
    out = weft.attention(*mine, layout, "tokens", length=61)
    return out.shape[2], layout.gather(out, {"tokens": 2})


results = weft.on_threads(layout, uneven)
assert [tokens for tokens, _ in results] == [16, 16, 16, 13]
torch.testing.assert_close(
    results[0][1], F.scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-14
)

# %% [markdown]
# ## That was it
#
# - A **layout** says how axes are placed on a mesh, and which strategy attends them.
# - `layout.shard` and `layout.gather` convert between full tensors and chunks.
# - `weft.attention(q, k, v, layout, axis, mask)` is exact, forward and backward.
#
# The word `"ring"` in the layout looked like a spell. It is not: it names a file with one rule in
# it. Next: [strategies are placement rules, and you can write your own](02_strategies.ipynb).

# %% [markdown]
# # 3. Heads and sequence at once
#
# There are two well-known ways to split attention over ranks. Cut the **heads**: each rank computes
# some of them, over the full sequence. Or cut the **sequence**: each rank keeps some of the
# tokens, and keys travel. The first moves little, but a model has only so many heads. The second
# takes any number of ranks, but moves more.
#
# In weft these are [rules](02_strategies.ipynb) for a mesh dim. So you need not choose: give one
# mesh dim to the heads and another to the sequence.

# %%
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import weft

torch.manual_seed(0)
torch.set_num_threads(1)

heads, tokens = 4, 32
q, k, v = torch.randn(3, 1, heads, tokens, 16, dtype=torch.float64).unbind(0)
expected = F.scaled_dot_product_attention(q, k, v)

# %% [markdown]
# ## Ulysses: trade tokens for heads
#
# At rest every rank has a chunk of the tokens, with all heads. For attention it trades: an
# all-to-all gives it **all tokens of some heads**. After attention it trades back. As a rule:

# %%
for rule in weft.Strategy.load("ulysses").rules.values():
    print(rule.describe())

# %% [markdown]
# And here is a mix, on one line. Mesh dims are listed from the outermost to the innermost.

# %%
mixed = weft.Layout.parse("tokens: ulysses=2 x ring=2")
print(mixed.to_toml())

# %% [markdown]
# The trade happens on one mesh dim, the ring on the other. Note what you did **not** say: which
# tokens a rank holds after the trade, in what order, and which keys it meets. weft keeps track of
# the global position of every token, so the order of the mesh dims cannot confuse anything. Try
# both orders, with a causal mask, which would notice the slightest mistake.

# %%
causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend(layout, mask):
    mine = [layout.shard(x, {"tokens": 2, "heads": 1}) for x in (q, k, v)]
    with weft.traffic(layout) as moved:
        out = weft.attention(*mine, layout, "tokens", mask)
    return layout.gather(out, {"tokens": 2, "heads": 1}), moved


for line in (
    "tokens: ulysses=2 x ring=2",
    "tokens: ring=2 x ulysses=2",
    "tokens(zigzag): ring=2 x ulysses=2",
    "tokens: ulysses=2 x tile=2x2",
):
    for out, _ in weft.on_threads(weft.Layout.parse(line), attend, weft.Causal()):
        torch.testing.assert_close(out, causal, rtol=0, atol=1e-14)
    print(f"exact: {line}")

# %% [markdown]
# ## Look at the box
#
# Scores are a box: head × query × key (and batch). Here it is in slices, one per head. The color of
# a square is the rank that computes it; as in the last tutorial, we let `weft.bias_tile` cut tiles
# out of a box of numbers.


# %%
def owners(layout):
    """Which rank computes which score: (heads, tokens, tokens)."""
    numbered = torch.arange(heads * tokens**2).view(1, heads, tokens, tokens)
    owner = torch.full((heads * tokens**2,), -1)
    tiles = weft.on_threads(layout, lambda rank: weft.bias_tile(numbered, rank, "tokens"))
    for rank, tile in enumerate(tiles):
        owner[tile.flatten()] = rank
    assert (owner >= 0).all()
    return owner.view(heads, tokens, tokens)


lines = ["tokens: ulysses=4", "tokens: ulysses=2 x ring=2", "tokens: ring=4"]
fig, axes = plt.subplots(3, heads, figsize=(6, 4.6))
for i, (row, line) in enumerate(zip(axes, lines)):
    box = owners(weft.Layout.parse(line))
    for head, ax in enumerate(row):
        ax.imshow(box[head], cmap="Set2", vmin=0, vmax=7)
        ax.set(xticks=[], yticks=[])
        if i == 0:
            ax.set_title(f"head {head}")
    row[0].set_ylabel(line.removeprefix("tokens: ").replace(" x ", "\nx "), rotation=0, ha="right")
fig.tight_layout()

# %% [markdown]
# Above, a rank owns a whole head. Below, a quarter of the rows of every head. In the middle, half
# the rows of half the heads. It is the same volume each time: the same work.
#
# ## The cost
#
# The work is the same, the traffic is not. Count the bytes that a rank receives, for more and more
# ranks. The sequence is as long as before; there are eight heads now.

# %%
q, k, v = torch.randn(3, 1, 8, 256, 16, dtype=torch.float64).unbind(0)
expected = F.scaled_dot_product_attention(q, k, v)

families = {
    "ring": {n: f"tokens: ring={n}" for n in (2, 4, 8, 16, 32)},
    "ulysses": {n: f"tokens: ulysses={n}" for n in (2, 4, 8)},
    "ulysses x ring": {2 * u: f"tokens: ulysses={u} x ring=2" for u in (2, 4, 8)},
    "ulysses x tile": {4 * u: f"tokens: ulysses={u} x tile=2x2" for u in (2, 4, 8)},
}

counted = {name: {} for name in families}
for name, members in families.items():
    for ranks, line in members.items():
        results = weft.on_threads(weft.Layout.parse(line), attend, weft.Full())
        torch.testing.assert_close(results[0][0], expected, rtol=0, atol=1e-14)
        counted[name][ranks] = max(moved.bytes for _, moved in results)

fig, ax = plt.subplots(figsize=(6, 3))
for name, points in counted.items():
    ax.plot(points.keys(), [n / 1000 for n in points.values()], marker="o", label=name)
ax.set_xscale("log", base=2)
ax.set_xticks([2, 4, 8, 16, 32], [2, 4, 8, 16, 32])
ax.set(xlabel="ranks", ylabel="kB received by a rank", ylim=0)
ax.legend()

assert counted["ulysses"][8] < counted["ulysses x ring"][8] < counted["ring"][8]
assert counted["ulysses x tile"][32] < counted["ulysses x ring"][16] < counted["ring"][16]

# %% [markdown]
# A ring rank must see all keys and values in the end, so its line rises to all of them. An
# all-to-all moves each tensor once and each rank's share shrinks: Ulysses falls. But at eight ranks
# it has run out of heads. The mixes go on from there.
#
# What if there are too few heads? Then weft says so before anything is sent.

# %%
try:
    weft.on_threads(weft.Layout.parse("tokens: ulysses=16"), attend, weft.Full())
except weft.ShapeError as error:
    message = str(error)
print(message)
assert "8 local heads cannot be split 16 ways" in message

# %% [markdown]
# ## Few key and value heads
#
# Many models have fewer heads of keys and values than of queries (grouped-query attention). A ring
# gains by it, as only keys and values travel. Ulysses must give each rank the key head that its
# query heads use; where there are fewer of them than ranks, weft sends a key head to several ranks.
# It remains exact.

# %%
q = torch.randn(1, 8, 64, 16, dtype=torch.float64)
k, v = torch.randn(2, 1, 2, 64, 16, dtype=torch.float64).unbind(0)  # 2 heads for 8
expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

for line in ("tokens: ring=4", "tokens: ulysses=4", "tokens: ulysses=2 x ring=2"):
    results = weft.on_threads(weft.Layout.parse(line), attend, weft.Full())
    for out, _ in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    print(f"{line:27} {max(moved.bytes for _, moved in results):6,} bytes received by a rank")

# %% [markdown]
# ## Heads that are cut already
#
# With tensor parallelism, the projections before attention leave each rank with some of the heads:
# heads are cut *at rest*, and there is nothing to trade. The axis `heads` has a mesh dim then. A
# ring next to it takes the sequence.

# %%
tensor_parallel = weft.Layout.load("tp-x-ring")
for mesh_dim, rule in tensor_parallel.rules("tokens").items():
    print(f"{mesh_dim}: {rule.describe()}")

results = weft.on_threads(tensor_parallel, attend, weft.Full())
for out, moved in results:
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    assert moved.by_mesh_dim().keys() == {"ring"}  # nothing moves between the heads

# %% [markdown]
# ## To remember
#
# - Cutting heads moves little, but heads run out. Cutting the sequence takes any number of ranks.
# - `"tokens: ulysses=2 x ring=2"`: one mesh dim each, and everything stays exact.
# - Put the mesh dim that moves more innermost, where links are fast: the order is yours.
#
# So far one axis was long. Next: [tables, with two axes that both are](04_table_model.ipynb).

# %% [markdown]
# # 2. Strategies are placement rules
#
# In the [first tutorial](01_first_ring.ipynb) a layout had `strategy = "ring"`. Now we open that
# file. You will see that ring attention, Ulysses, pass-Q and the mesh tile are all the same kind of
# thing: three lines of **placements**. Then you write a strategy of your own, in a TOML file, and
# check that it is exact.

# %%
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import weft

torch.set_num_threads(1)
torch.manual_seed(0)

shipped = weft.declare.catalog.folder("strategies")
print((shipped / "ring.toml").read_text())

# %% [markdown]
# ## How to read a rule
#
# A placement says how one mesh dim holds a tensor. The terms are those of PyTorch's DTensor:
#
# - `S(seq)`: each rank has a chunk of the sequence; `S(head)`, `S(batch)` likewise,
# - `R`: every rank has all of it,
# - `P(softmax)`: every rank has a *partial* output, over some of the keys; they merge.
#
# An arrow goes from **rest** to **compute**: `key = "S(seq) -> R"` means that keys rest in chunks,
# but while computing every rank sees all of them. (For `out` the arrow goes the other way, from
# compute to rest.) *How* they travel follows from the placements, and weft works it out.
#
# So the ring says: my queries stay, all keys come to me, my output is complete.
#
# Its mirror image: keys stay, all queries come to me, and what I compute is partial.

# %%
print((shipped / "pass_q.toml").read_text())

# %% [markdown]
# ## Few rules are right
#
# Scores are a box: batch × head × query × key. While computing, a mesh dim cuts **one** side of
# that box, or none. That leaves five legal rows in this table:
#
# | while computing, it cuts | query | key, value | output |
# |---|---|---|---|
# | batch | `S(batch)` | `S(batch)` | `S(batch)` |
# | heads | `S(head)` | `S(head)` | `S(head)` |
# | queries | `S(seq)` | `R` | `S(seq)` |
# | keys | `R` | `S(seq)` | `P(softmax)` |
# | nothing | `R` | `R` | `R` |
#
# Anything else would drop scores or count them twice. weft refuses it, and says why.

# %%
for query, key, out in [
    ("S(seq)", "S(seq)", "S(seq)"),
    ("S(seq) -> R", "S(seq)", "S(seq)"),
    ("S(seq)", "S(seq) -> S(head)", "S(seq)"),
]:
    try:
        weft.Rule.parse(query=query, key=key, out=out)
    except weft.DeclarationError as error:
        print(f"{query!r}, {key!r}, {out!r}\n    {error}\n")
    else:
        raise AssertionError("this rule should have been refused")

# %% [markdown]
# ## The tile of a rank
#
# Let us look. `weft.bias_tile` cuts this rank's tile out of any matrix that is as large as the
# score matrix. We give it a matrix of numbers, and so learn which scores each rank computes.


# %%
def owners(layout, tokens=16):
    """Which rank computes which score: (tokens, tokens)."""
    numbered = torch.arange(tokens * tokens).view(1, 1, tokens, tokens)
    tiles = weft.on_threads(layout, lambda rank: weft.bias_tile(numbered, rank, "tokens"))
    owner = torch.full((tokens * tokens,), -1)
    for rank, tile in enumerate(tiles):
        assert (owner[tile.flatten()] == -1).all()  # no score is computed twice ...
        owner[tile.flatten()] = rank
    assert (owner >= 0).all()  # ... and none is forgotten
    return owner.view(tokens, tokens)


def show(*layouts):
    fig, axes = plt.subplots(1, len(layouts), figsize=(3 * len(layouts), 3.2))
    for ax, layout in zip(axes, layouts):
        owner = owners(layout)
        ax.imshow(owner, cmap="Set2", vmin=0, vmax=7)
        for i, j in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
            ax.text(4 * j + 1.5, 4 * i + 1.5, owner[4 * i, 4 * j].item(), ha="center", va="center")
        ax.set(title=layout.name, xlabel="keys", ylabel="queries", xticks=[], yticks=[])
    fig.tight_layout()


ring, pass_q, tile = (weft.Layout.load(n) for n in ("ring-4", "pass-q-4", "tile-2x2"))
show(ring, pass_q, tile)

# %% [markdown]
# The numbers are ranks, each small square is one chunk of queries by one chunk of keys. Ring: a
# rank owns rows. Pass-Q: a rank owns columns. The third is new: a rank owns two rows by two
# columns, a rectangle (the columns just are not side by side). It is called the mesh tile, and
# look at its file: it is the ring's rule on one mesh dim and pass-Q's on another.

# %%
print((shipped / "mesh_tile.toml").read_text())

# %% [markdown]
# **Composition is nothing but giving different mesh dims different rules.** Ulysses is the rule
# `S(seq) -> S(head)`; Ulysses on one dim and a ring on the other is what others call USP or 2D
# attention. That is the subject of [tutorial 3](03_heads_and_sequence.ipynb).
#
# A tile needs only the queries of its rows and the keys of its columns, so with many ranks it moves
# much less. Count it: sixteen ranks, the same tensors, what the busiest rank receives.

# %%
q, k, v = torch.randn(3, 1, 2, 256, 16, dtype=torch.float64).unbind(0)
expected = F.scaled_dot_product_attention(q, k, v)


def attend(layout):
    mine = [layout.shard(x, {"tokens": 2}) for x in (q, k, v)]
    with weft.traffic(layout) as moved:
        out = weft.attention(*mine, layout, "tokens")
    return layout.gather(out, {"tokens": 2}), moved


received = {}
for line in ("tokens: ring=16", "tokens: pass_q=16", "tokens: tile=4x4"):
    results = weft.on_threads(weft.Layout.parse(line), attend)
    for out, _ in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    received[line] = max(moved.bytes for _, moved in results)
    print(f"{line:18} {received[line]:7,} bytes received by a rank")

assert received["tokens: tile=4x4"] < 0.5 * received["tokens: ring=16"]

# %% [markdown]
# (`Layout.parse` reads a layout from one line; `print(layout.to_toml())` shows the file it
# stands for.)
#
# ## Write your own
#
# Imagine two nodes of four ranks. They hold the keys and values of a long document, and a few new
# queries arrive. A ring would send all of the document past every rank. It is better to send the
# queries to every rank, and to merge the partial outputs: first inside each node, where links
# are fast, then one merged result per node over the slow link.
#
# weft does not ship that. Write the file: pass-Q's rule, twice.

# %%
folder = Path(tempfile.mkdtemp())
tree_file = folder / "tree.toml"
tree_file.write_text("""
about = "Queries go to all keys; partial outputs merge inside a node first, then between nodes."

[rule.between]
query = "S(seq) -> R"
key   = "S(seq)"
out   = "P(softmax) -> S(seq)"

[rule.inside]
query = "S(seq) -> R"
key   = "S(seq)"
out   = "P(softmax) -> S(seq)"
""")
weft.Strategy.load(tree_file).rules["inside"].role

# %% [markdown]
# A strategy knows nothing of meshes. The layout binds its two rules to two mesh dims, outermost
# first. A strategy of your own is named by its path.

# %%
(folder / "two-nodes.toml").write_text(f"""
about = "A long document over two nodes of four ranks."

[mesh]
node = 2
gpu = 4

[shard]
tokens = ["node", "gpu"]

[attend]
tokens = [{{ strategy = "{tree_file}", on = {{ between = "node", inside = "gpu" }} }}]
""")

tree = weft.Layout.load(folder / "two-nodes.toml")
for mesh_dim, rule in tree.rules("tokens").items():
    print(f"{mesh_dim}: {rule.describe()}")

# %% [markdown]
# Is it exact? And does it move fewer bytes? 64 queries, 1,024 keys; a ring of rings
# (`hierarchical`) for comparison. `length` is a pair now: so many queries, so many keys.

# %%
q = torch.randn(1, 2, 64, 16, dtype=torch.float64)
k, v = torch.randn(2, 1, 2, 1024, 16, dtype=torch.float64).unbind(0)
expected = F.scaled_dot_product_attention(q, k, v)


def look_up(layout):
    mine = [layout.shard(x, {"tokens": 2}) for x in (q, k, v)]
    with weft.traffic(layout) as moved:
        out = weft.attention(*mine, layout, "tokens", length=(64, 1024))
    return layout.gather(out, {"tokens": 2}), moved


rings = weft.Layout.parse("tokens: hierarchical=2x4")
slow, fast = {}, {}
for name, layout in {"ring of rings": rings, "our tree": tree}.items():
    results = weft.on_threads(layout, look_up)
    for out, _ in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    outer, inner = layout.mesh
    slow[name] = max(moved.by_mesh_dim()[outer] for _, moved in results)
    fast[name] = max(moved.by_mesh_dim()[inner] for _, moved in results)

fig, ax = plt.subplots(figsize=(6, 2.4))
for offset, (label, counted) in enumerate({"between nodes": slow, "inside a node": fast}.items()):
    places = [i + 0.35 * offset for i in range(len(counted))]
    bars = ax.barh(places, counted.values(), height=0.33, label=label)
    ax.bar_label(bars, [f"{n:,}" for n in counted.values()], padding=3)
ax.set(yticks=[0.175, 1.175], yticklabels=slow, xlabel="bytes received by a rank, forward")
ax.margins(x=0.15)
ax.legend()
assert slow["our tree"] < slow["ring of rings"] / 5

# %% [markdown]
# Exact, and a small fraction of the traffic: the document stays where it is. Nobody wrote a line of
# communication. Gradients work too, and since masks and token order are not the strategy's
# business, all of them work with it.
#
# ## When the file is wrong
#
# Errors name the file, the key, what was found, and what would work.

# %%
(folder / "typo.toml").write_text("""
[rule.ring]
query = "S(seq)"
keys  = "S(seq) -> R"
out   = "S(seq)"
""")
try:
    weft.Strategy.load(folder / "typo.toml")
except weft.DeclarationError as error:
    message = str(error).replace(str(folder) + "/", "")
print(message)
assert "did you mean 'key'" in message

# %% [markdown]
# ## To remember
#
# - A rule is three placements; an arrow is a movement.
# - A mesh dim cuts batch, heads, queries or keys. What you cut decides what must move.
# - A strategy is one or more rules. Put your own into a file and name it by its path.
#
# Next: [cut heads and sequence at once](03_heads_and_sequence.ipynb).

# %% [markdown]
# # 6. Learned routing: fetch only the chunks that matter
#
# A ring brings every key to every query. Often most of them get almost no attention, so most of
# that traffic is for nothing. What if each rank **learned** which chunks its queries need, and
# fetched only those?
#
# In this tutorial you train such a router, look at what it learned, count what it saves, and see
# when it equals full attention exactly. (It needs less than a minute on a laptop.)

# %%
import numpy as np
import torch
from matplotlib import pyplot as plt

import weft
from weft.comm import run_threads
from weft.routing import routed_modules, routing_penalty, set_progress
from weft.routing.report import observe

torch.set_num_threads(1)
shipped = weft.declare.catalog.folder("strategies")
print((shipped / "routed.toml").read_text())

# %% [markdown]
# ## The rule
#
# It is the ring's rule with one word more: keys go from `S(seq)` to `R(top_k)`, to some of the
# ranks instead of all.
#
# 1. Every rank **summarises** its block of keys: mean, standard deviation, largest and smallest
#    value of each feature, through a small learned projection. Summaries are a few numbers, and
#    every rank gets all of them.
# 2. Every rank compares the summary of its queries with them, and gets **routing weights** $w$.
# 3. It fetches the $k$ heaviest blocks, **point to point**, and attends to them and to its own.
# 4. The logits of a fetched block get the bias $\log(w \cdot n)$, where $n$ is the number of
#    eligible blocks. So the router has a gradient; where weights are uniform, the bias is 0.
#
# The last point has a consequence worth checking: a fresh router (it starts uniform) that takes
# **all** blocks is exactly full attention.

# %%
x = torch.randn(2, 64, 32)
seed = torch.Generator()
full = weft.MultiAxisAttention(32, 4, axis="tokens", generator=seed.manual_seed(0))
routed = weft.routing.RoutedAttention(
    32, 4, axis="tokens", routing={"top_k": 7, "chunks": 8}, generator=seed.manual_seed(0)
)
torch.testing.assert_close(routed(x), full(x), rtol=0, atol=1e-5)
print("largest difference:", (full(x) - routed(x)).abs().max().item())

# %% [markdown]
# ## A task that needs it
#
# Sequences of 8 chunks. Four of them **state** facts ("key 12 has value 5"), four **ask** for the
# values of keys; each asks what one of the others states. The other tokens carry
# no information. Which chunk asks which is drawn anew for every sequence.

# %%
KEYS, VALUES, CHUNKS, STATED, ASKED, TOKENS = 32, 16, 8, 4, 3, 128


def draw(seed, step, batch):
    """Tokens (b n 2): key and value, -1 for none; answers (b n); who answers each chunk (b, 8)."""
    tokens = np.full((batch, TOKENS, 2), -1)
    answers, sources = np.full((batch, TOKENS), -1), np.full((batch, CHUNKS), -1)
    for b in range(batch):
        rng = np.random.default_rng([seed, 1, step * batch + b])
        pairs = rng.permutation(CHUNKS).reshape(2, -1).T  # one states, one asks
        keys = rng.permutation(KEYS)[: len(pairs) * STATED].reshape(-1, STATED)
        values = rng.integers(VALUES, size=keys.shape)
        tokens[b, :, 1] = rng.integers(VALUES, size=TOKENS)
        chunks = np.array_split(np.arange(TOKENS), CHUNKS)
        for i, (states, asks) in enumerate(pairs):
            sources[b, asks] = states
            place = rng.permutation(chunks[states])[:STATED]
            tokens[b, place] = np.stack([keys[i], values[i]], -1)
            place, which = rng.permutation(chunks[asks])[:ASKED], rng.permutation(STATED)[:ASKED]
            tokens[b, place, 0], tokens[b, place, 1] = keys[i, which], -1
            answers[b, place] = values[i, which]
    return tuple(map(torch.from_numpy, (tokens, answers, sources)))


tokens, _, sources = draw(seed=0, step=0, batch=8)
print("tokens (key, value):", tokens[0, :8].tolist())
print("who asks whom      :", sources[0].tolist(), "(-1: this chunk states)")

# %% [markdown]
# ## The model
#
# A head of our own around the blocks of a model file: it embeds keys and values, and scores the
# value of each token's key. `routing` in a block is for layouts that route its axis; on others the
# block computes full attention.


# %%
class Retrieval(torch.nn.Module):
    def __init__(self, spec, layout, generator):
        super().__init__()
        embed = spec.sizes.embed
        self.key = torch.nn.Embedding(KEYS + 1, embed)
        self.value = torch.nn.Embedding(VALUES + 1, embed)
        self.trunk = weft.models.Trunk(spec, layout, generator)
        self.scores = torch.nn.Linear(embed, VALUES)
        for part, std in ((self.key, 0.7), (self.value, 0.7), (self.scores, embed**-0.5)):
            torch.nn.init.normal_(part.weight, std=std, generator=generator)  # equal on all ranks
        torch.nn.init.zeros_(self.scores.bias)

    def forward(self, tokens):
        keys, values = tokens.unbind(-1)  # -1, none, is the last row of a table
        x = self.key(keys % (KEYS + 1)) + self.value(values % (VALUES + 1))
        return self.scores(self.trunk(x, lengths={"tokens": TOKENS}))


weft.register_head("retrieval", Retrieval, axes=3)
spec = weft.models.ModelSpec.from_dict(
    {
        "head": "retrieval",
        "axes": ["batch", "tokens", "embed"],
        "sizes": {"embed": 64, "heads": 4},
        "block": [
            {
                "attend": "tokens",
                "init_k_from_q": True,
                "routing": {"chunks": CHUNKS, "warm_up": 0.7, "imitate": 3.0},
            },
            {"mlp": 128},
        ],
    }
)

# %% [markdown]
# ## Training
#
# Two things make a router learn, and both are on by default:
#
# - **warm-up**: at first it takes all blocks, then fewer and fewer until `top_k`. A block that was
#   never fetched teaches nothing.
# - **imitation**: while several blocks are taken, the weights are pulled towards the attention that
#   the blocks really got.
#
# Here we train on one rank that holds all 8 chunks, to keep it quick: a routed model computes the
# same function on any number of ranks.

# %%
STEPS = 400
layout = weft.Layout.parse("tokens: routed=1")
curves = {"accuracy": [], "routed right": [], "blocks taken": []}


def hits(how, sources):
    """Share of the chunks that ask whose heaviest block is the one that states."""
    heaviest = how.matrix.masked_fill(~how.eligible, -torch.inf).argmax(-1)[:, 0]
    return (heaviest == sources)[sources >= 0].float().mean().item()


def learn(transport):
    model = weft.compose(spec, layout.on(transport), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, pct_start=0.1)
    for step in range(STEPS):
        set_progress(model, step / STEPS)
        tokens, answers, sources = draw(0, step, batch=8)
        logits, answers = model(tokens)[answers >= 0], answers[answers >= 0]
        loss = torch.nn.functional.cross_entropy(logits, answers) + routing_penalty(model)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        (module,) = routed_modules(model)
        curves["accuracy"].append((logits.argmax(-1) == answers).float().mean().item())
        curves["routed right"].append(hits(module.last, sources))
        curves["blocks taken"].append(module.current().top_k / 7)
    return model.state_dict()


(weights,) = run_threads(layout.mesh, learn, timeout=900)
fig, ax = plt.subplots(figsize=(7, 3))
for name, values in curves.items():
    smooth = torch.tensor(values).unfold(0, 10, 1).mean(-1)
    ax.plot(range(9, STEPS), smooth, label=name if name != "blocks taken" else "blocks taken / 7")
ax.axhline(1 / 7, color="grey", linewidth=0.8, linestyle="--", label="a blind guess of the block")
ax.set_xlabel("step")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# While all blocks are taken, the model learns to answer and the router to see where answers come
# from. Then blocks are withdrawn, and the router must do with one.

# %%
last = {name: sum(values[-40:]) / 40 for name, values in curves.items()}
print(f"last 40 steps: accuracy {last['accuracy']:.1%}, right block {last['routed right']:.1%}")
assert last["accuracy"] > 0.8
assert last["routed right"] > 0.8

# %% [markdown]
# ## The learned routes
#
# Now the trained weights on **eight ranks** (threads here). First: routing weights of one sequence,
# the chosen block of each row circled. Chunks that ask chose the one that states; chunks that state
# need no other, and their choice does not matter.

# %%
eight = weft.Layout.load("routed-8")
ring = weft.Layout.parse("tokens: ring=8")


def look(on):
    def rank(transport):
        bound = on.on(transport)
        model = weft.compose(spec, bound)
        if routed_modules(model):
            model.load_state_dict(weights)
        observe(model.eval(), True)
        tokens = bound.shard(draw(1, 0, batch=16)[0], {"tokens": 1})
        with weft.traffic(bound) as moved:
            model(tokens)
        return moved, [module.last for module in routed_modules(model)]

    return run_threads(on.mesh, rank)


found = look(eight)
_, (how,) = found[0]
fig, ax = plt.subplots(figsize=(4.6, 4.2))
ax.imshow(how.weights[0, 0], vmin=0, vmax=1)
queries, keys = how.chosen[0, 0].nonzero().T
ax.scatter(keys, queries, s=60, facecolors="none", edgecolors="tab:red")
ax.set(xlabel="key block", ylabel="query block", title="routing weights, chosen blocks in red")
plt.show()

# %% [markdown]
# And which part of the score matrix is computed at all: a rank's own block, and the one it chose,
# here of all sequences.

# %%
share = how.chosen[:, 0].float().mean(0).fill_diagonal_(1.0)
fig, ax = plt.subplots(figsize=(4.6, 4.2))
fig.colorbar(ax.imshow(share, cmap="Blues"), label="share of sequences that compute the block")
ax.set(xlabel="key block", ylabel="query block")
plt.show()
print(f"{share.mean():.0%} of the scores are computed")

# %% [markdown]
# ## The savings
#
# One block instead of seven: a seventh of a ring's keys and values, and the summaries.

# %%
moved, ring_moved = found[0][0].by_tensor(), look(ring)[0][0].by_tensor()
print("ring  :", ring_moved)
print("routed:", moved)
share = sum(moved.values()) / sum(ring_moved.values())
print(f"all   : {share:.0%} of the ring's bytes")
assert share < 0.25

# %% [markdown]
# ## To remember
#
# - `R(top_k)` in a strategy, `[routing]` for its options, `weft.routing.RoutedAttention` in your
#   own model; in a model file, `routing = { top_k = 2 }` next to `attend`.
# - Learned routing is **not** full attention. It is exact by its own definition, on every mesh, and
#   it is full attention only when it takes every block with uniform weights.
# - Under a causal mask the summary of a query block uses its first token alone, so that no query
#   learns from routing what the mask hides from it. `strict = false` gives that up.
# - It composes: `head-x-routed` has Ulysses on one mesh dim and routes on the other.
#
# Next: [your own model](07_your_model.ipynb).

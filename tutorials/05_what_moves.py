# %% [markdown]
# # 5. What moves, and when
#
# weft writes the communication for you. That is no reason not to look at it. Before anything runs,
# weft makes a **plan**: which blocks of scores each rank computes, and which transfers are in
# flight meanwhile. A plan is plain data. You can ask it how many bytes it will move, and draw it,
# for a mesh you do not have.
#
# In this tutorial you
#
# - predict traffic, and count it, and see the same numbers,
# - balance causal work with the order of tokens,
# - read a plan step by step, and as a timeline.

# %%
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import weft

torch.manual_seed(0)
torch.set_num_threads(1)

heads, tokens, dim = 4, 512, 32

# %% [markdown]
# ## Predicted and counted
#
# A plan needs the sizes of a call, but no tensors and no other ranks.


# %%
def plan(layout, mask=weft.Causal(), tokens=tokens):  # noqa: B008
    """The plan of a call on a layout, as rank 0 has it."""
    return layout.plan(
        "tokens", length=tokens, heads=heads, head_dim=dim, mask=mask, dtype=torch.float32
    )


tile = weft.Layout.load("tile-2x2")
of_rank_3 = list(plan(tile).ranks())[3]
for (mesh_dim, what), received in of_rank_3.traffic.forward.received.items():
    print(f"rank 3, forward, mesh dim {mesh_dim!r}: {received:7,} bytes of {what}")

# %% [markdown]
# On the mesh dim `row` keys and values come (the ring's rule), on `col` queries come and partial
# outputs return to their owners (pass-Q's rule). Now run it, forward and backward, and count.

# %%
q, k, v, grad = torch.randn(4, 1, heads, tokens, dim).unbind(0)


def count(layout):
    my_q, my_k, my_v, my_grad = (layout.shard(x, {"tokens": 2}) for x in (q, k, v, grad))
    leaves = [x.requires_grad_() for x in (my_q, my_k, my_v)]
    with weft.traffic(layout) as forward:
        out = weft.attention(*leaves, layout, "tokens", weft.Causal())
    with weft.traffic(layout) as backward:
        out.backward(my_grad)
    return forward.bytes, backward.bytes


for line in ("tokens: ring=4", "tokens: pass_q=4", "tokens: tile=2x2", "tokens: ulysses=4"):
    layout = weft.Layout.parse(line)
    counted = weft.on_threads(layout, count)
    moved = [each.traffic for each in plan(layout).ranks()]
    predicted = [(passes.forward.bytes, passes.backward.bytes) for passes in moved]
    assert predicted == counted
    print(f"{line:18} forward, ranks 0 to 3: {[f'{b:,}' for b, _ in counted]}")

# %% [markdown]
# Predicted bytes are counted bytes, to the last one, on every rank. (Look at the first line: with a
# causal mask, keys that no query sees are not sent.)
#
# ## The work of each rank
#
# Causal attention is a triangle. Cut it into rows of equal height, and the last rank has seven
# times the work of the first. All would wait for it. So tokens can have another **order**:
#
# - `contiguous`: a rank holds neighbours,
# - `zigzag`: a rank holds one part from the front and one from the back,
# - `striped`: tokens are dealt out like cards.
#
# The order is one line of a layout, here in brackets. Masks, positions and results know nothing of
# it: `layout.shard` and `layout.gather` take care.

# %%
folder = Path(tempfile.mkdtemp())


def show(*paths):
    """Pictures side by side."""
    images = [plt.imread(path) for path in paths]
    width = sum(image.shape[1] for image in images)
    fig, axes = plt.subplots(
        1, len(images), figsize=(width / 180, images[0].shape[0] / 180), squeeze=False
    )
    for ax, image in zip(axes[0], images):
        ax.imshow(image)
        ax.axis("off")
    fig.tight_layout(pad=0)


orders = {
    name: weft.Layout.parse(f"tokens({name}): ring=4")
    for name in ("contiguous", "zigzag", "striped")
}
for name, layout in orders.items():
    plan(layout, tokens=64).score_matrix().draw(folder / f"{name}.png", title=name)
show(folder / "contiguous.png", folder / "zigzag.png")

# %% [markdown]
# The picture is drawn from the plans: colors are ranks, white is masked and never computed. On the
# right every rank has two thin strips and one quarter of the work.

# %%
for name, layout in orders.items():
    work = [each.scores.forward for each in plan(layout).ranks()]
    share = [f"{entries / sum(work):.1%}" for entries in work]
    print(f"{name:10} scores per rank: {share}; busiest / mean = {4 * max(work) / sum(work):.2f}")
    assert 4 * max(work) / sum(work) > 1.7 or name != "contiguous"
    assert 4 * max(work) / sum(work) < 1.01 or name == "contiguous"

# %% [markdown]
# ## Step by step
#
# The middle of a plan is a **program**: a list of steps. In a step some transfers begin, some
# blocks are computed while they travel, and transfers end. All ranks run the same program. Each
# numbers chunks from its own: chunk 0 is mine, chunk 1 is that of the next rank along the mesh dim.
#
# Here is the forward program of the 2x2 tile, for a longer sequence. (Where blocks are small, weft
# gathers everything first and computes once: many tiny calls would cost more than they hide.)

# %%
program = plan(tile, weft.Full(), tokens=16384).program.forward
for number, step in enumerate(program.steps):
    begins = [f"{t.payload} {t.source}->{t.target} on {t.mesh_dim}" for t in step.begin]
    computes = [f"q {b.q} x kv {b.kv}" for b in step.blocks]
    print(f"step {number}: begin {begins}\n        compute {computes}")

blocks = [(i, j) for step in program.steps for b in step.blocks for i in b.q for j in b.kv]
assert sorted(blocks) == [(i, j) for i in range(program.a) for j in range(program.b)]

# %% [markdown]
# Each block of the tile is computed once, and a partial output leaves as soon as its row is
# complete.
#
# ## As a timeline
#
# The same program as a picture, for all ranks, forward and backward. Upper bars are computation
# (chunks of queries times chunks of keys), lower bars are what is in flight at that time: chunks
# that arrive, or partial results that leave. Paler blocks are partly masked.

# %%
for line in ("tokens(zigzag): ring=4", "tokens(striped): tile=2x2"):
    layout = weft.Layout.parse(line)
    found = plan(layout, tokens=16384).timeline()
    assert {event.rank for event in found.events} == {0, 1, 2, 3}
    name = folder / f"timeline-{layout.world_size}.png"
    found.draw(name, title=line)
    show(name)

# %% [markdown]
# Forward, the ring hides each transfer behind a block; backward, its first partial gradients leave
# before the last block is done. The tile begins both of its transfers at once, and returns partial
# outputs to their owners while it computes its own rows; it moves fewer and smaller chunks. Both
# end the backward pass with a step in which nobody computes. Which is better depends on the mesh,
# the links and the sizes. Try yours.
#
# A run can be recorded just as well: `with weft.inspect.recording.record() as run:` around any
# code, then `run.draw("run.png")`. And on the command line, all of this is
# `weft explain call tile-2x2`.
#
# ## To remember
#
# - Plans are data. Predicted bytes are counted bytes.
# - With a causal mask, use `zigzag` or `striped`.
# - Look at a plan before you rent the mesh.
#
# Next: [learned routing](06_learned_routing.ipynb), where most keys do not travel at all.

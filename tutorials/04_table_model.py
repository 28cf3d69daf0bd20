# %% [markdown]
# # 4. A table model over two axes
#
# A table has rows and columns, and a table model attends along **both**: a cell looks at the other
# cells of its row, then at the other cells of its column. A million rows do not fit on one device;
# a thousand features may not either. So there are two long axes, and each can be attended, and
# split, in its own way.
#
# In this tutorial you
#
# - attend over rows and over features of one tensor, with names instead of `permute`,
# - put a model file and a layout file together, and swap the layout,
# - train a small table model, the same on one rank and on four,
# - take the trained weights to another mesh and let them draw a picture.

# %%
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import weft
from weft.train import fit

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## Attend over an axis by name
#
# Cells become vectors, so a batch of tables is `(batch, rows, features, embed)`. Say so once, and
# say which axis to attend. All others act as batch.

# %%
axes = ("batch", "rows", "features", "embed")
tables = torch.randn(2, 24, 6, 32, dtype=torch.float64)


def make(axis, layout=None):
    generator = torch.Generator().manual_seed(1)  # the same weights on every layout
    return weft.MultiAxisAttention(
        32, 4, axis=axis, axes=axes, layout=layout, generator=generator, dtype=torch.float64
    )


along_rows, along_features = make("rows"), make("features")
with torch.no_grad():
    expected = along_features(tables + along_rows(tables))
expected.shape

# %% [markdown]
# Now on four ranks. Here are two layouts for the same computation. In the first, rows are on a 2x2
# mesh tile and every rank has all features of its rows: attention over features needs nobody.

# %%
print(weft.Layout.load("tabular-2x2").to_toml())

# %% [markdown]
# In the second, rows **and** features are split, and each axis has its strategy: a ring
# for rows; for features an all-to-all that trades features for rows ("axial").

# %%
print(weft.Layout.load("tabular-axial-2x2").to_toml())

# %%
where = {"rows": 1, "features": 2}  # axis -> dim


def two_axes(layout):
    my_tables = layout.shard(tables, where)
    my_out = make("features", layout)(my_tables + make("rows", layout)(my_tables))
    return tuple(my_tables.shape), layout.gather(my_out, where)


for name in ("tabular-2x2", "tabular-axial-2x2"):
    results = weft.on_threads(weft.Layout.load(name), two_axes)
    for _, out in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    print(f"{name}: exact; each rank held {results[0][0]} of {tuple(tables.shape)}")

# %% [markdown]
# When rows are attended, the mesh dim that splits *features* has nothing to do: features are batch
# there. You need not say so; a mesh dim that splits another axis is batch.
#
# ## A model file and a layout file
#
# A model file names axes, sizes and blocks. It knows nothing of meshes; the layout knows nothing of
# depth. Any model runs on any layout that knows its axes. Here is a small one. (`weft` ships a
# larger one as `tabular`.)

# %%
folder = Path(tempfile.mkdtemp())
model_file = folder / "small-table.toml"
model_file.write_text("""
about = "A small table transformer: every cell is a token."

head = "table"                   # predicts the classes of test rows
axes = ["batch", "rows", "features", "embed"]
repeat = 2

[sizes]
embed = 48
heads = 4
classes = 4

[[block]]
attend = "features"

[[block]]
attend = "rows"
mask = "first-keys"              # only training rows are keys: what is asked must not teach
init_k_from_q = true             # keys start as copies of the queries

[[block]]
mlp = 96

[train]
batch = 8
lr = 3e-3
length = { rows = [40, 64], features = [2, 3] }
""")
model = weft.compose(model_file)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# The model learns *in context*: it gets training rows with their class and test
# rows without, and answers in one pass. It is trained once, on random tables that are drawn on the
# fly, and then used on tables it never saw.
#
# ## Train on one rank, and on four
#
# `train` runs on whatever layout it is given. The same seed must give the same losses,
# however rows are split. Ten steps of each:

# %%
spec = weft.models.ModelSpec.load(model_file)


def losses(layout, steps=10):
    run = fit(spec, layout, steps=steps, quiet=True)
    return run.losses


curves = {"one rank": losses(weft.Layout.single())}
for name in ("tabular-2x2", "tabular-axial-2x2"):
    curves[f"{name}, 4 ranks"] = weft.on_threads(weft.Layout.load(name), losses)[0]

fig, ax = plt.subplots(figsize=(6, 2.6))
for (name, curve), style in zip(curves.items(), ("-", "o", "x")):
    ax.plot(curve, style, label=name)
ax.set(xlabel="step", ylabel="loss")
ax.legend()

one = torch.tensor(curves["one rank"])
for name, curve in curves.items():
    apart = (torch.tensor(curve) - one).abs().max().item()
    print(f"{name:27} at most {apart:.1e} from one rank")
    assert apart < 1e-4  # single precision: only the order of additions differs

# %% [markdown]
# ## Weights do not know their layout
#
# Now train a little longer, on one rank to save time: a quarter of a minute is enough to see
# something.

# %%
run = fit(spec, weft.Layout.single(), steps=250, quiet=True)
early, late = (sum(run.losses[part]) / 20 for part in (slice(0, 20), slice(-20, None)))
print(f"mean loss: {early:.2f} over the first 20 steps, {late:.2f} over the last 20")
assert late < early - 0.2

# %% [markdown]
# And use it on four ranks. The table has 80 training rows, two moons; the test rows are the points
# of a grid, 1,600 of them. Rows are split over the tile; each rank answers for its own.

# %%
generator = torch.Generator().manual_seed(3)


def two_moons(number):
    """Points (number, 2) of two interlocking half circles, and which one each belongs to."""
    label = torch.arange(number) % 2
    angle = torch.pi * torch.rand(number, generator=generator)
    x = torch.stack([angle.cos() + label, (1 - 2 * label) * angle.sin() + 0.5 * label], dim=1)
    return x + 0.1 * torch.randn(number, 2, generator=generator), label


def answer(layout, train_rows, classes, test_rows):
    """Probabilities of the classes of test rows: (test rows, classes), whole, on every rank."""
    known, total = len(train_rows), len(train_rows) + len(test_rows)
    cells = torch.full((1, total, 3), float("nan"))  # the last column is the class
    cells[0, :, :2] = torch.cat([train_rows, test_rows])
    cells[0, :known, 2] = classes.float()
    model = weft.compose(model_file, layout)
    model.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        my_logits = model(
            layout.shard(cells, where), train=known, lengths={"rows": total, "features": 3}
        )
    return layout.gather(my_logits, {"rows": 1})[0, known:].softmax(-1)


moons, label = two_moons(80)
side = 40
grid = torch.cartesian_prod(torch.linspace(-1.5, 2.5, side), torch.linspace(-1.2, 1.7, side))
seen = weft.on_threads(weft.Layout.load("tabular-2x2"), answer, moons, label, grid)[0]

fig, ax = plt.subplots(figsize=(5, 3.4))
shown = ax.imshow(
    seen[:, 1].view(side, side).T, origin="lower", extent=(-1.5, 2.5, -1.2, 1.7), cmap="coolwarm"
)
ax.scatter(*moons.T, c=label, cmap="coolwarm", edgecolors="black", s=25)
ax.set(xlabel="feature 0", ylabel="feature 1")
bar = fig.colorbar(shown, label="probability of class 1")

# %% [markdown]
# Dots are the training rows, colors the model's answer between them. The model saw these rows only
# as a context, and was hardly trained, but it has learnt to look at the near past.
#
# How good is it at new points of the same two moons? And does another layout say the same?

# %%
points, truth = two_moons(200)
alone = answer(weft.Layout.single(), moons, label, points)
for name in ("tabular-2x2", "tabular-axial-2x2"):
    for got in weft.on_threads(weft.Layout.load(name), answer, moons, label, points):
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-4)

right = (alone.argmax(-1) == truth).float().mean().item()
print(f"{right:.0%} of 200 new points are right, on every layout")
assert right > 0.75

# %% [markdown]
# ## To remember
#
# - `MultiAxisAttention(axis="rows", axes=...)`: attended axes have names, all others are batch.
# - Each axis has its own strategies; a layout lists them under `[attend]`.
# - A model file and a layout file are put together by `weft.compose(model, layout)`. The function
#   is the same on every layout, and so are its weights.
#
# On the command line, `weft train tabular tabular-2x2` does this with real processes.
#
# Next: [what moves, and when](05_what_moves.ipynb).

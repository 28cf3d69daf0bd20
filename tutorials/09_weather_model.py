# %% [markdown]
# # 9. A weather model over four axes
#
# Weather lies on a grid: `(batch, time, lat, lon, channels)`. A model of it looks back along time,
# then at the whole globe at once, then at measurements from outside, which are no grid at all.
# Three kinds of attention over one tensor, and every one of them may have to be split.
#
# In this tutorial you
#
# - write such a model as one file: windows, rotary positions, joint axes, a context,
# - put your own embedding and head round it, in a few lines,
# - train it on one rank and on four, split in three ways, with the same loss to ten digits.
#
# The ranks are threads here, so it runs in any notebook. Nothing else changes on real ones.

# %%
import copy

import torch
from matplotlib import pyplot as plt

import weft
from weft.train import clip_grad_norm_

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## The model is a file
#
# A model file without a `head` is a **trunk**: embedded tensors in, embedded tensors out. Blocks
# come in order, over any axes. `attend = "lat+lon"` joins two axes into one sequence of places;
# `rope` then turns half of every head by latitude, and half by longitude. The context has an axis
# that the grid lacks, so every place and time attends to all stations, whose keys and values are
# computed once.

# %%
print((weft.declare.catalog.folder("models") / "weather.toml").read_text())

# %% [markdown]
# What a number means is yours to say. Here a grid point has two channels, and a station tells where
# the wind blows. The trunk is an ordinary module inside yours. It starts from the same weights on
# every layout; your own weights must be the same on every rank, too. Real ranks draw them from one
# seed. Threads share torch's generator, so here they are drawn before the ranks start.

# %%
sizes = {"enter": (2, 32), "station": (2, 32), "leave": (32, 2)}
drawn = {name: torch.nn.Linear(*size, dtype=torch.float64) for name, size in sizes.items()}


class Weather(torch.nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.trunk = weft.compose("weather", layout, dtype=torch.float64)
        self.enter, self.station, self.leave = (copy.deepcopy(m) for m in drawn.values())

    def forward(self, fields, stations, lengths):
        hidden = self.trunk(
            self.enter(fields), {"forcing": self.station(stations)}, lengths=lengths
        )
        return fields + self.leave(hidden)


# %% [markdown]
# ## A small world
#
# Waves that drift with a wind of their own. The grid is 6 x 8, with 7 time steps: no mesh of two
# divides all of that, so the global lengths are given.

# %%
axes = {"batch": 0, "time": 1, "lat": 2, "lon": 3}  # axis -> dim
lengths = {"time": 7, "lat": 6, "lon": 8}


def world(batch=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    wind = torch.randn(batch, 2, generator=draw, dtype=torch.float64) * 0.5
    t, lat, lon = (torch.arange(n, dtype=torch.float64) for n in (8, 6, 8))
    t, lat, lon = t[:, None, None], lat[:, None], lon
    phase = [wind[:, i, None, None, None] * t + p * 0.8 for i, p in enumerate((lat, lon))]
    fields = torch.stack([(phase[0] + phase[1]).sin(), (phase[0] - phase[1]).cos()], dim=-1)
    stations = wind[:, None] + 0.1 * torch.randn(batch, 5, 2, generator=draw, dtype=torch.float64)
    return fields, stations  # (batch, 8, 6, 8, 2), (batch, 5, 2)


# %% [markdown]
# ## Three ways over four ranks
#
# `lat+lon` in `[attend]` says how the joint axis is attended. Samples and a ring; heads and a
# tile; or everything by all-to-all:

# %%
names = ["weather-dp-x-ring", "weather-head-x-tile", "weather-axial-2x2"]
for name in names:
    print(f"# {name}\n{weft.Layout.load(name).to_toml()}\n")

# %% [markdown]
# Such layouts fit on a line, too: with as many sizes as joined axes each axis is split by one of
# them, otherwise the first axis by all.

# %%
tile = weft.Layout.parse("batch: dp=2; time: local; lat+lon: tile=2x2")
tile.shard_dims("lat"), tile.shard_dims("lon")

# %% [markdown]
# ## Train
#
# One function for every layout. `shard` cuts what all ranks have drawn, `mean` averages over all
# ranks' tokens, `sync_gradients` completes the gradients, and `clip_grad_norm_` counts every weight
# once, split heads included.


# %%
def train(layout, steps=20):
    model = Weather(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(steps):
        fields, stations = world(seed=step)
        now, then = (layout.shard(t, axes) for t in (fields[:, :-1], fields[:, 1:]))
        guess = model(now, layout.shard(stations, {"batch": 0}), lengths)
        loss = layout.mean((guess - then).square().sum(), then.numel())
        optimizer.zero_grad()
        loss.backward()
        layout.sync_gradients(model)
        clip_grad_norm_(model, 1.0, layout)
        optimizer.step()
        losses.append(loss.item())
    return losses


alone = train(weft.Layout.single())
alone[0], alone[-1]

# %%
on_four = {name: weft.on_threads(weft.Layout.load(name), train) for name in names}
for name, ranks in on_four.items():
    far = max(abs(a - b) for losses in ranks for a, b in zip(losses, alone, strict=True))
    print(f"{name:20}  largest difference in 20 steps: {far:.0e}")
    assert far < 1e-10

# %%
fig, ax = plt.subplots(figsize=(6, 2.8))
for (name, ranks), style in zip(on_four.items(), ["-", "--", ":"]):
    ax.plot(ranks[0], style, label=name, linewidth=2)
ax.plot(alone, "k.", label="one rank", markersize=4)
ax.set(xlabel="step", ylabel="squared error", yscale="log")
ax.legend()

assert alone[-1] < alone[0] / 2, alone

# %% [markdown]
# ## What moves
#
# A layout is a choice of traffic. Ask for it before you choose.


# %%
def count(layout):
    fields, stations = world()
    model = Weather(layout)
    parts = layout.shard(fields[:, :-1], axes), layout.shard(stations, {"batch": 0})
    with weft.traffic(layout) as moved:
        model(*parts, lengths)
    return moved.bytes


for name in names:
    print(f"{name:20} {weft.on_threads(weft.Layout.load(name), count)[0] / 1024:6.0f} KiB a pass")

# %% [markdown]
# ## Where next
#
# - On real ranks, `layout.build()` takes the place of `on_threads`, and head-parallel weights are
#   DTensors, so that FSDP2, `torch.distributed.checkpoint` and optimisers know what lies where:
#   [from a laptop to a cluster](08_laptop_to_cluster.ipynb).
# - Blocks of a kind may lie as another layout says: `weft.compose("weather", layout,
#   layouts={"station": other})` reshards between blocks, and back, with `layout.redistribute`.
# - A head of your own by name: `weft.register_head("forecast", make)`, then `head = "forecast"`.

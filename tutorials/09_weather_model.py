# %% [markdown]
# # 9. A weather model over four axes
#
# Weather is on a grid: `(batch, time, lat, lon, channels)`. A model of it looks back along time,
# then at the whole globe at once, then at measurements from outside, which are no grid at all.
# Three kinds of attention over one tensor, and every one of them may have to be split.
#
# In this tutorial you
#
# - write such a model as one file: windows, rotary positions, joint axes, a context,
# - put your own embedding and head round it and train it with FSDP2, clipping and checkpoints, in
#   40 lines,
# - start it on four ranks, resume from its checkpoints on layouts that split it differently, and
#   see the losses of one process to ten digits.

# %%
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import weft

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
# ## Three ways over four ranks
#
# The model file knows of no mesh. A layout file says how the axes are placed on one; `lat+lon` in
# `[attend]` says how the joint axis is attended. Samples and a ring; heads and a tile; or
# everything by all-to-all:

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
# ## Your own code
#
# You decide what the numbers mean. Here a grid point has two channels, waves that drift with a
# wind of their own, and a station tells where the wind blows. The grid is 6 x 8, with 7 time steps:
# no mesh of two divides all of that, so the global lengths are given.
#
# - `Weather` is an ordinary module with the trunk inside. Weights must start the same on every
#   rank: `compose` draws the trunk's from a separate seed, yours come from `manual_seed`.
# - `layout.shard` cuts what every rank has drawn, `layout.mean` averages over all ranks' tokens.
# - `weft.data_parallel` has FSDP2 shard weights, gradients and optimizer states over the mesh dims
#   that split data. Split heads stay split. On one process it leaves the model as it is.
# - `weft.clip_grad_norm_` counts every weight once, whichever rank holds it. (torch's own raises a
#   `KeyError` on heads split under FSDP2, unless `tp` is the last mesh dim.)
# - `Checkpoints` keeps full tensors, so a run resumes on any layout.

# %%
folder = Path(tempfile.mkdtemp())
script = folder / "weather.py"
script.write_text("""
import sys
import torch
import weft

AXES, LENGTHS = {"batch": 0, "time": 1, "lat": 2, "lon": 3}, {"time": 7, "lat": 6, "lon": 8}

class Weather(torch.nn.Module):
    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = weft.compose("weather", layout)
        self.enter, self.station, self.leave = map(torch.nn.Linear, (2, 2, 32), (32, 32, 2))

    def forward(self, fields, stations):
        context = {"forcing": self.station(stations)}
        return fields + self.leave(self.trunk(self.enter(fields), context, lengths=LENGTHS))

def world(step):
    wind = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(step)).double() * 0.5
    t, lat, lon = torch.meshgrid(*map(torch.arange, (8, 6, 8)), indexing="ij")
    a, b = (w.view(2, 1, 1, 1) * t + x * 0.8 for w, x in zip(wind.mean(1).T, (lat, lon)))
    return torch.stack([(a + b).sin(), (a - b).cos()], -1), wind

def train(layout, folder, until):
    model = weft.data_parallel(Weather(layout).double(), layout, "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    checkpoints, losses = weft.checkpoint.Checkpoints(folder, layout), []
    for step in range(checkpoints.load(model, optimizer).step, until):
        fields, stations = world(step)
        now, then = layout.shard(fields[:, :-1], AXES), layout.shard(fields[:, 1:], AXES)
        error = model(now, layout.shard(stations, {"batch": 0})) - then
        loss = layout.mean(error.square().sum(), error.numel())
        optimizer.zero_grad()
        loss.backward()
        weft.clip_grad_norm_(model, 1.0, layout)
        optimizer.step()
        losses.append(loss.item())
    checkpoints.save(until, model, optimizer)
    return losses

if __name__ == "__main__":
    for name, until in (leg.split(":") for leg in sys.argv[2:]):
        layout = weft.Layout.load(name).build("cpu", timeout=60)
        losses = train(layout, sys.argv[1], int(until))
        if layout.rank == 0:
            print(losses)
""")
lines = [line for line in script.read_text().splitlines() if line.strip()]
assert len(lines) <= 40, len(lines)

# %% [markdown]
# ## One process
#
# 20 steps, here in the notebook. `Layout.single()` has no mesh; all that the script does with a
# layout does nothing then.

# %%
sys.path.insert(0, str(folder))
from weather import Weather, train, world

alone = train(weft.Layout.single(), folder / "alone", 20)
alone[0], alone[-1]

# %% [markdown]
# ## Four ranks, three layouts
#
# Now on four processes, started as in a shell. Seven steps with samples and a ring; seven more with
# heads and a tile; the rest with all-to-alls. Each leg makes a new model and reads the checkpoint
# that the one before it left: every rank holds other parts of other tensors, and the checkpoint
# does not care. Three commands with one leg each do the same.
#
# ```bash
# torchrun --nproc-per-node 4 weather.py runs/four \
#     weather-dp-x-ring:7 weather-head-x-tile:14 weather-axial-2x2:20
# ```

# %%
until = [7, 14, 20]
done = subprocess.run(
    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    + [script, folder / "four", *(f"{name}:{n}" for name, n in zip(names, until))],
    stdout=subprocess.PIPE,
    check=True,
    timeout=300,
    env=os.environ | {"OMP_NUM_THREADS": "1"},
)
legs = [json.loads(line) for line in done.stdout.splitlines()]
far = max(abs(a - b) for a, b in zip(itertools.chain(*legs), alone, strict=True))
print(f"largest difference to one process in 20 steps: {far:.0e}")
assert far < 1e-10

# %%
fig, ax = plt.subplots(figsize=(6, 2.8))
for name, leg, end in zip(names, legs, until):
    ax.plot(range(end - len(leg), end), leg, linewidth=3, label=name)
ax.plot(alone, "k.", label="one process", markersize=5)
ax.set(xlabel="step", ylabel="squared error", yscale="log")
ax.legend()

assert alone[-1] < alone[0] / 2, alone

# %% [markdown]
# ## Traffic
#
# A layout is a choice of traffic. Ask for it before you choose, with the ranks as threads of this
# process:


# %%
def count(layout):
    fields, stations = world(0)
    model = Weather(layout).double()
    parts = layout.shard(fields[:, :-1], AXES), layout.shard(stations, {"batch": 0})
    with weft.traffic(layout) as moved:
        model(*parts)
    return moved.bytes


AXES = {"batch": 0, "time": 1, "lat": 2, "lon": 3}
for name in names:
    print(f"{name:20} {weft.on_threads(weft.Layout.load(name), count)[0] / 1024:6.0f} KiB a pass")

# %% [markdown]
# ## Where next
#
# - `layout.sync_gradients(model)` after `backward` is the way without FSDP2: weights stay
#   replicated, and ranks may be threads. `weft.data_parallel(model, layout, "ddp")` is the third. A
#   model takes one of them, and the others are refused for it.
# - Blocks of a kind may run on another layout: `weft.compose("weather", layout,
#   layouts={"forcing": other})` reshards between blocks, and back, with `layout.redistribute`.
# - A head of your own by name: `weft.register_head("forecast", make)`, then `head = "forecast"`.
# - More nodes, SLURM, Kubernetes: [from a laptop to a cluster](08_laptop_to_cluster.ipynb).

# %% [markdown]
# # 12. Which layout?
#
# Ring, Ulysses, a tile, or a mix? With how many ranks each? It depends on heads, lengths, the mask
# and the links. `weft plan` answers from sizes and a description of the hardware, before you have
# the machines. This tutorial
#
# - plans a call for four laptops on Ethernet,
# - plans for a cluster of GPUs that you do not have,
# - checks the plan, and counts its bytes on this machine,
# - compares layouts for a full model, sums around its projections included.
#
# [Tutorial 5](05_what_moves.ipynb) shows what a plan is made of.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import weft

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## From sizes to a layout
#
# `choose_layout` tries every way to split heads, queries and keys over the devices. Each has a
# lower bound in closed form; the programs of the promising ones run on a clock that knows which
# messages share a network card. The result is sorted, fastest first.

# %%
call = {"heads": 8, "kv_heads": 2, "head_dim": 64, "mask": weft.Causal()}
laptops = weft.choose_layout(1024, "ethernet-laptops", 4, **call)
for choice in laptops.choices[:5]:
    took, sent = 1e3 * choice.total, sum(choice.bytes_of_levels) / 1e6
    print(f"{took:6.1f} ms  {sent:5.1f} MB  {choice.bounded_by:13} {choice.layout.name}")
print(f"of {laptops.considered} candidates, {len(laptops.choices)} on the clock")

# %% [markdown]
# `gap` says how much faster a layout that was not put on the clock may be, at most: a promise
# about the clock's own model, not about your machine. `weft plan call` prints the same,
# and says what bounds the best one, what is second, and what was refused.

# %%
assert laptops.gap <= 0.01 or len(laptops.choices) >= 10
best = laptops.best
slow = weft.choose_layout(1024, "ethernet-laptops", 4, **call, only=["ulysses"])
print(f"heads alone: {slow.best.total / best.total:.2f} times as long")
assert slow.best.total >= best.total * 0.99

# %% [markdown]
# ## A cluster that you do not have
#
# Hardware files say what a GPU computes and what each level of links carries, with a source for
# every figure (`weft list hardware`). Heads are split inside the node, where all-to-alls are
# cheap.

# %%
gpus = {"heads": 32, "kv_heads": 8, "head_dim": 128}
cluster = weft.choose_layout(65536, "h100-8", 16, **gpus, only=["ulysses", "ring", "tile"])
print(
    cluster.best.layout.name,
    f"{1e3 * cluster.best.total:.1f} ms, bounded by {cluster.best.bounded_by}",
)
node, between = cluster.best.bytes_of_levels
print(f"a rank sends {node / 2**20:.0f} MiB inside its node, {between / 2**20:.0f} MiB to others")

# %% [markdown]
# Time against devices, by strategy. Few devices: computing decides, and all lines fall. Many:
# messages no longer hide behind blocks, and a mix wins.

# %%
families = {"ring": ["ring"], "Ulysses": ["ulysses"], "best mix": []}
figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
for name, only in families.items():
    points = []
    for devices in (2, 4, 8, 16):
        found = weft.choose_layout(8192, "h100-8", devices, **gpus, only=only, gap=0.05)
        points.append((devices, found.best.total))
    axes.loglog(*zip(*points), "o-", label=name, base=2)
axes.set(xlabel="devices", ylabel="seconds, predicted")
axes.legend()
plt.show()

# %% [markdown]
# ## Check it
#
# A choice is a layout like any other. It is written as a file, and proven from its plans. Times are
# those of the four laptops; `weft rates` writes a hardware file of the machine at hand.


# %%
def command(*words):
    """What a weft command prints."""
    run = subprocess.run(
        [sys.executable, "-m", "weft", *words], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


plan = Path(tempfile.mkdtemp()) / "plan.toml"
plan.write_text(best.layout.to_toml())
print(command("check", str(plan), "--symbolic", "--mask", "causal", "--length", "64"))

# %% [markdown]
# The bytes that the transports count are those that the plan predicts:

# %%
layout = weft.Layout.load(plan)
q, k, v = torch.randn(1, 8, 512, 64), torch.randn(1, 2, 512, 64), torch.randn(1, 2, 512, 64)


def count(bound):
    parts = (bound.shard(x, {"tokens": 2}).requires_grad_() for x in (q, k, v))
    with weft.traffic(bound) as moved:
        weft.attention(*parts, bound, "tokens", weft.Causal()).sum().backward()
    return moved


for rank, moved in enumerate(weft.on_threads(layout, count)):
    assert moved.as_predicted
    print(f"rank {rank}: {moved.bytes:,} bytes, as predicted")

# %% [markdown]
# ## A full model
#
# A model does more than attend: projections that are split over ranks sum their outputs,
# activations are resharded between blocks, gradients are summed. `weft explain model`
# runs the model's own code on tensors without numbers and counts. Tensor parallelism is free in
# attention, and not in the model:

# %%
layouts = ["heads: tp=2; tokens: ring=2", "tokens: ulysses=2 x ring=2", "tokens(zigzag): ring=4"]
report = command(
    "explain", "model", "causal_lm", *layouts, "--length", "tokens=1024",
    "--hardware", "ethernet-laptops",
)
assert "sums" in report
print(report)

# %% [markdown]
# `weft plan model` searches all axes of a model at once, prices resharding between blocks, and
# keeps to the memory of the devices: weights, gradients, optimizer, activations.

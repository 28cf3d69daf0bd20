# %% [markdown]
# # 8. From a laptop to a cluster
#
# Until now ranks were threads of one process. Here they become processes, on this machine, started
# as they are started on a cluster. The function that a rank runs stays the same. You will
#
# - turn a notebook cell into a script, and start it with `torchrun`,
# - let a mesh take as many ranks as there are,
# - say which mesh dims must stay inside a node, and see a launch that breaks this refused,
# - decide on a layout for 32 GPUs before you have them.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import weft

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## One script
#
# `layout.build()` takes the place of `weft.on_threads`. It joins the process group, makes PyTorch's
# `DeviceMesh`, and checks that all ranks read the same layout. On CPUs it uses gloo, on GPUs NCCL.

# %%
script = folder / "attend.py"
script.write_text("""
import sys
import torch
import torch.nn.functional as F
import weft

torch.set_num_threads(1)


def attend(layout):
    torch.manual_seed(0)                        # every rank draws the same whole tensors
    q, k, v = torch.randn(3, 1, 4, 100, 16, dtype=torch.float64).unbind(0)
    mine = [layout.shard(x, {"tokens": 2}) for x in (q, k, v)]
    out = weft.attention(*mine, layout, "tokens", weft.Causal(), length=100)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (layout.gather(out, {"tokens": 2}) - expected).abs().max().item()


if __name__ == "__main__":
    layout = weft.Layout.load(sys.argv[1])
    layout = layout.build("cpu", timeout=60)
    error = attend(layout)
    line = f"rank {layout.rank} of {layout.world_size} at {layout.coords}: error {error:.0e}"
    print(line + "\\n", end="")                  # one write: ranks share the terminal
    assert error < 1e-14
""")
print(f"{len(script.read_text().splitlines())} lines")

# %% [markdown]
# And a layout. One size of a mesh may be `-1`: as many ranks as are left. So the same file serves
# two ranks on a laptop and two hundred elsewhere.

# %%
layout_file = folder / "any.toml"
layout_file.write_text("""
about = "A ring over all the ranks there are."

[mesh]
ring = -1

[shard]
tokens = ["ring"]

[order]
tokens = "zigzag"

[attend]
tokens = [{ strategy = "ring", on = "ring" }]
""")
weft.Layout.load(layout_file).resolve(8).mesh

# %% [markdown]
# ## torchrun
#
# In a shell you would now type
#
# ```bash
# torchrun --nproc-per-node 2 attend.py any.toml
# ```
#
# `torchrun` is `python -m torch.distributed.run`; from a notebook we start that.


# %%
def torchrun(*options):
    """Start torchrun; gives the running process."""
    port_free = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    where = [] if "--master-port" in options else port_free
    command = [sys.executable, "-m", "torch.distributed.run", *where, *map(str, options)]
    return subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


started = torchrun("--nproc-per-node", 2, script, layout_file)
printed, _ = started.communicate(timeout=120)
lines = sorted(line for line in printed.splitlines() if line.startswith("rank"))
print("\n".join(lines))
assert started.returncode == 0, printed
assert len(lines) == 2

# %% [markdown]
# Two processes, gloo between them, and the same numbers. On a machine with GPUs leave `"cpu"` out:
# `layout.build()` takes them.
#
# ## Several nodes
#
# On several nodes the same command runs on each of them, with the address of the first:
#
# ```bash
# torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 \
#     --master-addr 10.0.0.1 --master-port 29500 attend.py any.toml
# ```
#
# Links between nodes are slower than those inside, so the order of mesh dims matters. The
# rule is simple: ranks fill the mesh row by row, and a node's ranks come one after another. So
# **the last mesh dims are inside a node**. Say so in the layout, and weft holds you to it:

# %%
nodes_file = folder / "nodes.toml"
nodes_file.write_text("""
about = "A ring between nodes, Ulysses inside each."

inside_node = ["gpu"]

[mesh]
node = -1
gpu = 2

[shard]
tokens = ["node", "gpu"]

[attend]
tokens = [{ strategy = "ring", on = "node" }, { strategy = "ulysses", on = "gpu" }]
""")
weft.Layout.load(nodes_file).inside_node

# %% [markdown]
# Now a launch that breaks this: two "nodes" (both on this machine) with **one** rank each. The mesh
# dim `gpu` would have to reach from one node to the other.

# %%
import socket

with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]

address = ["--master-addr", "localhost", "--master-port", port, "--nproc-per-node", 1]
started = [
    torchrun("--nnodes", 2, "--node-rank", node, *address, script, nodes_file) for node in (0, 1)
]
printed = "".join(process.communicate(timeout=120)[0] for process in started)
refusal = next(line for line in printed.splitlines() if "inside_node lists" in line)
print(refusal.replace(str(folder) + "/", ""))
assert all(process.returncode != 0 for process in started)
assert "run on node 0, node 1; start 2 or a multiple of it per node" in refusal

# %% [markdown]
# Refused before the mesh is made, on every rank. Slow training a week later would tell you less.
#
# ## Which layout for 32 GPUs?
#
# Four nodes of eight. [Plans](05_what_moves.ipynb) need no ranks, so ask them now. For each of some
# layouts: what does a rank receive over the mesh dim that crosses nodes, and what over the one
# inside?

# %%
sizes = {"length": 131072, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
lines = {
    "a ring of rings": "tokens: hierarchical=4x8",
    "ring between, Ulysses inside": "tokens: ring=4 x ulysses=8",
    "Ulysses between, ring inside": "tokens: ulysses=4 x ring=8",
    "tile: keys between, queries inside": "tokens: tile=4x8",
}
between, inside = {}, {}
for name, line in lines.items():
    layout = weft.Layout.parse(line)
    outer, inner = layout.mesh
    moved = layout.plan("tokens", **sizes).traffic.forward.by_mesh_dim()
    between[name], inside[name] = moved[outer] / 2**20, moved[inner] / 2**20

fig, ax = plt.subplots(figsize=(6, 2.8))
for offset, (label, found) in enumerate(
    {"between nodes": between, "inside a node": inside}.items()
):
    places = [i + 0.36 * offset for i in range(len(found))]
    bars = ax.barh(places, found.values(), height=0.34, label=label)
    ax.bar_label(bars, [f"{n:.0f}" for n in found.values()], padding=3)
ax.set_yticks([i + 0.18 for i in range(len(between))], between)
ax.set(xlabel="MiB received by a rank, forward")
ax.margins(x=0.12)
ax.legend()

assert between["ring between, Ulysses inside"] < inside["ring between, Ulysses inside"]

# %% [markdown]
# Bytes are half of the answer: a ring's transfers travel while blocks are computed, an all-to-all
# has nothing to hide behind. That is why Ulysses belongs inside a node, and a ring between nodes.
# And with eight key heads for 32 query heads, keys are cheap to move and queries are not.
#
# ## SLURM and Kubernetes
#
# The repository has a script for each, in `cluster/`. Both carry the layout file with the job:
#
# ```bash
# sbatch --nodes=4 cluster/slurm.sh cluster/layout.toml -m weft train tabular LAYOUT
# ```
#
# `docs/clusters.md` has the details: which node gets which rank, which settings of NCCL matter, and
# where to look when the network is slow.
#
# When a rank dies or falls silent, the others do not hang: every wait has a limit
# (`layout.build(timeout=...)`), and the error names the rank that failed first.
#
# ## One more
#
# You have seen a ring, rules, mixes, tables, plans, routing, other people's models and other
# people's machines. The last one puts them together: [a weather model over four
# axes](09_weather_model.ipynb).

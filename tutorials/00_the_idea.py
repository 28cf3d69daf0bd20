# %% [markdown]
# # 0. The idea, in one file
#
# Everything that weft does follows from one sentence: **each mesh dim has one role in attention,
# written as placements of queries and keys, at rest and while computing.** Here is the whole of it
# in plain PyTorch: placements give roles, roles give a plan, and a plan is applied to tensors.
#
# The ranks are entries of lists, chunks are even, and there is a forward pass only. What weft adds
# is the rest: real ranks, gradients, uneven chunks, messages that travel while kernels run, and
# refusals. But its numbers are these, and so are its bytes: a test compares both, rank by rank, on
# every layout that ships and has one attended axis.

# %%
import itertools
from dataclasses import dataclass

import torch
from matplotlib import pyplot as plt

import weft

# %% [markdown]
# ## 1. Placements give roles
#
# Attention is a box of scores: batch x head x query x key. While computing, a mesh dim cuts one
# side of the box, or none. `S(seq)` of the queries is a cut of the query side, and so on. Any other
# pair would drop scores or count them twice.

# %%
ROLES = {  # (query, key) while computing: the side that is cut
    ("S(batch)", "S(batch)"): "batch",
    ("S(head)", "S(head)"): "head",
    ("S(seq)", "R"): "query",  # a rank owns rows of the scores: keys come to it
    ("R", "S(seq)"): "key",  # a rank owns columns: queries come to it, partial outputs leave
    ("R", "R"): "none",
}
TENSOR_DIM = {"S(batch)": 0, "S(head)": 1, "S(seq)": 2, "R": None}  # of (batch, head, seq, dim)


@dataclass(frozen=True)
class Rule:
    """Placements of queries, and of keys with values, on one mesh dim: "rest -> compute"."""

    query: str
    key: str

    @property
    def rest(self) -> tuple[str, str]:
        return self.query.split(" -> ")[0], self.key.split(" -> ")[0]

    @property
    def compute(self) -> tuple[str, str]:
        return self.query.split(" -> ")[-1], self.key.split(" -> ")[-1]

    @property
    def role(self) -> str:
        return ROLES[self.compute]

    @property
    def trades(self) -> bool:  # one cut for another, in an all-to-all: Ulysses, axial
        return self.rest != self.compute and "R" not in self.compute


RING = Rule("S(seq)", "S(seq) -> R")
PASS_Q = Rule("S(seq) -> R", "S(seq)")
ULYSSES = Rule("S(seq) -> S(head)", "S(seq) -> S(head)")
HEADS = Rule("S(head)", "S(head)")

# %% [markdown]
# ## 2. Roles give a plan
#
# A plan is data. Per rank: the ranks whose queries, and whose keys, it computes with. They are
# those along the mesh dims where a chunk at rest becomes replicated. A mesh tile is both at once.

# %%
Mesh = dict[str, int]
Rules = dict[str, Rule]


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    return [dict(zip(mesh, c)) for c in itertools.product(*map(range, mesh.values()))]


def along(mesh: Mesh, rank: dict[str, int], dims: list[str]) -> list[int]:
    """The ranks that differ from one in these mesh dims only."""
    same = [d for d in mesh if d not in dims]
    return [r for r, c in enumerate(coordinates(mesh)) if all(c[d] == rank[d] for d in same)]


def plan(mesh: Mesh, rules: Rules) -> list[tuple[list[int], list[int]]]:
    to_queries = [d for d in mesh if rules[d].role == "key" and rules[d].rest[0] == "S(seq)"]
    to_keys = [d for d in mesh if rules[d].role == "query" and rules[d].rest[1] == "S(seq)"]
    ranks = coordinates(mesh)
    return [(along(mesh, c, to_queries), along(mesh, c, to_keys)) for c in ranks]


plan({"row": 2, "col": 2}, {"row": RING, "col": PASS_Q})[3]  # of rank 3: queries of 2, keys of 2

# %% [markdown]
# Drawn: the number in a cell is the rank that computes the scores of these queries and keys. A ring
# owns rows, pass-Q columns, a tile rectangles.

# %%
PLANS = {
    "ring=4": plan({"ring": 4}, {"ring": RING}),
    "pass_q=4": plan({"pass_q": 4}, {"pass_q": PASS_Q}),
    "tile=2x2": plan({"row": 2, "col": 2}, {"row": RING, "col": PASS_Q}),
}
figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.8), layout="constrained")
for ax, (name, steps) in zip(axes, PLANS.items()):
    owner = torch.empty(4, 4)
    for rank, (queries, keys) in enumerate(steps):
        for i, j in itertools.product(queries, keys):
            owner[i, j] = rank
            ax.text(j, i, rank, ha="center", va="center", color="white")
    ax.imshow(owner, cmap="viridis", vmax=4)
    ax.set(title=name, xlabel="keys of rank", ylabel="queries of rank", xticks=range(4))

# %% [markdown]
# ## 3. A plan is applied to tensors
#
# A chunk carries the global positions of its tokens, so that no order of chunks confuses a mask.

# %%
Parts = list[torch.Tensor]  # one per rank


def split(x: torch.Tensor, mesh: Mesh, rules: Rules, side: int) -> Parts:
    """Each rank's part at rest; of queries (side 0) or of keys (1)."""
    parts = []
    for c in coordinates(mesh):
        part = x
        for d, size in mesh.items():
            dim = TENSOR_DIM[rules[d].rest[side]]
            part = part if dim is None else part.chunk(size, dim)[c[d]]
        parts.append(part)
    return parts


def trade(parts: Parts, mesh: Mesh, dim: str, cut: str, joined: str) -> tuple[Parts, list[int]]:
    """An all-to-all along a mesh dim: cut one tensor dim and join another; bytes received."""
    out, received = [], []
    for r, c in enumerate(coordinates(mesh)):
        pieces = {
            p: parts[p].chunk(mesh[dim], TENSOR_DIM[cut])[c[dim]] for p in along(mesh, c, [dim])
        }
        out.append(torch.cat([*pieces.values()], TENSOR_DIM[joined]))
        received.append(sum(t.nbytes for p, t in pieces.items() if p != r))
    return out, received


def block(q, k, v, visible):
    """Softmax attention over some of the keys, and the logsumexp of their scores."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min)).exp() @ v, lse


def merge(partial):
    """`P(softmax) -> S(seq)`: partial outputs weighed by their share of the sum of exponentials."""
    total = torch.logsumexp(torch.stack([lse for _, lse in partial]), 0)
    return sum(out * (lse - total).exp().nan_to_num(0.0) for out, lse in partial)


def attend(q, k, v, mesh: Mesh, rules: Rules, visible) -> tuple[Parts, list[int]]:
    """Each rank's output, like its queries at rest, and the bytes that each rank receives."""
    ranks, steps, received = coordinates(mesh), plan(mesh, rules), [0] * len(coordinates(mesh))
    index = [torch.arange(x.shape[2]).view(1, 1, -1, 1).expand(*x.shape[:3], 1) for x in (q, k)]
    sides = {"q": (q, 0), "k": (k, 1), "v": (v, 1), "at_q": (index[0], 0), "at_k": (index[1], 1)}
    held = {name: split(x, mesh, rules, side) for name, (x, side) in sides.items()}

    trades = [d for d in mesh if rules[d].trades and mesh[d] > 1]
    for d in trades:
        for name, (_, side) in sides.items():
            cut, joined = rules[d].compute[side], rules[d].rest[side]
            held[name], nbytes = trade(held[name], mesh, d, cut, joined)
            if name in "qkv":  # positions are known to all and do not travel
                received = [a + b for a, b in zip(received, nbytes)]

    partial: list[list] = [[] for _ in ranks]  # on the rank at which the queries rest
    for r, (queries, keys) in enumerate(steps):
        k_, v_, at_k = (torch.cat([held[n][p] for p in keys], 2) for n in ("k", "v", "at_k"))
        received[r] += sum(held[n][p].nbytes for n in ("k", "v") for p in keys if p != r)
        for p in queries:
            seen = visible(held["at_q"][p], at_k.mT)
            result = block(held["q"][p], k_, v_, seen)
            partial[p].append(result)
            if p != r:  # the queries came here, and their partial output goes back
                received[r] += held["q"][p].nbytes
                received[p] += sum(t.nbytes for t in result)
    out = [merge(parts) for parts in partial]

    for d in reversed(trades):
        out, nbytes = trade(out, mesh, d, rules[d].rest[0], rules[d].compute[0])
        received = [a + b for a, b in zip(received, nbytes)]
    return out, received


# %% [markdown]
# ## 4. Strategies are rules; composition is a rule for each mesh dim
#
# A ring, its dual pass-Q, their product the tile, Ulysses, two rings in each other, tensor-parallel
# heads beside a ring, and three strategies at once. Each is compared with softmax attention on one
# device, and its bytes with what weft predicts for the layout of the same rules.

# %%
EXAMPLES = {
    "tokens: ring=4": {"ring": RING},
    "tokens: pass_q=4": {"pass_q": PASS_Q},
    "tokens: tile=2x2": {"row": RING, "col": PASS_Q},
    "tokens: ulysses=4": {"ulysses": ULYSSES},
    "tokens: hierarchical=2x2": {"inter": RING, "intra": RING},
    "heads: tp=2; tokens: ring=2": {"tp": HEADS, "ring": RING},
    "tokens: ring=2 x ulysses=2 x pass_q=2": {"ring": RING, "ulysses": ULYSSES, "pass_q": PASS_Q},
}
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 8, 32, 16, dtype=torch.float64).unbind(0)
MASKS = {"full": lambda at_q, at_k: at_k >= 0, "causal": lambda at_q, at_k: at_q >= at_k}

for line, of_dims in EXAMPLES.items():
    layout = weft.Layout.parse(line)
    rules = dict(zip(layout.mesh, of_dims.values()))
    for name, visible in MASKS.items():
        out, received = attend(q, k, v, dict(layout.mesh), rules, visible)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=name == "causal"
        )
        parts = split(wanted, dict(layout.mesh), rules, 0)
        error = max((a - b).abs().max().item() for a, b in zip(out, parts))
        assert error < 1e-13
        print(f"{line:38} {name:6}  largest error {error:.0e}  rank 0 receives {received[0]} bytes")

# %% [markdown]
# ## 5. The same, by the engine
#
# weft plans the same bytes, without running anything:

# %%
layout = weft.Layout.parse("tokens: ring=2 x ulysses=2 x pass_q=2")
sizes = {"length": 32, "heads": 8, "head_dim": 16, "batch": 2, "dtype": torch.float64}
planned = [layout.plan("tokens", rank=r, **sizes).traffic.forward.bytes for r in range(8)]
_, received = attend(q, k, v, dict(layout.mesh), rules, MASKS["full"])  # rules: of the last example
assert planned == received
planned

# %% [markdown]
# Under a causal mask weft sends less than the file above: rows that nobody needs stay where they
# are. [Your first ring](01_first_ring.ipynb) runs the engine.

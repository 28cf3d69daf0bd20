# %% [markdown]
# # 14. A draft model: tokens x depth
#
# Speculative decoding drafts some tokens ahead of a large model. A draft model is trained on its
# own drafts: at depth 1 it goes on from what it made of each token at depth 0, at depth 2 from
# that. So its attention is over **tokens x depth**: causal among the tokens of depth 0, and of
# every later depth one key, on a diagonal. You will
#
# - write this mask as a function, for four packed documents at three depths,
# - split the tokens over a ring of four ranks, and compare outputs and gradients with one device,
# - balance the work, and count what travels.
#
# Layouts are those of [the first tutorial](01_first_ring.ipynb). Ranks are threads of this process.

# %%
import torch
from matplotlib import pyplot as plt

import weft

torch.set_num_threads(1)
torch.manual_seed(0)

DEPTHS, LENGTHS = 3, (48, 12, 30, 6)
document = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
n = DEPTHS * len(document)

# %% [markdown]
# ## The mask
#
# Position `p` of the axis is token `p // 3` at depth `p % 3`: all depths of a token stand together.
# The draft of a token at depth `d` sees the tokens up to its own at depth 0, and itself at depths
# 1 to `d`. Nothing crosses documents.


# %%
def drafts(b, h, q, k):
    token, depth, other, at = q // DEPTHS, q % DEPTHS, k // DEPTHS, k % DEPTHS
    seen = torch.where(at == 0, other <= token, (other == token) & (at <= depth))
    return seen & (document[token] == document[other])


mask = weft.MaskMod(drafts)
i = torch.arange(n)
table = mask.allowed(i * 0, i * 0, i[:, None], i)
by_depth = torch.argsort(i % DEPTHS, stable=True)

_, panel = plt.subplots(figsize=(3.6, 3.6))
panel.imshow(table[by_depth][:, by_depth], cmap="Greys", interpolation="nearest")
panel.set(title="depth by depth", xlabel="keys", ylabel="queries", xticks=[], yticks=[])
print(f"{table.float().mean():.1%} of all pairs are visible")

# %% [markdown]
# ## On a ring, packed
#
# Nobody need know of depths or documents: ranks ask the function, once, and what nobody sees
# neither travels nor is computed. `balance` makes an order of the positions in which every rank
# computes as many scores. For that it cuts the long document over ranks, and more travels.

# %%
ring = weft.Layout.parse("tokens: ring=4")
balanced = ring.reorder("tokens", ring.balance("tokens", mask, n))


def plan(layout, mask):
    sizes = {"length": n, "heads": 4, "head_dim": 16, "mask": mask}
    ranks = layout.plan("tokens", **sizes).ranks()
    rows = weft.on_threads(layout, lambda rank: rank.positions("tokens", n))
    work = torch.stack([table[held].sum() for held in rows]).double()
    return sum(rank.traffic.forward.bytes for rank in ranks), float(work.max() / work.mean())


for name, layout, seen in (
    ("all keys, as dense", ring, weft.Full()),
    ("drafts", ring, mask),
    ("drafts, balanced", balanced, mask),
):
    received, busiest = plan(layout, seen)
    print(f"{name:20} {received:9,} bytes received; busiest rank {busiest:.2f} of the mean")

assert plan(ring, mask)[0] < plan(ring, weft.Full())[0] / 2
assert plan(balanced, mask)[1] <= 1.05 < plan(ring, mask)[1]

# %% [markdown]
# ## Exact
#
# Outputs and gradients are those of one device, in float64.

# %%
x = torch.randn(3, 1, 4, n, 16, dtype=torch.float64)
weight = torch.randn(1, 4, n, 16, dtype=torch.float64)
TOKENS = {"tokens": 2}


def attend(layout):
    q, k, v = (layout.shard(t, TOKENS).requires_grad_() for t in x)
    out = weft.attention(q, k, v, layout, "tokens", mask)
    (out * layout.shard(weight, TOKENS)).sum().backward()
    return [layout.gather(t.detach(), TOKENS) for t in (out, q.grad, k.grad, v.grad)]


expected = attend(weft.Layout.single())
apart = 0.0
for layout in (ring, balanced):
    for found in weft.on_threads(layout, attend):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
            apart = max(apart, float((one - other).abs().max()))
print(f"output and gradients are at most {apart:.0e} apart")

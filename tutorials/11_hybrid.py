# %% [markdown]
# # 11. A hybrid model: states that cross ranks
#
# Qwen3.5 has three layers of Gated DeltaNet for every layer of attention. Such a layer reads its
# tokens one after another and keeps a state, so a rank with the second half of a sequence needs to
# know what the first half left behind. You will
#
# - train a small Qwen3.5 from transformers, unmodified, on one rank and on four,
# - draw the two loss curves over each other: they are the same run,
# - count what crosses ranks: as many bytes for a long sequence as for a short one.
#
# Needs `pip install -e ".[transformers]"`. Nothing is downloaded: the model is tiny, with
# random weights, and the text is made here. Ranks are threads of this process.

# %%
import copy

import torch
from matplotlib import pyplot as plt
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

import weft
from weft import parallelize

torch.set_num_threads(1)
logging.set_verbosity_error()

# %% [markdown]
# ## The model and the text
#
# Three recurrent layers and one that attends. Each word is followed by one of two others, as a
# table says, so that there is something to learn.

# %%
WORDS = 40


torch.manual_seed(0)
fresh = Qwen3_5ForCausalLM(
    Qwen3_5TextConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
)


follows = torch.randint(0, WORDS, (WORDS, 2), generator=torch.Generator().manual_seed(0))


def text(step, length=120):
    draw = torch.Generator().manual_seed(step)
    words = [torch.randint(0, WORDS, (4,), generator=draw)]
    for which in torch.randint(0, 2, (length - 1, 4), generator=draw):
        words.append(follows[words[-1], which])
    return torch.stack(words, 1)


print(*fresh.config.layer_types, sep="\n")

# %% [markdown]
# ## One loop for any number of ranks
#
# `parallelize` gives attention to weft, and lets each recurrent layer's convolution and scan go on
# where the rank before has stopped. It checks the model first: a copy whose states decay slowly
# runs on one rank and on virtual ranks. The rest is a loop as for one process.

# %%
STEPS = 30


def train(layout):
    model = parallelize(copy.deepcopy(fresh), layout)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(STEPS):
        ids = text(step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        layout.sync_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


one = weft.on_threads(weft.Layout.parse("tokens: ring=1"), train)[0]
four = weft.on_threads(weft.Layout.parse("tokens(zigzag): ring=4"), train)[0]
print(f"one rank:   loss {one[0]:.3f} -> {one[-1]:.3f}")
print(f"four ranks: loss {four[0]:.3f} -> {four[-1]:.3f}")

# %% [markdown]
# ## The same run
#
# In zigzag order every rank has two pieces of each sequence, one near its start and one near its
# end. Over a piece a recurrent layer is an affine map of the state that comes in,
# $S_{out} = A S_{in} + b$. Ranks exchange $(A, b)$, and each composes those of all earlier pieces.

# %%
figure, panel = plt.subplots(figsize=(6, 3), constrained_layout=True)
panel.plot(one, lw=5, alpha=0.35, label="one rank")
panel.plot(four, lw=1.2, label="four ranks, zigzag")
panel.set(xlabel="step", ylabel="loss")
panel.legend()

# %%
apart = max(abs(a - b) / a for a, b in zip(one, four, strict=True))
print(f"at most {apart:.0e} of the loss apart in {STEPS} steps")
assert apart < 1e-3
assert one[-1] < 0.7 * one[0]

# %% [markdown]
# ## Traffic between ranks
#
# A map has `heads x K x (K + V)` numbers, however many tokens it stands for; the convolution of
# four taps needs the three columns to its left. Attention sends keys and values, which grow with
# the sequence.


# %%
def bytes_sent(layout, length):
    model = parallelize(copy.deepcopy(fresh), layout)
    ids = text(0, length)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    sent = {"state": 0, "halo": 0, "attention": 0}
    for (_, label), count in layout.bound.sent.items():
        sent[label if label in sent else "attention"] += count
    return sent


ring = weft.Layout.parse("tokens(zigzag): ring=4")
for length in (128, 512, 2048):
    sent = weft.on_threads(ring, bytes_sent, length)[0]
    print(f"{length:5} tokens: {sent}")
    batch, layers, heads, size, pieces, others = 4, 3, 4, 16, 2, 3
    assert sent["state"] == layers * batch * heads * size * (size + size) * 4 * pieces * others

# %% [markdown]
# Mamba, Jamba, Nemotron-H, Falcon-H1, LFM2, Kimi Linear and others work so: `docs/families.md` has
# them all, and `docs/state.md` says what is refused.
# Trainers take hybrid models, too: [Fine-tune with SFTTrainer](10_trainers.ipynb).

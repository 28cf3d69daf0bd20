# %% [markdown]
# # 13. A VAE over a grid of ranks: fields
#
# A convolution sees the pixels around its own. When an image is split over ranks, those around
# the edge of a part are on other ranks, and strides, borders, norms and the attention in the middle
# each need something else from them. You will
#
# - decode an image by an unmodified VAE of diffusers on a grid of 2 x 2 ranks,
# - count what a rank receives, beside what gathering would take,
# - take a training step, equal to that of one device,
# - train a weather model of your own, with convolutions and shifted windows in a model file.
#
# Needs `pip install diffusers`. Nothing is downloaded: the VAE is small, with random weights. Ranks
# are threads of this process.

# %%
import copy

import torch
from diffusers import AutoencoderKL
from matplotlib import pyplot as plt
from torch import nn

import weft

torch.set_num_threads(1)
torch.manual_seed(0)

vae = AutoencoderKL(
    block_out_channels=(8, 16),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    norm_num_groups=4,
    layers_per_block=1,
).double()
image = torch.randn(1, 3, 46, 38, dtype=torch.float64)

# %% [markdown]
# ## The layout
#
# Two axes are split, each by `halo`: windows along it take the positions around a rank's own, norms
# merge their moments, and attention brings the keys of all positions to the queries.

# %%
layout = weft.Layout.parse("height: halo=2; width: halo=2")
print(layout.to_toml())

# %% [markdown]
# ## Decode
#
# Every rank calls the VAE with whole tensors, as before. Inside, tensors are fields: they have the
# shape of the whole image, so that code of the model that asks for shapes is right as it stands.

# %%
with torch.no_grad():
    latents = vae.encode(image).latent_dist.mode()
    expected = vae.decode(latents).sample


def decode(layout):
    split = weft.parallelize(copy.deepcopy(vae), layout)
    with torch.no_grad(), weft.traffic(layout) as moved:
        sample = split.decode(latents).sample
    return sample, moved


ranks = weft.on_threads(layout, decode)
errors = [float((sample - expected).abs().max() / expected.abs().max()) for sample, _ in ranks]
print("largest error of any rank:", max(errors))
assert max(errors) < 1e-12

# %% [markdown]
# ## What moves
#
# Halos are strips: a rank receives the surface of its box for every convolution, and no more. To
# gather the inputs of all convolutions would take this much:

# %%
gathered = 0


def count(module, inputs):
    global gathered
    if max(module.kernel_size) > 1:
        gathered += inputs[0].numel() * inputs[0].element_size() * 3 // 4


hooks = [m.register_forward_pre_hook(count) for m in vae.modules() if isinstance(m, nn.Conv2d)]
with torch.no_grad():
    vae.decode(latents)
for hook in hooks:
    hook.remove()

_, moved = ranks[0]
received = moved.by_tensor()
assert received["halo"] * 10 < gathered
fig, ax = plt.subplots(figsize=(6, 2.2))
bars = {**received, "all inputs of convolutions": gathered}
ax.bar_label(ax.barh([*bars], [n / 1e3 for n in bars.values()]), fmt="%.1f", padding=3)
ax.set(xlabel="kB that rank 0 received, and what gathering would take")
ax.margins(x=0.15)

# %% [markdown]
# Strips grow with the edge of an image, and what is gathered with its area: at 512 x 512 the ratio
# is an order of magnitude larger. The label `gather` is the whole output, which is handed to every
# rank; `weft.parallelize(vae, layout, output="field")` keeps it split.
#
# ## A training step
#
# Gradients of the weights are shares of each rank's part, which `sync_gradients` adds up.

# %%


def step(model, sync=lambda model: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    latents = model.encode(image).latent_dist.mode()
    loss = (model.decode(latents).sample - image).square().mean()
    loss.backward()
    sync(model)
    optimizer.step()
    return loss.item(), {name: p.detach() for name, p in model.named_parameters()}


loss, weights = step(copy.deepcopy(vae))
trained = weft.on_threads(
    layout,
    lambda layout: step(weft.parallelize(copy.deepcopy(vae), layout), layout.sync_gradients),
)
for split_loss, split_weights in trained:
    assert abs(split_loss - loss) < 1e-12 * loss
    for name, weight in weights.items():
        torch.testing.assert_close(split_weights[name], weight, rtol=1e-9, atol=1e-12)
print("loss", loss, "and every weight after the step are those of one device")

# %% [markdown]
# ## A model of your own
#
# Neighbourhoods and boxes are masks of attention. `models/weather_windows.toml` has the attention
# of today's weather models: within boxes that shift from block to block and go around in longitude,
# and within neighbourhoods. It names no mesh; `layouts/weather-halo-2x2.toml` splits the globe.

# %%
spec = weft.models.ModelSpec.load("weather_windows")
for block in spec.blocks[:3]:
    print(block.model_dump(exclude_unset=True))

# %% [markdown]
# Waves drift eastwards around the globe, and the model says where they are next. Ranks hold their
# part of the fields; 13 latitudes are split 7 and 6.

# %%
GRID = {"lat": 13, "lon": 18}
AXES = {"batch": 0, "lat": 1, "lon": 2}


def waves(step):
    draw = torch.Generator().manual_seed(step)
    phase = 6.28 * torch.rand(2, 1, 1, 1, generator=draw, dtype=torch.float64)
    lat = torch.linspace(-1, 1, GRID["lat"], dtype=torch.float64)[:, None, None]
    lon = torch.arange(GRID["lon"], dtype=torch.float64)[:, None] * 6.2832 / GRID["lon"]
    now = torch.cos(2 * lon + phase) * (1 - lat**2)
    return now, now.roll(2, dims=2)


torch.manual_seed(0)
ends = nn.ModuleDict({"enter": nn.Linear(1, 32), "leave": nn.Linear(32, 1)}).double()


def forecast(layout):
    model = copy.deepcopy(ends)  # the same on every rank
    model["trunk"] = trunk = weft.compose(spec, layout, dtype=torch.float64)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(12):
        now, then = (layout.shard(t, AXES) for t in waves(step))
        guess = now + model["leave"](trunk(model["enter"](now), lengths=GRID))
        loss = layout.mean((guess - then).square().sum(), then.numel())
        optimizer.zero_grad()
        loss.backward()
        layout.sync_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


alone = forecast(weft.Layout.single())
split = weft.on_threads(weft.Layout.load("weather-halo-2x2"), forecast)
for losses in split:
    assert max(abs(a - b) for a, b in zip(losses, alone)) < 1e-10
assert alone[-1] < alone[0] / 2
print("losses of one device, and of each of four ranks:", [round(x, 4) for x in alone])

# %% [markdown]
# `weft explain model weather_windows weather-halo-2x2` counts what its blocks send, and
# `weft check weather-halo-2x2 --mask boxes:3:6:1:3:0:1 --length lat=13,lon=18` runs the attention
# of a shifted block beside softmax.
#
# [What moves, and when](05_what_moves.ipynb) counts messages of attention; strips of windows are
# counted in the same way. [Your own model](07_your_model.ipynb) splits a sequence, not a grid.

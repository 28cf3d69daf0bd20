"""Unmodified models on fields, beside one device: errors and bytes, by model and grid.

    python -m benchmarks.fields                     all models on all grids, as a table
    python -m benchmarks.fields autoencoder_kl 2x2 1x5

Weights and inputs are random and fp64, casts to fp32 within models are left out. Errors are
relative to the largest entry; those of parameters' gradients to 1e-6 of the largest gradient at
least, as some are zero in exact numbers (a bias before a norm). Needs diffusers and transformers.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import weft
from weft.layout import Layout

GRIDS = ("2x2", "3x1", "1x5")


@dataclass(frozen=True)
class Case:
    """A model and how it is called.

    Attributes:
        make: makes the model.
        shape: of its input, height and width last unless `dims` says otherwise.
        call: (model, input) -> output.
        dims: axis -> dim.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Callable[[nn.Module, Tensor], Tensor]
    dims: dict[str, int] | None = None


def diffusers(name: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module("diffusers"), name)(**config)


def transformers(name: str, sdpa: bool = False, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        made = getattr(library, f"{name}Config")(**config)
        made._attn_implementation = "sdpa" if sdpa else "eager"
        kind = f"{name}Model" if hasattr(library, f"{name}Model") else name
        return getattr(library, kind)(made)

    return make


def both_ways(model: nn.Module, x: Tensor) -> Tensor:
    """An image through the encoder and the decoder."""
    z = model.encode(x)
    z = z.latent_dist.mode() if hasattr(z, "latent_dist") else getattr(z, "latents", None)
    return model.decode(z).sample


def deep_compression(model: nn.Module, x: Tensor) -> Tensor:
    return model.decode(model.encode(x).latent).sample


def hidden(model: nn.Module, x: Tensor) -> Tensor:
    return model(pixel_values=x)[0]


def _text(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, 40, dtype=x.dtype).view(1, 5, 8)


_KL = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
_SWIN = {
    "image_size": (44, 40),
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "drop_path_rate": 0.0,
    "hidden_dropout_prob": 0.0,
}
_LTX = {
    "latent_channels": 8,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 8, 8, 8),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "patch_size": 1,
    "patch_size_t": 1,
}
_DC = {
    "in_channels": 3,
    "latent_channels": 4,
    "attention_head_dim": 4,
    "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
    "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "encoder_layers_per_block": (1, 1),
    "decoder_layers_per_block": (1, 1),
    "encoder_qkv_multiscales": ((), (5,)),
    "decoder_qkv_multiscales": ((), (5,)),
    "upsample_block_type": "interpolate",
    "downsample_block_type": "conv",
}
_UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
_HUNYUAN = {
    "block_out_channels": (8, 8),
    "down_block_types": ("HunyuanVideoDownBlock3D",) * 2,
    "up_block_types": ("HunyuanVideoUpBlock3D",) * 2,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "spatial_compression_ratio": 2,
    "temporal_compression_ratio": 4,
}
_SEGFORMER = {
    "hidden_sizes": [8, 8],
    "depths": [1, 1],
    "num_encoder_blocks": 2,
    "num_attention_heads": [1, 2],
    "sr_ratios": [2, 1],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
    "drop_path_rate": 0.0,
}
_HIERA = {
    "image_size": [32, 32],
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "query_stride": [2, 2],
    "num_query_pool": 1,
    "masked_unit_size": [4, 4],
    "embed_dim_multiplier": 2.0,
    "patch_size": [7, 7],
    "patch_stride": [4, 4],
    "patch_padding": [3, 3],
}

CASES: dict[str, Case] = {
    "autoencoder_kl": Case(diffusers("AutoencoderKL", **_KL), (1, 3, 26, 22), both_ways),
    "autoencoder_tiny": Case(
        diffusers(
            "AutoencoderTiny",
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        (1, 3, 38, 22),
        both_ways,
    ),
    "autoencoder_dc": Case(diffusers("AutoencoderDC", **_DC), (1, 3, 26, 22), deep_compression),
    "wan": Case(
        diffusers(
            "AutoencoderKLWan",
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            attn_scales=[],
            temperal_downsample=[False, True],
        ),
        (1, 3, 5, 24, 20),
        both_ways,
    ),
    "cogvideox": Case(
        diffusers(
            "AutoencoderKLCogVideoX",
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        (1, 3, 5, 24, 40),
        both_ways,
    ),
    "hunyuan": Case(
        diffusers("AutoencoderKLHunyuanVideo", **_HUNYUAN), (1, 3, 5, 14, 10), both_ways
    ),
    "ltx": Case(diffusers("AutoencoderKLLTXVideo", **_LTX), (1, 3, 9, 32, 40), both_ways),
    "qwen_image": Case(
        diffusers(
            "AutoencoderKLQwenImage",
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        (1, 3, 1, 26, 22),
        both_ways,
    ),
    "svd": Case(
        diffusers(
            "AutoencoderKLTemporalDecoder",
            block_out_channels=(32, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            layers_per_block=1,
        ),
        (3, 3, 14, 22),
        lambda m, x: m.decode(m.encode(x).latent_dist.mode(), num_frames=3).sample,
    ),
    "unet": Case(
        diffusers("UNet2DConditionModel", **_UNET),
        (1, 4, 22, 14),
        lambda m, x: m(x, torch.tensor(3), _text(x)).sample,
    ),
    "controlnet": Case(
        diffusers(
            "ControlNetModel",
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            layers_per_block=1,
            cross_attention_dim=8,
            attention_head_dim=4,
            norm_num_groups=4,
            conditioning_embedding_out_channels=(4, 4),
        ),
        (1, 4, 22, 14),
        lambda m, x: (
            m(
                x,
                torch.tensor(3),
                _text(x),
                controlnet_cond=torch.linspace(-1, 1, 3 * 44 * 28, dtype=x.dtype).view(
                    1, 3, 44, 28
                ),
            ).mid_block_res_sample
        ),
    ),
    "swin": Case(transformers("Swin", **_SWIN), (1, 3, 44, 40), hidden),
    "swin_v2": Case(transformers("Swinv2", **_SWIN), (1, 3, 44, 40), hidden),
    "swin_backbone": Case(
        lambda: _swin_backbone(),
        (1, 3, 47, 41),
        lambda m, x: m(x).feature_maps[-1],
    ),
    "convnext": Case(
        transformers("ConvNext", hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], patch_size=2),
        (1, 3, 46, 38),
        hidden,
    ),
    "resnet": Case(
        transformers(
            "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        ),
        (1, 3, 37, 29),
        hidden,
    ),
    "segformer": Case(transformers("Segformer", sdpa=True, **_SEGFORMER), (1, 3, 46, 38), hidden),
    "hiera": Case(transformers("Hiera", **_HIERA), (1, 3, 32, 32), hidden),
    "poolformer": Case(
        transformers(
            "PoolFormer",
            hidden_sizes=[8, 8, 8, 8],
            depths=[1, 1, 1, 1],
            patch_sizes=[3, 3, 3, 3],
            strides=[2, 2, 2, 2],
            padding=[1, 1, 1, 1],
            drop_path_rate=0.0,
        ),
        (1, 3, 37, 41),
        hidden,
    ),
    "focalnet": Case(
        transformers(
            "FocalNet",
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[1, 1],
            hidden_sizes=[8, 8],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
            drop_path_rate=0.0,
        ),
        (1, 3, 32, 32),
        hidden,
    ),
    "whisper": Case(lambda: _whisper(), (2, 5, 30), lambda m, x: m(x)[0], {"height": 2}),
    "wav2vec2": Case(lambda: _wav2vec2(), (2, 403), lambda m, x: m(x)[0], {"height": 1}),
}


def _swin_backbone() -> nn.Module:
    from transformers import SwinBackbone, SwinConfig

    config = SwinConfig(**_SWIN, out_features=["stage1", "stage2"])
    config._attn_implementation = "eager"
    return SwinBackbone(config)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=8,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=16,
        num_mel_bins=5,
        max_source_positions=15,
        dropout=0.0,
    )
    config._attn_implementation = "sdpa"
    return WhisperEncoder(config)


def _wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    kinds = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
    none = dict.fromkeys((*kinds, "layerdrop"), 0.0)
    config = Wav2Vec2Config(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(4, 4, 4),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 2),
        num_conv_pos_embeddings=6,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        apply_spec_augment=False,
        **none,
    )
    config._attn_implementation = "sdpa"
    model = Wav2Vec2Model(config)
    model.feature_extractor._requires_grad = False  # it sets requires_grad of its input
    return model


def seeded(model: nn.Module) -> nn.Module:
    """Random weights in fp64, of a size that leaves activations alive; no dropout."""
    make = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=make)
            scale = (0.5 / max(1, p[0].numel())) ** 0.5 if p.dim() > 1 else 0.1
            p.copy_(noise * scale + (1.0 if p.dim() <= 1 else 0.0))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().train()


class InDouble(TorchFunctionMode):
    """Models' own casts to fp32 stay in fp64, so that errors are those of the split alone."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        wide = lambda v: torch.float64 if v is torch.float32 else v  # noqa: E731
        if func is Tensor.float:
            func = Tensor.double if args[0].is_floating_point() else func
        if func is Tensor.to:
            args = tuple(map(wide, args))
        return func(*args, **{n: wide(v) for n, v in (kwargs or {}).items()})


@dataclass(frozen=True)
class Result:
    """Errors of a model on a grid, and the bytes that the busiest rank receives forward."""

    output: float
    d_input: float
    d_parameters: float
    buffers: float
    received: int


def layout_of(grid: str, case: Case) -> Layout:
    """The layout of a grid such as "2x2"."""
    rows, columns = map(int, grid.split("x"))
    if case.dims is not None and "width" not in case.dims:
        return Layout.parse(f"height: gather={rows * columns}")
    sizes = {"height": rows, "width": columns}
    terms = (f"{a}: gather={n}" if n > 1 else f"{a}: local" for a, n in sizes.items())
    return Layout.parse("; ".join(terms))


def measure(name: str, grid: str) -> Result:
    """A model of `CASES` on a grid, beside one device."""
    case = CASES[name]
    layout = layout_of(grid, case)
    torch.manual_seed(0)
    with InDouble():
        model = seeded(case.make())
        x = torch.randn(case.shape, dtype=torch.float64)
        base, whole = copy.deepcopy(model), x.clone().requires_grad_()
        y = case.call(base, whole)
        w = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
        (y * w).sum().backward()

        def rank(layout: Layout) -> tuple:
            own, local = copy.deepcopy(model), x.clone().requires_grad_()
            options = {} if case.dims is None else {"dims": case.dims}
            weft.parallelize(own, layout, **options)
            with InDouble(), weft.traffic(layout) as moved:
                out = case.call(own, local)
            (out * w).sum().backward()
            gradients = {n: p.grad for n, p in own.named_parameters()}
            received = sum(n for (_, kind), n in moved.received.items() if kind != "gather")
            return out.detach(), local.grad, gradients, dict(own.named_buffers()), received

        ranks = weft.on_threads(layout, rank, timeout=300)
    known = {n: p.grad for n, p in base.named_parameters() if p.grad is not None}
    top, worst = max(float(g.abs().max()) for g in known.values()), 0.0
    for key, gradient in known.items():
        total = sum(r[2][key] for r in ranks if r[2][key] is not None)
        scale = gradient.abs().max().clamp(min=1e-6 * top)
        worst = max(worst, float((total - gradient).abs().max() / scale))
    buffers = (
        float((ranks[0][3][n] - b).abs().max())
        for n, b in base.named_buffers()
        if b.is_floating_point() and b.numel()
    )
    relative = lambda a, b: float((a - b).abs().max() / b.abs().max())  # noqa: E731
    return Result(
        relative(ranks[0][0], y.detach()),
        relative(ranks[-1][1], whole.grad),
        worst,
        max(buffers, default=0.0),
        max(r[4] for r in ranks),
    )


def main(arguments: list[str]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    names = [a for a in arguments if a in CASES] or list(CASES)
    grids = [a for a in arguments if a not in CASES] or list(GRIDS)
    print("| model | grid | output | d input | d parameters | buffers | received |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in names:
        for grid in grids:
            try:
                r = measure(name, grid)
            except Exception as error:
                print(
                    f"| {name} | {grid} | {type(error).__name__}: {str(error)[:300]} |", flush=True
                )
                continue
            errors = (r.output, r.d_input, r.d_parameters, r.buffers)
            numbers = " | ".join(f"{e:.1e}" for e in errors)
            print(f"| {name} | {grid} | {numbers} | {r.received / 1e3:.1f} kB |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

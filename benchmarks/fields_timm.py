"""timm's models on fields, unmodified, beside one device: exact, refused by name, or wrong.

    python -m benchmarks.fields_timm               all of `NAMES` on 2x2 and 3x1 ranks, as a table
    python -m benchmarks.fields_timm resnet18

Random weights in fp64 and images of 64 x 64, or of the size that a model takes. Needs timm.
"""

from __future__ import annotations

import collections
import sys
import warnings
from typing import Any

import timm
import torch
from torch import nn

from benchmarks.fields import CASES, Case, measure
from weft import UnsupportedError

#: The smallest model of each family, and the size of its images.
NAMES = dict.fromkeys(
    [
        "resnet10t",
        "resnet14t",
        "resnetv2_50",
        "resnext50_32x4d",
        "seresnet18",
        "skresnet18",
        "res2net50_26w_4s",
        "regnetx_002",
        "regnety_002",
        "densenet121",
        "dla34",
        "dpn48b",
        "efficientnet_lite0",
        "mobilenetv2_035",
        "mobilenetv3_small_050",
        "mobilenetv4_conv_small_050",
        "mobileone_s0",
        "ghostnet_050",
        "hardcorenas_a",
        "hrnet_w18_small",
        "lcnet_035",
        "mnasnet_small",
        "nfnet_f0",
        "repvgg_a0",
        "repghostnet_050",
        "selecsls42",
        "tinynet_e",
        "vgg11_bn",
        "vovnet39a",
        "xception41",
        "convnext_atto",
        "convnextv2_atto",
        "convmixer_768_32",
        "edgenext_xx_small",
        "efficientformerv2_s0",
        "fastvit_t8",
        "focalnet_tiny_srf",
        "inception_next_atto",
        "poolformer_s12",
        "pvt_v2_b0",
        "repvit_m0_9",
        "rdnet_tiny",
        "starnet_s1",
        "tiny_vit_5m_224",
        "visformer_tiny",
        "mixer_s32_224",
        "resmlp_12_224",
        "xcit_nano_12_p8_224",
        "vit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        "coat_tiny",
        "levit_128s",
        "gcvit_xxtiny",
    ],
    64,
) | {"inception_v3": 96}
#: Relative errors above are of another function.
EXACT = 1e-7


def made(name: str, size: int) -> nn.Module:
    """A model for images of a size, where it can be made for one."""
    options: dict[str, Any] = {"num_classes": 5, "drop_rate": 0.0}
    try:
        return timm.create_model(name, img_size=size, **options)
    except TypeError:  # of any size
        return timm.create_model(name, **options)


def verdict(name: str, grid: str) -> tuple[str, str]:
    """exact, refused, wrong or error, and what was seen."""
    try:
        found = measure(name, grid)
    except UnsupportedError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    worst = max(found.output, found.d_input, found.d_parameters, found.buffers)
    return ("exact" if worst < EXACT else "wrong"), f"{worst:.1e}"


def main(arguments: list[str]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    print("| model | grid | | |\n| --- | --- | --- | --- |")
    for name in arguments or NAMES:
        size = NAMES.get(name, 64)
        CASES[name] = Case(lambda n=name, s=size: made(n, s), (2, 3, size, size), lambda m, x: m(x))
        for grid in ("2x2", "3x1"):
            kind, note = verdict(name, grid)
            counts[kind] += 1
            print(f"| {name} | {grid} | {kind} | {' '.join(note.split())[:160]} |", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])

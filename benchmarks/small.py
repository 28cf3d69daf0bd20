"""Attention on one device, where nothing moves: `python -m benchmarks.small`.

`weft.attention` on `Layout.single()` against `F.scaled_dot_product_attention`, both passes,
8 heads of 64 in fp32 on one thread. Sides take turns, and the ratio is the median of those of
neighbours in time, which other programs on the machine disturb little. The aim is 1.05 at 256
tokens; at 8 there is nothing but overhead, and `--profile` prints where it goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable

import torch
import torch.nn.functional as F

import weft
from benchmarks.timing import interleaved, ratio


def sides(tokens: int) -> dict[str, Callable[[], None]]:
    """A pass forward and backward of either side."""
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 8, tokens, 64, generator=make).unbind(0)
    leaves, layout = [t.clone().requires_grad_() for t in (q, k, v)], weft.Layout.single()

    def ours() -> None:
        weft.attention(*leaves, layout, "tokens").backward(dout)

    def plain() -> None:
        F.scaled_dot_product_attention(*leaves).backward(dout)

    return {"weft": ours, "sdpa": plain}


def main() -> None:
    """Print a line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in (8, 256, 1024):
        both = sides(tokens)
        seconds = interleaved(both, args.repeats)
        best = {name: min(times) * 1e3 for name, times in seconds.items()}
        print(
            f"{tokens:,} tokens: ratio {ratio(seconds, 'weft', 'sdpa'):.3f}; fastest: weft"
            f" {best['weft']:.3f} ms, sdpa {best['sdpa']:.3f} ms"
        )
        if args.profile and tokens == 8:
            with cProfile.Profile() as profile:
                for _ in range(args.repeats):
                    both["weft"]()
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()

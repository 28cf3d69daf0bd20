"""One rank: the overhead of weft.attention over the kernel that it calls.

    python -m benchmarks.kernel

Forward and backward of `weft.attention` on a layout of one device, against
`F.scaled_dot_product_attention` and against torch's flash kernel called directly, at several
lengths; and the overhead per call at 16 tokens. Sides take turns; numbers are medians.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from benchmarks.common import interleaved, ratio, save

HEADS, HEAD_DIM = 8, 64


def sides(tokens: int, backward: bool) -> dict:
    """name -> one call, all on the same tensors."""
    layout = weft.Layout.single()
    q, k, v, dout = torch.randn(4, 1, HEADS, tokens, HEAD_DIM).unbind(0)
    leaves = [t.clone().requires_grad_(backward) for t in (q, k, v)]

    def step(attend) -> Tensor:
        out = attend(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, dout)
        return out

    return {
        "weft": lambda: step(lambda q, k, v: weft.attention(q, k, v, layout, "tokens")),
        "sdpa": lambda: step(F.scaled_dot_product_attention),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 256, 1024, 4096])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{HEADS} heads, dim {HEAD_DIM}, fp32, {args.threads} threads; medians, sides in turn")
    rows = []
    for tokens in args.tokens:
        for backward in (False, True):
            rows.append(measure(tokens, backward, args.seconds))
            print(line(rows[-1]))
    save("kernel", {"heads": HEADS, "head_dim": HEAD_DIM, "threads": args.threads, "rows": rows})


def measure(tokens: int, backward: bool, budget: float) -> dict:
    """Medians in microseconds, the ratio, and the difference per call."""
    calls = sides(tokens, backward)
    trial = interleaved(calls, 3)
    once = sum(statistics.median(s) for s in trial.values())
    seconds = interleaved(calls, max(5, min(2000, int(budget / once))))
    medians = {name: 1e6 * statistics.median(s) for name, s in seconds.items()}
    return {
        "tokens": tokens,
        "backward": backward,
        "repeats": len(seconds["weft"]),
        "microseconds": medians,
        "ratio": ratio(seconds, "weft", "sdpa"),
        "overhead": medians["weft"] - medians["sdpa"],
    }


def line(row: dict) -> str:
    """One row for a terminal."""
    what = "forward + backward" if row["backward"] else "forward           "
    us = row["microseconds"]
    return (
        f"{row['tokens']:>6} tokens  {what}  weft {us['weft']:>11,.0f} us  "
        f"sdpa {us['sdpa']:>11,.0f} us  ratio {row['ratio']:.3f}  "
        f"overhead {row['overhead']:>8,.0f} us  ({row['repeats']} repeats)"
    )


if __name__ == "__main__":
    main()

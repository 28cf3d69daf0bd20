"""Bytes per layer of latents and of the keys that are made of them: predicted, and counted.

    python -m benchmarks.latents              writes results/latents.md
    python -m benchmarks.latents --ranks 8    prints the rows of so many ranks only

The sizes are those of DeepSeek V3: 128 heads with keys of 128 + 64 and values of 128, which are
made of 512 + 64 numbers per token, in 16 bits. Bytes are those that rank 0 receives in a layer's
attention, forward and backward, without a mask. They are read off the plan; then the call runs,
forward and backward, by one rank of torch's fake process group on tensors without numbers: the code
of real ranks, through to the messages that it hands to torch. What that rank counts must be what
the plan says, byte for byte, or nothing is written.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import weft
from weft import Expansion, Layout
from weft._torch import fake_ranks
from weft.inspect.words import nbytes, show_time
from weft.plan.call import Expanded
from weft.plan.predict import Forecast, forecast_of, plan_for
from weft.plan.problem import Problem
from weft.plan.travel import Travel, choose_travel, of_keys

RESULT = Path(__file__).parent / "results" / "latents.md"
HEADS, NOPE, ROPE, VALUES, LATENT = 128, 128, 64, 128, 512
SIZES = Expanded(HEADS, NOPE + ROPE, VALUES, (LATENT, ROPE), 2 * LATENT * HEADS * (NOPE + VALUES))
DTYPE = torch.bfloat16
#: Layouts, and tokens of a row.
ROWS = (
    ("tokens: ring=8", 131072),
    ("tokens: gather=8", 131072),
    ("tokens: tile=4x2", 131072),
    ("tokens: ulysses=8", 131072),
    ("tokens: ulysses=4 x ring=2", 131072),
    ("tokens: pass_q=8", 131072),
    ("tokens: burst=8", 131072),
    ("tokens: ring=64", 1 << 20),
    ("tokens: ulysses=8 x ring=8", 1 << 20),
    ("tokens: tile=8x8", 1 << 20),
)


class Projection(nn.Module):
    """DeepSeek's `kv_b_proj` and what makes keys and values of it, on tensors without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(LATENT, HEADS * (NOPE + VALUES), False, device="meta", dtype=DTYPE)

    def forward(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        both = self.up(c).squeeze(1).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = both.split([NOPE, VALUES], -1)
        return torch.cat([k, r.expand(-1, HEADS, -1, -1)], -1), v


@dataclass(frozen=True)
class Row:
    """A layout: the two ways, forward and backward, and the choice on a GPU and on a CPU."""

    line: str
    tokens: int
    latents: Forecast
    keys: Forecast
    gpu: Travel
    cpu: Travel


def problem(tokens: int, device: str = "cpu") -> Problem:
    """Attention to latents of a row of tokens."""
    shape = {"heads": HEADS, "kv_heads": 1, "head_dim": NOPE + ROPE, "expanded": SIZES}
    return Problem.of("tokens", tokens, dtype=DTYPE, device=device, **shape)


def predicted(line: str, tokens: int) -> Row:
    """A row, read off plans."""
    layout = Layout.parse(line)
    both = problem(tokens), of_keys(problem(tokens))
    latents, keys = (forecast_of(plan_for(layout, p, 0)) for p in both)
    gpu, cpu = (
        choose_travel(layout, problem(tokens, kind).on(layout, 0)) for kind in ("cuda", "cpu")
    )
    return Row(line, tokens, latents, keys, gpu, cpu)


def counted(line: str, tokens: int, travel: str) -> int:
    """Bytes that rank 0 receives in both passes, as its transport counts them."""
    layout = Layout.parse(line)
    ranks, own = layout.world_size, tokens // layout.world_size

    def make(heads: int, dim: int) -> Tensor:
        return torch.empty((1, heads, own, dim), dtype=DTYPE, device="meta", requires_grad=True)

    q, c, r = make(HEADS, NOPE + ROPE), make(1, LATENT), make(1, ROPE)
    expand = Expansion(Projection(), travel=travel)
    with fake_ranks(0, ranks):
        layout = layout.build("cpu")
        with weft.traffic(layout) as moved:
            out = weft.attention(q, c, r, layout, "tokens", length=tokens, expand=expand)
            out.backward(torch.empty_like(out))
    if not moved.as_predicted:
        raise RuntimeError(f"{line}: predicted, counted {moved.differences()}")
    return moved.bytes


def check(row: Row) -> None:
    """Raise `RuntimeError` where the bytes that a rank counts are not those of the plan."""
    for travel, forecast in (("latents", row.latents), ("keys", row.keys)):
        wanted = forecast.forward.traffic.bytes + forecast.backward.traffic.bytes
        found = counted(row.line, row.tokens, travel)
        if found != wanted:
            raise RuntimeError(f"{row.line}, {travel}: counted {found} bytes, predicted {wanted}")


def of_tensor(forecast: Forecast, backward: bool, names: tuple[str, ...]) -> int:
    """Bytes of some tensors of a pass."""
    traffic = (forecast.forward, forecast.backward)[backward].traffic
    return sum(n for (_, name), n in traffic.received.items() if name in names)


def page(rows: list[Row]) -> str:
    """The table."""
    head = (
        "| layout | tokens | forward: keys | latents | fewer | both passes: keys | latents |"
        " on a GPU | on a CPU |"
    )
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |"]
    for row in rows:
        ways = [
            (f.forward.traffic.bytes, f.forward.traffic.bytes + f.backward.traffic.bytes)
            for f in (row.keys, row.latents)
        ]
        (keys, both_keys), (latents, both) = ways
        chosen = [
            f"{'latents' if t.latents else 'keys'}, {show_time(t.if_latents.seconds)} against"
            f" {show_time(t.if_keys.seconds)}"
            for t in (row.gpu, row.cpu)
        ]
        lines.append(
            f"| `{row.line}` | {row.tokens:,} | {nbytes(keys)} | {nbytes(latents)} |"
            f" {keys / latents:.1f} | {nbytes(both_keys)} | {nbytes(both)} |"
            f" {' | '.join(chosen)} |"
        )
    return "\n".join(lines)


INTRODUCTION = """# Latents in the place of keys

Bytes that rank 0 receives in one attention layer of DeepSeek V3's sizes (128 heads with keys of
192 and values of 128, made of 512 + 64 numbers per token; 16 bits), of all tensors: under Ulysses,
pass-Q and tiles, queries and outputs travel, too. Every number was counted by a rank that ran the
call, forward and backward, on tensors without numbers, and is that of the plan to the byte. The
last columns have what "auto" takes (the latents, if they are fewer bytes and the call at most 5 %
longer), at the rates that are assumed of a GPU (400 TFLOP/s, 50 GB/s) and of a CPU core
(50 GFLOP/s, 1.25 GB/s), and the seconds of both passes by which: those of the plan's clock, not
measured.

"""


def main() -> None:
    """Count and print the rows, and write the page of all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="only layouts of so many ranks, printed")
    asked = parser.parse_args().ranks
    rows = []
    for line, tokens in ROWS:
        if asked is None or Layout.parse(line).world_size == asked:
            rows.append(predicted(line, tokens))
            check(rows[-1])
            print(f"{line}: counted as predicted", flush=True)
    table = page(rows)
    print(table)
    if asked is None:
        RESULT.write_text(f"{INTRODUCTION}{table}\n\n`python -m benchmarks.latents` writes it.\n")


if __name__ == "__main__":
    main()

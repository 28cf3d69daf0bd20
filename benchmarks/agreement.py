"""The cost of agreement on every call: the caller's time, the answer's, and messages.

    python -m benchmarks.agreement                       2, 4, 8 and 16 processes on this machine
    python -m benchmarks.agreement --ranks 2 16 --repeats 500 --write

Sides, in turns within one run: a vote of weft (an all-to-all of digests, which the calling thread
hands to another, with what names the call: its module and line), an asynchronous maximum over all
ranks (a ring of 2 (P - 1) messages), and a
blocking all-gather of one number, which is what a check before every call would be. *begin* is what
the calling thread spends, *answer* the time from beginning until all ranks know, *processor* the
processor time of all threads of a rank meanwhile. Beyond 16 ranks votes go in phases; messages per
rank are counted from the phases themselves.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.comm.control import ControlGroup, phases
from weft.comm.origin import origin

RESULTS = Path(__file__).parent / "results" / "agreement.md"
LIMIT = datetime.timedelta(seconds=60)
FAR = (64, 256, 512, 1024, 4096)


def _vote(control: ControlGroup):
    answer = control.vote(12345, LIMIT, origin().numbers)
    return lambda: answer()


def _maximum(control: ControlGroup):
    ballot = torch.tensor([12345, -12345])
    work = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True)

    def answer() -> bool:
        work.wait()
        return ballot.tolist() == [12345, -12345]

    return answer


def _gather(control: ControlGroup):
    found = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([12345]))
    return lambda: len({t.item() for t in found}) == 1


SIDES = {"vote": _vote, "maximum": _maximum, "all-gather": _gather}


def _rank(rank: int, ranks: int, port: int, repeats: int, out) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=LIMIT)
    control = ControlGroup(range(ranks), LIMIT)
    times = {side: ([], [], []) for side in SIDES}
    for repeat in range(repeats + 20):
        for side, begin in SIDES.items():
            dist.barrier()
            used, start = time.process_time(), time.perf_counter()
            answer = begin(control)
            begun = time.perf_counter()
            assert answer()
            ended = time.perf_counter()
            if repeat >= 20:
                times[side][0].append(1e6 * (begun - start))
                times[side][1].append(1e6 * (ended - start))
                times[side][2].append(1e6 * (time.process_time() - used))
    dist.barrier()
    if rank == 0:
        out.put({s: tuple(map(statistics.median, three)) for s, three in times.items()})
    dist.destroy_process_group()


def measured(ranks: int, repeats: int, port: int) -> dict[str, tuple[float, float, float]]:
    """Medians on rank 0, in microseconds: (begin, answer, processor) of every side."""
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    mp.spawn(_rank, (ranks, port, repeats, out), ranks)
    return out.get()


def messages(ranks: int) -> tuple[int, int]:
    """(phases, messages that a rank sends) of one vote."""
    parts = phases(ranks, 0)
    return len(parts), sum(len(part) - 1 for part in parts)


def report(found: dict[int, dict[str, tuple[float, float, float]]], repeats: int) -> str:
    """The results as Markdown."""
    lines = [
        "# What agreement costs",
        "",
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        "",
        f"`python -m benchmarks.agreement --repeats {repeats} --write`: medians over {repeats}"
        f" calls, rank 0, microseconds; all processes on one machine of {os.cpu_count()} cores,",
        "gloo over loopback, one thread each.",
        "",
        "| ranks | vote: begin | answer | processor | maximum: begin | answer | processor "
        "| all-gather (blocks) |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for ranks, sides in found.items():
        row = [*sides["vote"], *sides["maximum"], sides["all-gather"][1]]
        lines.append(f"| {ranks} | " + " | ".join(f"{x:.0f}" for x in row) + " |")
    lines += [
        "",
        "Messages that one rank sends per vote, of 24 bytes each, and messages one after another",
        "in a maximum or all-gather over a ring of as many ranks:",
        "",
        "| ranks | phases | messages of a vote | in a row | ring, in a row |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for ranks in (*found, *FAR):
        count, sent = messages(ranks)
        lines.append(f"| {ranks} | {count} | {sent} | {count} | {2 * (ranks - 1)} |")
    last = max(found)
    count, _ = messages(4096)
    answer = found[last]["vote"][1]
    lines += [
        "",
        f"At 4,096 ranks a vote is {count} exchanges among 16 ranks, one after another on a thread",
        "of its own, which looks after all but the last every 2 ms or more often: the caller only",
        f"hands it over, and the answer takes about {count} times one exchange: "
        f"{count} x {answer:.0f} us = {count * answer / 1e3:.1f} ms",
        f"by the row of {last} ranks, whose processes share {os.cpu_count()} cores. "
        "Not measured at 4,096.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--port", type=int, default=29650)
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS}")
    args = parser.parse_args()
    found = {}
    for i, ranks in enumerate(args.ranks):
        found[ranks] = measured(ranks, args.repeats, args.port + i)
        shown = ", ".join(f"{s} {b:.0f}/{a:.0f} us" for s, (b, a, _) in found[ranks].items())
        print(f"{ranks} ranks: begin/answer {shown}", flush=True)
    text = report(found, args.repeats)
    print(text)
    if args.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()

"""All ranks of shipped layouts on GPUs that compute nothing, over torch's own ProcessGroupNCCL.

Run by `world` in a process of `gpu.environment`: it imports torch once and forks a rank per GPU.
Each rank writes what it measured to FOLDER/RANK.json; the log of its calls is `null.cpp`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import socket
import subprocess
import sys
import traceback
import warnings
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from weft import ChosenKeys
from weft._uploads import upload
from weft.comm import processes
from weft.errors import WeftError
from weft.kernels import fused
from weft.testing.cases import Case
from weft.testing.check import local_part
from weft_axes.fetching import attend
from weft_axes.fetching.rules import fetches
from weft_models.routing import attention as routing
from weft_models.routing.attention import routed_attention
from weft_models.routing.geometry import is_routed
from weft_models.routing.module import routing_options
from weft_models.routing.router import Router

from .gpu import environment, mark, null

ROOT = Path(__file__).parent.parent.parent
#: Seconds that a run may take; some on an idle machine.
SECONDS = 900
#: Attention calls that are in memory at once, and launches of the rest of a layer, as of a model.
LAYERS, OTHERS = 16, 40


def world(size: int, folder: Path, what: str, names: list[str], *plant: str) -> list[dict]:
    """What every rank measured in a run of some layouts of `size` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    log = {"LOG": str(folder / "log")} if what == "strict" else {}
    env = environment(80, DEVICES=size, **log)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), env.get("PYTHONPATH", "")])
    module = [sys.executable, "-m", "tests.null_cuda.ranks"]
    command = [*module, str(size), str(folder), what, ",".join(names), *plant]
    with (folder / "output").open("w+") as output:
        done = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=SECONDS)
        output.seek(0)
        assert done.returncode == 0, output.read()[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


# -- in the process of the ranks -------------------------------------------------------------------


def main(size: str, folder: str, what: str, names: str, plant: str = "") -> None:
    """Fork a rank per GPU, and wait for them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost"}
    os.environ |= place | {"MASTER_PORT": str(port), "WEFT_TIMEOUT": "120"}
    ranks = [os.fork() or _rank(i, folder, what, names, plant) for i in range(int(size))]
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in ranks))


def _rank(rank: int, folder: str, what: str, names: str, plant: str) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    found, code = {}, 0
    try:
        if what == "strict":
            _note_memory()
            _note_agreements()
        torch.cuda.set_device(rank)
        _choose()
        _plant(plant, rank)
        for name in names.split(","):
            mark(f"layout {name}")
            try:
                found[name] = RUNS[what](name)
            except WeftError as error:
                found[name] = {"refused": str(error)}
            null().null_lag(0)
            (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # groups would wait for a GPU that is behind


def _note_memory() -> None:
    """The log says which memory a tensor has, and when it ends; no stream holds any longer."""
    path = os.environ["LD_PRELOAD"]
    plain = torch.cuda.memory.CUDAPluggableAllocator(path, "null_malloc", "null_free")
    torch.cuda.memory.change_current_allocator(plain)


def _note_agreements() -> None:
    """The log says where the CPU waits for other ranks' CPUs."""
    of = processes.ProcessTransport
    vote, texts = of._vote, of._all_gather_text

    def who(transport: Any, dims: tuple[str, ...]) -> str:
        return ",".join(str(transport.world_ranks[r]) for r in transport.ranks_along(dims))

    def noted_vote(self, dims, digest, names):
        mark(f"vote-begin {who(self, dims)}")
        answer = vote(self, dims, digest, names)

        def wait():
            mark(f"vote-wait {who(self, dims)}")
            return answer()

        return wait

    def noted_texts(self, text, dims):
        if dims:
            mark(f"text {who(self, dims)}")
        return texts(self, text, dims)

    of._vote, of._all_gather_text = noted_vote, noted_texts


def _choose() -> None:
    """Every rank takes one key of 32, or the next block: this GPU's own choices mean nothing."""
    unpacked, choose_keys = attend._unpacked, routing.routes.choose_keys

    def keys(packed, shape):
        wanted = unpacked(packed, shape).fill_(False)
        wanted[..., ::32] = True
        return wanted

    def blocks(shares, eligible, *numbers):
        found = choose_keys(shares, eligible, *numbers)
        following = torch.eye(found.shape[-1], dtype=torch.bool).roll(1, 1)
        return upload(following.expand(found.shape).contiguous(), found.device)

    attend._unpacked, routing.routes.choose_keys = keys, blocks


def _plant(fault: str, rank: int) -> None:
    """A planted fault in how a rank posts its messages."""
    of = processes.ProcessTransport
    post, count = of._post, [0]

    def skipped(self, p2p, receives, sends, tag, works):
        count[0] += 1
        return post(self, p2p, receives, sends if rank != 1 or count[0] != 3 else [], tag, works)

    def halved(self, p2p, receives, sends, tag, works):
        if rank == 1 and p2p.label != "warm-up":
            receives = [(peer, t[: t.numel() // 2]) for peer, t in receives]
        return post(self, p2p, receives, sends, tag, works)

    def one_by_one(self, p2p, receives, sends, tag, works):
        for message in sends:
            post(self, p2p, [], [message], tag, works)
        for message in receives:
            post(self, p2p, [message], [], tag, works)

    faults = {"skip": skipped, "size": halved, "single": one_by_one}
    if fault == "wait":
        of._wait = lambda self, work: None
    elif fault:
        of._post = faults[fault]


# -- a layout's attention --------------------------------------------------------------------------


class Calls:
    """Attention along every axis of a shipped layout, in shapes of this rank."""

    def __init__(self, name: str, tokens: int, heads: int, dim: int) -> None:
        declared = weft.Layout.load(name)
        mesh = {d: 2 if size < 0 else size for d, size in declared.mesh.items()}
        self.layout = weft.Layout.load(name).build("cuda")
        self.cases = []
        for axis in declared.attend or ("tokens",):
            axes = axis.split("+")
            parts = math.prod(mesh[d] for a in axes for d in declared.shard_dims(a)) or 1
            n = tokens * parts
            if len(axes) > 1:  # twice as long as it is high
                side = math.isqrt(n // 2)
                lengths: Any = (side, n // side)
            else:
                lengths = n
            batch, of = 2 * mesh.get("dp", 1), {"heads": heads, "kv_heads": heads // 4, "dim": dim}
            case = Case(name, lengths, batch=batch, axis=axis, dtype=torch.bfloat16, **of)
            options = {"device": "cuda", "dtype": case.dtype}
            mask, router = weft.Full(), None
            if is_routed(self.layout, case.axes):
                width = routing_options(self.layout, case.axes).summary_dim
                sizes = (dim, heads, heads // 4, width)
                router = Router(*sizes, self.layout, **options)
            elif len(axes) == 1:
                mask = weft.Causal()
            shapes = [
                local_part(self.layout, case, torch.empty(case.shapes[x], device="meta"), x).shape
                for x in "qkv"
            ]
            leaves = [
                torch.zeros(b, n, h, d, requires_grad=True, **options) for b, h, n, d in shapes
            ]
            self.cases.append((case, mask, leaves, router))
        self.others = torch.zeros(64, device="cuda")

    def forward(self, layers: int) -> list[Tensor]:
        """The outputs of some layers, each along every axis."""
        outs = []
        for _ in range(layers):
            for _ in range(OTHERS):  # the launches of the rest of a layer
                self.others.add_(1)
            outs += [self._attend(*of) for of in self.cases]
        return outs

    def _attend(
        self, case: Case, mask: weft.Mask, leaves: list[Tensor], router: Router | None
    ) -> Tensor:
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves)  # by token
        given: tuple = q, k, v, self.layout, case.axes, mask
        if router is not None:
            options = routing_options(self.layout, case.axes)
            given = q, k, v, router, self.layout, case.axes, options, mask
            return routed_attention(*given, length=case.length)[0]
        choice = None
        if fetches(self.layout, case.axes):
            chosen = q.new_zeros((q.shape[0], 1, q.shape[2], 64), dtype=torch.int32)
            choice = ChosenKeys(chosen, check=False)  # `_choose` says which come
        return weft.attention(*given, length=case.length, choice=choice)

    def backward(self, outs: list[Tensor]) -> None:
        """The gradients of all of them, the last first."""
        while outs:
            out = outs.pop()
            out.backward(torch.zeros_like(out))
            for _, _, leaves, _ in self.cases:
                for leaf in leaves:
                    leaf.grad = None


def strict(name: str) -> dict:
    """Two steps of one layer, for the log."""
    fused.launcher = lambda name: None  # torch's operations: no compiler is needed
    calls = Calls(name, 1024, 8, 64)
    for step in range(2):
        mark(f"{name}, step {step}, forward")
        outs = calls.forward(1)
        mark(f"{name}, step {step}, backward")
        calls.backward(outs)
    mark("done")
    torch.cuda.synchronize()
    return {}


def measured(name: str) -> dict:
    """Memory at two lags, then launches, kinds of Triton's kernels, and waits of a later step."""
    kinds = _count_kinds()
    calls = Calls(name, 4096, 32, 128)
    row: dict[str, Any] = {}
    for lag in (0, 1000):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        null().null_lag(lag)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            calls.backward(calls.forward(LAYERS))
        stats = torch.cuda.memory_stats()
        row[f"allocated {lag}"] = stats["allocated_bytes.all.peak"]
        row[f"reserved {lag}"] = stats["reserved_bytes.all.peak"]
    before = null().null_launches()
    calls.backward(calls.forward(1))
    own = OTHERS + 1 * len(calls.cases)  # a gradient of zeros for each output
    row["launches"] = null().null_launches() - before - own
    with Waits() as waits:
        calls.backward(calls.forward(1))
    row["waits"] = waits.found
    row["kinds"] = {kernel: len(found) for kernel, found in kinds.items()}
    return row


def documents(name: str) -> dict:
    """Kinds of Triton's kernels in ten steps of packed documents, of random lengths."""
    kinds, draw = _count_kinds(), random.Random(0)
    layout = weft.Layout.load(name).build("cuda")
    for _ in range(10):
        n = draw.randrange(2048, 4096)
        cuts = sorted(draw.sample(range(1, n), 7))
        mask = weft.Documents(tuple(b - a for a, b in pairwise([0, *cuts, n]))) & weft.Causal()
        local = layout.local_length("tokens", n)
        q, k, v = (
            torch.zeros(1, h, local, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for h in (8, 2, 2)
        )
        out = weft.attention(q, k, v, layout, "tokens", mask, length=n)
        out.backward(torch.zeros_like(out))
    return {"waits": [], "kinds": {kernel: len(found) for kernel, found in kinds.items()}}


def llama(name: str) -> dict:
    """Waits of the third training step of a parallelized Llama, `sync_gradients` included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fused.launcher = lambda name: None
    layout = weft.Layout.load(name).build("cuda")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).cuda()
    weft.parallelize(model, layout)
    ids = torch.randint(0, 100, (1, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    waits = Waits()
    for step in range(3):
        with waits if step == 2 else contextlib.nullcontext():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            layout.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return {"waits": waits.found, "kinds": {}}


class Waits:
    """Where the CPU waits for the GPU inside the block, by torch's own sync debug mode."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> Waits:
        self._shown = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = self._show
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._shown

    def _show(self, message: Any, *_: object, **__: object) -> None:
        if "called a synchronizing" not in str(message):
            return
        stack = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
        last = [f for f in stack if not f.filename.endswith("/warnings.py")][-1]
        self.found.append(f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno} {last.line}")


def _count_kinds() -> dict[str, set[str]]:
    """By kernel the kinds that Triton would compile; its launches are counted, not compiled."""
    from triton.runtime import jit

    kinds: dict[str, set[str]] = defaultdict(set)

    def run(self, *args, grid, warmup, **options):
        options |= {"debug": False, "instrumentation_mode": None}
        *_, binder = self.device_caches[torch.cuda.current_device()]
        _, specialization, _ = binder(*args, **options)
        compiled = {key: value for key, value in options.items() if key not in self.arg_names}
        kinds[self.fn.__name__].add(f"{specialization} {compiled}")
        name = f"triton:{self.fn.__name__}".encode()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        null().null_launch(name, grid[0], 1, 1, 128, ctypes.c_size_t(0), stream)

    jit.JITFunction.run = run
    return kinds


RUNS = {"strict": strict, "measured": measured, "documents": documents, "llama": llama}

if __name__ == "__main__":
    main(*sys.argv[1:])

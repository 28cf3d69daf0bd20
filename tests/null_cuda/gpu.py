"""A GPU that computes nothing, built from `null.cpp`, for programs that run apart.

torch's CUDA build and a compiler are all it takes; `missing` says which is not there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
#: torch's libraries that ask for CUDA's functions.
_ASKING = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")


@functools.cache
def missing() -> str:
    """What the GPU that computes nothing lacks here; "" if it can be built."""
    if torch.version.cuda is None:
        return "torch's CUDA build"
    lacking = [tool for tool in ("g++", "gcc", "nm") if shutil.which(tool) is None]
    return " and ".join(lacking)


def environment(capability: int = 90, **settings: str | int) -> dict[str, str]:
    """The variables of a process on this GPU; built once for a version of torch and of the source.

    `settings` are those of `null.cpp`, without their prefix.
    """
    source = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.cpp")))
    digest = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"weft-null-cuda-{os.getuid()}-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            _build(Path(made))
            shutil.copytree(made, folder, dirs_exist_ok=True)
    given = {"CAPABILITY": capability, **settings}
    return os.environ | {
        "LD_PRELOAD": str(folder / "libnull.so"),
        "LD_LIBRARY_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
        **{f"NULL_CUDA_{name}": str(value) for name, value in given.items()},
    }


def null() -> ctypes.CDLL:
    """The library, in a process that runs on this GPU."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def mark(text: str) -> None:
    """A line in the log."""
    null().null_mark(text.encode())


def _build(folder: Path) -> None:
    site = Path(torch.__file__).parent.parent
    lib = site / "torch" / "lib"
    wanted: set[str] = set()
    for name in _ASKING:
        wanted |= _symbols(lib / name, "--dynamic", "--undefined-only")
    cuda = {s for s in wanted if re.match(r"cuda[A-Z]|__cuda|cublas|nccl", s)}
    nvidia = site / "nvidia" / f"cu{torch.version.cuda.split('.')[0]}" / "include"
    triton = site / "triton" / "backends" / "nvidia"
    headers = [f"-I{nvidia}", f"-I{triton / 'include'}"]
    common = ["-O1", "-w", "-fPIC", "-std=c++20", *headers]
    _linked(folder, "libnull.so", [*common, str(HERE / "null.cpp")], cuda)
    # `libcuda.so.1` is asked for by name: by NVRTC's library and by Triton's driver.
    asked = set(re.findall(r"\b(cu[A-Z]\w+)\(", (triton / "driver.c").read_text()))
    asked |= {s for s in _symbols(lib / "libcaffe2_nvrtc.so", "--dynamic", "--undefined-only")
              if re.match("cu[A-Z]", s)}  # fmt: skip
    named = [*common, "-Wl,-soname,libcuda.so.1", str(HERE / "driver.cpp")]
    _linked(folder, "libcuda.so.1", named, asked)


def _linked(folder: Path, name: str, source: list[str], wanted: set[str]) -> None:
    """A library of a source, and of functions that do nothing for what else is wanted."""
    made, rest = folder / f"{name}.o", folder / f"{name}.c"
    options = [option for option in source[:-1] if not option.startswith("-Wl")]
    _run("g++", *options, "-c", source[-1], "-o", str(made))
    lacking = sorted(wanted - _symbols(made, "--defined-only"))
    rest.write_text("".join(f"long {symbol}(void) {{ return 0; }}\n" for symbol in lacking))
    _run("gcc", "-O1", "-w", "-fno-builtin", "-fPIC", "-c", str(rest), "-o", f"{rest}.o")
    links = [option for option in source if option.startswith("-Wl")]
    _run("g++", "-shared", *links, str(made), f"{rest}.o", "-o", str(folder / name))


def _symbols(library: Path, *options: str) -> set[str]:
    listed = _run("nm", *options, str(library)).split("\n")
    return {line.split()[-1].split("@")[0] for line in listed if line.strip()}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout

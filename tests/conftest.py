"""Shared by all tests: one thread per rank, and a pool of real processes started on first use."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from few import beyond
from one_core import keep_ranks_together
from pool import Pool

import weft

# Files of tests, which stand in folders as those of the packages, may take names from each other.
sys.path.extend(str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir())
torch.set_num_threads(1)
keep_ranks_together()
# Modules and tests are no garbage: to look through them again and again is a tenth of the time.
gc.set_threshold(20_000, 20, 20)


#: Files whose tests wait for processes of their own: they begin first, the many short ones fill up.
LONG = (
    "test_kills",
    "test_tutorials",
    "test_readme",
    "test_launch",
    "test_train",
    "test_rates",
    "test_two_nodes",
    "test_clusters",
    "test_processes",
    "test_gpu_benchmark",
    "test_torch",
    "test_wheel",
    "test_cli",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Whoever asks for the pool runs first: one worker begins there, and it can end early.

    Tests that need a GPU are not there without one: a skip in every run would say nothing. Those
    that are slow are there for `-m slow`, a sample of them for `-m sample`, and whoever names a
    test gets it.
    """
    for item in items:
        if item.get_closest_marker("sample"):
            item.add_marker("slow")
    for item in beyond(items):
        item.add_marker("slow")
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda i: ("pool" not in i.fixturenames, places.get(i.path.stem, len(LONG))))
    absent = [] if torch.cuda.is_available() else ["gpu"]
    named = any("::" in argument for argument in config.args)
    absent += [] if named or re.search("slow|sample", config.option.markexpr) else ["slow"]
    out = [item for item in items if any(map(item.get_closest_marker, absent))]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_collection_finish():
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Every file begins with fresh ranks: a fork of what is imported already.

    gloo wakes a thread per process group and rank 100 times a second, and soon there are hundreds.
    """
    last = nextitem is None or "pool" not in nextitem.fixturenames or nextitem.path != item.path
    if last and "pool" in item.funcargs:
        item.funcargs["pool"].stop()


@pytest.fixture(autouse=True)
def planned_anew(request):
    """Whoever patches weft meets no plan from before, and leaves none behind."""
    patches = "monkeypatch" in request.fixturenames
    if patches:
        weft.clear_caches()
    yield
    if patches:
        weft.clear_caches()


@pytest.fixture(scope="session")
def pool():
    """Four real gloo processes, kept from the first test of a file that uses them to the last."""
    with Pool(4) as processes:
        yield processes


@pytest.fixture(scope="session")
def apart():
    """Calls a function in another process, where a fake process group may come and go."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        yield lambda fn, *args: other.submit(fn, *args).result(timeout=240)


@pytest.fixture(scope="session")
def triton():
    """Triton, which the test extra brings; where it should be there and is not, tests fail."""
    if importlib.util.find_spec("triton") is None:
        text = "TRITON IS NOT INSTALLED, a fused kernel went UNTESTED: pip install triton"
        if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
            pytest.fail(text)
        pytest.skip(text)
    return importlib.import_module("triton")

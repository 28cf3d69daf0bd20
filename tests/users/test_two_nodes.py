"""Two nodes: network namespaces of one machine, a cable between them, torchrun on each.

Needs root and iproute2. Where they are missing, the tests of the launch say so and do not run; the
tests of `inside_node` run everywhere.
"""

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from weft.comm.world import node
from weft.errors import DeclarationError
from weft.layout import Layout

HIERARCHICAL = {
    "mesh": {"inter": 2, "intra": 2},
    "shard": {"tokens": ["inter", "intra"]},
    "attend": {
        "tokens": [{"strategy": "hierarchical", "on": {"inter": "inter", "intra": "intra"}}]
    },
}


def _why_not() -> str:
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "iproute2 (the command ip) is not installed"
    tried = subprocess.run(
        ["ip", "netns", "add", name := f"weft-{uuid.uuid4().hex[:6]}"],
        capture_output=True,
        text=True,
    )
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"ip netns add failed: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = _why_not()
needs_nodes = pytest.mark.skipif(
    bool(WHY_NOT), reason=f"NOT RUN: no second node to launch on: {WHY_NOT}"
)

RANK = """
import torch
import weft
from weft.errors import DeclarationError

try:
    weft.Layout.load("inter.toml").build("cpu", timeout=60)
except DeclarationError as error:
    print(f"REFUSED {error}", flush=True)
layout = weft.Layout.load("intra.toml").build("cpu", timeout=60)
generator = torch.Generator().manual_seed(0)
whole = [torch.randn(2, 4, 26, 8, dtype=torch.float64, generator=generator) for _ in range(4)]
want = [t.clone().requires_grad_() for t in whole[:3]]
reference = torch.nn.functional.scaled_dot_product_attention(*want, is_causal=True)
reference.backward(whole[3])
q, k, v = (layout.shard(t, {"tokens": 2}).requires_grad_() for t in whole[:3])
with weft.traffic(layout) as moved:
    out = weft.attention(q, k, v, layout, "tokens", weft.Causal(), length=26)
    out.backward(layout.shard(whole[3], {"tokens": 2}))
pairs = [(out, reference), *((a.grad, b.grad) for a, b in zip((q, k, v), want))]
error = max((layout.gather(a, {"tokens": 2}) - b).abs().max().item() for a, b in pairs)
inter = moved.by_mesh_dim().get("inter", 0)
print(f"RESULT {layout.rank} {error} {inter}", flush=True)
"""


@pytest.fixture
def two_nodes():
    """Names and addresses of two namespaces joined by a virtual cable."""
    tag = uuid.uuid4().hex[:6]
    names = [f"weft-{tag}-{i}" for i in range(2)]
    cables = [f"wf{tag}{i}" for i in range(2)]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for i, (name, cable) in enumerate(zip(names, cables)):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(names[i], cables[i], f"10.77.0.{i + 1}") for i in range(2)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _received(name, cable):
    path = f"/sys/class/net/{cable}/statistics/rx_bytes"
    text = subprocess.run(
        ["ip", "netns", "exec", name, "cat", path], check=True, capture_output=True, text=True
    )
    return int(text.stdout)


def _launch(nodes, folder: Path) -> str:
    """torchrun on both nodes, two ranks each, rendezvous on the first; all output.

    Ranks and launchers share pipes, so a line need not begin where a rank began to write.
    """
    (folder / "rank.py").write_text(RANK)
    processes = []
    for i, (name, cable, address) in enumerate(nodes):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--nproc-per-node", "2", "--local-addr", address]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0][2]}:29417"]
        # Both namespaces have one host name, by which torchrun would look for the first node.
        command += ["--rdzv-conf", f"is_host={int(i == 0)},join_timeout=60"]
        command += ["--rdzv-id", folder.name, "rank.py"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": cable, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    output = []
    try:
        for process in processes:
            output.append(process.communicate(timeout=90)[0])
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    assert [p.returncode for p in processes] == [0, 0], "\n".join(output)
    return "".join(output)


@needs_nodes
@pytest.mark.sample
def test_two_nodes_are_exact_and_refuse_broken_layouts(two_nodes, tmp_path):
    for inside in ("inter", "intra"):
        text = Layout.from_dict(HIERARCHICAL | {"inside_node": [inside]}).to_toml()
        (tmp_path / f"{inside}.toml").write_text(text)
    before = [_received(name, cable) for name, cable, _ in two_nodes]
    output = _launch(two_nodes, tmp_path)
    over_cable = [_received(name, cable) - was for (name, cable, _), was in zip(two_nodes, before)]
    refusal = "REFUSED inter.toml: inside_node lists mesh dim 'inter', but ranks [0, 2]"
    assert output.count(refusal) == 4, output
    results = re.findall(r"RESULT (\d+) (\S+) (\d+)", output)
    assert sorted(int(rank) for rank, _, _ in results) == [0, 1, 2, 3]
    assert all(float(error) < 1e-12 for _, error, _ in results)
    counted = sum(int(inter) for _, _, inter in results)
    assert 0 < counted <= sum(over_cable)  # what weft counted between nodes came over the cable


# -- without a second node ------------------------------------------------------------------------


def _build(rank, inside, per_node, mesh):
    names = {"GROUP_RANK": str(rank // per_node)}
    os.environ.update(names)
    try:
        data = HIERARCHICAL | {"inside_node": inside, "mesh": mesh}
        Layout.from_dict(data).build("cpu", timeout=30)
    except DeclarationError as error:
        return str(error)
    finally:
        del os.environ["GROUP_RANK"]
    return ""


FITS = [
    (["intra"], 2, {"inter": 2, "intra": 2}),
    (["intra"], 2, {"inter": -1, "intra": 2}),
    (["intra", "inter"], 4, {"inter": 2, "intra": 2}),
    (["inter"], 1, {"inter": 1, "intra": 4}),
    ([], 1, {"inter": 2, "intra": 2}),
]
BREAKS = [
    (["intra"], 1, {"inter": 2, "intra": 2}, "ranks [0, 1] along it run on node 0, node 1"),
    (["inter"], 2, {"inter": 2, "intra": 2}, "ranks [0, 2] along it run on node 0, node 1"),
    (["intra"], 2, {"inter": 1, "intra": 4}, "start 4 or a multiple of it per node"),
    (["intra", "inter"], 2, {"inter": 2, "intra": 2}, "mesh dim 'inter'"),
]


@pytest.mark.parametrize(("inside", "per_node", "mesh"), FITS)
def test_a_mesh_dim_inside_nodes_is_built(pool, inside, per_node, mesh):
    assert pool.run(_build, inside, per_node, mesh) == [""] * 4


@pytest.mark.parametrize(("inside", "per_node", "mesh", "message"), BREAKS)
def test_mesh_dim_that_spans_nodes_is_refused_on_every_rank(pool, inside, per_node, mesh, message):
    for text in pool.run(_build, inside, per_node, mesh):
        assert message in text


NODES = [
    ({"GROUP_RANK": "3", "RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "node 3"),
    ({"RANK": "7", "LOCAL_WORLD_SIZE": "4"}, "node 1"),
    ({"SLURM_NODEID": "2"}, "node 2"),
]


@pytest.mark.parametrize(("environ", "name"), NODES)
def test_a_node_is_what_the_launcher_says(environ, name):
    assert node(environ) == name
    assert node({}).startswith("host ")


def test_refuses_an_unknown_mesh_dim():
    with pytest.raises(DeclarationError, match="did you mean 'intra'"):
        Layout.from_dict(HIERARCHICAL | {"inside_node": ["inta"]})

"""The files in `cluster/` start what they say, with the layout they carry."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ports import free_job

from weft.layout import Layout

CLUSTER = Path(__file__).parents[2] / "cluster"

# What the SLURM script needs of SLURM: `scontrol show hostnames`, and `srun` on every node, which
# ends all tasks when one fails (--kill-on-bad-exit).
SCONTROL = "#!/bin/bash\nfor n in $(seq $SLURM_NNODES); do echo 127.0.0.1; done\n"
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
pids=()
for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait -n || { kill "${pids[@]}" 2> /dev/null; wait; exit 1; }; done
"""
RANK = """
import os, sys
import torch
import weft
layout = weft.Layout.load(sys.argv[2])
layout = layout.build("cpu", timeout=30)
q = torch.ones(1, 1, 2, 4)
out = weft.attention(q, q, q, layout, "rows")
place = (layout.coords["inter"], layout.coords["intra"], os.environ["GROUP_RANK"])
line = " ".join(map(str, ("RANK", *place, sys.argv[1], round(out.sum().item(), 3))))
os.write(1, f"{line}\\n".encode())  # in one piece: ranks share the pipe
"""


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job of two nodes whose srun starts both on this machine."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_JOB_ID": str(free_job(lambda job: 20000 + job % 12000)),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_PER_NODE": "h100:2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }


def submit(environment, *words):
    return subprocess.run(
        ["bash", str(CLUSTER / "slurm.sh"), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )


def layout_file(folder, intra):
    text = (CLUSTER / "layout.toml").read_text().replace("intra = 8", f"intra = {intra}")
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.sample
def test_the_slurm_script_starts_every_rank_with_the_layout(slurm, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    job = submit(slurm, layout_file(tmp_path, 2), tmp_path / "rank.py", "a b", "LAYOUT")
    assert job.returncode == 0, job.stderr
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("RANK"))
    # Coordinates along inter and intra, the node, the argument with its space, the attention.
    assert lines == [
        f"RANK {inter} {intra} {inter} a b 8.0" for inter in range(2) for intra in range(2)
    ]
    carried = list(tmp_path.glob("layout-*.toml"))
    assert [tomllib.loads(p.read_text())["mesh"] for p in carried] == [{"inter": -1, "intra": 2}]


@pytest.mark.slow
def test_slurm_script_hands_on_refusal_of_layout_that_breaks_node(slurm, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    one_each = slurm | {"SLURM_GPUS_PER_NODE": "h100:1"}
    job = submit(one_each, layout_file(tmp_path, 2), tmp_path / "rank.py", "x", "LAYOUT")
    assert job.returncode != 0
    assert "inside_node lists mesh dim 'intra'" in job.stderr


@pytest.mark.parametrize(
    ("words", "message"), [((), "usage"), (("x",), "usage"), (("no.toml", "x"), "no layout file")]
)
def test_the_slurm_script_refuses_a_job_without_a_layout(slurm, words, message):
    job = submit(slurm, *words)
    assert job.returncode == 2
    assert message in job.stderr


def test_the_slurm_script_meets_at_a_fixed_port(slurm, tmp_path):
    """Its first process says the port that it was told; jobs one after another differ."""
    (tmp_path / "python").write_text(
        '#!/bin/bash\nwhile [ "$1" != --master-port ]; do shift; done\necho "$2"\n'
    )
    (tmp_path / "python").chmod(0o755)
    told = slurm | {"PYTHON": str(tmp_path / "python")}
    jobs = (1, 11999, 12000, 15000, 19999, 71234)
    printed = [
        submit(told | {"SLURM_JOB_ID": str(job)}, layout_file(tmp_path, 2), "rank.py").stdout
        for job in jobs
    ]
    ports = [{int(port) for port in text.split()} for text in printed]
    assert all(len(each) == 1 for each in ports)  # both nodes are told the same
    assert len(set.union(*ports)) == len(jobs)
    assert all(20000 <= port < 32768 for port in set.union(*ports))


def test_the_pytorchjob_fits_the_layout_it_carries():
    yaml = pytest.importorskip("yaml", reason="NOT RUN: pyyaml is not installed")
    config, job = yaml.safe_load_all((CLUSTER / "pytorchjob.yaml").read_text())
    layout = Layout.from_dict(tomllib.loads(config["data"]["layout.toml"]))
    assert layout.declaration == Layout.load(CLUSTER / "layout.toml").declaration
    spec = job["spec"]
    per_node, replicas = int(spec["nprocPerNode"]), spec["pytorchReplicaSpecs"]
    nodes = sum(r["replicas"] for r in replicas.values())
    assert dict(layout.resolve(nodes * per_node).mesh) == {"inter": nodes, "intra": per_node}
    assert layout.inside_node == ("intra",)
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == per_node
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert {v["name"] for v in pod["volumes"]} == mounts.keys()
        assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
        assert container["args"][-1] == f"{mounts['layout']}/layout.toml"

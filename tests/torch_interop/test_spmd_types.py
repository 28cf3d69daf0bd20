"""weft's functions under the checker of `spmd_types`: on a fake process group, nothing runs."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from weft import Layout
from weft.errors import UnsupportedError
from weft.torch_interop import spmd_types

WHOLE, BATCH = {"batch": 0, "tokens": 1}, {"batch": 4, "tokens": 32}


@pytest.fixture
def mesh():
    pytest.importorskip("spmd_types", reason="needs spmd_types: pip install spmd_types")
    importlib.import_module("spmd_types.checker")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "ulysses"))
    dist.destroy_process_group()


def run(mesh: DeviceMesh, local: bool, split: tuple, of_weight: str, of_state: int) -> torch.Tensor:
    """A model of every function, of an input and a weight of some types."""
    import spmd_types as spmd

    groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    lines = ("batch: dp=2; tokens: gather=2 x ulysses=2", "batch: dp=2; tokens: ulysses=2 x ring=2")
    layout = Layout.parse(lines[0]).bind(mesh, rename={"gather": "cp"})
    other = Layout.parse(lines[1]).bind(mesh, rename={"ulysses": "cp", "ring": "ulysses"})
    where = {"layout": layout, "axis": "tokens"}
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck(local=local):
        x = torch.randn(2, 8, 16, device="meta", requires_grad=True)
        names = (tuple(groups[n] for n in entry) or None for entry in split)
        of_x = dict.fromkeys(groups.values(), spmd.V), spmd.PartitionSpec(*names)
        spmd.assert_type(x, of_x[0], partition_spec=of_x[1])
        weight = torch.randn(16, 16, device="meta", requires_grad=True)
        spmd.assert_type(weight, dict.fromkeys(groups.values(), getattr(spmd, of_weight)))
        q = (x @ weight).unflatten(-1, (4, 4)).transpose(1, 2)
        out = (
            spmd_types.typed_attention(q, q, q, layout, "tokens", weft.Causal())
            .transpose(1, 2)
            .flatten(2)
        )
        out = spmd_types.typed_along(weft.scan, out.sigmoid(), out, **where, dim=of_state)
        out = spmd_types.typed_along(
            weft.halo, lambda run: run[:, 1:] + run[:, :-1], out, 1, **where
        )
        out = spmd_types.typed_redistribution(out, layout, other, WHOLE, lengths=BATCH)
        out = spmd_types.typed_on(other, "gather", out, {"tokens": 1})
        y = spmd_types.typed_on(
            layout, "shard", spmd_types.typed_on(other, "enter", out, "tokens"), {"tokens": 1}
        )
        spmd.assert_type(y, of_x[0], partition_spec=of_x[1])
        return y


RIGHT = (("dp",), ("cp", "ulysses"), ())


@pytest.mark.parametrize("local", [True, False])
def test_a_model_passes_the_checker(mesh, local):
    assert run(mesh, local, RIGHT, "R", 1).shape == (2, 8, 16)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (
            ((("cp", "ulysses"), ("dp",), ()), "R", 1),
            "dim 0: tensor has .*, new assert has mesh_dp",
        ),
        (((("dp",), ("ulysses", "cp"), ()), "R", 1), r"tensor has \(mesh_ulysses, mesh_cp\)"),
        ((RIGHT, "P", 1), "P"),
        ((RIGHT, "R", 2), "already shards dim 1, cannot also shard dim 2"),
    ],
    ids=["sequences for tokens", "another order of ranks", "partial weights", "along channels"],
)
def test_wrong_placements_are_caught(mesh, planted, said):
    from spmd_types import SpmdTypeError

    with pytest.raises(SpmdTypeError, match=said):
        run(mesh, False, *planted)


def test_without_the_package_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spmd_types, "spmd", None)
    with pytest.raises(UnsupportedError, match="pip install spmd_types"):
        spmd_types.typed_on(Layout.single(), "enter", torch.zeros(1), "tokens")

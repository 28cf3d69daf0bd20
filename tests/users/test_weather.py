"""The weather model on real ranks: trained on layout after layout as on one, to ten digits."""

import pytest
import torch

import weft
from weft.checkpoint import Checkpoints
from weft_models.train import clip_grad_norm_

#: The step until which each layout trains.
LEGS = {"weather-dp-x-ring": 7, "weather-head-x-tile": 14, "weather-axial-2x2": 20}
AXES = {"batch": 0, "time": 1, "lat": 2, "lon": 3}
LENGTHS = {"time": 5, "lat": 3, "lon": 4}


class Weather(torch.nn.Module):
    """A trunk with an embedding and a head of plain torch."""

    def __init__(self, layout: weft.Layout) -> None:
        super().__init__()
        self.trunk = weft.compose("weather", layout, dtype=torch.float64)
        torch.manual_seed(7)
        self.enter = torch.nn.Linear(2, 32, dtype=torch.float64)
        self.leave = torch.nn.Linear(32, 2, dtype=torch.float64)

    def forward(self, fields: torch.Tensor, stations: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(self.enter(fields), {"forcing": stations}, lengths=LENGTHS)
        return fields + self.leave(hidden)


def _data(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    shapes = [(2, 5, 3, 4, 2), (2, 5, 3, 4, 2), (2, 3, 32)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def _train(layout: weft.Layout, folder: str, until: int) -> list[float]:
    """Losses from the step where the folder's latest checkpoint ends; leaves another."""
    model = weft.data_parallel(Weather(layout), layout, "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    checkpoints, losses = Checkpoints(folder, layout), []
    for step in range(checkpoints.load(model, optimizer).step, until):
        now, then, stations = _data(step)
        now, then = layout.shard(now, AXES), layout.shard(then, AXES)
        guess = model(now, layout.shard(stations, {"batch": 0}))
        loss = layout.mean((guess - then).square().sum(), then.numel())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model, 0.5, layout)
        optimizer.step()
        losses.append(loss.item())
    checkpoints.save(until, model, optimizer)
    return losses


def _on_ranks(rank: int, folder: str) -> list[float]:
    """Losses of steps with FSDP2, every leg on another layout, from the checkpoint before it."""
    losses = []
    for name, until in LEGS.items():
        losses += _train(weft.Layout.load(name).build("cpu", timeout=60), folder, until)
    return losses


@pytest.mark.slow
def test_real_ranks_train_as_one_and_resume_on_other_layouts(pool, tmp_path):
    alone = _train(weft.Layout.single(), str(tmp_path / "alone"), 20)
    for losses in pool.run(_on_ranks, str(tmp_path / "four")):
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-10

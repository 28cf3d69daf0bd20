"""The weather model on real ranks: trained on every layout as on one, to ten digits."""

import pytest
import torch

import weft
from weft.train import clip_grad_norm_

LAYOUTS = ["weather-dp-x-ring", "weather-head-x-tile", "weather-axial-2x2"]
AXES = {"batch": 0, "time": 1, "lat": 2, "lon": 3}
LENGTHS = {"time": 5, "lat": 3, "lon": 4}
STEPS = 20


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


def _train(layout: weft.Layout) -> list[float]:
    model, losses = Weather(layout), []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(STEPS):
        now, then, stations = _data(step)
        now, then = layout.shard(now, AXES), layout.shard(then, AXES)
        guess = model(now, layout.shard(stations, {"batch": 0}))
        loss = layout.mean((guess - then).square().sum(), then.numel())
        optimizer.zero_grad()
        loss.backward()
        layout.sync_gradients(model)
        clip_grad_norm_(model, 0.5, layout)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _on_ranks(rank: int, name: str) -> list[float]:
    layout = weft.Layout.load(name)
    bound = layout.build("cpu", timeout=60)
    return _train(bound if isinstance(bound, weft.Layout) else layout)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return _train(weft.Layout.single())


@pytest.mark.parametrize("name", LAYOUTS)
def test_real_ranks_train_as_one_does(pool, alone, name):
    for losses in pool.run(_on_ranks, name):
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-10

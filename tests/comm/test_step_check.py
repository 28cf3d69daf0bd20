"""`WEFT_CHECK=step`: ten faults planted on one rank of a loop of one's own, ten named."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from ports import free_port
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft import DeclarationError, Layout, ShapeError
from weft.comm import step_check

RANKS, RANK, STEP = 4, 2, 3
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Model(nn.Module):
    """Attention between two projections."""

    def __init__(self, layout, plant):
        super().__init__()
        self.layout, self.plant, self.step = layout, plant, 0
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, here):
        qkv = self.first(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        mask = weft.Full() if here and self.plant == "mask" else weft.Causal()
        out = weft.attention(*qkv, self.layout, "tokens", mask, length=16)
        out = self.last(out.transpose(1, 2).flatten(2))
        if here and self.plant == "nan-backward":
            out.register_hook(lambda grad: grad * float("nan"))
        return out


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Modules are not looked at any more when a test ends."""
    yield
    monkeypatch.delenv("WEFT_CHECK", raising=False)
    step_check.is_on()
    assert not torch.nn.modules.module._global_forward_hooks


def train(layout, plant, steps=5):
    """A user's loop, in which rank 2 is another than all in step 3; the losses."""
    model, losses = Model(layout, plant), []
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1, steps + 1):
        here = step == STEP and layout.rank == RANK
        x = torch.randn(2, 16, 8, generator=generator)
        if here:
            harm(plant, model, x)
        mine = layout.shard(x, {"tokens": 1})
        if here and plant == "length":
            mine = mine[:, 1:]
        if here and plant == "nan":
            mine[0, 0, 0] = float("nan")
        layout.mean(model(mine, here).square().sum(), mine.numel()).backward()
        layout.sync_gradients(model)
        if not (here and plant == "skip"):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(model.last.weight.sum().item())
    return losses


def harm(plant, model, x):
    if plant == "data":
        x[1, 9].add_(1.0)
    elif plant == "weight":
        model.last.weight.data[0, 0] += 1e-3
    elif plant == "raises":
        raise KeyError("a user's own")
    elif plant in SIGNALS:
        os.kill(os.getpid(), SIGNALS[plant])
    elif plant in ("exits", "sleeps"):
        time.sleep(600 if plant == "sleeps" else 0)
        os._exit(3)


#: Nobody names these unless steps are checked, and what is said if they are.
SILENT = {
    "data": r"step 3: tensor 1 given to layout.shard must be the same on every rank, but:\n"
    r"  rank 0, 1, 3: \(2, 16, 8\) float32 split as \{'tokens': 1\}, digest \w+\n  rank 2: ",
    "weight": r"step 3: weight 'last.weight' must be the same .*\n  rank 0, 1, 3: .*\n  rank 2: ",
    "skip": r"step 4: weight 'first.weight' must be .*\n  rank 0, 1, 3: [^;]*; if they did not in",
    "nan": r"step 3, rank 2: the output of module 'first' has the first NaN",
    "nan-backward": r"step 3: on rank 2 the gradient of 'last.bias' has a NaN",
}


@pytest.mark.parametrize("plant", SILENT)
def test_silent_faults_are_named_where_steps_are_checked(plant, monkeypatch):
    layout = Layout.parse(f"tokens: ring={RANKS}")
    monkeypatch.delenv("WEFT_CHECK", raising=False)
    lists = weft.on_threads(layout, train, plant)
    undisturbed = weft.on_threads(layout, train, "")[0]
    assert str(lists) != str([undisturbed] * RANKS)  # nobody said so
    monkeypatch.setenv("WEFT_CHECK", "step")
    assert weft.on_threads(layout, train, "")[0] == undisturbed
    with pytest.raises(ShapeError, match=SILENT[plant]):
        weft.on_threads(layout, train, plant)


def _llama(layout, skips):
    """A model that is given full rows."""
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    for p in model.parameters():
        nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    weft.parallelize(model, layout)
    ids = torch.arange(32).view(2, 16)
    _steps(model, layout, skips, lambda: model(input_ids=ids, labels=ids).loss)


def _composed(layout, skips):
    """A model of weft's own, whose heads may be split."""
    model = weft.compose("causal_lm", layout, seed=0)
    ids = layout.shard(torch.arange(32).view(2, 16), {"tokens": 1})
    _steps(model, layout, skips, lambda: layout.mean(model(ids).square().sum(), ids.numel()))


def _steps(model, layout, skips, loss):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        loss().backward()
        layout.sync_gradients(model)
        if step or not (skips and layout.rank == 1):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("train", "line"), [(_llama, "tokens: ring=2"), (_composed, "tokens: ring=2; heads: tp=2")]
)
def test_models_of_others_and_of_weft_are_checked(train, line, monkeypatch):
    monkeypatch.setenv("WEFT_CHECK", "step")
    layout = Layout.parse(line)
    weft.on_threads(layout, train, False)
    with pytest.raises(ShapeError, match=r"^step 2: weight |weights .* \(rank 1\)"):
        weft.on_threads(layout, train, True)


def test_compiled_modules_are_not_looked_at(monkeypatch):
    monkeypatch.setenv("WEFT_CHECK", "step")
    assert step_check.is_on()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    torch._dynamo.reset()


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("WEFT_CHECK", "steps")
    with pytest.raises(DeclarationError, match="WEFT_CHECK='steps': known is WEFT_CHECK=step"):
        weft.on_threads(Layout.parse("tokens: ring=2"), lambda layout: layout)


#: What the other ranks, processes, say of each; of the last the one that waits in vain.
SAID = {
    **dict.fromkeys(["nan", "length", "raises", "exits", "killed", "stopped", "sleeps"], "rank 2"),
    **{plant: SILENT[plant] for plant in ("data", "weight", "skip")},
    "mask": r"mask Causal\(\) \(rank 0, 1, 3\), Full\(\) \(rank 2\)",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", SAID)
def test_faults_of_processes_are_named_by_all_others(plant, tmp_path):
    env = os.environ | {"WORLD_SIZE": f"{RANKS}", "MASTER_ADDR": "localhost", "WEFT_CHECK": "step"}
    env |= {"MASTER_PORT": f"{free_port()}", "WEFT_BLACKBOX": str(tmp_path), "WEFT_TIMEOUT": "30"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    procs = [
        subprocess.Popen([sys.executable, __file__, plant], stderr=subprocess.PIPE, text=True,
                         env=env | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=150)[1] for i, p in enumerate(procs) if i != RANK]
    finally:
        procs[RANK].kill()
        procs[RANK].wait()
    for text in said:
        assert re.search(SAID[plant], re.sub(r"\[rank\d\]: ", "", text)), text


if __name__ == "__main__":
    train(Layout.parse(f"tokens: ring={RANKS}").build("cpu"), sys.argv[1])

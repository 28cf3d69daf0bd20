"""Compute and link rates of a rank, by which programs are scheduled.

A layout file may say what was measured where it runs (`weft rates` measures it); what it leaves
out is assumed.

    [rates]
    flops = 5e10                     # floating-point operations per second of the attention kernel
    bandwidth = 1.25e9               # bytes per second each way
    latency = 1e-4                   # seconds per message

Where links differ between ranks of a node and those of several, levels take the place of the last
two, as `weft.declare.hardware` has them:

    [rates]
    flops = 4e14
    level = [
        { name = "node", ranks = 8, rate = 4.5e11, latency = 1e-5 },
        { name = "cluster", rate = 5e10, latency = 2e-5 },
    ]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hardware import Hardware

#: What is assumed where nothing was measured: a core that computes 50 GFLOP/s with 10 Gbit/s
#: Ethernet, and a GPU of 400 TFLOP/s with a 400 Gbit/s network card, whose merges reach 2 TB/s and
#: whose launches take 5 us.
DEFAULT_RATES = {
    "cpu": {"flops": 5e10, "bandwidth": 1.25e9, "latency": 1e-4},
    "cuda": {
        **{"flops": 4e14, "bandwidth": 5e10, "latency": 1e-5},
        **{"memory_rate": 2e12, "launch": 5e-6},
    },
}


def rates_for(device: str, measured: Mapping[str, Any] | None = None) -> Hardware:
    """The hardware of a device type, with what was measured in place of what is assumed.

    >>> rates_for("cpu", {"bandwidth": 1e8}).level[0].rate
    100000000.0
    """
    rates = DEFAULT_RATES.get(device, DEFAULT_RATES["cpu"]) | dict(measured or {})
    links = {"name": "links", "rate": rates["bandwidth"], "latency": rates["latency"]}
    level = rates.get("level", [links])
    device_rates = {
        "flops": rates["flops"],
        "speeds": rates.get("speeds") or (),
        "memory_rate": rates.get("memory_rate"),
        "host": {"launch": rates.get("launch") or 0.0},
    }
    return Hardware.from_dict({"device": device_rates, "level": level})


def rates_of(hardware: Hardware) -> dict[str, Any]:
    """The `[rates]` of a layout that is planned for some hardware.

    Of block rates by length it has that of the longest; of merges and launches the prices, where
    both have one.

    >>> rates_of(Hardware.load("ethernet-laptops"))
    {'flops': 50000000000.0, 'level': [{'name': 'network', 'rate': 118000000.0, 'latency': 0.0002}]}
    """
    flops = hardware.device.flops
    longest = flops[max(flops)] if isinstance(flops, dict) else flops
    levels = [level.model_dump(exclude_defaults=True) for level in hardware.level]
    speeds = {"speeds": hardware.device.speeds} if hardware.device.speeds else {}
    prices = {"memory_rate": hardware.device.memory_rate, "launch": hardware.device.host.launch}
    prices = {name: price for name, price in prices.items() if price and prices["launch"]}
    return {"flops": longest, **speeds, **prices, "level": levels}

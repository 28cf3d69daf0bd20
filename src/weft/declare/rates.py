"""What a rank computes and its links carry per second: what programs are planned by.

A layout file may say what was measured where it runs (`weft rates` measures it); what it leaves
out is assumed.

    [rates]
    flops = 5e10                     # floating-point operations per second of the attention kernel
    bandwidth = 1.25e9               # bytes per second each way
    latency = 1e-4                   # seconds per message
    latencies = { node = 1e-3 }      # of mesh dims whose messages take longer, or shorter
    links = { node = 2.5e8 }         # mesh dims that have a link of their own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Rates:
    """What a rank computes and its links carry per second.

    Attributes:
        flops: floating-point operations per second of the attention kernel.
        bandwidth: bytes per second each way, of mesh dims that `links` does not name.
        latency: seconds per message, along mesh dims that `latencies` does not name.
        latencies: seconds per message of mesh dims.
        links: bytes per second of mesh dims; if any is named, every mesh dim has a link of its own
            (such as NVLink inside a node and the network between nodes), and they work side by
            side.
    """

    flops: float
    bandwidth: float
    latency: float = 0.0
    links: Mapping[str, float] = field(default_factory=dict)
    latencies: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, mesh_dim: str, nbytes: float, messages: int = 1) -> float:
        """What messages of this many bytes in all take along a mesh dim, one after another.

        >>> Rates(5e10, 1e9, 1e-4, latencies={"node": 1e-3}).seconds("node", 2e6, 3)
        0.005
        """
        bandwidth = self.links.get(mesh_dim, self.bandwidth)
        return messages * self.latencies.get(mesh_dim, self.latency) + nbytes / bandwidth


#: What is assumed where nothing was measured: a core that computes 50 GFLOP/s beside 10 Gbit/s
#: Ethernet, and a GPU of 400 TFLOP/s beside a 400 Gbit/s network card.
DEFAULT_RATES = {
    "cpu": Rates(flops=5e10, bandwidth=1.25e9, latency=1e-4),
    "cuda": Rates(flops=4e14, bandwidth=5e10, latency=1e-5),
}


def rates_for(device: str, measured: Mapping[str, Any] | None = None) -> Rates:
    """The rates of a device type, with what was measured in place of what is assumed.

    >>> rates_for("cpu", {"bandwidth": 1e8}).bandwidth
    100000000.0
    """
    return replace(DEFAULT_RATES.get(device, DEFAULT_RATES["cpu"]), **(measured or {}))

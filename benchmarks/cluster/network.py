"""N hosts on one machine: network namespaces joined by rate-limited links.

    host 0 ─ eth0 ~ rate ~┐
    host 1 ─ eth0 ~ rate ~┤ node bridge ~ uplink rate ~┐
    host 2 ─ eth0 ~ rate ~┐                            ├ core bridge
    host 3 ─ eth0 ~ rate ~┤ node bridge ~ uplink rate ~┘

Every link is a veth pair with a token bucket (`tc tbf`) at each end, so both directions are
limited. The bridges live in a namespace of their own: nothing is added to the machine's network,
and deleting the namespaces takes every interface with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "weft-bench-"
HUB = PREFIX + "hub"
#: jumbo frames, as data centers use: with small ones the cores are busy with packets
MTU = "9000"
#: a bucket of one large segment, a queue of one second: rates hold from a few segments on
BURST, QUEUE = "64kb", "1s"
#: Sockets queue two packets only, as the byte queue limits of real network cards see to; else
#: acknowledgements wait behind a deep queue of data and a slow link never runs both ways at once.
#: So does what gloo says to another peer before it may send: behind 64 kB, 17 ms at 30 Mbit/s.
SOCKETS = (
    "net.ipv4.tcp_limit_output_bytes=18432",
    "net.ipv4.tcp_wmem=4096 65536 131072",
    "net.ipv4.tcp_slow_start_after_idle=0",
)


class CannotRun(RuntimeError):
    """The machine lacks what the benchmark needs."""


@dataclass(frozen=True)
class Rates:
    """Mbit/s each way: of every host's link, and of every node's uplink (None: not limited)."""

    host: float | None
    uplink: float | None = None


def check() -> None:
    """Raise `CannotRun` with what is missing."""
    if os.name != "posix" or not os.path.exists("/proc/self/ns/net"):
        raise CannotRun("needs Linux with network namespaces")
    if os.geteuid() != 0:
        raise CannotRun("needs root, to make network namespaces and limit links")
    for tool in ("ip", "tc", "sysctl"):
        if shutil.which(tool) is None:
            raise CannotRun(f"needs {tool!r} (packages iproute2 and procps)")


def run(*command: str, check: bool = True) -> str:
    """Run a command; its output, or `CannotRun` with its message."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise CannotRun(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def host_name(host: int) -> str:
    """The namespace of a host."""
    return f"{PREFIX}{host}"


def address(host: int) -> str:
    """The address of a host, in a network that exists in the namespaces only."""
    return f"10.77.{host // 250}.{host % 250 + 1}"


def clean() -> None:
    """Remove every namespace of this benchmark, of this run or of one that was killed."""
    for line in run("ip", "netns", "list", check=False).splitlines():
        name = line.split()[0] if line.split() else ""
        if name.startswith(PREFIX):
            for pid in run("ip", "netns", "pids", name, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "del", name, check=False)


@contextlib.contextmanager
def network(hosts: int, per_node: int | None = None) -> Iterator[Network]:
    """Hosts on a bridge, or on a bridge per node of `per_node` hosts; gone when the block ends.

    SIGINT and SIGTERM end the block like an exception. Only one at a time on a machine: runs of
    two would tear down each other's hosts, and neither's timings would mean anything.
    """
    check()
    with _alone():
        yield from _network(hosts, per_node)


def _network(hosts: int, per_node: int | None) -> Iterator[Network]:
    clean()
    old = {s: signal.signal(s, _raise) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        net = Network(hosts, per_node or hosts)
        net.make()
        yield net
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        clean()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Raise `CannotRun` while another process of this machine has such a network."""
    with open(os.path.join(tempfile.gettempdir(), PREFIX + "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun("another benchmark uses this machine's namespaces; wait") from None
        yield


def _raise(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(f"signal {number}")


@dataclass
class Network:
    """The namespaces of `hosts` hosts, `per_node` of them behind each uplink."""

    hosts: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.hosts // self.per_node)

    def make(self) -> None:
        """Namespaces, bridges and links, without limits."""
        run("ip", "netns", "add", HUB)
        self._hub("link", "set", "lo", "up")
        if self.nodes > 1:
            self._bridge("core")
        for node in range(self.nodes):
            self._bridge(f"node{node}")
            if self.nodes > 1:
                down, up = self._uplink(node)
                self._hub("link", "add", down, "type", "veth", "peer", "name", up)
                for end in (down, up):
                    self._hub("link", "set", end, "mtu", MTU)
                self._plug(down, "core")
                self._plug(up, f"node{node}")
        for host in range(self.hosts):
            self._add_host(host)

    def limit(self, rates: Rates) -> None:
        """Set the rate of every link, both ways."""
        for host in range(self.hosts):
            _limit(host_name(host), "eth0", rates.host)
            _limit(HUB, f"h{host}", rates.host)
        if self.nodes > 1:
            for node in range(self.nodes):
                for end in self._uplink(node):
                    _limit(HUB, end, rates.uplink)

    def _uplink(self, node: int) -> tuple[str, str]:
        return f"down{node}", f"up{node}"

    def _hub(self, *arguments: str) -> None:
        run("ip", "-n", HUB, *arguments)

    def _bridge(self, name: str) -> None:
        self._hub("link", "add", name, "type", "bridge")
        self._hub("link", "set", name, "up")

    def _plug(self, link: str, bridge: str) -> None:
        self._hub("link", "set", link, "master", bridge)
        self._hub("link", "set", link, "up")

    def _add_host(self, host: int) -> None:
        name, port = host_name(host), f"h{host}"
        run("ip", "netns", "add", name)
        self._hub(*("link", "add", port, "type", "veth"), *("peer", "name", "eth0", "netns", name))
        self._hub("link", "set", port, "mtu", MTU)
        self._plug(port, f"node{host // self.per_node}")
        inside = ("ip", "-n", name)
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{address(host)}/16", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "mtu", MTU)
        run(*inside, "link", "set", "eth0", "up")
        for setting in SOCKETS:
            run("ip", "netns", "exec", name, "sysctl", "-qw", setting)


def _limit(namespace: str, device: str, rate: float | None) -> None:
    where = ("tc", "-n", namespace, "qdisc")
    if rate is None:
        run(*where, "del", "dev", device, "root", check=False)
        return
    bucket = ("rate", f"{rate:g}mbit", "burst", BURST, "latency", QUEUE)
    run(*where, "replace", "dev", device, "root", "tbf", *bucket)


def enter(host: int) -> None:
    """Move this process into a host's namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host_name(host)}") as handle:
        if libc.setns(handle.fileno(), 0x40000000):  # CLONE_NEWNET
            raise CannotRun(f"setns: {os.strerror(ctypes.get_errno())}")

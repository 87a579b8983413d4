"""Real separate hosts for tests: network namespaces on a bridge, with links of a given rate; and a harmful proxy.

A host has an address, loopback, and a network of its own; files and processes are this machine's. The bridge lies in a
namespace, too, so hosts reach each other and nothing else, and several tests can run side by side. Needs root.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from helpers.guard import PREFIX, remove_namespaces

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _enter(name: str) -> None:
    """Move the calling thread into a namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    finally:
        os.close(descriptor)


class Host:
    """One of them."""

    def __init__(self, switch: str, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.address = f"10.77.0.{index + 1}"
        self._switch, self._port = switch, f"p{index}"
        self._processes: list[subprocess.Popen[Any]] = []
        _ip("netns", "add", name)
        _ip("link", "add", self._port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", name, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")

    def only_ipv6(self) -> None:
        """Exchange its address for one of IPv6."""
        _ip("-n", self.name, "address", "flush", "dev", "eth0")
        self.address = f"fd77::{self.index + 1}"
        _ip("-n", self.name, "address", "add", f"{self.address}/64", "dev", "eth0", "nodad")

    def limit(self, rate: str | None) -> None:
        """How fast its link is, in each direction; as `tc` writes it: 1gbit, 10mbit, … None: as fast as it goes."""
        for namespace, device in ((self.name, "eth0"), (self._switch, self._port)):
            if rate is None:
                subprocess.run(
                    ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], check=False, capture_output=True
                )
                continue
            # Bytes that may go at once: a few packets of segmentation offload, or about 2 ms of the link.
            burst = max(80_000, int(_bits(rate) / 8 * 0.002))
            shape = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "100ms"]
            subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape], check=True)

    def cable(self, plugged: bool) -> None:
        """Pull its cable, or put it back; the other end does not see a link that is down, as behind a switch."""
        _ip("-n", self.name, "link", "set", "eth0", "up" if plugged else "down")

    def command(self, command: Sequence[str]) -> list[str]:
        """The same, run on this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start something on this host; it is ended with it."""
        process = subprocess.Popen(self.command(command), start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str], seconds: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run something on this host to its end; what it said is in `stdout` and `stderr`."""
        return subprocess.run(
            self.command(command), timeout=seconds, capture_output=True, text=True, check=False, **options
        )

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is on this host: sockets that it makes here stay on it."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _enter(self.name)
        try:
            yield
        finally:
            _LIBC.setns(before, _CLONE_NEWNET)
            os.close(before)

    def enter(self) -> None:
        """Move the calling thread, and what it starts, to this host for good."""
        _enter(self.name)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """So many hosts on one switch, gone with everything that runs on them when this ends."""
    remove_namespaces()
    mark = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
    switch = f"{mark}-switch"
    made: list[Host] = []

    def remove() -> None:
        while made:
            made.pop().close()
        subprocess.run(["ip", "netns", "delete", switch], check=False, capture_output=True)

    atexit.register(remove)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for index in range(count):
            made.append(Host(switch, f"{mark}-{index}", index))
            if rate is not None:
                made[-1].limit(rate)
        yield list(made)
    finally:
        remove()
        atexit.unregister(remove)


def _bits(rate: str) -> float:
    """1mbit -> 1e6."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"a rate is like 10mbit, not {rate}")


class Proxy:
    """Listens on a host and passes on to an address what it hears, later, damaged or not at all.

    With a host given, both ends are on it: whoever is to suffer connects to the proxy's port there.
    """

    def __init__(self, target: tuple[str, int], host: Host | None = None, port: int = 0) -> None:
        self.delay = 0.0
        """Seconds that everything takes longer, in each direction."""
        self.corrupt = 0.0
        """The probability that a piece of what is passed on has one byte changed."""
        self.refuse = False
        """Whether new connections are closed at once."""
        self.corrupted = self.accepted = self.passed = 0
        """How often it did; bytes that were passed on."""
        self._target, self._host = target, host
        self._random = random.Random(1)
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._ended = threading.Event()
        with host.inside() if host is not None else contextlib.nullcontext():
            self._listener = socket.create_server(("0.0.0.0", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> int:
        """Cut all connections that there are; says how many."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            _cut(pair)
        return len(pairs)

    def close(self) -> None:
        self._ended.set()
        self._listener.close()
        self.drop()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        if self._host is not None:
            _enter(self._host.name)
        self._listener.settimeout(0.2)  # closing it elsewhere would not wake this thread
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self.accepted += 1
            try:
                if self.refuse:
                    raise ConnectionRefusedError
                far = socket.create_connection(self._target, 30.0)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._pass_on, args=(source, sink, pair), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        try:
            while piece := source.recv(1 << 18):
                if self.delay:
                    time.sleep(self.delay)
                if self.corrupt and self._random.random() < self.corrupt:
                    damaged = bytearray(piece)
                    damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
                    piece = bytes(damaged)
                    self.corrupted += 1
                sink.sendall(piece)
                self.passed += len(piece)
        except OSError:
            pass
        with self._lock:
            self._pairs.discard(pair)
        _cut(pair)


def _cut(pair: tuple[socket.socket, socket.socket]) -> None:
    for one in pair:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

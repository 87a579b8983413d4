"""Checks of the installed libraries on this machine."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import importlib.util
import os
import socket
import ssl
import tempfile
import time
from pathlib import Path

from paceline.cluster.engines.ray_cluster import known_address
from paceline.cluster.process import WITHOUT_AMX, bfloat16_dies
from paceline.doctor.findings import Finding, cannot, limits, ok
from paceline.errors import UsageError
from paceline.transport.handshake import PortListener, begin_call
from paceline.transport.keys import Secret, new_key
from paceline.transport.poller import Poller

_PATIENCE = 5.0
"""Seconds for a connection of this process to itself."""


def devices() -> Finding:
    import torch

    if not torch.accelerator.is_available():
        return ok("devices", "no accelerator; workers compute on the CPU")
    kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    return ok("devices", f"{count} × {kind}")


def torch_itself() -> Finding:
    import torch

    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"torch {torch.__version__}, {torch.get_num_threads()} threads in this process"
    if threads is not None and threads.isdecimal() and int(threads) > len(os.sched_getaffinity(0)):
        return limits("torch", f"{found}, OMP_NUM_THREADS={threads}", "unset it: each worker then gets one thread")
    return ok("torch", found)


def bfloat16() -> Finding:
    """Checks bfloat16, which kills torch on virtual machines that announce AMX but cannot run it."""
    if bfloat16_dies():
        change = " ".join(f"{key}={value}" for key, value in WITHOUT_AMX.items())
        return limits("bfloat16", "this machine announces AMX and cannot run it: torch dies of it", f"export {change}")
    return ok("bfloat16", "works")


def gloo() -> Finding:
    """Checks gloo with an all-reduce of one process, which needs an address of this host, too."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return limits("gloo", "this torch is built without it", "all-reduce over machines needs a torch with gloo")
    from paceline.collectives.gloo import open_gloo

    try:
        with tempfile.TemporaryDirectory() as scratch:
            store = dist.FileStore(str(Path(scratch) / "store"), 1)  # type: ignore[attr-defined]
            group = open_gloo(store, 0, 1, None, datetime.timedelta(seconds=30))
            group.allreduce([torch.ones(4)]).wait()
            del group, store
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return limits("gloo", f"does not start: {reason}", "set GLOO_SOCKET_IFNAME to an interface that has an address")
    return ok("gloo", "works")


def encryption() -> Finding:
    """Checks one encrypted connection over the loopback, as machines open between them."""
    secret, proven, poller = Secret.of(new_key(), "doctor"), list[socket.socket](), Poller()
    try:
        listener = PortListener(poller, "127.0.0.1", secret, lambda _, peer: proven.append(peer), lambda *_: None)
        caller = begin_call("127.0.0.1", listener.port, secret, "doctor")
        try:
            until = time.monotonic() + _PATIENCE
            while not (caller.advance() and proven):
                if time.monotonic() > until:
                    raise TimeoutError(f"no connection within {_PATIENCE:g} s")
                poller.wait(0.01)
        finally:
            listener.close()
            caller.close()
            for peer in proven:
                peer.close()
    except UsageError as error:
        return limits("encryption", str(error), "without it, teams with a key cannot span several machines")
    except OSError as error:
        return cannot("encryption", f"{ssl.OPENSSL_VERSION}: {error}", "allow TCP on the loopback")
    finally:
        poller.close()
    return ok("encryption", f"{ssl.OPENSSL_VERSION}, a connection with a key works")


def ray() -> Finding:
    if importlib.util.find_spec("ray") is None:
        return ok("Ray", "not installed; only --on ray needs it (pip install 'paceline[ray]')")
    version = importlib.metadata.version("ray")
    address = known_address()
    return ok("Ray", f"{version}, {f'cluster at {address}' if address else 'no cluster here'}")

"""What the installed libraries can do on this machine."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from paceline.cluster.engines.ray_cluster import known_address
from paceline.cluster.process import WITHOUT_AMX, bfloat16_dies
from paceline.doctor.findings import Finding, cannot, limits, ok

_PATIENCE = 5000
"""Milliseconds for a message of ZeroMQ to itself."""


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
    """Some virtual machines announce AMX and then cannot run it."""
    if bfloat16_dies():
        change = " ".join(f"{key}={value}" for key, value in WITHOUT_AMX.items())
        return limits("bfloat16", "this machine announces AMX and cannot run it: torch dies of it", f"export {change}")
    return ok("bfloat16", "works")


def gloo() -> Finding:
    """One member's all-reduce: it needs an address of this host, too."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return limits("gloo", "this torch has none", "all-reduce over machines needs a torch with gloo")
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


def zeromq() -> Finding:
    """One encrypted message over the loopback."""
    if importlib.util.find_spec("zmq") is None:
        return limits("ZeroMQ", "not installed", "pip install pyzmq, for a parameter server over several machines")
    zmq: Any = importlib.import_module("zmq")
    version = f"{zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    if not zmq.has("curve"):
        return limits("ZeroMQ", f"{version}, without CURVE", "install a pyzmq that has it: between machines it must")
    context: Any = zmq.Context()
    try:
        server, client = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        keys = [zmq.curve_keypair(), zmq.curve_keypair()]
        for connection, (public, secret) in zip((server, client), keys, strict=True):
            connection.linger = 0
            connection.rcvtimeo = connection.sndtimeo = _PATIENCE
            connection.curve_publickey, connection.curve_secretkey = public, secret
        server.curve_server = True
        client.curve_serverkey = keys[0][0]
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"paceline")
        heard = server.recv()
    except zmq.ZMQError as error:
        return cannot("ZeroMQ", f"{version}: {error}", "allow TCP on the loopback")
    finally:
        context.destroy(linger=0)
    return ok("ZeroMQ", f"{version}, encrypts with CURVE") if heard == b"paceline" else cannot("ZeroMQ", "lies", "")


def ray() -> Finding:
    if importlib.util.find_spec("ray") is None:
        return ok("Ray", "not installed; only --on ray needs it (pip install 'paceline[ray]')")
    version = importlib.metadata.version("ray")
    address = known_address()
    return ok("Ray", f"{version}, {f'cluster at {address}' if address else 'no cluster here'}")

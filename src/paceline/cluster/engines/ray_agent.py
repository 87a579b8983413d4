"""The agent on a node of a Ray cluster: starts one worker, and beside the lead the servers; reports output and files.

Ray is sent this file's code by value, so it is plain Python, like `process_set`, `file_sync` and `bootstrap`: a node's
Ray process imports neither torch nor this package. The driver pulls (`listen`), so a slow driver slows the worker's
output, and never fills the node's memory.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from paceline.cluster.file_sync import FileSync
from paceline.cluster.process_set import ProcessSet, machine

_EVENTS = 2000
"""Events that wait for the driver; more make the worker wait."""
_MOST_DESCRIPTORS = 16
"""Descriptors that come with a request of the lead."""
_CHUNK = 4 << 20
"""Bytes of files in one answer."""

_SWEEP = """
import fcntl, os, shutil, sys, time
if os.fork():
    os._exit(0)
sys.stdin.buffer.read()
try:
    with open(os.path.join(sys.argv[1], ".lock"), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(300):  # a worker that is just being ended may still write there
            shutil.rmtree(sys.argv[1], ignore_errors=True)
            if not os.path.exists(sys.argv[1]):
                break
            time.sleep(0.1)
except OSError:
    pass
"""
"""Removes the run's folder on this node once no agent holds its lock any more, however the agents ended.

It detaches itself from the agent, because Ray ends an agent's children with the agent.
"""


class Agent:
    """Starts and supervises one worker of a run, and beside the lead its servers."""

    def __init__(self, run: str) -> None:
        self._folder = pathlib.Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{run}"
        spec = importlib.util.find_spec("paceline")
        found = list(spec.submodule_search_locations or []) if spec is not None else []
        self._package = pathlib.Path(found[0]) if found else None
        self._hold_folder()
        self._events: queue.Queue[tuple[Any, ...]] = queue.Queue(_EVENTS)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._processes = ProcessSet(
            self._inside("cluster/bootstrap.py"),
            self._folder / "exit_reports",
            lambda *line: self._report("line", *line),
        )
        self._wake, self._woken = socket.socketpair()
        self._processes.listen(self._woken.fileno(), self._run_order)
        self._port_holder: socket.socket | None = None
        self._lead_socket: socket.socket | None = None
        self._memory: list[int] = []
        """Descriptors of the run's memory, with which a server that is killed is started again."""
        self._stopping = False
        self._file_sync = FileSync(self._folder)
        # The processes die with the thread that starts them, and this one lasts as long as the agent.
        self._thread = threading.Thread(target=self._work, name="paceline agent", daemon=True)
        self._thread.start()

    # -- called by the driver ------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """Host, machine, and the installed versions."""
        if self._package is None:
            return {"host": socket.gethostname(), "version": "", "python": sys.executable}
        return {
            "host": socket.gethostname(),
            "version": importlib.metadata.version("paceline"),
            "python": platform.python_version(),
            "machine": machine(),
        }

    def port(self) -> int:
        """A free port, held until the next is asked for: bound but not listening, so that rank 0 can listen on it."""
        if self._port_holder is not None:
            self._port_holder.close()
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("", 0))
        return int(self._port_holder.getsockname()[1])

    def address(self) -> str:
        """The address at which other nodes reach this one."""
        import ray.util  # importable where Ray runs

        return str(ray.util.get_node_ip_address())

    def has(self, path: str, size: int) -> bool:
        """True if the run's folder on this node has this file."""
        target = self._folder / path
        return target.is_file() and target.stat().st_size == size

    def start(self, rank: int, script: str, arguments: list[str], environment: dict[str, str], launch: str) -> None:
        """Start a worker. A relative script is in Ray's copy of the driver's folder, `paceline:…` in the package."""
        inside = script.removeprefix("paceline:")
        path = self._inside(inside) if inside != script else pathlib.Path(script)
        settings = {**json.loads(launch), "folder": str(self._folder)}
        if settings.get("resume") is not None:
            settings["resume"] = str(self._folder)
        inherited: list[int] = []
        starter = None
        if rank == 0:
            starter = self._listen_to_lead()
            settings["starter"] = starter.fileno()
            inherited = [starter.fileno()]
        full = {**self._environment(environment), "PACELINE_LAUNCH": json.dumps(settings), "PYTHONUNBUFFERED": "1"}
        self._order(lambda: self._processes.spawn(rank, path, arguments, full, inherited))
        if starter is not None:
            starter.close()

    def serve(self, index: int, arguments: list[str], environment: dict[str, str]) -> None:
        """Start a server."""
        script = self._inside("server/main.py")
        if self._memory:  # it keeps the run's memory, and starts again by itself if it is killed
            arguments = [*arguments[:3], "keep:" + ",".join(map(str, self._memory)), *arguments[4:]]
        full = self._environment(environment)
        self._order(lambda: self._processes.spawn(-1 - index, script, arguments, full, self._memory))

    def put(self, path: str, offset: int, data: bytes, last: bool) -> None:
        """Write a part of a file of the run's folder, sent by the driver."""
        target = self._folder / path
        partial = target.with_name(f".{target.name}.arriving")
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
        if last:
            partial.replace(target)
            self._file_sync.mark_sent(path)

    def listen(self, seconds: float, files: bool) -> list[tuple[Any, ...]]:
        """Events since the last call, waiting up to `seconds` for the first; with `files`, also new file contents."""
        events = []
        try:
            events.append(self._events.get(timeout=seconds))
            while len(events) < _EVENTS:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        # Files come after lines: after the end of a process the driver asks for the rest of them.
        return events + (self._file_sync.updates(_CHUNK) if files else [])

    def rest(self) -> list[tuple[Any, ...]]:
        """More file contents of the run's folder; empty when the driver has all."""
        return self._file_sync.updates(_CHUNK, at_once=True)

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        """Send a signal to the processes of these ranks, or to all of this agent."""
        self._order(lambda: self._processes.signal(number, ranks))

    def preempt(self) -> None:
        """Tell this agent's worker to leave."""
        self._order(self._processes.preempt)

    def stop(self) -> None:
        """End all processes of this agent, and remove its files."""
        self._stopping = True
        self._order(lambda: None)
        self._thread.join(10.0)
        self._forget_memory()
        self._file_sync.close()
        if self._port_holder is not None:
            self._port_holder.close()
        self._leave_folder()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping:
            for end in self._processes.poll(0.5):
                self._report("ended", *end)
        self._processes.stop()

    def _order(self, order: Callable[[], None]) -> None:
        """Run a function in the thread that owns the processes, and wait for it."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                order()
                done.put(None)
            except BaseException as error:
                done.put(error)

        self._orders.put(run)
        self._wake.send(b".")
        error = done.get(timeout=30.0)
        if error is not None:
            raise error

    def _run_order(self) -> None:
        self._woken.recv(1)
        self._orders.get_nowait()()

    def _report(self, *event: Any) -> None:
        """Put an event into the queue for the driver; waits while that is full."""
        while not self._stopping:
            try:
                self._events.put(event, timeout=0.2)
                return
            except queue.Full:
                continue

    def _inside(self, name: str) -> pathlib.Path:
        """A file of the package on this node."""
        return (self._package or pathlib.Path()) / name

    @staticmethod
    def _environment(own: dict[str, str]) -> dict[str, str]:
        """The node's environment without the variables of Ray's own processes, and with those that the driver sends."""
        return {**{key: value for key, value in os.environ.items() if not key.startswith("RAY_")}, **own}

    def _listen_to_lead(self) -> socket.socket:
        """Returns the lead's end of a new socket on which it requests servers."""
        if self._lead_socket is not None:
            old = self._lead_socket
            self._order(lambda: self._close(old))
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lead_socket = ours
        self._order(lambda: self._processes.listen(ours.fileno(), lambda: self._read_lead(ours)))
        return theirs

    def _read_lead(self, lead: socket.socket) -> None:
        request, descriptors, _, _ = socket.recv_fds(lead, 1 << 17, _MOST_DESCRIPTORS)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if request:
            self._forget_memory()  # of a team before this one
            self._memory = descriptors
            self._report("servers", request)
        else:  # the lead has ended
            self._close(lead)

    def _forget_memory(self) -> None:
        for descriptor in self._memory:
            os.close(descriptor)
        self._memory = []

    def _close(self, lead: socket.socket) -> None:
        if lead.fileno() >= 0:
            self._processes.unlisten(lead.fileno())
            lead.close()

    def _hold_folder(self) -> None:
        lock = self._folder / ".lock"
        while True:
            try:
                (self._folder / "exit_reports").mkdir(parents=True, exist_ok=True, mode=0o700)
                self._folder.chmod(0o700)
                self._lock = lock.open("ab")
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(self._lock.fileno()), lock.stat()):
                    break
            except FileNotFoundError:
                pass  # another agent's sweeper has just removed it
        self._sweeper = subprocess.Popen(
            [sys.executable, "-S", "-c", _SWEEP, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._sweeper.wait(30.0)

    def _leave_folder(self) -> None:
        """Remove it, if this is the last agent of the run on this machine."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._folder, ignore_errors=True)
        except OSError:
            pass  # another agent still uses it
        self._lock.close()
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()

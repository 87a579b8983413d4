"""What runs on a node of a Ray cluster: starts the processes of one worker there, and hands on what they say and write.

Ray is sent this file's code by value, so it is plain Python, like `process_set`, `file_sync` and `bootstrap`: a node's
Ray process imports neither torch nor anything of ours. The driver pulls (`listen`), so a slow driver slows the worker's
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
from paceline.cluster.process_set import ProcessSet

_LINES = 2000
"""Lines that wait for the driver; more make the worker wait."""
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
"""Removes the run's folder on this node once nobody holds its lock any more, however its holders ended.

Nobody's child, because Ray ends the children of whoever it ends.
"""


class Agent:
    """Looks after one worker of a run, and beside the lead after its servers."""

    def __init__(self, run: str) -> None:
        self._folder = pathlib.Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{run}"
        self._hold_folder()
        self._said: queue.Queue[tuple[Any, ...]] = queue.Queue(_LINES)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._processes = ProcessSet(self._folder / "exit_reports", lambda *line: self._say("line", *line))
        self._knock, self._knocked = socket.socketpair()
        self._processes.listen(self._knocked.fileno(), self._obey)
        self._holder: socket.socket | None = None
        self._asked: socket.socket | None = None
        self._stopping = False
        self._file_sync = FileSync(self._folder)
        # The processes die with the thread that starts them, and this one lasts as long as the agent.
        self._thread = threading.Thread(target=self._work, name="paceline agent", daemon=True)
        self._thread.start()

    # -- what the driver calls -----------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """Where this is, and what is installed here."""
        spec = importlib.util.find_spec("paceline")
        if spec is None or not spec.submodule_search_locations:
            return {"host": socket.gethostname(), "version": "", "python": sys.executable}
        self._package = pathlib.Path(spec.submodule_search_locations[0])
        return {
            "host": socket.gethostname(),
            "version": importlib.metadata.version("paceline"),
            "python": platform.python_version(),
            "machine": _machine(),
        }

    def port(self) -> int:
        """A free port, held until the next is asked for: bound but not listening, so that rank 0 can listen on it."""
        if self._holder is not None:
            self._holder.close()
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("", 0))
        return int(self._holder.getsockname()[1])

    def address(self) -> str:
        """Where other nodes reach this one."""
        import ray.util  # only a node of Ray knows

        return str(ray.util.get_node_ip_address())

    def has(self, path: str, size: int) -> bool:
        """Whether the run's folder here has this file."""
        target = self._folder / path
        return target.is_file() and target.stat().st_size == size

    def start(self, rank: int, script: str, arguments: list[str], environment: dict[str, str], launch: str) -> None:
        """Start a worker; a relative script is in Ray's copy of the driver's folder, `paceline:` in our package."""
        inside = script.removeprefix("paceline:")
        path = self._package / inside if inside != script else pathlib.Path(script)
        settings = {**json.loads(launch), "folder": str(self._folder)}
        inherited: list[int] = []
        starter = None
        if rank == 0:
            starter = self._listen_to_lead()
            settings["starter"] = starter.fileno()
            inherited = [starter.fileno()]
        full = {**self._environment(environment), "PACELINE_LAUNCH": json.dumps(settings), "PYTHONUNBUFFERED": "1"}
        self._order(lambda: self._processes.spawn(rank, self._words(rank, path, arguments), full, inherited))
        if starter is not None:
            starter.close()

    def serve(self, index: int, arguments: list[str], environment: dict[str, str]) -> None:
        """Start a server."""
        rank = -1 - index
        words = self._words(rank, self._package / "server" / "main.py", arguments)
        self._order(lambda: self._processes.spawn(rank, words, self._environment(environment)))

    def put(self, path: str, offset: int, data: bytes, last: bool) -> None:
        """Write a part of a file of the run's folder, as it is at the driver's."""
        target = self._folder / path
        partial = target.with_name(f".{target.name}.arriving")
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
        if last:
            partial.replace(target)
            self._file_sync.knows(path)

    def listen(self, seconds: float, files: bool) -> list[tuple[Any, ...]]:
        """What has been said or has happened since the last time; and, if wanted, what the run's folder has got."""
        news = []
        try:
            news.append(self._said.get(timeout=seconds))
            while len(news) < _LINES:
                news.append(self._said.get_nowait())
        except queue.Empty:
            pass
        # Files come after lines: whoever has heard of an end asks once more for the rest.
        return news + (self._file_sync.news(_CHUNK) if files else [])

    def rest(self) -> list[tuple[Any, ...]]:
        """More of the run's folder, until there is none."""
        return self._file_sync.news(_CHUNK, at_once=True)

    def signal(self, number: int) -> None:
        self._order(lambda: self._processes.signal(number))

    def stop(self) -> None:
        """End all that was started here, and leave nothing behind."""
        self._stopping = True
        self._order(lambda: None)
        self._thread.join(10.0)
        self._file_sync.close()
        if self._holder is not None:
            self._holder.close()
        self._leave_folder()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping:
            for gone in self._processes.turn(0.5):
                self._say("gone", *gone)
        self._processes.stop()

    def _order(self, order: Callable[[], None]) -> None:
        """Have something done by the thread to which the processes belong, and wait for it."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                order()
                done.put(None)
            except BaseException as error:
                done.put(error)

        self._orders.put(run)
        self._knock.send(b".")
        error = done.get(timeout=30.0)
        if error is not None:
            raise error

    def _obey(self) -> None:
        self._knocked.recv(1)
        self._orders.get_nowait()()

    def _say(self, *news: Any) -> None:
        while not self._stopping:
            try:
                self._said.put(news, timeout=0.2)
                return
            except queue.Full:
                continue

    def _words(self, rank: int, script: pathlib.Path, arguments: list[str]) -> list[str]:
        bootstrap = str(self._package / "cluster" / "bootstrap.py")
        exit_report = str(self._processes.exit_report_of(rank))
        return [sys.executable, bootstrap, str(os.getpid()), exit_report, str(script), *arguments]

    @staticmethod
    def _environment(own: dict[str, str]) -> dict[str, str]:
        """That of this node, without what Ray uses to speak to its own processes, and with what the driver sends."""
        return {**{key: value for key, value in os.environ.items() if not key.startswith("RAY_")}, **own}

    def _listen_to_lead(self) -> socket.socket:
        """A socket on which the lead asks for servers."""
        if self._asked is not None:
            old = self._asked
            self._order(lambda: self._forget(old))
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked = ours
        self._order(lambda: self._processes.listen(ours.fileno(), lambda: self._hear_lead(ours)))
        return theirs

    def _hear_lead(self, asked: socket.socket) -> None:
        request = asked.recv(1 << 17)
        if request:
            self._say("asked", request)
        else:  # the lead has ended
            self._forget(asked)

    def _forget(self, asked: socket.socket) -> None:
        if asked.fileno() >= 0:
            self._processes.unlisten(asked.fileno())
            asked.close()

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
                pass  # it was just being swept away after another
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
            pass  # another one is still there
        self._lock.close()
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()


def _machine() -> str:
    """As membership.machine() has it: equal where memory can be shared."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "/".join([boot, *(str(pathlib.Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))])

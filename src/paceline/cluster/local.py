"""The engine for one machine: starts the workers, relays what they say, and sees to it that all end when one must.

Nothing of a run outlives it. Workers die with the launcher (the kernel sees to that, see `bootstrap`), shared memory
has no name, and the port is only held, not listened on. So even `kill -9` of the launcher leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.cluster.servers import Start, command
from paceline.config import Launch
from paceline.transport.meeting import Meeting
from paceline.transport.memory import Memory

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_HINT = "; a machine that announces AMX but cannot run it needs ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
_TICK = 0.2
"""Seconds between looks at the clock while nothing happens."""


class Farewell(msgspec.Struct):
    """What a worker's bootstrap leaves behind when its script fails."""

    kind: str
    message: str
    usage: bool
    consequence: bool
    """It failed because another worker did."""
    traceback: str


@dataclasses.dataclass(slots=True)
class Ending:
    """How one worker ended."""

    rank: int
    """Below 0 for a server."""
    code: int
    farewell: Farewell | None
    spared: bool = False
    """It was lost, and the others could go on without it."""

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.spared

    @property
    def spoken(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else f"server {-1 - self.rank}"
        if self.code < 0:
            hint = _HINT if -self.code == signal.SIGILL else ""
            return f"{who} was killed by signal {-self.code} ({signal.Signals(-self.code).name}){hint}"
        return f"{who} ended with exit code {self.code}"


@dataclasses.dataclass(slots=True)
class _Pipe:
    """A worker's stdout or stderr, and the beginning of a line that it has not finished yet."""

    rank: int
    name: str
    partial: bytes = b""


class Interrupted(Exception):
    """The launcher was told to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


Relay = Callable[[int, str, bytes], None]
"""Takes a line that a worker wrote: rank, "stdout" or "stderr", and the line."""


class LocalEngine:
    """Runs a script on several workers of this machine."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        workers: int,
        launch: Launch,
        *,
        relay: Relay,
        tick: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._script, self._arguments, self._workers = script, list(arguments), workers
        self._launch = launch
        self._relay, self._tick = relay, tick
        self._environment = dict(environment if environment is not None else os.environ)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._folder = Path(launch.folder or ".") / "farewells"
        self._holder: socket.socket | None = None
        self._deadlines: list[tuple[float, int]] = []
        self._starter, self._asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._spare = False
        """Whether a worker may be lost."""
        self._grace: float | None = None
        """Until when servers may end by themselves, once all workers have."""

    def run(self) -> list[Ending]:
        """Start all, wait for all; returns how they ended, in that order. Raises Interrupted when told to stop."""
        endings: list[Ending] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start()
            while not self._all_ended(endings):
                for key, _ in self._selector.select(_TICK):
                    if key.fd not in self._selector.get_map():
                        continue  # its worker was buried a moment ago
                    if isinstance(key.data, _Pipe):
                        self._pump(key.data, key.fd)
                    elif key.fd == self._asked.fileno():
                        self._hear_lead()
                    else:
                        endings.append(self._bury(key.data, key.fd))
                        self._schedule(endings)
                self._enforce()
                self._tick()
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            self._stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return endings

    def _all_ended(self, endings: list[Ending]) -> bool:
        """Whether all workers have, and their servers have had time to do so as well."""
        if sum(ending.rank >= 0 for ending in endings) < self._workers:
            return False
        if self._grace is None:
            self._grace = time.monotonic() + self._launch.timeouts.stop
        return len(endings) == len(self._processes) or time.monotonic() >= self._grace

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        control = Memory.create(Meeting.memory_size(self._workers))
        launch = msgspec.structs.replace(self._launch, control=control.descriptor, starter=self._starter.fileno())
        self._selector.register(self._asked.fileno(), selectors.EVENT_READ, None)
        # Bound but not listening: nobody else is given this port, yet rank 0 may still listen on it.
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            self._holder = holder.dup()
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._holder.getsockname()[1]),
            "WORLD_SIZE": str(self._workers),
            "LOCAL_WORLD_SIZE": str(self._workers),
            "GROUP_RANK": "0",
            "PYTHONUNBUFFERED": "1",
            # One thread each, as torchrun does it: more only get into each other's way.
            "OMP_NUM_THREADS": self._environment.get("OMP_NUM_THREADS", "1"),
            **launch.to_environment(),
        }
        for rank in range(self._workers):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._spawn(
                rank,
                [
                    sys.executable,
                    str(_BOOTSTRAP),
                    str(os.getpid()),
                    str(self._folder / f"{rank}.json"),
                    str(self._script),
                    *self._arguments,
                ],
                {**self._environment, **shared, **own},
                (control.descriptor, self._starter.fileno()),
            )
        self._starter.close()
        control.close_descriptor()

    def _spawn(self, rank: int, words: list[str], environment: dict[str, str], inherited: tuple[int, ...]) -> None:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, who ends the others in order
        )
        self._processes[rank] = process
        assert process.stdout is not None and process.stderr is not None
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream.fileno(), selectors.EVENT_READ, _Pipe(rank, name))
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)

    def _hear_lead(self) -> None:
        request = self._asked.recv(1 << 17)
        if request:
            self._start_servers(msgspec.msgpack.decode(request, type=Start))
        else:  # all workers have ended
            self._selector.unregister(self._asked.fileno())

    def _start_servers(self, start: Start) -> None:
        """The lead has asked for servers."""
        self._spare = start.spare
        environment = {**self._environment, "OMP_NUM_THREADS": self._environment.get("OMP_NUM_THREADS", "1")}
        for index in range(start.servers):
            rank = -1 - index
            farewell = self._folder / f"{rank}.json"
            self._spawn(rank, command(start, index, os.getpid(), farewell), environment, ())

    # -- while it runs -----------------------------------------------------------------------------------------------

    def _pump(self, pipe: _Pipe, descriptor: int) -> bool:
        """Relay what a worker has written; False once there is nothing more to read."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(descriptor)
            return False
        *lines, pipe.partial = (pipe.partial + data).split(b"\n")
        for line in lines:
            self._relay(pipe.rank, pipe.name, line)
        return True

    def _bury(self, rank: int, descriptor: int) -> Ending:
        """A worker has ended: take its last words."""
        process = self._processes[rank]
        # What it started ends with it. Nobody else can have its id yet: it has not been waited for.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        self._selector.unregister(descriptor)
        os.close(descriptor)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            key = self._selector.get_map().get(stream.fileno())
            if key is not None:
                while self._pump(key.data, key.fd):
                    pass
                if key.data.partial:
                    self._relay(rank, key.data.name, key.data.partial)
                if key.fd in self._selector.get_map():  # a process that it started still holds the other end
                    self._selector.unregister(key.fd)
        path = self._folder / f"{rank}.json"
        farewell = msgspec.json.decode(path.read_bytes(), type=Farewell) if path.exists() else None
        # A worker that was killed, or one that cannot go on without such a one; not one whose script is wrong.
        lost = code < 0 or (farewell is not None and farewell.kind == "WorkerLost")
        spared = self._spare and rank >= 0 and lost and not self._deadlines
        return Ending(rank, code, farewell, spared)

    def _schedule(self, endings: list[Ending]) -> None:
        """After the first failure: time for the others to say whom they miss, then the order to stop, then the end."""
        if not self._deadlines and any(ending.failed for ending in endings):
            now = time.monotonic()
            patience = self._launch.timeouts.stop
            self._deadlines = [(now + patience, signal.SIGTERM), (now + patience + 1.0, signal.SIGKILL)]

    def _enforce(self) -> None:
        for deadline, number in self._deadlines:
            if time.monotonic() >= deadline:
                self._signal(number)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                # Its whole session, so that the loader processes that it started end with it.
                os.killpg(process.pid, number)

    def _stop(self) -> None:
        """End whatever still runs; asked first, then made to."""
        self._signal(signal.SIGTERM)
        until = time.monotonic() + 1.5
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                process.wait()
        for process in self._processes.values():
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
        self._selector.close()
        self._asked.close()
        self._starter.close()
        if self._holder is not None:
            self._holder.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _interrupt(number: int, _frame: object) -> None:
    raise Interrupted(number)

"""The engine for a Ray cluster: Ray finds room and starts an agent in each bundle; agents start the workers.

Ray is asked for room and for carrying short calls, and for nothing else: workers are processes of their own, as under
every engine, and the data that they train with does not pass through Ray. Several of them on one machine share its
memory, however many nodes Ray believes that machine to be.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.engines.base import TICK, Engine, EngineCallbacks, EngineOption, Job, SupervisedRun
from paceline.cluster.engines.ray_cluster import PLACEMENTS, RayCluster, Room, first_line, parse_each, parse_environment
from paceline.cluster.file_sync import newest_checkpoint, newest_snapshot
from paceline.cluster.process_set import ProcessEnd
from paceline.cluster.servers import StartServers
from paceline.cluster.supervision import ExitStatus
from paceline.config import Launch, one_of
from paceline.errors import JoinError

_LISTEN = 2.0
"""Seconds that an agent waits for an event before it answers that there is none."""
_CHUNK = 4 << 20
"""Bytes of a file in one call."""
_SNAPSHOTS = 2
"""Snapshots that are kept in the driver's folder, as on the lead's machine."""
_FORWARDED = ("OMP_", "MKL_", "ONEDNN_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "PACELINE_", "PYTHONHASHSEED")
"""Prefixes of the environment variables that the workers get without `--env`."""
_PACKAGE = Path(__file__).resolve().parents[2]


class RayEngine(Engine):
    """Runs a script on several workers of a Ray cluster."""

    NAME = "ray"
    SELECTORS = ("ray", "ray://HOST:PORT")
    PLACE = "in a Ray cluster (RAY_ADDRESS, or this machine's)"
    OPTIONS = (
        EngineOption(
            name="place",
            metavar="|".join(PLACEMENTS),
            default="spread",
            help="On Ray: workers over many nodes, or on as few as possible.",
        ),
        EngineOption(
            name="each",
            metavar="cpu=1,gpu=1",
            help="On Ray: cores and GPUs that each worker takes. [default: cpu=1]",
        ),
        EngineOption(
            name="env",
            metavar="NAME[=VALUE]",
            repeatable=True,
            help="On Ray: an environment variable that the workers get. Repeatable.",
        ),
    )
    DEFAULT_RESTARTS = 1
    RESTARTS_TEAM = True
    SEVERAL_MACHINES = True

    def __init__(self, job: Job) -> None:
        """Connects to the cluster, and checks that it could have enough room at all."""
        super().__init__(job)
        room = Room(
            workers=job.workers,
            placement=one_of("--place", job.options.get("place", "spread"), PLACEMENTS),
            each=parse_each(job.options.get("each") or ""),
            servers=job.servers,
        )
        self.environment = {**job.environment, **parse_environment(job.options.get("env", []))}
        script = job.script.resolve()
        folder = None
        if script.is_relative_to(_PACKAGE):  # every node has it
            self.script = f"paceline:{script.relative_to(_PACKAGE)}"
        else:
            here = Path.cwd().resolve()
            folder = here if script.is_relative_to(here) else script.parent
            self.script = str(script.relative_to(folder))
        self.cluster = RayCluster(None if job.on in ("", "ray") else job.on, folder, room)

    def run(self, launch: Launch, callbacks: EngineCallbacks) -> list[ExitStatus]:
        return RayRun(self, launch, callbacks).run()


class RayMember:
    """One bundle of the cluster, its agent, and the processes there."""

    def __init__(self, bundle: int, agent: Any, facts: Mapping[str, str], rank: int = 0) -> None:
        self.bundle, self.agent, self.rank = bundle, agent, rank
        self.host, self.machine = facts["host"], facts["machine"]
        self.local_rank, self.local_size, self.group = rank, 1, 0
        self.running: set[int] = set()
        """Ranks of the processes there, servers among them."""
        self.lost = False


class RayRun(SupervisedRun):
    """One run in a Ray cluster."""

    restarts_team = True

    def __init__(self, engine: RayEngine, launch: Launch, callbacks: EngineCallbacks) -> None:
        super().__init__(engine.job, launch, callbacks)
        self._cluster, self._script, self._environment = engine.cluster, engine.script, engine.environment
        self._relay_addresses: dict[str, str] = {}
        """By machine, the address at which workers can join; empty while there is none."""
        self._run, self._key = secrets.token_hex(6), secrets.token_hex(32)
        """The run's name on the nodes; and the key by which its machines recognise each other."""
        self._members: list[RayMember] = []
        """By rank."""
        self._calls: dict[Any, RayMember] = {}
        """Agents' calls that wait for events, by Ray's reference."""
        self._replacements: dict[Any, RayMember] = {}
        """Agents that are started in place of lost ones, by the reference of their first answer."""
        self._stream_starts: dict[tuple[Any, str], int] = {}
        """Offset in the driver's file at which a stream of an agent begins: before it is that of an earlier start."""

    def _wait(self, references: list[Any], seconds: float) -> list[Any]:
        """The references that are ready within so many seconds, as soon as one is."""
        self.check_interrupted()
        return self._cluster.wait(references, min(seconds, TICK))

    def _all(self, references: list[Any], what: str) -> list[Any]:
        """All answers, in the same order."""
        until = time.monotonic() + self.launch.timeouts.join
        left = list(references)
        while left:
            ready = self._wait(left, TICK)
            left = [reference for reference in left if reference not in ready]
            if left and time.monotonic() >= until:
                raise JoinError(f"{what}: no answer in {self.launch.timeouts.join:g} s (--timeout)")
            self.callbacks.tick()
        try:
            return [self._cluster.get(reference) for reference in references]
        except self._cluster.Lost as error:
            raise JoinError(f"{what}: {first_line(error)}") from None

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self, attempt: int) -> None:
        if attempt == 0:
            self._cluster.reserve(self._wait)
        self._start_agents()
        self._relay_addresses = {}
        if self.launch.resume is not None:  # rank 0 reads it, and gives it to the others
            self._send_file(newest_snapshot(self.folder), self._members[:1])
        elif attempt:
            self._send_file(newest_checkpoint(self.folder), self._members)
        lead = self._members[0]
        port, address = self._all([lead.agent.port.remote(), lead.agent.address.remote()], "rank 0's node")
        one_machine = lead.local_size == self.job.workers
        self._common = {
            **{key: value for key, value in os.environ.items() if key.startswith(_FORWARDED)},
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", self._cluster.room.threads),
            "PACELINE_KEY": os.environ.get("PACELINE_KEY") or self._key,
            **self._environment,
        }
        self._common.pop(Launch.VARIABLE, None)
        self._shared = {
            "MASTER_ADDR": "127.0.0.1" if one_machine else str(address),
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.job.workers),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        self._all([self._start_worker(member) for member in self._members], "starting the workers")
        listening = list(self._calls.values())
        self._calls |= {self._listen(member): member for member in self._members if member not in listening}

    def _start_agents(self) -> None:
        """Start an agent in every bundle without one. Ranks of one machine are adjacent; bundle 0 has rank 0."""
        kept = {member.bundle: member for member in self._members if not member.lost}
        missing = [bundle for bundle in range(self.job.workers) if bundle not in kept]
        agents = [self._cluster.start_agent(bundle, self._run) for bundle in missing]
        facts = self._all([agent.facts.remote() for agent in agents], "starting an agent for each worker")
        for bundle, agent, fact in zip(missing, agents, facts, strict=True):
            self._cluster.check(fact)
            kept[bundle] = RayMember(bundle, agent, fact)
        machines: dict[str, list[RayMember]] = {}
        for _, member in sorted(kept.items()):
            machines.setdefault(member.machine, []).append(member)
        self._members = [member for group in machines.values() for member in group]
        for rank, member in enumerate(self._members):
            group = machines[member.machine]
            member.rank, member.local_rank, member.local_size = rank, group.index(member), len(group)
            member.group = list(machines).index(member.machine)

    def _start_worker(self, member: RayMember) -> Any:
        """Start this member's worker; one that is started again joins the run through its server."""
        own = {
            "RANK": str(member.rank),
            "LOCAL_RANK": str(member.local_rank),
            "LOCAL_WORLD_SIZE": str(member.local_size),
            "GROUP_RANK": str(member.group),
        }
        member.running.add(member.rank)
        joins = self._relay_addresses.get(member.machine)
        launch = msgspec.structs.replace(self.launch, joins=joins, machine=member.group if joins else 0)
        environment = {**self._common, **self._shared, **own}
        settings = msgspec.json.encode(launch).decode()
        return member.agent.start.remote(member.rank, self._script, list(self.job.arguments), environment, settings)

    def start_servers(self, request: StartServers) -> None:
        lead = self._members[0]
        if request.address:
            machines = list(dict.fromkeys(member.machine for member in self._members))
            addresses = request.relay_addresses or [request.address] * len(machines)
            self._relay_addresses = dict(zip(machines, addresses, strict=True))
        for index in range(request.servers):
            lead.running.add(-1 - index)
            lead.agent.serve.remote(index, request.arguments(index), self._common)

    def _send_file(self, path: Path | None, members: list[RayMember]) -> None:
        """Send a file of the run's folder to every machine of these members that does not have it."""
        if path is None:
            return
        name, size = str(path.relative_to(self.folder)), path.stat().st_size
        for member in members:
            if member.local_rank == 0 and not self._all([member.agent.has.remote(name, size)], member.host)[0]:
                with path.open("rb") as file:
                    while file.tell() < size or size == 0:
                        start, data = file.tell(), file.read(_CHUNK)
                        last = file.tell() == size
                        self._all([member.agent.put.remote(name, start, data, last)], member.host)
                        if last:
                            break

    # -- while it runs -----------------------------------------------------------------------------------------------

    @property
    def running(self) -> set[int]:
        return {rank for member in self._members for rank in member.running}

    def poll(self, seconds: float) -> list[ProcessEnd]:
        ends: list[ProcessEnd] = []
        for reference in self._wait([*self._calls, *self._replacements], seconds):
            member: RayMember | None
            if reference in self._replacements:
                member = self._replace(reference)
            else:
                member = self._calls.pop(reference)
                ends += self._handle(member, reference)
            if member is not None and not member.lost:
                self._calls[self._listen(member)] = member
        return ends

    def end_worker(self, rank: int) -> None:
        member = self._members[rank]
        if member.running and not member.lost:
            member.agent.signal.remote(int(signal.SIGKILL), [rank])

    def signal(self, number: int) -> None:
        for member in self._members:
            if member.running and not member.lost:
                member.agent.signal.remote(int(number))

    def preempt(self) -> None:
        for member in self._members:
            if member.running and not member.lost:
                member.agent.preempt.remote()

    def _listen(self, member: RayMember) -> Any:
        return member.agent.listen.remote(_LISTEN, member.rank == 0)

    def _handle(self, member: RayMember, reference: Any) -> list[ProcessEnd]:
        """Handle the events that an agent has reported; returns the processes that have ended."""
        try:
            events = self._cluster.get(reference)
        except self._cluster.Lost as error:
            member.lost = True
            ranks, member.running = sorted(member.running, reverse=True), set()
            host = member.host + self._cluster.cause(error)
            return [ProcessEnd(rank, -signal.SIGKILL, None, host) for rank in ranks]
        ends = []
        for kind, *facts in events:
            match kind:
                case "line":
                    self.callbacks.output(*facts)
                case "ended":
                    end = ProcessEnd(*facts)
                    member.running.discard(end.rank)
                    ends.append(end)
                case "servers":
                    self.take_request(facts[0])
                case _:
                    self._write_file(member, kind, *facts)
        return ends

    def finish(self) -> None:
        """End servers that outlive their workers, and fetch the rest of the run's folder on the lead's machine."""
        while self.running:
            self.signal(signal.SIGKILL)
            for end in self.poll(TICK):
                self.supervision.record(end)
            self.callbacks.tick()
        lead = self._members[0]
        until = time.monotonic() + self.launch.timeouts.join
        while not lead.lost and time.monotonic() < until:
            reference = lead.agent.rest.remote()
            while not self._wait([reference], TICK) and time.monotonic() < until:
                self.callbacks.tick()
            try:
                events = self._cluster.get(reference)
            except self._cluster.Lost:
                lead.lost = True
                return
            for kind, *facts in events:
                self._write_file(lead, kind, *facts)
            if not events:
                return

    def _write_file(
        self, member: RayMember, kind: str, name: str, offset: int, data: bytes, last: bool = False
    ) -> None:
        """Write a part of a file that came from a node."""
        path = self.folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise JoinError(f"{member.host} sent a file named '{name}', which is not in the run's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "grown":
            base = self._stream_starts.setdefault((member.agent, name), path.stat().st_size if path.exists() else 0)
            _write(path, base + offset, data)
            return
        partial = path.with_name(f".{path.name}.arriving")
        _write(partial, offset, data)
        if last:
            partial.replace(path)
            if path.parent == self.folder / "snapshots":
                for old in sorted(path.parent.glob("[0-9]*.pt"))[:-_SNAPSHOTS]:
                    old.unlink(missing_ok=True)

    # -- starting again ----------------------------------------------------------------------------------------------

    def can_restart(self, status: ExitStatus) -> bool:
        return super().can_restart(status) and status.died

    def restart_worker(self, rank: int) -> None:
        member = self._members[rank]
        if member.lost:  # Ray finds another place for the bundle, when there is room
            agent = self._cluster.start_agent(member.bundle, self._run)
            replacement = RayMember(member.bundle, agent, {"host": "", "machine": ""}, rank)
            self._replacements[agent.facts.remote()] = replacement
        else:
            self._start_worker(member)

    def _replace(self, reference: Any) -> RayMember | None:
        """Start the worker of an agent that replaces a lost one, if it can join from there."""
        member = self._replacements.pop(reference)
        try:
            facts = self._cluster.get(reference)
            self._cluster.check(facts)
        except (*self._cluster.Lost, JoinError) as error:
            self.callbacks.note(f"rank {member.rank} could not be started again: {first_line(error)}")
            return None
        member.host, member.machine = facts["host"], facts["machine"]
        if member.machine not in self._relay_addresses:
            self.callbacks.note(
                f"rank {member.rank} could not be started again: there is room for it on {member.host} only, which is "
                "no machine of this run"
            )
            self._cluster.kill(member.agent)
            return None
        member.group = list(self._relay_addresses).index(member.machine)
        self._members[member.rank] = member
        self._start_worker(member)
        return member

    def stop(self) -> None:
        members = [*self._members, *self._replacements.values()]
        self._cluster.release([member.agent for member in members if not member.lost])


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(data)
        file.truncate()

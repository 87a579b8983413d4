"""The engine for a Ray cluster: Ray finds room and starts an agent in each place; agents start the workers.

Ray is asked for places and for carrying short calls, and for nothing else: workers are processes of their own, as
everywhere, and what they train with does not pass through Ray. Several of them on one machine share its memory, however
many nodes Ray believes that machine to be.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.checkpoints import newest_checkpoint
from paceline.cluster.engines.ray_cluster import RayCluster, first_line
from paceline.cluster.process_set import ProcessEnd
from paceline.cluster.servers import Start, arguments_of
from paceline.cluster.supervision import ExitStatus, Interrupted, Relay, Supervision, failures, interruptible
from paceline.config import Launch
from paceline.errors import JoinError

_TICK = 0.2
_LISTEN = 2.0
"""Seconds that an agent waits for something to tell before it says that there is nothing."""
_CHUNK = 4 << 20
_TRAVELS = ("OMP_", "MKL_", "ONEDNN_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "PACELINE_", "PYTHONHASHSEED")
"""Environment variables that go to the workers by themselves begin so."""


class RayMember:
    """One place in the cluster, and what the driver knows about it."""

    def __init__(self, bundle: int, agent: Any, facts: Mapping[str, str], rank: int = 0) -> None:
        self.bundle, self.agent, self.rank = bundle, agent, rank
        self.host, self.machine = facts["host"], facts["machine"]
        self.local_rank, self.local_size, self.group = rank, 1, 0
        self.running: set[int] = set()
        """Ranks of the processes there, servers among them."""
        self.lost = False


class RayEngine:
    """Runs a script on several workers of a Ray cluster."""

    def __init__(
        self,
        cluster: RayCluster,
        script: Path | str,
        arguments: Sequence[str],
        workers: int,
        launch: Launch,
        *,
        relay: Relay,
        tick: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda _sentence: None,
        environment: Mapping[str, str] | None = None,
        restarts: int = 1,
    ) -> None:
        self._cluster, self._script, self._arguments = cluster, str(script), list(arguments)
        self._workers, self._launch = workers, launch
        self._relay, self._tick, self._note = relay, tick, note
        self._environment = dict(environment or {})
        self._restarts = self._left = restarts
        """How often something may be started again, and how often it still may."""
        self._relay_addresses: dict[str, str] = {}
        """By machine, the address at which workers can join, once there is one."""
        self._hiring: dict[Any, RayMember] = {}
        """Places whose agent was lost and is being replaced, by the answer that is awaited."""
        self._folder = Path(launch.folder or ".")
        self._run, self._key = secrets.token_hex(6), secrets.token_hex(32)
        """The run's name on the nodes; and what proves, between machines, that one belongs to it."""
        self._members: list[RayMember] = []
        self._supervision = Supervision(launch.timeouts)
        self._bases: dict[tuple[Any, str], int] = {}
        """Where in the driver's file a stream of an agent begins: what came before is of an earlier start."""
        self._told: int | None = None
        """The signal by which the driver was told to stop."""

    def run(self) -> list[ExitStatus]:
        """Start all, wait for all; returns how they ended, in that order. Raises Interrupted when told to stop."""
        with interruptible(self._tell) as deaf:
            try:
                self._cluster.reserve(self._wait)
                attempt = 0
                while True:
                    self._assemble()
                    self._start(attempt)
                    self._follow()
                    if self._left == 0 or not self._worth_another():
                        break
                    attempt += 1
                    self._left -= 1
                    self._announce()
                return self._supervision.endings
            finally:
                deaf()
                self._stop()

    def _tell(self, number: int) -> None:
        self._told = number  # an exception out of a signal's handler could be lost inside Ray

    def _wait(self, references: list[Any], seconds: float) -> list[Any]:
        """Those answers that have come within so many seconds, once all or the first of them has."""
        if self._told is not None:
            raise Interrupted(self._told)
        return self._cluster.wait(references, min(seconds, _TICK))

    def _all(self, references: list[Any], what: str) -> list[Any]:
        """All answers, in the same order."""
        until = time.monotonic() + self._launch.timeouts.join
        left = list(references)
        while left:
            ready = self._wait(left, _TICK)
            left = [reference for reference in left if reference not in ready]
            if left and time.monotonic() >= until:
                raise JoinError(f"{what}: no answer in {self._launch.timeouts.join:g} s (--timeout)")
            self._tick()
        try:
            return [self._cluster.get(reference) for reference in references]
        except self._cluster.Lost as error:
            raise JoinError(f"{what}: {first_line(error)}") from None

    # -- starting ----------------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """An agent in every place, those on one machine beside each other, and the first place's machine first."""
        kept = {member.bundle: member for member in self._members if not member.lost}
        missing = [bundle for bundle in range(self._workers) if bundle not in kept]
        agents = [self._cluster.hire(bundle, self._run) for bundle in missing]
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

    def _start(self, attempt: int) -> None:
        self._supervision = Supervision(self._launch.timeouts)
        self._relay_addresses = {}
        if attempt:
            self._send_checkpoint()
        lead = self._members[0]
        port, address = self._all([lead.agent.port.remote(), lead.agent.address.remote()], "rank 0's node")
        one_machine = lead.local_size == self._workers
        self._common = {
            **{key: value for key, value in os.environ.items() if key.startswith(_TRAVELS)},
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", self._cluster.room.threads),
            "PACELINE_KEY": os.environ.get("PACELINE_KEY") or self._key,
            **self._environment,
        }
        self._common.pop(Launch.VARIABLE, None)
        self._shared = {
            "MASTER_ADDR": "127.0.0.1" if one_machine else str(address),
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self._workers),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        self._all([self._start_worker(member) for member in self._members], "starting the workers")

    def _start_worker(self, member: RayMember) -> Any:
        """Start this member's worker, for the first time; or again, and then it joins the run where that is."""
        own = {
            "RANK": str(member.rank),
            "LOCAL_RANK": str(member.local_rank),
            "LOCAL_WORLD_SIZE": str(member.local_size),
            "GROUP_RANK": str(member.group),
        }
        member.running.add(member.rank)
        joins = self._relay_addresses.get(member.machine)
        launch = msgspec.structs.replace(self._launch, joins=joins, machine=member.group if joins else 0)
        environment = {**self._common, **self._shared, **own}
        told = msgspec.json.encode(launch).decode()
        return member.agent.start.remote(member.rank, self._script, self._arguments, environment, told)

    def _start_servers(self, start: Start) -> None:
        """The lead has asked for servers: they share memory with the workers of its machine, so there they run."""
        lead = self._members[0]
        self._supervision.spare, self._supervision.joining = start.spare, bool(start.address)
        if start.address:  # without one there is nothing to join
            machines = list(dict.fromkeys(member.machine for member in self._members))
            self._relay_addresses = dict(
                zip(machines, start.relay_addresses or [start.address] * len(machines), strict=True)
            )
        for index in range(start.servers):
            lead.running.add(-1 - index)
            lead.agent.serve.remote(index, arguments_of(start, index), self._common)

    def _send_checkpoint(self) -> None:
        """The newest one, to every machine: a worker may have come to one where it has not been."""
        path = newest_checkpoint(self._folder)
        if path is None:
            return
        name, size = str(path.relative_to(self._folder)), path.stat().st_size
        for member in self._members:
            if member.local_rank == 0 and not self._all([member.agent.has.remote(name, size)], member.host)[0]:
                with path.open("rb") as file:
                    while file.tell() < size or size == 0:
                        start, data = file.tell(), file.read(_CHUNK)
                        last = file.tell() == size
                        self._all([member.agent.put.remote(name, start, data, last)], member.host)
                        if last:
                            break

    # -- while it runs -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Until all have ended: relay, fetch, and end the others when one has failed."""
        supervision = self._supervision
        asked = {self._ask(member): member for member in self._members}
        while True:
            for reference in self._wait([*asked, *self._hiring], _TICK):
                if reference in self._hiring:
                    member = self._welcome(reference)
                else:
                    member = asked.pop(reference)
                    self._hear(member, reference)
                if member is not None and not member.lost:
                    asked[self._ask(member)] = member
            running = {rank for member in self._members for rank in member.running}
            over = supervision.over(running)
            if over and not running:
                break
            for number in [*supervision.due, *([signal.SIGKILL] if over else [])]:
                for member in self._members:
                    if member.running and not member.lost:
                        member.agent.signal.remote(int(number))
            self._tick()
        self._fetch_rest()

    def _ask(self, member: RayMember) -> Any:
        return member.agent.listen.remote(_LISTEN, member.rank == 0)

    def _hear(self, member: RayMember, reference: Any) -> None:
        """Take what an agent has told."""
        try:
            news = self._cluster.get(reference)
        except self._cluster.Lost as error:
            member.lost = True
            ranks, member.running = sorted(member.running, reverse=True), set()
            where = member.host + self._cluster.cause(error)
            for rank in ranks:
                self._replace(member, self._supervision.record(ProcessEnd(rank, -signal.SIGKILL, None), where))
            return
        for kind, *facts in news:
            match kind:
                case "line":
                    self._relay(*facts)
                case "gone":
                    gone = ProcessEnd(*facts)
                    member.running.discard(gone.rank)
                    self._replace(member, self._supervision.record(gone))
                case "asked":
                    self._start_servers(msgspec.msgpack.decode(facts[0], type=Start))
                case _:
                    self._keep(member, kind, *facts)

    def _fetch_rest(self) -> None:
        """What the run's folder on the lead's machine still has."""
        lead = self._members[0]
        until = time.monotonic() + self._launch.timeouts.join
        while not lead.lost and time.monotonic() < until:
            reference = lead.agent.rest.remote()
            while not self._wait([reference], _TICK) and time.monotonic() < until:
                self._tick()
            try:
                news = self._cluster.get(reference)
            except self._cluster.Lost:
                lead.lost = True
                return
            for kind, *facts in news:
                self._keep(lead, kind, *facts)
            if not news:
                return

    def _keep(self, member: RayMember, kind: str, name: str, offset: int, data: bytes, last: bool = False) -> None:
        """Write a part of a file that came from a node."""
        path = self._folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise JoinError(f"{member.host} sent a file named '{name}', which is not in the run's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "grown":
            base = self._bases.setdefault((member.agent, name), path.stat().st_size if path.exists() else 0)
            _write(path, base + offset, data)
            return
        partial = path.with_name(f".{path.name}.arriving")
        _write(partial, offset, data)
        if last:
            partial.replace(path)

    # -- starting again ----------------------------------------------------------------------------------------------

    def _replace(self, member: RayMember, ending: ExitStatus) -> None:
        """Start a worker again that was lost, if the others go on without it and it can join them."""
        if not (ending.rank >= 0 and ending.spared and ending.died and self._left and self._relay_addresses):
            return
        self._left -= 1
        ending.replaced = True
        self._note(f"{ending.spoken}; it is started again ({self._left} restarts left)")
        if member.lost:  # Ray finds another place for it, when there is room
            agent = self._cluster.hire(member.bundle, self._run)
            self._hiring[agent.facts.remote()] = RayMember(
                member.bundle, agent, {"host": "", "machine": ""}, member.rank
            )
        else:
            self._start_worker(member)

    def _welcome(self, reference: Any) -> RayMember | None:
        """An agent that was hired anew is there: it starts its worker, if that can join from where it is."""
        member = self._hiring.pop(reference)
        try:
            facts = self._cluster.get(reference)
            self._cluster.check(facts)
        except (*self._cluster.Lost, JoinError) as error:
            self._note(f"rank {member.rank} could not be started again: {first_line(error)}")
            return None
        member.host, member.machine = facts["host"], facts["machine"]
        if member.machine not in self._relay_addresses:
            self._note(
                f"rank {member.rank} could not be started again: there is room for it on {member.host} only, where "
                "nothing of this run was"
            )
            self._cluster.dismiss(member.agent)
            return None
        member.group = list(self._relay_addresses).index(member.machine)
        self._members[member.rank] = member
        self._start_worker(member)
        return member

    def _worth_another(self) -> bool:
        """Whether somebody died, rather than a script being wrong, and the others could not go on without."""
        failed = failures(self._supervision.endings)
        wrong = [e for e in failed if not e.died and not (e.exit_report is not None and e.exit_report.consequence)]
        return not wrong and any(ending.died for ending in failed)

    def _announce(self) -> None:
        first = next(ending for ending in failures(self._supervision.endings) if ending.died)
        checkpoint = newest_checkpoint(self._folder)
        origin = f"with checkpoint {checkpoint.name}" if checkpoint else "from the beginning, as it saved no checkpoint"
        self._note(f"{first.spoken}; the team is started again {origin} ({self._left} restarts left)")

    def _stop(self) -> None:
        """End whatever still runs, and give the places back."""
        hired = [*self._members, *self._hiring.values()]
        self._cluster.release([member.agent for member in hired if not member.lost])


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(data)
        file.truncate()

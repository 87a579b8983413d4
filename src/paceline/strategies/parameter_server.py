"""A worker of a parameter server: computes gradients, pushes them, and goes on with the version that it is given.

The way of a step: the gradient lies in the worker's shared buffer; a short message tells the server; the policy there
decides, the server writes the next version, and answers when this worker may go on, and with which version. A pull is a
change of pointers. Samples are leased from the server, too.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.process import is_stopped
from paceline.cluster.servers import StartServers, start_servers
from paceline.config import RunSpec, capacity, parse_compression, parse_correction, parse_servers, place_servers
from paceline.data.leased_loader import LeasedLoader
from paceline.errors import Mismatch, ServerLost, TeamError, UsageError
from paceline.events import Pull, Reduce, Wait
from paceline.parameters.compression import Feedback, codec_class
from paceline.parameters.gradients import Gradients
from paceline.parameters.hyperparameters import Hyperparameters, RateScaling
from paceline.parameters.model_buffers import ModelBuffers
from paceline.parameters.reduction import CHUNK, weighted_sum
from paceline.parameters.step_snapshot import StepSnapshot
from paceline.parameters.versions import Versions
from paceline.parameters.worker_table import WorkerTable
from paceline.policies import parse_policy
from paceline.relay.launch import open_relay
from paceline.relay.messages import TransferLayout
from paceline.server.client import ServerClient
from paceline.server.flags import SharedFlags
from paceline.server.memory import RunMemory
from paceline.server.messages import (
    Freeze,
    GradientReady,
    LeaseGranted,
    Proceed,
    PushGradient,
    Thaw,
)
from paceline.server.messages import ReduceShare as ReduceOrder
from paceline.server.messages import StepCancelled as CancelledStep
from paceline.server.process import serve_in_thread
from paceline.server.shard import describe_optimizer, describe_parameters, make_layout, memory_sizes
from paceline.strategies.base import Options, Trainer, TrainerContext
from paceline.strategies.cancellation import CancelHooks, StepCancelledError, release_scaler
from paceline.strategies.leasing import Leases
from paceline.strategies.optimizer_patch import OneCycleClamp, clear_gradients, own_parameters, own_state
from paceline.transport import BarrierKind, Memory
from paceline.transport.unix_connection import new_address

_RELAY_ENDS = 5.0
"""Seconds in which a relay has sent the last events home."""


class ParameterServerTrainer(Trainer):
    """One worker's part in training a model with a parameter server."""

    _inside = 0
    """How many blocks of `team.step()` the script is in, one in the other."""
    _relay_addresses: Sequence[str] = ()
    """By machine, the address at which its workers talk to the server, if there are several."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, options: Options, context: TrainerContext) -> None:
        _refuse(optimizer, options)
        super().__init__(model, optimizer, context)
        self.size = context.members.size
        self._spread = len(context.members.machines) > 1
        self._relay: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pushed = False
        """Whether it has pushed anything."""
        self._joins = context.launch.joins
        """Of a run that goes on already, the address of its server."""
        self._launch = context.launch
        self._timeouts = context.members.barrier.timeouts
        RateScaling(options.scale_lr, 1, options.warmup)
        self._at = self._buffer = 0
        """The server's version, and the buffer that it lies in."""
        self._before = 0
        """Updates that the parameters had had before this run."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in held]
        rest = [parameter for parameter in model.parameters() if id(parameter) not in held]
        context.members.mirror([*rest, *model.buffers()] if self._joins is None else [])
        self._rest = ModelBuffers([*rest, *model.buffers()])
        self._set_up(named, options, context)
        self.paces = [(0.0, 0)] * self.size
        policy = parse_policy(context.strategy).for_workers(range(self.size))
        self.cancels = policy.cancels
        if policy.spare or self._launch.elastic:
            context.members.barrier.spare = True

        self._leases = Leases(self._client, self._stopwatch, self._gradients, self.size, self._follow)
        self._leases.leave = self._leave_if_told
        self._loss: float | None = None
        self._clip: tuple[float, float] | None = None
        self._frozen = False
        self._exchanged = 0.0
        """Seconds that the last push and pull took that had to wait for nobody."""
        self._gone_back = False
        """Whether the leases of a step that is being left are with the server already."""
        self._snapshot: StepSnapshot | None = None
        self._boundaries: CancelHooks | None = None
        if self.cancels:
            self._snapshot = StepSnapshot(model)
            self._boundaries = CancelHooks(model, self._look)
            self._stopwatch.sleep = self._sleep
        away = set(self._spec.servers) != {context.members.machine}
        early = self._spread and self._feedback is None and away
        self._gradients.attach(which=self._made if early else None)
        self._clamp = None if policy.lockstep else OneCycleClamp(optimizer)
        self._patch_optimizer()

    @property
    def version(self) -> int:
        return self._before + self._at

    @version.setter
    def version(self, value: int) -> None:
        self._before = value - (0 if self._late else self._at)

    @property
    def _late(self) -> bool:
        """Whether this worker has joined, and its script still does what the others' did before they trained."""
        return self._joins is not None and not self._pushed

    # -- setting up --------------------------------------------------------------------------------------------------

    def _set_up(self, named: list[tuple[str, torch.nn.Parameter]], options: Options, context: TrainerContext) -> None:
        members = self._members
        self._servers = parse_servers(self._launch.servers or options.servers)
        spec = self._describe_run(named, options, context)
        if self._joins is not None:
            self._join(spec, self._joins)
            return
        if self._spread:
            members.mirror([parameter.data for _, parameter in named])
        memory = self._lay_out(spec, functools.partial(members.share, keep=True))
        self._fill(memory)

        coordinator = members.gather(new_address().encode(), BarrierKind.ALLOCATE)[0].decode()
        if self._spread:
            compressed = None if self._feedback is None else self._bytes
            layout = TransferLayout.of(self._layout, compressed, [shard.owned() for shard in self._shards])
            self._relay_addresses, self._relay = open_relay(
                members, spec, layout, memory, coordinator, self._launch.key
            )
        address = self._relay_addresses[members.machine] if self._spread else coordinator
        spare = spec.elastic or parse_policy(context.strategy).for_workers(range(self.size)).spare
        self._start(coordinator if members.machine == 0 else address, spare, context.say)
        self._connect(ServerClient(address, self._rank, self._timeouts), memory)
        if self._rank == 0:
            self._client.open_run(spec, memory, self._pids())
        else:
            self._client.open()
        self._client.wait_until_ready(self._look_for_lead)
        memory.close_descriptors()
        self._versions.pull(0)

    def _look_for_lead(self) -> None:
        """Without the lead, which sends the spec, no server begins."""
        members = self._members
        if members.machine == 0 and self._rank != 0 and (how := members.local.barrier.gone(0)) is not None:
            raise ServerLost(f"rank 0 {how} before it had told the server what to train", [0])

    def _made(self, parameter: int) -> None:
        """While the backward pass goes on, what it has made can travel."""
        if not self._accumulating:
            self._client.tell(GradientReady([parameter]))

    def _describe_run(
        self, named: list[tuple[str, torch.nn.Parameter]], options: Options, context: TrainerContext
    ) -> RunSpec:
        launch, machines = self._launch, self._members.machines
        self._named = named
        return RunSpec(
            machines=tuple(map(tuple, machines)),
            capacity=capacity(self.size),
            servers=(0,) if self._joins is not None else tuple(place_servers(str(self._servers), machines)),
            strategy=str(context.strategy),
            timeouts=self._timeouts,
            folder=str(context.folder) if context.recorder.on else None,
            elastic=launch.elastic,
            optimizer=describe_optimizer(self._optimizer),
            parameters=describe_parameters(named, self._optimizer),
            buffers=self._rest.size,
            corrections=tuple(launch.corrections or options.corrections),
            compress=launch.compress or options.compress,
            scale_lr=options.scale_lr,
            warmup=options.warmup,
        )

    def _pids(self) -> list[int]:
        members, pids = self._members, [0] * self.size
        for place, rank in enumerate(members.machines[members.machine]):
            pids[rank] = members.local.barrier.pid(place)
        return pids

    def _join(self, own: RunSpec, address: str) -> None:
        """Take part in a run that goes on: its spec counts, and its memory comes from the server."""
        client = ServerClient(address, self._rank, self._timeouts, late=True)
        session, spec, memory = client.join()
        if spec.model != own.model:
            raise Mismatch(
                f"rank {self._rank} cannot join: its model or optimizer is not the one that the run trains",
                [self._rank],
            )
        self.size = spec.workers
        coming = iter(memory)
        self._lay_out(spec, lambda _size: next(coming))
        self._optimizer.state.clear()
        self._rest.read(memory.buffers)
        self._connect(client, memory)
        memory.close_descriptors()
        self._versions.pull(session.buffer)
        self._at, self._buffer = session.version, session.buffer

    def _lay_out(self, spec: RunSpec, share: Callable[[int], Memory]) -> RunMemory:
        """Find everything's place in shared memory; `share` gives a memory of some size, always in the same order."""
        self._spec, optimizer = spec, self._optimizer
        self._layout, kind = make_layout(spec, self._named, optimizer)
        layout = self._layout
        gradients, versions, table, flags, buffers = map(share, memory_sizes(spec, layout))
        self._versions = Versions(layout, versions, spec.versions)
        self._take_gradients(gradients)
        workers = WorkerTable(table.bytes(0, table.size), spec.capacity, len(layout.slots))
        self._hyperparameters, self._used = (
            Hyperparameters(optimizer, workers.slots, self._rank),
            workers.used[self._rank],
        )
        # The state of the optimizer lives there, too: the servers work on it, any worker can read it.
        self._shards = [
            kind(optimizer, layout, self._versions, self._gradients, index, len(spec.servers))
            for index in range(len(spec.servers))
        ]
        state = share(self._shards[0].memory_size())
        for shard in self._shards:
            shard.place(state)
        return RunMemory(gradients, versions, table, flags, buffers, state)

    def _connect(self, client: ServerClient, memory: RunMemory) -> None:
        self._client = client
        client.watch(SharedFlags(memory.flags, self._spec.capacity))
        client.reduce = self._sum_part
        client.copy = functools.partial(self._rest.write, memory.buffers)

    def _take_gradients(self, memory: Memory) -> None:
        """Where this worker's gradients lie: where the server reads them, or to be compressed first."""
        layout = self._layout
        self._feedback: Feedback | None = None
        self._bytes = layout.size
        compress = self._spec.compress
        kind = codec_class(parse_compression(compress))
        if kind is None:
            self._gradients = Gradients.shared(layout, memory, self._rank, self._spec.gradients)
            return
        for flat in layout.flats:
            if flat.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"compress is '{compress}', which needs parameters of float32; some are {flat.dtype}")
        codec = kind(layout, memory, self._spec.capacity)
        self._gradients = Gradients.private(layout, torch.device("cpu"))
        self._feedback = Feedback(codec, self._rank, self._gradients.own)
        self._bytes = codec.bytes

    def _fill(self, memory: RunMemory) -> None:
        """Write what the training begins with into shared memory: version 0, the optimizer's state, and the rest."""
        if self._members.local.rank == 0:
            self._versions.fill(0)
            self._rest.write(memory.buffers)
        if self._rank == 0:
            self._import_state()
        if self._spread:
            self._mirror_state(memory.state)
        self._optimizer.state.clear()

    def _mirror_state(self, state: Memory) -> None:
        """Let every machine begin with the state that the lead has, if it has one."""
        marks = bytes([any(state.bytes(start, stop - start)) for s in self._shards for start, stop in s.owned()[:1]])
        if any(self._members.gather(marks, BarrierKind.ALLOCATE)[0]):
            whole = state.tensor(0, state.size, torch.uint8)
            self._members.mirror([whole] if self._members.local.rank == 0 else [torch.empty_like(whole)])

    def _start(self, address: str, spare: bool, say: Callable[[str], None]) -> None:
        """Have the servers of this machine started, as processes or beside the workers.

        address: of the coordinator, or away from home of this machine's relay.
        """
        patience, where, machine = self._timeouts.join, self._servers, self._members.machine
        if where in ("lead", "all"):
            # A worker that holds a shard can not be spared.
            if self._rank == 0 or where == "all":
                self._thread = serve_in_thread(address, self._rank, patience, say)
            if self._rank == 0:
                start_servers(
                    self._launch,
                    StartServers(0, address, patience, [], False, relay_addresses=list(self._relay_addresses)),
                )
            return
        kind = type(self._optimizer)
        if kind.__module__ == "__main__":
            raise UsageError(
                f"the optimizer {kind.__name__} is defined in the script itself, where a server process cannot find "
                "it; move it to a module, or hold the parameters in the lead with --servers lead"
            )
        servers = self._spec.servers_on(machine)
        if self._members.local.rank == 0 and servers:
            paths = [path for path in sys.path if path]
            start = StartServers(
                len(servers), address, patience, paths, spare, servers.start, list(self._relay_addresses)
            )
            self._processes = start_servers(self._launch, start)

    def _import_state(self) -> None:
        state = dict(self._optimizer.state)
        for shard in self._shards:
            self._optimizer.state.update(state)
            shard.import_state(self._optimizer)

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def report_loss(self, loss: float) -> None:
        self._loss = loss

    def enter_step(self) -> None:
        self._inside += 1
        if self._inside == 1 and self._snapshot is not None and self._leases.open <= 1:
            # Of several minibatches that make one gradient, all are left together: back to before the first.
            self._snapshot.take()

    def leave_step(self, error: BaseException | None) -> bool:
        self._inside -= 1
        if self._inside or not isinstance(error, StepCancelledError):
            return False  # a step is left as a whole
        if not self._gone_back:
            leases = self._leases.take()
            self._stopwatch.cancel(self._at, leases, self._client.cancelled_at())
            self._follow(self._client.call(CancelledStep(leases, self._leases.wanted())), free=False)
        self._gone_back = False
        self._clip = None
        release_scaler(error, self._optimizer)
        for slot in self._layout.slots:
            slot.parameter.grad = None
        if self._snapshot is not None:
            self._snapshot.restore()
        self._stopwatch.restart(time.perf_counter())
        return True

    def _look(self) -> None:
        if self._inside and self._client.cancelled(self._at):
            raise StepCancelledError

    def _sleep(self, seconds: float) -> None:
        if self._client.sleep(seconds, self._at if self._inside else None):
            raise StepCancelledError

    def _clear_gradients(self, set_to_none: bool) -> None:
        clear_gradients(self._optimizer, self._layout, set_to_none)

    def _update(self, unscale: float, found_inf: bool) -> None:
        self._look()
        _, samples = self._stopwatch.stop(self._at)
        self._push(samples, unscale, found_inf)

    def _push(self, samples: int, factor: float, skip: bool) -> None:
        start = time.perf_counter()
        used = self._gradients.collect()
        complete = 0 not in used
        if not complete:
            self._used[:] = used
        if self._feedback is not None and not skip:
            self._feedback.encode(None if complete else used, factor)
        message = PushGradient(
            self._at,
            samples,
            self._leases.take(),
            self._hyperparameters.publish(),
            complete,
            factor,
            self._bytes,
            self._loss,
            self._clip,
            skip,
            self._leases.wanted(),
        )
        self._loss, self._clip, self._pushed = None, None, True
        self._stopwatch.slow_link(self._exchanged)
        sent = time.perf_counter()
        answer: Proceed = self._client.call(message)
        self._follow(answer)
        end = time.perf_counter()
        self._exchanged = end - sent if answer.on < 0 else self._exchanged
        if answer.on >= 0:
            self._recorder.add(Wait(self._rank, start, end - start, answer.on))
        else:
            self._recorder.add(Pull(self._rank, start, end - start, self._at))
        self._stopwatch.restart(end)
        self.on_update()
        self._leave_if_told()
        if answer.outcome == "dropped" and self.cancels and self._inside:
            self._gone_back = True
            raise StepCancelledError

    def _follow(self, answer: Proceed | LeaseGranted | Any, *, free: bool = True) -> None:
        """Take the version that the server says, and a lease if it gives one."""
        if answer.buffer != self._buffer:
            self._versions.pull(answer.buffer)
            self._buffer = answer.buffer
        self._at = answer.version
        if free and not self._leases.open:
            self._stopwatch.free()
        if isinstance(answer, Proceed) and answer.lease is not None:
            self._leases.ride(answer.lease)

    def _leave_if_told(self) -> None:
        """End this script, as its launcher wants it: between two gradients, and with a exit_report."""
        if self._client.dismissed:
            raise SystemExit(0)

    @property
    def present(self) -> int | None:
        return self._client.present

    def gather(self, payload: bytes, kind: BarrierKind) -> list[bytes] | None:
        """Over the server, since who takes part may change."""
        brought = self._client.meet(kind, payload)
        return [brought.get(rank, b"") for rank in range(max(self.size, *(rank + 1 for rank in brought)))]

    def clip(self, limit: float, norm: float) -> torch.Tensor:
        """The mean is clipped where it is made, on the server; what is known here is this worker's own norm."""
        self._clip = (limit, norm)
        gradients = [slot.parameter.grad for slot in self._layout.slots if slot.parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm)

    def _sum_part(self, order: ReduceOrder) -> None:
        """Sum this worker's part of its group's gradients into the group's buffer."""
        start = time.perf_counter()
        place, members = order.ranks.index(self._rank), len(order.ranks)
        weights = list(zip(order.ranks, order.weights, strict=True))
        read = 0
        for number, flat in enumerate(self._layout.flats):
            target = self._gradients.flats[self._spec.capacity + order.group][number]
            first, last = flat.count * place // members, flat.count * (place + 1) // members
            step = max(1, CHUNK // flat.dtype.itemsize)
            for begin in range(first, last, step):
                end = min(begin + step, last)
                parts = tuple(tensors[number][begin:end] for tensors in self._gradients.flats)
                weighted_sum(target[begin:end], parts, weights)
            read += (members - 1) * (last - first) * flat.dtype.itemsize
        self._recorder.add(Reduce(self._rank, start, time.perf_counter() - start, read))

    # -- samples -----------------------------------------------------------------------------------------------------

    def share_loader(self, loader: DataLoader[Any], global_batch: int | None) -> LeasedLoader:
        return self._leases.share(loader, global_batch)

    # -- state as plain torch knows it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self, reload: bool = False) -> Iterator[None]:
        """While here, the server changes nothing, and this worker has its newest version."""
        if self._frozen:
            yield
            return
        self._follow(self._client.call(Freeze()))
        self._frozen = True
        try:
            yield
        finally:
            self._frozen = False
            self._client.tell(Thaw(reload))

    def _state_dict(self) -> dict[str, Any]:
        with self.frozen():
            self._export_state()
            try:
                return type(self._optimizer).state_dict(self._optimizer)
            finally:
                self._optimizer.state.clear()

    def _export_state(self) -> None:
        """Give the user's optimizer a state of its own, as it is now."""
        self._shards[0].export_state(self._optimizer)
        own_state(self._optimizer)

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        """The lead's counts; the others take the hyperparameters."""
        type(self._optimizer).load_state_dict(self._optimizer, state)
        if self._rank == 0 and not self._late:
            with self.frozen(reload=True):
                self._import_state()
        self._optimizer.state.clear()

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        if self._late:
            return  # what the run has made of it since then counts
        here = [rank for rank, said in enumerate(self.gather(b"here", BarrierKind.BARRIER) or []) if said]
        # One after the other: the lead writes what all share, the others then find it, and their own buffers.
        for rank in here:
            if rank == self._rank:
                with self.frozen():
                    self._model.load_state_dict(model)
                self._optimizer.load_state_dict(optimizer)
            self.gather(b"", BarrierKind.BARRIER)

    def leave(self) -> None:
        self._client.close()
        if getattr(sys, "last_value", None) is not None:
            return  # this script has failed, and the others should know soon
        # The others need what is served from here, or from processes that die with this one.
        until = time.monotonic() + self._timeouts.barrier
        if self._thread is not None:
            self._thread.join(self._timeouts.barrier)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def wait_until_forwarded(self) -> None:
        if self._relay is None:
            return
        try:
            self._relay.wait(_RELAY_ENDS)
        except subprocess.TimeoutExpired:
            if is_stopped(self._relay.pid):  # others may still need one that runs; this one serves nobody
                self._relay.kill()

    def close(self) -> None:
        with contextlib.suppress(TeamError), self.frozen():
            self._export_state()
        if self._boundaries is not None:
            self._boundaries.remove()
        self._gradients.detach()
        super().close()
        if self._clamp is not None:
            self._clamp.undo()
        own_parameters(self._layout)


def _refuse(optimizer: Optimizer, options: Options) -> None:
    """What a parameter server can not do, in one sentence."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times per step, which a parameter server cannot do; use all-reduce, "
            "or another optimizer"
        )
    if options.gradients != "local":
        raise UsageError(
            f"gradients is {options.gradients!r}; with a parameter server the mean gradient is on the server only, "
            "so it must be 'local'"
        )
    for spec in options.corrections:
        parse_correction(spec)
    parse_servers(options.servers)
    parse_compression(options.compress)

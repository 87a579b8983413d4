"""Links, servers, machines and trouble in a simulation cost what one can count by hand."""

import dataclasses
import math
from typing import Any

import pytest

from paceline.collectives.links import LinkMatrix, best_topology
from paceline.config.distributions import Constant, Empirical, Exponential
from paceline.errors import UsageError
from paceline.policies import Arrival, Decision, Order, Policy, parse_policy
from paceline.simulate.cluster import Failures, SimulatedCluster, Spells, compressed_share
from paceline.simulate.engine import EventLoop
from paceline.simulate.predict import predict, simulate
from paceline.simulate.result import Result
from paceline.topologies import TOPOLOGIES, Link, quickest, seconds, sharded_servers

SIZE, BANDWIDTH, ALPHA = 100e6, 1e9, 0.003
LINK = Link(ALPHA, BANDWIDTH)


def cluster(workers: int = 4, **more: Any) -> SimulatedCluster:
    given = {"compute": Constant(1.0), "size": SIZE, "link": Link(ALPHA, BANDWIDTH), **more}
    return SimulatedCluster(workers=workers, **given)


def ask(spec: str, on: SimulatedCluster, updates: int = 40, seed: int = 0) -> Result:
    return simulate(spec, on, updates=updates, seed=seed)[0]


@pytest.mark.parametrize(("interruptible", "seconds"), [(True, 4.0), (False, (20 - 4) / 3)])
def test_a_cancelled_step_lasts_until_its_end_where_it_cannot_be_left(interruptible: bool, seconds: float) -> None:
    """Two minibatches make an update; by hand they are made at 4, 8, 12, 16 s, or else at 4, 9, 15, 20 s."""
    on = SimulatedCluster(workers=2, own=(Constant(3.0), Constant(4.0)), interruptible=interruptible)
    assert ask("k-batch-sync:k=2", on, updates=4).seconds_per_update == pytest.approx(seconds)


# -- costs of messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4, 7, 16])
@pytest.mark.parametrize("servers", [1, 2, 5, 32])
def test_sync_on_servers_costs_its_formula(workers: int, servers: int) -> None:
    on = cluster(workers, servers=str(servers))
    told = ask("sync", on)
    wanted = 1.0 + sharded_servers(workers, servers, SIZE, LINK)
    assert told.seconds_per_update == pytest.approx(wanted, rel=1e-9)
    assert predict("sync", on).seconds_per_update == pytest.approx(wanted, rel=1e-9)


def test_one_server_is_a_hub() -> None:
    assert ask("sync", cluster(8)).seconds_per_update == pytest.approx(1.0 + sharded_servers(8, 1, SIZE, LINK))


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_a_shard_on_every_machine_costs_as_direct_exchange(workers: int) -> None:
    told = ask("sync", cluster(workers, servers="all"))
    assert told.seconds_per_update == pytest.approx(1.0 + seconds("direct", workers, SIZE, LINK), rel=1e-9)


def test_the_lead_s_own_gradient_does_not_travel() -> None:
    told = ask("sync", cluster(4, servers="lead"))
    assert told.seconds_per_update == pytest.approx(1.0 + 2 * ALPHA + 2 * 3 * SIZE / BANDWIDTH, rel=1e-9)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("workers", [2, 4, 16])
def test_all_reduce_costs_its_topology_s_formula(topology: str, workers: int) -> None:
    wanted = 1.0 + seconds(topology, workers, SIZE, LINK)
    told = ask(f"all-reduce:topology={topology}", cluster(workers))
    assert told.seconds_per_update == pytest.approx(wanted, rel=1e-9)
    uneven = ask(f"all-reduce:topology={topology}", cluster(workers, factors=(2.0,) + (1.0,) * (workers - 1)))
    assert uneven.seconds_per_update == pytest.approx(wanted + 1.0, rel=1e-9)


@pytest.mark.parametrize(("size", "wanted"), [(1e5, "direct"), (SIZE, "ring"), (1e10, "ring")])
def test_by_default_all_reduce_takes_the_topology_that_a_run_would_choose(size: float, wanted: str) -> None:
    links = LinkMatrix([[ALPHA] * 4] * 4, [[BANDWIDTH] * 4] * 4)
    assert best_topology(links, int(size)) == quickest(4, size, LINK) == wanted
    times = {
        name: ask(f"all-reduce:topology={name}", cluster(size=size)).seconds_per_update - 1.0 for name in TOPOLOGIES
    }
    assert ask("all-reduce", cluster(size=size)).seconds_per_update == pytest.approx(1.0 + times[wanted])
    compared = {name: time * TOPOLOGIES[name].handicap for name, time in times.items()}
    assert compared[wanted] == min(compared.values())


def test_async_is_as_fast_as_the_server_s_port_lets_it() -> None:
    on = cluster(8, compute=Exponential(0.1), size=1e9)
    assert ask("async", on, updates=400).seconds_per_update == pytest.approx(1.0, rel=0.02)
    wide = dataclasses.replace(on, server_link=Link(ALPHA, 100 * BANDWIDTH))
    # Then it is the workers' own links: a gradient and a version take a second each, one after the other.
    assert ask("async", wide, updates=400).seconds_per_update == pytest.approx(2.1 / 8, rel=0.05)


def test_a_slow_link_holds_up_its_worker_only() -> None:
    on = cluster(4, links=((2, Link(ALPHA, BANDWIDTH / 100)),), server_link=Link(ALPHA, 1000 * BANDWIDTH))
    told = ask("async", on, updates=400)
    # The others' cycle is 1.206 s; that one's is 21.
    assert told.seconds_per_update == pytest.approx(1 / (3 / 1.206 + 1 / 21.006), rel=0.02)
    assert told.communicating[2] > 0.8
    assert told.communicating[0] < 0.3


def test_workers_of_one_machine_share_its_port() -> None:
    alone = ask("sync", cluster(4, server_link=Link(ALPHA, 100 * BANDWIDTH)))
    shared = ask("sync", cluster(4, server_link=Link(ALPHA, 100 * BANDWIDTH), per_machine=4))
    assert alone.seconds_per_update == pytest.approx(1 + 2 * (ALPHA + SIZE / BANDWIDTH), rel=0.01)
    assert shared.seconds_per_update == pytest.approx(1 + 2 * (ALPHA + 4 * SIZE / BANDWIDTH), rel=0.01)


def test_bytes_are_counted_at_every_port() -> None:
    told = ask("sync", cluster(4), updates=10)
    assert told.traffic["server_in"] == [10 * 4 * SIZE]
    assert told.traffic["server_out"] == [10 * 4 * SIZE]
    assert told.traffic["out"] == told.traffic["in"] == [10 * SIZE] * 4
    ring = ask("all-reduce:topology=ring", cluster(4), updates=10)
    assert ring.traffic["out"] == [10 * 1.5 * SIZE] * 4


@pytest.mark.parametrize(
    ("spec", "share"), [("none", 1.0), ("bf16", 0.5), ("fp16", 0.5), ("int8", 0.25), ("topk:0.01", 0.02)]
)
def test_compression_makes_pushes_shorter_but_not_pulls(spec: str, share: float) -> None:
    told = ask("sync", cluster(4, compress=spec))
    wanted = 1 + 2 * ALPHA + 4 * (1 + share) * SIZE / BANDWIDTH
    assert told.seconds_per_update == pytest.approx(wanted, rel=1e-6)
    assert compressed_share(spec) == share


def test_what_is_sent_while_computing_costs_nothing_more() -> None:
    apart = ask("async", cluster(1, servers="1"), updates=50)
    assert apart.seconds_per_update == pytest.approx(1 + 2 * ALPHA + 0.2)
    over = ask("async", cluster(1, overlap=0.5), updates=50)
    assert over.seconds_per_update == pytest.approx(1 + 2 * ALPHA + 0.1)
    reduced = ask("all-reduce:topology=direct", cluster(4, overlap=0.5), updates=50)
    assert reduced.seconds_per_update == pytest.approx(1.0)  # all of its 0.156 s are hidden


def test_a_server_does_one_thing_after_the_other() -> None:
    on = SimulatedCluster(workers=8, compute=Exponential(0.01), push_seconds=0.02, update_seconds=0.03)
    assert ask("async", on, updates=500).seconds_per_update == pytest.approx(0.05, rel=0.01)
    assert ask("k-batch-async:k=4", on, updates=500).seconds_per_update == pytest.approx(0.11, rel=0.01)


def test_groups_agree_inside_before_they_push() -> None:
    on = cluster(4, size=1e9, server_link=Link(0.0, math.inf))
    told = ask("groups:size=2", on)
    inside = min(seconds(name, 2, 1e9, LINK) for name in TOPOLOGIES)
    # A push of a second, the sum, a pull of a second; two groups in turn.
    assert told.seconds_per_update == pytest.approx((1 + 2 + 2 * ALPHA + inside) / 2, rel=0.05)


# -- trouble ---------------------------------------------------------------------------------------------------------


def test_spells_make_a_worker_slow_now_and_then() -> None:
    on = SimulatedCluster(workers=1, compute=Constant(0.1), spells=Spells(5.0, 30.0, 10.0))
    told = ask("async", on, updates=20_000, seed=3)
    # A quarter of the time is slow, when a step takes five times as long: per second 0.75 * 10 + 0.25 * 2 steps.
    assert 1 / told.seconds_per_update == pytest.approx(8.0, rel=0.05)
    four = dataclasses.replace(on, workers=4)
    assert ask("sync", four, updates=4000).seconds_per_update > 2.2 * ask("k-sync:k=2", four, 4000).seconds_per_update


def test_workers_that_die_are_missed_only_where_all_are_needed() -> None:
    on = SimulatedCluster(workers=8, compute=Constant(1.0), failures=Failures(100.0, 20.0))
    counts = {"sync": 2000, "k-sync:k=5": 2000, "async": 20_000}
    told = {spec: ask(spec, on, updates=count) for spec, count in counts.items()}
    assert all(one.failures > 100 for one in told.values())
    # Of eight one dies every 12.5 s, and then all wait for 20: an update takes 1 + 20/12.5 and some more.
    assert told["sync"].seconds_per_update > 2.0
    assert told["k-sync:k=5"].seconds_per_update == pytest.approx(1.0, rel=0.05)
    # Each is away for 20 of 120 s.
    assert told["async"].minibatches_per_second == pytest.approx(8 * 100 / 120, rel=0.05)


def test_failures_come_by_the_seed() -> None:
    on = SimulatedCluster(
        workers=4, compute=Exponential(1.0), failures=Failures(50.0, 5.0), spells=Spells(3.0, 40.0, 4.0)
    )
    one, two, other = (ask("k-async:k=2", on, updates=500, seed=seed) for seed in (1, 1, 2))
    assert one == two != other


class Greedy(Policy):
    """Lets everybody wait for what never comes."""

    def arrive(self, push: Arrival) -> Decision:
        if self.version >= 3:
            return self.hold(push, Order.WAIT, "not yet")
        self.held.append(push)
        return self.update("", {push.worker: Order.RENEW})


class Picky(Policy):
    """Drops everything after a while."""

    def arrive(self, push: Arrival) -> Decision:
        if self.version >= 3:
            return self.drop(push, "no")
        self.held.append(push)
        return self.update("", {push.worker: Order.RENEW})


def test_a_deadlock_is_said_to_be_one() -> None:
    told = EventLoop(Greedy().for_workers(range(4)), SimulatedCluster(workers=4, compute=Constant(1.0)), 0).run(
        100, "greedy"
    )
    assert told.updates == 3
    assert told.verdict is not None
    assert told.verdict.startswith("deadlock: after 3 updates 4 workers wait")


def test_of_a_mesh_every_worker_is_told_of_and_waits_in_its_pipeline() -> None:
    on = SimulatedCluster(workers=4, compute=Constant(1.0), factors=(1.0, 1.0, 1.0, 3.0))
    told, _ = simulate("mesh:data=2,pipeline=2,microbatches=4,sync=async", on, updates=50)
    assert told.workers == len(told.waiting) == len(told.computing) == len(told.in_flight) == 4
    assert told.waiting[:2] == pytest.approx([0.2, 0.2])  # (p - 1) / (m + p - 1)
    assert told.waiting[2] > 0.6
    assert told.waiting[3] < 0.1
    left, _ = simulate("mesh:data=2,tensor=2,sync=k-sync:k=1", on, updates=50)
    assert left.starved == [2, 3]


def test_gradients_that_are_never_used_do_not_run_forever() -> None:
    told = EventLoop(Picky().for_workers(range(4)), SimulatedCluster(workers=4, compute=Constant(1.0)), 0).run(
        100, "picky"
    )
    assert told.verdict is not None
    assert told.verdict.startswith("starvation:")
    assert told.updates == 3


def test_who_is_never_used_is_named() -> None:
    told = ask("k-sync:k=2", SimulatedCluster(workers=3, compute=Constant(1.0), factors=(1.0, 1.0, 4.0)), updates=100)
    assert told.starved == [2]
    assert told.verdict is None


def test_a_worker_may_have_steps_of_its_own_kind() -> None:
    on = SimulatedCluster(workers=2, compute=Constant(1.0), own=(None, Empirical((3.0, 5.0))))
    told = ask("sync", on, updates=4000)
    assert told.seconds_per_update == pytest.approx(4.0, rel=0.02)
    assert ask("async", on, updates=4000).seconds_per_update == pytest.approx(1 / 1.25, rel=0.02)


def test_adaptive_follows_a_loss_that_is_given() -> None:
    on = SimulatedCluster(workers=8, compute=Exponential(1.0))
    still, _ = simulate("adaptive:of=k-batch-async", on, updates=2000)
    grown, _ = simulate("adaptive:of=k-batch-async", on, updates=2000, loss=lambda version, k: 2.0 / (1 + version / 50))
    assert still.seconds_per_update == pytest.approx(1 / 8, rel=0.1)
    # K is the root of what the loss has fallen by: 2 after 150 updates, 3 after 400, 6 in the end.
    assert grown.seconds_per_update > 3 * still.seconds_per_update


# -- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SimulatedCluster(workers=0), "there must be at least 1"),
        (lambda: SimulatedCluster(workers=2, factors=(1.0,)), "one each"),
        (lambda: SimulatedCluster(workers=1, factors=(-1.0,)), "above 0"),
        (lambda: SimulatedCluster(size=-1), "0 or more"),
        (lambda: SimulatedCluster(update_seconds=math.inf), "0 or more"),
        (lambda: SimulatedCluster(overlap=1.0), "below 1"),
        (lambda: SimulatedCluster(per_machine=0), "at least 1"),
        (lambda: SimulatedCluster(servers="none"), "servers is"),
        (lambda: SimulatedCluster(compress="zip"), "compress is"),
        (lambda: SimulatedCluster(links=((9, Link()),)), "no worker 9"),
        (lambda: Link(-1.0), "latency"),
        (lambda: Link(0.0, 0.0), "bandwidth"),
        (lambda: Spells(0.5, 1.0, 1.0), "factor of at least 1"),
        (lambda: Failures(0.0, 1.0), "above 0"),
    ],
)
def test_nonsense_is_one_sentence(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("pipeline:stages=3", "one each"),
        ("pipeline:stages=4,microbatches=0", "option 'microbatches' .* at least 1"),
        ("pipeline:stages=4,schedule=chaos", "option 'schedule' .* is 'chaos'"),
        ("pipeline:stages=4,microbatches=6,schedule=interleaved", "multiple"),
        ("tensor:degree=3", "the same"),
        ("mesh:data=3,pipeline=2", "the product"),
        ("mesh:data=4,sync=tensor:degree=2", "between replicas"),
        ("mesh:data=4,sync=k-sync:k=9", "k is 9"),
        ("all-reduce:topology=star", "option 'topology' of strategy 'all-reduce' is 'star'"),
        ("k-sync:k=5", "k is 5"),
        ("groups:size=5", "size is 5"),
    ],
)
def test_a_strategy_that_cannot_be_is_one_sentence(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ask(spec, cluster(4))


def test_the_same_policies_are_asked_as_a_server_asks() -> None:
    seen: list[Arrival] = []
    policy = parse_policy("k-sync:k=2").for_workers(range(3))
    arrive = policy.arrive
    policy.arrive = lambda push: (seen.append(push), arrive(push))[1]  # type: ignore[method-assign]
    told = EventLoop(policy, SimulatedCluster(workers=3, compute=Exponential(1.0)), 0).run(50, "k-sync:k=2")
    assert told.updates == policy.version == 50
    assert len(seen) >= 100
    assert len({push.ticket for push in seen}) == len(seen)

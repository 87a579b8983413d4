"""The simulated cluster that the options of a command describe."""

from __future__ import annotations

import dataclasses

from paceline.cli import quantities
from paceline.errors import UsageError
from paceline.simulate.cluster import Failures, SimulatedCluster, Spells
from paceline.topologies import Link


def with_links(
    cluster: SimulatedCluster, latency: str | None, bandwidth: str | None, own: list[str], server: str | None
) -> SimulatedCluster:
    if latency is not None or bandwidth is not None:
        link = Link(
            cluster.link.latency if latency is None else quantities.seconds("--latency", latency),
            cluster.link.bandwidth if bandwidth is None else quantities.rate("--bandwidth", bandwidth),
        )
        kept = (
            tuple((rank, Link(one.latency, link.bandwidth)) for rank, one in cluster.links) if latency is None else ()
        )
        cluster = dataclasses.replace(cluster, link=link, links=kept)
    links = dict(cluster.links)
    for spec in own:
        who, _, what = spec.partition(":")
        first, comma, second = what.partition(",")
        if not (who.isdecimal() and int(who) < cluster.workers and comma):
            raise UsageError(
                f"--link is '{spec}'; it must be RANK:LATENCY,BANDWIDTH, a rank from 0 to {cluster.workers - 1}"
            )
        links[int(who)] = Link(quantities.seconds("--link", first), quantities.rate("--link", second))
    cluster = dataclasses.replace(cluster, links=tuple(sorted(links.items())))
    if server is not None:
        wide = Link(cluster.link.latency, quantities.rate("--server-bandwidth", server))
        cluster = dataclasses.replace(cluster, server_link=wide)
    return cluster


def with_trouble(
    cluster: SimulatedCluster, slow: list[str], spells: str | None, failures: str | None
) -> SimulatedCluster:
    if slow:
        cluster = dataclasses.replace(cluster, factors=_factors(slow, cluster))
    if spells is not None:
        parts = spells.split(",")
        if len(parts) != 3 or not parts[0].replace(".", "", 1).isdecimal():
            raise UsageError(f"--spells is '{spells}'; it must be FACTOR,EVERY,LASTING, as 4,60s,5s")
        every, lasting = (quantities.seconds("--spells", part) for part in parts[1:])
        cluster = dataclasses.replace(cluster, spells=Spells(float(parts[0]), every, lasting))
    if failures is not None:
        parts = failures.split(",")
        if len(parts) != 2:
            raise UsageError(f"--failures is '{failures}'; it must be EVERY,RESTART, as 1h,30s")
        every, restart = (quantities.seconds("--failures", part) for part in parts)
        cluster = dataclasses.replace(cluster, failures=Failures(every, restart))
    return cluster


def _factors(specs: list[str], cluster: SimulatedCluster) -> tuple[float, ...]:
    factors = list(cluster.factors or [1.0] * cluster.workers)
    for spec in specs:
        who, _, what = spec.partition(":")
        try:
            factor = float(what)
        except ValueError:
            factor = 0.0
        if not (who.isdecimal() and int(who) < cluster.workers and 0 < factor < float("inf")):
            raise UsageError(
                f"--slow is '{spec}'; it must be RANK:FACTOR, a rank from 0 to {cluster.workers - 1} and a factor "
                "above 0"
            )
        factors[int(who)] = factor
    return tuple(factors)

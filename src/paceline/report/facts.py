"""The facts of a run for its report: numbers, sentences and the data of the figures, as plain values for JSON."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import numpy as np

from paceline.config.units import duration
from paceline.events.summary import Staleness
from paceline.report.advice import Adviser
from paceline.report.aggregate import RunAggregate
from paceline.report.attribution import CAUSES
from paceline.report.buckets import MOST
from paceline.report.detail import DetailPiece, covers
from paceline.report.reasons import notable_reasons
from paceline.report.rows import COMMUNICATING, KINDS, UPDATING, WAITING, Rows, ends, median_span
from paceline.report.slowness import Pattern, SlownessFinding, WorkerSteps, find_slowness
from paceline.report.verdict import Host, mostly_cancelled, verdict

_TYPICAL = 10
"""Updates in the timeline's first view."""
_NUMBERS = 120_000
"""Shares of time on a page, of all workers together."""
_FEW_CANCELLED = 0.05
"""Share of cancelled steps up to which the others describe a worker."""
_OUTLIER = 3.0
"""Ratio of a step's length to the median from which on it is marked."""


def facts(
    run: RunAggregate,
    *,
    name: str,
    config: dict[str, Any],
    notes: list[str],
    pictures: bool = True,
    columns: int = MOST,
    advice: bool = True,
) -> dict[str, Any]:
    """All facts of one run.

    pictures: include the data of the figures.
    advice: include what would have made it quicker, which takes some simulations.
    columns: the most buckets of the timeline of the whole run.
    """
    ranks = sorted(rank for rank in run.tallies if rank >= 0)
    trained = run.last >= run.first
    span = run.last - run.first if trained else 0.0
    workers = [_worker(run, rank, span) for rank in ranks]
    steps = run.steps.workers()
    servers = sum(rank < 0 for rank in run.tallies)
    cores = config.get("cores")
    host = Host(cores if isinstance(cores, int) else 0, len(workers) + servers)
    findings = _compare(workers, find_slowness(steps), host)
    total = sum(sum(worker["seconds"].values()) for worker in workers) or 1.0
    waiting = sum(worker["seconds"]["waiting"] for worker in workers)
    first, last = run.update_span
    bubble, moved = run.bubbles.result(run.strategy), run.transfers.result()
    reasons = notable_reasons(steps)
    shares = {"begin": run.first, "bubbles": waiting / total, "bubble": bubble}
    known: dict[str, Any] = {
        "name": name,
        "strategy": run.strategy or config.get("strategy"),
        "config": config,
        "notes": [*notes, *_recoveries(run), *_thinned(run)],
        "started": None if run.wall is None or not trained else run.wall + run.first,
        "startup": max(0.0, run.first - run.joined) if trained and run.joined < run.first else None,
        "starting": None if trained else _starting(run, config.get("workers")),
        "seconds": span,
        "served": run.served,
        "updates": run.updates,
        "seconds_per_update": (last - first) / (run.updates - 1) if run.updates > 1 else None,
        "samples_per_second": _rate(run),
        "efficiency": _efficiency(run, workers),
        "bubbles": waiting / total,
        "waiting": waiting,
        "bubble": msgspec.to_builtins(bubble),
        "communication": msgspec.to_builtins(moved),
        "verdict": verdict(workers, findings, reasons, host, **shares) + (moved.sentences if moved else []),
        "slowness": [msgspec.to_builtins(finding) for finding in findings],
        "slow": [worker["rank"] for worker in workers if worker["slow"]],
        "workers": workers,
        "servers": [
            {"rank": rank, "updates": tally.updates, "seconds": float(tally.seconds[UPDATING]), "read": tally.read}
            for rank, tally in sorted(run.tallies.items(), reverse=True)
            if rank < 0
        ],
        "causes": CAUSES,
        "reasons": dict(reasons),
        "staleness": msgspec.structs.asdict(Staleness.of(run.staleness)),
        "bytes": {
            "pushed": sum(worker["bytes"]["pushed"] for worker in workers),
            "saved": sum(worker["bytes"]["saved"] for worker in workers),
            "read": sum(tally.read for tally in run.tallies.values()),
            "sent": sum(worker["bytes"]["sent"] for worker in workers),
        },
        "last": {name: curve.last for name, curve in run.curves.items()},
    }
    if advice:
        known["advice"] = _advice(run, steps, findings, known)
    if pictures:
        known["curves"] = _curves(run)
        known["timeline"] = _timeline(run, ranks, columns)
    return known


def _starting(run: RunAggregate, workers: Any) -> str:
    """How far a run is that has not trained yet."""
    joined = sum(tally.came > -np.inf for rank, tally in run.tallies.items() if rank >= 0)
    if joined and run.is_set_up:
        return "starting: the model is set up, and the first step is computed"
    if joined and joined == workers:
        return f"starting: all {workers} workers have joined"
    of = f" of {workers}" if isinstance(workers, int) else ""
    return f"starting: {joined}{of} workers have joined"


def _advice(
    run: RunAggregate, steps: dict[int, WorkerSteps], findings: list[SlownessFinding], known: dict[str, Any]
) -> list[dict[str, Any]]:
    """Changes that would have made the run quicker; none where steps are cancelled, whose lengths are not known."""
    cancelled = sum(tally.cancelled for tally in run.tallies.values())
    done = sum(tally.minibatches for tally in run.tallies.values())
    if known["config"].get("predicted") or cancelled > _FEW_CANCELLED * done or known["seconds_per_update"] is None:
        return []
    adviser = Adviser(steps, findings, known["strategy"] or "", known["seconds_per_update"], known["config"])
    return [msgspec.to_builtins(one) | {"sentence": one.sentence} for one in adviser.advise()]


# -- workers ---------------------------------------------------------------------------------------------------------


def _recoveries(run: RunAggregate) -> list[str]:
    """A sentence about servers that were killed, if any were."""
    found = [f"server {one.server} at version {one.version}" for one in run.recoveries]
    if not found:
        return []
    some = ", ".join(found[:4]) + (f" and {len(found) - 4} more times" if len(found) > 4 else "")
    return [f"a killed server came back and went on where it was: {some}"]


def _thinned(run: RunAggregate) -> list[str]:
    """A sentence about events that were not recorded, if there are any."""
    if not run.omitted:
        return []
    return [
        f"the record is thinned (--record-limit): {run.omitted:,} events are in sums only; totals count all of them, "
        "the zoomed timeline, step lengths and causes show the others"
    ]


def headline(facts: dict[str, Any]) -> list[str]:
    """The few numbers that say how fast a run was."""
    words = [f"{facts['updates']:,} updates"]
    if facts["samples_per_second"]:
        words.append(f"{facts['samples_per_second']:,.0f} samples/s")
    if facts["seconds_per_update"]:
        words.append(f"{duration(facts['seconds_per_update'])} per update")
    if facts["efficiency"] is not None:
        words.append(f"efficiency {facts['efficiency']:.0%}")
    return words


def _worker(run: RunAggregate, rank: int, span: float) -> dict[str, Any]:
    tally = run.tallies[rank]
    seconds = {kind: float(tally.seconds[number]) for number, kind in enumerate(KINDS)}
    seconds["elsewhere"] = max(0.0, span - sum(seconds.values()))
    steps = max(1, tally.minibatches)
    causes = run.blame.causes(rank)
    backward = max(0.0, seconds["computing"] - tally.forward - tally.slowed)
    return {
        "rank": rank,
        "seconds": seconds,
        "minibatches": tally.minibatches,
        "samples": tally.samples,
        "cancelled": tally.cancelled,
        "pace": tally.own_seconds / steps if tally.minibatches else None,
        "parts": {
            "loading": seconds["loading"] / steps,
            "forward": tally.forward / steps,
            "backward": backward / steps,
            "slowed": tally.slowed / steps,
            "link": (seconds["communicating"] + seconds["updating"]) / steps,
        },
        "median": tally.quantile(0.5),
        "p99": tally.quantile(0.99),
        "longest": tally.longest,
        "blame": sum(causes.values()),
        "causes": dict(causes),
        "bytes": {"read": tally.read, "pushed": tally.pushed, "saved": tally.saved, "sent": tally.sent},
        "state": tally.state,
        "heard": tally.heard,
        "version": tally.version,
        "staleness": tally.stale,
    }


def _compare(workers: list[dict[str, Any]], findings: list[SlownessFinding], host: Host) -> list[SlownessFinding]:
    """Adds to each worker the ratio of its step time to the others', and whether, in what and why it is slow.

    Returns the findings that are worth a sentence: of slow workers, those that were waited for, if there was waiting.
    """
    waits = any(worker["blame"] > 0 for worker in workers)
    said = [one for one in findings if one.pattern is not Pattern.PERSISTENT]
    for worker in workers:
        others = [other for other in workers if other is not worker and other["pace"]]
        worker["ratio"] = 1.0
        worker["slow"], worker["why"] = mostly_cancelled(worker), None
        worker["pattern"] = worker["because"] = None
        if not others or not worker["pace"]:
            continue
        worker["ratio"] = worker["pace"] / statistics.median(other["pace"] for other in others)
        blamed = statistics.median(other["blame"] for other in others)
        waited = worker["blame"] >= 2 * blamed and (worker["blame"] > 0 or not waits)
        mine = [one for one in findings if worker["rank"] in one.ranks]
        if not waited:
            mine = [one for one in mine if one.pattern is not Pattern.PERSISTENT]
        said += [one for one in mine if one.pattern is Pattern.PERSISTENT]
        if mine:
            worker["slow"], worker["why"], worker["pattern"] = True, mine[0].part, mine[0].pattern.value
            if mine[0].reason is not None:
                worker["because"] = host.because(mine[0].reason, mine[0].reason_share)
    return sorted(said, key=findings.index)


def _rate(run: RunAggregate) -> float | None:
    """Samples per second, from the first update to the last."""
    first, last = run.update_span
    return run.samples.inside / (last - first) if last > first and run.samples.inside else None


def _efficiency(run: RunAggregate, workers: list[dict[str, Any]]) -> float | None:
    """Samples per second over those of the same workers if each only loaded and computed."""
    rate = _rate(run)
    alone = 0.0
    for worker in workers:
        busy = worker["seconds"]["computing"] + worker["seconds"]["loading"]
        alone += worker["samples"] / busy if busy else 0.0
    return None if rate is None or not alone else min(1.0, rate / alone)


# -- curves ----------------------------------------------------------------------------------------------------------


def _curves(run: RunAggregate) -> dict[str, Any]:
    curves = {}
    for name, curve in run.curves.items():
        moments, versions, values = curve.series()
        curves[name] = {
            "seconds": [round(moment - run.first, 4) for moment in moments],
            "updates": [round(version, 1) for version in versions],
            "values": [float(f"{value:.6g}") for value in values],
        }
    return {"metrics": curves, "throughput": _throughput(run)}


def _throughput(run: RunAggregate) -> dict[str, list[float]]:
    """Samples and updates per second over time, in at most 200 intervals of several updates each."""
    if run.buckets is None:
        return {"seconds": [], "samples": [], "updates": [], "versions": []}
    count = run.buckets.count(run.last)
    together = max(1, -(-count // max(10, min(200, run.updates // 4))))
    width = run.buckets.width * together
    samples, updates = (np.array(run.buckets.get(key, count)) for key in (run.samples.key, ("updates",)))
    edges = np.arange(0, count, together)
    per_sample, per_update = np.add.reduceat(samples, edges), np.add.reduceat(updates, edges)
    # The last interval is incomplete.
    widths = np.full(len(edges), width)
    widths[-1] = max(width * 0.05, run.last - run.first - width * (len(edges) - 1))
    return {
        "seconds": [round(float(edge), 4) for edge in edges * run.buckets.width + widths / 2],
        "samples": [round(float(value), 2) for value in per_sample / widths],
        "updates": [round(float(value), 3) for value in per_update / widths],
        "versions": [int(value) for value in np.cumsum(per_update)],
    }


# -- the timeline ----------------------------------------------------------------------------------------------------


def _timeline(run: RunAggregate, ranks: list[int], columns: int) -> dict[str, Any]:
    pieces = run.detail.seal()
    lanes = [*ranks, *sorted((rank for rank in run.tallies if rank < 0), reverse=True)]
    count = run.buckets.count(run.last) if run.buckets else 0
    columns = min(columns, max(200, _NUMBERS // (max(1, len(lanes)) * len(KINDS))))
    together = max(1, -(-count // columns))
    width = run.buckets.width * together if run.buckets else 1.0
    marks = []
    for rank in ranks:
        usual = run.tallies[rank].quantile(0.5)
        for step in run.detail.slowest(rank, _OUTLIER * usual):
            start, seconds = float(step["start"]) - run.first, float(step["seconds"])
            marks.append([rank, round(start, 6), round(seconds, 6), round(seconds / usual, 1), int(step["version"])])
    marks.sort(key=lambda mark: -mark[2])
    return {
        "seconds": run.last - run.first if pieces else 0.0,
        "whole": run.detail.whole,
        "passes": run.bubbles.measured() is not None,
        "kinds": KINDS,
        "width": width,
        "lanes": [
            {"rank": rank, "buckets": [_shares(run, (rank, kind), count, together) for kind in range(len(KINDS))]}
            for rank in lanes
        ],
        "pieces": [_piece(piece, run) for piece in pieces],
        "typical": _typical(pieces, run),
        "slowest": marks,
    }


def _shares(run: RunAggregate, key: tuple[object, ...], count: int, together: int) -> list[int]:
    """The share of each bucket that one activity took, in thousandths."""
    if run.buckets is None:
        return []
    sums = np.add.reduceat(np.array(run.buckets.get(key, count)), np.arange(0, count, together))
    return [int(value) for value in np.round(1000 * sums / (run.buckets.width * together))]


def _micro(moments: Any) -> list[int]:
    return [int(value) for value in np.round(np.asarray(moments) * 1e6)]


def _piece(piece: DetailPiece, run: RunAggregate) -> dict[str, Any]:
    begin, end = covers(piece)
    lanes = {}
    for rank in np.unique(piece.rows["rank"]):
        rows = piece.rows[piece.rows["rank"] == rank]
        lanes[str(rank)] = {
            "kind": "".join(str(kind) for kind in rows["kind"]),
            "start": _micro(rows["start"] - begin),
            "length": _micro(rows["seconds"]),
            "version": [int(version) for version in rows["version"]],
            "forward": _micro(rows["forward"]) if (rows["forward"] > 0).any() else None,
            "on": [int(on) for on in rows["on"]] if (rows["kind"] == WAITING).any() else None,
        }
    return {
        "begin": round(begin - run.first, 6),
        "end": round(end - run.first, 6),
        "lanes": lanes,
        "arrows": _arrows(piece, begin) if run.served else [],
        "updates": _micro(_updates(piece.rows, run.served) - begin),
    }


def _updates(rows: Rows, served: bool) -> Any:
    """The times at which versions were published: by the server, or by the lead if all workers make the same update."""
    who = -1 if served else 0
    return ends(rows[(rows["kind"] == UPDATING) & (rows["rank"] == who) & ~rows["skipped"]])


def _arrows(piece: DetailPiece, begin: float) -> list[list[int]]:
    """Pushes and their replies: worker; times of sending, arrival, reply and receipt in µs; 1 if it was used."""
    published = np.sort(_updates(piece.rows, served=True))
    arrows = []
    for rank in np.unique(piece.pushes["rank"]):
        pushes = piece.pushes[piece.pushes["rank"] == rank]
        talks = piece.rows[(piece.rows["rank"] == rank) & np.isin(piece.rows["kind"], (COMMUNICATING, WAITING))]
        if not len(talks):
            continue
        index = np.searchsorted(talks["start"], pushes["start"], "right") - 1
        for push, number in zip(pushes, index, strict=True):
            if number < 0 or push["start"] > talks["start"][number] + talks["seconds"][number]:
                continue
            sent, got = talks["start"][number], talks["start"][number] + talks["seconds"][number]
            last = np.searchsorted(published, got, "right") - 1
            answered = max(push["start"], published[last]) if last >= 0 else push["start"]
            arrows.append(
                [int(rank), *_micro(np.array([sent, push["start"], answered, got]) - begin), int(push["used"])]
            )
    return arrows


def _typical(pieces: list[DetailPiece], run: RunAggregate) -> list[float]:
    """Start and end of a typical view: the run of `_TYPICAL` updates of median length, from the middle of the run."""
    if not pieces:
        return [0.0, 1.0]
    middle = pieces[len(pieces) // 2]
    moments = sorted(_updates(middle.rows, run.served).tolist())
    if len(moments) > 1:
        begin, end = median_span(moments, _TYPICAL)
    else:
        begin, end = covers(middle)
        end = max(end, begin + 1e-6)
    return [round(begin - run.first, 6), round(end - run.first, 6)]

"""The verdict on a run in sentences: who is slow, when, in what and why, and how much of the time is waiting."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.config.units import duration
from paceline.errors import names
from paceline.events.bubbles import Bubble
from paceline.report.attribution import CAUSES
from paceline.report.reasons import reason_words
from paceline.report.slowness import Pattern, SlownessFinding

_NOTABLE = 0.02
"""Share of the time above which waiting is called notable."""
_WORTH = 5e-4
"""Share of the time below which waiting counts as none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """What is known of the machine of a run."""

    cores: int
    """0 if unknown."""
    processes: int
    """Workers and servers of the run."""

    def because(self, reason: str, share: float) -> str:
        """Why a single worker was slow, as the end of a sentence."""
        return reason_words(reason, share, self.cores, self.processes, alone=True)


def mostly_cancelled(worker: dict[str, Any]) -> bool:
    """True if most of its steps were cancelled: those it finished are its quick ones, and say nothing of its pace."""
    return bool(worker["cancelled"] > worker["minibatches"])


def verdict(
    workers: list[dict[str, Any]],
    findings: list[SlownessFinding],
    reasons: list[tuple[str, float]],
    host: Host,
    *,
    begin: float,
    bubbles: float,
    bubble: Bubble | None,
) -> list[str]:
    """Sentences that name the slow workers, the share of waiting, and a pipeline's bubble.

    reasons: what takes a notable share of all workers' time, with the share; begin: the time at which training began.
    """
    words = []
    whole = sum(worker["seconds"]["waiting"] for worker in workers) or 1.0
    blame = {worker["rank"]: worker["blame"] for worker in workers}
    for finding in sorted(findings, key=lambda one: -sum(blame[rank] for rank in one.ranks)):
        sentence, blamed = _sentence(finding, begin, host), sum(blame[rank] for rank in finding.ranks)
        if blamed / whole > _NOTABLE and bubbles > _NOTABLE:
            it = "it" if len(finding.ranks) == 1 else "them"
            sentence += f"; the team waited {duration(blamed)} for {it} ({blamed / whole:.0%} of all waiting)"
        elif bubbles > _WORTH:
            sentence += "; the others hardly waited for it"
        words.append(sentence + ".")
    for worker in workers:
        if mostly_cancelled(worker):
            begun = worker["cancelled"] + worker["minibatches"]
            words.append(f"Worker {worker['rank']} was cancelled in {worker['cancelled']:,} of {begun:,} steps.")
    if not words and len(workers) > 1:
        words.append("No worker is slow by itself.")
    if len(workers) > 1:
        much = "Waiting takes" if bubbles > _NOTABLE else "Waiting takes only"
        words.append(f"{much} {bubbles:.1%} of the workers' time." if bubbles > _WORTH else "No worker waited.")
    told = {finding.reason for finding in findings}
    for reason, share in reasons:
        if reason not in told:
            words.append(f"On average a worker {reason_words(reason, share, host.cores, host.processes, alone=False)}.")
    if bubble is not None:
        equal = f"; with stages of equal length it would be {bubble.formula:.1%}" if bubble.formula is not None else ""
        words.append(f"The pipeline's bubble is {bubble.measured:.1%} of a step{equal}.")
        if bubble.predicted:
            words.append(
                f"From its first pass to its last a step takes {duration(bubble.step)}; {duration(bubble.predicted)} "
                "were predicted when the model was cut, from its measured operations and links."
            )
    return words


def _sentence(finding: SlownessFinding, begin: float, host: Host) -> str:
    """A finding in words, without a full stop."""
    who, more = f"Worker {finding.ranks[0]}", duration(finding.more)
    match finding.pattern:
        case Pattern.PERSISTENT:
            step = duration(finding.usual + finding.more)
            what = f"{who} is slow: a step of its own takes it {step}, {finding.ratio:.1f} times as long as the others'"
        case Pattern.INTERMITTENT:
            when = f"every {_ordinal(finding.period)} step" if finding.period else f"{finding.share:.0%} of its steps"
            what = f"{who} is slow now and then: {when} takes it {more} longer"
        case Pattern.ONE_OFF:
            after = duration(max(0.0, finding.moment - begin))
            what = f"{who} was slow once: step {finding.step:,}, {after} after the start, took it {more} longer"
        case Pattern.ROTATING:
            share, some = f"{finding.share:.0%} of the steps", names(finding.ranks)
            what = f"Slowness moves from worker to worker: in {share} one of {some} takes {more} longer"
    what += f", because of {CAUSES[finding.part]}"
    if finding.reason is None:
        return what
    return f"{what}: it {host.because(finding.reason, finding.reason_share)}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"

"""Results of the checks, and their verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Verdict = Literal["ok", "works with limits", "cannot"]
_ORDER: tuple[Verdict, ...] = ("ok", "works with limits", "cannot")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    what: str
    verdict: Verdict
    found: str
    change: str = ""
    """What to change, unless the verdict is ok."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    findings: list[Finding]


class LinkFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured links between workers; rows send, columns receive, the diagonal is empty."""

    hosts: list[str]
    """Host name of each worker; of several machines, with its address."""
    latency: list[list[float | None]]
    """Seconds for a short message, one way."""
    bandwidth: list[list[float | None]]
    """Bytes per second in large messages."""
    findings: list[Finding]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    machines: list[Machine]
    links: LinkFindings | None = None

    @property
    def findings(self) -> list[Finding]:
        return [f for machine in self.machines for f in machine.findings] + (self.links.findings if self.links else [])

    @property
    def verdict(self) -> Verdict:
        return worst(finding.verdict for finding in self.findings)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of these verdicts."""
    return max(verdicts, key=_ORDER.index, default="ok")


def ok(what: str, found: str) -> Finding:
    return Finding(what=what, verdict="ok", found=found)


def limits(what: str, found: str, change: str) -> Finding:
    return Finding(what=what, verdict="works with limits", found=found, change=change)


def cannot(what: str, found: str, change: str) -> Finding:
    return Finding(what=what, verdict="cannot", found=found, change=change)

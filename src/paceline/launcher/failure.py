"""The error that made a run fail, found among the ends of its processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.cluster.supervision import ExitReport, ExitStatus, failures
from paceline.errors import names

NEEDED = (
    ", and this run cannot go on without it; under all-reduce and with a parameter server --elastic lets the others go "
    "on, and paceline run --resume goes on from a snapshot"
)
"""The end of a sentence about a worker that was preempted."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The process that failed first by itself, and what became of the others."""

    cause: ExitStatus
    same: list[int]
    """Ranks of the others that failed with the same error."""
    others: list[ExitStatus]
    """Workers that failed with another error."""

    @classmethod
    def of(cls, statuses: Sequence[ExitStatus]) -> Failure | None:
        """None if the run did not fail."""
        failed = failures(statuses)
        if not failed:
            return None
        # Causes come before their consequences.
        causes = [one for one in failed if one.exit_report is None or not one.exit_report.consequence] or failed
        first, report = causes[0], causes[0].exit_report
        reports = [(one.rank, one.exit_report) for one in causes[1:]]
        same = [rank for rank, other in reports if report and other and _error(other) == _error(report)]
        others = [one for one in failed if one is not first and one.rank not in same and one.exit_report is not None]
        return cls(first, same, others)

    @property
    def notes(self) -> list[str]:
        """Sentences about the other workers."""
        found = [f"{names(self.same)} failed with the same error"] if self.same else []
        for status in self.others:
            if status.exit_report is not None:
                found.append(f"rank {status.rank} stopped: {status.exit_report.kind}: {status.exit_report.message}")
        return found


def warnings(statuses: Sequence[ExitStatus]) -> list[str]:
    """Sentences about workers that were lost, and that the others went on without."""
    # A worker that was started again, or that came too late to join, is no loss.
    lost = [one for one in statuses if one.spared and not one.restarted and one.exit_report is None]
    failed = failures(statuses)
    return [f"warning: {one.description}; the others went on without it" for one in lost if one not in failed]


def _error(report: ExitReport) -> tuple[str, str]:
    return report.kind, report.message

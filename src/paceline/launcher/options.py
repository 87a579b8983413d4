"""The options of a run, as a launcher takes and checks them."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Sequence
from typing import Any

from paceline.config import (
    Launch,
    Strategy,
    Timeouts,
    capacity,
    check_workers,
    parse_compression,
    parse_correction,
    parse_door,
    parse_grace,
    parse_record_limit,
    parse_servers,
    parse_slowness,
    parse_snapshot,
    parse_strategy,
    positive,
)
from paceline.config.launch import LONGEST
from paceline.errors import UsageError
from paceline.loggers.process import Logging
from paceline.policies import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run, checked on construction; messages name them as `paceline run` does."""

    workers: int
    strategy: str | None = None
    """None for the script's own."""
    servers: str | None = None
    correct: Sequence[str] = ()
    compress: str | None = None
    elastic: bool = False
    restarts: int = 0
    slow: Sequence[str] = ()
    seed: int = 0
    timeout: float = 300.0
    """Seconds."""
    open: str | None = None
    """The port, or address and port, at which other machines may join."""
    grace: str = "30s"
    """The time from SIGTERM to a worker until it must have left."""
    record: bool = True
    record_limit: str = "256MB"
    snapshot: str | None = None
    """The time between snapshots, or "off"; None for that of a named run, or of one without a name."""
    logging: Logging = dataclasses.field(default_factory=Logging)
    restarts_team: bool = False
    """As `Engine.RESTARTS_TEAM`."""

    def __post_init__(self) -> None:
        positive("--workers", self.workers)
        if not 0 < self.timeout <= LONGEST:
            raise UsageError(f"--timeout is {self.timeout:g}; it must be above 0 and at most {LONGEST:,.0f} seconds")
        if self.restarts < 0:
            raise UsageError(f"--restarts is {self.restarts}; it must be 0 or more")
        if self.strategy is not None:
            object.__setattr__(self, "strategy", str(_check(self.strategy, self.workers)))
        for one in self.correct:
            parse_correction(one)
        parse_servers(self.servers or "1")
        parse_compression(self.compress or "none")
        parse_slowness(self.slow, self.workers, capacity(self.workers))
        parse_snapshot(self.snapshot or "off")
        parse_grace(self.grace)
        if self.open is not None:
            parse_door(self.open, "--open")

    @property
    def has_policy(self) -> bool:
        """True if the strategy is given, and is one of a parameter server."""
        return self.strategy is not None and isinstance(parse_strategy(self.strategy), Policy)

    @property
    def server_processes(self) -> int:
        """Servers that the workers will ask for, as far as these options determine it."""
        where = parse_servers(self.servers or "1")
        return where if isinstance(where, int) and (self.has_policy or self.servers is not None) else 0

    def launch(
        self,
        folder: str | None,
        name: str | None = None,
        *,
        detected: bool = False,
        named: bool = False,
        resume: str | None = None,
    ) -> Launch:
        """The settings of the workers; folder: of the run, None if it is not recorded.

        name: where the workers themselves make the folder, and, if they are `detected`, start its loggers. named: the
        user has named the run; resume: the folder with the snapshots that it goes on from.
        """
        return Launch(
            strategy=self.strategy,
            timeouts=Timeouts(barrier=self.timeout, join=max(self.timeout, Timeouts().join)),
            slow=parse_slowness(self.slow, self.workers, capacity(self.workers)),
            seed=self.seed,
            folder=folder,
            name=name,
            record=self.record,
            record_limit=parse_record_limit(self.record_limit),
            loggers=self.logging.loggers if detected else [],
            push_metrics=self.logging.push_metrics if detected else None,
            servers=self.servers,
            corrections=list(self.correct),
            compress=self.compress,
            prelude=_PRELUDE,
            snapshot=parse_snapshot(self.snapshot or (_INTERVAL if named else "off")),
            resume=resume,
            open=self.open,
            restarts=self.restarts > 0 and not self.elastic,
            grace=parse_grace(self.grace),
            # Where a team without a server is started again as a whole, it need not survive the loss of a worker.
            elastic=self.elastic
            or self.open is not None
            or (self.restarts > 0 and (self.has_policy or not self.restarts_team)),
        )

    def config(self, **more: Any) -> dict[str, Any]:
        """The content of `config.json`, after the given."""
        return {
            **more,
            "workers": self.workers,
            "strategy": self.strategy,  # until the events tell the script's own strategy
            "servers": self.servers,
            "correct": list(self.correct),
            "compress": self.compress,
            "elastic": self.elastic,
            "restarts": self.restarts,
            "slow": list(self.slow),
            "seed": self.seed,
            "cores": len(os.sched_getaffinity(0)),
            "timeout": self.timeout,
            "open": self.open,
            "grace": self.grace,
            "record_limit": self.record_limit,
            "snapshot": self.snapshot,
            "log": self.logging.loggers,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


_INTERVAL = "30s"
"""Between snapshots of a run that has a name."""
_PRELUDE = "paceline.integrations.import_hook"
"""Lets scripts of Accelerate and of the Hugging Face Trainer train under the run's strategy."""


def _check(spec: str, workers: int) -> Strategy:
    """The strategy, checked for this number of workers."""
    strategy = parse_strategy(spec)
    if isinstance(strategy, Policy):
        strategy.for_workers(range(workers))
    check_workers(strategy, workers)
    return strategy

"""What a run leaves in its folder, beside what its processes write there themselves."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from paceline.cluster.engines.base import Engine, EngineCallbacks
from paceline.cluster.supervision import ExitStatus
from paceline.config import Launch
from paceline.events.private import write_private
from paceline.events.summary import Summariser, Summary, merge
from paceline.launcher.live_page import LivePage
from paceline.launcher.progress import Progress
from paceline.loggers.process import Logging, LoggingProcess


class RunRecord:
    """Writes `config.json` when a run starts; `events.jsonl` and `summary.json` when it ends, however it ends."""

    def __init__(self, progress: Progress, config: dict[str, Any], logging: Logging | None, *, live: bool) -> None:
        """logging: what to log the run to, beside what its script asks for; None if it is not recorded.

        live: serve the live page while the run goes on.
        """
        self._progress, self._config = progress, config
        self._page = LivePage(progress.folder) if live and progress.folder is not None else None
        self._logging: LoggingProcess | None = None
        if logging is not None and progress.folder is not None:
            self._logging = LoggingProcess(progress.folder, logging)
        self._workers: int = config["workers"]
        self.summary: Summary = Summariser(self._workers).result()
        """Of the run's events, once the context has exited."""

    def __enter__(self) -> Self:
        self._write_config(self._config)
        if self._page is not None:
            self._page.start()
        if self._logging is not None:
            self._logging.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._logging is not None:
            self._logging.start()  # if the script asked for it only now
        if self._progress.folder is not None:
            self.summary = merge(self._progress.folder, self._workers, self._progress.note_once)
        self._write_config({**self._config, "strategy": self.summary.strategy or self._config["strategy"]})
        if self._logging is not None:
            self._logging.stop()
        if self._page is not None:
            self._page.stop()

    def run(self, engine: Engine, launch: Launch) -> list[ExitStatus]:
        """Run the engine's job to its end and show its progress; returns how its processes ended."""
        progress = self._progress
        with progress:
            callbacks = EngineCallbacks(output=progress.output, tick=self._tick, note=progress.note)
            return engine.run(launch, callbacks)

    def _tick(self) -> None:
        self._progress.tick()
        if self._logging is not None:
            self._logging.start()  # as soon as the script asks for it

    def _write_config(self, config: dict[str, Any]) -> None:
        if self._progress.folder is not None:
            with self._progress.recording():
                text = msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
                write_private(self._progress.folder / "config.json", text)

"""Values of a run as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.events import Event
from paceline.events.scalars import Values, all_scalars
from paceline.loggers.base import Logger


class TensorBoardLogger(Logger):
    """Writes `tensorboard/` in the run's folder, without torch or TensorFlow."""

    NAME, MODULE, PACKAGE = "tensorboard", "tensorboard", "tensorboard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._record, self._summary = Record, Summary
        self._writer: Any = EventFileWriter(str(folder / "tensorboard"), flush_secs=5)

    def configure(self, config: dict[str, Any]) -> None:
        """Shows the configuration as a table among the texts."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in config.items())
        table = f"| | |\n|---|---|\n{rows}"
        value = self._summary.Value(
            tag="paceline/config",
            metadata=create_summary_metadata("paceline/config", ""),
            tensor=TensorProto(dtype="DT_STRING", string_val=[table.encode()]),
        )
        self._writer.add_event(self._record(step=0, summary=self._summary(value=[value])))

    def log(self, values: Sequence[Values]) -> None:
        for version, wall, scalars in values:
            found = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            self._writer.add_event(self._record(wall_time=wall, step=version, summary=self._summary(value=found)))

    def close(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def write_tensorboard(folder: Path, events: Iterable[Event]) -> None:
    """Writes the values of a run that is over to `tensorboard/` in its folder, with those of each worker."""
    TensorBoardLogger.check()
    logger = TensorBoardLogger(folder)
    try:
        logger.log(list(all_scalars(events)))
    finally:
        logger.close()

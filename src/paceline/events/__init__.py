"""Everything that happens is an event: one typed record. Reports, figures and oracles are made from these alone."""

from paceline.events.recorder import Recorder
from paceline.events.schema import (
    Balance,
    Compute,
    Event,
    Join,
    Leave,
    Message,
    Metric,
    Reduce,
    Update,
    Wait,
    decode,
)

__all__ = [
    "Balance",
    "Compute",
    "Event",
    "Join",
    "Leave",
    "Message",
    "Metric",
    "Recorder",
    "Reduce",
    "Update",
    "Wait",
    "decode",
]

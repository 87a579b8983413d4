"""Pictures of runs, made from their events and from nothing else."""

from paceline.report.messages import draw_messages
from paceline.report.timeline import timeline

__all__ = ["draw_messages", "timeline"]

"""Figures, reports and the live page of runs, made from their events only."""

from paceline.report.messages import draw_messages
from paceline.report.timeline import timeline

__all__ = ["draw_messages", "timeline"]

"""Moves bytes. Here: memory that several processes of one machine share, and the meetings they hold in it."""

from paceline.transport.meeting import Intent, Meeting
from paceline.transport.memory import Memory
from paceline.transport.steps import Steps

__all__ = ["Intent", "Meeting", "Memory", "Steps"]

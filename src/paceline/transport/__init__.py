"""Moves bytes: memory that processes of one machine share, their meetings, and wires to other machines."""

from paceline.transport.meeting import Intent, Meeting
from paceline.transport.memory import Memory
from paceline.transport.spread import SpreadMeeting
from paceline.transport.star import StarMeeting
from paceline.transport.steps import Steps

__all__ = ["Intent", "Meeting", "Memory", "SpreadMeeting", "StarMeeting", "Steps"]

"""Moves bytes: memory that processes of one machine share, their barriers, and connections to other machines."""

from paceline.transport.barrier import Barrier, BarrierKind
from paceline.transport.elastic_barrier import ElasticBarrier
from paceline.transport.machines_barrier import MachinesBarrier
from paceline.transport.memory import Memory
from paceline.transport.step_counter import StepCounter

__all__ = ["Barrier", "BarrierKind", "ElasticBarrier", "MachinesBarrier", "Memory", "StepCounter"]

"""Strategies, timeouts, slowness and the launch of a run: parsed and checked here, once."""

from __future__ import annotations

from paceline.config.checks import one_of, positive
from paceline.config.gradients import (
    Compression,
    Correction,
    DcAsgd,
    DcAsgdAdaptive,
    DropAbove,
    DuttaRate,
    RateOverStaleness,
    parse_compression,
    parse_correction,
    parse_servers,
    place_servers,
)
from paceline.config.launch import (
    Launch,
    Place,
    Profiling,
    Timeouts,
    capacity,
    parse_grace,
    parse_record_limit,
    parse_snapshot,
)
from paceline.config.model_parallel import (
    Mesh,
    Pipeline,
    Tensor,
    between_replicas,
    check_workers,
    replicas_by_machine,
    workers_of,
)
from paceline.config.run_spec import OptimizerSpec, ParameterSpec, RunSpec
from paceline.config.slowness import Slowness, parse_slowness
from paceline.config.strategy import (
    STRATEGIES,
    AllReduce,
    Strategy,
    name_and_options,
    parse_strategy,
    search_beside,
    strategy_class,
)

__all__ = [
    "STRATEGIES",
    "AllReduce",
    "Compression",
    "Correction",
    "DcAsgd",
    "DcAsgdAdaptive",
    "DropAbove",
    "DuttaRate",
    "Launch",
    "Mesh",
    "OptimizerSpec",
    "ParameterSpec",
    "Pipeline",
    "Place",
    "Profiling",
    "RateOverStaleness",
    "RunSpec",
    "Slowness",
    "Strategy",
    "Tensor",
    "Timeouts",
    "between_replicas",
    "capacity",
    "check_workers",
    "name_and_options",
    "one_of",
    "parse_compression",
    "parse_correction",
    "parse_grace",
    "parse_record_limit",
    "parse_servers",
    "parse_slowness",
    "parse_snapshot",
    "parse_strategy",
    "place_servers",
    "positive",
    "replicas_by_machine",
    "search_beside",
    "strategy_class",
    "workers_of",
]

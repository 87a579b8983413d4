"""Strategy specs, timeouts, slowness, launch: what a run is, parsed and checked here, once."""

from __future__ import annotations

from paceline.config.checks import one_of, positive
from paceline.config.data_parallel import (
    Adaptive,
    AllReduce,
    Async,
    Auto,
    Groups,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Ssp,
    Sync,
)
from paceline.config.gradients import (
    CORRECTIONS,
    FORMS,
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
from paceline.config.launch import Launch, Place, Profiling, capacity
from paceline.config.model_parallel import (
    NORMS,
    Mesh,
    Pipeline,
    Tensor,
    between_replicas,
    check_workers,
    workers_of,
)
from paceline.config.run_spec import OptimizerSpec, ParameterSpec, RunSpec
from paceline.config.slowness import Slowness, parse_slowness
from paceline.config.strategy import STRATEGIES, Strategy, parse_spec, parse_strategy
from paceline.config.timeouts import Timeouts

__all__ = [
    "CORRECTIONS",
    "FORMS",
    "NORMS",
    "STRATEGIES",
    "Adaptive",
    "AllReduce",
    "Async",
    "Auto",
    "Compression",
    "Correction",
    "DcAsgd",
    "DcAsgdAdaptive",
    "DropAbove",
    "DuttaRate",
    "Groups",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
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
    "Ssp",
    "Strategy",
    "Sync",
    "Tensor",
    "Timeouts",
    "between_replicas",
    "capacity",
    "check_workers",
    "one_of",
    "parse_compression",
    "parse_correction",
    "parse_servers",
    "parse_slowness",
    "parse_spec",
    "parse_strategy",
    "place_servers",
    "positive",
    "workers_of",
]

STRATEGIES |= {
    kind.spec: kind
    for kind in (
        AllReduce,
        Sync,
        KSync,
        KBatchSync,
        Async,
        KAsync,
        KBatchAsync,
        Ssp,
        Groups,
        Adaptive,
        Auto,
        Pipeline,
        Tensor,
        Mesh,
    )
}

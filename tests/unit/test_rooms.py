"""Imports go one way through the house."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

HOUSE = Path(paceline.__file__).parent
LEAVES = {"config", "errors", "events", "failpoints", "policies", "schedules", "topologies"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "failpoints": {"errors"},
    "requirements": set(),
    "config": {"errors", "schedules", "topologies"},
    "events": {"config", "errors", "schedules"},
    "policies": {"config", "errors"},
    "schedules": {"errors"},
    "topologies": {"errors"},
    "transport": {"config", "errors", "failpoints", "topologies"},
    "cluster": {"config", "errors", "events", "failpoints", "transport"},
    "parameters": {"config", "errors", "events", "failpoints", "transport", "cluster", "collectives"},
    "data": {"config", "errors", "events", "failpoints"},
    "observation": {"config", "errors", "events"},
    "collectives": LEAVES | {"transport", "cluster", "requirements", "observation"},
    "graph": LEAVES,
    "tensor_parallel": {"config", "errors", "transport", "cluster", "parameters", "collectives", "graph"},
    "pipeline": LEAVES | {"cluster", "transport", "parameters", "collectives", "graph", "tensor_parallel"},
    "relay": LEAVES | {"transport", "cluster", "parameters", "data", "server"},
    "server": LEAVES | {"transport", "cluster", "parameters", "data", "planner"},
    "strategies": LEAVES
    | {
        "transport",
        "cluster",
        "parameters",
        "collectives",
        "server",
        "relay",
        "pipeline",
        "tensor_parallel",
    },
    "team": LEAVES | {"transport", "cluster", "parameters", "data", "strategies", "loggers", "observation"},
    "integrations": {"team", "data", "parameters", "policies", "config", "errors"},
    "bench": {"team", "topologies", "cluster", "collectives", "transport", "config", "errors", "events"},
    "doctor": {"cluster", "collectives", "transport", "config", "errors"},
    "simulate": LEAVES,
    "planner": LEAVES | {"simulate", "graph"},
    "report": LEAVES | {"simulate", "graph"},
    "loggers": {"config", "errors", "events"},
    "launcher": LEAVES | {"cluster", "team", "report", "loggers"},
    "__init__": {"team", "launcher", "collectives", "config", "errors", "policies", "requirements"},
    "__main__": {"cli"},
}
ROOMS["cli"] = set(ROOMS) - {"__init__", "__main__"}
"""Which rooms each may import, besides itself."""

WIRES = {"torch.distributed", "socket", "zmq"}
OUTSIDE: dict[str, set[str]] = {
    "simulate": WIRES,
    "planner": WIRES,
    "graph": WIRES,
    "policies": {"torch", "socket", "zmq", "time"},
    "schedules": {"torch", "socket", "zmq", "time"},
    "topologies": {"torch", "numpy", "socket", "zmq", "time"},
}
"""Which modules from elsewhere a room must not know."""


def imported(source: str) -> Iterator[str]:
    """Full names of all that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"{'.' * node.level}{node.module or ''}"
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(room: str, source: str) -> list[str]:
    """What a source in this room imports that it must not."""
    if room not in ROOMS:
        return [f"{room} is not a room of the house"]
    found = []
    for name in imported(source):
        top, _, rest = name.partition(".")
        if name.startswith("."):
            found.append(f"{room} imports {name}, relative to itself")
        elif top == "paceline":
            first = rest.split(".")[0]
            # The package itself holds the public names, which are the team's.
            target = first if first in ROOMS or (first and (HOUSE / first).is_dir()) else "team"
            if target not in {room, *ROOMS[room]}:
                found.append(f"{room} imports {target} ({name})")
        elif any(f"{name}.".startswith(f"{banned}.") for banned in OUTSIDE.get(room, ())):
            found.append(f"{room} imports {name}")
    return found


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def test_every_import_goes_the_allowed_way() -> None:
    found = [
        f"{path.relative_to(HOUSE)}: {offence}"
        for path in sorted(HOUSE.rglob("*.py"))
        for offence in offences(room_of(path), path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_room_that_the_table_names_imports_only_rooms_of_the_table() -> None:
    assert set().union(*ROOMS.values()) <= set(ROOMS)


def test_strategies_import_at_most_eight_rooms_beside_the_leaves() -> None:
    assert len(ROOMS["strategies"] - LEAVES) <= 8


def test_the_way_has_no_circles() -> None:
    left = {room: allowed - {room} for room, allowed in ROOMS.items()}
    while left:
        free = {room for room, allowed in left.items() if not allowed & set(left)}
        assert free, f"these import each other: {sorted(left)}"
        left = {room: allowed for room, allowed in left.items() if room not in free}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("errors", "import paceline.config"),
        ("transport", "from paceline.cluster.membership import Members"),
        ("data", "from paceline import strategies"),
        ("parameters", "def late():\n    from paceline.team import join\n"),
        ("strategies", "class A:\n    def f(self):\n        import paceline\n"),
        ("team", "from paceline.cli import main"),
        ("bench", "import paceline.report.figures as figures"),
        ("simulate", "import torch.distributed as dist"),
        ("simulate", "from torch import distributed"),
        ("planner", "if True:\n    from socket import create_connection\n"),
        ("planner", "import zmq.asyncio"),
        ("policies", "from torch.nn import Module"),
        ("topologies", "from paceline.transport.channel import Channel"),
        ("topologies", "if TYPE_CHECKING:\n    import torch\n"),
        ("cluster", "from . import local"),
        ("cluster", "from ..team import join"),
        ("attic", "import os"),
    ],
)
def test_an_import_the_wrong_way_is_caught(room: str, source: str) -> None:
    assert len(offences(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("cli", "from paceline.cli import bench, run\nfrom paceline.report import page\n"),
        ("bench", "import paceline\nfrom paceline import join\n"),
        ("simulate", "import torch\nfrom paceline.policies import Sync\nimport socketserver\n"),
        ("cluster", "import socket\nimport torch.distributed\n"),
    ],
)
def test_an_import_the_allowed_way_is_not(room: str, source: str) -> None:
    assert offences(room, source) == []

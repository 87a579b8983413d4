import paceline


def test_the_public_names_are_these_and_no_others() -> None:
    assert paceline.__all__ == [
        "Adaptive",
        "AllReduce",
        "Async",
        "Auto",
        "Backup",
        "Groups",
        "JoinError",
        "KAsync",
        "KBatchAsync",
        "KBatchSync",
        "KSync",
        "Mesh",
        "Mismatch",
        "PacelineError",
        "Pipeline",
        "Run",
        "ServerLost",
        "Ssp",
        "Sync",
        "Team",
        "TeamError",
        "TeamTimeout",
        "Tensor",
        "Timeouts",
        "UsageError",
        "WorkerLost",
        "join",
        "last_run",
        "launch",
    ]


def test_the_public_names_are_sorted_and_there() -> None:
    assert paceline.__all__ == sorted(paceline.__all__)
    assert all(hasattr(paceline, name) for name in paceline.__all__)


def test_every_error_can_be_caught_as_one() -> None:
    errors = [getattr(paceline, name) for name in paceline.__all__ if name.endswith(("Error", "Lost", "Timeout"))]
    assert len(errors) == 7
    assert all(issubclass(error, paceline.PacelineError) for error in [*errors, paceline.Mismatch])

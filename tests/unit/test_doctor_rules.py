"""The doctor's judgement: of links, of limits, and of strangers at the door."""

from __future__ import annotations

import io
import resource
import socket
import threading

import pytest
from rich.console import Console

from paceline.cli.doctor import _table
from paceline.doctor import libraries, links, machine
from paceline.doctor.findings import Diagnosis, Finding, Machine, cannot, limits, ok, worst
from paceline.transport.keys import Secret

SECRET = Secret.of(None, "secret")


def matrix(size: int, value: float, **other: float) -> list[list[float | None]]:
    rows: list[list[float | None]] = [[None if a == b else value for b in range(size)] for a in range(size)]
    for key, special in other.items():
        rows[int(key[1])][int(key[2])] = special
    return rows


def test_even_links_are_ok() -> None:
    (finding,) = links.judge(matrix(3, 50e-6), matrix(3, 1e9))
    assert finding.verdict == "ok"
    assert finding.found == "latency 50 µs, bandwidth 1,000 MB/s (median)"


def test_a_slow_link_is_named_with_its_direction() -> None:
    (finding,) = links.judge(matrix(4, 50e-6), matrix(4, 1e9, _20=1e8))
    assert finding.verdict == "works with limits"
    assert "2 to 0 carries 100 MB/s" in finding.found
    assert "0 to 2" not in finding.found
    assert finding.change


def test_a_distant_member_is_named_once() -> None:
    (finding,) = links.judge(matrix(4, 50e-6, _13=1e-3, _31=1e-3), matrix(4, 1e9))
    assert "1 and 3 are 1,000 µs apart" in finding.found
    assert finding.found.count("apart") == 1


MBIT = 1e6 / 8


def test_the_slow_one_of_three_hosts_is_named() -> None:
    """At 200, 100 and 20 Mbit/s: the median link is a slow one, and no link is much slower than that."""
    rates = matrix(3, 20 * MBIT, _01=100 * MBIT, _10=100 * MBIT)
    hosts = ["vm (10.0.0.1)", "vm (10.0.0.2)", "vm (10.0.0.3)"]
    (finding,) = links.judge(matrix(3, 1e-4), rates, hosts)
    assert finding.verdict == "works with limits"
    assert "vm (10.0.0.3) is slow: at most 2.5 MB/s to and from any other, which have 12.5 MB/s" in finding.found
    assert finding.found.count("is slow") == 1 and "carries" not in finding.found


def test_hosts_with_equal_links_are_ok_however_quick_their_own_workers_are() -> None:
    """Two workers each on three machines: inside a machine they are 100 times as quick."""
    hosts = ["a", "a", "b", "b", "c", "c"]
    rates: list[list[float | None]] = [
        [None if a == b else 1e10 if hosts[a] == hosts[b] else 1e8 for b in range(6)] for a in range(6)
    ]
    (finding,) = links.judge(matrix(6, 1e-4), rates, hosts)
    assert finding.verdict == "ok"


def test_of_two_hosts_nobody_can_tell_which_is_slow() -> None:
    (finding,) = links.judge(matrix(2, 1e-4), matrix(2, 1e6), ["a", "b"])
    assert finding.verdict == "ok"


def test_without_a_key_it_says_what_to_set() -> None:
    nothing: list[list[float | None]] = [[None, None], [None, None]]
    (finding,) = links.judge(nothing, nothing)
    assert finding.verdict == "works with limits"
    assert "PACELINE_KEY" in finding.change


def test_the_gravest_finding_is_the_verdict() -> None:
    fine, less, no = ok("a", ""), limits("b", "", "x"), cannot("c", "", "y")
    assert Diagnosis(machines=[Machine(host="h", findings=[fine])]).verdict == "ok"
    assert Diagnosis(machines=[Machine(host="h", findings=[less, fine])]).verdict == "works with limits"
    assert Diagnosis(machines=[Machine(host="h", findings=[no, less])]).verdict == "cannot"
    assert worst([]) == "ok"


def test_a_stranger_is_hung_up_on_and_a_member_is_measured() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(10.0)
        served: list[str] = []

        def serve() -> None:
            with links._caller(listener, SECRET) as connection:
                links._follow(connection)
                served.append("member")

        thread = threading.Thread(target=serve)
        thread.start()
        address = listener.getsockname()
        with socket.create_connection(address, 10.0) as stranger:
            with pytest.raises(ConnectionError, match=r"closed|reset"):
                links._greet(stranger, Secret.of(None, "guess"), first=True)
            assert not served
        with socket.create_connection(address, 10.0) as connection:
            links._greet(connection, SECRET, first=True)
            latency, out, back = links._lead(connection)
        thread.join(10.0)
        assert served == ["member"]
        assert 0 < latency < 1 and out > 1e6 and back > 1e6


def test_an_echo_of_our_own_proof_is_no_proof() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"pl08" + bytes(16))
                answer = connection.recv(84, socket.MSG_WAITALL)
                connection.sendall(answer[-32:])
                connection.recv(1)

        thread = threading.Thread(target=echo)
        thread.start()
        with (
            socket.create_connection(listener.getsockname(), 10.0) as connection,
            pytest.raises(ConnectionError, match="the listener is not a member of the run"),
        ):
            links._greet(connection, SECRET, first=True)
        thread.join(10.0)


def test_few_open_files_are_a_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        finding = machine.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.verdict == "works with limits"
    assert finding.found == "at most 500"
    assert finding.change.startswith("ulimit -n 4096")
    assert machine.open_files().verdict == ("ok" if soft >= 1024 or soft < 0 else "works with limits")


def test_too_many_threads_are_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert libraries.torch_itself().verdict == "works with limits"


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken_check() -> Finding:
        raise OSError("no such thing")

    first, second = machine.examine([broken_check, machine.system]).findings
    assert (first.what, first.verdict) == ("broken check", "works with limits")
    assert "no such thing" in first.found
    assert second.verdict == "ok"


def test_what_is_found_is_printed_as_it_is() -> None:
    out = io.StringIO()
    _table(Console(file=out, width=200), [limits("Ray", "pip install 'paceline[ray]'", "echo [always]")])
    assert "pip install 'paceline[ray]'" in out.getvalue() and "echo [always]" in out.getvalue()

"""`paceline doctor` as it is used: on this machine, with members, under torchrun, and where something cannot."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.fork_server import ForkServer
from helpers.forks import done, starting
from helpers.support import PACELINE, TORCHRUN, finished

from paceline.cluster.process import WITHOUT_AMX  # spares all but the first test a look for it in another process


def test_members_of_one_machine_measure_each_other(tmp_path: Path) -> None:
    with starting([PACELINE, "doctor", "--workers", "3", "--json"], tmp_path) as run:
        outcome = run.finish(170)
    assert outcome.code == 0, outcome.err
    assert outcome.err.startswith("paceline: starting 3 workers\n")
    facts = json.loads(outcome.out)
    assert facts["verdict"] in ("ok", "works with limits")
    (machine,) = facts["machines"]
    lines = {finding["what"]: finding for finding in machine["findings"]}
    assert all(finding["change"] for finding in lines.values() if finding["verdict"] != "ok")
    for needed in ("shared memory", "memory of others", "waking", "gloo", "ports"):
        assert lines[needed]["verdict"] == "ok", lines[needed]
    assert not [finding for finding in lines.values() if "the check failed" in finding["found"]]
    latency, bandwidth = facts["links"]["latency"], facts["links"]["bandwidth"]
    for row in range(3):
        for column in range(3):
            assert (latency[row][column] is None) == (bandwidth[row][column] is None) == (row == column)
    assert list(tmp_path.glob("runs")) == []


def test_under_torchrun_the_lead_tells_it_once(tmp_path: Path) -> None:
    words = [TORCHRUN, "--nproc-per-node", "2", "-m", "paceline", "doctor"]
    outcome = done(words, tmp_path, 170, **WITHOUT_AMX)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("bandwidth from row to column, MB/s") == 1
    assert outcome.out.count("memory of others") == 1


def test_a_machine_without_a_loopback_cannot(tmp_path: Path) -> None:
    with ForkServer() as server:
        words = ["unshare", "--net", PACELINE, "doctor", "--json"]
        outcome = finished(words, tmp_path, 170, **WITHOUT_AMX, **server.variables)
    assert outcome.code == 1, outcome.err
    facts = json.loads(outcome.out)
    assert facts["verdict"] == "cannot"
    findings = {found["what"]: found for found in facts["machines"][0]["findings"] if found["verdict"] == "cannot"}
    assert set(findings) == {"ports", "encryption"}
    assert findings["ports"]["change"] == "ip link set lo up"

"""The live page: it grows with the run, lets nobody but its readers in, ends with the run, and stays small."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fork_server import ForkServer
from helpers.forks import playing
from helpers.pages import TIMELINE, Watched, browsing, colours, heap, join, line, make_going, step
from helpers.support import PACELINE, PREAMBLE, Run, finished, started, wait_until, write_script
from playwright.sync_api import Browser
from prometheus_client.parser import text_string_to_metric_families

TRAIN = (
    PREAMBLE
    + """
import itertools
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
notes = pathlib.Path(os.environ["RUN_NOTES"])
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(256, 6)
data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
loader = DataLoader(data, batch_size=8 * team.world_size, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
for epoch in itertools.count():
    for x, y in loader:
        with team.step():
            loss = mse_loss(model(x), y)
            loss.backward()
            time.sleep(0.02)  # what the page shows changes by the second: more steps would only take CPU time
            optimizer.step()
            optimizer.zero_grad()
        team.report(loss=loss)
    note(f"epoch-{epoch}-{team.rank}")
    if team.is_lead and (notes / "stop").exists():
        (notes / "end").touch()
    team.barrier()
    if (notes / "end").exists():
        break
"""
)
"""Trains until its test leaves a file `stop` among the notes."""


Metrics = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""By name and labels."""


@pytest.fixture(scope="module", autouse=True)
def quick_commands() -> Iterator[None]:
    """Commands need not import anything. Their server is forked from here, so it comes before the browser."""
    with ForkServer() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


def address_of(run: Run) -> str:
    """What a command printed, as soon as it has."""
    printed = run.notes / "stderr"
    pattern = re.compile(r"^paceline: live at (http://\S+)$", re.MULTILINE)
    wait_until(lambda: bool(pattern.search(printed.read_text())) or run.ended, 60, "an address")
    found = pattern.search(printed.read_text())
    assert found is not None, printed.read_text()
    return found[1]


@dataclasses.dataclass(frozen=True)
class Served:
    """A page that somebody serves."""

    run: Run
    address: str

    @property
    def port(self) -> int:
        found = re.search(r":(\d+)/", self.address)
        assert found is not None
        return int(found[1])

    @property
    def errors(self) -> str:
        return (self.run.notes / "stderr").read_text()

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """An answer to exactly this path, however strange."""
        talk = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(talk):
            talk.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                talk.putheader(name.replace("_", "-"), value)
            talk.endheaders()
            answer = talk.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes, whatever they are."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as talk:
            talk.sendall(data)
            with contextlib.suppress(OSError):
                talk.shutdown(socket.SHUT_WR)
                return talk.recv(4096)
        return b""

    def facts(self) -> dict[str, Any]:
        status, headers, data = self.ask("/facts.json")
        assert (status, headers["content-type"]) == (200, "application/json")
        return dict(json.loads(data))

    def metrics(self) -> Metrics:
        status, headers, data = self.ask("/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(data.decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }


@contextlib.contextmanager
def serving(folder: Path, *words: str, **extra: str) -> Iterator[Served]:
    with started([PACELINE, "live", folder, *words], folder.parent, **extra) as run:
        yield Served(run, address_of(run))


# -- a real run ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Served]:
    """A real run, once it trains. It is forked from here, so these tests come before the first that needs a browser."""
    script = write_script(folder, TRAIN)
    with playing([script, "--workers", "2", "--slow", "1:3", "--name", "going", "--live", "--quiet"], folder) as run:
        served = Served(run, address_of(run))
        run.note("epoch-0-0", 90)
        yield served


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_the_page_ends_however_the_run_ends(number: signal.Signals, tmp_path: Path) -> None:
    with training(tmp_path) as served, socket.create_connection(("127.0.0.1", served.port), timeout=60) as reader:
        reader.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert reader.recv(100).startswith(b"HTTP/1.1 200")
        served.run.process.send_signal(number)
        assert served.run.process.wait(30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not served.run.processes(), 30, "the end of all processes")
        assert "Traceback" not in served.errors


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with training(tmp_path_factory.mktemp("going")) as served:
        yield served


@pytest.fixture(scope="module")
def watched(going: Served, browser: Browser) -> Iterator[Watched]:
    page = Watched(browser, going.address)
    yield page
    page.page.close()


UPDATES = """() => {
    const boxes = [...document.querySelectorAll(".numbers div")];
    const box = boxes.find((one) => one.querySelector("span").textContent === "updates");
    return Number(box.querySelector("b").textContent.replace(",", ""));
}"""


def test_the_page_grows_with_the_run(watched: Watched) -> None:
    watched.until(f"({UPDATES})() > 0")
    seconds, updates = watched(f"{TIMELINE}.data.seconds"), watched(UPDATES)
    before = watched("({...window.paceline, runs: 0})")  # last, or what is waited for could have come already
    watched.until("(before) => window.paceline.messages >= before + 2", before["messages"])
    watched.until("(before) => window.paceline.drawings >= before + 2", before["drawings"])
    assert watched(f"{TIMELINE}.data.seconds") > seconds
    assert watched(UPDATES) > updates
    assert watched.view[1] > seconds  # it follows
    assert "live" in watched.words(".bar")[0]
    assert colours(watched, "canvas.main") > 5
    assert (watched.problems, watched.outside) == ([], [])


def test_every_worker_has_its_state_its_pace_and_when_it_was_last_heard_of(watched: Watched) -> None:
    watched.until(f"({UPDATES})() > 0")
    heads = watched.words("[data-figure=workers] th")
    assert heads[:4] == ["worker", "state", "last heard of", "own pace"]
    rows = [
        row.locator("th, td").all_inner_texts() for row in watched.page.locator("[data-figure=workers] tr").all()[1:]
    ]
    assert [row[0] for row in rows] == ["0", "1"]
    for row in rows:
        assert row[1] in ("computing", "loading", "communicating", "updating", "waiting")
        assert row[2] == "just now" or row[2].endswith(" ago")
        assert row[3].endswith("ms")


def test_who_works_was_heard_of_just_now(watched: Watched) -> None:
    words = "[...document.querySelectorAll('[data-figure=workers] td:nth-child(3)')].map((cell) => cell.textContent)"
    watched.until(f"{words}.length === 2 && {words}.every((one) => one === 'just now')")


def test_nothing_is_drawn_while_it_is_paused(watched: Watched) -> None:
    watched.click("pause the drawing")
    drawings, messages = watched("[window.paceline.drawings, window.paceline.messages]")
    updates = watched(UPDATES)
    watched.until("(before) => window.paceline.messages >= before + 2", messages)
    assert watched("window.paceline.drawings") == drawings
    assert watched(UPDATES) == updates
    watched.click("go on drawing")
    watched.until("(before) => window.paceline.drawings > before + 1", drawings)
    assert watched(UPDATES) > updates


def test_where_one_looks_stays_until_one_follows_again(watched: Watched) -> None:
    watched.click("+")
    view, messages = watched.view, watched("window.paceline.messages")
    watched.until("(before) => window.paceline.messages >= before + 2", messages)
    assert watched.view == view
    watched.click("follow")
    assert watched.view[1] > view[1]


def test_counters_grow(going: Served) -> None:
    before = going.metrics()
    wait_until(lambda: going.metrics()["paceline_updates_total", ()] > before["paceline_updates_total", ()], 30, "more")
    after, mine = going.metrics(), (("worker", "0"),)
    assert after["paceline_minibatches_total", mine] > before["paceline_minibatches_total", mine]


def test_a_run_can_be_looked_at_that_was_started_before(going: Served) -> None:
    with serving(going.run.cwd / "runs" / "going", "--port", "0") as other:
        assert other.port != going.port
        before = other.facts()
        assert before["over"] is False
        assert len(before["workers"]) == 2
        wait_until(lambda: other.facts()["updates"] > before["updates"], 30, "more updates")
        other.run.process.send_signal(signal.SIGINT)
        assert other.run.finish(30).code in (0, 130)


def test_in_the_end_it_says_that_the_run_is_over(going: Served, watched: Watched) -> None:
    (going.run.notes / "stop").touch()
    watched.until("document.querySelector('.bar').textContent.includes('the run is over')")
    updates = watched(UPDATES)
    outcome = going.run.finish(60)
    assert outcome.code == 0, outcome.err
    assert outcome.tracebacks == 0
    wait_until(lambda: not going.run.processes(), 30, "the end of all processes")
    assert updates == going.run.summary("going")["updates"]
    assert {
        row[1]
        for row in [
            r.locator("th, td").all_inner_texts() for r in watched.page.locator("[data-figure=workers] tr").all()[1:]
        ]
    } == {"left"}
    assert (watched.problems, watched.outside) == ([], [])


# -- a page that is asked by everybody -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_going(tmp_path_factory.mktemp("asked") / "run", time.perf_counter())
    with serving(folder) as served:
        yield served


@pytest.fixture(autouse=True)
def it_still_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever was asked of it."""
    yield
    if "asked" in request.fixturenames:
        asked: Served = request.getfixturevalue("asked")
        assert asked.ask()[0] == 200
        assert not asked.run.ended


def test_what_it_serves_may_be_read(asked: Served) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/figures.js", "text/javascript"),
        ("/page.js", "text/javascript"),
        ("/timeline.js", "text/javascript"),
        ("/live.js", "text/javascript"),
    ):
        status, headers, data = asked.ask(path)
        assert status == 200, path
        assert headers["content-type"].startswith(kind)
        assert headers["cache-control"] == "no-store"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert data
        status, headers, data = asked.ask(path, "HEAD")
        assert (status, data) == (200, b""), path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE", "STRANGE"])
def test_nothing_can_be_changed(method: str, asked: Served) -> None:
    for path in ("/", "/facts.json", "/metrics", "/stream", "/unknown"):
        assert 400 <= asked.ask(path, method)[0] < 500, path


@pytest.mark.parametrize(
    "host",
    [
        "example.org",
        "127.0.0.1.example.org",
        "localhost.example.org:80",
        "",
        "[::2]",
        "@",
        "127.0.0.1:1",
        "localhost:1",
        "[::1]:1",
        "127.0.0.1:x",
    ],
)
def test_another_host_name_or_port_is_refused(host: str, asked: Served) -> None:
    for path in ("/", "/facts.json", "/stream"):
        assert asked.ask(path, Host=host)[0] == (421 if host else 400), path


def test_its_own_host_names_are_served(asked: Served) -> None:
    for host in ("127.0.0.1", "localhost", f"localhost:{asked.port}", "LOCALHOST", "[::1]"):
        assert asked.ask(Host=host)[0] == 200, host


def test_without_a_host_there_is_no_answer(asked: Served) -> None:
    assert asked.raw(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert asked.raw(b"GET /facts.json HTTP/1.0\r\n\r\n").split()[1] == b"400"


@pytest.mark.parametrize("origin", ["http://example.org", "null", "", "file://", "http://127.0.0.1:1"])
def test_another_origin_is_refused(origin: str, asked: Served) -> None:
    for path in ("/", "/facts.json", "/stream"):
        status, headers, _ = asked.ask(path, Origin=origin)
        assert status == 403, path
        assert "access-control-allow-origin" not in headers


def test_another_site_is_refused_and_its_own_is_not(asked: Served) -> None:
    assert asked.ask("/facts.json", Sec_Fetch_Site="cross-site")[0] == 403
    assert asked.ask("/facts.json", Sec_Fetch_Site="same-site")[0] == 403
    assert asked.ask("/facts.json", Sec_Fetch_Site="same-origin")[0] == 200
    assert asked.ask("/facts.json", Origin=f"http://127.0.0.1:{asked.port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/unknown",
        "/favicon.ico",
        "/page.html",
        "/facts.json/more",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/../page.css",
        "//etc/passwd",
        "/streams/0.jsonl",
        "/config.json",
        "/page.js%00.css",
        "/" + "x" * 3000,
    ],
)
def test_there_is_nothing_else(path: str, asked: Served) -> None:
    status, _, data = asked.ask(path)
    assert 400 <= status < 500
    assert b"root:" not in data


def test_a_web_socket_is_not_opened(asked: Served) -> None:
    for path in ("/", "/stream", "/facts.json", "/unknown"):
        for origin in ("", "Origin: http://example.org\r\n"):
            answer = asked.raw(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{asked.port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{origin}\r\n".encode()
            )
            assert not answer.startswith(b"HTTP/1.1 101")


def test_noise_is_survived(asked: Served) -> None:
    for noise in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"\0" * 100_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"y" * 200_000,
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"z" * 200_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\r\n\r\n\r\n",
        b"",
    ):
        with contextlib.suppress(ConnectionError):
            asked.raw(noise)
        assert asked.ask()[0] == 200, noise[:40]
    assert "Traceback" not in asked.errors


def test_a_reader_may_leave_in_the_middle(asked: Served) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", asked.port), timeout=60) as talk:
            talk.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert talk.recv(100).startswith(b"HTTP/1.1 200")


def test_facts_and_metrics_are_what_the_events_say(asked: Served) -> None:
    wait_until(lambda: asked.facts()["updates"] == 50, 30, "what was done last")
    facts, metrics = asked.facts(), asked.metrics()
    assert facts["over"] is False
    assert [worker["minibatches"] for worker in facts["workers"]] == [50, 50]
    assert metrics["paceline_up", ()] == 1
    assert metrics["paceline_updates_total", ()] == 50
    for rank in ("0", "1"):
        mine = (("worker", rank),)
        assert metrics["paceline_minibatches_total", mine] == 50
        assert metrics["paceline_samples_total", mine] == 400
        computing = metrics["paceline_seconds_total", (("kind", "computing"), ("worker", rank))]
        assert computing == pytest.approx(0.4, rel=1e-3)
    assert metrics["paceline_metric", (("name", "loss"),)] == 0.5


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Metrics]]:
    """Facts and metrics, again and again, while a second of steps has just been written down."""
    folder, found = make_going(tmp_path_factory.mktemp("looks") / "run", time.perf_counter(), steps=1000), []
    with serving(folder, "--port", "0") as served:
        wait_until(lambda: served.facts()["updates"] == 1000, 30, "what was done before")
        found.append((served.facts(), served.metrics()))
        now = time.perf_counter()
        for rank in (0, 1):
            with (folder / "streams" / f"{rank}.jsonl").open("a") as file:
                file.write("".join(step(rank, now + 0.01 * n - 1, 0.01, 1000 + n) for n in range(100)))
        while found[-1][1]["paceline_updates_total", ()] < 1100:
            assert time.perf_counter() < now + 30
            found.append((served.facts(), served.metrics()))
    return found


def test_no_counter_ever_goes_down(looks: list[tuple[dict[str, Any], Metrics]]) -> None:
    for (_, before), (_, after) in itertools.pairwise(looks):
        lower = [key for key, value in before.items() if key[0].endswith("_total") and after[key] < value - 1e-9]
        assert lower == []


def test_what_is_not_counted_yet_is_not_shown_as_idle(looks: list[tuple[dict[str, Any], Metrics]]) -> None:
    for facts, _ in looks:
        samples = facts["curves"]["throughput"]["samples"]
        assert any(samples[-3:]), f"{samples[-12:]} of {facts['seconds']} s"


# -- away from loopback ----------------------------------------------------------------------------------------------


def test_elsewhere_one_needs_the_token(tmp_path: Path, browser: Browser) -> None:
    folder = make_going(tmp_path / "run", time.perf_counter())
    with serving(folder, "--host", "0.0.0.0", "--port", "0") as served:
        token = served.address.partition("?token=")[2]
        assert len(token) >= 20
        for path in ("/", "/page.js", "/stream", "/facts.json", "/metrics", "/unknown"):
            assert served.ask(path)[0] == 401, path
            for wrong in ("", "x", token[:-1], token + "x", "%FF%FE", "é".encode().hex()):
                assert served.ask(f"{path}?token={wrong}")[0] == 401, path
            assert served.ask(path, Authorization="Bearer wrong")[0] == 401
            assert served.ask(path, Authorization=token)[0] == 401
        for path in ("/", "/page.js", "/facts.json", "/metrics"):
            assert served.ask(f"{path}?token={token}")[0] == 200
            assert served.ask(path, Authorization=f"Bearer {token}")[0] == 200
        assert served.ask(f"/?token={token}", Host="example.org")[0] == 421
        watched = Watched(browser, f"http://127.0.0.1:{served.port}/?token={token}")
        watched.until("window.paceline.messages >= 2")
        assert watched.words("h1") == ["run"]
        assert (watched.problems, watched.outside) == ([], [])
        watched.page.close()


def test_a_token_of_ones_own_is_asked_for_on_loopback_too(tmp_path: Path) -> None:
    folder = make_going(tmp_path / "run", time.perf_counter())
    with serving(folder, PACELINE_TOKEN="a b/c?&é") as served:
        path = served.address.removeprefix(f"http://127.0.0.1:{served.port}")
        assert path == "/?token=a%20b/c%3F%26%C3%A9"
        assert served.ask()[0] == 401
        status, _, page = served.ask(path)
        assert status == 200
        script = re.search(rb'src="(page\.js[^"]*)"', page)
        assert script is not None
        assert served.ask("/" + script[1].decode())[0] == 200


# -- what cannot be shown --------------------------------------------------------------------------------------------


def test_a_busy_port_is_one_sentence(asked: Served, tmp_path: Path) -> None:
    folder = make_going(tmp_path / "run", time.perf_counter())
    for port in (str(asked.port), "70000"):
        outcome = finished([PACELINE, "live", folder, "--port", port], tmp_path)
        assert outcome.code == 2
        assert len(outcome.err.splitlines()) == 1
        assert port in outcome.err
        assert outcome.out == ""


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        outcome = finished([PACELINE, "live", name], tmp_path)
        assert outcome.code == 2
        assert len(outcome.err.splitlines()) == 1
        assert name in outcome.err


def test_a_run_that_is_over_can_be_looked_at(tmp_path: Path, browser: Browser) -> None:
    folder = make_going(tmp_path / "run", time.perf_counter())
    lines = "".join((folder / "streams" / f"{rank}.jsonl").read_text() for rank in (0, 1)).splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(sorted(lines, key=lambda one: json.loads(one)["start"])))
    for rank in (0, 1):
        (folder / "streams" / f"{rank}.jsonl").unlink()
    (folder / "streams").rmdir()
    with serving(folder, "--port", "0") as served:
        watched = Watched(browser, served.address)
        assert "the run is over" in watched.words(".bar")[0]
        assert colours(watched, "canvas.main") > 5
        assert watched.problems == []
        watched.page.close()
        assert served.metrics()["paceline_up", ()] == 0
        assert served.facts()["updates"] == 50
        served.run.process.send_signal(signal.SIGINT)
        outcome = served.run.finish(30)
        assert outcome.code in (0, 130)


def test_a_page_that_is_opened_before_the_first_event_follows_the_run(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text('{"strategy": "all-reduce", "workers": 2}')
    with serving(folder, "--port", "0") as served:
        watched = Watched(browser, served.address)
        wait_until(lambda: "0 of 2 workers" in watched.words(".bar")[0], 30, "0 of 2 workers")
        assert served.metrics()["paceline_up", ()] == 1
        (folder / "streams").mkdir()
        (folder / "streams" / "0.jsonl").write_text(join(0, time.perf_counter()))
        wait_until(lambda: "1 of 2 workers" in watched.words(".bar")[0], 30, "1 of 2 workers")
        with (folder / "streams" / "0.jsonl").open("a") as stream:
            stream.write("".join(step(0, time.perf_counter() + 0.01 * number, 0.01, number) for number in range(9)))
        wait_until(lambda: "live" in watched.words(".bar")[0], 30, "live")
        assert not served.facts()["over"]
        assert watched.problems == []
        watched.page.close()


# -- a long run ------------------------------------------------------------------------------------------------------

ROUNDS, STEPS = 8, 4000
"""Times that events come, and steps of each of four workers each time."""


def test_what_is_sent_and_kept_does_not_grow_with_the_run(tmp_path: Path, browser: Browser) -> None:
    folder = make_going(tmp_path / "run", time.perf_counter(), ranks=4)
    sizes: list[int] = []
    heaps: list[int] = []
    with serving(folder, "--port", "0") as served:
        watched = Watched(browser, served.address)
        session = watched.page.context.new_cdp_session(watched.page)
        session.send("Network.enable")
        session.on("Network.eventSourceMessageReceived", lambda message: sizes.append(len(message["data"].encode())))
        session.send("HeapProfiler.enable")
        began, version = time.perf_counter(), 50
        for _ in range(ROUNDS):
            now = time.perf_counter()
            each = (now - began) / STEPS
            for rank in range(4):
                moments = [(began + n * each, version + n) for n in range(STEPS)]
                words = [step(rank, moment, each, number) for moment, number in moments]
                words += [line("metric", rank, m, version=v, values={"loss": 1 / v}) for m, v in moments[::4]]
                with (folder / "streams" / f"{rank}.jsonl").open("a") as file:
                    file.write("".join(words))
            began, version = now, version + STEPS
            messages = watched("window.paceline.messages")
            watched.until("(before) => window.paceline.messages > before", messages)
            heaps.append(heap(session))
        wait_until(lambda: served.facts()["updates"] == version, 30, "all updates")
        assert served.facts()["workers"][3]["minibatches"] == version
        assert watched.problems == []
        watched.page.close()
    assert len(sizes) >= ROUNDS - 1
    assert max(sizes) < 1_500_000
    assert max(heaps[ROUNDS // 2 :]) < 1.3 * max(heaps[2 : ROUNDS // 2]) + 8e6, heaps

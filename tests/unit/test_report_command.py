"""`paceline report` writes a page that needs nothing else, and says in one sentence what it cannot do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from helpers.support import PACELINE, finished

from paceline.cli import main, status
from paceline.events import Compute, Event, Join, Metric, Push, Update, Wait
from paceline.events.summary import merge
from paceline.report.page import static

EVIL = "</script><script>alert(1)</script>"


class Said(NamedTuple):
    code: int
    out: str
    err: str


Report = Callable[..., Said]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """The command, as it would be called in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def call(*words: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["paceline", "report", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        heard = capsys.readouterr()
        return Said(int(caught.value.code or 0), heard.out, heard.err)

    return call


def events(strategy: str = "all-reduce", rounds: int = 20) -> list[Event]:
    """Two workers, each round 0.1 s; worker 0 waits for worker 1."""
    happened: list[Event] = [Join(rank, 0.5, 1, "host", "cpu", strategy, 1000.5) for rank in (0, 1)]
    for number in range(rounds):
        start = 1.0 + 0.1 * number
        happened += [Compute(0, start, 0.04, number, 1, 8), Wait(0, start + 0.04, 0.05, 1)]
        happened += [Compute(1, start, 0.09, number, 1, 8)]
        happened += [Update(rank, start + 0.09, 0.01, number + 1, 64, 2) for rank in (0, 1)]
    return [*happened, Metric(0, start, rounds, {"loss": 0.125})]


def write(folder: Path, happened: list[Event], config: dict[str, Any] | None = None) -> Path:
    """A run's folder; returns it."""
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in happened))
    (folder / "config.json").write_bytes(msgspec.json.encode(config or {"workers": 2}))
    return folder


class Page(HTMLParser):
    """What a browser would find in a page: its tags, its scripts, its title."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = self.style = ""
        self._inside: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._inside == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._inside.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        match self._inside:
            case ["script"]:
                self.scripts[-1] += data
            case ["style"]:
                self.style += data
            case ["title"]:
                self.title += data

    @property
    def data(self) -> dict[str, Any]:
        """What the page is drawn from."""
        call = self.scripts[-1].strip()
        assert call.startswith("report(") and call.endswith(");")
        known: dict[str, Any] = json.loads(call[len("report(") : -len(");")])
        return known


def sentence(said: Said) -> str:
    """The one sentence with which a command was refused."""
    assert said.code == 2, said.err
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("paceline: ")
    return lines[0].removeprefix("paceline: ")


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_written_next_to_the_events(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "first", events())
    said = report("runs/first")
    assert said == (0, "report: runs/first/report.html\n", "")
    left = sorted(path.name for path in (tmp_path / "runs" / "first").iterdir())
    assert left == ["config.json", "events.jsonl", "report.html"]
    page = Page(tmp_path / "runs" / "first" / "report.html")
    assert page.title == page.data["title"] == "first"
    (run,) = page.data["runs"]
    assert (run["name"], run["strategy"], run["updates"], run["slow"]) == ("first", "all-reduce", 20, [1])
    assert (run["config"], run["notes"], run["last"]) == ({"workers": 2}, [], {"loss": 0.125})
    assert run["started"] == pytest.approx(1001.0)
    assert {"curves", "timeline"} <= set(run)


def test_the_events_file_alone_will_do(report: Report, tmp_path: Path) -> None:
    folder = write(tmp_path / "first", events())
    assert report("first/events.jsonl").code == 0
    assert Page(folder / "report.html").data["runs"][0]["name"] == "events.jsonl"


def test_a_run_that_was_not_merged_is_read_from_its_streams(report: Report, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    (folder / "streams").mkdir(parents=True)
    for rank in (0, 1):
        mine = [event for event in events() if event.rank == rank]
        data = b"".join(msgspec.json.encode(event) + b"\n" for event in mine)
        (folder / "streams" / f"{rank}.jsonl").write_bytes(data)
    before = json.loads(report("first", "--json").out)
    merge(folder, 2)
    assert json.loads(report("first", "--json").out) == before
    assert before["updates"] == 20


def test_the_page_loads_nothing_from_elsewhere(report: Report, tmp_path: Path) -> None:
    report(write(tmp_path / "first", events()))
    page = Page(tmp_path / "first" / "report.html")
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith("data:"), f"<{tag} {name}={value}>"
    assert not re.search(r"@import|url\(\s*['\"]?(?!data:)", page.style)
    for name in ("page.html", "page.css", "page.js", "timeline.js", "figures.js"):
        assert not re.search(r"""(src|href)\s*=\s*["'`]?\s*(https?:)?//|fetch\(\s*["'`](https?:)?//""", static(name))
    assert len(page.scripts) == 4
    assert (tmp_path / "first" / "report.html").stat().st_size < 200_000


def test_output_and_title_are_what_one_asks_for(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "first", events())
    (tmp_path / "deep" / "down").mkdir(parents=True)
    said = report("first", "-o", "deep/down/page.html", "--title", "A <b>title</b> & more")
    assert said == (0, "report: deep/down/page.html\n", "")
    page = Page(tmp_path / "deep" / "down" / "page.html")
    assert page.title == page.data["title"] == "A <b>title</b> & more"
    assert "b" not in {tag for tag, _ in page.tags}
    assert not (tmp_path / "first" / "report.html").exists()


# -- several runs ----------------------------------------------------------------------------------------------------


def test_several_runs_are_on_one_page_above_them_all(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a", events())
    write(tmp_path / "runs" / "b", events("sync", rounds=5))
    assert report("runs/a", "runs/b") == (0, "report: runs/report.html\n", "")
    page = Page(tmp_path / "runs" / "report.html")
    assert [(run["name"], run["strategy"], run["updates"]) for run in page.data["runs"]] == [
        ("a", "all-reduce", 20),
        ("b", "sync", 5),
    ]
    assert page.title == "Paceline: runs compared"


def test_runs_are_called_what_one_calls_them(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "a", events())
    write(tmp_path / "b", events())
    assert report("a", "b", "--name", "one", "--name", "two", "-o", "page.html").code == 0
    assert [run["name"] for run in Page(tmp_path / "page.html").data["runs"]] == ["one", "two"]


def test_runs_of_the_same_name_are_told_apart(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "x" / "run", events())
    write(tmp_path / "y" / "run", events())
    known = json.loads(report("x/run", "y/run", "--json").out)
    assert [run["name"] for run in known] == ["x/run", "y/run"]


@pytest.mark.parametrize("names", [["one"], ["one", "two", "three"]])
def test_as_many_names_as_runs_or_none(names: list[str], report: Report, tmp_path: Path) -> None:
    write(tmp_path / "a", events())
    write(tmp_path / "b", events())
    said = report("a", "b", *(word for name in names for word in ("--name", name)))
    assert sentence(said) == f"there are 2 runs but {len(names)} names; give one --name for each run, or none"
    assert not (tmp_path / "report.html").exists()


# -- for scripts and terminals ---------------------------------------------------------------------------------------


def test_json_has_the_numbers_without_what_is_only_drawn(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "first", events())
    said = report("first", "--json")
    assert (said.code, said.err) == (0, "")
    known = json.loads(said.out)
    assert (known["name"], known["updates"], known["slow"]) == ("first", 20, [1])
    assert known["workers"][0]["seconds"]["waiting"] == pytest.approx(20 * 0.05)
    assert known["workers"][1]["blame"] == pytest.approx(20 * 0.05)
    assert "curves" not in known and "timeline" not in known
    assert not (tmp_path / "first" / "report.html").exists()


def test_json_of_several_runs_is_a_list(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "a", events())
    write(tmp_path / "b", events(rounds=3))
    assert [run["updates"] for run in json.loads(report("a", "b", "--json").out)] == [20, 3]


def test_text_has_every_run_s_head_lines_and_table(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "a", events())
    write(tmp_path / "b", events("sync"))
    said = report("a", "b", "--text")
    assert (said.code, said.err) == (0, "")
    assert "a: all-reduce, 2 workers, 20 updates" in said.out
    assert "b: sync, 2 workers, 20 updates" in said.out
    assert said.out.count("Worker 1 is slow") == 2
    assert said.out.count("\n worker 0 ") == said.out.count("\n worker 1 ") == 2
    assert said.out.count("where the time went, in seconds") == 2
    assert not list(tmp_path.rglob("report.html"))


def test_text_and_json_at_once_do_not_end_in_a_traceback(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "first", events())
    assert report("first", "--text", "--json").code in (0, 2)


def test_exports_lie_next_to_the_events(report: Report, tmp_path: Path) -> None:
    folder = write(tmp_path / "first", events())
    said = report("first", "--trace", "--csv", "--tensorboard")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "report: first/report.html",
        "trace: first/trace.json (open it in Perfetto or chrome://tracing)",
        "tables: first/csv/ (5 files)",
        "scalars: first/tensorboard/ (tensorboard --logdir first/tensorboard)",
    ]
    assert len(json.loads((folder / "trace.json").read_bytes())["traceEvents"]) > 100
    made = sorted(path.name for path in (folder / "csv").iterdir())
    assert made == ["compute.csv", "join.csv", "metric.csv", "update.csv", "wait.csv"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_run_that_is_not_there_is_named(report: Report) -> None:
    wanted = "there is no run at runs/absent; give a folder of a run, such as runs/NAME"
    assert sentence(report("runs/absent")) == wanted


def test_a_folder_that_is_not_a_run_s_is_refused(report: Report, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    wanted = "photos is not the folder of a run: it has neither events.jsonl nor streams/"
    assert sentence(report("photos")) == wanted


@pytest.mark.parametrize(
    "content",
    [b"dear diary\ntoday\n", b'{"a": 1}\n', bytes(range(256)) * 20, b"\x89PNG\r\n\x1a\n" + bytes(500)],
    ids=["text", "json", "bytes", "picture"],
)
def test_a_file_of_somebody_else_s_is_refused(content: bytes, report: Report, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_bytes(content)
    wanted = "diary.txt has no event that Paceline knows; is it the events file of a run?"
    assert sentence(report("diary.txt")) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]


def test_a_run_without_events_is_refused(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "first", [])
    assert sentence(report("first")) == "first has no events: nothing was recorded"


def test_if_one_of_several_runs_is_wrong_nothing_is_written(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "a", events())
    assert "there is no run at b" in sentence(report("a", "b"))
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize("place", ["first", "first/events.jsonl/page.html"])
def test_a_place_where_no_page_can_be_written_is_refused(place: str, report: Report, tmp_path: Path) -> None:
    write(tmp_path / "first", events())
    assert place in sentence(report("first", "-o", place))


def test_without_tensorboard_one_is_told_so(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "first", events())
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = report("first", "--tensorboard")
    assert said.code == 2
    assert said.err == "paceline: the logger tensorboard needs the package tensorboard: pip install tensorboard\n"


def test_as_a_process_it_ends_with_the_same_code_and_sentence(tmp_path: Path) -> None:
    outcome = finished([PACELINE, "report", "absent"], tmp_path)
    assert (outcome.code, outcome.out, outcome.tracebacks) == (2, "", 0)
    assert outcome.err == "paceline: there is no run at absent; give a folder of a run, such as runs/NAME\n"


def test_without_a_terminal_a_long_reading_and_writing_is_a_line_now_and_then(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "first", events())
    monkeypatch.setattr(status, "_INTERVAL", 0.0)
    said = report("first", "--trace")
    assert said.code == 0
    assert list(dict.fromkeys(said.err.splitlines())) == [
        "paceline: reading first (1 of 1)",
        "paceline: writing first/trace.json",
    ]


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_shown_up_to_there_and_said_to_be_damaged(report: Report, tmp_path: Path) -> None:
    folder = write(tmp_path / "first", events())
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    count = len(events())
    said = report("first")
    note = f"1 line of first/events.jsonl could not be read, the first of them line {count}; everything else is shown"
    assert said == (0, "report: first/report.html\n", f"paceline: {note}\n")
    (run,) = Page(folder / "report.html").data["runs"]
    assert (run["notes"], run["updates"], run["last"]) == ([note], 20, {})


def test_damage_is_in_the_text_and_the_json_too(report: Report, tmp_path: Path) -> None:
    folder = write(tmp_path / "first", events())
    path = folder / "events.jsonl"
    path.write_bytes(b"?\n\n" + path.read_bytes())
    note = "2 lines of first/events.jsonl could not be read, the first of them line 1; everything else is shown"
    said = report("first", "--text")
    assert (said.code, said.err) == (0, f"paceline: {note}\n")
    assert note in said.out
    said = report("first", "--json")
    assert (said.code, said.err) == (0, f"paceline: {note}\n")
    assert json.loads(said.out)["notes"] == [note]


@pytest.mark.parametrize("field", ["rank", "version", "samples"])
def test_a_number_that_no_run_could_have_does_not_end_in_a_traceback(
    field: str, report: Report, tmp_path: Path
) -> None:
    folder = write(tmp_path / "first", events())
    odd = {**msgspec.to_builtins(Compute(0, 4.0, 0.5, 0, 1, 8)), field: 10**19}
    with (folder / "events.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(odd) + b"\n")
    said = report("first", "--json")
    assert said.code == 0
    assert json.loads(said.out)["updates"] == 20


@pytest.mark.parametrize("content", [b"not json", b"[1]", b"\xff", b""])
def test_a_damaged_config_is_as_none(content: bytes, report: Report, tmp_path: Path) -> None:
    folder = write(tmp_path / "first", events())
    (folder / "config.json").write_bytes(content)
    assert json.loads(report("first", "--json").out)["config"] == {}


def test_a_loss_that_is_not_a_number_is_no_damage(report: Report, tmp_path: Path) -> None:
    write(tmp_path / "first", [*events(), Metric(0, 4.0, 20, {"loss": float("nan")})])
    assert report("first") == (0, "report: first/report.html\n", "")


# -- names that would be markup --------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [EVIL, "</SCRIPT >", "<!--", "]]>", "'\"`${alert(1)}", "\u2028\u2029", "$title $$"])
def test_whatever_is_in_a_run_s_config_or_names_does_not_break_out_of_the_page(
    words: str, report: Report, tmp_path: Path
) -> None:
    happened = [*events(words), Metric(0, 3.5, 20, {words: 1.0})]
    happened.append(Push(0, 3.5, 1, 0, 0, 8, [], 1, 1, words, words))
    folder = write(tmp_path / "first", happened, {words: [words], "script": words})
    assert report("first", "--name", words, "--title", words).code == 0
    page = Page(folder / "report.html")
    assert len(page.scripts) == 4
    assert [tag for tag, _ in page.tags] == [
        *("html", "head", "meta", "meta", "link", "title", "style", "body", "main", "div"),
        *["script"] * 4,
    ]
    assert page.title == page.data["title"] == words
    (run,) = page.data["runs"]
    assert (run["name"], run["strategy"], run["config"]) == (words, words, {words: [words], "script": words})
    assert run["last"] == {"loss": 0.125, words: 1.0}


def test_a_comment_that_opens_a_script_in_a_name_does_not_swallow_the_end_of_the_page(
    report: Report, tmp_path: Path
) -> None:
    # After "<!--<script" a browser takes the next "</script>" for the end of the inner one.
    folder = write(tmp_path / "first", events(), {"name": "<!--<script>"})
    assert report("first").code == 0
    page = Page(folder / "report.html")
    assert page.data["runs"][0]["config"] == {"name": "<!--<script>"}
    assert not re.search(r"<!--.*<script", page.scripts[-1], re.IGNORECASE | re.DOTALL)

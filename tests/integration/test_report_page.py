"""The report of real runs in a real browser: what is drawn, how one moves in it, and what it never does."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forks import done, played
from helpers.pages import TIMELINE, Watched, browsing, colours, join, line, step
from helpers.support import PACELINE, Run, finished, started, wait_until, write_script
from playwright.sync_api import Browser

TRAIN = """
import time
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(512, 6)
data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
loader = DataLoader(data, batch_size=8 * team.world_size, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        with team.step():
            loss = mse_loss(model(x), y)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
        team.report(loss=loss)
    team.report(epoch=epoch)
"""
SLOW = ["--slow", "2:3", "--workers", "4", "--quiet"]
EVIL = "</script><b>bold</b> & so on"

BARS = ["Where the time goes", "Own pace", "Bytes moved"]
LINES = ["Throughput over time", "Throughput over updates", "Metrics over time", "Metrics over updates"]

STEPS, LONGEST, SECOND = 20_000, 15_000, 5_000
"""Of the made-up long run, whose steps take 1 ms each; worker 3's step LONGEST takes 200 ms, its step SECOND 100 ms."""


def make_long(folder: Path) -> Path:
    folder.mkdir()
    lines, now = [join(rank, 99.0) for rank in range(4)], 100.0
    for number in range(STEPS):
        late = {LONGEST: 0.25, SECOND: 0.125}.get(number, 0.001)
        for rank in range(4):
            lines.append(step(rank, now, late if rank == 3 else 0.001, number))
            if rank != 3 and late > 0.001:
                lines.append(line("wait", rank, now + 0.001, seconds=late - 0.0015, on=3))
        now += late
    (folder / "events.jsonl").write_text("".join(lines))
    return folder


@dataclasses.dataclass(frozen=True)
class Reports:
    """Pages on disk, and the events of which they were made."""

    cwd: Path

    def address(self, name: str) -> str:
        return (self.cwd / f"{name}.html").as_uri()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(words) for words in (self.cwd / "runs" / name / "events.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    cwd = tmp_path_factory.mktemp("reports")
    script = write_script(cwd, TRAIN)
    for name, more in (("together", []), ("served", ["--strategy", "k-batch-sync:k=3"])):
        outcome = played([script, *SLOW, *more, "--name", name], cwd)
        assert outcome.code == 0, outcome.err
    make_long(cwd / "runs" / "long")
    both = ["runs/together", "runs/served", "--name", "all", "--name", "three of four", "--title", EVIL]
    pages = {"together": ["runs/together"], "served": ["runs/served"], "long": ["runs/long"], "compared": both}
    for name, words in pages.items():
        outcome = done([PACELINE, "report", *words, "-o", f"{name}.html"], cwd)
        assert (outcome.code, outcome.out, outcome.err) == (0, f"report: {name}.html\n", "")
    return Reports(cwd)


@pytest.fixture(scope="module")
def browser(reports: Reports) -> Iterator[Browser]:
    """After the runs, which are forked from here."""
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def opened(browser: Browser, reports: Reports) -> dict[str, Watched]:
    return {name: Watched(browser, reports.address(name)) for name in ("together", "served", "long", "compared")}


@pytest.fixture(autouse=True)
def nothing_goes_wrong(opened: dict[str, Watched]) -> Iterator[None]:
    """Every test begins with what a page shows at first; none may leave an error behind, or ask a network."""
    for watched in opened.values():
        watched(f"{TIMELINE}.show(...{TIMELINE}.data.typical)")
        watched.page.mouse.move(1, 1)
    yield
    for name, watched in opened.items():
        assert watched.problems == [], name
        assert watched.outside == [], name


@pytest.fixture
def together(opened: dict[str, Watched]) -> Watched:
    return opened["together"]


@pytest.fixture
def served(opened: dict[str, Watched]) -> Watched:
    return opened["served"]


@pytest.fixture
def long(opened: dict[str, Watched]) -> Watched:
    return opened["long"]


# -- what is there ---------------------------------------------------------------------------------------------------


def shapes(watched: Watched, figure: str, selector: str) -> list[float]:
    """The greater side of each of a figure's shapes."""
    script = """([figure, selector]) =>
        [...document.querySelector(`[data-figure="${figure}"]`).querySelectorAll(selector)].map((shape) => {
            const box = shape.getBoundingClientRect();
            return Math.max(box.width, box.height);
        })"""
    return list(watched(script, [figure, selector]))


@pytest.mark.parametrize("name", ["together", "served"])
def test_every_figure_is_drawn(name: str, opened: dict[str, Watched]) -> None:
    watched = opened[name]
    visible = watched(
        "[...document.querySelectorAll('[data-figure]')].filter((e) => !e.hidden).map((e) => e.dataset.figure)"
    )
    few = ["Staleness"] if name == "served" else ["Who was waited for"]
    assert sorted(visible) == sorted(["timeline", "workers", *BARS, *LINES, *few])
    for figure in [*BARS, *few]:
        assert max(shapes(watched, figure, ".barlayer .point path"), default=0) > 20, figure
    for figure in LINES:
        assert max(shapes(watched, figure, ".scatterlayer path.js-line"), default=0) > 100, figure


@pytest.mark.parametrize("name", ["together", "served", "long"])
def test_both_canvases_show_something(name: str, opened: dict[str, Watched]) -> None:
    for canvas in ("canvas.main", "canvas.strip"):
        assert colours(opened[name], canvas) > 5, canvas


def test_a_bar_is_as_long_as_what_it_shows(together: Watched) -> None:
    script = """() => {
        const figure = document.querySelector('[data-figure="Where the time goes"] .plot');
        const traces = [...figure.querySelectorAll(".barlayer .trace.bars")];
        return traces.flatMap((trace, n) => [...trace.querySelectorAll(".point path")].map(
            (path, worker) => [window.paceline.runs[0].time.data[n].values[worker], path.getBBox().width]));
    }"""
    bars = [(seconds, width) for seconds, width in together(script) if width > 20]
    assert len(bars) >= 4
    scale = max(width / seconds for seconds, width in bars)
    for seconds, width in bars:
        assert width == pytest.approx(seconds * scale, abs=3)


def test_the_slow_worker_is_named_above_and_in_the_table(together: Watched) -> None:
    assert "Worker 2 is slow" in together.words(".verdict")[0]
    # On a busy machine another worker may be slow now and then, too.
    named = dict(zip(together.words("tr.slow th"), together.words("tr.slow td.words"), strict=True))
    assert named["2"] == "slowness put on with --slow"


def test_a_worker_has_a_row_and_the_server_too(together: Watched, served: Watched) -> None:
    assert together(f"{TIMELINE}.data.lanes.map((lane) => lane.rank)") == [0, 1, 2, 3]
    assert served(f"{TIMELINE}.data.lanes.map((lane) => lane.rank)") == [0, 1, 2, 3, -1]


# -- moving ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def middle(together: Watched) -> Watched:
    """The middle of the run, far from its ends, where nobody can move on: typical updates may lie at the very end."""
    whole = together(f"{TIMELINE}.data.seconds")
    together.show(0.4 * whole, 0.5 * whole)
    return together


def test_the_wheel_zooms_around_the_pointer(middle: Watched) -> None:
    first, last = middle.view
    moment = first + 0.25 * (last - first)
    x, y = middle.place(moment, 1)
    middle.page.mouse.move(x, y)
    middle.page.mouse.wheel(0, -240)
    middle.until(f"(before) => {TIMELINE}.view[1] - {TIMELINE}.view[0] < 0.5 * before", last - first)
    assert middle.place(moment, 1)[0] == pytest.approx(x, abs=2)
    near = middle.seconds
    middle.page.mouse.wheel(0, 240)
    middle.until(f"(before) => {TIMELINE}.view[1] - {TIMELINE}.view[0] > 2 * before", near)
    assert middle.view == pytest.approx((first, last), abs=0.05 * (last - first))


def test_buttons_zoom_around_the_middle(middle: Watched) -> None:
    first, last = middle.view
    middle.click("+")
    assert middle.view == pytest.approx((first + (last - first) / 4, last - (last - first) / 4))
    middle.click("−")
    assert middle.view == pytest.approx((first, last))


def test_keys_zoom_and_move(middle: Watched) -> None:
    middle(f"{TIMELINE}.canvas.focus()")
    first, last = middle.view
    length = last - first
    for key, expected in (
        ("+", (first + length / 4, last - length / 4)),
        ("-", (first, last)),
        ("ArrowRight", (first + length / 4, last + length / 4)),
        ("ArrowLeft", (first, last)),
    ):
        middle.page.keyboard.press(key)
        assert middle.view == pytest.approx(expected), key
    middle.page.keyboard.press("Home")
    assert middle.view == pytest.approx((0, middle(f"{TIMELINE}.data.seconds")))


def test_what_is_dragged_stays_under_the_pointer(middle: Watched) -> None:
    first, last = middle.view
    moment = (first + last) / 2
    x, y = middle.place(moment)
    middle.page.mouse.move(x, y)
    middle.page.mouse.down()
    middle.page.mouse.move(x + 60, y)
    middle.page.mouse.move(x + 120, y)
    middle.page.mouse.up()
    assert middle.place(moment)[0] == pytest.approx(x + 120, abs=1)
    assert middle.seconds == pytest.approx(last - first)
    middle.page.mouse.move(x, y)  # let go, it no longer follows
    assert middle.place(moment)[0] == pytest.approx(x + 120, abs=1)


def test_a_double_click_goes_back_to_typical_updates(together: Watched) -> None:
    typical = together.view
    together.click("whole run")
    assert together.seconds > 1.5 * (typical[1] - typical[0])
    together.page.mouse.dblclick(*together.place(together.view[0] + 0.5 * together.seconds))
    assert together.view == pytest.approx(typical)


def test_the_strip_goes_anywhere_in_the_run(together: Watched) -> None:
    length, whole = together.seconds, together(f"{TIMELINE}.data.seconds")
    together.place(0)
    box = together("""() => { const box = document.querySelector("canvas.strip").getBoundingClientRect();
                              return [box.left, box.top, box.width]; }""")
    left, right, y = box[0] + 92, box[0] + box[2] - 8, box[1] + 15
    together.page.mouse.move(left + (right - left) / 2, y)
    together.page.mouse.down()
    assert sum(together.view) / 2 == pytest.approx(whole / 2, rel=0.02)
    together.page.mouse.move(left + 0.7 * (right - left), y)
    together.page.mouse.up()
    assert sum(together.view) / 2 == pytest.approx(0.7 * whole, rel=0.02)
    assert together.seconds == pytest.approx(length)
    together.page.mouse.move(left, y)
    assert sum(together.view) / 2 == pytest.approx(0.7 * whole, rel=0.02)


def test_one_cannot_leave_the_run(together: Watched) -> None:
    whole = together(f"{TIMELINE}.data.seconds")
    for first, last in ((-9 * whole, -8 * whole), (8 * whole, 9 * whole), (-whole, 3 * whole), (1.0, 1.0)):
        together.show(first, last)
        start, end = together.view
        assert -0.02 * whole <= start < end <= 1.03 * whole


# -- close up and from afar ------------------------------------------------------------------------------------------


def test_pushes_and_pulls_are_arrows_close_up(served: Watched, together: Watched) -> None:
    served.page.locator("canvas.main").focus()
    for _ in range(3):
        if not served(f"{TIMELINE}.arrows"):
            served.page.keyboard.press("+")
    assert served(f"{TIMELINE}.close") is True
    assert served(f"{TIMELINE}.arrows") > 0
    assert not together(f"{TIMELINE}.arrows")


def test_pointing_tells_what_the_events_say(together: Watched, reports: Reports) -> None:
    events = reports.events("together")
    began = min(event["start"] for event in events if "seconds" in event)
    computes = [event for event in events if event["event"] == "compute" and event["rank"] == 2]
    chosen = max(computes[5:-5], key=lambda event: event["seconds"])
    start, seconds = chosen["start"] - began, chosen["seconds"]
    together.show(start - seconds, start + 2 * seconds)
    # The page keeps times to a thousandth of themselves, so the last digit may be the next one.
    shown = {f"computing: {together(f'duration({seconds * factor!r})')}" for factor in (0.999, 1.0, 1.001)}
    for share in (0.03, 0.5, 0.97):
        words = together.tip(start + share * seconds, 2)
        assert words is not None
        first, second, *_ = words.splitlines()
        assert first in shown
        assert second == f"on version {chosen['version']}"
        assert words.splitlines()[2].endswith(", then backward")
    waits = [event for event in events if event["event"] == "wait" and event["rank"] == 0 and event["on"] == 2]
    wait = max(waits, key=lambda event: event["seconds"])
    start, seconds = wait["start"] - began, wait["seconds"]
    together.show(start - seconds, start + 2 * seconds)
    assert together.tip(start + seconds / 2, 0) == f"waiting: {together(f'duration({seconds!r})')}\nfor worker 2"
    together.page.mouse.move(1, 1)
    assert together.page.locator("#tip").is_hidden()


def test_from_afar_a_pixel_is_the_shares_of_many_steps(long: Watched) -> None:
    long.click("whole run")
    assert long(f"{TIMELINE}.close") is False
    assert "zoom in for single steps" in long.words(".bar .soft")[0]
    words = long.tip(10.0, 1)
    assert words is not None
    told = dict(part.split(" ", 1) for part in words.splitlines()[:-1])
    assert float(told["computing"].removesuffix(" %")) == pytest.approx(80, abs=2)
    assert float(told["updating"].removesuffix(" %")) == pytest.approx(10, abs=2)


def test_close_up_even_a_long_run_shows_single_steps(long: Watched) -> None:
    assert long(f"{TIMELINE}.close") is True
    first, last = long.view
    words = [long.tip(first + (last - first) * (0.5 + n / 40), 1) or "" for n in range(4)]
    assert any("on version" in one for one in words)


def test_slow_steps_of_a_long_run_are_marked_and_found(long: Watched) -> None:
    long.click("whole run")
    marks = long(f"{TIMELINE}.data.slowest")
    assert [(rank, version) for rank, _, _, _, version in marks] == [(3, LONGEST), (3, SECOND)]
    (_, start, seconds, times, _) = marks[0]
    assert seconds == pytest.approx(0.2)
    assert times == pytest.approx(250, rel=0.03)
    words = long.tip(start + seconds / 2, 3, up=19)
    assert words == f"a slow step: 200 ms\n{times:g} times the usual"
    for _, start, seconds, _, version in [*marks, marks[0]]:
        long.click("slowest step")
        first, last = long.view
        assert first < start < start + seconds < last
        assert last - first == pytest.approx(5 * seconds)
        assert version in (LONGEST, SECOND)


def test_a_slow_step_is_drawn_as_it_is_wherever_it_was(long: Watched) -> None:
    long.click("slowest step")
    first, last = long.view
    for share in (0.42, 0.58):  # it is the middle fifth of what is shown
        words = long.tip(first + share * (last - first), 3)
        assert words is not None
        assert "computing" in words


# -- several runs ----------------------------------------------------------------------------------------------------


def test_runs_stand_side_by_side(opened: dict[str, Watched]) -> None:
    compared = opened["compared"]
    rows = compared.page.locator("[data-figure=comparison] tr").all()
    assert len(rows) == 3
    cells = [row.locator("th, td").all_inner_texts() for row in rows[1:]]
    assert [row[:3] for row in cells] == [["all", "all-reduce", "4"], ["three of four", "k-batch-sync:k=3", "4"]]
    assert cells[0][compared.words("[data-figure=comparison] thead th").index("× first")] == "1.00"
    assert compared.words("details.run h2") == ["all", "three of four"]
    assert compared("window.paceline.runs.length") == 2
    for figure in ("loss against wall-clock", "loss against updates"):
        assert len([size for size in shapes(compared, figure, ".scatterlayer path.js-line") if size > 50]) == 2
    assert len(shapes(compared, "Throughput, side by side", ".barlayer .point path")) == 2


def test_the_winner_is_named_first(opened: dict[str, Watched]) -> None:
    compared = opened["compared"]
    sentence = compared.words(".verdict")[0]
    winner = compared("document.querySelector('[data-figure=comparison] tr.best th').dataset.value")
    assert sentence.startswith(f"{winner} ") and "quick" in sentence
    top = compared("document.querySelector('.verdict').getBoundingClientRect().top + scrollY")
    assert top < 200


def test_a_head_sorts_the_table_by_its_column(opened: dict[str, Watched]) -> None:
    compared = opened["compared"]
    rates = """[...document.querySelectorAll('[data-figure=comparison] tbody tr')].map((row) => Number(row.children[
        [...document.querySelectorAll('[data-figure=comparison] thead th')].findIndex(
            (head) => head.textContent === "samples/s")].dataset.value))"""
    head = compared.page.locator("[data-figure=comparison] thead th", has_text="samples/s")
    head.locator("button").focus()
    compared.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert compared(rates) == sorted(compared(rates), reverse=True)
    compared.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert compared(rates) == sorted(compared(rates))
    compared.page.locator("[data-figure=comparison] thead th button", has_text="run").click()
    compared.page.locator("[data-figure=comparison] thead th button", has_text="run").click()
    assert compared("document.querySelector('[data-figure=comparison] tbody th').dataset.value") == "all"


def test_lines_have_their_names_at_their_ends(opened: dict[str, Watched]) -> None:
    compared = opened["compared"]
    figure = '[data-figure="loss against wall-clock"]'

    def words(selector: str) -> list[str]:
        script = "(selector) => [...document.querySelectorAll(selector)].map((one) => one.firstChild.textContent)"
        return list(compared(script, f"{figure} {selector}"))

    assert sorted(words(".linelabel")) == ["all", "three of four"]
    colours = """(figure) => ["stroke", "fill"].map((name, n) => [...document.querySelectorAll(
        figure + [" .js-line", " .linelabel"][n])].map((one) => one.getAttribute(name)).sort())"""
    lines, labels = compared(colours, figure)
    assert lines == labels and len(set(lines)) == 2
    assert compared(f"document.querySelectorAll('{figure} .scatterlayer .raw').length") == 2
    before = words(".ytick")
    compared.page.locator(f"{figure} .switch").click()
    assert words(".ytick") != before
    compared.page.locator(f"{figure} .switch").click()
    assert words(".ytick") == before


def test_a_run_is_folded_until_it_is_chosen(opened: dict[str, Watched]) -> None:
    compared = opened["compared"]
    assert compared("[...document.querySelectorAll('details.run')].map((one) => one.open)") == [False, False]
    assert compared("document.querySelectorAll('#timelines canvas').length") == 2
    compared.page.locator("nav.contents a", has_text="three of four").click()
    compared.until("document.querySelector('#run-1').open")
    compared.until("document.querySelectorAll('#run-1 .js-line').length > 2")
    assert compared(OVERLAPS) == []
    compared("document.querySelectorAll('details.run').forEach((one) => { one.open = false; })")


def test_a_worker_that_is_chosen_stays_bright_in_all_figures(together: Watched) -> None:
    faded = """[...document.querySelectorAll('.faded')].map((one) => Number(one.dataset.worker))"""
    together.page.locator("[data-figure=workers] tbody button").nth(2).focus()
    before = together(f"{TIMELINE}.drawn")
    together.page.keyboard.press("Enter")
    assert set(together(faded)) == {0, 1, 3} and together(f"{TIMELINE}.chosen") == 2
    assert together(f"{TIMELINE}.drawn") > before
    together.page.locator('[data-figure="Where the time goes"] .point[data-worker="1"]').first.click()
    assert set(together(faded)) == {0, 2, 3}
    together.page.locator("[data-figure=workers] tbody button").nth(1).click()
    assert together(faded) == []


def test_what_is_drawn_is_also_said(opened: dict[str, Watched]) -> None:
    """For screen readers: figures have words, cells have heads, and headings are in order."""
    for name, watched in opened.items():
        words = watched("[...document.querySelectorAll('.plot svg, canvas')].map((one) => one.ariaLabel)")
        assert all(words), name
        assert any("worker 1: computing" in one for one in words), name
        assert watched("[...document.querySelectorAll('th')].every((head) => head.scope)"), name
        levels = watched("[...document.querySelectorAll('h1, h2, h3, h4')].map((one) => Number(one.tagName[1]))")
        assert levels[0] == 1 and all(after - before <= 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("name", ["together", "served", "long", "compared"])
def test_a_telephone_needs_no_sideways_scrolling(name: str, opened: dict[str, Watched]) -> None:
    watched = opened[name]
    watched.page.set_viewport_size({"width": 400, "height": 800})
    try:
        watched.until("document.documentElement.clientWidth <= 400")
        watched.until(f"!{TIMELINE}.box.checkVisibility() || {TIMELINE}.width < 400")
        assert watched("document.documentElement.scrollWidth") <= 400
        watched.until(f"({OVERLAPS})().length === 0")
    finally:
        watched.page.set_viewport_size({"width": 1280, "height": 800})


@pytest.mark.parametrize("name", ["together", "served", "long", "compared"])
def test_a_page_is_small(name: str, reports: Reports) -> None:
    assert (reports.cwd / f"{name}.html").stat().st_size < 1_500_000


def test_a_title_is_words_and_never_markup(opened: dict[str, Watched]) -> None:
    assert opened["compared"].words("h1") == [EVIL]
    assert opened["compared"].page.title() == EVIL


# -- how it looks ----------------------------------------------------------------------------------------------------


def test_it_is_light_or_dark_as_the_system_is(served: Watched) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    drawn = "document.querySelector('canvas.main').toDataURL()"
    ticks = "getComputedStyle(document.querySelector('.xtick text')).fill"
    light = [served(script) for script in (paper, drawn, ticks)]
    before = served(f"{TIMELINE}.drawn")
    served.page.emulate_media(color_scheme="dark")
    served.until(f"(before) => {TIMELINE}.drawn > before", before)
    served.until("(before) => getComputedStyle(document.querySelector('.xtick text')).fill !== before", light[2])
    dark = [served(script) for script in (paper, drawn)]
    served.page.emulate_media(color_scheme="light")
    served.until(f"(before) => {drawn} === before", light[1])
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] != light[0]
    assert dark[1] != light[1]


OVERLAPS = """() => {
    const found = [];
    for (const plot of document.querySelectorAll(".plot")) {
        if (!plot.checkVisibility()) continue;
        const figure = plot.closest("[data-figure]").dataset.figure;
        const parts = [...plot.querySelectorAll(".xtick text, .ytick text, .xtitle, .ytitle, .legendtext")]
            .map((part) => [part.textContent, part.getBoundingClientRect()]).filter(([, box]) => box.width > 0);
        const frame = plot.getBoundingClientRect();
        parts.forEach(([words, box], n) => {
            if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
                found.push(`${figure}: '${words}' leaves its frame`);
            for (const [others, other] of parts.slice(n + 1)) {
                const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
                const high = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
                if (wide > 1 && high > 1) found.push(`${figure}: '${words}' and '${others}' overlap`);
            }
        });
    }
    return found;
}"""


@pytest.mark.parametrize("name", ["together", "served", "long", "compared"])
def test_no_two_labels_overlap(name: str, opened: dict[str, Watched]) -> None:
    assert opened[name](OVERLAPS) == []


@pytest.mark.parametrize("name", ["together", "served", "long", "compared"])
def test_a_page_is_as_wide_as_its_window(name: str, opened: dict[str, Watched]) -> None:
    assert opened[name]("document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize("name", ["together", "served", "long"])
def test_the_table_of_workers_fits_its_card(name: str, opened: dict[str, Watched]) -> None:
    assert (
        opened[name]("(() => { const c = document.querySelector('.scroll'); return c.scrollWidth - c.clientWidth; })()")
        <= 0
    )


# -- pictures --------------------------------------------------------------------------------------------------------


def test_runs_stand_side_by_side_however_long_their_strategies(browser: Browser, tmp_path: Path) -> None:
    specs = ["sync", "mesh:data=2,pipeline=2,microbatches=8,schedule=zero-bubble,sync=k-batch-async:k=2"]
    words = [word for spec in specs for word in ("-s", spec)]
    outcome = finished([PACELINE, "simulate", *words, "--updates", "20", "--out", "predicted"], tmp_path)
    assert outcome.code == 0, outcome.err
    watched = Watched(browser, (tmp_path / "predicted" / "report.html").as_uri())
    find = "document.querySelector('[data-figure=comparison]')"
    wide, room = watched(f"(card => [card.scrollWidth, card.clientWidth])({find})")
    assert wide <= room
    assert watched(OVERLAPS) == []
    watched.page.close()


@contextlib.contextmanager
def drawing(folder: Path, temporary: Path) -> Iterator[Run]:
    """`paceline report --png` of a run of two workers."""
    lines = [step(rank, 100 + 0.01 * n, 0.01 + 0.001 * rank, n) for n in range(60) for rank in (0, 1)]
    write_script(folder, join(0, 99.0) + join(1, 99.0) + "".join(lines), "events.jsonl")
    command = [PACELINE, "report", "events.jsonl", "--png", "-o", "drawn.html"]
    with started(command, folder, TMPDIR=str(temporary)) as run:
        yield run


def test_every_visible_figure_becomes_a_picture(tmp_path: Path) -> None:
    temporary = tmp_path / "with a name that is too long for a socket in it"
    temporary.mkdir()
    with drawing(tmp_path, temporary) as run:
        outcome = run.finish(110)
    assert outcome.code == 0, outcome.err
    # There was no server, nobody waited, nothing was reported and no byte was moved: nobody wants pictures of that.
    names = ["timeline", "workers", "where-the-time-goes", "own-pace"]
    names += ["throughput-over-time", "throughput-over-updates"]
    assert outcome.out.splitlines()[-1] == f"figures: drawn/ ({len(names)} PNG files)"
    pictures = sorted((tmp_path / "drawn").iterdir())
    assert [picture.name for picture in pictures] == [f"{n:02}-{name}.png" for n, name in enumerate(names, start=1)]
    for picture in pictures:
        data = picture.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width == 1220
        assert 150 < height < 800, picture.name
        assert len(data) > 3000, picture.name


def test_nothing_is_left_of_pictures_that_were_given_up(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name, drawing(tmp_path, Path(name)) as run:
        wait_until(lambda: any(Path(name).glob("paceline-png-*/*")), 60, "the browser")
        run.process.send_signal(signal.SIGINT)
        outcome = run.finish(30)
        assert run.processes() == []
        assert list(Path(name).iterdir()) == []
    assert (outcome.code, outcome.err) == (130, "paceline: drawing the figures\n")

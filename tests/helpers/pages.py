"""What the tests of the report's and of the live page share: a browser, pages that are watched, and made-up runs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, ConsoleMessage, Page, sync_playwright

from helpers.load import allowed

PATIENCE = 60_000.0
"""Milliseconds that a page may take for anything."""
TIMELINE = "window.paceline.runs[0].timeline"


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium as the system has it; nothing is downloaded."""
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page of which all that goes wrong, and all that it asks for, is written down."""

    def __init__(self, browser: Browser, address: str, scheme: Any = "light") -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.until("Boolean(window.paceline && window.paceline.ready)")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    # -- asking ------------------------------------------------------------------------------------------------------

    def __call__(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def until(self, script: str, argument: Any = None) -> None:
        """Wait until a script says true. (`wait_for_function` may not: the live page forbids it to evaluate words.)"""
        began = time.monotonic()
        while not self.page.evaluate(script, argument):
            assert time.monotonic() - began < allowed(PATIENCE / 1000), f"waited in vain for {script}"
            self.page.wait_for_timeout(50)

    @property
    def outside(self) -> list[str]:
        """What it asked for that is neither in its own file nor on loopback."""
        near = ("file://", "data:", "blob:", "http://127.0.0.1:", "http://localhost:")
        return [url for url in self.requests if not url.startswith(near)]

    def words(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def click(self, words: str) -> None:
        self.page.get_by_role("button", name=words, exact=True).first.click()

    # -- the timeline of its first run -------------------------------------------------------------------------------

    @property
    def view(self) -> tuple[float, float]:
        first, last = self(f"{TIMELINE}.view")
        return first, last

    @property
    def seconds(self) -> float:
        """From the left end of the timeline to its right."""
        first, last = self.view
        return last - first

    def show(self, first: float, last: float) -> None:
        self(f"([a, b]) => {TIMELINE}.show(a, b)", [first, last])

    def place(self, moment: float, lane: int = 0) -> tuple[float, float]:
        """Where a moment of a row is, in the window."""
        self(f"{TIMELINE}.canvas.scrollIntoView({{block: 'center'}})")
        script = f"""([moment, lane]) => {{
            const box = {TIMELINE}.canvas.getBoundingClientRect();
            return [box.left + {TIMELINE}.at(moment), box.top + {TIMELINE}.y(lane) + 17];
        }}"""
        x, y = self(script, [moment, lane])
        return x, y

    def tip(self, moment: float, lane: int = 0, up: float = 0.0) -> str | None:
        """What is told where the mouse points."""
        x, y = self.place(moment, lane)
        self.page.mouse.move(x, y - up)
        return None if self.page.locator("#tip").is_hidden() else self.page.locator("#tip").inner_text()


def colours(watched: Watched, selector: str) -> int:
    """How many colours a canvas shows."""
    script = """(selector) => {
        const canvas = document.querySelector(selector);
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(data.buffer)).size;
    }"""
    return int(watched(script, selector))


def heap(session: CDPSession) -> int:
    """Bytes that the page's script holds on to."""
    session.send("HeapProfiler.collectGarbage")
    return int(session.send("Runtime.getHeapUsage")["usedSize"])


# -- made-up runs ----------------------------------------------------------------------------------------------------


def line(event: str, rank: int, start: float, **more: Any) -> str:
    return json.dumps({"event": event, "rank": rank, "start": start, **more}) + "\n"


def join(rank: int, start: float) -> str:
    return line("join", rank, start, pid=1, host="here", device="cpu", strategy="all-reduce", wall=1.75e9)


def step(rank: int, start: float, seconds: float, version: int) -> str:
    """Computing, most of the time, and an update. Written by hand: there are many."""
    computing, updating = 0.8 * seconds, 0.1 * seconds
    return (
        f'{{"event":"compute","rank":{rank},"start":{start:.7f},"seconds":{computing:.7f},"version":{version},'
        f'"minibatches":1,"samples":8,"forward":{0.3 * seconds:.7f}}}\n'
        f'{{"event":"update","rank":{rank},"start":{start + computing:.7f},"seconds":{updating:.7f},'
        f'"version":{version + 1},"workers":4}}\n'
    )


def make_going(folder: Path, now: float, ranks: int = 2, steps: int = 50) -> Path:
    """The folder of a run that goes on: so many steps of 10 ms each until now."""
    (folder / "streams").mkdir(parents=True)
    (folder / "config.json").write_text('{"workers": 2}')
    began = now - 0.01 * steps
    for rank in range(ranks):
        lines = [join(rank, began - 1), *(step(rank, began + 0.01 * n, 0.01, n) for n in range(steps))]
        lines.append(line("metric", rank, began + 0.1, version=9, values={"loss": 0.5}))
        (folder / "streams" / f"{rank}.jsonl").write_text("".join(lines))
    return folder

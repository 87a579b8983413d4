"""PNG files of a report's figures, drawn by an installed browser."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from paceline.errors import UsageError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_PATIENCE = 60.0
_WIDTH, _EDGE = 1220, 20
_PLUG = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""A program that moves the pipes to descriptors 3 and 4, which the browser uses, and then becomes the browser."""
_LONG = 40
"""Length of a folder's path above which the path of the browser's socket in it may be too long."""


def find_browser() -> str:
    """The path of an installed browser."""
    for name in _BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    raise UsageError(f"--png needs a browser to draw with, and found none of {', '.join(_BROWSERS)}; install chromium")


def take_pictures(page: Path, folder: Path) -> list[Path]:
    """Writes each figure of a report to a PNG; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with Browser(find_browser()) as browser:
        browser.open(page.resolve().as_uri())
        browser.resize(_WIDTH, 900)
        for number, name in enumerate(browser.evaluate("paceline.figures()")):
            height = browser.evaluate(f"paceline.show({number})")
            browser.resize(_WIDTH, height + 2 * _EDGE)
            browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            words = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")
            paths.append(folder / f"{number + 1:02}-{words}.png")
            paths[-1].write_bytes(browser.picture())
    return paths


class Browser:
    """A headless browser with one page, driven over pipes by the DevTools protocol."""

    def __init__(self, path: str) -> None:
        self._name = Path(path).name
        self._calls = 0
        self._session: str | None = None
        self._heard = b""
        near = "/tmp" if len(tempfile.gettempdir()) > _LONG and os.access("/tmp", os.W_OK) else None
        self._profile = tempfile.TemporaryDirectory(prefix="paceline-png-", dir=near, ignore_cleanup_errors=True)
        options = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # a browser refuses to run with one as root
        orders, self._orders = _pipe()
        self._answers, answers = _pipe()
        self._process = subprocess.Popen(
            [
                *[sys.executable, "-S", "-c", _PLUG, str(orders), str(answers)],
                *[path, *options, f"--user-data-dir={self._profile.name}", "about:blank"],
            ],
            env={**os.environ, "TMPDIR": self._profile.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(orders, answers),
            start_new_session=True,
        )
        os.close(orders)
        os.close(answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._orders)
        os.close(self._answers)
        self._profile.cleanup()

    def open(self, address: str) -> None:
        """Opens a report, and waits until it is drawn."""
        target = self._call("Target.createTarget", url=address)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        until = time.monotonic() + _PATIENCE
        while not self.evaluate("Boolean(window.paceline && window.paceline.ready)"):
            if time.monotonic() >= until:
                raise self._late()
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            what = answer["exceptionDetails"].get("exception", {}).get("description", "an error of its script")
            raise UsageError(f"{self._name} could not draw the report: {what.splitlines()[0]}")
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self) -> bytes:
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        order: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            order["sessionId"] = self._session
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\0")
        except BrokenPipeError:
            raise UsageError(f"{self._name} ended before it had drawn the report") from None
        until = time.monotonic() + _PATIENCE
        while (answer := self._answer(until)).get("id") != self._calls:
            pass  # an event of the browser
        if "error" in answer:
            raise UsageError(f"{self._name} could not draw the report: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    def _answer(self, until: float) -> dict[str, Any]:
        """The browser's next message."""
        while b"\0" not in self._heard:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._late()
            more = os.read(self._answers, 1 << 20)
            if not more:
                raise UsageError(f"{self._name} ended before it had drawn the report")
            self._heard += more
        said, _, self._heard = self._heard.partition(b"\0")
        answer: dict[str, Any] = json.loads(said)
        return answer

    def _late(self) -> UsageError:
        return UsageError(f"{self._name} did not draw the report within {_PATIENCE:g} s")


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors differ from those that a browser uses."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]

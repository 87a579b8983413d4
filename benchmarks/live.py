"""The live page on a long run. One command: `python benchmarks/live.py` (needs chromium and playwright).

Draws the streams of a run of 8 workers with 100,000 steps each, as if it were still going on, opens the page on it in a
headless browser, and says how soon there is a picture, how smoothly the page moves meanwhile, and what it needs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import report
from playwright.sync_api import Page, sync_playwright

from paceline.report.png import find_browser

WATCH = """() => {
  window.gaps = [];
  let last = performance.now();
  const look = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(look); };
  requestAnimationFrame(look);
}"""
REDRAW = """() => {
  const line = window.paceline.runs[0].timeline, begin = performance.now();
  line.show(0, line.data.seconds);
  for (let n = 0; n < 20; n++) line.draw();
  return (performance.now() - begin) / 20;
}"""


def heap(page: Page) -> float:
    """Megabytes of the page's objects."""
    return float(page.evaluate("() => { window.gc(); return performance.memory.usedJSHeapSize / 1e6; }"))


def wait(page: Page, until: str, seconds: float) -> float:
    """How long it took until this was so."""
    begin = time.monotonic()
    while not page.evaluate(until):
        if time.monotonic() - begin > seconds:
            sys.exit(f"not within {seconds:g} s: {until}")
        page.wait_for_timeout(50)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="of each of the eight workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent, sync_playwright() as player:
        folder = Path(parent) / "long"
        report.write(folder, options.steps)
        (folder / "config.json").write_text("{}")
        size = sum(file.stat().st_size for file in (folder / "streams").iterdir())
        print(f"{size / 1e6:.0f} MB of events", flush=True)
        command = [sys.executable, "-m", "paceline", "live", str(folder)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                address = server.stderr.readline().split()[-1]
                flags = ["--no-sandbox", "--js-flags=--expose-gc", "--enable-precise-memory-info"]
                browser = player.chromium.launch(executable_path=find_browser(), args=flags)
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                begin = time.monotonic()
                page.goto(address)
                wait(page, "Boolean(window.paceline && window.paceline.ready)", 60)
                print(f"first picture after {time.monotonic() - begin:.1f} s", flush=True)
                page.evaluate(WATCH)
                first = heap(page)
                wait(page, "!document.querySelector('.bar').textContent.includes('reading')", 120)
                print(f"all of it after {time.monotonic() - begin:.1f} s", flush=True)
                page.wait_for_timeout(5000)
                gaps = sorted(page.evaluate("window.gaps"))
                print(
                    f"between two frames {gaps[len(gaps) // 2]:.0f} ms (median), {gaps[int(0.99 * len(gaps))]:.0f} ms "
                    f"(99 of 100), {gaps[-1]:.0f} ms (longest)"
                )
                print(f"a redraw of the whole timeline {page.evaluate(REDRAW):.1f} ms")
                print(f"the page's objects {first:.0f} MB at first, {heap(page):.0f} MB at the end")
                with urllib.request.urlopen(address.rstrip("/") + "/facts.json") as answer:
                    print(f"a message {len(answer.read()) / 1e3:.0f} kB")
                status = Path(f"/proc/{server.pid}/status").read_text()
                print(f"the server {int(status.split('VmHWM:')[1].split()[0]) / 1024:.0f} MB at most")
                browser.close()
            finally:
                server.terminate()


if __name__ == "__main__":
    main()

"""Pictures of a report's figures, taken by the browser that is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import unquote

from paceline.errors import UsageError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_PATIENCE = 60.0


def find_browser() -> str:
    for name in _BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    raise UsageError(f"--png needs a browser to draw with, and found none of {', '.join(_BROWSERS)}; install chromium")


def take_pictures(page: Path, folder: Path) -> list[Path]:
    """Write each figure of a report to a PNG of its own; returns where."""
    browser = find_browser()
    address = page.resolve().as_uri()
    folder.mkdir(parents=True, exist_ok=True)
    text = _call(browser, "--dump-dom", "--window-size=1220,900", f"{address}#figures")
    known = re.search(r'data-figures="([^"]*)"', text)
    if known is None:
        raise UsageError(f"{Path(browser).name} could not draw {page}")
    paths = []
    for number, (name, height) in enumerate(json.loads(unquote(known.group(1)))):
        words = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")
        path = folder / f"{number + 1:02}-{words}.png"
        size = f"--window-size=1220,{height + 40}"
        _call(browser, size, f"--screenshot={path.resolve()}", f"{address}#figure={number}")
        paths.append(path)
    return paths


def _call(browser: str, *arguments: str) -> str:
    options = ["--headless=new", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000", "--no-first-run"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # which a browser refuses to have as root
    with tempfile.TemporaryDirectory(prefix="paceline-png-", ignore_cleanup_errors=True) as profile:
        try:
            done = subprocess.run(
                [browser, *options, f"--user-data-dir={profile}", *arguments],
                capture_output=True,
                timeout=_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"{Path(browser).name} did not draw the page within {_PATIENCE:g} s") from None
    if done.returncode:
        raise UsageError(f"{Path(browser).name} ended with exit code {done.returncode}")
    return done.stdout.decode(errors="replace")

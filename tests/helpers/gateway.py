"""A Prometheus Pushgateway on loopback that keeps what is pushed to it."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple


class Pushed(NamedTuple):
    """One push."""

    path: str
    kind: str
    """Its content type."""
    body: str


class _Handler(http.server.BaseHTTPRequestHandler):
    pushed: list[Pushed]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.pushed.append(Pushed(self.path, self.headers["Content-Type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def gateway() -> Iterator[tuple[str, list[Pushed]]]:
    """Its address, and what is pushed to it until the context exits."""
    pushed: list[Pushed] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"pushed": pushed})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", pushed
        finally:
            server.shutdown()
            thread.join()

"""The live page: the report's figures during a run, and its metrics for Prometheus. It is read-only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.report.metrics import CONTENT_TYPE, metrics
from paceline.report.page import SCRIPTS, html, static
from paceline.report.source import RunSource

_INTERVAL = 1.0
"""Seconds between two refreshes."""
_EXIT_REPORT = 5.0
"""Seconds from the run's end until the server stops, in which open pages learn of the end."""
_ADVICE = 10.0
"""Seconds between two simulations for advice."""
_COLUMNS = 600
LIMIT = 6000
"""Single intervals that are sent to the page."""
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class CurrentFacts:
    """The facts of a run, recomputed on request, at most once per refresh interval."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._facts: dict[str, Any] = {}
        self._made = 0.0
        self._advised = 0.0
        self._lock = asyncio.Lock()

    async def facts(self) -> dict[str, Any]:
        async with self._lock:
            ended = not self.source.going and not self._facts.get("over")
            old = ended or time.monotonic() - self._made >= _INTERVAL * 0.9
            if not self._facts or old or self.source.share < 1.0:
                self._facts = await asyncio.to_thread(self._make)
                self._made = time.monotonic()
            return self._facts

    def _make(self) -> dict[str, Any]:
        if not self._facts.get("over"):
            over = self.source.over
            self.source.follow(_INTERVAL)
            share = self.source.share
            known = {"over": over and share == 1.0, "now": time.perf_counter(), "read": share}
            fresh = known["over"] or time.monotonic() - self._advised >= _ADVICE
            facts = self.source.facts(columns=_COLUMNS, advice=fresh) | known
            if fresh:
                self._advised = time.monotonic()
            self._facts = {"advice": self._facts.get("advice", [])} | facts
        return self._facts


class Guard:
    """Admits only requests with an allowed method, host, origin and, if set, token."""

    def __init__(self, app: Any, *, hosts: set[str], port: int, token: str | None) -> None:
        self._app, self._hosts, self._port, self._token = app, hosts, port, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope)
        refused = self._refusal(request)

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SAFE)
            await send(message)

        answer = self._app if refused is None else PlainTextResponse(refused[1] + "\n", refused[0])
        await answer(scope, receive, send_safely)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        host = request.headers.get("host", "")
        name, port = _name_and_port(host)
        if name not in self._hosts or port not in ("", str(self._port)):
            why = "this host name or port is not served here; through a tunnel, use the same port"
            return 421 if host else 400, why
        if request.method not in ("GET", "HEAD"):
            return 405, "this page only reads: GET and HEAD are allowed"
        origin = request.headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "this origin may not read it"
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return 403, "another site may not read it"
        if self._token is not None and not secrets.compare_digest(_given(request).encode(), self._token.encode()):
            return 401, "a token is needed: open the address that was printed, or send 'Authorization: Bearer TOKEN'"
        return None


def _given(request: Request) -> str:
    scheme, _, word = request.headers.get("authorization", "").partition(" ")
    return word if scheme.lower() == "bearer" else request.query_params.get("token", "")


def _name_and_port(host: str) -> tuple[str, str]:
    """A host's name, and its port if it is given."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name.lower(), port.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower(), port


def application(source: RunSource, token: str | None) -> Starlette:
    current = CurrentFacts(source)
    query = "" if token is None else f"?token={quote(token)}"
    names = (*SCRIPTS, "live.js")
    page = html("Paceline live", "\n".join(f'<script src="{name}{query}"></script>' for name in names))

    @functools.cache
    def script(name: str) -> str:
        return "live();" if name == "live.js" else static(name)

    async def index(_: Request) -> Response:
        return Response(page, media_type="text/html")

    async def serve(request: Request) -> Response:
        return Response(script(request.url.path.removeprefix("/")), media_type="text/javascript")

    async def stream(_: Request) -> Response:
        return StreamingResponse(_stream(current), media_type="text/event-stream")

    async def facts(_: Request) -> Response:
        data = msgspec.json.encode(await current.facts())
        return Response(data, media_type="application/json")

    async def prometheus(_: Request) -> Response:
        return Response(metrics(await current.facts()), media_type=CONTENT_TYPE)

    routes = [Route("/", index), Route("/stream", stream), Route("/facts.json", facts), Route("/metrics", prometheus)]
    return Starlette(routes=[*routes, *(Route(f"/{name}", serve) for name in names)])


async def _stream(current: CurrentFacts) -> AsyncIterator[bytes]:
    while True:
        began = time.monotonic()
        facts = await current.facts()
        yield b"event: facts\ndata: " + msgspec.json.encode(facts) + b"\n\n"
        if facts["over"]:
            return
        # A busy machine refreshes less often; the last refresh comes at once.
        until = time.monotonic() + max(_INTERVAL, 3 * (time.monotonic() - began))
        while not current.source.over and current.source.share == 1.0 and time.monotonic() < until:
            await asyncio.sleep(0.1)


def allowed_hosts(host: str) -> set[str]:
    """The host names under which the page may be requested."""
    hosts = {host.lower()}
    if is_loopback(host):
        return hosts | {"127.0.0.1", "localhost", "::1"}
    own = socket.gethostname()
    hosts |= {own.lower(), socket.getfqdn().lower(), "127.0.0.1", "localhost"}
    with contextlib.suppress(OSError):
        hosts |= {str(info[4][0]) for info in socket.getaddrinfo(own, None)}
    return hosts


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(source: RunSource, listener: socket.socket, host: str, token: str | None, *, until_over: bool) -> None:
    """Serves the page until interrupted or, with `until_over`, until the run is over."""
    app = Guard(application(source, token), hosts=allowed_hosts(host), port=listener.getsockname()[1], token=token)
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)

    async def watch() -> None:
        over: float | None = None
        parent = os.getppid()
        while not server.should_exit:
            await asyncio.sleep(0.25)
            if os.getppid() != parent:
                server.should_exit = True  # the launcher is gone
            elif source.over:
                over = over or time.monotonic()
                idle = not server.server_state.connections
                if idle or time.monotonic() - over > _EXIT_REPORT:
                    server.should_exit = True

    async def both() -> None:
        watcher = asyncio.create_task(watch()) if until_over else None
        await server.serve(sockets=[listener])
        if watcher is not None:
            watcher.cancel()

    asyncio.run(both())

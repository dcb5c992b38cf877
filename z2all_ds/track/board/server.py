"""The board's web server: the page, its charts' library, and the runs as JSON.

It answers this machine alone unless it is told otherwise, and then only those who know a token. Without a token a
request that names another host is refused: a page from elsewhere could have had its name point here.
"""

import gzip
import secrets
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from z2all_ds.track.board.curves import AXES
from z2all_ds.track.board.hosts import host_of, is_loopback
from z2all_ds.track.board.run import WatchedRun
from z2all_ds.track.board.settings import differences
from z2all_ds.track.board.watch import Watch

PAGE = Path(__file__).parent / "page"
DEFAULT_POINTS, MOST_POINTS = 800, 20_000
# Plotly sets styles on its elements and makes pictures of charts as data and blob addresses; it needs no eval.
POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def answer_of(content: Any, status: int = 200) -> Response:
    """As JSON; what is not finite becomes null."""
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(body, status, media_type="application/json")


class Guard:
    """In front of everything: who may ask, and the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str | None, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        if self._token is None:
            host = host_of(Headers(scope=scope).get("host", ""))
            if is_loopback(host):
                return None
            return answer_of({"error": f"host {host!r}: the board answers to 127.0.0.1 and localhost alone"}, 403)
        if self._is_right(request.query_params.get("token")):
            rest = request.url.remove_query_params("token").query
            answer = RedirectResponse(request.url.path + (f"?{rest}" if rest else ""))
            words = quote(self._token or "", safe="")  # a cookie holds few characters as they are
            answer.set_cookie(self._cookie, words, httponly=True, samesite="strict")
            return answer
        if self._is_right(unquote(request.cookies.get(self._cookie, ""))):
            return None
        words = "token missing or wrong: open the address that `z2all board` has printed"
        return PlainTextResponse(words, 403) if request.url.path == "/" else answer_of({"error": words}, 403)

    def _is_right(self, said: str | None) -> bool:
        return said is not None and secrets.compare_digest(said.encode(), (self._token or "").encode())


def make_app(watch: Watch, token: str | None = None, port: int = 0) -> Starlette:
    """`token` None: this machine alone. The port is in the cookie's name, or two boards would share one."""

    def run_of(request: Request) -> WatchedRun:
        return _run(watch, request.query_params.get("run", ""))

    def runs(request: Request) -> Response:
        names = watch.names()
        return answer_of({"runs": [run.summary(names[run.id]) for run in watch.shown_runs()]})

    def curves(request: Request) -> Response:
        query = request.query_params
        names = query.getlist("name") + [name for name in query.get("names", "").split(",") if name]
        axis = query.get("x", "step")
        if axis not in AXES:
            raise HTTPException(400, f"x={axis}: must be one of {', '.join(AXES)}")
        most = int(_number(request, "points") or DEFAULT_POINTS)
        most = max(1, min(MOST_POINTS, most))
        low, high = _number(request, "from"), _number(request, "to")
        try:
            return answer_of(run_of(request).points(names, axis, low, high, most))
        except OSError as error:  # a zoom reads the file again
            raise HTTPException(503, f"{error}") from None

    def events(request: Request) -> Response:
        return answer_of({"events": run_of(request).shown_events()})

    def health(request: Request) -> Response:
        return answer_of(run_of(request).shown_health())

    def mixture(request: Request) -> Response:
        return answer_of(run_of(request).mixture())

    def probes(request: Request) -> Response:
        return answer_of({"probes": run_of(request).probes()})

    def differing(request: Request) -> Response:
        chosen = [_run(watch, number) for number in request.query_params.get("runs", "").split(",")]
        return answer_of({"keys": differences([run.settings.flat for run in chosen])})

    def index(request: Request) -> Response:
        watch.pace.give_way()
        return _page_file("index.html")

    def page(request: Request) -> Response:
        return _page_file(request.path_params["name"])

    apis: dict[str, Callable[[Request], Response]] = {
        "runs": runs,
        "curves": curves,
        "events": events,
        "health": health,
        "mixture": mixture,
        "probes": probes,
        "differences": differing,
    }
    return Starlette(
        routes=[
            Route("/", index),
            Route("/page/{name}", page),
            Route("/plotly.js", plotly),
            *(Route(f"/api/{name}", endpoint) for name, endpoint in apis.items()),
        ],
        middleware=[
            Middleware(Guard, token=token, cookie=f"z2all_board_{port}"),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
        ],
        exception_handlers={HTTPException: _told},
    )


def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer_of({"error": error.detail}, error.status_code)


def _run(watch: Watch, number: str) -> WatchedRun:
    found = {run.id: run for run in watch.runs()}
    if number not in found:
        raise HTTPException(404, f"run={number}: there is no such run on the board")
    return found[number]


def _number(request: Request, name: str) -> float | None:
    said = request.query_params.get(name)
    if said is None or said == "":
        return None
    try:
        number = float(said)
    except ValueError:
        number = float("nan")
    if abs(number) < float("inf"):
        return number
    raise HTTPException(400, f"{name}={said}: must be a finite number")


def _page_file(name: str) -> Response:
    """Only names that are there, so that no path leads out."""
    found = {file.name: file for file in PAGE.iterdir() if file.is_file()} if PAGE.is_dir() else {}
    if name not in found:
        raise HTTPException(404, f"{name}: the page has no such file")
    return FileResponse(found[name], headers={"cache-control": "no-cache"})


def plotly(request: Request) -> Response:
    """The charts' library, from the installed package, whose Python is never loaded."""
    headers = {"cache-control": "private, max-age=86400", "vary": "accept-encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return FileResponse(_plotly_file(), headers=headers, media_type="text/javascript")
    return Response(_plotly_packed(), headers={**headers, "content-encoding": "gzip"}, media_type="text/javascript")


def _plotly_file() -> Path:
    spec = find_spec("plotly")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


@cache
def _plotly_packed() -> bytes:
    """A third of its size, for those behind `ssh -L`."""
    return gzip.compress(_plotly_file().read_bytes(), 4)

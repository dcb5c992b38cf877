"""The board's web server: the page, its chart library, and the runs as JSON.

It answers only those who have the token, on a loopback address too: every user of a machine can connect to it.
"""

import gzip
import math
import secrets
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import orjson
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from z2all_ds.track.board.run import WatchedRun
from z2all_ds.track.board.settings import differences
from z2all_ds.track.board.watch import Watch
from z2all_ds.track.fields import AXES

PAGE = Path(__file__).parent / "page"
DEFAULT_POINTS, MOST_POINTS = 800, 20_000
DEEPEST = 100
# Plotly sets styles on its elements and exports charts as data and blob URLs; it needs no eval.
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


def json_response(content: Any, status: int = 200) -> Response:
    """Return JSON; NaN and infinities become null."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        body = orjson.dumps(content, option=option)
    except orjson.JSONEncodeError:
        body = orjson.dumps(_encodable(content), option=option)
    return Response(body, status, media_type="application/json")


def _encodable(content: Any, depth: int = 0) -> Any:
    """Return the content with text in place of what has no JSON here: lone surrogates, large integers, deep nesting."""
    if depth == DEEPEST:
        return "..."
    if isinstance(content, dict):
        return {_encodable(str(key)): _encodable(value, depth + 1) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_encodable(value, depth + 1) for value in content]
    if isinstance(content, str):
        return content.encode(errors="backslashreplace").decode()
    if isinstance(content, int) and content.bit_length() > 63:
        return f"integer of {content.bit_length()} bits"
    return content


class Guard:
    """Refuses requests that are not allowed, and adds headers to all responses."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
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
        if self._is_right(request.query_params.get("token")):
            rest = request.url.remove_query_params("token").query
            path = "/" + request.url.path.lstrip("/")  # a path that begins with // would name another server
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""))
            value = quote(self._token, safe="")  # a cookie may contain only a few characters unquoted
            # Not "strict": a browser does not send such a cookie after a link on another page, such as a web terminal.
            answer.set_cookie(self._cookie, value, httponly=True, samesite="lax")
            return answer
        if self._is_right(unquote(request.cookies.get(self._cookie, ""))):
            return None
        error = "token missing or wrong: open the address that `z2all board` has printed"
        return PlainTextResponse(error, 403) if request.url.path == "/" else json_response({"error": error}, 403)

    def _is_right(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self._token.encode())


def make_app(watch: Watch, token: str, port: int) -> Starlette:
    """Return the web application. The port is part of the cookie's name, so that two boards do not share it."""

    def index(request: Request) -> Response:
        watch.pace.yield_to_page()
        return _page_file("index.html")

    def runs(request: Request) -> Any:
        names = watch.names()
        return {"runs": [run.summary(names[run.id]) for run in watch.shown_runs()]}

    def differing(request: Request) -> Any:
        chosen = [_run(watch, number) for number in request.query_params.get("runs", "").split(",")]
        return {"keys": differences([run.settings.flat for run in chosen])}

    def of_run(content: Callable[[WatchedRun, Request], Any]) -> Callable[[Request], Any]:
        return lambda request: content(_run(watch, request.query_params.get("run", "")), request)

    apis: dict[str, Callable[[Request], Any]] = {
        "runs": runs,
        "differences": differing,
        "curves": of_run(_curves),
        "events": of_run(lambda run, _: {"events": run.shown_events()}),
        "health": of_run(lambda run, _: run.shown_health()),
        "mixture": of_run(lambda run, _: run.mixture()),
        "probes": of_run(lambda run, _: {"probes": run.probes()}),
    }

    def api(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in apis:
            raise HTTPException(404)
        return json_response(apis[name](request))

    return Starlette(
        routes=[
            Route("/", index),
            Route("/page/{name}", lambda request: _page_file(request.path_params["name"])),
            Route("/plotly.js", plotly),
            Route("/api/{name}", api),
        ],
        middleware=[
            Middleware(Guard, token=token, cookie=f"z2all_board_{port}"),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
        ],
        exception_handlers={HTTPException: _error_response},
    )


def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"error": error.detail}, error.status_code)


def _run(watch: Watch, number: str) -> WatchedRun:
    found = {run.id: run for run in watch.runs()}
    if number not in found:
        raise HTTPException(404, f"run={number}: no such run on the board")
    return found[number]


def _curves(run: WatchedRun, request: Request) -> Any:
    query = request.query_params
    names = query.getlist("name") + [name for name in query.get("names", "").split(",") if name]
    axis = query.get("x", "step")
    if axis not in AXES:
        raise HTTPException(400, f"x={axis}: must be one of {', '.join(AXES)}")
    most = max(1, min(MOST_POINTS, int(_number(request, "points") or DEFAULT_POINTS)))
    try:
        return run.points(names, axis, _number(request, "from"), _number(request, "to"), most)
    except OSError as error:  # a zoom reads the file again
        raise HTTPException(503, f"{error}") from None


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise HTTPException(400, f"{name}={text}: must be a finite number")
    return number


def _page_file(name: str) -> Response:
    """Return a file by its name in the folder's list, so that no path leads outside."""
    found = {file.name: file for file in PAGE.iterdir() if file.is_file()}
    if name not in found:
        raise HTTPException(404, f"{name}: no such file of the page")
    return FileResponse(found[name], headers={"cache-control": "no-cache"})


def plotly(request: Request) -> Response:
    """Return the chart library, from the installed package, which is not imported."""
    headers = {"cache-control": "private, max-age=86400", "vary": "accept-encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return FileResponse(_plotly_file(), headers=headers, media_type="text/javascript")
    headers["content-encoding"] = "gzip"
    return Response(_compressed_plotly(), headers=headers, media_type="text/javascript")


def _plotly_file() -> Path:
    spec = find_spec("plotly")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


@cache
def _compressed_plotly() -> bytes:
    """Return it in a third of its size, for `ssh -L`."""
    return gzip.compress(_plotly_file().read_bytes(), 4)

"""A fake W&B server that stores the history of runs, answers queries about it, and fails on request."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: tests kill clients in the middle of a request."""


class WandbServer:
    """A running server; `rows` contains the received history rows of every run id."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.names: dict[str, str] = {}
        self.refuses_rows = False
        """Whether history rows are refused, as after an exceeded quota."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                self._answer(*server.answer(self.path, body))

            def do_GET(self) -> None:
                self._answer(200, {})

            do_PUT = do_POST

            def _answer(self, code: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = _QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if path.endswith("/file_stream"):
            return self._take_rows(path.split("/")[-2], json.loads(body))
        if path != "/graphql":
            return 200, {}
        asked = json.loads(body)
        return 200, {"data": self._graphql(asked.get("operationName"), asked.get("variables") or {})}

    def _take_rows(self, run: str, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refuses_rows:
            return 402, {"error": "quota exceeded"}
        found = content.get("files", {}).get(HISTORY)
        if found:
            rows = self.rows.setdefault(run, [])
            del rows[found["offset"] :]
            rows += [json.loads(line) for line in found["content"]]
        return 200, {}

    def _graphql(self, operation: str | None, given: dict[str, Any]) -> dict[str, Any]:
        model = {"id": "m", "name": given.get("project"), "entity": {"id": "e", "name": "team"}}
        if operation == "Viewer":
            return {"viewer": {"id": "u", "entity": "team", "username": "u", "email": "", "flags": "{}", "teams": None}}
        if operation == "RunResumeStatus":
            rows = self.rows.get(given["name"])
            if rows is None:
                return {"model": {**model, "bucket": None}}
            tail = json.dumps([json.dumps(row) for row in rows[-1:]])
            bucket = {
                "id": "b",
                "name": given["name"],
                "summaryMetrics": "{}",
                "displayName": self.names.get(given["name"]),
                "logLineCount": 0,
                "historyLineCount": len(rows),
                "eventsLineCount": 0,
                "historyTail": tail,
                "eventsTail": "[]",
                "config": "{}",
                "tags": [],
                "notes": None,
                "wandbConfig": '{"t": 1}',
            }
            return {"model": {**model, "bucket": bucket}}
        if operation == "UpsertBucket":
            self.names.setdefault(given["name"], given["displayName"])
            bucket = {
                "id": "b",
                "name": given["name"],
                "displayName": given["displayName"],
                "description": None,
                "config": "{}",
                "sweepName": None,
                "project": model,
                "historyLineCount": len(self.rows.get(given["name"], [])),
            }
            return {"upsertBucket": {"bucket": bucket, "inserted": given["name"] not in self.rows}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    try:
        yield server
    finally:
        server.close()

"""A chat endpoint on this machine, scripted: what it answers, and how it misbehaves, is the test's to say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Answer = dict[str, Any] | tuple[int, dict[str, str], bytes] | Callable[["Handler"], None]
"""A JSON body of status 200; or (status, headers, body); or a function that does with the connection what it likes."""


class Handler(BaseHTTPRequestHandler):
    """Hands each request to the script of its server."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        endpoint = self.server.endpoint
        with endpoint.lock:
            number = len(endpoint.requests)
            endpoint.requests.append(body)
            endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
            endpoint.open += 1
            endpoint.most_open = max(endpoint.most_open, endpoint.open)
        answer = endpoint.script(body, number)
        with endpoint.lock:
            endpoint.open -= 1
        if callable(answer):
            answer(self)
        elif isinstance(answer, dict):
            self.send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())
        else:
            self.send(*answer)

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    endpoint: Endpoint

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is what some tests want."""


class Endpoint:
    """A running server; `requests` and `headers` are what it was sent, `most_open` how many requests it worked on at a time."""

    def __init__(self, script: Callable[[dict[str, Any], int], Answer]) -> None:
        self.script, self.lock = script, threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = 0
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.endpoint = self
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self) -> Endpoint:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()


def said(content: str | None = None, *calls: tuple[str, Any], finish: str = "stop", usage: tuple[int, int] | None = (100, 10)) -> dict[str, Any]:
    """A chat completion: text, and calls as (name, arguments); arguments that are no text are written as JSON."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": args if isinstance(args, str) else json.dumps(args)}}
            for i, (name, args) in enumerate(calls)
        ]
    body: dict[str, Any] = {"id": "x", "object": "chat.completion", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return body


def failure(status: int, message: str = "no", code: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """An error as endpoints word it."""
    body = {"error": {"message": message, "type": "error", "code": code}}
    return status, {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}, json.dumps(body).encode()

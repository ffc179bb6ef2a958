"""A real S3 protocol server on loopback (moto) that can be told to misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

REASONS = {403: ("AccessDenied", "Access Denied"), 500: ("InternalError", "We encountered an internal error")}


@dataclass
class Fault:
    """Answers ``status`` to the next ``times`` requests whose method and address fit."""

    method: str
    part: str
    status: int = 500
    times: int = 1_000_000


@dataclass
class S3Server:
    """Moto behind a door that counts requests and lets some of them fail.

    Attributes:
        requests: (method, path and query, first and last byte asked for) in order.
        ignore_conditions: forget If-None-Match, as older stores do.
    """

    requests: list[tuple[str, str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    ignore_conditions: bool = False
    url: str = ""

    def __post_init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        address = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with self._lock:
            self.requests.append((environ["REQUEST_METHOD"], address, environ.get("HTTP_RANGE", "")))
            fault = next((f for f in self.faults if self._fits(f, environ["REQUEST_METHOD"], address)), None)
            if fault is not None:
                fault.times -= 1
        if self.ignore_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if fault is None:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code, message = REASONS[fault.status]
        start_response(f"{fault.status} {code}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]

    def _fits(self, fault: Fault, method: str, address: str) -> bool:
        return fault.times > 0 and fault.method == method and fault.part in address

    def fail(self, method: str, part: str, status: int = 500, times: int = 1_000_000) -> None:
        self.faults.append(Fault(method, part, status, times))

    def heal(self) -> None:
        self.faults.clear()
        self.ignore_conditions = False

    def asked(self, method: str, part: str = "") -> list[str]:
        return [address for verb, address, _ in self.requests if verb == method and part in address]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def serving() -> Iterator[S3Server]:
    """The server on a free port of 127.0.0.1."""
    server = S3Server()
    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_Quiet)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()

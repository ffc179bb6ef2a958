"""The part of the Kubernetes API that starts and watches Jobs, over HTTP, with the simulator behind it."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.kubernetes_simulator import Document, Job, Pod

SYNC_S = 0.05


class Entry:
    """A Job that was posted: the document, and the simulator that works on it."""

    def __init__(self, document: Document, job: Job) -> None:
        self.document, self.job, self.uid = document, job, str(uuid.uuid4())
        self.began = time.monotonic()
        self.deleted = False


class Api:
    """Jobs and ConfigMaps by name.

    Args:
        root: of the simulator's volumes.
        extra: environment of the pods.

    Attributes:
        entries: the Jobs that are there.
        posted: every document that was created, in order.
        deleted: names of Jobs, in the order they were deleted.
        fail: how many questions about a Job's status are answered with 500.
    """

    def __init__(self, root: Path, **extra: str) -> None:
        self.root, self.extra = root, extra
        self.entries: dict[str, Entry] = {}
        self.config_maps: dict[str, Document] = {}
        self.posted: list[Document] = []
        self.deleted: list[str] = []
        self.fail = 0
        self.lock = threading.RLock()

    def sync(self) -> None:
        """One look at every Job, as the controller takes it."""
        with self.lock:
            for name, entry in list(self.entries.items()):
                spec = entry.job.spec
                if not entry.job.condition and time.monotonic() - entry.began > spec["activeDeadlineSeconds"]:
                    entry.job._finish("Failed", "DeadlineExceeded")
                entry.job.sync()
                if entry.deleted and not entry.job.running():
                    del self.entries[name]

    def post(self, kind: str, document: Document) -> tuple[int, Document]:
        known: dict[str, Any] = self.config_maps if kind == "configmaps" else self.entries
        name = document["metadata"]["name"]
        with self.lock:
            if name in known:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            self.posted.append(document)
            if kind == "configmaps":
                self.config_maps[name] = document
            else:
                job = Job([*self.config_maps.values(), document], name, self.root, **self.extra)
                self.entries[name] = Entry(document, job)
        return 201, document

    def job(self, name: str) -> tuple[int, Document]:
        with self.lock:
            if self.fail:
                self.fail -= 1
                return 500, {"kind": "Status", "message": "the API server is away"}
            if name not in self.entries:
                return 404, {"kind": "Status", "reason": "NotFound"}
            entry = self.entries[name]
            job = entry.job
            ended = [pod for pod in job.pods if pod.exit_code is not None]
            status: Document = {
                "active": len(job.running()),
                "succeeded": sum(pod.exit_code == 0 for pod in ended),
                "failed": sum(pod.exit_code != 0 for pod in ended),
            }
            if job.condition and not job.running():
                status["conditions"] = [{"type": job.condition, "status": "True", "reason": job.reason}]
            metadata = {**entry.document["metadata"], "uid": entry.uid}
            if entry.deleted:
                metadata["deletionTimestamp"] = now()
            return 200, {**entry.document, "metadata": metadata, "status": status}

    def delete(self, name: str) -> tuple[int, Document]:
        with self.lock:
            if name not in self.entries:
                return 404, {"kind": "Status", "reason": "NotFound"}
            entry = self.entries[name]
            entry.deleted = True
            self.deleted.append(name)
            entry.job._finish("Failed", "Deleted")
            return 200, {"kind": "Status", "status": "Success"}

    def pods(self, selector: str) -> tuple[int, Document]:
        key, _, value = selector.partition("=")
        assert key == "batch.kubernetes.io/controller-uid"
        with self.lock:
            found = [pod for entry in self.entries.values() if entry.uid == value for pod in entry.job.pods]
            return 200, {"kind": "PodList", "items": [described(pod, number) for number, pod in enumerate(found)]}

    def log(self, name: str) -> tuple[int, str]:
        with self.lock:
            [pod] = [pod for entry in self.entries.values() for pod in entry.job.pods if pod.name == name]
            return 200, pod.log.read_text(encoding="utf-8")


def now(seconds: int = 0) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def described(pod: Pod, number: int) -> Document:
    state: Document = {"running": {}}
    if pod.exit_code is not None:
        state = {"terminated": {"exitCode": pod.exit_code, "message": pod.message}}
    status = {"name": "embed", "image": "-", "imageID": "-", "ready": False, "restartCount": 0, "state": state}
    metadata = {"name": pod.name, "creationTimestamp": now(number)}
    return {"metadata": metadata, "status": {"containerStatuses": [status]}}


def handler(api: Api) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: Document | str) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def body(self) -> Document:
            document: Document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            return document

        def do_POST(self) -> None:
            self.answer(*api.post(urlsplit(self.path).path.rpartition("/")[2], self.body()))

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if match := re.fullmatch(r"/apis/batch/v1/namespaces/here/jobs/([\w-]+)(/status)?", parts.path):
                self.answer(*api.job(match[1]))
            elif match := re.fullmatch(r"/api/v1/namespaces/here/pods/([\w-]+)/log", parts.path):
                self.answer(*api.log(match[1]))
            else:
                assert parts.path == "/api/v1/namespaces/here/pods"
                self.answer(*api.pods(parse_qs(parts.query)["labelSelector"][0]))

        def do_DELETE(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            self.answer(*api.delete(urlsplit(self.path).path.rpartition("/")[2]))

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving(api: Api, kubeconfig: Path) -> Iterator[None]:
    """The API on a free port, and a kubeconfig that leads to it; in the end no pod is left."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(api))
    over = threading.Event()

    def control() -> None:
        while not over.wait(SYNC_S):
            api.sync()

    threads = [threading.Thread(target=server.serve_forever), threading.Thread(target=control)]
    address = f"http://127.0.0.1:{server.server_address[1]}"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": address}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    kubeconfig.write_text(yaml.safe_dump(document), encoding="utf-8")
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        server.shutdown()
        for thread in threads:
            thread.join()
        server.server_close()
        for entry in api.entries.values():
            entry.job.stop()

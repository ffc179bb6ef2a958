"""The output on an object store: the methods of a folder, with what S3 and its like give instead of a rename.

A file is built and checked in a scratch folder on this machine and uploaded whole: a PUT, or the end of a multipart
upload, makes an object appear at once or not at all. A commit record is *created*, never overwritten (If-None-Match),
so of two writers exactly one has it. Nothing is cached: every answer is the store's own.

There is no lock and no correctness that needs one: two runs at one output do the same work twice.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pipeline import scratch
from pipeline.errors import ConfigError, OutputError
from pipeline.remote import RemoteFile, error_code, open_filesystem, protocols, tried
from pipeline.storage import json_bytes

T = TypeVar("T")

UPLOAD_PART_BYTES = 16 * 1024 * 1024
MAX_PARTS = 10_000  # S3's limit
UPLOADS_AT_ONCE = 4  # parts in memory; s3fs' own defaults would hold ten of 50 MiB


class ObjectStore:
    """The prefix given as ``--output``; every name is relative to it. See ``storage.Storage`` for the methods.

    All of them raise:
        ConfigError: the store refuses: credentials, permission, no such bucket.
        OutputError: it failed three times.
    """

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._filesystem, path = open_filesystem(self.root)
        self._path = path.rstrip("/")
        self._folder: Path | None = None

    def location(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def prepare(self) -> list[str]:
        """Prove that objects can be created and removed, and see whether the store creates only once."""
        if "memory" in protocols(self._filesystem):
            raise ConfigError(f"--output {self.root}: memory:// is a process's own, workers would not share it")
        probe = f".probe-{uuid.uuid4().hex}"
        try:
            self.create_json(probe, {})
            again = self.create_json(probe, {})
            self.remove(probe)
        except (ConfigError, OutputError) as error:
            raise type(error)(f"--output {str(error).replace(f'/{probe}', '')}") from None
        except ValueError as error:  # botocore's, for an endpoint that is no URL
            raise ConfigError(f"--output {self.root}: {error}") from None
        if not again:
            return []
        return [
            f"--output {self.root}: this store overwrites what it is asked to create once (it ignores If-None-Match); "
            "let one run at a time write here"
        ]

    def temporary(self, name: str) -> Path:
        """Where to build ``name`` on this machine."""
        return self._scratch("up", name)

    def _scratch(self, way: str, name: str) -> Path:
        self._folder = self._folder or scratch.new_folder(self)
        path = self._folder / way / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, temporary: Path, name: str) -> None:
        """Upload a finished file as ``name``, replacing what was there, and see that all of it arrived."""
        size = temporary.stat().st_size

        def upload() -> None:
            self._filesystem.put_file(str(temporary), self._at(name), **self._upload_options(size))
            found = self._size(name)
            if found != size:
                raise ConnectionError(f"{found} of {size} bytes arrived")

        self._put("uploaded", name, upload)
        temporary.unlink()

    def _upload_options(self, size: int) -> dict[str, Any]:
        if "s3" not in protocols(self._filesystem):
            return {}
        return {"chunksize": max(UPLOAD_PART_BYTES, size // MAX_PARTS + 1), "max_concurrency": UPLOADS_AT_ONCE}

    def write_json(self, name: str, document: Any) -> None:
        data = json_bytes(document)
        self._put("written", name, lambda: self._filesystem.pipe_file(self._at(name), data))

    def create_json(self, name: str, document: Any) -> bool:
        """False where the object is there already; it is left as it is."""
        data = json_bytes(document)
        try:
            self._put("created", name, lambda: self._create(name, data))
        except FileExistsError:
            return False
        return True

    def _create(self, name: str, data: bytes) -> None:
        try:
            self._filesystem.pipe_file(self._at(name), data, mode="create")
        except OSError as error:
            if error_code(error) in ("PreconditionFailed", "412"):  # not every store says which condition failed
                raise FileExistsError(name) from None
            if error.errno != errno.ENOSYS:
                raise
            self._filesystem.pipe_file(self._at(name), data)  # a store without conditional writes

    def read_json(self, name: str) -> Any | None:
        try:
            return json.loads(self._do("read", name, lambda: self._filesystem.cat_file(self._at(name))))
        except (FileNotFoundError, ValueError):
            return None

    def size(self, name: str) -> int | None:
        return self._do("read", name, lambda: self._size(name))

    def _size(self, name: str) -> int | None:
        self._filesystem.invalidate_cache()
        try:
            info = self._filesystem.info(self._at(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def files(self, folder: str, suffix: str, *, hidden: bool = False) -> Iterator[str]:
        def find() -> list[str]:
            self._filesystem.invalidate_cache()
            found: list[str] = self._filesystem.find(self._at(folder))
            return found

        with contextlib.suppress(FileNotFoundError):
            for path in self._do("listed", folder, find):
                name = path[len(self._path) :].lstrip("/")
                if name.endswith(suffix) and (hidden or not any(part.startswith(".") for part in name.split("/"))):
                    yield name

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._do("removed", name, lambda: self._filesystem.rm_file(self._at(name)))

    def remove_tree(self, folder: str) -> None:
        for name in list(self.files(folder, "", hidden=True)):
            self.remove(name)

    def source(self, name: str) -> RemoteFile:
        return RemoteFile(self._filesystem, self._at(name), functools.partial(self._do, "read", name))

    def fetch(self, name: str) -> Path:
        """A copy on this machine; downloaded the first time it is asked for."""
        target = self._scratch("down", name)
        if not target.exists():
            partial = target.with_name(f"{target.name}.part")

            def download() -> None:
                self._filesystem.get_file(self._at(name), str(partial))
                found, size = partial.stat().st_size, self._size(name)
                if found != size:
                    raise ConnectionError(f"{found} of {size} bytes arrived")

            self._do("downloaded", name, download)
            partial.rename(target)
        return target

    def release(self, name: str) -> None:
        if self._folder is not None:
            (self._folder / "down" / name).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove what a crash left in scratch folders on this machine; returns how many of them."""
        return scratch.sweep()

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False, name: str = ".lock") -> Iterator[bool]:
        """Nothing is locked: a store has no lock that ends with its holder. Two runs at once do the work twice."""
        yield True

    def _put(self, done: str, name: str, call: Callable[[], T]) -> T:
        try:
            return self._do(done, name, call)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.location(name)}: cannot be {done} ({error}); expected a bucket that exists"
            ) from None

    def _do(self, done: str, name: str, call: Callable[[], T]) -> T:
        try:
            return tried(f"{self.location(name)}: cannot be {done}", call)
        except PermissionError as error:
            raise ConfigError(
                f"{error}; expected credentials that may list, read, write and delete below {self.root}"
            ) from None
        except ConnectionError as error:
            raise OutputError(f"{error}; run again when the store answers") from None

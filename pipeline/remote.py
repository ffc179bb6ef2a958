"""fsspec at the border: a URL -> its filesystem, calls that are tried again, files that pyarrow reads.

Clients of object stores raise what they like: botocore's errors, aiohttp's, Azure's. Here, and only here, they become
one of four OSErrors with one line of text: ``FileNotFoundError``, ``FileExistsError``, ``PermissionError`` (the store
refuses: credentials, permission, a name it does not take) and ``ConnectionError`` (it failed each time).
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

from pipeline.errors import ConfigError, one_line

T = TypeVar("T")

ATTEMPTS = 3
BACKOFF_S = 0.5  # then four times that; the clients have waited and tried again on their own before
MAX_REASON = 300  # characters; some stores answer with a page of HTML
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
CLIENTS = {
    "adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpcore2",
    "httpx", "httpx2", "huggingface_hub", "requests", "s3fs", "urllib3",
}  # fmt: skip
_REFUSALS = re.compile("Credential|Authenti|Token|Profile|Validation|Region")  # in the type's name
_REFUSED_CODES = {"AuthorizationHeaderMalformed", "InvalidBucketName", "InvalidToken", "PermanentRedirect"}


def is_remote(name: str) -> bool:
    return "://" in name and not name.startswith(("file://", "local://"))


def open_filesystem(url: str) -> tuple[Any, str]:
    """The filesystem of a URL or local path, and the path on it.

    Raises:
        ConfigError: no such protocol, or its package is not installed.
    """
    try:
        filesystem, path = fsspec.url_to_fs(url)
        return filesystem, path
    except ImportError as error:
        protocol = url.partition("://")[0]
        remedy = f"pip install 'embed-corpus[{EXTRAS[protocol]}]'" if protocol in EXTRAS else one_line(error)
        raise ConfigError(f"{url}: {protocol}:// needs a package that is not installed; {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {one_line(error)}; expected a path, or a URL such as s3://bucket/folder") from None


def tried(what: str, call: Callable[[], T]) -> T:
    """What ``call`` returns; a failure that may pass is tried again, three times in all.

    Args:
        what: begins the message, as in ``s3://bucket/x: cannot be read``; "3 times (reason)" follows.
        call: must do the same however often it is made.

    Raises:
        FileNotFoundError, FileExistsError: as the store said.
        PermissionError: it refuses.
        ConnectionError: it failed each time.
    """
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF_S * 4 ** (attempt - 1))
        try:
            return call()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            if not _is_foreign(error):
                raise
            reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
            if _is_refusal(error):
                raise PermissionError(f"{what} ({reason})") from None
    raise ConnectionError(f"{what} {ATTEMPTS} times ({reason})")


def _is_foreign(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in CLIENTS


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, PermissionError) or error_code(error) in _REFUSED_CODES:
        return True
    return not isinstance(error, OSError) and bool(_REFUSALS.search(type(error).__name__))


def protocols(filesystem: Any) -> tuple[str, ...]:
    """All names of a filesystem's protocol: ``("s3", "s3a")``."""
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


def error_code(error: BaseException) -> str:
    """S3's own word for an error, such as ``PreconditionFailed``; empty where there is none."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


class RemoteFile:
    """A remote file as pyarrow reads it; an error of ``attempt`` reaches whoever called pyarrow.

    Nothing is read ahead: the columns of a row group lie apart, so what was read ahead for one would be thrown away by
    the next. Whoever reads chooses how much to ask for at once.

    Args:
        filesystem: where it is.
        path: its path there.
        attempt: makes a call, again if need be; ``tried`` where nothing is given.
    """

    mode = "rb"

    def __init__(self, filesystem: Any, path: str, attempt: Callable[[Callable[[], Any]], Any] | None = None) -> None:
        self._attempt = attempt or functools.partial(tried, f"{filesystem.unstrip_protocol(path)}: cannot be read")
        self._file = self._attempt(lambda: filesystem.open(path, "rb", cache_type="none"))

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def read(self, size: int = -1) -> bytes:
        start = self._file.tell()

        def read() -> bytes:
            self._file.seek(start)
            data: bytes = self._file.read(size)
            return data

        return bytes(self._attempt(read))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        """There is nothing to flush; pyarrow asks all the same."""

    def close(self) -> None:
        self._file.close()

"""Why a run failed, where Kubernetes looks for it: the termination message of the container.

``kubectl describe pod`` shows it beside the exit code, so that nobody has to find the log of a pod that is gone.
Outside a container nothing is written, and nothing that goes wrong here may hide the failure it is to tell of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

VARIABLE = "EMBED_CORPUS_TERMINATION_LOG"
DEFAULT_PATH = "/dev/termination-log"
MAX_BYTES = 4096  # what Kubernetes keeps of it
ELLIPSIS = "…"


def write_reason(message: str, environ: Mapping[str, str] = os.environ) -> None:
    """Leave ``message`` as the reason of the end, in place of an earlier one; never raises and never waits.

    Args:
        message: its beginning is kept where it is too long: that names the shard, the rest may be a traceback.
        environ: ``EMBED_CORPUS_TERMINATION_LOG`` is a path of your own (``terminationMessagePath``), made if need be.
    """
    own = environ.get(VARIABLE)
    # Kubernetes puts the default file there; elsewhere /dev is nobody's place to make one. A pipe without a reader
    # must not hold us up.
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | (os.O_CREAT if own else 0)
    with contextlib.suppress(OSError, ValueError):  # ValueError: a null byte in the path
        descriptor = os.open(own or DEFAULT_PATH, flags, 0o644)
        try:
            os.write(descriptor, cut(message))
        finally:
            os.close(descriptor)


def cut(message: str, max_bytes: int = MAX_BYTES) -> bytes:
    """UTF-8 of at most ``max_bytes``, never in the middle of a character; an ellipsis tells that there was more."""
    data = message.encode("utf-8", errors="replace")  # a file name may hold half of a surrogate pair
    if len(data) <= max_bytes:
        return data
    kept = data[: max_bytes - len(ELLIPSIS.encode())].decode("utf-8", errors="ignore")
    return (kept + ELLIPSIS).encode()

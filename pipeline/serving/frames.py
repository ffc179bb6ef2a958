"""Messages between the server and its search process: a JSON header and bytes, each with its length before it.

Vectors and hits travel as the bytes they are; nothing is unpickled (`device_ring` opens its memory so, and says whose).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, BinaryIO

import orjson

_LENGTHS = struct.Struct("<II")


def pack(header: dict[str, Any], data: bytes = b"") -> bytes:
    head = orjson.dumps(header)
    return b"".join((_LENGTHS.pack(len(head), len(data)), head, data))


def read(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None when the other side is gone."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head, data = _LENGTHS.unpack(lengths)
    content = stream.read(head + data)
    return None if len(content) < head + data else (orjson.loads(content[:head]), content[head:])


async def read_from(stream: asyncio.StreamReader) -> tuple[dict[str, Any], bytes] | None:
    """As ``read``, without waiting in the event loop."""
    try:
        head, data = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
        content = await stream.readexactly(head + data)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return orjson.loads(content[:head]), content[head:]

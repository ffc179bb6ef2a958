"""How much memory this process may really use, in words too, and giving back what it freed.

The machine's size says little in a container, whose control group may grant less. This asks both and sets nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def granted_memory(root: str = "/") -> int:
    """Bytes: the smallest of the machine's memory and the limits of control groups v2 and v1.

    Args:
        root: where ``proc`` and ``sys`` are; other than ``/`` only in tests.
    """
    base = Path(root)
    limits = [_number(line) for path in _limit_files(base) for line in _lines(path)[:1]]
    total = next((1024 * _number(line) for line in _lines(base / "proc/meminfo") if line.startswith("MemTotal:")), 0)
    # A version 1 group without a limit says nearly 2**63, and no machine is of 0 bytes.
    return min((limit for limit in (total, *limits) if 0 < limit < 1 << 60), default=8 << 30)


def _limit_files(root: Path) -> list[Path]:
    """Of this process's group and all above it, up to the mount point: each of them binds."""
    mount = root / "sys/fs/cgroup"
    group = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), "/")
    folder = mount / group.strip("/")
    levels = [level for level in (folder, *folder.parents) if level == mount or mount in level.parents]
    return [*(level / "memory.max" for level in levels), mount / "memory/memory.limit_in_bytes"]


def _number(line: str) -> int:
    digits = "".join(filter(str.isdigit, line))
    return int(digits) if digits else 0  # "max": no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []


def give_back() -> None:
    """Return freed memory to the system: glibc keeps that of thousands of small blocks, such as inverted lists."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def short_bytes(size: float | None) -> str:
    """For a person: three digits or so and a unit."""
    if size is None:
        return "unknown"
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= pair[0]), (1, "B"))
    return f"{size / unit:,.1f} {name}"

"""How many cores this process may really use.

FAISS, OpenBLAS and the tokenizers count the machine's cores; in a container with a CPU quota that starts many more
threads than can run. This asks the scheduler's affinity and the control group, and sets nothing itself.
"""

from __future__ import annotations

import os
from pathlib import Path

MAX_TOKENIZER_WORKERS = 16  # more than the fastest device has been seen to need


def available_cores(root: str = "/") -> int:
    """The smallest of the affinity mask, the cgroup v2 ``cpu.max`` and the cgroup v1 quota; at least 1.

    Args:
        root: where ``proc`` and ``sys`` are; other than ``/`` only in tests.
    """
    quotas = [*_quotas_v2(Path(root)), *_quotas_v1(Path(root))]
    return max(1, min([_affinity(), *(int(quota) for quota in quotas)]))


def auto_tokenizer_workers(device: str, cores: int, num_workers: int) -> int:
    """How many tokenizer processes a worker has where nobody said it; 0 for tokenizing in the worker itself.

    A CPU computes for 97 % of the time and more: processes would only take its cores from the model. Beside a GPU one
    core is left to the thread that launches kernels and one to reading and writing.

    Args:
        device: of the worker.
        cores: of the machine, see `available_cores`.
        num_workers: that share them.
    """
    return 0 if device == "cpu" else max(1, min(MAX_TOKENIZER_WORKERS, cores // num_workers - 2))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas_v2(root: Path) -> list[float]:
    # A quota on any ancestor binds too, so every level up to the mount point counts.
    mount = root / "sys/fs/cgroup"
    group = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), "/")
    folder = mount / group.strip("/")
    levels = [level for level in (folder, *folder.parents) if level == mount or mount in level.parents]
    fields = [line.split() for level in levels for line in _lines(level / "cpu.max")[:1]]
    return [ratio for pair in fields if len(pair) == 2 and (ratio := _ratio(*pair)) is not None]


def _quotas_v1(root: Path) -> list[float]:
    ratios = []
    for folder in (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"):
        quota, period = _lines(folder / "cpu.cfs_quota_us")[:1], _lines(folder / "cpu.cfs_period_us")[:1]
        if quota and period and (ratio := _ratio(quota[0], period[0])) is not None:
            ratios.append(ratio)
    return ratios


def _ratio(quota: str, period: str) -> float | None:
    """Cores in a quota; None for no limit, written ``max`` in v2 and -1 in v1."""
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split("\n")
    except (OSError, ValueError):
        return []

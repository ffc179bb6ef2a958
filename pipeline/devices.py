"""Which devices a run uses, found out without importing torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipeline.errors import ConfigError

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def num_gpus(root: Path = Path("/dev")) -> int:
    """NVIDIA devices this process may use: those the driver shows, cut by CUDA_VISIBLE_DEVICES."""
    present = len(list(root.glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def resolve_devices(option: str, gpus: int) -> list[str]:
    """One entry a worker: ``cpu`` or ``cuda:N``.

    Args:
        option: ``auto`` (all GPUs, else the CPU), ``cuda`` (the first GPU), or a comma-separated list.
        gpus: how many GPUs there are.

    Raises:
        ConfigError: an unknown name, or a GPU that is not there.
    """
    if option == "auto":
        return [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    devices = [name.strip().lower() for name in option.split(",") if name.strip()]
    devices = ["cuda:0" if name == "cuda" else name for name in devices]
    for name in devices:
        if not _DEVICE.fullmatch(name):
            raise ConfigError(f"--devices {option}: '{name}' is not a device; expected auto, cpu, cuda or cuda:N")
        if name.startswith("cuda") and int(name.partition(":")[2]) >= gpus:
            raise ConfigError(f"--devices {option}: {name} asked for, {gpus} CUDA devices found; use cpu or auto")
    if not devices:
        raise ConfigError("--devices is empty; expected auto, cpu, cuda or cuda:N")
    return devices


def resolve_dtype(option: str, device: str, checkpoint: str | None) -> str:
    """The compute type behind ``auto``: float32 on a CPU; on a GPU bfloat16 for a bfloat16 checkpoint, else float16."""
    if option != "auto":
        return option
    if device == "cpu":
        return "float32"
    return "bfloat16" if checkpoint == "bfloat16" else "float16"

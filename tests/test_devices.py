"""Which devices a run uses, found without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.devices import num_gpus, resolve_devices, resolve_dtype
from pipeline.errors import ConfigError


def test_gpus_are_counted_from_the_driver_and_cut_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert num_gpus(tmp_path) == 2
    for value, expected in (("0", 1), ("0,1,2", 2), ("", 0), ("-1", 0), ("GPU-8f6c", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert num_gpus(tmp_path) == expected


@pytest.mark.parametrize(
    ("option", "gpus", "expected"),
    [
        ("auto", 0, ["cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cpu", 2, ["cpu"]),
        ("cpu, cpu", 0, ["cpu", "cpu"]),
        ("cuda", 2, ["cuda:0"]),
        ("cuda:1,cuda:0", 2, ["cuda:1", "cuda:0"]),
    ],
)
def test_an_option_becomes_a_worker_each(option: str, gpus: int, expected: list[str]) -> None:
    assert resolve_devices(option, gpus) == expected


@pytest.mark.parametrize("option", ["cuda", "cuda:2", "gpu", "", "cpu,tpu"])
def test_what_is_not_there_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="--devices"):
        resolve_devices(option, 0)


def test_auto_dtype_follows_device_and_checkpoint() -> None:
    assert resolve_dtype("auto", "cpu", "bfloat16") == "float32"
    assert resolve_dtype("auto", "cuda:0", "bfloat16") == "bfloat16"
    assert resolve_dtype("auto", "cuda:0", None) == "float16"
    assert resolve_dtype("float32", "cuda:0", "bfloat16") == "float32"

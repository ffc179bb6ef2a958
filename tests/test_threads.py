from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.threads import available_cores


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000\n", 8), ("200000 100000\n", 2), ("150000 100000\n", 1), ("5000 100000\n", 1), ("garbage\n", 8)],
)
def test_cgroup_v2_quota_limits_the_affinity(tmp_path: Path, cpu_max: str, cores: int) -> None:
    write(tmp_path / "sys/fs/cgroup/cpu.max", cpu_max)
    assert available_cores(str(tmp_path)) == cores


@pytest.mark.usefixtures("eight_cores")
def test_quota_of_a_parent_group_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path / "sys/fs/cgroup/pod/cpu.max", "300000 100000\n")
    write(tmp_path / "sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")
    assert available_cores(str(tmp_path)) == 3


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("quota", "cores"), [("-1\n", 8), ("400000\n", 4)])
def test_cgroup_v1_quota_limits_the_affinity(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota)
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert available_cores(str(tmp_path)) == cores


@pytest.mark.usefixtures("eight_cores")
def test_no_control_group_leaves_the_affinity(tmp_path: Path) -> None:
    assert available_cores(str(tmp_path)) == 8


def test_here_it_is_at_least_one() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)

"""Workers that die: replaced a bounded number of times, then named; what they say about configuration is passed on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline import pool
from pipeline.errors import ConfigError, Stopped
from pipeline.pool import Pool
from pipeline.records import EncoderSettings, Shard
from pipeline.shards import Columns, find_shards
from pipeline.worker_settings import WorkerSettings
from tests.conftest import write_shard
from tests.stand_in import StandIn


class DiesAtTheWordDie(StandIn):
    """Ends its process, as the kernel does when memory runs out, when a batch holds a 'z'."""

    def encode(self, batch):  # type: ignore[no-untyped-def]
        if (batch.input_ids == 26).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(batch)


def dies_at_once(settings: EncoderSettings) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuses(settings: EncoderSettings) -> None:
    raise ConfigError("the model cannot do that")


def is_broken(settings: EncoderSettings) -> None:
    raise ZeroDivisionError("our mistake")


def settings(output: Path, stand_in: str) -> WorkerSettings:
    return WorkerSettings(
        EncoderSettings("none"),
        str(output),
        Columns("text", "id"),
        fingerprint="f",
        stand_in=f"tests.test_pool:{stand_in}",
    )


def shards(tmp_path: Path, **texts: str) -> list[Shard]:
    for name, text in texts.items():
        write_shard(tmp_path / "in" / f"{name}.parquet", [text])
    return find_shards([str(tmp_path / "in")])


def test_a_shard_that_kills_its_worker_is_given_up_and_the_others_finish(tmp_path: Path) -> None:
    todo = shards(tmp_path, a="abc", b="z", c="def")
    with Pool(["cpu"], settings(tmp_path / "out", "DiesAtTheWordDie"), 1) as workers:
        events = [event for event in workers.process(todo) if event.kind in ("done", "lost", "gave up")]
    ends = {event.shard.key: event for event in events if event.shard and event.kind != "lost"}
    assert {key: event.kind for key, event in ends.items()} == {"a": "done", "b": "gave up", "c": "done"}
    lost = [event.shard.key for event in events if event.shard and event.kind == "lost"]
    assert lost.count("b") == pool.MAX_ATTEMPTS - 1
    assert len(lost) <= pool.MAX_ATTEMPTS  # a shard that was in work beside it comes back once, then alone
    assert "b.parquet: worker on cpu killed (signal 9" in ends["b"].reason


def test_workers_that_die_while_loading_stop_the_run(tmp_path: Path) -> None:
    workers = Pool(["cpu"], settings(tmp_path / "out", "dies_at_once"), 1)
    with workers, pytest.raises(Stopped, match=r"signal 9.*while loading the model, 3 times"):
        list(workers.process(shards(tmp_path, a="abc")))


def test_what_a_worker_refuses_is_the_runs_error(tmp_path: Path) -> None:
    workers = Pool(["cpu"], settings(tmp_path / "out", "refuses"), 1)
    with workers, pytest.raises(ConfigError, match="the model cannot do that"):
        list(workers.process(shards(tmp_path, a="abc")))


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    workers = Pool(["cpu"], settings(tmp_path / "out", "is_broken"), 1)
    with workers, pytest.raises(RuntimeError, match="ZeroDivisionError: our mistake"):
        list(workers.process(shards(tmp_path, a="abc")))


def test_a_hung_worker_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "STALL_S", 0.5)
    monkeypatch.setenv("STAND_IN_SECONDS", "30")
    monkeypatch.setattr(pool, "MAX_ATTEMPTS", 1)
    stand_in = settings(tmp_path / "out", "StandIn")
    with Pool(["cpu"], stand_in, 1) as workers:
        kinds = [event.kind for event in workers.process(shards(tmp_path, a="abc"))]
    assert kinds[-1] == "gave up"


def test_a_gpu_worker_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    assert pool._visible("cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-bb"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pool._visible("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"}
    assert pool._visible("cpu") == {"CUDA_VISIBLE_DEVICES": ""}

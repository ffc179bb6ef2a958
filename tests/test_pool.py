"""Workers that die: replaced a bounded number of times, then named; what they say about configuration is passed on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import pool
from pipeline.errors import ConfigError, Stopped
from pipeline.pool import Events, Pool, PoolWorker
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


class Scripted(PoolWorker):
    """Does what the test's script does with it: called with "" when it starts, then with the key of each shard."""

    def __init__(self, device: str, events: Events, script: Script) -> None:
        super().__init__(device)
        self._events, self._script = events, script
        script(self, "")

    def says(self, event: str, **values: Any) -> None:
        self._events.put((self, {"event": event, **values}))

    def dies(self, *, with_node: bool = False) -> None:
        self.died_with_node = with_node
        self._events.put((self, None))

    def send(self, **request: Any) -> None:
        self._script(self, request["shard"]["key"])

    def kill(self) -> None:
        self.dies()

    def close(self) -> None: ...

    def cause_of_death(self) -> str:
        return "died"


Script = Callable[[Scripted, str], None]


class ScriptedPool(Pool):
    def __init__(self, devices: list[str], script: Script) -> None:
        super().__init__(devices, WorkerSettings(EncoderSettings("none"), max_batch_tokens=1), 1)
        self._script = script

    def _start(self, device: str) -> PoolWorker:
        return Scripted(device, self._events, self._script)


def whole(*keys: str) -> list[Shard]:
    return [Shard(key, f"/{key}.parquet", 1, 1) for key in keys]


def test_an_idle_worker_takes_over_and_does_not_wait_for_a_replacement() -> None:
    started: list[Scripted] = []

    def script(worker: Scripted, key: str) -> None:
        if not key:
            started.append(worker)
            if len(started) <= 2:  # where should a third one start, its machine being gone
                worker.says("ready", max_batch_tokens=1)
        elif worker is not started[0]:
            worker.says("done", unit=key, record={})
        elif key == "a":
            worker.says("free")

    kinds = []
    for event in ScriptedPool(["one", "two"], script).process(whole("a", "b", "c", "d")):
        kinds.append(event.kind)
        assert kinds.count("tick") < 5, kinds
        if event.kind == "done" and event.shard == whole("d")[0]:  # the first one has two in work
            started[0].dies(with_node=True)
    ends = ["done", "done", "lost", "lost", "done", "done"]
    assert [kind for kind in kinds if kind not in ("ready", "tick")] == ends


def test_the_last_units_wait_for_a_free_worker_not_behind_a_busy_one() -> None:
    """Two shards, two workers: the first one has read all of its shard before the second one has loaded the model."""
    given: list[tuple[str, str]] = []
    workers: list[Scripted] = []

    def script(worker: Scripted, key: str) -> None:
        if not key:
            workers.append(worker)
            if worker.device == "one":
                worker.says("ready", max_batch_tokens=1)
            return
        given.append((worker.device, key))
        if worker.device == "one":
            worker.says("free")
            workers[1].says("ready", max_batch_tokens=1)
        else:
            for other, unit in zip(workers, whole("a", "b"), strict=True):
                other.says("done", unit=unit.unit, record={})

    kinds = [event.kind for event in ScriptedPool(["one", "two"], script).process(whole("a", "b"))]
    assert given == [("one", "a"), ("two", "b")] and kinds.count("done") == 2


def test_a_shard_is_not_blamed_for_a_few_lost_machines_but_for_many() -> None:
    def script(worker: Scripted, key: str) -> None:
        if key:
            worker.dies(with_node=True)
        else:
            worker.says("ready", max_batch_tokens=1)

    kinds = [event.kind for event in ScriptedPool(["one"], script).process(whole("a"))]
    assert [kind for kind in kinds if kind != "ready"] == ["lost"] * (pool.MAX_NODES_LOST - 1) + ["gave up"]


def test_machines_that_are_lost_while_the_model_loads_are_tried_more_often() -> None:
    started: list[Scripted] = []

    def script(worker: Scripted, key: str) -> None:
        started.append(worker)
        worker.dies(with_node=True)

    with pytest.raises(Stopped, match=f"worker on one died while loading the model, {pool.MAX_NODES_LOST} times"):
        list(ScriptedPool(["one"], script).process(whole("a")))
    assert len(started) == pool.MAX_NODES_LOST


def test_busy_workers_are_ended_all_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    class Busy(PoolWorker):
        def send(self, **request: Any) -> None: ...

        def kill(self) -> None: ...

        def close(self) -> None:
            together.wait(timeout=60)  # none gets on before all have begun

        def cause_of_death(self) -> str:
            return ""

    with Pool(["cpu"] * 3, settings(tmp_path, "StandIn"), 3) as workers:
        workers._workers = [Busy("cpu") for _ in range(3)]
    assert together.n_waiting == 0 and not together.broken

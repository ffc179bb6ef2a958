"""Workers on a real Ray cluster of three nodes on loopback: the vectors of a local run, whatever dies.

Ray lives in processes of its own here as in a run, so nothing of it is imported into this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline import __version__, ray_actor, ray_pool, shards
from pipeline.config import build_config
from pipeline.errors import ConfigError, Stopped
from pipeline.ledger import Ledger
from pipeline.model import open_model
from pipeline.pool import Event
from pipeline.ray_actor import NodeWorker, Start, check_node
from pipeline.ray_pool import resolve_actors
from pipeline.records import Batch, EncoderSettings
from pipeline.run import run
from pipeline.storage import Output
from pipeline.telemetry import RunReport
from pipeline.worker_settings import WorkerSettings
from tests import ray_cluster
from tests.conftest import ROOT, STAND_IN, RunCommand, read_output, vectors_of, write_shard
from tests.stand_in import StandIn, vector_of
from tests.test_parts import Watch

NUM_SHARDS, ROWS = 6, 60
TEXTS = [[f"shard {shard} row {row}" for row in range(ROWS)] for shard in range(NUM_SHARDS)]


class DiesAtTheLetterZ(StandIn):
    def encode(self, batch: Batch) -> Any:
        if (batch.input_ids == 26).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(batch)


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[ray_cluster.RayCluster]:
    # Slow on the nodes alone, so that they can be killed while a shard is in work.
    with ray_cluster.ray_cluster(nodes=3, STAND_IN_SECONDS="0.1") as cluster:
        yield cluster


@pytest.fixture
def cluster(three_nodes: ray_cluster.RayCluster, monkeypatch: pytest.MonkeyPatch) -> ray_cluster.RayCluster:
    monkeypatch.setenv("RAY_ADDRESS", three_nodes.address)
    return three_nodes


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number, texts in enumerate(TEXTS):
        write_shard(tmp_path / "in" / f"part-{number}.parquet", texts)
    return tmp_path / "in"


def embed(
    source: Path, output: Path, model: str, watch: Watch | None = None, stand_in: str = STAND_IN, **options: Any
) -> RunReport:
    given = {"input": str(source), "output": str(output), "model": model, "id_column": "id", "index": "none"}
    return run(build_config(None, {**given, "max_batch_tokens": 200, **options}), watch, stand_in=stand_in)


def files_of(output: Path) -> dict[str, bytes]:
    """All but what a killed node was writing: the next run removes it."""
    files = (path for path in (output / "embeddings").rglob("*") if path.suffix != ".tmp")
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in files}


def gone(processes: list[psutil.Process], within_s: float = 30) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.slow
def test_a_node_that_is_killed_mid_shard_costs_no_row(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    doomed, placed = "1", []

    def kill_a_node(event: Event) -> None:
        if event.kind == "progress" and len(placed) == 0 and len(cluster.workers()) == 3:
            placed.extend(cluster.workers())
            cluster.kill_node(doomed)

    watch = Watch(kill_a_node)
    report = embed(corpus, tmp_path / "out", model_dir, watch, backend="ray")
    cluster.add_node()
    cluster.settle()
    assert (report.exit_code, report.shards_done, report.device) == (0, NUM_SHARDS, "cpu,cpu,cpu")
    lost = [event for event in watch.events if event.kind == "lost"]
    assert lost and all("died with its node" in event.reason for event in lost), lost
    assert report.retries == len(lost)
    assert gone(placed)
    embed(corpus, tmp_path / "local", model_dir)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "local")
    np.testing.assert_allclose(
        vectors_of(read_output(tmp_path / "out")), [vector_of(text) for texts in TEXTS for text in texts], atol=1e-6
    )
    assert not list((tmp_path / "out").rglob(".ray*"))


def test_a_budget_stop_on_the_cluster_is_continued_here(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PART_ROWS", 20)  # one of them is a large file, worked on in parts
    write_shard(corpus / "part-0.parquet", TEXTS[0], row_group_size=20)
    report = embed(corpus, tmp_path / "out", model_dir, backend="ray", devices="cpu,cpu", max_tokens=2000)
    assert (report.exit_code, report.device) == (75, "cpu,cpu")
    assert 0 < report.shards_done < NUM_SHARDS
    rest = embed(corpus, tmp_path / "out", model_dir)
    assert (rest.exit_code, rest.shards_done) == (0, NUM_SHARDS - report.shards_done)
    embed(corpus, tmp_path / "whole", model_dir)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_damaged_shard_and_one_that_kills_workers_fail_alone(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    path = corpus / "part-2.parquet"
    content = bytearray(path.read_bytes())
    content[20:200] = bytes(180)
    path.write_bytes(content)
    write_shard(corpus / "part-4.parquet", ["fine", "a z"])
    deadly, options = "tests.test_ray_backend:DiesAtTheLetterZ", {"backend": "ray", "devices": "cpu,cpu"}
    report = embed(corpus, tmp_path / "out", model_dir, stand_in=deadly, **options)
    assert (report.shards_done, report.shards_failed) == (NUM_SHARDS - 2, 2)
    reasons = {failure.reason.partition(".parquet")[0][-6:]: failure.reason for failure in report.failed}
    assert "part-2" in reasons
    assert "killed (signal 9; the machine may be out of memory), 3 times at this shard; given up" in reasons["part-4"]
    assert "worker on cpu of node " in reasons["part-4"]


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_command_ends_all_its_workers(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str, signal_number: signal.Signals
) -> None:
    options = {"backend": "ray", "max_batch_tokens": 40}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.drive", str(corpus), str(tmp_path / "out"), model_dir, json.dumps(options)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while len(workers := cluster.workers()) < 3 or not Ledger(str(tmp_path / "out")).commits():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.1)
        [driver] = [p for p in psutil.Process(process.pid).children() if "pipeline.ray_driver" in p.cmdline()]
        process.send_signal(signal_number)
        out, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert gone([driver, *workers])
    assert 0 < len(Ledger(str(tmp_path / "out")).commits()) < NUM_SHARDS
    if signal_number == signal.SIGTERM:
        assert (process.returncode, out) == (75, ""), log
        assert "interrupted; run the same command again to continue" in log
    rest = embed(corpus, tmp_path / "out", model_dir)
    assert rest.exit_code == 0
    assert read_output(tmp_path / "out").num_rows == NUM_SHARDS * ROWS


def test_an_actor_has_one_gpu_and_the_worker_sees_that_alone(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    node = cluster.add_node(num_cpus=2, num_gpus=2)
    seen: list[dict[str, str]] = []

    def look(event: Event) -> None:
        if event.kind == "progress" and not seen and len(workers := cluster.workers()) == 2:
            seen.extend(worker.environ() for worker in workers)

    report = embed(corpus, tmp_path / "out", model_dir, Watch(look), backend="ray")
    cluster.kill_node(node)
    cluster.settle()
    assert (report.exit_code, report.device) == (0, "cuda,cuda")
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in seen} == {"0", "1"}
    assert {environment["OMP_NUM_THREADS"] for environment in seen} == {"1"}  # its share of the node, not the machine
    assert {record["device"] for record in Ledger(str(tmp_path / "out")).commits()} == {"cuda:0"}


def test_without_room_on_any_node_the_run_stops_and_can_be_continued(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "NO_NODE_S", 2.0)
    monkeypatch.setattr(ray_pool, "SAY_WAITING_S", 0.5)
    lines: list[str] = []
    watch = Watch()
    monkeypatch.setattr(watch, "line", lines.append)
    with pytest.raises(Stopped, match=r"no node of the Ray cluster had room for a worker \(1 GPU and 1 CPU\)"):
        embed(corpus, tmp_path / "out", model_dir, watch, backend="ray", devices="cuda,cuda")
    assert lines[-1].startswith("waiting for a node of the Ray cluster")
    assert embed(corpus, tmp_path / "out", model_dir, dtype="float16").shards_done == NUM_SHARDS


def test_a_node_that_is_not_as_the_run_needs_it_ends_the_run_with_its_name(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "__version__", "9.9")
    with pytest.raises(ConfigError, match=rf"node \S+: has embed-corpus {__version__}, the run is 9\.9; install one"):
        embed(corpus, tmp_path / "out", model_dir, backend="ray")
    assert gone(cluster.workers())


def test_the_loss_of_the_connection_stops_the_run(
    cluster: ray_cluster.RayCluster, corpus: Path, tmp_path: Path, model_dir: str
) -> None:
    workers: list[psutil.Process] = []

    def cut(event: Event) -> None:
        if event.kind == "progress" and not workers:
            workers.extend(cluster.workers())
            for process in psutil.Process().children():
                if "pipeline.ray_driver" in process.cmdline():
                    process.kill()
        assert [one.kind for one in watch.events].count("tick") < 30

    watch = Watch(cut)
    with pytest.raises(Stopped, match=r"the connection to the Ray cluster is lost.*; run again to continue"):
        embed(corpus, tmp_path / "out", model_dir, watch, backend="ray", devices="cpu")
    assert len(workers) == 1 and gone(workers)


def test_without_ray_the_command_says_what_to_install(
    corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(ConfigError, match=r"--backend ray needs .* pip install 'embed-corpus\[ray\]'"):
        embed(corpus, tmp_path / "out", model_dir, backend="ray")
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_does_not_answer_is_told_at_once(
    corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", closed)
    with pytest.raises(Stopped, match=f"RAY_ADDRESS {closed}: the cluster does not answer"):
        embed(corpus, tmp_path / "out", model_dir, backend="ray")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="Ray Client is not supported; run the command on a node"):
        embed(corpus, tmp_path / "out", model_dir, backend="ray")


def test_the_coordinator_imports_neither_ray_nor_torch(command: RunCommand) -> None:
    code = "import sys, pipeline.ray_pool, pipeline.ray_driver; print({'ray', 'torch', 'faiss'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert "--backend" in command("run", "--help").stdout
    assert "--backend" not in command("plan", "--help").stdout  # it times batches where it is started


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--backend: found 'dask'"):
        build_config(None, {"input": "in", "output": str(tmp_path), "model": "m", "backend": "dask"})


@pytest.mark.parametrize(
    ("option", "nodes", "expected"),
    [
        ("auto", [(1, 0), (1, 0), (1, 0)], (["cpu"] * 3, 1)),
        ("auto", [(8, 0), (8, 0)], (["cpu"] * 2, 8)),
        ("auto", [(1, 0), (8, 0), (8, 0)], (["cpu"] * 2, 8)),  # a small head node is left out
        ("auto", [(0, 0), (8, 0), (16, 0)], (["cpu"] * 3, 8)),  # a larger node has two
        ("auto", [(4, 0), (32, 4), (64, 4)], (["cuda"] * 8, 8)),
        ("auto", [(0, 1)], (["cuda"], 0)),
        ("cuda,cuda", [(4, 0)], (["cuda"] * 2, 1)),  # for machines that an autoscaler will bring
        ("CUDA", [(16, 2)], (["cuda"], 8)),
        ("cpu", [(8, 0), (16, 0)], (["cpu"], 16)),
        ("cpu,cpu,cpu", [(4, 0), (4, 0)], (["cpu"] * 3, 2)),
        ("cpu,cpu,cpu", [(1, 0)], (["cpu"] * 3, 1)),
    ],
)
def test_actors_are_as_large_as_the_cluster_allows(option: str, nodes: Any, expected: tuple[list[str], int]) -> None:
    assert resolve_actors(option, nodes) == expected


@pytest.mark.parametrize("option", ["cuda:1", "cpu,cuda", "tpu", ","])
def test_devices_that_mean_nothing_on_a_cluster_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="with --backend ray expected auto, or one kind for each actor"):
        resolve_actors(option, [(8, 1)])


def test_a_cluster_that_offers_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="offers neither GPUs nor CPUs"):
        resolve_actors("auto", [(0, 0)])


@pytest.fixture
def start(corpus: Path, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch) -> Start:
    """What a node is told that is as it should be."""
    monkeypatch.setattr(ray_actor, "VISIBLE_WITHIN_S", 0.5)
    Output(tmp_path / "out").write_json(".token.tmp", {})
    part = corpus / "part-0.parquet"
    return Start(
        settings=WorkerSettings(EncoderSettings("/elsewhere"), str(tmp_path / "out"), stand_in=STAND_IN),
        device="cpu", threads=1, environment={}, version=__version__, token=".token.tmp", model=model_dir,
        model_fields=open_model(model_dir).fingerprint_fields(), inputs=[(str(part), part.stat().st_size)],
    )  # fmt: skip


def test_a_node_that_sees_all_takes_the_model_from_where_it_has_it(start: Start, model_dir: str) -> None:
    assert check_node(start).encoder.model_path == str(Path(model_dir).resolve())


def test_a_node_with_another_folder_of_the_outputs_name_writes_nothing(start: Start, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "out")  # as it is on a machine that does not mount it
    with pytest.raises(ConfigError, match=r"does not see what the run writes to --output .*/out; expected a folder"):
        check_node(start)
    assert not (tmp_path / "out").exists()


def test_a_node_with_other_weights_is_refused(start: Start, model_dir: str, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    check_node(replace(start, model=str(tmp_path / "model")))  # a prompt is sent along and is not the folder's
    with open(tmp_path / "model" / "model.safetensors", "ab") as file:
        file.write(b"\0")
    with pytest.raises(ConfigError, match=r"its files are not those .* \(model_weights differ\); copy the same folder"):
        check_node(replace(start, model=str(tmp_path / "model")))


def test_a_node_without_the_model_or_the_input_is_refused(start: Start, corpus: Path) -> None:
    with pytest.raises(ConfigError, match="model /nowhere/model: no such folder"):
        check_node(replace(start, model="/nowhere/model"))
    with pytest.raises(ConfigError, match=r"input /nowhere/a.parquet: cannot be read .*under the same name on every"):
        check_node(replace(start, inputs=[*start.inputs, ("/nowhere/a.parquet", 1)]))
    path = str(corpus / "part-0.parquet")
    with pytest.raises(ConfigError, match=r"part-0.parquet: [\d,]+ bytes, 7 where the run began"):
        check_node(replace(start, inputs=[(path, 7)]))


def test_what_is_wrong_with_a_node_comes_as_an_answer_and_a_bug_with_its_traceback(start: Start) -> None:
    refused, broken = NodeWorker(), NodeWorker()
    refused.begin({**start.to_json(), "model": "/nowhere/model"})
    [answer] = refused.answers()
    assert (answer["event"], answer["exit_code"], answer["unit"]) == ("error", 78, None)
    broken.begin({**start.to_json(), "inputs": None})
    [answer] = broken.answers()
    assert (answer["exit_code"], "TypeError" in answer["trace"]) == (1, True)
    refused.send({"do": "stop"})  # too late for it, and no error
    refused.close()


def test_credentials_go_along_and_what_belongs_to_the_machine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    passed = ray_pool.passed_on()
    assert passed["AWS_ENDPOINT_URL"] == "http://store"
    assert not {"PATH", "HOME", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "TMPDIR", "OMP_NUM_THREADS"} & set(passed)

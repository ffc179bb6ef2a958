"""What a machine does to a run: a full disk, no network, two runs at once, being PID 1, a caller with threads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.config import build_config
from pipeline.errors import ConfigError
from pipeline.pool import child_environment
from pipeline.run import run
from pipeline.threads import available_cores
from tests.conftest import ROOT, STAND_IN, RunCommand, read_output, write_shard

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(6):
        write_shard(tmp_path / "in" / f"shard-{number}.parquet", [f"text {number} {row}" for row in range(50)])
    return tmp_path / "in"


def drive(source: Path, output: Path, model: str, *prefix: str, seconds: float = 0.0, **options: object) -> list[str]:
    return [*prefix, sys.executable, "-m", "tests.drive", str(source), str(output), model, json.dumps(options)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_the_run_and_room_lets_it_finish(corpus: Path, small_disk: Path, model_dir: str) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 64 * 1024)
    done = subprocess.run(
        drive(corpus, small_disk / "out", model_dir), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 75, done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert "No space left on device" in message
    assert str(small_disk / "out") in message
    assert "Traceback" not in done.stderr
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    done = subprocess.run(
        drive(corpus, small_disk / "out", model_dir), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total_rows_out"] == 300


def unshared(*flags: str) -> list[str]:
    if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a namespace")
    return ["unshare", *flags]


def test_a_local_model_needs_no_network(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    """The real model, in a namespace without any network, with the hub not switched off by the caller."""
    command = [*unshared("-n"), sys.executable, "-m", "cli", "run", str(corpus / "shard-0.parquet"), "--output"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [*command, str(tmp_path / "out"), "--model", model_dir, "--index", "none"],
        capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_output(tmp_path / "out").num_rows == 50


def test_sigterm_reaches_a_run_that_is_pid_1(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    """As in a container: PID 1 has no default signal actions, and whoever it leaves behind dies with it."""
    process = subprocess.Popen(
        drive(corpus, tmp_path / "out", model_dir, *unshared("-p", "-f", "--mount-proc"), max_batch_tokens=16),
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "STAND_IN_SECONDS": "0.2"},
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 20
    while not (tmp_path / "out" / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75, err


def test_two_runs_at_once_leave_every_row_once(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    command = drive(corpus, tmp_path / "out", model_dir, max_batch_tokens=64)
    both = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**ENVIRONMENT, "STAND_IN_SECONDS": "0.02"},
        )
        for _ in range(2)
    ]  # fmt: skip
    ends = [(process.communicate(timeout=60), process.returncode) for process in both]
    assert sorted(code for _, code in ends) == [0, 75]
    [refusal] = [err for (_, err), code in ends if code == 75]
    assert "another run holds its lock" in refusal
    ids = read_output(tmp_path / "out")["id"].to_pylist()
    assert (len(ids), len(set(ids))) == (300, 300)


def test_a_caller_that_used_tokenizer_threads_is_no_danger(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    """Workers are started afresh, never forked: no deadlock, no warning about forks."""
    script = tmp_path / "script.py"
    script.write_text(
        "from tokenizers import Tokenizer\nfrom pipeline import embed_corpus\n"
        f"Tokenizer.from_file({model_dir + '/tokenizer.json'!r}).encode_batch(['some words to split'] * 1000)\n"
        f"print(embed_corpus({str(corpus)!r}, {str(tmp_path / 'out')!r}, model={model_dir!r}, devices='cpu,cpu',\n"
        "    index='none', progress='plain').total_rows_out)\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False,
        env={**ENVIRONMENT, "TOKENIZERS_PARALLELISM": "true"},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "300"), done.stderr
    assert "fork" not in done.stderr


@pytest.mark.gpu
def test_a_caller_that_used_cuda_is_no_danger(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    import torch

    torch.zeros(1).cuda()
    report = run(build_config(None, {"input": str(corpus), "output": str(tmp_path / "out"), "model": model_dir}))
    assert report.total_rows_out == 300


def test_threads_follow_the_cores_this_process_may_use() -> None:
    environment = child_environment(available_cores())
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        assert int(environment[name]) <= len(os.sched_getaffinity(0))


def test_auto_warns_and_records_the_cpu(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    given = {"input": str(corpus), "output": str(tmp_path / "out"), "model": model_dir, "index": "none"}
    report = run(build_config(None, given), stand_in=STAND_IN)
    assert report.warnings == ["no GPU found: running on the CPU"]
    assert report.shards[0]["device"] == "cpu"


def test_nothing_is_indexed_when_every_shard_fails(tmp_path: Path, model_dir: str) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    given = {"input": str(tmp_path), "output": str(tmp_path / "out"), "model": model_dir}
    with pytest.raises(ConfigError, match=r"a\.parquet: the file is empty .*\(and 1 more"):
        run(build_config(None, given), stand_in=STAND_IN)
    assert not (tmp_path / "out").exists()


def test_the_index_follows_shards_that_are_added(corpus: Path, tmp_path: Path, model_dir: str) -> None:
    later = tmp_path / "later.parquet"
    shutil.move(corpus / "shard-0.parquet", later)  # it sorts first
    given = {"input": str(corpus), "output": str(tmp_path / "out"), "model": model_dir, "id_column": "id"}
    assert run(build_config(None, given), stand_in=STAND_IN).index["ntotal"] == 250  # type: ignore[index]
    shutil.move(later, corpus / "shard-0.parquet")
    report = run(build_config(None, given), stand_in=STAND_IN)
    assert (report.shards_done, report.index["ntotal"]) == (1, 300)  # type: ignore[index]
    ids = pq.read_table(tmp_path / "out" / "index" / report.index["ids_file"])["id"].to_pylist()  # type: ignore[index]
    assert sorted(ids) == sorted(read_output(tmp_path / "out")["id"].to_pylist())


@pytest.mark.slow
def test_half_precision_is_stored_as_float32(tmp_path: Path, model_dir: str, command: RunCommand) -> None:
    write_shard(tmp_path / "x.parquet", ["a boat", "a ship"])
    options = ["--model", model_dir, "--dtype", "bfloat16", "--index", "none"]
    done = command("run", "x.parquet", "--output", "out", *options)
    assert done.returncode == 0, done.stderr
    assert str(read_output(tmp_path / "out").schema.field("embedding").type.value_type) == "float"

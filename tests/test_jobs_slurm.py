"""The shipped scripts under a real Slurm: an array shares the shards, the step after it does what was lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.ledger import Ledger
from tests.conftest import ROOT, read_output, write_shard
from tests.slurm import Cluster, cluster, why_not

SCRIPTS = ROOT / "jobs" / "slurm"
needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def command_with_the_stand_in(folder: Path, **environment: str) -> None:
    """An ``embed-corpus`` in ``folder`` that computes with the stand-in encoder."""
    settings = "".join(f"export {name}={value}\n" for name, value in environment.items())
    script = folder / "embed-corpus"
    script.write_text(
        f'#!/bin/sh\n{settings}PYTHONPATH={ROOT} exec {sys.executable} -m tests.kubernetes_simulator "$@"\n'
    )
    script.chmod(0o755)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and the folder where its jobs look for the command first."""
    root = tmp_path_factory.mktemp("slurm")
    commands = root / "bin"
    commands.mkdir()
    with cluster(root / "cluster", commands) as made:
        yield made, commands


@pytest.fixture
def job(tmp_path: Path, model_dir: str) -> Path:
    for number in range(6):
        write_shard(tmp_path / "in" / f"part-{number}.parquet", [f"text {number} {row}" for row in range(40)])
    file = tmp_path / "job.yaml"
    file.write_text(f"input: in\noutput: out\nmodel: {model_dir}\nid-column: id\nmax-batch-tokens: 64\n")
    return file


def submitted(made: Cluster, job: Path, tasks: int) -> tuple[str, str]:
    array, finish = made.call(SCRIPTS / "submit.sh", job.name, str(tasks), cwd=job.parent).split()
    return array, finish


def logs(job: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in job.parent.glob("*.log")}


def check_complete(job: Path) -> None:
    output = job.parent / "out"
    rows = read_output(output)
    assert sorted(rows["id"].to_pylist()) == sorted(f"part-{n}-{row}" for n in range(6) for row in range(40)), logs(job)
    assert (output / "index" / "index.json").exists()
    assert not list(output.rglob("*.tmp"))


def check_both_fail_for_good(made: Cluster, job: Path, reason: str) -> str:
    """Two tasks of an array; returns the step after it."""
    array, finish = submitted(made, job, 2)
    made.wait_for(lambda: list(made.states(array).values()) == ["FAILED", "FAILED"])
    assert reason in logs(job)[f"embed-corpus-{array}-0.log"]
    assert "requeued" not in "".join(logs(job).values())
    return finish


@needs_slurm
@pytest.mark.slow
def test_an_array_and_the_step_after_it_do_everything_once(slurm: tuple[Cluster, Path], job: Path) -> None:
    made, commands = slurm
    command_with_the_stand_in(commands)
    array, finish = submitted(made, job, 3)
    made.wait_for(lambda: made.states(finish).get("") == "COMPLETED")
    assert set(made.states(array).values()) == {"COMPLETED"}
    check_complete(job)
    for rank in range(3):
        assert f"rank {rank} of 3: 2 of 6 shards are its share" in logs(job)[f"embed-corpus-{array}-{rank}.log"]
    assert " shard " not in logs(job)[f"embed-corpus-{finish}.log"]  # all shards were done, only the index was left


@needs_slurm
@pytest.mark.slow
def test_a_task_that_is_stopped_comes_back_and_one_that_is_killed_is_made_up_for(
    slurm: tuple[Cluster, Path], job: Path
) -> None:
    made, commands = slurm
    command_with_the_stand_in(commands, STAND_IN_SECONDS="0.3")
    array, finish = submitted(made, job, 2)
    output = job.parent / "out"
    made.wait_for(lambda: len(Ledger(str(output)).commits()) >= 1 if (output / "run.json").exists() else False)
    batch = [f"{array}_0", f"{array}_1"]
    made.call("scancel", "--batch", "--signal=TERM", batch[0])  # as before the end of its time: 75, and requeued
    [coordinator] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "tests.kubernetes_simulator" in (process.info["cmdline"] or [])
        and process.environ().get("SLURM_ARRAY_TASK_ID") == "1"
    ]
    coordinator.send_signal(signal.SIGKILL)  # 137: this task has failed
    made.wait_for(lambda: "exit code 75: requeued, 1 of 3" in logs(job).get(f"embed-corpus-{array}-0.log", ""))
    command_with_the_stand_in(commands)
    made.wait_for(lambda: made.states(finish).get("") == "COMPLETED")
    states = made.states(array)
    assert (states["0"], states["1"]) == ("COMPLETED", "FAILED"), logs(job)
    check_complete(job)


@needs_slurm
def test_a_wrong_job_file_fails_the_tasks_and_is_not_requeued(slurm: tuple[Cluster, Path], job: Path) -> None:
    made, commands = slurm
    command_with_the_stand_in(commands)
    job.write_text(job.read_text() + "text-column: nothing\n")
    finish = check_both_fail_for_good(made, job, "no column 'nothing'")
    made.wait_for(lambda: made.states(finish).get("") == "FAILED")
    assert "requeued" not in "".join(logs(job).values())


@needs_slurm
def test_a_limit_of_the_job_file_ends_the_tasks_and_does_not_begin_anew(slurm: tuple[Cluster, Path], job: Path) -> None:
    made, commands = slurm
    command_with_the_stand_in(commands, STAND_IN_SECONDS="0.1")
    for number in range(6, 20):  # more than what is in work when the limit is seen
        write_shard(job.parent / "in" / f"part-{number}.parquet", [f"text {number} {row}" for row in range(40)])
    job.write_text(job.read_text() + "max-tokens: 1\n")
    finish = check_both_fail_for_good(made, job, "--max-tokens 1 is reached")
    made.call("scancel", finish)
    assert 2 <= len(Ledger(str(job.parent / "out")).commits()) < 20


@needs_slurm
def test_more_tasks_than_the_cluster_allows_are_refused(slurm: tuple[Cluster, Path], job: Path) -> None:
    made, _ = slurm
    done = subprocess.run(
        [SCRIPTS / "submit.sh", job.name, "20"], cwd=job.parent, env=made.environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "at most 19 tasks (MaxArraySize), asked for 20" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["job.yaml"], ["job.yaml", "0"], ["job.yaml", "x"], ["missing.yaml", "2"]])
def test_wrong_use_says_how(job: Path, arguments: list[str]) -> None:
    command = [SCRIPTS / "submit.sh", *arguments]
    done = subprocess.run(command, cwd=job.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_the_scripts_are_bash_without_a_mistake() -> None:
    for script in (*SCRIPTS.iterdir(), ROOT / "jobs" / "cron" / "embed-corpus"):
        subprocess.run(["bash", "-n", script], check=True)

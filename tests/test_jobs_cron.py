"""The shipped line and script as cron and run-parts start them: hardly any environment, maybe two at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.ledger import Ledger
from tests.conftest import ROOT, write_shard
from tests.test_jobs_slurm import command_with_the_stand_in

SCRIPT = ROOT / "jobs" / "cron" / "embed-corpus"
SHARDS = 4


@pytest.fixture
def job(tmp_path: Path, model_dir: str) -> Path:
    folder = tmp_path / "etc"
    for number in range(SHARDS):
        write_shard(folder / "in" / f"part-{number}.parquet", [f"text {number} {row}" for row in range(20)])
    file = folder / "job.yaml"
    file.write_text(f"input: in\noutput: out\nmodel: {model_dir}\nid-column: id\nmax-batch-tokens: 64\n")
    (tmp_path / "bin").mkdir()
    command_with_the_stand_in(tmp_path / "bin")
    return file


def as_cron(job: Path, command: str, **more: str) -> subprocess.Popen[str]:
    """What cron gives a command: /bin/sh, HOME, and a short PATH; run-parts needs no more."""
    home = job.parent.parent
    environment = {"HOME": str(home), "LOGNAME": "root", "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}
    environment |= {"EMBED_CORPUS_BIN": str(home / "bin"), **more}
    return subprocess.Popen(
        ["/bin/sh", "-c", command], cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def log_of(job: Path) -> str:
    [log] = (job.parent / "logs").glob("*.log")
    assert re.fullmatch(r"job-\d{4}-\d\d-\d\d\.log", log.name)
    return log.read_text()


def line_of_the_crontab() -> tuple[str, str]:
    lines = (ROOT / "jobs" / "cron" / "crontab").read_text().splitlines()
    [line] = [line for line in lines if line and not line.startswith("#") and not re.match(r"[A-Z_]+=", line)]
    *when, command = line.split(maxsplit=5)
    return " ".join(when), command


def test_the_line_of_the_crontab_runs_the_job(job: Path) -> None:
    when, command = line_of_the_crontab()
    assert re.fullmatch(r"(?:(?:\*|\d+(?:-\d+)?(?:,\d+)*)(?:/\d+)? ?){5}", when), when
    assert "%" not in command, "cron makes a new line of it"
    command = command.replace("/srv/search/embed-corpus/jobs/cron/embed-corpus", str(SCRIPT))
    command = command.replace("/srv/search/job.yaml", str(job))
    assert command == f"{SCRIPT} {job}"
    process = as_cron(job, command)
    said, _ = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, ""), "nothing to mail"
    assert len(Ledger(str(job.parent / "out")).commits()) == SHARDS
    assert f"{SHARDS} of {SHARDS} shards" in log_of(job)


@pytest.mark.skipif(shutil.which("run-parts") is None, reason="run-parts (debianutils) is not installed")
def test_of_two_under_run_parts_at_once_one_works_and_the_other_says_so(job: Path, tmp_path: Path) -> None:
    daily = tmp_path / "cron.daily"
    daily.mkdir()
    (daily / "embed-corpus").write_text(f"#!/bin/sh\nexec {SCRIPT} {job}\n")
    (daily / "embed-corpus").chmod(0o755)
    command_with_the_stand_in(tmp_path / "bin", STAND_IN_SECONDS="0.3")
    first = as_cron(job, f"run-parts {daily}")
    deadline = time.monotonic() + 60
    while not list(job.parent.glob("logs/*.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = as_cron(job, f"run-parts {daily}")
    assert second.communicate(timeout=60) == ("", None)
    assert first.poll() is None, "the second did not wait for the first"
    assert first.communicate(timeout=120) == ("", None)
    assert (first.returncode, second.returncode) == (0, 0)
    assert log_of(job).count("another run of") == 1
    assert log_of(job).count("loading the model") == 1
    assert len(Ledger(str(job.parent / "out")).commits()) == SHARDS


def test_a_failure_is_printed_for_the_mail_with_the_exit_code(job: Path) -> None:
    (job.parent / "in" / "part-2.parquet").write_bytes(b"PAR1 damaged")
    process = as_cron(job, f"{SCRIPT} {job}")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 65
    assert "ended with exit code 65" in said
    assert "part-2.parquet" in said
    assert len(Ledger(str(job.parent / "out")).commits()) == SHARDS - 1


def test_a_killed_run_releases_the_lock(job: Path, tmp_path: Path) -> None:
    command_with_the_stand_in(tmp_path / "bin", STAND_IN_SECONDS="0.3")
    first = as_cron(job, f"exec {SCRIPT} {job}")
    deadline = time.monotonic() + 60
    while not list((job.parent / "out" / "commits").glob("*.json")):
        assert time.monotonic() < deadline, log_of(job)
        time.sleep(0.05)
    subprocess.run(["pkill", "-9", "-f", f"run --job {job}"], check=True)
    first.communicate(timeout=60)
    assert first.returncode == 137
    command_with_the_stand_in(tmp_path / "bin")
    again = as_cron(job, f"{SCRIPT} {job}")
    assert again.communicate(timeout=120) == ("", None)
    assert again.returncode == 0
    assert len(Ledger(str(job.parent / "out")).commits()) == SHARDS


def test_a_command_that_is_not_there_is_told_with_what_to_set(job: Path, tmp_path: Path) -> None:
    script = tmp_path / "jobs" / "cron" / "embed-corpus"  # beside no .venv
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    nothing = subprocess.run(
        ["/bin/bash", script, job], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert nothing.returncode == 78
    assert "set EMBED_CORPUS_BIN to its folder" in nothing.stderr


def test_old_logs_are_removed_and_nothing_else(job: Path) -> None:
    logs = job.parent / "logs"
    logs.mkdir()
    for name in ("job-2020-01-01.log", "job-2020-01-02.txt", "other-2020-01-01.log"):
        (logs / name).write_text("old")
        os.utime(logs / name, (1e9, 1e9))
    process = as_cron(job, f"{SCRIPT} {job}")
    assert process.communicate(timeout=120) == ("", None)
    left = sorted(path.name for path in logs.iterdir() if path.name.endswith((".log", ".txt")) and "20-01" in path.name)
    assert left == ["job-2020-01-02.txt", "other-2020-01-01.log"]


def test_without_a_job_file_it_says_what_to_give(job: Path) -> None:
    process = as_cron(job, f"{SCRIPT} /no/such/job.yaml")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 78
    assert "no such job file; give one as the first argument" in said

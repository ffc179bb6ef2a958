"""Kills, anywhere in the tree of processes, at any moment: the end state is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.verify import verify
from tests.conftest import ROOT, read_output, write_shard
from tests.test_run import digests, embed

KILLS = int(os.environ.get("KILLS", "60"))
"""Each takes most of a second; 200 once a change touches the ledger, the pool or the writer."""


@pytest.mark.slow
def test_many_kills_leave_the_bytes_of_an_undisturbed_run(tmp_path: Path, model_dir: str) -> None:
    rng = random.Random(5)
    for number in range(60):
        texts = ["".join(rng.choices("abcdefg h", k=rng.randrange(1, 60))) for _ in range(30)]
        write_shard(tmp_path / "in" / f"{number % 7}" / f"part-{number}.parquet", [*texts, None])
    embed(tmp_path / "in", tmp_path / "calm", model_dir, max_batch_tokens=64)
    options = json.dumps({"devices": "cpu,cpu", "max_batch_tokens": 64})
    command = [sys.executable, "-m", "tests.drive", str(tmp_path / "in"), str(tmp_path / "out"), model_dir, options]
    environment = {**os.environ, "STAND_IN_SECONDS": "0.005"}
    process, kills = None, 0
    while kills < KILLS:
        if process is None or process.poll() is not None:
            if process is not None and process.returncode == 0:
                take_back(tmp_path / "out", rng)
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        time.sleep(rng.uniform(0.05, 1.2))
        kills += kill_one(process, rng)
    process.kill()
    process.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "out") == digests(tmp_path / "calm")
    assert list((tmp_path / "out").rglob("*.tmp")) == []
    assert read_output(tmp_path / "out").num_rows == 60 * 30
    certificate = verify(str(tmp_path / "out"))
    assert (certificate["ok"], certificate["faults"]) == (True, [])


def take_back(output: Path, rng: random.Random) -> None:
    """It had finished: forget half of the shards, so that there is something to disturb."""
    records = sorted((output / "commits").rglob("*.json"))
    for record in rng.sample(records, len(records) // 2):
        record.unlink()


def kill_one(process: subprocess.Popen[bytes], rng: random.Random) -> int:
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        rng.choice(tree).send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return 0
    if process.poll() is not None:
        process.wait()
    return 1

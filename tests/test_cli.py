"""The command as a user calls it: quick help, one-line errors with the promised exit codes, results alone on stdout."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pipeline
from tests.conftest import ROOT, SAMPLE_DATA, RunCommand, SampleRun, read_output, write_shard


def test_help_answers_at_once(command: RunCommand) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = command("--help")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
    assert statistics.median(seconds) < 0.5
    assert [name for name in ("run", "index", "search") if name not in done.stdout] == []


def test_only_commands_that_exist_are_listed(command: RunCommand) -> None:
    listed = re.findall(r"^  ([a-z]+)  ", command("--help").stdout, flags=re.MULTILINE)
    for name in listed:
        assert command(name, "--help").returncode == 0
    assert set(listed) == {"run", "index", "search", "verify", "bench", "plan", "serve", "report"}


def test_neither_torch_nor_faiss_enters_the_coordinator() -> None:
    heavy = ("torch", "faiss", "transformers")
    code = f"import sys, pipeline, cli, pipeline.run; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def failing(command: RunCommand, code: int, *arguments: Any, within_s: float = 10) -> str:
    """stderr of a call that must fail before a model is loaded: one line, no traceback, the right code."""
    start = time.monotonic()
    done = command("run", *arguments)
    assert time.monotonic() - start < within_s
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "loading the model" not in done.stderr
    assert done.stdout == ""
    return str(lines[0])


def test_a_missing_folder_is_named(command: RunCommand, model_dir: str) -> None:
    message = failing(command, 78, "/no/such/folder", "--output", "out", "--model", model_dir)
    assert "input /no/such/folder: does not exist" in message


def test_a_folder_without_shards_is_named(command: RunCommand, model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "input empty: no Parquet file" in failing(command, 78, "empty", "--output", "out", "--model", model_dir)


def test_the_reason_is_left_where_kubernetes_looks_for_it(command: RunCommand, model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = {"EMBED_CORPUS_TERMINATION_LOG": str(tmp_path / "reason")}
    done = command("run", "empty", "--output", "out", "--model", model_dir, env=environment)
    assert done.returncode == 78
    assert done.stderr == f"embed-corpus: {(tmp_path / 'reason').read_text()}\n"
    assert "no Parquet file" in done.stderr


def test_the_version_is_the_packages(command: RunCommand) -> None:
    assert command("--version").stdout == f"embed-corpus {pipeline.__version__}\n"


def test_with_json_lines_the_error_is_an_object_too(command: RunCommand, model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    line = failing(command, 78, "empty", "--output", "out", "--model", model_dir, "--log-format", "json")
    said = json.loads(line)
    assert (said["level"], said["event"]) == ("error", "message")
    assert "no Parquet file" in said["message"]


def test_a_missing_column_is_named_with_the_nearest_one(command: RunCommand, model_dir: str) -> None:
    message = failing(command, 78, SAMPLE_DATA, "--output", "out", "--model", model_dir, "--text-column", "texts")
    assert "no column 'texts'; did you mean 'text'?" in message


@pytest.mark.parametrize("name", ["/no/such/dir", "no-such-model", "pipeline/run.py"])
def test_a_missing_model_is_named(command: RunCommand, name: str) -> None:
    assert f"model {name}: " in failing(command, 78, SAMPLE_DATA, "--output", "out", "--model", name)


def test_an_output_that_cannot_be_written_is_named(command: RunCommand, model_dir: str) -> None:
    message = failing(command, 78, SAMPLE_DATA, "--output", "/proc/1/out", "--model", model_dir)
    assert "--output /proc/1/out: cannot be written" in message


def test_a_gpu_that_is_not_there_is_named(command: RunCommand, model_dir: str) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    message = failing(command, 78, SAMPLE_DATA, "--output", "out", "--model", model_dir, "--devices", "cuda")
    assert "cuda:0 asked for, 0 CUDA devices found" in message


def test_wrong_use_has_typers_exit_code(command: RunCommand) -> None:
    assert command("run", "--no-such-option").returncode == 2


def test_an_index_without_an_output_is_refused(command: RunCommand, tmp_path: Path) -> None:
    done = command("index", tmp_path)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (78, 1)
    done = command("search", tmp_path, "query")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (78, 1)


def test_the_main_job_runs_and_reports(sample_run: SampleRun) -> None:
    folder, done = sample_run
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)  # nothing but the result is on stdout
    assert (summary["shards_done"], summary["total_rows_out"], summary["dim"]) == (3, 2400, 384)
    assert all(shard["token_efficiency"] == 1.0 for shard in summary["shards"])
    assert summary["index"]["ntotal"] == 2400
    assert read_output(folder / "out" / "sample").schema.names == ["id", "word", "pos", "text", "embedding"]


def test_a_log_file_is_plain_and_small(sample_run: SampleRun) -> None:
    _, done = sample_run
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    assert len(done.stderr) < 5_000
    assert "shards, 2,400 rows to embed" in done.stderr


def test_search_shows_score_id_columns_and_place(sample_run: SampleRun, command: RunCommand) -> None:
    folder, _ = sample_run
    done = command("search", folder / "out" / "sample", "a small boat", "-k", "3")
    assert done.returncode == 0, done.stderr
    assert re.search(r"0\.\d{4}  wn-\d+ .*part-0000\d:\d+", done.stdout)
    done = command("search", folder / "out" / "sample", "a small boat", "-k", "3", "--columns", "word", "--json")
    hits = json.loads(done.stdout)
    assert [hit["rank"] for hit in hits] == [1, 2, 3]
    assert set(hits[0]) == {"query", "rank", "score", "id", "shard", "row", "word"}
    scores = [hit["score"] for hit in hits]
    assert scores == sorted(scores, reverse=True)


def test_a_finished_job_says_so_quickly(sample_run: SampleRun, command: RunCommand) -> None:
    folder, _ = sample_run
    start = time.monotonic()
    done = command("run", "--job", ROOT / "jobs" / "sample.yaml", cwd=folder)
    assert time.monotonic() - start < 20
    assert done.returncode == 0
    assert "Nothing to do: all 3 shards" in done.stdout
    assert "Index unchanged" in done.stdout


def test_the_index_command_builds_what_was_asked(sample_run: SampleRun, command: RunCommand, tmp_path: Path) -> None:
    shutil.copytree(sample_run[0] / "out" / "sample", tmp_path / "out")
    done = command("index", "out", "--index", "IVF16,Flat", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["factory"], document["ntotal"]) == ("IVF16,Flat", 2400)
    assert document["recall_at_10"]["value"] >= 0.95


def test_the_index_command_takes_the_options_of_the_run(
    sample_run: SampleRun, command: RunCommand, tmp_path: Path
) -> None:
    shutil.copytree(sample_run[0] / "out" / "sample", tmp_path / "out")
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    run["config"].update(index="IVF8,Flat", min_recall=2)
    (tmp_path / "out" / "run.json").write_text(json.dumps(run))
    refused = command("index", "out")
    assert refused.returncode == 78 and "--min-recall" in refused.stderr
    document = json.loads(command("index", "out", "--min-recall", "0.5", "--json").stdout)
    assert document["factory"] == "IVF8,Flat"
    document = json.loads(command("index", "out", "--index", "IVF9,Flat", "--min-recall", "0.5", "--json").stdout)
    assert document["factory"] == "IVF9,Flat"


def test_a_bad_shard_gives_65_and_its_name(command: RunCommand, model_dir: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "in" / "good.parquet", ["one", "two"])
    (tmp_path / "in" / "bad.parquet").write_bytes(b"not parquet")
    done = command("run", "in", "--output", "out", "--model", model_dir, "--id-column", "id", "--index", "none")
    assert done.returncode == 65
    assert "bad.parquet: not a Parquet file" in done.stderr
    assert read_output(tmp_path / "out").num_rows == 2

"""The benchmark: figures computed by hand, files compared row by row, one tiny real run, one-line errors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import bench_report
from pipeline.bench import BenchConfig, check_plot, parse_batch_sizes
from pipeline.bench_files import copy_texts, parity, quotas
from pipeline.bench_process import timed, tree_bytes
from pipeline.bench_report import HOST_ONLY, OURS, Contender, ratios, spread, summary
from pipeline.errors import ConfigError, ModelError, Stopped
from pipeline.shards import Columns, check_shards, find_shards
from pipeline.writer import embedding_type
from tests.conftest import ROOT, SAMPLE_DATA, RunCommand, write_shard

FACTS = {
    # Rows of 2, 2 and 4 tokens, of which a run computes one of the two equal ones.
    "lengths": [2, 2, 4], "computed": [2, 4], "parameters": 100, "layers": 3, "width": 5,
}  # fmt: skip


def three_rounds() -> dict[str, Any]:
    same = {"rows": 3, "max_abs_difference": 1e-7, "min_cosine": 1.0}
    other = {"rows": 3, "max_abs_difference": 3e-7, "min_cosine": 0.999}
    contenders = {
        OURS: Contender([10, 20, 12], [4, 8, 5], [700, 900, None], []),
        HOST_ONLY: Contender([5, 5, 5], [1, 2, 1], [1, 1, 1], []),
        "encode, batch_size 32": Contender([15, 40, 12], [8, 24, 5], [None, None, None], [same, other, same]),
    }
    peaks = [{"flops_per_s": rate, "shape": [8, 5, 5], "kind": "linear"} for rate in (500.0, 1000.0, 800.0)]
    return summary(contenders, FACTS, peaks, [0.8, 1.0, 0.5])


def test_medians_come_with_the_range_of_the_rounds() -> None:
    assert spread([3, 1, 2]) == {"median": 2, "min": 1, "max": 3, "rounds": [3, 1, 2]}
    assert spread([1, 2])["median"] == 1.5


def test_ratios_are_taken_round_by_round() -> None:
    # 15/10, 40/20, 12/12; the ratio of the medians would be 15/12.
    assert ratios([15, 40, 12], [10, 20, 12]) == {"median": 1.5, "min": 1.0, "max": 2.0, "rounds": [1.5, 2.0, 1.0]}


def test_the_summary_is_computed_from_the_rounds() -> None:
    document = three_rounds()
    ours, host, theirs = document["contenders"]
    assert theirs["embed_corpus_is_faster"]["process"]["rounds"] == [1.5, 2.0, 1.0]
    assert theirs["embed_corpus_is_faster"]["work"]["median"] == 2.0  # of 2, 3, 1
    assert ours["tokens_per_s"]["rounds"] == [2.0, 1.0, 1.6]  # 8 tokens of all rows, after loading
    assert theirs["texts_per_s"]["median"] == 3 / 8
    assert document["model_flops"]["computed_once"] == 2400
    assert document["model_flops"]["every_row"] == 2 * 100 * 8 + 4 * 5 * 3 * (4 + 4 + 16)
    assert document["peak"]["flops_per_s"] == 1000  # the best of all rounds is the limit
    assert ours["share_of_peak"]["median"] == 2400 / 5 / 1000
    assert theirs["share_of_peak"]["median"] == 3040 / 8 / 1000
    assert "share_of_peak" not in host and "parity" not in ours
    assert (ours["peak_memory_bytes"], theirs["peak_memory_bytes"]) == (900, None)
    assert document["tokenizer"]["tokens_per_s"]["rounds"] == [10.0, 8.0, 16.0]
    assert document["tokenizer"]["host_only_share"]["rounds"] == [0.8, 0.5, 0.5]
    assert theirs["parity"] == {"rows": 3, "max_abs_difference": 3e-7, "min_cosine": 0.999}  # the worst round's


def whole_document() -> dict[str, Any]:
    given = {"texts": 3, "tokens": 8, "median_length": 2, "longest": 4}
    facts = {"model": "tiny", "dtype": "float32", "machine": "a machine", "threads": 2, "rounds": 3}
    return {**three_rounds(), **facts, "input": given}


def test_the_table_shows_median_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    for part in bench_report.tables(whole_document()):
        Console(width=120, highlight=False, markup=False).print(part, soft_wrap=isinstance(part, str))
    shown = capsys.readouterr().out
    assert "12.0 [10.0–20.0]" in shown
    assert "1.50 [1.00–2.00] ×" in shown and "0.999000" in shown
    assert all(len(line) <= 120 for line in shown.splitlines()[1:-2])


def test_the_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench_report.plot(whole_document(), str(tmp_path / "chart.png"))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_taken_of_each_shard_in_proportion() -> None:
    assert quotas([6, 2], 4) == [3, 1]
    assert quotas([6, 2], None) == [6, 2]
    assert quotas([6, 2], 100) == [6, 2]
    assert sum(quotas([5, 5, 5], 7)) == 7
    assert quotas([0, 0], 3) == [0, 0]


def test_texts_are_copied_in_order_without_nulls(tmp_path: Path) -> None:
    write_shard(tmp_path / "in" / "a.parquet", ["a0", None, "a2", "a3"])
    write_shard(tmp_path / "in" / "b.parquet", ["b0", ""])
    shards = check_shards(find_shards([str(tmp_path / "in")]), Columns("text", None)).shards
    target = str(tmp_path / "out.parquet")
    assert copy_texts(shards, "text", None, target) == 1
    assert pq.read_table(target).to_pydict() == {"id": [0, 1, 2, 3, 4], "text": ["a0", "a2", "a3", "b0", ""]}
    assert copy_texts(shards, "text", 3, target) == 1
    assert pq.read_table(target)["text"].to_pylist() == ["a0", "b0"]


def test_an_input_without_a_text_is_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.parquet", pa.array([None, None], pa.string()))
    shards = check_shards(find_shards([str(shard)]), Columns("text", None)).shards
    with pytest.raises(ConfigError, match=r"a\.parquet: no row of the 2 taken has a text in 'text'"):
        copy_texts(shards, "text", None, str(tmp_path / "out.parquet"))


def write_vectors(path: Path, ids: list[int], vectors: list[list[float]]) -> Path:
    column = pa.FixedSizeListArray.from_arrays(
        pa.array(np.array(vectors, np.float32).reshape(-1)), type=embedding_type(2, "float32")
    )
    pq.write_table(pa.table({"id": ids, "embedding": column}), path)
    return path


def test_outputs_are_compared_row_by_row(tmp_path: Path) -> None:
    ours = write_vectors(tmp_path / "ours.parquet", [0, 2, 1], [[1, 0], [0, 2], [3, 4]])
    same = write_vectors(tmp_path / "same.parquet", [0, 1, 2, 3], [[1, 0], [3, 4], [0, 2], [9, 9]])
    assert parity(ours, same) == {"rows": 3, "max_abs_difference": 0.0, "min_cosine": 1.0}
    # cosine of (3, 4) and (4, 3) is 24/25
    other = write_vectors(tmp_path / "other.parquet", [0, 1, 2], [[1, 0], [4, 3], [0, 2]])
    found = parity(ours, other)
    assert found["max_abs_difference"] == 1.0
    assert found["min_cosine"] == pytest.approx(0.96)


def test_memory_is_that_of_the_whole_process_tree() -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    hold = "import sys, time; block = bytearray(64 << 20); print('{}', flush=True); time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    taken = timed("child", [sys.executable, "-c", parent], dict(os.environ))
    assert taken.answer == {}
    assert taken.peak_bytes is not None and taken.peak_bytes > 64 << 20
    assert taken.wall_s > 0.5
    # At least this process: others of the test run may still have children of their own.
    assert tree_bytes(os.getpid()) >= 0.8 * psutil.Process().memory_info().rss
    assert tree_bytes(2**22 + 1) == 0


@pytest.mark.parametrize(("end", "kind"), [("sys.exit(78)", ConfigError), ("os.kill(os.getpid(), 9)", Stopped)])
def test_a_failed_child_is_one_error_of_its_kind(end: str, kind: type[Exception]) -> None:
    code = f"import os, sys; print('noise\\nembed-corpus: the reason', file=sys.stderr, flush=True); {end}"
    with pytest.raises(kind, match=r"^who: .*the reason"):
        timed("who", [sys.executable, "-c", code], dict(os.environ))


def test_an_interrupt_leaves_no_child_behind() -> None:
    code = (
        "import sys, pipeline.bench_process as b\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "import os, signal; signal.signal(signal.SIGTERM, stop)\n"
        "b.timed('child', [sys.executable, '-c', 'import time; time.sleep(60)'], dict(os.environ))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    while not children:
        time.sleep(0.1)
        children = psutil.Process(process.pid).children()
    process.terminate()
    assert process.wait(timeout=30) != 0
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_batch_sizes_are_numbers_with_commas() -> None:
    assert parse_batch_sizes("32, 8,32") == (32, 8)
    for text in ("", "8,x", "0", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--batch-sizes: found"):
            parse_batch_sizes(text)


def test_an_unknown_competitor_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="--against sentence-transformer: did you mean 'sentence-transformers'"):
        BenchConfig(["x"], "y", against="sentence-transformer")


def test_what_cannot_be_drawn_is_refused_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"chart\.svg: expected a name that ends in \.png"):
        check_plot("chart.svg")
    with pytest.raises(ConfigError, match="is not a folder that can be written to"):
        check_plot(str(tmp_path / "no" / "chart.png"))
    check_plot(str(tmp_path / "chart.png"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib.*pip install 'embed-corpus\[plot\]'"):
        check_plot("chart.png")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "nothing"], "--against nothing: known: sentence-transformers, none"),
        (["--batch-sizes", "many"], "--batch-sizes: found 'many'"),
        (["--plot", "chart.jpg"], "ends in .png"),
        (["--text-column", "body"], "no column 'body'"),
    ],
)
def test_what_is_wrong_is_one_line(command: RunCommand, model_dir: str, arguments: list[str], said: str) -> None:
    done = command("bench", SAMPLE_DATA, "--model", model_dir, *arguments)
    assert (done.returncode, done.stdout, len(done.stderr.strip().splitlines())) == (78, "", 1), done.stderr
    assert said in done.stderr


def test_a_model_that_is_not_there_is_one_line(command: RunCommand) -> None:
    done = command("bench", SAMPLE_DATA, "--model", "/no/such/model")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (ModelError.exit_code, 1)


@pytest.mark.slow
def test_a_tiny_benchmark_measures_and_compares(command: RunCommand, model_dir: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    texts = pq.read_table(SAMPLE_DATA / "part-00000.parquet")["text"].to_pylist()[:11]
    write_shard(tmp_path / "in" / "x.parquet", [*texts, texts[0], None])
    done = command(
        "bench", "in", "--model", model_dir, "--rounds", "1", "--batch-sizes", "32", "--json", "--plot", "chart.png",
        timeout=600, env={"TMPDIR": str(temporary)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # nothing but the result is on stdout
    ours, host, theirs = document["contenders"]
    assert [row["name"] for row in (ours, host, theirs)] == [OURS, HOST_ONLY, "encode, batch_size 32"]
    assert theirs["parity"]["rows"] == 12
    assert theirs["parity"]["max_abs_difference"] <= 1e-5
    assert theirs["parity"]["min_cosine"] >= 0.99999
    for what in ("process", "work"):
        ratio = theirs[f"{what}_s"]["rounds"][0] / ours[f"{what}_s"]["rounds"][0]
        assert theirs["embed_corpus_is_faster"][what]["median"] == pytest.approx(ratio)
    assert host["tokens_per_s"]["median"] > 0
    assert host["work_s"]["median"] < ours["work_s"]["median"]
    assert ours["share_of_peak"]["median"] > 0 and document["peak"]["flops_per_s"] > 1e9
    assert min(ours["peak_memory_bytes"], theirs["peak_memory_bytes"]) > 100 * 2**20
    given = document["input"]
    assert (given["texts"], given["computed_texts"], document["rows_without_text"]) == (12, 11, 1)
    assert given["tokens"] > given["computed_tokens"]  # the text that stands twice is computed once
    # Six layers of four 384 × 384 and two 384 × 1,536 products, their biases and norms, and the embeddings' norm.
    layer = 4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384
    assert document["model_flops"]["parameters"] == 6 * layer + 2 * 384
    assert "round 1: embed-corpus run" in done.stderr
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert list(temporary.iterdir()) == []

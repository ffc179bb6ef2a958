"""How fast is ``embed-corpus run`` on this machine, beside sentence-transformers and the machine's own limits?

Whole processes take turns, one at a time: in each round the matrix products that the model is made of, our run, the
same run without its forward, and sentence-transformers at each batch size. All read the same Parquet file, use the same
device, compute type and number of threads, and write Parquet. Each was run once before, uncounted, on a few rows.

Nothing is left behind but what is remembered of the model and the device (see ``tuning``). This process imports no
torch; what runs in the children is in ``bench_model`` and ``bench_reference``, what is made of the figures in
``bench_report``. Leave the machine alone while it runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.bench_files import copy_texts, parity
from pipeline.bench_process import Timed, timed
from pipeline.bench_report import HOST_ONLY, OURS, Contender, summary
from pipeline.config import nearest
from pipeline.devices import num_gpus, resolve_devices, resolve_dtype
from pipeline.errors import ConfigError, ShardError
from pipeline.flops import cpu_name
from pipeline.model import open_model
from pipeline.pool import child_environment
from pipeline.shards import Columns, check_shards, find_shards
from pipeline.threads import available_cores
from pipeline.tuning import default_batch_tokens

COMPETITORS = ("sentence-transformers", "none")
WARM_UP_ROWS = 32


@dataclass(frozen=True)
class BenchConfig:
    """The options of ``embed-corpus bench``.

    Attributes:
        input: as for a run.
        model: as for a run.
        text_column: as for a run.
        against: ``sentence-transformers`` or ``none``.
        rounds: how often each takes its turn.
        rows: of the input, each shard's first ones in proportion; None for all.
        batch_sizes: of sentence-transformers' ``encode_document``, texts at once.
    """

    input: list[str]
    model: str
    text_column: str = "text"
    against: str = "sentence-transformers"
    rounds: int = 3
    rows: int | None = None
    batch_sizes: tuple[int, ...] = (32, 8, 16, 64)

    def __post_init__(self) -> None:
        if self.against not in COMPETITORS:
            raise ConfigError(f"--against {self.against}: {nearest(self.against, list(COMPETITORS))}")
        if self.rounds < 1 or (self.rows is not None and self.rows < 1):
            raise ConfigError("--rounds and --rows: expected at least 1")


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """``32,8`` as numbers, each once.

    Raises:
        ConfigError: something else.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--batch-sizes: found '{text}'; expected whole numbers from 1 with commas, such as 32,8")
    return tuple(dict.fromkeys(int(part) for part in parts))


def check_plot(file: str) -> None:
    """Refuse before anything is measured what could not be drawn afterwards.

    Raises:
        ConfigError: no matplotlib, no such folder, or another kind of file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'embed-corpus[plot]'")
    if not file.lower().endswith(".png"):
        raise ConfigError(f"--plot {file}: expected a name that ends in .png")
    folder = os.path.dirname(file) or "."
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--plot {file}: {folder} is not a folder that can be written to")


def bench(config: BenchConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and return plain values: ``contenders`` with medians and rounds, ``peak``, ``model_flops``, ``input``.

    Args:
        config: the options.
        progress: is told what comes next, a line at a time.

    Raises:
        ConfigError: an option, the input or the model is wrong.
        ShardError: a shard cannot be read.
        Stopped: a child process was killed.
    """
    model = open_model(config.model)
    device = resolve_devices("auto", num_gpus())[0]
    checked = check_shards(find_shards(config.input), Columns(config.text_column, None))
    if checked.bad:
        raise ShardError(f"{checked.bad[0][0].path}: {checked.bad[0][1]}")
    dtype = resolve_dtype("auto", device, model.checkpoint_dtype)
    with tempfile.TemporaryDirectory(prefix="embed-corpus-bench-") as folder:
        shard = os.path.join(folder, "bench.parquet")
        left_out = copy_texts(checked.shards, config.text_column, config.rows, shard)
        course = _Course(Path(folder), shard, str(model.path), device, dtype, config, progress)
        return {**course.run(), "model": Path(config.model).name or config.model, "rows_without_text": left_out}


@dataclass
class _Course:
    """Who runs, in which order, with what."""

    folder: Path
    shard: str
    model: str
    device: str
    dtype: str
    config: BenchConfig
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self.threads = available_cores()
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        # What a library leaves in its temporary folder goes with ours.
        self.environment = {**child_environment(self.threads), **hidden, "TMPDIR": str(self.folder)}
        self.sizes = self.config.batch_sizes if self.config.against != "none" else ()

    def run(self) -> dict[str, Any]:
        self.progress("reading the model and the lengths of the texts")
        facts = self._ask_model("facts", shard=self.shard, model=self.model, **self._where()).answer
        lengths = facts["lengths"]
        turns = 2 + len(self.sizes)
        self.progress(
            f"{len(lengths):,} texts, {sum(lengths):,} tokens on {self.device}; {turns} processes take turns, "
            f"rounds: {self.config.rounds}; leave the machine alone"
        )
        self._warm_up()
        contenders: dict[str, Contender] = {}
        peaks, tokenize_s = [], []
        for number in range(1, self.config.rounds + 1):
            peaks.append(self._peak(facts["shapes"]))
            tokenize_s.append(self._ask_model("tokenize", shard=self.shard, model=self.model).answer["seconds"])
            counted = self._round(number, contenders)["counts"]["tokens"]
            expected = sum(facts["computed"])
            assert counted == expected, f"{counted} tokens computed, {expected} expected. This is a bug."
        return {
            **summary(contenders, facts, peaks, tokenize_s),
            "input": {
                "texts": len(lengths),
                "tokens": sum(lengths),
                "median_length": statistics.median(lengths),
                "longest": max(lengths),
                "computed_texts": len(facts["computed"]),
                "computed_tokens": sum(facts["computed"]),
            },
            "rounds": self.config.rounds,
            "threads": self.threads,
            "device": self.device,
            "dtype": self.dtype,
            "machine": facts["gpu"] or cpu_name(),
            "versions": {"python": platform.python_version(), **facts["versions"]},
        }

    def _warm_up(self) -> None:
        """Each once on a few rows: files come into the page cache, compiled Python is written."""
        self.progress("warm-up, not counted")
        warm = str(self.folder / "warm.parquet")
        first = next(pq.ParquetFile(self.shard).iter_batches(batch_size=WARM_UP_ROWS))
        pq.write_table(pa.Table.from_batches([first]), warm)
        few = replace(self.config, batch_sizes=self.sizes[:1], rounds=1)
        _Course(self.folder, warm, self.model, self.device, self.dtype, few, lambda line: None)._round(0, {})

    def _round(self, number: int, contenders: dict[str, Contender]) -> dict[str, Any]:
        """Everybody once; returns our report. Our output stays until the others' were compared with it."""
        ours = self.folder / "ours"
        taken = self._ours(str(ours))
        self._count(number, contenders, OURS, taken, "encode_wall_s")
        found = next((ours / "embeddings").glob("*.parquet"))
        without = str(self.folder / "host-only")
        given = {"shard": self.shard, "output": without, "model": self.model, "device": self.device}
        self._count(number, contenders, HOST_ONLY, self._ask_model("host-only", **given), "encode_wall_s")
        shutil.rmtree(without)
        for size in self.sizes:
            name, theirs = f"encode, batch_size {size}", self.folder / "theirs.parquet"
            self._count(number, contenders, name, self._reference(str(theirs), size), "work_s")
            contenders[name].parity.append(parity(found, theirs))
            theirs.unlink()
        shutil.rmtree(ours)
        return taken.answer

    def _count(self, number: int, contenders: dict[str, Contender], name: str, taken: Timed, work: str) -> None:
        self.progress(f"round {number}: {name}: {taken.wall_s:.1f} s, {taken.answer[work]:.1f} s after loading")
        entry = contenders.setdefault(name, Contender())
        entry.process_s.append(taken.wall_s)
        entry.work_s.append(taken.answer[work])
        entry.peak_bytes.append(taken.peak_bytes)

    def _ours(self, output: str) -> Timed:
        files = [self.shard, "--output", output, "--model", self.model]
        options = ["--id-column", "id", "--devices", self.device, "--index", "none", "--json", "--progress", "none"]
        return timed(OURS, [sys.executable, "-m", "cli", "run", *files, *options], self.environment)

    def _reference(self, output: str, batch_size: int) -> Timed:
        script = str(Path(__file__).with_name("bench_reference.py"))
        given = [self.shard, output, self.model, self.device, self.dtype, str(batch_size)]
        # As a file and with -P: it imports nothing of this package, nor what lies beside it.
        return timed("sentence-transformers", [sys.executable, "-P", script, *given], self.environment)

    def _peak(self, shapes: list[list[int]]) -> dict[str, Any]:
        taken = self._ask_model("peak", shapes=shapes, tokens=default_batch_tokens(self.device), **self._where())
        self.progress(f"matrix products: {taken.answer['flops_per_s'] / 1e9:,.0f} GFLOP/s")
        return taken.answer

    def _ask_model(self, what: str, **given: Any) -> Timed:
        command = [sys.executable, "-m", "pipeline.bench_model", what, json.dumps(given)]
        return timed(what, command, self.environment)

    def _where(self) -> dict[str, str]:
        return {"device": self.device, "dtype": self.dtype}

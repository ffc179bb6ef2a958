"""The script that is run on a machine with a GPU, on tiny models here: it must work the first time there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_script_measures_all_it_says(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.measure", "--device", "cpu", "--smoke", "--out", str(out)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(out.with_suffix(".json").read_text())
    assert {row["kind"] for row in document["attention"]} == {"grouped", "padded"}
    assert all(row["ok"] for row in document["attention"])
    found = {(row["texts"], row["what"].split(",")[0]) for row in document["speed"]}
    whats = ("encoder", "sentence-transformers", "Parquet to Parquet")
    assert found == {(texts, what) for texts in ("50", "512", "mixed") for what in whats}
    assert all(speed > 0 for row in document["speed"] for speed in row["speeds"])
    assert "| tiny | mixed | encoder, 1,024 | float32 |" in out.read_text()

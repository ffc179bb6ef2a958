"""The README's lines for other tools, run as they stand there, on the sample job's output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SampleRun

CHECK = """
import pyarrow.parquet as pq

stored = pq.read_table("out/sample/embeddings")
everything = stored["embedding"].combine_chunks().flatten().to_numpy().reshape(2400, 384)
ids = stored["id"].to_pylist()
assert frame["id"].to_list() == table["id"].tolist() == list(corpus["id"]) == ids
for copy in (frame["embedding"].to_numpy(), np.stack(table["embedding"]), vectors):
    assert copy.dtype == np.float32 and np.array_equal(copy, everything)
assert isinstance(vectors, np.memmap) and np.array_equal(np.load("vectors.npy", mmap_mode="r"), everything)
assert np.array_equal(query, everything[0])
assert sorted(nouns["id"]) == sorted(stored.filter(ds.field("pos") == "n")["id"].to_pylist())
assert np.stack(nouns["vector"]).shape == (len(nouns["id"]), 384)
best = [ids[row] for row in np.argsort(-(everything @ query))[:5]]
assert nearest["id"] == best
assert [name for name, _ in in_sql.fetchall()] == best
"""


@pytest.mark.slow
def test_the_lines_for_other_tools_do_what_the_readme_says(sample_run: SampleRun, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    blocks = [block for block in code if "duckdb" in block]
    assert len(blocks) == 1, "one block of the README has the lines for other tools"
    for name in ("duckdb", "pl.", "pd.", "datasets", "add_faiss_index", "memmap"):
        assert name in blocks[0]
    (tmp_path / "out").symlink_to(sample_run[0] / "out")
    done = subprocess.run(
        [sys.executable, "-c", blocks[0] + CHECK], cwd=tmp_path, timeout=300, check=False, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

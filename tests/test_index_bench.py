"""The script that measures the index at size runs, on a small one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import index_bench
from tests.test_indexer import clustered


@pytest.mark.slow
def test_the_index_is_measured_beside_bare_faiss(tmp_path: Path) -> None:
    np.save(tmp_path / "base.npy", clustered(300, dim=32))
    arguments = ["--vectors", "4000", "--shards", "3", "--rounds", "1", "--factory", "IVF16,Flat"]
    arguments += ["--vectors-file", str(tmp_path / "base.npy"), "--out", str(tmp_path / "result.json")]
    index_bench.main([*arguments, "--scratch", str(tmp_path)])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ratio"]["build"] > result["ratio"]["measured"] > 0
    assert result["recall_at_10"]["value"] >= 0.95
    assert result["update"]["added_rows"] == 40
    assert 0 < result["peak_bytes"] < 1.1 * result["predicted_bytes"]
    assert result["index_bytes"] == pytest.approx(result["predicted_index_bytes"], rel=0.05)

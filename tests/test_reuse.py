"""A changed shard: texts it had before keep their vector, the rest is computed, and damage only costs time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.config import build_config
from pipeline.ledger import Ledger
from pipeline.records import Tokens
from pipeline.reuse import hash_table, token_hashes
from pipeline.run import run
from tests.conftest import STAND_IN, read_output, vectors_of, write_shard
from tests.stand_in import vector_of

TEXTS = [f"text number {n}" for n in range(300)]


def embed(tmp_path: Path, model: str, **options: Any) -> dict[str, Any]:
    """Embed the one shard; returns its counts."""
    given = {"input": str(tmp_path / "in"), "output": str(tmp_path / "out"), "model": model, "id_column": "id"}
    report = run(build_config(None, {**given, "index": "none", **options}), stand_in=STAND_IN)
    counts: dict[str, Any] = report.shards[0]["counts"]
    return counts


def check(tmp_path: Path, texts: list[str]) -> None:
    np.testing.assert_allclose(vectors_of(read_output(tmp_path / "out")), [vector_of(t) for t in texts], atol=1e-6)


def test_only_new_texts_are_computed(tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in" / "x.parquet"
    write_shard(path, TEXTS)
    assert embed(tmp_path, model_dir)["reused"] == 0
    changed = ["brand new", *TEXTS[50:], TEXTS[3], "x"]
    write_shard(path, changed)
    counts = embed(tmp_path, model_dir)
    assert (counts["reused"], counts["texts"]) == (251, 253)
    assert counts["tokens"] == len("brand new") + 1
    check(tmp_path, changed)
    write_shard(path, changed[::-1])
    assert embed(tmp_path, model_dir)["reused"] == 253
    check(tmp_path, changed[::-1])


@pytest.mark.parametrize("damage", ["hashes", "record", "embeddings"])
def test_what_is_damaged_is_computed_again(tmp_path: Path, model_dir: str, damage: str) -> None:
    path = tmp_path / "in" / "x.parquet"
    write_shard(path, TEXTS)
    embed(tmp_path, model_dir)
    if damage == "hashes":
        (tmp_path / "out" / "reuse" / "x.parquet").write_bytes(b"PAR1 no more")
    elif damage == "record":
        record = tmp_path / "out" / "commits" / "x.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "reuse": None}))
    else:
        target = tmp_path / "out" / "embeddings" / "x.parquet"
        raw = bytearray(target.read_bytes())
        raw[len(raw) // 2] ^= 0xFF  # the size stays, the page checksum does not
        target.write_bytes(raw)
    write_shard(path, TEXTS[1:])
    assert embed(tmp_path, model_dir)["reused"] == 0
    check(tmp_path, TEXTS[1:])


def test_a_shard_of_another_output_is_never_asked(tmp_path: Path, model_dir: str) -> None:
    write_shard(tmp_path / "in" / "x.parquet", TEXTS)
    embed(tmp_path, model_dir)
    write_shard(tmp_path / "in" / "y.parquet", TEXTS)
    assert embed(tmp_path, model_dir)["reused"] == 0


def test_hashes_lie_beside_the_embeddings_row_by_row(tmp_path: Path, model_dir: str) -> None:
    write_shard(tmp_path / "in" / "x.parquet", ["ab", None, "cd", "ab"])
    embed(tmp_path, model_dir)
    record = Ledger(str(tmp_path / "out")).commits()[0]
    values = pq.read_table(tmp_path / "out" / record["reuse"]["path"])["tokens_hash"].to_pylist()
    assert len(values) == 3
    assert values[0] == values[2] != values[1]


def test_a_hash_depends_on_the_tokens_alone() -> None:
    def of(*texts: list[int]) -> np.ndarray:
        lengths = np.array([len(text) for text in texts], np.int32)
        return token_hashes(Tokens(np.array([t for text in texts for t in text], np.int32), lengths))

    several = of([1, 2], [1, 2, 3], [], [1, 2])
    assert (several[0] == several[3]).all()
    assert (several[0] == of([1, 2])[0]).all()
    assert len({tuple(row) for row in several}) == 3
    assert hash_table(several).num_rows == 4

"""The promise, on the sample job with the real model: every row is sentence-transformers' own vector, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import embed_corpus
from tests.conftest import SAMPLE_DATA, SampleRun, read_output, vectors_of, write_shard


def test_every_row_of_the_sample_equals_encode_document(sample_run: SampleRun, model_dir: str) -> None:
    from sentence_transformers import SentenceTransformer

    folder, _ = sample_run
    rows = pa.concat_tables([pq.read_table(path) for path in sorted(SAMPLE_DATA.glob("*.parquet"))])
    output = read_output(folder / "out" / "sample")
    assert output["id"].to_pylist() == rows["id"].to_pylist()
    ours = vectors_of(output)
    reference = SentenceTransformer(model_dir, device="cpu").encode_document(rows["text"].to_pylist())
    assert np.abs(ours - reference).max() <= 1e-5
    cosines = (ours * reference).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(reference, axis=1)
    assert cosines.min() >= 0.99999


def test_a_vector_does_not_depend_on_budget_or_neighbours(tmp_path: Path, model_dir: str) -> None:
    texts = pq.read_table(SAMPLE_DATA / "part-00000.parquet")["text"].to_pylist()[:60]
    write_shard(tmp_path / "all" / "x.parquet", texts)
    for number in range(4):  # other neighbours: each fourth text
        ids = [f"x-{n}" for n in range(number, 60, 4)]
        write_shard(tmp_path / "parts" / f"{number}.parquet", texts[number::4], ids)
    outputs = []
    for name, source, budget in (("a", "all", 128), ("b", "all", 8192), ("c", "parts", 1024)):
        embed_corpus(
            tmp_path / source, tmp_path / name, model=model_dir, id_column="id", index="none",
            max_batch_tokens=budget, progress="none",
        )  # fmt: skip
        table = read_output(tmp_path / name)
        order = {key: row for row, key in enumerate(table["id"].to_pylist())}
        outputs.append(vectors_of(table)[[order[f"x-{n}"] for n in range(60)]])
    for other in outputs[1:]:
        assert np.abs(other - outputs[0]).max() <= 1e-5

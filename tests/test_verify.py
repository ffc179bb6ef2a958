"""A finished output is proven; whatever is tampered with is named: one test a fault, and its text asserted."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline import verify as verify_module
from pipeline.config import build_config
from pipeline.errors import ConfigError, ModelError, Stopped
from pipeline.ledger import Ledger, fingerprint
from pipeline.model import ModelFolder
from pipeline.reference import Request, compare, reference_vectors
from pipeline.reference import embed as embed_reference
from pipeline.run import run
from pipeline.storage import Output
from pipeline.verify import draw, verify
from tests.conftest import ROOT, STAND_IN, RunCommand, SampleRun, vectors_of
from tests.s3_server import serving

ROWS = 60
NULL_ROW, EMPTY_ROW = 7, 11
Folder = Path
Change = Callable[[pa.Table], pa.Table]


def make_input(folder: Path) -> None:
    """Three shards; row 7 of each has no text and row 11 an empty one, which has no token."""
    rng = random.Random(5)
    folder.mkdir(parents=True)
    for number in range(3):
        texts: list[str | None] = ["".join(rng.choices("abcdefg h", k=rng.randrange(1, 70))) for _ in range(ROWS)]
        texts[NULL_ROW], texts[EMPTY_ROW] = None, ""
        ids = [f"{number}-{row}" for row in range(ROWS)]
        scores = [float("nan") if row == 3 else row / 7 for row in range(ROWS)]
        pq.write_table(pa.table({"id": ids, "text": texts, "score": scores}), folder / f"part-{number}.parquet")


def embed(folder: Path, model: str, **options: Any) -> Any:
    given = {
        "input": str(folder / "in"), "output": str(folder / "out"), "model": model, "id_column": "id",
        "columns": ["score"], "index": "none", **options,
    }  # fmt: skip
    return run(build_config(None, given), stand_in=STAND_IN)


def prepared(folder: Path, model: str, **options: Any) -> Path:
    make_input(folder / "in")
    assert embed(folder, model, **options).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Folder:
    return prepared(tmp_path_factory.mktemp("plain"), model_dir)


@pytest.fixture(scope="module")
def indexed_run(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Folder:
    return prepared(tmp_path_factory.mktemp("indexed"), model_dir, index="auto")


@pytest.fixture(scope="module")
def chunked_run(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Folder:
    return prepared(tmp_path_factory.mktemp("chunked"), model_dir, long_texts="chunk")


def copied(source: Folder, target: Path) -> Folder:
    """The input and its output elsewhere, as run.json has it."""
    shutil.copytree(source, target)
    edit(target / "out" / "run.json", lambda run: run["config"].update(input=[str(target / "in")]))
    return target


@pytest.fixture
def plain(plain_run: Folder, tmp_path: Path) -> Folder:
    return copied(plain_run, tmp_path / "copy")


@pytest.fixture
def indexed(indexed_run: Folder, tmp_path: Path) -> Folder:
    return copied(indexed_run, tmp_path / "copy")


@pytest.fixture
def chunked(chunked_run: Folder, tmp_path: Path) -> Folder:
    return copied(chunked_run, tmp_path / "copy")


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rewrite(folder: Folder, change: Change, part: str = "output", key: str = "part-1") -> None:
    """Another content of a file, with a record that agrees with it: what no checksum can find."""
    out = folder / "out"
    path = out / ("embeddings" if part == "output" else part) / f"{key}.parquet"
    table = change(pq.read_table(path))
    pq.write_table(table, path)

    def agree(record: dict[str, Any]) -> None:
        record[part].update(bytes=path.stat().st_size, sha256=digest(path), rows=table.num_rows)

    edit(out / "commits" / f"{key}.json", agree)


def with_vectors(change: Callable[[Any], Any]) -> Change:
    def changed(table: pa.Table) -> pa.Table:
        vectors = change(vectors_of(table).copy())
        field = table.schema.field("embedding")
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=field.type)
        return table.set_column(table.schema.get_field_index("embedding"), field, column)

    return changed


def order(rows: list[int]) -> Change:
    return lambda table: table.take(rows)


def faults(folder: Folder) -> list[str]:
    certificate = verify(str(folder / "out"))
    assert certificate["ok"] == (not certificate["faults"])
    assert json.loads((folder / "out" / "certificate.json").read_text()) == certificate
    found: list[str] = certificate["faults"]
    return found


def fault(folder: Folder) -> str:
    """The only one."""
    found = faults(folder)
    assert len(found) == 1, found
    return found[0]


# -- what is whole --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["plain_run", "indexed_run", "chunked_run"])
def test_a_finished_output_is_proven_and_counted(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    certificate = verify(str(folder / "out"))
    assert certificate["faults"] == []
    assert certificate["ok"] is True
    rows = sum(record["output"]["rows"] for record in Ledger(str(folder / "out")).commits())
    checked = certificate["checked"]
    assert (checked["shards"], checked["rows"], checked["vectors"], checked["quarantined"]) == (3, 180, rows, 6)
    assert (rows > 174) == (which == "chunked_run")
    assert certificate["parity"] == {"skipped": "stand-in encoder"}
    assert certificate["made_with"]["device"] == ["cpu"]
    assert json.loads((folder / "out" / "certificate.json").read_text()) == certificate


def test_ids_made_from_shard_and_row_are_proven(tmp_path: Path, model_dir: str) -> None:
    folder = prepared(tmp_path, model_dir, id_column=None, columns=[])
    assert faults(folder) == []
    rewrite(folder, order([1, 0, *range(2, 58)]))
    assert "id part-1:1 at output row 0, expected part-1:0 as in row 0" in fault(folder)


def test_small_pieces_and_windows_give_the_same_verdict(indexed: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reader.WINDOW_ROWS", 16)
    monkeypatch.setattr("pipeline.reader.MAX_ROWS_AT_ONCE", 16)
    monkeypatch.setattr("pipeline.accounting.PIECE_FLOATS", 5 * 8)
    assert faults(indexed) == []
    rewrite(indexed, order([*range(40), 41, 40, *range(42, 58)]), key="part-0")
    found = faults(indexed)
    assert any("id 0-43 at output row 40, expected 0-42 as in row 42" in one for one in found), found


def test_a_shard_without_any_vector_is_proven(tmp_path: Path, model_dir: str) -> None:
    make_input(tmp_path / "in")
    pq.write_table(pa.table({"id": ["x"], "text": pa.nulls(1), "score": [1.0]}), tmp_path / "in" / "part-1.parquet")
    embed(tmp_path, model_dir)
    assert faults(tmp_path) == []


def test_half_precision_storage_is_proven_within_its_rounding(tmp_path: Path, model_dir: str) -> None:
    folder = prepared(tmp_path, model_dir, embedding_dtype="float16")
    assert faults(folder) == []


def test_a_folder_without_a_run_is_a_wrong_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run.json here"):
        verify(str(tmp_path))


def test_a_run_of_another_version_is_refused(plain: Folder) -> None:
    edit(plain / "out" / "run.json", lambda run: run.update(version=0))
    with pytest.raises(ConfigError, match="version 0, expected 1"):
        verify(str(plain / "out"))


def test_an_output_at_work_is_not_verified(plain: Folder) -> None:
    with Output(plain / "out").lock(), pytest.raises(Stopped, match="holds its lock"):
        verify(str(plain / "out"))


def test_neither_torch_nor_faiss_is_imported() -> None:
    heavy = ("torch", "faiss", "transformers", "sentence_transformers")
    code = f"import sys, pipeline.verify; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


# -- shards and records ---------------------------------------------------------------------------------------------


def test_a_missing_commit_is_named_and_so_are_its_files(plain: Folder) -> None:
    (plain / "out" / "commits" / "part-1.json").unlink()
    found = faults(plain)
    assert "in/part-1.parquet: found no commit record of it, expected commits/part-1.json; run" in found[0]
    assert found[1].startswith("embeddings/part-1.parquet: found a file that no commit record names")
    assert found[2].startswith("quarantine/part-1.parquet: found a file that no commit record names")


def test_a_record_that_cannot_be_read_is_named(plain: Folder) -> None:
    (plain / "out" / "commits" / "part-1.json").write_text("{")
    assert fault(plain).startswith("commits/part-1.json: found no record that can be read")


@pytest.mark.parametrize("part", ["output", "shard", "counts", "fingerprint"])
def test_a_record_that_lacks_a_part_is_named(plain: Folder, part: str) -> None:
    edit(plain / "out" / "commits" / "part-1.json", lambda record: record.pop(part))
    assert any("commits/part-1.json: found no record that can be read" in one for one in faults(plain))


def test_a_removed_input_is_named_and_its_vectors_are_still_checked(plain: Folder) -> None:
    (plain / "in" / "part-1.parquet").unlink()
    assert "commits/part-1.json: found a record of a removed input" in fault(plain)
    assert "--prune" in fault(plain)
    rewrite(plain, with_vectors(lambda vectors: vectors * 2))
    assert any("a vector of length 2.000000 at output row 0" in one for one in faults(plain))


def test_a_removed_input_folder_is_named(plain: Folder) -> None:
    shutil.rmtree(plain / "in")
    found = faults(plain)
    assert "copy/in: does not exist" in found[0]
    assert len([one for one in found if "a record of a removed input" in one]) == 3


def test_a_changed_input_is_named(plain: Folder) -> None:
    os.utime(plain / "in" / "part-1.parquet", ns=(0, 0))
    assert "in/part-1.parquet: found an input that changed since, expected its size and time" in fault(plain)


def test_an_input_changed_in_place_with_its_old_size_and_time_is_found_by_its_rows(plain: Folder) -> None:
    path = plain / "in" / "part-1.parquet"
    before = path.stat()
    pq.write_table(pq.read_table(path).take([1, 0, *range(2, ROWS)]), path)

    def same_time(record: dict[str, Any]) -> None:
        record["shard"]["size_bytes"] = path.stat().st_size

    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    edit(plain / "out" / "commits" / "part-1.json", same_time)
    assert "embeddings/part-1.parquet: found id 1-0 at output row 0, expected 1-1 as in row 0 of" in fault(plain)


def test_an_input_that_cannot_be_read_is_named(plain: Folder) -> None:
    (plain / "in" / "part-9.parquet").write_bytes(b"not parquet")
    assert "part-9.parquet: not a Parquet file" in fault(plain)


def test_a_foreign_fingerprint_is_named(plain: Folder) -> None:
    edit(plain / "out" / "commits" / "part-1.json", lambda record: record.update(fingerprint="other"))
    assert "commits/part-1.json: found fingerprint other, expected" in fault(plain)


def test_a_fingerprint_that_is_not_of_its_fields_is_named(plain: Folder) -> None:
    edit(plain / "out" / "run.json", lambda run: run["fields"].update(prompt="other: "))
    assert "expected the hash of its fields" in fault(plain)


def test_another_model_is_named(plain: Folder, model_dir: str, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "data_config.json"))
    (tmp_path / "model" / "model.safetensors").symlink_to(Path(model_dir) / "model.safetensors")
    edit(plain / "out" / "run.json", lambda run: run["model"].update(path=str(tmp_path / "model")))
    assert faults(plain) == []
    config = tmp_path / "model" / "1_Pooling" / "config.json"
    config.write_text(config.read_text() + " ")
    assert "found other model-modules, expected the model the vectors were made with" in fault(plain)
    shutil.rmtree(tmp_path / "model")
    assert "no such folder" in fault(plain)


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_found_by_checksum_and_by_page(plain: Folder) -> None:
    path = plain / "out" / "embeddings" / "part-1.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    path.write_bytes(raw)
    found = faults(plain)
    assert found[0].startswith("embeddings/part-1.parquet: found sha256")
    edit(plain / "out" / "commits" / "part-1.json", lambda record: record["output"].update(sha256=digest(path)))
    assert "embeddings/part-1.parquet: found damage" in fault(plain)


@pytest.mark.parametrize("name", ["embeddings/part-1.parquet", "quarantine/part-1.parquet"])
@pytest.mark.parametrize("damage", ["cut", "delete"])
def test_a_cut_or_missing_file_is_named(plain: Folder, name: str, damage: str) -> None:
    path = plain / "out" / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        path.unlink()
    found = "no file" if damage == "delete" else f"{path.stat().st_size} bytes"
    assert f"{name}: found {found}, expected" in fault(plain)


def test_a_file_that_no_record_names_is_found(plain: Folder) -> None:
    shutil.copy(plain / "out" / "embeddings" / "part-1.parquet", plain / "out" / "embeddings" / "more.parquet")
    assert "embeddings/more.parquet: found a file that no commit record names" in fault(plain)


def test_another_column_or_type_is_named(plain: Folder) -> None:
    rewrite(plain, lambda table: table.drop_columns("score"))
    assert "embeddings/part-1.parquet: found columns id: string" in fault(plain)


def test_counts_of_the_record_that_are_not_the_files_are_named(plain: Folder) -> None:
    edit(plain / "out" / "commits" / "part-1.json", lambda record: record["counts"].update(rows_out=57))
    assert "found 60 rows, 58 vectors and quarantined" in fault(plain)
    assert "expected 60, 57 and" in fault(plain)


def test_another_number_of_rows_than_committed_is_named(plain: Folder) -> None:
    edit(plain / "out" / "commits" / "part-1.json", lambda record: record["output"].update(rows=57))
    assert "embeddings/part-1.parquet: found 58 rows, expected 57 as committed" in fault(plain)


# -- rows -----------------------------------------------------------------------------------------------------------


def test_swapped_rows_are_found_at_the_first_one(plain: Folder) -> None:
    rewrite(plain, order([*range(20), 21, 20, *range(22, 58)]))
    assert "found id 1-23 at output row 20, expected 1-22 as in row 22 of" in fault(plain)


def test_a_carried_value_that_is_not_the_inputs_is_found(plain: Folder) -> None:
    def changed(table: pa.Table) -> pa.Table:
        scores = [1.5 if at == 9 else score for at, score in enumerate(table["score"].to_pylist())]
        return table.set_column(1, "score", pa.array(scores))

    rewrite(plain, changed)
    assert "found score 1.5 at output row 9, expected 1.4285714285714286 as in row 10 of" in fault(plain)


def test_a_lost_output_row_is_found(plain: Folder) -> None:
    rewrite(plain, order([*range(20), *range(21, 58)]))
    found = faults(plain)
    assert "found 57 vectors and 2 quarantined rows, expected the 60 rows of the input" in found[0]
    assert any("found id 1-23 at output row 20, expected 1-22" in one for one in found)


def test_a_doubled_output_row_is_found(plain: Folder) -> None:
    rewrite(plain, order([*range(20), 19, *range(20, 58)]))
    assert any("found 59 vectors and 2 quarantined rows" in one for one in faults(plain))


def test_a_lost_quarantine_row_is_found(plain: Folder) -> None:
    rewrite(plain, order([1]), part="quarantine")
    found = faults(plain)
    assert "found 58 vectors and 1 quarantined rows, expected the 60 rows of the input" in found[0]
    assert any("found id 1-8 at output row 7, expected 1-7 as in row 7" in one for one in found)


def test_a_quarantine_row_of_another_id_is_found(plain: Folder) -> None:
    rewrite(plain, lambda table: table.set_column(0, "id", pa.array(["1-7", "1-9"])), part="quarantine")
    assert "quarantine/part-1.parquet: found id 1-9 for row 11, expected 1-11 as in the input" in fault(plain)


def test_a_quarantine_out_of_order_is_found(plain: Folder) -> None:
    rewrite(plain, order([1, 0]), part="quarantine")
    assert "quarantine/part-1.parquet: found rows that repeat or go back" in fault(plain)


def test_a_text_in_the_quarantine_as_null_is_found(plain: Folder) -> None:
    def changed(table: pa.Table) -> pa.Table:
        return table.set_column(2, "reason", pa.array(["null text", "null text"]))

    rewrite(plain, changed, part="quarantine")
    found = faults(plain)
    assert any("found row 11 with reason 'null text', expected its vector" in one for one in found)
    assert any("as in its commit record" in one for one in found)


def test_a_vector_of_a_row_without_text_is_found(plain: Folder) -> None:
    """The quarantine names its neighbour instead, and all ids and counts agree."""

    def moved(table: pa.Table) -> pa.Table:
        return table.set_column(1, "row", pa.array([8, 11])).set_column(0, "id", pa.array(["1-8", "1-11"]))

    def renamed(table: pa.Table) -> pa.Table:
        ids = ["1-7" if key == "1-8" else key for key in table["id"].to_pylist()]
        scores = [1.0 if key == "1-7" else score for key, score in zip(ids, table["score"].to_pylist(), strict=True)]
        return table.set_column(0, "id", pa.array(ids)).set_column(1, "score", pa.array(scores))

    rewrite(plain, moved, part="quarantine")
    rewrite(plain, renamed)
    found = faults(plain)
    assert any("found a vector at output row 7, expected none, row 7 has no text" in one for one in found)
    assert any("found row 8 with reason 'null text', expected its vector" in one for one in found)


# -- vectors --------------------------------------------------------------------------------------------------------


def test_a_vector_that_is_not_finite_is_found(plain: Folder) -> None:
    def broken(vectors: Any) -> Any:
        vectors[30, 2] = np.nan
        return vectors

    rewrite(plain, with_vectors(broken))
    assert "embeddings/part-1.parquet: found a vector that is not finite at output row 30" in fault(plain)


def test_a_vector_that_is_not_of_unit_length_is_found(plain: Folder) -> None:
    def longer(vectors: Any) -> Any:
        vectors[30] *= 1.0001
        return vectors

    rewrite(plain, with_vectors(longer))
    assert "found a vector of length 1.000100 at output row 30, expected length 1" in fault(plain)


def test_a_run_that_does_not_normalise_may_have_any_length(plain: Folder) -> None:
    rewrite(plain, with_vectors(lambda vectors: vectors * 2))
    assert "a vector of length 2.000000" in fault(plain)

    def without(run: dict[str, Any]) -> None:
        run["fields"]["normalize"] = run["config"]["normalize"] = False
        run["fingerprint"] = fingerprint(run["fields"])

    edit(plain / "out" / "run.json", without)
    mark = json.loads((plain / "out" / "run.json").read_text())["fingerprint"]
    for path in (plain / "out" / "commits").glob("*.json"):
        edit(path, lambda record: record.update(fingerprint=mark))
    assert faults(plain) == []


@pytest.mark.parametrize(
    ("fields", "truncate_dim", "modules", "expected"),
    [
        ({"normalize": None, "dimensions": None}, None, ["Transformer", "Pooling", "Normalize"], True),
        ({"normalize": None, "dimensions": None}, 8, ["Transformer", "Pooling", "Normalize"], False),
        ({"normalize": None, "dimensions": 4}, 8, ["Transformer", "Pooling", "Normalize"], True),
        ({"normalize": None, "dimensions": None}, None, ["Transformer", "Pooling"], False),
        ({"normalize": None, "dimensions": None}, None, ["Transformer", "Pooling", "Normalize", "Dense"], False),
        ({"normalize": True, "dimensions": None}, None, ["Transformer", "Pooling"], True),
        ({"normalize": False, "dimensions": 4}, None, ["Transformer", "Pooling", "Normalize"], False),
    ],
)
def test_unit_length_is_expected_where_the_run_normalises_last(
    tmp_path: Path, fields: dict[str, Any], truncate_dim: int | None, modules: list[str], expected: bool
) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": truncate_dim}))
    chain = tuple((f"sentence_transformers.models.{name}", "") for name in modules)
    assert verify_module.is_normalized(ModelFolder("m", tmp_path, chain), fields) is expected


# -- chunks ---------------------------------------------------------------------------------------------------------


def chunk_column(name: str, change: Callable[[list[int]], Any]) -> Change:
    def changed(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        change(values)
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, pa.array(values, table.schema.field(at).type))

    return changed


def second_chunk(folder: Folder) -> int:
    """Output row of the first chunk that is not its row's first."""
    return int(pq.read_table(folder / "out" / "embeddings" / "part-1.parquet")["chunk"].to_pylist().index(1))


def test_a_lost_chunk_is_found(chunked: Folder) -> None:
    at = second_chunk(chunked)
    rewrite(chunked, lambda table: table.take([row for row in range(table.num_rows) if row != at - 1]))
    found = faults(chunked)
    assert any("found chunk 1 of row" in one and "expected chunk 0" in one for one in found)
    assert any("a chunk of row" in one and "expected chunks that cover the text" in one for one in found)


def test_a_row_without_any_chunk_is_found(chunked: Folder) -> None:
    rewrite(chunked, lambda table: table.filter(pc.not_equal(table["row"], 12)))
    assert any("found neither a vector nor a quarantine line for row 12" in one for one in faults(chunked))


def test_spaces_may_lie_between_chunks(tmp_path: Path, model_dir: str) -> None:
    """A tokenizer that drops spaces makes no chunk of them; a letter must not be dropped."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": ["x"], "text": [" a" * 40], "score": [1.0]}), tmp_path / "in" / "part-1.parquet")
    embed(tmp_path, model_dir, long_texts="chunk", chunk_overlap=0)
    assert faults(tmp_path) == []
    rewrite(tmp_path, chunk_column("start", lambda starts: starts.__setitem__(1, 33)))
    assert faults(tmp_path) == []
    rewrite(tmp_path, chunk_column("start", lambda starts: starts.__setitem__(1, 34)))
    assert "found a chunk of row 0 from 34 to 64 after 32 of 80, expected chunks that cover the text" in fault(tmp_path)


def test_a_lost_end_of_a_text_is_found(chunked: Folder) -> None:
    at = second_chunk(chunked)
    rewrite(chunked, lambda table: table.take([row for row in range(table.num_rows) if row != at]))
    assert any("expected chunks that cover the text" in one for one in faults(chunked))


def test_a_gap_between_chunks_is_found(chunked: Folder) -> None:
    at = second_chunk(chunked)
    rewrite(chunked, chunk_column("start", lambda starts: starts.__setitem__(at, starts[at] + 40)))
    assert "expected chunks that cover the text" in fault(chunked)


def test_input_rows_of_chunks_that_go_back_are_found(chunked: Folder) -> None:
    rewrite(chunked, lambda table: table.take(list(range(table.num_rows))[::-1]))
    assert any("found input rows that go back" in one for one in faults(chunked))


# -- the index ------------------------------------------------------------------------------------------------------


def index_document(folder: Folder) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "out" / "index" / "index.json").read_text())
    return document


def test_an_index_that_should_be_there_is_missed(indexed: Folder) -> None:
    shutil.rmtree(indexed / "out" / "index")
    assert "index/index.json: found no index, expected one of the committed vectors" in fault(indexed)


def test_an_index_document_that_is_cut_is_named(indexed: Folder) -> None:
    (indexed / "out" / "index" / "index.json").write_text("{")
    assert "index/index.json: found no document that can be read" in fault(indexed)


def test_an_index_of_fewer_rows_is_stale(indexed: Folder) -> None:
    def fewer(index: dict[str, Any]) -> None:
        index["ntotal"] -= index["shards"].pop()["rows"]

    edit(indexed / "out" / "index" / "index.json", fewer)
    text = "found a stale index of 116 vectors in 2 shards, expected the 174 vectors of the 3 committed shards"
    assert text in fault(indexed)


def test_an_index_of_other_vectors_is_stale(indexed: Folder) -> None:
    rewrite(indexed, with_vectors(lambda vectors: vectors * -1))
    assert "found a stale index of 174 vectors in 3 shards" in fault(indexed)


def test_an_index_of_another_fingerprint_is_stale(indexed: Folder) -> None:
    edit(indexed / "out" / "index" / "index.json", lambda index: index.update(fingerprint="other"))
    assert "found a stale index" in fault(indexed)


@pytest.mark.parametrize("what", ["index", "ids"])
def test_a_damaged_index_file_is_named(indexed: Folder, what: str) -> None:
    name = index_document(indexed)[f"{what}_file"]
    path = indexed / "out" / "index" / name
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 0xFF
    path.write_bytes(raw)
    assert faults(indexed)[0].startswith(f"index/{name}: found sha256")
    path.unlink()
    assert f"index/{name}: found no file" in fault(indexed)


def test_an_index_file_that_holds_fewer_vectors_is_named(indexed: Folder) -> None:
    name = index_document(indexed)["index_file"]
    path = indexed / "out" / "index" / name
    raw = bytearray(path.read_bytes())
    raw[8:16] = (100).to_bytes(8, "little")
    path.write_bytes(raw)
    edit(indexed / "out" / "index" / "index.json", lambda index: index["sha256"].update(index=digest(path)))
    assert f"index/{name}: found 100 vectors, expected the 174 committed ones" in fault(indexed)


def swapped_ids(table: pa.Table) -> pa.Table:
    return table.set_column(1, table.schema.field(1), table["id"].take(pa.array([1, 0, *range(2, table.num_rows)])))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (swapped_ids, "found id 0-1 in line 0, expected id 0-0, output row 0 of part-0"),
        (lambda table: table.slice(0, 100), "found no more lines in line 100, expected faiss_id"),
        (chunk_column("row", lambda rows: rows.__setitem__(70, 13)), "found row 13 in line 70, expected row 14"),
        (chunk_column("faiss_id", lambda ids: ids.__setitem__(70, 5)), "found faiss_id 5 in line 70, expected"),
    ],
    ids=["id", "cut", "row", "faiss_id"],
)
def test_an_ids_file_that_names_other_rows_is_found(indexed: Folder, change: Change, text: str) -> None:
    name = index_document(indexed)["ids_file"]
    path = indexed / "out" / "index" / name
    pq.write_table(change(pq.read_table(path)), path)
    edit(indexed / "out" / "index" / "index.json", lambda index: index["sha256"].update(ids=digest(path)))
    found = faults(indexed)
    assert any(one.startswith(f"index/{name}") and text in one for one in found), found


# -- an object store ------------------------------------------------------------------------------------------------


def test_an_output_on_an_object_store_is_proven_and_a_flipped_byte_found(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import fsspec

    make_input(tmp_path / "in")
    with serving() as server:
        settings = {
            "ENDPOINT_URL": server.url,
            "ACCESS_KEY_ID": "x",
            "SECRET_ACCESS_KEY": "x",
            "DEFAULT_REGION": "us-east-1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        # fsspec keeps file systems, and one of another test may know another server.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        request.addfinalizer(fsspec.get_filesystem_class("s3").clear_instance_cache)
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.mkdir("verified")
        embed(tmp_path, model_dir, output="s3://verified/out", index="auto")
        certificate = verify("s3://verified/out")
        assert certificate["faults"] == []
        assert certificate["checked"]["vectors"] == 174
        store.invalidate_cache()
        assert json.loads(store.cat_file("verified/out/certificate.json")) == certificate
        raw = bytearray(store.cat_file("verified/out/embeddings/part-1.parquet"))
        raw[len(raw) // 3] ^= 0xFF
        store.pipe_file("verified/out/embeddings/part-1.parquet", bytes(raw))
        store.rm_file("verified/out/commits/part-0.json")
        found = verify("s3://verified/out")["faults"]
        assert "in/part-0.parquet: found no commit record of it" in found[0]
        assert any(one.startswith("embeddings/part-1.parquet: found sha256") for one in found)
        assert any("found a stale index of 174 vectors in 3 shards" in one for one in found)


# -- parity ---------------------------------------------------------------------------------------------------------


def test_the_sample_is_seeded_and_spread() -> None:
    positions = draw(100_000, 256)
    np.testing.assert_array_equal(positions, draw(100_000, 256))
    assert len(np.unique(positions)) == 256
    assert (np.diff(positions) > 0).all()
    assert (np.bincount(positions // 10_000, minlength=10) > 5).all()
    np.testing.assert_array_equal(draw(5, 256), np.arange(5))


def test_vectors_are_compared_row_by_row() -> None:
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((40, 8)).astype(np.float32)
    same = compare(vectors, vectors)
    np.testing.assert_allclose(same.cosines, 1.0)
    assert same.differences.max() == 0
    assert same.rank_overlap == 1.0
    other = compare(vectors, np.roll(vectors, 1, axis=0))
    assert other.cosines.max() < 0.99
    assert compare(vectors, rng.standard_normal((40, 8)).astype(np.float32)).rank_overlap < 0.7
    assert compare(vectors[:1], vectors[:1]).rank_overlap is None
    zero = np.zeros((1, 8), np.float32)
    assert compare(zero, zero).cosines[0] == 1.0
    assert compare(zero, vectors[:1]).cosines[0] == 0.0


def test_equal_scores_may_stand_in_any_order() -> None:
    vectors = np.zeros((30, 2), np.float32)
    vectors[:, 0] = 1
    nudged = vectors + np.random.default_rng(2).uniform(0, 1e-8, vectors.shape).astype(np.float32)
    assert compare(nudged, vectors).rank_overlap == 1.0


def real_copy(sample_run: SampleRun, target: Path) -> Folder:
    folder, _ = sample_run
    shutil.copytree(folder / "out" / "sample", target / "out")
    edit(target / "out" / "run.json", lambda run: run["config"].update(input=[str(folder / "sample_data")]))
    return target


def test_a_real_run_is_certified_and_swapped_vectors_are_not(
    sample_run: SampleRun, command: RunCommand, tmp_path: Path
) -> None:
    folder = real_copy(sample_run, tmp_path / "real")
    done = command("verify", folder / "out", "--sample", 64)
    assert done.returncode == 0, done.stderr
    assert "Verified: 2,400 rows in 3 shards, 2,400 vectors" in done.stdout
    assert "cosine min 1.000000" in done.stdout
    parity = json.loads((folder / "out" / "certificate.json").read_text())["parity"]
    assert (parity["rows"], parity["reference"]["device"]) == (64, "cpu")
    assert parity["cosine_min"] >= 0.99999
    assert parity["max_abs_difference"] <= 1e-5
    assert parity["rank_overlap_at_10"] >= 0.99
    assert parity["reference"]["sentence_transformers"]

    first, second = draw(2400, 64)[:2]

    def swapped(vectors: Any) -> Any:
        vectors[[first, second]] = vectors[[second, first]]
        return vectors

    shutil.rmtree(folder / "out" / "index")
    edit(folder / "out" / "run.json", lambda run: run["config"].update(index="none"))
    rewrite(folder, with_vectors(swapped), key="part-00000")
    done = command("verify", folder / "out", "--sample", 64, "--json")
    assert done.returncode == 65
    certificate = json.loads(done.stdout)
    assert certificate["ok"] is False
    [text] = certificate["faults"]
    assert f"embed-corpus: {text}" in done.stderr.splitlines()
    assert "to sentence-transformers' vector of the text, expected cosine 0.99999 and difference 1e-05" in text
    assert "2 of 64 sampled rows are not their text's vectors" in text
    assert certificate["parity"]["cosine_min"] < 0.9


def test_the_reference_follows_the_options_of_the_run(model_dir: str) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["A small boat.", "prime numbers " * 50]
    found, made_by = reference_vectors(
        Request(model_dir, "cpu", texts, prompt="passage: ", max_length=12, dimensions=64, normalize=True)
    )
    model = SentenceTransformer(model_dir, device="cpu", local_files_only=True)
    model.max_seq_length = 12
    expected = model.encode(texts, prompt="passage: ", truncate_dim=64, normalize_embeddings=True, batch_size=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert set(made_by) == {"device", "sentence_transformers", "transformers", "torch"}
    raw, _ = reference_vectors(Request(model_dir, "cpu", texts, normalize=False))
    assert (np.abs(np.linalg.norm(raw, axis=1) - 1) > 0.1).all()


def test_a_reference_that_cannot_be_had_is_a_fault_and_not_a_crash(
    sample_run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = real_copy(sample_run, tmp_path / "real")

    def fails(request: Request) -> Any:
        raise ModelError("model: sentence-transformers gives no reference vectors (exit code -9: no message)")

    monkeypatch.setattr(verify_module, "reference_vectors", fails)
    assert "exit code -9" in fault(folder)


def test_a_model_folder_that_does_not_load_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gives no reference vectors") as error:
        reference_vectors(Request(str(tmp_path), "cpu", ["text"]))
    assert "\n" not in str(error.value)


def test_a_model_that_does_not_fit_the_device_in_float32_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def too_large(request: Request, device: str) -> Any:
        if device != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return np.ones((1, 3), np.float32)

    monkeypatch.setattr("pipeline.reference._embed", too_large)
    vectors, made_by = embed_reference(Request("model", "cuda:0", ["text"]))
    assert (vectors.shape, made_by["device"]) == ((1, 3), "cpu")


# -- the command ----------------------------------------------------------------------------------------------------


def test_run_verify_puts_the_certificate_into_the_summary(tmp_path: Path, model_dir: str) -> None:
    make_input(tmp_path / "in")
    report = embed(tmp_path, model_dir, verify=True)
    assert report.exit_code == 0
    assert report.to_dict()["certificate"]["ok"] is True
    path = tmp_path / "out" / "embeddings" / "part-1.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    path.write_bytes(raw)
    report = embed(tmp_path, model_dir, verify=True)
    assert report.exit_code == 65
    assert "embeddings/part-1.parquet: found sha256" in report.to_dict()["certificate"]["faults"][0]


def test_faults_go_to_stderr_a_line_each(plain: Folder, command: RunCommand) -> None:
    (plain / "out" / "commits" / "part-1.json").unlink()
    done = command("verify", plain / "out")
    assert done.returncode == 65
    lines = done.stderr.strip().splitlines()
    assert len([line for line in lines if line.startswith("embed-corpus: ")]) == 3
    assert done.stdout.startswith("NOT verified, 3 faults: ")
    assert command("verify", plain / "no-such-folder").returncode == 78


def test_a_report_shows_the_certificate_of_its_run(plain: Folder) -> None:
    import cli
    from pipeline.telemetry import RunReport

    certificate = verify_module.short_form(verify(str(plain / "out")))
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        cli.show_report(RunReport(output="out", certificate=certificate), as_json=False)
    assert "Verified: 180 rows in 3 shards" in stdout.getvalue()

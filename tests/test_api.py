"""From a notebook or a script: no main guard, no torch in the caller, a table for Jupyter."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import pipeline
from pipeline import embed_corpus, open_index
from pipeline.errors import ConfigError
from pipeline.search import CorpusIndex
from tests.conftest import ROOT, read_output, vectors_of, write_shard

TEXTS = ["a small boat", "a sailing ship", "the theory of numbers", "arithmetic and algebra"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Path:
    folder = tmp_path_factory.mktemp("api")
    write_shard(folder / "in" / "x.parquet", TEXTS)
    report = embed_corpus(folder / "in", folder / "out", model=model_dir, id_column="id", columns=["text"])
    assert (report.shards_done, report.total_rows_out, report.failed) == (1, 4, [])
    html = report._repr_html_()
    assert "<table>" in html
    assert "4 vectors of 384" in html
    return folder / "out"


@pytest.fixture(scope="module")
def index(output: Path) -> CorpusIndex:
    return open_index(output, mmap=True)


def test_search_answers_texts_and_vectors_alike(output: Path, index: CorpusIndex) -> None:
    result = index.search(["mathematics", "vessel on the sea"], k=2)
    numbers, ships = result.to_list()
    assert numbers[0]["text"] in TEXTS[2:]
    assert ships[0]["text"] in TEXTS[:2]
    assert "<table>" in result._repr_html_()
    own = vectors_of(read_output(output))
    assert [hits[0]["id"] for hits in index.search(own, k=1).to_list()] == ["x-0", "x-1", "x-2", "x-3"]


def test_the_query_process_ends_with_the_index(output: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    index = open_index(output)
    index.search(["a boat"], k=1)
    [worker] = [child for child in psutil.Process().children() if child.pid not in before]
    del index
    gc.collect()
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_query_gets_the_vector_of_the_same_document(output: Path, index: CorpusIndex, model_dir: str) -> None:
    """Also one without a word, which is a text like any other."""
    from sentence_transformers import SentenceTransformer

    queries = ["a small boat", ""]
    reference = SentenceTransformer(model_dir, device="cpu").encode_query(queries)
    scores = index.search(queries, k=4).table["score"].to_numpy().reshape(2, 4)
    expected = -np.sort(-(reference @ vectors_of(read_output(output)).T), axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_a_text_is_filtered_and_scored_exactly(index: CorpusIndex) -> None:
    [hits] = index.search(["mathematics"], where="text like '%ship%' or id = 'x-0'", rerank=20).to_list()
    assert {hit["id"] for hit in hits} == {"x-0", "x-1"}


def test_a_dataset_is_an_input(tmp_path: Path, model_dir: str) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"key": [3, 1, 2], "text": TEXTS[:3]})
    options = {"model": model_dir, "id_column": "key", "index": "none", "progress": "none"}
    assert embed_corpus(dataset, tmp_path / "out", **options).total_rows_out == 3
    assert read_output(tmp_path / "out")["key"].to_pylist() == [3, 1, 2]
    assert embed_corpus(dataset, tmp_path / "out", **options).shards_done == 0


def test_a_plain_script_without_a_main_guard_works(tmp_path: Path, model_dir: str) -> None:
    write_shard(tmp_path / "x.parquet", TEXTS)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pipeline import embed_corpus\n"
        f"report = embed_corpus({str(tmp_path / 'x.parquet')!r}, {str(tmp_path / 'out')!r}, model={model_dir!r},\n"
        "    index='none', progress='none')\n"
        "assert 'torch' not in sys.modules\nprint(report.total_rows_out)\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr


def test_what_is_no_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="found a int; expected a path"):
        embed_corpus(3, "out", model="m")


def with_another_model(output: Path, folder: Path, model_dir: str, changed: str, content: bytes) -> Path:
    """A copy of the output whose model folder has one file of other content."""
    shutil.copytree(output, folder / "out")
    (folder / "model").mkdir()
    for path in Path(model_dir).iterdir():
        (folder / "model" / path.name).symlink_to(path)
    (folder / "model" / changed).unlink()
    (folder / "model" / changed).write_bytes(content)
    run = json.loads((folder / "out" / "run.json").read_text())
    run["model"]["path"] = str(folder / "model")
    (folder / "out" / "run.json").write_text(json.dumps(run))
    return folder / "out"


def test_a_model_that_changed_since_is_refused_for_queries(output: Path, tmp_path: Path, model_dir: str) -> None:
    changed = with_another_model(output, tmp_path, model_dir, "sentence_bert_config.json", b'{"max_seq_length": 16}')
    with pytest.raises(ConfigError, match=r"model-modules of .* is not what the vectors were made with"):
        open_index(changed).search(["x"])


def test_weights_that_changed_since_are_refused_for_queries(output: Path, tmp_path: Path, model_dir: str) -> None:
    weights = bytearray((Path(model_dir) / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    changed = with_another_model(output, tmp_path, model_dir, "model.safetensors", bytes(weights))
    with pytest.raises(ConfigError, match=r"model-weights of .* is not what the vectors were made with"):
        open_index(changed).search(["x"])
    assert open_index(changed).search(like="x-0", k=1).table.num_rows == 1, "no model is needed for that"


def test_a_query_prompt_that_changed_since_does_not_change_the_query(
    output: Path, index: CorpusIndex, tmp_path: Path, model_dir: str
) -> None:
    """The one that was recorded with the vectors is used."""
    prompts = json.dumps({"prompts": {"query": "something else: "}}).encode()
    changed = with_another_model(output, tmp_path, model_dir, "config_sentence_transformers.json", prompts)
    expected = index.search(["a boat"], k=4).table
    assert open_index(changed).search(["a boat"], k=4).table.equals(expected)


def test_a_run_file_that_was_edited_is_refused_for_queries(output: Path, tmp_path: Path) -> None:
    shutil.copytree(output, tmp_path / "out")
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    run["fields"]["prompt"] = "another prompt: "
    (tmp_path / "out" / "run.json").write_text(json.dumps(run))
    with pytest.raises(ConfigError, match="its fields are not those of its fingerprint"):
        open_index(tmp_path / "out").search(["x"])


def test_the_package_names_what_it_offers() -> None:
    assert [name for name in pipeline.__all__ if not hasattr(pipeline, name)] == []

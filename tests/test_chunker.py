"""Long texts as overlapping pieces: nothing lost, nothing truncated, each piece embedded as the text it is."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline import embed_corpus, open_index
from pipeline.chunker import Chunker, with_chunk_columns
from pipeline.errors import ConfigError, ModelError
from pipeline.records import CHUNK_COLUMNS, Window
from pipeline.tokenizer import Tokenizer, TokenizerSpec
from tests import model_zoo
from tests.conftest import read_output, vectors_of, write_shard

WORDS = ["boat", "ship", "sailing", "harbour", "theory", "of", "numbers,", "don't", "naïve", "co-operate", "x" * 40]


def spec(tokenizer: object, max_length: int = 24, prompt: str = "") -> TokenizerSpec:
    return TokenizerSpec(tokenizer.to_str(), max_length=max_length, prompt=prompt)  # type: ignore[attr-defined]


def text_of(num_words: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


TOKENIZERS = {
    "wordpiece": model_zoo.wordpiece,
    "byte_bpe": model_zoo.byte_bpe,
    "unigram": model_zoo.unigram,
    "gemma_bpe": model_zoo.gemma_bpe,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["", "passage: "])
def test_pieces_fit_cover_and_overlap(kind: str, prompt: str) -> None:
    given = spec(TOKENIZERS[kind](), prompt=prompt)
    tokenizer = Tokenizer(given)
    texts = [text_of(words, words) for words in (1, 3, 30, 200)] + ["y" * 700, "字" * 300, "a\n\n b  \t" * 80]
    for text, spans in zip(texts, Chunker(given, 4).cut(texts), strict=True):
        tokens = tokenizer.encode([text[span.start : span.end] for span in spans])
        assert not tokens.dropped.any()
        assert tokens.lengths.max() <= 24
        assert not text[: spans[0].start].strip()
        assert not text[spans[-1].end :].strip()
        for left, right in itertools.pairwise(spans):
            assert left.start < right.start
            assert left.end < right.end
            assert not text[left.end : right.start].strip(), "text between two pieces is lost"
    assert len(Chunker(given, 4).cut([texts[3]])[0]) > 10


def test_a_text_that_fits_is_one_piece_as_it_is() -> None:
    [[only]] = Chunker(spec(model_zoo.wordpiece())).cut(["  boat \n"])
    assert (only.start, only.end) == (0, 8)


def test_pieces_end_between_words_and_share_about_the_overlap() -> None:
    given = spec(model_zoo.wordpiece(), max_length=40)
    text = text_of(300).replace("x" * 40, "x")  # no word is longer than a piece
    spans = Chunker(given, 10).cut([text])[0]
    starts = {0} | {n + 1 for n, letter in enumerate(text) if letter in " ,'-"}
    assert all(span.start in starts or text[span.start] in ",'-" for span in spans)
    tokenizer = Tokenizer(given)
    for left, right in itertools.pairwise(spans):
        shared = tokenizer.encode([text[right.start : left.end]]).lengths[0] - 2
        assert 0 <= shared <= 10


def test_no_limit_and_no_progress_are_refused() -> None:
    with pytest.raises(ModelError, match="no length limit; give --max-length"):
        Chunker(TokenizerSpec(model_zoo.wordpiece().to_str()))
    with pytest.raises(ModelError, match="--chunk-overlap 22: a chunk has room for 22 tokens"):
        Chunker(spec(model_zoo.wordpiece()), 22)


def test_rows_of_a_window_are_repeated_with_row_number_and_span() -> None:
    chunker = Chunker(spec(model_zoo.wordpiece()), 0)
    long = text_of(60)
    table = pa.table({"id": ["a", "b", "c", "d"], "url": ["1", "2", "3", "4"]})
    window = chunker.expand(Window(100, table, [None, long, "boat", None], {3: "not UTF-8"}))
    rows = window.table.to_pylist()
    count = len(rows) - 3
    assert count > 2
    assert [row["id"] for row in rows] == ["a", *["b"] * count, "c", "d"]
    assert [row["row"] for row in rows] == window.rows.tolist() == [100, *[101] * count, 102, 103]
    assert [row["chunk"] for row in rows] == [0, *range(count), 0, 0]
    assert [window.texts[n] for n in range(1, count + 1)] == [long[r["start"] : r["end"]] for r in rows[1 : count + 1]]
    assert window.texts[0] is window.texts[-1] is None
    assert window.rejected == {len(rows) - 1: "not UTF-8"}
    assert window.num_input_rows == 4
    schema = with_chunk_columns(table.schema)
    assert schema.names[2:] == list(CHUNK_COLUMNS) == window.table.schema.names[2:]
    assert schema.types == window.table.schema.types


@pytest.mark.slow
def test_each_piece_has_sentence_transformers_vector_and_is_found(tmp_path: Path, model_dir: str) -> None:
    from sentence_transformers import SentenceTransformer

    long = " ".join([*["the harbour is full of boats"] * 60, "prime numbers are infinite", *["we sail at dawn"] * 60])
    write_shard(tmp_path / "in" / "x.parquet", ["short", None, long], [7, 8, 9])
    options = {"model": model_dir, "id_column": "id", "long_texts": "chunk", "progress": "none"}
    report = embed_corpus(tmp_path / "in", tmp_path / "out", **options)
    table = read_output(tmp_path / "out")
    assert report.counts.rows == 3
    assert report.counts.truncated_texts == 0
    assert report.counts.rows + report.counts.extra_chunks == table.num_rows + 1
    rows = table.drop_columns("embedding").to_pylist()
    assert [(row["id"], row["row"], row["chunk"]) for row in rows[:2]] == [(7, 0, 0), (9, 2, 0)]
    pieces = ["short", *(long[row["start"] : row["end"]] for row in rows[1:])]
    reference = SentenceTransformer(model_dir, device="cpu").encode_document(pieces)
    assert np.abs(vectors_of(table) - reference).max() <= 1e-5
    [[hit]] = open_index(tmp_path / "out").search(["prime numbers"], k=1).to_list()
    assert (hit["id"], hit["row"]) == (9, 2)
    assert "prime numbers" in long[hit["start"] : hit["end"]]
    assert embed_corpus(tmp_path / "in", tmp_path / "out", **options).shards_done == 0
    with pytest.raises(ConfigError, match='long-texts is "chunk" there and "truncate" now'):
        embed_corpus(tmp_path / "in", tmp_path / "out", model=model_dir, id_column="id", progress="none")

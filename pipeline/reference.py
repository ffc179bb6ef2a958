"""Texts -> the vectors that sentence-transformers itself gives them, in float32, from a process of its own.

``python -m pipeline.reference`` reads one ``Request`` as JSON on stdin and answers one JSON object on stdout. Nothing
of our forward, tokenizer or pooling is used there: one text at a time goes through ``encode_document``. Whoever asks
(``reference_vectors``, ``compare``) imports no torch.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ModelError, one_line
from pipeline.pool import child_environment
from pipeline.threads import available_cores

RANKS = 10
TIE = 1e-6  # scores this close, on the scale of the largest, are one rank


@dataclass(frozen=True)
class Request:
    """What to embed and with which of the run's options.

    Attributes:
        model_path: a sentence-transformers folder.
        device: ``cpu`` or ``cuda:N``; a model that does not fit there in float32 runs on the CPU.
        texts: documents, without a prompt.
        prompt, prompt_name: as the user gave them; neither means what ``encode_document`` chooses.
        max_length, dimensions, normalize: as the user gave them; None for the folder's own.
        trust_remote_code: run Python code that the model folder brings.
    """

    model_path: str
    device: str
    texts: list[str]
    prompt: str | None = None
    prompt_name: str | None = None
    max_length: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    trust_remote_code: bool = False


def reference_vectors(request: Request) -> tuple[NDArray[np.float32], dict[str, str]]:
    """(num_texts, dim) float32 in the order of the texts, and where and with what they were computed.

    Raises:
        ModelError: sentence-transformers cannot embed them, or its process died.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.reference"],
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=child_environment(available_cores()),
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then ends this child
    )
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        reason = f"exit code {done.returncode}: {last}"
        raise ModelError(f"{request.model_path}: sentence-transformers gives no reference vectors ({reason})")
    answer = json.loads(done.stdout)
    vectors = np.frombuffer(base64.b64decode(answer["data"]), dtype=np.float32).reshape(len(request.texts), -1)
    return vectors, answer["made_by"]


@dataclass(frozen=True)
class Comparison:
    """Two sets of vectors of the same texts.

    Attributes:
        cosines: (n,) float64, of each pair.
        differences: (n,) float64, largest |difference| of each pair.
        relative: (n,) float64, the same as a share of the expected vector's length.
        rank_overlap: mean share of a row's ten nearest among the other rows that both sets agree on, ties counting as
            agreement; None for a single row.
    """

    cosines: NDArray[np.float64]
    differences: NDArray[np.float64]
    relative: NDArray[np.float64]
    rank_overlap: float | None


def compare(found: NDArray[np.float32], expected: NDArray[np.float32]) -> Comparison:
    """Compare (n, dim) finite vectors row by row."""
    ours, theirs = found.astype(np.float64), expected.astype(np.float64)
    lengths, their_lengths = np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1)
    product = lengths * their_lengths
    differences = np.abs(ours - theirs).max(axis=1)
    both_zero = (lengths == 0) & (their_lengths == 0)  # a text cut within a prompt that pooling leaves out
    cosines = np.where(both_zero, 1.0, (ours * theirs).sum(axis=1) / np.where(product == 0, 1.0, product))
    return Comparison(cosines, differences, differences / their_lengths.clip(min=1e-12), _rank_overlap(ours, theirs))


def _rank_overlap(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> float | None:
    k = min(RANKS, len(ours) - 1)
    if k < 1:
        return None
    shares = []
    for row in range(len(ours)):  # a row at a time: no (n, n) table
        scores, their_scores = ours @ ours[row], theirs @ theirs[row]
        scores[row] = their_scores[row] = -np.inf
        nearest = np.argpartition(-scores, k - 1)[:k]
        limit = np.partition(their_scores, -k)[-k]
        tie = TIE * float(np.abs(their_scores[np.isfinite(their_scores)]).max())
        shares.append(float((their_scores[nearest] >= limit - tie).mean()))
    return float(np.mean(shares))


def embed(request: Request) -> tuple[NDArray[np.float32], dict[str, str]]:
    """What the child process does. Imports torch."""
    import sentence_transformers
    import torch
    import transformers

    try:
        vectors, device = _embed(request, request.device), request.device
    except torch.OutOfMemoryError:
        vectors, device = _embed(request, "cpu"), "cpu"
    versions = {module.__name__: str(module.__version__) for module in (sentence_transformers, transformers, torch)}
    return vectors, {"device": device, **versions}


def _embed(request: Request, device: str) -> NDArray[np.float32]:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        request.model_path,
        device=device,
        model_kwargs={"dtype": torch.float32},
        trust_remote_code=request.trust_remote_code,
        local_files_only=True,
    )
    if request.max_length is not None:
        model.max_seq_length = request.max_length
    normalizers = [name for name, module in model.named_children() if type(module).__name__ == "Normalize"]
    if request.normalize is False:
        for name in normalizers:
            delattr(model, name)
        normalizers = []
    vectors = model.encode_document(
        request.texts,
        prompt=request.prompt,
        prompt_name=request.prompt_name,
        batch_size=1,  # no padding, no neighbours
        show_progress_bar=False,
        truncate_dim=request.dimensions,
        # A cut that the user asked for is renormalised where the model normalises.
        normalize_embeddings=bool(request.normalize or (request.dimensions and normalizers)),
    )
    return np.ascontiguousarray(vectors, dtype=np.float32)


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not end up in the answer
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        vectors, made_by = embed(Request(**request))
    except Exception as error:  # all of it is foreign
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return ModelError.exit_code
    with answers:
        json.dump({"data": base64.b64encode(vectors.tobytes()).decode("ascii"), "made_by": made_by}, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a GPU does: ``python -m tests.gpu.measure [--device cuda:0] [--out table.md] [--quick]``, in the repository.

First every attention path is compared with float64 attention of each text alone. Then tokens/s of models with random
weights at texts of 50 tokens, of 512 and of mixed lengths: the encoder alone (token ids in, vectors on the host out) at
several budgets, as it is and compiled, in turns with sentence-transformers at several batch sizes; and the whole
command, Parquet to Parquet, at the best budget. The tables are written after every line, so that a run that is cut off
leaves what it has. ``--device cpu --smoke`` runs all of it on tiny models: to test the script, not the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.batcher import pack, plan_batches
from pipeline.devices import resolve_dtype
from pipeline.encoder import Encoder
from pipeline.flops import ModelFacts, flops, peak
from pipeline.records import EncoderSettings, Tokens
from tests import model_zoo
from tests.gpu import numerics

BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
QWEN = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072,
}  # fmt: skip
USUAL = {"initializer_range": 0.02, "max_position_embeddings": 1024}
MODELS = {"BERT-base": ("bert", BERT_BASE), "MiniLM": ("bert", MINILM), "Qwen3-0.6B": ("qwen3", QWEN)}
LENGTHS = ("50", "512", "mixed")
BUDGETS = (8_192, 16_384, 32_768, 65_536, 131_072)
BATCH_SIZES = (32, 128, 512)


@dataclass
class Plan:
    """How much of it is done."""

    device: str
    models: dict[str, tuple[str, dict[str, int]]]
    budgets: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    tokens: int
    rounds: int
    compiled: bool


def lengths_of(kind: str, tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """(n,) int32, about `tokens` in all; ``mixed`` is log-normal, 5 to 512."""
    if kind != "mixed":
        return np.full(max(1, tokens // int(kind)), int(kind), np.int32)
    drawn = np.random.default_rng(0).lognormal(np.log(90), 0.9, max(8, tokens // 100))
    return drawn.clip(5, 512).astype(np.int32)


def alone(encoder: Encoder, tokens: Tokens, budget: int) -> float:
    """Seconds of all texts, with one batch in flight as in a run."""
    waiting: Any = None
    start = time.perf_counter()
    for chosen in plan_batches(tokens.lengths, budget, padded=encoder.padded):
        submitted = encoder.submit(pack(tokens, chosen))
        if waiting is not None:
            waiting.result()
        waiting = submitted
    waiting.result()
    return time.perf_counter() - start


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other, round by round, after one that does not count; what fails is left out."""
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, call in list(calls.items()):
            try:
                seconds = call()
            except (torch.OutOfMemoryError, RuntimeError) as error:
                print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
                del calls[name]
                taken.pop(name, None)
                continue
            if number:
                taken.setdefault(name, []).append(seconds)
    return taken


def words_of(encoder: Encoder, lengths: np.ndarray[Any, np.dtype[np.int32]]) -> list[str]:
    """Texts of about so many tokens, out of the vocabulary's own words."""
    words, rng = encoder._tokenizer.words(), np.random.default_rng(1)
    return [" ".join(words[at] for at in rng.integers(0, len(words), max(1, length - 2))) for length in lengths]


def command(folder: Path, model: Path, texts: list[str], plan: Plan, budget: int) -> float:
    """tokens/s of ``embed-corpus run`` after loading, Parquet to Parquet."""
    source, output = folder / "in.parquet", folder / f"out-{time.monotonic_ns()}"
    pq.write_table(pa.table({"text": texts}), source, row_group_size=32_768)
    options = ["--devices", plan.device, "--max-batch-tokens", str(budget), "--index", "none", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "cli", "run", str(source), "--output", str(output), "--model", str(model), *options],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["tokens_per_s"])


def measure_model(name: str, folder: Path, plan: Plan, note: Callable[[dict[str, Any]], None]) -> None:
    architecture, shape = plan.models[name]
    model = model_zoo.build(architecture, folder / name, max_length=512, **{**USUAL, **shape})
    dtype = resolve_dtype("auto", plan.device, None)
    settings = EncoderSettings(str(model), device=plan.device, dtype=dtype)
    encoders = {"": Encoder.load(settings)}
    if plan.compiled:
        encoders[" compiled"] = Encoder.load(EncoderSettings(str(model), device=plan.device, dtype=dtype, compile=True))
    facts = ModelFacts.of(encoders[""].transformer)
    limit = float(peak([list(one) for one in facts.shapes], max(plan.budgets), plan.device, dtype)["flops_per_s"])
    for kind in LENGTHS:
        lengths = lengths_of(kind, plan.tokens)
        total, squares = int(lengths.sum()), float((lengths.astype(np.int64) ** 2).sum())
        vocabulary = encoders[""]._model.config.vocab_size
        tokens = Tokens(np.random.default_rng(2).integers(5, vocabulary, total).astype(np.int32), lengths)
        texts = words_of(encoders[""], lengths)
        calls: dict[str, Callable[[], float]] = {
            f"encoder{how}, {budget:,}": partial(alone, encoder, tokens, budget)
            for how, encoder in encoders.items()
            for budget in plan.budgets
        }
        for size in plan.batch_sizes:
            calls[f"sentence-transformers, {size}"] = partial(reference, encoders[""], texts, size)
        for what, seconds in in_turns(calls, plan.rounds).items():
            speeds = [total / one for one in seconds]
            share = (
                flops(total, squares, facts.parameters, facts.layers, facts.width) / statistics.median(seconds) / limit
            )
            note({"model": name, "texts": kind, "what": what, "dtype": dtype, "speeds": speeds, "peak_share": share})
        budget = plan.budgets[len(plan.budgets) // 2]
        speed = command(folder, model, texts, plan, budget)
        note(
            {"model": name, "texts": kind, "what": f"Parquet to Parquet, {budget:,}", "dtype": dtype, "speeds": [speed]}
        )


def reference(encoder: Encoder, texts: list[str], batch_size: int) -> float:
    """Seconds of sentence-transformers' own ``encode``, in the same process and type."""
    implementation = encoder._model.config._attn_implementation
    encoder._model.set_attn_implementation("sdpa")
    try:
        start = time.perf_counter()
        encoder._st.encode(texts, batch_size=batch_size, show_progress_bar=False)
        return time.perf_counter() - start
    finally:
        encoder._model.set_attn_implementation(implementation)


def table(machine: dict[str, str], attention: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """All of it as Markdown."""
    lines = [" · ".join(f"{key} {value}" for key, value in machine.items()), ""]
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in attention:
        kinds.setdefault((row["kind"], row["dtype"]), []).append(row)
    lines += [
        "| attention | type | cases | failed | largest relative error | worst cosine |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, dtype), of_kind in kinds.items():
        good = [row for row in of_kind if not row["error"]]
        worst = max((row["max_relative"] for row in good), default=float("nan"))
        cosine = min((row["min_cosine"] for row in good), default=float("nan"))
        failed = sum(not row["ok"] for row in of_kind)
        lines.append(f"| {kind} | {dtype} | {len(of_kind)} | {failed} | {worst:.1e} | {cosine:.6f} |")
    lines += ["", "| model | texts, tokens | what, budget or batch size | type | tokens/s | of the peak |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        low, middle, high = min(row["speeds"]), statistics.median(row["speeds"]), max(row["speeds"])
        speed = f"{middle:,.0f}" + (f" [{low:,.0f}–{high:,.0f}]" if low != high else "")
        share = f"{row['peak_share']:.0%}" if "peak_share" in row else ""
        lines.append(f"| {row['model']} | {row['texts']} | {row['what']} | {row['dtype']} | {speed} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", default="gpu.md")
    parser.add_argument("--quick", action="store_true", help="fewer budgets, texts and rounds")
    parser.add_argument("--smoke", action="store_true", help="tiny models: to test the script")
    given = parser.parse_args()
    plan = Plan(given.device, dict(MODELS), BUDGETS, BATCH_SIZES, 2_000_000, 3, True)
    if given.quick:
        plan = Plan(given.device, dict(MODELS), BUDGETS[1:4], BATCH_SIZES[:2], 500_000, 2, True)
    if given.smoke:
        tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        plan = Plan(given.device, {"tiny": ("bert", tiny)}, (1_024,), (8,), 4_000, 1, False)
    is_cuda = given.device.startswith("cuda")
    machine = {
        "machine": torch.cuda.get_device_name(given.device) if is_cuda else "CPU",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "date": time.strftime("%Y-%m-%d"),
    }
    attention: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def write() -> None:
        out = Path(given.out)
        out.write_text(table(machine, attention, rows), encoding="utf-8")
        everything = {"machine": machine, "attention": attention, "speed": rows}
        out.with_suffix(".json").write_text(json.dumps(everything, indent=1), encoding="utf-8")

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        write()

    cases = numerics.cases(numerics.SHORT_LENGTHS, (32,)) if given.smoke else numerics.cases()
    for case in cases:
        for kind in numerics.KINDS:
            for dtype in numerics.dtypes_of(kind) if not numerics.why_not(kind, given.device) else ():
                if is_cuda or dtype == torch.float32:
                    attention.append(numerics.as_row(kind, case, dtype, given.device))
    write()
    with tempfile.TemporaryDirectory() as folder:
        for name in plan.models:
            measure_model(name, Path(folder), plan, note)
    print(Path(given.out).read_text(encoding="utf-8"))
    return 0 if all(row["ok"] for row in attention) else 1


if __name__ == "__main__":
    sys.exit(main())

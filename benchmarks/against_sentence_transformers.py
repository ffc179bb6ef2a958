"""How much faster is ``embed-corpus run`` than sentence-transformers' ``encode``, Parquet to Parquet, on this machine?

    python benchmarks/against_sentence_transformers.py SHARD.parquet --model models/all-MiniLM-L6-v2

Whole processes take turns (ours, then sentence-transformers at each batch size, then again), so a drift of the machine
hits all alike; the ratio is taken round by round and its median is printed. Both use float32 and the same number of
threads, start Python, load the model, read the shard and write Parquet with the same compression. Beside the wall time
of the process stands the time after the model was ready. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REFERENCE = """
import json, sys, time
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer
shard, output, model, batch_size = sys.argv[1:]
encoder = SentenceTransformer(model, device="cpu")
encoder.encode(["warm up"])
ready = time.perf_counter()
table = pq.read_table(shard, columns=["id", "text"])
vectors = encoder.encode_document(table["text"].to_pylist(), batch_size=int(batch_size), show_progress_bar=False)
kind = pa.list_(pa.field("element", pa.float32(), nullable=False), vectors.shape[1])
column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind)
pq.write_table(pa.table({"id": table["id"], "embedding": column}), output, compression="zstd", compression_level=1,
               use_dictionary=["id"], column_encoding={"embedding.list.element": "BYTE_STREAM_SPLIT"},
               row_group_size=16384)
print(json.dumps({"ready_s": time.perf_counter() - ready}))
"""


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, dict[str, float]]:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return time.perf_counter() - start, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shard", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 8, 16, 64])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    model = os.path.realpath(args.model)
    threads = {name: str(args.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    environment = {**os.environ, **threads, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    walls: dict[str, list[float]] = {}
    inner: dict[str, list[float]] = {}
    tokens = 0
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            options = ["--id-column", "id", "--devices", "cpu", "--index", "none", "--json", "--progress", "none"]
            files = [str(args.shard), "--output", f"{folder}/out", "--model", model]
            ours = [sys.executable, "-m", "cli", "run", *files, *options]
            wall, report = timed(ours, environment)
            walls.setdefault("embed-corpus", []).append(wall)
            inner.setdefault("embed-corpus", []).append(report["encode_wall_s"])
            tokens = report["counts"]["tokens"]  # type: ignore[index]
            for size in args.batch_sizes:
                files = [str(args.shard), f"{folder}/{size}.parquet", model, str(size)]
                wall, answer = timed([sys.executable, "-c", REFERENCE, *files], environment)
                walls.setdefault(f"batch_size {size}", []).append(wall)
                inner.setdefault(f"batch_size {size}", []).append(answer["ready_s"])
        last = ", ".join(f"{name} {times[-1]:.1f} s" for name, times in walls.items())
        print(f"round {number + 1}: {last}", flush=True)
    print(f"\n{tokens:,} tokens, {args.threads} threads, medians of {args.rounds} rounds")
    print(f"{'':16} {'process s':>10} {'work s':>8} {'tokens/s':>9} {'ours is (process)':>18} {'ours is (work)':>15}")
    for name in walls:
        ratio = statistics.median(a / b for a, b in zip(walls[name], walls["embed-corpus"], strict=True))
        work = statistics.median(a / b for a, b in zip(inner[name], inner["embed-corpus"], strict=True))
        seconds = statistics.median(inner[name])
        print(f"{name:16} {statistics.median(walls[name]):10.1f} {seconds:8.1f} {tokens / seconds:9,.0f} "
              f"{ratio:17.2f}x {work:14.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()

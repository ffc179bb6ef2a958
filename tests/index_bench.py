"""The index at size: ``python -m tests.index_bench [--vectors 1000000] [--rounds 2] [--out FILE]``, in the repository.

MiniLM vectors of real texts, spread by small seeded noise, are written as a run leaves them: Parquet shards with commit
records. Then, in turns and each in a process of its own: our build, and bare FAISS doing the same (the same shards read
the same way, factory, sample and threads): its build alone, and with the exact neighbours of the same queries and their
recall, by ``faiss.knn``. Beside the times stand the peak memory against what was predicted, the recall, the latency,
and what adding 1 % costs. With
``--autofaiss-python PATH`` of a virtual environment that has autofaiss, it builds an index of the same vectors under
the same memory and is measured by the same queries.

``--texts`` is Parquet with a column ``text``; ``--vectors-file`` takes their vectors from an .npy instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import recall
from pipeline.corpus import Corpus, Sample, open_corpus
from pipeline.faiss_library import faiss_threads, load_faiss
from pipeline.indexer import build_index
from pipeline.pool import child_environment
from pipeline.storage import open_output
from pipeline.threads import available_cores
from tests.test_indexer import FakeOutput

NOISE = 0.6
"""Length of the noise beside a unit vector: the nearest neighbours of a spread vector are of many texts."""
ROW_GROUP = 8_192


def texts_vectors(texts: str, model: str, limit: int) -> NDArray[np.float32]:
    """(n, dim) float32, unit length."""
    from sentence_transformers import SentenceTransformer

    column = pq.read_table(texts, columns=["text"]).column("text").to_pylist()[:limit]
    encoder = SentenceTransformer(model, device="cpu")
    encoder.max_seq_length = 48
    return np.asarray(encoder.encode(column, normalize_embeddings=True, show_progress_bar=False), np.float32)


def spread(base: NDArray[np.float32], num: int, seed: int) -> NDArray[np.float32]:
    """(num, dim): vectors of the base with noise, unit length."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((num, base.shape[1]), dtype=np.float32)
    vectors = base[rng.integers(len(base), size=num)] + NOISE / np.sqrt(base.shape[1]) * noise
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


class Shards(FakeOutput):
    """Written as the writer does: zstd, BYTE_STREAM_SPLIT on the vectors, no dictionary on them."""

    def write(self, name: str, table: pa.Table, row_group_size: int = ROW_GROUP) -> dict[str, Any]:
        from pipeline.storage import sha256_file

        path = self.store.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        vector = "embedding.list.element"
        pq.write_table(
            table, path, row_group_size=ROW_GROUP, compression="zstd", compression_level=1, write_page_checksum=True,
            use_dictionary=["id"], column_encoding={vector: "BYTE_STREAM_SPLIT"},
        )  # fmt: skip
        return {"path": name, "rows": table.num_rows, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def make_shards(root: Path, base: NDArray[np.float32], num: int, num_shards: int) -> Shards:
    shards = Shards(root, dim=base.shape[1])
    for number, rows in enumerate(np.diff(np.linspace(0, num, num_shards + 1).astype(int))):
        shards.add(f"part-{number:05d}", spread(base, int(rows), seed=number))
    return shards


# -- in a process of its own -----------------------------------------------------------------------------------------


def bare(corpus: Corpus, factory: str, num_train: int, target: Path, nprobe: int) -> dict[str, float]:
    """What anyone would write who knows FAISS and has the sample's positions; seconds of the build, and of all of it.

    Measured as ours measures itself: the exact neighbours of the same queries, recall@10 at the setting ours chose.
    """
    faiss, began = load_faiss(), time.perf_counter()
    queries_at, train_at = recall.draw(corpus.num_vectors, num_train)
    sample = Sample(train_at, corpus.dim)
    for block in corpus.blocks():
        sample.add(block)
    index = faiss.index_factory(corpus.dim, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(sample.vectors)
    del sample
    for block in corpus.blocks():
        index.add_with_ids(block.vectors, block.faiss_ids)
    faiss.write_index(index, str(target))
    built = time.perf_counter()
    queries, own = corpus.vectors_at(queries_at), corpus.faiss_ids(queries_at)
    best = faiss.ResultHeap(len(queries), 11, keep_max=True)
    for block in corpus.blocks():
        scores, rows = faiss.knn(queries, block.vectors, 11, metric=faiss.METRIC_INNER_PRODUCT)
        best.add_result(scores, block.faiss_ids[rows])
    best.finalize()
    index.nprobe = nprobe
    found = index.search(queries, 11)[1]
    hits = [len(set(a) & set(b) - {one}) for a, b, one in zip(best.I, found, own, strict=True)]
    log(f"bare FAISS: recall@10 {np.mean(hits) / 10:.3f}")
    return {"build": round(built - began, 2), "measured": round(time.perf_counter() - began, 2)}


def child(task: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    root, result = task["root"], {}
    if task["what"] == "ours":
        result = build_index(root, task["factory"], max_index_ram=task["max_index_ram"], progress=log)
    else:
        store = open_output(root)
        with faiss_threads(available_cores()):
            given = task["factory"], task["num_train"], Path(task["target"]), task["nprobe"]
            result = bare(open_corpus(store, {}), *given)
    seconds = time.perf_counter() - began
    status = Path("/proc/self/status").read_text().splitlines()  # unlike getrusage's, not the parent's before exec
    peak = int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) * 1024
    return {"seconds": round(seconds, 2), "peak_bytes": peak, "index": result}


def in_a_process(**task: Any) -> dict[str, Any]:
    environment = child_environment(available_cores())
    command = [sys.executable, "-m", "tests.index_bench", "--child", json.dumps(task)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


AUTOFAISS = """
import json, sys, time, resource
from autofaiss import build_index
task = json.loads(sys.argv[1])
began = time.perf_counter()
build_index(embeddings=task["folder"], index_path=task["target"], index_infos_path=task["target"] + ".json",
            file_format="npy", metric_type="ip", nb_cores=task["cores"], verbose=30,
            max_index_memory_usage=task["ram"], current_memory_available=task["available"],
            max_index_query_time_ms=task["query_ms"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": round(time.perf_counter() - began, 2), "peak_bytes": peak}))
"""


def autofaiss(python: str, corpus: Corpus, scratch: Path, max_index_ram: int, query_ms: float) -> dict[str, Any]:
    """Its index of the same vectors, measured by our queries at the setting it chose."""
    folder, target = scratch / "npy", scratch / "autofaiss.index"
    folder.mkdir()
    vectors = np.concatenate([block.vectors for block in corpus.blocks()])
    np.save(folder / "vectors.npy", vectors)
    del vectors
    task = {
        "folder": str(folder), "target": str(target), "cores": available_cores(), "query_ms": query_ms,
        "ram": f"{max_index_ram // 1_000_000}MB", "available": f"{2 * max_index_ram // 1_000_000}MB",
    }  # fmt: skip
    done = subprocess.run([python, "-c", AUTOFAISS, json.dumps(task)], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    faiss = load_faiss()
    chosen = json.loads(Path(f"{target}.json").read_text())
    index = faiss.read_index(str(target))
    faiss.ParameterSpace().set_index_parameters(index, chosen["index_param"])
    document = corpus.store.read_json("index/index.json")
    truth = recall.Truth.load(corpus.store.fetch(f"index/{document['truth']['file']}"))
    # Its ids are positions.
    truth.ids = corpus.positions(truth.ids)
    truth.neighbours = corpus.positions(truth.neighbours)
    ours = faiss.read_index(str(corpus.store.fetch(f"index/{document['index_file']}")))  # as theirs: read, not mapped
    faiss.extract_index_ivf(ours).nprobe = document["nprobe"]
    ours_ms = recall.latency_ms(ours, truth.queries)
    with faiss_threads(available_cores()):
        recalls = {f"recall_at_{k}": round(float(truth.recalls(index, corpus, k).mean()), 4) for k in recall.JUDGED}
        latency = recall.latency_ms(index, truth.queries)
    size = target.stat().st_size
    return {**result, "factory": chosen["index_key"], "setting": chosen["index_param"], **recalls,
            "latency_ms": latency, "ours_latency_ms": ours_ms, "index_bytes": size}  # fmt: skip


# -- the whole -------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    if options.vectors_file:
        base = np.load(options.vectors_file).astype(np.float32)
    else:
        base = texts_vectors(options.texts, options.model, options.num_texts)
    shards = make_shards(scratch / "out", base, options.vectors, options.shards)
    log(f"{options.vectors:,} vectors of {base.shape[1]} in {options.shards} shards, from {len(base):,} texts")
    root, target = str(shards.root), str(scratch / "bare.faiss")
    ours, plain = [], []
    asked = {"what": "ours", "root": root, "factory": options.factory, "max_index_ram": options.max_index_ram}
    for number in range(options.rounds):
        for what in ("ours", "bare") if number % 2 == 0 or not ours else ("bare", "ours"):
            if what == "ours":
                shutil.rmtree(shards.root / "index", ignore_errors=True)
                ours.append(in_a_process(**asked))
                log(f"ours: {ours[-1]['seconds']} s, {ours[-1]['index']['seconds']}")
            else:
                built = ours[-1]["index"]
                num_train = int(built["num_train"])
                given = {"factory": built["factory"], "num_train": num_train, "nprobe": built["nprobe"]}
                plain.append(in_a_process(what="bare", root=root, target=target, **given))
                log(f"bare FAISS: {plain[-1]['index']} s")
    built = ours[-1]["index"]
    document: dict[str, Any] = {
        "vectors": options.vectors, "dim": base.shape[1], "texts": len(base), "cores": available_cores(),
        "factory": built["factory"], "trained_on": built["num_train"], "recall_at_1": built["recall_at_1"],
        "recall_at_10": built["recall_at_10"], "recall_at_100": built["recall_at_100"], "nprobe": built["nprobe"],
        "latency_ms": built["latency_ms"], "bytes_per_vector": built["bytes_per_vector"],
        "build_s": [run["seconds"] for run in ours],
        "bare_s": {what: [run["index"][what] for run in plain] for what in ("build", "measured")},
        "ratio": {
            what: round(statistics.median(a["seconds"] / b["index"][what] for a, b in zip(ours, plain, strict=True)), 3)
            for what in ("build", "measured")
        },
        "seconds": built["seconds"],
        "peak_bytes": max(run["peak_bytes"] for run in ours),
        "predicted_bytes": built["predicted"]["build_bytes"],
        "bare_peak_bytes": max(run["peak_bytes"] for run in plain),
        "index_bytes": built["bytes"]["index"],
        "predicted_index_bytes": built["predicted"]["index_bytes"],
    }  # fmt: skip
    if options.autofaiss_python:
        corpus = open_corpus(shards.store, built)
        limit = options.max_index_ram or 2 * built["bytes"]["index"]
        document["autofaiss"] = autofaiss(
            options.autofaiss_python, corpus, scratch, limit, options.autofaiss_query_ms or built["latency_ms"]["p50"]
        )
        log(f"autofaiss: {document['autofaiss']}")
    shards.add("part-99999", spread(base, options.vectors // 100, seed=99_999))
    update = in_a_process(**asked)
    assert update["index"]["built"] == "updated", update["index"]["why"]
    document["update"] = {
        "added_rows": update["index"]["added_rows"], "seconds": update["seconds"], "stages": update["index"]["seconds"],
        "peak_bytes": update["peak_bytes"], "predicted_bytes": update["index"]["predicted"]["build_bytes"],
        "share_of_build": round(update["seconds"] / statistics.median(document["build_s"]), 4),
        "recall_at_10": update["index"]["recall_at_10"],
    }  # fmt: skip
    return document


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.index_bench", description=__doc__)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--factory", default="auto")
    parser.add_argument("--max-index-ram", type=int)
    parser.add_argument("--texts", default="sample_data")
    parser.add_argument("--num-texts", type=int, default=20_000)
    parser.add_argument("--model", default="models/all-MiniLM-L6-v2")
    parser.add_argument("--vectors-file")
    parser.add_argument("--autofaiss-python", metavar="PATH")
    parser.add_argument("--autofaiss-query-ms", type=float)
    parser.add_argument("--scratch", help="folder for the vectors; default: below TMPDIR")
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        document = measure(options, Path(scratch))
    print(json.dumps(document, indent=2))
    if options.out:
        Path(options.out).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

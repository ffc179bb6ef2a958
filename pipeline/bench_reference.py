"""sentence-transformers at the same job, as its users write it: Parquet -> ``encode_document`` -> Parquet.

``python -m pipeline.bench_reference SHARD OUTPUT MODEL DEVICE DTYPE BATCH_SIZE`` answers ``{"work_s": …}`` on stdout:
seconds after the model was loaded and warm. Nothing of ours is imported, so that nothing of ours is timed. Only the
layout of the output file is that of ``embed-corpus run`` (zstd, byte stream split), so that both write as much.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not end up in the answer
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from sentence_transformers import SentenceTransformer

    shard, output, folder, device, dtype, batch_size = sys.argv[1:]
    model = SentenceTransformer(
        folder, device=device, model_kwargs={"dtype": getattr(torch, dtype)}, local_files_only=True
    )
    model.encode(["warm up"], show_progress_bar=False)
    start = time.perf_counter()
    table = pq.read_table(shard, columns=["id", "text"])
    vectors = model.encode_document(table["text"].to_pylist(), batch_size=int(batch_size), show_progress_bar=False)
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False), vectors.shape[1])
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.astype("float32", copy=False).reshape(-1)), type=kind)
    pq.write_table(
        pa.table({"id": table["id"], "embedding": column}),
        output,
        compression="zstd",
        compression_level=1,
        use_dictionary=["id"],
        column_encoding={"embedding.list.element": "BYTE_STREAM_SPLIT"},
        row_group_size=16_384,
    )
    work_s = time.perf_counter() - start
    with answers:
        json.dump({"work_s": work_s}, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

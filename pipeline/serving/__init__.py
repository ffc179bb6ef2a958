"""``embed-corpus serve``: a finished output answers queries over HTTP.

    client ──▶ app ──▶ engine: queue ──▶ tokenizer ──▶ encoder        (a lane of its own for queries)
                 │        └─▶ fallback: another server with the same vectors, or 503
                 └──▶ search process: FAISS, ids and columns           (never in one process with torch)

The process that speaks HTTP imports neither torch nor faiss.
"""

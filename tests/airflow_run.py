"""``python -P airflow_run.py '[CONF, …]' RESULT``, by the Python that has Airflow: ``dag.test()`` of the shipped DAG.

RESULT gets, as JSON, of each run: its state, that of each task and rank with the number of its tries, the summaries and
the asset events. A CONF is the DAG run's, and ``timeout_s`` that of the embedding. With ``AIRFLOW_RUN_TRACED`` a span
is open meanwhile, as it is where Airflow itself is traced.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "jobs" / "airflow"))

import embed_corpus
import embed_corpus_kubernetes
from airflow.models.asset import AssetEvent
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from opentelemetry.sdk.trace import TracerProvider


def one(conf: dict[str, Any]) -> dict[str, Any]:
    importlib.reload(embed_corpus)  # parameters of an earlier run in this process would stay
    for task in embed_corpus.dag.tasks:
        task.retry_delay = timedelta(seconds=0.1)
    if "timeout_s" in conf:
        limit = timedelta(seconds=conf.pop("timeout_s"))
        embed_corpus.dag.get_task("embed").partial_kwargs["execution_timeout"] = limit
    run = embed_corpus.dag.test(run_conf=conf)

    def name(task_id: str, map_index: int) -> str:
        return task_id if map_index < 0 else f"{task_id}[{map_index}]"

    with create_session() as session:
        xcoms = session.query(XComModel).filter_by(run_id=run.run_id, key="return_value").all()
        events = session.query(AssetEvent).filter_by(source_run_id=run.run_id).all()
        return {
            "state": run.state,
            "run_id": run.run_id,
            "tasks": {
                name(each.task_id, each.map_index): [each.state, each.try_number]
                for each in run.get_task_instances(session=session)
            },
            "summaries": {name(each.task_id, each.map_index): XComModel.deserialize_value(each) for each in xcoms},
            "events": [
                {"uri": each.asset.uri, "extra": each.extra, "aliases": [alias.name for alias in each.source_aliases]}
                for each in events
            ],
        }


def main(confs: str, result: str) -> None:
    embed_corpus_kubernetes.POLL_S = 0.3
    span: Any = contextlib.nullcontext()
    if "AIRFLOW_RUN_TRACED" in os.environ:
        span = TracerProvider().get_tracer("test").start_as_current_span("worker")
    with span as current:
        runs = [one(conf) for conf in json.loads(confs)]
    for run in runs:
        run["trace_id"] = f"{current.get_span_context().trace_id:032x}" if current is not None else ""
    Path(result).write_text(json.dumps(runs), encoding="utf-8")


main(*sys.argv[1:])

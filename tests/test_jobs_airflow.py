"""The DAG in jobs/airflow under a real Airflow: its tasks, what an exit code makes of them, its Jobs on Kubernetes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.ledger import Ledger
from tests import airflow_venv
from tests.airflow_venv import DAGS, Airflow, NotInstallable
from tests.conftest import ROOT, SAMPLE_DATA, read_output, write_shard
from tests.kubernetes_api import Api, serving
from tests.kubernetes_rules import faults
from tests.kubernetes_simulator import Document, render
from tests.test_jobs_kubernetes import DOCKERFILE, VERSIONS

pytestmark = pytest.mark.slow

# Ends with the codes of the file 'codes.STEP.RANK', one a call, then with 0; prints a summary as the command does.
STUB = """#!/bin/sh
case "$*" in *"--rank "*) rank=${*##*--rank }; rank=.${rank%% *} ;; esac
echo "$TRACEPARENT $AIRFLOW_CTX_DAG_RUN_ID $AIRFLOW_CTX_TASK_ID $AIRFLOW_CTX_TRY_NUMBER $*" >> calls
codes=codes.$1$rank
code=$(head -n 1 "$codes" 2> /dev/null)
[ -s "$codes" ] && sed -i 1d "$codes"
[ "$code" = crash ] && kill -9 $$
[ "$code" = sleep ] && { trap 'kill $!; echo - - - ended >> calls; exit 75' TERM; sleep 300 > /dev/null 2>&1 & wait; }
echo "embed-corpus: the reason of $1" >&2
cat "summary.$1" 2> /dev/null || printf '{\\n  "of": "%s",\\n  "shards": [1, 2]\\n}\\n' "$1"
exit "${code:-0}"
"""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    return started(tmp_path_factory.mktemp("airflow"))


def started(home: Path) -> Airflow:
    """An Airflow; without one the tests are skipped, but not in CI, where nobody would see that."""
    try:
        return Airflow(home)
    except NotInstallable as error:
        reason = f"Airflow cannot be installed: {error}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.mark.parametrize(("variable", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_an_airflow_that_cannot_be_installed_is_a_skip_with_its_reason_and_in_ci_a_failure(
    variable: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", variable)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as without a network
    monkeypatch.setattr(airflow_venv, "FOLDER", tmp_path / "venv")
    either = (pytest.fail.Exception, pytest.skip.Exception)  # a skip that is not caught would skip this test, too
    with pytest.raises(either, match=r"Airflow cannot be installed: .*No matching distribution found") as told:
        started(tmp_path / "home")
    assert told.type is outcome
    assert not (tmp_path / "venv" / "done").exists()


Result = dict[str, Any]


def prepared(folder: Path, job: str = "", **codes: str) -> dict[str, str]:
    """A folder with the stub and a job file; the parameters that lead there."""
    folder.mkdir()
    (folder / "stub").write_text(STUB)
    (folder / "stub").chmod(0o755)
    (folder / "job.yaml").write_text(f"input: in\noutput: out\nmodel: m\n{job}")
    for step, ends in codes.items():
        (folder / f"codes.{step.replace('_', '.')}").write_text(ends.replace(" ", "\n") + "\n")
    return {"folder": str(folder), "command": "./stub", "job": "job.yaml"}


def calls(folder: Path) -> list[str]:
    """Task, try and arguments of each call of the stub."""
    path = folder / "calls"
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def stubbed(airflow: Airflow, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """All runs with the stub at once, since most of the time is Airflow's own start; and where their folders are."""
    root = tmp_path_factory.mktemp("stubbed")
    stop = '{\n  "stopped": "--max-cost 3.0 is reached"\n}\n'
    confs: dict[str, dict[str, Any]] = {
        "retried": prepared(root / "retried", "index: none\n", plan="65", run="75 crash"),
        "damaged": {**prepared(root / "damaged", run_0="75", run_1="65"), "world_size": 3},
        "wrong": prepared(root / "wrong", plan="78"),
        "wrong later": prepared(root / "wrong later", "index: Flat\n", run="78"),
        "limit": {
            **prepared(root / "limit", run="75"), "max_cost": 6, "max_tokens": 1000, "max_hours": 2,
            "price_per_hour": 1.5, "output": "s3://bucket/out", "input": "s3://bucket/in", "model": "other",
            "world_size": 1,
        },
        "faulty": prepared(root / "faulty", verify="65"),
        "out of time": {**prepared(root / "out of time", run="sleep"), "timeout_s": 3},
        "no price": {**prepared(root / "no price"), "max_cost": 6},
        "no command": {**prepared(root / "no command"), "command": "./missing"},
    }  # fmt: skip
    (root / "limit" / "summary.run").write_text(stop)
    return root, dict(zip(confs, airflow.test(*confs.values()), strict=True))


def test_a_stop_or_a_crash_is_tried_again_and_a_damaged_shard_does_not_hold_up_a_plan(
    stubbed: tuple[Path, dict[str, Result]],
) -> None:
    root, runs = stubbed
    run = runs["retried"]
    assert run["state"] == "success"
    assert run["tasks"] == {
        "ranks": ["success", 1],
        "plan": ["success", 1],
        "embed[0]": ["success", 3],
        "index": ["skipped", 1],
        "verify": ["success", 1],
    }
    assert [event["aliases"] for event in run["events"]] == [["embed-corpus"]]
    options = "--job job.yaml --output out"
    assert calls(root / "retried") == [
        f"plan 1 plan {options} --progress plain --json",
        *(f"embed {number} run {options} --index none --progress plain --json" for number in (1, 2, 3)),
        "verify 1 verify out --progress plain --json",
    ]


def test_the_summary_of_each_step_is_its_xcom_without_the_list_of_shards(
    stubbed: tuple[Path, dict[str, Result]],
) -> None:
    summaries = stubbed[1]["retried"]["summaries"]
    assert summaries == {"ranks": [0], "plan": {"of": "plan"}, "embed[0]": {"of": "run"}, "verify": {"of": "verify"}}


def test_all_steps_of_a_run_are_in_one_trace(stubbed: tuple[Path, dict[str, Result]]) -> None:
    root, runs = stubbed
    told = [tuple(line.split(" ")[:2]) for line in (root / "retried" / "calls").read_text().splitlines()]
    [(parent, run_id)] = set(told)
    version, trace_id, span_id, flags = parent.split("-")
    assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01")
    assert int(trace_id, 16) and int(span_id, 16)
    assert run_id == runs["retried"]["run_id"]
    [other] = {line.split(" ")[0] for line in (root / "damaged" / "calls").read_text().splitlines()}
    assert other != parent


def test_a_damaged_shard_fails_its_rank_without_a_retry_when_the_others_are_done(
    stubbed: tuple[Path, dict[str, Result]],
) -> None:
    root, runs = stubbed
    run = runs["damaged"]
    assert run["state"] == "failed"
    assert run["tasks"] == {
        "ranks": ["success", 1],
        "plan": ["success", 1],
        "embed[0]": ["success", 2],
        "embed[1]": ["failed", 1],
        "embed[2]": ["success", 1],
        "index": ["success", 1],
        "verify": ["upstream_failed", 0],
    }
    assert run["summaries"]["embed[1]"] == {"of": "run"}
    assert "embed-corpus run ended with exit code 65: the reason of run" in run["log"]
    assert run["events"] == []
    done = calls(root / "damaged")
    for rank in range(3):
        assert any(f"--rank {rank} --world-size 3" in call for call in done)
    assert done[-1] == "index 1 index out --progress plain --json"


def test_what_is_wrong_ends_the_run_at_once(stubbed: tuple[Path, dict[str, Result]]) -> None:
    root, runs = stubbed
    assert runs["wrong"]["state"] == runs["wrong later"]["state"] == "failed"
    assert runs["wrong"]["tasks"]["plan"] == ["failed", 1]
    assert len(calls(root / "wrong")) == 1
    assert runs["wrong later"]["tasks"]["embed[0]"] == ["failed", 1]
    assert runs["wrong later"]["tasks"]["verify"][0] == "upstream_failed"
    assert calls(root / "wrong later")[-1] == "index 1 index out --index Flat --progress plain --json"
    assert "embed-corpus plan ended with exit code 78: the reason of plan" in runs["wrong"]["log"]


def test_a_limit_that_was_reached_is_not_tried_again(stubbed: tuple[Path, dict[str, Result]]) -> None:
    root, runs = stubbed
    run = runs["limit"]
    assert run["tasks"]["embed[0]"] == ["failed", 1]
    assert run["tasks"]["index"] == ["success", 1]
    assert run["events"] == []
    assert "ended with exit code 75: --max-cost 3.0 is reached" in run["log"]
    options = "s3://bucket/in --job job.yaml --output s3://bucket/out --model other --price-per-hour 1.5"
    limits = "--index none --max-cost 6.0 --max-tokens 1000 --max-hours 2"
    assert calls(root / "limit")[1] == f"embed 1 run {options} {limits} --progress plain --json"


def test_a_task_that_must_end_ends_its_command(stubbed: tuple[Path, dict[str, Result]]) -> None:
    root, runs = stubbed
    embed = [call.split()[:2] for call in calls(root / "out of time")[1:4]]
    assert embed == [["embed", "1"], ["-", "ended"], ["embed", "2"]]
    assert runs["out of time"]["tasks"]["embed[0]"] == ["success", 2]


def test_a_fault_found_by_verify_is_no_finished_output(stubbed: tuple[Path, dict[str, Result]]) -> None:
    run = stubbed[1]["faulty"]
    assert (run["state"], run["tasks"]["verify"], run["events"]) == ("failed", ["failed", 1], [])


def test_parameters_that_do_not_fit_are_told_before_anything_is_called(
    stubbed: tuple[Path, dict[str, Result]],
) -> None:
    root, runs = stubbed
    assert runs["no price"]["tasks"]["ranks"] == ["failed", 1]
    assert calls(root / "no price") == []
    assert "max_cost needs price_per_hour: give both" in runs["no price"]["log"]
    assert runs["no command"]["tasks"]["plan"] == ["failed", 1]
    assert f"./missing in {root / 'no command'}: No such file or directory" in runs["no command"]["log"]


def test_the_sample_is_embedded_and_proven_and_whoever_waits_for_it_is_told(
    airflow: Airflow, tmp_path: Path, model_dir: str
) -> None:
    """The command and the model themselves; as where Airflow is traced, so that its trace is continued."""
    rows = 60
    pq.write_table(pq.read_table(SAMPLE_DATA / "part-00001.parquet").slice(0, rows), tmp_path / "part.parquet")
    (tmp_path / "embed-corpus").write_text(
        f"#!/bin/sh\necho $TRACEPARENT >> traced\nPYTHONPATH={ROOT} exec {sys.executable} -m cli \"$@\"\n"
    )
    (tmp_path / "embed-corpus").chmod(0o755)
    conf = {
        "job": str(ROOT / "jobs" / "sample.yaml"), "input": "part.parquet", "model": model_dir, "output": "out",
        "folder": str(tmp_path), "command": "./embed-corpus", "price_per_hour": 2,
    }  # fmt: skip
    [run] = airflow.test(conf, AIRFLOW_RUN_TRACED="yes")
    assert run["state"] == "success", run["log"][-5000:]
    assert {state for state, _ in run["tasks"].values()} == {"success"}
    found = run["summaries"]
    assert len(read_output(tmp_path / "out")) == rows
    assert found["plan"]["rows"] == found["embed[0]"]["total_rows_out"] == found["index"]["ntotal"] == rows
    assert found["embed[0]"]["cost"] > 0
    assert found["embed[0]"]["planned"]["tokens"] == found["embed[0]"]["counts"]["tokens"]
    assert (found["verify"]["ok"], found["verify"]["parity"]["rows"]) == (True, rows)
    assert not any("shards" in found[step] for step in ("plan", "embed[0]", "index", "verify"))
    [event] = run["events"]
    assert event["uri"] == (tmp_path / "out").as_uri()
    assert event["aliases"] == ["embed-corpus"]
    assert (event["extra"]["rows"], event["extra"]["output"]) == (rows, "out")
    assert {line.split("-")[1] for line in (tmp_path / "traced").read_text().split()} == {run["trace_id"]}


# Kubernetes


NUM_SHARDS, ROWS = 4, 20


@pytest.fixture(scope="module")
def manifests() -> list[Document]:
    return render(ROOT / "jobs" / "kubernetes" / "overlays" / "cpu")


@pytest.fixture
def in_pods(tmp_path: Path, manifests: list[Document], model_dir: str) -> dict[str, Any]:
    """Parameters: a job whose paths are those of a pod, its shards on the claim."""
    for number in range(NUM_SHARDS):
        texts = [f"shard {number} row {row}" for row in range(ROWS)]
        write_shard(tmp_path / "claims" / "embed-corpus-data" / "corpus" / f"part-{number}.parquet", texts)
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump_all(manifests))
    job = f"input: /data/corpus\noutput: /data/vectors\nmodel: {model_dir}\nid-column: id\n"
    (tmp_path / "job.yaml").write_text(job)
    return {
        "where": "kubernetes", "folder": str(tmp_path), "job": "job.yaml", "manifests": "jobs.yaml",
        "namespace": "here", "world_size": 2,
    }  # fmt: skip


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    with serving(made, tmp_path / "kubeconfig"):
        yield made


def connection(folder: Path) -> dict[str, str]:
    extra = {"kube_config_path": str(folder / "kubeconfig")}
    return {"AIRFLOW_CONN_KUBERNETES_DEFAULT": json.dumps({"conn_type": "kubernetes", "extra": extra})}


def posted(api: Api, step: str) -> list[Document]:
    return [each for each in api.posted if each["metadata"]["name"].startswith(f"embed-corpus-{step}-")]


def test_on_kubernetes_pods_share_the_shards_and_a_task_tried_again_finds_its_job(
    airflow: Airflow, tmp_path: Path, api: Api, in_pods: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The plan's first question gets no answer: the task fails and is tried again. Its Job still works then, because its
    # pod begins no sooner than the second question is answered.
    api.fail, answer, sync, answered = 1, api.job, api.sync, threading.Event()

    def job(name: str) -> tuple[int, Document]:
        status, document = answer(name)
        if status == 200:
            answered.set()
        return status, document

    monkeypatch.setattr(api, "job", job)
    monkeypatch.setattr(api, "sync", lambda: sync() if answered.is_set() else None)
    conf = {**in_pods, "image": "registry.example.org/embed-corpus:cpu", "price_per_hour": 3, "max_cost": 12}
    [run] = airflow.test(conf, **connection(tmp_path))
    assert run["state"] == "success", run["log"][-8000:]
    assert run["tasks"]["plan"] == ["success", 2]
    assert len(posted(api, "plan")) == 1 and api.deleted == []
    output = tmp_path / "claims" / "embed-corpus-data" / "vectors"
    ids = sorted(read_output(output)["id"].to_pylist())
    assert ids == sorted(f"part-{number}-{row}" for number in range(NUM_SHARDS) for row in range(ROWS))
    summaries = run["summaries"]
    [embed] = posted(api, "embed")
    assert summaries["embed[0]"] == {"job": embed["metadata"]["name"], "pods_done": 2, "pods_failed": 0}
    assert summaries["plan"]["rows"] == summaries["index"]["ntotal"] == NUM_SHARDS * ROWS
    assert summaries["verify"]["ok"] is True
    assert [event["uri"] for event in run["events"]] == ["file:///data/vectors"]

    for document in api.posted:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        assert document["metadata"]["namespace"] == "here"
    [config_map] = posted(api, "job")
    assert config_map["data"] == {"job.yaml": (tmp_path / "job.yaml").read_text()}
    assert faults([config_map, embed], DOCKERFILE) == []
    spec = embed["spec"]
    assert (spec["completions"], spec["parallelism"], spec["maxFailedIndexes"]) == (2, 2, 2)
    assert spec["activeDeadlineSeconds"] == 2 * 3600  # what 12 buys of two pods at 3 an hour each
    [container] = spec["template"]["spec"]["containers"]
    assert container["image"] == conf["image"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["AIRFLOW_CTX_DAG_RUN_ID"] == run["run_id"]
    assert environment["TRACEPARENT"].startswith("00-")
    [index] = posted(api, "index")
    assert index["spec"]["suspend"] is False and "completionMode" not in index["spec"]


def test_on_kubernetes_a_damaged_shard_or_a_deadline_fails_without_a_retry_and_the_rest_is_indexed(
    airflow: Airflow, tmp_path: Path, api: Api, in_pods: dict[str, Any]
) -> None:
    shards = tmp_path / "claims" / "embed-corpus-data" / "corpus"
    (shards / "part-2.parquet").write_bytes(b"PAR1 damaged")
    [damaged] = airflow.test(in_pods, **connection(tmp_path))
    assert damaged["tasks"]["plan"] == ["success", 1]
    assert damaged["tasks"]["embed[0]"] == ["failed", 1]
    assert damaged["tasks"]["index"] == ["success", 1]
    assert damaged["tasks"]["verify"][0] == "upstream_failed"
    assert damaged["summaries"]["embed[0]"]["pods_failed"] == 1
    assert damaged["summaries"]["index"]["ntotal"] == (NUM_SHARDS - 1) * ROWS
    assert "part-2.parquet" in damaged["log"]
    output = tmp_path / "claims" / "embed-corpus-data" / "vectors"
    assert len(Ledger(str(output)).commits()) == NUM_SHARDS - 1

    one_second = {"max_hours": 1 / 3600}  # a pod needs more to begin
    [late] = airflow.test({**in_pods, **one_second, "output": "/data/late"}, **connection(tmp_path))
    assert late["tasks"]["embed[0]"] == ["failed", 1]
    assert late["summaries"]["embed[0]"]["stopped"].startswith("DeadlineExceeded")


def test_without_the_kubernetes_provider_nothing_is_missing(airflow: Airflow) -> None:
    """Airflow imports both files when it looks for DAGs."""
    without = dict.fromkeys(("kubernetes", "airflow.providers.cncf.kubernetes.hooks.kubernetes"))
    imports = f"import sys; sys.modules |= {without}; sys.path.insert(0, {str(DAGS)!r})"
    airflow.call("-P", "-c", f"{imports}; import embed_corpus, embed_corpus_kubernetes")


def test_both_files_say_how_to_start() -> None:
    for path in sorted(DAGS.glob("*.py")):
        head = path.read_text(encoding="utf-8").split('"""')[1]
        assert "\n    kubectl kustomize" in head or "\n    airflow dags trigger" in head

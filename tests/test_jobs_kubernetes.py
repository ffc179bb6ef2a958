"""The manifests in jobs/kubernetes: valid, true to the code, and run as an Indexed Job by a simulator.

Nothing here needs a cluster: ``kubectl kustomize`` renders, kubernetes-validate knows the schemas, and the simulator
starts what the rendered manifests say as processes on this machine.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import pytest
import yaml

from pipeline.errors import EXIT_CONFIG, EXIT_DATA, EXIT_STOPPED
from pipeline.ledger import Ledger
from pipeline.ranks import Rank
from pipeline.tracing import POD, resource_attributes
from tests.conftest import ROOT, read_output, vectors_of, write_shard
from tests.kubernetes_rules import KUEUE, faults
from tests.kubernetes_simulator import Document, Job, Pod, render, translated
from tests.stand_in import vector_of

FOLDER = ROOT / "jobs" / "kubernetes"
OVERLAYS = ["cpu", "gpu", "kueue", "cron"]
# The oldest in which all of podFailurePolicy and backoffLimitPerIndex is stable, and the newest the validator knows.
VERSIONS = ["1.33", "1.37"]
DOCKERFILE = (ROOT / "jobs" / "Dockerfile").read_text(encoding="utf-8")
NUM_SHARDS, ROWS = 8, 25
EMBED, FINISH = "embed-corpus", "embed-corpus-finish"


@functools.cache
def _rendered(overlay: str) -> str:
    return json.dumps(render(FOLDER / "overlays" / overlay))


def rendered(overlay: str) -> list[Document]:
    documents: list[Document] = json.loads(_rendered(overlay))
    return documents


def named(documents: list[Document], name: str) -> Document:
    [found] = [each for each in documents if each["metadata"]["name"] == name and each["kind"] in ("Job", "CronJob")]
    return found


# Manifests


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", ["base", "storage", *(f"overlays/{name}" for name in OVERLAYS)])
def test_every_document_has_the_form_of_its_kind(folder: str, version: str) -> None:
    documents = render(FOLDER / folder)
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_misspelt_field_is_found(version: str) -> None:
    job = named(rendered("cpu"), EMBED)
    job["spec"]["backoffLimitPerIndexx"] = job["spec"].pop("backoffLimitPerIndex")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_all_rules(overlay: str) -> None:
    assert faults(rendered(overlay), DOCKERFILE) == []


def test_what_each_overlay_is_for() -> None:
    kinds = {overlay: [each["kind"] for each in rendered(overlay)] for overlay in OVERLAYS}
    assert kinds["cpu"] == kinds["gpu"] == kinds["kueue"] == ["ConfigMap", "Job", "Job"]
    assert kinds["cron"] == ["ConfigMap", "CronJob"]
    gpus = {
        overlay: [
            container["resources"]["limits"].get("nvidia.com/gpu")
            for document in rendered(overlay)
            if document["kind"] == "Job"
            for container in document["spec"]["template"]["spec"]["containers"]
        ]
        for overlay in OVERLAYS
    }
    assert gpus == {"cpu": [None, None], "gpu": ["1", "1"], "kueue": ["1", "1"], "cron": []}
    assert KUEUE in named(rendered("kueue"), EMBED)["metadata"]["labels"]


def pod(job: Document) -> Document:
    found: Document = job["spec"]["template"]["spec"]
    return found


def container(job: Document) -> Document:
    found: Document = pod(job)["containers"][0]
    return found


def rules(job: Document) -> list[Document]:
    found: list[Document] = job["spec"]["podFailurePolicy"]["rules"]
    return found


def without(place: Document, name: str) -> None:
    del place[name]


def put(place: Any, **values: Any) -> None:
    place.update(values)


# What is changed in the first Job of 'gpu', and what must be said of it. The schema finds none of these.
BROKEN: dict[str, tuple[Callable[[Document], Any], str]] = {
    "action misspelt": (lambda job: put(rules(job)[1], action="FailIndexx"), "action: FailIndexx is none of"),
    "mode misspelt": (lambda job: put(job["spec"], completionMode="indexed"), "completionMode: indexed is none of"),
    "not indexed": (lambda job: without(job["spec"], "completionMode"), "backoffLimitPerIndex needs completionMode"),
    "no limit an index": (
        lambda job: without(job["spec"], "backoffLimitPerIndex"), "FailIndex needs backoffLimitPerIndex",
    ),
    "more failed than there are": (
        lambda job: put(job["spec"], maxFailedIndexes=5), "maxFailedIndexes is more than completions",
    ),
    "limit of the whole": (lambda job: put(job["spec"], backoffLimit=6), "no backoffLimit"),
    "restarted in place": (lambda job: put(pod(job), restartPolicy="OnFailure"), "restartPolicy must be Never"),
    "replaced too early": (
        lambda job: put(job["spec"], podReplacementPolicy="TerminatingOrFailed"), "podReplacementPolicy must be Failed",
    ),
    "too many at once": (lambda job: put(job["spec"], parallelism=9), "parallelism is more than completions"),
    "for ever": (lambda job: without(job["spec"], "activeDeadlineSeconds"), "activeDeadlineSeconds is missing"),
    "never removed": (lambda job: without(job["spec"], "ttlSecondsAfterFinished"), "ttlSecondsAfterFinished is"),
    "another code": (lambda job: put(rules(job)[2]["onExitCodes"], values=[2, 79]), "exit code 78 gives Count"),
    "unknown code": (lambda job: put(rules(job)[2]["onExitCodes"], values=[2, 78, 79]), "exit codes [79] are none"),
    "stopped for ever": (lambda job: put(rules(job)[3], action="Ignore"), "exit code 75 gives Ignore, expected Count"),
    "codes unordered": (lambda job: put(rules(job)[2]["onExitCodes"], values=[78, 2]), "must be in order"),
    "operator misspelt": (lambda job: put(rules(job)[2]["onExitCodes"], operator="in"), "operator in is none of"),
    "another container": (
        lambda job: put(rules(job)[1]["onExitCodes"], containerName="main"), "container main, which is not there",
    ),
    "disruption not first": (lambda job: rules(job).append(rules(job).pop(0)), "of a disrupted pod gives"),
    "condition misspelt": (
        lambda job: put(rules(job)[0], onPodConditions=[{"type": "Disruption", "status": "True"}]),
        "is not DisruptionTarget",
    ),
    "both in one rule": (
        lambda job: put(rules(job)[0], onExitCodes={"operator": "In", "values": [75]}), "conditions, one of them",
    ),
    "world size drifted": (lambda job: put(job["spec"], completions=8), "WORLD_SIZE is 4, completions 8"),
    "world size not given": (lambda job: put(container(job), args=container(job)["args"][:3]), "args: --world-size"),
    "unknown variable": (
        lambda job: put(container(job), args=[*container(job)["args"], "$(RANK)"]), "$(RANK) is used in args",
    ),
    "killed while stopping": (
        lambda job: put(pod(job), terminationGracePeriodSeconds=20), "terminationGracePeriodSeconds must be above 20",
    ),
    "root": (lambda job: put(pod(job)["securityContext"], runAsUser=0), "must run as a user that is not root"),
    "no seccomp": (lambda job: without(pod(job)["securityContext"], "seccompProfile"), "seccompProfile must be"),
    "writable root": (
        lambda job: put(container(job)["securityContext"], readOnlyRootFilesystem=False), "readOnlyRootFilesystem must",
    ),
    "capabilities": (lambda job: without(container(job)["securityContext"], "capabilities"), "must drop ALL"),
    "escalation": (
        lambda job: without(container(job)["securityContext"], "allowPrivilegeEscalation"), "allowPrivilegeEscalation",
    ),
    "token": (lambda job: without(pod(job), "automountServiceAccountToken"), "automountServiceAccountToken must be"),
    "host path": (
        lambda job: put(pod(job)["volumes"][1], hostPath={"path": "/data"}), "of a kind that 'restricted' forbids",
    ),
    "no temporary folder": (lambda job: container(job)["volumeMounts"].pop(3), "TMPDIR is /tmp, where nothing can"),
    "read-only models": (
        lambda job: put(container(job)["volumeMounts"][2], readOnly=True), "HF_HOME is /models, where nothing can",
    ),
    "volume not there": (lambda job: pod(job)["volumes"].pop(1), "volumes and mounts differ: ['data']"),
    "claim not there": (
        lambda job: put(pod(job)["volumes"][1]["persistentVolumeClaim"], claimName="x"), "claim x is not in storage/",
    ),
    "shm on disk": (lambda job: put(pod(job)["volumes"][4], emptyDir={}), "/dev/shm is not an emptyDir in memory"),
    "ConfigMap not there": (
        lambda job: put(pod(job)["volumes"][0]["configMap"], name="x"), "is in no ConfigMap that is mounted",
    ),
    "key not there": (
        lambda job: put(container(job), args=[word.replace("job.yaml", "j.yaml") for word in container(job)["args"]]),
        "/etc/embed-corpus/j.yaml is in no ConfigMap",
    ),
    "no tag": (lambda job: put(container(job), image="registry.example.com/embed-corpus"), "is no target of the"),
    "image without CUDA": (
        lambda job: put(container(job), image="registry.example.com/embed-corpus:cpu"), "embed-corpus:cpu with a GPU",
    ),
    "no toleration": (lambda job: without(pod(job), "tolerations"), "a toleration is missing"),
    "no limits": (lambda job: without(container(job)["resources"], "limits"), "requests and limits"),
    "reason elsewhere": (
        lambda job: put(container(job), terminationMessagePath="/tmp/reason"), "terminationMessagePath is /tmp/reason",
    ),
    "reason only by itself": (
        lambda job: put(container(job), terminationMessagePolicy="File"), "must be FallbackToLogsOnError",
    ),
    "pod not known": (lambda job: container(job)["env"].pop(1), "the trace would not know POD_NAME"),
    "Secret needed": (
        lambda job: put(container(job)["envFrom"][0]["secretRef"], optional=False), "must be optional",
    ),
    "name too long": (lambda job: put(job["metadata"], name="x" * 62), "more than 63 characters"),
    "in a queue, not suspended": (lambda job: put(job["metadata"], labels={KUEUE: "q"}), "must begin suspended"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manifest_is_found(name: str) -> None:
    documents = rendered("gpu")
    change, said = BROKEN[name]
    change(named(documents, EMBED))
    assert any(said in fault for fault in faults(documents, DOCKERFILE)), faults(documents, DOCKERFILE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: put(spec, concurrencyPolicy="Allow"), "concurrencyPolicy must be Forbid"),
        (lambda spec: without(spec, "startingDeadlineSeconds"), "startingDeadlineSeconds must be a minute or more"),
        (lambda spec: put(spec, timeZone="Europe/Berlim"), "timeZone Europe/Berlim does not exist"),
        (lambda spec: put(spec, schedule="0 2 * *"), "has not five fields"),
        (lambda spec: put(spec, failedJobsHistoryLimit=0), "failedJobsHistoryLimit must keep some"),
        (lambda spec: put(spec["jobTemplate"]["spec"], activeDeadlineSeconds=172800), "more than a day"),
    ],
)
def test_a_broken_schedule_is_found(change: Callable[[Document], None], said: str) -> None:
    documents = rendered("cron")
    change(named(documents, "embed-corpus-nightly")["spec"])
    assert any(said in fault for fault in faults(documents, DOCKERFILE)), faults(documents, DOCKERFILE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: put(spec, suspend=False), "the second Job must be suspended"),
        (lambda spec: put(spec["podFailurePolicy"]["rules"][1], action="FailIndex"), "FailIndex needs backoffLimit"),
    ],
)
def test_a_broken_second_job_is_found(change: Callable[[Document], None], said: str) -> None:
    documents = rendered("cpu")
    change(named(documents, FINISH)["spec"])
    assert any(said in fault for fault in faults(documents, DOCKERFILE)), faults(documents, DOCKERFILE)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("modle: x", "job file"),
        ("max-hours: 8", "max_hours is not for a pod that is one of several"),
        ("verify: true", "verify is not for a pod that is one of several"),
        ("output: /elsewhere", "/elsewhere is below no claim"),
    ],
)
def test_a_broken_job_file_is_found(line: str, said: str) -> None:
    documents = rendered("cpu")
    [config_map] = [each for each in documents if each["kind"] == "ConfigMap"]
    config_map["data"]["job.yaml"] += line + "\n"
    assert any(said in fault for fault in faults(documents, DOCKERFILE)), faults(documents, DOCKERFILE)


@pytest.mark.parametrize("suffix", ["", "-wiki"])
def test_the_world_size_follows_a_patch_of_completions(tmp_path: Path, suffix: str) -> None:
    """The patch is the one that stands in the overlay 'cpu' as a comment; the suffix is for a second corpus."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "cpu"
    text = (overlay / "kustomization.yaml").read_text(encoding="utf-8")
    text, count = re.subn(r"^  # (- target: |  patch: |    - \{op: )", r"  \1", text, flags=re.MULTILINE)
    assert count == 4
    (overlay / "kustomization.yaml").write_text(text + (f"nameSuffix: {suffix}\n" if suffix else ""))
    documents = render(overlay)
    assert named(documents, EMBED + suffix)["spec"]["completions"] == 16
    assert faults(documents, DOCKERFILE) == []


def test_the_commands_between_the_two_jobs_wait_for_either_end_and_resume(tmp_path: Path) -> None:
    """Those in the comment of finish.yaml, with a kubectl whose answers are a Job's conditions as time goes on."""
    text = (FOLDER / "base" / "finish.yaml").read_text(encoding="utf-8")
    [waiting] = re.findall(r"^#   (until .+)$", text, flags=re.MULTILINE)
    [patch] = re.findall(r"^#   kubectl patch job embed-corpus-finish -p '(.+)'$", text, flags=re.MULTILINE)
    assert json.loads(patch) == {"spec": {"suspend": False}}
    for last in ("SuccessCriteriaMet Complete", "FailureTarget Failed", "Suspended Complete"):
        folder = tmp_path / last.replace(" ", "-")
        folder.mkdir()
        (folder / "answers").write_text(f"\nSuspended\nSuspended {last.split()[0]}\n{last}\nunreachable\n")
        (folder / "kubectl").write_text("#!/bin/sh\nhead -n 1 answers; sed -i 1d answers\n")
        (folder / "kubectl").chmod(0o755)
        environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", waiting.replace("sleep 10", "sleep 0")],
            cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=20, check=True,
        )  # fmt: skip
        assert done.stdout == f"{last}\n"
        assert (folder / "answers").read_text() == "unreachable\n"


# The simulator


@pytest.fixture
def cluster(tmp_path: Path, model_dir: str) -> Path:
    """A root with the two claims filled: shards, and a hub cache that holds the model the job file names."""
    documents = rendered("cpu")
    [config_map] = [each for each in documents if each["kind"] == "ConfigMap"]
    job = yaml.safe_load(config_map["data"]["job.yaml"])
    claims = tmp_path / "claims"
    places = {"/data": claims / "embed-corpus-data", "/models": claims / "embed-corpus-models"}
    for number in range(NUM_SHARDS):
        texts = [f"shard {number} row {row}" for row in range(ROWS)]
        write_shard(Path(translated(job["input"], places)) / f"part-{number}.parquet", texts)
    cached = places["/models"] / "hub" / f"models--{job['model'].replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / ("0" * 40)).symlink_to(model_dir)
    return tmp_path


Start = Callable[..., Job]


@pytest.fixture
def start(cluster: Path) -> Iterator[Start]:
    """Create a Job of the overlay 'cpu' in the cluster; what still runs in the end is killed."""
    jobs: list[Job] = []

    def create(name: str, documents: list[Document] | None = None, **extra: str) -> Job:
        jobs.append(Job(documents or rendered("cpu"), name, cluster, **extra))
        return jobs[-1]

    yield create
    for job in jobs:
        job.stop()


def output_of(cluster: Path) -> Path:
    return cluster / "claims" / "embed-corpus-data" / "vectors"


def check_every_row_once(cluster: Path, without: frozenset[int] = frozenset()) -> None:
    """All rows, in order, each with its vector, and an index over exactly these."""
    expected = [
        (f"part-{shard}:{row}", f"shard {shard} row {row}")
        for shard in range(NUM_SHARDS)
        for row in range(ROWS)
        if shard not in without
    ]
    table = read_output(output_of(cluster))
    assert table["id"].to_pylist() == [key for key, _ in expected]
    np.testing.assert_allclose(vectors_of(table), [vector_of(text) for _, text in expected], atol=1e-6)
    index = json.loads((output_of(cluster) / "index" / "index.json").read_text())
    assert index["ntotal"] == len(expected)
    assert not list(output_of(cluster).rglob("*.tmp"))
    for pod_folder in (cluster / "pods").iterdir():
        assert not list((pod_folder / "cwd").iterdir()), "written outside the volumes"


def one_at_work(job: Job, *others: Pod) -> Pod:
    """Wait until a pod embeds; one at another index than ``others``."""
    found: list[Pod] = []

    def look() -> bool:
        free = [pod for pod in job.running() if pod.index not in {other.index for other in others}]
        found.extend(pod for pod in free if "model ready" in pod.log.read_text())
        return bool(found)

    job.wait(look)
    return found[-1]


def finish(start: Start) -> Job:
    """The second Job, as the comment in its file starts it."""
    job = start(FINISH)
    job.sync()
    assert not job.pods, "it begins suspended"
    job.resume()
    job.wait()
    return job


def test_every_rank_does_its_share_and_the_second_job_the_index(cluster: Path, start: Start) -> None:
    job = start(EMBED)
    job.wait()
    assert (job.condition, sorted(pod.index or 0 for pod in job.pods)) == ("Complete", [0, 1, 2, 3])
    assert not (output_of(cluster) / "index").exists()
    for pod in job.pods:
        assert "2 of 2 shards" in pod.log.read_text()
        attributes = resource_attributes(Rank(pod.index or 0, 4), {**pod.environment, "KUBERNETES_SERVICE_HOST": "x"})
        assert set(POD.values()) <= attributes.keys()
        assert attributes["k8s.pod.name"] == pod.name
        assert attributes["k8s.job.completion_index"] == str(pod.index)
    assert len(Ledger(str(output_of(cluster))).commits()) == NUM_SHARDS
    assert finish(start).condition == "Complete"
    check_every_row_once(cluster)


@pytest.mark.slow
def test_disrupted_pods_are_replaced_and_not_counted_whether_they_could_stop_or_not(
    cluster: Path, start: Start
) -> None:
    job = start(EMBED, STAND_IN_SECONDS="1.5")
    in_order = one_at_work(job)
    in_order.delete("DisruptionTarget")
    in_a_hurry = one_at_work(job, in_order)
    in_a_hurry.delete("DisruptionTarget", grace_s=0)
    job.wait()
    assert (in_order.exit_code, in_a_hurry.exit_code) == (EXIT_STOPPED, 137)
    assert in_order.message == "interrupted; run the same command again to continue"
    assert job.condition == "Complete"
    assert Counter(pod.index for pod in job.pods) == Counter([0, 1, 2, 3, in_order.index, in_a_hurry.index])
    assert {pod.failures for pod in job.pods} == {0}
    assert finish(start).condition == "Complete"
    check_every_row_once(cluster)


@pytest.mark.slow
def test_a_killed_pod_counts_against_its_index_and_is_retried(cluster: Path, start: Start) -> None:
    job = start(EMBED, STAND_IN_SECONDS="1.5")
    first = one_at_work(job)
    first.kill()
    job.wait()
    assert (first.exit_code, job.condition) == (137, "Complete")
    assert "model ready" in first.message  # it left no reason: the end of its log is shown
    assert [pod.failures for pod in job.pods if pod.index == first.index] == [0, 1]
    assert {pod.failures for pod in job.pods if pod.index != first.index} == {0}
    assert finish(start).condition == "Complete"
    check_every_row_once(cluster)


def test_two_pods_at_one_index_do_no_harm(cluster: Path, start: Start) -> None:
    job = start(EMBED, STAND_IN_SECONDS="0.2")
    job.sync()
    second = job.start(0)
    job.wait()
    assert (job.condition, second.exit_code) == ("Complete", 0)
    assert [pod.exit_code for pod in job.pods] == [0] * 5
    assert finish(start).condition == "Complete"
    check_every_row_once(cluster)


def test_a_damaged_shard_fails_its_index_and_nothing_else(cluster: Path, start: Start) -> None:
    shard = cluster / "claims" / "embed-corpus-data" / "corpus" / "part-3.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])
    job = start(EMBED)
    job.wait()
    assert (job.condition, job.reason) == ("Failed", "FailedIndexes")
    [index] = job.failed_indexes
    [failed] = [pod for pod in job.pods if pod.index == index]  # one: it is not retried
    assert failed.exit_code == EXIT_DATA
    assert "part-3.parquet" in failed.message and "\n" not in failed.message  # the reason alone, not the log
    assert [pod.exit_code for pod in job.pods if pod.index != index] == [0] * 3
    last = finish(start)
    assert (last.condition, last.reason, len(last.pods)) == ("Failed", "PodFailurePolicy", 1)
    assert "part-3.parquet" in last.pods[0].message
    check_every_row_once(cluster, without=frozenset({3}))


def test_a_wrong_configuration_fails_the_whole_job(cluster: Path, start: Start) -> None:
    documents = rendered("cpu")
    [config_map] = [each for each in documents if each["kind"] == "ConfigMap"]
    config_map["data"]["job.yaml"] += "text-column: body\n"
    job = start(EMBED, documents)
    job.wait()
    assert (job.condition, job.reason) == ("Failed", "PodFailurePolicy")
    assert len(job.pods) <= 4
    failed = [pod for pod in job.pods if pod.exit_code == EXIT_CONFIG]
    assert failed
    assert "body" in failed[0].message and "\n" not in failed[0].message


def test_a_budget_that_is_reached_again_and_again_fails_its_index_and_the_second_job_does_the_rest(
    cluster: Path, start: Start
) -> None:
    documents = rendered("cpu")
    job_document = named(documents, EMBED)
    put(job_document["spec"], completions=1, parallelism=1, maxFailedIndexes=1, backoffLimitPerIndex=1)
    put(container(job_document)["env"][0], value="1")
    container(job_document)["args"] += ["--max-tokens", "1"]  # two or three of the eight shards a pod
    job = start(EMBED, documents)
    job.wait()
    assert (job.condition, job.reason) == ("Failed", "FailedIndexes")
    assert [(pod.exit_code, pod.failures) for pod in job.pods] == [(EXIT_STOPPED, 0), (EXIT_STOPPED, 1)]
    assert all("--max-tokens 1 is reached" in pod.message for pod in job.pods)
    assert 2 <= len(Ledger(str(output_of(cluster))).commits()) < NUM_SHARDS
    assert finish(start).condition == "Complete"
    check_every_row_once(cluster)


def test_the_nightly_job_embeds_what_is_new_and_updates_the_index(cluster: Path, start: Start) -> None:
    late = cluster / "claims" / "embed-corpus-data" / "corpus" / f"part-{NUM_SHARDS - 1}.parquet"
    aside = cluster / late.name
    late.rename(aside)
    first = start("embed-corpus-nightly", rendered("cron"))
    first.wait()
    assert first.condition == "Complete"
    check_every_row_once(cluster, without=frozenset({NUM_SHARDS - 1}))
    aside.rename(late)
    second = start("embed-corpus-nightly", rendered("cron"))
    second.wait()
    assert second.condition == "Complete"
    assert f"1 of {NUM_SHARDS} shards" in second.pods[0].log.read_text()
    check_every_row_once(cluster)

"""The Jobs that the DAG beside this file starts: those of ``jobs/kubernetes``, rendered, with a step's own command.

    kubectl kustomize jobs/kubernetes/overlays/gpu > embed-corpus.yaml        # the DAG's parameter 'manifests'

``embed`` is the Indexed Job ``embed-corpus``; the other steps are the Job ``embed-corpus-finish``, one pod without a
rank. A Job's name follows from the DAG run, so a task that is tried again while its Job still works waits for that one.
Waiting takes a worker slot, but hardly any work. The account of the connection may create, get and delete Jobs, create
ConfigMaps, and list pods and read their logs.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from airflow.sdk.exceptions import AirflowFailException

if TYPE_CHECKING:
    from kubernetes.client import V1Job, V1Pod

INDEXED, SINGLE, CONTAINER = "embed-corpus", "embed-corpus-finish", "embed"
QUEUE = "kueue.x-k8s.io/queue-name"
EXIT_BUG, EXIT_DATA, EXIT_STOPPED, EXIT_CONFIG = 1, 65, 75, (78, 2)
POLL_S = 10

Document = dict[str, Any]


@dataclass(frozen=True)
class End:
    """What became of a Job.

    Attributes:
        exit_code: as if it were one process.
        log: of the pod of a Job that has one; empty for ``embed``.
        reason: why it failed.
        out_of_time: it ran into its deadline.
        pods: its name and how many pods ended well or not.
    """

    exit_code: int
    log: str
    reason: str
    out_of_time: bool
    pods: dict[str, str | int]


class PodJob:
    """A step as a Job.

    Args:
        step: its name.
        words: arguments of ``embed-corpus``.
        params: of the DAG run.
        environment: added to the container's.
        job_file: the job file's text; pods find it as ``/etc/embed-corpus/job.yaml``.
        say: takes a line of the log.
    """

    def __init__(
        self,
        step: str,
        words: list[str],
        params: dict[str, Any],
        environment: dict[str, str],
        job_file: str,
        say: Callable[[str], None],
    ) -> None:
        # Here: Airflow looks for DAGs in this file, too, and must find no error where the provider is not wanted.
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

        self._namespace, self._say = params["namespace"], say
        path = Path(params["folder"]) / params["manifests"]
        try:
            documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise AirflowFailException(f"manifests: {path}: {error.strerror}") from None
        self._config_map, self._job = documents_of(step, words, params, environment, job_file, documents)
        self._name, self._is_indexed = self._job["metadata"]["name"], step == "embed"
        hook = KubernetesHook()
        self._batch, self._core = hook.batch_v1_client, hook.core_v1_client

    def run(self) -> End:
        """Create the Job, or find the one that an earlier try of the task has created, and wait for its end."""
        self._create()
        seen = None
        while True:
            job = self._batch.read_namespaced_job_status(self._name, self._namespace)
            status = job.status
            counts = tuple(each or 0 for each in (status.active, status.succeeded, status.failed))
            if counts != seen:
                self._say("pods of {}: {} working, {} done, {} failed".format(self._name, *counts))
                seen = counts
            if end := ended(job):
                return self._outcome(job, *end)
            time.sleep(POLL_S)

    def delete(self) -> None:
        """End the Job; its pods have their grace period."""
        self._unless(
            404,  # gone already
            lambda: self._batch.delete_namespaced_job(self._name, self._namespace, propagation_policy="Foreground"),
        )

    def _create(self) -> None:
        # Its name follows from its content, so it is there already or as it must be.
        self._unless(409, lambda: self._core.create_namespaced_config_map(self._namespace, self._config_map))
        while not self._unless(409, lambda: self._batch.create_namespaced_job(self._namespace, self._job)):
            there = self._unless(404, lambda: self._batch.read_namespaced_job_status(self._name, self._namespace))
            if there and not ended(there) and not there.metadata.deletion_timestamp:
                self._say(f"{self._name} works already: waiting for it")
                return
            if there and ended(there):
                self.delete()  # of an earlier try; it is done again, which finds finished shards
            time.sleep(POLL_S / 10)
        self._say(f"created the Job {self._name} in {self._namespace}")

    def _unless(self, status: int, call: Callable[[], Any]) -> Any:
        """What the call returns; None when the API answers with this status."""
        from kubernetes.client import ApiException

        try:
            return call()
        except ApiException as error:
            if error.status != status:
                raise
            return None

    def _outcome(self, job: V1Job, condition: str, reason: str, message: str) -> End:
        selector = f"batch.kubernetes.io/controller-uid={job.metadata.uid}"
        pods = self._core.list_namespaced_pod(self._namespace, label_selector=selector).items
        states = [(pod, terminated(pod)) for pod in sorted(pods, key=lambda pod: pod.metadata.creation_timestamp)]
        bad = [(pod, state) for pod, state in states if state is not None and state.exit_code != 0]
        for pod, state in bad:
            self._say(f"{pod.metadata.name} ended with exit code {state.exit_code}: {(state.message or '').strip()}")
        counts = {"job": self._name, "pods_done": job.status.succeeded or 0, "pods_failed": job.status.failed or 0}
        over = [pod for pod, state in states if state is not None]
        log = "" if self._is_indexed or not over else self._log(over[-1])
        if condition == "Complete":
            return End(0, log, "", False, counts)
        why = "; ".join(dict.fromkeys(state.message.strip() for _, state in bad if state.message)) or message
        code = exit_code(reason, [state.exit_code for _, state in bad])
        return End(code, log, f"{reason}: {why}", reason == "DeadlineExceeded", counts)

    def _log(self, pod: V1Pod) -> str:
        # As it is: the client would take a log that is JSON apart and put it together as Python writes it.
        read = functools.partial(self._core.read_namespaced_pod_log, _preload_content=False)
        response = self._unless(404, lambda: read(pod.metadata.name, self._namespace))
        return "" if response is None else response.data.decode("utf-8", "replace")


def documents_of(
    step: str,
    words: list[str],
    params: dict[str, Any],
    environment: dict[str, str],
    job_file: str,
    documents: list[Document],
) -> tuple[Document, Document]:
    """The ConfigMap and the Job of a step, from rendered manifests.

    Raises:
        AirflowFailException: they are not those of ``jobs/kubernetes``.
    """
    name = INDEXED if step == "embed" else SINGLE
    found = [each for each in documents if each and each.get("kind") == "Job" and each["metadata"]["name"] == name]
    if len(found) != 1:
        raise AirflowFailException(
            f"manifests: {params['manifests']} has {len(found)} Jobs called {name}, expected one; render an overlay "
            "of jobs/kubernetes with kubectl kustomize"
        )
    job = copy.deepcopy(found[0])
    metadata, spec = job["metadata"], job["spec"]
    digest = hashlib.sha256(f"{environment['AIRFLOW_CTX_DAG_ID']} {environment['AIRFLOW_CTX_DAG_RUN_ID']}".encode())
    metadata |= {"name": f"{INDEXED}-{step}-{digest.hexdigest()[:10]}", "namespace": params["namespace"]}
    if QUEUE not in metadata.get("labels", {}):
        spec["suspend"] = False
    if step == "embed":
        if params["world_size"] is not None:
            spec["completions"] = spec["parallelism"] = params["world_size"]
            spec["maxFailedIndexes"] = min(spec["maxFailedIndexes"], params["world_size"])
        environment = {**environment, "WORLD_SIZE": str(spec["completions"])}
        spec["activeDeadlineSeconds"] = deadline_s(params, spec)
    pod = spec["template"]["spec"]
    [container] = [each for each in pod["containers"] if each["name"] == CONTAINER]
    container["args"] = words
    if params["image"] is not None:
        container["image"] = params["image"]
    kept = [each for each in container["env"] if each["name"] not in environment]
    container["env"] = kept + [{"name": key, "value": value} for key, value in environment.items()]
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"embed-corpus-job-{hashlib.sha256(job_file.encode()).hexdigest()[:10]}",
            "namespace": params["namespace"],
            "labels": dict(metadata.get("labels", {})),
        },
        "data": {"job.yaml": job_file},
        "immutable": True,
    }
    [volume] = [each for each in pod["volumes"] if "configMap" in each]
    volume["configMap"]["name"] = config_map["metadata"]["name"]
    return config_map, job


def deadline_s(params: dict[str, Any], spec: Document) -> int:
    """Seconds, by the hours and the cost that are allowed; never more than the manifest has."""
    hours = [] if params["max_hours"] is None else [params["max_hours"]]
    if params["max_cost"] is not None:
        hours.append(params["max_cost"] / params["price_per_hour"] / spec["parallelism"])
    return min([spec["activeDeadlineSeconds"], *(max(1, int(each * 3600)) for each in hours)])


def ended(job: V1Job) -> tuple[str, str, str] | None:
    """Condition, reason and message of a Job that has ended."""
    for each in job.status.conditions or []:
        if each.type in ("Complete", "Failed") and each.status == "True":
            return each.type, each.reason or each.type, each.message or ""
    return None


def terminated(pod: V1Pod) -> Any:
    """How the container ended; None where it has not, or never began."""
    for each in pod.status.container_statuses or []:
        if each.name == CONTAINER:
            return each.state.terminated
    return None


def exit_code(reason: str, codes: list[int]) -> int:
    """Of a failed Job, from the reason in its condition and the exit codes of its failed pods."""
    if reason == "DeadlineExceeded":
        return EXIT_STOPPED
    for code in EXIT_CONFIG:
        if code in codes:
            return code
    others = [code for code in codes if code != EXIT_DATA]
    return others[-1] if others else EXIT_DATA if codes else EXIT_BUG

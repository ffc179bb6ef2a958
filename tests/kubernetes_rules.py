"""What must hold of rendered manifests beyond their schema: fields that must fit each other, the code, and the image.

The API server would refuse some of it, the rest it would accept and do something else than was meant.
"""

from __future__ import annotations

import functools
import itertools
import re
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import build_config
from pipeline.errors import EXIT_BUG, EXIT_CONFIG, EXIT_DATA, EXIT_STOPPED, EXIT_USAGE, ConfigError
from pipeline.termination import DEFAULT_PATH, VARIABLE
from pipeline.tracing import POD
from tests.conftest import ROOT
from tests.kubernetes_simulator import Document, action, image_environment, render

STOP_S = 20  # what a run needs to end after SIGTERM
KUEUE = "kueue.x-k8s.io/queue-name"
ALLOWED = {
    "completionMode": {"Indexed", "NonIndexed"},
    "podReplacementPolicy": {"Failed", "TerminatingOrFailed"},
    "action": {"Ignore", "Count", "FailIndex", "FailJob"},
    "concurrencyPolicy": {"Allow", "Forbid", "Replace"},
    "restartPolicy": {"Never", "OnFailure", "Always"},
    "terminationMessagePolicy": {"File", "FallbackToLogsOnError"},
    "fsGroupChangePolicy": {"Always", "OnRootMismatch"},
}


def faults(documents: list[Document], dockerfile: str) -> list[str]:
    """All that is wrong with a rendered overlay, in words.

    Args:
        documents: as ``render`` gives them.
        dockerfile: its text.
    """
    return list(_faults(documents, dockerfile))


def _faults(documents: list[Document], dockerfile: str) -> Iterator[str]:
    yield from _unknown_words(documents)
    for document in documents:
        if document["kind"] == "Job":
            spec = document["spec"]
            queue = document["metadata"].get("labels", {}).get(KUEUE)
            if queue and not spec.get("suspend"):
                yield "a Job in a queue of Kueue must begin suspended"
            if not _is_indexed(spec) and (queue or not spec.get("suspend")):
                yield "the second Job must be suspended and in no queue, or it starts beside the first"
        elif document["kind"] == "CronJob":
            spec = document["spec"]["jobTemplate"]["spec"]
            yield from _of_schedule(document)
        else:
            continue
        yield from _of_retries(spec)
        yield from _of_policy(spec)
        yield from _of_pod(spec["template"]["spec"], dockerfile)
        yield from _of_run(spec, documents)
        longest = f"{document['metadata']['name']}-{spec['completions'] - 1}"
        if len(longest) > 63:
            yield f"{longest} is no host name: more than 63 characters"


def _is_indexed(spec: Document) -> bool:
    return bool(spec.get("completionMode") == "Indexed")


def _unknown_words(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ALLOWED and isinstance(value, str) and value not in ALLOWED[key]:
                yield f"{key}: {value} is none of {', '.join(sorted(ALLOWED[key]))}"
            yield from _unknown_words(value)
    elif isinstance(node, list):
        for value in node:
            yield from _unknown_words(value)


def _of_retries(spec: Document) -> Iterator[str]:
    per_index = [name for name in ("backoffLimitPerIndex", "maxFailedIndexes") if name in spec]
    if _is_indexed(spec):
        if len(per_index) < 2 or "backoffLimit" in spec:
            yield "an Indexed Job counts retries by index: backoffLimitPerIndex and maxFailedIndexes, no backoffLimit"
        elif spec["maxFailedIndexes"] > spec["completions"]:
            yield "maxFailedIndexes is more than completions"
    elif per_index:
        yield f"{per_index[0]} needs completionMode Indexed"
    elif "backoffLimit" not in spec:
        yield "backoffLimit is missing"
    if spec["parallelism"] > spec["completions"]:
        yield "parallelism is more than completions"
    if spec.get("podReplacementPolicy") != "Failed":
        yield "podReplacementPolicy must be Failed: with a podFailurePolicy nothing else is allowed"
    for name in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if not spec.get(name):
            yield f"{name} is missing"


def _of_policy(spec: Document) -> Iterator[str]:
    names = {container["name"] for container in spec["template"]["spec"]["containers"]}
    rules = spec["podFailurePolicy"].get("rules", [])
    for rule in rules:
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "a rule of podFailurePolicy has exit codes or conditions, one of them"
            return
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
            yield "FailIndex needs backoffLimitPerIndex"
        asked = rule.get("onExitCodes")
        if asked and asked["operator"] not in ("In", "NotIn"):
            yield f"operator {asked['operator']} is none of In, NotIn"
        if asked and asked.get("containerName") not in names:
            yield f"a rule of podFailurePolicy is about the container {asked.get('containerName')}, which is not there"
        if asked and (asked["values"] != sorted(set(asked["values"])) or 0 in asked["values"]):
            yield f"exit codes {asked['values']} must be in order, each once, without 0"
        for pattern in rule.get("onPodConditions", []):
            if pattern != {"type": "DisruptionTarget", "status": "True"}:
                yield f"condition {pattern} is not DisruptionTarget: True"
    expected = {
        EXIT_BUG: "Count",
        EXIT_USAGE: "FailJob",
        EXIT_DATA: "FailIndex" if _is_indexed(spec) else "FailJob",
        EXIT_STOPPED: "Count",
        EXIT_CONFIG: "FailJob",
        137: "Count",
        143: "Count",
    }
    for code, wanted in expected.items():
        if (found := action(spec["podFailurePolicy"], code, set())) != wanted:
            yield f"exit code {code} gives {found}, expected {wanted}"
        if (found := action(spec["podFailurePolicy"], code, {"DisruptionTarget"})) != "Ignore":
            yield f"exit code {code} of a disrupted pod gives {found}, expected Ignore"
    named = {code for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    if named - set(expected):
        yield f"exit codes {sorted(named - set(expected))} are none of the command's"


def _of_pod(pod: Document, dockerfile: str) -> Iterator[str]:
    [container] = pod["containers"]
    if pod.get("restartPolicy") != "Never":
        yield "restartPolicy must be Never: with a podFailurePolicy nothing else is allowed"
    if pod.get("terminationGracePeriodSeconds", 30) <= STOP_S:
        yield f"terminationGracePeriodSeconds must be above {STOP_S}, which a run needs to stop"
    yield from _of_security(pod, container)
    yield from _of_resources(pod, container, dockerfile)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    if volumes.keys() != mounts.keys():
        yield f"volumes and mounts differ: {sorted(volumes.keys() ^ mounts.keys())}"
    image = image_environment()
    writable = {mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")}
    for what, path in [("TMPDIR", "/tmp"), *((name, image[name]) for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"))]:
        if not any(_is_below(path, place) for place in writable):
            yield f"{what} is {path}, where nothing can be written"
    if not any(
        mount["mountPath"] == "/dev/shm" and volumes[name].get("emptyDir", {}).get("medium") == "Memory"
        for name, mount in mounts.items()
        if name in volumes
    ):
        yield "/dev/shm is not an emptyDir in memory"
    path = container.get("terminationMessagePath")
    if not path == image[VARIABLE] == DEFAULT_PATH:
        yield f"terminationMessagePath is {path}, the run writes to {image[VARIABLE]}"
    if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        yield "terminationMessagePolicy must be FallbackToLogsOnError, or a crash has no reason"
    given = {variable["name"] for variable in container["env"]}
    if missing := POD.keys() - given - {"JOB_COMPLETION_INDEX"}:  # that one comes from the Job controller
        yield f"the trace would not know {', '.join(sorted(missing))}"
    for source in container.get("envFrom", []):
        if not source["secretRef"].get("optional"):
            yield "a Secret that is not shipped must be optional"


def _of_security(pod: Document, container: Document) -> Iterator[str]:
    """The profile 'restricted' of the Pod Security Standards, and a root file system that is read-only."""
    of_pod, own = pod.get("securityContext", {}), container.get("securityContext", {})
    if not of_pod.get("runAsNonRoot") or not isinstance(of_pod.get("runAsUser"), int) or of_pod["runAsUser"] == 0:
        yield "securityContext: must run as a user that is not root, by number"
    if of_pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "securityContext: seccompProfile must be RuntimeDefault"
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "securityContext: allowPrivilegeEscalation must be false"
    if own.get("capabilities") != {"drop": ["ALL"]}:
        yield "securityContext: capabilities must drop ALL"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "securityContext: readOnlyRootFilesystem must be true"
    if pod.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false: the run does not talk to Kubernetes"
    if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "securityContext: nothing of the host"
    for volume in pod["volumes"]:
        if volume.keys() - {"name", "configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}:
            yield f"securityContext: volume {volume['name']} is of a kind that 'restricted' forbids"


def _of_resources(pod: Document, container: Document, dockerfile: str) -> Iterator[str]:
    resources = container.get("resources", {})
    limits = resources.get("limits", {})
    if resources.get("requests") != limits or not {"cpu", "memory"} <= limits.keys():
        yield "resources: requests and limits of cpu and memory must be given and be the same"
    gpu = "nvidia.com/gpu" in limits
    targets = re.findall(r"^FROM runtime AS (\w+)$", dockerfile, flags=re.MULTILINE)
    name, _, tag = container["image"].rpartition(":")
    if not name.endswith("/embed-corpus") or tag not in targets:
        yield f"image {container['image']} is no target of the Dockerfile ({', '.join(targets)}) in a registry"
    elif (tag == "cuda") != gpu:
        yield f"image {container['image']} with{'' if gpu else 'out'} a GPU"
    if gpu and not any(each["key"] == "nvidia.com/gpu" for each in pod.get("tolerations", [])):
        yield "nodes with a GPU are tainted: a toleration is missing"


def _of_run(spec: Document, documents: list[Document]) -> Iterator[str]:
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    arguments = container["args"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    unknown = [name for word in arguments for name in re.findall(r"\$\((\w+)\)", word) if name not in environment]
    if unknown:
        yield f"$({unknown[0]}) is used in args and not in env"
    if ("--world-size", "$(WORLD_SIZE)") not in itertools.pairwise(arguments):
        yield "args: --world-size $(WORLD_SIZE) is missing"
    if environment.get("WORLD_SIZE") != str(spec["completions"]):
        yield f"WORLD_SIZE is {environment.get('WORLD_SIZE')}, completions {spec['completions']}"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in container["volumeMounts"]}
    config_maps = {each["metadata"]["name"]: each["data"] for each in documents if each["kind"] == "ConfigMap"}
    for volume in volumes.values():
        if (claim := volume.get("persistentVolumeClaim", {}).get("claimName", "")) and claim not in shipped_claims():
            yield f"claim {claim} is not in storage/"
        if (name := volume.get("configMap", {}).get("name", "")) and name not in config_maps:
            yield f"ConfigMap {name} is not there"
    job = Path(arguments[arguments.index("--job") + 1])
    data = config_maps.get(places.get(str(job.parent), {}).get("configMap", {}).get("name", ""), {})
    if job.name not in data:
        yield f"{job} is in no ConfigMap that is mounted"
        return
    yield from _of_job_file(data[job.name], places)


def _of_job_file(text: str, places: dict[str, Document]) -> Iterator[str]:
    options = {key.replace("-", "_"): value for key, value in yaml.safe_load(text).items()}
    try:
        config = build_config(None, options)
    except ConfigError as error:
        yield f"job file: {error}"
        return
    for name in ("rank", "world_size", "prune", "verify", "max_tokens", "max_cost", "max_hours"):
        if getattr(config, name):
            yield f"job file: {name} is not for a pod that is one of several, and may be retried"
    for path in [*config.input, config.output]:
        if "://" not in path and not any(
            _is_below(path, place) for place, volume in places.items() if "persistentVolumeClaim" in volume
        ):
            yield f"job file: {path} is below no claim"


def _of_schedule(document: Document) -> Iterator[str]:
    spec = document["spec"]
    if spec.get("concurrencyPolicy") != "Forbid":
        yield "concurrencyPolicy must be Forbid"
    if spec.get("startingDeadlineSeconds", 0) < 60:
        yield "startingDeadlineSeconds must be a minute or more: 100 missed starts end the schedule, 10 s may miss one"
    if spec.get("timeZone") not in zoneinfo.available_timezones():
        yield f"timeZone {spec.get('timeZone')} does not exist"
    fields = str(spec.get("schedule")).split()
    if len(fields) != 5 or not all(re.fullmatch(r"[\d*/,-]+", each) for each in fields):
        yield f"schedule {spec.get('schedule')} has not five fields"
    for name in ("successfulJobsHistoryLimit", "failedJobsHistoryLimit"):
        if not spec.get(name):
            yield f"{name} must keep some: they hold the reasons"
    if len(document["metadata"]["name"]) > 52:
        yield "the name of a CronJob has 52 characters at most"
    if spec["jobTemplate"]["spec"].get("activeDeadlineSeconds", 0) > 86400:
        yield "activeDeadlineSeconds is more than a day: the next one would be left out"


@functools.cache
def shipped_claims() -> frozenset[str]:
    return frozenset(each["metadata"]["name"] for each in render(ROOT / "jobs" / "kubernetes" / "storage"))


def _is_below(path: str, place: str) -> bool:
    return Path(path).is_relative_to(place)

"""What Kubernetes does with a Job, on this machine: pods become processes, volumes folders, the controller a method.

It starts from rendered manifests and takes from them all that it can: arguments, environment, volumes, ConfigMap, exit
code policy, retries, grace period, termination message. Paths of the container are replaced by folders below one root,
the image by its ENTRYPOINT with the stand-in encoder behind it. The rules of the controller (which rule of the policy
fits, when an index or a Job has failed) are those of pkg/controller/job in Kubernetes 1.33. Delays are shortened.

    python -m tests.kubernetes_simulator ARGUMENTS        the command 'embed-corpus' with the stand-in encoder
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.conftest import ROOT, STAND_IN

KUBECTL = Path(sys.executable).parent / "kubectl"
MAX_LOG_BYTES = 2048  # of a log that becomes the termination message
BACKOFF_S = 0.05  # before the first retry of an index, doubled for each further one; Kubernetes has 10 s

Document = dict[str, Any]


def render(folder: Path) -> list[Document]:
    """The documents that ``kubectl apply -k`` would send."""
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def entrypoint(dockerfile: Path = ROOT / "jobs" / "Dockerfile") -> list[str]:
    """What the image runs, with arguments behind it."""
    [line] = re.findall(r"^ENTRYPOINT (.+)$", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    words: list[str] = yaml.safe_load(line)
    return words


def action(policy: Document | None, exit_code: int, conditions: set[str]) -> str:
    """Of the first rule that fits; ``Count`` where none does.

    Args:
        policy: ``spec.podFailurePolicy``.
        exit_code: of the container, not 0.
        conditions: types of the pod's conditions that are true.
    """
    for rule in (policy or {}).get("rules", []):
        if "onExitCodes" in rule:
            asked = rule["onExitCodes"]
            if (exit_code in asked["values"]) == (asked["operator"] == "In"):
                return str(rule["action"])
        elif any(pattern["type"] in conditions and pattern["status"] == "True" for pattern in rule["onPodConditions"]):
            return str(rule["action"])
    return "Count"


@dataclass
class Pod:
    """One process and what is known of it.

    Attributes:
        index: its completion index; None in a Job without indexes.
        failures: how often its index had failed, by the policy's count, when it was started.
        conditions: types of its conditions that are true.
        exit_code: of the container: 128 and the signal's number for one that was killed; None while it runs.
        message: its termination message.
    """

    name: str
    index: int | None
    failures: int
    process: subprocess.Popen[str]
    log: Path
    reason_file: Path
    spec: Document
    environment: dict[str, str]
    conditions: set[str] = field(default_factory=set)
    exit_code: int | None = None
    message: str = ""
    kill_at: float | None = None

    def delete(self, *conditions: str, grace_s: float | None = None) -> None:
        """SIGTERM, and SIGKILL when the grace period is over.

        Args:
            conditions: such as ``DisruptionTarget``, which evictions, preemption and drains leave on the pod.
            grace_s: in place of the pod's own, as a node that is in a hurry has it.
        """
        self.conditions |= set(conditions)
        self.kill_at = time.monotonic() + (self.spec["terminationGracePeriodSeconds"] if grace_s is None else grace_s)
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """As when memory ends: everything in the container is gone at once."""
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def poll(self) -> bool:
        """Whether it has ended; notes the exit code and the message when it has."""
        if self.exit_code is None and self.process.poll() is None:
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                self.kill()
            return False
        if self.exit_code is None:
            code = self.process.returncode
            self.exit_code = code if code >= 0 else 128 - code
            self.message = self._termination_message()
        return True

    def _termination_message(self) -> str:
        text = self.reason_file.read_text(encoding="utf-8")
        container = self.spec["containers"][0]
        if not text and self.exit_code and container["terminationMessagePolicy"] == "FallbackToLogsOnError":
            text = self.log.read_text(encoding="utf-8")[-MAX_LOG_BYTES:]
        return text


class Job:
    """A Job of a rendered overlay, or one that its CronJob starts.

    Args:
        documents: the rendered overlay.
        name: of the Job or CronJob.
        root: holds the volumes: ``claims/NAME`` for each claim, the rest a folder a pod.
        extra: environment of the machine that no manifest can know, such as settings of the stand-in.
    """

    def __init__(self, documents: list[Document], name: str, root: Path, **extra: str) -> None:
        [self.document] = [
            each for each in documents if each["kind"] in ("Job", "CronJob") and each["metadata"]["name"] == name
        ]
        is_cron = self.document["kind"] == "CronJob"
        self.spec: Document = self.document["spec"]["jobTemplate"]["spec"] if is_cron else self.document["spec"]
        self.name, self.root, self.suspended = name, root, bool(self.spec.get("suspend"))
        maps = [each for each in documents if each["kind"] == "ConfigMap"]
        self._config_maps = {each["metadata"]["name"]: each["data"] for each in maps}
        self.pods: list[Pod] = []
        self.condition, self.reason = "", ""  # Complete or Failed, and why
        self.failed_indexes: set[int] = set()
        self._succeeded: set[int] = set()
        self._counted: set[str] = set()  # names of pods whose end is taken into account
        self._failures: dict[int, int] = {}
        self._ignored: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._extra = extra

    @property
    def is_indexed(self) -> bool:
        return bool(self.spec.get("completionMode") == "Indexed")

    def resume(self) -> None:
        self.suspended = False

    def running(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.exit_code is None]

    def sync(self) -> None:
        """Look at the pods once, as the controller does, and start those that are missing."""
        for pod in self.pods:
            if pod.poll() and pod.name not in self._counted:
                self._counted.add(pod.name)
                self._ended(pod)
        if self.condition or self.suspended:
            return
        # podReplacementPolicy Failed: who is still ending holds the index.
        busy = {pod.index or 0 for pod in self.running()}
        for index in range(self.spec["completions"]):
            wanted = index not in busy | self._succeeded | self.failed_indexes
            is_time = time.monotonic() >= self._not_before.get(index, 0)
            if wanted and is_time and len(self.running()) < self.spec["parallelism"]:
                self.start(index)

    def wait(self, until: Callable[[], bool] | None = None, timeout_s: float = 120) -> None:
        """Sync until the Job has ended, or until something has become true."""
        give_up = time.monotonic() + timeout_s
        while not (until() if until else self.condition and not self.running()):
            assert time.monotonic() < give_up, "\n".join([repr(self.pods), *(pod.log.read_text() for pod in self.pods)])
            assert not (until and self.condition), (self.condition, self.reason, self.pods)
            self.sync()
            time.sleep(0.02)

    def stop(self) -> None:
        """Leave no process behind, whatever became of a test."""
        for pod in self.running():
            if pod.process.poll() is None:
                pod.kill()

    def _ended(self, pod: Pod) -> None:
        index = pod.index or 0
        if pod.exit_code == 0:
            self._succeeded.add(index)
            if len(self._succeeded) == self.spec["completions"]:
                self._finish("Complete", "")
        elif index not in self._succeeded:
            assert pod.exit_code is not None
            self._failed(pod, index, action(self.spec.get("podFailurePolicy"), pod.exit_code, pod.conditions))
        everything = len(self.failed_indexes) + len(self._succeeded) == self.spec["completions"]
        if self.failed_indexes and everything:
            self._finish("Failed", "FailedIndexes")

    def _failed(self, pod: Pod, index: int, verdict: str) -> None:
        if verdict == "FailJob":
            self._finish("Failed", "PodFailurePolicy")
        elif verdict == "Ignore":
            self._ignored[index] = self._ignored.get(index, 0) + 1
        else:
            self._failures[index] = pod.failures + 1
            if not self.is_indexed:
                if sum(self._failures.values()) > self.spec["backoffLimit"]:
                    self._finish("Failed", "BackoffLimitExceeded")
            elif verdict == "FailIndex" or pod.failures >= self.spec["backoffLimitPerIndex"]:
                self.failed_indexes.add(index)
                if len(self.failed_indexes) > self.spec["maxFailedIndexes"]:
                    self._finish("Failed", "MaxFailedIndexesExceeded")
        failures = self._failures.get(index, 0) + self._ignored.get(index, 0)  # both wait longer each time
        self._not_before[index] = time.monotonic() + BACKOFF_S * 2.0 ** max(0, failures - 1)

    def _finish(self, condition: str, reason: str) -> None:
        if not self.condition:
            self.condition, self.reason = condition, reason
            for pod in self.running() if condition == "Failed" else ():
                if pod.process.poll() is None:
                    pod.delete()

    def start(self, index: int) -> Pod:
        """One pod at this index, whatever else runs there."""
        template = self.spec["template"]
        spec: Document = template["spec"]
        [container] = spec["containers"]
        name = f"{self.name}-{f'{index}-' if self.is_indexed else ''}{uuid.uuid4().hex[:5]}"
        labels = {**template.get("metadata", {}).get("labels", {}), "batch.kubernetes.io/job-name": self.name}
        folder = self.root / "pods" / name
        (folder / "cwd").mkdir(parents=True)
        folders = {volume["name"]: self._volume(volume, folder) for volume in spec["volumes"]}
        places = {mount["mountPath"]: folders[mount["name"]] for mount in container["volumeMounts"]}
        reason_file = places[container["terminationMessagePath"]] = folder / "termination-log"
        reason_file.touch()
        for volume in spec["volumes"]:
            for key, text in self._config_maps[volume["configMap"]["name"]].items() if "configMap" in volume else ():
                (folders[volume["name"]] / key).write_text(translated(text, places), encoding="utf-8")
        environment = {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "TMPDIR": "/tmp",  # that of the container is not ours
            **image_environment(),
            **{each["name"]: self._value(each, name, labels) for each in container["env"]},
            **({"JOB_COMPLETION_INDEX": str(index)} if self.is_indexed else {}),
        }
        words = [expanded(word, environment) for word in container.get("args", [])]
        environment = {key: translated(value, places) for key, value in environment.items()}
        log = folder / "log"
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*here(container.get("command") or entrypoint()), *(translated(word, places) for word in words)],
                cwd=folder / "cwd",
                env={
                    **environment,
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(ROOT),
                    "HF_HUB_OFFLINE": "1",
                    "EMBED_CORPUS_NO_TUNING": "1",
                    **self._extra,
                },
                text=True, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        number = index if self.is_indexed else None
        pod = Pod(name, number, self._failures.get(index, 0), process, log, reason_file, spec, environment)
        self.pods.append(pod)
        return pod

    def _volume(self, volume: Document, pod_folder: Path) -> Path:
        path = pod_folder / "volumes" / str(volume["name"])
        if claim := volume.get("persistentVolumeClaim"):
            path = self.root / "claims" / str(claim["claimName"])
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _value(self, variable: Document, pod_name: str, labels: dict[str, str]) -> str:
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if match := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            return labels[match[1]]
        known = {"metadata.name": pod_name, "metadata.namespace": "here", "spec.nodeName": "node-1"}
        return {**known, "metadata.uid": str(uuid.uuid4())}[path]


def image_environment() -> dict[str, str]:
    """ENV of the stage that all images are built from."""
    text = (ROOT / "jobs" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    stage = text[text.index(" AS runtime") : text.index("FROM runtime AS")]
    [line] = re.findall(r"^ENV (.+)$", stage, flags=re.MULTILINE)
    pairs = dict(word.split("=", 1) for word in line.split())
    return {key: value for key, value in pairs.items() if key != "PATH"}


def expanded(word: str, environment: dict[str, str]) -> str:
    """``$(NAME)`` as the kubelet does it; a name that is not known stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), word)


def translated(text: str, places: dict[str, Path]) -> str:
    """Every path at or below a place of the container, replaced by where that lies here."""
    known = "|".join(re.escape(place) for place in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({known})(?![\w.-])", lambda match: str(places[match[1]]), text)


def here(command: list[str]) -> list[str]:
    """The image's command, as it can be started on this machine."""
    assert command == ["tini", "--", "embed-corpus"], command
    return [sys.executable, "-m", "tests.kubernetes_simulator"]


if __name__ == "__main__":
    import cli
    from pipeline import plan as plan_module
    from pipeline import run as run_module

    run_module.run = functools.partial(run_module.run, stand_in=STAND_IN)
    plan_module.make_plan = functools.partial(plan_module.make_plan, stand_in=STAND_IN)
    cli.main()

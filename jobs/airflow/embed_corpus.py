"""A DAG for Airflow 3.3 or newer: ranks, plan, embed, index, verify. To try it, in the repository's folder:

    export AIRFLOW__CORE__DAGS_FOLDER=$PWD/jobs/airflow AIRFLOW__CORE__LOAD_EXAMPLES=False
    airflow db migrate && airflow dags test embed_corpus          # here, with jobs/sample.yaml
    airflow dags trigger embed_corpus --conf '{"job": "jobs/eight-gpus.yaml", "world_size": 4}'

Airflow has an environment of its own; embed-corpus need not be in it, only be a command on the workers, or an image.
To deploy the DAG, copy both files of this folder. With ``"where": "kubernetes"`` each step is a Job: that needs
apache-airflow-providers-cncf-kubernetes, the connection kubernetes_default and manifests, see the parameter.

Each step's summary (what ``--json`` prints, without the list of shards) is its XCom, also when it fails. When
``verify`` has found no fault, an event goes to the asset alias ``embed-corpus``, for the asset whose URI is the output:
``schedule=[AssetAlias("embed-corpus")]`` starts what comes after.

    exit code   the task
    0           succeeds
    65          fails without a retry: a shard is damaged. The others are embedded and indexed; verify does not run
    75          is tried again and continues; but not when max_tokens, max_cost or max_hours was reached
    2, 78       fails without a retry: options, model or output must be mended first
    others      is tried again: a crash, memory
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator, Param, TriggerRule, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

FINISHED = AssetAlias("embed-corpus")
STOP_S = 30  # a run ends within 20 s of SIGTERM
EXIT_DATA, EXIT_STOPPED, NO_RETRY = 65, 75, (2, 65, 78)

TEXT, COUNT, AMOUNT = ["null", "string"], ["null", "integer"], ["null", "number"]
FOLDER = Path(__file__).resolve().parent.parent.parent  # of the repository, where this file lies in one
COMMAND = FOLDER / ".venv" / "bin" / "embed-corpus"
PARAMS = {
    "job": Param("jobs/sample.yaml", type="string", description="Job file; on Kubernetes with paths as pods see them."),
    "input": Param(None, type=TEXT, description="In place of the job file's."),
    "output": Param(None, type=TEXT, description="In place of the job file's."),
    "model": Param(None, type=TEXT, description="In place of the job file's."),
    "where": Param("local", enum=["local", "kubernetes"], description="Commands on Airflow's workers, or Jobs."),
    "world_size": Param(
        None,
        type=COUNT,
        minimum=1,
        maximum=1024,
        description="Tasks or pods that share the shards, in sight of one output. Default: 1, or the manifests'.",
    ),
    "price_per_hour": Param(None, type=AMOUNT, minimum=0, description="Of one machine or pod."),
    "max_cost": Param(None, type=AMOUNT, exclusiveMinimum=0, description="Of all tasks or pods together, a try."),
    "max_tokens": Param(None, type=COUNT, minimum=1, description="Of all tasks together, a try; not on Kubernetes."),
    "max_hours": Param(None, type=AMOUNT, exclusiveMinimum=0, description="Of the embedding, a try."),
    "folder": Param(str(FOLDER), type="string", description="On the workers: where paths begin."),
    "command": Param(
        str(COMMAND) if COMMAND.exists() else "embed-corpus",
        type="string",
        description="A path, or a name on the PATH.",
    ),
    "manifests": Param(
        "embed-corpus.yaml",
        type="string",
        description="From: kubectl kustomize jobs/kubernetes/overlays/gpu > embed-corpus.yaml",
    ),
    "image": Param(None, type=TEXT, description="In place of the manifests'."),
    "namespace": Param("default", type="string", description="Of the Jobs."),
}


class Step(BaseOperator):
    """One call of ``embed-corpus`` with ``--json``; returns its summary.

    Args:
        step: ``plan``, ``embed``, ``index`` or ``verify``.
        rank: which share of ``embed`` this is.
    """

    template_fields = ("rank",)  # for mapping

    def __init__(self, *, step: str, rank: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.step, self.rank = step, rank
        self._process: subprocess.Popen[str] | None = None
        self._job: Any = None

    def execute(self, context: Any) -> dict[str, Any]:
        params = dict(context["params"])
        job = read_job(params)
        if self.step == "index" and job.get("index") == "none":
            raise AirflowSkipException("the job file says 'index: none'")
        words = arguments(self.step, params, job, self.rank)
        self.log.info("embed-corpus %s", " ".join(words))
        call = self._call_in_pods if params["where"] == "kubernetes" else self._call_here
        code, summary, reason = call(words, params, traced(context))
        summary.pop("shards", None)  # one each: too many for a database
        if code == EXIT_DATA and self.step == "plan":
            self.log.warning("%s: planned without it", reason)
        elif code:
            context["ti"].xcom_push(key="return_value", value=summary)
            at_end = summary.get("stopped") if code == EXIT_STOPPED else None
            kind = AirflowFailException if code in NO_RETRY or at_end else AirflowException
            raise kind(f"embed-corpus {words[0]} ended with exit code {code}: {at_end or reason}")
        if self.step == "verify":
            note_finished(context, params, job, summary)
        return summary

    def _call_here(
        self, words: list[str], params: dict[str, Any], environment: dict[str, str]
    ) -> tuple[int, dict[str, Any], str]:
        """Exit code, summary and the last line of the log."""
        command = params["command"]
        if "/" in command:
            command = os.path.join(params["folder"], command)
        last = ""
        with tempfile.TemporaryFile("w+", encoding="utf-8") as results:
            try:
                # In the task's own process group: Airflow's signals to that reach the command, too.
                self._process = subprocess.Popen(
                    [command, *words],
                    cwd=params["folder"],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=results,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            except OSError as error:
                raise AirflowFailException(f"{command} in {params['folder']}: {error.strerror}") from None
            try:
                assert self._process.stderr is not None
                for line in self._process.stderr:
                    self.log.info("%s", line.rstrip())
                    last = line.strip() or last
                code = self._process.wait()
            finally:
                self._end_process()
            results.seek(0)
            return code, summary_in(results.read()), last.removeprefix("embed-corpus: ")

    def _call_in_pods(
        self, words: list[str], params: dict[str, Any], environment: dict[str, str]
    ) -> tuple[int, dict[str, Any], str]:
        from embed_corpus_kubernetes import PodJob  # beside this file; needs the provider

        text = (Path(params["folder"]) / params["job"]).read_text(encoding="utf-8")
        self._job = PodJob(self.step, words, params, environment, text, say=self.log.info)
        end = self._job.run()
        summary = summary_in(end.log) | end.pods
        return end.exit_code, summary | ({"stopped": end.reason} if end.out_of_time else {}), end.reason

    def on_kill(self) -> None:
        """The task is to end: so do the command and the Job. What they finished stays."""
        self._end_process()
        if self._job is not None:
            self._job.delete()

    def _end_process(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def read_job(params: dict[str, Any]) -> dict[str, Any]:
    """The options of the job file, with ``-`` for ``_``, and what the parameters put in their place."""
    path = Path(params["folder"]) / params["job"]
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        job = {str(key).replace("_", "-"): value for key, value in document.items()}
    except OSError as error:
        raise AirflowFailException(f"job: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError):
        raise AirflowFailException(f"job: {path}: expected 'option: value' lines in YAML") from None
    job |= {name: params[name] for name in ("input", "output", "model") if params[name] is not None}
    if not job.get("output"):
        raise AirflowFailException(f"job: {path} names no output, and neither does the parameter: give one")
    return job


def arguments(step: str, params: dict[str, Any], job: dict[str, Any], rank: int) -> list[str]:
    """Of ``embed-corpus``, for one step."""
    end = ["--progress", "plain", "--json"]
    output = str(job["output"])
    if step == "verify":
        return ["verify", output, *end]
    if step == "index":
        return ["index", output, *(["--index", str(job["index"])] if "index" in job else []), *end]
    in_pods, world_size = params["where"] == "kubernetes", params["world_size"] or 1
    words = [params["input"]] if params["input"] is not None else []
    words += ["--job", "/etc/embed-corpus/job.yaml" if in_pods else params["job"], "--output", output]
    for name in ("model", "price_per_hour"):
        words += [f"--{name.replace('_', '-')}", str(params[name])] if params[name] is not None else []
    if step == "plan":
        return ["plan", *words, *end]
    words += ["--index", "none"]
    if in_pods:  # limits there are a deadline of the Job, since each pod that is tried again would have a new one
        return ["run", *words, "--world-size", "$(WORLD_SIZE)", "--progress", "plain"]
    if params["max_cost"] is not None:
        words += ["--max-cost", str(params["max_cost"] / world_size)]
    if params["max_tokens"] is not None:
        words += ["--max-tokens", str(max(1, params["max_tokens"] // world_size))]
    if params["max_hours"] is not None:
        words += ["--max-hours", str(params["max_hours"])]
    if world_size > 1:
        words += ["--rank", str(rank), "--world-size", str(world_size)]
    return ["run", *words, *end]


def traced(context: Any) -> dict[str, str]:
    """Variables that make the command's spans part of this DAG run's trace: Airflow's own where that is traced."""
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    if "traceparent" not in carrier:
        digest = hashlib.sha256(f"{context['ti'].dag_id} {context['run_id']}".encode()).hexdigest()
        carrier = {"traceparent": f"00-{digest[:32]}-{digest[32:48]}-01"}  # one for all steps and ranks of the run
    variables = {name.upper(): value for name, value in carrier.items()}
    return variables | {name: value for name, value in os.environ.items() if name.startswith("AIRFLOW_CTX_")}


def summary_in(text: str) -> dict[str, Any]:
    """The last JSON object that begins and ends with a brace alone in a line; empty without one."""
    lines = text.splitlines()
    try:
        end = len(lines) - lines[::-1].index("}")
        begin = end - 1 - lines[:end][::-1].index("{")
        summary: dict[str, Any] = json.loads("\n".join(lines[begin:end]))
    except ValueError:
        return {}
    return summary


def note_finished(context: Any, params: dict[str, Any], job: dict[str, Any], certificate: dict[str, Any]) -> None:
    """Tell those who wait for the asset."""
    output = str(job["output"])
    uri = output if "://" in output else (Path(params["folder"]) / output).as_uri()
    extra = {"output": output, "fingerprint": certificate.get("fingerprint"), **certificate.get("checked", {})}
    context["outlet_events"][FINISHED].add(Asset(uri=uri), extra=extra)


@task
def ranks(params: dict[str, Any]) -> list[int]:
    """One for each task that embeds; on Kubernetes one task starts all pods. Wrong parameters fail here."""
    if params["max_cost"] is not None and not params["price_per_hour"]:
        raise AirflowFailException("max_cost needs price_per_hour: give both")
    if params["where"] == "local":
        return list(range(params["world_size"] or 1))
    if params["max_tokens"] is not None:
        raise AirflowFailException("max_tokens does not go with Kubernetes: give max_cost or max_hours")
    return [0]


with DAG(
    "embed_corpus",
    schedule=None,  # such as "0 2 * * *": what is finished is not done again
    catchup=False,
    max_active_runs=1,  # an output has one run at a time
    params=PARAMS,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=1), "retry_exponential_backoff": True},
    tags=["embed-corpus"],
    doc_md=__doc__,
) as dag:
    shares = ranks()
    plan = Step(task_id="plan", step="plan")
    embed = Step.partial(task_id="embed", step="embed", map_index_template="rank {{ task.rank }}").expand(rank=shares)
    # Whatever became of a rank, what is good is indexed.
    index = Step(task_id="index", step="index", trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS)
    verify = Step(task_id="verify", step="verify", trigger_rule=TriggerRule.NONE_FAILED, outlets=[FINISHED])
    shares >> plan >> [embed, index]
    embed >> index
    [embed, index] >> verify

"""A real Slurm on loopback: munged, slurmctld and slurmd of Debian's packages, everything of theirs in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job may begin again once its old credential has expired, by default after two minutes.
AuthInfo=socket={root}/munge/socket,cred_expire=6
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=25
SlurmdParameters=config_overrides
MaxArraySize=20
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why Slurm cannot be started here; empty where it can."""
    missing = [name for name in NEEDED if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurmctld and slurmd are started as root only"
    return ""


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass
class Cluster:
    """One node of eight (pretended) cores.

    Attributes:
        root: its folder, logs of the daemons in it.
        environment: with which ``sbatch`` and the others find it.
    """

    root: Path
    environment: dict[str, str]

    def call(self, *command: str | Path, cwd: Path | None = None, check: bool = True) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, env=self.environment, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self, job: str) -> dict[str, str]:
        """State by array index ('' for a job without an array), of what the controller still knows."""
        lines = self.call("scontrol", "show", "job", job, "--oneliner", check=False).splitlines()
        fields = [dict(word.partition("=")[::2] for word in line.split()) for line in lines if "JobState=" in line]
        return {field.get("ArrayTaskId", ""): field["JobState"] for field in fields}

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.call('squeue')}\n{self._logs()}"
            time.sleep(0.2)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.root.glob("*.log")))


@contextlib.contextmanager
def cluster(root: Path, path: Path) -> Iterator[Cluster]:
    """Started and ready for jobs.

    Args:
        root: a folder for everything.
        path: put before the PATH of jobs.
    """
    (root / "munge").mkdir(parents=True, mode=0o755)
    for name in ("state", "spool"):
        (root / name).mkdir()
    key = root / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = free_ports(2)
    configuration = root / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(
        CONFIGURATION.format(root=root, host=host, controller_port=ports[0], node_port=ports[1]), encoding="utf-8"
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
        "SLURM_CONF": str(configuration),
        "PATH": f"{path}:{search_path()}",
    }
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={root}/munge/socket",
         f"--pid-file={root}/munge/pid", f"--log-file={root}/munge/log", f"--seed-file={root}/munge/seed"],
        ["slurmctld", "-D", "-c", "-f", str(configuration)],
        ["slurmd", "-D", "-c", "-f", str(configuration), "-N", host],
    ]  # fmt: skip
    made = Cluster(root, environment)
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context(open(root / f"{command[0]}.out.log", "ab"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(end, process)
            if command[0] == "munged":
                made.wait_for((root / "munge" / "socket").exists, 30)
        made.wait_for(lambda: "idle" in made.call("sinfo", "-h", "-o", "%T", check=False), 60)
        stack.callback(made.call, "scancel", "--user=root", check=False)
        yield made


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]

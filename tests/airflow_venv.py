"""Airflow in an environment of its own, beside the repository's: the two would not agree on versions."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

FOLDER = ROOT / ".airflow-venv"
REQUIREMENTS = Path(__file__).with_name("airflow-requirements.txt")
DAGS = ROOT / "jobs" / "airflow"


class NotInstallable(Exception):
    """pip could not bring Airflow."""


def installed_python() -> Path:
    """The Python that has Airflow; the first call takes a minute or two, the folder is kept.

    Raises:
        NotInstallable: with pip's last words.
    """
    FOLDER.mkdir(exist_ok=True)
    python, done = FOLDER / "bin" / "python", FOLDER / "done"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != wanted:
            done.unlink(missing_ok=True)
            shutil.rmtree(FOLDER / "lib", ignore_errors=True)
            (FOLDER / ".gitignore").write_text("*\n")
            # Every version is pinned, so there is nothing to resolve.
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
            for command in (
                [sys.executable, "-m", "venv", str(FOLDER)],
                [str(python), "-m", "pip", "install", *options, "--requirement", str(REQUIREMENTS)],
            ):
                made = subprocess.run(command, capture_output=True, text=True, check=False)
                if made.returncode:
                    raise NotInstallable(" ".join(made.stderr.split()[-40:]) or f"{command[0]}: {made.returncode}")
            done.write_text(wanted)
    return python


class Airflow:
    """An Airflow with an empty SQLite database.

    Args:
        home: its folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = installed_python()
        home.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "OTEL_", "TRACE"))}
        self.environment = {
            **kept,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        }
        self.call("-m", "airflow", "db", "migrate")

    def call(self, *arguments: str | Path, **more: str) -> str:
        done = subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, env={**self.environment, **more}, check=False,
            cwd=self.home, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
        return done.stdout + done.stderr

    def test(self, *confs: dict[str, Any], **more: str) -> list[dict[str, Any]]:
        """Runs of the DAG, one after the other: see airflow_run.py. ``log`` is what all of them printed."""
        result = self.home / "result.json"
        log = self.call("-P", Path(__file__).with_name("airflow_run.py"), json.dumps(confs), result, **more)
        (self.home / "last.log").write_text(log)
        return [{**run, "log": log} for run in json.loads(result.read_text())]

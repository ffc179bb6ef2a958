"""What lands on a user's disk, and what the README says about it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from tests.conftest import ROOT, RunCommand

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_command_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipeline").rglob("*.*") if path.suffix != ".pyc"}
    assert {Path(name).suffix for name in files} == {".py", ".css", ".html"}, "code, and the pages it makes"
    assert {name for name in names if ".dist-info/" not in name} == files | {"cli.py"}


def test_no_other_installed_distribution_owns_our_import_names() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in ("pipeline", "cli"):
        assert set(owners.get(name, [])) <= {"embed-corpus"}


def test_the_pins_satisfy_the_project_file() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    normalised = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires("embed-corpus") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "cpu"}):
            version = normalised[re.sub(r"[-_.]+", "-", requirement.name).lower()]
            assert requirement.specifier.contains(version), text


def test_every_option_of_the_readme_exists_and_every_option_is_in_the_readme(command: RunCommand) -> None:
    offered = set(re.findall(r"--[a-z][a-z-]+", command("run", "--help").stdout)) - {"--help"}
    table = README[README.index("| option | default |") : README.index("From a notebook")]
    assert set(re.findall(r"`[^`]*?(--[a-z][a-z-]+)", table)) - {"--no-normalize"} == offered - {
        "--job", "--output", "--model", "--no-normalize", "--no-trust-remote-code",
    }  # fmt: skip
    everywhere = set(re.findall(r"--[a-z][a-z-]+", README))
    for other in ("bench", "index", "plan", "report", "search", "serve", "verify"):
        offered |= set(re.findall(r"--[a-z][a-z-]+", command(other, "--help").stdout))
    assert everywhere <= offered


def test_every_option_of_the_command_is_a_field_of_the_job_file(command: RunCommand) -> None:
    offered = {name[2:].replace("-", "_") for name in re.findall(r"--[a-z][a-z-]+", command("run", "--help").stdout)}
    shown_only = {"help", "json", "progress", "log_format", "job", "no_normalize", "no_trust_remote_code"}
    assert offered - shown_only == set(RunConfig.model_fields) - {"input"}


def test_every_file_the_readme_links_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_every_module_says_what_it_does() -> None:
    for path in [ROOT / "cli.py", *(ROOT / "pipeline").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert text.startswith('"""'), path

"""The job files in jobs/, and what the image is built from."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths

from pipeline.config import build_config
from pipeline.termination import DEFAULT_PATH, VARIABLE
from tests.conftest import ROOT

JOB_FILES = sorted((ROOT / "jobs").glob("*.yaml"))
KUBERNETES = ROOT / "jobs" / "kubernetes" / "base" / "job.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_every_key_of_a_job_file_is_an_option_and_its_head_says_how_to_start_it(path: Path) -> None:
    build_config(str(path), {})
    head = [line for line in path.read_text(encoding="utf-8").splitlines()[:4] if line.startswith("#")]
    assert any(f"embed-corpus run --job jobs/{path.name}" in line for line in head)


@pytest.mark.parametrize("path", [*JOB_FILES, KUBERNETES], ids=lambda path: path.name)
def test_what_a_job_file_leaves_as_a_comment_is_an_option_too(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (tmp_path / path.name).write_text(re.sub(r"^# (?=[a-z-]+: \S+( +#.*)?$)", "", text, flags=re.MULTILINE))
    build_config(str(tmp_path / path.name), {})


def test_the_usual_cases_have_a_job_file() -> None:
    assert {"sample", "one-gpu", "eight-gpus", "s3", "cpu"} <= {path.stem for path in JOB_FILES}


class Stage:
    """One stage of a Dockerfile: its base, and its instructions in order."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.instructions: list[tuple[str, str]] = []

    def all(self, name: str) -> list[str]:
        return [value for instruction, value in self.instructions if instruction == name]


def stages() -> dict[str, Stage]:
    text = (ROOT / "jobs" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found = {"": Stage("")}
    for line in filter(None, lines):
        instruction, _, value = line.partition(" ")
        if instruction == "FROM":
            base, _, name = value.partition(" AS ")
            found[name] = Stage(base)
        else:
            list(found.values())[-1].instructions.append((instruction, value.strip()))
    return found


def chain(name: str) -> list[Stage]:
    """A stage and those below it, the lowest first."""
    found = stages()
    return [*chain(found[name].base), found[name]] if name in found else []


def environment(name: str) -> dict[str, str]:
    pairs = [pair for stage in chain(name) for value in stage.all("ENV") for pair in shlex.split(value)]
    return dict(pair.split("=", 1) for pair in pairs)


def test_the_image_has_a_target_for_a_cpu_and_one_for_cuda_and_the_cpu_is_the_default() -> None:
    assert [name for name, stage in stages().items() if stage.base == "runtime"] == ["cuda", "cpu"]
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_a_number_and_keeps_models_in_a_volume(target: str) -> None:
    values = [pair for stage in chain(target) for pair in stage.instructions]
    [user] = [value for name, value in values if name == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    [volume] = [value for name, value in values if name == "VOLUME"]
    variables = environment(target)
    assert variables["HF_HOME"] == variables["XDG_CACHE_HOME"] == volume
    # The volume must be that user's, and made before it is declared: what comes after is thrown away.
    [made] = [value for name, value in values if name == "RUN"]
    assert f"install --directory --owner={user.split(':')[0]} --group={user.split(':')[1]} {volume}" in made
    assert values.index(("RUN", made)) < values.index(("VOLUME", volume))
    assert variables[VARIABLE] == DEFAULT_PATH
    assert ("ENTRYPOINT", '["tini", "--", "embed-corpus"]') in values
    assert " tini" in made
    assert variables["PATH"].startswith("/opt/embed-corpus/bin:")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_holds_the_environment_built_for_it_and_no_build_tools(target: str) -> None:
    [copied] = [value for stage in chain(target) for value in stage.all("COPY")]
    assert copied == f"--from=build-{target} /opt/embed-corpus /opt/embed-corpus"
    assert {"build-cpu", "build-cuda"} <= stages().keys()
    assert chain(target)[0].base == chain(f"build-{target}")[0].base  # the same Python at the same path


def test_nothing_secret_is_built_in() -> None:
    text = (ROOT / "jobs" / "Dockerfile").read_text(encoding="utf-8")
    names = re.findall(r"^(?:ARG|ENV) (.+)$", re.sub(r"\\\n", " ", text), flags=re.MULTILINE)
    assert not re.search(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY", " ".join(names), flags=re.IGNORECASE)
    copied = [value.split() for stage in stages().values() for value in stage.all("COPY")]
    assert not [words for words in copied if words[0] in (".", "./")], "what is copied must be named"
    assert "--mount=type=secret" not in text


@pytest.mark.parametrize(("target", "extra"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_an_image_installs_extras_that_exist_at_the_pinned_versions(target: str, extra: str) -> None:
    commands = [value for stage in chain(f"build-{target}") for value in stage.all("RUN") if "pip install" in value]
    [extras] = [found for command in commands for found in re.findall(r"'\.\[([\w,-]+)\]'", command)]
    assert {extra, "s3", "otel"} == set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert all("constraints.txt" in command for command in commands)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==", pins, flags=re.MULTILINE)
    assert re.search(r"^faiss-cpu==", pins, flags=re.MULTILINE)


def context() -> set[str]:
    """The files that the builder gets."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    return {path for path in exclude_paths(str(ROOT), patterns) if (ROOT / path).is_file()}


def test_the_builder_gets_what_is_copied_and_nothing_else() -> None:
    copied = {
        word.rstrip("/")
        for stage in stages().values()
        for value in stage.all("COPY")
        if not value.startswith("--from")
        for word in value.split()[:-1]
    }
    assert all((ROOT / word).exists() for word in copied)
    wanted = {
        str(path.relative_to(ROOT))
        for word in copied
        for path in ([ROOT / word] if (ROOT / word).is_file() else (ROOT / word).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert context() - {".dockerignore"} == wanted


@pytest.mark.slow
def test_what_is_copied_is_enough_to_build_the_package(tmp_path: Path) -> None:
    for stage in ("build-cpu", "build-cuda"):
        source = tmp_path / stage
        for value in (value for part in chain(stage) for value in part.all("COPY")):
            *words, into = value.split()
            for name in context():
                for word in words:
                    if name == word or name.startswith(f"{word}/"):
                        below = Path(name).relative_to(word) if name != word else Path(Path(name).name)
                        target = source / into / below
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes((ROOT / name).read_bytes())
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / f"{stage}-wheel")],
            cwd=source, check=True, capture_output=True,
        )  # fmt: skip
        [wheel] = (tmp_path / f"{stage}-wheel").glob("*.whl")
        modules = {f"pipeline/{path.name}" for path in (ROOT / "pipeline").glob("*.py")} | {"cli.py"}
        assert modules <= set(zipfile.ZipFile(wheel).namelist())

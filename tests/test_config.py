"""Options: the command line wins over the job file, mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import RunConfig, build_config
from pipeline.errors import ConfigError

GIVEN = {"input": ["in"], "output": "out", "model": "m"}


def job(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_wins_over_the_job_file(tmp_path: Path) -> None:
    path = job(tmp_path, "input: corpus\noutput: o\nmodel: m\ntext-column: body\nmax-length: 64\n")
    config = build_config(path, {"max_length": 128, "text_column": None})
    assert (config.input, config.text_column, config.max_length) == (["corpus"], "body", 128)


def test_every_option_can_stand_in_a_job_file(tmp_path: Path) -> None:
    defaults = RunConfig(**GIVEN).model_dump()
    lines = [f"{name.replace('_', '-')}: {value if value is not None else 'null'}" for name, value in defaults.items()]
    assert build_config(job(tmp_path, "\n".join(lines)), {}).model_dump() == defaults


def test_columns_may_be_comma_separated() -> None:
    assert build_config(None, {**GIVEN, "columns": "a, b,"}).columns == ["a", "b"]


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'max-lenght'; did you mean 'max-length'"):
        build_config(job(tmp_path, "max-lenght: 3"), {})


def test_an_unknown_option_of_the_python_call_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown option 'text_colum'; did you mean 'text_column'"):
        build_config(None, {**GIVEN, "text_colum": "t"})


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("max_length", 0, "--max-length: found 0"),
        ("dtype", "float8", "--dtype: found 'float8'"),
        ("attention", "flash", "--attention: found 'flash'"),
        ("input", None, "INPUT is missing"),
        ("model", None, "--model is missing"),
    ],
)
def test_a_wrong_value_names_option_and_value(option: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(None, {**GIVEN, option: value})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_replaces_the_prompt_name_of_the_job_file(tmp_path: Path) -> None:
    path = job(tmp_path, "input: i\noutput: o\nmodel: m\nprompt-name: document")
    assert build_config(path, {"prompt": "text: "}).prompt_name is None


def test_prompt_and_prompt_name_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        build_config(None, {**GIVEN, "prompt": "a", "prompt_name": "b"})


@pytest.mark.parametrize("text", ["- a list", "key: [unclosed", "just words"])
def test_a_job_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--job"):
        build_config(job(tmp_path, text), {})


def test_a_missing_job_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--job /no/such\.yaml: cannot be read"):
        build_config("/no/such.yaml", {})


def test_an_overlap_without_chunks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--chunk-overlap goes with --long-texts chunk"):
        build_config(None, {**GIVEN, "chunk_overlap": 3})


def test_an_empty_job_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file is empty"):
        build_config(job(tmp_path, "# nothing yet"), {})

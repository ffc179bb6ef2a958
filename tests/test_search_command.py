"""``embed-corpus search`` as a user calls it, on the sample job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ConfigError
from pipeline.queries import read_queries
from tests.conftest import RunCommand, SampleRun

QUERIES = ["a small boat", "", "number theory"]


@pytest.fixture
def out(sample_run: SampleRun) -> Path:
    return sample_run[0] / "out" / "sample"


@pytest.mark.slow
def test_many_queries_are_answered_one_after_the_other(out: Path, command: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("\n".join(QUERIES) + "\n", encoding="utf-8")
    done = command("search", out, "--queries", "queries.txt", "-k", "2", "--columns", "word")
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.split("\n\n")
    assert [block.split("\n")[0] for block in blocks] == [*QUERIES, ""]
    assert all(len(re.findall(r"0\.\d{4}  wn-\d{5}", block)) == 2 for block in blocks[:-1])
    lines = command("search", out, "--queries", "-", "-k", "2", "--json", input="\n".join(QUERIES)).stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["query"] for answer in answers] == QUERIES
    assert [[hit["rank"] for hit in answer["hits"]] for answer in answers] == [[1, 2]] * 3
    assert answers[0]["hits"][0]["id"] in blocks[0]


def test_rows_like_a_row_that_pass_a_filter(out: Path, command: RunCommand) -> None:
    options = ["--like", "wn-00937", "-k", "3", "--where", "pos = 'n' and not word like '%rig%'", "--rerank", "50"]
    done = command("search", out, *options, "--mmap", "--json")
    assert done.returncode == 0, done.stderr
    hits = json.loads(done.stdout)
    assert len(hits) == 3
    assert all(hit["pos"] == "n" and "rig" not in hit["word"] and hit["id"] != "wn-00937" for hit in hits)


def test_no_row_that_passes_is_no_error(out: Path, command: RunCommand) -> None:
    done = command("search", out, "--like", "wn-00937", "--where", "pos = 'none such'")
    assert (done.returncode, done.stdout) == (0, "no row\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give one of QUERY, --like ID and --queries FILE"),
        (["x", "--like", "y"], 2, "give one of QUERY, --like ID and --queries FILE"),
        (["--like", "nope"], 78, "like 'nope': no row of the index has this id"),
        (["x", "--where", "pos = n"], 78, "found n at character 7"),
        (["--like", "wn-00937", "--rerank", "5"], 78, "rerank = 5: expected at least k = 10"),
        (["--queries", "none.txt"], 78, "--queries none.txt: cannot be read (No such file or directory)"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    out: Path, command: RunCommand, arguments: list[str], code: int, message: str
) -> None:
    done = command("search", out, *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize("name", ["queries.txt", "queries.jsonl", "queries.parquet"])
def test_queries_are_read_alike_from_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path, texts = tmp_path / name, ["a small boat", "", "größer", " two  words "]
    if name.endswith("txt"):
        path.write_bytes("\r\n".join(texts).encode() + b"\n")
    elif name.endswith("jsonl"):
        lines: list[Any] = [texts[0], {"text": texts[1], "more": 1}, *texts[2:]]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    else:
        pq.write_table(pa.table({"n": range(4), "text": texts}), path)
    assert list(read_queries(str(path))) == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'"x"\n{"txt": 1}\n', "line 2: expected a string, or an object with 'text'"),
        ("a.jsonl", b"{\n", "line 1 is not JSON"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.parquet", b"PAR1", "not a readable Parquet file"),
        ("b.parquet", pa.table({"query": ["x"]}), "no column 'text'; there are ['query']"),
        ("c.parquet", pa.table({"text": ["x", None]}), "row 1 of 'text' is None; expected text"),
    ],
)
def test_a_file_of_something_else_is_told(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        list(read_queries(str(path)))

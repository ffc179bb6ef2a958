"""Input and output on an object store, against a real S3 protocol server: the bytes of a run on disk, each row once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import remote, scratch
from pipeline import run as run_module
from pipeline.api import _dataset_shards, open_index
from pipeline.errors import ConfigError, OutputError, ShardError, Stopped
from pipeline.indexer import build_index
from pipeline.ledger import Ledger, same_input
from pipeline.object_store import ObjectStore
from pipeline.reader import read_windows
from pipeline.records import Shard
from pipeline.shards import REMOTE_READ_BUFFER_BYTES, Columns, check_shards, find_shards
from pipeline.storage import Output, open_output
from pipeline.writer import ShardWriter
from tests.conftest import RunCommand, write_shard
from tests.s3_server import S3Server, serving
from tests.test_run import embed, start, workers_of

SHARDS, ROWS = 4, 60
DATA_FOLDERS = ("embeddings", "quarantine", "reuse")
NUMBER = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serving() as s3, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own retries would only slow the tests down
        patch.setattr(remote, "BACKOFF_S", 0.01)
        yield s3


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    server.requests.clear()
    yield server
    server.heal()


@pytest.fixture
def bucket(s3: S3Server) -> str:
    name = f"bucket-{next(NUMBER)}"
    files().mkdir(name)
    return f"s3://{name}"


def files() -> Any:
    return fsspec.filesystem("s3")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "in"
    for number in range(SHARDS):
        texts = [f"{number} {row * 7919 % 1000} abc" if row % 20 else None for row in range(ROWS)]
        write_shard(folder / f"part-{number}.parquet", texts)
    return folder


@pytest.fixture(scope="module")
def local(corpus: Path, model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job from disk to disk."""
    output = tmp_path_factory.mktemp("local") / "out"
    embed(corpus, output, model_dir, index="auto")
    return output


@pytest.fixture(scope="module")
def finished(server: S3Server, corpus: Path, model_dir: str) -> str:
    """A bucket with ``in`` and the finished ``out``."""
    url = f"s3://bucket-{next(NUMBER)}"
    files().mkdir(url)
    upload(corpus, f"{url}/in")
    embed(f"{url}/in", f"{url}/out", model_dir, index="auto", devices="cpu")  # type: ignore[arg-type]
    return url


@pytest.fixture
def copy(finished: str, bucket: str) -> str:
    """The same in a bucket of the test's own; input etags stay, so nothing is to be done."""
    for name, data in objects(finished).items():
        files().pipe_file(f"{bucket}/{name}", data)
    return bucket


def upload(folder: Path, url: str) -> None:
    for path in folder.rglob("*.parquet"):
        files().put_file(str(path), f"{url}/{path.relative_to(folder)}")


def objects(url: str) -> dict[str, bytes]:
    """Everything below a URL by relative name, but for the note that a run leaves however little it did."""
    fs = files()
    fs.invalidate_cache()
    top = fs._strip_protocol(url)
    return {name[len(top) + 1 :]: fs.cat_file(name) for name in fs.find(url) if "/runs/" not in name}


def data_on_disk(output: Path) -> dict[str, bytes]:
    return {
        path.relative_to(output).as_posix(): path.read_bytes()
        for folder in DATA_FOLDERS
        for path in (output / folder).rglob("*.parquet")
    }


def data_of(url: str) -> dict[str, bytes]:
    return {name: data for name, data in objects(url).items() if name.split("/")[0] in DATA_FOLDERS}


# -- a run -----------------------------------------------------------------------------------------------------------


def test_from_s3_to_s3_gives_the_bytes_of_a_run_on_disk(finished: str, local: Path) -> None:
    assert data_of(f"{finished}/out") == data_on_disk(local)
    assert len(data_of(f"{finished}/out")) >= 2 * SHARDS
    records = Ledger(f"{finished}/out").commits()
    assert [record["shard"]["key"] for record in records] == [f"part-{n}" for n in range(SHARDS)]
    assert records[0]["shard"]["path"] == f"{finished}/in/part-0.parquet"
    assert records[0]["shard"]["etag"]


def test_the_same_command_again_does_nothing(s3: S3Server, finished: str, model_dir: str) -> None:
    before = objects(finished)
    arguments: Any = (f"{finished}/in", f"{finished}/out", model_dir)
    report = embed(*arguments, index="auto", devices="cpu")
    assert (report.shards_done, report.shards_skipped, report.warnings) == (0, SHARDS, [])
    assert report.index is not None
    assert report.index["reused"] is True
    assert objects(finished) == before
    for address in s3.asked("PUT"):
        assert "/.probe-" in address or "/out/runs/" in address, "only the probe and the run's note may be written"


@pytest.mark.parametrize("damage", ["delete", "cut", "forget"])
def test_a_damaged_object_is_made_again_and_the_others_are_not(copy: str, model_dir: str, damage: str) -> None:
    victim, before = f"{copy}/out/embeddings/part-2.parquet", data_of(f"{copy}/out")
    if damage == "delete":
        files().rm_file(victim)
    elif damage == "cut":
        files().pipe_file(victim, before["embeddings/part-2.parquet"][:-9])
    else:
        files().rm_file(f"{copy}/out/commits/part-2.json")
    report = embed(f"{copy}/in", f"{copy}/out", model_dir)  # type: ignore[arg-type]
    assert [record["shard"]["key"] for record in report.shards] == ["part-2"]
    assert data_of(f"{copy}/out") == before


def test_an_input_of_the_same_size_and_second_is_told_by_its_etag(copy: str, corpus: Path) -> None:
    [old, *_] = find_shards([f"{copy}/in"])
    files().pipe_file(f"{copy}/in/part-0.parquet", (corpus / "part-0.parquet").read_bytes()[:-1] + b"?")
    [new, *_] = find_shards([f"{copy}/in"])
    recorded = {**old.identity(), "mtime_ns": new.mtime_ns}
    assert old.size_bytes == new.size_bytes
    assert not same_input(recorded, new)
    assert same_input({**recorded, "mtime_ns": 1}, old), "copied elsewhere it is the same input"
    assert not same_input({**recorded, "mtime_ns": 1, "etag": None}, old)


def test_the_output_inside_the_input_is_not_an_input(finished: str) -> None:
    keys = [shard.key for shard in find_shards([finished], f"{finished}/out")]
    assert keys == [f"in/part-{number}" for number in range(SHARDS)]


def test_a_killed_run_is_finished_by_the_next_with_every_row_once(
    bucket: str, corpus: Path, local: Path, model_dir: str
) -> None:
    upload(corpus, f"{bucket}/in")
    arguments: Any = (f"{bucket}/in", f"{bucket}/out", model_dir)
    process = start(*arguments, seconds=0.1, max_batch_tokens=64)
    workers = workers_of(process)
    deadline = time.monotonic() + 20
    while not Ledger(f"{bucket}/out").keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(workers, timeout=10)
    done = len(Ledger(f"{bucket}/out").commits())
    assert 0 < done < SHARDS
    report = embed(*arguments, max_batch_tokens=64)
    assert (report.shards_skipped, report.total_rows, report.exit_code) == (done, SHARDS * ROWS, 0)
    assert data_of(f"{bucket}/out") == data_on_disk(local)


# -- what fails ------------------------------------------------------------------------------------------------------


def test_an_upload_that_fails_twice_is_tried_a_third_time(s3: S3Server, copy: str, model_dir: str) -> None:
    files().rm_file(f"{copy}/out/commits/part-1.json")
    before = data_of(f"{copy}/out")
    s3.requests.clear()
    s3.fail("PUT", "/out/embeddings/part-1.parquet", times=2)
    assert embed(f"{copy}/in", f"{copy}/out", model_dir).exit_code == 0  # type: ignore[arg-type]
    assert len(s3.asked("PUT", "/out/embeddings/part-1.parquet")) == 3
    assert data_of(f"{copy}/out") == before


def test_an_upload_that_always_fails_names_the_object_and_leaves_nothing(
    s3: S3Server, bucket: str, corpus: Path, model_dir: str
) -> None:
    upload(corpus, f"{bucket}/in")
    arguments: Any = (f"{bucket}/in", f"{bucket}/out", model_dir)
    s3.fail("PUT", "/out/embeddings/part-1.parquet")
    process = start(*arguments)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    message = err.strip().splitlines()[-1]
    assert f"{bucket}/out/embeddings/part-1.parquet: cannot be uploaded 3 times" in message
    assert "internal error" in message
    assert not {"embeddings/part-1.parquet", "commits/part-1.json"} & objects(f"{bucket}/out").keys()
    s3.heal()
    assert embed(*arguments).total_rows == SHARDS * ROWS


def test_a_large_object_goes_up_in_parts_and_is_whole_or_not_there(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    store = ObjectStore(f"{bucket}/out")
    data = np.random.default_rng(0).bytes(40_000_000)
    for times in (1_000_000, 0):
        s3.heal()
        s3.fail("PUT", "partNumber=3", times=times)
        path = store.temporary("embeddings/large.parquet")
        path.write_bytes(data)
        if times:
            with pytest.raises(OutputError, match=r"embeddings/large\.parquet: cannot be uploaded 3 times"):
                store.publish(path, "embeddings/large.parquet")
            assert objects(bucket) == {}
    store.publish(path, "embeddings/large.parquet")
    assert store.size("embeddings/large.parquet") == len(data)
    assert store.fetch("embeddings/large.parquet").read_bytes() == data
    assert s3.asked("PUT", "partNumber=3")


def test_a_missing_bucket_is_refused_before_a_worker_is_started(
    s3: S3Server, corpus: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "Pool", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(ConfigError, match=r"^--output s3://no-such-bucket/out: cannot be .* a bucket that exists"):
        embed(corpus, "s3://no-such-bucket/out", model_dir)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^input s3://no-such-bucket/in: does not exist"):
        find_shards(["s3://no-such-bucket/in"])


def test_missing_permission_is_a_wrong_configuration(s3: S3Server, copy: str) -> None:
    s3.fail("PUT", "/out/.probe-", status=403)
    with pytest.raises(ConfigError, match=r"^--output s3://.* cannot be created \(Access Denied\); expected"):
        ObjectStore(f"{copy}/out").prepare()
    s3.fail("GET", "/out/run.json", status=403)
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read \(Access Denied\)"):
        open_index(f"{copy}/out")
    s3.fail("GET", "list-type=2", status=403)
    with pytest.raises(ConfigError, match=r"^input s3://.*/in: cannot be listed \(.*Access Denied"):
        find_shards([f"{copy}/in"])


def test_an_unreachable_store_is_a_stop_to_be_resumed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    files().clear_instance_cache()
    try:
        with pytest.raises(OutputError, match=r"cannot be created 3 times \(.*; run again when the store answers"):
            ObjectStore("s3://bucket/out").prepare()
        with pytest.raises(Stopped, match=r"^input s3://bucket/in: cannot be listed"):
            find_shards(["s3://bucket/in"])
    finally:
        files().clear_instance_cache()


def test_an_input_that_stops_answering_fails_its_shard_alone(s3: S3Server, finished: str) -> None:
    shards = find_shards([f"{finished}/in"])
    s3.fail("GET", "/in/part-1.parquet")
    checked = check_shards(shards, Columns("text", "id"))
    [(shard, reason)] = checked.bad
    assert (shard.key, "cannot be read 3 times" in reason) == ("part-1", True)
    with pytest.raises(ShardError, match=r"part-1\.parquet: cannot be read 3 times \(.*internal error"):
        list(read_windows(shards[1], Columns("text", "id"), "id"))
    assert len(list(read_windows(shards[0], Columns("text", "id"), "id"))) == 1


@pytest.mark.parametrize("url", ["gs://bucket/in", "nonsense://bucket/in"])
def test_a_url_that_nothing_here_can_open_says_what_to_install(url: str) -> None:
    expected = r"pip install 'embed-corpus\[gcs\]'" if url.startswith("gs") else "nonsense"
    for use in (lambda: find_shards([url]), lambda: open_output(url)):
        with pytest.raises(ConfigError, match=expected):
            use()


# -- commits ---------------------------------------------------------------------------------------------------------

SHARD = Shard("a/x", "in/a/x.parquet", 10, 20, 3, 1)


def record_of(host: str, sha: str = "same") -> dict[str, Any]:
    output = {"path": "embeddings/a/x.parquet", "bytes": 7, "rows": 3, "sha256": sha}
    shard = {"key": SHARD.key, **SHARD.identity()}
    return {"shard": shard, "fingerprint": "f", "output": output, "quarantine": None, "host": host}


def test_of_eight_writers_one_creates_the_commit(s3: S3Server, bucket: str) -> None:
    won: list[int] = []
    gate = threading.Barrier(8)

    def race(number: int) -> None:
        store = ObjectStore(f"{bucket}/out")
        gate.wait()
        if store.create_json("commits/x.json", {"writer": number}):
            won.append(number)

    racers = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(won) == 1
    assert ObjectStore(f"{bucket}/out").read_json("commits/x.json") == {"writer": won[0]}


def test_the_second_writer_of_the_same_bytes_takes_the_record_that_is_there(s3: S3Server, bucket: str) -> None:
    ledger = Ledger(f"{bucket}/out")
    assert ledger.commit(record_of("first"))["host"] == "first"
    assert Ledger(f"{bucket}/out").commit(record_of("second"))["host"] == "first"
    assert json.loads(objects(bucket)["out/commits/a/x.json"])["host"] == "first"


def test_two_writers_that_disagree_leave_no_record(s3: S3Server, bucket: str) -> None:
    ledger = Ledger(f"{bucket}/out")
    ledger.commit(record_of("first"))
    with pytest.raises(OutputError, match=r"a/x\.json: another run wrote this shard at the same time"):
        ledger.commit(record_of("second", sha="other"))
    assert objects(bucket) == {}


def test_a_shard_that_another_run_finished_is_not_made_again(s3: S3Server, copy: str, model_dir: str) -> None:
    """Two runs at once on one output: together they make each shard at least once, and both end well."""
    for number in range(SHARDS):
        files().rm_file(f"{copy}/out/commits/part-{number}.json")
    before = data_of(f"{copy}/out")
    arguments: Any = (f"{copy}/in", f"{copy}/out", model_dir)
    runs = [start(*arguments, seconds=0.05, max_batch_tokens=64) for _ in range(2)]
    for process in runs:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert data_of(f"{copy}/out") == before
    assert len(Ledger(f"{copy}/out").commits()) == SHARDS


def test_a_store_that_ignores_if_none_match_is_told_from_one_that_does_not(s3: S3Server, bucket: str) -> None:
    store = ObjectStore(f"{bucket}/out")
    assert store.prepare() == []
    s3.ignore_conditions = True
    [warning] = store.prepare()
    assert "let one run at a time write here" in warning
    assert objects(bucket) == {}, "the probe is removed"


def test_nothing_is_cached(s3: S3Server, bucket: str) -> None:
    store, name = ObjectStore(f"{bucket}/out"), "commits/x.json"
    assert (store.read_json(name), store.size(name), list(store.files("commits", ".json"))) == (None, None, [])
    ObjectStore(f"{bucket}/out").write_json(name, {})
    assert (store.read_json(name), store.size(name), list(store.files("commits", ".json"))) == ({}, 3, [name])
    ObjectStore(f"{bucket}/out").remove(name)
    assert (store.read_json(name), store.size(name), list(store.files("commits", ".json"))) == (None, None, [])
    store.remove(name)


# -- index and search ------------------------------------------------------------------------------------------------


def test_an_index_on_s3_answers_as_the_one_on_disk(s3: S3Server, finished: str, local: Path, tmp_path: Path) -> None:
    queries = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    with open_index(local) as here, open_index(f"{finished}/out") as there:
        assert there.info["sha256"]["index"] == here.info["sha256"]["index"]
        assert there.search(queries, k=7).table.equals(here.search(queries, k=7).table)
        texts = there.search(["3 abc"], k=1, columns=[])
    assert texts.table.num_rows == 1


def test_an_index_is_replaced_whole_and_the_old_one_removed(copy: str) -> None:
    before = {name for name in objects(f"{copy}/out") if name.startswith("index/")}
    assert build_index(f"{copy}/out")["reused"] is True
    Ledger(f"{copy}/out").forget("part-3")
    built = build_index(f"{copy}/out")
    after = {name for name in objects(f"{copy}/out") if name.startswith("index/")}
    files = (built["index_file"], built["ids_file"], built["truth"]["file"])
    assert after == {"index/index.json", *(f"index/{name}" for name in files)}
    assert after & before == {"index/index.json"}


def test_a_damaged_index_is_noticed(copy: str) -> None:
    name = f"{copy}/out/index/{ObjectStore(f'{copy}/out').read_json('index/index.json')['index_file']}"  # type: ignore[index]
    data = bytearray(files().cat_file(name))
    data[len(data) // 2] ^= 1
    files().pipe_file(name, bytes(data))
    with pytest.raises(ConfigError, match="damaged, its sha256"):
        open_index(f"{copy}/out")


def test_the_command_takes_urls(command: RunCommand, copy: str) -> None:
    done = command("index", f"{copy}/out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reused"] is True


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_shard_is_downloaded_about_once(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    """Columns that are read in turns must not fetch each other's bytes again and again.

    The first bytes of each column are read twice: how large a row is must be known before the first window.
    """
    rng = np.random.default_rng(2)
    columns = {name: pa.array([rng.bytes(900).hex() for _ in range(9000)]) for name in ("id", "text", "more")}
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=3000, compression="none", use_dictionary=False)
    upload(tmp_path, f"{bucket}/in")
    s3.requests.clear()
    [shard] = find_shards([f"{bucket}/in"])
    rows = sum(window.num_rows for window in read_windows(shard, Columns("text", "id", ("more",)), "id"))
    spans = [span.removeprefix("bytes=").split("-") for verb, _, span in s3.requests if verb == "GET" and span]
    read = sum(int(last) + 1 - int(first) for first, last in spans)
    assert rows == 9000
    assert read < path.stat().st_size + 3 * REMOTE_READ_BUFFER_BYTES + 100_000
    assert len(spans) < 30


# -- other protocols, scratch ----------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://corpus"
    fsspec.filesystem("memory").rm("/corpus", recursive=True)


def test_any_fsspec_protocol_is_read_and_written(memory: str, corpus: Path) -> None:
    for path in corpus.iterdir():
        fsspec.filesystem("memory").pipe_file(f"/corpus/in/{path.name}", path.read_bytes())
    checked = check_shards(find_shards([f"{memory}/in"]), Columns("text", "id"))
    assert [shard.num_rows for shard in checked.shards] == [ROWS] * SHARDS
    shard = checked.shards[0]
    assert find_shards([f"{memory}/in/*.parquet"])[0].path == shard.path
    store = ObjectStore(f"{memory}/out")
    with ShardWriter(store, shard, 4, "float32", "id") as writer:
        for window in read_windows(shard, Columns("text", "id"), "id"):
            text_of_row = np.arange(window.num_rows)
            writer.write(window, text_of_row, np.ones((window.num_rows, 4), np.float32))
        files = writer.finish(pa.schema([("id", pa.string())]))
    record = {"shard": {"key": shard.key, **shard.identity()}, "fingerprint": "f", **files}
    Ledger(store).commit(record)
    assert Ledger(f"{memory}/out").is_done(shard, "f")
    assert pq.read_table(store.source("embeddings/part-0.parquet")).num_rows == ROWS


def test_a_store_that_workers_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory:// is a process's own"):
        ObjectStore("memory://corpus/out").prepare()


def test_a_dataset_becomes_shards_on_the_store(s3: S3Server, bucket: str) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": ["a", "b"]})
    [folder] = _dataset_shards(dataset, open_output(f"{bucket}/out"))
    assert [shard.key for shard in find_shards([folder], f"{bucket}/out")] == ["part-00000"]


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    store = open_output(f"file://{tmp_path}")
    assert isinstance(store, Output)
    assert store.root == tmp_path


def test_scratch_goes_with_its_store_and_what_a_crash_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = ObjectStore("memory://corpus/out")
    store.temporary("embeddings/x.parquet").write_bytes(b"half")
    crashed = "import os, pipeline.scratch as s\nclass O: pass\no = O()\ns.new_folder(o)\nos._exit(1)"
    subprocess.run([sys.executable, "-c", crashed], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 2
    assert scratch.sweep() == 1
    assert store.temporary("embeddings/x.parquet").exists(), "in use"
    del store
    assert list(tmp_path.iterdir()) == []

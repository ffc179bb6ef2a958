"""Vectors that another process reads where they were computed: whole, or not at all.

All of it runs on the CPU, where the memory is shared by the same mechanism of torch; `tests/gpu` runs it on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.serving.device_ring import DeviceRing, InRing, OpenedRing, Ring, RingDownload, RingGone, RingTransfer
from pipeline.serving.engine import Engine
from pipeline.serving.lanes import Computed, ProcessLane
from pipeline.serving.search_client import SearchClient
from pipeline.serving.settings import ServeSettings
from pipeline.transfer import Download, Transfer
from tests import model_zoo
from tests.conftest import ROOT, write_shard
from tests.serve import client_of, hand_service, stand_in_run
from tests.stand_in import DIM, vector_of
from tests.test_serving_engine import FakeLane, ask, assert_vectors, engine_of, until

ROWS = 16

EXPORTER = """
import sys
import numpy as np, torch
from pipeline.serving.device_ring import DeviceRing
import json
from dataclasses import asdict

device, rows, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ring = DeviceRing(rows, dim, device)
print(json.dumps(asdict(ring.ring)), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "spin" in order:  # vectors that say which they are, as fast as it goes
        while True:
            ring.put(torch.arange(ring._next, ring._next + 4, device=device).float()[:, None].expand(4, dim))
    numbers = ring.put(torch.tensor(order["put"], dtype=torch.float32).to(device))
    if device != "cpu":
        torch.cuda.synchronize()
    print(json.dumps(numbers.tolist()), flush=True)
"""


@dataclass
class Exporter:
    """A process with a ring."""

    process: subprocess.Popen[str]
    ring: Ring

    def put(self, vectors: NDArray[np.float32]) -> NDArray[np.int64]:
        self._say(put=vectors.tolist())
        assert self.process.stdout is not None
        return np.array(json.loads(self.process.stdout.readline()))

    def spin(self) -> None:
        self._say(spin=True)

    def kill(self) -> None:
        """It stays a zombie: nobody waits for it."""
        self.process.kill()

    def _say(self, **order: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)


@contextlib.contextmanager
def exporter(device: str = "cpu", rows: int = ROWS, dim: int = DIM) -> Iterator[Exporter]:
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORTER, device, str(rows), str(dim)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Exporter(process, Ring(**json.loads(process.stdout.readline())))
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.communicate()


@contextlib.contextmanager
def opened(ring: Ring) -> Iterator[OpenedRing]:
    one = OpenedRing(ring)
    try:
        yield one
    finally:
        one.close()


def vectors_of(num_texts: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((num_texts, DIM)).astype(np.float32)


def taken(reader: OpenedRing, numbers: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """None where they were overwritten."""
    try:
        return reader.take(numbers)
    except RingGone as gone:
        if gone.for_good:
            raise
        return None


# -- what two processes see; also run on a GPU -----------------------------------------------------------------------


def check_reading(device: str) -> None:
    """Bit for bit, in any order, and what was overwritten never."""
    with exporter(device) as writer, opened(writer.ring) as reader:
        old, new = vectors_of(6, 1), vectors_of(8, 2)
        first, second = writer.put(old), writer.put(new)
        np.testing.assert_array_equal(reader.take(first), old)
        np.testing.assert_array_equal(reader.take(np.r_[second[::-1], first[3]]), np.r_[new[::-1], old[3:4]])
        third = writer.put(vectors_of(5, 3))  # does not fit behind the second, so it begins where the first did
        for numbers in (first, first[:1], np.r_[second, first[4]]):
            with pytest.raises(RingGone, match="overwritten") as caught:
                reader.take(numbers)
            assert not caught.value.for_good
        np.testing.assert_array_equal(reader.take(np.r_[first[5], third[4]]), np.r_[old[5:], vectors_of(5, 3)[4:]])
        with pytest.raises(RingGone, match="overwritten"):
            reader.take(third + ROWS)  # not written yet


def check_reading_while_it_is_written(device: str, seconds: float = 2.0) -> None:
    """A vector is the one of its number, or there is none: never half of one and half of another."""
    with exporter(device, rows=64, dim=4096) as writer, opened(writer.ring) as reader:
        writer.spin()
        whole = gone = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            numbers = reader._numbers[:4].clone().cpu().numpy()
            found = taken(reader, numbers)
            if found is None:
                gone += 1
            elif numbers.all():
                whole += 1
                assert (found == numbers[:, None]).all()
        assert whole and gone, (whole, gone)


def check_an_exporter_that_dies(device: str) -> None:
    with exporter(device) as writer, opened(writer.ring) as reader:
        numbers = writer.put(vectors_of(2))
        reader.take(numbers)
        writer.kill()
        assert reader._poll.poll(60_000), "it did not end"
        with pytest.raises(RingGone, match="has ended") as caught:
            reader.take(numbers)
        assert caught.value.for_good
        writer.process.wait()
        with pytest.raises(RingGone) as caught:
            OpenedRing(writer.ring)
        assert caught.value.for_good


def test_another_process_reads_vectors_bit_for_bit_and_overwritten_ones_never() -> None:
    check_reading("cpu")


def test_a_vector_that_is_overwritten_while_it_is_read_is_never_torn() -> None:
    check_reading_while_it_is_written("cpu")


def test_the_ring_of_a_killed_process_is_gone_also_while_its_memory_can_be_read() -> None:
    check_an_exporter_that_dies("cpu")


def test_memory_that_cannot_be_opened_is_a_ring_that_is_gone() -> None:
    with exporter() as writer:
        with pytest.raises(RingGone, match="cannot be opened here") as caught:
            OpenedRing(replace(writer.ring, memory="AAAA"))
        assert caught.value.for_good


# -- the ring alone --------------------------------------------------------------------------------------------------


class Intruding:
    """A tensor; something happens between two looks at it."""

    def __init__(self, tensor: torch.Tensor, then: Callable[[], Any]) -> None:
        self._tensor, self._then = tensor, then

    def __getitem__(self, rows: Any) -> torch.Tensor:
        found = self._tensor[rows]
        self._then()
        return found


def test_numbers_are_looked_at_again_after_the_copy() -> None:
    ring = DeviceRing(4, DIM, "cpu")
    numbers = ring.put(torch.from_numpy(vectors_of(3)))
    with opened(ring.ring) as reader:
        np.testing.assert_array_equal(reader.take(numbers), vectors_of(3))
        whole = reader._vectors
        reader._vectors = Intruding(whole, lambda: ring.put(torch.from_numpy(vectors_of(2))))  # type: ignore[assignment]
        with pytest.raises(RingGone, match="overwritten"):
            reader.take(numbers)
        reader._vectors = whole
        with pytest.raises(RingGone, match="overwritten"):
            reader.take(numbers)


def test_a_number_is_never_given_twice_and_says_its_row() -> None:
    ring = DeviceRing(10, DIM, "cpu")
    seen: list[int] = []
    for size in (4, 4, 4, 1, 10, 3, 7, 0, 10, 10):
        vectors = torch.from_numpy(vectors_of(size, len(seen)))
        numbers = ring.put(vectors)
        rows = numbers % 10
        assert rows.tolist() == list(range(rows[0], rows[0] + size)) if size else not len(numbers)
        assert torch.equal(ring._vectors[rows], vectors) and ring._numbers[rows].tolist() == numbers.tolist()
        seen += numbers.tolist()
    assert len(set(seen)) == len(seen) and min(seen) > 0


def test_what_is_not_finite_has_no_place_since_it_is_computed_again_elsewhere() -> None:
    vectors = vectors_of(3)
    vectors[1, 2] = np.inf
    ring = DeviceRing(8, DIM, "cpu")
    download = RingTransfer(Transfer(torch.device("cpu")), ring).download(torch.from_numpy(vectors), 0.0)
    assert download.numbers().tolist() == [8, 0, 10]
    assert download.result() is not None and download.seconds > 0
    assert RingDownload(Download(torch.zeros(0, DIM), 0.0), np.zeros(0, np.int64)).numbers().tolist() == []


# -- the engine ------------------------------------------------------------------------------------------------------


class RingLane(FakeLane):
    """Tells places, too; the test says in which ring."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: Ring | None = Ring("a", 1, "")
        self.next = 100

    async def _compute(self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> Computed:
        ring, numbers = self.ring, np.arange(self.next, self.next + len(lengths))
        self.next += len(lengths)
        computed = await super()._compute(input_ids, lengths)
        return computed if ring is None else computed._replace(in_ring=InRing(ring, numbers))


def test_a_call_knows_where_each_of_its_vectors_lies_though_they_come_longest_first_and_in_two_batches() -> None:
    async def main() -> None:
        found = await ask(engine_of(RingLane(), max_batch_tokens=9), "a", "bbb", "cc", "dddd")
        assert_vectors(found, ["a", "bbb", "cc", "dddd"])
        assert found.in_ring is not None and found.in_ring.ring.name == "a"
        # The first batch is dddd, bbb, cc with 100 to 102; a did not fit.
        assert found.in_ring.numbers.tolist() == [103, 101, 102, 100]

    asyncio.run(main())


def test_vectors_of_two_rings_or_of_none_are_handed_over_as_bytes() -> None:
    async def main() -> None:
        for other in (Ring("b", 2, ""), None):
            lane = RingLane()
            engine, go = engine_of(lane, max_batch_tokens=4), lane.hold()
            call = ask(engine, "aaaa", "bbbb")
            await until(lambda lane=lane: lane.next == 101)  # type: ignore[misc]
            lane.ring = other
            go.set()
            found = await call
            assert_vectors(found, ["aaaa", "bbbb"])
            assert lane.batches == 2 and found.in_ring is None
        assert (await ask(engine_of(FakeLane()), "a")).in_ring is None

    asyncio.run(main())


def encoder_lane(model: Path, ring_rows: int) -> ProcessLane:
    from dataclasses import asdict

    from pipeline.records import EncoderSettings

    setup = {"do": "setup", "backend": "torch", "encoder": asdict(EncoderSettings(str(model))), "stand_in": None}
    setup |= {"cuda_graphs": True, "ring_rows": ring_rows}
    return ProcessLane("torch", setup, "cpu", 1)


def test_an_encoder_process_writes_its_vectors_into_its_ring(tmp_path: Path) -> None:
    async def main() -> None:
        model = model_zoo.build("bert", tmp_path / "model")
        lane, plain = encoder_lane(model, 8), encoder_lane(model, 0)
        try:
            await asyncio.gather(lane.start(), plain.start())
            assert lane.facts["cuda_graphs"] == {"buckets": [], "reasons": ["the device is cpu, graphs are for CUDA"]}
            ids, lengths = np.arange(5, 14, dtype=np.int32), np.array([4, 3, 2], np.int32)
            without = await plain.send(ids, lengths, 0)
            assert without.in_ring is None
            reader = None
            for _ in range(4):  # more than once around
                found = await lane.send(ids, lengths, 0)
                assert found.in_ring is not None
                reader = reader or OpenedRing(found.in_ring.ring)
                np.testing.assert_array_equal(reader.take(found.in_ring.numbers), found.vectors)
                np.testing.assert_array_equal(found.vectors, without.vectors)
            assert reader is not None
            reader.close()
        finally:
            await asyncio.gather(lane.close(), plain.close())

    asyncio.run(main())


# -- the search process ----------------------------------------------------------------------------------------------

WORDS = [f"word number {number}" for number in range(40)]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Path:
    folder = tmp_path_factory.mktemp("ring")
    write_shard(folder / "in" / "a.parquet", WORDS)
    stand_in_run(folder / "in", folder / "out", model_dir)
    return folder / "out"


class Searching:
    """A `SearchClient` and what it said."""

    def __init__(self, output: Path, ring_device: str | None) -> None:
        document = json.loads((output / "index" / "index.json").read_text())
        self.said: list[str] = []
        self.client = SearchClient(
            str(output), document["fingerprint"], poll_s=0.2, cache_bytes=1 << 20, max_waiting=9,
            say=lambda event, **values: self.said.append(event), ring_device=ring_device,
        )  # fmt: skip

    async def found(self, vectors: NDArray[np.float32], in_ring: InRing | None) -> list[str]:
        """The text of the nearest row of each."""
        deadline = asyncio.get_running_loop().time() + 60
        hits = await self.client.search(vectors, k=1, columns=["text"], deadline=deadline, in_ring=in_ring)
        return [rows[0]["text"] for rows in json.loads(hits.json)]

    @property
    def counted(self) -> tuple[int, int]:
        return self.client.by_ring, self.client.ring_gone


def test_the_search_process_takes_vectors_from_the_ring_while_they_are_there_and_asks_for_them_otherwise(
    output: Path,
) -> None:
    async def main() -> None:
        there, sent = np.stack([vector_of(WORDS[3]), vector_of(WORDS[33])]), np.stack([vector_of(WORDS[7])] * 2)
        search = Searching(output, "cpu")
        await search.client.start()
        try:
            with exporter() as one, exporter() as other:
                places = InRing(one.ring, one.put(there))
                # The bytes say something else, so it shows which of the two was searched with.
                for _ in range(2):
                    assert await search.found(sent, places) == [WORDS[3], WORDS[33]]
                assert await search.found(sent[:1], replace(places, numbers=places.numbers[1:])) == [WORDS[33]]
                assert await search.found(sent, None) == [WORDS[7]] * 2
                assert search.counted == (3, 0)
                for _ in range(2):
                    one.put(vectors_of(10))
                assert await search.found(sent, places) == [WORDS[7]] * 2, "its rows are overwritten"
                assert search.counted == (3, 1)
                places = InRing(one.ring, one.put(there))
                assert await search.found(sent, places) == [WORDS[3], WORDS[33]]
                one.kill()
                one.process.wait()
                for _ in range(3):
                    assert await search.found(sent, places) == [WORDS[7]] * 2, "its process is gone"
                assert search.counted == (4, 2) and search.said.count("ring_lost") == 1
                places = InRing(other.ring, other.put(there))
                assert await search.found(sent, places) == [WORDS[3], WORDS[33]], "the process that came instead"
                assert search.counted == (5, 2)
        finally:
            await search.client.close()

    asyncio.run(main())


def test_a_search_process_that_is_replaced_opens_the_ring_again(output: Path) -> None:
    async def main() -> None:
        import psutil

        search = Searching(output, "cpu")
        await search.client.start()
        try:
            with exporter() as writer:
                places = InRing(writer.ring, writer.put(vector_of(WORDS[3])[None]))
                assert await search.found(vector_of(WORDS[7])[None], places) == [WORDS[3]]
                pid = search.client.pid
                assert pid is not None
                psutil.Process(pid).kill()
                await until(lambda: search.client.restarts == 1 and search.client.index is not None)
                assert await search.found(vector_of(WORDS[7])[None], places) == [WORDS[3]]
        finally:
            await search.client.close()

    asyncio.run(main())


def test_torch_is_in_the_search_process_only_where_it_reads_rings_and_places_are_ignored_elsewhere(
    output: Path,
) -> None:
    async def main() -> None:
        for device in (None, "cpu"):
            search = Searching(output, device)
            await search.client.start()
            try:
                maps = Path(f"/proc/{search.client.pid}/maps").read_text()
                assert ("libtorch" in maps) == (device is not None)
                if device is None:
                    places = InRing(Ring("a", 1, ""), np.array([1]))
                    assert await search.found(vector_of(WORDS[7])[None], places) == [WORDS[7]]
                    assert search.counted == (0, 0)
            finally:
                await search.client.close()

    asyncio.run(main())


# -- all of it -------------------------------------------------------------------------------------------------------


async def serve_and_search(output: Path, texts: list[str], **options: Any) -> None:
    """Search over the routes: with places, with a vector, and after the encoder was killed; each finds its own text."""
    from pipeline.serving.search_process import generation

    settings = ServeSettings(enable_gpu_ipc=True, query_lane="torch", **options)
    engine = await Engine.start(str(output), settings)
    search = SearchClient(
        str(output), engine.info.fingerprint, poll_s=0.2, cache_bytes=1 << 20, max_waiting=9,
        say=lambda event, **values: None, ring_device=engine.info.device,
    )  # fmt: skip
    await search.start()
    service = hand_service(engine, search=search, enable_gpu_ipc=True)  # type: ignore[arg-type]
    document = json.loads((output / "index" / "index.json").read_text())
    try:
        async with client_of(service) as client:

            async def nearest(query: Any) -> list[str]:
                answer = await client.post("/search", json={"query": query, "k": 1}, timeout=120)
                assert answer.status_code == 200, answer.text
                assert answer.json()["generation"] == generation(document)
                return [hits[0]["text"] for hits in answer.json()["results"]]

            assert await nearest(texts[0]) == texts[:1]
            assert await nearest(texts[:5]) == texts[:5]
            assert (search.by_ring, search.ring_gone) == (2, 0)
            [vector] = (await client.post("/embed", json={"inputs": texts[1], "prompt_name": "query"})).json()
            assert await nearest(vector) == texts[1:2], "a vector that the caller gives goes as bytes"
            assert search.by_ring == 2
            lane = engine._lanes[0]
            assert isinstance(lane, ProcessLane) and lane._child is not None
            lane._child.kill()
            await until(lambda: lane.restarts == 1 and lane.is_ready, 120)
            assert await nearest(texts[2]) == texts[2:3], "from the ring of the process that came instead"
            assert search.by_ring == 3
            assert "embed_corpus_search_by_ipc_total 3.0" in (await client.get("/metrics")).text
    finally:
        await service.stop()


def tiny_output(folder: Path, texts: list[str], devices: str) -> Path:
    """A finished run of a tiny model, with its index."""
    from pipeline.config import build_config
    from pipeline.progress import make_display
    from pipeline.run import run

    write_shard(folder / "in" / "a.parquet", texts)
    model = model_zoo.build("bert", folder / "model", hidden_size=128)
    options = {"input": [str(folder / "in")], "output": str(folder / "out"), "model": str(model), "columns": ["text"]}
    run(build_config(None, {**options, "id_column": "id", "devices": devices}), make_display("none"))
    return folder / "out"


@pytest.mark.slow
def test_a_search_by_text_hands_over_places_and_all_else_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serving.opening._device", lambda settings: "cpu")  # it would refuse
    texts = [model_zoo.sentence(1 + number % 12, seed=number) for number in range(30)]
    output = tiny_output(tmp_path, texts, "cpu")
    asyncio.run(serve_and_search(output, texts[-6:], warm_spare=False))

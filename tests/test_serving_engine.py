"""The serving engine: with an encoder that can be computed by hand, and with processes that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from pipeline.records import EncoderSettings, Tokens
from pipeline.serving.engine import Embedded, Engine, EngineInfo
from pipeline.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDown,
    NotEmbeddable,
    Overloaded,
    ServingError,
    TooLong,
)
from pipeline.serving.lanes import Computed, ProcessLane
from pipeline.serving.settings import ServeSettings
from pipeline.tokenizer import Tokenizer
from tests.conftest import ROOT, STAND_IN, write_shard
from tests.stand_in import DIM, MAX_LENGTH, MIX, StandIn, vector_of


class FakeLane:
    """Computes what `StandIn` computes, on the event loop, in a time that the test sets."""

    restarts, last_words = 0, ""

    def __init__(self, tokens_per_s: float = 1e9, name: str = "fake", cost_s: float = 0.0) -> None:
        self.name, self.batches, self.tokens_per_s, self.cost_s = name, 0, tokens_per_s, cost_s
        self.on_change: Callable[[], None] = lambda: None
        self.is_ready = True
        self.held: list[asyncio.Event] = []
        self.sent: list[list[int]] = []
        self._tasks: set[asyncio.Task[Computed]] = set()
        self._turn = asyncio.Lock()

    def predicted_s(self, lengths: NDArray[np.int32]) -> float:
        return self.cost_s * len(lengths)

    def send(
        self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32], prompt_length: int
    ) -> asyncio.Future[Computed]:
        self.batches += 1
        self.sent.append(lengths.tolist())
        task = asyncio.create_task(self._compute(input_ids, lengths))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _compute(self, input_ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> Computed:
        async with self._turn:
            seconds = len(input_ids) / self.tokens_per_s
            if self.held:
                await self.held.pop(0).wait()
            await asyncio.sleep(seconds)
        starts = np.cumsum(lengths) - lengths
        sums = np.add.reduceat(MIX[input_ids], starts, axis=0)
        vectors = (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)
        return Computed(vectors, seconds)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def hold(self) -> asyncio.Event:
        """The next batch is not computed until this is set."""
        self.held.append(asyncio.Event())
        return self.held[-1]


INFO = EngineInfo(
    model="stand-in", model_path="", dim=DIM, max_length=MAX_LENGTH, dtype="float32", device="cpu", pooling="sum",
    normalize=True, prompts={}, document_prompt="", query_prompt="", fingerprint="f", lane="fake", attention="grouped",
)  # fmt: skip


def engine_of(*lanes: FakeLane, max_batch_tokens: int = 64, depth: int = 1, **options: Any) -> Engine:
    tokenizer = Tokenizer(StandIn(EncoderSettings("")).tokenizer_spec())
    chosen = lanes or (FakeLane(),)
    return Engine(INFO, tokenizer, chosen, ServeSettings(**options), max_batch_tokens=max_batch_tokens, depth=depth)


def in_s(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def ask(engine: Engine, *texts: str, seconds: float = 60, **options: Any) -> asyncio.Task[Embedded]:
    return asyncio.create_task(engine.embed(texts, deadline=in_s(seconds), **options))


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = in_s(seconds)
    while not condition():
        assert in_s(0) < end, "it did not come to pass"
        await asyncio.sleep(0.005)


def assert_vectors(found: Embedded, texts: list[str], prompt: str = "") -> None:
    expected = np.stack([vector_of(text, prompt) for text in texts])
    np.testing.assert_allclose(found.vectors, expected, atol=1e-6)


def test_a_call_gets_its_vectors_with_their_token_counts_and_times() -> None:
    async def main() -> None:
        found = await ask(engine_of(), "abc", "z" * (MAX_LENGTH + 5), prompt="q")
        assert_vectors(found, ["abc", "z" * (MAX_LENGTH + 5)], "q")
        assert found.num_tokens.tolist() == [4, MAX_LENGTH] and found.truncated.tolist() == [False, True]
        assert found.vectors.dtype == np.float32 and found.lane == "fake"
        assert set(found.seconds) == {"queue", "tokenize", "compute"} and min(found.seconds.values()) >= 0

    asyncio.run(main())


texts_of_a_call = st.lists(st.text("abcdefgh0123", min_size=1, max_size=40), min_size=1, max_size=9)
some_calls = st.lists(st.tuples(texts_of_a_call, st.sampled_from(["", "q", "xyz"]), st.sampled_from(["query", "bulk"])),
                      min_size=1, max_size=12)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(some_calls, st.integers(1, 80), st.integers(1, 6), st.integers(1, 2))
def test_each_call_gets_its_own_vectors_in_order_whatever_is_computed_with_it(
    calls: list[tuple[list[str], str, Any]], budget: int, size: int, depth: int
) -> None:
    async def main() -> None:
        engine = engine_of(
            FakeLane(name="one", cost_s=1), FakeLane(name="other", cost_s=1),
            max_batch_tokens=budget, depth=depth, max_batch_size=size, max_queue_tokens=1 << 30,
        )  # fmt: skip
        tasks = [ask(engine, *texts, prompt=prompt, lane=lane) for texts, prompt, lane in calls]
        for task, (texts, prompt, _) in zip(tasks, calls, strict=True):
            assert_vectors(await task, texts, prompt)
        assert (engine.stats.queue_tokens, engine.stats.active_requests, engine.stats.in_flight) == (0, 0, 0)

    asyncio.run(main())


def test_calls_that_come_while_the_device_computes_are_computed_together_longest_first() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine, go = engine_of(lane), lane.hold()
        first = ask(engine, "a")
        await until(lambda: lane.batches == 1)
        rest = [ask(engine, "b" * length) for length in (3, 9, 5)]
        await until(lambda: engine.stats.queue_requests == 3)
        assert lane.batches == 1
        go.set()
        await asyncio.gather(first, *rest)
        assert lane.sent == [[1], [9, 5, 3]]

    asyncio.run(main())


def test_a_second_batch_follows_one_on_the_device_when_its_oldest_call_has_waited() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine, go = engine_of(lane, depth=2, max_queue_delay_ms=30), lane.hold()
        first = ask(engine, "a")
        await until(lambda: lane.batches == 1)
        began = in_s(0)
        second = ask(engine, "b")
        await until(lambda: lane.batches == 2)
        assert in_s(0) - began >= 0.029
        go.set()
        await asyncio.gather(first, second)

    asyncio.run(main())


def test_the_lane_with_the_smaller_measured_cost_computes() -> None:
    async def main() -> None:
        slow, fast = FakeLane(name="slow", cost_s=2.0), FakeLane(name="fast", cost_s=1.0)
        engine = engine_of(slow, fast)
        assert (await ask(engine, "a")).lane == "fast"
        fast.is_ready = False
        assert (await ask(engine, "a")).lane == "slow"

    asyncio.run(main())


def test_a_full_queue_refuses_one_text_and_a_list_alike_and_says_when_to_come_back() -> None:
    async def main() -> None:
        lane = FakeLane(tokens_per_s=1000)
        engine = engine_of(lane, max_queue_tokens=50)
        await ask(engine, "a" * 20)  # 20 tokens in 0.02 s: the rate is known
        go = lane.hold()
        waiting = [ask(engine, "a" * 30)]
        await until(lambda: lane.batches == 2)
        waiting.append(ask(engine, "b" * 30))
        await until(lambda: engine.stats.queue_tokens == 30)
        for texts in (["c" * 21], ["c" * 7] * 3):
            with pytest.raises(Overloaded) as caught:
                await ask(engine, *texts)
            assert caught.value.retry_after_s == pytest.approx(60 / 1000, abs=0.05)
        assert engine.stats.rejected["overloaded"] == 2
        waiting.append(ask(engine, "c" * 20))
        go.set()
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_while_the_queue_is_full_a_call_no_smaller_is_refused_without_tokenizing_it() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine = engine_of(lane, max_queue_tokens=50)
        seen: list[list[str]] = []
        encode = engine._tokenizer.encode

        def noted(texts: list[str]) -> Tokens:
            seen.append(texts)
            return encode(texts)

        engine._tokenizer.encode = noted  # type: ignore[method-assign, assignment]
        go = lane.hold()
        waiting = [ask(engine, "a" * 30)]
        await until(lambda: lane.batches == 1)
        waiting.append(ask(engine, "b" * 30))
        await until(lambda: engine.stats.queue_tokens == 30)
        seen.clear()
        for texts in (["c" * 25], ["c" * 25], ["c" * 13] * 2, ["c" * 40]):
            with pytest.raises(Overloaded, match="30 tokens are waiting"):
                await ask(engine, *texts)
        assert seen == [["c" * 25]]
        waiting.append(ask(engine, "d" * 20))  # a smaller one is looked at, and fits
        await until(lambda: engine.stats.queue_tokens == 50)
        with pytest.raises(Overloaded, match="50 tokens"):
            await ask(engine, "c" * 25)
        go.set()
        await asyncio.gather(*waiting)
        await ask(engine, "c" * 25)  # and the queue that became shorter takes it
        assert seen == [["c" * 25], ["d" * 20], ["c" * 25]]

    asyncio.run(main())


def test_no_more_than_the_allowed_calls_are_in_work() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine, go = engine_of(lane, max_concurrent_requests=2), lane.hold()
        waiting = [ask(engine, "a"), ask(engine, "b")]
        await until(lambda: engine.stats.active_requests == 2)
        with pytest.raises(Overloaded, match="2 calls"):
            await ask(engine, "c")
        go.set()
        await asyncio.gather(*waiting)
        await ask(engine, "c")

    asyncio.run(main())


def test_what_is_past_its_deadline_is_answered_in_time_and_never_computed() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine, go = engine_of(lane), lane.hold()
        first = ask(engine, "a")
        await until(lambda: lane.batches == 1)
        with pytest.raises(DeadlineExceeded):
            await ask(engine, "bb", seconds=0.05)
        assert engine.stats.queue_tokens == 0
        go.set()
        await asyncio.gather(first, ask(engine, "ccc"))
        assert lane.sent == [[1], [3]]

    asyncio.run(main())


def test_a_call_on_a_device_that_does_not_answer_ends_at_its_deadline() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine = engine_of(lane)
        lane.hold()
        with pytest.raises(DeadlineExceeded):
            await ask(engine, "a", seconds=0.05)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("as_event", [False, True])
def test_what_nobody_waits_for_any_more_is_never_computed(as_event: bool) -> None:
    async def main() -> None:
        lane = FakeLane()
        engine, go, gone = engine_of(lane), lane.hold(), asyncio.Event()
        first = ask(engine, "a")
        await until(lambda: lane.batches == 1)
        hung_up = ask(engine, "bb", cancelled=gone if as_event else gone.is_set)
        ended = ask(engine, "cccc")
        await until(lambda: engine.stats.queue_requests == 2)
        gone.set()
        ended.cancel()
        go.set()
        await first
        with pytest.raises(Cancelled):
            await hung_up
        with pytest.raises(asyncio.CancelledError):
            await ended
        await ask(engine, "ddd")
        assert lane.sent == [[1], [3]] and engine.stats.rejected["cancelled"] == 2

    asyncio.run(main())


def test_a_text_too_long_is_refused_where_nothing_may_be_cut() -> None:
    async def main() -> None:
        engine = engine_of()
        with pytest.raises(TooLong) as caught:
            await ask(engine, "a", "b" * 40, truncate=False)
        assert (caught.value.index, caught.value.num_tokens, caught.value.limit) == (1, 40, MAX_LENGTH)
        await ask(engine, "b" * MAX_LENGTH, truncate=False)

    asyncio.run(main())


def test_a_text_without_tokens_is_refused_by_its_place() -> None:
    async def main() -> None:
        with pytest.raises(NotEmbeddable) as caught:
            await ask(engine_of(), "a", "")
        assert caught.value.index == 1

    asyncio.run(main())


def test_tokens_come_with_their_places_in_the_text_and_none_is_cut_off() -> None:
    engine = asyncio.run(_made(engine_of))
    [tokens] = engine.tokenize(["ab" * 40], prompt="q")
    assert [token.text for token in tokens[:3]] == ["q", "a", "b"] and len(tokens) == 81
    assert (tokens[2].start, tokens[2].stop, tokens[2].special) == (2, 3, False)


async def _made(make: Callable[[], Engine]) -> Engine:
    return make()


def test_draining_answers_what_is_in_work_and_refuses_what_comes() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine, go = engine_of(lane), lane.hold()
        waiting = [ask(engine, "a"), ask(engine, "b")]
        await until(lambda: engine.stats.active_requests == 2)
        draining = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(EngineDown):
            await ask(engine, "c")
        go.set()
        assert await draining
        assert all(task.done() and not task.exception() for task in waiting)

    asyncio.run(main())


def test_closing_ends_what_waits() -> None:
    async def main() -> None:
        lane = FakeLane()
        engine = engine_of(lane)
        lane.hold()
        first = ask(engine, "a", seconds=0.2)
        await until(lambda: lane.batches == 1)
        waiting = ask(engine, "b")
        await until(lambda: engine.stats.queue_requests == 1)
        await engine.close()
        with pytest.raises(EngineDown):
            await waiting
        with pytest.raises(ServingError):
            await first

    asyncio.run(main())


def test_calls_wait_for_a_process_that_is_replaced_and_are_refused_when_it_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.serving.engine.DOWN_S", 0.2)

    async def main() -> None:
        lane = FakeLane()
        engine = engine_of(lane)
        lane.is_ready, lane.last_words = False, "out of memory"
        lane.on_change()
        assert not engine.is_up
        waiting = ask(engine, "abc")
        await asyncio.sleep(0.3)
        with pytest.raises(EngineDown, match="out of memory"):
            await ask(engine, "de")
        lane.is_ready = True
        lane.on_change()
        assert engine.is_up
        assert_vectors(await waiting, ["abc"])
        assert_vectors(await ask(engine, "de"), ["de"])

    asyncio.run(main())


def test_at_five_times_its_capacity_every_call_ends_in_time_and_throughput_stays() -> None:
    rate, length = 4_000.0, 20

    async def offered(factor: float, seconds: float) -> tuple[dict[str, int], float, float, Engine]:
        """Calls at `factor` times what can be computed: outcomes, texts/s, longest wait beyond a deadline."""
        engine = engine_of(FakeLane(rate), max_batch_tokens=200, max_queue_tokens=800, max_concurrent_requests=200)
        outcomes: dict[str, int] = {}
        worst = 0.0
        most_waiting = 0

        async def one() -> None:
            nonlocal worst
            deadline = in_s(0.3)
            try:
                await engine.embed(["a" * length], deadline=deadline)
                outcome = "ok"
            except ServingError as error:
                outcome = type(error).__name__
            worst = max(worst, in_s(0) - deadline)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

        began = time.monotonic()
        tasks = set()
        while (passed := time.monotonic() - began) < seconds:
            due = int(passed * factor * rate / length) - len(tasks)
            tasks.update(asyncio.create_task(one()) for _ in range(due))
            most_waiting = max(most_waiting, engine.stats.queue_tokens)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
        took = time.monotonic() - began
        assert sum(outcomes.values()) == len(tasks) and most_waiting <= 800
        return outcomes, outcomes["ok"] / took, worst, engine

    calm, peak, _, _ = asyncio.run(offered(1.5, 2.0))
    outcomes, throughput, worst, engine = asyncio.run(offered(5.0, 2.0))
    assert set(outcomes) <= {"ok", "Overloaded", "DeadlineExceeded"} and outcomes["Overloaded"] > outcomes["ok"]
    assert throughput >= 0.9 * peak, (calm, peak, outcomes, throughput)
    assert worst < 1.0
    assert (engine.stats.queue_tokens, engine.stats.active_requests, engine.stats.in_flight) == (0, 0, 0)


# -- processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in_output(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> str:
    """A finished output of the real model's folder whose vectors come from the stand-in."""
    folder = tmp_path_factory.mktemp("served")
    write_shard(folder / "in" / "part.parquet", ["abc", "de"])
    return run_output(folder, model_dir, STAND_IN)


def run_output(folder: Path, model_dir: str, stand_in: str | None) -> str:
    from pipeline.config import build_config
    from pipeline.progress import make_display
    from pipeline.run import run

    output = str(folder / "out")
    options = {"input": [str(folder / "in")], "output": output, "model": model_dir, "index": "none", "devices": "cpu"}
    run(build_config(None, options), make_display("none"), stand_in=stand_in)
    return output


def test_a_killed_process_fails_its_calls_and_is_replaced_by_a_spare_within_seconds(
    stand_in_output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS", "0.5")

    async def main() -> None:
        engine = await Engine.start(stand_in_output, ServeSettings())
        try:
            lane = engine._lanes[0]
            assert isinstance(lane, ProcessLane) and lane.pid is not None
            in_work = ask(engine, "abc")
            await until(lambda: engine.stats.in_flight == 1)
            waiting = ask(engine, "de")
            await until(lambda: engine.stats.queue_requests == 1)
            os.kill(lane.pid, signal.SIGKILL)
            with pytest.raises(EngineDown, match="signal 9"):
                await in_work
            assert_vectors(await waiting, ["de"])
            assert engine.stats.restarts == 1 and engine.stats.rejected["down"] == 1
            # Without a spare, too: the second one dies before the third has loaded.
            os.kill(lane.pid, signal.SIGKILL)
            await until(lambda: engine.stats.restarts == 2)
            assert_vectors(await ask(engine, "fg"), ["fg"])
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_batch_that_cannot_be_computed_fails_alone(stand_in_output: str) -> None:
    async def main() -> None:
        engine = await Engine.start(stand_in_output, ServeSettings(warm_spare=False))
        try:
            lane = engine._lanes[0]
            with pytest.raises(EngineDown, match="could not be computed"):
                await lane.send(np.array([9_999], np.int32), np.array([1], np.int32), 0)
            assert_vectors(await ask(engine, "abc"), ["abc"])
            assert engine.stats.restarts == 0
        finally:
            await engine.close()

    asyncio.run(main())


def children_of(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def is_alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


SERVER = """
import asyncio, sys
from pipeline.serving.engine import Engine
from pipeline.serving.settings import ServeSettings

async def main():
    engine = await Engine.start(sys.argv[1], ServeSettings())
    found = await engine.embed(["abc"], deadline=asyncio.get_running_loop().time() + 60)
    print(*sorted(name for name in ("torch", "faiss", "transformers") if name in sys.modules), "served", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_process_outlives_a_server_that_is_killed_and_the_server_imports_no_torch(stand_in_output: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, stand_in_output], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert server.stdout is not None and server.stdout.readline() == "served\n"
        children = children_of(server.pid)
        assert children
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
    end = time.monotonic() + 30
    while any(map(is_alive, children)):
        assert time.monotonic() < end, "a process outlived its server"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_gpu_ipc": True}, "enable_gpu_ipc: needs a CUDA device, the server computes on the CPU; set it to"),
        ({"device": "cpu,cpu"}, "a server computes on one"),
        ({"model": "models/other"}, "given beside the output"),
    ],
)
def test_settings_that_cannot_be_had_are_refused_in_words(
    stand_in_output: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serving.opening.num_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(Engine.start(stand_in_output, ServeSettings(**options)))
    assert caught.value.exit_code == 78


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json"):
        asyncio.run(Engine.start(str(tmp_path), ServeSettings()))


# -- settings ------------------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    from pipeline.serving.settings import load_settings

    file = tmp_path / "serve.yaml"
    file.write_text("max-batch-size: 8\nport: 1111\nmax_queue_delay_ms: 3\n")
    environ = {"EMBED_CORPUS_SERVE_PORT": "2222", "EMBED_CORPUS_SERVE_MAX_QUEUE_DELAY_MS": "4", "PATH": "x"}
    found = load_settings(str(file), environ, {"max_queue_delay_ms": 5, "port": None})
    assert (found.max_batch_size, found.port, found.max_queue_delay_ms) == (8, 2222, 5)
    assert (found.service_name, found.enable_gpu_ipc) == ("embedding-model-serving-tei", False)
    keys = load_settings(None, {"EMBED_CORPUS_SERVE_API_KEYS": '{"team": "abcdefgh"}'}).api_keys
    assert keys["team"].get_secret_value() == "abcdefgh"


def test_the_defaults_are_the_contract() -> None:
    found = ServeSettings()
    assert (found.max_batch_size, found.max_queue_delay_ms, found.enable_gpu_ipc) == (64, 10, False)


@pytest.mark.parametrize(
    ("text", "environ", "options", "message"),
    [
        ("max_bach_size: 3", {}, {}, "--config .*unknown option 'max_bach_size'; did you mean 'max_batch_size'"),
        ("- 3", {}, {}, "--config .*: found a list"),
        ("a: [", {}, {}, "--config .*: not YAML"),
        ("", {"EMBED_CORPUS_SERVE_PROT": "1"}, {}, "unknown option 'EMBED_CORPUS_SERVE_PROT'; did you mean 'port'"),
        ("", {"EMBED_CORPUS_SERVE_FALLBACKS": "[{"}, {}, "EMBED_CORPUS_SERVE_FALLBACKS: begins as JSON"),
        ("max_batch_size: 0", {}, {}, "--config .*: max_batch_size: found 0"),
        ("", {"EMBED_CORPUS_SERVE_PORT": "x"}, {}, "environment: port: found 'x'"),
        ("", {}, {"query_lane": "fast"}, "command line: query_lane: found 'fast'"),
    ],
)
def test_a_wrong_setting_is_named_with_where_it_stands(
    tmp_path: Path, text: str, environ: dict[str, str], options: dict[str, Any], message: str
) -> None:
    from pipeline.serving.settings import load_settings

    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(str(file), environ, options)


def test_a_secret_never_gets_into_a_message() -> None:
    from pipeline.serving.settings import load_settings

    with pytest.raises(ConfigError) as caught:
        load_settings(None, {"EMBED_CORPUS_SERVE_API_KEYS": '{"team": "geheim"}'})
    assert "geheim" not in str(caught.value)

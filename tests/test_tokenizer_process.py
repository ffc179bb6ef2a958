"""Tokenizing in child processes: the same tokens as in-process, whatever becomes of a child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest
import tokenizers

from pipeline import tokenizer_process
from pipeline.chunker import Chunker
from pipeline.errors import ModelError
from pipeline.reuse import token_hashes
from pipeline.tokenizer import Tokenizer, TokenizerSpec
from pipeline.tokenizer_process import Pending, TokenizerProcesses
from tests import model_zoo
from tests.conftest import ROOT

ODD_TEXTS = ["", " ", "\ud83d", "\ude00 halves of a pair", "a\udfffb", "\x00", "é", "中文", "👩‍👩‍👧", "river " * 90]


@pytest.fixture(scope="module")
def spec() -> TokenizerSpec:
    return TokenizerSpec(model_zoo.byte_bpe().to_str(), 16, prompt="query: ")


@pytest.fixture(scope="module")
def shared(spec: TokenizerSpec) -> Iterator[TokenizerProcesses]:
    with TokenizerProcesses(spec, 2, 3, chunk=True) as processes:
        yield processes


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "MAX_SLICE_TEXTS", 3)


def texts_of(number: int, seed: int = 0) -> list[str]:
    return [model_zoo.sentence(1 + at % 23, at + seed) for at in range(number)]


def assert_same(pending: Pending, spec: TokenizerSpec, texts: list[str]) -> None:
    tokens, hashes = pending.result()
    expected = Tokenizer(spec).encode(texts)
    pairs = [(getattr(tokens, name), getattr(expected, name)) for name in ("input_ids", "lengths", "dropped")]
    for ours, theirs in [*pairs, (hashes, token_hashes(expected))]:
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours, theirs)


def pids(processes: TokenizerProcesses) -> list[int]:
    return [child._process.pid for child in processes._children]


def child_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let ``code`` stand in for what children do with a request, where it is to go wrong."""
    script = tmp_path / "child.py"
    script.write_text(
        "import os, sys\n"
        "from pipeline import tokenizer_process as child\n"
        "make = child._work\n"
        "def work(*arguments):\n"
        "    do = make(*arguments)\n"
        "    def wrapped(verb, texts):\n"
        f"        {code}\n"
        "        return do(verb, texts)\n"
        "    return wrapped\n"
        "child._work = work\n"
        "child.main()\n",
        encoding="utf-8",
    )
    program(tmp_path, monkeypatch, f"exec {sys.executable} {script}")


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Let shell lines stand in for the children's Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.usefixtures("small_slices")
def test_tokens_and_hashes_are_those_of_the_tokenizer_in_the_order_given(
    shared: TokenizerProcesses, spec: TokenizerSpec
) -> None:
    before = shared.busy_seconds
    windows = [ODD_TEXTS, texts_of(50), [], ["alone"], texts_of(20, seed=5), tuple(ODD_TEXTS * 3)]
    for window, pending in [(list(window), shared.submit(window)) for window in windows]:
        assert_same(pending, spec, window)
    assert before < shared.busy_seconds < before + 10
    assert shared.restarts == 0


def test_a_text_without_any_token_is_kept() -> None:
    tokenizer = model_zoo.byte_bpe()
    tokenizer.post_processor = tokenizers.processors.ByteLevel()
    spec = TokenizerSpec(tokenizer.to_str())
    with TokenizerProcesses(spec, 1) as processes:
        assert_same(processes.submit([""]), spec, [""])


@pytest.mark.usefixtures("small_slices")
def test_spans_are_those_of_the_chunker(shared: TokenizerProcesses, spec: TokenizerSpec) -> None:
    texts = [None, *ODD_TEXTS[5:], model_zoo.sentence(300), None, "", *texts_of(10)]
    assert shared.cut(texts) == Chunker(spec, 3).cut(texts)
    assert shared.cut([]) == []


def test_slices_are_bounded_and_a_long_text_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "MAX_SLICE_TEXTS", 3)
    monkeypatch.setattr(tokenizer_process, "MAX_SLICE_CHARS", 10)
    texts = ["a", "b", "c", "d", "e" * 99, "f", "g" * 9, "h"]
    slices = list(tokenizer_process._slices(texts))
    assert slices == [["a", "b", "c"], ["d"], ["e" * 99], ["f", "g" * 9], ["h"]]


def test_requests_and_answers_larger_than_a_pipe_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "PIPE_BYTES", 4096)
    text = "a b " * 50_000
    with TokenizerProcesses(TokenizerSpec(model_zoo.wordpiece().to_str()), 1) as processes:
        tokens, _ = processes.submit([text] * 16).result()
    assert tokens.lengths.tolist() == [100_002] * 16
    np.testing.assert_array_equal(tokens.input_ids.reshape(16, -1), [tokens.input_ids[:100_002]] * 16)


def test_an_error_of_ours_is_raised_as_itself(spec: TokenizerSpec) -> None:
    with pytest.raises(ModelError) as expected:
        Chunker(spec, 99)
    with TokenizerProcesses(spec, 1, 99, chunk=True) as processes:
        for _ in range(2):
            with pytest.raises(ModelError) as raised:
                processes.cut(["text"])
            assert str(raised.value) == str(expected.value)
        with pytest.raises(ModelError):
            processes.submit(["text"]).result()
        assert processes.restarts == 0


def test_an_error_of_a_library_is_raised_with_the_childs_traceback() -> None:
    with TokenizerProcesses(TokenizerSpec("{}"), 1) as processes:
        with pytest.raises(RuntimeError, match=r"(?s)Traceback.*in _work") as raised:
            processes.submit(["text"]).result()
        assert type(raised.value) is RuntimeError


def test_an_error_is_that_of_its_slice_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: TokenizerSpec
) -> None:
    child_that(tmp_path, monkeypatch, "assert 'bad' not in texts, 'a bad text'")
    with TokenizerProcesses(spec, 1) as processes:
        bad, good = processes.submit(["bad"]), processes.submit(["good"])
        with pytest.raises(RuntimeError, match="a bad text"):
            bad.result()
        assert_same(good, spec, ["good"])


@pytest.mark.usefixtures("small_slices")
def test_a_killed_child_is_replaced_and_nothing_is_lost(spec: TokenizerSpec) -> None:
    windows = [texts_of(4000, seed) for seed in range(2)]
    with TokenizerProcesses(spec, 2) as processes:
        pending = [processes.submit(window) for window in windows]
        wait_until(lambda: processes.busy_seconds > 0)
        os.kill(pids(processes)[0], signal.SIGKILL)
        for window, one in zip(windows, pending, strict=True):
            assert_same(one, spec, window)
        assert processes.restarts == 1
        assert len(pids(processes)) == 2


@pytest.mark.usefixtures("small_slices")
def test_texts_that_children_die_of_are_given_up_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: TokenizerSpec
) -> None:
    child_that(tmp_path, monkeypatch, "'deadly' in texts and [os.write(2, b'last words'), os.kill(os.getpid(), 9)]")
    before, after = texts_of(9), texts_of(9, seed=3)
    with TokenizerProcesses(spec, 1) as processes:
        good, bad, next_one = processes.submit(before), processes.submit(["deadly"]), processes.submit(after)
        with pytest.raises(RuntimeError, match=r"signal 9 \(Killed\): last words, 3 times") as raised:
            bad.result()
        assert type(raised.value) is RuntimeError
        assert_same(good, spec, before)
        assert_same(next_one, spec, after)
        assert processes.restarts == 3


def test_children_that_cannot_start_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: TokenizerSpec
) -> None:
    program(tmp_path, monkeypatch, "echo no room >&2; echo ' ' >&2; exit 7")
    with TokenizerProcesses(spec, 2) as processes:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended with exit code 7: no room, 3 times"):
                processes.submit(["text"]).result()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "not there"))
    with TokenizerProcesses(spec, 1) as processes:
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                processes.submit(["text"]).result()


def test_what_a_library_prints_does_not_get_between_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: TokenizerSpec
) -> None:
    child_that(tmp_path, monkeypatch, "print('hello', flush=True), os.write(1, b'hello')")
    with TokenizerProcesses(spec, 1) as processes:
        assert_same(processes.submit(["text"]), spec, ["text"])


def test_closing_ends_the_children_in_mid_work(spec: TokenizerSpec) -> None:
    processes = TokenizerProcesses(TokenizerSpec(spec.json), 2)
    wait_until(lambda: len(pids(processes)) == 2)
    ended = [psutil.Process(pid) for pid in pids(processes)]
    pending = processes.submit(["river " * 1_000_000] * 4)
    start = time.perf_counter()
    processes.close()
    assert time.perf_counter() - start < 5
    with pytest.raises(RuntimeError, match="before their work was done"):
        pending.result()
    assert not any(process.is_running() for process in ended)
    processes.close()


def test_no_child_is_left_when_its_worker_is_killed(spec: TokenizerSpec) -> None:
    code = (
        "import sys, psutil\n"
        "from pipeline.tokenizer_process import TokenizerProcesses, TokenizerSpec\n"
        "processes = TokenizerProcesses(TokenizerSpec(sys.stdin.read()), 2)\n"
        "processes.submit(['text']).result()\n"
        "processes.submit(['river ' * 1_000_000] * 4)\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
        "processes.submit(['text'] * 4).result()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(spec.json)
        worker.stdin.close()
        left = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        worker.kill()
    assert len(left) == 2
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


def test_a_child_ignores_the_interrupt_that_its_worker_handles(spec: TokenizerSpec) -> None:
    with TokenizerProcesses(spec, 1) as processes:
        processes.submit(["text"]).result()
        os.kill(pids(processes)[0], signal.SIGINT)
        assert_same(processes.submit(["text"]), spec, ["text"])
        assert processes.restarts == 0


def test_a_child_loads_no_framework(spec: TokenizerSpec) -> None:
    code = (
        "import json, sys\n"
        "from pipeline import tokenizer_process\n"
        "work = tokenizer_process._work(json.load(sys.stdin), True, 2)\n"
        "work('encode', ['text'])\n"
        "work('cut', ['text'])\n"
        "names = {'torch', 'transformers', 'sentence_transformers', 'datasets', 'faiss'}\n"
        "sys.exit(', '.join(names & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(asdict(spec)), cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)

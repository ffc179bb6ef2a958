"""What only a real device shows of a run: memory that ends, numbers too large for float16, a worker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from pipeline.batcher import pack, plan_batches
from pipeline.encoder import Encoder
from pipeline.records import EncoderSettings
from pipeline.tokenizer import Tokenizer
from pipeline.verify import verify
from tests import model_zoo
from tests.conftest import ROOT, read_output, vectors_of, write_shard

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
TEXTS = [model_zoo.sentence(1 + number % 150, seed=number) for number in range(4000)]


@pytest.fixture
def little_memory(cuda: str) -> Iterator[None]:
    """Let this process have only what it holds now and 150 MiB more."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(cuda) + (150 << 20)) / total, cuda)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)


def encoded(encoder: Encoder, texts: list[str], budget: int) -> np.ndarray:
    tokens = Tokenizer(encoder.tokenizer_spec()).encode(texts)
    found = np.full((len(texts), encoder.dim), np.nan, np.float32)
    for chosen in plan_batches(tokens.lengths, budget):
        found[chosen] = encoder.encode(pack(tokens, chosen))
    return found


def test_a_batch_larger_than_the_devices_memory_is_halved_until_it_fits(
    cuda: str, little_memory: None, tmp_path: Path
) -> None:
    folder = model_zoo.build("bert", tmp_path / "model", hidden_size=256, intermediate_size=1024)
    encoder = Encoder.load(EncoderSettings(str(folder), device=cuda))
    small = encoded(encoder, TEXTS, 2048)
    assert encoder.num_oom_splits == 0
    large = encoded(encoder, TEXTS, 10_000_000)
    assert encoder.num_oom_splits > 0
    assert encoder.token_limit is not None and encoder.token_limit < 300_000
    cosines = np.einsum("ij,ij->i", small, large) / np.linalg.norm(small, axis=1) / np.linalg.norm(large, axis=1)
    assert cosines.min() > 0.9999


def test_a_text_that_overflows_float16_gets_its_float32_vector(device: str, tmp_path: Path) -> None:
    folder = model_zoo.build("bert", tmp_path / "model")
    whole = Encoder.load(EncoderSettings(str(folder), device=device, dtype="float32"))
    half = Encoder.load(EncoderSettings(str(folder), device=device, dtype="float16"))
    # A weight of one word that float16 holds, and whose product with the next layer's it does not.
    rare = Tokenizer(half.tokenizer_spec()).encode(["velvet"]).input_ids[1]
    for encoder in (whole, half):
        table = encoder.transformer.get_input_embeddings().weight  # type: ignore[operator]
        norm = encoder.transformer.embeddings.LayerNorm  # type: ignore[union-attr]
        with torch.no_grad():
            table[rare, 0] = 3e4
            norm.weight[0] = 6e4  # type: ignore[index]
    texts = ["river stone", "velvet velvet", "paper garden"]
    expected, found = encoded(whole, texts, 512), encoded(half, texts, 512)
    assert np.isfinite(expected).all()
    assert np.isfinite(found).all()
    assert half._float32 is not None, "nothing overflowed: the test shows nothing"


def test_a_run_killed_on_the_device_is_finished_by_the_same_command(device: str, tmp_path: Path) -> None:
    for number in range(12):
        write_shard(tmp_path / "in" / f"part-{number:02}.parquet", TEXTS[:2000])
    folder = model_zoo.build("bert", tmp_path / "model", hidden_size=128, num_hidden_layers=6)
    command = [sys.executable, "-m", "cli", "run", str(tmp_path / "in"), "--model", str(folder), "--devices", device]
    command += ["--id-column", "id", "--index", "none", "--progress", "none", "--max-batch-tokens", "8192", "--output"]
    subprocess.run([*command, str(tmp_path / "calm")], cwd=ROOT, check=True, timeout=600)
    process = subprocess.Popen([*command, str(tmp_path / "out")], cwd=ROOT)
    try:
        wait_for(lambda: len(list((tmp_path / "out/commits").glob("*.json"))) >= 2)
        [worker] = [child for child in psutil.Process(process.pid).children() if "pipeline.worker" in child.cmdline()]
        worker.send_signal(signal.SIGKILL)  # it is replaced, and its shard given out again
        assert process.wait(timeout=600) == 0
        (tmp_path / "out/commits/part-11.json").unlink()
        again = subprocess.Popen([*command, str(tmp_path / "out")], cwd=ROOT)
        time.sleep(5)
        os.kill(again.pid, signal.SIGKILL)
        again.wait()
        subprocess.run([*command, str(tmp_path / "out")], cwd=ROOT, check=True, timeout=600)
    finally:
        process.kill()
    calm, out = vectors_of(read_output(tmp_path / "calm")), vectors_of(read_output(tmp_path / "out"))
    assert calm.shape == out.shape
    assert np.abs(calm - out).max() <= 2e-3 * np.linalg.norm(calm, axis=1).max()
    assert verify(str(tmp_path / "out"), sample=64)["faults"] == []


def wait_for(condition: object, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)

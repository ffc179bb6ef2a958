"""The budget of devices whose speed is known, on a clock that only they move; and what is remembered of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline import tuning
from pipeline.calibration import cost_terms
from pipeline.errors import ModelError
from pipeline.records import Batch, EncoderSettings
from pipeline.tokenizer import TokenizerSpec
from pipeline.tuning import CPU_BUDGETS, GPU_BUDGETS, MAX_S, Tuning, knee, tune, tuned, vocabulary_ids
from tests import stand_in

IDS = np.arange(100, 200, dtype=np.int32)


class Device:
    """Computes nothing and takes the time it is told to: ``seconds(batch)``, or the error it raises."""

    dtype, attention, num_parameters = "float32", "grouped", 7

    def __init__(self, seconds: Callable[[Batch], float], *, padded: bool = False) -> None:
        self.padded, self.time, self.batches = padded, 0.0, list[int]()
        self._seconds = seconds

    def now(self) -> float:
        return self.time

    def encode(self, batch: Batch) -> NDArray[np.float32]:
        assert np.isin(batch.input_ids, IDS).all() or batch.input_ids.max() < 100
        self.batches.append(batch.num_tokens)
        self.time += self._seconds(batch)
        return np.zeros((batch.num_texts, 2), np.float32)

    def tokenizer_spec(self) -> TokenizerSpec:
        return stand_in.make(EncoderSettings("")).tokenizer_spec()


def found(device: Device, kind: str = "cpu", max_length: int | None = 256) -> Tuning:
    return tune(device, device=kind, ids=IDS, max_length=max_length, now=device.now)


def per_batch(tokens: float, rate: float = 20_000) -> Callable[[Batch], float]:
    """So many tokens' time for each batch, beside the time of its own tokens."""
    return lambda batch: (batch.num_tokens + tokens) / rate


def noisy(seconds: Callable[[Batch], float], share: float, seed: int) -> Callable[[Batch], float]:
    rng = random.Random(seed)
    return lambda batch: seconds(batch) * rng.uniform(1 - share, 1 + share)


def test_the_smallest_budget_near_the_best_is_taken() -> None:
    # 2,048 tokens reach 91 % of the best rate, 4,096 95 % and 8,192 98 %: within 3 % of the best one.
    device = Device(per_batch(200))
    result = found(device)
    assert result.max_batch_tokens == 4096
    assert "faster than 2,048 tokens" in result.reason
    assert device.time < MAX_S


def test_larger_budgets_are_not_tried_once_they_are_no_better() -> None:
    device = Device(lambda batch: batch.num_tokens / (20_000 if batch.num_tokens <= 3000 else 10_000))
    assert found(device).max_batch_tokens == 2048
    assert max(device.batches) <= 4096


def test_a_smaller_budget_is_taken_where_the_default_is_too_large() -> None:
    assert found(Device(lambda b: b.num_tokens / (20_000 if b.num_tokens <= 1100 else 15_000))).max_batch_tokens == 512
    assert found(Device(lambda b: b.num_tokens / (20_000 if b.num_tokens <= 1100 else 19_800))).max_batch_tokens == 2048


@pytest.mark.parametrize("seed", range(10))
def test_noise_does_not_move_the_default(seed: int) -> None:
    assert found(Device(noisy(per_batch(0), 0.02, seed))).max_batch_tokens == 2048
    assert found(Device(noisy(per_batch(0, rate=5e6), 0.02, seed)), "cuda:0").max_batch_tokens == 32_768


@pytest.mark.parametrize("seed", range(10))
def test_noise_does_not_hide_what_is_much_faster(seed: int) -> None:
    device = Device(noisy(lambda b: b.num_tokens / (20_000 if b.num_tokens > 3000 else 15_000), 0.03, seed))
    assert found(device).max_batch_tokens in (4096, 8192)


def test_a_gpu_that_gains_from_large_batches_gets_them() -> None:
    result = found(Device(per_batch(20_000, rate=5e6)), "cuda:0")
    assert result.max_batch_tokens in GPU_BUDGETS
    assert result.max_batch_tokens > 32_768
    no_limit = found(Device(per_batch(20_000, rate=5e6)), "cuda:0", None)
    assert no_limit.max_batch_tokens == result.max_batch_tokens


@pytest.mark.parametrize("error", [MemoryError(), ModelError("a text does not fit")])
def test_half_of_what_fits_is_used_where_memory_ends(error: Exception) -> None:
    def seconds(batch: Batch) -> float:
        if batch.num_tokens > 32_768:
            raise error
        return (batch.num_tokens + 20_000) / 5e6

    result = found(Device(seconds), "cuda:0")
    assert result.max_batch_tokens == 16_384
    assert "65,536 tokens at once do not fit" in result.reason
    assert result.coefficients[0] > 0


def test_a_batch_that_was_halved_did_not_fit() -> None:
    class Halving(Device):
        num_oom_splits = 0

        def encode(self, batch: Batch) -> NDArray[np.float32]:
            self.num_oom_splits += batch.num_tokens > limit
            return super().encode(batch)

    limit = 66_000
    assert found(Halving(per_batch(0, rate=5e6)), "cuda:0").max_batch_tokens == 32_768
    limit = 10_000
    assert found(Halving(per_batch(0, rate=5e6)), "cuda:0").max_batch_tokens == 4_096
    limit = 5_000
    assert found(Halving(per_batch(0, rate=5e6)), "cuda:0").max_batch_tokens == 4_096


def test_other_errors_are_told() -> None:
    def seconds(batch: Batch) -> float:
        raise RuntimeError("kernel missing")

    with pytest.raises(RuntimeError, match="kernel missing"):
        found(Device(seconds))


@pytest.mark.parametrize("rate", [50, 300, 500, 1000, 2000, 5000, 20_000, 1e6, 1e12])
def test_it_never_takes_more_than_ten_seconds(rate: float) -> None:
    device = Device(per_batch(30, rate=rate))
    result = found(device)
    assert device.time <= MAX_S + 1
    assert result.took_s == round(device.time, 3)
    assert result.coefficients[0] > 0
    if rate <= 500:
        assert result.max_batch_tokens == 2048
        assert "too long to compare budgets" in result.reason


def test_a_model_that_is_far_too_slow_is_given_up_after_one_text() -> None:
    device = Device(per_batch(0, rate=40))
    result = found(device)
    assert result.max_batch_tokens == 2048
    assert result.reason == "the default; 512 tokens take about 12.8 s, too long to compare budgets"
    assert result.coefficients == pytest.approx((1 / 40, 0, 0))
    assert len(device.batches) == 1


@pytest.mark.parametrize("padded", [False, True])
def test_the_cost_of_a_batch_is_found(padded: bool) -> None:
    wanted = (5e-5, 1e-7, 2e-3)

    def seconds(batch: Batch) -> float:
        return float(np.dot(cost_terms(batch.lengths, padded=padded), wanted))

    np.testing.assert_allclose(found(Device(seconds, padded=padded)).coefficients, wanted, rtol=1e-6)


def test_a_disturbed_batch_does_not_count_as_the_models_cost() -> None:
    calls = iter(range(10**6))
    device = Device(lambda batch: batch.num_tokens / 20_000 * (3 if next(calls) % 11 == 5 else 1))
    assert found(device).coefficients == pytest.approx((1 / 20_000, 0, 0))


def test_batches_follow_one_another_as_in_a_run() -> None:
    class Beside(Device):
        waiting, most = 0, 0

        def submit(self, batch: Batch) -> Beside:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            self.encode(batch)
            return self

        def result(self) -> None:
            self.waiting -= 1

    device = Beside(per_batch(0, rate=5e6))
    found(device, "cuda:0")
    assert (device.waiting, device.most) == (0, 2)


def test_a_text_is_never_longer_than_the_limit_or_the_smallest_budget() -> None:
    longest: list[int] = []

    def seconds(batch: Batch) -> float:
        longest.append(batch.max_seqlen)
        return batch.num_tokens / 20_000

    found(Device(seconds), max_length=3)
    assert max(longest) == 3
    longest.clear()
    found(Device(seconds), max_length=None)
    assert max(longest) == CPU_BUDGETS[0]


def test_the_knee_wants_three_quarters_of_enough_rounds() -> None:
    assert knee({4096: [1.1, 1.1, 1.1]}, 2048) == 4096
    assert knee({4096: [1.1, 1.1]}, 2048) == 2048  # too few
    assert knee({4096: [1.1, 1.1, 1.02]}, 2048) == 2048
    assert knee({4096: [1.1, 1.1, 1.1, 1.1, 1.02]}, 2048) == 4096
    assert knee({4096: [1.08] * 3, 8192: [1.1] * 3}, 2048) == 4096
    assert knee({4096: [1.06] * 3, 8192: [1.1] * 3}, 2048) == 8192
    assert knee({512: [1.02] * 3, 4096: [1.035] * 3}, 2048) == 4096  # 512 is near the best, and no better than 2,048
    assert knee({}, 2048) == 2048


def test_ids_are_the_vocabularys_without_special_tokens() -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 5}, unk_token="[PAD]"))
    tokenizer.add_special_tokens(["[PAD]", "[SEP]"])
    assert vocabulary_ids(TokenizerSpec(json=tokenizer.to_str())).tolist() == [1, 5]


# -- what is remembered ----------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EMBED_CORPUS_NO_TUNING", raising=False)
    return tmp_path / "cache" / "embed-corpus" / "tuning"


def tuned_once(device: Device, threads: int = 2) -> Tuning:
    return tuned(device, "cpu", threads, now=device.now)


def test_a_result_is_remembered(cache: Path) -> None:
    first, second = Device(per_batch(200)), Device(per_batch(200))
    result = tuned_once(first)
    assert result.max_batch_tokens == 4096
    assert tuned_once(second) == result
    assert second.batches == []
    [file] = cache.iterdir()
    assert json.loads(file.read_text())["key"]["architecture"] == "Device"


def test_another_machine_model_or_type_is_measured_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_once(Device(per_batch(0)))
    changes: list[tuple[Any, str, Any]] = [
        (Device, "dtype", "bfloat16"), (Device, "attention", "padded"), (Device, "num_parameters", 8),
        (tuning, "VERSION", 99), (tuning, "cpu_name", lambda: "another"), (tuning, "_torch_version", lambda: "0"),
        (stand_in, "MAX_LENGTH", 16),
    ]  # fmt: skip
    for holder, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            device = Device(per_batch(0))
            tuned_once(device)
            assert device.batches, name
    device = Device(per_batch(0))
    tuned_once(device, threads=3)
    assert device.batches
    assert len(list(cache.iterdir())) == len(changes) + 2


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "null",
        lambda text: text.replace('"max_batch_tokens": 4096', '"max_batch_tokens": 0'),
        lambda text: text.replace('"max_batch_tokens": 4096', '"max_batch_tokens": null'),
        lambda text: text.replace('"width"', '"wide"'),
        lambda text: text.replace('"peak_flops_per_s": 0.0', '"peak_flops_per_s": NaN'),
        lambda text: text.replace('"num_parameters": 7', '"num_parameters": 8'),
        lambda text: json.dumps({**json.loads(text), "tuning": [1]}),
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(cache: Path, change: Callable[[str], str]) -> None:
    result = tuned_once(Device(per_batch(200)))
    [file] = cache.iterdir()
    whole = file.read_text()
    damaged = change(whole)
    assert damaged != whole
    file.write_text(damaged)
    device = Device(per_batch(200))
    assert tuned_once(device) == result
    assert device.batches
    assert [(path, path.read_text()) for path in cache.iterdir()] == [(file, whole)]


def test_bytes_that_are_no_text_are_measured_again(cache: Path) -> None:
    result = tuned_once(Device(per_batch(200)))
    [file] = cache.iterdir()
    file.write_bytes(b"\xff\xfe\x00")
    assert tuned_once(Device(per_batch(200))) == result


@pytest.mark.parametrize("place", ["no home", "relative", "a file in the way", "a folder in the way"])
def test_where_nothing_can_be_written_it_is_measured_each_time(
    place: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if place == "no home":
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME")
    elif place == "relative":
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        monkeypatch.setenv("HOME", "")
    elif place == "a file in the way":
        (tmp_path / "cache").write_text("")
    else:
        tuned_once(Device(per_batch(200)))
        [file] = cache.iterdir()
        file.unlink()
        (file / "full").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        device = Device(per_batch(200))
        assert tuned_once(device).max_batch_tokens == 4096
        assert device.batches
    assert sorted(tmp_path.rglob("*")) == before


def test_without_its_own_variable_the_cache_is_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EMBED_CORPUS_NO_TUNING", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    tuned_once(Device(per_batch(0)))
    assert len(list((tmp_path / ".cache" / "embed-corpus" / "tuning").iterdir())) == 1


def test_the_switch_keeps_the_default_and_touches_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBED_CORPUS_NO_TUNING", "1")
    device = Device(per_batch(200))
    assert tuned_once(device) == Tuning(2048, reason="the default; EMBED_CORPUS_NO_TUNING is set")
    assert tuned(device, "cuda:0", 2).max_batch_tokens == 32_768
    assert device.batches == []
    assert not cache.exists()


def test_a_result_survives_json() -> None:
    result = Tuning(4096, (1e-4, 2e-8, 0.0), 2e11, 100, 3, 5, "why", 3.2)
    assert Tuning.from_json(json.loads(json.dumps(result.to_dict()))) == result
    assert result.flops(6, 20) == 2400
    with pytest.raises(ValueError, match="not a tuning"):
        Tuning.from_json({})


@pytest.mark.slow
def test_the_real_model_is_measured_in_seconds(cache: Path, model_dir: str) -> None:
    from pipeline.encoder import Encoder

    encoder = Encoder.load(EncoderSettings(model_dir))
    result = tuned(encoder, "cpu", 2)
    assert result.max_batch_tokens in CPU_BUDGETS
    assert result.took_s < 20  # ten and the peak, on a machine that may be busy
    # Six layers of four 384 × 384 and two 384 × 1,536 products, their biases and norms, and the embeddings' norm.
    layer = 4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384
    assert (result.parameters, result.layers, result.width) == (6 * layer + 2 * 384, 6, 384)
    # Computing a token takes no less than its operations at the limit of the machine.
    assert result.peak_flops_per_s > 1e9
    assert result.coefficients[0] > 0.5 * result.flops(1, 0) / result.peak_flops_per_s
    assert tuned(encoder, "cpu", 2) == result

"""A loaded encoder into the token budget that suits it and its device, measured once and remembered.

Synthetic texts are computed in batches of growing budgets, and what looks faster than the default is compared with it
in rounds: the ratio of neighbours in time, so that a drift of the machine falls out. The default is kept unless another
budget is more than 3 % faster in three quarters of the rounds; of several such the smallest within 3 % of the best is
taken, as it needs less memory. Where memory ends on the way up, half of what fitted is the limit. It takes about three
seconds, ten at most; a model too slow to be compared in that time keeps the default.

All batches timed give the cost of a batch, too, and a second of matrix products the limit of the device.

The result lies in ``$XDG_CACHE_HOME/embed-corpus/tuning`` (``~/.cache`` without that variable) under a hash of device,
model shape, types and versions; where nothing can be written it is measured each time. Remove the folder to measure
again. ``EMBED_CORPUS_NO_TUNING=1`` keeps the default, measures nothing and reads nothing. No vector depends on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline import batcher
from pipeline.calibration import cost_terms
from pipeline.cost_model import fit_cost
from pipeline.errors import EmbedCorpusError
from pipeline.flops import ModelFacts, cpu_name, flops, peak
from pipeline.records import Batch, Tokens
from pipeline.tokenizer import TokenizerSpec

if TYPE_CHECKING:
    from torch import nn

VERSION = 1  # of what is remembered, and of how it is measured
SWITCH = "EMBED_CORPUS_NO_TUNING"

CPU_BATCH_TOKENS = 2_048  # the activations of one layer stay in a core's share of the cache
GPU_BATCH_TOKENS = 32_768
CPU_BUDGETS = (512, 1_024, 2_048, 4_096, 8_192)
GPU_BUDGETS = (8_192, 16_384, 32_768, 65_536, 131_072)

AIM_S, MAX_S = 3.0, 10.0  # of all batches: no further round after the first, no batch that would end after the second
SLICE_S = 0.15  # small batches are computed in turn for about so long, as one measurement
MAX_SLICE_TOKENS = 1 << 20
MIN_ROUNDS, MAX_ROUNDS = 3, 7
MARGIN = 0.03
DISTURBED = 1.25  # batches this much slower than the others, by their cost, tell of the machine and not of the model
PEAK_S = 1.0

SEED = 20_240_229
NUM_TEXTS = 65_536  # of lengths alone; tokens are made up for those that are computed
MEDIAN_LENGTH, SPREAD = 64, 1.0  # log-normal tokens of a text: 18 to 230 for two thirds of them
MIN_LENGTH = 4
# Where in the order of lengths, longest first, batches are taken: one place a round, the middle first.
PLACES = (0.5, 0.1, 0.8)


class Encodes(Protocol):
    """What is needed of an encoder here.

    One that computes beside the host may have ``submit``, and ``num_oom_splits`` where it halves what does not fit;
    ``transformer`` is its torch module. See ``encoder.Encoder``.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def padded(self) -> bool: ...
    def encode(self, batch: Batch) -> NDArray[np.float32]: ...
    def tokenizer_spec(self) -> TokenizerSpec: ...


@dataclass(frozen=True)
class Tuning:
    """What is known of an encoder on its device.

    Attributes:
        max_batch_tokens: the budget to use.
        coefficients: seconds of each of ``calibration.cost_terms``: a token, a pair of tokens that attend, a batch;
            zeros where nothing was measured.
        peak_flops_per_s: of the best matrix product of the model's shapes; 0 where it was not measured.
        parameters, layers, width: what `flops` must know of the model; 0 where it is not known.
        reason: why this budget, in words.
        took_s: to find out; of a remembered result, when it was found.
    """

    max_batch_tokens: int
    coefficients: tuple[float, float, float] = (0.0, 0.0, 0.0)
    peak_flops_per_s: float = 0.0
    parameters: int = 0
    layers: int = 0
    width: int = 0
    reason: str = ""
    took_s: float = 0.0

    def flops(self, num_tokens: float, sum_of_squared_lengths: float) -> float:
        """Operations of a forward over texts of so many tokens; 0 where the model is not known."""
        return flops(num_tokens, sum_of_squared_lengths, self.parameters, self.layers, self.width)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Tuning:
        """From ``to_dict``.

        Raises:
            ValueError: it is not one.
        """
        try:
            tokens, quadratic, batch = (float(value) for value in document["coefficients"])
            found = cls(
                max_batch_tokens=int(document["max_batch_tokens"]),
                coefficients=(tokens, quadratic, batch),
                peak_flops_per_s=float(document["peak_flops_per_s"]),
                parameters=int(document["parameters"]),
                layers=int(document["layers"]),
                width=int(document["width"]),
                reason=str(document["reason"]),
                took_s=float(document["took_s"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a tuning: {error!r}") from error
        numbers = (*found.coefficients, found.peak_flops_per_s)
        if found.max_batch_tokens < 1 or not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("not a tuning: a number is out of range")
        return found


def default_batch_tokens(device: str) -> int:
    return CPU_BATCH_TOKENS if device == "cpu" else GPU_BATCH_TOKENS


def tuned(
    encoder: Encodes, device: str, threads: int, *, now: Callable[[], float] = time.perf_counter, peak_s: float = PEAK_S
) -> Tuning:
    """The remembered result for an encoder like this one, or a new one, which is then remembered.

    Args:
        encoder: loaded.
        device: ``cpu``, ``cuda:0`` …
        threads: that a CPU computes with.
        now: a clock in seconds.
        peak_s: see `tune`.
    """
    module: nn.Module | None = getattr(encoder, "transformer", None)
    facts = ModelFacts() if module is None else ModelFacts.of(module)
    if os.environ.get(SWITCH, "") not in ("", "0"):
        return Tuning(
            default_batch_tokens(device), (0.0, 0.0, 0.0), 0.0, facts.parameters, facts.layers, facts.width,
            reason=f"the default; {SWITCH} is set",
        )  # fmt: skip
    spec = encoder.tokenizer_spec()
    key = {
        "version": VERSION,
        "device": f"{cpu_name()}, {threads} threads" if device == "cpu" else _gpu_name(device),
        "architecture": type(encoder if module is None else module).__name__,
        "num_parameters": encoder.num_parameters,
        "facts": asdict(facts),
        "max_length": spec.max_length,
        "dtype": encoder.dtype,
        "attention": encoder.attention,
        "torch": _torch_version(),
    }
    key = json.loads(json.dumps(key))  # as it is read back
    file = _cache_file(key)
    known = _read(file, key)
    if known is not None:
        return known
    ids = vocabulary_ids(spec)
    found = tune(encoder, device=device, ids=ids, max_length=spec.max_length, facts=facts, now=now, peak_s=peak_s)
    _write(file, key, found)
    return found


def tune(
    encoder: Encodes,
    *,
    device: str,
    ids: NDArray[np.int32],
    max_length: int | None,
    facts: ModelFacts | None = None,
    now: Callable[[], float] = time.perf_counter,
    peak_s: float = PEAK_S,
) -> Tuning:
    """Measure. Memory that does not suffice is no error here, and neither is a model that cannot compute.

    Args:
        encoder: loaded; it computes batches whose vectors are thrown away.
        device: ``cpu``, ``cuda:0`` …
        ids: (n,) token ids that texts are made of; no special ones.
        max_length: of a text in tokens; None for no limit.
        facts: of the model; without them the limit of the device is not measured.
        now: a clock in seconds.
        peak_s: about how long the limit of the device may take to measure.
    """
    facts = facts or ModelFacts()
    began = now()
    budgets = CPU_BUDGETS if device == "cpu" else GPU_BUDGETS
    default = default_batch_tokens(device)
    # A text longer than the smallest budget is a batch of its own whatever the budget: it does not tell them apart.
    trial = _Trial(encoder, ids, min(max_length or budgets[0], budgets[0]), now)
    chosen, reason = _choose(trial, budgets, default, on_cpu=device == "cpu")
    return Tuning(
        max_batch_tokens=chosen,
        coefficients=trial.cost(),
        peak_flops_per_s=_peak(facts, device, encoder.dtype, peak_s),
        parameters=facts.parameters,
        layers=facts.layers,
        width=facts.width,
        reason=reason,
        took_s=round(now() - began, 3),
    )


def vocabulary_ids(spec: TokenizerSpec) -> NDArray[np.int32]:
    """(n,) ids of a vocabulary without those that were added to it, such as special tokens."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(spec.json)
    added = set(tokenizer.get_added_tokens_decoder())
    everything = set(tokenizer.get_vocab(with_added_tokens=False).values())
    return np.array(sorted(everything - added or everything), np.int32)


def _choose(trial: _Trial, budgets: Sequence[int], default: int, *, on_cpu: bool) -> tuple[int, str]:
    """The budget, and why."""
    costs: dict[int, float] = {}
    gains: dict[int, list[float]] = {}
    try:
        trial.begin(budgets[0], on_cpu=on_cpu)
        _go_up(trial, budgets, default, costs)
        if default in costs:
            gains = _compare(trial, default, costs)
    except _NoRoom as error:
        fitted = [budget for budget in budgets if budget < error.budget]
        limit = (fitted[-1] if fitted else budgets[0]) // 2
        why = "half of what fits the device" if limit < default else "the default"
        return min(default, limit), f"{why}; {error.budget:,} tokens at once do not fit"
    if not any(len(ratios) >= MIN_ROUNDS for ratios in gains.values()):
        seconds = trial.predicted_s(budgets[0])
        return default, f"the default; {budgets[0]:,} tokens take about {seconds:.1f} s, too long to compare budgets"
    chosen = knee(gains, default)
    if chosen == default:
        return default, f"the default; no other budget is more than {MARGIN:.0%} faster"
    return chosen, f"{statistics.median(gains[chosen]) - 1:.1%} faster than {default:,} tokens"


def _go_up(trial: _Trial, budgets: Sequence[int], default: int, costs: dict[int, float]) -> None:
    """Seconds a token of each budget into ``costs``, from the smallest one until a larger one is no better.

    Beside the default only what can be compared with it in the time that is left is measured.
    """
    for budget in budgets:
        twice = 0.0 if default in costs or budget == default else 2 * trial.predicted_s(default)
        rounds = 0.0 if budget == default else MIN_ROUNDS * (trial.predicted_s(budget) + trial.predicted_s(default))
        if trial.left_s < 2 * trial.predicted_s(budget) + twice + rounds:
            if budget >= default:
                return
            continue
        if budget != budgets[0]:
            trial.warm_up(budget)
        costs[budget] = trial.time(budget, PLACES[0])
        if budget > default and costs[budget] >= min(cost for other, cost in costs.items() if other != budget):
            return


def _compare(trial: _Trial, default: int, costs: Mapping[int, float]) -> dict[int, list[float]]:
    """How many times as fast as the default others are, a value a round: those that looked faster, or the next best.

    Also where nothing looked faster some rounds are run: their batches tell what long and short texts cost.
    """
    others = sorted((budget for budget in costs if budget != default), key=lambda budget: costs[budget])
    chosen = [budget for budget in others if costs[budget] < costs[default]] or others[:1]

    def round_s() -> float:
        return sum(trial.predicted_s(budget) for budget in (default, *chosen))

    while chosen and trial.left_s < MIN_ROUNDS * round_s():
        chosen.pop()
    gains: dict[int, list[float]] = {budget: [] for budget in chosen}
    for number in range(MAX_ROUNDS if chosen else 0):
        if trial.left_s < round_s() or (number >= MIN_ROUNDS and trial.spent_s > AIM_S):
            break
        order = [default, *chosen][:: -1 if number % 2 else 1]
        seconds = {budget: trial.time(budget, PLACES[number % len(PLACES)]) for budget in order}
        for budget in chosen:
            gains[budget].append(seconds[default] / seconds[budget])
    return gains


def knee(gains: Mapping[int, Sequence[float]], default: int) -> int:
    """The smallest budget within 3 % of the best, among those that are more than 3 % faster than the default.

    Args:
        gains: of each other budget, how many times as fast as the default it was, a value a round; those with fewer
            than ``MIN_ROUNDS`` do not count, nor those that were not so fast in three quarters of the rounds.
        default: taken where no other budget counts.
    """
    faster = {
        budget: statistics.median(ratios)
        for budget, ratios in gains.items()
        if len(ratios) >= MIN_ROUNDS and float(np.quantile(ratios, 0.25, method="lower")) > 1 + MARGIN
    }
    best = max(faster.values(), default=0.0)
    return min((budget for budget, gain in faster.items() if gain >= best * (1 - MARGIN)), default=default)


class _NoRoom(Exception):
    """A batch of ``budget`` tokens does not fit the device."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.budget = budget


class _Trial:
    """Makes up batches and times them.

    Attributes:
        timed: cost terms and seconds of each measurement.
    """

    def __init__(self, encoder: Encodes, ids: NDArray[np.int32], max_length: int, now: Callable[[], float]) -> None:
        self._encoder, self._ids, self._now = encoder, ids, now
        self._rng = np.random.default_rng(SEED)
        drawn = self._rng.lognormal(math.log(MEDIAN_LENGTH), SPREAD, NUM_TEXTS)
        self._lengths = np.clip(drawn, min(MIN_LENGTH, max_length), max_length).astype(np.int32)
        self._plans: dict[int, list[NDArray[np.int64]]] = {}
        self._s_per_token = 0.0
        self._cold: list[float] = []
        self._began = now()
        self.timed: list[list[float]] = []

    @property
    def spent_s(self) -> float:
        return self._now() - self._began

    @property
    def left_s(self) -> float:
        return MAX_S - self.spent_s

    def predicted_s(self, budget: int) -> float:
        """Of one measurement."""
        return max(SLICE_S, budget * self._s_per_token)

    def begin(self, budget: int, *, on_cpu: bool) -> None:
        """The first computations of all, not counted: kernels are loaded, and the pace becomes known.

        A CPU begins with a single text: that a model is too slow for it must not take minutes to find out.
        """
        if on_cpu:
            middle = np.argsort(self._lengths, kind="stable")[NUM_TEXTS // 2]
            self._uncounted(budget, np.array([middle]))
        if self.predicted_s(budget) < self.left_s:
            self.warm_up(budget)
        if self.predicted_s(budget) < MAX_S / 4:  # what happens only once must not count for the pace
            self.warm_up(budget)

    def warm_up(self, budget: int) -> None:
        """Compute a batch of the longest texts, not counted: memory is taken."""
        self._uncounted(budget, self._plan(budget)[0])

    def _uncounted(self, budget: int, texts: NDArray[np.int64]) -> None:
        batch = self._batch(texts)
        self._cold = self._row([batch], self._seconds(budget, [batch]))
        if not self.timed:
            self._s_per_token = self._cold[3] / batch.num_tokens

    def time(self, budget: int, place: float) -> float:
        """Seconds a token of one or more batches, of the same texts for each budget as nearly as can be.

        Args:
            budget: of a batch.
            place: of the first batch, as a share of all, longest first.

        Raises:
            _NoRoom: it does not fit.
        """
        plan = self._plan(budget)
        first, wanted = int(place * len(plan)), min(MAX_SLICE_TOKENS, SLICE_S / self._s_per_token)
        batches: list[Batch] = []
        num_tokens = 0
        for chosen in itertools.chain(plan[first:], plan[:first]):
            batches.append(self._batch(chosen))
            num_tokens += batches[-1].num_tokens
            if num_tokens >= wanted:
                break
        seconds = self._seconds(budget, batches)
        self.timed.append(self._row(batches, seconds))
        self._s_per_token = seconds / num_tokens
        return self._s_per_token

    def cost(self) -> tuple[float, float, float]:
        """Seconds a token, a pair of tokens that attend, a batch, from all that was timed."""
        rows = np.array(self.timed or [self._cold], np.float64).reshape(-1, 4)
        found, _ = fit_cost(rows)
        if rows.size:
            ratios = rows[:, 3] / np.maximum(rows[:, :3] @ found, 1e-12)
            found, _ = fit_cost(rows[ratios <= DISTURBED * np.median(ratios)])
        tokens, quadratic, batch = found.tolist()
        return tokens, quadratic, batch

    def _plan(self, budget: int) -> list[NDArray[np.int64]]:
        if budget not in self._plans:
            self._plans[budget] = batcher.plan_batches(self._lengths, budget, padded=self._encoder.padded)
        return self._plans[budget]

    def _batch(self, texts: NDArray[np.int64]) -> Batch:
        lengths = self._lengths[texts]
        tokens = Tokens(self._rng.choice(self._ids, int(lengths.sum())), lengths)
        return batcher.pack(tokens, np.arange(len(lengths), dtype=np.int64))

    def _row(self, batches: Sequence[Batch], seconds: float) -> list[float]:
        terms = np.array([cost_terms(batch.lengths, padded=self._encoder.padded) for batch in batches])
        return [*terms.sum(axis=0).tolist(), seconds]

    def _seconds(self, budget: int, batches: Sequence[Batch]) -> float:
        before = getattr(self._encoder, "num_oom_splits", 0)
        start = self._now()
        try:
            _compute(self._encoder, batches)
            fits = getattr(self._encoder, "num_oom_splits", 0) == before
        except Exception as error:
            # What is wrong with the model itself, the run's own first batch will tell.
            if not isinstance(error, (MemoryError, EmbedCorpusError)) and type(error).__name__ != "OutOfMemoryError":
                raise
            fits = False
        if not fits:  # outside the except block: its traceback keeps the failed forward's tensors alive
            raise _NoRoom(budget)
        return max(self._now() - start, 1e-9)


def _compute(encoder: Encodes, batches: Sequence[Batch]) -> None:
    """As a run does: the next batch is given to the device before the one before it is waited for."""
    submit: Callable[[Batch], Any] | None = getattr(encoder, "submit", None)
    if submit is None:
        for batch in batches:
            encoder.encode(batch)
        return
    waiting: Any = None
    for batch in batches:
        submitted = submit(batch)
        if waiting is not None:
            waiting.result()
        waiting = submitted
    waiting.result()


def _peak(facts: ModelFacts, device: str, dtype: str, max_s: float) -> float:
    if not facts.shapes:
        return 0.0
    try:
        return float(peak(facts.shapes, default_batch_tokens(device), device, dtype, max_s=max_s)["flops_per_s"])
    except RuntimeError:  # no room beside the model, or a product that torch lacks for this type
        return 0.0


# -- what is remembered ----------------------------------------------------------------------------------------------


def _gpu_name(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def _torch_version() -> str:
    """Without importing it: an encoder may do without."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cache_file(key: dict[str, Any]) -> Path | None:
    """None where the environment names no place for it."""
    home, cache = os.environ.get("HOME", ""), os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path counts as none.
    folder = Path(cache) if os.path.isabs(cache) else Path(home, ".cache") if os.path.isabs(home) else None
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode("utf-8")).hexdigest()
    return None if folder is None else folder / "embed-corpus" / "tuning" / f"{name}.json"


def _read(file: Path | None, key: dict[str, Any]) -> Tuning | None:
    """None where there is none, or another one than was asked for."""
    try:
        document = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
        if isinstance(document, dict) and document.get("key") == key:
            return Tuning.from_json(document["tuning"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        pass
    return None


def _write(file: Path | None, key: dict[str, Any], found: Tuning) -> None:
    """Whole or not at all; where it cannot be written, the next worker measures again."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=file.stem, suffix=".tmp", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                json.dump({"key": key, "tuning": found.to_dict()}, opened, indent=2)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise

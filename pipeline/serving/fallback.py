"""Texts this server cannot embed in time -> another server's vectors, if they are ours; otherwise none.

Two models' vectors in one index give wrong neighbours and no error, so an upstream is trusted for what it computes, not
for what it says it is:

- it is admitted when its vectors of a set of probe texts equal ours (cosine ≥ 0.9999 each, same length), short, long
  and beyond the length limit, and compared again every few minutes;
- each request to it carries one probe more, and counts only if that one's vector is ours: whatever was deployed
  there a second ago, its vectors do not get through;
- after failures in a row it is left alone for a while, and compared again before it is asked again.

A request that another server of ours sent here as its fallback is not sent on: see `HOP_HEADER`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from pipeline.serving.errors import ServingError
from pipeline.serving.http_settings import HttpSettings, Upstream

HOP_HEADER = "x-embed-corpus-fallback"
MIN_COSINE = 0.9999
PROBE_TIMEOUT_S = 10.0
PROBES = (
    "a small boat",
    "The quick brown fox jumps over the lazy dog, then sleeps until the sun goes down behind the hills.",
    "What is the capital of France?",
    "naïve café Ångström Größe Dvořák",
    "数学 is mathematics, λόγος is word",
    "x",
    "3.14159 2,718 1e-5 0x1F",
    # Cut at the length limit by nearly every model; one that cuts elsewhere gives another vector.
    "the ship left the harbour at dawn and the crew counted barrels of salt fish . " * 400,
)
CANARY = PROBES[0]

Vectors = NDArray[np.float32]


class NoFallback(ServingError):
    """No other server could answer in our place."""

    reason = "no_fallback"


class Unfit(Exception):
    """An upstream did not answer, or not with our vectors; the message says which.

    Args:
        reason: the message.
        counts: as a failure of the upstream; a text that it does not take is none.
    """

    def __init__(self, reason: str, *, counts: bool = True) -> None:
        super().__init__(reason)
        self.counts = counts


@dataclass(frozen=True)
class Answer:
    """What an upstream gave.

    Attributes:
        vectors: (n, dim) float32, ours in all but who computed them.
        num_tokens: as the upstream counted them; 0 where it does not say.
        upstream: its name.
    """

    vectors: Vectors
    num_tokens: int
    upstream: str


class Fallback:
    """The upstreams of a server, in the order in which they are tried.

    Args:
        settings: see there.
        normalize: whether our vectors are of unit length.
        headers: sent with each request.
        say: hears when an upstream is admitted or refused: an event's name and its values.
        count: hears of each attempt: the upstream's name and the outcome.
        transport: of httpx, for tests.
    """

    def __init__(
        self,
        settings: HttpSettings,
        *,
        normalize: bool,
        say: Callable[..., None],
        count: Callable[[str, str], None],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._recheck_s, self._say, self._count = settings.fallback_recheck_s, say, count
        self._client = httpx.AsyncClient(transport=transport, follow_redirects=False, trust_env=False)
        self.members = [Member(each, settings, normalize, self._client) for each in settings.fallbacks]
        self._own: Vectors | None = None
        self._checks: list[asyncio.Task[None]] = []

    async def start(self, own: Callable[[Sequence[str]], Any]) -> None:
        """Compute the probes here, and begin to compare; until an upstream is admitted it is not asked.

        Args:
            own: (n, dim) vectors of n texts without a prompt, truncated, from this server's own engine.
        """
        self._own = np.asarray(await own(PROBES), dtype=np.float32)
        self._checks = [asyncio.create_task(self._check_on(member)) for member in self.members]

    async def _check_on(self, member: Member) -> None:
        assert self._own is not None
        while True:
            was = (member.state, member.reason)
            await member.compare(self._own)
            if (member.state, member.reason) != was:
                event = "fallback_admitted" if member.admitted else "fallback_refused"
                self._say(event, upstream=member.name, reason=member.reason or None)
            await member.next_check(self._recheck_s)

    async def embed(
        self, texts: Sequence[str], *, truncate: bool, deadline: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """The vectors of n texts, prompts included in them, from the first upstream that gives ours.

        Args:
            texts: as they are to be tokenized.
            truncate: cut at the length limit; False is for upstreams that can refuse such texts.
            deadline: on the loop's clock.
            headers: to send along, such as ``traceparent``.

        Raises:
            NoFallback: none did.
        """
        assert self._own is not None
        loop = asyncio.get_running_loop()
        reasons = []
        for place, member in enumerate(self.members):
            if refusal := member.refusal(loop.time(), truncate):
                reasons.append(f"{member.name}: {refusal}")
                continue
            try:
                # Whoever comes after it needs time, too.
                share_s = (deadline - loop.time()) / (len(self.members) - place)
                async with asyncio.timeout(max(0.0, share_s)):
                    answer = await member.embed(texts, self._own[0], truncate, headers or {})
            except TimeoutError:
                member.failed("no answer in time")
                reasons.append(f"{member.name}: no answer in time")
            except Unfit as error:
                if error.counts:
                    member.failed(str(error))
                reasons.append(f"{member.name}: {error}")
            else:
                member.succeeded()
                self._count(member.name, "answered")
                return answer
            self._count(member.name, "failed")
        raise NoFallback("; ".join(reasons) or "there is none")

    def states(self) -> dict[str, str]:
        """``admitted``, or why not, by name."""
        return {member.name: member.reason or member.state for member in self.members}

    async def close(self) -> None:
        for task in self._checks:
            task.cancel()
        for task in self._checks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._client.aclose()


class Member:
    """One upstream: how it is asked, whether it is admitted, and whether it may be asked now.

    Attributes:
        state: ``new``, ``admitted``, ``refused`` (other vectors), ``unknown`` (it could not be compared) or ``paused``
            (failures in a row).
        reason: in words, where it is not admitted.
    """

    def __init__(self, upstream: Upstream, settings: HttpSettings, normalize: bool, client: httpx.AsyncClient) -> None:
        self.name, self._upstream, self._client, self._normalize = upstream.label, upstream, client, normalize
        self._max_failures, self._pause_s = settings.fallback_failures, settings.fallback_pause_s
        self.state, self.reason = "new", "not compared yet"
        self._failures = 0
        self._wake = asyncio.Event()
        self._budget, self._spent_at = upstream.max_requests_per_s, 0.0

    @property
    def admitted(self) -> bool:
        return self.state == "admitted"

    async def compare(self, own: Vectors) -> None:
        """Ask for the probes and decide whether its vectors are ours."""
        size = self._upstream.max_client_batch_size
        parts = []
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S * len(PROBES)):
                for start in range(0, len(PROBES), size):
                    parts.append((await self._ask(PROBES[start : start + size], True, PROBE_TIMEOUT_S, {})).vectors)
        except (Unfit, TimeoutError) as error:
            # It keeps what it has shown, unless it was paused: a lost probe says nothing of its vectors.
            if not self.admitted:
                self.state, self.reason = "unknown", str(error) or "no answer in time"
            return
        alike = len({part.shape[1] for part in parts}) == 1
        if difference := unlike(np.concatenate(parts), own) if alike else "its vectors differ in length":
            self.state, self.reason = "refused", difference
        else:
            self.state, self.reason, self._failures = "admitted", "", 0

    async def next_check(self, recheck_s: float) -> None:
        """Wait until it is to be compared again: sooner where it is not admitted, or ceases to be."""
        if self.admitted:
            # Not ``wait_for``: in Python 3.11 it can lose a cancellation that comes as the event is set.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(recheck_s):
                    await self._wake.wait()
        self._wake.clear()
        if not self.admitted:
            await asyncio.sleep(min(recheck_s, self._pause_s))

    def refusal(self, now: float, truncate: bool) -> str:
        """Why it may not be asked now; empty where it may, and then it counts against the budget."""
        if not self.admitted:
            return self.reason
        if not truncate and self._upstream.api == "openai":
            return "cannot be told not to truncate"
        rate = self._upstream.max_requests_per_s
        self._budget = min(max(1.0, rate), self._budget + (now - self._spent_at) * rate)
        self._spent_at = now
        if self._budget < 1:
            return f"its budget of {rate:g} requests a second is used up"
        self._budget -= 1
        return ""

    def failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= self._max_failures and self.admitted:
            self._leave("paused", f"{self._failures} failures in a row, the last: {why}")

    def _leave(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason
        self._wake.set()

    def succeeded(self) -> None:
        self._failures = 0

    async def embed(self, texts: Sequence[str], own: Vectors, truncate: bool, headers: Mapping[str, str]) -> Answer:
        """The vectors of n texts; each request has a probe at its end, whose vector must be ``own``, (dim,).

        Raises:
            Unfit: no answer, not what was asked for, or vectors that are not ours; then it is no longer admitted.
        """
        size = self._upstream.max_client_batch_size - 1
        parts, num_tokens = [], 0
        for start in range(0, len(texts), size):
            answer = await self._ask([*texts[start : start + size], CANARY], truncate, None, headers)
            if difference := unlike(answer.vectors[-1:], own[None]):
                self._leave("refused", difference)
                raise Unfit(difference)
            parts.append(answer.vectors[:-1])
            num_tokens += answer.num_tokens
        return Answer(np.concatenate(parts), num_tokens, self.name)

    async def _ask(
        self, texts: Sequence[str], truncate: bool, timeout_s: float | None, headers: Mapping[str, str]
    ) -> Answer:
        upstream = self._upstream
        if upstream.api == "openai":
            path = "/v1/embeddings"
            body: dict[str, Any] = {"input": list(texts), "encoding_format": "float"}
            body |= {"model": upstream.model} if upstream.model else {}
        else:
            path = "/embed"
            body = {"inputs": list(texts), "truncate": truncate, "normalize": self._normalize}
        key = {"authorization": f"Bearer {upstream.api_key.get_secret_value()}"} if upstream.api_key else {}
        try:
            response = await self._client.post(
                upstream.url.removesuffix("/v1") + path,
                json=body,
                headers={**headers, **key, HOP_HEADER: "1"},
                timeout=timeout_s,
            )
        except httpx.HTTPError as error:
            raise Unfit(f"no answer ({type(error).__name__})") from None
        if (status := response.status_code) != 200:
            raise Unfit(f"answered {status}", counts=status not in (400, 413, 422))
        return self._read(response, len(texts))

    def _read(self, response: httpx.Response, num_texts: int) -> Answer:
        try:
            document = json.loads(response.content)
            if self._upstream.api == "openai":
                rows = [row["embedding"] for row in sorted(document["data"], key=lambda row: row["index"])]
                num_tokens = int(document.get("usage", {}).get("prompt_tokens", 0))
            else:
                rows, num_tokens = document, int(response.headers.get("x-compute-tokens", 0))
            vectors = np.asarray(rows, dtype=np.float32)
        except (ValueError, KeyError, TypeError):
            raise Unfit("answered something that holds no vectors") from None
        if vectors.ndim != 2 or len(vectors) != num_texts or not np.isfinite(vectors).all():
            raise Unfit(f"answered vectors of shape {vectors.shape}, some perhaps not finite, for {num_texts} texts")
        return Answer(vectors, num_tokens, self.name)


def unlike(theirs: Vectors, own: Vectors) -> str:
    """How (n, dim) vectors differ from ours, in words; empty where they are ours, in direction and in length."""
    if theirs.shape != own.shape:
        return f"its vectors have {theirs.shape[-1]} dimensions, ours {own.shape[-1]}"
    sizes, own_sizes = np.linalg.norm(theirs, axis=1), np.linalg.norm(own, axis=1)
    if not (sizes > 0).all():
        return "one of its vectors is zero"
    cosines = np.einsum("ij,ij->i", theirs, own, dtype=np.float64) / (sizes.astype(np.float64) * own_sizes)
    if cosines.min() < MIN_COSINE:
        return f"its vectors are not ours: cosine {cosines.min():.4f} on a probe, at least {MIN_COSINE} expected"
    if not np.allclose(sizes, own_sizes, rtol=1e-2):
        return "its vectors have another length than ours: one is normalised, the other is not"
    return ""

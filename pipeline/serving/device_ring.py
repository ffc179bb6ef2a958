"""Vectors that stay on the device: written by the process that computes, read by the one that searches.

    encoder process   DeviceRing ── put ──▶ vectors, numbers ── take ──▶ OpenedRing   search process

The memory is the encoder process'. It is allocated and exported once, by torch's own mechanism: CUDA IPC, or shared
memory for a ring on the CPU, which tests use. A vector gets a number that no other one of its ring ever has, and lies
in row ``number % num_rows`` until a later one takes it; so a ring and a number are a vector's place.

Nobody waits for anybody, and nothing rests on time: numbers are compared before and after a vector is copied, and the
ring counts only while its process lives. What ``take`` returns is what was asked for, or it raises `RingGone`, and then
the vectors' bytes have to be sent.

torch is imported where a ring is made or opened; the server hands places on without it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import secrets
import select
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pipeline.transfer import Download, Transfer

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Ring:
    """How another process of this machine finds a ring; JSON.

    Attributes:
        name: no other ring has it.
        pid: of the process whose memory it is.
        memory: its tensors as torch hands them to another process, base64. Opening it runs what it says: it comes from
            a process that the server started.
    """

    name: str
    pid: int
    memory: str


@dataclass(frozen=True)
class InRing:
    """The places of n vectors.

    Attributes:
        ring: that holds them.
        numbers: (n,) int64; 0 for a vector that is not there.
    """

    ring: Ring
    numbers: Numbers


class RingGone(Exception):
    """Vectors are not in their ring any more.

    Args:
        message: why, one line.
        for_good: no vector of that ring will be had again.
    """

    def __init__(self, message: str, *, for_good: bool) -> None:
        super().__init__(message)
        self.for_good = for_good


class DeviceRing:
    """The memory, and the end that writes; one thread does.

    Args:
        num_rows: vectors it holds; no batch may have more.
        dim: length of a vector.
        device: ``cuda:0`` for the GPU that both processes see first, or ``cpu``.

    Attributes:
        ring: for the process that reads. The memory is there as long as this object is.
    """

    def __init__(self, num_rows: int, dim: int, device: str) -> None:
        import torch

        if torch.device(device).type == "cpu":
            # The default hands over an open file through a connection of multiprocessing, which these do not have.
            torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        self._vectors = torch.zeros(num_rows, dim, dtype=torch.float32, device=device)
        self._numbers = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(num_rows, device=device)
        self._next = num_rows  # in row 0; the number 0 means no vector
        with _pipes_not_inherited():
            memory = bytes(ForkingPickler.dumps((self._vectors, self._numbers)))
        self.ring = Ring(secrets.token_hex(8), os.getpid(), base64.b64encode(memory).decode("ascii"))

    def put(self, vectors: Tensor) -> Numbers:
        """Copy vectors into the next rows, over the oldest.

        Args:
            vectors: (n, dim) float32 on the ring's device, n at most ``num_rows``.

        Returns:
            (n,) their numbers. On CUDA the copy is only queued, in the current stream: wait for it before telling them.
        """
        num_texts, num_rows = len(vectors), len(self._rows)
        assert num_texts <= num_rows, "a batch larger than its ring. This is a bug."
        first = self._next % num_rows
        if first + num_texts > num_rows:  # neighbours stay neighbours, so that a batch is one copy
            self._next, first = self._next + num_rows - first, 0
        rows = slice(first, first + num_texts)
        # In this order, whoever finds a number both before and after copying its row has copied its vector.
        self._numbers[rows] = 0
        self._vectors[rows] = vectors
        self._numbers[rows] = self._rows[rows] + (self._next - first)
        numbers = np.arange(self._next, self._next + num_texts)
        self._next += num_texts
        return numbers


@contextlib.contextmanager
def _pipes_not_inherited() -> Iterator[None]:
    """On a CPU torch starts a process that clears up behind all others; it would hold our pipes open until then."""
    before = [os.get_inheritable(number) for number in range(3)]
    try:
        for number in range(3):
            os.set_inheritable(number, False)
        yield
    finally:
        for number, inheritable in enumerate(before):
            os.set_inheritable(number, inheritable)


class RingDownload:
    """A `Download` of vectors that are in a ring, too."""

    def __init__(self, download: Download, numbers: Numbers) -> None:
        self._download, self._numbers = download, numbers

    @property
    def seconds(self) -> float:
        return self._download.seconds

    def result(self) -> NDArray[np.float32]:
        """(n, dim), see `Download`; once it is here, the ring has it as well."""
        return self._download.result()

    def numbers(self) -> Numbers:
        """(n,) places in the ring; 0 for a vector that is not finite: it is computed again, and not into the ring."""
        return np.where(np.isfinite(self.result()).all(axis=1), self._numbers, 0)


class RingTransfer:
    """A `Transfer` whose downloads are in a ring, too.

    The copy into the ring is queued in front of the mark that the download waits for, so it needs no wait of its own.
    """

    def __init__(self, transfer: Transfer, ring: DeviceRing) -> None:
        self.upload, self.begin = transfer.upload, transfer.begin
        self._transfer, self._ring = transfer, ring

    def download(self, vectors: Tensor, began: torch.cuda.Event | float) -> RingDownload:
        """See `Transfer.download`."""
        numbers = self._ring.put(vectors)
        return RingDownload(self._transfer.download(vectors, began), numbers)


class OpenedRing:
    """Another process' ring, and the end that reads.

    Args:
        ring: as its process told it.

    Attributes:
        name: of the ring.

    Raises:
        RingGone: its process has ended, or this one cannot open its memory.
    """

    def __init__(self, ring: Ring) -> None:
        self.name = ring.name
        self._pid = ring.pid
        try:
            # Stands for that process alone, also when its number is given to another one.
            self._process = os.pidfd_open(ring.pid)
        except OSError as error:
            raise self._gone(f"cannot be watched ({error.strerror})") from None
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)
        try:
            vectors, numbers = pickle.loads(base64.b64decode(ring.memory))
        except Exception as error:  # drivers and containers have many reasons to refuse
            os.close(self._process)
            raise self._gone(f"has memory that cannot be opened here ({one_line(error)})") from None
        self._vectors: Tensor = vectors
        self._numbers: Tensor = numbers

    def take(self, numbers: Numbers) -> NDArray[np.float32]:
        """Copy vectors to the host.

        Args:
            numbers: (n,) as ``put`` returned them.

        Returns:
            (n, dim) float32, in that order.

        Raises:
            RingGone: one of them was overwritten, or the process has ended.
        """
        self._check_process()
        try:
            wanted = self._numbers.new_tensor(numbers)
            rows = wanted % len(self._numbers)
            before = self._numbers[rows]
            copied = self._vectors[rows]
            after = self._numbers[rows]
            vectors: NDArray[np.float32] = copied.cpu().numpy()
            is_whole = before.equal(wanted) and after.equal(wanted)
        except RuntimeError as error:  # of the device
            raise self._gone(f"has memory that cannot be read ({one_line(error)})") from None
        self._check_process()
        if not is_whole:
            raise RingGone("the vectors' rows were overwritten", for_good=False)
        return vectors

    def close(self) -> None:
        """Let go of the memory."""
        del self._vectors, self._numbers
        with contextlib.suppress(OSError):
            os.close(self._process)

    def _check_process(self) -> None:
        if self._poll.poll(0):  # readable once it has ended
            raise self._gone("has ended")

    def _gone(self, why: str) -> RingGone:
        return RingGone(f"the process {self._pid} that computed the vectors {why}", for_good=True)

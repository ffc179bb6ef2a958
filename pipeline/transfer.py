"""Batches onto the device and vectors back, so that neither makes the device wait.

On CUDA both copies have a stream of their own and pinned memory at the host's end: the upload of a batch and the
download of the one before it run while a third is computed. Where device and host are one, nothing is copied.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Download:
    """Vectors on their way to the host.

    Attributes:
        seconds: the device spent on them; known once ``result`` has returned.
    """

    def __init__(self, host: Tensor, seconds: float, events: tuple[torch.cuda.Event, ...] = ()) -> None:
        self._host, self._events = host, events
        self.seconds = seconds

    def result(self) -> NDArray[np.float32]:
        """The array; waits for the copy."""
        if self._events:
            began, ended, copied = self._events
            copied.synchronize()
            self.seconds = began.elapsed_time(ended) / 1000
            self._events = ()
        array: NDArray[np.float32] = self._host.numpy()
        return array


class Transfer:
    """The copies of one device, and how long it computes between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            # Two: a download waits for its batch to be computed, and must not hold up the next one's upload.
            self._up, self._down = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def upload(self, array: NDArray[np.int32]) -> Tensor:
        """The array on the device; on CUDA what is computed with it waits for the copy, the host does not."""
        host = torch.from_numpy(array)
        if not self._is_cuda:
            return host
        pinned = host.pin_memory()
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._up):
            tensor = pinned.to(self._device, non_blocking=True)
        compute.wait_stream(self._up)
        tensor.record_stream(compute)  # else its memory could be given away while it is still read
        return tensor

    def begin(self) -> torch.cuda.Event | float:
        """A mark before the first computation of a batch, for ``download``."""
        return self._mark() if self._is_cuda else time.perf_counter()

    def download(self, vectors: Tensor, began: torch.cuda.Event | float) -> Download:
        """float32 vectors to the host, behind whatever computes them."""
        if isinstance(began, float):
            return Download(vectors, time.perf_counter() - began)
        ended = self._mark()
        host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        self._down.wait_event(ended)
        with torch.cuda.stream(self._down):
            host.copy_(vectors, non_blocking=True)
            copied = self._down.record_event()
        vectors.record_stream(self._down)
        return Download(host, 0.0, (began, ended, copied))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

"""Where these tests run: the first GPU, or with ``EMBED_CORPUS_TEST_DEVICE=cpu`` whatever of them a CPU can run.

The second is how the tests themselves are tested where there is no GPU; what needs CUDA skips itself then.
"""

from __future__ import annotations

import os

import pytest
import torch

from pipeline.devices import num_gpus

VARIABLE = "EMBED_CORPUS_TEST_DEVICE"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take back the skip of ``tests/conftest.py``, which looks for one file only: GPU 0 need not be the one we have."""
    if not num_gpus() and VARIABLE not in os.environ:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(scope="session")
def device() -> str:
    chosen = os.environ.get(VARIABLE, "cuda:0")
    if chosen != "cpu" and not torch.cuda.is_available():
        pytest.fail(f"an NVIDIA device is there, but torch {torch.__version__} cannot use it: install torch with CUDA")
    return chosen


@pytest.fixture(scope="session")
def cuda(device: str) -> str:
    """The device, for tests that make no sense without CUDA."""
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    return device

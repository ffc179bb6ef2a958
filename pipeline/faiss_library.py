"""The one place where FAISS is loaded; and what a GPU does, where FAISS has one.

A GPU is used for what is computed once: k-means, the assignment to lists, exact neighbours. The index itself is always
one of the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ConfigError, one_line

INNER_PRODUCT = "inner_product"
L2 = "l2"
Vectors = NDArray[np.float32]


def load_faiss() -> Any:
    """The faiss module, imported only where it is needed: it must not be in the process that embeds.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ConfigError('faiss is not installed; run: pip install "embed-corpus[cpu]"') from error


def faiss_reason(error: Exception) -> str:
    """One line of what FAISS has to say; it puts a C++ signature and a source line before it."""
    return re.sub(r"^Error in .*? at \S+:\d+: ", "", one_line(error))


@contextlib.contextmanager
def faiss_threads(num_threads: int) -> Iterator[None]:
    """FAISS on so many threads; afterwards on as many as before."""
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(num_threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def set_parameter(index: Any, name: str | None, value: int | None) -> None:
    """Set a search parameter by FAISS' name for it; None for an index that has none."""
    if name is not None:
        load_faiss().ParameterSpace().set_index_parameter(index, name, value)


def faiss_metric(metric: str) -> int:
    faiss = load_faiss()
    return int(faiss.METRIC_INNER_PRODUCT if metric == INNER_PRODUCT else faiss.METRIC_L2)


def nearest(queries: Vectors, vectors: Vectors, k: int, metric: str) -> tuple[Vectors, NDArray[np.int64]]:
    """(n, k) scores of the exact neighbours, larger is nearer, and their rows in ``vectors``."""
    faiss = load_faiss()
    if num_gpus():
        scores, rows = faiss.knn_gpu(_resources(), queries, vectors, k, metric=faiss_metric(metric))
    else:
        scores, rows = faiss.knn(queries, vectors, k, metric=faiss_metric(metric))
    return scores if metric == INNER_PRODUCT else -scores, rows


def num_gpus() -> int:
    """That FAISS can use; 0 in the wheel for CPUs."""
    faiss = load_faiss()
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def on_gpu(index: Any) -> Any:
    """A copy on all GPUs, or the index itself where there is none."""
    return load_faiss().index_cpu_to_all_gpus(index) if num_gpus() else index


@functools.cache
def _resources() -> Any:
    return load_faiss().StandardGpuResources()

"""A sample of the vectors -> an empty, trained index, to which blocks are added.

A large sample stays in half precision: k-means decodes as much of it as it looks at.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.corpus import Block, Vectors
from pipeline.errors import ConfigError
from pipeline.faiss_library import INNER_PRODUCT, faiss_metric, faiss_reason, load_faiss, num_gpus, on_gpu
from pipeline.index_choice import DECODED_BYTES, DECODED_ROWS, ENCODER_SAMPLE, FLAT, Choice

Sampled = NDArray[np.float16] | Vectors


def made(factory: str, dim: int, metric: str = INNER_PRODUCT) -> Any:
    """An empty index.

    Raises:
        ConfigError: FAISS does not know the factory, or not for this many dimensions.
    """
    if re.search(r"(^|,)_?(IVF|HNSW|PQ|NSG|IMI)0+(?!\d)", factory):  # FAISS ends the process, or keeps nothing
        raise ConfigError(f"--index {factory}: nothing can be of size 0; expected a factory string such as IVF1024,SQ8")
    try:
        index = load_faiss().index_factory(dim, factory, faiss_metric(metric))
        _without_polysemous(index)
        return index
    except RuntimeError as error:
        raise ConfigError(
            f"--index {factory}: FAISS cannot make it for {dim} dimensions ({faiss_reason(error)}); expected "
            "auto or a factory string such as IVF1024,SQ8"
        ) from error


def _without_polysemous(index: Any) -> None:
    """Nothing here searches by Hamming distances, and to prepare for it takes PQ most of its training."""
    faiss = load_faiss()
    while index is not None:
        index = faiss.downcast_index(index)
        if hasattr(index, "do_polysemous_training"):
            index.do_polysemous_training = False
        index = getattr(index, "index", None)


def trained(choice: Choice, sample: Sampled, metric: str = INNER_PRODUCT) -> Any:
    """An empty index trained on a sample, (n, dim); exact search, noted in ``choice``, where that is too small."""
    dim = sample.shape[1]
    index = made(choice.factory, dim, metric)
    if index.is_trained:
        return index
    ivf = load_faiss().try_extract_index_ivf(index)
    try:
        for part in (ivf, getattr(index, "index", None)):
            for clustering in (getattr(part, "cp", None), getattr(getattr(part, "pq", None), "cp", None)):
                if clustering is not None:
                    # FAISS prints about too few vectors on stderr; the choice has said so already.
                    clustering.min_points_per_centroid = 1
        if _has_plain_lists(index):
            _train_lists(index, sample)
            sample = sample[:: -(-len(sample) // ENCODER_SAMPLE)]
        index.train(np.ascontiguousarray(sample, dtype=np.float32))
    except RuntimeError as error:
        reason = faiss_reason(error)
        choice.warnings.append(f"{choice.factory} cannot be trained on {len(sample)} vectors ({reason}): exact search")
        choice.factory, choice.num_lists = FLAT, 0
        return made(FLAT, dim, metric)
    return index


def _has_plain_lists(index: Any) -> bool:
    """An inverted file without a transformation before it, whose lists are found by comparing with each centre."""
    faiss = load_faiss()
    kinds = (faiss.IndexFlat, faiss.IndexHNSW)
    return isinstance(index, faiss.IndexIVF) and isinstance(faiss.downcast_index(index.quantizer), kinds)


def _train_lists(ivf: Any, sample: Sampled) -> None:
    """k-means as the index itself would do it, but on half precision and on a GPU if there is one."""
    faiss = load_faiss()
    clustering = faiss.Clustering(ivf.d, ivf.nlist, ivf.cp)
    clustering.decode_block_size = DECODED_ROWS
    assigner = on_gpu(faiss.IndexFlat(ivf.d, ivf.metric_type))
    if sample.dtype == np.float16 and 4 * sample.size <= DECODED_BYTES:
        sample = sample.astype(np.float32)
    if sample.dtype == np.float16:
        codec = faiss.IndexScalarQuantizer(ivf.d, faiss.ScalarQuantizer.QT_fp16)
        clustering.train_encoded(np.ascontiguousarray(sample).view(np.uint8), codec, assigner)
    else:
        clustering.train(sample, assigner)
    centroids = faiss.vector_to_array(clustering.centroids).reshape(ivf.nlist, ivf.d)
    ivf.quantizer.train(centroids)
    ivf.quantizer.add(centroids)


def num_different(sample: Sampled) -> int:
    """Of the vectors of a sample."""
    return len({hash(row.tobytes()) for row in sample})


class Adding:
    """Adds blocks to an index; lists are found by a GPU if there is one.

    Args:
        index: trained.
    """

    def __init__(self, index: Any) -> None:
        faiss = load_faiss()
        self._index, self._ivf = index, index if isinstance(index, faiss.IndexIVF) and num_gpus() else None
        self._quantizer = on_gpu(index.quantizer) if self._ivf is not None else None

    def add(self, block: Block) -> None:
        if self._ivf is None or self._quantizer is None:
            self._index.add_with_ids(block.vectors, block.faiss_ids)
            return
        swig_ptr, ids = load_faiss().swig_ptr, block.faiss_ids
        lists = np.ascontiguousarray(self._quantizer.search(block.vectors, 1)[1].ravel())
        self._ivf.add_core(len(ids), swig_ptr(block.vectors), swig_ptr(ids), swig_ptr(lists))

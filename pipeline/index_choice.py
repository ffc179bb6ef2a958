"""How many vectors of how many dimensions -> which index, what it will take, and what to try where recall is too low.

The ladder: exact search for few; an inverted file of whole vectors up to a million; codes of a byte a dimension above,
with more lists, and from ten million on with a graph over their centres. Where memory is short, smaller codes. FAISS is
not needed here: sizes follow from the formats it writes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.config import RunConfig
from pipeline.corpus import BLOCK_FLOATS
from pipeline.errors import ConfigError
from pipeline.memory import granted_memory
from pipeline.recall import NUM_QUERIES

FLAT = "IDMap2,Flat"
FLAT_LIMIT = 50_000
"""``auto`` searches exactly up to here: 50,000 x 384 float32 are 77 MB and a few milliseconds a query."""
WHOLE_LIMIT = 1_000_000
"""Up to here ``auto`` keeps whole vectors in its lists, above it a byte a dimension."""
GRAPH_LIMIT = 1_000_000
"""A graph takes hours beyond; ``auto`` builds one only for a latency that nothing else reaches."""

MIN_TRAIN_PER_LIST = 39
TRAIN_PER_LIST = 50
MIN_TRAIN = 65_536
"""FAISS's k-means wants 39 vectors a list; 50 leave a margin. Codes without lists (PQ, SQ8) train on at least these."""
MIN_LISTS = 16
"""Fewer lists than these are not worth their loss of recall."""

MEMORY_SHARE = 0.5
"""Of what the machine or control group grants, the index may take so much where nobody said it."""

CODES = ("Flat", "SQfp16", "SQ8", "SQ6", "RaBitQ4", "PQ{}")
"""From the dearest to the cheapest. Recall@10 with every list probed, MiniLM vectors of 384: 1, 1, .99, .97, .9, .7"""

PART_BYTES = 256 << 20
CHUNK_BYTES = 32 << 20
MAX_PARTS = 256
WHOLE_PARTS = 8
"""What makes up no more parts than these, a build of minutes, is built in memory as a whole where that has room. To
write parts first takes a few per cent longer, but a build that is interrupted goes on after them."""
PROCESS_BYTES = 230_000_000
"""Python, pyarrow, FAISS and the reading of a shard."""
ENCODER_SAMPLE = 100_000
"""Vectors that the codes of an inverted file are trained on; FAISS takes no more for SQ8."""
DECODED_BYTES = 512 << 20
"""A sample that takes no more in single precision is decoded once for k-means, which is then a tenth faster."""
DECODED_ROWS = 32_768
"""Of a larger one in half precision, k-means decodes so many at once."""
GROWTH = 1.6
"""Resident bytes of lists that grow, to the bytes in them."""


@dataclass(frozen=True)
class IndexOptions:
    """What was asked for.

    Attributes:
        factory: ``auto``, or a FAISS factory string.
        min_recall: recall@10 below which nothing is published, 0 to 1.
        max_index_ram: bytes the index may take where it is searched; None: a share of what is granted here. ``auto``
            chooses by it, a build keeps its parts below it.
        max_latency_ms: median of single queries on one thread; None for no limit.
        metric: ``ip`` or ``l2`` for vectors that are not normalised; None: inner product.
    """

    factory: str = "auto"
    min_recall: float = 0.95
    max_index_ram: int | None = None
    max_latency_ms: float | None = None
    metric: Literal["ip", "l2"] | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_recall <= 1.0:
            raise ConfigError(f"--min-recall {self.min_recall}: expected a number from 0 to 1")
        if self.max_latency_ms is not None and not self.max_latency_ms > 0:
            raise ConfigError(f"--max-latency-ms {self.max_latency_ms}: expected milliseconds above 0")
        if self.max_index_ram is not None and self.max_index_ram <= 0:
            raise ConfigError(f"--max-index-ram {self.max_index_ram}: expected a size above 0, such as 8GB")
        if self.metric not in (None, "ip", "l2"):
            raise ConfigError(f"--metric {self.metric}: expected ip or l2")

    @property
    def max_bytes(self) -> int:
        return self.max_index_ram or round(MEMORY_SHARE * granted_memory())

    def arguments(self) -> list[str]:
        """For the command line of the indexer."""
        given = {
            "--factory": self.factory,
            "--min-recall": self.min_recall,
            "--max-index-ram": self.max_index_ram,
            "--max-latency-ms": self.max_latency_ms,
            "--metric": self.metric,
        }
        return [str(text) for option in given.items() if option[1] is not None for text in option]

    def record(self) -> dict[str, Any]:
        return {"max_index_ram": self.max_index_ram, "max_latency_ms": self.max_latency_ms, "metric": self.metric}


UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("", 1000), ("IB", 1024))
}


def parse_size(text: str) -> int:
    """Bytes of ``8GB``, ``8GiB``, ``500 MB`` or a plain number.

    Raises:
        ConfigError: it is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(found[2].upper()) if found else None
    size = math.inf if found is None or unit is None else float(found[1]) * unit
    if size >= 1 << 63:
        raise ConfigError(f"--max-index-ram {text[:40]}: expected a size such as 8GB, 500MB or 2GiB")
    return round(size)


def index_options(config: RunConfig) -> IndexOptions | None:
    """Those of a run; None where it builds no index.

    Raises:
        ConfigError: one of them is wrong.
    """
    if config.index == "none":
        return None
    size = parse_size(config.max_index_ram) if config.max_index_ram else None
    return IndexOptions(config.index, config.min_recall, size, config.max_latency_ms, config.metric)


@dataclass
class Choice:
    """An index to build.

    Attributes:
        factory: for FAISS.
        num_train: vectors it trains on.
        num_lists: 0 where it has none.
        warnings: what a person should know of it.
        adaptable: fewer lists may be made of it.
    """

    factory: str
    num_train: int
    num_lists: int = 0
    warnings: list[str] = field(default_factory=list)
    adaptable: bool = False

    def fitted(self, num_different: int, fits_whole: bool) -> Choice:
        """As many lists as a sample with so many different vectors can fill; exact search where that is hardly any.

        Args:
            num_different: of the sample.
            fits_whole: whether all vectors may be held as they are.
        """
        enough = _power_of_two(num_different / MIN_TRAIN_PER_LIST)
        if not self.adaptable or enough >= self.num_lists:
            return self
        found = f"only {num_different:,} different vectors among {self.num_train:,} sampled"
        if enough < MIN_LISTS and fits_whole:
            return Choice(FLAT, 0, 0, [*self.warnings, f"{found}: exact search"])
        factory = re.sub(r"IVF\d+(_HNSW\d+)?", f"IVF{enough}", self.factory)
        warning = f"{found}: {enough} lists instead of {self.num_lists:,}"
        return Choice(factory, self.num_train, enough, [*self.warnings, warning])


def choices(options: IndexOptions, num_vectors: int, dim: int) -> list[Choice]:
    """What to build, and after it what to try one after the other where recall or latency is missed; never empty.

    Raises:
        ConfigError: the factory cannot keep row ids, or no index fits ``max_index_ram``.
    """
    if options.factory != "auto":
        return [_explicit(options.factory, num_vectors)]
    dear, cheap = _ladder(num_vectors, dim, fast=options.max_latency_ms is not None)
    sizes = [index_bytes(rung.factory, num_vectors, dim) or 0 for rung in [*dear, *cheap]]
    if sizes[0] <= options.max_bytes:
        return [rung for rung, size in zip(dear, sizes, strict=False) if size <= options.max_bytes]
    for rung, size in zip(cheap, sizes[len(dear) :], strict=True):
        if size <= options.max_bytes:
            return [rung]
    raise ConfigError(
        f"--max-index-ram {options.max_bytes:,} bytes: the smallest index of {num_vectors:,} vectors of {dim} "
        f"dimensions takes {min(sizes):,}; allow more, or give a FAISS factory with --index"
    )


def _ladder(num_vectors: int, dim: int, *, fast: bool) -> tuple[list[Choice], list[Choice]]:
    """The preferred index and the ones to try after it, and those for less memory, the dearest first.

    What needs less memory never has more recall, so there is nothing to try after one of those.
    """
    lists, graph = _num_lists(num_vectors)
    num_train = min(max(0, num_vectors - NUM_QUERIES), TRAIN_PER_LIST * lists)
    product = _product(dim)
    inverted = [Choice(f"IVF{lists}{graph},{code.format(product)}", num_train, lists, adaptable=True) for code in CODES]
    faster = [Choice("IDMap2,HNSW32", 0)] if fast and num_vectors <= GRAPH_LIMIT else []
    if num_vectors <= FLAT_LIMIT:
        cheap = [_explicit(f"IDMap2,{code}", num_vectors) for code in ("SQfp16", "SQ8", f"PQ{product}")]
        return [Choice(FLAT, 0), *(inverted[:1] if fast and lists >= MIN_LISTS else []), *faster], cheap
    preferred = 0 if num_vectors <= WHOLE_LIMIT else CODES.index("SQ8")
    return [*inverted[preferred::-1], *faster], inverted[preferred + 1 :]


def _num_lists(num_vectors: int) -> tuple[int, str]:
    """Lists, and what finds them fast."""
    usual = next(
        (lists for limit, lists in ((10_000_000, 16_384), (100_000_000, 65_536)) if num_vectors <= limit), 131_072
    )
    if num_vectors <= WHOLE_LIMIT:
        usual = 2 ** round(math.log2(4 * math.sqrt(num_vectors)))
    lists = min(usual, _power_of_two((num_vectors - NUM_QUERIES) / MIN_TRAIN_PER_LIST))
    return lists, "_HNSW32" if lists >= 65_536 else ""


def _power_of_two(limit: float) -> int:
    """The largest one up to a limit, at least 1."""
    return 1 << max(0, math.floor(math.log2(max(1.0, limit))))


def _product(dim: int) -> int:
    """Bytes of a product quantizer: one for four dimensions, or for as near to it as divides them."""
    return next(parts for parts in range(max(1, dim // 4), 0, -1) if dim % parts == 0)


def _explicit(requested: str, num_vectors: int) -> Choice:
    factory = requested.strip()
    if re.search(r"(^|,)(RFlat|Refine)", factory):
        raise ConfigError(f"--index {requested}: a refining index cannot keep row ids; leave the refinement out")
    inverted = re.search(r"(?:^|,)(?:IVF|IMI)(\d+)", factory)
    bare = re.sub(r"^IDMap2?,", "", factory)
    lists = int(inverted[1]) if inverted else 0
    num_train = 0 if re.fullmatch(r"Flat|HNSW\d+", bare) else max(TRAIN_PER_LIST * lists, MIN_TRAIN)
    choice = Choice(bare if inverted else f"IDMap2,{bare}", min(num_vectors, num_train), lists)
    warn = choice.warnings.append
    if inverted and bare != factory:
        warn(f"{requested}: IDMap left out, an inverted file keeps ids itself and loses them when wrapped")
    if choice.num_train < MIN_TRAIN_PER_LIST * lists:
        warn(f"{bare}: {choice.num_train} training vectors for {lists} lists, {MIN_TRAIN_PER_LIST} a list wanted")
    return choice


def index_bytes(factory: str, num_vectors: int, dim: int) -> int | None:
    """Size of a FAISS index file, within a few percent; None for kinds whose size is not known here."""
    size = 8.0 * num_vectors  # the ids
    for part in factory.split(","):
        lists = re.fullmatch(r"IVF(\d+)(?:_HNSW(\d+))?", part)
        graph = re.fullmatch(r"HNSW(\d+)(?:_(\w+))?", part)
        turned = re.fullmatch(r"(?:OPQ\d+|PCAR?|RR)_?(\d*)", part)
        codes = _code_bytes(part, dim)
        if lists:
            size += int(lists[1]) * (dim * 4 + 8 + (_graph_bytes(int(lists[2])) if lists[2] else 0))
        elif graph:
            kept = 0.0 if f"{part}," in factory else _code_bytes(graph[2] or "Flat", dim)
            if kept is None:
                return None
            size += num_vectors * (_graph_bytes(int(graph[1])) + kept)
        elif turned:
            out = int(turned[1] or dim) if not part.startswith("OPQ") or turned[1] else dim
            size += 4 * out * dim
            dim = out
        elif codes is not None:
            size += codes * num_vectors
        elif part not in ("IDMap", "IDMap2"):
            return None
    return round(size)


def _graph_bytes(links: int) -> float:
    """Of a vector: twice as many links below as above, whose levels take some more, and where they begin."""
    return 8.0 * links + 15


def _code_bytes(part: str, dim: int) -> float | None:
    fixed = {"Flat": 4.0, "SQ8": 1.0, "SQ6": 0.75, "SQ4": 0.5, "SQfp16": 2.0, "SQbf16": 2.0}
    if part in fixed:
        return math.ceil(fixed[part] * dim)
    product = re.fullmatch(r"PQ(\d+)(?:x(\d+))?", part)
    if product:
        return math.ceil(int(product[1]) * int(product[2] or 8) / 8)
    rotated = re.fullmatch(r"RaBitQ(\d?)", part)
    if rotated:
        bits = int(rotated[1] or 1)
        return math.ceil(dim * bits / 8) + (8 if bits == 1 else 20)
    return None


@dataclass(frozen=True)
class Predicted:
    """What a build will take, said before it starts.

    Attributes:
        index_bytes: of the index file, and of the memory it is searched in; None where that is not known.
        build_bytes: most memory the building process holds at once.
        num_parts: it is written in; 0 where it is built in memory as a whole.
        part_rows: vectors of a part.
        mapped: the finished index is measured from the disk, as it does not fit the memory it may take.
    """

    index_bytes: int | None
    build_bytes: int | None
    num_parts: int
    part_rows: int
    mapped: bool

    def record(self) -> dict[str, Any]:
        return {"index_bytes": self.index_bytes, "build_bytes": self.build_bytes, "parts": self.num_parts}


def predict(choice: Choice, num_vectors: int, dim: int, max_bytes: int, num_added: int | None = None) -> Predicted:
    """What it takes to build an index, or to add ``num_added`` vectors to one.

    Args:
        choice: what is built.
        num_vectors: in the end.
        dim: of a vector.
        max_bytes: the memory it may take.
        num_added: None: all of them, and it is trained.
    """
    added = num_vectors if num_added is None else num_added
    size = index_bytes(choice.factory, num_vectors, dim)
    inverted = choice.num_lists > 0
    block = 8 * 4 * BLOCK_FLOATS  # as Parquet, as Arrow, as numpy, read ahead, beside what FAISS compares at once
    if size is None:
        part_rows = max(1, PART_BYTES // (4 * dim + 8))
        return Predicted(None, None, math.ceil(added / part_rows) if inverted else 0, part_rows, False)
    header = index_bytes(choice.factory, 0, dim) or 0
    a_vector = (size - header) / max(1, num_vectors)
    if not inverted:  # grows by doubling, and is held twice while it does
        return Predicted(size, round(PROCESS_BYTES + block + 2 * size + _training_bytes(choice, dim)), 0, 0, False)
    part_bytes = max(min(PART_BYTES, max_bytes // 8), CHUNK_BYTES, size // MAX_PARTS)
    part_rows = max(1, int(part_bytes / a_vector))
    mapped = size > max_bytes
    if num_added is None and size <= WHOLE_PARTS * part_bytes and GROWTH * size <= max_bytes:
        most = max(_training_bytes(choice, dim), block + 2 * header + GROWTH * (size - header))
        return Predicted(size, round(PROCESS_BYTES + most), 0, 0, mapped)
    steps = (
        0 if num_added is not None else _training_bytes(choice, dim),
        block + 2 * header + GROWTH * a_vector * min(2 * part_rows, added),  # one is written, one is filled
        3 * CHUNK_BYTES + 2 * header,
        header + (0 if mapped else size),
    )
    return Predicted(size, round(PROCESS_BYTES + max(steps)), math.ceil(added / part_rows), part_rows, mapped)


def _training_bytes(choice: Choice, dim: int) -> float:
    """The sample in half precision, what k-means decodes of it, the centres, and what the codes are trained on."""
    sample, encoder = choice.num_train, min(choice.num_train, ENCODER_SAMPLE)
    decoded = 4.0 * dim * (sample if 4 * dim * sample <= DECODED_BYTES else min(sample, DECODED_ROWS))
    whole = not choice.num_lists or not choice.factory.startswith("IVF")  # trained on float32
    codes = 0.0 if choice.factory.endswith(",Flat") else 4.0 * dim * encoder * 2
    centres = 3 * 4.0 * dim * choice.num_lists
    return 2.0 * dim * sample + (4.0 * dim * sample * 2 if whole else decoded + codes) + centres

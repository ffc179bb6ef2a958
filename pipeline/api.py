"""The two functions for a notebook or a script: embed a corpus, open what came out.

The same coordinator as the command line, in the caller's process: workers are child processes, so no main guard is
needed, and neither torch nor CUDA enters the caller.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from pipeline import ledger
from pipeline.config import build_config
from pipeline.devices import num_gpus, resolve_devices, resolve_dtype
from pipeline.errors import ConfigError
from pipeline.model import ModelFolder, open_model
from pipeline.pool import QueryWorker
from pipeline.progress import make_display
from pipeline.records import EncoderSettings
from pipeline.run import run
from pipeline.storage import Storage, open_output
from pipeline.telemetry import RunReport
from pipeline.threads import available_cores
from pipeline.worker_settings import WorkerSettings

if TYPE_CHECKING:
    from pipeline.search import CorpusIndex

DATASET_ROWS = 100_000  # a shard: small enough to lose little in a crash, large enough for full windows


def embed_corpus(
    inputs: Any,
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str],
    progress: str = "auto",
    **options: Any,
) -> RunReport:
    """Embed Parquet shards, or a ``datasets.Dataset``, and index the vectors.

    Args:
        inputs: a file, folder or glob, a list of them, or a ``datasets.Dataset``.
        output: folder for the results; calling again continues what was interrupted.
        model: a sentence-transformers folder.
        progress: auto, rich, plain or none.
        **options: as on the command line, with ``_`` for ``-``.

    Returns:
        What was done; a Jupyter cell shows it as a table. Shards with bad data are listed in ``failed``.

    Raises:
        ConfigError: an option, the model or the output folder is wrong.
        Stopped: workers died too often, or the output is in use.
    """
    names = _dataset_shards(inputs, open_output(output)) if hasattr(inputs, "_fingerprint") else _names(inputs)
    given = {"input": names, "output": os.fspath(output), "model": os.fspath(model), **options}
    return run(build_config(None, given), make_display(progress))


def _names(inputs: Any) -> list[str]:
    if isinstance(inputs, (str, os.PathLike)):
        return [os.fspath(inputs)]
    if isinstance(inputs, Sequence):
        return [os.fspath(name) for name in inputs]
    raise ConfigError(
        f"inputs: found a {type(inputs).__name__}; expected a path, a list of paths or a datasets.Dataset "
        "(write an IterableDataset to Parquet first)"
    )


def _dataset_shards(dataset: Any, output: Storage) -> list[str]:
    """The dataset as Parquet below the output, named by its fingerprint so that a second call finds it again."""
    folder = f"dataset/{dataset._fingerprint}"
    for number, start in enumerate(range(0, len(dataset), DATASET_ROWS)):
        name = f"{folder}/part-{number:05}.parquet"
        if output.size(name) is None:
            temporary = output.temporary(name)
            part = dataset.select(range(start, min(start + DATASET_ROWS, len(dataset))))
            pq.write_table(part.with_format("arrow")[:], temporary)
            output.publish(temporary, name)
    if not len(dataset):
        raise ConfigError("inputs: the dataset has no rows")
    return [output.location(folder)]


def open_index(output: str | os.PathLike[str], *, verify: bool = True, mmap: bool = False) -> CorpusIndex:
    """Open the index of a finished output for queries.

    Queries given as text are embedded in a child process with the model of the run and its query prompt; it is started
    by the first such query. Hits bring the carried columns and the text; ``columns=[]`` leaves all of it out.

    Args:
        output: the folder given to ``embed_corpus``.
        verify: check the sha256 of the index' files first, which reads them once more.
        mmap: leave the index on the disk and read what a search needs of it.

    Raises:
        ConfigError: there is no index, or it is damaged. At the first query given as text: the model is gone, or is not
            the one the vectors were made with any more.
    """
    from pipeline import search

    place = open_output(output)
    queries = LazyQueries(place)
    return search.open_index(str(place.root), encoder=queries.embed, verify=verify, mmap=mmap, texts=True)


class LazyQueries:
    """Embeds queries as the run of an output embedded its documents; loads the model at the first query.

    The process with the model ends when this object is no longer used.
    """

    def __init__(self, output: Storage) -> None:
        self._output = output
        self._worker: QueryWorker | None = None

    def embed(self, texts: list[str]) -> Any:
        """(n, dim) float32."""
        if self._worker is None:
            self._worker = query_worker(self._output)
            weakref.finalize(self, self._worker.close)  # the process goes when the index does
        return self._worker.embed(texts)


def query_worker(output: Storage) -> QueryWorker:
    """A worker for the queries of this output.

    Raises:
        ConfigError: the model folder is gone, or is not the one the vectors were made with.
    """
    document = ledger.read_run(output)
    fields, config = document["fields"], document["config"]
    if ledger.fingerprint(fields) != document["fingerprint"]:
        raise ConfigError(f"{output.root}/run.json: its fields are not those of its fingerprint; put the file back")
    model = open_model(document["model"]["path"], trust_remote_code=config["trust_remote_code"])
    _same_model(model, fields, output)
    device = resolve_devices("auto", num_gpus())[0]
    encoder = EncoderSettings(
        model_path=str(model.path),
        device=device,
        # float32 stands in for a half type on a CPU: the same space, and half precision is slow there
        dtype="float32" if device == "cpu" else resolve_dtype(fields["dtype"], device, model.checkpoint_dtype),
        prompt=document["model"]["query_prompt"],
        max_length=fields["max_length"],
        dimensions=fields["dimensions"],
        normalize=fields["normalize"],
        trust_remote_code=config["trust_remote_code"],
    )
    return QueryWorker(device, WorkerSettings(encoder, stand_in=fields.get("stand_in")), available_cores())


def _same_model(model: ModelFolder, fields: dict[str, Any], output: Storage) -> None:
    for name, value in model.fingerprint_fields().items():
        if fields.get(name) != value:
            raise ConfigError(
                f"{output.root}: {name.replace('_', '-')} of {model.path} is not what the vectors were made with; "
                "put the model back, or embed again into another folder"
            )

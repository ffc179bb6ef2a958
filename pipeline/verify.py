"""A finished output -> proof that it is complete, or every fault by name; either way ``OUTPUT/certificate.json``.

Every input shard has a commit record of this run and of the input as it is now; every file has the size and sha256 that
were committed; every row is accounted for (``pipeline.accounting``); the index names exactly these rows. A seeded
sample is then embedded by sentence-transformers itself (``pipeline.reference``) and compared.

Nothing but the certificate is written, and neither torch nor faiss is imported. A vector outside the sample is not
compared with its text. The FAISS file is not searched: its sha256 ties it to the build that measured it.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import ledger
from pipeline.accounting import REDO, RERUN, Faults, Piece, Positions, ShardCheck
from pipeline.config import build_config
from pipeline.devices import num_gpus, resolve_devices
from pipeline.errors import ConfigError, ModelError, Stopped
from pipeline.index_check import REDO as REINDEX
from pipeline.index_check import IdsCheck, check_index
from pipeline.index_document import NAME as INDEX
from pipeline.ledger import Ledger, same_input
from pipeline.model import ModelFolder, open_model
from pipeline.records import Shard, commit_name
from pipeline.reference import Request, compare, reference_vectors
from pipeline.run import resolve_columns
from pipeline.shards import check_shards, find_shards, natural_key
from pipeline.storage import Storage, open_output, sha256_of

CERTIFICATE = "certificate.json"
VERSION = 1
SAMPLE_ROWS = 256
# How near a stored vector must be to sentence-transformers' float32 one. float32 is the promise; half precision only
# has to tell rounding (cos about 0.99999 in float16, 0.999 in bfloat16) from another text's vector.
MIN_COSINE = {"float32": 0.99999, "float16": 0.999, "bfloat16": 0.99}
MAX_DIFFERENCE = 1e-5  # of the vector's length; in float32 only
UNIT_TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}
Say = Callable[[str], None]
Record = dict[str, Any]


def verify(output: str, *, sample: int = SAMPLE_ROWS, progress: Say | None = None) -> dict[str, Any]:
    """Prove an output folder, and write ``certificate.json`` into it.

    Args:
        output: the folder given as ``--output``.
        sample: how many rows are embedded again; all, where there are fewer.
        progress: gets one line of text now and then.

    Returns:
        The certificate. ``ok`` says whether ``faults`` is empty; each fault says where, what was found, what was
        expected and what to do.

    Raises:
        ConfigError: the folder holds no run of this version.
        Stopped: a run works in it.
    """
    store = open_output(output)
    run = ledger.read_run(store)
    if run.get("version") != ledger.VERSION:
        raise ConfigError(f"{store.location(ledger.RUN_FILE)}: version {run.get('version')}, expected {ledger.VERSION}")
    store.prepare()
    with store.lock() as ours:
        if not ours:
            raise Stopped(f"{store.root}: a run holds its lock; wait for it, then verify")
        certificate = _Verifier(store, run, progress or (lambda line: None)).certificate(sample)
        store.write_json(CERTIFICATE, certificate)
    return certificate


def short_form(certificate: dict[str, Any]) -> dict[str, Any]:
    """What the summary of a run says of it."""
    return {name: certificate[name] for name in ("ok", "faults", "checked", "parity")}


def draw(num_rows: int, sample: int) -> Positions:
    """The sample's positions among all committed vectors, ascending; always the same for one number of rows."""
    return np.sort(np.random.default_rng(0).choice(num_rows, min(sample, num_rows), replace=False)).astype(np.int64)


@dataclass(frozen=True)
class _Sampled:
    id: Any
    place: str
    text: str
    vector: NDArray[np.float32]


class _Verifier:
    """All checks, in order. ``faults`` gathers what is wrong; nothing is raised for it."""

    def __init__(self, store: Storage, run: dict[str, Any], say: Say) -> None:
        self.store, self.run, self.fields, self.faults = store, run, run["fields"], Faults()
        self.config = build_config(None, run["config"])
        self.columns, self.id_name = resolve_columns(self.config)
        stored, computed = self.fields["embedding_dtype"], self.fields["dtype"]
        self.precision = stored if computed == "float32" else computed
        self.checked = Counter({"shards": 0, "rows": 0, "vectors": 0, "quarantined": 0, "files": 0, "bytes": 0})
        self._say, self._said = say, time.monotonic()

    def certificate(self, sample: int) -> dict[str, Any]:
        begun, created = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
        if ledger.fingerprint(self.fields) != self.run["fingerprint"]:
            self.faults.add(ledger.RUN_FILE, self.run["fingerprint"], "the hash of its fields", "restore the file")
        model = self._model()
        shards = self._inputs()
        records = self._records(shards)
        with contextlib.ExitStack() as opened:
            samples = self._rows(records, shards, model, sample, self._index(records, opened))
        parity = self._parity(samples, model)
        return {
            "version": VERSION,
            "ok": not self.faults,
            "created": created,
            "faults": list(self.faults),
            "checked": dict(self.checked),
            "parity": parity,
            "fingerprint": self.run["fingerprint"],
            "made_with": {
                "model": self.run["model"]["name"],
                "dtype": self.fields["dtype"],
                "embedding_dtype": self.fields["embedding_dtype"],
                **{name: sorted({record[name] for record in records.values()}) for name in ("device", "attention")},
            },
            "verified_with": {"python": platform.python_version(), "pyarrow": pa.__version__, "numpy": np.__version__},
            "seconds": round(time.perf_counter() - begun, 3),
        }

    # -- what there is ----------------------------------------------------------------------------------------------

    def _model(self) -> ModelFolder | None:
        """The model folder, if it is still the one that the vectors were made with."""
        try:
            model = open_model(self.run["model"]["path"], trust_remote_code=self.config.trust_remote_code)
        except ModelError as error:
            self.faults.append(f"{error}; put the model back, there is nothing to compare the vectors with")
            return None
        other = [name for name, value in model.fingerprint_fields().items() if self.fields.get(name) != value]
        if other:
            found = f"other {' and '.join(name.replace('_', '-') for name in other)}"
            self.faults.add(str(model.path), found, "the model the vectors were made with", "put it back")
        return None if other else model

    def _inputs(self) -> dict[str, Shard]:
        """The input shards by key; those that cannot be read are named, and have no number of rows."""
        shards: dict[str, Shard] = {}
        for name in self.config.input:
            try:
                shards |= {shard.key: shard for shard in find_shards([name], str(self.store.root))}
            except ConfigError as error:
                self.faults.append(f"{error}; put it back, or run again without it")
        try:
            checked = check_shards(list(shards.values()), self.columns) if shards else None
        except ConfigError as error:  # not one can be read
            self.faults.append(f"{error}; mend the input, then {RERUN}")
            return shards
        if checked is not None:
            shards |= {shard.key: shard for shard in checked.shards}
            self.faults.extend(f"{shard.path}: {reason}; mend it, then {RERUN}" for shard, reason in checked.bad)
        return shards

    def _records(self, shards: dict[str, Shard]) -> dict[str, Record]:
        """The commit records that count, by key, in natural order; what does not count is named."""
        keys = Ledger(self.store).keys()
        for key in sorted(shards.keys() - set(keys), key=natural_key):
            if shards[key].num_rows is not None:
                self.faults.add(shards[key].path, "no commit record of it", commit_name(key), RERUN)
        records = {key: record for key in keys if (record := self._record(key, shards.get(key))) is not None}
        for folder in ("embeddings", "quarantine"):
            named = {part["path"] for record in records.values() for part in _parts(record).values()}
            for name in sorted(set(self.store.files(folder, ".parquet")) - named):
                key = name[len(folder) + 1 : -len(".parquet")]
                if key in records or key not in keys:  # else its record has been named
                    self.faults.add(name, "a file that no commit record names", "none", f"remove it, or {RERUN}")
        return records

    def _record(self, key: str, shard: Shard | None) -> Record | None:
        name = commit_name(key)
        record = self.store.read_json(name)
        if not _is_record(record, key):
            self.faults.add(name, "no record that can be read", f"the commit record of {key}", REDO)
            return None
        if record["fingerprint"] != self.run["fingerprint"]:
            found = f"fingerprint {record['fingerprint']}"
            self.faults.add(name, found, f"{self.run['fingerprint']} as in {ledger.RUN_FILE}", REDO)
        if shard is None:
            do = "put the shard back, or run with --prune, which removes its vectors"
            self.faults.add(name, "a record of a removed input", record["shard"]["path"], do)
        elif not same_input(record["shard"], shard):
            self.faults.add(shard.path, "an input that changed since", "its size and time as committed", RERUN)
        present = [self._is_whole(what, part) for what, part in _parts(record).items()]
        return record if all(present) else None

    def _is_whole(self, what: str, part: dict[str, Any]) -> bool:
        """Whether the file is there with its size; only then does its record count, as for the ledger."""
        size = self.store.size(part["path"])
        self.checked.update(files=1, bytes=size or 0)
        if size != part["bytes"]:
            if size is None and what == "reuse":  # spares work when the shard changes, and nothing else
                return True
            found = "no file" if size is None else f"{size} bytes"
            self.faults.add(part["path"], found, f"{part['bytes']} bytes as committed", REDO)
            return what == "reuse"
        if (found := sha256_of(self.store, part["path"])) != part["sha256"]:
            self.faults.add(part["path"], f"sha256 {found[:12]}…", f"{part['sha256'][:12]}… as committed", REDO)
        return True

    def _index(self, records: dict[str, Record], opened: contextlib.ExitStack) -> IdsCheck | None:
        if self.store.size(INDEX) is not None:
            return check_index(self.store, self.run["fingerprint"], records, self.faults, opened)
        if self.config.index != "none" and any(record["output"]["rows"] for record in records.values()):
            self.faults.add(INDEX, "no index", "one of the committed vectors", REINDEX)
        return None

    # -- rows and vectors -------------------------------------------------------------------------------------------

    def _rows(
        self,
        records: dict[str, Record],
        shards: dict[str, Shard],
        model: ModelFolder | None,
        sample: int,
        ids: IdsCheck | None,
    ) -> list[_Sampled]:
        """Read everything once, check it, and keep the sample."""
        tolerance = UNIT_TOLERANCE[self.precision] if model and is_normalized(model, self.fields) else None
        chunked = self.run["layout"].get("long_texts") == "chunk"
        total, start = sum(record["output"]["rows"] for record in records.values()), 0
        wanted, samples = draw(total, sample), list[_Sampled]()
        for key, record in records.items():
            shard = shards.get(key)
            same = shard is not None and shard.num_rows is not None and same_input(record["shard"], shard)
            check = ShardCheck(
                self.store, record, shard if same else None, self.columns, self.id_name,
                self.fields["embedding_dtype"], chunked, self.faults,
            )  # fmt: skip
            for piece in check.pieces(tolerance):
                samples.extend(self._sample(piece, wanted - start))
                if ids is not None:
                    ids.check(piece, start + piece.row, self.id_name)
                self.checked["vectors"] += piece.found.num_rows
                if time.monotonic() - self._said > 5.0:
                    self._said = time.monotonic()
                    self._say(f"verify: {self.checked['vectors']:,} of {total:,} vectors")
            quarantined = (record.get("quarantine") or {}).get("rows", 0)
            self.checked.update(shards=1, rows=record["shard"]["num_rows"], quarantined=quarantined)
            start += record["output"]["rows"]
        return samples

    def _sample(self, piece: Piece, wanted: Positions) -> list[_Sampled]:
        """The rows of a piece that are in the sample, given as ascending output rows of its file."""
        first, end = np.searchsorted(wanted, [piece.row, piece.row + len(piece.rows)])
        if first == end or piece.window is None:
            return []
        texts, ids = piece.texts(), piece.found[self.id_name]
        return [
            _Sampled(ids[at].as_py(), f"{piece.path} row {piece.row + at}", text, piece.vectors[at].copy())
            for at in (wanted[first:end] - piece.row).tolist()
            if (text := texts[at]) is not None and np.isfinite(piece.norms[at])
        ]

    def _parity(self, samples: list[_Sampled], model: ModelFolder | None) -> dict[str, Any]:
        """Compare the sample with sentence-transformers' own vectors."""
        if "stand_in" in self.fields:
            return {"skipped": "stand-in encoder"}
        if model is None or not samples:
            return {"skipped": "the model is not there as it was" if model is None else "no vector to compare"}
        self._say(f"verify: sentence-transformers embeds {len(samples):,} sampled rows")
        try:
            expected, made_by = reference_vectors(self._request(samples, model))
        except ModelError as error:
            self.faults.append(f"{error}; nothing was compared")
            return {"skipped": str(error)}
        found = np.stack([sampled.vector for sampled in samples])
        if found.shape != expected.shape:
            self.faults.add("parity", f"{found.shape[1]} dimensions", f"{expected.shape[1]}", REDO)
            return {"skipped": "dimensions differ"}
        compared = compare(found, expected)
        wrong = compared.cosines < MIN_COSINE[self.precision]
        limits: dict[str, float] = {"cosine": MIN_COSINE[self.precision]}
        if self.precision == "float32":
            limits["difference"] = MAX_DIFFERENCE
            wrong |= compared.relative > MAX_DIFFERENCE
        worst = int(np.argmax(compared.relative))
        if wrong.any():
            cosine, difference = compared.cosines[worst], compared.relative[worst]
            self.faults.add(
                samples[worst].place,
                f"cosine {cosine:.6f}, difference {difference:.1e} to sentence-transformers' vector of the text",
                " and ".join(f"{name} {value:g}" for name, value in limits.items()),
                f"{int(wrong.sum())} of {len(samples)} sampled rows are not their text's vectors, {REDO}",
            )
        return {
            "rows": len(samples),
            "cosine_min": float(compared.cosines.min()),
            "cosine_mean": float(compared.cosines.mean()),
            "max_abs_difference": float(compared.differences.max()),
            "rank_overlap_at_10": compared.rank_overlap,
            "worst_id": samples[worst].id if isinstance(samples[worst].id, int | str) else str(samples[worst].id),
            "limits": limits,
            "reference": made_by,
        }

    def _request(self, samples: list[_Sampled], model: ModelFolder) -> Request:
        return Request(
            model_path=str(model.path),
            device=resolve_devices("auto", num_gpus())[0],
            texts=[sampled.text for sampled in samples],
            prompt=self.config.prompt,
            prompt_name=self.config.prompt_name,
            max_length=self.fields["max_length"],
            dimensions=self.fields["dimensions"],
            normalize=self.fields["normalize"],
            trust_remote_code=self.config.trust_remote_code,
        )


def is_normalized(model: ModelFolder, fields: dict[str, Any]) -> bool:
    """Whether every vector must be of unit length: asked for, or the chain ends so and is not cut after that."""
    if fields["normalize"] is not None:
        return bool(fields["normalize"])
    settings = model.path / "config_sentence_transformers.json"
    cut = json.loads(settings.read_text("utf-8")).get("truncate_dim") if settings.is_file() else None
    ends_so = bool(model.modules) and model.modules[-1][0].endswith("Normalize")
    return ends_so and (fields["dimensions"] is not None or not cut)


def _parts(record: Record) -> dict[str, dict[str, Any]]:
    return {what: record[what] for what in ("output", "quarantine", "reuse") if record.get(what)}


def _is_record(record: Any, key: str) -> TypeGuard[Record]:
    try:
        whole = all({"path", "rows", "bytes", "sha256"} <= part.keys() for part in _parts(record).values())
        named = {"size_bytes", "mtime_ns", "num_rows", "path"} <= record["shard"].keys()
        counted = {"rows", "rows_out", "quarantined"} <= record["counts"].keys()
        known = {"fingerprint", "device", "attention"} <= record.keys()
        right = record["version"] == ledger.VERSION and record["shard"]["key"] == key and record["output"]["dim"] > 0
    except (AttributeError, KeyError, TypeError):
        return False
    return whole and named and counted and known and right

"""What a server needs of a model before torch is loaded: made once by `export`, kept in a cache, found by its key.

A kit is a folder ``~/.cache/embed-corpus/onnx/<key>`` (``$XDG_CACHE_HOME`` in place of ``~/.cache`` where it is set):

    kit.json      facts of the encoder and its tokenizer, measured costs, why there is no graph; written last
    model.onnx    the graph
    int8.onnx     the same with int8 weights, only where it was asked for
    probes.npz    probe texts and the batch engine's vectors of them

The key is a hash of all that changes one of these: model files, length, dimensions, normalisation, prompts, versions,
processor and cores. Remove the folder to have it made again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_CONFIG, ConfigError, ModelError
from pipeline.flops import cpu_name
from pipeline.pool import child_environment
from pipeline.records import EncoderSettings

VERSION = 1
EXPORT_S = 900.0
PACKAGES = ("torch", "transformers", "sentence-transformers", "tokenizers", "onnxruntime", "onnx", "onnxscript")

FASTER = 1.25
"""A second lane is worth its memory where it computes some batch so many times as fast."""


@dataclass(frozen=True)
class Kit:
    """One folder of the cache.

    Attributes:
        folder: see above.
        facts: of the batch encoder, as `encoder_process.facts_of` gives them.
        reason: why there is no graph; empty when there is one.
        timed: (tokens, sum of squared lengths, ONNX Runtime's seconds, the batch encoder's) of some batches.
    """

    folder: Path
    facts: dict[str, Any]
    reason: str
    timed: list[tuple[float, float, float, float]]

    @property
    def probes(self) -> Path:
        return self.folder / "probes.npz"

    def graph(self, *, int8: bool) -> Path:
        return self.folder / ("int8.onnx" if int8 else "model.onnx")

    @property
    def torch_is_worth_it(self) -> bool:
        """Whether the batch encoder computes some size of batch so much faster that it had better be there, too."""
        return any(onnx_s > FASTER * torch_s for _, _, onnx_s, torch_s in self.timed)

    @classmethod
    def read(cls, folder: Path) -> Kit | None:
        try:
            document = json.loads((folder / "kit.json").read_text("utf-8"))
            timed = [tuple(map(float, row)) for row in document["timed"]]
            return cls(folder, dict(document["facts"]), str(document["reason"]), timed)  # type: ignore[arg-type]
        except (OSError, ValueError, KeyError, TypeError):
            return None


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embed-corpus" / "onnx"


def kit_key(
    model_files: dict[str, str], encoder: EncoderSettings, prompts: Sequence[str], threads: int, *, int8: bool
) -> str:
    """A hash of all that a kit depends on; `model_files` are `ModelFolder.fingerprint_fields`."""
    parts = {
        "version": VERSION,
        "model": model_files,
        "encoder": {**asdict(encoder), "model_path": "", "prompt": ""},
        "prompts": sorted(set(prompts)),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": [cpu_name(), threads],
        "int8": int8,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


async def prepared(
    key: str, encoder: EncoderSettings, prompts: Sequence[str], threads: int, *, int8: bool = False
) -> Kit:
    """The kit of that key, from the cache or made now, which takes half a minute and a process with torch.

    Where nothing can be kept, a temporary folder holds it as long as this process lives.

    Raises:
        ConfigError: the model cannot be loaded, or the process that makes the kit died.
    """
    root = cache_root()
    found = Kit.read(root / key)
    if found is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=root))
    except OSError:
        root, building = Path(), Path(tempfile.mkdtemp(prefix="embed-corpus-onnx-"))
    request = {
        "folder": str(building),
        "encoder": asdict(encoder),
        "prompts": list(prompts),
        "threads": threads,
        "int8": int8,
    }
    try:
        await _make(request, threads)
        # Another server may have made the same one meanwhile; whoever is second keeps the first one's.
        target = root / key if root != Path() else building
        if target != building:
            try:
                building.rename(target)
            except OSError:
                shutil.rmtree(building, ignore_errors=True)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    made = Kit.read(target)
    assert made is not None, "the kit that was made cannot be read. This is a bug."
    return made


async def _make(request: dict[str, Any], threads: int) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pipeline.serving.export",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**child_environment(threads), "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(EXPORT_S):
            _, errors = await child.communicate(json.dumps(request).encode())
    except BaseException as error:
        child.kill()
        await child.wait()
        if isinstance(error, TimeoutError):
            raise ConfigError(f"the query lane was not made within {EXPORT_S:.0f} s; use query_lane: torch") from None
        raise
    if child.returncode:
        last = next((line for line in reversed(errors.decode("utf-8", "replace").splitlines()) if line.strip()), "")
        if child.returncode == EXIT_CONFIG:
            raise ModelError(last.strip())
        raise ConfigError(f"the process that makes the query lane ended with {child.returncode}: {last.strip()}")

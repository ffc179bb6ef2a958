"""A model name into a folder, and what the folder says, read from its files alone: no torch, no transformers.

This is what can be refused before a worker is started, and what the fingerprint of a run is made of. Loading the
weights and proving that our forward equals the reference is the encoder's business.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import nearest
from pipeline.errors import ModelError
from pipeline.storage import sha256_file

# By the last component of the type: folders written before and after sentence-transformers 5.4 differ in the rest.
KNOWN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout")
WEIGHT_SUFFIXES = (".safetensors", ".bin")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
LFS_HEADER = b"version https://git-lfs"
Modules = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ModelFolder:
    """What a sentence-transformers folder says.

    Attributes:
        name: as the user gave it.
        path: the folder.
        modules: (type, sub-folder) of each module, in order; empty where there is no ``modules.json``.
        prompts: by name; sentence-transformers itself adds empty ``query`` and ``document`` ones.
        default_prompt_name: used where neither a prompt nor a fitting name is given.
        max_length: token limit, or None where the folder sets none.
        checkpoint_dtype: type of the stored weights, if the configuration names it.
    """

    name: str
    path: Path
    modules: Modules = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_length: int | None = None
    checkpoint_dtype: str | None = None

    def document_prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """The text ``SentenceTransformer.encode_document`` would put before each document."""
        return self._prompt(prompt, prompt_name, ("document", "passage", "corpus"))

    def query_prompt(self) -> str:
        """The text ``SentenceTransformer.encode_query`` would put before a query."""
        return self._prompt(None, None, ("query",))

    def _prompt(self, prompt: str | None, prompt_name: str | None, candidates: Iterable[str]) -> str:
        if prompt is not None:
            return prompt
        if prompt_name is None:
            prompt_name = next((name for name in candidates if name in self.prompts), self.default_prompt_name)
        if prompt_name is None:
            return ""
        if prompt_name not in self.prompts:
            known = nearest(prompt_name, sorted(self.prompts)) if self.prompts else "the model has none"
            raise ModelError(f"--prompt-name {prompt_name}: the model {self.name} has no such prompt; {known}")
        return self.prompts[prompt_name]

    def fingerprint_fields(self) -> dict[str, str]:
        """Hashes of all files that change a vector, by what they are; renaming or moving the folder changes none."""
        weights, tokenizer, modules = [], [], []
        for path in self._files():
            relative = path.relative_to(self.path).as_posix()
            if "/" in relative or relative in ("modules.json", "config.json") or relative.startswith("sentence_"):
                modules.append(path)
            elif relative.endswith(WEIGHT_SUFFIXES):
                weights.append(path)
            elif relative in TOKENIZER_FILES or relative.endswith((".model", ".tiktoken")):
                tokenizer.append(path)
            elif relative.endswith(".py"):
                modules.append(path)
        safe = [path for path in weights if path.suffix == ".safetensors"]
        return {
            "model_weights": self._hash(safe or weights),
            "model_tokenizer": self._hash(tokenizer),
            "model_modules": self._hash(modules),
        }

    def _files(self) -> list[Path]:
        folders = {sub for _, sub in self.modules if sub}
        below = [p for sub in sorted(folders) for p in sorted((self.path / sub).rglob("*")) if p.is_file()]
        return [p for p in sorted(self.path.iterdir()) if p.is_file()] + below

    def _hash(self, files: list[Path]) -> str:
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{path.relative_to(self.path).as_posix()}\0{sha256_file(path)}\n".encode())
        return digest.hexdigest()[:32]


def open_model(name: str, *, trust_remote_code: bool = False) -> ModelFolder:
    """Find the folder and read what it says.

    Args:
        name: a folder, or a model id that is in the hub cache (or can be downloaded, unless HF_HUB_OFFLINE is set).
        trust_remote_code: accept modules whose code comes with the folder.

    Raises:
        ModelError: no such model, or one that cannot be loaded or reproduced exactly.
    """
    path = _locate(name)
    modules = _modules(path)
    _check_modules(name, modules, trust_remote_code)
    _check_files(name, path, modules)
    settings = _json(path / "config_sentence_transformers.json")
    kind = settings.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ModelError(f"model {name}: is a {kind}; expected a SentenceTransformer, which gives one vector a text")
    transformer = path / _transformer_folder(modules)
    config = _json(transformer / "config.json")
    stored = [part.get("dtype") or part.get("torch_dtype") for part in (config, config.get("text_config") or {})]
    return ModelFolder(
        name=name,
        path=path,
        modules=modules,
        prompts={"query": "", "document": "", **{k: v or "" for k, v in (settings.get("prompts") or {}).items()}},
        default_prompt_name=settings.get("default_prompt_name"),
        max_length=_max_length(transformer, config),
        checkpoint_dtype=next((dtype for dtype in stored if dtype), None),
    )


def _locate(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelError(f"model {name}: is a file; expected a sentence-transformers folder")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or os.path.isdir(path.parent):
        raise ModelError(f"model {name}: no such folder; expected a sentence-transformers folder or a model id")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name))
    except Exception as error:  # the hub client has a dozen error types, all of them mean 'cannot be had'
        raise ModelError(
            f"model {name}: not a folder here, and not to be had from the hub ({type(error).__name__}); "
            "expected a sentence-transformers folder or a model id in the hub cache"
        ) from None


def _check_modules(name: str, modules: Modules, trust_remote_code: bool) -> None:
    """Only what is known to work on packed texts: one Transformer first, one Pooling, and what may stand around it."""
    for module, _ in modules:
        known = module.rpartition(".")[2] in KNOWN_MODULES and module.startswith("sentence_transformers.")
        if not known and not trust_remote_code:
            raise ModelError(f"model {name}: module {module} is not known; known: {', '.join(KNOWN_MODULES)}")
    names = [module.rpartition(".")[2] for module, _ in modules]
    if names and (names[0] != "Transformer" or names.count("Transformer") != 1 or names.count("Pooling") != 1):
        raise ModelError(f"model {name}: chains {' > '.join(names)}; expected one Transformer first and one Pooling")


def _transformer_folder(modules: Modules) -> str:
    """Older folders keep the transformer in a folder of its own."""
    return next((sub for module, sub in modules if module.endswith(".Transformer")), "")


def _check_files(name: str, path: Path, modules: Modules) -> None:
    folder = path / _transformer_folder(modules)
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {name}: no config.json in {folder}; expected a sentence-transformers folder")
    if not any(p.name.endswith(WEIGHT_SUFFIXES) for p in folder.iterdir()):
        raise ModelError(f"model {name}: no weights in {folder}; expected model.safetensors")
    vocabularies = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken")
    if not any(any(folder.glob(pattern)) for pattern in vocabularies):
        raise ModelError(f"model {name}: no tokenizer in {folder}; expected tokenizer.json or a vocabulary file")
    for file in (p for sub in {"", *(sub for _, sub in modules)} for p in (path / sub).glob("*") if p.is_file()):
        with open(file, "rb") as handle:
            if handle.read(len(LFS_HEADER)) == LFS_HEADER:
                raise ModelError(f"model {name}: {file.name} is a Git LFS pointer, not the file; run 'git lfs pull'")


def _modules(path: Path) -> Modules:
    listing = path / "modules.json"
    if not listing.is_file():
        return ()
    try:
        return tuple((str(m["type"]), str(m.get("path", ""))) for m in json.loads(listing.read_text("utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{listing}: not a list of modules ({error!r})") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from None
    return document if isinstance(document, dict) else {}


def _max_length(folder: Path, config: dict[str, Any]) -> int | None:
    """As sentence-transformers has it: its own setting, else the smaller of tokenizer and position table."""
    for file in sorted(folder.glob("sentence_*_config.json")):
        value = _json(file).get("max_seq_length")
        if value is not None:
            return int(value)
    limits = [_json(folder / "tokenizer_config.json").get("model_max_length"), config.get("max_position_embeddings")]
    real = [int(limit) for limit in limits if limit and 0 < limit < 1e9]  # 1e30 stands for 'not set'
    return min(real, default=None)

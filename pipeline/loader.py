"""A checked model folder into the model that sentence-transformers makes of it, with every weight from the file.

What the folder says was read and refused before (`pipeline.model`); here the weights are loaded, and whatever a foreign
library raises becomes one `ModelError` line.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.errors import ModelError, one_line

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def load_sentence_transformer(
    path: Path, device: str, dtype: torch.dtype, *, trust_remote_code: bool
) -> SentenceTransformer:
    """The folder as sentence-transformers loads it, in evaluation mode, without touching the network.

    Raises:
        ModelError: it does not load, or some of its weights are not in the file and were made up.
    """
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    # Its bars would go to stderr, which is ours.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with _LoadReport() as report:
        try:
            model = SentenceTransformer(
                str(path),
                device=device,
                model_kwargs={"dtype": dtype},
                trust_remote_code=trust_remote_code,
                local_files_only=True,
            )
        except Exception as error:
            raise ModelError(f"model folder {path} cannot be loaded: {_reason(error)}") from error
    if report.missing:
        raise ModelError(
            f"{path}: its weight file lacks {', '.join(report.missing[:3])}"
            f"{f' and {len(report.missing) - 3} more' if len(report.missing) > 3 else ''}; vectors would be random"
        )
    model.eval()
    return model


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it brings its own Python code, which runs only with --trust-remote-code"
    return f"{type(error).__name__}: {one_line(error)}"


class _LoadReport(logging.Filter):
    """Reads the report that transformers logs on loading, and keeps it off stderr.

    A weight that the file lacks is initialised at random and only mentioned there. A pooler's may be lacking: its
    output is not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.missing: list[str] = []
        self._logger = logging.getLogger("transformers.modeling_utils")

    def __enter__(self) -> _LoadReport:
        self._level = self._logger.level
        # Only where a user silenced warnings: the report is one, and unread it would hide missing weights.
        if not self._logger.isEnabledFor(logging.WARNING):
            self._logger.setLevel(logging.WARNING)
        self._logger.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeFilter(self)
        self._logger.setLevel(self._level)

    def filter(self, record: logging.LogRecord) -> bool:
        text = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())
        if "LOAD REPORT" not in text:
            return True
        for line in text.splitlines():
            key, _, rest = (part.strip() for part in line.partition("|"))
            if rest.startswith("MISSING") and "pooler" not in key:
                self.missing.append(key)
        return False

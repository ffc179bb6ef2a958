"""Every way a run can end other than well, and the exit code each one has.

Foreign errors (pyarrow, safetensors, OSError …) are translated once, where they enter, into one of these; the command
line turns them into one line on stderr and an exit code. Anything that is not an ``EmbedCorpusError`` is our bug and is
shown with its traceback (exit code 1).

    EmbedCorpusError
    ├── ConfigError      78  wrong option, job file, input list, output folder, or an output made with another one
    │   └── ModelError   78  a model folder we cannot load or cannot reproduce exactly
    ├── DataError        65
    │   ├── ShardError   65  one shard's data is bad; every other shard is still done
    │   └── IndexingError 65  the vectors are there, the index is not
    └── Stopped          75  ended early and resumable: a signal, a busy output, a worker lost too often
        └── OutputError  75  the output stopped taking data: disk full, connection lost
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_DATA = 65
EXIT_STOPPED = 75
EXIT_CONFIG = 78


class EmbedCorpusError(Exception):
    """A failure its reader can act on: the message says where, what was found, what was expected, what to do."""

    exit_code = EXIT_BUG


class ConfigError(EmbedCorpusError):
    """The command, the job file, the input list or the output folder is wrong; running again changes nothing."""

    exit_code = EXIT_CONFIG


class ModelError(ConfigError):
    """The model folder cannot be loaded, or cannot be reproduced exactly."""


class DataError(EmbedCorpusError):
    """Something in the data, not in the configuration, is bad."""

    exit_code = EXIT_DATA


class ShardError(DataError):
    """One shard's data is bad. The shard is named in the message; the others are not affected."""


class IndexingError(DataError):
    """The committed vectors cannot be turned into an index that keeps its promise."""


class Stopped(EmbedCorpusError):
    """The run ended before its work was done and continues when started again."""

    exit_code = EXIT_STOPPED


class OutputError(Stopped):
    """The output stopped taking data in mid-run; once there is room again the run continues."""


def one_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, or its type when it has none."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text or type(error).__name__

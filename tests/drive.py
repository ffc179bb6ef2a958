"""``python -m tests.drive INPUT OUTPUT MODEL ['{"option": …}']``: a run with the stand-in encoder, a process apart."""

from __future__ import annotations

import json
import sys

import typer

import cli
from pipeline.config import build_config
from pipeline.progress import make_display
from pipeline.run import run
from tests.conftest import STAND_IN


def main() -> int:
    source, output, model, *rest = sys.argv[1:]
    options = {"id_column": "id", "index": "none", **(json.loads(rest[0]) if rest else {})}
    with cli.errors():
        cli.stop_on_sigterm()
        config = build_config(None, {"input": source, "output": output, "model": model, **options})
        report = run(config, make_display("plain"), stand_in=STAND_IN)
        print(json.dumps(report.to_dict()))
    return report.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except typer.Exit as end:
        sys.exit(end.exit_code)

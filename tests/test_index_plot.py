"""The picture of recall against latency."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import matplotlib.image
import pytest

from pipeline.errors import ConfigError
from pipeline.index_plot import plot
from pipeline.indexer import build_index
from tests.test_indexer import FakeOutput, clustered


@pytest.fixture
def out(tmp_path: Path) -> FakeOutput:
    output = FakeOutput(tmp_path / "out")
    output.add("a", clustered(1500))
    return output


@pytest.mark.parametrize("factory", ["IVF32,Flat", "HNSW8", "auto"])
def test_settings_are_drawn_and_the_published_one_is_marked(out: FakeOutput, tmp_path: Path, factory: str) -> None:
    document = build_index(str(out), factory, min_recall=0.5)
    picture = tmp_path / "recall.png"
    plot(document, str(picture))
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 900
    blue = (pixels[:, :, 2] > 0.8) & (pixels[:, :, 0] < 0.3)
    assert blue.sum() > 30  # the mark and its bar
    tried = [setting["value"] for setting in document["settings"]]
    assert (document["nprobe"] or document["ef_search"]) in tried
    assert len(tried) <= 1 or tried == sorted(tried)


def test_an_index_without_settings_is_told(out: FakeOutput, tmp_path: Path) -> None:
    document = build_index(str(out))
    del document["settings"]
    with pytest.raises(ConfigError, match="did not keep its settings"):
        plot(document, str(tmp_path / "recall.png"))


@pytest.mark.slow
def test_the_command_takes_the_limits_and_draws(
    command: Callable[..., CompletedProcess[str]], out: FakeOutput, tmp_path: Path
) -> None:
    picture = tmp_path / "recall.png"
    limits = ["--max-index-ram", "1GB", "--min-recall", "0.9", "--max-latency-ms", "10000"]
    done = command("index", out.root, "--index", "IVF16,Flat", *limits, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Index built: 1,500 vectors, IVF16,Flat, recall@10 0.9")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert out.document()["options"] == {"max_index_ram": 10**9, "max_latency_ms": 10000.0, "metric": None}
    out.add("b", clustered(60, seed=2))
    done = command("index", out.root, "--index", "IVF16,Flat", *limits)
    assert done.stdout.startswith("Index updated: 1,560 vectors"), done.stderr
    done = command("index", out.root, "--metric", "l2", "--plot", picture)
    assert done.returncode == 78
    assert "--metric l2: these vectors are of unit length" in done.stderr
    assert command("index", out.root, "--plot", tmp_path / "no.pdf").returncode == 78
    assert command("index", out.root, "--max-index-ram", "much").returncode == 78

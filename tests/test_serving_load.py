"""More than a server can do, from many clients at once: everybody is answered, in time, and with what is theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import SampleRun
from tests.serve import running_server
from tests.serve_load import overload, own_answers


@pytest.fixture(scope="module")
def port(sample_run: SampleRun) -> Iterator[int]:
    """Of a server with a deadline of three seconds."""
    folder, done = sample_run
    assert done.returncode == 0, done.stderr
    with running_server(folder, "out/sample", environ={"EMBED_CORPUS_SERVE_REQUEST_TIMEOUT_MS": "3000"}) as running:
        yield int(running.url.rpartition(":")[2])


def test_sixteen_clients_with_mixed_sizes_get_their_own_answers(port: int) -> None:
    assert own_answers(port, 16, 3) < 1e-6


def test_five_times_too_much_is_answered_in_time_and_the_work_goes_on(port: int) -> None:
    found = overload(port, 5, 3.0)
    assert found.offered > 3 * found.peak
    assert found.statuses.keys() <= {200, 429, 504} and found.statuses.keys() >= {200, 429}
    assert max(found.seconds) < 3.0 + 2.0  # the deadline, and what a busy machine adds
    # `python -m tests.serve_load` measures it; here other tests run beside.
    assert found.served > 0.4 * found.peak

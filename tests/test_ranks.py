from __future__ import annotations

import pytest

from pipeline.errors import ConfigError
from pipeline.ranks import Rank, resolve_rank, share
from pipeline.records import Shard


def shards(*sizes: int) -> list[Shard]:
    return [Shard(f"part-{number}", f"/in/part-{number}.parquet", size, 0) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "expected"),
    [
        (None, None, {}, None),
        (2, 8, {}, Rank(2, 8)),
        (0, 1, {}, None),
        (None, 1, {}, None),
        (None, 8, {"JOB_COMPLETION_INDEX": "3"}, Rank(3, 8)),
        (None, 8, {"SLURM_ARRAY_TASK_ID": "3"}, Rank(3, 8)),
        (None, None, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, Rank(3, 4)),
        (
            None,
            None,
            {
                "SLURM_ARRAY_TASK_ID": "14",
                "SLURM_ARRAY_TASK_MIN": "10",
                "SLURM_ARRAY_TASK_STEP": "2",
                "SLURM_ARRAY_TASK_COUNT": "3",
            },
            Rank(2, 3),
        ),
        (1, 2, {"JOB_COMPLETION_INDEX": "7"}, Rank(1, 2)),  # what is given wins
    ],
)
def test_the_rank_comes_from_options_or_scheduler(
    rank: int | None, world_size: int | None, environment: dict[str, str], expected: Rank | None
) -> None:
    assert resolve_rank(rank, world_size, environment) == expected


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "said"),
    [
        (None, 8, {}, "--world-size 8: which of them is this"),
        (3, None, {}, "--rank is 3, but of how many"),
        (None, None, {"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX is 3, but of how many"),
        (8, 8, {}, "--rank is 8; expected 0 to 7"),
        (None, 4, {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX is 4; expected 0 to 3"),
        (None, 4, {"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX is 'x'"),
    ],
)
def test_half_a_rank_is_refused(
    rank: int | None, world_size: int | None, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_rank(rank, world_size, environment)


@pytest.mark.parametrize("sizes", [(), (5,), (9, 1, 1, 1, 9, 1), (7,) * 13, tuple(range(1, 40))])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_shard_is_in_one_share_and_shares_are_balanced(sizes: tuple[int, ...], world_size: int) -> None:
    everything = shards(*sizes)
    shares = [share(everything, Rank(number, world_size)) for number in range(world_size)]
    assert sorted(shard.key for one in shares for shard in one) == sorted(shard.key for shard in everything)
    loads = [sum(shard.size_bytes for shard in one) for one in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert all(one == [shard for shard in everything if shard in one] for one in shares)


def test_the_order_of_the_list_does_not_matter() -> None:
    everything = shards(3, 1, 4, 1, 5, 9, 2, 6)
    for number in range(3):
        keys = {shard.key for shard in share(everything, Rank(number, 3))}
        assert {shard.key for shard in share(everything[::-1], Rank(number, 3))} == keys

"""Which shards are this process's, where several machines work on one job.

Every rank lists the same input and deals it out by the same rule, so none has to know of the others. The ledger makes
any partition safe: a shard that two of them do is done twice and counts once, one that a lost rank left is done by
whoever runs the job without a rank.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import ConfigError
from pipeline.records import Shard


@dataclass(frozen=True)
class Rank:
    """This process's place: ``number`` of ``of``, from 0."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number} of {self.of}"


def resolve_rank(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Rank | None:
    """From the options or from what the scheduler says; None where one process does it all.

    An Indexed Job of Kubernetes gives ``JOB_COMPLETION_INDEX``, but not how many there are. A Slurm array gives
    ``SLURM_ARRAY_TASK_ID`` and, beside it, where the array begins, its step and how many tasks were submitted.

    Raises:
        ConfigError: one of the two is not known, or the rank is not below the world size.
    """
    where = "--rank"
    if rank is None:
        rank, where = _of_scheduler(environment)
    if world_size is None and where.startswith("SLURM"):
        world_size = _number(environment, "SLURM_ARRAY_TASK_COUNT")
    if rank is None and world_size in (None, 1):
        return None
    if rank is None:
        raise ConfigError(
            f"--world-size {world_size}: which of them is this? Give --rank, or start it as a Kubernetes Indexed Job "
            "or a Slurm array"
        )
    if world_size is None:
        raise ConfigError(f"{where} is {rank}, but of how many? Give --world-size (1 for a job that is done by one)")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"{where} is {rank}; expected 0 to {world_size - 1}, one less than --world-size")
    return Rank(rank, world_size) if world_size > 1 else None


def _of_scheduler(environment: Mapping[str, str]) -> tuple[int | None, str]:
    index = _number(environment, "JOB_COMPLETION_INDEX")
    if index is not None:
        return index, "JOB_COMPLETION_INDEX"
    task = _number(environment, "SLURM_ARRAY_TASK_ID")
    if task is None:
        return None, ""
    first, step = _number(environment, "SLURM_ARRAY_TASK_MIN") or 0, _number(environment, "SLURM_ARRAY_TASK_STEP") or 1
    return (task - first) // step, "SLURM_ARRAY_TASK_ID"


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "").strip()
    if not value:
        return None
    if not value.isdigit():
        raise ConfigError(f"{name} is '{value}' in the environment; expected a number")
    return int(value)


def share(shards: Sequence[Shard], rank: Rank) -> list[Shard]:
    """The shards of one rank, in the order given.

    The largest goes first, each to whoever has the fewest bytes so far; equal ones by key and rank. So no rank has more
    than a third more than it must, and the same list gives the same shares everywhere.
    """
    loads = [(0, number) for number in range(rank.of)]
    mine = set()
    for shard in sorted(shards, key=lambda shard: (-shard.size_bytes, shard.key)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + shard.size_bytes, number))
        if number == rank.number:
            mine.add(shard.key)
    return [shard for shard in shards if shard.key in mine]

"""The work order of the ranks. Needs no torch, so a launcher can start ranks before it imports torch."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from flyte_ddp.core.machine.resources import Request, World
from flyte_ddp.core.runs.checkpoint import Checkpoint, Identity
from flyte_ddp.core.settings import Settings

NOT_FOUND = World(num_ranks=0)


@dataclass(frozen=True)
class Restart:
    """A restart of all ranks in place, after a failure."""

    reason: str  # the failure
    step: int  # of the checkpoint from which the ranks start; 0: from scratch
    number: int  # of the restarts without progress in between, from 1
    most: int  # the largest number of such restarts
    time: float  # when the failure was noticed, in seconds since 1970

    def describe(self, seconds: float) -> str:
        """Return a sentence about the restart, for people. ``seconds`` is how long the restart took."""
        after = f"from step {self.step:,}" if self.step else "from scratch, as no checkpoint exists"
        return f"{self.reason}; restarted {after}, in {seconds:.1f} s ({self.number} of {self.most})"


@dataclass(frozen=True)
class Work:
    """The work of all ranks, and the facts that all ranks need.

    Launchers pass ``arguments`` on unread.
    """

    function: str  # package.module:function of this library, which each rank calls with its Rank
    arguments: Any  # for the function
    request: Request  # the ranks for which the launcher finds capacity
    output_folder: Path  # where ranks write; on the launcher's host the run folder, or a training's unfinished/ in it
    identity: Identity  # the identity that a checkpoint must have
    settings: Settings
    checkpoint: Checkpoint | None = None  # from which the run resumes
    restarts: tuple[Restart, ...] = ()  # restarts in place since the checkpoint, which rank 0 records
    files: Mapping[str, Path] = field(default_factory=dict)  # files to send to hosts that do not see the output folder
    user_code: tuple[str, ...] = ()  # package.module:callable of users, whose sources other hosts may lack
    host_function: str = ""  # package.module:function that a host calls with the Work to get its ranks' Work
    world: World = NOT_FOUND  # the ranks for which the launcher has found capacity
    sees_run_folder: bool = True  # whether output_folder is the launcher's; else results go to the launcher as messages

    def choose_world(self, plan_world: Callable[[Request], World]) -> Self:
        world = plan_world(self.request)
        return replace(self, world=replace(world, threads=self.request.threads or world.threads))

    def prepare_on_host(self) -> Self:
        prepared: Self = pkgutil.resolve_name(self.host_function)(self) if self.host_function else self
        return prepared


Launch = Callable[[Work], None]  # a launcher of flyte_ddp.core.launch

"""The work order of the ranks. Needs no torch, so that a launcher can start ranks before it has imported torch."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from flyte_ddp.machine.resources import Request, World
from flyte_ddp.runs.checkpoint import Checkpoint, Identity
from flyte_ddp.settings import Settings

NOT_FOUND = World(num_ranks=0)


@dataclass(frozen=True)
class Restart:
    """A start of all ranks in place, after a failure."""

    reason: str  # the failure
    step: int  # of the checkpoint from which the ranks start; 0: from scratch
    number: int  # of the restarts without progress in between, from 1
    most: int  # how many of these are allowed
    time: float  # when the failure was noticed, in seconds since 1970

    def describe(self, seconds: float | None = None) -> str:
        """Return a sentence for people; ``seconds`` is how long the restart took, None if that is not known yet."""
        after = f"from step {self.step:,}" if self.step else "from scratch, as there is no checkpoint"
        took = "" if seconds is None else f", in {seconds:.1f} s"
        return f"{self.reason}; restarted {after}{took} ({self.number} of {self.most})"


@dataclass(frozen=True)
class Work:
    """What ranks are to do, and what all of them need to know. Launchers pass ``arguments`` on without a look."""

    function: str  # package.module:function of this library; each rank calls it with its Rank
    arguments: Any  # the function's own
    request: Request  # the ranks that the launcher is to find capacity for
    output_folder: Path  # where ranks write; on the launcher's host the run folder, or a training's unfinished/ in it
    identity: Identity  # what a checkpoint must belong to
    settings: Settings
    checkpoint: Checkpoint | None = None  # from which the run resumes
    restarts: tuple[Restart, ...] = ()  # in place, since the checkpoint; rank 0 records them
    files: Mapping[str, Path] = field(default_factory=dict)  # what hosts without the output folder must be sent
    own_code: tuple[str, ...] = ()  # package.module:callable of users, whose sources other hosts may lack
    on_host: str = ""  # package.module:function, which a host calls with the Work to get the Work for its ranks
    world: World = NOT_FOUND  # what the launcher has found capacity for
    sees_run_folder: bool = True  # whether output_folder is the launcher's; else results go to the launcher as messages

    def choose_world(self, find_world: Callable[[Request], World]) -> Self:
        world = find_world(self.request)
        return replace(self, world=replace(world, threads=self.request.threads or world.threads))

    def prepare_on_host(self) -> Self:
        prepared: Self = pkgutil.resolve_name(self.on_host)(self) if self.on_host else self
        return prepared


Launch = Callable[[Work], None]  # as the launchers of flyte_ddp.launch

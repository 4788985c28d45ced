"""The interface of a user-defined function to its rank, with or without a launcher."""

import atexit
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch
import torch.distributed as dist

from flyte_ddp.core.errors import UserError, print_to_stderr
from flyte_ddp.core.loops.checkpoints import Checkpoints
from flyte_ddp.core.loops.records import Records
from flyte_ddp.core.order.augmentation import draw_bits_of_one_sample
from flyte_ddp.core.parallel.distributed import translate_collective_errors
from flyte_ddp.core.parallel.training_pass import Generators
from flyte_ddp.core.runs.checkpoint import Identity, State
from flyte_ddp.core.settings import read_settings

LOADED = "flyte-ddp loaded"  # in the ranks' common store
_current: "CurrentRank | None" = None  # of this process


class CurrentRank:
    """The rank of this process, returned by :func:`current_rank`.

    The attributes are the rank's place, device and folder. The methods join, save, load, seed and record.
    """

    def __init__(
        self,
        place: tuple[int, int, int],
        device: torch.device,
        folder: Path,
        *,
        checkpoints: Checkpoints,
        records: Records | None,
        join: Callable[[], None],
        store: Any = None,
    ) -> None:
        self.rank, self.world_size, self.local_rank = place
        self.device = device  # the GPU of this rank, or the CPU
        self.folder = folder  # for the run's files; rank 0's files are in the run's folder at the end
        self._checkpoints, self._records, self._join, self._store = checkpoints, records, join, store
        self._loads = 0
        self._temporary: tempfile.TemporaryDirectory[str] | None = None  # the folder without a launcher
        self._has_saved = False

    def join(self) -> None:
        """Join torch's process group (gloo, or nccl on GPUs).

        All ranks must call this method, which waits for all ranks. Without a launcher, does nothing if a process group
        exists.

        Raises:
            UserError: A launcher has started this rank, and a process group exists.
        """
        if dist.is_initialized():
            if self._temporary is not None:  # without a launcher a function may be called twice in a process
                return
            raise UserError("join: a process group already exists; call either join() or init_process_group(), once")
        self._join()

    def load(self) -> State | None:
        """Load the last state that :meth:`save` has saved in an earlier attempt, onto the CPU.

        Without a saved state, returns None. All ranks must call this method equally often. Rank 0 waits for all ranks,
        up to the run's time limit. A single rank also gets a state that was saved in this attempt.

        Raises:
            UserError: This attempt has saved already, and the run has several ranks.
        """
        if self._has_saved and self.world_size > 1:
            raise UserError("load: this attempt has already saved; call load() before save(), and keep the state")
        state = self._checkpoints.load()
        if self._store is not None:
            self._loads += 1
            keys = [f"{LOADED} {self._loads} {other}" for other in range(1, self.world_size)]
            with translate_collective_errors():
                if self.rank:
                    self._store.set(keys[self.rank - 1], "")
                else:
                    self._store.wait(keys)  # rank 0's second save from here replaces the file that other ranks read
        return state

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save rank 0's state after a step. The next attempt resumes from this state.

        The states of other ranks are ignored. A thread writes a copy to disk, unless a later save comes first.

        Args:
            step: How many steps are done.
            state: Tensors, numbers, texts, and lists and dicts of them.

        Raises:
            UserError: The step goes back, or torch.load(weights_only=True) would reject the state.
        """
        if self.rank == 0:
            self._checkpoints.save(step, state)
        elif self.rank == 1 and not self._has_saved:
            print_to_stderr("save: only rank 0's state is saved; the states of other ranks are ignored")
        self._has_saved = True

    def due(self) -> bool:
        """Return whether rank 0 should save now, by FLYTE_DDP_CHECKPOINT_SECONDS or because of a stop.

        On other ranks returns False.
        """
        return self.rank == 0 and self._checkpoints.due()

    def seed_step(self, step: int, seed: int = 0) -> None:
        """Seed the global random generators of torch, NumPy and Python from ``seed``, this rank and ``step``.

        Call this method first in each step. Noise and dropout then differ from rank to rank, but are the same if the
        step is repeated after a resume. Processes of a DataLoader are not seeded.
        """
        bits = draw_bits_of_one_sample(seed, step, self.rank)
        Generators(torch.default_generator, random, np.random).seed_each(bits)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(bits)

    def record(self, step: int, **values: SupportsFloat) -> None:
        """Write rank 0's numbers of a step to metrics.jsonl, and show the numbers as progress.

        The report and wandb read metrics.jsonl. The numbers of other ranks are ignored.

        Args:
            step: How many steps are done. Several calls may have the same step.
            values: Numbers by name. Tensors and arrays of one element are accepted, too.

        Raises:
            UserError: The step goes back, a value is not a number, or a name is ``kind`` or ``time``.
        """
        if self._records is not None:
            self._records.record(step, values)


def current_rank() -> CurrentRank:
    """Return the rank of this process.

    Without a launcher, this is rank 0 of 1, or the rank of torchrun's environment variables. The rank's folder is then
    temporary, and is deleted when the process ends.
    """
    global _current  # noqa: PLW0603 (a property of the process, as its rank is)
    if _current is None:
        _current = make_rank_without_launcher()
    return _current


def set_current_rank(rank: CurrentRank | None) -> CurrentRank | None:
    """Make ``rank`` the rank that :func:`current_rank` returns in this process, and return the rank before."""
    global _current
    before, _current = _current, rank
    return before


def make_rank_without_launcher() -> CurrentRank:
    """Make the CurrentRank of a process that no launcher has started, with a temporary folder.

    The rank is 0 of 1, or the rank of torchrun's environment variables. When the process ends, waits for the last save,
    destroys a process group of gloo, and deletes the folder.
    """
    names = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    rank, world_size, local_rank = (int(os.environ.get(name, default)) for name, default in names)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    temporary = tempfile.TemporaryDirectory(prefix="flyte-ddp-")
    folder, settings = Path(temporary.name), read_settings()

    checkpoints = Checkpoints(folder, Identity({}), None, settings.checkpoint_seconds)
    atexit.register(checkpoints.close)  # runs before the folder's deletion, which was registered earlier

    def join() -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore() if "MASTER_PORT" not in os.environ else None  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        if backend == "gloo":  # gloo's threads may abort a process that ends; after a GPU's failure destroying may hang
            atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)

    made = CurrentRank(
        (rank, world_size, local_rank),
        device,
        folder,
        checkpoints=checkpoints,
        records=Records(folder, settings.progress) if rank == 0 else None,
        join=join,
    )
    made._temporary = temporary  # the object deletes the folder when the process ends
    return made

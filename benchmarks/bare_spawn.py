"""The baseline of ``startup``: ``mp.spawn`` of ranks that form a gloo group, and nothing else."""

import json
import sys
import tempfile
import time
from pathlib import Path


def join(rank: int, num_ranks: int, folder: str) -> None:
    """Forms the group; rank 0 notes when it stood."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    if rank == 0:
        Path(folder, "formed").write_text(repr(time.time()))
    distributed.destroy_process_group()


def main(num_ranks: int, output: str) -> None:
    """Writes the seconds to the group, counted from before and from after the parent's import of torch."""
    began = time.time()
    from torch.multiprocessing.spawn import spawn

    imported = time.time()
    with tempfile.TemporaryDirectory() as folder:
        spawn(join, (num_ranks, folder), num_ranks)  # type: ignore[no-untyped-call]
        formed = float(Path(folder, "formed").read_text())
    Path(output).write_text(json.dumps({"whole": formed - began, "without_import": formed - imported}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""Run one loader in a process of its own: ``python -m benchmarks.loader_run ORDER``."""

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from benchmarks import image_loaders, remote_loaders
from benchmarks.running import most_memory

SIDES = image_loaders.SIDES | remote_loaders.SIDES


def main() -> None:
    """Writes images a second in the last of some epochs, their number, and the most memory in use, in bytes."""
    warnings.filterwarnings("ignore")
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)  # the cores are for the two workers or threads that are compared
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-bench-") as folder:
        epoch = SIDES[order["side"]](order, Path(folder))
        for number in range(order["epochs"]):
            begin, count = time.perf_counter(), 0
            for images in epoch(number):
                count += len(images)
            seconds = time.perf_counter() - begin
        memory = most_memory()
    found = {"rate": count / seconds, "images": count, "memory": memory}
    Path(order["output"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

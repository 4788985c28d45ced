"""Models and loops for ``recovery``: the wide model, and a plain loop for ``torchrun`` that saves every 10 steps."""

import os
import sys
import time
from pathlib import Path
from typing import Any

WIDE = 63_000  # units, with which the weights take 200 MB, and SGD's momentum as much again
SAVE_STEPS = 10
BATCH = {"tutorial": 256, "wide": 16}  # of both ranks together


def wide(num_classes: int, input_shape: tuple[int, int, int]) -> Any:
    import math

    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), WIDE), nn.ReLU(), nn.Linear(WIDE, num_classes))


def tutorial() -> Any:
    from torch import nn

    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


def main(net: str, folder: Path, steps: int) -> None:
    """Train. Rank 0 writes a line for each step, and each rank writes a file with the process id."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    (folder / f"rank {rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(tutorial() if net == "tutorial" else wide(10, (1, 28, 28)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    done, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    images, labels = torch.randn(BATCH[net] // 2, 1, 28, 28), torch.randint(10, (BATCH[net] // 2,))
    with (folder / "steps").open("a") as file:
        while done < steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            done += 1
            if rank == 0:
                print(done, time.time(), file=file, flush=True)
                if done % SAVE_STEPS == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                    torch.save(state, checkpoint.with_suffix(".new"))
                    checkpoint.with_suffix(".new").replace(checkpoint)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

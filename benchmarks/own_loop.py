"""Functions for ``launchers`` as users write them, and a script that runs one: by ``torchrun``, or by ``run_ranks``."""

import os
import sys
import time
from pathlib import Path

RECORD_STEPS = 50  # from one record to the next


def join_and_add() -> float:
    """Joins by torchrun's variables and adds a number up; when that was done."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.ones(1))
    ended = time.time()
    distributed.destroy_process_group()
    return ended


def step_seconds(blocks: int, steps: int) -> dict[str, list[float]]:
    """Trains in blocks of steps, in turn plain ones and ones that call due() and record(); seconds of a step in each.

    Each pair of blocks is followed by the calls alone, of as many steps.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from flyte_ddp import current_rank

    rank = current_rank()
    rank.join()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 784), torch.randint(10, (64,))
    done = 0

    def train_step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss)  # as a loop that looks at its loss

    def block(*, trains: bool, calls: bool) -> float:
        nonlocal done
        loss, begin = 0.0, time.perf_counter()
        for _ in range(steps):
            done += 1
            if trains:
                loss = train_step()
            if calls:
                rank.due()
                if done % RECORD_STEPS == 0:
                    rank.record(done, loss=loss)
        return (time.perf_counter() - begin) / steps

    block(trains=True, calls=True)  # not counted
    found: dict[str, list[float]] = {"plain": [], "with calls": [], "calls alone": []}
    for number in range(blocks):
        sides = ["plain", "with calls"]
        for side in sides if number % 2 else reversed(sides):
            found[side].append(block(trains=True, calls=side != "plain"))
        found["calls alone"].append(block(trains=False, calls=True))
    return found


def main(output: str) -> None:
    """Writes when the function was done; under torchrun on rank 0, else with ranks of this library."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ended = join_and_add()
    else:
        from flyte_ddp import run_ranks

        ended = run_ranks(join_and_add, num_ranks=2)
    if os.environ.get("RANK", "0") == "0":
        Path(output).write_text(repr(ended))


if __name__ == "__main__":
    main(sys.argv[1])

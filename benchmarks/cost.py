"""What it costs an epoch to be able to go on after a fault: checkpoints, and wandb kept apart.

The tutorial's network on FashionMNIST, with and without a checkpoint after each epoch; and with checkpoints and a wandb
server that accepts connections and never answers. Seconds of the last epoch, its evaluation and its checkpoint's copy
included.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import fashion_mnist, run_library

EPOCHS = 3


def measure(options: Options) -> Result:
    """Runs the three sides in turn."""
    hp = {
        "dataset": "fashion_mnist",
        "model": "tutorial",
        "epochs": EPOCHS,
        "batch_size": 128,
        "test_batch_size": 1000,
        "num_ranks": 2,
        "backend": "gloo",
        "max_steps": 5 if options.quick else 0,
    }
    data = fashion_mnist(options.folder)
    result = Result(settings={key: str(value) for key, value in hp.items()})
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        server = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "WANDB_API_KEY": "0" * 40}
        kinds: dict[str, tuple[str, dict[str, str]]] = {
            "no checkpoints": ("disabled", {"FLYTE_DDP_CHECKPOINT_SECONDS": "0"}),
            "checkpoints": ("disabled", {}),
            "checkpoints and a silent wandb server": ("online", {**server, "FLYTE_DDP_WANDB_TIMEOUT": "1"}),
        }

        def side(name: str) -> Callable[[int], None]:
            wandb, variables = kinds[name]

            def run(repeat: int) -> None:
                folder = options.folder / f"{len(name)}-{repeat}"
                run = run_library(hp, data, folder, wandb=wandb, variables=variables)
                result.add(f"{name}: last epoch", run.epoch_seconds()[-1], "s")

            return run

        interleaved({name: side(name) for name in kinds}, options.number(7))
    without = "no checkpoints: last epoch"
    for name, bound in (("checkpoints", 0.03), ("checkpoints and a silent wandb server", 0.05)):
        ratio = result.ratio(f"{name} / no checkpoints", f"{name}: last epoch", without)
        result.targets.append(Target(f"{name}: added to an epoch", ratio - 1, "%", at_most=bound))
    return result

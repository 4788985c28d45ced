"""The fast preset from the shell prompt: ``pyflyte run workflows/training.py training_wf --hp config/fast.json``.

The whole command is timed: start-up, preparing FashionMNIST from the system's copy, training, evaluation, report, wandb
(offline, as without a key). Each seed starts with an empty HOME and an empty folder of runs, so nothing is cached. With
``--tutorial`` the tutorial's hyperparameters are measured too, on FashionMNIST and for 20 epochs: minutes a seed.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import ROOT, environment, run_command

PYFLYTE = str(Path(sys.executable).with_name("pyflyte"))


def measure(options: Options) -> Result:
    """Runs the preset with seeds 0, 1, ..."""
    preset = json.loads((ROOT / "config" / "fast.json").read_text())
    tutorial = json.loads((ROOT / "config" / "tutorial.json").read_text()) | {"dataset": "fashion_mnist", "epochs": 20}
    if options.quick:
        preset["max_steps"] = tutorial["max_steps"] = 20
    result = Result(settings={"preset": json.dumps(preset)})

    def run(side: str, hp: dict[str, Any], repeat: int) -> None:
        folder = options.folder / f"{side}-{repeat}"
        seconds, accuracy = train(hp | {"seed": repeat}, folder)
        result.add(f"{side}: from the prompt and back", seconds, "s")
        result.add(f"{side}: test accuracy", accuracy, "%")

    sides = {"fast": lambda repeat: run("fast", preset, repeat)}
    if options.tutorial:
        sides["tutorial"] = lambda repeat: run("tutorial", tutorial, repeat)
    interleaved(options, result, sides, options.number(5))
    seconds, accuracies = (result.values(f"fast: {what}") for what in ("from the prompt and back", "test accuracy"))
    result.targets = [
        Target("longest time of all seeds", max(seconds), "s", at_most=20.0),
        Target("mean time", sum(seconds) / len(seconds), "s", at_most=20.0),
        Target("lowest test accuracy of all seeds", min(accuracies), "%", at_least=0.9),
        Target("mean test accuracy", sum(accuracies) / len(accuracies), "%", at_least=0.9),
    ]
    return result


def train(hp: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Seconds of one ``pyflyte run`` with nothing cached, and the test accuracy that it reached."""
    shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
    folder.mkdir()
    (folder / "hp.json").write_text(json.dumps(hp))
    variables = environment({"FLYTE_DDP_RUNS": str(folder / "runs")}, folder / "home")
    command = [PYFLYTE, "run", "workflows/training.py", "training_wf", "--hp", str(folder / "hp.json")]
    begin = time.perf_counter()
    run_command(command, variables)
    seconds = time.perf_counter() - begin
    (sidecar,) = (folder / "runs").glob("*/model.json")
    return seconds, json.loads(sidecar.read_text())["metrics"]["test_accuracy"]

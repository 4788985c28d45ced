"""The fast preset from the shell prompt: ``pyflyte run workflows/training.py training_wf --hp config/fast.json``.

The time of the whole command is measured: start-up, preparing FashionMNIST from the system's copy, training,
evaluation, report, and wandb (offline, as without a key). Each seed starts with an empty HOME and an empty folder of
runs, so nothing is cached.
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
    preset = json.loads((ROOT / "config" / "fast.json").read_text())
    if options.quick:
        preset["max_steps"] = 20
    result = Result(settings={"preset": json.dumps(preset)})

    def run(repeat: int) -> None:
        seconds, accuracy = train(preset | {"seed": repeat}, options.folder / f"fast-{repeat}")
        result.add("fast: from the prompt and back", seconds, "s")
        result.add("fast: test accuracy", accuracy, "%")

    interleaved(options, result, {"fast": run}, options.number(5))
    seconds, accuracies = (result.values(f"fast: {what}") for what in ("from the prompt and back", "test accuracy"))
    result.targets = [
        Target("longest time of all seeds", max(seconds), "s", at_most=20.0),
        Target("mean time", sum(seconds) / len(seconds), "s", at_most=20.0),
        Target("lowest test accuracy of all seeds", min(accuracies), "%", at_least=0.9),
        Target("mean test accuracy", sum(accuracies) / len(accuracies), "%", at_least=0.9),
    ]
    return result


def train(hp: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Return the seconds of a ``pyflyte run`` with nothing cached, and the test accuracy."""
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

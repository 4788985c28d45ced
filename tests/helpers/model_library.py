"""Train the recipe of a library as users do, and print the findings as one JSON object.

``python tests/helpers/model_library.py examples/libraries/model_timm.py FOLDER`` trains on one rank, on two ranks, and
again after a kill. It also writes predictions and an ONNX.
"""

import ast
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import wait_until
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from flyte_ddp import Hyperparameters, Result, Settings, fetch, run_ranks, run_training
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.export.exporting import export_onnx_if_equal
from flyte_ddp.export.graphs import NotExportedError
from flyte_ddp.predict.predict import write_prediction_table
from flyte_ddp.predict.prediction_batches import SavedModel

QUIET = Settings(progress="off", wandb_mode="disabled", checkpoint_seconds=0.01, loaders=1)
KILLED_AFTER = 5  # steps, of 8


def kill_after_steps(folder: Path, function: Callable[[], object]) -> None:
    """Call a function that trains on one rank in a fork, and kill the fork in the sixth step."""
    child = os.fork()
    if child == 0:
        steps: list[None] = []

        def kill(*_: object) -> None:
            if len(steps) == KILLED_AFTER:
                wait_until(lambda: [*folder.rglob("checkpoints/*.ckpt")])
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(lambda *_: steps.append(None))
        register_module_forward_pre_hook(kill)  # between steps, because no checkpoint is taken during one
        function()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run was not killed"


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel())


def resumed_step(folder: Path) -> int:
    """Return the step after which the last attempt resumed."""
    starts = [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "start"]
    return int(starts[-1]["resumed_after_step"])


def check_training(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train by hyperparameters in fp64, and return the findings."""
    hp = {"validation_fraction": 0.0, "log_interval": 1, **options, "precision": "fp64", "backend": "gloo"}
    data = fetch(hp["dataset"], hp.get("data_source", ""), folder / "data", progress="off")

    def train(name: str, ranks: int) -> Result:
        return run_training(Hyperparameters(**hp, num_ranks=ranks), data, folder / name, QUIET, threads=1)

    kill_after_steps(folder / "killed", lambda: train("killed", 1))
    resumed, one, two = train("killed", 1), train("one", 1), train("two", 2)
    weights = [torch.load(run.model, weights_only=True) for run in (one, two)]
    write_prediction_table(one.model, one.sidecar, images=None, dataset=data, output=folder / "predictions.csv")
    reason = ""
    try:
        compared = export_onnx_if_equal(SavedModel(one.model, one.sidecar, QUIET), open_prepared(data), folder)
        exported = compared.passed
    except NotExportedError as error:
        exported, reason = False, str(error)
    end = [record for record in read_records(two.metrics) if record["kind"] == "end"]
    return {
        "difference": largest_difference(*weights),
        "resumed": resumed_step(resumed.run_folder),
        "same_bits": resumed.model.read_bytes() == one.model.read_bytes(),
        "measures": one.measures,
        "notes": end[0]["notes"],
        "predictions": (folder / "predictions.csv").read_text().splitlines()[:2],
        "exported": exported,
        "reason": reason,
    }


def check_loop(function: Callable[[], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run a user-defined loop, and return the findings."""
    os.environ["FLYTE_DDP_CHECKPOINT_SECONDS"] = "0.01"

    def train(name: str, ranks: int) -> dict[str, Any]:
        found: dict[str, Any] = run_ranks(function, num_ranks=ranks, folder=folder / name)
        return found

    kill_after_steps(folder / "killed", lambda: train("killed", 1))
    resumed, one, two = train("killed", 1), train("one", 1), train("two", 2)
    return {
        "difference": largest_difference(one, two),
        "resumed": resumed_step(folder / "killed"),
        "same_bits": all(torch.equal(one[name], resumed[name]) for name in one),
        "notes": [],
        "exported": False,
        "reason": "a loop of one's own",
    }


def main(example: str, folder: str) -> None:
    """Check a recipe, and print the findings."""
    file = Path(example).resolve()
    root = file.parents[2]
    os.chdir(root)
    sys.path.insert(0, str(root))
    Path(folder).mkdir(parents=True, exist_ok=True)
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    if found := re.search(r"--hp '(\{.*\})'", text, re.DOTALL):
        result = check_training(json.loads(found[1]), Path(folder))
    else:
        result = check_loop(importlib.import_module(f"examples.libraries.{file.stem}").train, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

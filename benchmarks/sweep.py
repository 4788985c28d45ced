"""Sweep: steps until the best of 27 trials is found, by successive halving, Optuna's pruner, and full training.

The trials are the first 27 of Sobol's points of a space. They are trained on FashionMNIST and on the table of 100,000
rows, stopped at each of four rungs, and trained to the end. This is done with a constant learning rate, and with the
schedule in the space.

Searches of four rungs and of the last three are replayed on these measurements. One search is ours. The other is by
Optuna's SuccessiveHalvingPruner. The pruner decides for each trial by the trials before. Therefore its steps depend
on the order of the trials, and 200 orders are drawn. A search has found the best if the validation loss of its winner
is within 1 % of the lowest of all 27. Nothing depends on the machine's speed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import Options, Result, Target
from benchmarks.running import call, fashion_mnist
from benchmarks.table import OURS
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import fetch
from flyte_ddp.run import run_training_fraction
from flyte_ddp.sweep.halving import TrialResult, pick_winner, rank_trials, read_run_progress
from flyte_ddp.sweep.space import ETA, Sweep, draw_trials

TRIALS, RUNGS, ORDERS, NEAR = 27, 4, 200, 1.01
BASES: dict[str, dict[str, Any]] = {
    "pictures": {"dataset": "fashion_mnist", "model": "small_cnn", "epochs": 3, "batch_size": 256},
    "table": {**OURS, "validation_fraction": 0.1, "epochs": 6, "batch_size": 512},
}
SPACES: dict[str, dict[str, Any]] = {
    "pictures": {
        "learning_rate": {"from": 0.003, "to": 0.3, "log": True},
        "momentum": {"from": 0.5, "to": 0.95},
        "weight_decay": {"from": 1e-5, "to": 1e-2, "log": True},
    },
    "table": {
        "learning_rate": {"from": 1e-4, "to": 0.1, "log": True},
        "weight_decay": {"from": 1e-6, "to": 1e-2, "log": True},
        "options.model.width": {"from": 16, "to": 128, "log": True, "step": 1},
    },
}
SCHEDULES = {"": {}, ", schedules": {"schedule": ["constant", "cosine", "one_cycle"]}}


def measure(options: Options) -> Result:
    trials, orders = (4, 10) if options.quick else (TRIALS, ORDERS)
    result = Result(settings={"trials": trials, "orders": orders})
    for name, base in BASES.items():
        short = {"max_steps": 54} if options.quick else {}
        hp = Hyperparameters(**(base | {"schedule": "constant", "num_ranks": 1} | short))
        data = fashion_mnist(options.folder) if name == "pictures" else fetch(hp.dataset, "", options.folder / name)
        for varied, schedules in SCHEDULES.items():
            sweep = Sweep(space=json.dumps(SPACES[name] | schedules), trials=trials, rungs=RUNGS)
            found = list[list[TrialResult]]()
            for number, trial in enumerate(draw_trials(sweep, hp, {})):
                folder = options.folder / f"{name}{len(varied)}-{number}"
                order = {"hp": trial.to_dict(), "data": str(data), "folder": str(folder)}
                measured = call("benchmarks.sweep:measure_rungs", order, sweep.list_divisors())
                found.append(
                    [TrialResult(number, trial, "", steps_divisor, **each) for steps_divisor, each in measured]
                )
                for rung in found[-1]:
                    result.add(f"{name}{varied}: loss at 1/{rung.steps_divisor}", rung.loss or float("nan"), "")
            for rungs in (RUNGS, RUNGS - 1):
                report(result, f"{name}{varied}, {rungs} rungs", [each[-rungs:] for each in found], orders)
            options.keep(result)
    return result


def measure_rungs(order: dict[str, Any], parts: list[int]) -> list[tuple[int, dict[str, Any]]]:
    """Train a trial from rung to rung, and return the measurement at each rung."""
    hp, folder, found = Hyperparameters(**order["hp"]), Path(order["folder"]), []
    for steps_divisor in parts:
        run_training_fraction(
            hp, Path(order["data"]), folder, steps_divisor, Settings(progress="off", wandb_mode="disabled")
        )
        found.append((steps_divisor, vars(read_run_progress(folder, hp))))
    return found


def report(result: Result, name: str, found: list[list[TrialResult]], orders: int) -> None:
    full, best = sum(rungs[-1].steps for rungs in found), min(rungs[-1].loss or np.inf for rungs in found)
    winner, spent = halve(found)
    result.targets += [
        Target(f"{name}: all steps in times those of the sweep", full / spent, "x", at_least=3.0),
        Target(f"{name}: loss of the sweep's winner, of the best of all trials", winner / best, "x", at_most=NEAR),
    ]
    random, ours, theirs = np.random.default_rng(0), list[float](), list[float]()
    for _ in range(orders):
        pruned, steps = prune([found[place] for place in random.permutation(len(found))])
        result.add(f"{name}: Optuna's steps, of all", steps / full, "x")
        result.add(f"{name}: loss of Optuna's winner, of the best", pruned / best, "x")
        ours.append(spent / full if winner <= NEAR * best else 1.0)
        theirs.append(steps / full if pruned <= NEAR * best else 1.0)
    result.targets.append(
        Target(
            f"{name}: steps until the best is found, all if it is not, of Optuna's",
            float(np.mean(ours) / np.mean(theirs)),
            "x",
            at_most=1.0 + float(np.std(theirs) / np.mean(theirs)),
        )
    )


def halve(found: list[list[TrialResult]]) -> tuple[float, int]:
    """Return the loss of the winner of successive halving, and the steps of all."""
    left, spent, done = [*range(len(found))], 0, list[TrialResult]()
    for place in range(len(found[0])):
        rungs = [found[trial][place] for trial in left]
        spent += sum(each.step - (found[each.trial][place - 1].step if place else 0) for each in rungs)
        done += rungs
        left = [each.trial for each in rank_trials(rungs)[: max(1, len(rungs) // ETA)]]
    loss = pick_winner(done).loss
    assert loss is not None
    return loss, spent


def prune(found: list[list[TrialResult]]) -> tuple[float, int]:
    """Return the loss of the best trial that Optuna's pruner completed, and the steps of all trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3))
    first = found[0][0].steps_divisor
    best, spent = float("inf"), 0
    for rungs in found:
        trial = study.ask()
        for rung in rungs:
            last, loss = rung, np.inf if rung.loss is None else rung.loss
            trial.report(loss, first // rung.steps_divisor)
            if rung is not rungs[-1] and trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            best = min(best, loss)
            study.tell(trial, loss)
        spent += last.step
    return best, spent

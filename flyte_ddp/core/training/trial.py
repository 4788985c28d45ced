"""Try user code and single samples before the first step, and find samples that made a loss not finite."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.split import Split
from flyte_ddp.core.objectives.objective import Objective, convert_float_tensors
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.parallel.distributed import hide_process_group, rank
from flyte_ddp.core.samples.leaves import Leaves, name_leaves
from flyte_ddp.core.training.evaluate import compute_batch_columns, compute_measures
from flyte_ddp.core.training.training_state import TrainingState

TRIED = 8  # test samples
# Errors of a measure that a few samples may not define.
UNDEFINED = (ArithmeticError, IndexError, RuntimeError, ValueError)


def try_evaluation(state: TrainingState) -> str:
    """Try a user-defined model or objective on up to 8 test samples, and on samples known to be non-finite.

    Runs a copy of the model, and restores the global random generators (CPU). If model and objective are built in, does
    nothing.

    Returns:
        A warning if the model cannot be copied or a language model's targets are shifted wrongly, else "".

    Raises:
        UserError: The model or the objective is unfit, or a loss and its sample are not finite. If a user-defined
            measure raises the error, only rank 0 raises UserError.
    """
    plan, test, data = state.plan, state.test, state.data
    if not plan.has_user_model_or_objective:
        return ""
    try:
        model = copy.deepcopy(state.kept_model())
    except Exception as error:  # a model with a lock or a file in it may be trained, too
        skipped = "The trial evaluation before training was skipped, because"
        return f"{skipped} model {plan.model.name!r} cannot be copied: {error!r}"
    model.eval()
    with keep_random_state(), torch.no_grad():
        first = test.order.samples_at(slice(0, min(TRIED, len(test))))
        columns = try_samples(state, model, "test", first)
        has_user_measures = not type(state.objective).measure.__module__.startswith("flyte_ddp.")
        if rank() == 0 and has_user_measures:
            with hide_process_group(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    compute_measures(state.objective, columns)
                except UNDEFINED as error:
                    if isinstance(error, UserError):
                        raise
        for split_name, sample in data.list_not_finite(state.validation.order):
            epoch = 0 if split_name == "training" else None
            try_samples(state, model, split_name, np.array([sample]), epoch)
        inputs, targets, _ = test.load_batch(first)
        return state.objective.describe_wrong_targets(inputs, targets)


def try_samples(
    state: TrainingState, model: nn.Module, split_name: str, samples: Indices, epoch: int | None = None
) -> dict[str, Tensor]:
    """Run ``model`` on samples of a split, check the losses, and return the objective's columns (fp64, on the CPU).

    Args:
        model: The model, in the mode and with the gradients that the caller has set.
        split_name: "training", "validation" or "test".
        epoch: Epoch of training for which samples are augmented. None means without augmentation.

    Raises:
        UserError: The model or objective is unfit, a loss and its sample are not finite, or a loss compares each output
            with each target.
    """
    inputs, targets, _ = getattr(state, split_name).load_batch(samples, epoch)
    outputs = state.predict(inputs, targets, len(samples), model)
    found = compute_batch_columns(state.objective, outputs, targets, len(samples))
    columns = {name: column.double().cpu() for name, column in found.items()}
    if not bool(columns["loss"].isfinite().all()):
        check_samples_finite(state, inputs, targets, samples, split_name)
    if state.plan.objective.is_user_defined:
        check_losses_not_broadcast(state.objective, outputs, targets)
    return columns


def check_first_sample_of_non_finite_loss(state: TrainingState, split_name: str, losses: Tensor) -> None:
    """Load the first sample with a non-finite loss again, and raise UserError if its input is not finite.

    If the objective is user-defined, also raises UserError if the sample's target is not finite. ``losses`` [N] are of
    all samples, in the split's order. ``split_name`` is "training", "validation" or "test".
    """
    split: Split = getattr(state, split_name)
    places = (~losses.isfinite()).nonzero()
    if len(places):
        samples = split.order.samples_at(slice(int(places[0, 0]), int(places[0, 0]) + 1))
        batch = split.load_batch(samples)
        check_samples_finite(state, batch.inputs, batch.targets, samples, split_name)


def check_losses_not_broadcast(objective: Objective, outputs: Any, targets: Leaves) -> None:
    """Raise UserError if the loss broadcasts outputs [n, 1] against targets [n], or [n] against [n, 1].

    Such a loss compares each output with each target. Needs at least three samples to find out. Calls the objective's
    losses up to four times.
    """
    if objective.compares_samples or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    samples = len(targets)
    if samples < 3 or {tuple(outputs.shape), tuple(targets.shape)} != {(samples,), (samples, 1)}:
        return
    outputs, targets = (convert_float_tensors(each, torch.float64) for each in (outputs, targets))
    compute: Callable[[Tensor, Tensor], Any] = objective.losses
    try:
        compute(outputs[:2], targets[:3])
    except Exception:  # so the loss needs one target for each output, and makes no table
        return
    # The mean of a table is the same for outputs in another order, and not for other targets.
    pairs = (outputs, targets), (outputs.flip(0), targets), (outputs, targets[:1].expand_as(targets))
    total, of_reversed, of_other_targets = (sum(each.sum() for each in tree_leaves(compute(*pair))) for pair in pairs)
    if torch.allclose(of_reversed, total, rtol=1e-6) and not torch.allclose(of_other_targets, total, rtol=1e-6):
        shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
        raise UserError(
            f"the objective's loss compares each output with each target, because {shapes} are broadcast; use "
            "outputs[:, 0], or outputs.reshape(targets.shape)"
        )


def check_samples_finite(state: TrainingState, inputs: Leaves, targets: Leaves, samples: Indices, split: str) -> None:
    """Raise UserError if an input is not finite. The error names the sample.

    If the objective is user-defined, also raises UserError if a target is not finite. Leaves without a row for each
    sample are not checked.

    Args:
        samples: Numbers of the samples, in the order of the rows.
        split: "training", "validation" or "test".
    """
    named = [("input", name, leaf) for name, leaf in name_leaves(inputs).items()]
    if state.plan.objective.is_user_defined:  # for built-in objectives, NaN is an unknown target
        named += [("target", name, leaf) for name, leaf in name_leaves(targets).items()]
    for kind, name, leaf in named:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[:1] == (len(samples),):
            places = (~leaf.isfinite()).nonzero()
            if len(places):
                row, *place = places[0].tolist()
                at = f" (column {place[0]})" if len(place) == 1 else f" (at {place})" if place else ""
                raise UserError(
                    f"the loss is not finite, because the {kind} {f'{name!r} ' if name else ''}of "
                    f"{state.data.name_sample(split, samples[row])}{at} is not finite; correct missing values in "
                    "the data set"
                )


def check_loss_uses_model_parameters_only(model: nn.Module, loss: Tensor) -> None:
    """Raise UserError if the loss depends on a parameter outside the model, such as an objective's parameter.

    Call this function before the backward pass, while ``loss`` has a graph.
    """
    known, waiting, seen = {*model.parameters()}, [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter) and parameter not in known:
            raise UserError(
                f"the loss depends on a parameter {list(parameter.shape)} outside the model, which would never be "
                "trained; make the parameter a part of the model, whose outputs the objective gets, or call "
                "requires_grad_(False)"
            )

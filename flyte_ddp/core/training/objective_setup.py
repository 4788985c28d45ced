"""Make a training's objective for its data, and check the targets before the first step."""

import numpy as np

from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.loading.split import TargetSpec
from flyte_ddp.core.loading.training_data import TrainingData
from flyte_ddp.core.objectives.objective import Facts, Objective
from flyte_ddp.core.objectives.requirements import check_loss_weights
from flyte_ddp.core.order.sampling import Order
from flyte_ddp.core.training.plan import TrainingPlan


def build_objective(plan: TrainingPlan, data: TrainingData, training: Order, targets: TargetSpec | None) -> Objective:
    """Make the plan's objective for these data, check all stored targets, and return the objective.

    Calls the objective's ``check_targets`` with all stored targets or, if none are stored, with a single target of
    zeros. For a user-defined objective, also calls ``weights`` with each batch of stored targets (long texts are cut).

    Args:
        plan: The plan of the training.
        data: The data, for the classes and the stored targets.
        training: Order of the training samples, whose classes are counted for balanced class weights.
        targets: Shape and dtype that all targets share. None if a target is a dict or tuple of arrays, or if the data
            have no targets.

    Raises:
        UserError: The objective does not accept the targets or the number of classes. The plan's ``select_by`` is no
            measure of the objective. The objective compares samples, and the plan has mixup or accumulation.
    """
    source, loop, select_by = plan.objective, plan.loop, plan.selection.select_by
    if targets is None and not source.is_user_defined:
        raise UserError(
            f"objective={source.name!r}: requires targets in a single array, and dataset={data.name!r} has several "
            "arrays or none; use a user-defined objective"
        )
    # A user-defined objective needs no classes if a sample's target is not a single number.
    of_numbers = targets is None or targets.dtype.kind == "f" or (source.is_user_defined and bool(targets.shape))
    classes = data.name_classes(of_numbers=of_numbers)
    varies = targets is None or targets.varies
    if targets is not None and targets.varies and not source.accepts_lengths:
        raise UserError(
            f"objective={source.name!r}: the targets of dataset={data.name!r} have different lengths; use language, or "
            "a user-defined objective"
        )
    facts = Facts(
        classes,
        # Targets without a known shape must not have the shape of a class number, ().
        target_shape=(1,) if targets is None or varies else targets.shape,
        class_counts=data.count_classes(training, len(classes)) if source.needs_class_counts else (),
        no_nan_targets=not varies and data.has_no_nan_targets(),  # shorter targets are padded with NaN
    )
    objective = source.make(facts)
    if objective.compares_samples and (reason := describe_comparison_obstacle(loop.accumulation_steps, loop.mixup)):
        raise UserError(reason)
    if not data.check_stored_targets(objective.check_targets) and targets is not None:
        objective.check_targets(np.zeros((1, *targets.shape), targets.dtype))
    if source.is_user_defined:  # tries the user's weights(); those of built-in objectives are tested
        for batch in data.iterate_stored_targets(loop.test_batch_size):
            check_loss_weights(objective.weights(batch), len(batch))
    if select_by not in ("loss", *objective.measures):
        raise unknown_name_error("select_by", select_by, ["loss", *objective.measures])
    return objective


def describe_comparison_obstacle(accumulation_steps: int, mixup: float) -> str:
    """Return why an objective cannot compare a batch's samples with these hyperparameters, or "" if it can."""
    if accumulation_steps > 1:
        return (
            f"accumulation_steps={accumulation_steps}: the objective compares the samples of a batch, and a "
            "micro-batch would have fewer samples; set accumulation_steps=1, and use more ranks or a smaller "
            "batch_size"
        )
    if mixup:
        return f"mixup={mixup:g}: the objective compares samples, and a mixture is two samples at once; set mixup=0"
    return ""

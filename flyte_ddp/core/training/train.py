"""The main line of training on one rank, equal under all launchers."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import lru_cache, partial, reduce
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.hardware import choose_hardware
from flyte_ddp.core.launch.supervise.rank import Rank
from flyte_ddp.core.loading.split import Split
from flyte_ddp.core.machine.resources import detect_bf16_support
from flyte_ddp.core.models.inputs import translate_input_errors
from flyte_ddp.core.objectives.objective import convert_float_tensors
from flyte_ddp.core.order import sampling
from flyte_ddp.core.parallel.batch_norm import compute_mean_running_statistics, preserve_running_statistics
from flyte_ddp.core.parallel.distributed import explain_out_of_memory, gather_objects, world_size
from flyte_ddp.core.samples.leaves import Leaves, call_with_leaves
from flyte_ddp.core.training import trial
from flyte_ddp.core.training.checkpointing import Checkpointer, load_training_state
from flyte_ddp.core.training.diagnosis import make_non_finite_loss_error
from flyte_ddp.core.training.evaluate import Evaluation, compute_split_columns, measure_split
from flyte_ddp.core.training.optimisation import do_first_user_optimizer_step
from flyte_ddp.core.training.optimizer_state import check_optimizer_state
from flyte_ddp.core.training.outputs import write_outputs, write_rung_result, write_start_record
from flyte_ddp.core.training.parts import (
    RankSlice,
    list_rank_slices,
    load_slice,
    load_slices_and_sum_weights,
    split_batch_for_rank,
)
from flyte_ddp.core.training.plan import INITIAL_WEIGHTS, TrainingJob
from flyte_ddp.core.training.recording import Recorder, StepSums
from flyte_ddp.core.training.training_state import TrainingState

OPTIMIZER_SEEDS = 2**34  # added to the seed for a user-defined optimiser's random numbers


def train(rank: Rank) -> None:
    """Train and evaluate on this rank, and write all files into the output folder. Collective.

    This is the function of a training's Work. Joins the process group, and resumes from the work's checkpoint, if any.
    Seeds the global random generators. If the job is a part of a run, stops after the part's last step. In place of the
    files, a part writes a checkpoint and rung.json.

    Raises:
        UserError: The user can fix the cause, for example a non-finite loss, bad samples or a full disk.
        CollectiveError: Another rank has failed.
    """
    rank.join()
    work, job = rank.work, cast("TrainingJob", rank.work.arguments)
    plan, loop, settings, data = job.plan, job.plan.loop, work.settings, job.plan.data.open(job.data_folder)
    hardware = choose_hardware(
        plan.hardware, work.world, min(gather_objects(detect_bf16_support(work.world.device_type)))
    )
    state = TrainingState(plan, hardware, data, work.files.get(INITIAL_WEIGHTS), settings)
    with closing(state.splits), closing(Recorder(work.output_folder, state)) as recorder:
        state.set_last_step_to_fraction(job.steps_divisor)
        write_start_record(state, recorder, resumed_from=work.checkpoint)
        if work.checkpoint is not None:
            load_training_state(state, recorder, work.checkpoint)
        else:
            recorder.add_warning(trial.try_evaluation(state))  # the first call of a user-defined model
        fix = (
            f"raise accumulation_steps (now {loop.accumulation_steps}), which changes no result without BatchNorm, or "
            f"lower batch_size ({loop.batch_size} on {world_size()} rank(s)) or test_batch_size "
            f"({loop.test_batch_size})"
        )
        with Checkpointer(work, state, recorder, rank.announce_writing) as checkpoints, explain_out_of_memory(fix):
            rank.offer_saving(checkpoints.save_last)
            if rank.link is not None:
                rank.link.offer_standing_in(checkpoints.save_for_rank_0)
            if recorder.writes:
                rank.record_restarts(recorder.write)
            while state.epoch < state.last_epoch and not state.selection.stopped:
                for batch in state.clock.iterate_and_time_steps(iterate_remaining_batches(state)):
                    train_step(state, recorder, batch)
                state.loss_watch.check_pending_loss()  # the last step's loss, before the weights are evaluated or saved
                is_last = state.step == state.total_steps
                if state.step < (state.epoch + 1) * state.steps_per_epoch and not is_last:
                    break  # a part ends in the middle of an epoch
                evaluate = is_last or (state.epoch + 1) % loop.eval_interval == 0
                evaluations = evaluate_splits(state, state.validation, state.test) if evaluate else ()
                state.splits.check_number_of_bad_samples(loop.bad_samples)
                finish_epoch(state, recorder, evaluations)
                checkpoints.save_epoch()
            if state.epoch < state.epochs and not state.selection.stopped:
                checkpoints.save_last()  # before an evaluation that the run does not have, which may change buffers
                write_rung_result(work.output_folder, state, *evaluate_splits(state, state.validation))
                return
        write_outputs(work, state, recorder)  # the caller leaves the process group


def iterate_remaining_batches(state: TrainingState) -> Iterator[sampling.Indices]:
    """Yield the samples of each global batch from ``state.step`` to the end of the epoch, or to ``state.last_step``.

    Meanwhile threads or processes load this rank's samples of later batches.
    """
    epoch, training, batch_size = state.epoch, state.training, state.plan.loop.batch_size
    done = state.step - epoch * state.steps_per_epoch
    batches = training.order.batches(epoch, batch_size, first=done)
    wanted = itertools.islice(batches, max(0, state.last_step - state.step))

    def list_rank_samples(item: tuple[int, sampling.Indices]) -> list[sampling.Indices]:
        step, batch = item
        return [samples for part in list_rank_slices(state, batch, step) for samples in part.list_loads()]

    numbered = enumerate(wanted, state.step)
    for _, batch in training.iterate_with_prefetch(numbered, list_rank_samples, epoch, batch_size):
        yield batch


def train_step(state: TrainingState, recorder: Recorder, batch: sampling.Indices) -> None:
    """Do one optimiser step on a global batch [B], and record the step. Collective.

    Changes weights, optimiser state and buffers, and increases ``state.step``. May write a record to metrics.jsonl.
    Checkpoints wait while the weights are updated.

    Raises:
        UserError: The loss of this step, or on a GPU of the step before, is not finite.
    """
    sums, step = compute_gradients(state, batch), state.step
    # Before the weights change, so that the last checkpoint is good, and the error can name the first bad value.
    state.loss_watch.check_loss(
        state.epoch, state.step + 1, sums.loss, lambda: rerun_forward_passes(state, batch, step)
    )
    with state.exclude_snapshots():  # a checkpoint sees all of a step or nothing of it
        with state.clock("optimizer"):
            norm = apply_gradients(state)
        rate = state.parameter_groups()[0]["lr"]
        recorder.record_step(state.epoch, state.step, sums, rate, norm)


def compute_gradients(state: TrainingState, batch: sampling.Indices) -> StepSums:
    """Compute this rank's gradients for a global batch [B], and average the gradients over the ranks. Collective.

    Loads this rank's part of the batch, and runs forward and backward passes, in micro-batches. The averaged gradients
    stay in the parameters. Sets the optimisers' training mode, and seeds the global random generators. If any rank's
    buffers changed, copies rank 0's buffers to all ranks.

    Returns:
        The sums over the samples of all ranks.

    Raises:
        UserError: The model fails on the inputs, outputs or losses are unfit, or a parameter would never be trained.
            Also if a buffer was added, removed or resized.
    """
    state.set_optimizer_mode(training=True)
    part_sums = []
    parts = list_rank_slices(state, batch, state.step)
    loaded, total = load_slices_and_sum_weights(state, parts, len(batch))
    divisor = total if isinstance(total, int) else total.where(total > 0, 1.0)  # a step without any weight has loss 0
    for part in parts:
        with state.clock("data"):
            micro_batch = next(loaded)
            inputs = micro_batch.prepare_inputs(state.prepare_inputs)
        with (
            state.clock("forward_backward"),
            state.sync.micro_batch(last=part is parts[-1]),  # gradients are averaged after the last backward pass only
            # A sample that must not count would change the running statistics of BatchNorm layers of this rank alone.
            nullcontext() if part.has_samples else preserve_running_statistics(state.model),
        ):
            outputs = compute_outputs(state, state.sync, inputs, micro_batch.targets[0][0], part)
            with state.loss_exchange.enable_across_ranks(has_samples=part.has_samples):
                # Autocast or a user's model may return bf16, which is too coarse for a loss.
                precise = convert_float_tensors(outputs, torch.float32)
                sums = [state.objective.loss_sum(precise, *pair, micro_batch.samples) for pair in micro_batch.targets]
                loss = reduce(torch.add, sums)
            if not part.has_samples:
                loss = 0.0 * loss  # the backward pass must still run, because other ranks wait in its exchanges
            if not state.step and state.plan.has_user_model_or_objective:
                trial.check_loss_uses_model_parameters_only(state.model, loss)
            state.this_pass.finish_forward()
            state.sync.prepare_backward(outputs, loss)
            # Divided by the sum of the global batch's weights, or by its size, so that a smaller last batch is exact.
            if isinstance(divisor, int):
                factor = make_loss_factor(divisor, world_size(), loss.dtype, loss.device)
            else:
                factor = (torch.ones_like(loss) / divisor).to(loss.dtype) * world_size()
            # Given to backward(), the factor would make torch import sympy: 0.3 s of each rank's first step.
            (factor * loss).backward()  # type: ignore[no-untyped-call]
            state.this_pass.finish_pass()
        # A copy, on the state's device: a user-defined objective may use another device, or fp64.
        part_sums.append(loss.detach().to(state.device, torch.float64, copy=True))
    state.check_parameters_are_optimised(state.frozen.items())  # cheap enough for each step
    loss_sum = reduce(torch.add, part_sums)
    if world_size() > 1:
        with state.clock("communication"):
            loss_sum = exchange_gradients_and_buffers(state, loss_sum)
    return StepSums(loss_sum, total, len(batch))


@lru_cache(maxsize=8)  # each tensor that a step makes costs microseconds
def make_loss_factor(divisor: int, num_ranks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return num_ranks / divisor as a scalar tensor. ``divisor`` is the number of samples in the global batch.

    Gradients are averaged over the ranks, so ``num_ranks`` cancels out. The tensor is cached.
    """
    return torch.full((), 1 / divisor, dtype=dtype, device=device) * num_ranks


def exchange_gradients_and_buffers(state: TrainingState, loss_sum: Tensor) -> Tensor:
    """Average gradients over the ranks in place, and add up the loss. Collective.

    If any rank's buffers changed, copies rank 0's buffers to all ranks.

    Returns:
        The sum of ``loss_sum`` over the ranks, a scalar.

    Raises:
        UserError: A buffer was added, removed or resized.
    """
    numbers = loss_sum.view(1)
    if state.buffers.shared_names:  # on all ranks or on none
        # Travels with the losses, because a separate exchange would cost more than a small broadcast.
        changed = torch.full_like(numbers, state.buffers.stage_buffers_for_broadcast())
        numbers = torch.cat((numbers, changed))
    sums = state.sync.average_gradients(numbers)
    if len(sums) > 1:
        state.buffers.broadcast_staged_buffers(ranks_with_changes=sums[1])
    return sums[0]


def compute_outputs(
    state: TrainingState, model: Callable[..., Any], inputs: Leaves, targets: Leaves, part: RankSlice
) -> Any:
    """Run ``model`` on a rank's slice of a micro-batch in the run's precision, and return the checked outputs.

    Seeds the global random generators. After the backward pass, call ``finish_pass`` of ``state.this_pass``.

    Args:
        model: Called with the inputs. May be ``state.sync``.
        inputs: Prepared inputs of the slice.
        targets: Targets of the slice, whose shape the outputs must fit.

    Raises:
        UserError: The model fails on the inputs, BatchNorm has a single value for a channel, or outputs do not fit the
            targets.
    """
    loop, name = state.plan.loop, state.plan.model.name
    state.this_pass.begin_pass(loop.seed, state.epoch, part.samples, state.device, has_samples=part.has_samples)
    try:
        with (
            translate_input_errors(name, state.model, inputs),
            # autocast takes 10 us also where it does nothing
            torch.autocast(state.device.type, torch.bfloat16) if state.hardware.precision == "bf16" else nullcontext(),
        ):
            outputs = model(inputs)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"batch_size={loop.batch_size}: BatchNorm of model {name!r} gets a single value per channel in a batch: "
            "must be at least two values; choose a batch_size with another remainder"
            + (", or a larger image_size" if state.spec.pictures else "")
            + ("" if loop.sync_batchnorm else ", or sync_batchnorm=true")
        ) from None
    state.objective.check_outputs(name, outputs, targets)
    return outputs


def rerun_forward_passes(state: TrainingState, batch: sampling.Indices, step: int) -> None:
    """Run a step's forward passes again, to find the first value that is not finite. Returns nothing.

    Loads this rank's part of the batch again, and checks the samples. Hooks of :func:`find_non_finite_activation`
    check the outputs of modules. Seeds the global random generators, and may change buffers.

    Raises:
        UserError: An input, or a target of a user-defined objective, is not finite. The error names the sample. Errors
            of :func:`compute_outputs` are raised, too.
    """
    for part in list_rank_slices(state, batch, step):
        loaded = load_slice(state, part)
        trial.check_samples_finite(state, loaded.inputs[0], loaded.targets[0][0], part.samples, "training")
        inputs = loaded.prepare_inputs(state.prepare_inputs)
        compute_outputs(state, partial(call_with_leaves, state.model), inputs, loaded.targets[0][0], part)


def apply_gradients(state: TrainingState) -> Tensor | None:
    """Clip the gradients, update the weights and the moving average, remove the gradients, and count the step.

    Sets the learning rate of each parameter group. With a user-defined optimiser, seeds the global random generators,
    and checks the optimiser in the first step.

    Returns:
        The norm of the gradients before clipping (a scalar), or None without a limit.

    Raises:
        UserError: The user-defined optimiser or schedule is unfit.
    """
    settings = state.plan.optimizer
    largest = settings.grad_clip_norm
    norm = clip_grad_norm_(state.model.parameters(), largest) if largest else None
    for group, rate in zip(state.parameter_groups(), state.initial_rates, strict=True):
        group["lr"] = state.schedule(rate, state.step)
    if settings.is_user_defined:
        # A user-defined optimiser may draw random numbers. All ranks need equal numbers, and no pass may have the same.
        seed = state.plan.loop.seed + OPTIMIZER_SEEDS
        state.this_pass.begin_pass(seed, state.step, np.zeros(1, dtype=np.int64), state.device)
    for optimizer in state.optimizers:
        if state.step or not settings.is_user_defined:
            optimizer.step()
        else:
            do_first_user_optimizer_step(optimizer, settings.optimizer)
            check_optimizer_state(optimizer, settings.optimizer)
        optimizer.zero_grad(set_to_none=True)  # a parameter without a gradient in the next step then stays as it is
    state.update_average()
    state.step += 1
    state.buffers.copy_buffers_after_step()
    return norm


def evaluate_splits(state: TrainingState, *splits: Split) -> tuple[Evaluation, ...]:
    """Evaluate the kept weights on each split. Collective.

    First averages BatchNorm's running statistics over the ranks, in place. The first split must be the validation
    split, on which a threshold for all splits is fitted. Optimisers stay in evaluation mode.

    Returns:
        The evaluation of each split, in order, equal on all ranks.

    Raises:
        UserError: The model fails or has changed its buffers' layout, or the validation split has no positive sample
            for a threshold.
    """
    loop = state.plan.loop
    with state.clock("communication"):
        # Weighted by this rank's samples of the largest batch there is: with few training samples some ranks have none.
        largest_batch = np.arange(min(loop.batch_size, len(state.training)))
        parts = split_batch_for_rank(largest_batch, loop.accumulation_steps)
        own_samples = sum(len(part.samples) for part in parts if part.has_samples)
        averaged = compute_mean_running_statistics(state.kept_model(), own_samples)
        with state.exclude_snapshots():
            for statistic, average in averaged:
                statistic.copy_(average)
            state.buffers.copy_buffers_after_step()
    with state.clock("evaluation"), state.evaluation_mode():
        columns = [
            compute_split_columns(state.predict, split, loop.test_batch_size, state.objective) for split in splits
        ]
        objective = state.objective.with_fitted_threshold(columns[0])
        return tuple(measure_split(objective, each) for each in columns)


def finish_epoch(state: TrainingState, recorder: Recorder, evaluations: tuple[Evaluation, ...]) -> None:
    """Check the model, count the epoch, write the evaluations to metrics.jsonl, and select the weights to keep.

    ``evaluations`` are of the validation and the test split, or empty if the epoch has no evaluation.

    Raises:
        UserError: A loss is not finite, or the model or its optimiser fails a check.
    """
    state.check_model_and_buffers()
    with state.exclude_snapshots():
        state.epoch += 1
        for split, evaluation in zip(("validation", "test"), evaluations, strict=False):
            if not math.isfinite(loss := evaluation.measures.get("loss", 0.0)):
                trial.check_first_sample_of_non_finite_loss(state, split, evaluation.columns["loss"])
                at = {"epoch": state.epoch - 1, "step": state.step, "update_step": state.step}
                raise make_non_finite_loss_error(
                    state.model, state.plan.optimizer.learning_rate, loss, **at, activation=""
                )
        if evaluations:
            validation, test = evaluations
            recorder.record_evaluation(state.epoch, state.step, validation, test)
            state.selection.select_weights(state.epoch, validation, test, state.kept_model().state_dict())

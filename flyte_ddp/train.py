"""The main line of training, as one rank runs it: the same under every launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from flyte_ddp import sampling
from flyte_ddp.augmentation import augment
from flyte_ddp.batch_norm import average_running_statistics
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import open_arrays
from flyte_ddp.distributed import rank, world_size
from flyte_ddp.errors import UserError
from flyte_ddp.evaluate import evaluate
from flyte_ddp.job import Job
from flyte_ddp.optimisation import learning_rate
from flyte_ddp.recording import Recorder, check_finite
from flyte_ddp.selection import Selection
from flyte_ddp.training_state import TrainingState


def train(job: Job) -> None:
    """Trains, evaluates every ``eval_interval`` epochs, and leaves metrics, model and sidecar in the run folder.

    Raises:
        UserError: a model whose output does not fit the classes, a loss that is not finite, weights that do not fit.

    """
    hp = job.hp
    arrays = open_arrays(job.data)
    state = TrainingState.create(hp, job.hardware, arrays, job.initial_weights)
    selection = Selection(hp)
    with Recorder(job, arrays, state) as recorder:
        step = 0
        for epoch in range(hp.epochs):
            order = sampling.epoch_order(state.training.indices, hp.seed, epoch)
            for batch in global_batches(order, hp.batch_size):
                loss_sum = train_step(state, batch, epoch, step)
                step += 1
                recorder.training(epoch, step, loss_sum, len(batch))
                if step == state.total_steps:
                    break
            finished = step == state.total_steps
            if finished or (epoch + 1) % hp.eval_interval == 0:
                with state.clock("communication"):
                    average_running_statistics(state.kept_model(), state.samples)
                with state.clock("evaluation"):
                    validation = evaluate(state.predict, state.validation, hp.test_batch_size, state.device)
                    test = evaluate(state.predict, state.test, hp.test_batch_size, state.device)
                recorder.evaluation(epoch + 1, step, validation, test)
                finished |= selection.consider(epoch + 1, validation, test, state)
            if finished:
                break
        recorder.finish(selection)


def global_batches(order: sampling.Indices, batch_size: int) -> Iterator[sampling.Indices]:
    """Cuts an epoch's order into global batches; the last one may be smaller."""
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def train_step(state: TrainingState, batch: sampling.Indices, epoch: int, step: int) -> Tensor:
    """One optimiser step on a global batch, of which this rank computes its share.

    Args:
        batch: [B] positions in the training set, the same on all ranks.

    Returns:
        The sum of this rank's losses, an fp64 scalar on the device.

    Raises:
        UserError: an output that does not fit, or a loss that is not finite.

    """
    hp = state.hp
    loss_sum = torch.zeros((), dtype=torch.float64, device=state.device)
    parts = min(hp.accumulation_steps, len(batch))  # none is empty, though a rank's share of it may be
    for part in range(parts):
        samples = sampling.share(sampling.share(batch, part, parts), rank(), world_size())
        with state.clock("data"):
            images, labels = state.training.gather(samples)
            images = state.prepare(augment(images, hp.augment, seed=hp.seed, epoch=epoch, samples=samples))
        if state.randomness is not None:
            state.randomness.begin_pass(hp.seed, epoch, samples, state.device)
        with state.clock("forward_backward"), state.sync.micro_batch(last=part == parts - 1):
            with state.autocast(), batch_norm_errors(hp):
                logits = state.sync(images)
            check_output(hp.model, logits, (len(samples), state.num_classes))
            loss = functional.cross_entropy(
                at_least_fp32(logits), labels, reduction="sum", label_smoothing=hp.label_smoothing
            )
            (loss / len(batch)).backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.detach()
        state.samples += len(samples)
    if state.device.type == "cpu":  # On a GPU this would wait for the device; there the recorder looks now and then.
        check_finite(loss_sum.item(), hp, epoch, step + 1)
    if hp.grad_clip_norm:
        clip_grad_norm_(state.model.parameters(), hp.grad_clip_norm)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(hp, step, state.total_steps)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.update_average()
    return loss_sum


def at_least_fp32(logits: Tensor) -> Tensor:
    """bf16, which autocast or a user's model may return, is too coarse for a loss."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def batch_norm_errors(hp: Hyperparameters) -> Iterator[None]:
    """Turns BatchNorm's refusal of a single value for each channel, which it cannot normalise, into a UserError."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"batch_size={hp.batch_size}: leaves a batch in which BatchNorm in model {hp.model!r} gets a single value "
            "a channel, and it needs two; choose a batch_size with another remainder, or a larger image_size"
            + ("" if hp.sync_batchnorm else ", or sync_batchnorm=true")
        ) from None


def check_output(model: str, logits: object, expected: tuple[int, int]) -> None:
    """Raises UserError unless the model returned one row of logits for each sample."""
    got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if got != expected:
        raise UserError(
            f"model {model!r} returned {got}: it must return a tensor of shape (samples, classes) = {expected}; "
            "size its last layer by num_classes"
        )

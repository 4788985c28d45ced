"""The main line of training, as one rank runs it: the same under every launcher."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.datasets import open_prepared
from flyte_ddp.errors import UserError
from flyte_ddp.loading.equal_pictures import LOOKED_AT, describe_equal_pictures
from flyte_ddp.loading.facts import check_bad_samples
from flyte_ddp.models import zoo
from flyte_ddp.order import sampling
from flyte_ddp.parallel.batch_norm import averaged_running_statistics, running_statistics_kept
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.runs.job import Job
from flyte_ddp.training.checkpointing import Checkpointer, Run, restore
from flyte_ddp.training.diagnosis import LossWatch, not_finite
from flyte_ddp.training.evaluate import Evaluation, as_on_rank_0, evaluate
from flyte_ddp.training.optimisation import clip_norm, learning_rate
from flyte_ddp.training.outputs import write_outputs, write_start
from flyte_ddp.training.recording import Recorder
from flyte_ddp.training.selection import Selection
from flyte_ddp.training.training_state import TrainingState


def train(job: Job, offer_saving: Callable[[Callable[[], int]], None] = lambda _: None) -> None:
    """Trains, evaluates every ``eval_interval`` epochs, and leaves metrics, model and sidecar in the run folder.

    Args:
        offer_saving: gets a function that writes a checkpoint at once, from any thread, and returns the step of the
            newest one, 0 without any.

    Raises:
        UserError: a model whose output does not fit the classes, a loss that is not finite, weights that do not fit.
    """
    hp = job.hp
    data = open_prepared(job.data)
    state = TrainingState(hp, job.hardware, data, job.initial_weights, job.settings)
    loss_watch = LossWatch(state.model, state.optimizer, hp, a_step_later=state.device.type == "cuda")
    with (
        closing(state.splits),
        Recorder(job, state.clock, state.device, state.total_steps, state.steps_per_epoch) as recorder,
    ):
        write_start(job, data, state, recorder)
        run = Run(state, Selection(hp), recorder, loss_watch)
        if job.checkpoint is not None:
            restore(run, job.checkpoint)
        elif recorder.writes:
            recorder.warn(equal_pictures(state))
        with Checkpointer(job, run) as checkpoints:
            offer_saving(checkpoints.save)
            while state.epoch < state.epochs and not run.selection.stopped:
                for batch in batches_to_do(state):
                    train_step(run, batch)
                loss_watch.catch_up()
                evaluation = evaluate_splits(state) if evaluation_is_due(state) else None
                check_bad_samples(state.splits.facts(), hp.bad_samples)
                finish_epoch(run, evaluation)
                checkpoints.epoch_done()
        write_outputs(job, data, state, run.selection, recorder)


def equal_pictures(state: TrainingState) -> str:
    """Return a warning if most of the first 64 pictures are equal: of the run's first epoch, of a stream in testing.

    A stream gives each picture once, and augmented. Of shards that are fetched this rank's own pictures are compared,
    for which no other shard is needed than for training.
    """
    hp, split = state.hp, state.training
    if encoded_kind(hp.dataset) == "stream":
        first = state.test.order.samples(slice(0, min(LOOKED_AT, len(state.test))))
        return describe_equal_pictures(state.test, first)
    batches: Iterator[sampling.Indices] = itertools.islice(split.order.batches(0, hp.batch_size), state.total_steps)
    if split.source.fetches:
        batches = (share.samples for batch in batches for share in own_shares(batch, hp.accumulation_steps))
    samples = itertools.islice(itertools.chain.from_iterable(batches), LOOKED_AT)
    return describe_equal_pictures(split, np.fromiter(samples, np.int64))


def batches_to_do(state: TrainingState) -> Iterator[sampling.Indices]:
    """The current epoch's global batches that no step has been done on yet."""
    epoch, training = state.epoch, state.training
    done = state.step - epoch * state.steps_per_epoch
    batches = training.order.batches(epoch, state.hp.batch_size, first=done)
    wanted = itertools.islice(batches, state.total_steps - state.step)

    def samples_of(batch: sampling.Indices) -> list[sampling.Indices]:
        return [share.samples for share in own_shares(batch, state.hp.accumulation_steps)]

    return training.load_ahead(wanted, samples_of, epoch, state.hp.batch_size)


def train_step(run: Run, batch: sampling.Indices) -> None:
    """One optimiser step on a global batch [B] of positions in the training set, which is recorded."""
    state = run.state
    loss_sum = compute_gradients(state, batch)
    run.loss_watch.look(state.epoch, state.step + 1, loss_sum, lambda: forward_again(state, batch))
    with state.mutation():
        apply_gradients(state)
        rate = state.optimizer.param_groups[0]["lr"]
        run.recorder.training(state.epoch, state.step, loss_sum, len(batch), rate)


def compute_gradients(state: TrainingState, batch: sampling.Indices) -> Tensor:
    """Forward and backward pass over a global batch [B], of which this rank computes its share.

    Returns:
        The sum of all ranks' losses, an fp64 scalar on the device.
    """
    hp = state.hp
    loss_sum = torch.zeros((), dtype=torch.float64, device=state.device)
    *others, last = own_shares(batch, hp.accumulation_steps)
    for share in (*others, last):
        with state.clock("data"):
            images, labels = prepared(state, share.samples)
        with (
            state.clock("forward_backward"),
            state.sync.micro_batch(last=share is last),
            nullcontext() if share.counts else running_statistics_kept(state.model),
        ):
            logits = forward(state, state.sync, images, share)
            # bf16, which autocast or a user's model may return, is too coarse for a loss.
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=hp.label_smoothing)
            if not share.counts:
                loss = 0.0 * loss
            (loss * world_size() / len(batch)).backward()  # type: ignore[no-untyped-call]
            state.this_pass.done()
        loss_sum += loss.detach()
    with state.clock("communication"):
        loss_sum = state.sync.combine(loss_sum)
        state.buffers.copy_from_rank_0()
    return loss_sum


class Share(NamedTuple):
    """A rank's part of a micro-batch. A rank without one takes a sample of another rank, which does not count.

    Many models fail on an empty batch, and every rank must take part in each exchange.
    """

    samples: sampling.Indices
    counts: bool


def own_shares(batch: sampling.Indices, parts: int) -> list[Share]:
    """This rank's share of each micro-batch; none of these is empty on all ranks."""
    parts = min(parts, len(batch))
    shares = []
    for part in range(parts):
        micro_batch = sampling.share(batch, part, parts)
        samples = sampling.share(micro_batch, rank(), world_size())
        shares.append(Share(samples, counts=True) if len(samples) else Share(micro_batch[:1], counts=False))
    return shares


def own_samples(state: TrainingState) -> int:
    """How many samples this rank has trained on, as if the number of ranks had always been this one."""
    hp = state.hp
    full, ragged = divmod(len(state.training), hp.batch_size)
    epochs, steps = divmod(state.step, state.steps_per_epoch)

    def of_batch(length: int) -> int:
        return sum(len(share.samples) for share in own_shares(np.arange(length), hp.accumulation_steps) if share.counts)

    return (epochs * full + steps) * of_batch(hp.batch_size) + epochs * of_batch(ragged)


def prepared(state: TrainingState, samples: sampling.Indices) -> tuple[Tensor, Tensor]:
    """The model's input for these samples, augmented for the current epoch, and their labels."""
    images, labels, _ = state.training.gather(samples, state.epoch)
    return state.prepare(images), labels


def forward(state: TrainingState, model: Callable[[Tensor], Tensor], images: Tensor, share: Share) -> Tensor:
    """Logits [n, classes] of this rank's samples, in training."""
    hp = state.hp
    state.this_pass.begin(hp.seed, state.epoch, share.samples, state.device, counts=share.counts)
    try:
        with state.autocast():
            logits = model(images)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"batch_size={hp.batch_size}: leaves a batch in which BatchNorm in model {hp.model!r} gets a single value "
            "a channel, and it needs two; choose a batch_size with another remainder, or a larger image_size"
            + ("" if hp.sync_batchnorm else ", or sync_batchnorm=true")
        ) from None
    zoo.check_output(hp.model, logits, (len(share.samples), state.num_classes))
    zoo.check_gradient(hp.model, logits)
    return logits


def forward_again(state: TrainingState, batch: sampling.Indices) -> None:
    """All forward passes of a step, without a strategy for gradients, to look at what the modules make of it."""
    for share in own_shares(batch, state.hp.accumulation_steps):
        forward(state, state.model, prepared(state, share.samples)[0], share)


def apply_gradients(state: TrainingState) -> None:
    """The optimiser's part of a step."""
    hp = state.hp
    if largest := clip_norm(hp):
        clip_grad_norm_(state.model.parameters(), largest)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(hp, state.step, state.total_steps)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.update_average()
    state.step += 1
    state.buffers.keep()


def evaluation_is_due(state: TrainingState) -> bool:
    """Whether the epoch that is being trained ends with an evaluation."""
    return state.step == state.total_steps or (state.epoch + 1) % state.hp.eval_interval == 0


def evaluate_splits(state: TrainingState) -> tuple[Evaluation, Evaluation]:
    """The weights that would be kept now, on the validation and the test split."""
    with state.clock("communication"):
        averaged = averaged_running_statistics(state.kept_model(), own_samples(state))
        with state.mutation():
            for statistic, average in averaged:
                statistic.copy_(average)
            state.buffers.keep()
    with state.clock("evaluation"), state.evaluating():
        validation, test = as_on_rank_0(
            evaluate(state.predict, split, state.hp.test_batch_size, state.device)
            for split in (state.validation, state.test)
        )
    return validation, test


def finish_epoch(run: Run, evaluation: tuple[Evaluation, Evaluation] | None) -> None:
    """Counts the epoch, and takes in its evaluation of the validation and the test split, if it had one.

    Raises UserError for a loss that is not finite: the last steps may break weights after their losses were checked.
    And for a model whose extra state, which its forward passes may change, could not be loaded from a file.
    """
    state = run.state
    state.check_model()
    with state.mutation():
        state.epoch += 1
        if evaluation is not None:
            for measured in evaluation:
                if not math.isfinite(measured.loss):
                    raise not_finite(
                        state.model, state.hp, measured.loss, state.epoch - 1, state.step, weights_of=state.step
                    )
            run.recorder.evaluation(state.epoch, state.step, *evaluation, state.model)
            run.selection.consider(state.epoch, *evaluation, state.kept_model().state_dict())

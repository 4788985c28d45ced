"""The objects of training, set up equally on every rank: the model, its optimiser, and the splits of the data."""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.hardware import Hardware
from flyte_ddp.core.loading.split import Splits
from flyte_ddp.core.loading.training_data import TrainingData
from flyte_ddp.core.machine.clock import make_clock
from flyte_ddp.core.machine.device_copy import copy_to_cpu
from flyte_ddp.core.models.inputs import InputSpec, prepare_inputs, translate_input_errors
from flyte_ddp.core.models.parts import freeze_parts, set_training_mode
from flyte_ddp.core.models.state_dicts import check_state_dict
from flyte_ddp.core.objectives.objective import HIGHER
from flyte_ddp.core.order.sampling import steps_per_epoch
from flyte_ddp.core.parallel.buffers import Buffers
from flyte_ddp.core.parallel.exchange import RankExchange
from flyte_ddp.core.parallel.strategies import compile_model, create_gradient_sync
from flyte_ddp.core.parallel.training_pass import TrainingPass
from flyte_ddp.core.samples.leaves import Leaves, call_with_leaves
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.training.building import (
    UserSources,
    build_initial_model,
    make_layers_rank_independent,
    seed_and_set_determinism,
)
from flyte_ddp.core.training.diagnosis import LossWatch
from flyte_ddp.core.training.evaluate import Selection
from flyte_ddp.core.training.objective_setup import build_objective, describe_comparison_obstacle
from flyte_ddp.core.training.optimisation import MovingAverage, create_optimizers, make_schedule
from flyte_ddp.core.training.optimizer_state import read_plain_attributes
from flyte_ddp.core.training.plan import TrainingPlan


class TrainingState:
    """The objects of training on one rank. Call ``sync`` in place of ``model``, to average gradients over the ranks."""

    def __init__(
        self,
        plan: TrainingPlan,
        hardware: Hardware,
        data: TrainingData,
        initial_weights: Path | None,
        settings: Settings | None = None,
    ) -> None:
        """Seed torch, Python and NumPy, apply ``deterministic``, open the data, and build the rest. Collective.

        Starts threads or processes that load samples, which ``splits.close()`` ends. Imports and runs user code. With
        ``deterministic``, sets an environment variable and torch's global setting.

        Args:
            initial_weights: File of the weights to start from, or None.
            settings: The settings, by default those without any variable set.

        Raises:
            UserError: Hyperparameters, data, model, objective or optimiser do not fit together.
        """
        self.plan, self.hardware, self.data, self.settings = plan, hardware, data, settings or Settings()
        loop, optimizer, selection = plan.loop, plan.optimizer, plan.selection
        self.step = 0  # optimiser steps that are done
        self.epoch = 0  # epochs that are done, with their evaluation
        self.lock = threading.RLock()  # held while the state is copied for a checkpoint, or changed
        self.inconsistent = False  # whether an update has failed halfway: then nothing is saved
        on_gpu = hardware.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        seed_and_set_determinism(loop.seed, deterministic=loop.deterministic)
        self.user_sources = UserSources(plan.user_code, data.user_code)  # before user code runs, as in the digest
        self._open_splits()
        self.objective = build_objective(plan, data, self.training.order, self.splits.targets)
        self._set_splits(self.splits.with_target_check(self.objective.check_targets))
        self.loss_exchange = RankExchange(describe_comparison_obstacle(loop.accumulation_steps, loop.mixup))
        # The order matters from here on. The model must have its final type, device and layers before anything refers
        # to its parameters. Then the strategy copies rank 0's weights to all ranks. Then the optimiser, the average and
        # the buffers refer to these weights.
        self.this_pass = TrainingPass(may_draw=plan.model.may_draw)
        self.dtype = torch.float64 if hardware.precision == "fp64" else torch.float32
        self.memory_format = torch.channels_last if hardware.channels_last else torch.contiguous_format
        model = build_initial_model(plan, self.objective.outputs, self.spec, initial_weights)
        self.frozen_modules = freeze_parts(model, loop.freeze)
        if self.dtype == torch.float64:
            model.double()  # a model in fp32 is not cast: it may have buffers of other types, also complex ones
        self.model = model.to(self.device).to(memory_format=self.memory_format)
        make_layers_rank_independent(model, self.this_pass, hardware, sync_batchnorm=loop.sync_batchnorm)
        set_training_mode(model, self.frozen_modules)
        self.optimised_parameters = {parameter for parameter in model.parameters() if parameter.requires_grad}
        self.frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self.clock = make_clock(self.device)
        self.sync = create_gradient_sync(compile_model(model) if loop.compile else model, hardware.strategy, self.clock)
        self.optimizers = create_optimizers(model, optimizer, plan.hyperparameters)
        self.attributes_at_start = copy_to_cpu([read_plain_attributes(each) for each in self.optimizers])
        self.optimizers_train: bool | None = None  # True after train(), False after eval()
        self.initial_rates = [float(group["lr"]) for group in self.parameter_groups()]
        self.schedule = make_schedule(optimizer.schedule, optimizer.warmup_steps, self.total_steps)
        self.average = MovingAverage(model, optimizer.ema_decay) if optimizer.ema_decay else None
        self.buffers = Buffers(model)
        # On a GPU, checking a loss in its own step would make the host wait for the device in every step.
        # With a user-defined optimiser the host waits, because the optimiser may be unable to skip an update.
        a_step_later = on_gpu and not optimizer.is_user_defined
        self.loss_watch = LossWatch(model, self.optimizers[0], optimizer.learning_rate, a_step_later=a_step_later)
        higher = self.objective.measures.get(selection.select_by) == HIGHER
        self.selection = Selection(
            selection.keep, selection.early_stop_patience, selection.select_by, higher_is_better=higher
        )

    def _open_splits(self) -> None:
        """Open the splits, start their loaders, and set the numbers of steps and epochs and the model's ``spec``."""
        loop = self.plan.loop
        self._set_splits(self.data.open_splits(self.hardware, self.device, self.settings))
        self.steps_per_epoch = steps_per_epoch(len(self.training), loop.batch_size)
        self.total_steps = min(loop.epochs * self.steps_per_epoch, loop.max_steps or sys.maxsize)
        self.epochs = -(-self.total_steps // self.steps_per_epoch)  # the last epoch may end early
        self.last_step, self.last_epoch = self.total_steps, self.epochs  # where this attempt stops
        self.spec = self.splits.inputs
        if isinstance(self.spec, InputSpec):
            self.spec = self.plan.model.choose_input(self.spec)

    def _set_splits(self, splits: Splits) -> None:
        self.splits = splits
        self.training, self.validation, self.test = splits.training, splits.validation, splits.test

    def set_last_step_to_fraction(self, steps_divisor: int) -> None:
        """Set ``last_step`` and ``last_epoch``, so that training stops after 1 / ``steps_divisor`` of the steps.

        The number of steps is rounded up.

        Raises:
            UserError: The run has fewer than ``steps_divisor`` steps.
        """
        if self.total_steps < steps_divisor:
            raise UserError(
                f"the run has {self.total_steps} steps, and a rung trains 1/{steps_divisor} of them: must be at least "
                f"{steps_divisor} steps; lower rungs or batch_size, or raise epochs or max_steps"
            )
        self.last_step = -(-self.total_steps // steps_divisor)
        self.last_epoch = -(-self.last_step // self.steps_per_epoch)

    @contextmanager
    def exclude_snapshots(self) -> Iterator[None]:
        """Hold the state's lock for the block, so that no checkpoint copies a half-changed state. Blocks may be nested.

        Waits while a checkpoint copies the state. After an exception in the block, the state is never saved again.
        """
        with self.lock:
            before, self.inconsistent = self.inconsistent, True
            yield
            self.inconsistent = before

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_optimizer_mode(self, *, training: bool) -> None:
        """Call ``train()`` or ``eval()`` of the optimisers that have these methods, unless the mode is set already.

        Schedule-free optimisers change and round the weights in these methods. Thus the next step sets training mode,
        not the end of an evaluation.
        """
        if training != self.optimizers_train:
            with self.exclude_snapshots():
                for optimizer in self.optimizers:
                    getattr(optimizer, "train" if training else "eval", lambda: None)()
                self.optimizers_train = training

    def prepare_inputs(self, inputs: Leaves) -> Leaves:
        """Return a batch's inputs in the model's dtype, with images resized and normalised."""
        return prepare_inputs(inputs, self.spec, self.dtype, self.memory_format)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Set model, moving average and optimisers to evaluation mode for the block.

        Buffers that the state_dict omits get their initial values, as in a loaded model. After the block, training mode
        and the buffers (except BatchNorm's) are restored. Optimisers stay in evaluation mode.

        Raises:
            UserError: A buffer of the model was added, removed or resized.
        """
        self.set_optimizer_mode(training=False)
        modules = [self.model, *([self.average.module] if self.average else [])]
        for module in modules:
            module.eval()
        try:
            with self.buffers.use_saved_buffers(self.kept_model()):
                yield
        finally:  # a checkpoint after an exception must give the same bits
            for module in modules:
                set_training_mode(module, self.frozen_modules)

    def check_model_and_buffers(self) -> None:
        """Check the model after an epoch.

        Raises:
            UserError: The state_dict cannot be saved, a buffer was added, removed or resized, or a trainable parameter
                is in no optimiser.
        """
        check_state_dict(self.plan.model.name, self.model.state_dict())
        self.buffers.require_same_buffer_layout(self.model)
        self.check_parameters_are_optimised(self.model.named_parameters())

    def check_parameters_are_optimised(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise UserError if a trainable parameter of ``named`` is in no optimiser.

        Such a parameter was frozen or missing when the optimiser was made.
        """
        for name, parameter in named:
            if parameter.requires_grad and parameter not in self.optimised_parameters:
                raise UserError(
                    f"parameter {name}: was frozen or missing when the optimiser was created, and would never be "
                    "trained; keep requires_grad True, and multiply the gradient by 0 (register_hook) as long as the "
                    "parameter should not be trained"
                )

    def predict(self, inputs: Leaves, targets: Leaves, samples: int, model: nn.Module | None = None) -> Any:
        """Prepare the inputs of a batch, run ``model`` (by default :meth:`kept_model`), and return its checked outputs.

        Seeds the global random generators. Does not change the mode, and does not turn off gradients.

        Args:
            inputs: Inputs as loaded, which are prepared here.
            targets: Targets, whose shape the outputs must fit.

        Raises:
            UserError: The model does not accept the inputs, or its outputs do not fit the targets.
        """
        self.this_pass.begin_pass(self.plan.loop.seed, 0, np.arange(samples), self.device)
        prepared = self.prepare_inputs(inputs)
        with translate_input_errors(self.plan.model.name, self.model, prepared):
            outputs = call_with_leaves(self.kept_model() if model is None else model, prepared)
        self.objective.check_outputs(self.plan.model.name, outputs, targets)
        return outputs

    def kept_model(self) -> nn.Module:
        """Return the module that is evaluated and saved: with ``keep`` "ema" the moving average, else the model."""
        return self.model if self.plan.selection.keep != "ema" or self.average is None else self.average.module

    def update_average(self) -> None:
        if self.average is not None:
            self.average.update_parameters(self.model)

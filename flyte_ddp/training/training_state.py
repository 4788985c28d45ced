"""The objects that training works on, set up alike on every rank: the model, its optimiser, the splits of the data."""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flyte_ddp import catalog, user_source
from flyte_ddp.clock import clock_for
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import PreparedSet, class_names
from flyte_ddp.errors import UserError
from flyte_ddp.hardware import Hardware
from flyte_ddp.loading import open_splits
from flyte_ddp.models import zoo
from flyte_ddp.models.images import InputSpec, prepare
from flyte_ddp.models.initial_weights import load_initial_weights
from flyte_ddp.order import sampling
from flyte_ddp.parallel.batch_norm import synchronise_batch_norm
from flyte_ddp.parallel.buffers import Buffers
from flyte_ddp.parallel.distributed import world_size
from flyte_ddp.parallel.dropout import derive_dropout_from_samples
from flyte_ddp.parallel.strategies import compile_model, synchronise_gradients
from flyte_ddp.parallel.training_pass import TrainingPass
from flyte_ddp.settings import Settings
from flyte_ddp.training.optimisation import make_optimizer

Tensors = tuple[Tensor, ...] | list[Tensor]


class TrainingState:
    """The objects of one rank: ``model`` is the bare module, ``sync`` the same module with synchronised gradients.

    ``files_not_seen`` are files of the model's code that its digest does not cover.
    """

    def __init__(
        self,
        hp: Hyperparameters,
        hardware: Hardware,
        data: PreparedSet,
        initial_weights: Path | None,
        settings: Settings | None = None,
    ) -> None:
        """Open the data and build everything else from the seed; all ranks do so together.

        Seeds the global generators of torch, Python and NumPy.

        Raises:
            UserError: images that the model cannot take, a model that cannot be trained, weights that do not fit it.
        """
        self.hp, self.hardware = hp, hardware
        self.step = 0  # optimiser steps that are done
        self.epoch = 0  # epochs that are done, with their evaluation
        self.lock = threading.Lock()  # held while the state is read by the checkpoint thread, or changed (`mutation`)
        self.inconsistent = False  # whether an update has raised halfway: then nothing is saved
        on_gpu = hardware.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        torch.manual_seed(hp.seed)
        random.seed(hp.seed)  # a model may draw from any of the three when it is made
        np.random.seed(hp.seed)  # noqa: NPY002
        if hp.deterministic:
            torch.use_deterministic_algorithms(True)
        self.num_classes = len(class_names(data.classes, hp))
        self._open_data(data, settings or Settings())
        model = self._build_model(initial_weights)
        # The order matters from here on. The model has its final type, device and layers before anything refers to its
        # parameters: first the dropout and BatchNorm layers, of which compile_model excludes some, then the strategy,
        # which copies rank 0's weights to all ranks, then the optimiser, the average and the buffers.
        self.this_pass = TrainingPass(may_draw=hp.model not in catalog.SMALL_MODELS)
        derive_dropout_from_samples(model, self.this_pass)
        if hp.sync_batchnorm and world_size() > 1:
            synchronise_batch_norm(model, self.this_pass, on_one_machine=hardware.strategy == "shared_memory")
        model.train()  # as every loop does: models override it to keep some layers in evaluation mode
        self.model = model
        self.clock = clock_for(self.device)
        self.sync = synchronise_gradients(compile_model(model) if hp.compile else model, hardware.strategy, self.clock)
        self.optimizer = make_optimizer(model.parameters(), hp)
        self.average = moving_average(model, hp.ema_decay) if hp.ema_decay else None
        self.buffers = Buffers(model)

    def _open_data(self, data: PreparedSet, settings: Settings) -> None:
        hp = self.hp
        self.splits = open_splits(data, hp, self.hardware, self.device, settings)
        self.training, self.validation, self.test = self.splits.training, self.splits.validation, self.splits.test
        self.steps_per_epoch = sampling.steps_per_epoch(len(self.training), hp.batch_size)
        self.total_steps = min(hp.epochs * self.steps_per_epoch, hp.max_steps or sys.maxsize)
        self.epochs = -(-self.total_steps // self.steps_per_epoch)  # the last one may end early
        height, width, channels = self.splits.shape
        images = InputSpec(channels, height, width, data.mean, data.std)
        self.spec = zoo.input_spec(hp.model, images, size=hp.image_size)

    def _build_model(self, initial_weights: Path | None) -> nn.Module:
        """Return the model with its first weights, of the run's type, memory format and device."""
        hp = self.hp
        own_files = user_source.own_files(hp.model)  # as the digest finds them: before the model's code runs
        model = zoo.build(hp.model, self.num_classes, self.spec)
        modules = {type(module).__module__ for module in model.modules()}
        self.files_not_seen = user_source.not_among(own_files, hp.model, modules)
        zoo.check_model(hp.model, model)
        if initial_weights is not None:
            load_initial_weights(model, initial_weights, hp)
        self.dtype = torch.float64 if self.hardware.precision == "fp64" else torch.float32
        if self.dtype == torch.float64:
            model.double()  # in fp32 a model keeps its types: it may have buffers of other types, also complex ones
        self.memory_format = torch.channels_last if self.hardware.channels_last else torch.contiguous_format
        return model.to(self.device).to(memory_format=self.memory_format)

    @contextmanager
    def mutation(self) -> Iterator[None]:
        """Go around each change, so that a checkpoint sees all of it, or nothing if it fails half way."""
        with self.lock:
            self.inconsistent = True
            yield
            self.inconsistent = False

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for mixed precision in training's forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.hardware.precision == "bf16")

    def prepare(self, images: Tensor) -> Tensor:
        """Return the model's input for uint8 images [N, H, W, C], in the memory order that the run uses."""
        return prepare(images, self.spec, self.dtype, self.memory_format)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Go around an evaluation of all batches: the kept model is as if it were saved and loaded, and without trace.

        Modes are switched once for an evaluation, not for each batch, since a model's own ``train`` may have effects.
        """
        modules = [self.model, *([self.average.module] if self.average else [])]
        for module in modules:
            module.eval()
        with self.buffers.as_saved(self.kept_model()):
            yield
        for module in modules:
            module.train()

    def check_model(self) -> None:
        """Raise UserError if forward passes have made of the model what no file can hold or no optimiser trains."""
        zoo.check_state_dict(self.hp.model, self.model.state_dict())
        self.buffers.current(self.model)
        trained = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter not in trained:
                raise UserError(
                    f"parameter {name}: was frozen when the optimiser was made, which never trains it; leave its "
                    "requires_grad True, and multiply its gradient by 0 (register_hook) until it is to be trained"
                )

    def predict(self, images: Tensor) -> Tensor:
        """Return logits [N, classes] of the weights that would be kept now, for uint8 images [N, H, W, C].

        Call it inside :meth:`evaluating`. An output that does not fit is a UserError. A model that draws random numbers
        in evaluations draws the same ones for each batch, on any rank, because generators are seeded here.
        """
        model = self.kept_model()
        self.this_pass.begin_pass(self.hp.seed, 0, np.arange(len(images)), self.device)
        logits: Tensor = model(self.prepare(images))
        zoo.check_output(self.hp.model, logits, (len(images), self.num_classes))
        return logits

    def kept_model(self) -> nn.Module:
        """Return the module whose weights would be kept now: the moving average, if the run keeps that."""
        return self.model if self.hp.keep != "ema" or self.average is None else self.average.module

    def update_average(self) -> None:
        """Update the moving average, if there is one, by the weights of this step."""
        if self.average is not None:
            self.average.update_parameters(self.model)


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """Return an exponential moving average of weights and buffers, to be updated after each step.

    Buffers of integers are not averaged: they have the newest values.
    """
    average_floats = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def average(averaged: Tensors, newest: Tensors, updates: Tensor | int) -> None:
        if averaged[0].is_floating_point() or averaged[0].is_complex():
            average_floats(averaged, newest, updates)
        else:
            torch._foreach_copy_(averaged, newest)

    return AveragedModel(model, multi_avg_fn=average, use_buffers=True)

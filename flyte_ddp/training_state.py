"""What training works on: the model, its optimiser, and the splits of the data, set up alike on every rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flyte_ddp import models, sampling
from flyte_ddp.batch_norm import synchronise_batch_norm
from flyte_ddp.clock import Clock
from flyte_ddp.compiler import compiled
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared import PreparedSet, class_names
from flyte_ddp.diagnosis import LossWatch
from flyte_ddp.distributed import rank, world_size
from flyte_ddp.dropout import SampleRandomness, derive_dropout_from_samples
from flyte_ddp.hardware import Hardware
from flyte_ddp.images import InputSpec, prepare
from flyte_ddp.initial_weights import load_initial_weights
from flyte_ddp.loading import Split, Splits, open_splits
from flyte_ddp.optimisation import make_optimizer
from flyte_ddp.settings import Settings
from flyte_ddp.strategies import GradientSync, synchronised


@dataclass
class TrainingState:
    """The objects of one rank; ``model`` is the bare module, ``sync`` the same module with synchronised gradients."""

    hp: Hyperparameters
    hardware: Hardware
    device: torch.device
    dtype: torch.dtype  # of weights and images
    spec: InputSpec
    num_classes: int
    splits: Splits
    total_steps: int
    model: nn.Module
    sync: GradientSync
    optimizer: torch.optim.Optimizer
    average: AveragedModel | None
    randomness: SampleRandomness | None
    clock: Clock
    step: int = 0  # optimiser steps that are done
    epoch: int = 0  # epochs that are done, with their evaluation
    loss_watch: LossWatch = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)  # for a look at it, as `changing` is for a change
    torn: bool = False
    kept_buffers: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loss_watch = LossWatch(self, a_step_later=self.device.type == "cuda")

    @classmethod
    def create(
        cls,
        hp: Hyperparameters,
        hardware: Hardware,
        data: PreparedSet,
        initial_weights: Path | None,
        settings: Settings | None = None,
    ) -> TrainingState:
        """Builds everything from the seed.

        Raises:
            UserError: images that the model cannot take, or initial weights that do not fit it.

        """
        on_gpu = hardware.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        torch.manual_seed(hp.seed)
        if hp.deterministic:
            torch.use_deterministic_algorithms(True)
        classes = len(class_names(data, hp))
        splits = open_splits(data, hp, hardware, device, settings or Settings())
        height, width, channels = splits.shape
        spec = models.input_spec(
            hp.model,
            channels=channels,
            height=height,
            width=width,
            mean=data.mean,
            std=data.std,
            size=hp.image_size,
        )
        model = models.build(hp.model, classes, spec)
        if initial_weights is not None:
            load_initial_weights(model, initial_weights, hp.init_from)
        dtype = torch.float64 if hardware.precision == "fp64" else torch.float32
        memory_format = torch.channels_last if hardware.channels_last else torch.contiguous_format
        model = model.to(device=device, dtype=dtype).to(memory_format=memory_format)
        randomness = derive_dropout_from_samples(model)
        if hp.sync_batchnorm and world_size() > 1:
            synchronise_batch_norm(model, on_one_machine=hardware.strategy == "shared_memory")
        steps = hp.epochs * sampling.steps_per_epoch(len(splits.training), hp.batch_size)
        return cls(
            hp=hp,
            hardware=hardware,
            device=device,
            dtype=dtype,
            spec=spec,
            num_classes=classes,
            splits=splits,
            total_steps=min(steps, hp.max_steps or steps),
            model=model,
            sync=synchronised(compiled(model) if hp.compile else model, hardware.strategy, device),
            optimizer=make_optimizer(model.parameters(), hp),
            average=moving_average(model, hp.ema_decay) if hp.ema_decay else None,
            randomness=randomness,
            clock=Clock(),
        )

    @property
    def training(self) -> Split:
        """The samples that the model is trained on."""
        return self.splits.training

    @property
    def validation(self) -> Split:
        """Those held out to choose by; there may be none."""
        return self.splits.validation

    @property
    def test(self) -> Split:
        """Those that results are reported for."""
        return self.splits.test

    @property
    def epochs(self) -> int:
        """How many epochs the run has; the last one may end early."""
        return -(-self.total_steps // sampling.steps_per_epoch(len(self.training), self.hp.batch_size))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Goes around each change, so that a checkpoint sees all of it or nothing; one that fails leaves ``torn``."""
        with self.lock:
            self.torn = True
            yield
            self.torn = False

    def own_samples(self) -> int:
        """How many samples this rank has trained on, as if the number of ranks had always been this one."""
        full, ragged = divmod(len(self.training), self.hp.batch_size)
        epochs, steps = divmod(self.step, sampling.steps_per_epoch(len(self.training), self.hp.batch_size))

        def of_batch(length: int) -> int:
            return sum(
                sampling.share_length(sampling.share_length(length, part, parts), rank(), world_size())
                for parts in [max(1, min(self.hp.accumulation_steps, length))]
                for part in range(parts)
            )

        return (epochs * full + steps) * of_batch(self.hp.batch_size) + epochs * of_batch(ragged)

    def keep_buffers(self) -> None:
        """Remembers the buffers as they are after a step, because the next forward pass changes them."""
        if rank() == 0:
            if not self.kept_buffers:
                self.kept_buffers = [buffer.detach().clone() for buffer in self.model.buffers()]
            for kept, buffer in zip(self.kept_buffers, self.model.buffers(), strict=True):
                kept.copy_(buffer)

    def buffers_after_step(self) -> dict[str, Tensor]:
        """Those of the state_dict, as they were after the step that was finished last; none before the first."""
        persistent = self.model.state_dict().keys()
        names = [name for name, _ in self.model.named_buffers()]
        return {name: kept for name, kept in zip(names, self.kept_buffers, strict=False) if name in persistent}

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision for training's forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.hardware.precision == "bf16")

    def prepare(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, C] to the model's input, in the memory order that the run uses."""
        batch = prepare(images, self.spec, self.dtype)
        order = torch.channels_last if self.hardware.channels_last else torch.contiguous_format
        return batch.contiguous(memory_format=order)

    def predict(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of the weights that would be kept now, for uint8 images [N, H, W, C].

        bf16 is for training only: evaluation's metrics are those of the saved model.
        """
        model = self.kept_model()
        was_training = model.training
        model.eval()
        try:
            logits: Tensor = model(self.prepare(images))
        finally:
            model.train(was_training)
        return logits

    def kept_model(self) -> nn.Module:
        """The module whose weights would be kept now: the moving average, if the run keeps that."""
        if self.hp.keep == "ema":
            assert self.average is not None
            averaged: nn.Module = self.average.module
            return averaged
        return self.model

    def update_average(self) -> None:
        """Takes the weights of this step into the moving average, if there is one."""
        if self.average is not None:
            self.average.update_parameters(self.model)


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """An exponential moving average of weights and buffers, to be updated after each step."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)  # type: ignore[no-untyped-call]

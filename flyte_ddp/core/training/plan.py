"""The plan of a training: all that is decided before ranks start. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.hardware import HardwareSettings

if TYPE_CHECKING:
    from torch import nn

    from flyte_ddp.core.loading.training_data import DataSource
    from flyte_ddp.core.models.inputs import InputSpec, ModelInput
    from flyte_ddp.core.objectives.objective import Facts, Objective

INITIAL_WEIGHTS = "initial weights"  # key in Work.files


class Values(Protocol):
    """The hyperparameters as the user gave them."""

    def to_dict(self) -> JsonObject:
        """Return all values by name, for records."""


class Group:
    """Base class of settings that have the names of hyperparameters."""

    @classmethod
    def from_hyperparameters(cls, values: Values) -> Self:
        """Return the settings of this group among ``values``."""
        return cls(**{field.name: getattr(values, field.name) for field in fields(cls)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class LoopSettings(Group):
    """Length, batches and cadence of a training."""

    epochs: int
    max_steps: int  # 0: no limit
    batch_size: int  # samples of a step, over all ranks and micro-batches
    test_batch_size: int
    accumulation_steps: int
    mixup: float
    bad_samples: int
    sync_batchnorm: bool
    freeze: str
    compile: bool
    deterministic: bool
    seed: int
    eval_interval: int  # epochs
    log_interval: int  # steps


@dataclass(frozen=True)
class OptimizerSettings(Group):
    """The optimiser, its schedule, and the moving average of the weights."""

    optimizer: str  # sgd, adam, adamw, or a user's package.module:callable
    learning_rate: float
    momentum: float
    weight_decay: float
    decay_norms: bool
    nesterov: bool
    schedule: str
    warmup_steps: int
    grad_clip_norm: float  # 0: no clipping
    ema_decay: float  # 0: no average

    @property
    def is_user_defined(self) -> bool:
        return ":" in self.optimizer


@dataclass(frozen=True)
class SelectionSettings(Group):
    """Which weights are kept, and when training stops early."""

    keep: str  # last, best or ema
    select_by: str  # a measure of the validation split
    early_stop_patience: int  # evaluations; 0: no early stopping


@dataclass(frozen=True)
class ModelSource:
    """Base class of models that can be built on each rank. Instances are pickled, and sent to ranks."""

    name: str  # in errors and files
    is_user_defined: bool
    may_draw: bool  # whether forward passes may draw random numbers

    def choose_input(self, images: InputSpec) -> InputSpec:
        """Return the model's input for images of a data set.

        Raises:
            UserError: The model does not accept the images.
        """
        raise NotImplementedError

    def build(self, outputs: int, inputs: ModelInput) -> nn.Module:
        """Return the model with new weights, drawn from the global random generators.

        Raises:
            UserError: The model cannot be built with these arguments.
        """
        raise NotImplementedError

    def load_initial_weights(self, model: nn.Module, file: Path) -> None:
        """Load the initial weights in ``file`` into a new model.

        Raises:
            UserError: The weights do not fit the model.
        """
        raise NotImplementedError

    def list_randomly_initialised_tensors(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Return the names of the tensors that start from random weights although initial weights are loaded."""
        raise NotImplementedError


@dataclass(frozen=True)
class ObjectiveSource:
    """Base class of objectives that can be made on each rank. Instances are pickled, and sent to ranks."""

    name: str  # in errors and files
    is_user_defined: bool
    describes_by_user_code: bool  # whether user code makes the columns of predictions
    accepts_lengths: bool  # whether targets may have different lengths
    needs_class_counts: bool  # whether weights depend on the numbers of training samples of the classes

    def make(self, facts: Facts) -> Objective:
        """Return the objective for data with the properties ``facts``, and with the user's settings.

        Raises:
            UserError: The objective does not fit the data or its settings.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TrainingPlan:
    """A training, as the launcher has resolved it from the hyperparameters. Sent to all ranks."""

    hyperparameters: Values  # for records, and for a user-defined optimiser
    options: Mapping[str, Any]  # of user-defined or built-in model and objective, for records
    loop: LoopSettings
    optimizer: OptimizerSettings
    selection: SelectionSettings
    hardware: HardwareSettings
    data: DataSource
    model: ModelSource
    objective: ObjectiveSource
    user_code: tuple[str, ...]  # package.module:callable of users, without the data set's, which has run before

    @property
    def has_user_model_or_objective(self) -> bool:
        return self.model.is_user_defined or self.objective.is_user_defined


@dataclass(frozen=True)
class TrainingJob:
    """The arguments of a training's Work."""

    plan: TrainingPlan
    data_folder: Path  # of the prepared data set
    steps_divisor: int = 1  # training stops after 1 / steps_divisor of the steps; no hyperparameter: steps are the same

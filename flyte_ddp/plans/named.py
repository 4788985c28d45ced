"""The data, the model and the objective that hyperparameters name. Imports torch only when a source is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters
from flyte_ddp.config.checks import check_unused_settings
from flyte_ddp.core.training.plan import ModelSource, ObjectiveSource
from flyte_ddp.models import initial_weights

if TYPE_CHECKING:
    from torch import nn

    from flyte_ddp.core.models.inputs import InputSpec, ModelInput
    from flyte_ddp.core.objectives.objective import Facts, Objective
    from flyte_ddp.plans.opened_data import OpenedData


@dataclass(frozen=True)
class NamedData:
    """The DataSource of a training."""

    hp: Hyperparameters

    def open(self, folder: Path) -> OpenedData:
        from flyte_ddp.datasets import open_prepared
        from flyte_ddp.plans.opened_data import OpenedData

        return OpenedData(self.hp, open_prepared(folder))


@dataclass(frozen=True)
class NamedModel(ModelSource):
    """A built-in model, or a user's ``package.module:callable``."""

    hp: Hyperparameters

    def choose_input(self, images: InputSpec) -> InputSpec:
        from flyte_ddp.models import zoo

        weights = catalog.find_torchvision_weights(self.hp.model, self.hp.init_from)
        return zoo.choose_input_spec(self.hp.model, images, self.hp.image_size, weights)

    def build(self, outputs: int, inputs: ModelInput) -> nn.Module:
        from flyte_ddp.models import zoo

        return zoo.build_model(self.hp.model, outputs, inputs, self.hp.parse_options().get("model", {}))

    def load_initial_weights(self, model: nn.Module, file: Path) -> None:
        init_from, init_skip = self.hp.init_from, self.hp.init_skip
        initial_weights.load_initial_weights(model, file, name=self.name, init_from=init_from, init_skip=init_skip)

    def list_randomly_initialised_tensors(self, state_dict: Mapping[str, Any]) -> list[str]:
        return initial_weights.list_randomly_initialised_tensors(state_dict, self.hp.init_from, self.hp.init_skip)


@dataclass(frozen=True)
class NamedObjective(ObjectiveSource):
    """A built-in objective, or a user's ``package.module:callable``."""

    hp: Hyperparameters

    def make(self, facts: Facts) -> Objective:
        from flyte_ddp.objectives import make_objective

        facts = replace(
            facts,
            class_weights=self.hp.class_weights,
            label_smoothing=self.hp.label_smoothing,
            select_by=self.hp.select_by,
            threshold_rule=self.hp.threshold,
        )
        objective = make_objective(self.hp.objective, facts, self.hp.parse_options().get("objective", {}))
        check_unused_settings(self.hp, objective.used_hyperparameters)
        return objective

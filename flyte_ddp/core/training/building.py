"""Build the objects of a training from its plan, equally on every rank."""

import os
import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flyte_ddp.core.hardware import Hardware
from flyte_ddp.core.models.inputs import ModelInput
from flyte_ddp.core.models.state_dicts import check_layers_and_state_dict
from flyte_ddp.core.parallel.batch_norm import synchronise_batch_norm
from flyte_ddp.core.parallel.distributed import rank, world_size
from flyte_ddp.core.parallel.dropout import make_dropout_rank_independent
from flyte_ddp.core.parallel.training_pass import TrainingPass
from flyte_ddp.core.training.plan import TrainingPlan
from flyte_ddp.core.user_code import source


def seed_and_set_determinism(seed: int, *, deterministic: bool) -> None:
    """Seed the global random generators of torch, Python and NumPy, from which a new model's weights are drawn.

    With ``deterministic``, also makes torch reject operations that are not repeatable, and sets the environment
    variable CUBLAS_WORKSPACE_CONFIG.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise torch rejects matrix products
        torch.use_deterministic_algorithms(True)


def build_initial_model(
    plan: TrainingPlan, outputs: int, inputs: ModelInput, initial_weights: Path | None
) -> nn.Module:
    """Build the plan's model on the CPU, with the weights of the file ``initial_weights``, or else random weights.

    Args:
        outputs: Size of the last layer.
        inputs: What the model gets.

    Raises:
        UserError: The model cannot be built, the weights do not fit, or several ranks would train the model unlike a
            single process.
    """
    model = plan.model.build(outputs, inputs)
    check_layers_and_state_dict(plan.model.name, model)
    if initial_weights is not None:
        plan.model.load_initial_weights(model, initial_weights)
    return model


def make_layers_rank_independent(
    model: nn.Module, this_pass: TrainingPass, hardware: Hardware, *, sync_batchnorm: bool
) -> None:
    """Change dropout and BatchNorm layers in place, so that they compute the same on any number of ranks.

    Replaces the ``forward`` of these layers. Call this function before torch.compile. With ``sync_batchnorm``, this
    function and each later forward pass in training mode are collective.
    """
    make_dropout_rank_independent(model, this_pass)
    if sync_batchnorm and world_size() > 1:
        synchronise_batch_norm(model, this_pass, on_one_machine=hardware.strategy == "shared_memory")


class UserSources:
    """The sources of a training's user code. Empty except on rank 0, which writes the results."""

    def __init__(self, user_code: Collection[str], preparing: Collection[str]) -> None:
        """Read the files that define ``user_code`` and the callables ``preparing`` of the data."""
        self.user_code, self.reads = user_code, rank() == 0
        self.files = source.list_user_files(*user_code) if self.reads else set()
        self.texts = source.read_user_sources(*user_code, *preparing) if self.reads else {}

    def list_uncovered(self, model: nn.Module) -> list[str]:
        """Return the user's imported files that the digest of ``user_code`` misses. On ranks other than 0, none."""
        # Base classes, too: a layer's class may have been replaced by a library's subclass, as by torch's parametrize.
        modules = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
        return source.list_files_outside_digest(self.files, self.user_code, modules) if self.reads else []

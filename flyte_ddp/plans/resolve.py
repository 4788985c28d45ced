"""Resolve hyperparameters into the plan of a training, and into the ranks and the hardware that they request.

Needs no torch.
"""

import os
from dataclasses import replace

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.hardware import Hardware, HardwareSettings, choose_hardware
from flyte_ddp.core.machine.resources import (
    Bf16,
    Request,
    World,
    choose_local_device_type,
    detect_bf16_support,
    detect_world,
)
from flyte_ddp.core.settings import REQUESTED_GPUS
from flyte_ddp.core.training.plan import LoopSettings, OptimizerSettings, SelectionSettings, TrainingPlan
from flyte_ddp.plans.named import NamedData, NamedModel, NamedObjective

PHOTO_CLIP_NORM = 1.0  # of gradients of the small models on encoded images, which have no normalisation layers


def resolve(hp: Hyperparameters) -> TrainingPlan:
    """Return the plan of a training, with the callables that the hyperparameters name. User code is not imported."""
    optimizer = OptimizerSettings.from_hyperparameters(hp)
    if hp.grad_clip_norm < 0:
        clipped = hp.model in catalog.SMALL_MODELS and hp.data_kind.encoded
        optimizer = replace(optimizer, grad_clip_norm=PHOTO_CLIP_NORM if clipped else 0.0)
    options, own_code = hp.parse_options(), hp.list_user_callables("dataset")
    code_option = catalog.CODE_OPTIONS.get(hp.objective, "")
    return TrainingPlan(
        hyperparameters=hp,
        options=options,
        loop=LoopSettings.from_hyperparameters(hp),
        optimizer=optimizer,
        selection=SelectionSettings.from_hyperparameters(hp),
        hardware=hardware_settings(hp),
        data=NamedData(hp),
        model=NamedModel(
            name=hp.model,
            is_user_defined=":" in hp.model,
            may_draw=hp.model not in catalog.SMALL_MODELS or bool(own_code),
            hp=hp,
        ),
        objective=NamedObjective(
            name=hp.objective,
            is_user_defined=":" in hp.objective,
            describes_by_user_code=":" in hp.objective or code_option in options.get("objective", {}),
            accepts_lengths=":" in hp.objective or hp.objective in catalog.OF_LENGTHS,
            needs_class_counts=hp.class_weights == "balanced",
            hp=hp,
        ),
        user_code=own_code,
    )


def hardware_settings(hp: Hyperparameters) -> HardwareSettings:
    small = ("cpu",) if hp.model in catalog.SMALL_MODELS else ()
    # A user-defined model may need the usual order: `x.view(len(x), -1)` after a convolution fails with channels_last.
    on_gpu = ("cuda",) if small or hp.model in catalog.TORCHVISION_MODELS else ()
    return HardwareSettings(
        strategy=hp.strategy,
        precision=hp.precision,
        channels_last=hp.channels_last,
        batch_size=hp.batch_size,
        accumulation_steps=hp.accumulation_steps,
        bf16_devices=("cuda", *small),
        channels_last_devices=(*small, *on_gpu),
    )


def detect_hardware(hp: Hyperparameters) -> Hardware:
    """Return the Hardware of a run whose ranks are all on this machine. For GPUs initialises CUDA.

    Raises:
        UserError: The machine lacks the GPUs or the bf16 that ``hp`` requires, or ``hp`` does not fit the ranks. Also
            if the machine has another number of GPUs than FLYTE_DDP_GPUS.
    """
    world = detect_world(request_ranks(hp))
    return choose_hardware(hardware_settings(hp), world, detect_bf16_support(world.device_type))


def request_ranks(hp: Hyperparameters) -> Request:
    return Request(hp.num_ranks, hp.backend, most=hp.batch_size)


def check_requested_resources(hp: Hyperparameters, nodes: int = 1, ranks: int = 0, capacity: int = 0) -> None:
    """Raise UserError if the GPUs requested for training pods (FLYTE_DDP_GPUS) do not fit ``hp``.

    Also raises UserError if the number of ranks, the batch size or the strategy does not fit. Does nothing if
    FLYTE_DDP_GPUS is not set.

    Args:
        hp: The hyperparameters.
        nodes: The largest number of training pods.
        ranks: The number of ranks that the engine starts (0: decided by ``hp``).
        capacity: The largest number of ranks without GPUs (0: no limit).
    """
    requested = os.environ.get(REQUESTED_GPUS)
    if requested is None:
        return
    gpus = nodes * int(requested)
    who = "the training pod requests" if nodes == 1 else f"the {nodes} training pods request"
    device_type = choose_local_device_type(request_ranks(hp), gpus, who, ", or register with another profile")
    if ranks and hp.num_ranks not in (0, ranks):
        raise UserError(
            f"num_ranks={hp.num_ranks}: {who} {ranks} Elastic worker(s), each of which is a rank; set num_ranks to "
            f"{ranks}, or 0, or register with another number of nodes (FLYTE_DDP_NODES) or another profile"
        )
    if device_type == "cpu" and 0 < capacity < hp.num_ranks:
        raise UserError(
            f"num_ranks={hp.num_ranks}: {who} capacity for {capacity} rank(s) without GPUs; set num_ranks to at most "
            f"{capacity}, or 0, or register with more nodes (FLYTE_DDP_NODES) or a larger profile"
        )
    ranks = ranks or hp.num_ranks or (gpus if device_type == "cuda" else 1)
    # Only a training pod can detect bf16, so this check assumes it.
    choose_hardware(hardware_settings(hp), World(ranks, device_type), Bf16.FASTER)

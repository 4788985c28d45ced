"""Hyperparameters that do not fit each other: each is a sentence that names the value, the rule and the fix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flyte_ddp import catalog
from flyte_ddp.checks.fields import OWN_CODE, short_repr
from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.torchvision_weights import find_weights

if TYPE_CHECKING:
    from flyte_ddp.config import Hyperparameters


def check_fields_together(hp: Hyperparameters) -> None:
    """Raise UserError for the first contradiction between fields, such as ``keep="ema"`` without ``ema_decay``."""
    refuse_own_code_of_torch(hp)
    check_batch_size(hp, max(1, hp.num_ranks))
    find_weights(hp.model, hp.init_from)
    check_select_by(hp)
    for contradiction in (*find_unfit_data_fields(hp), *find_contradictions(hp)):
        raise UserError(contradiction)


def check_select_by(hp: Hyperparameters, classes: int = 2) -> None:
    """Raise UserError if a built-in objective of ``classes`` has no measure ``select_by``; own ones need ranks."""
    if hp.objective in catalog.MEASURES:
        unfit = catalog.OF_TWO_CLASSES if hp.objective == "classification" and classes > 2 else ()
        choices = ["loss", *(name for name in catalog.MEASURES[hp.objective] if name not in unfit)]
        if hp.select_by in unfit:
            raise UserError(
                f"select_by={hp.select_by!r}: is of two classes, and there are {classes}; choose {', '.join(choices)}"
            )
        if hp.select_by not in choices:
            raise unknown_name_error("select_by", hp.select_by, choices)


def find_unfit_data_fields(hp: Hyperparameters) -> Iterator[str]:
    """Yield a sentence for each field that does not fit the data set: its value, why, and what to do."""
    kind = catalog.encoded_kind(hp.dataset)
    unfit = f"not for dataset={short_repr(hp.dataset)}"
    if hp.augment in (("crop", "crop_flip") if kind else ("resized_crop",)):
        fitting = "none or resized_crop" if kind else "none, crop or crop_flip"
        yield f"augment={hp.augment!r}: {unfit}; choose {fitting}"
    if ":" in hp.augment and kind == "stream":
        yield f"augment={hp.augment!r}: not for a stream, which has no fixed order; take shards:ADDRESS"
    if hp.sample and ":" not in hp.sample:
        yield f"sample={hp.sample!r}: must have the form {OWN_CODE}"
    if hp.sample and kind not in ("shards", "image_folder"):
        yield f"sample={hp.sample!r}: {unfit}; take shards:ADDRESS or image_folder:ADDRESS, or leave it out"
    if hp.collate != "stacked" and (kind or hp.dataset in catalog.DATASETS):
        yield f"collate={hp.collate!r}: {unfit}, whose images have one size; leave it out"
    if hp.sampling != "shuffled" and kind in ("shards", "stream"):
        fix = "give weights to the parts of its index (python -m flyte_ddp.shards join), or take shuffled"
        yield f"sampling={hp.sampling!r}: {unfit}; {fix}"
    if hp.mixup and kind == "stream":
        yield f"mixup={hp.mixup:g}: a stream gives an image once, so that it is no other's partner; set mixup=0"


def find_contradictions(hp: Hyperparameters) -> Iterator[str]:
    if hp.nesterov and hp.optimizer == "sgd" and hp.momentum == 0:
        yield "nesterov=True: needs momentum above 0; set momentum or nesterov=false"
    if hp.warmup_steps and ":" in hp.schedule:
        what = f"warmup_steps={hp.warmup_steps}"
        yield f"{what}: not for a schedule of your own, which can rise itself; set warmup_steps 0"
    if hp.init_skip and not hp.init_from:
        yield f"init_skip={hp.init_skip!r}: goes with init_from, which is empty; set that, or leave both empty"
    if hp.early_stop_patience and hp.validation_fraction == 0:
        what = f"early_stop_patience={hp.early_stop_patience}"
        yield f"{what}: needs a validation split; set validation_fraction above 0"
    if -1 < hp.grad_clip_norm < 0:
        yield f"grad_clip_norm={hp.grad_clip_norm}: must be above 0, or 0 for no clipping, or -1 for the default"
    if hp.keep == "best" and hp.validation_fraction == 0:
        yield "keep='best': needs a validation split to choose by; set validation_fraction above 0"
    if hp.keep == "ema" and hp.ema_decay == 0:
        yield "keep='ema': there is no moving average; set ema_decay, for example to 0.99"


def refuse_own_code_of_torch(hp: Hyperparameters) -> None:
    for field in dataclasses.fields(hp):
        value = getattr(hp, field.name)
        if field.metadata["own"] and ":" in value and value.partition(":")[0].partition(".")[0] == "torch":
            raise UserError(
                f"{field.name}={value!r}: is torch's own, and is called in another way here; write a function of your "
                "own that returns it, or what it computes, and name that (docs/own-code.md)"
            )


def check_class_weights(text: str) -> None:
    """Raise UserError unless ``text`` is empty, "balanced", or numbers of at least 0, separated by commas."""
    if text in ("", "balanced"):
        return
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise UserError(
            f"class_weights={short_repr(text)}: must be balanced, or numbers of at least 0 separated by commas, not "
            "all 0"
        )


def check_batch_size(hp: Hyperparameters, num_ranks: int) -> None:
    if hp.batch_size < num_ranks * hp.accumulation_steps:
        raise UserError(
            f"batch_size={hp.batch_size}: must be at least ranks x accumulation_steps = "
            f"{num_ranks} x {hp.accumulation_steps}; raise batch_size, or lower num_ranks or accumulation_steps"
        )

"""Check the values of hyperparameters that depend on other hyperparameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from flyte_ddp import catalog
from flyte_ddp.core.checks.fields import OWN_CODE, short_repr
from flyte_ddp.core.errors import UserError, unknown_name_error

if TYPE_CHECKING:
    from flyte_ddp.config import Hyperparameters


def check_dataset_names(hp: Hyperparameters) -> None:
    """Raise UserError if ``dataset`` is an unknown name or lacks its address, or ``test_dataset`` does not fit.

    An empty ``test_dataset`` always fits. ``shards:ADDRESS`` fits ``shards:`` and ``stream:``, and
    ``image_folder:ADDRESS`` fits ``image_folder:``.
    """
    if ":" not in hp.dataset and hp.dataset not in catalog.DATASETS:
        raise unknown_name_error("dataset", hp.dataset, catalog.DATASET_NAMES)
    if hp.dataset in [f"{prefix}:" for prefix in catalog.WITH_ADDRESS]:
        raise UserError(f"dataset={hp.dataset!r}: must name an address, such as {hp.dataset}s3://bucket/folder")
    prefix = hp.data_kind.prefix
    fitting = prefix.replace("stream", "shards")
    if hp.test_dataset and not (prefix and catalog.find_kind(hp.test_dataset).prefix == fitting):
        must = f"{fitting}:ADDRESS for {prefix}:" if prefix else "left empty"
        raise UserError(
            f"test_dataset={hp.test_dataset!r}: must be {must}; data sets other than shards, streams and image "
            "folders contain a test set"
        )


def check_unused_settings(hp: Hyperparameters, used: Collection[str]) -> None:
    """Raise UserError if a hyperparameter is changed that other objectives use, but not the chosen objective.

    ``used`` names the hyperparameters that the chosen objective uses.
    """
    some_use = {name for names in catalog.SETTINGS_OF_OBJECTIVES.values() for name in names}
    for field in dataclasses.fields(hp):
        value = getattr(hp, field.name)
        if field.name in some_use and field.name not in used and value != field.default:
            raise UserError(
                f"{field.name}={short_repr(value)}: not used by objective={hp.objective!r}; remove {field.name}, or "
                "choose another objective"
            )


def check_class_weights(text: str) -> None:
    """Raise UserError unless ``class_weights`` is empty, "balanced", or numbers separated by commas.

    The numbers must be finite, at least 0, and not all 0.
    """
    if text in ("", "balanced"):
        return
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        rule = "must be balanced, or numbers separated by commas, each at least 0 and not all 0"
        raise UserError(f"class_weights={short_repr(text)}: {rule}")


def check_threshold(hp: Hyperparameters) -> None:
    """Raise UserError if ``threshold`` is malformed, or must be fitted although no validation split exists."""
    if hp.threshold and catalog.parse_threshold(hp.threshold)[0] != "fixed" and hp.validation_fraction == 0:
        raise UserError(
            f"threshold={hp.threshold!r}: needs a validation split for fitting; set validation_fraction above 0, "
            "or give a probability"
        )


def check_no_torch_callables(hp: Hyperparameters) -> None:
    """Raise UserError if a hyperparameter names a callable of the package torch, such as torch.nn:MSELoss.

    torch's callables have other parameters than user-defined callables.
    """
    for field in dataclasses.fields(hp):
        value = getattr(hp, field.name)
        if field.metadata["own"] and ":" in value and value.partition(":")[0].partition(".")[0] == "torch":
            raise UserError(
                f"{field.name}={value!r}: torch's callables expect other arguments; write a function that returns or "
                "calls the torch callable, and name your function (docs/own-code.md)"
            )


def list_loading_errors(hp: Hyperparameters) -> Iterator[str]:
    """Yield an error message for each hyperparameter of data loading that does not fit the kind of data set."""
    prefix, encoded = hp.data_kind.prefix, hp.data_kind.encoded
    unfit = f"not supported for dataset={short_repr(hp.dataset)}"
    if hp.augment in (("crop", "crop_flip") if encoded else ("resized_crop",)):
        fitting = "none or resized_crop" if encoded else "none, crop or crop_flip"
        yield f"augment={hp.augment!r}: {unfit}; choose {fitting}"
    if ":" in hp.augment and prefix == "stream":
        yield f"augment={hp.augment!r}: not supported for a stream, which has no fixed order; use shards:ADDRESS"
    if hp.sample and ":" not in hp.sample:
        yield f"sample={hp.sample!r}: must have the form {OWN_CODE}"
    if hp.sample and prefix not in ("shards", "image_folder"):
        yield f"sample={hp.sample!r}: {unfit}; use shards:ADDRESS or image_folder:ADDRESS, or remove sample"
    if hp.collate != "stacked" and (encoded or hp.dataset in catalog.DATASETS):
        yield f"collate={hp.collate!r}: {unfit}, whose images all have one size; remove collate"
    if hp.sampling != "shuffled" and prefix in ("shards", "stream"):
        fix = "set weights of the index's parts (python -m flyte_ddp.shards join), or use shuffled"
        yield f"sampling={hp.sampling!r}: {unfit}; {fix}"
    if hp.mixup and prefix == "stream":
        yield f"mixup={hp.mixup:g}: mixup needs random access, and a stream reads each image once; set mixup=0"


def list_contradictions(hp: Hyperparameters) -> Iterator[str]:
    """Yield an error message for each pair of hyperparameters that exclude each other.

    A ``grad_clip_norm`` between -1 and 0 also gives a message.
    """
    if hp.nesterov and hp.optimizer == "sgd" and hp.momentum == 0:
        yield "nesterov=True: needs momentum above 0; set momentum or nesterov=false"
    if hp.warmup_steps and ":" in hp.schedule:
        yield (
            f"warmup_steps={hp.warmup_steps}: not supported for a user-defined schedule, which can include a warm-up; "
            "set warmup_steps=0"
        )
    if hp.init_skip and not hp.init_from:
        yield f"init_skip={hp.init_skip!r}: requires init_from, which is empty; set init_from, or leave both empty"
    if hp.early_stop_patience and hp.validation_fraction == 0:
        yield f"early_stop_patience={hp.early_stop_patience}: needs a validation split; set validation_fraction above 0"
    if -1 < hp.grad_clip_norm < 0:
        yield f"grad_clip_norm={hp.grad_clip_norm}: must be above 0, or 0 for no clipping, or -1 for the default"
    if hp.keep == "best" and hp.validation_fraction == 0:
        yield "keep='best': needs a validation split to choose by; set validation_fraction above 0"
    if hp.keep == "ema" and hp.ema_decay == 0:
        yield "keep='ema': needs a moving average; set ema_decay, for example to 0.99"

"""What a training run is asked to do: one flat, frozen, validated dataclass.

It holds only what can change the result, because every field is part of the cache key. Other settings come from the
environment (:mod:`flyte_ddp.settings`). Nothing heavy is imported: registration, command-line parsing and cache hits
all pay for what this module loads.
"""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
import dataclasses
import functools
import json
import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, TypeVar

from dataclasses_json import DataClassJsonMixin

from flyte_ddp import catalog
from flyte_ddp.errors import UserError, unknown_name

Kind = TypeVar("Kind")
# Numbers that YAML 1.1, and so flytekit when it reads a YAML file, takes for text: 1e-1, 1.5e3.
YAML_NUMBER = re.compile(r"[-+]?(\d+e[-+]?\d+|(\d+\.\d*|\.\d+)e\d+)", re.IGNORECASE)
BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}
TYPES: dict[type, str] = {bool: "true or false", str: "text", int: "a whole number", float: "a finite number"}
LARGEST_INT = 2**53  # the console's form (protobuf Struct) carries doubles: larger ones would be rounded silently


def setting(default: Any, doc: str, *, choices: Optional[tuple[str, ...]] = None, **bounds: float) -> Any:
    """A field with its documentation and its range, by the names of ``BOUNDS``."""
    if type(default) is int:
        bounds.setdefault("at_most", LARGEST_INT)
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices, **bounds})


def names_checked(cls: type[Kind]) -> type[Kind]:
    """Makes the constructor refuse an unknown name as all other paths do, with the nearest known one."""
    made_by_dataclass = cls.__init__

    @functools.wraps(made_by_dataclass)
    def init(self: Kind, *args: Any, **values: Any) -> None:
        made_by_dataclass(self, *args, **known_fields(values))

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


@names_checked
@dataclass(frozen=True)
class Hyperparameters(DataClassJsonMixin):
    """Everything that determines a training run's result.

    Raises:
        UserError: an unknown field, a value of the wrong type, or a value out of range; on every path by which a
            value arrives (Python, command-line JSON, the console's form, a pod's msgpack).

    """

    # Data
    dataset: str = setting(
        "digits",
        "Data set: digits, mnist, fashion_mnist, cifar10; `shards:ADDRESS` of an index; `stream:ADDRESS` of an index, "
        "read in no fixed order; `image_folder:ADDRESS` of class/name.jpg; or your own `package.module:callable`.",
    )
    data_source: str = setting(
        "",
        "Where the data set's files are: a directory, or a file://, s3://, gs://, az:// or https:// mirror; "
        "empty for the usual places (a system copy, then the public address).",
    )
    test_dataset: str = setting(
        "",
        "For shards, streams and image folders: the data set to test on, `shards:ADDRESS` or `image_folder:ADDRESS`; "
        "empty holds out a tenth of the samples, or of a stream's shards.",
    )
    num_classes: int = setting(
        0, "Classes of shards whose index does not give their number; 0 if it does.", at_least=0, at_most=1_000_000
    )
    shuffle_shards: int = setting(
        16,
        "Shards from which a batch is drawn, over all ranks: more mix better, fewer need less cache.",
        at_least=1,
        at_most=4096,
    )
    shuffle_buffer: int = setting(
        1000, "For streams: samples that each worker, and each rank, mix among.", at_least=1, at_most=10_000_000
    )
    bad_samples: int = setting(
        0,
        "How many images, over all ranks, may be impossible to decode. Each is replaced by the next image of its shard "
        "that can be decoded. A stream leaves them out, and allows as many for each worker.",
        at_least=0,
    )
    validation_fraction: float = setting(
        0.1,
        "Share of the training samples held out for early stopping and for choosing the best epoch; 0 holds out none.",
        at_least=0.0,
        below=1.0,
    )
    # Model
    model: str = setting(
        "small_cnn", "small_cnn, tutorial, a torchvision classifier by name, or your own `package.module:callable`."
    )
    image_size: int = setting(
        0,
        "Side in pixels of the square that images are resized to; 0: their own size, or 224 for shards, streams and "
        "image folders.",
        at_least=0,
        at_most=4096,
    )
    init_from: str = setting(
        "",
        "A file (path or URI) with the weights to start from: a state_dict, or a checkpoint with one under "
        "`state_dict`, `model_state_dict` or `model`; all tensors must fit. Empty starts from the seed.",
    )
    init_skip: str = setting(
        "",
        "Parts of the model that start from the seed although the rest starts from `init_from`: names of modules or "
        "tensors, separated by commas, such as the head for another number of classes (`fc`, `classifier.6`).",
    )
    sync_batchnorm: bool = setting(
        True, "BatchNorm normalises by the statistics of the whole batch; false: each rank by those of its own share."
    )
    # Length
    epochs: int = setting(10, "Passes over the training samples.", at_least=1, at_most=100_000)
    max_steps: int = setting(0, "Stop after this many optimiser steps; 0 sets no limit.", at_least=0)
    # Batches
    batch_size: int = setting(
        128, "Samples per optimiser step, over all ranks and accumulation steps.", at_least=1, at_most=1_000_000
    )
    test_batch_size: int = setting(
        250, "Samples per evaluation batch; each batch is evaluated whole by one rank.", at_least=1, at_most=1_000_000
    )
    accumulation_steps: int = setting(
        1,
        "Parts of each batch, to save memory; their gradients are summed before the step.",
        at_least=1,
        at_most=100_000,
    )
    # Optimiser
    optimizer: str = setting("sgd", "Optimiser: SGD, Adam, or AdamW.", choices=("sgd", "adam", "adamw"))
    learning_rate: float = setting(0.1, "Learning rate; the peak, if the schedule has one.", above=0.0, at_most=1_000.0)
    momentum: float = setting(0.9, "Momentum of SGD; the first beta of Adam and AdamW.", at_least=0.0, below=1.0)
    weight_decay: float = setting(5e-4, "L2 for SGD and Adam, decoupled for AdamW.", at_least=0.0, at_most=1.0)
    nesterov: bool = setting(True, "Nesterov momentum; for SGD with momentum above 0.")
    schedule: str = setting(
        "one_cycle",
        "Learning rate over the run: constant, cosine to 0, or one_cycle (linear up over the first quarter, "
        "linear down to 0).",
        choices=("constant", "cosine", "one_cycle"),
    )
    warmup_steps: int = setting(
        0, "Optimiser steps of linear warm-up from 0; with one_cycle they replace the first quarter.", at_least=0
    )
    label_smoothing: float = setting(
        0.0, "Share of each training label spread evenly over all classes.", at_least=0.0, below=1.0
    )
    grad_clip_norm: float = setting(
        -1.0,
        "Largest L2 norm of the whole gradient; larger ones are scaled down. 0: no clipping. -1: 1 for the two small "
        "CNNs, which do not normalise, on shards, streams and image folders; else no clipping.",
        at_least=-1.0,
    )
    # Regularisation and selection
    augment: str = setting(
        "none",
        "Training-time augmentation: none, crop (shifted by up to 1/8 of the side), crop_flip (crop, and mirrored half "
        "of the time), or, for shards, streams and image folders, resized_crop (a random part at a random size, and "
        "mirrored half of the time).",
        choices=("none", "crop", "crop_flip", "resized_crop"),
    )
    ema_decay: float = setting(
        0.0, "Decay per step of the exponential moving average of the weights; 0 keeps none.", at_least=0.0, below=1.0
    )
    early_stop_patience: int = setting(
        0, "Stop after this many evaluations without a better validation loss; 0 never stops early.", at_least=0
    )
    keep: str = setting(
        "last",
        "Weights to return: of the last step, of the evaluation with the best validation loss, or the moving average.",
        choices=("last", "best", "ema"),
    )
    seed: int = setting(
        0, "Seed of the initial weights, the order of samples, the split and augmentation.", at_least=0, at_most=2**31
    )
    # Hardware
    num_ranks: int = setting(
        0,
        "Processes that train together; 0: one for each visible GPU, else one for each CPU core, at most 4.",
        at_least=0,
        at_most=4096,
    )
    backend: str = setting(
        "auto", "Communication: nccl (GPUs), gloo (CPUs), or auto.", choices=("auto", "nccl", "gloo")
    )
    strategy: str = setting(
        "auto",
        "How gradients are averaged over the ranks: ddp (torch's DistributedDataParallel), hooks (an all-reduce for "
        "each parameter), shared_memory (CPU ranks of one machine, on Linux), or auto: shared memory if possible, "
        "else ddp.",
        choices=("auto", "ddp", "hooks", "shared_memory"),
    )
    precision: str = setting(
        "auto",
        "fp32; bf16 (autocast); auto takes bf16 on GPUs that have it, and for the two small CNNs on CPUs where it was "
        "measured to be faster (Intel's with AMX, AMD's of families 25 and 26 with AVX512-BF16); fp64 for comparisons.",
        choices=("auto", "fp32", "bf16", "fp64"),
    )
    channels_last: str = setting(
        "auto",
        "Memory order of images and weights: on, off, or auto: on for the two small CNNs, and for torchvision's models "
        "on GPUs.",
        choices=("auto", "on", "off"),
    )
    compile: bool = setting(False, "Compile the model with torch.compile; pays off in long runs of large models only.")
    deterministic: bool = setting(
        False, "Use only operations with bit-equal results from run to run (torch.use_deterministic_algorithms)."
    )
    # Cadence
    log_interval: int = setting(10, "Optimiser steps between logged training losses.", at_least=1)
    eval_interval: int = setting(
        1, "Epochs between evaluations; the last epoch is always evaluated.", at_least=1, at_most=100_000
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = checked(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        check_names(self)
        check_combinations(self)

    @classmethod
    def from_dict(cls, kvs: Any, **_: Any) -> "Hyperparameters":
        """Builds from untrusted key-value pairs, such as decoded JSON; the inherited one drops and converts."""
        return cls(**known_fields(kvs))

    @classmethod
    def from_json(cls, s: Any, **_: Any) -> "Hyperparameters":
        """The command line's way in (``--hp '{...}'``, ``--hp preset.json``, ``--inputs-file``)."""
        try:
            values = json.loads(s)
        except (ValueError, RecursionError) as error:
            raise UserError(f"hyperparameters are not valid JSON: {error}") from None
        values = known_fields(values)
        for field in dataclasses.fields(cls):
            text = values.get(field.name)
            if field.type in (int, float) and isinstance(text, str) and YAML_NUMBER.fullmatch(text):
                values[field.name] = float(text)
        return cls(**values)

    @classmethod
    def __pre_deserialize__(cls, values: Any) -> dict[str, Any]:
        """Mashumaro's hook: the only place that sees raw values on a cluster, before they are silently converted."""
        return {**vars(cls.from_dict(values))}


def known_fields(values: Any) -> dict[str, Any]:
    """A copy of the mapping; an error if a key is no hyperparameter's name."""
    if not isinstance(values, Mapping):
        raise UserError(f"hyperparameters must be a JSON object, got {shown(values)}")
    names = [field.name for field in dataclasses.fields(Hyperparameters)]
    for key in values:
        if key not in names:
            raise unknown_name("hyperparameter", str(key), names)
    return dict(values)


def checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """The value in the field's own type and range.

    A whole number given as ``3.0`` is taken for an int, because the console's form (protobuf Struct) has only doubles.
    Any other value of another type is refused.
    """
    rule = field.metadata
    kind: Any = field.type
    if kind is bool or kind is str:
        fits = isinstance(value, kind)
    else:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        fits = fits and (kind is float or value == int(value))
    if not fits:
        misread = kind is str and isinstance(value, bool)
        hint = "; YAML takes on, off, yes and no for true and false unless they are in quotes" if misread else ""
        raise UserError(f"{field.name}={shown(value)}: must be {TYPES[kind]}{hint}")
    value = kind(value)
    if rule["choices"] is not None and value not in rule["choices"]:
        raise unknown_name(field.name, value, rule["choices"])
    for key, holds in BOUNDS.items():
        if key in rule and not holds(value, rule[key]):
            raise UserError(f"{field.name}={shown(value)}: must be {key.replace('_', ' ')} {rule[key]}")
    return value


def shown(value: Any) -> str:
    """A value as an error message shows it: on one line and not too long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_names(hp: Hyperparameters) -> None:
    """Refuses unknown data sets and models, with the choices."""
    if ":" not in hp.dataset and hp.dataset not in catalog.DATASETS:
        raise unknown_name("dataset", hp.dataset, [*catalog.DATASETS, *catalog.DATASET_FORMS])
    if hp.dataset in [f"{kind}:" for kind in catalog.ENCODED_KINDS]:
        raise UserError(f"dataset={hp.dataset!r}: must name an address, such as {hp.dataset}s3://bucket/folder")
    kind = catalog.encoded_kind(hp.dataset)
    fitting = kind.replace("stream", "shards")
    if hp.test_dataset and (not kind or catalog.encoded_kind(hp.test_dataset) != fitting):
        raise UserError(
            f"test_dataset={hp.test_dataset!r}: must be {f'{fitting}:ADDRESS for {kind}:' if kind else 'left empty'}; "
            "other data sets than shards, streams and image folders have a test set of their own"
        )
    if ":" not in hp.model:
        if reason := catalog.why_unsupported(hp.model):
            raise UserError(f"model={hp.model!r} cannot be used: {reason}; choose a classifier such as resnet18")
        if hp.model not in catalog.MODELS:
            raise unknown_name("model", hp.model, [*catalog.MODELS, "package.module:callable"])


def check_batch_size(hp: Hyperparameters, num_ranks: int) -> None:
    """Refuses a batch that does not have a sample for each rank in each of its parts."""
    if hp.batch_size < num_ranks * hp.accumulation_steps:
        raise UserError(
            f"batch_size={hp.batch_size}: must be at least ranks x accumulation_steps = "
            f"{num_ranks} x {hp.accumulation_steps}; raise batch_size, or lower num_ranks or accumulation_steps"
        )


def check_combinations(hp: Hyperparameters) -> None:
    """Refuses fields that contradict one another."""
    check_batch_size(hp, max(1, hp.num_ranks))
    encoded = bool(catalog.encoded_kind(hp.dataset))
    if hp.augment in (("crop", "crop_flip") if encoded else ("resized_crop",)):
        fitting = "none or resized_crop" if encoded else "none, crop or crop_flip"
        raise UserError(f"augment={hp.augment!r}: not for dataset={shown(hp.dataset)}; choose {fitting}")
    if hp.nesterov and hp.optimizer == "sgd" and hp.momentum == 0:
        raise UserError("nesterov=True: needs momentum above 0; set momentum or nesterov=false")
    if hp.init_skip and not hp.init_from:
        raise UserError(
            f"init_skip={hp.init_skip!r}: goes with init_from, which is empty; set that, or leave both empty"
        )
    if hp.early_stop_patience and hp.validation_fraction == 0:
        what = f"early_stop_patience={hp.early_stop_patience}"
        raise UserError(f"{what}: needs a validation split; set validation_fraction above 0")
    if -1 < hp.grad_clip_norm < 0:
        raise UserError(
            f"grad_clip_norm={hp.grad_clip_norm}: must be above 0, or 0 for no clipping, or -1 for the default"
        )
    if hp.keep == "best" and hp.validation_fraction == 0:
        raise UserError("keep='best': needs a validation split to choose by; set validation_fraction above 0")
    if hp.keep == "ema" and hp.ema_decay == 0:
        raise UserError("keep='ema': there is no moving average; set ema_decay, for example to 0.99")

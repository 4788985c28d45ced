"""Hyperparameters of a training run, as one flat, frozen and checked dataclass.

Every field is part of the cache key. Other settings come from the environment (:mod:`flyte_ddp.core.settings`). This
module imports nothing heavy, because registration, command-line parsing and cache hits import it.
"""

# No "from __future__ import annotations" here: flytekit derives the console's form from real types.
import dataclasses
from dataclasses import dataclass

from flyte_ddp import catalog
from flyte_ddp.config.checks import (
    check_class_weights,
    check_dataset_names,
    check_no_torch_callables,
    check_threshold,
    check_unused_settings,
    list_contradictions,
    list_loading_errors,
)
from flyte_ddp.core.checks.fields import OWN_CODE, CheckedFields, setting, short_repr
from flyte_ddp.core.checks.parsing import YAML_NUMBER, JsonObject, iterate_json_strings, parse_json
from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.hardware import check_batch_size

FIELDS_WITH_OPTIONS = ("model", "objective")  # hyperparameters that name callables with options


@dataclass(frozen=True, repr=False)
class Hyperparameters(CheckedFields, called="hyperparameter"):
    """All values that determine the result of a training run.

    Raises:
        UserError: A field is unknown, or a value is not allowed.
    """

    # Data
    dataset: str = setting(
        "digits",
        "Data set: digits, mnist, fashion_mnist, cifar10; `shards:ADDRESS` of an index; `stream:ADDRESS` of an index, "
        "read in no fixed order; `image_folder:ADDRESS` of class/name.jpg; or your own `package.module:callable`.",
        own=True,
    )
    data_source: str = setting(
        "",
        "Location of the data set's files: a directory, or a file://, s3://, gs://, az:// or https:// mirror; empty: "
        "a system copy, else the public address. A user-defined callable gets the value unchanged.",
    )
    test_dataset: str = setting(
        "",
        "For shards, streams and image folders: the data set to test on, `shards:ADDRESS` or `image_folder:ADDRESS`; "
        "empty: a tenth of the samples, or of a stream's shards, is held out.",
    )
    num_classes: int = setting(
        0, "Number of classes, or of tokens for texts; 0: from the data set.", at_least=0, at_most=1_000_000
    )
    sample: str = setting(
        "",
        "For shards and image folders: your own `package.module:callable`, which makes an image and a target from "
        "the members of a sample; empty: an image and its class.",
        own=True,
    )
    collate: str = setting(
        "stacked",
        "How samples other than images are collated into a batch: stacked (all samples have one shape), padded (the "
        "first dimension is padded to the longest sample; the model also gets `mask`, true at values), or your own "
        "`package.module:callable`, called with a list of pairs (inputs, targets).",
        choices=("stacked", "padded"),
        own=True,
    )
    shuffle_shards: int = setting(
        16,
        "Number of shards from which a batch is drawn, over all ranks: more shards mix better, fewer need less cache.",
        at_least=1,
        at_most=4096,
    )
    shuffle_buffer: int = setting(
        1000,
        "For streams: size of the shuffle buffer of each worker, and of each rank, in samples.",
        at_least=1,
        at_most=10_000_000,
    )
    bad_samples: int = setting(
        0,
        "For shards, streams and image folders: maximum number of images that cannot be decoded, over all ranks. "
        "Each is replaced by the next image of the same shard that can be decoded. In a stream, each worker skips up "
        "to this number of images.",
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
        "small_cnn",
        "For images: small_cnn, tutorial, or the name of a torchvision classifier; for any data: your own "
        "`package.module:callable`.",
        own=True,
    )
    image_size: int = setting(
        0,
        "Side, in pixels, of the square to which images are resized; 0: the stored size, or 224 for shards, streams "
        "and image folders, or the size that `torchvision:` weights expect.",
        at_least=0,
        at_most=4096,
    )
    init_from: str = setting(
        "",
        "Initial weights: `torchvision:DEFAULT` (or other weights of torchvision for the model), or a file (path or "
        "URI) with a state_dict, or with a checkpoint that has a state_dict under `state_dict`, `model_state_dict` "
        "or `model`; all tensors must fit. Empty: random weights, drawn by the seed.",
    )
    init_skip: str = setting(
        "",
        "Parts of the model that start with random weights although `init_from` is set: names of modules or tensors, "
        "separated by commas, such as the head for another number of classes (`fc`, `classifier.6`).",
    )
    freeze: str = setting(
        "",
        "Parts of the model that are not trained: names of modules or tensors, separated by commas (`layer1`, "
        "`fc.bias`). A frozen module also stays in evaluation mode: its BatchNorm keeps its statistics, and its "
        "dropout is off.",
    )
    sync_batchnorm: bool = setting(
        True,
        "BatchNorm normalises by the statistics of the whole batch; false: by those of each rank's part of the batch.",
    )
    # Objective
    objective: str = setting(
        "classification",
        "What is minimised and measured: classification (a class for each sample), multilabel (several labels), "
        "regression (numbers), segmentation (a class for each pixel), language (the next token at each position of a "
        "text), or your own `package.module:callable`.",
        choices=tuple(catalog.SETTINGS_OF_OBJECTIVES),
        own=True,
    )
    options: str = setting(
        "",
        'Options of the model and the objective, a JSON object or its text: `{"model": {"width": 128}, "objective": '
        '{"loss": "huber"}}`. Regression has `loss`: mse, l1 or huber; language has `shift` and `decode`; '
        "user-defined callables get their options as keyword arguments.",
        json=True,
    )
    class_weights: str = setting(
        "",
        "Weights of the classes or labels in the loss (not for regression and language): numbers separated by "
        "commas, or balanced (inverse to each class's number of training samples); empty: all 1.",
    )
    threshold: str = setting(
        "",
        "For classification of two classes: the probability from which the second class is predicted: a number, or a "
        "rule that fits the threshold on the validation split. f1: the highest F1; recall=0.9: the highest precision "
        "with a recall of at least 0.9; cost=10: the lowest cost, where a missed sample of the second class costs as "
        "much as 10 false alarms. Empty: the more probable class is predicted.",
        number=True,
    )
    # Length
    epochs: int = setting(10, "Passes over the training samples.", at_least=1, at_most=100_000)
    max_steps: int = setting(0, "Stop after this many optimiser steps; 0 sets no limit.", at_least=0)
    # Batches
    batch_size: int = setting(
        128, "Samples per optimiser step, over all ranks and accumulation steps.", at_least=1, at_most=1_000_000
    )
    test_batch_size: int = setting(
        250, "Samples per evaluation batch; each batch is evaluated by a single rank.", at_least=1, at_most=1_000_000
    )
    sampling: str = setting(
        "shuffled",
        "Training samples of an epoch: shuffled (each once), weighted (drawn with replacement by the data set's "
        "sample_weights), balanced (drawn with equal frequencies of all classes), or your own "
        "`package.module:callable`, called with the samples, the seed and the epoch. For shards and streams: only "
        "shuffled.",
        choices=("shuffled", "weighted", "balanced"),
        own=True,
    )
    accumulation_steps: int = setting(
        1,
        "Micro-batches of each batch, to save memory; gradients are summed before the step.",
        at_least=1,
        at_most=100_000,
    )
    # Optimiser
    optimizer: str = setting(
        "sgd",
        "Optimiser: sgd, adam, adamw, or your own `package.module:callable`, called with the model and the "
        "hyperparameters, which returns an optimiser or a list of optimisers; parameter groups keep their learning "
        "rates.",
        choices=("sgd", "adam", "adamw"),
        own=True,
    )
    learning_rate: float = setting(0.1, "Learning rate; the peak, if the schedule has one.", above=0.0, at_most=1_000.0)
    momentum: float = setting(0.9, "Momentum of SGD; the first beta of Adam and AdamW.", at_least=0.0, below=1.0)
    weight_decay: float = setting(5e-4, "L2 for SGD and Adam, decoupled for AdamW.", at_least=0.0, at_most=1.0)
    decay_norms: bool = setting(
        True,
        "Weight decay for all parameters; false: no weight decay for parameters with fewer than two dimensions, such "
        "as biases, and for parameters of normalisation layers. A user-defined optimiser sets its weight decay "
        "itself.",
    )
    nesterov: bool = setting(True, "Nesterov momentum; for SGD with momentum above 0.")
    schedule: str = setting(
        "one_cycle",
        "Learning rate over the run: constant, cosine to 0, one_cycle (linear up over the first quarter, linear down "
        "to 0), or your own `package.module:callable`, called with the step and the total number of steps, which "
        "returns the factor of the learning rate.",
        choices=("constant", "cosine", "one_cycle"),
        own=True,
    )
    warmup_steps: int = setting(
        0,
        "Optimiser steps of linear warm-up from 0; with one_cycle, they replace the rise over the first quarter. Not "
        "for a user-defined schedule.",
        at_least=0,
    )
    label_smoothing: float = setting(
        0.0, "For classification: share of each training label spread evenly over all classes.", at_least=0.0, below=1.0
    )
    grad_clip_norm: float = setting(
        -1.0,
        "Maximum L2 norm of the whole gradient; a larger gradient is scaled down. 0: no clipping. -1: 1 for the two "
        "small CNNs, which have no normalisation layers, on shards, streams and image folders; else no clipping.",
        at_least=-1.0,
    )
    # Regularisation and selection
    augment: str = setting(
        "none",
        "Training-time augmentation: none, crop (shifted by up to 1/8 of the side), crop_flip (crop, and mirrored "
        "half of the time), resized_crop (for shards, streams and image folders: a random part at a random size, and "
        "mirrored half of the time), or your own `package.module:callable` (not for streams).",
        choices=("none", "crop", "crop_flip", "resized_crop"),
        own=True,
    )
    mixup: float = setting(
        0.0,
        "Alpha of mixup: each input is mixed with another input of its batch by a share drawn from Beta(alpha, "
        "alpha), and the losses of both targets are mixed likewise; 0: no mixup.",
        at_least=0.0,
        at_most=100.0,
    )
    ema_decay: float = setting(
        0.0, "Decay per step of the exponential moving average of the weights; 0: no average.", at_least=0.0, below=1.0
    )
    early_stop_patience: int = setting(
        0,
        "Stop after this many evaluations in a row without an improvement by `select_by`; 0: no early stopping.",
        at_least=0,
    )
    select_by: str = setting(
        "loss",
        "Measure by which the best evaluation of the validation split is chosen: loss, or a measure of the objective.",
    )
    keep: str = setting(
        "last",
        "Weights to return: of the last step, of the best evaluation by `select_by`, or the moving average (ema).",
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
        "fp32; bf16 (autocast); fp64 (for comparisons); auto: bf16 on GPUs that support bf16, and for the two small "
        "CNNs on CPUs on which bf16 was measured to be faster (Intel's with AMX, AMD's of families 25 and 26 with "
        "AVX512-BF16), else fp32.",
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
        super().__post_init__()
        check_dataset_names(self)
        if ":" not in self.model and self.model not in catalog.MODELS:
            raise unknown_name_error("model", self.model, [*catalog.MODELS, OWN_CODE], catalog.MODELS_PAGE)
        if self.objective in catalog.SETTINGS_OF_OBJECTIVES:
            check_unused_settings(self, catalog.SETTINGS_OF_OBJECTIVES[self.objective])
        self.parse_options()
        check_class_weights(self.class_weights)
        check_threshold(self)
        check_no_torch_callables(self)
        check_batch_size(self.batch_size, self.accumulation_steps, max(1, self.num_ranks))
        catalog.find_torchvision_weights(self.model, self.init_from)
        catalog.check_select_by(self.select_by, self.objective)
        for contradiction in (*list_loading_errors(self), *list_contradictions(self)):
            raise UserError(contradiction)

    @property
    def data_kind(self) -> catalog.DataKind:
        """Return the kind of a data set with an address, or NO_ADDRESS for other data sets."""
        return catalog.find_kind(self.dataset)

    def list_user_callables(self, *skipped_fields: str) -> tuple[str, ...]:
        """Return the user-defined ``package.module:callable`` that the fields and ``options`` name, each once.

        Fields in ``skipped_fields`` are skipped.
        """
        fields = [field.name for field in dataclasses.fields(self) if field.metadata["own"]]
        skipped_fields = (*skipped_fields, *["dataset"] * bool(self.data_kind.prefix))
        values: list[str] = [getattr(self, name) for name in fields if name not in skipped_fields]
        if (option := catalog.CODE_OPTIONS.get(self.objective)) and "objective" not in skipped_fields:
            values.append(str(self.parse_options().get("objective", {}).get(option, "")))
        return tuple(dict.fromkeys(value for value in values if ":" in value))

    def parse_options(self) -> dict[str, JsonObject]:
        """Return the options of the model and the objective, under the keys "model" and "objective".

        The options are keyword arguments. A key without options may be missing.

        Raises:
            UserError: ``options`` is not a JSON object of this form, or has a number written as text.
        """
        try:
            found = parse_json(self.options or "{}")
        except ValueError as error:
            raise UserError(f"options={short_repr(self.options)}: is not JSON ({error})") from None
        if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
            raise UserError(
                f"options={short_repr(self.options)}: must be a JSON object that maps hyperparameters to objects, such "
                'as {"model": {"width": 128}}'
            )
        for name in found:
            if name not in FIELDS_WITH_OPTIONS:
                raise unknown_name_error("key of options", name, FIELDS_WITH_OPTIONS)
        for text in filter(YAML_NUMBER.fullmatch, iterate_json_strings(found)):
            raise UserError(
                f"options={short_repr(self.options)}: {text!r} is text, not a number; write numbers without quotes, "
                "and in YAML with a decimal point and a signed exponent, such as 1.0e-4"
            )
        return found

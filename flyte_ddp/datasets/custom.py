"""A data set that a user-defined callable returns. The hyperparameter ``dataset`` names the callable."""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import waiting
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.samples.leaves import Leaves, convert_to_array, get_leaves_form, group_leaves, restore_leaves
from flyte_ddp.core.settings import read_number_variable
from flyte_ddp.core.user_code.callables import check_positional_arguments, load_callable
from flyte_ddp.core.user_code.source import compute_user_code_digest
from flyte_ddp.datasets.images import image_arrays
from flyte_ddp.datasets.leaf_conversion import convert_weights
from flyte_ddp.datasets.on_demand_set import (
    OnDemand,
    OnDemandSet,
    call_seeded,
    convert_sample,
    read_user_item,
    refuse_stream,
    require_samples,
    split_item,
)
from flyte_ddp.datasets.sample_arrays import SampleArrays, arrays
from flyte_ddp.datasets.table import Table, load_table
from flyte_ddp.storage.identity import digest_lines, hash_address_content

SETS = ("training set", "test set")


@dataclass(frozen=True)
class CustomSet:
    """A data set that the callable ``spec`` (``package.module:callable``) returns for a data source."""

    spec: str

    def fingerprint(self, source: str) -> str:
        """Return a text that changes with the callable's name or code, with ``source``, or with the data at ``source``.

        Imports no user code. Puts the working directory first on ``sys.path``. Records the digests of the source files,
        to notice later changes. If ``source`` is a remote address, sends requests with retries, and may download the
        file.

        Raises:
            UserError: The spec is malformed, or ``source`` cannot be read. Also if the module does not exist, or has
                changed since this process imported the module.
        """
        identity = digest_lines([self.spec, compute_user_code_digest(self.spec), source, hash_address_content(source)])
        return f"{re.sub(r'[^A-Za-z0-9_.]', '-', self.spec)}-{identity[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[SampleArrays | OnDemandSet, str]:
        """Call the user's callable with ``source``, and return its checked data and the call as text.

        Random generators are seeded during the call. If the result is a pair of map-style sets, all items are read into
        memory. If the result is a set on demand, only the first training item is read. Exceptions of the user's code
        pass through. Sets the time limit of waits in this process to FLYTE_DDP_TIMEOUT.

        Args:
            source: The hyperparameter ``data_source``.
            workspace: Unused, because user code decides where to download to.
            progress: Shows the number of items that were read.

        Raises:
            UserError: The callable cannot be loaded or has other parameters, or the returned data are unfit.
            UserCodeError: Reading an item of a map-style set failed.
            MachineError: An item did not arrive within FLYTE_DDP_TIMEOUT.
        """
        del workspace  # user code decides where to download to
        waiting.limit_seconds = read_number_variable("FLYTE_DDP_TIMEOUT", at_least=1.0)
        function = load_callable(self.spec)
        if isinstance(function, type) and issubclass(function, Table):
            function = partial(load_table, self.spec, function)
        check_positional_arguments(f"dataset={self.spec!r}", function, "data_source")
        result = call_seeded(function, source)
        called = f"{self.spec}({source!r})"
        if isinstance(result, OnDemand):
            samples = len(result.train), len(result.test)
            weights = convert_weights(getattr(result.train, "sample_weights", None), samples[0])
            content = [*map(str, samples), *result.classes, *([] if weights is None else map(str, weights.tolist()))]
            digest = digest_lines([self.fingerprint(source), *content])
            pictures = has_images("training set", result.train)
            for name, side in zip(SETS, (result.train, result.test), strict=True):
                refuse_stream(f"dataset={self.spec!r}: the {name}", side)  # some sets open a stream at the first item
            return OnDemandSet(self.spec, source, *samples, result.classes, digest, weights, pictures), called
        return make_arrays_from_user_result(self.spec, result, progress), called


def make_arrays_from_user_result(spec: str, result: Any, progress: Progress) -> SampleArrays:
    """Convert the value that a user's callable returned to SampleArrays with the name ``spec``.

    A SampleArrays is only renamed. A pair (training set, test set) of map-style sets is read into memory.
    Class names and weights are the training set's attributes ``classes`` and ``sample_weights``, if these exist.
    Without ``classes``, class numbers are named "0", "1" and so on.

    Raises:
        UserError: The result has another type, or a set is empty or has unfit items.
        UserCodeError: Reading an item failed.
        MachineError: An item did not arrive within FLYTE_DDP_TIMEOUT.
    """
    if isinstance(result, SampleArrays):
        return replace(result, name=spec)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        rule = "arrays(...), image_arrays(...) or on_demand(...) of flyte_ddp, or a pair (training set, test set)"
        raise UserError(f"dataset={spec!r}: returned {type(result).__name__}; must return {rule}")
    try:
        pictures = has_images(SETS[0], result[0])
        train, test = (
            read_map_style_set(name, side, progress, pictures=pictures) for name, side in zip(SETS, result, strict=True)
        )
        classes, weights = (getattr(result[0], attribute, None) for attribute in ("classes", "sample_weights"))
        named = () if classes is None else [*classes]
        if not pictures:
            return arrays(train, test, classes=named, name=spec, sample_weights=weights)
        labels = [convert_to_array("labels", targets) for _, targets in (train, test)]
        if not named and labels[0].dtype.kind in "iu" and labels[0].ndim == 1:
            named = [*map(str, range(max(each.max() for each in labels) + 1))]
        return image_arrays(*train, *test, named, name=spec, sample_weights=weights)
    except UserError as error:
        raise UserError(f"dataset={spec!r}: {error.message}") from error


def has_images(set_name: str, samples: Any) -> bool:
    """Read the first item of a map-style set and return whether the item is a pair with a picture.

    A picture is a PIL image, or uint8 with two or three dimensions.

    Raises:
        UserError: ``samples`` is empty or no map-style set.
        UserCodeError: Reading the item failed.
        MachineError: The item did not arrive within FLYTE_DDP_TIMEOUT.
    """
    require_samples(set_name, samples)
    item = read_user_item(f"{set_name}: item 0", samples, 0)
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    pixels = getattr(item[0], "numpy", lambda: item[0])()
    return hasattr(pixels, "convert") or (getattr(pixels, "dtype", None) == np.uint8 and pixels.ndim in (2, 3))


def read_map_style_set(set_name: str, samples: Any, progress: Progress, *, pictures: bool) -> tuple[Leaves, Leaves]:
    """Read all items into memory, and return inputs and targets. Each leaf is a list with one value for each item.

    If ``pictures`` is True, the inputs are one array uint8 [N, H, W, C] instead.

    Raises:
        UserError: An item is neither a pair nor a dict with ``labels``, or items differ in form or image size. Also if
            the set is empty or no map-style set.
        UserCodeError: Reading an item failed.
        MachineError: An item did not arrive within FLYTE_DDP_TIMEOUT.
    """
    pairs, images = list[tuple[Leaves, Leaves]](), np.empty(0, np.uint8)
    names = [f"{set_name}: item {index}" for index in range(require_samples(set_name, samples))]
    with progress.track(set_name, len(names), "samples") as advance:
        for index, name in enumerate(names):
            try:
                inputs, targets = split_item(read_user_item(name, samples, index))
            except ValueError as error:
                raise UserError(f"{name} {error}; for whole arrays, return arrays(train, test)") from None
            if pictures:
                pixels, targets = convert_sample(name, (inputs, targets))
                images = images if index else np.empty((len(names), *pixels.shape), np.uint8)
                if pixels.shape != images.shape[1:]:
                    one, other = ("x".join(map(str, shape)) for shape in (pixels.shape, images.shape[1:]))
                    fix = "all images must have the same size; resize them and convert them to the same mode"
                    raise UserError(f"{name} is {one} and item 0 is {other}; {fix}")
                images[index], inputs = pixels, None
            pairs.append((inputs, targets))
            advance(1)
    inputs, targets = (
        restore_leaves(get_leaves_form(sides[0]), group_leaves(kind, sides, names))
        for kind, sides in zip(("inputs", "targets"), zip(*pairs, strict=True), strict=True)
    )
    return images if pictures else inputs, targets

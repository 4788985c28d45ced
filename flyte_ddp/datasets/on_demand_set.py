"""Data sets that stay where they are. User code reads each sample when a batch needs the sample."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import MachineError, UserCodeError, UserError
from flyte_ddp.core.machine.waiting import limit_wait
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.samples.class_names import normalize_class_names
from flyte_ddp.core.samples.leaves import Leaves, check_not_masked, convert_to_array
from flyte_ddp.core.samples.pictures import convert_to_uint8_pixels
from flyte_ddp.core.user_code.callables import load_callable
from flyte_ddp.datasets.item_set import ItemSet
from flyte_ddp.datasets.prepared_folder import Description, read_weights

MAP_STYLE = {"__len__": "len()", "__getitem__": "[number]"}  # methods of a map-style set, and how to call them


@dataclass(frozen=True, eq=False)
class OnDemand:
    """The return value of :func:`on_demand`: two map-style data sets and the names of the classes."""

    train: Any
    test: Any
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class OnDemandSet(ItemSet):
    """A prepared data set whose folder holds only the description. Each process calls the user's function again."""

    name: str  # the ``package.module:callable``
    source: str  # the hyperparameter ``data_source``, given to the callable
    train_samples: int
    test_samples: int
    classes: tuple[str, ...]
    digest: str
    sample_weights: NDArray[np.float64] | None = None
    pictures: bool = False  # whether inputs are pictures, judged by the first training sample

    @cached_property
    def sets(self) -> OnDemand:
        """Call the user's function at the first use in this process, and return its data sets.

        Random generators are seeded during the call. Exceptions of the function pass through.

        Raises:
            UserError: The function cannot be loaded or returned another type, or the number of samples has changed.
        """
        found = call_seeded(load_callable(self.name), self.source)
        if not isinstance(found, OnDemand):
            raise UserError(f"dataset={self.name!r}: returned {type(found).__name__} now, but on_demand(...) before")
        lengths = len(found.train), len(found.test)
        before = self.train_samples, self.test_samples
        if lengths != before:
            told = f"{before[0]} and {before[1]} samples"
            change = f"has {lengths[0]} and {lengths[1]} samples now, but had {told} when it was prepared"
            raise UserError(f"dataset={self.name!r}: {change}; {explain_change(before, lengths)}")
        return found

    @cached_property
    def transforms_to_seed(self) -> dict[str, list[Any]]:
        """Return the random transforms of the user's data sets that need seeds, by side ("train", "test").

        The first use may call the user's function, as :attr:`sets` does.
        """
        from flyte_ddp.core.loading.user_functions import list_seedable_transforms

        sides = {"train": self.sets.train, "test": self.sets.test}
        return {
            side: [
                each
                for wrapped in list_nested_sets(samples)
                for each in list_seedable_transforms(wrapped, "__getitem__")
            ]
            for side, samples in sides.items()
        }

    def read_item(self, side: str, sample: int, seed: int, epoch: int | None) -> tuple[Leaves, Leaves]:
        """Return inputs and targets of an item, as user code reads them. Pictures are uint8 [H, W, C].

        First seeds the global random generators, and does not restore them. The seed depends on ``seed``, ``epoch``
        (None counts as 0) and the number of the sample.

        Raises:
            UserError: The item is no pair of inputs and targets, or its picture is unfit.
            UserCodeError: User code fails.
            MachineError: User code does not return within FLYTE_DDP_TIMEOUT.
        """
        from flyte_ddp.core.loading.user_functions import seed_for_sample

        samples, where = getattr(self.sets, side), f"dataset={self.name!r}: {side} sample {sample}"
        seed_for_sample("dataset", seed, epoch or 0, sample, self.transforms_to_seed[side])
        try:
            pair = split_item(read_user_item(where, samples, sample))
        except ValueError as error:
            raise UserError(f"{where} {error}") from None
        return convert_sample(where, pair) if self.pictures else pair

    def describe_content(self) -> Mapping[str, Any]:
        return {"on_demand": [self.train_samples, self.test_samples], "pictures": self.pictures}

    @classmethod
    def open(cls, folder: Path, description: Description) -> Self:
        train, test = description.content["on_demand"]
        name, classes, digest = description.name, description.classes, description.digest
        weights, pictures = read_weights(folder, description), description.content["pictures"]
        return cls(name, description.data_source, train, test, classes, digest, weights, pictures)

    def __reduce__(self) -> tuple[Any, ...]:  # without the user's sets, because each process creates them itself
        return OnDemandSet, tuple(getattr(self, name) for name in self.__dataclass_fields__)


def explain_change(before: tuple[int, int], now: tuple[int, int]) -> str:
    """Return advice for an error about a set whose numbers of training and test samples have changed.

    In a run of several ranks, the advice says if the set seems to divide its samples by the ranks. Imports torch.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    shares = [{length // ranks, -(-length // ranks)} for length in before]
    if ranks > 1 and all(length in share for length, share in zip(now, shares, strict=True)):
        return f"its len() depends on the {ranks} ranks, but each rank needs all samples; read by number, without ranks"
    return "the number of samples must not change"


def call_seeded(function: Callable[[str], Any], source: str) -> Any:
    """Return ``function(source)``, called with the global generators of Python, NumPy and torch seeded with 0.

    The states of the generators are restored, except those of torch's GPU generators. Imports torch.
    """
    import torch

    with keep_random_state():
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        return function(source)


def on_demand(train: Any, test: Any, *, classes: Sequence[str] = ()) -> OnDemand:
    """Return a data set whose samples stay where they are, for a callable that the hyperparameter ``dataset`` names.

    ``train`` and ``test`` are map-style data sets with ``len(set)``. ``set[i]`` for i in 0..len-1 is (inputs, targets),
    or a dict with the targets as ``labels``. Inputs and targets are arrays, numbers or CPU tensors, or tuples or dicts
    of them. Their shapes must be equal unless ``collate`` pads.

    Pictures are PIL images, uint8 [H, W] or [H, W, C], or tensors [C, H, W]. If the inputs of the first training sample
    are a picture, all inputs must be pictures of one size.

    Each loader process calls the callable itself. Random generators are seeded before each sample, so random numbers
    depend only on seed, epoch and sample. An attribute ``sample_weights`` of ``train`` is used for ``sampling``
    "weighted".

    Raises:
        UserError: A set is empty or no map-style set, or two names in ``classes`` are equal.
        MachineError: ``len(set)`` takes longer than FLYTE_DDP_TIMEOUT.
    """
    for name, samples in (("train", train), ("test", test)):
        require_samples(name, samples)
    return OnDemand(train, test, normalize_class_names("classes", classes))


def require_samples(set_name: str, samples: Any) -> int:
    """Return ``len(samples)``.

    Raises:
        UserError: The set is empty or not map-style, or ``len()`` fails. The text begins with ``set_name``.
        MachineError: ``len()`` takes longer than FLYTE_DDP_TIMEOUT.
    """
    kind = type(samples).__name__
    for method, missing in MAP_STYLE.items():
        if not hasattr(samples, method):
            raise UserError(f"{set_name}: a {kind} has no {missing}; it must be a map-style data set")
    try:
        with limit_wait(f"{set_name}: len() of a {kind}"):
            length = len(samples)
    except (TypeError, ValueError) as error:
        raise UserError(f"{set_name}: len() of a {kind} fails ({error}); must be the number of samples") from error
    if not length:
        raise UserError(f"{set_name}: is empty")
    return length


def list_nested_sets(samples: Any) -> list[Any]:
    """Return a map-style set and the sets inside, the outermost first.

    A set wraps the set in its attribute ``dataset``, as torch's Subset does. If ``samples`` is not a map-style set, the
    list is empty.
    """
    found = list[Any]()
    # An attribute ``dataset`` may also hold another object, such as an open file.
    while all(hasattr(type(samples), method) for method in MAP_STYLE) and all(samples is not each for each in found):
        found.append(samples)
        samples = getattr(samples, "dataset", None)
    return found


def refuse_stream(set_name: str, samples: Any) -> None:
    """Raise a UserError if a set, a set inside, or an attribute of either is a map-style IterableDataset of torch.

    The streams of mosaicml-streaming and litdata have this type, and divide samples by ranks. ``set_name`` begins the
    text.
    """
    from torch.utils.data import IterableDataset

    for wrapped in list_nested_sets(samples):
        for part in (wrapped, *getattr(wrapped, "__dict__", {}).values()):
            if isinstance(part, IterableDataset) and list_nested_sets(part):
                problem = f"reads a {type(part).__name__}, a torch IterableDataset, which divides samples among ranks"
                fix = "read by number, for example with mosaicml-streaming's LocalDataset or litdata's Cache"
                rule = "an on-demand set needs all samples in each rank"
                raise UserError(f"{set_name} {problem}; {rule}; {fix} (docs/data-libraries.md)")


def read_user_item(where: str, samples: Any, number: int) -> Any:
    """Return ``samples[number]``, read by user code.

    UserErrors and MachineErrors of the user code pass through.

    Raises:
        UserCodeError: User code raised another exception. The text begins with ``where``.
        MachineError: The sample did not arrive within FLYTE_DDP_TIMEOUT.
    """
    try:
        with limit_wait(where):
            return samples[number]
    except (UserError, MachineError):
        raise
    except (Exception, GeneratorExit) as error:  # an uncaught GeneratorExit would silently end the library's generator
        raise UserCodeError(f"{where}: {type(error).__name__}: {error}") from error


def split_item(item: Any) -> tuple[Leaves, Leaves]:
    """Return inputs and targets of an item: a pair, or a dict with ``labels``. Raises ValueError for other types."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, Mapping) and "labels" in item:
        return {name: value for name, value in item.items() if name != "labels"}, item["labels"]
    raise ValueError(f"is a {type(item).__name__}: must be a pair (inputs, targets), or a dict with labels")


def convert_sample(where: str, item: Any) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return an item's pixels (uint8 [H, W, C]) and label.

    Raises:
        UserError: The item is no pair of a picture and numbers, or the picture has masked values. The text begins with
            ``where``.
    """
    try:
        image, given = item
        label = convert_to_array("its label", given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} must be an image and a label: {error}") from error
    if label.dtype.kind not in "biuf":
        raise UserError(f"{where}: its label is a {type(given).__name__}; must be a number or numbers")
    check_not_masked(f"{where}: its image", image)
    return convert_to_uint8_pixels(f"{where}: its image", image), label

"""Functions of the user that load, decode or augment samples, and the augmentation.

User code runs in loader processes (:mod:`flyte_ddp.core.loading.loader_process`), or in the rank itself.
"""

import hashlib
import inspect
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import MachineError, UserCodeError, UserError
from flyte_ddp.core.machine.waiting import limit_wait
from flyte_ddp.core.order.augmentation import augment_images
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.parallel.training_pass import Generators
from flyte_ddp.core.samples.leaves import IGNORED, check_not_masked, convert_to_array
from flyte_ddp.core.samples.pictures import Pixels, convert_to_uint8_pixels
from flyte_ddp.core.user_code.callables import load_callable

OF_BATCHES = ("crop", "crop_flip")  # kinds that change whole batches on the device
GLOBAL = Generators(torch.default_generator, random, np.random)


class Sample(NamedTuple):
    """A sample in memory."""

    image: Pixels  # uint8 [H, W, C]
    target: NDArray[Any]  # [] or [...]
    name: str  # the key in the data set; empty if it has none


def seed_for_sample(purpose: str, seed: int, epoch: int, sample: int, transforms: Iterable[Any] = ()) -> None:
    """Seed the global random generators of Python, NumPy and torch (CPU), and ``transforms``, for a sample.

    Does not restore the state before. ``purpose`` (up to 16 bytes) makes seeds for different purposes differ. Each
    transform must have ``set_random_seed``.
    """
    packed = struct.pack("<3q", seed, epoch, sample)
    hashed = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    bits = int.from_bytes(hashed, "little")
    GLOBAL.seed_each(bits)
    for transform in transforms:
        transform.set_random_seed(bits % 2**32)


def list_seedable_transforms(own: Any, method: str = "__call__") -> list[Any]:
    """Return the objects with a method ``set_random_seed``, such as transforms, that a user's callable uses.

    Searches the callable, the attributes, and the globals and closure variables in the code. Looks a single level deep:
    not inside of lists, and not at attributes of attributes. Skips classes.

    Args:
        own: The user's function or object.
        method: The method of an object whose code is searched.
    """
    function = inspect.unwrap(own if inspect.isroutine(own) else getattr(type(own), method))
    function = getattr(function, "__func__", function)  # of a bound method
    found = [own, *(value for _, value in inspect.getmembers_static(own))]
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        found += [*used.globals.values(), *used.nonlocals.values()]
    seeded = (each for each in found if callable(getattr(each, "set_random_seed", None)) and not isinstance(each, type))
    return list({id(each): each for each in seeded}.values())


class UserFunction:
    """A user's callable ``package.module:callable``, imported at the first use.

    If the callable is a class, an object of the class is called.
    """

    def __init__(self, setting: str, spec: str) -> None:
        self.setting, self.spec = setting, spec
        self.function: Callable[..., Any] | None = None
        self.transforms: list[Any] = []  # used by the function, and to be seeded

    @classmethod
    def import_if_named(cls, setting: str, spec: str) -> "UserFunction | None":
        """Import the function that the value ``spec`` of a setting names, or return None if ``spec`` has no colon.

        Restores the global random generators after the import.

        Raises:
            UserError: The import fails.
        """
        if ":" not in spec:
            return None
        found = cls(setting, spec)
        with keep_random_state():
            found.load()
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return UserFunction, (self.setting, self.spec)

    def load(self) -> Callable[..., Any]:
        """Import the user's callable at the first call, and return the callable. Of a class, makes an object.

        Raises:
            UserError: The import fails, or an object of the class cannot be called.
        """
        if self.function is None:
            found: Any = load_callable(self.spec)
            if inspect.isclass(found):
                found = found()
            if not callable(found):
                raise UserError(f"{self}: objects of this class are not callable; define the method __call__")
            self.function, self.transforms = found, list_seedable_transforms(found)
        return self.function

    def seed(self, seed: int, epoch: int, sample: int) -> None:
        """Seed the global random generators and the function's transforms for a sample in an epoch.

        Imports the function at the first call.
        """
        self.load()
        seed_for_sample(self.setting, seed, epoch, sample, self.transforms)

    def call_pair(self, where: str, *arguments: Any, returns: str = "(inputs, targets)") -> tuple[Any, Any]:
        """Call the user's function with ``arguments``, and return the pair that the function returns.

        Args:
            where: Names the sample in errors.
            returns: Describes the expected pair in errors.

        Raises:
            UserError: The function returns no pair.
            UserCodeError: The function fails.
            MachineError: The function does not return within FLYTE_DDP_TIMEOUT. Only in the main thread.
        """
        function = self.load()
        try:
            with limit_wait(f"{self} on {where}"):
                returned = function(*arguments)
        except MachineError:
            raise
        except Exception as error:
            raise UserCodeError(f"{self} on {where}: {type(error).__name__}: {error}") from error
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise UserError(f"{self} returned a {type(returned).__name__} for {where}: must return {returns}")
        return returned[0], returned[1]

    def call(self, name: str, *arguments: Any) -> Sample:
        """Call the user's function with ``arguments``, and return image and target as the sample ``name``.

        Raises:
            UserError: The function returns no pair, no pixels, or no array as target.
            UserCodeError: The function fails.
            MachineError: The function does not return within FLYTE_DDP_TIMEOUT. Only in the main thread.
        """
        image, target = self.call_pair(name, *arguments, returns="(image, target)")
        what = f"{self}: the image of {name}"
        check_not_masked(what, image)
        return Sample(
            convert_to_uint8_pixels(what, image), convert_to_array(f"{self}: the target of {name}", target), name
        )

    def __str__(self) -> str:
        return f"{self.setting}={self.spec!r}"


@dataclass(frozen=True)
class Augmentation:
    """How training samples are augmented: by a built-in kind, or by a user-defined function."""

    kind: str = "none"  # none, crop, crop_flip, or resized_crop, which is done when an image is decoded
    seed: int = 0  # of the random numbers
    function: UserFunction | None = None  # changes single samples

    @classmethod
    def from_augment_setting(cls, setting: str, seed: int) -> "Augmentation":
        """Return the augmentation that the hyperparameter ``augment`` names. Imports a user-defined function.

        ``seed`` seeds the random numbers of the augmentation.

        Raises:
            UserError: The import fails.
        """
        function = UserFunction.import_if_named("augment", setting)
        return cls("none" if function else setting, seed, function)

    def augment_sample(self, loaded: Sample, sample: int, epoch: int | None, where: str) -> Sample:
        """Augment a sample by the user-defined function, which gets copies of image and target.

        Without a function, or if ``epoch`` is None, returns the sample unchanged. Seeds the global random generators,
        and does not restore the generators. ``sample`` is the sample's number, and ``where`` names the sample in
        errors.

        Raises:
            UserError: The function returns no image and target.
            UserCodeError: The function fails.
        """
        if self.function is None or epoch is None:
            return loaded
        self.function.seed(self.seed, epoch, sample)
        # Copied, because the arrays are read-only and shared by all processes.
        target = np.array(loaded.target) if loaded.target.ndim else loaded.target.item()
        return self.function.call(where, np.array(loaded.image), target)._replace(name=loaded.name)

    def augment_batch(
        self, images: Tensor, targets: Tensor, samples: Indices, epoch: int | None
    ) -> tuple[Tensor, Tensor]:
        """Augment a batch by a built-in kind, and return its images [n, H, W, C] and targets.

        The kind "crop" shifts images at random, and "crop_flip" also mirrors half of the images. For other kinds, and
        if ``epoch`` is None, nothing changes. The shift of an image depends on seed, epoch and the sample's number.

        Masks (targets [n, H, W]) are shifted and mirrored with their images. Uncovered pixels of a mask become 255
        (ignored). Other targets are unchanged.
        """
        if epoch is None or self.kind not in OF_BATCHES:
            return images, targets
        augment = partial(augment_images, kind=self.kind, seed=self.seed, epoch=epoch, samples=samples)
        if targets.dim() == 3:
            targets = augment(targets[..., None], fill=IGNORED)[..., 0]
        return augment(images), targets


NO_AUGMENTATION = Augmentation()

"""Images in a folder or under a prefix, one folder for each class: ``class/name.jpg``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.catalog import IMAGES
from flyte_ddp.datasets.identity import digest_of
from flyte_ddp.errors import UserError

SUFFIXES = tuple(f".{kind}" for kind in IMAGES)
LISTED = 10  # classes at most whose numbers of images are listed
TRAINING_PARTS = ("train", "training")
PARTS = (*TRAINING_PARTS, "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")


@dataclass(frozen=True, eq=False)
class ImageList:
    """The images below an address, in the order of their names, and their classes, in the order of theirs."""

    address: str
    classes: tuple[str, ...]
    names: Sequence[str]  # relative to the address
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]  # bytes; -1 where unknown
    tags: NDArray[np.bytes_]  # texts that change when the files do; SHA-256 (hex) where sizes are unknown

    def address_of(self, number: int) -> str:
        """Where an image is."""
        return storage.join(self.address, self.names[number])

    def read(self, number: int) -> bytes:
        """An image as it is stored.

        Raises:
            UserError: it cannot be read, or is not the one that was listed.
        """
        size, tag = int(self.sizes[number]), self.tags[number].decode()

        def read(address: str) -> bytes:
            content = storage.read(address, tag=tag if size >= 0 else "")
            if size < 0 and hashlib.sha256(content).hexdigest() != tag:
                raise storage.AlteredError("does not have the SHA-256 of the list")
            if 0 <= size != len(content):
                raise storage.AlteredError(f"has {len(content):,} bytes, and {size:,} when it was listed")
            return content

        address = self.address_of(number)
        try:
            return storage.retried(address, read)
        except storage.UnavailableError as failure:
            altered = isinstance(failure, storage.AlteredError)
            reason = f"{failure}" if altered else f"cannot be read ({failure}), though it was listed"
            raise failure.explained(f"image {address}: {reason}; run again to list what is there now") from None

    def describe(self) -> list[str]:
        """Lines for the user: what the folder holds, and warnings."""
        counts = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        if len(counts) > LISTED:
            numbers = f"with {min(counts):,} to {max(counts):,} images each"
        else:
            numbers = ", ".join(f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True))
        kinds = "1 class" if len(counts) == 1 else f"{len(counts):,} classes"
        said = [f"image folder {self.address}: {len(self.labels):,} images of {kinds} ({numbers})"]
        parts = [name for name in self.classes if name.lower() in PARTS]
        parts.sort(key=lambda name: name.lower() not in TRAINING_PARTS)
        if len(parts) > 1:
            train, test = (f"image_folder:{storage.join(self.address, name)}" for name in parts[:2])
            said.append(
                f"warning: image folder {self.address}: {', '.join(parts)} look like parts of a data set, and are "
                f"taken for classes, as the first folders are; if they are parts, set dataset={train} and "
                f"test_dataset={test}"
            )
        elif len(counts) == 1:
            said.append(
                f"warning: image folder {self.address}: all images are of one class, {self.classes[0]}, so that there "
                "is nothing to tell apart; put those of each class into a folder of its own"
            )
        return said

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of names, sizes and tags."""
        rows = zip(self.names, self.sizes.tolist(), self.tags.tolist(), strict=True)
        return digest_of(f"{name} {size} {tag.decode()}" for name, size, tag in rows)


def list_images(address: str) -> ImageList:
    """Lists the images below ``address``: as torchvision's ImageFolder does, by the first folder of their names.

    Hidden files and folders, whose names begin with a dot, are left out.

    Raises:
        UserError: it cannot be listed, or there is no image in a folder of its own.
    """
    files = files_below(address)
    images = (entry for entry in files if "/" in entry.name and is_image(entry.name))
    found = sorted(images, key=lambda entry: entry.name)
    if not found:
        raise UserError(
            f"image folder {address}: has no images in folders of their classes among its {len(files):,} files; "
            "it must hold class/name.jpg"
        )
    classes = tuple(sorted({entry.name.partition("/")[0] for entry in found}))
    numbers = {name: number for number, name in enumerate(classes)}
    return ImageList(
        address=address,
        classes=classes,
        names=tuple(entry.name for entry in found),
        labels=np.array([numbers[entry.name.partition("/")[0]] for entry in found], dtype=np.int64),
        sizes=np.array([entry.size for entry in found], dtype=np.int64),
        tags=np.array([entry.tag.encode() for entry in found]),
    )


def files_below(address: str) -> list[storage.Entry]:
    """The files below a folder or prefix; links are followed, and hidden files and folders left out, wherever it is.

    Raises:
        UserError: it cannot be listed.
    """
    try:
        entries = storage.retried(address, lambda where: list(storage.list_files(where)))
    except storage.UnavailableError as failure:
        raise failure.explained(
            f"image folder {address}: cannot be listed ({failure}); check address and server"
        ) from None
    return [entry for entry in entries if not entry.name.startswith(".") and "/." not in entry.name]


def is_image(name: str) -> bool:
    """Whether a file is an image, by its name."""
    return name.lower().endswith(SUFFIXES)

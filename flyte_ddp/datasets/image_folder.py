"""Images in a folder or under a prefix, one folder for each class: ``class/name.jpg``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.catalog import IMAGES
from flyte_ddp.errors import UserError

SUFFIXES = tuple(f".{kind}" for kind in IMAGES)
LISTED = 10  # classes whose numbers of images are told one by one
TRAINING_PARTS = ("train", "training")
OTHER_PARTS = ("test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")


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
        address, size, tag = self.address_of(number), int(self.sizes[number]), self.tags[number].decode()
        hint = "run again to list what is there now"
        try:
            content = storage.retried(address, lambda where: storage.read(where, tag=tag if size >= 0 else ""))
        except storage.AlteredError as failure:
            raise UserError(f"image {address}: {failure}; {hint}") from None
        except storage.UnavailableError as failure:
            message = f"image {address}: cannot be read ({failure}), though it was listed"
            raise failure.explained(f"{message}; {hint}") from None
        if size < 0 and hashlib.sha256(content).hexdigest() != tag:
            raise UserError(f"image {address}: does not have the SHA-256 of the list; {hint}")
        if size >= 0 and len(content) != size:
            raise UserError(f"image {address}: has {len(content):,} bytes, and {size:,} when it was listed; {hint}")
        return content

    def describe(self) -> list[str]:
        """What there is, and what there likely should not be, for people."""
        counts = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        if len(counts) > LISTED:
            numbers = f"with {min(counts):,} to {max(counts):,} images each"
        else:
            numbers = ", ".join(f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True))
        kinds = "1 class" if len(counts) == 1 else f"{len(counts):,} classes"
        said = [f"image folder {self.address}: {len(self.labels):,} images of {kinds} ({numbers})"]
        parts = [name for name in self.classes if name.lower() in (*TRAINING_PARTS, *OTHER_PARTS)]
        training = next((name for name in parts if name.lower() in TRAINING_PARTS), "")
        if parts == [*self.classes] or (training and len(parts) > 1):
            others = [name for name in parts if name != training]
            fix = " and ".join(
                f"{key}=image_folder:{storage.join(self.address, name)}"
                for key, name in (("dataset", training), ("test_dataset", next(iter(others), "")))
                if name
            )
            said.append(
                f"warning: image folder {self.address}: {', '.join(parts)} look like parts of a data set, and are "
                f"taken for classes, as the first folders are; if they are parts, set {fix}"
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
        lines = "\n".join(f"{name} {size} {tag.decode()}" for name, size, tag in rows)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


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

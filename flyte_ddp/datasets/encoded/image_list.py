"""The list of the images in a folder or under a prefix, with one folder for each class (``class/name.jpg``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.catalog import IMAGES
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.class_names import normalize_class_names
from flyte_ddp.core.text.formatting import format_count
from flyte_ddp.storage.identity import digest_lines

SUFFIXES = tuple(f".{kind}" for kind in IMAGES)
LISTED = 10  # maximum number of classes in a printed line
SPLIT_NAMES = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation"}


@dataclass(frozen=True, eq=False)
class ImageList:
    """The images below an address and the names of the classes, each sorted by name."""

    address: str
    classes: tuple[str, ...]
    names: Sequence[str]  # relative to the address
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]  # bytes
    tags: NDArray[np.bytes_]  # texts that change with the files
    others: int = 0  # number of files that are no images of a class

    def image_address(self, number: int) -> str:
        return storage.join_address(self.address, self.names[number])

    def read_image(self, number: int) -> bytes:
        """Return the bytes of an image file. Tries up to 4 times, with pauses.

        Raises:
            UserError: The file cannot be read, or has changed since the listing.
        """
        address, size, tag = self.image_address(number), int(self.sizes[number]), self.tags[number].decode()

        def read_once(address: str) -> bytes:
            content = storage.read_file(address, tag=tag)
            if len(content) != size:
                raise storage.AlteredError(f"has {len(content):,} bytes, but had {size:,} when it was listed")
            return content

        try:
            return storage.call_with_retries(address, read_once)
        except storage.UnavailableError as failure:
            advice = "make it readable, or remove it, and run again"
            if isinstance(failure, (storage.MissingError, storage.AlteredError)):
                advice = "run again to list the current files"
            raise failure.to_user_error(f"image {address}: cannot be read ({failure}); {advice}") from None

    def describe_images(self) -> list[str]:
        """Return lines for users: counts of images and classes, and the number of skipped files.

        If all class folders have names such as "train", a warning is added.
        """
        where = f"image folder {self.address}:"
        counts = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        numbers = ", ".join(f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True))
        if len(counts) > LISTED:
            numbers = f"with {min(counts):,} to {max(counts):,} images each"
        kinds = "1 class" if len(counts) == 1 else f"{len(counts):,} classes"
        lines = [f"{where} {len(self.labels):,} images of {kinds} ({numbers})"]
        if SPLIT_NAMES.issuperset(map(str.lower, self.classes)):
            lines.append(f"warning: {where} the top-level folders are the classes, but their names look like splits")
        if self.others:
            lines.append(f"{where} {format_count(self.others, 'other file')} skipped (not images in class folders)")
        return lines

    @property
    def digest(self) -> str:
        """Return a SHA-256 (hex) of the images' names, sizes and tags."""
        rows = zip(self.names, self.sizes.tolist(), self.tags.tolist(), strict=True)
        return digest_lines(f"{name} {size} {tag.decode()}" for name, size, tag in rows)


def list_images(address: str) -> ImageList:
    """List the images in the class folders below ``address`` (``class/name.jpg``), up to any depth.

    Names that begin with a dot are skipped, and other files are only counted. Folders whose names are equal in
    Unicode's form NFC are one class. Listing is tried up to 4 times, with pauses.

    Raises:
        UserError: The address cannot be listed or has no images, a class has no images, or a class name is not UTF-8.
    """
    where, files = f"image folder {address}", sorted(list_visible_files(address), key=lambda entry: entry.name)
    images = [entry for entry in files if "/" in entry.name and is_image(entry.name)]
    if not images:
        problem = f"none of its {len(files):,} files is an image in a class folder"
        raise UserError(f"{where}: {problem}; it must contain class/name.jpg")
    folders = sorted({entry.name.partition("/")[0] for entry in files if "/" in entry.name})
    class_of = {name: normalize_class_names(where, [name])[0] for name in folders}  # one class for names equal in NFC
    labelled = [class_of[entry.name.partition("/")[0]] for entry in images]
    classes = tuple(sorted({*labelled}))
    if imageless := {*class_of.values()} - {*classes}:
        fix = "or, if it is not a class, move the folder away or start its name with a dot"
        raise UserError(f"{where}: class {min(imageless)!r} has no images; convert its files to PNG or JPEG, {fix}")
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[name] for name in labelled], np.int64)
    sizes = np.array([entry.size for entry in images], np.int64)
    tags = np.array([entry.tag.encode() for entry in images])
    names = tuple(entry.name for entry in images)
    return ImageList(address, classes, names, labels, sizes, tags, len(files) - len(images))


def list_visible_files(address: str) -> list[storage.Entry]:
    """Return the files below an address, without files and folders whose names begin with a dot.

    Tries up to 4 times, with pauses.

    Raises:
        UserError: The address cannot be listed.
    """
    try:
        entries = storage.call_with_retries(address, lambda where: list(storage.list_files(where)))
    except storage.UnavailableError as failure:
        remote = storage.find_local_path(address) is None
        advice = "check address and server" if remote else "check the address, and links and permissions in the folder"
        raise failure.to_user_error(f"image folder {address}: cannot be listed ({failure}); {advice}") from None
    return [entry for entry in entries if "/." not in f"/{entry.name}"]


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


class NameList(Sequence[str]):
    """A list of texts in one memory-mapped array. ``content`` holds the bytes, and ``ends`` the end of each text."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        start = int(self.ends[number - 1]) if number else 0
        return self.content[start : int(self.ends[number])].tobytes().decode("utf-8", "surrogateescape")

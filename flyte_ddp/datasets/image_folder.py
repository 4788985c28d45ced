"""List and read images in a folder or under a prefix, with one folder for each class: ``class/name.jpg``."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import storage
from flyte_ddp.catalog import IMAGES
from flyte_ddp.datasets.identity import digest_lines
from flyte_ddp.errors import UserError
from flyte_ddp.samples.class_names import normalize_class_name
from flyte_ddp.settings import runs_folder
from flyte_ddp.storage.digest_list import SUMS
from flyte_ddp.text.formatting import format_count, join_first

SUFFIXES = tuple(f".{kind}" for kind in IMAGES)
LISTED = 10  # classes, and kinds of files, that a printed line lists at most
TRAINING_NAMES = ("train", "training")
SPLIT_NAMES = (*TRAINING_NAMES, "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")


@dataclass(frozen=True, eq=False)
class ImageList:
    """The images below an address in the order of their names, with the classes in the order of theirs."""

    address: str
    classes: tuple[str, ...]
    names: Sequence[str]  # relative to the address
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]  # bytes; -1 where unknown
    tags: NDArray[np.bytes_]  # texts that change when the files do; SHA-256 (hex) where sizes are unknown
    left_out: Mapping[str, int] = field(default_factory=dict)  # how many other files there are of each kind

    def image_address(self, number: int) -> str:
        return storage.join(self.address, self.names[number])

    def read_image(self, number: int) -> bytes:
        """Return the bytes of an image file; UserError if it cannot be read, or has changed since it was listed."""
        address, size, tag = self.image_address(number), int(self.sizes[number]), self.tags[number].decode()

        def read_once(address: str) -> bytes:
            content = storage.read_file(address, tag=tag if size >= 0 else "")
            if size < 0 and hashlib.sha256(content).hexdigest() != tag:
                raise storage.AlteredError("does not have the SHA-256 of the list")
            if 0 <= size != len(content):
                raise storage.AlteredError(f"has {len(content):,} bytes, and {size:,} when it was listed")
            return content

        try:
            return storage.retry(address, read_once)
        except storage.UnavailableError as failure:
            advice = "make it readable, or remove it, and run again"
            if isinstance(failure, (storage.MissingError, storage.AlteredError)):
                advice = "run again to list what is there now"
            raise failure.to_user_error(f"image {address}: cannot be read ({failure}); {advice}") from None

    def describe_images(self) -> list[str]:
        """Return lines for the user: numbers of images and classes, files left out, warnings of splits or one class."""
        where = f"image folder {self.address}:"
        counts = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        numbers = ", ".join(f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True))
        if len(counts) > LISTED:
            numbers = f"with {min(counts):,} to {max(counts):,} images each"
        kinds = "1 class" if len(counts) == 1 else f"{len(counts):,} classes"
        lines = [f"{where} {len(self.labels):,} images of {kinds} ({numbers})"]
        if self.left_out:
            files = format_count(sum(self.left_out.values()), "file")
            lines.append(f"{where} {files} left out, as no images: {join_kinds(self.left_out)}")
        splits = [name for name in self.classes if name.lower() in SPLIT_NAMES]
        splits.sort(key=lambda name: name.lower() not in TRAINING_NAMES)
        if len(splits) > 1:
            train, test = (f"image_folder:{storage.join(self.address, name)}" for name in splits[:2])
            lines.append(
                f"warning: {where} the first folders are the classes, but {', '.join(splits)} look like splits; if "
                f"they are splits, set dataset={train} and test_dataset={test}"
            )
        elif len(counts) == 1:
            lines.append(
                f"warning: {where} all images are of one class, {self.classes[0]}, so there is nothing to learn; put "
                "the images of each class into a folder of their own"
            )
        return lines

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of name, size and tag of each image."""
        rows = zip(self.names, self.sizes.tolist(), self.tags.tolist(), strict=True)
        return digest_lines(f"{name} {size} {tag.decode()}" for name, size, tag in rows)


def list_images(address: str) -> ImageList:
    """List the images below ``address`` by torchvision's rule: the first folder of a file's name is the class.

    Leaves out hidden files and folders. Folders whose names differ only in Unicode's form are one class. Raises a
    UserError if the address cannot be listed, a class's folder has no images, or its name is not UTF-8.
    """
    where, files = f"image folder {address}", sorted(list_visible_files(address), key=lambda entry: entry.name)
    images = [entry for entry in files if "/" in entry.name and is_image(entry.name)]
    others = {entry.name for entry in files}.difference(entry.name for entry in images)
    left_out = Counter(map(file_kind, others))
    if not images:
        listed = f" ({join_kinds(left_out)})" if left_out else ""
        raise UserError(
            f"{where}: has no images in folders of their classes among its {len(files):,} files{listed}; it must hold "
            "class/name.jpg"
        )
    folders = {entry.name.partition("/")[0] for entry in files if "/" in entry.name}
    path = storage.local_path(address)  # object storage has no empty folders
    if path is not None:
        shown = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        folders |= {entry.name for entry in shown} - {find_runs_below(address).removesuffix("/")}
    class_of = {folder: normalize_class_name(where, folder) for folder in sorted(folders)}
    labelled = [class_of[entry.name.partition("/")[0]] for entry in images]
    classes = tuple(sorted({*labelled}))
    if imageless := {*class_of.values()} - {*classes}:
        name = min(imageless)
        kinds = Counter(file_kind(other) for other in others if class_of.get(other.partition("/")[0]) == name)
        why = f"but {join_kinds(kinds)}; convert images to PNG or JPEG"
        raise UserError(
            f"{where}: class {name!r} has no images, {why if kinds else 'as its folder has no files; fill it'}, or, if "
            "it is no class, move the folder away or begin its name with a dot"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers[name] for name in labelled], np.int64)
    sizes = np.array([entry.size for entry in images], np.int64)
    tags = np.array([entry.tag.encode() for entry in images])
    names = tuple(entry.name for entry in images)
    return ImageList(address, classes, names, labels, sizes, tags, left_out)


def list_visible_files(address: str) -> list[storage.Entry]:
    """List the files below a folder or prefix, but SHA256SUMS, the runs folder, and hidden files and folders."""
    own = find_runs_below(address)
    try:
        entries = storage.retry(address, lambda where: list(storage.list_files(where)))
    except storage.UnavailableError as failure:
        remote = storage.local_path(address) is None
        advice = "check address and server" if remote else "check the address, and links and permissions in the folder"
        raise failure.to_user_error(f"image folder {address}: cannot be listed ({failure}); {advice}") from None
    shown = (entry for entry in entries if "/." not in f"/{entry.name}" and entry.name != SUMS)
    return [entry for entry in shown if not entry.name.startswith(own)]


def find_runs_below(address: str) -> str:
    """Return how names of files in the runs folder begin; "./", as no name begins, if it is not below a folder."""
    root, runs = storage.local_path(address), runs_folder().resolve()
    return f"{runs.relative_to(root.resolve())}/" if root and runs.is_relative_to(root.resolve()) else "./"


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def file_kind(name: str) -> str:
    """Return a file's kind as text: its extension, and "in no class's folder" for an image outside of all folders."""
    _, dot, extension = name.rpartition("/")[2].rpartition(".")
    kind = f".{extension.lower()}" if dot else "without an extension"
    return f"{kind} in no class's folder" if is_image(name) and "/" not in name else kind


def join_kinds(kinds: Mapping[str, int]) -> str:
    most = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return join_first((f"{count:,} {kind}" for kind, count in most), LISTED)

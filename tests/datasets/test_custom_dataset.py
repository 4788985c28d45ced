"""A user's own data set: what its callable may return, and when its fingerprint changes."""

import dataclasses
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_server import FileServer
from mnist_files import leftovers
from PIL import Image

from flyte_ddp.datasets import fetch, fingerprint, image_arrays, open_arrays
from flyte_ddp.datasets.custom import arrays_from_result
from flyte_ddp.datasets.identity import content_identity
from flyte_ddp.errors import UserError
from flyte_ddp.progress import Progress

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the user's module, called own_data, in the working directory."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)

    def written(text: str) -> Path:
        path = Path("own_data.py").absolute()
        path.write_text(textwrap.dedent(text))
        return path

    return written


def picture(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_torchvisions_data_sets_can_be_returned_as_they_are(write: Write, tmp_path: Path) -> None:
    """A folder of PNG files for each class, read by ImageFolder; compared with what was drawn."""
    write("""
        from torchvision.datasets import ImageFolder
        def flowers(source):
            return ImageFolder(source + "/train"), ImageFolder(source + "/test")
    """)
    drawn = {split: [picture(number, 6, 8, 3) for number in range(4)] for split in ("train", "test")}
    for split, images in drawn.items():
        for number, image in enumerate(images):
            folder = tmp_path / "flowers" / split / ("daisy", "rose")[number // 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    source = str(tmp_path / "flowers")
    folder = fetch("own_data:flowers", source, tmp_path / "data", progress="off")
    ours = open_arrays(folder)
    np.testing.assert_array_equal(ours.train_images, np.stack(drawn["train"]))
    np.testing.assert_array_equal(ours.test_images, np.stack(drawn["test"]))
    assert ours.train_labels.tolist() == ours.test_labels.tolist() == [0, 0, 1, 1]
    assert ours.classes == ("daisy", "rose")
    assert ours.name == "own_data:flowers"
    assert fetch("own_data:flowers", source, tmp_path / "data", progress="off") == folder


def gathered(train: Any, test: Any = None) -> Any:
    return arrays_from_result("own:data", (train, train if test is None else test), Progress("off"))


@pytest.mark.parametrize(
    "kind",
    [
        *("grey PIL", "grey array", "grey tensor", "PIL", "array", "tensor", "palette", "bitmap"),
        *("16 bits", "transparent", "grey and transparent"),
    ],
)
def test_image_types_are_converted(kind: str) -> None:
    grey, colour = picture(1, 6, 8), picture(2, 6, 8, 3)
    palette = Image.fromarray(colour).quantize(8)
    holes = (np.indices((6, 8)).sum(0) % 2 * 255).astype(np.uint8)[..., None]
    images: dict[str, tuple[Any, Any]] = {
        "grey PIL": (Image.fromarray(grey), grey[..., None]),
        "grey array": (grey, grey[..., None]),
        "grey tensor": (torch.from_numpy(grey), grey[..., None]),
        "PIL": (Image.fromarray(colour), colour),
        "array": (colour, colour),
        "tensor": (torch.from_numpy(colour).permute(2, 0, 1), colour),
        "palette": (palette, np.asarray(palette.convert("RGB"))),
        "bitmap": (Image.fromarray(grey > 127), (grey > 127).astype(np.uint8)[..., None] * 255),
        "16 bits": (Image.fromarray(grey.astype(np.uint16) * 256 + 17), grey[..., None]),
        "transparent": (
            Image.fromarray(np.concatenate([colour, holes], 2)),
            np.where(holes, colour, 255).astype(np.uint8),
        ),
        "grey and transparent": (
            Image.fromarray(np.concatenate([grey[..., None], holes], 2), "LA"),
            np.where(holes, grey[..., None], 255).astype(np.uint8).repeat(3, axis=2),
        ),
    }
    image, expected = images[kind]
    made = gathered([(image, 0), (image, torch.tensor(1)), (image, np.int64(2))])
    np.testing.assert_array_equal(made.train_images, np.stack([expected] * 3))
    assert made.train_labels.tolist() == [0, 1, 2]
    assert made.classes == ("0", "1", "2")


class Sized:
    """Has a length and no items."""

    def __len__(self) -> int:
        return 0


IMAGE = picture(0, 4, 4)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned NoneType; must return flyte_ddp.datasets.image_arrays"),
        ((iter([]), iter([])), r"training set: a list_iterator has no len\(\)"),
        (([(IMAGE, 0)], Sized()), "test set: is empty"),
        (([(IMAGE, 0), (picture(0, 4, 5), 0)], [(IMAGE, 0)]), "image 1 is 4x5x1 and image 0 is 4x4x1.*one size"),
        (
            ([(Image.new("I", (4, 4)), 0)], [(IMAGE, 0)]),
            "cannot be converted to 8 bits: its pixels are 32-bit or signed",
        ),
        (([(IMAGE / 255, 0)], [(IMAGE, 0)]), "image 0 is float64.*leave out transforms such as ToTensor"),
        (([(IMAGE, 0.5)], [(IMAGE, 0)]), "item 0 must be an image and a whole-number label"),
        (([(IMAGE, 0, 1)], [(IMAGE, 0)]), "item 0 must be an image and a whole-number label"),
        (([(IMAGE, -1)], [(IMAGE, 0)]), "label -1 of sample 0"),
    ],
)
def test_wrong_results_are_refused(result: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"dataset='own:data': .*{said}"):
        arrays_from_result("own:data", result, Progress("off"))


def test_arrays_can_be_returned_and_are_checked() -> None:
    right = image_arrays(IMAGE[None], [0], IMAGE[None], [0], classes=["one"])
    made = arrays_from_result("own:data", right, Progress("off"))
    assert (made.name, made.classes) == ("own:data", ("one",))
    wrong = dataclasses.replace(right, train_labels=np.array([7]))
    with pytest.raises(UserError, match="label 7 of sample 0"):
        arrays_from_result("own:data", wrong, Progress("off"))


def test_the_users_own_error_comes_through_and_leaves_nothing(write: Write, tmp_path: Path) -> None:
    write("def broken(source):\n    raise ZeroDivisionError('mine')\n")
    with pytest.raises(ZeroDivisionError, match="mine"):
        fetch("own_data:broken", "", tmp_path / "data", progress="off")
    assert leftovers(tmp_path) == ["project"]


def test_the_fingerprint_changes_with_code_name_and_content_and_imports_nothing(write: Write, tmp_path: Path) -> None:
    write("raise AssertionError('imported')")
    source = tmp_path / "source"
    (source / "deeper").mkdir(parents=True)
    (source / "deeper" / "file").write_bytes(b"one")
    first = fingerprint("own_data:make", str(source))
    assert first == fingerprint("own_data:make", str(source))
    assert first.startswith("own_data-make-")
    assert "/" not in first
    seen = {first, fingerprint("own_data:other", str(source)), fingerprint("own_data:make", "")}
    (source / "deeper" / "file").write_bytes(b"two")
    seen.add(fingerprint("own_data:make", str(source)))
    (source / "deeper" / "file").rename(source / "file")
    seen.add(fingerprint("own_data:make", str(source)))
    write("raise AssertionError('changed')")
    seen.add(fingerprint("own_data:make", str(source)))
    seen.add(fingerprint("own_data:make", str(source / "file")))
    write("from own_helper import make")
    for number in (1, 2):  # a module that the user's own imports
        Path("own_helper.py").write_text(f"raise AssertionError({number})")
        seen.add(fingerprint("own_data:make", str(source)))
    assert len(seen) == 9
    assert "own_data" not in sys.modules


@pytest.mark.parametrize("source", ["no/such/path", "{}"])
def test_a_source_that_is_missing_or_empty_is_an_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match=r"(no such file or directory|the directory is empty); give one"):
        content_identity(source.format(tmp_path))


def test_the_identity_of_a_file_on_a_web_server(server: FileServer) -> None:
    server.tagged = False
    server.files = {"data.zip": b"content"}
    address = f"{server.url}/data.zip"
    unmarked = content_identity(address)  # no header says anything, so it is read
    server.files["data.zip"] = b"CONTENT"
    assert content_identity(address) != unmarked
    server.answers = {"ETag": '"one"'}
    marked, requests = content_identity(address), len(server.requests)
    assert content_identity(address) == marked
    assert len(server.requests) == requests + 2  # of SHA256SUMS, which is not there, and the headers alone
    server.answers = {"ETag": '"two"'}
    assert content_identity(address) != marked


def test_the_identity_of_a_directory_on_a_web_server(server: FileServer) -> None:
    with pytest.raises(UserError, match=r"HTTP 404.*needs a SHA256SUMS"):
        content_identity(f"{server.url}/data")
    server.files = {"data/SHA256SUMS": b"one"}
    before = content_identity(f"{server.url}/data")
    server.files = {"data/SHA256SUMS": b"two"}
    server.faults = {"data/SHA256SUMS": [503]}
    assert content_identity(f"{server.url}/data") != before

"""A user's own data set: what its callable may return, and when its fingerprint changes."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_server import FileServer
from image_folders import pixels_of
from PIL import Image

from flyte_ddp.core.errors import UserCodeError, UserError
from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets import fetch, fingerprint, image_arrays, open_arrays
from flyte_ddp.datasets.custom import CustomSet, make_arrays_from_user_result
from flyte_ddp.storage.identity import hash_address_content


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the user's module own_data in the working directory, to be written."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    return tmp_path / "project" / "own_data.py"


def test_torchvisions_data_sets_can_be_returned_as_they_are(module: Path, tmp_path: Path) -> None:
    module.write_text(
        "from torchvision.datasets import ImageFolder\n"
        "def flowers(source):\n"
        "    return ImageFolder(source + '/train'), ImageFolder(source + '/test')\n"
    )
    drawn = [pixels_of(number) for number in range(4)]
    for split in ("train", "test"):
        for number, image in enumerate(drawn):
            folder = tmp_path / "flowers" / split / ("daisy", "rose")[number // 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image if split == "train" else 255 - image).save(folder / f"{number}.png")
    source = str(tmp_path / "flowers")
    folder = fetch("own_data:flowers", source, tmp_path / "data", progress="off")
    ours = open_arrays(folder)
    np.testing.assert_array_equal(ours.train_inputs, np.stack(drawn))
    np.testing.assert_array_equal(ours.test_inputs, 255 - np.stack(drawn))
    assert ours.train_targets.tolist() == ours.test_targets.tolist() == [0, 0, 1, 1]
    assert (ours.classes, ours.name) == (("daisy", "rose"), "own_data:flowers")
    assert fetch("own_data:flowers", source, tmp_path / "data", progress="off") == folder


GREY, COLOUR = pixels_of(1)[..., 0], pixels_of(2)
HOLES = (np.indices(GREY.shape).sum(0) % 2 * 255).astype(np.uint8)[..., None]
TYPES: dict[str, tuple[Any, Any]] = {
    "grey PIL": (Image.fromarray(GREY), GREY[..., None]),
    "grey tensor": (torch.from_numpy(GREY), GREY[..., None]),
    "PIL": (Image.fromarray(COLOUR), COLOUR),
    "array": (COLOUR, COLOUR),
    "tensor": (torch.from_numpy(COLOUR).permute(2, 0, 1), COLOUR),
    "16 bits": (Image.fromarray(GREY.astype(np.uint16) * 256 + 17), GREY[..., None]),
    "transparent": (Image.fromarray(np.concatenate([COLOUR, HOLES], 2)), np.where(HOLES, COLOUR, 255)),
    "grey and transparent": (
        Image.merge("LA", [*map(Image.fromarray, (GREY, HOLES[..., 0]))]),
        np.where(HOLES, GREY[..., None], 255).repeat(3, axis=2),
    ),
}


@pytest.mark.parametrize("kind", TYPES)
def test_image_types_are_converted(kind: str) -> None:
    image, expected = TYPES[kind]
    train = [(image, 0), (image, torch.tensor(1)), (image, np.int64(2))]
    made = make_arrays_from_user_result("own:data", (train, train), Progress("off"))
    np.testing.assert_array_equal(made.train_inputs, np.stack([expected] * 3))
    assert made.train_targets.tolist() == [0, 1, 2]
    assert made.classes == ("0", "1", "2")


class Named(list[Any]):
    """A data set with the attribute ``classes``."""

    classes: Any


@pytest.mark.parametrize(
    ("classes", "expected"), [(["a", "b"], "ab"), (np.array(["a", "b"]), "ab"), (None, "01"), (np.array([]), "01")]
)
def test_class_names_are_those_of_the_training_set_or_numbers(classes: Any, expected: str) -> None:
    train = Named([(GREY, 0), (GREY, 1)])
    train.classes = classes
    assert make_arrays_from_user_result("own:data", (train, train[:1]), Progress("off")).classes == tuple(expected)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (iter([]), r"training set: a list_iterator has no len\(\)"),
        ([], "training set: is empty"),
        ([(GREY, 0), (GREY[1:], 0)], "item 1 is 8x11x1 and item 0 is 9x11x1.*the same size"),
        ([(Image.new("I", (4, 4)), 0)], "cannot be converted to 8 bits: its pixels are 32-bit or signed"),
        ([(GREY, 0), (GREY / 255, 0)], "item 1: its image is float64.*transforms such as ToTensor"),
        ([(GREY, np.ma.masked_equal(0, 0))], "item 0 must be an image and a label: its label: has masked values"),
        ([(np.ma.masked_equal(GREY, GREY[0, 0]), 0)], "item 0: its image: has masked values"),
        ([(GREY, "cat")], "item 0: its label is a str; must be a number or numbers"),
        ([(GREY, 0), (GREY, 0, 1)], r"item 1 is a tuple: must be a pair \(inputs, targets\)"),
        ([(GREY, [1, 0]), (GREY, [1])], "labels: is not an array .*inhomogeneous"),
    ],
)
def test_wrong_results_are_refused(train: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"dataset='own:data': .*{said}"):
        make_arrays_from_user_result("own:data", (train, [(GREY, 0)]), Progress("off"))


def test_arrays_can_be_returned() -> None:
    right = image_arrays(GREY[None], [0], GREY[None], [0], classes=["one"])
    made = make_arrays_from_user_result("own:data", right, Progress("off"))
    assert (made.name, made.classes) == ("own:data", ("one",))
    with pytest.raises(UserError, match="returned NoneType; must return arrays"):
        make_arrays_from_user_result("own:data", None, Progress("off"))


def load_set(name: str, source: Path) -> Any:
    source.touch()
    return CustomSet(f"streams:{name}").load(str(source), source.parent, Progress("off"))[0]


@pytest.mark.parametrize("kind", ["stream", "holding", "opening", "subset"])
def test_a_stream_is_refused_as_a_set_on_demand_wherever_it_is_held(kind: str, tmp_path: Path) -> None:
    """In ranks mosaicml-streaming's would take one name twice, and the length of litdata's would change."""
    problem = "the training set reads a Stream, .*IterableDataset, .*ranks; .*by number"
    with pytest.raises(UserError, match=f"^dataset='streams:samples': {problem}") as caught:
        load_set("samples", tmp_path / kind)
    assert len(caught.value.message) < 300


def test_the_items_of_a_stream_are_a_set_on_demand_and_a_stream_to_test_is_refused(tmp_path: Path) -> None:
    assert load_set("samples", tmp_path / "collected").train_samples == 8
    with pytest.raises(UserError, match="the test set reads a Stream"):
        load_set("tested", tmp_path / "holding")


def test_the_fingerprint_changes_with_code_name_and_content_and_imports_nothing(module: Path, tmp_path: Path) -> None:
    module.write_text("raise AssertionError('imported')")
    source = tmp_path / "source"
    (source / "deeper").mkdir(parents=True)
    (source / "deeper" / "file").write_bytes(b"one")

    def of_source() -> str:
        return fingerprint("own_data:make", str(source))

    first = of_source()
    assert first == of_source()
    assert first.startswith("own_data-make-")
    assert "/" not in first
    seen = {first, fingerprint("own_data:other", str(source)), fingerprint("own_data:make", "")}
    (source / "deeper" / "file").write_bytes(b"two")
    seen.add(of_source())
    (source / "deeper" / "file").rename(source / "file")
    seen.add(of_source())
    module.write_text("raise AssertionError('changed')")
    seen |= {of_source(), fingerprint("own_data:make", str(source / "file"))}
    module.write_text("from own_helper import make")
    for number in (1, 2):  # a module that the user's own imports
        Path("own_helper.py").write_text(f"raise AssertionError({number})")
        seen.add(of_source())
    assert len(seen) == 9
    assert "own_data" not in sys.modules


def test_a_source_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, said in (
        ("no/such/path", "no such file or directory; give"),
        (f"{tmp_path}/empty", "the directory is empty; give"),
        ("/proc/self/mem", "cannot be read: .*Input/output error"),  # root, who runs these tests in CI, reads others
    ):
        with pytest.raises(UserError, match=f"^data_source='{source}': {said}"):
            hash_address_content(source)


def test_what_runs_and_tools_write_into_a_folder_of_data_makes_no_other_data(tmp_path, monkeypatch) -> None:
    """Such as with data_source "." in a project: else no run would be the one that was cut off."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cats").mkdir()
    Image.new("RGB", (8, 8)).save("cats/1.png")
    before = hash_address_content(".")
    for name in ("runs/x/metrics.jsonl", "runs/x/results/1.png", "__pycache__/data.pyc", ".git/HEAD", ".venv/a/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("written")
    assert hash_address_content(".") == before
    monkeypatch.setenv("FLYTE_DDP_RUNS", "elsewhere")
    assert hash_address_content(".") != before, "another folder of that name counts"


def test_files_that_readers_write_and_that_the_folder_names_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/data.mdb").write_text("samples")
    before = hash_address_content(str(tmp_path))
    for name in ("lock.mdb", "inner/cache-1f0c.arrow", "inner/scene.tif.aux.xml"):
        (tmp_path / name).write_text("written by a reader")
    assert hash_address_content(str(tmp_path)) == before
    for name in ("a.idx", "inner/b.idx", "inner/c.log"):
        (tmp_path / name).write_text("written by another reader")
    assert hash_address_content(str(tmp_path)) != before
    (tmp_path / ".flyteddpignore").write_text("# of a library\n*.idx\n\ninner/*.log\n")
    assert hash_address_content(str(tmp_path)) == before
    (tmp_path / "c.log").write_text("in another folder")
    assert hash_address_content(str(tmp_path)) != before


def test_the_identity_of_files_and_folders_on_a_web_server(server: FileServer) -> None:
    server.tagged = False
    server.files = {"data.zip": b"content"}
    address = f"{server.url}/data.zip"
    unmarked = hash_address_content(address)  # no header says anything, so it is read
    server.files["data.zip"] = b"CONTENT"
    assert hash_address_content(address) != unmarked
    server.answers = {"ETag": '"one"'}
    marked, requests = hash_address_content(address), len(server.requests)
    assert hash_address_content(address) == marked
    assert len(server.requests) == requests + 2  # of SHA256SUMS, which is not there, and the headers alone
    server.answers = {"ETag": '"two"'}
    assert hash_address_content(address) != marked
    with pytest.raises(UserError, match=r"HTTP 404.*needs a SHA256SUMS"):
        hash_address_content(f"{server.url}/folder")
    server.answers, server.files = {}, {"folder/SHA256SUMS": b"one"}
    before = hash_address_content(f"{server.url}/folder")
    server.files, server.faults = {"folder/SHA256SUMS": b"two"}, {"folder/SHA256SUMS": [503]}
    assert hash_address_content(f"{server.url}/folder") != before


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if number == 3:
            raise self.error
        return np.zeros(2), 0


@pytest.mark.parametrize("error", [StopIteration(), IndexError("gone"), GeneratorExit(), KeyError("k")])
def test_what_an_item_raises_is_told_with_the_item(error: BaseException) -> None:
    with pytest.raises(UserCodeError, match=f"^training set: item 3: {type(error).__name__}: ") as caught:
        make_arrays_from_user_result("a:b", (Raising(error), Raising(error)), Progress("off"))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(("length", "said"), [(2.0, "'float' object cannot be"), (-1, "should return >= 0")])
def test_a_length_that_is_none(length: float, said: str) -> None:
    class Set(Raising):
        def __len__(self) -> int:
            return length  # type: ignore[return-value]

    with pytest.raises(UserError, match=rf"training set: len\(\) of a Set fails \(.*{said}.*\); must be the number"):
        make_arrays_from_user_result("a:b", (Set(KeyError()), Set(KeyError())), Progress("off"))


@pytest.mark.parametrize("line", [b"index/", b"/a.idx", b"!a.idx", b"\xff"])
def test_a_line_of_the_ignore_file_that_would_do_nothing_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / ".flyteddpignore").write_bytes(line)
    with pytest.raises(UserError, match=r"[.]flyteddpignore: ('.*' is not a pattern|is not a text file)"):
        hash_address_content(str(tmp_path))

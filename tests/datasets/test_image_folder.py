"""What a listing of class/name.jpg takes, what it leaves out and says, and which names of classes it takes."""

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from image_folders import image_bytes, pixels_of, stored, write_files
from PIL import Image
from surroundings import s3_environment
from tars import indexed

from flyte_ddp import image_arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.datasets.encoded import decoding
from flyte_ddp.datasets.encoded.image_list import SUFFIXES, list_images
from flyte_ddp.datasets.prepared import check_prepared_set
from flyte_ddp.shards.index import read_index

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
NO_TEXT = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize("decode", [decoding.decode_with_torchcodec, decoding.decode_with_pillow])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_listed_can_be_decoded(decode, suffix: str) -> None:
    """By both decoders, from the format that Pillow saves under such a name."""
    form = {".apng": "PNG", ".jfif": "JPEG", ".jpe": "JPEG", ".pnm": "PPM"}.get(suffix)
    picture = Image.fromarray(pixels_of(0)).convert("1" if suffix == ".pbm" else "RGB")
    assert decode(stored(picture, form or Image.registered_extensions()[suffix])).shape == (9, 11, 3)


def files_of(classes: dict[str, list[str]]) -> dict[str, bytes]:
    return {f"{name}/{file}": image_bytes(seed=ord(file[0])) for name, files in classes.items() for file in files}


def test_other_files_are_counted(tmp_path: Path) -> None:
    images = files_of({"ant": ["1.jfif", "2.PNG"], "bee": ["1.avif", "2.heic", "3.HEIC", "4.txt", "LICENSE"]})
    others = dict.fromkeys(["top.jpg", "README", "labels.csv", ".hidden.heic"], b"")
    folder = str(write_files(tmp_path / "images", images | others))
    where = f"image folder {folder}:"
    expected = [
        f"{where} 3 images of 2 classes (ant 2, bee 1)",
        f"{where} 7 other files skipped (not images in class folders)",
    ]
    found = list_images(folder)
    assert list(found.names) == ["ant/1.jfif", "ant/2.PNG", "bee/1.avif"]
    assert found.describe_images() == expected
    tests = write_files(tmp_path / "tests", files_of({"ant": ["1.png"], "bee": ["1.png"]}))
    test_dataset = f"image_folder:{tests}"
    data = fetch(f"image_folder:{folder}", "", tmp_path / "data", test_dataset=test_dataset, progress="off")
    hp = Hyperparameters(dataset=f"image_folder:{folder}", test_dataset=test_dataset, validation_fraction=0.0)
    of_tests = f"image folder {tests}: 2 images of 2 classes (ant 1, bee 1)"
    assert check_prepared_set(data, hp) == [*expected, of_tests], "also of a folder that was listed before"


def test_a_class_or_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    files = files_of({"ant": ["1.jpg"], "bee": ["1.heic", "deep/3.dng"], "cow": ["1.jpg", "2.heic"]})
    folder = write_files(tmp_path / "bucket", files)
    with pytest.raises(UserError, match=r"class 'bee' has no images; convert its files to PNG or JPEG"):
        list_images(str(folder))
    (folder / "ant/1.jpg").unlink()
    (folder / "cow/1.jpg").unlink()
    with pytest.raises(UserError, match=r"none of its 3 files .*class/name\.jpg"):
        list_images(str(folder))


def test_a_class_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "images", files_of({"ant": ["1.png"], NO_TEXT: ["1.png"]}))
    with pytest.raises(UserError, match=r"images: class 'caf\\udce9' is not UTF-8.*; rename it"):
        list_images(str(folder))


def test_bad_names_are_refused_in_lists_of_classes_too(tmp_path: Path) -> None:
    picture = np.zeros((2, 4, 4), np.uint8)
    index = indexed(tmp_path, {"0": {".png": image_bytes(), ".cls": b"0"}}, classes=["ant", "bee"])
    index.write_text(index.read_text().replace('"bee"', json.dumps(NO_TEXT)))
    with pytest.raises(UserError, match=r"class 'caf\\udce9' is not UTF-8"):
        read_index(str(index))
    assert image_arrays(picture, [0, 1], picture, [0, 1], ["ant", NFD]).classes == ("ant", NFC)
    with pytest.raises(UserError, match=r"classes 'caf\\xe9' and 'cafe\\u0301' are equal in Unicode"):
        image_arrays(picture, [0, 1], picture, [0, 1], [NFC, NFD])


def test_folders_whose_names_differ_in_unicodes_form_are_one_class(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "train", files_of({"ant": ["1.png"], NFC: ["1.png"], NFD: ["2.png", "3.png"]}))
    found = list_images(str(folder))
    assert (found.classes, sorted(found.labels.tolist())) == (("ant", NFC), [0, 1, 1, 1])
    assert all(found.read_image(number) for number in range(4))
    tests = write_files(tmp_path / "tests", files_of({"ant": ["1.png"], NFD: ["1.png"]}))
    address = f"image_folder:{folder}", f"image_folder:{tests}"
    data = open_prepared(fetch(address[0], "", tmp_path / "data", test_dataset=address[1], progress="off"))
    assert data.classes == data.test.classes == ("ant", NFC)


def test_an_image_that_changes_is_to_be_listed_again_and_another_not(tmp_path: Path, monkeypatch) -> None:
    folder = write_files(tmp_path / "images", files_of({"ant": ["1.png", "2.png"]}))
    found = list_images(str(folder))
    os.utime(folder / "ant" / "1.png", ns=(0, 0))  # as of another image of the same length
    with pytest.raises(UserError, match=r"ant/1\.png: cannot be read \(changed after it was listed.*; run again"):
        found.read_image(0)
    (folder / "ant" / "1.png").unlink()
    with pytest.raises(UserError, match=r"ant/1\.png: cannot be read \(no such file\); run again to list"):
        found.read_image(0)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match=r"ant/2\.png: cannot be read \(Permission denied\); make it readable, or"):
        found.read_image(1)


def test_faults_of_a_store_that_last_are_errors_and_others_are_retried(server: FileServer, monkeypatch) -> None:
    """One that may pass is worth another try of the run."""
    s3_environment(server.url, monkeypatch)
    name, content = "bucket/ant/1.png", image_bytes()
    server.files, server.faults = {name: content}, {name: [503]}
    found = list_images("s3://bucket")
    assert found.read_image(0) == content
    server.faults = {name: [503] * 100}
    with pytest.raises(UnreachableError, match=rf"image s3://{name}: cannot be read \(HTTP 503.*run again"):
        found.read_image(0)
    server.faults = {name: [404] * 100}
    with pytest.raises(UserError, match=rf"image s3://{name}: cannot be read \(HTTP 404.*run again") as failure:
        found.read_image(0)
    assert not isinstance(failure.value, UnreachableError)

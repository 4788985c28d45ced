"""What can be packed into shards: folders and lists of images, objects and map-style data sets, and errors in them."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from image_folders import all_files, image_files, write_files
from served_shards import contents
from surroundings import object_stores

from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets import open_arrays
from flyte_ddp.datasets.encoded.image_list import list_images
from flyte_ddp.datasets.packing import pack_image_folder, pack_source
from flyte_ddp.shards.dataset import ShardDataset
from flyte_ddp.shards.packing import pack_samples

NAMES = [
    *(f"{kind}/{number}.jpg" for kind in ("zebra", "ant") for number in range(9)),
    "ant/deeper/1.JPEG",
    "ant/a.b.c.png",
    "ant/a%2Eb.c.png",
    "ant/same.jpg",
    "ant/same.png",
    "ant/same.PNG",
    "v1.0/écureuil 名.png",
    f"v1.0/{'long' * 50}.png",
]
OTHERS = {"README": b"", "top.jpg": b"", "ant/notes.txt": b"", "ant/.hidden.jpg": b"", "ant/deeper/x.csv": b""}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return image_files(*NAMES)


def packed_images(index: Path) -> list[tuple[str, bytes, bytes]]:
    """Extension, content and label of each sample."""
    found = [[(name, content) for name, content in sample.items() if name[0] == "."] for sample in contents(index)]
    return [(extension, content, label) for (extension, content), (_, label) in found]


def expected_images(files: dict[str, bytes]) -> list[tuple[str, bytes, bytes]]:
    classes = sorted({name.partition("/")[0] for name in files})
    labels = (b"%d" % classes.index(name.partition("/")[0]) for name in files)
    extensions = (f".{name.rpartition('.')[2].lower()}" for name in files)
    return sorted(zip(extensions, files.values(), labels, strict=True))


def test_a_folder_of_images(files: dict[str, bytes], tmp_path: Path) -> None:
    source = write_files(tmp_path / "source", files | OTHERS)
    index = pack_image_folder(str(source), tmp_path / "out", samples_per_shard=7, progress="off")
    assert index.classes == ("ant", "v1.0", "zebra")
    assert index.counts.tolist() == [7, 7, 7, 5]
    assert len({sample["__key__"] for sample in contents(tmp_path / "out" / "train.json")}) == len(files)
    packed = packed_images(tmp_path / "out" / "train.json")
    assert sorted(packed) == expected_images(files)
    assert packed != expected_images(files)
    pack_image_folder(str(source), tmp_path / "own", seed=None, name="val", progress="off")
    unmixed = packed_images(tmp_path / "own" / "val.json")
    assert [content for _, content, _ in unmixed] == [files[name] for name in sorted(files)]
    for shard in index.shards:
        content = Path(shard.url).read_bytes()
        assert (shard.size, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    names = [*(f"train-00000{i}.tar" for i in range(4)), "train.json", "train.json.tables"]
    assert sorted(all_files(tmp_path / "out")) == names


def test_the_same_files_make_the_same_bytes(files: dict[str, bytes], tmp_path: Path) -> None:
    """Whatever their times and the order on the disk are; another seed makes others, in another order."""
    first = write_files(tmp_path / "first", files)
    second = write_files(tmp_path / "second", dict(reversed(files.items())))
    os.utime(second / "ant/0.jpg", (1, 1))
    for name, source, seed in (("a", first, 0), ("b", second, 0), ("c", first, 1)):
        pack_image_folder(str(source), tmp_path / name, samples_per_shard=10, seed=seed, progress="off")
    a, b, c = (all_files(tmp_path / name) for name in "abc")
    assert a == b
    assert a["train-000000.tar"] != c["train-000000.tar"]
    # Known once and for all: what was packed before is to be the same in a year.
    golden = pack_samples(lambda i: (f"k{i}", {".a": b"%d" % i}), 5, tmp_path / "golden", classes=[], progress="off")
    assert golden.shards[0].sha256 == GOLDEN


GOLDEN = "b0fef850427fa1f0750c6de7a13e97d2c452d6de762f871790d1460ababe6169"


def test_a_prefix_of_objects(files: dict[str, bytes], server: FileServer, tmp_path: Path, monkeypatch) -> None:
    """On S3 and on Google, with faults that pass; the result is that of the same files in a folder."""
    object_stores(server.url, monkeypatch)
    server.page = 10
    served = {name: content for name, content in (files | OTHERS).items() if ".hidden" not in name}
    server.files = {f"bucket/images/{name}": content for name, content in (served | {"": b"", "ant/": b""}).items()}
    server.files["bucket/images2/ant/x.jpg"] = b""
    server.faults = {"bucket/images/ant/0.jpg": [503, "reset", "truncate"], "bucket": [503]}
    pack_image_folder(str(write_files(tmp_path / "source", files)), tmp_path / "local", progress="off")
    for scheme in ("s3", "gs"):
        pack_image_folder(f"{scheme}://bucket/images/", tmp_path / scheme, progress="off")
        assert all_files(tmp_path / scheme) == all_files(tmp_path / "local")
    assert server.counts["bucket/images/ant/0.jpg"] == 5
    # An object that is gone, or has changed since it was listed:
    for fault, said in {404: "cannot be read .HTTP 404", "longer": "752 bytes, .*751 when it was listed"}.items():
        server.faults["bucket/images/ant/0.jpg"] = [fault]
        with pytest.raises(UserError, match=rf"^image s3://bucket/images/ant/0\.jpg: .*{said}"):
            pack_image_folder("s3://bucket/images", tmp_path / "out", progress="off")
        assert not [*tmp_path.glob("out/*")]


@pytest.mark.slow
def test_no_source_is_not_the_working_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"source='': give a folder of images \(class/name.jpg\), or the name of a"):
        pack_source("", tmp_path / "shards", samples_per_shard=10)


def test_a_data_set_by_its_name(tmp_path: Path, digits: Path) -> None:
    arrays = open_arrays(digits)
    index = pack_source("digits", tmp_path, split="test", name="test", seed=None, progress="off")
    assert index.classes == arrays.classes
    found = list(ShardDataset(tmp_path / "test.json", tmp_path / "cache"))
    pixels = np.stack([np.asarray(sample[".png"]) for sample in found])
    np.testing.assert_array_equal(pixels, arrays.test_inputs[..., 0])
    assert [sample[".cls"] for sample in found] == arrays.test_targets.tolist()


def test_hidden_files_and_folders_are_left_out_everywhere(server: FileServer, tmp_path: Path, monkeypatch) -> None:
    object_stores(server.url, monkeypatch)
    seen = ["ant/..x/y.jpg", "ant/._x.jpg", ".checkpoints/x.jpg", "bee/.thumbs/x.jpg", "bee/deep/.x.jpg"]
    names = ["ant/x.jpg", "ant/x.y.TIFF", "bee/deep/a.b/x.pgm"]
    files = dict.fromkeys([*seen, *names], b"x")
    write_files(tmp_path, {f"bucket/.d/{name}": content for name, content in files.items()})
    server.files = {f"bucket/.d/{name}": content for name, content in files.items()}
    for start in (str(tmp_path), "s3:/", "gs:/", "az:/"):
        found = list_images(f"{start}/bucket/.d")
        assert (list(found.names), found.classes) == (names, ("ant", "bee"))


def test_lists_of_images_have_a_digest_that_changes_with_the_files(tmp_path: Path, files: dict[str, bytes]) -> None:
    first, again = (write_files(tmp_path / name, files) for name in "ab")
    for name in files:
        os.utime(first / name, (1, 1))
        os.utime(again / name, (1, 1))
    before = list_images(str(first))
    assert list_images(str(again)).digest == before.digest
    assert [before.classes[label] for label in before.labels] == [name.partition("/")[0] for name in before.names]
    assert before.sizes.tolist() == [len(files[name]) for name in before.names]
    digests = {before.digest}
    for change in (
        lambda: os.utime(again / "ant/0.jpg", (2, 2)),
        (again / "ant/0.jpg").unlink,
        lambda: write_files(again, {os.fsdecode(b"ant/not-utf-8-\xff.jpg"): b""}),
    ):
        change()
        digests.add(list_images(str(again)).digest)
    assert len(digests) == 4

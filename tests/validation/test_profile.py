"""What is found in data sets whose faults are known, as arrays, files and shards."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
from encoded_runs import quiet
from image_folders import image_bytes, image_files, write_files
from PIL import Image
from tars import shard_bytes

from flyte_ddp.datasets import fetch, image_arrays, open_arrays
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.validation.leaf_statistics import describe_range
from flyte_ddp.validation.profile import DataProfile
from flyte_ddp.validation.profiling import compute_profile


def test_profile_of_digits_is_numpys(digits: Path) -> None:
    found, arrays = compute_profile(digits), open_arrays(digits)
    labels = Counter(arrays.train_targets.tolist())
    assert found.training.labels == {str(label): count for label, count in labels.items()}
    assert (found.training.samples, found.test.samples) == (len(arrays.train_targets), len(arrays.test_targets))
    assert found.test.statistics["types of inputs"] == {"uint8 [8 x 8 x 1]": len(arrays.test_targets)}
    means = arrays.test_inputs.reshape(len(arrays.test_inputs), -1).mean(axis=1)
    assert found.test.statistics["means of inputs"] == Counter(map(describe_range, means.tolist()))
    distinct = {image.tobytes() for image in (*arrays.train_inputs, *arrays.test_inputs)}
    assert len(distinct) == found.training.samples + found.test.samples, "no two are equal"
    assert (found.duplicates, found.conflicts, found.bad, found.labelled) == (0, 0, [], {})
    assert DataProfile.from_json(found.to_json()) == found


def test_equal_pixels_among_arrays(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 1), dtype=np.uint8)
    images[3] = images[1]  # with one label, in training: nothing to say
    images[7] = images[1]  # and in the test split
    images[8] = images[2]  # likewise, with another label
    labels = np.array([0, 0, 1, 0, 1, 1, 0, 0, 0])
    (tmp_path / "data").mkdir()
    arrays = image_arrays(images[:6], labels[:6], images[6:], labels[6:], classes=("a", "b"), name="digits")
    write_prepared_set(arrays, tmp_path / "data", {})
    found = compute_profile(tmp_path / "data")
    assert found.duplicates == 2
    assert sorted(found.duplicated) == [f"test sample {number} and training sample {number}" for number in (1, 2)]
    assert found.conflicts == 2
    assert found.conflicting == ["training sample 2 (label 1) and test sample 2 (label 0)"]


def test_profile_of_files(tmp_path: Path) -> None:
    """Undecodable files, other modes, an image in two classes, and one in both splits."""
    train = image_files("cat/1.png", "cat/2.jpg", "dog/1.png", "dog/2.png")
    train["dog/3.png"] = train["cat/1.png"]
    train["dog/4.png"] = train["dog/1.png"][:60]
    tests = {"cat/x.png": train["dog/2.png"], "dog/y.png": image_bytes(seed=77)}
    folders = [write_files(tmp_path / name, files) for name, files in {"train": train, "test": tests}.items()]
    Image.new("L", (40, 30), 200).save(folders[0] / "cat/grey.png")
    dataset, test_dataset = (f"image_folder:{folder}" for folder in folders)
    data = fetch(dataset, "", tmp_path / "data", test_dataset=test_dataset)
    found = compute_profile(data, quiet(tmp_path))
    assert found.classes == ["cat", "dog"]
    assert found.training.labels == {"0": 3, "1": 3}, "of those that can be decoded"
    assert found.training.undecodable == 1
    [bad] = found.bad
    assert bad.startswith(f"image {folders[0]}/dog/4.png (")
    assert found.training.statistics["colour modes"] == {"RGB": 5, "L": 1}
    assert found.training.statistics["sizes"] == {"images of 64 to 127 pixels": 5, "images of 1,024 to 2,047 pixels": 1}
    assert found.training.statistics["brightness"]["images of mean value 192 to 207"] == 1
    assert found.duplicates == 1
    assert found.duplicated == [f"image {folders[1]}/cat/x.png and image {folders[0]}/dog/2.png"]
    assert found.conflicts == 4, "the two that are in cat and in dog, and the one whose copy is tested as a cat"
    assert sorted(found.conflicting) == [
        f"image {folders[0]}/cat/1.png (label 0) and image {folders[0]}/dog/3.png (label 1)",
        f"image {folders[0]}/dog/2.png (label 1) and image {folders[1]}/cat/x.png (label 0)",
    ]


def test_profile_of_shards_with_held_out_test_samples(tmp_path: Path) -> None:
    """Labels are those of the samples, and each sample is in one of the splits."""
    for shard in range(4):
        seeds = {f"{shard}{number}": (10 * shard + number) % 35 for number in range(10)}  # five of them again
        labels = {key: b"7" if key == "23" else b"%d" % (seed % 2) for key, seed in seeds.items()}
        contents = {key: {".png": image_bytes(seed=seed), ".cls": labels[key]} for key, seed in seeds.items()}
        (tmp_path / f"{shard}.tar").write_bytes(shard_bytes(contents))
    listed = [{"url": f"{shard}.tar", "nsamples": 10} for shard in range(4)]
    (tmp_path / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": listed}))
    found = compute_profile(
        fetch(f"shards:{tmp_path}/index.json", "", tmp_path / "data", progress="off"), quiet(tmp_path)
    )
    assert found.training.samples + found.test.samples == 40
    counts = Counter(found.training.labels) + Counter(found.test.labels)
    assert counts == {"0": 21, "1": 18, "7": 1}
    assert found.labelled["7"] == f"sample '23' in shard {tmp_path}/2.tar"
    assert found.conflicts == 0
    assert found.duplicates == len(found.duplicated)
    pairs = [tuple(sorted(re.findall(r"sample '(\d+)'", said))) for said in found.duplicated]
    assert {*pairs} <= {(f"0{number}", f"3{number + 5}") for number in range(5)}


def test_other_targets_than_classes(tmp_path: Path) -> None:
    """Labels and masks count for each class that they have; equal pictures are compared."""
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 1), dtype=np.uint8)
    images[5], images[1] = images[0], images[0]
    labels = np.array([[1, 0], [1, 1], [np.nan, 1], [0, 0], [0, 1], [1, 0]], np.float32)
    masks = np.zeros((6, 4, 4), np.uint8)
    masks[0, :2], masks[1], masks[2] = 1, 255, 1
    for name, targets, tests in (("l", labels, {"1": 1, "0": 1}), ("m", masks, {"0": 2})):
        (tmp_path / name).mkdir()
        arrays = image_arrays(images[:4], targets[:4], images[4:], targets[4:], classes=["a", "b"], name="own")
        write_prepared_set(arrays, tmp_path / name, {})
        found = compute_profile(tmp_path / name)
        assert (found.training.labels, found.test.labels) == ({"0": 2, "1": 2}, tests)
        assert (found.duplicates, found.conflicts) == (1, 3)

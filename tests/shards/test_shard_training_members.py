"""Which members of a sample training reads, and where it is said that a sample does not have them."""

import json
from pathlib import Path

import pytest
import webdataset as wds
from file_server import FileServer
from image_folders import image_bytes
from tars import Samples, shard_bytes, write_shards

from flyte_ddp.datasets import fetch
from flyte_ddp.errors import UserError
from flyte_ddp.loading.readers import ShardImages
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.planning import describe_plan
from flyte_ddp.shards.scanning import create_index, verify_index

IMAGE = image_bytes()
GOOD = {f"{number}": {".png": IMAGE, ".cls": b"%d" % (number % 2)} for number in range(3)}
NAMES = "; training reads KEY.jpg (or .jpeg, .png, "
UNFIT = {
    "two extensions": (
        {"x": {".input.jpg": IMAGE, ".cls": b"1"}},
        "'x' in shard {} has no image: it has .input.jpg, .cls",
    ),
    "json": ({"x": {".jpg": IMAGE, ".json": b"{}"}}, "'x' in shard {} has no label: it has .jpg, .json"),
    "dots": (
        {f"2024.{day:02}": {".jpg": IMAGE, ".cls": b"1"} for day in range(9)},
        "'2024' in shard {} has no image: it has .00.jpg, .00.cls, .01.jpg, .01.cls, .02.jpg, .02.cls and 12 others",
    ),
}


def refused_by_training(index: Path, folder: Path) -> str:
    """What a run says before any rank starts."""
    with pytest.raises(UserError) as caught:
        fetch(f"shards:{index}", "", folder / "prepared", progress="off")
    assert not (folder / "prepared").exists()
    return caught.value.message


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves them to be collected
def test_the_case_of_extensions_is_ignored_as_in_webdataset(tmp_path: Path) -> None:
    contents = {
        "a": {".JPG": b"first", ".CLS": b"1"},
        "b": {".Jpeg": b"second", ".cls": b"0", ".JSON": b"{}"},
        "c": {".seg.png": b"mask", ".PNG": b"third", ".Cls": b"3"},
    }
    [path] = write_shards(tmp_path, contents)
    index = create_index([str(path)], tmp_path / "index.json", progress="off")
    assert index.classes == ("0", "1", "2", "3")
    reader = ShardImages(ShardReader(index, ShardCache(tmp_path / "cache")))
    found = [reader.read_sample(number) for number in range(3)]
    expected = [
        (sample["__key__"], next(sample[name] for name in ("jpg", "jpeg", "png") if name in sample), int(sample["cls"]))
        for sample in wds.WebDataset(str(path), shardshuffle=False)
    ]
    assert [(sample.key, sample.content, sample.label) for sample in found] == expected
    fetch(f"shards:{tmp_path / 'index.json'}", "", tmp_path / "prepared", progress="off")


@pytest.mark.parametrize(("samples", "said"), UNFIT.values(), ids=UNFIT)
def test_what_training_refuses_is_said_when_the_index_is_made(samples: Samples, said: str, tmp_path, capsys) -> None:
    first, second = write_shards(tmp_path, GOOD, samples)
    said = f"sample {said.format(second)}"
    output = tmp_path / "index.json"
    create_index([str(first), str(second)], output, progress="lines")
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert f"warning: 1 of {len(GOOD) + 1} samples cannot be trained on: {said}{NAMES}" in warning
    assert [line for line in verify_index(str(output), decode=True, progress="off") if line.startswith(said + NAMES)]
    assert not [line for line in verify_index(str(output), progress="off") if "training" in line]
    # The first sample is looked at again where no other command was asked.
    create_index([str(second)], output, progress="off")
    assert refused_by_training(output, tmp_path).startswith(said + NAMES)
    [*_, last] = describe_plan(PlanRequest(index=str(output), validation_fraction=0.0, test_fraction=0.0, batch_size=1))
    assert last.startswith(f"warning: {said}{NAMES}")
    assert "create" not in last
    # As wids' own tool writes it, which looks at numbers of samples only.
    output.write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": second.name, "nsamples": 1}]}))
    assert refused_by_training(output, tmp_path).startswith(said + NAMES)


def test_of_a_remote_shard_the_first_sample_is_read(server: FileServer, tmp_path: Path) -> None:
    large = {f"{number}": {".png": bytes(5_000_000), ".cls": b"cat"} for number in range(4)}
    server.files["0.tar"] = shard_bytes(large)
    server.files["index.json"] = json.dumps({"shardlist": [{"url": "0.tar", "nsamples": 4}]}).encode()
    with pytest.raises(UserError, match=r"sample '0' in shard .*0.tar: its .cls is b'cat'; must be the number of a"):
        fetch(f"shards:{server.url}/index.json", "", tmp_path / "prepared", progress="off")
    assert server.counts["0.tar"] == 1
    assert [path.name for path in tmp_path.iterdir()] == []
    server.files["0.tar"] = shard_bytes(GOOD)
    server.faults["0.tar"] = [503]  # which passes
    fetch(f"shards:{server.url}/index.json", "", tmp_path / "prepared", progress="off")


def test_a_plan_of_shards_that_cannot_be_read_says_so(server: FileServer, tmp_path: Path) -> None:
    server.files["index.json"] = json.dumps({"shardlist": [{"url": "0.tar", "nsamples": 400}]}).encode()
    [plan, warning] = describe_plan(PlanRequest(index=f"{server.url}/index.json"))
    assert "warning" not in plan
    assert warning.startswith(f"warning: shard {server.url}/0.tar: cannot be fetched (HTTP 404 Not Found); check the")

"""The programs of the documents, on launchers: a rank is killed in the middle, and the same call goes on from its save.

They train with tiny data. What they must end with: the tutorial as a loop of one process does, written here in plain
torch; CustomDDP with the losses that torch's DistributedDataParallel has; the others, bit for bit, with what a run that
nothing disturbs has.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import AGENTS, DASK, LAUNCHERS, RAY, SPAWN, Launch, on
from killed_ranks import call_and_kill
from s3_server import S3Server, s3_server
from torch.nn import functional
from torchvision import datasets, models

from examples.custom_ddp.custom_ddp import train_dist
from examples.dask_s3.dask_s3 import make_model, run_transfer_learning
from examples.gan.gan import train as gan_digits
from examples.sample_data import unpack_mnist_files, write_image_folder
from examples.tutorial.tutorial import MODEL_FILE, TRANSFORM, Hyperparameters, Net, train_mnist
from examples.wids_ray.wids_ray import Config, train_in_ray
from flyte_ddp import RankError, run_ranks
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.datasets.packing import pack_image_folder

pytestmark = pytest.mark.slow
COUNT = 48  # of training samples, 24 on each rank
HP = Hyperparameters(batch_size=8, log_interval=1, epochs=3)


@dataclass(frozen=True)
class Case:
    """A run of an example in ``folder``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    folder: Path
    launch: Launch | None = None

    def run(self, rank: int = 1, step: int = 5) -> Any:
        """Run it, and kill a rank at the end of a step if none was killed in this folder."""
        arguments = rank, step, str(self.folder.with_suffix(".killed")), *self.arguments
        return run_ranks(call_and_kill, self.function, *arguments, folder=self.folder, launch=self.launch)

    def run_undisturbed(self) -> Any:
        """Run it elsewhere, in processes of this machine."""
        undisturbed = replace(self, folder=self.folder.with_name("undisturbed"), launch=None)
        undisturbed.folder.with_suffix(".killed").touch()
        return undisturbed.run()

    def run_killed(self, rank: int = 1) -> Any:
        """Run it until a rank is killed, and again; return what the second run returns."""
        with pytest.raises(RankError, match=rf"rank {rank} .*SIGKILL"):
            self.run(rank)
        returned = self.run(rank)
        starts = [each for each in read_records(self.folder / "metrics.jsonl") if each["kind"] == "start"]
        assert len(starts) == 2
        assert 0 < starts[1]["resumed_after_step"] <= 5
        return returned


@pytest.fixture(scope="module", autouse=True)
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server with a bucket, ``bucket``; it is there before the clusters are, whose workers find it so."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    with s3_server(folder) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.aws_environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch) -> Callable[..., Case]:
    """Make a case on the launcher of the test; each step saves."""
    monkeypatch.setenv("FLYTE_DDP_CHECKPOINT_SECONDS", "1e-6")
    monkeypatch.setenv("FLYTE_DDP_PROGRESS", "off")
    return lambda function, *arguments: Case(function, arguments, tmp_path / "run", launch)


@on(SPAWN, without=[AGENTS])
def test_tutorial(case: Callable[..., Case], tmp_path: Path) -> None:
    data = unpack_mnist_files("MNIST", None, tmp_path, COUNT)
    tutorial = case(train_mnist, HP, str(data))
    accuracies = tutorial.run_killed(rank=0)
    weights, expected = train_in_one_process(data)
    assert accuracies == expected
    for name, value in torch.load(tutorial.folder / MODEL_FILE, weights_only=True).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)


def train_in_one_process(data: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return weights and accuracies after the tutorial's training, a batch of both ranks at a time."""
    training, test = (datasets.MNIST(data, train=train, transform=TRANSFORM) for train in (True, False))
    torch.manual_seed(HP.seed)
    net, accuracies = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=HP.learning_rate, momentum=HP.sgd_momentum)
    test_images, test_labels = map(
        torch.stack, zip(*[(image, torch.tensor(label)) for image, label in test], strict=True)
    )
    for epoch in range(HP.epochs):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(HP.seed + epoch)).tolist()
        for start in range(0, COUNT, 2 * HP.batch_size):  # both ranks' samples alternate in the order
            samples = [training[number] for number in order[start : start + 2 * HP.batch_size]]
            images, labels = torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])
            optimizer.zero_grad()
            functional.nll_loss(net(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            accuracies.append(int((net(test_images).argmax(1) == test_labels).sum()) / len(test_labels))
    return net.state_dict(), accuracies


@on(without=[AGENTS, DASK])
def test_custom_ddp(case: Callable[..., Case], tmp_path: Path) -> None:
    data = str(unpack_mnist_files("FashionMNIST", None, tmp_path, COUNT))
    losses = case(train_dist, data, 2, 12).run_killed()
    expected = case(train_dist, data, 2, 12, "torch").run_undisturbed()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)


@on(without=[AGENTS, DASK])
def test_wids_on_ray(case: Callable[..., Case], tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images", COUNT)
    pack_image_folder(str(images), tmp_path / "shards", samples_per_shard=20, progress="off")
    config = Config(str(tmp_path / "shards/train.json"), epochs=2, batch_size=6, cache_dir=str(tmp_path / "cache"))
    wids = case(train_in_ray, config)
    returned, undisturbed = wids.run_killed(), wids.run_undisturbed()
    assert returned == undisturbed
    assert_equal(wids.folder / "resnet.pt", tmp_path / "undisturbed/resnet.pt")


@on(without=[AGENTS, RAY])
def test_transfer_learning_on_dask_and_s3(case: Callable[..., Case], bucket: S3Server, tmp_path, monkeypatch) -> None:
    write_image_folder(bucket.folder / "bucket" / tmp_path.name, COUNT)
    copies = bucket.folder / "bucket/results" / tmp_path.name
    monkeypatch.setenv("FLYTE_DDP_RESULTS", f"s3://bucket/results/{tmp_path.name}")
    learning = case(run_transfer_learning, f"s3://bucket/{tmp_path.name}", "", 3, 13)
    assert learning.run_killed() == learning.run_undisturbed()
    assert_equal(copies / "run/checkpoint-10.pt", copies / "undisturbed/checkpoint-10.pt")
    events = [json.loads(line) for line in (copies / "run/events.jsonl").read_text().splitlines()]
    assert {each["count"] for each in events if each["rank"] == 0} == set(range(1, 13))
    assert {each["rank"] for each in events} == {0, 1}


@pytest.mark.exhaustive
@on(SPAWN, without=LAUNCHERS)
def test_a_gan(case: Callable[..., Case], tmp_path: Path) -> None:
    gan = case(gan_digits, 2)
    assert gan.run_killed(rank=0) == gan.run_undisturbed()
    here, there = (torch.load(path / "gan.pt", weights_only=True) for path in (gan.folder, tmp_path / "undisturbed"))
    for name, weights in here.items():
        assert [key for key, value in weights.items() if not torch.equal(value, there[name][key])] == []
    records = [
        [record for record in read_records(path / "metrics.jsonl") if record["kind"] == "record"]
        for path in (gan.folder, tmp_path / "undisturbed")
    ]
    mine, other = ([{**record, "time": 0} for record in of] for of in records)
    assert mine == other
    assert sum("distance" in record for record in mine) == 2, "once for each epoch"


def test_transfer_learning_begins_with_the_weights_that_are_given(tmp_path: Path) -> None:
    weights = models.resnet18().state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    begun = make_model(str(tmp_path / "weights.pt"), num_classes=3).state_dict()
    assert begun["fc.weight"].shape == (3, 512)
    assert all(torch.equal(begun[name], weights[name]) for name in weights if not name.startswith("fc."))


def assert_equal(here: Path, there: Path) -> None:
    """Assert that two files of weights are equal bit for bit."""
    mine, other = (torch.load(path, weights_only=True) for path in (here, there))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)

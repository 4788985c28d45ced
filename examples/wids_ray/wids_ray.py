"""Indexed shards (wids) and DistributedDataParallel on Ray: a ResNet, from the notebook of the wids library.

    python examples/wids_ray/wids_ray.py                               # digits, packed into shards
    python examples/wids_ray/wids_ray.py --index https://.../imagenet-train.json --model resnet50 --image-size 224

Without RAY_ADDRESS the program starts a Ray cluster of this machine.

Changes to the notebook:

- run_ranks(..., launch=ray.launch) replaces a remote function for each rank. The launcher reserves GPUs or CPUs, finds
  address and port, and ends all ranks after a failure. current_rank() returns rank, number of ranks and device.
- Ranks stop after equally many batches. The sampler gives fewer samples to the last rank, and other ranks would wait
  for it.
- Crops depend on sample and epoch only, so a resumed run makes the same crops. Shards of finished steps are not read,
  because the first samples of the sampler's list are skipped.
- load(), save() and due(): after a kill the same command resumes. record() replaces the prints at intervals.
"""

import argparse
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import wids
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import models, transforms

from flyte_ddp import current_rank, run_ranks
from flyte_ddp.engines import ray


@dataclass
class Config:
    trainset_url: str
    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.001
    momentum: float = 0.9
    model: str = "resnet18"
    image_size: int = 32
    cache_dir: str | None = None  # None: WIDS_CACHE, or /tmp/_wids_cache


def make_dataset_train(config: Config) -> Any:
    crop = [transforms.RandomResizedCrop(config.image_size), transforms.RandomHorizontalFlip()]
    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    transform = transforms.Compose([*crop, transforms.ToTensor(), normalize])

    def make_sample(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        torch.manual_seed(dataset.epoch << 32 | int(sample["__index__"]))
        image = sample[".jpg"] if ".jpg" in sample else sample[".png"]
        return transform(image.convert("RGB")), sample[".cls"]

    dataset = wids.ShardListDataset(config.trainset_url, cache_dir=config.cache_dir, keep=True)
    return dataset.add_transform(make_sample)


def make_dataloader_train(config: Config, dataset: Any, epoch: int, first: int, end: int) -> DataLoader[Any]:
    """Return a loader of this rank's batches of an epoch, from ``first`` to ``end``."""
    dataset.epoch = epoch
    sampler = wids.DistributedChunkedSampler(dataset, chunksize=1000, shuffle=True)
    sampler.set_epoch(epoch)
    samples = [*sampler][first * config.batch_size : end * config.batch_size]
    return DataLoader(dataset, config.batch_size, sampler=samples)


def train_in_ray(config: Config) -> list[float]:
    """Train, and return this rank's mean loss and accuracy of the last hundred steps. Rank 0 writes resnet.pt."""
    here = current_rank()
    here.join()
    torch.manual_seed(0)
    net = getattr(models, config.model)().to(here.device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=config.lr, momentum=config.momentum)
    saved = here.load() or {"step": 0, "epoch": 0, "recent": []}
    step, recent = saved["step"], deque(saved["recent"], maxlen=100)  # of losses and accuracies
    if step:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    dataset = make_dataset_train(config)
    steps = len(dataset) // here.world_size // config.batch_size  # of an epoch, on each rank
    for epoch in range(saved["epoch"], config.epochs):
        for images, targets in make_dataloader_train(config, dataset, epoch, step - epoch * steps, steps):
            inputs, labels = images.to(here.device), targets.to(here.device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            step += 1
            recent.append((loss.item(), (outputs.argmax(1) == labels).float().mean().item()))
            here.record(step, loss=recent[-1][0], accuracy=recent[-1][1])
            if here.due():
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                here.save(step, {**state, "step": step, "epoch": epoch, "recent": [*recent]})
    if here.rank == 0:
        torch.save(net.state_dict(), here.folder / "resnet.pt")
    return torch.tensor([*recent]).mean(0).tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--index", help="path or address of the shards' index (default: the digits)")
    parser.add_argument("--folder", default="runs/wids_ray", help="run folder: data, checkpoints, records, weights")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks; 0: as many as fit")
    args = parser.parse_args()
    if not args.index:
        from flyte_ddp.datasets.packing import pack_source

        shards = Path(args.folder, "shards").absolute()
        pack_source("digits", shards)
        args.index = str(shards / "train.json")
    config = Config(args.index, epochs=args.epochs, model=args.model, image_size=args.image_size)
    print(run_ranks(train_in_ray, config, num_ranks=args.world_size, folder=args.folder, launch=ray.launch))

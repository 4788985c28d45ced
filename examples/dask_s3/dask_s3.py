"""Transfer learning on Dask with images on S3: ResNet18, from the introduction of dask-pytorch-ddp.

    python examples/dask_s3/dask_s3.py                                            # digits, in a folder
    FLYTE_DDP_RESULTS=s3://bucket/results python examples/dask_s3/dask_s3.py --images s3://bucket/images \
        --weights s3://bucket/resnet18.pt

Images are ``class/name.png`` below a path, s3://, gs:// or az://. Without DASK_SCHEDULER_ADDRESS the program starts a
Dask cluster of this machine.

Changes to the original program:

- run_ranks(..., launch=partial(dask.launch, client=client)) replaces dispatch.run(client, ...).
- results.submit() and results.event() replace a DaskResultsHandler. Both write to results/ in the run's folder. During
  the run both also write to FLYTE_DDP_RESULTS, if set.
- batches() replaces a train_sampler. Each sample goes to a single rank. A resumed run begins where the run was stopped.
- load(), save() and due(): after a kill the same command resumes.
"""

import argparse
import io
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms

from flyte_ddp import batches, current_rank, run_ranks
from flyte_ddp.core import results
from flyte_ddp.engines import dask
from flyte_ddp.storage import join_address, list_files, read_file

SUBMIT_EVERY = 10  # steps


class S3ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The images ``class/name.png`` below an address, in the order of their names."""

    def __init__(self, address: str, image_size: int) -> None:
        self.address, self.names = address, [entry.name for entry in list_files(address)]
        self.classes = sorted({name.split("/")[0] for name in self.names})
        self.transform = transforms.Compose([transforms.Resize([image_size] * 2), transforms.ToTensor()])

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        name = self.names[idx]
        image = Image.open(io.BytesIO(read_file(join_address(self.address, name)))).convert("RGB")
        return self.transform(image), self.classes.index(name.split("/")[0])

    def __len__(self) -> int:
        return len(self.names)


def make_model(weights: str, num_classes: int) -> nn.Module:
    """Return a ResNet18 with a new last layer.

    ``weights`` is the address of a state_dict. "" uses random weights.
    """
    model: nn.Module = models.resnet18()
    if weights:
        model.load_state_dict(torch.load(io.BytesIO(read_file(weights)), weights_only=True))
    model.fc = nn.Linear(512, num_classes)
    return model


def run_transfer_learning(images: str, weights: str, n_epochs: int, batch_size: int, image_size: int = 32) -> float:
    """Train, and return the last loss of this rank.

    Rank 0 submits the weights every 10 steps. All ranks submit their losses.
    """
    here = current_rank()
    here.join()
    torch.manual_seed(0)
    dataset = S3ImageFolder(images, image_size)
    net = make_model(weights, len(dataset.classes)).to(here.device)
    optimizer = optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    saved = here.load() or {"count": 0, "epoch": 0, "loss": 0.0}
    count, loss = saved["count"], torch.tensor(saved["loss"])
    if count:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = DistributedDataParallel(net)
    steps = len(batches(len(dataset), batch_size, seed=0, epoch=0))
    for epoch in range(saved["epoch"], n_epochs):
        order = batches(len(dataset), batch_size, seed=0, epoch=epoch, first=count - epoch * steps)
        loader = DataLoader(dataset, batch_sampler=order)
        for factor, (inputs, labels) in zip(order.loss_factors(), loader, strict=True):
            loss = nn.functional.cross_entropy(model(inputs.to(here.device)), labels.to(here.device))
            optimizer.zero_grad()
            (factor * loss).backward()
            optimizer.step()
            count += 1
            results.event(loss=loss.item(), epoch=epoch, count=count)
            here.record(count, loss=loss.item())
            if count % SUBMIT_EVERY == 0 and here.rank == 0:
                torch.save(net.state_dict(), file := io.BytesIO())
                results.submit(f"checkpoint-{count}.pt", file.getvalue())
            if here.due():
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                here.save(count, {**state, "count": count, "epoch": epoch, "loss": loss.item()})
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", help="folder or prefix of images (default: the digits)")
    parser.add_argument("--weights", default="", help="path or address of a ResNet18's state_dict")
    parser.add_argument("--folder", default="runs/dask_s3", help="run folder: data, checkpoints, records, results")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    if not args.images:
        from examples.sample_data import write_image_folder

        args.images = str(write_image_folder(Path(args.folder, "images").absolute()))
    with dask.connected(num_ranks=args.world_size) as client:
        options = {"num_ranks": args.world_size, "folder": args.folder, "launch": partial(dask.launch, client=client)}
        print("loss", run_ranks(run_transfer_learning, args.images, args.weights, args.epochs, 100, **options))


if __name__ == "__main__":
    main()

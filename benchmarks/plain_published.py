"""``python -m benchmarks.plain_published BATCH LEARNING_RATE EPOCHS``: the published runs' task in one plain process.

Independent of the library's training: which batch and learning rate give the table's losses? See README.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.models import resnet18

from benchmarks.running import fashion_mnist
from flyte_ddp.datasets import open_arrays


def main(batch: int, learning_rate: float, epochs: int, most_images: int = 60_000) -> None:
    """Prints each epoch's mean loss, and the document's validation on all, half and a quarter of the test images."""
    with tempfile.TemporaryDirectory() as folder:
        arrays = open_arrays(fashion_mnist(Path(folder)))
        images, labels = pixels(arrays.train_images[:most_images]), torch.tensor(arrays.train_labels[:most_images])
        test_images, test_labels = pixels(arrays.test_images), torch.tensor(arrays.test_labels)
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for epoch in range(1, epochs + 1):
        losses = []
        for index in torch.randperm(len(images)).split(batch):
            loss = functional.cross_entropy(model(images[index].expand(-1, 3, -1, -1)), labels[index].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():  # the model stays in training mode
            tested = [
                functional.cross_entropy(model(part.expand(-1, 3, -1, -1)), truth.long()).item()
                for part, truth in zip(test_images.split(batch), test_labels.split(batch), strict=True)
            ]
        means = (np.mean(tested[: len(tested) // parts]) for parts in (1, 2, 4))
        print(f"epoch {epoch}: {np.mean(losses):.4f}, tested", *(f"{mean:.4f}" for mean in means), flush=True)


def pixels(images: np.ndarray) -> Tensor:
    """uint8 [N, 28, 28, 1] to fp32 [N, 1, 28, 28] in [0, 1]."""
    return torch.tensor(np.array(images)).permute(0, 3, 1, 2) / 255


if __name__ == "__main__":
    batch, learning_rate, epochs, *most = sys.argv[1:]
    main(int(batch), float(learning_rate), int(epochs), *map(int, most))

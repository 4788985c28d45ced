"""A GAN on scikit-learn's digits, with two networks and optimisers, BatchNorm, dropout and noise.

If the program is killed, the same command resumes. The result has the bits of an uninterrupted run.

    python examples/gan/gan.py

- seed_step() seeds noise and dropout by rank and step. With manual_seed(0) alone, all ranks would draw the same noise.
  A resumed run would draw other noise, because no states of random generators are saved.
- Each forward pass of DistributedDataParallel copies rank 0's BatchNorm statistics to all ranks. Rank 0 saves them.
- The generator learns from ``discriminator`` itself. The DistributedDataParallel would average unused gradients.
- At the end of an epoch, rank 0 submits a picture for the run's page.
"""

import io
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp import batches, current_rank, run_ranks
from flyte_ddp.core import results

NOISE, BATCH = 32, 60  # the last batch of an epoch has 57 samples: BatchNorm needs two on each rank


def loss_of(judged: Tensor, truth: float) -> Tensor:
    return binary_cross_entropy_with_logits(judged, torch.full_like(judged, truth))


def train(epochs: int = 40) -> float:
    """Train on all ranks, and return the distance of the mean generated digit from the mean real digit.

    Rank 0 writes gan.pt.
    """
    rank = current_rank()
    rank.join()
    torch.manual_seed(0)  # the networks begin equal on all ranks
    images = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)  # from -1 to 1
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()).to(
        rank.device
    )
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)).to(
        rank.device
    )
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3, (0.5, 0.999)) for each in (generator, discriminator)]
    learning: dict[str, Any] = {
        "generator": generator,
        "discriminator": discriminator,
        "first": optimizers[0],
        "second": optimizers[1],
    }
    step = first_epoch = 0
    if saved := rank.load():
        step, first_epoch = saved["step"], saved["epoch"]
        for name, part in learning.items():
            part.load_state_dict(saved[name])
    make, judge = (DistributedDataParallel(each, find_unused_parameters=True) for each in (generator, discriminator))

    distance, steps = 0.0, len(batches(len(images), BATCH, seed=0, epoch=0))
    for epoch in range(first_epoch, epochs):
        order = batches(len(images), BATCH, seed=0, epoch=epoch, first=step - epoch * steps)
        for factor, samples in zip(order.loss_factors(), order, strict=True):
            rank.seed_step(step)
            real = images[samples].to(rank.device)
            made = make(torch.randn(len(real), NOISE, device=rank.device))
            of_real, of_made = judge(torch.cat([real, made.detach()])).split(len(real))
            judge_loss = factor * (loss_of(of_real, 0.9) + loss_of(of_made, 0.0))
            make_loss = factor * loss_of(discriminator.requires_grad_(False)(made), 1.0)
            discriminator.requires_grad_(True)
            for loss, optimizer in zip((make_loss, judge_loss), optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            rank.record(step, discriminator_loss=judge_loss, generator_loss=make_loss)
            if rank.due():
                state = {name: part.state_dict() for name, part in learning.items()}
                rank.save(step, {**state, "step": step, "epoch": epoch})
        if rank.rank == 0:
            digits = draw_digits(generator, rank.device)
            distance = (digits.mean(0) - images.mean(0)).abs().mean().item()
            rank.record(step, distance=distance)
            pixels = (digits.view(8, 8, 8, 8).transpose(1, 2).reshape(64, 64) + 1) * 127.5
            Image.fromarray(pixels.byte().numpy()).save(file := io.BytesIO(), format="PNG")
            results.submit(f"epoch-{epoch + 1:03}.png", file.getvalue())
    if rank.rank == 0:
        torch.save(
            {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}, rank.folder / "gan.pt"
        )
    return distance


@torch.no_grad()
def draw_digits(generator: nn.Module, device: torch.device) -> Tensor:
    """Return 64 digits generated from the same noise at each call, [64, 64]."""
    noise = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(0))
    digits: Tensor = generator.eval()(noise.to(device)).cpu()
    generator.train()
    return digits


if __name__ == "__main__":
    print("distance", run_ranks(train, num_ranks=2, folder="runs/gan"))

"""A GAN on scikit-learn's digits: two networks and optimisers, BatchNorm, dropout and noise; exact after a kill.

    python examples/gan/gan.py

Kill it in the middle: the same command goes on, and ends with the bits of a run that was never stopped.

- seed_step() seeds noise and dropout of a step by rank and step, so no state of random generators is saved. With the
  same seed on all ranks and no more, all ranks would draw the same noise, and other noise after a resume.
- What is saved: both networks, with BatchNorm's statistics, both optimisers, and how far the run is. Each forward pass
  of DistributedDataParallel gives all ranks rank 0's statistics, so those of rank 0 are enough.
- The generator learns from ``discriminator`` itself, not from its DistributedDataParallel, which would average
  gradients that nobody needs.
- At the end of an epoch rank 0 hands in a picture, which is on the page of the run, and records a measure.
"""

import argparse
import io

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp import batches, current_rank, results, run_ranks

NOISE = 32  # numbers from which a digit is made
BATCH = 60  # the last batch of an epoch has 57 samples: BatchNorm needs two on each rank


def make_networks() -> dict[str, nn.Module]:
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()
    )
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    return {"generator": generator.extend([nn.Linear(128, 64), nn.Tanh()]), "discriminator": discriminator}


def loss_of(judged: Tensor, truth: float) -> Tensor:
    return binary_cross_entropy_with_logits(judged, torch.full_like(judged, truth))


def train(epochs: int = 40) -> float:
    """Train on all ranks; return how far the mean of made digits is from that of real ones. Rank 0 writes gan.pt."""
    rank = current_rank()
    rank.join()
    torch.manual_seed(0)  # the networks begin equal on all ranks
    images = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)  # from -1 to 1
    networks = {name: network.to(rank.device) for name, network in make_networks().items()}
    generator, discriminator = networks.values()
    optimizers = {name: torch.optim.Adam(networks[name].parameters(), 1e-3, betas=(0.5, 0.999)) for name in networks}
    step = first_epoch = 0
    if saved := rank.load():
        step, first_epoch = saved["step"], saved["epoch"]
        for name, network in networks.items():
            network.load_state_dict(saved[name])
            optimizers[name].load_state_dict(saved[f"{name}'s optimizer"])
    make, judge = (DistributedDataParallel(network, find_unused_parameters=True) for network in networks.values())

    distance, steps = 0.0, len(batches(len(images), BATCH, seed=0, epoch=0))
    for epoch in range(first_epoch, epochs):
        order = batches(len(images), BATCH, seed=0, epoch=epoch, first=step - epoch * steps)
        for factor, samples in zip(order.loss_factors(), order, strict=True):
            rank.seed_step(step)
            real = images[samples].to(rank.device)
            made = make(torch.randn(len(real), NOISE, device=rank.device))
            of_real, of_made = judge(torch.cat([real, made.detach()])).split(len(real))
            judge_loss = factor * (loss_of(of_real, 0.9) + loss_of(of_made, 0.0))
            optimizers["discriminator"].zero_grad()
            judge_loss.backward()
            optimizers["discriminator"].step()
            discriminator.requires_grad_(False)
            make_loss = factor * loss_of(discriminator(made), 1.0)
            optimizers["generator"].zero_grad()
            make_loss.backward()
            optimizers["generator"].step()
            discriminator.requires_grad_(True)
            step += 1
            rank.record(step, discriminator_loss=judge_loss, generator_loss=make_loss)
            if rank.due():
                state = {name: network.state_dict() for name, network in networks.items()}
                state |= {f"{name}'s optimizer": optimizer.state_dict() for name, optimizer in optimizers.items()}
                rank.save(step, {**state, "step": step, "epoch": epoch})
        if rank.rank == 0:
            digits = draw_digits(generator, rank.device)
            results.submit(f"epoch-{epoch + 1:03}.png", encode_picture(digits))
            distance = (digits.mean(0) - images.mean(0)).abs().mean().item()
            rank.record(step, distance=distance)
    if rank.rank == 0:
        torch.save({name: network.state_dict() for name, network in networks.items()}, rank.folder / "gan.pt")
    return distance


@torch.no_grad()
def draw_digits(generator: nn.Module, device: torch.device) -> Tensor:
    """Return 64 digits made of noise that is the same at each call, [64, 64]."""
    noise = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(0))
    digits: Tensor = generator.eval()(noise.to(device)).cpu()
    generator.train()
    return digits


def encode_picture(digits: Tensor) -> bytes:
    """Return a PNG of eight rows of eight digits."""
    pixels = ((digits.view(8, 8, 8, 8) + 1) * 127.5).transpose(1, 2).reshape(64, 64).round().byte()
    Image.fromarray(pixels.numpy()).save(file := io.BytesIO(), format="PNG")
    return file.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/gan", help="of the run: checkpoints, records, pictures, weights")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    print("distance", run_ranks(train, args.epochs, num_ranks=args.world_size, folder=args.folder))

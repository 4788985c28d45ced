"""An exact training loop: N ranks train like a single process, and a run resumes inside an epoch.

This command compares the weights of whole runs:

    python examples/exact/exact.py

The degree of equality depends on the class that averages gradients.

With DistributedDataParallel of torch, a resumed run has the same bits as an uninterrupted run. Another number of ranks
gives the same numbers up to rounding, because the samples of a batch are added up in another order. The difference is
at most 1e-9 in fp64, and in the last digits in fp32, as here.

With PartAverage below, another number of ranks gives the same bits, too, and a run may resume on another number. Each
global batch is cut into PARTS parts, whatever the number of ranks. Each part's gradient is computed separately, on a
single rank. The parts are then added up in a fixed order that does not depend on the ranks. The price is an exchange of
PARTS gradients instead of one, smaller passes, and at most PARTS ranks. Equal bits also require the same torch, the
same kind of processor, and the same number of threads.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import flyte_ddp

PARTS = 4
BATCH, EPOCHS, SEED, SAVE_EVERY = 100, 2, 0, 10  # 1438 samples: 15 steps an epoch, the last of 38 samples


class DDPAverage:
    """Gradients of a global batch by torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module) -> None:
        self.device, self.network = next(model.parameters()).device, model
        if dist.is_initialized():
            # Without find_unused_parameters DDP orders its buckets anew after the first step of a process, and a
            # resumed run would then add up in another order: on 3 ranks its weights differ by 1e-7. torch warns that
            # the option costs time.
            self.network = DistributedDataParallel(model, find_unused_parameters=True)

    def load_batches(self, training: Subset[Any], epoch: int, first: int) -> Iterator[Any]:
        """Yield this rank's part of each remaining global batch of an epoch, with the factor for the mean loss."""
        order = flyte_ddp.batches(len(training), BATCH, SEED, epoch, first)
        return zip(order.loss_factors(), DataLoader(training, batch_sampler=order), strict=True)

    def compute_gradients(self, batch: Any) -> float:
        """Set the gradients of the global batch, and return its mean loss. All ranks must call this method."""
        factor, (images, labels) = batch
        loss = factor * functional.cross_entropy(self.network(images.to(self.device)), labels.to(self.device))
        loss.backward()
        return float(flyte_ddp.sum_over_ranks(loss.detach())) / flyte_ddp.current_rank().world_size


class PartAverage:
    """Gradients of a global batch, added up from the gradients of parts in a fixed order."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        rank = flyte_ddp.current_rank()
        if rank.world_size > parts:
            raise flyte_ddp.UserError(f"{rank.world_size} ranks: must be at most {parts}, one for each part")
        self.device, self.model, self.parameters = rank.device, model, list(model.parameters())
        self.own_parts = range(rank.rank, parts, rank.world_size)
        # A row for each part: all gradients, flattened, and the loss.
        self.rows = torch.zeros(parts, sum(map(Tensor.numel, self.parameters)) + 1, device=rank.device)

    def load_batches(self, training: Subset[Any], epoch: int, first: int) -> Iterator[Any]:
        """Yield this rank's parts of each remaining global batch of an epoch, with the factors for their losses."""
        loads = []
        for part in self.own_parts:
            order = flyte_ddp.batches(len(training), BATCH, SEED, epoch, first, rank=part, num_ranks=len(self.rows))
            loads.append(zip(order.loss_factors(), DataLoader(training, batch_sampler=order), strict=True))
        return zip(*loads, strict=True)

    def compute_gradients(self, batch: Any) -> float:
        """Set the gradients of the global batch, and return its mean loss. All ranks must call this method."""
        self.rows.zero_()
        for part, (factor, (images, labels)) in zip(self.own_parts, batch, strict=True):
            loss = factor * functional.cross_entropy(self.model(images.to(self.device)), labels.to(self.device))
            gradients = torch.autograd.grad(loss, self.parameters)
            self.rows[part] += torch.cat([*map(Tensor.flatten, gradients), loss.detach().view(1)])
        flyte_ddp.sum_over_ranks(self.rows)  # exact: in a row all ranks but one have zeros
        mean = self.rows[0].clone()
        for row in self.rows[1:]:  # one after another, because Tensor.sum may choose another order
            mean += row
        mean /= len(self.rows)
        *of_parameters, mean_loss = torch.split(mean, [*map(Tensor.numel, self.parameters), 1])
        for parameter, gradient in zip(self.parameters, of_parameters, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return float(mean_loss)


def train(parts: int, fail_at: int = 0) -> dict[str, Any]:
    """Train a small network on all ranks, and return the weights, and loss and accuracy on the test samples.

    Args:
        parts: Number of parts of PartAverage. 0 uses DistributedDataParallel.
        fail_at: The last rank fails after this step, unless the run has been resumed. 0 never fails.
    """
    rank = flyte_ddp.current_rank()
    rank.join()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    training, test = random_split(load_samples(), [0.8, 0.2])
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    model = nn.Sequential(*layers).to(rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = rank.load() or {"step": 0, "epoch": 0}  # on all ranks
    if saved["step"]:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    average = PartAverage(model, parts) if parts else DDPAverage(model)
    step, steps = saved["step"], len(flyte_ddp.batches(len(training), BATCH, SEED, epoch=0))
    for epoch in range(saved["epoch"], EPOCHS):
        for batch in average.load_batches(training, epoch, first=step - epoch * steps):
            loss = average.compute_gradients(batch)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            rank.record(step, loss=loss)
            if rank.due() or (rank.rank == 0 and step % SAVE_EVERY == 0):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                rank.save(step, {**state, "step": step, "epoch": epoch})
            if step == fail_at and not saved["step"] and rank.rank == rank.world_size - 1:
                raise RuntimeError("simulated failure of the machine")
    loss, accuracy = evaluate(model, test, rank.device)
    return {"weights": model.cpu().state_dict(), "loss": loss, "accuracy": accuracy}


def load_samples() -> TensorDataset:
    """Return scikit-learn's 1797 digits."""
    digits = load_digits()
    return TensorDataset(torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target))


@torch.no_grad()
def evaluate(model: nn.Module, test: Subset[Any], device: torch.device) -> tuple[float, float]:
    """Return mean loss and accuracy over all ranks' samples, with the same bits for any number of ranks."""
    results = torch.zeros(2, len(test), dtype=torch.float64, device=device)  # a column for each sample
    order = flyte_ddp.evaluation_batches(len(test), BATCH)
    for samples, (images, labels) in zip(order, DataLoader(test, batch_sampler=order), strict=True):
        logits, truth = model(images.to(device)), labels.to(device)
        results[0, samples] = functional.cross_entropy(logits, truth, reduction="none").double()
        results[1, samples] = (logits.argmax(1) == truth).double()
    loss, accuracy = flyte_ddp.sum_over_ranks(results).mean(dim=1)
    return float(loss), float(accuracy)


def describe_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return whether the weights, loss and accuracy of two runs have the same bits.

    If not, the text has the largest difference between weights.
    """
    pairs = [(value, other["weights"][name]) for name, value in one["weights"].items()]
    same_weights = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
    if same_weights and (one["loss"], one["accuracy"]) == (other["loss"], other["accuracy"]):
        return "equal bit for bit"
    return f"differ by {max(float((a - b).abs().max()) for a, b in pairs):.1e}"


def compare_runs(folder: Path, parts: int, resume_ranks: int) -> dict[str, str]:
    """Train in a single process, on 3 ranks, and on 3 ranks with a failure.

    The failed run resumes on ``resume_ranks``. Returns by name how the runs differ from the uninterrupted run on 3
    ranks.
    """

    def run(name: str, num_ranks: int, fail_at: int = 0) -> dict[str, Any]:
        result: dict[str, Any] = flyte_ddp.run_ranks(
            train, parts, fail_at, num_ranks=num_ranks, folder=folder / f"{parts} parts, {name}"
        )
        return result

    one, three = run("one process", 1), run("3 ranks", 3)
    fail_at = 25  # in the middle of the second epoch, after the saves of steps 10 and 20
    try:
        run("resumed", 3, fail_at)
    except flyte_ddp.RankError as error:
        print(f"    {error.message}; resumes on {resume_ranks} ranks")
    resumed = run("resumed", resume_ranks, fail_at)
    return {
        "3 ranks and one process": describe_difference(three, one),
        "uninterrupted and resumed": describe_difference(three, resumed),
    }


def main() -> None:
    """Print how far runs differ, with DistributedDataParallel and with PartAverage."""
    with tempfile.TemporaryDirectory() as folder:
        for title, parts, resume_ranks in (
            ("DistributedDataParallel", 0, 3),
            (f"PartAverage, {PARTS} parts", PARTS, 2),
        ):
            print(title)
            for name, difference in compare_runs(Path(folder), parts, resume_ranks).items():
                print(f"    {name}: {difference}")


if __name__ == "__main__":
    main()

"""What a run leaves behind: metrics while it trains, and the model with its sidecar at the end. Rank 0 writes."""

from __future__ import annotations

import math
import platform
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.nn import functional

import flyte_ddp
from flyte_ddp import artifacts, distributed
from flyte_ddp.arithmetic import of_this_run
from flyte_ddp.catalog import encoded_kind
from flyte_ddp.code_digest import library_digest
from flyte_ddp.datasets.prepared import PreparedSet, class_names
from flyte_ddp.diagnosis import no_better_than_guessing, not_finite
from flyte_ddp.evaluate import Evaluation
from flyte_ddp.files import replacing
from flyte_ddp.initial_weights import left_out
from flyte_ddp.job import Job
from flyte_ddp.json_lines import JsonLines
from flyte_ddp.loading.facts import of_all_ranks
from flyte_ddp.notes import not_in_the_key, notes, seeded
from flyte_ddp.progress import TrainingProgress
from flyte_ddp.selection import Selection

if TYPE_CHECKING:
    from flyte_ddp.training_state import TrainingState

WORST_MISTAKES = 16
HISTOGRAM_BINS = 64
LEAST_STEPS = 30  # of which something learned can be asked: fewer are a trial


class Recorder:
    """Collects losses over all ranks and, on rank 0, writes metrics.jsonl and shows progress."""

    def __init__(self, job: Job, data: PreparedSet, state: TrainingState) -> None:
        self.job, self.data, self.state = job, data, state
        self.writes = distributed.rank() == 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=state.device)
        self.samples = 0
        self.samples_in_all = 0
        self.since = time.perf_counter()
        self.evaluated = 0.0
        self.training_seconds = 0.0
        self.epoch_accuracies: list[float] = []
        self.arithmetic = of_this_run(job.hardware, state.device)
        self.warnings: list[str] = []
        self.last_loss: float | None = None  # of training, since it began here
        if self.writes:
            self.log = JsonLines(job.run_folder / "metrics.jsonl")
            steps_per_epoch = -(-len(state.training) // job.hp.batch_size)
            self.progress = TrainingProgress(job.settings.progress, state.total_steps, steps_per_epoch)
            self.log.write(start_record(job, data, state))
            self.progress.note(f"ranks: {distributed.world_size()}, nodes: {job.num_nodes}")
            if said := seeded(job, state):
                self.progress.note(said)
            self.warn(not_in_the_key(state))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writes:
            self.progress.close()
            self.log.close()

    def so_far(self) -> dict[str, Any]:
        """What is known of the steps that have no record yet, and of the whole run."""
        return {
            "loss_sum": self.loss_sum,
            "samples": self.samples,
            "samples_in_all": self.samples_in_all,
            "training_seconds": self.training_seconds,
            "seconds": self.elapsed(),
            "epoch_accuracies": self.epoch_accuracies,
        }

    def go_on(self, so_far: dict[str, Any]) -> None:
        """Continues where :meth:`so_far` was called."""
        self.loss_sum.copy_(so_far["loss_sum"])
        self.samples, self.samples_in_all = so_far["samples"], so_far["samples_in_all"]
        self.training_seconds = so_far["training_seconds"]
        self.epoch_accuracies = so_far["epoch_accuracies"]
        self.evaluated = self.state.clock.seconds["evaluation"]
        self.since = time.perf_counter() - so_far["seconds"]

    def elapsed(self) -> float:
        """Seconds of training since the last record, without an evaluation that came in between."""
        return time.perf_counter() - self.since - (self.state.clock.seconds["evaluation"] - self.evaluated)

    def training(self, epoch: int, step: int, loss_sum: torch.Tensor, samples: int) -> None:
        """Takes in a finished step (``step`` counts from 1): the sum of all ranks' losses, and the number of samples.

        The record of every ``log_interval`` steps holds the mean over their samples.
        """
        self.loss_sum += loss_sum
        self.samples += samples
        if step % self.job.hp.log_interval and step != self.state.total_steps:
            if self.writes and self.progress.due():
                self.progress.step(epoch, step, None, None)
            return
        elapsed = self.elapsed()
        self.training_seconds += elapsed
        self.samples_in_all += self.samples
        distributed.wait_for(self.state.device)
        loss = self.last_loss = self.loss_sum.item() / self.samples
        if self.writes:
            rate = self.samples / elapsed
            self.log.write(
                {
                    "kind": "train",
                    "epoch": epoch,
                    "step": step,
                    "learning_rate": self.state.optimizer.param_groups[0]["lr"],
                    "samples_per_second": rate,
                    "loss": loss,
                }
            )
            self.progress.step(epoch, step, loss, rate)
        self.loss_sum.zero_()
        self.samples = 0
        self.since, self.evaluated = time.perf_counter(), self.state.clock.seconds["evaluation"]

    def evaluation(self, epoch: int, step: int, validation: Evaluation, test: Evaluation) -> None:
        """Takes in the evaluation after ``epoch`` epochs.

        Raises:
            UserError: a loss that is not finite: the last steps led astray, after their own losses had been checked.

        """
        for measured in (validation, test):
            if not math.isfinite(measured.loss):
                raise not_finite(self.state, measured.loss, epoch - 1, step, weights_of=step)
        self.epoch_accuracies.append(test.accuracy)
        if self.writes:
            record: dict[str, Any] = {"kind": "evaluation", "epoch": epoch, "step": step}
            if len(self.state.validation):
                record |= {"validation_loss": validation.loss, "validation_accuracy": validation.accuracy}
            record |= {"test_loss": test.loss, "test_accuracy": test.accuracy}
            self.log.write(record)
            self.progress.evaluation(record)
            if self.job.settings.wandb_watch:
                self.log.write({"kind": "watch", "step": step, "parameters": histograms(self.state.model)})

    def finish(self, selection: Selection) -> None:
        """Writes the predictions, the model with its sidecar, and the end record, in this order; all ranks call it."""
        facts = of_all_ranks(self.state.splits.facts())
        if not self.writes:
            return
        if self.last_loss is not None and self.state.step >= LEAST_STEPS:
            self.warn(no_better_than_guessing(self.last_loss, selection.test.truth, self.job.hp))
        model = self.state.kept_model()
        self.state.buffers.restore(model, selection.weights)
        folder = self.job.run_folder
        with replacing(folder / "predictions.npz") as file:
            np.savez(file, **self.predictions(selection.test))
        metrics = {
            "test_accuracy": selection.test.accuracy,
            "test_loss": selection.test.loss,
            "epoch_accuracies": self.epoch_accuracies,
            "kept_epoch": selection.epoch,
        }
        artifacts.save_model(folder, model.state_dict(), self.sidecar(metrics))
        self.log.write(
            {
                "kind": "end",
                "test_accuracy": selection.test.accuracy,
                "test_loss": selection.test.loss,
                "seconds": self.seconds(),
                "samples_per_second": self.samples_in_all / max(self.training_seconds, 1e-9),
                "stopped": selection.stopped,
                "notes": [*self.warnings, *notes(self.job, self.state, self.arithmetic), *facts.describe()],
            }
        )

    def warn(self, said: str) -> None:
        """Says something that is a note in the report as well; nothing if it is empty."""
        if said:
            self.warnings.append(said)
            self.progress.note(said)

    def seconds(self) -> dict[str, float]:
        """Where the time of rank 0 went; communication is what no computation hid."""
        spent = self.state.clock.seconds
        waited_in_backward = self.state.sync.waited
        seconds = {
            "data": spent["data"],
            "forward_backward": spent["forward_backward"] - waited_in_backward,
            "communication": spent["communication"] + waited_in_backward,
            "evaluation": spent["evaluation"],
        }
        total = self.state.clock.total()
        return {**seconds, "other": total - sum(seconds.values()), "total": total}

    def predictions(self, test: Evaluation) -> dict[str, Any]:
        """The first test samples and the worst mistakes, with pictures and scores, and the confusion matrix."""
        rows = min(self.job.settings.wandb_table_rows, len(self.state.test))
        wrong = torch.where(test.guesses != test.truth, test.losses, -torch.inf)
        worst = wrong.topk(min(WORST_MISTAKES, int((test.guesses != test.truth).sum()))).indices
        index = torch.cat([torch.arange(rows), worst]).numpy().astype(np.int32)
        tests = self.state.test
        samples = [int(tests.order.samples(slice(place, place + 1))[0]) for place in index.tolist()]
        images, _ = tests.gather(np.array(samples, dtype=np.int64))
        scores = torch.zeros(0, self.state.num_classes)
        if samples:  # no model gets an empty batch
            with torch.no_grad(), self.state.evaluating():
                scores = functional.softmax(self.state.predict(images), dim=1)
        return {
            "index": index,
            "names": np.array(tests.names(np.array(samples, dtype=np.int64)), dtype=np.str_),
            "images": images.cpu().numpy(),
            "scores": scores.float().cpu().numpy(),
            "truth": test.truth[index].numpy(),
            "loss": test.losses[index].float().numpy(),
            "table_rows": np.array(rows),
            "confusion": test.confusion(self.state.num_classes).numpy(),
        }

    def sidecar(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """What makes the bare weights usable; the digest of the weights is added when they are saved."""
        spec, hp = self.state.spec, self.job.hp
        return {
            "format": artifacts.FORMAT,
            "model": hp.model,
            "classes": list(class_names(self.data, hp)),
            "input": artifacts.described_input(spec, artifacts.MIDDLE if encoded_kind(hp.dataset) else ""),
            "late_buffers": self.state.buffers.unlike_new(),
            "hyperparameters": hp.to_dict(),
            "metrics": metrics,
            "digests": {"data": self.data.digest, "code": library_digest()},
            "versions": versions(),
            "num_ranks": distributed.world_size(),
            "num_nodes": self.job.num_nodes,
        }


def start_record(job: Job, data: PreparedSet, state: TrainingState) -> dict[str, Any]:
    """The facts of a run that are known before its first step."""
    hardware = job.hardware
    return {
        "kind": "start",
        "resumed_after_step": job.checkpoint.step if job.checkpoint else 0,
        "hyperparameters": job.hp.to_dict(),
        "num_ranks": distributed.world_size(),
        "num_nodes": job.num_nodes,
        "device": torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else "cpu",
        "backend": hardware.backend if distributed.world_size() > 1 else "none",
        "strategy": hardware.strategy if distributed.world_size() > 1 else "none",
        "precision": hardware.precision,
        "channels_last": hardware.channels_last,
        "threads_per_rank": hardware.threads,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "training_samples": len(state.training),
        "validation_samples": len(state.validation),
        "test_samples": len(state.test),
        "steps": state.total_steps,
        "classes": list(class_names(data, job.hp)),
        "init_skipped": left_out(state.model.state_dict(), job.hp.init_skip),
    }


def histograms(model: torch.nn.Module) -> dict[str, dict[str, list[float]]]:
    """Counts and bin edges of every parameter's values."""
    result = {}
    for name, parameter in model.named_parameters():
        counts, edges = np.histogram(parameter.detach().float().cpu().numpy(), bins=HISTOGRAM_BINS)
        result[name] = {"counts": counts.tolist(), "edges": edges.tolist()}
    return result


def versions() -> dict[str, str]:
    """What the weights were made with."""
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "flyte_ddp": flyte_ddp.__version__,
    }

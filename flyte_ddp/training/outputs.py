"""Write a run's model, sidecar and predictions, and the first and the last record of its metrics."""

import platform
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import flyte_ddp
from flyte_ddp.catalog import encoded_kind
from flyte_ddp.code_digest import library_digest
from flyte_ddp.confusions import count_confusions
from flyte_ddp.datasets.prepared import PreparedSet, resolve_class_names
from flyte_ddp.files import replace_file
from flyte_ddp.loading.facts import combine_over_ranks
from flyte_ddp.models import artifacts, zoo
from flyte_ddp.models.initial_weights import skipped_tensor_names
from flyte_ddp.parallel.distributed import wait_for_all_ranks, world_size
from flyte_ddp.runs.job import Job
from flyte_ddp.runs.run_folder import PREDICTIONS
from flyte_ddp.training.diagnosis import nothing_learned_warning
from flyte_ddp.training.evaluate import Evaluation
from flyte_ddp.training.notes import init_skip_note, report_notes, uncovered_files_warning
from flyte_ddp.training.recording import Recorder
from flyte_ddp.training.saved_model import verify_saved_model
from flyte_ddp.training.selection import Selection
from flyte_ddp.training.training_state import TrainingState

WORST_MISTAKES = 16
LEAST_STEPS = 30  # a shorter run is a trial, which need not have learned anything


def write_start_record(job: Job, data: PreparedSet, state: TrainingState, recorder: Recorder) -> None:
    """Write the start record to metrics.jsonl and print the number of ranks; does nothing on ranks other than 0.

    Also prints, and keeps for the report, the tensors that ``init_skip`` leaves to the seed, and the files that the
    cache key does not cover.
    """
    if not recorder.writes:
        return
    hardware, ranks = job.hardware, world_size()
    recorder.log.write(
        {
            "kind": "start",
            "resumed_after_step": job.checkpoint.step if job.checkpoint else 0,
            "hyperparameters": job.hp.to_dict(),
            "num_ranks": ranks,
            "num_nodes": job.num_nodes,
            "device": torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else "cpu",
            "backend": hardware.backend if ranks > 1 else "none",
            "strategy": hardware.strategy if ranks > 1 else "none",
            "precision": hardware.precision,
            "channels_last": hardware.channels_last,
            "threads_per_rank": hardware.threads,
            "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
            "training_samples": len(state.training),
            "validation_samples": len(state.validation),
            "test_samples": len(state.test),
            "steps": state.total_steps,
            "classes": list(resolve_class_names(data.classes, job.hp)),
            "init_skipped": skipped_tensor_names(state.model.state_dict(), job.hp.init_skip),
        }
    )
    recorder.progress.print_note(f"ranks: {ranks}, nodes: {job.num_nodes}")
    recorder.add_warning(init_skip_note(state))
    recorder.add_warning(uncovered_files_warning(state))


def write_outputs(job: Job, data: PreparedSet, state: TrainingState, selection: Selection, recorder: Recorder) -> None:
    """Write the model with its sidecar, the predictions, and the end record, in this order. All ranks must call it.

    All ranks build a second model, which runs the user's code. Then rank 0 writes alone, and prints a warning if
    nothing was learned. It loads the kept weights into the trained model, and reads the saved model to verify it.
    Raises UserError if the disk is full, or the model's file does not hold all of the model.
    """
    facts = combine_over_ranks(state.splits.facts())
    # Built on all ranks, because a user's model may wait for other ranks while it is built, such as for a download.
    # Built anew and not copied, because load_model will build it, too.
    new_model = zoo.build_model(job.hp.model, state.num_classes, state.spec)
    wait_for_all_ranks()  # so that a rank that hangs is noticed: what rank 0 does from here has no time limit
    if not recorder.writes:
        return
    test, hp = selection.test, job.hp
    if recorder.last_loss is not None and state.step >= LEAST_STEPS:
        recorder.add_warning(nothing_learned_warning(recorder.last_loss, test.truth, hp))
    model = state.kept_model()
    model.load_state_dict(selection.weights)
    digests = {
        "data": data.digest,
        "code": library_digest(),
        "user_code": job.identity.user_code,
        "init_from": job.identity.initial_weights,
    }
    sidecar = {
        "format": artifacts.FORMAT,
        "model": hp.model,
        "classes": list(resolve_class_names(data.classes, hp)),
        "input": artifacts.describe_input(state.spec, artifacts.MIDDLE if encoded_kind(hp.dataset) else ""),
        "hyperparameters": hp.to_dict(),
        "metrics": {
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "epoch_accuracies": recorder.epoch_accuracies,
            "kept_epoch": selection.epoch,
        },
        "digests": {name: digest for name, digest in digests.items() if digest},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": version("torchvision"),
            "flyte_ddp": flyte_ddp.__version__,
        },
        "num_ranks": world_size(),
        "num_nodes": job.num_nodes,
        "threads_per_rank": job.hardware.threads,
    }
    model_path, _ = artifacts.save_model(job.run_folder, model.state_dict(), sidecar)
    verify_saved_model(new_model, model_path, sidecar, state)
    with replace_file(job.run_folder / PREDICTIONS) as file:
        np.savez(file, **collect_predictions(state, test, rows=min(job.settings.wandb_table_rows, len(state.test))))
    recorder.log.write(
        {
            "kind": "end",
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "seconds": recorder.seconds(),
            "samples_per_second": recorder.samples_in_all / max(recorder.training_seconds, 1e-9),
            "stopped": selection.stopped,
            "notes": [*recorder.warnings, *report_notes(state, recorder.arithmetic, job.checkpoint), *facts.describe()],
        }
    )


def collect_predictions(state: TrainingState, test: Evaluation, rows: int) -> dict[str, Any]:
    """Return arrays of the first ``rows`` test samples and the worst mistakes: images, scores, truth, losses, names.

    Also the counts of all confusions. Reads these samples, predicts their logits, and seeds the random generators.
    """
    wrong = test.predictions != test.truth
    worst = torch.where(wrong, test.losses, -torch.inf).topk(min(WORST_MISTAKES, int(wrong.sum()))).indices
    index = torch.cat([torch.arange(rows), worst]).numpy().astype(np.int32)
    samples = np.array([int(state.test.order.samples(slice(at, at + 1))[0]) for at in index.tolist()], dtype=np.int64)
    images, _, names = state.test.gather(samples)
    scores = torch.zeros(0, state.num_classes)
    if len(samples):  # no model gets an empty batch
        with torch.no_grad(), state.evaluation_mode():
            scores = functional.softmax(state.predict_logits(images), dim=1)
    return {
        "index": index,
        "names": np.array(names, dtype=np.str_),
        "images": images.cpu().numpy(),
        "scores": scores.float().cpu().numpy(),
        "truth": test.truth[index].numpy(),
        "loss": test.losses[index].float().numpy(),
        "table_rows": np.array(rows),
        "confusion_counts": count_confusions(test.truth.numpy(), test.predictions.numpy()),
    }

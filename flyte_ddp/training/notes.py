"""Notes in a run's report: what its result depends on, and that it was resumed."""

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.loading.facts import few
from flyte_ddp.models.initial_weights import skipped_tensors
from flyte_ddp.parallel.batch_norm import has_separate_statistics
from flyte_ddp.parallel.distributed import world_size
from flyte_ddp.runs.arithmetic import Arithmetic
from flyte_ddp.runs.job import Job
from flyte_ddp.training.training_state import TrainingState


def report_notes(job: Job, state: TrainingState, arithmetic: Arithmetic) -> list[str]:
    """Return sentences for the report, at the end of a run, on rank 0.

    Args:
        arithmetic: what the run was trained in since it was started or resumed.
    """
    separate = has_separate_statistics(state.model, synchronised=job.hp.sync_batchnorm)
    changed = state.buffers.names_of_changed()
    notes = [skipped] if (skipped := init_skip_note(job, state)) else []
    reasons = []
    if state.this_pass.draws:
        reasons.append("The model draws random numbers outside torch's dropout layers")
    if separate:
        why = "" if job.hp.sync_batchnorm else " (sync_batchnorm is false)"
        reasons.append(f"BatchNorm used the statistics of each rank's own share{why}")
    notes += [f"{reason}: another number of ranks would give another result." for reason in reasons]
    if changed:
        notes.append(
            f"The model changes {few(changed)} in its forward passes, and those of rank 0 counted: another number of "
            "ranks may give another result."
        )
    if unsaved := {*changed}.intersection(state.buffers.unsaved):
        notes.append(f"{few(unsaved)} is not in the model's state_dict: evaluations used the values of a new model.")
    if encoded_kind(job.hp.dataset) == "stream":
        notes.append("The training data were a stream: ranks and workers each read shards of their own.")
    if job.checkpoint is not None:
        by_ranks = separate or state.this_pass.draws or bool(changed)
        exactly = exactness(job, state, arithmetic, separate=separate, by_ranks=by_ranks)
        notes.append(
            f"The run went on from a checkpoint after step {job.checkpoint.step:,}; the result is as if it had not "
            f"been cut off, {exactly}."
        )
    return notes


def exactness(job: Job, state: TrainingState, arithmetic: Arithmetic, *, separate: bool, by_ranks: bool) -> str:
    """Return in words how exactly a resumed run is like one that was not cut off.

    Args:
        separate: BatchNorm has statistics of each rank's own.
        by_ranks: the result depends on the number of ranks.
    """
    assert job.checkpoint is not None
    differences = []
    if encoded_kind(job.hp.dataset) == "stream":
        differences.append("but for the stream, which restarted from scratch")
    if separate and world_size() > 1:
        differences.append("but for the statistics of BatchNorm, of which rank 0's were saved")
    if by_ranks and any(before.num_ranks != arithmetic.num_ranks for before in job.checkpoint.trained_in):
        differences.append("but for what depends on the number of ranks")
    if changes := arithmetic.changes(job.checkpoint.trained_in):
        differences.append(f"up to rounding, because these changed: {changes}")
    elif state.device.type == "cuda" and not job.hp.deterministic:
        differences.append("up to rounding: GPUs do not always add up in the same order (deterministic is false)")
    # What a model of the user's own keeps outside of parameters and buffers is not looked at.
    exactly = "bit for bit, as far as can be seen" if ":" in job.hp.model else "bit for bit"
    return ", and ".join(differences) or exactly


def init_skip_note(job: Job, state: TrainingState) -> str:
    """Return which tensors started from the seed and not from ``init_from``; empty if none did."""
    names = skipped_tensors(state.model.state_dict(), job.hp.init_skip)
    return f"From the seed, and not from init_from, began (init_skip): {', '.join(names)}." if names else ""


def uncovered_files_warning(state: TrainingState) -> str:
    """Return a warning that names files of the model's code that the cache key does not cover; empty if none."""
    if not state.files_not_seen:
        return ""
    return (
        f"The model uses {few(state.files_not_seen)}, which the cache key does not cover: a change there is not "
        "noticed. Import it by its name at the top of a module, from a folder on Python's own path."
    )

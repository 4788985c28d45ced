"""Notes of a run's report: which settings its result depends on, and whether it was resumed."""

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.loading.facts import few
from flyte_ddp.models.initial_weights import skipped_tensor_names
from flyte_ddp.parallel.batch_norm import has_per_rank_statistics
from flyte_ddp.parallel.distributed import world_size
from flyte_ddp.runs.arithmetic import Arithmetic
from flyte_ddp.runs.job import Job
from flyte_ddp.training.training_state import TrainingState


def report_notes(job: Job, state: TrainingState, arithmetic: Arithmetic) -> list[str]:
    """Return the notes for the report, one sentence each; for rank 0, at the end of a run.

    Args:
        arithmetic: number of ranks, devices and precision since the run was started or resumed.
    """
    separate = has_per_rank_statistics(state.model, synchronised=job.hp.sync_batchnorm)
    changed = state.buffers.changed_names()
    notes = [skipped] if (skipped := init_skip_note(job, state)) else []
    reasons = []
    if state.this_pass.model_draws:
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
    if unsaved := {*changed}.intersection(state.buffers.unsaved_names):
        notes.append(f"{few(unsaved)} is not in the model's state_dict: evaluations used the values of a new model.")
    if encoded_kind(job.hp.dataset) == "stream":
        notes.append("The training data were a stream: ranks and workers each read shards of their own.")
    if job.checkpoint is not None:
        by_ranks = separate or state.this_pass.model_draws or bool(changed)
        exactly = describe_exactness(job, state, arithmetic, separate=separate, by_ranks=by_ranks)
        notes.append(
            f"The run went on from a checkpoint after step {job.checkpoint.step:,}; the result is as if it had not "
            f"been cut off, {exactly}."
        )
    return notes


def describe_exactness(
    job: Job, state: TrainingState, arithmetic: Arithmetic, *, separate: bool, by_ranks: bool
) -> str:
    """Return in words how exactly the result of a resumed run equals that of an uninterrupted run.

    Args:
        separate: whether BatchNorm used statistics of each rank alone.
        by_ranks: whether the result depends on the number of ranks.
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
    # A user's model may keep other state than parameters and buffers, which no checkpoint has.
    exactly = "bit for bit, as far as can be seen" if ":" in job.hp.model else "bit for bit"
    return ", and ".join(differences) or exactly


def init_skip_note(job: Job, state: TrainingState) -> str:
    """Return a sentence with the tensors that started from the seed, not from ``init_from``; empty without any."""
    names = skipped_tensor_names(state.model.state_dict(), job.hp.init_skip)
    return f"Started from the seed and not from init_from (init_skip): {', '.join(names)}." if names else ""


def uncovered_files_warning(state: TrainingState) -> str:
    """Return a warning with the files of the model's code that the cache key does not cover; empty without any."""
    if not state.uncovered_files:
        return ""
    return (
        f"The model uses {few(state.uncovered_files)}, which the cache key does not cover: a change there is not "
        "noticed. Import it by name at the top of a module, from a folder on Python's path."
    )

"""Notes in a run's report: what its result depends on, and that the run was cut off."""

from __future__ import annotations

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.loading.facts import few
from flyte_ddp.models.initial_weights import left_out
from flyte_ddp.parallel.batch_norm import has_separate_statistics
from flyte_ddp.parallel.distributed import world_size
from flyte_ddp.runs.arithmetic import Arithmetic
from flyte_ddp.runs.job import Job
from flyte_ddp.training.training_state import TrainingState


def notes(job: Job, state: TrainingState, arithmetic: Arithmetic) -> list[str]:
    """Sentences for the report, at the end of a run; ``arithmetic`` is what this part of it was trained in."""
    separate = has_separate_statistics(state.model, synchronised=job.hp.sync_batchnorm)
    said = [note] if (note := seeded(job, state)) else []
    reasons = []
    if state.this_pass.draws:
        reasons.append("The model draws random numbers outside torch's dropout layers")
    if separate:
        why = "" if job.hp.sync_batchnorm else " (sync_batchnorm is false)"
        reasons.append(f"BatchNorm used the statistics of each rank's own share{why}")
    said += [f"{reason}: another number of ranks would give another result." for reason in reasons]
    if changed := state.buffers.names_of_changed():
        said.append(
            f"The model changes {few(changed)} in its forward passes, and those of rank 0 counted: another number of "
            "ranks may give another result."
        )
    if unsaved := {*changed}.intersection(state.buffers.unsaved):
        said.append(f"{few(unsaved)} is not in the model's state_dict: evaluations used the values of a new model.")
    if encoded_kind(job.hp.dataset) == "stream":
        said.append("The training data were a stream: ranks and workers each read shards of their own.")
    if job.checkpoint is not None:
        as_if = f"the result is as if it had not been cut off, {how_exactly(job, state, arithmetic, separate=separate)}"
        said.append(f"The run went on from a checkpoint after step {job.checkpoint.step:,}; {as_if}.")
    return said


def how_exactly(job: Job, state: TrainingState, arithmetic: Arithmetic, *, separate: bool) -> str:
    """How like a run that was not cut off one is that went on from a checkpoint.

    ``separate``: BatchNorm has statistics of each rank's own.
    """
    assert job.checkpoint is not None
    differences = []
    if encoded_kind(job.hp.dataset) == "stream":
        differences.append("but for the stream, which restarted from scratch")
    if separate and world_size() > 1:
        differences.append("but for the statistics of BatchNorm, of which rank 0's were saved")
    other_ranks = any(before.num_ranks != arithmetic.num_ranks for before in job.checkpoint.trained_in)
    if other_ranks and (separate or state.this_pass.draws or state.buffers.names_of_changed()):
        differences.append("but for what depends on the number of ranks")
    if changes := arithmetic.changes(job.checkpoint.trained_in):
        differences.append(f"up to rounding, because these changed: {changes}")
    elif state.device.type == "cuda" and not job.hp.deterministic:
        differences.append("up to rounding: GPUs do not always add up in the same order (deterministic is false)")
    exactly = "bit for bit, as far as can be seen" if ":" in job.hp.model else "bit for bit"  # not into all of Python
    return ", and ".join(differences) or exactly


def seeded(job: Job, state: TrainingState) -> str:
    """Which tensors did not start from ``init_from``; empty if all did, or if there is none."""
    names = left_out(state.model.state_dict(), job.hp.init_skip)
    return f"From the seed, and not from init_from, began (init_skip): {', '.join(names)}." if names else ""


def not_in_the_key(state: TrainingState) -> str:
    """Which of the user's own files the model uses although the cache key does not cover them; empty if none."""
    if not state.files_not_seen:
        return ""
    return (
        f"The model uses {few(state.files_not_seen)}, which the cache key does not cover: a change there is not "
        "noticed. Import it by its name at the top of a module, from a folder on Python's own path."
    )

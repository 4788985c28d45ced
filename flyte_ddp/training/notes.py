"""Notes of a run's report: which settings its result depends on, and whether it was resumed."""

from collections.abc import Sequence

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.loading.facts import join_few
from flyte_ddp.models.initial_weights import skipped_tensor_names
from flyte_ddp.parallel.batch_norm import has_per_rank_statistics
from flyte_ddp.parallel.distributed import world_size
from flyte_ddp.runs.arithmetic import Arithmetic
from flyte_ddp.runs.checkpoint import Checkpoint
from flyte_ddp.training.training_state import TrainingState

OTHER_RESULT = "another number of ranks would give another result."


def report_notes(state: TrainingState, arithmetic: Arithmetic, resumed_from: Checkpoint | None) -> list[str]:
    """Return the notes for the report, one sentence each; for rank 0, at the end of a run.

    Args:
        arithmetic: number of ranks, devices and precision since the run was started or resumed.
        resumed_from: the checkpoint that the run was resumed from; None if it was not.
    """
    hp = state.hp
    separate = has_per_rank_statistics(state.model, synchronised=hp.sync_batchnorm)
    changed = state.buffers.changed_names()
    notes = []
    if state.this_pass.model_draws:
        notes.append(f"The model draws random numbers outside torch's dropout layers: {OTHER_RESULT}")
    if separate:
        why = "" if hp.sync_batchnorm else " (sync_batchnorm is false)"
        notes.append(f"BatchNorm used the statistics of each rank's own share{why}: {OTHER_RESULT}")
    if changed:
        notes.append(
            f"The model changes {join_few(changed)} in its forward passes, and rank 0's values were used: another number of "
            "ranks may give another result."
        )
    if unsaved := {*changed}.intersection(state.buffers.unsaved_names):
        notes.append(
            f"{join_few(unsaved)} is not in the model's state_dict: evaluations used the values of a new model."
        )
    if encoded_kind(hp.dataset) == "stream":
        notes.append("The training data were a stream: ranks and workers each read shards of their own.")
    if resumed_from is not None:
        by_ranks = separate or state.this_pass.model_draws or bool(changed)
        exactly = describe_exactness(state, arithmetic, resumed_from.trained_in, separate=separate, by_ranks=by_ranks)
        notes.append(
            f"The run went on from a checkpoint after step {resumed_from.step:,}; the result is as if it had not been "
            f"cut off, {exactly}."
        )
    return notes


def describe_exactness(
    state: TrainingState, now: Arithmetic, before: Sequence[Arithmetic], *, separate: bool, by_ranks: bool
) -> str:
    """Return in words how exactly the result of a resumed run equals that of an uninterrupted run.

    Args:
        now: number of ranks, devices and precision since the run was resumed.
        before: the values of ``now`` that the run had before.
        separate: whether BatchNorm used statistics of each rank alone.
        by_ranks: whether the result depends on the number of ranks.
    """
    differences = []
    if encoded_kind(state.hp.dataset) == "stream":
        differences.append("but for the stream, which restarted from scratch")
    if separate and world_size() > 1:
        differences.append("but for the statistics of BatchNorm, of which rank 0's were saved")
    if by_ranks and any(earlier.num_ranks != now.num_ranks for earlier in before):
        differences.append("but for what depends on the number of ranks")
    if changes := now.describe_changes(before):
        differences.append(f"up to rounding, because these changed: {changes}")
    elif state.device.type == "cuda" and not state.hp.deterministic:
        differences.append("up to rounding: GPUs do not always add up in the same order (deterministic is false)")
    # A user's model may keep other state than parameters and buffers, which no checkpoint has.
    exactly = "bit for bit, as far as can be seen" if ":" in state.hp.model else "bit for bit"
    return ", and ".join(differences) or exactly


def init_skip_note(state: TrainingState) -> str:
    """Return a sentence with the tensors that started from the seed, not from ``init_from``; empty without any."""
    names = skipped_tensor_names(state.model.state_dict(), state.hp.init_skip)
    return f"Started from the seed and not from init_from (init_skip): {', '.join(names)}." if names else ""


def uncovered_files_warning(state: TrainingState) -> str:
    """Return a warning with the files of the model's code that the cache key does not cover; empty without any."""
    if not state.uncovered_files:
        return ""
    return (
        f"The model uses {join_few(state.uncovered_files)}, which the cache key does not cover: a change there is not "
        "noticed. Import it by name at the top of a module, from a folder on Python's path."
    )

"""Which attempts of an execution say that another one would get no further, and which do not."""

from dataclasses import replace
from pathlib import Path

import pytest
from kept_checkpoints import begun, write

from flyte_ddp.core.errors import OutOfMemoryError, RankError, RankLostError, StoppedError, UnreachableError, UserError
from flyte_ddp.core.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.pods import retries
from flyte_ddp.pods.checkpoint_store import CheckpointStore


def end_attempts(store: CheckpointStore, folder: Path, numbers: range, *errors: BaseException | None) -> None:
    """Begin attempts with these numbers at step 0, and end each with its error; without an error each is lost."""
    for number in numbers:
        own = replace(store, attempt=number)
        assert begun(own, folder / str(number)) == 0
        for error in errors:
            own.record_attempt_end(error)


def test_two_attempts_whose_ranks_fail_at_one_step_are_the_last(store: CheckpointStore, tmp_path: Path) -> None:
    store.upload_checkpoint(write(tmp_path / "a.ckpt", 5))
    for attempt, failure in enumerate(("a cosmic ray", "another one")):
        own = replace(store, attempt=2 * attempt)  # pods that were lost before they began do not count
        assert begun(own, tmp_path / str(attempt)) == 5
        own.record_attempt_end(RankError(f"rank 1: {failure}"))
    third = replace(store, attempt=4)
    with pytest.raises(UserError, match=r"^2 attempts made no progress after step 5, .* error: rank 1: another"):
        begun(third, tmp_path / "4")
    replace(store, attempt=2).upload_checkpoint(write(tmp_path / "a.ckpt", 6))
    assert begun(third, tmp_path / "4 again") == 6
    assert begun(replace(store, execution="two"), tmp_path / "two") == 6, "another execution counts for itself"


def test_memory_is_named_where_the_kernel_has_counted(store: CheckpointStore, tmp_path: Path) -> None:
    end_attempts(store, tmp_path, range(2), OutOfMemoryError("rank 0 was killed by SIGKILL, as memory ran out"))
    with pytest.raises(UserError, match="memory ran out; give the pod more memory"):
        begun(replace(store, attempt=2), tmp_path / "2")


def test_attempts_that_were_taken_away_do_not_count(store: CheckpointStore, tmp_path: Path) -> None:
    """Nor those that were lost while they fetched their data."""
    for number, loss in enumerate(
        (StoppedError("SIGTERM", step=0), UnreachableError("no answer"), retries.PodTerminated())
    ):
        end_attempts(store, tmp_path, range(2 * number, 2 * number + 2), loss)
    for attempt in range(6, 12):
        assert replace(store, attempt=attempt).download_newest_checkpoint(tmp_path / SLOTS[0]) is None


@pytest.mark.parametrize("errors", [(), (RankLostError("rank 1 was killed by SIGKILL", recoverable=True),)])
def test_the_fifth_attempt_that_was_lost_soon_is_the_last(
    store: CheckpointStore, tmp_path: Path, errors: tuple[BaseException, ...]
) -> None:
    """Two lost nodes are bad luck; but of a pod whose memory runs out nothing is left either."""
    end_attempts(store, tmp_path, range(5), *errors)
    with pytest.raises(UserError, match=r"5 attempts were lost, .* if OOMKilled, give the pod more memory"):
        begun(replace(store, attempt=5), tmp_path / "5")
    store.upload_checkpoint(write(tmp_path / "a.ckpt", 1))
    assert begun(replace(store, attempt=5), tmp_path / "5 again") == 1


def test_of_two_saves_of_a_step_the_next_attempt_gets_the_later_one(tmp_path: Path) -> None:
    """Both are sent in one round; the later one is in the first file."""
    store, folder = CheckpointStore(str(tmp_path / "store/run"), "one"), tmp_path / "run" / FOLDER
    uploader = retries.CheckpointUploader(store, folder)
    for name, metrics in ((SLOTS[1], b"earlier\n"), (SLOTS[0], b"later\n")):
        write(folder / name, 5, metrics)
    uploader.upload_changed_checkpoints()
    path = tmp_path / "next" / SLOTS[0]
    path.parent.mkdir()
    found = replace(store, attempt=1).download_newest_checkpoint(path)
    assert found is not None
    assert found.metrics == b"later\n"

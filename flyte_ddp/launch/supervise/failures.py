"""Which rank failed first, and of what: the death of one rank makes others fail, and they are not to blame."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from flyte_ddp.errors import OutOfMemoryError, RankError, RankLostError, UnreachableError, UserError
from flyte_ddp.launch.supervise.rank_handle import RankHandle

SILENT = "(it does not say)"
MISTAKES = {"mistake": UserError, "unreachable": UnreachableError}
OWN = ("own", *MISTAKES)  # causes that are no consequence of another rank's failure


def cause_is_known(group: Sequence[RankHandle]) -> bool:
    """Whether one of the failures so far is nobody's consequence."""
    return bool(killed(group) or lost(group) or errors(group, *OWN) or silent(group))


def first_failure(group: Sequence[RankHandle], timeout: float) -> UserError | RankError:
    """The error of the rank that failed first.

    A rank that was killed leaves no report, and its victims' reports only say that it was gone. SIGABRT is the
    exception: gloo and NCCL abort in a victim, too, when a peer's connection closes at the wrong moment.

    Args:
        timeout: seconds that ranks wait for one another.

    """
    own, gone, left = errors(group, *OWN), lost(group), silent(group)
    if dead := killed(group) or ([] if own or left else killed(group, aborted=True)):
        rank, code = dead[0]
        out_of_memory = any(handle.ran_out_of_memory() for handle in group if handle.rank == rank)
        return was_killed(rank, signal.Signals(-code), out_of_memory=out_of_memory)
    if gone:
        if gone[0].ran_out_of_memory():
            return was_killed(gone[0].rank, signal.SIGKILL, out_of_memory=True)
        return RankLostError(
            f"rank {gone[0].rank} exited without reporting an error before it had finished training, or its host "
            f"{gone[0].host} is lost",
            recoverable=True,
        )
    if own:
        mistake = MISTAKES.get(own[0]["cause"])
        return mistake(own[0]["message"]) if mistake else RankError(said(own[0]), details=own[0]["traceback"])
    if left:
        rank, code = left[0]
        return RankError(f"rank {rank} ended with exit code {code} before it had finished training")
    return waited_in_vain(group, timeout)


def was_killed(rank: int, by: signal.Signals, *, out_of_memory: bool) -> RankError:
    """Return the error of a rank that a signal has ended.

    Args:
        out_of_memory: whether the kernel has counted a process that it killed for lack of memory.
    """
    said = f"rank {rank} was killed by {by.name}"
    if by != signal.SIGKILL:
        return RankError(said, recoverable=True)
    if out_of_memory:
        return OutOfMemoryError(f"{said}, as memory ran out (by the kernel's own count)", recoverable=True)
    return RankLostError(said, recoverable=True)


def did_not_begin(handle: RankHandle, seconds: float) -> RankError:
    """The error where ranks wait for an import of torch that does not end."""
    return RankLostError(
        f"rank {handle.rank} did not begin within {seconds:g} s",
        details=f"its process is at:\n{handle.stack() or SILENT}",
        recoverable=True,
    )


def waited_in_vain(group: Sequence[RankHandle], timeout: float) -> RankError:
    """Return the error where collective operations failed, and no rank is known to have ended for another cause.

    It says where the ranks are that have not failed, and what the others reported. It is recoverable, unless all ranks
    of one host failed at once: no network and no other rank was to blame for that, but what they asked for.

    Args:
        group: some of its ranks have reported ``timeout`` or ``peer``; asks the others for their stacks.
        timeout: the time limit of collectives, in seconds.
    """
    reports = errors(group, "timeout", "peer")
    late = sorted(error["rank"] for error in reports if error["cause"] == "timeout")
    others = sorted(error["rank"] for error in reports if error["cause"] == "peer")
    missing = [handle for handle in group if handle.error is None]
    if not late:
        message = said(reports[0])
    elif missing:
        where = f"{listed(late)} waited for {timeout:g} s (FLYTE_DDP_TIMEOUT)"
        message = f"{listed([handle.rank for handle in missing])} did not come where {where}"
    elif others:
        what = f"{listed(late)} waited in vain for {timeout:g} s (FLYTE_DDP_TIMEOUT)"
        message = f"{what}; {listed(others)} came too late, or waited elsewhere"
    else:
        message = f"all ranks waited for each other for {timeout:g} s, in different places"
    stacks = [f"rank {handle.rank} is at:\n{handle.stack() or SILENT}" for handle in missing]
    tracebacks = [f"{said(error)}\n\n{error['traceback']}" for error in (reports[:1] if missing else reports)]
    recoverable = bool(late or missing) or len({handle.host for handle in group}) > 1
    kind = RankLostError if recoverable and not late else RankError  # a rank that ended is not known to end again
    return kind(message, details="\n\n".join([*stacks, *tracebacks]), recoverable=recoverable)


def killed(group: Sequence[RankHandle], *, aborted: bool = False) -> list[tuple[int, int]]:
    """Rank and exit code of those ended by a signal; by SIGABRT only if that is asked for."""
    codes = [(handle.rank, handle.exitcode) for handle in group if handle.exitcode is not None and handle.exitcode < 0]
    return [(rank, code) for rank, code in codes if aborted or code != -signal.SIGABRT]


def silent(group: Sequence[RankHandle]) -> list[tuple[int, int]]:
    """Rank and exit code of those that ended by themselves without a report."""
    unreported = [handle for handle in group if handle.error is None and not handle.completed]
    codes = [(handle.rank, handle.exitcode) for handle in unreported if handle.exitcode is not None]
    return [(rank, code) for rank, code in codes if code >= 0]


def lost(group: Sequence[RankHandle]) -> list[RankHandle]:
    """Those of which nobody knows any more what became of them."""
    return [handle for handle in group if handle.lost and handle.error is None and not handle.completed]


def errors(group: Sequence[RankHandle], *causes: str) -> list[dict[str, Any]]:
    """Reports of these kinds, the earliest first, by the launcher's clock."""
    found = [{**handle.error, "rank": handle.rank} for handle in group if handle.error is not None]
    return sorted((error for error in found if error["cause"] in causes), key=lambda error: error["time"])


def said(error: dict[str, Any]) -> str:
    """A rank's own words."""
    return f"rank {error['rank']}: {error['type']}: {error['message']}"


def listed(ranks: Sequence[int]) -> str:
    """Such as ``rank 1`` or ``ranks 0 and 2``."""
    *first, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

"""Finds the rank that failed first, and why. The death of one rank makes others fail, and they are not to blame."""

import signal
from collections.abc import Sequence
from typing import Any

from flyte_ddp.errors import OutOfMemoryError, RankError, RankLostError, UnreachableError, UserError
from flyte_ddp.launch.supervise.rank_handle import RankHandle

NO_STACK = "(it does not say)"
MISTAKES = {"mistake": UserError, "unreachable": UnreachableError}
OWN = ("own", *MISTAKES)  # causes of a report that are no consequence of another rank's failure


def root_cause_is_known(group: Sequence[RankHandle]) -> bool:
    """Return whether one of the failures so far is a root cause and no consequence of another rank's failure."""
    return bool(
        killed_ranks(group) or lost_ranks(group) or reports_with_cause(group, *OWN) or ranks_without_report(group)
    )


def first_failure(group: Sequence[RankHandle], timeout: float) -> UserError | RankError:
    """Return the error of the rank that failed first.

    In this order: a rank that a signal has ended, a rank that was lost, the earliest report of a cause of its own, a
    rank that exited without a report, a collective operation that failed. In the last case it asks ranks for their
    stacks. SIGABRT counts only if nothing else explains the failure: gloo and NCCL also abort when a peer is gone.

    Args:
        timeout: seconds that ranks wait for one another.
    """
    own, gone, left = reports_with_cause(group, *OWN), lost_ranks(group), ranks_without_report(group)
    if dead := killed_ranks(group) or ([] if own or left else killed_ranks(group, aborted=True)):
        rank, code = dead[0]
        out_of_memory = any(handle.ran_out_of_memory() for handle in group if handle.rank == rank)
        return killed_rank_error(rank, signal.Signals(-code), out_of_memory=out_of_memory)
    if gone:
        if gone[0].ran_out_of_memory():
            return killed_rank_error(gone[0].rank, signal.SIGKILL, out_of_memory=True)
        return RankLostError(
            f"rank {gone[0].rank} exited without reporting an error before it had finished training, or its host "
            f"{gone[0].host} is lost",
            recoverable=True,
        )
    if own:
        first, mistake = own[0], MISTAKES.get(own[0]["cause"])
        return mistake(first["message"]) if mistake else RankError(format_rank_error(first), details=first["traceback"])
    if left:
        rank, code = left[0]
        return RankError(f"rank {rank} ended with exit code {code} before it had finished training")
    return collective_timeout_error(group, timeout)


def killed_rank_error(rank: int, by: signal.Signals, *, out_of_memory: bool) -> RankError:
    """Return the recoverable error of a rank that a signal has ended.

    Args:
        out_of_memory: whether the kernel has counted a process that it killed for lack of memory; matters for SIGKILL.
    """
    message = f"rank {rank} was killed by {by.name}"
    if by != signal.SIGKILL:
        return RankError(message, recoverable=True)
    if out_of_memory:
        return OutOfMemoryError(f"{message}, as memory ran out (by the kernel's own count)", recoverable=True)
    return RankLostError(message, recoverable=True)


def start_timeout_error(handle: RankHandle, seconds: float) -> RankError:
    """Return the error of a rank that has not started in time, with its stack, for which it asks the rank."""
    return RankLostError(
        f"rank {handle.rank} did not begin within {seconds:g} s",
        details=f"its process is at:\n{handle.read_stack() or NO_STACK}",
        recoverable=True,
    )


def collective_timeout_error(group: Sequence[RankHandle], timeout: float) -> RankError:
    """Return the error for collective operations that failed while no rank is known to have ended for another cause.

    The error names the ranks that timed out and those that have not failed. Its details are the stacks of the latter,
    for which it asks them, and the reports. It is recoverable, unless all ranks failed at once on a single host: then
    neither a network nor another rank is to blame, but the operation itself.

    Args:
        group: ranks, of which some have reported ``timeout`` or ``peer``.
        timeout: the time limit of collectives, in seconds.
    """
    reports = reports_with_cause(group, "timeout", "peer")
    late = sorted(error["rank"] for error in reports if error["cause"] == "timeout")
    others = sorted(error["rank"] for error in reports if error["cause"] == "peer")
    missing = [handle for handle in group if handle.error is None]
    if not late:
        message = format_rank_error(reports[0])
    elif missing:
        where = f"{format_ranks(late)} waited for {timeout:g} s (FLYTE_DDP_TIMEOUT)"
        message = f"{format_ranks([handle.rank for handle in missing])} did not come where {where}"
    elif others:
        what = f"{format_ranks(late)} waited in vain for {timeout:g} s (FLYTE_DDP_TIMEOUT)"
        message = f"{what}; {format_ranks(others)} came too late, or waited elsewhere"
    else:
        message = f"all ranks waited for each other for {timeout:g} s, in different places"
    stacks = [f"rank {handle.rank} is at:\n{handle.read_stack() or NO_STACK}" for handle in missing]
    shown = reports[:1] if missing else reports
    tracebacks = [f"{format_rank_error(error)}\n\n{error['traceback']}" for error in shown]
    recoverable = bool(late or missing) or len({handle.host for handle in group}) > 1
    # A rank that ended may not end again; a hang may be the code's own.
    kind = RankLostError if recoverable and not late else RankError
    return kind(message, details="\n\n".join([*stacks, *tracebacks]), recoverable=recoverable)


def killed_ranks(group: Sequence[RankHandle], *, aborted: bool = False) -> list[tuple[int, int]]:
    """Return (rank, exit code) of the ranks that a signal has ended; SIGABRT counts only if ``aborted``."""
    codes = [(handle.rank, handle.exitcode) for handle in group if handle.exitcode is not None and handle.exitcode < 0]
    return [(rank, code) for rank, code in codes if aborted or code != -signal.SIGABRT]


def ranks_without_report(group: Sequence[RankHandle]) -> list[tuple[int, int]]:
    """Return (rank, exit code) of the ranks that ended by themselves, without a report and without completing."""
    unreported = [handle for handle in group if handle.error is None and not handle.completed]
    codes = [(handle.rank, handle.exitcode) for handle in unreported if handle.exitcode is not None]
    return [(rank, code) for rank, code in codes if code >= 0]


def lost_ranks(group: Sequence[RankHandle]) -> list[RankHandle]:
    """Return the ranks whose connection ended before they reported an error, completed, or an exit code came."""
    return [handle for handle in group if handle.lost and handle.error is None and not handle.completed]


def reports_with_cause(group: Sequence[RankHandle], *causes: str) -> list[dict[str, Any]]:
    """Return the ranks' reports of these causes, with ``rank`` added; the earliest by the launcher's clock first."""
    found = [{**handle.error, "rank": handle.rank} for handle in group if handle.error is not None]
    return sorted((error for error in found if error["cause"] in causes), key=lambda error: error["time"])


def format_rank_error(error: dict[str, Any]) -> str:
    """Return ``rank 1: ValueError: message`` for a rank's report."""
    return f"rank {error['rank']}: {error['type']}: {error['message']}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0 and 2`` for a list of ranks."""
    *first, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

"""Finds the rank that failed first, and the cause.

The death of a rank makes other ranks fail, and their failures are not the root cause.
"""

import signal
from collections.abc import Sequence
from typing import Any

from flyte_ddp.errors import OutOfMemoryError, RankError, RankLostError, UnreachableError, UserError
from flyte_ddp.launch.supervise.rank_handle import RankHandle

NO_STACK = "(it does not say)"
MISTAKES = {"mistake": UserError, "unreachable": UnreachableError}
ROOT_CAUSES = ("own", "machine", *MISTAKES)  # causes that are not a consequence of another rank's failure


def find_first_failure(group: Sequence[RankHandle], timeout: float) -> UserError | RankError:
    """Return the error of the rank that failed first.

    ``timeout`` is the ranks' limit in seconds, for the text of the error.
    """
    if (error := find_root_cause(group)) is not None:
        return error
    for handle in group:
        if handle.exitcode == -signal.SIGABRT:
            return killed_rank_error(handle.rank, signal.SIGABRT, out_of_memory=False)
    return collective_failure_error(group, timeout)


def find_root_cause(group: Sequence[RankHandle]) -> UserError | RankError | None:
    """Return a failure that no other rank caused, or None.

    The order of the search is: a signal, a lost rank, the earliest report, an exit code.
    """
    for handle in group:
        if handle.exitcode is not None and handle.exitcode < 0 and handle.exitcode != -signal.SIGABRT:
            number = signal.Signals(-handle.exitcode)
            return killed_rank_error(handle.rank, number, out_of_memory=handle.ran_out_of_memory())
    unreported = [handle for handle in group if handle.error is None and not handle.completed]
    for handle in unreported:
        if handle.lost and handle.ran_out_of_memory():
            return killed_rank_error(handle.rank, signal.SIGKILL, out_of_memory=True)
        if handle.lost:
            return RankLostError(
                f"rank {handle.rank} exited without reporting an error before it had finished, or its host "
                f"{handle.host} is lost",
                recoverable=True,
            )
    if own := reports_with_cause(group, *ROOT_CAUSES):
        first, mistake = own[0], MISTAKES.get(own[0]["cause"])
        of_machine = first["cause"] == "machine"
        failure = RankError(format_rank_error(first), details=first["traceback"], recoverable=of_machine)
        return mistake(first["message"]) if mistake else failure
    for handle in unreported:
        if handle.exitcode is not None and handle.exitcode >= 0:
            return RankError(f"rank {handle.rank} ended with exit code {handle.exitcode} before it had finished")
    return None


def killed_rank_error(rank: int, by: signal.Signals, *, out_of_memory: bool) -> RankError:
    message = f"rank {rank} was killed by {by.name}"
    if by != signal.SIGKILL:
        return RankError(message, recoverable=True)
    if out_of_memory:
        return OutOfMemoryError(f"{message}, as memory ran out (by the kernel's own count)", recoverable=True)
    return RankLostError(message, recoverable=True)


def collective_failure_error(group: Sequence[RankHandle], timeout: float) -> RankError:
    """Return the error for failed collective operations without a known root cause.

    The error is recoverable, unless all ranks are on one host and failed without a timeout. In this case the operation
    is the cause.
    """
    reports = reports_with_cause(group, "timeout", "peer")
    late = sorted(error["rank"] for error in reports if error["cause"] == "timeout")
    missing = [handle for handle in group if handle.error is None]
    waited = f"{format_ranks(late)} waited for {timeout:g} s (FLYTE_DDP_TIMEOUT)" if late else ""
    if late and missing:
        message = f"{format_ranks([handle.rank for handle in missing])} did not come where {waited}"
    else:
        message = f"{waited}, in different places or at different times" if late else format_rank_error(reports[0])
    stacks = [f"rank {handle.rank} is at:\n{handle.read_stack() or NO_STACK}" for handle in missing]
    shown = reports[:1] if missing else reports
    tracebacks = [f"{format_rank_error(error)}\n\n{error['traceback']}" for error in shown]
    recoverable = bool(late or missing) or len({handle.host for handle in group}) > 1
    # A lost rank may be the fault of its host. A timeout may be a hang of the code, which recurs in each attempt.
    kind = RankLostError if recoverable and not late else RankError
    of_system = any("unhandled system error" in error["message"] for error in reports)  # NCCL's, not the operation's
    return kind(message, details="\n\n".join([*stacks, *tracebacks]), recoverable=recoverable or of_system)


def reports_with_cause(group: Sequence[RankHandle], *causes: str) -> list[dict[str, Any]]:
    """Return the ranks' reports of these causes, with ``rank`` added.

    The earliest report by the launcher's clock is the first.
    """
    found = [{**handle.error, "rank": handle.rank} for handle in group if handle.error is not None]
    return sorted((error for error in found if error["cause"] in causes), key=lambda error: error["time"])


def format_rank_error(error: dict[str, Any]) -> str:
    return f"rank {error['rank']}: {error['type']}: {error['message']}"


def format_ranks(ranks: Sequence[int]) -> str:
    *first, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

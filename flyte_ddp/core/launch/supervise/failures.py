"""Finds the rank that failed first, and the cause.

The death of a rank makes other ranks fail, and their failures are not the root cause.
"""

import signal
from collections.abc import Container, Sequence

from flyte_ddp.core.errors import OutOfMemoryError, RankError, RankLostError, UnreachableError, UserError
from flyte_ddp.core.launch.supervise.failure_report import CONSEQUENCES, ROOT_CAUSES, Cause, FailureReport
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle

NO_STACK = "(no stack reported)"
MISTAKES = {Cause.MISTAKE: UserError, Cause.UNREACHABLE: UnreachableError}


def find_first_failure(group: Sequence[RankHandle], timeout: float) -> UserError | RankError:
    """Return the error of the rank that failed first. Call this function after a rank has failed.

    Without a root cause, the error is of a rank killed by SIGABRT, else of the failed collective operation. For the
    last error, reads the stacks of ranks without a report, which takes up to 3 s each. ``timeout`` is the ranks' limit
    in seconds, for the text of the error.
    """
    if (error := find_root_cause(group)) is not None:
        return error
    for handle in group:
        if handle.exitcode == -signal.SIGABRT:
            return killed_rank_error(handle.rank, signal.SIGABRT, out_of_memory=False)
    return collective_failure_error(group, timeout)


def find_root_cause(group: Sequence[RankHandle]) -> UserError | RankError | None:
    """Return a failure that no other rank caused, or None.

    First looks for a rank that a signal other than SIGABRT has killed, and then for a lost rank. The next choice is the
    earliest report of a root cause, and the last is an exit code without a report.
    """
    for handle in group:
        if handle.exitcode is not None and handle.exitcode < 0 and handle.exitcode != -signal.SIGABRT:
            number = signal.Signals(-handle.exitcode)
            return killed_rank_error(handle.rank, number, out_of_memory=handle.ran_out_of_memory())
    unreported = [handle for handle in group if handle.report is None and not handle.completed]
    for handle in unreported:
        if handle.lost and handle.ran_out_of_memory():
            return killed_rank_error(handle.rank, signal.SIGKILL, out_of_memory=True)
        if handle.lost:
            return RankLostError(
                f"rank {handle.rank} exited without reporting an error before it had finished, or its host "
                f"{handle.host} is lost",
                recoverable=True,
            )
    if reports := list_reports(group, ROOT_CAUSES):
        rank, first = reports[0]
        mistake, of_machine = MISTAKES.get(first.cause), first.cause is Cause.MACHINE
        failure = RankError(first.format(rank), details=first.traceback, recoverable=of_machine)
        return mistake(first.message) if mistake else failure
    for handle in unreported:
        if handle.exitcode is not None and handle.exitcode >= 0:
            return RankError(f"rank {handle.rank} ended with exit code {handle.exitcode} before it had finished")
    return None


def killed_rank_error(rank: int, by: signal.Signals, *, out_of_memory: bool) -> RankError:
    """Return the recoverable error of a rank that the signal ``by`` has killed.

    For SIGKILL the error is an OutOfMemoryError or a RankLostError, and for any other signal a RankError.
    """
    message = f"rank {rank} was killed by {by.name}"
    if by != signal.SIGKILL:
        return RankError(message, recoverable=True)
    if out_of_memory:
        return OutOfMemoryError(f"{message}, as memory ran out (by the kernel's count of OOM kills)", recoverable=True)
    return RankLostError(message, recoverable=True)


def collective_failure_error(group: Sequence[RankHandle], timeout: float) -> RankError:
    """Return the error for failed collective operations without a known root cause. At least one rank must have a
    report.

    The error is recoverable, unless all ranks are on one host and all report a failure without a timeout. In this case
    the operation is the cause, except for a system error of NCCL. Reads the stacks of ranks without a report, which
    takes up to 3 s each.
    """
    reports = list_reports(group, CONSEQUENCES)
    late = sorted(rank for rank, report in reports if report.cause is Cause.TIMEOUT)
    missing = [handle for handle in group if handle.report is None]
    waited = f"{format_ranks(late)} waited for {timeout:g} s (FLYTE_DDP_TIMEOUT)" if late else ""
    if late and missing:
        absent = format_ranks([handle.rank for handle in missing])
        message = f"{absent} did not reach the collective operation in which {waited}"
    else:
        rank, first = reports[0]
        apart = f"{waited}, in different collective operations or at different times"
        message = apart if late else first.format(rank)
    stacks = [f"rank {handle.rank} is at:\n{handle.request_stack() or NO_STACK}" for handle in missing]
    shown = reports[:1] if missing else reports
    tracebacks = [f"{report.format(rank)}\n\n{report.traceback}" for rank, report in shown]
    recoverable = bool(late or missing) or len({handle.host for handle in group}) > 1
    # A lost rank may be the fault of its host. A timeout may be a hang of the code, which recurs in each attempt.
    kind = RankLostError if recoverable and not late else RankError
    of_system = any("unhandled system error" in report.message for _, report in reports)  # NCCL's, not the operation's
    return kind(message, details="\n\n".join([*stacks, *tracebacks]), recoverable=recoverable or of_system)


def list_reports(group: Sequence[RankHandle], causes: Container[Cause]) -> list[tuple[int, FailureReport]]:
    """Return rank and report of each failure whose cause is in ``causes``.

    The earliest report by the launcher's clock is the first.
    """
    found = [(handle.rank, handle.report) for handle in group if handle.report is not None]
    return sorted((each for each in found if each[1].cause in causes), key=lambda each: each[1].time)


def format_ranks(ranks: Sequence[int]) -> str:
    *first, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

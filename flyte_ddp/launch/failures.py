"""Which rank failed first, and of what: the death of one rank makes others fail, and they are not to blame."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import RankError, UnreachableError, UserError

if TYPE_CHECKING:
    from flyte_ddp.launch.gang import Member

SILENT = "(it does not say)"
MISTAKES = {"mistake": UserError, "unreachable": UnreachableError}
OWN = ("own", *MISTAKES)  # causes that are no consequence of another rank's failure


def cause_is_known(gang: Sequence[Member]) -> bool:
    """Whether one of the failures so far is nobody's consequence."""
    return bool(killed(gang) or lost(gang) or errors(gang, *OWN) or silent(gang))


def first_failure(gang: Sequence[Member], timeout: float) -> UserError | RankError:
    """The error of the rank that failed first.

    A rank that was killed leaves no report, and its victims' reports only say that it was gone. SIGABRT is the
    exception: gloo and NCCL abort in a victim, too, when a peer's connection closes at the wrong moment.

    Args:
        timeout: seconds that ranks wait for one another.

    """
    own = errors(gang, *OWN)
    dead = killed(gang) or ([] if own or silent(gang) else killed(gang, also=signal.SIGABRT))
    if dead:
        return was_killed(dead[0].rank, signal.Signals(-exit_code(dead[0])))
    if lost(gang):
        gone = lost(gang)[0]
        return RankError(
            f"rank {gone.rank} ended without a word before it had finished training, or its host {gone.host} is lost",
            recoverable=True,
        )
    if own:
        mistake = MISTAKES.get(own[0]["cause"])
        return mistake(own[0]["message"]) if mistake else RankError(said(own[0]), details=own[0]["traceback"])
    if silent(gang):
        left = silent(gang)[0]
        return RankError(f"rank {left.rank} ended with exit code {exit_code(left)} before it had finished training")
    if errors(gang, "timeout"):
        return hang(gang, timeout)
    victim = errors(gang, "peer")[0]
    return RankError(said(victim), details=victim["traceback"], recoverable=True)


def was_killed(rank: int, by: signal.Signals) -> RankError:
    """The error of a rank that a signal has ended."""
    hint = ", which is often the kernel's out-of-memory killer" if by == signal.SIGKILL else ""
    return RankError(f"rank {rank} was killed by {by.name}{hint}", recoverable=True)


def did_not_begin(member: Member, seconds: float) -> RankError:
    """The error where ranks wait for an import of torch that does not end."""
    return RankError(
        f"rank {member.rank} did not begin within {seconds:g} s",
        details=f"its process is at:\n{member.stack() or SILENT}",
        recoverable=True,
    )


def hang(gang: Sequence[Member], timeout: float) -> RankError:
    """Ranks have waited in vain for those that have not failed; these show where they are."""
    waited = sorted(member.rank for member in gang if member.error is not None)
    missing = [member for member in gang if member.error is None]
    if not missing:
        return RankError(
            f"all ranks waited for each other for {timeout:g} s, in different places",
            details="\n\n".join(f"{said(error)}\n\n{error['traceback']}" for error in errors(gang, "timeout")),
            recoverable=True,
        )
    return RankError(
        f"{listed([member.rank for member in missing])} did not come where {listed(waited)} waited for {timeout:g} s "
        "(FLYTE_DDP_TIMEOUT)",
        details="\n".join(f"rank {member.rank} is at:\n{member.stack() or SILENT}" for member in missing),
        recoverable=True,
    )


def killed(gang: Sequence[Member], also: signal.Signals | None = None) -> list[Member]:
    """Those ended by a signal; by SIGABRT only if that is asked for."""
    return [
        member
        for member in gang
        if member.exitcode is not None
        and member.exitcode < 0
        and (-member.exitcode != signal.SIGABRT or also == signal.SIGABRT)
    ]


def lost(gang: Sequence[Member]) -> list[Member]:
    """Those of which nobody knows any more what became of them."""
    return [member for member in gang if member.lost and member.error is None and not member.completed]


def errors(gang: Sequence[Member], *causes: str) -> list[dict[str, Any]]:
    """Reports of these kinds, the earliest first."""
    found = [{**member.error, "rank": member.rank} for member in gang if member.error is not None]
    return sorted((error for error in found if error["cause"] in causes), key=lambda error: error["time"])


def silent(gang: Sequence[Member]) -> list[Member]:
    """Those that ended by themselves without a report."""
    return [
        member
        for member in gang
        if member.exitcode is not None and member.exitcode >= 0 and member.error is None and not member.completed
    ]


def exit_code(member: Member) -> int:
    """Of one that has ended."""
    assert member.exitcode is not None
    return member.exitcode


def said(error: dict[str, Any]) -> str:
    """A rank's own words."""
    return f"rank {error['rank']}: {error['type']}: {error['message']}"


def listed(ranks: Sequence[int]) -> str:
    """Such as ``rank 1`` or ``ranks 0 and 2``."""
    *first, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

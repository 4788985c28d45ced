"""Which rank failed first, and of what: the death of one rank makes others fail, and they are not to blame."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import RankError, UnreachableError, UserError

if TYPE_CHECKING:
    from flyte_ddp.launch.spawn import Member

STACK_SECONDS = 1.0
MISTAKES = {"mistake": UserError, "unreachable": UnreachableError}
OWN = ("own", *MISTAKES)  # causes that are no consequence of another rank's failure


def cause_is_known(gang: Sequence[Member]) -> bool:
    """Whether one of the failures so far is nobody's consequence."""
    return bool(killed(gang) or errors(gang, *OWN) or silent(gang))


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
        name = signal.Signals(-exit_code(dead[0])).name
        hint = ", which is often the kernel's out-of-memory killer" if name == "SIGKILL" else ""
        return RankError(f"rank {dead[0].rank} was killed by {name}{hint}", recoverable=True)
    if own:
        mistake = MISTAKES.get(own[0]["cause"])
        return mistake(own[0]["message"]) if mistake else RankError(said(own[0]))
    if silent(gang):
        left = silent(gang)[0]
        return RankError(f"rank {left.rank} ended with exit code {exit_code(left)} before it had finished training")
    if errors(gang, "timeout"):
        return hang(gang, timeout)
    return RankError(said(errors(gang, "peer")[0]), recoverable=True)


def hang(gang: Sequence[Member], timeout: float) -> RankError:
    """Ranks have waited in vain for those that have not failed; these show where they are."""
    waited = sorted(member.rank for member in gang if member.error is not None)
    missing = [member for member in gang if member.error is None]
    if not missing:
        return RankError(
            f"all ranks waited for each other for {timeout:g} s, in different places\n\n"
            + "\n\n".join(said(error) for error in errors(gang, "timeout")),
            recoverable=True,
        )
    stacks = "\n".join(f"rank {member.rank} is at:\n{stack(member)}" for member in missing)
    return RankError(
        f"{listed([member.rank for member in missing])} did not come where {listed(waited)} waited for {timeout:g} s "
        f"(FLYTE_DDP_TIMEOUT); {stacks}",
        recoverable=True,
    )


def stack(member: Member) -> str:
    """Where a rank is, by its own account; it need not be able to run any Python code for that."""
    with suppress(ProcessLookupError):
        os.kill(member.pid, signal.SIGUSR1)
    written, deadline = b"", time.monotonic() + STACK_SECONDS
    while member.stacks.poll(0.1 if written else max(0.0, deadline - time.monotonic())):
        if not (chunk := os.read(member.stacks.fileno(), 1 << 16)):
            break
        written += chunk
    return written.decode(errors="replace").strip() or "(it does not say)"


def killed(gang: Sequence[Member], also: signal.Signals | None = None) -> list[Member]:
    """Those ended by a signal; by SIGABRT only if that is asked for."""
    return [
        member
        for member in gang
        if member.process.exitcode is not None
        and member.process.exitcode < 0
        and (-member.process.exitcode != signal.SIGABRT or also == signal.SIGABRT)
    ]


def errors(gang: Sequence[Member], *causes: str) -> list[dict[str, Any]]:
    """Reports of these kinds, the earliest first."""
    found = [{**member.error, "rank": member.rank} for member in gang if member.error is not None]
    return sorted((error for error in found if error["cause"] in causes), key=lambda error: error["time"])


def silent(gang: Sequence[Member]) -> list[Member]:
    """Those that ended by themselves without a report."""
    return [
        member
        for member in gang
        if member.process.exitcode is not None
        and member.process.exitcode >= 0
        and member.error is None
        and not member.completed
    ]


def exit_code(member: Member) -> int:
    """Of one that has ended."""
    assert member.process.exitcode is not None
    return member.process.exitcode


def said(error: dict[str, Any]) -> str:
    """A rank's own words."""
    return f"rank {error['rank']}: {error['type']}: {error['message']}\n\n{error['traceback']}"


def listed(ranks: Sequence[int]) -> str:
    """Such as ``rank 1`` or ``ranks 0 and 2``."""
    *first, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

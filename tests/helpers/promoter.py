"""Processes that use a registry at the same time, or are killed in the middle."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flyte_ddp import storage
from flyte_ddp.core.files import SIDECAR, WEIGHTS
from flyte_ddp.release.model_files import content_digest
from flyte_ddp.release.promotion import apply_verdict, store_version
from flyte_ddp.release.promotion_log import Entry, LostError
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.verdict import Verdict


def append(registry: Registry, before: Entry | None, who: str = "somebody", manifest: str = "m") -> Entry:
    """Append an entry that promotes a version named after the author. Return the entry."""
    digests = {"version": content_digest(who.encode()), "manifest": content_digest(manifest.encode())}
    values = {**digests, "best": digests["version"], "reason": "why not"}
    return registry.append_entry(before, by=who, action="promote", **values)


def race(who: str, address: str, rounds: int) -> list[tuple[str, bool, str]]:
    """Try to write each of the first entries of the log. Return the author, whether this call won, and the reason."""
    registry, before, found = Registry(address, "model"), None, []
    for _ in range(rounds):
        try:
            before = append(registry, before, who)
            found.append((before.by, True, ""))
        except LostError as lost:
            before = lost.winner
            if before.number % 8 == 0:
                assert len(registry.read_log()) >= before.number  # the log must never look damaged
            found.append((before.by, False, str(lost)))
        champion = registry.read_champion()
        assert champion is not None
        assert champion.number >= before.number
    return found


def race_at_once(address: str, names: Sequence[str], rounds: int) -> list[list[tuple[str, bool, str]]]:
    """Call ``race`` in a process for each name at the same time. Return all results."""
    with ProcessPoolExecutor(len(names), get_context("spawn")) as pool:
        return [*pool.map(partial(race, address=address, rounds=rounds), names)]


def release_model(address: str, folder: Path) -> str:
    """Store a version and promote the version. Return the outcome's reason. A second call is a second try."""
    verdict = Verdict.from_json((folder / "verdict.json").read_text())
    registry = Registry(address, "model")
    files = (folder / name for name in (WEIGHTS, SIDECAR))
    version = store_version(registry, *files, verdict, {"page.html": folder / "page.html"})
    return apply_verdict(registry, version, verdict, by="one execution").outcome


def release_and_be_killed(address: str, folder: Path, number: int, *, after: bool) -> None:
    """Release a model in a process that exits before or after a write, without cleanup, like after SIGKILL."""
    left = [number]

    def killing(write: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> None:
            left[0] -= 1
            if left[0] < 0 and not after:
                os._exit(9)
            write(*arguments, **named)
            if left[0] < 0:
                os._exit(9)

        return wrapped

    for name in ("create_file", "write_file"):
        setattr(storage, name, killing(getattr(storage, name)))
    release_model(address, folder)

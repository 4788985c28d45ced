"""A process that promotes: ``race ADDRESS WHO ROUNDS`` for each entry of a log, ``release ADDRESS FOLDER``.

``KILL_AT`` numbers the write before or after which the process is killed.

``look ADDRESS WHO ROUNDS`` claims looks at a test split.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flyte_ddp import storage
from flyte_ddp.release import versions
from flyte_ddp.release.promotion import apply_verdict, store_version
from flyte_ddp.release.registry import LostError, Registry
from flyte_ddp.release.verdict import Verdict


def race(address: str, who: str, rounds: str) -> None:
    """Try to write each of the first entries of the log; print who has written it."""
    registry, before = Registry(address, "model"), None
    for _ in range(int(rounds)):
        try:
            values = {"version": who, "manifest": "m", "best": who, "reason": "it was faster"}
            before = registry.append_entry(before, by=who, action="promote", **values)
            print(json.dumps({"number": before.number, "winner": before.by, "won": True}))
        except LostError as lost:
            before = lost.winner
            if before.number % 8 == 0:
                assert len(registry.read_log()) >= before.number  # which nobody takes for damaged meanwhile
            print(json.dumps({"number": before.number, "winner": before.by, "won": False, "said": str(lost)}))
        champion = registry.read_champion()
        assert champion is not None
        assert champion.number >= before.number  # however late champion.json is


def look(address: str, who: str, rounds: str) -> None:
    """Claim a look for a new pair in each round; print the numbers of the looks."""
    for number in range(int(rounds)):
        print(Registry(address, "model").claim_look("t", f"{who} {number}", "champion", "superior"))


def release_model(address: str, folder: str) -> str:
    """Store a version and promote it; return the outcome's reason. A second call is a second try."""
    verdict = Verdict.from_json(Path(folder, "verdict.json").read_text())
    registry = Registry(address, "model")
    files = (Path(folder, name) for name in (versions.WEIGHTS, versions.SIDECAR))
    version = store_version(registry, *files, verdict, {"page.html": Path(folder, "page.html")}, by="one execution")
    return apply_verdict(registry, version, verdict, by="one execution").reason


def kill_at_write(number: int, *, after: bool) -> None:
    """Make this process exit at a write, as by SIGKILL: nothing is tidied up."""
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


def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start this file as a process."""
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.Popen([sys.executable, __file__, *arguments], env=variables, stdout=subprocess.PIPE)


def run_at_once(command: str, address: str, names: Sequence[str], rounds: int) -> list[list[Any]]:
    """Run a process for each name at the same time; return the JSON lines that each has printed."""
    running = [start(command, address, name, str(rounds)) for name in names]
    said = [[json.loads(line) for line in process.communicate()[0].splitlines()] for process in running]
    assert [process.returncode for process in running] == [0] * len(names)
    return said


if __name__ == "__main__":
    if at := os.environ.get("KILL_AT"):
        place, _, when = at.partition(" ")
        kill_at_write(int(place), after=when == "after")
    print({"race": race, "look": look, "release": release_model}[sys.argv[1]](*sys.argv[2:]) or "", end="")

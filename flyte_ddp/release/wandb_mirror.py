"""A copy of the champion for wandb: an artifact with the alias ``champion``. What fails there costs a message.

wandb runs in a process of its own, whose program this file is, too: nothing that it does can hold a promotion up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flyte_ddp.process import kill_trees
from flyte_ddp.release import versions
from flyte_ddp.release.registry import Entry, Registry
from flyte_ddp.settings import Settings
from flyte_ddp.tracking.wandb_run import wandb_environment

UPLOAD = 20  # times the timeout of wandb's answers: for all of an upload


def mirror(registry: Registry, version: str, settings: Settings) -> None:
    """Sends the champion to wandb, if it is this version and there is a key, and prints how that ended."""
    if settings.wandb_mode != "online":
        return
    try:
        sent_last, champion = None, registry.champion()
        while champion is not None and champion != sent_last and (sent_last or champion.version == version):
            ended = uploaded(registry, champion, settings)
            print(f"wandb: champion {champion.number} of {registry.name} {ended}", flush=True)
            sent_last, champion = champion, registry.champion()  # of two at the same time the last one has the alias
    except Exception as error:  # whatever it is: the promotion stands
        print(f"wandb: champion of {registry.name} not mirrored ({error})", flush=True)


def uploaded(registry: Registry, champion: Entry, settings: Settings) -> str:
    """Sends the champion of an entry; what came of it, in words."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # wandb's own processes may still write there
        version = versions.read_version(registry, champion.version, champion.manifest)
        files = Path(folder, "files")
        files.mkdir()
        versions.fetch_files(registry, version, files, tuple(version.files))
        return sent(described(registry, champion, settings, folder), files, Path(folder), settings.wandb_timeout)


def described(registry: Registry, entry: Entry, settings: Settings, folder: str) -> dict[str, Any]:
    """What the process is told: the run's arguments, and the artifact's."""
    seconds = settings.wandb_timeout
    quiet = {"console": "off", "disable_git": True, "disable_code": True, "silent": True}
    run = {
        "project": settings.wandb_project,
        "entity": settings.wandb_entity or None,
        "mode": "online",
        "job_type": "release",
        "name": f"{registry.name}-champion-{entry.number}",
        "dir": folder,
        "settings": {**quiet, "init_timeout": seconds, "finish_timeout": UPLOAD * seconds},
    }
    about = {name: getattr(entry, name) for name in ("number", "version", "reason", "by", "time")}
    artifact = {"name": registry.name, "type": "model", "description": entry.reason, "metadata": about}
    return {"run": run, "artifact": artifact, "aliases": ["champion", entry.version[:12]]}


def sent(what: dict[str, Any], files: Path, folder: Path, seconds: float) -> str:
    """Has the process send the files; what came of it, in words."""
    said = folder / "said.txt"  # and no pipe, which a process that wandb leaves behind would keep open
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flyte_ddp.release.wandb_mirror", json.dumps(what), str(files)],
            cwd=Path(__file__).resolve().parents[2],
            env=wandb_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(timeout=(UPLOAD + 2) * seconds)
        except subprocess.TimeoutExpired:
            kill_trees(lambda: [process.pid])
            process.wait()
            return "not mirrored (the server took too long)"
    last = said.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2][:200]
    return f"is {last}" if process.returncode == 0 else f"not mirrored ({last})"


def main(what: str, files: str) -> None:
    """Sends the files, and prints under which name, or why not."""
    import wandb

    asked = json.loads(what)
    try:
        with wandb.init(**asked["run"]) as run:
            artifact = wandb.Artifact(**asked["artifact"])
            artifact.add_dir(files)
            run.log_artifact(artifact, aliases=asked["aliases"]).wait()
            print(f"{run.entity}/{run.project}/{artifact.name.partition(':')[0]}:champion")
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        print(f"{type(error).__name__}: {line}")
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

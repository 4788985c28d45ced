"""Copying the champion to wandb: an artifact with the alias ``champion``. A failure is printed, and stops nothing.

wandb runs in a process of its own, whose program is this file, too: whatever wandb does, the promotion goes on.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from flyte_ddp.machine.process import kill_process_trees
from flyte_ddp.release.promotion import download_version
from flyte_ddp.release.registry import Entry, Registry
from flyte_ddp.settings import Settings
from flyte_ddp.tracking.wandb_run import wandb_environment

UPLOAD = 20  # times the timeout of wandb's answers: the limit of an upload


def copy_champion_to_wandb(registry: Registry, version: str, settings: Settings) -> None:
    """Upload the champion to wandb if it is this version and wandb is online; print how that went; raise nothing."""
    if settings.wandb_mode != "online":
        return
    try:
        sent_last, champion = None, registry.read_champion()
        while champion is not None and champion != sent_last and (sent_last or champion.version == version):
            ended = upload_entry(registry, champion, settings)
            print(f"wandb: champion {champion.number} of {registry.name} {ended}", flush=True)
            sent_last, champion = champion, registry.read_champion()  # of rivals the last one has the alias
    except Exception as error:  # whatever it is: the promotion stands
        print(f"wandb: champion of {registry.name} not mirrored ({error})", flush=True)


def upload_entry(registry: Registry, entry: Entry, settings: Settings) -> str:
    """Upload a version to wandb in a new process, which has UPLOAD + 2 (22) times wandb's timeout; say how it went."""
    seconds = settings.wandb_timeout
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:  # wandb's own processes may still write there
        folder, files = Path(name), Path(name, "files")
        download_version(registry, entry.version, files, entry.manifest, every_file=True)
        quiet = {"console": "off", "disable_git": True, "disable_code": True, "silent": True}
        run = {
            "project": settings.wandb_project,
            "entity": settings.wandb_entity or None,
            "mode": "online",
            "job_type": "release",
            "name": f"{registry.name}-champion-{entry.number}",
            "dir": name,
            "settings": {**quiet, "init_timeout": seconds, "finish_timeout": UPLOAD * seconds},
        }
        about = {name: getattr(entry, name) for name in ("number", "version", "reason", "by", "time")}
        artifact = {"name": registry.name, "type": "model", "description": entry.reason, "metadata": about}
        request = json.dumps({"run": run, "artifact": artifact, "aliases": ["champion", entry.version[:12]]})
        output = folder / "output.txt"  # no pipe, which a process that wandb leaves behind would keep open
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "flyte_ddp.release.wandb_mirror", request, str(files)],
                cwd=Path(__file__).resolve().parents[2],
                env=wandb_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(timeout=(UPLOAD + 2) * seconds)
            except subprocess.TimeoutExpired:
                kill_process_trees(lambda: [process.pid])
                process.wait()
                return "not mirrored (the server took too long)"
        last = output.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2][:200]
        return f"is {last}" if process.returncode == 0 else f"not mirrored ({last})"


def upload_artifact(request: str, files: str) -> None:
    """Upload the folder ``files`` to wandb as an artifact and print its name; or print the error, and exit with 1."""
    import wandb

    asked = json.loads(request)
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
    upload_artifact(*sys.argv[1:])

"""Run a task's body on ranks in the folder of the run, with the services that a pod needs."""

import glob
import hashlib
import json
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flyte_ddp.core.errors import print_to_stderr
from flyte_ddp.core.launch.engine import EngineLaunch
from flyte_ddp.core.loops.call import Call
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.checkpoint import GO_ON, describe_going_on, find_newest_step
from flyte_ddp.core.runs.run_folder import METRICS, REPORT
from flyte_ddp.core.runs.work import Launch
from flyte_ddp.core.settings import read_text_variable
from flyte_ddp.pods.live_page import publish_function_page
from flyte_ddp.pods.paths import print_local_files, resolve_folder
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.retries import open_checkpoint_store, sync_checkpoints_with_store
from flyte_ddp.run_function import (
    disable_wandb_without_key,
    print_how_to_resume_on_error,
    remove_run_checkpoints,
    run_call_in_folder,
)
from flytekitplugins.ddp.flyte import PLATFORM
from flytekitplugins.ddp.resources import ENGINE_RETRIES

# Actions to run when flytekit has written the outputs.
when_written: ContextVar[list[Callable[[], None]] | None] = ContextVar("when_written", default=None)


def call_when_outputs_written(action: Callable[[], None]) -> None:
    """Call ``action`` later, when flytekit has written the task's outputs.

    If this process executes no RanksTask, as in a map task, calls ``action`` at once.
    """
    waiting = when_written.get()
    if waiting is None:
        action()
    else:
        waiting.append(action)


def name_run(task: str, call: Call) -> str:
    """Return the name of a run, TASK-INPUTS-CODE with digests, which is equal for all attempts.

    If FLYTE_DDP_GO_ON names a run of the same task and inputs, returns the name in the variable. If the variable names
    another run, prints a note.
    """
    same, code = f"{task}-{digest_json([task, dict(call.shown)])[:12]}-", digest_json(call.code)[:8]
    named = Path(read_text_variable(GO_ON)).name
    if named and not named.startswith(same):
        print_to_stderr(f"{GO_ON}={named} is ignored: this run, {same}{code}, has another task or other inputs")
    return named if named.startswith(same) else f"{same}{code}"


def digest_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def print_saves_of_other_code(run: str, folder: Path) -> None:
    """Print to stderr which run of the same task and inputs, but of other code, has a checkpoint.

    Prints nothing if this run has a checkpoint. In a pod, queries the blob store.
    """
    if find_newest_step(folder) != 0:
        return
    same = f"{run.rpartition('-')[0]}-"
    if is_in_pod():
        steps = open_checkpoint_store(PLATFORM, run).read_saved_steps(same)
    else:
        steps = {path.name: find_newest_step(path) or 0 for path in folder.parent.glob(f"{glob.escape(same)}*")}
    if steps and (step := max(steps.values())):
        other = max(steps, key=lambda name: steps[name])
        found = f"{other}, with the same inputs and different code, has saved step {step:,}"
        print_to_stderr(f"{run} starts from scratch; {found}: {describe_going_on(folder.with_name(other))}")


def make_engine_launcher(engine: str, hosts: int) -> Launch:
    launch: EngineLaunch = import_module(f"flyte_ddp.engines.{engine}").launch
    return partial(launch, retries=ENGINE_RETRIES, awaited_hosts=hosts if is_in_pod() else 0)


def run_in_folder(call: Call, run: str, request: Request, launch: Launch | None) -> Any:
    """Run a call on ranks in the folder named ``run``, and return the result of rank 0.

    Waits for the ranks. Resumes an earlier attempt. In a pod, copies checkpoints from and to the blob store, uploads
    unsent wandb data, and publishes the console's page. When flytekit has written the outputs, removes the checkpoints
    and records the result. In a local run, prints where the recorded values are. ``launch`` starts the ranks (None: on
    this machine).
    """
    folder = resolve_folder(run)
    with (
        publish_function_page(PLATFORM, folder, run),
        sync_checkpoints_with_store(
            PLATFORM, folder, folder, defer=call_when_outputs_written
        ) as record_start_and_read_settings,
    ):
        settings = disable_wandb_without_key(record_start_and_read_settings())
        print_saves_of_other_code(run, folder)
        with print_how_to_resume_on_error(folder):
            returned = run_call_in_folder(call, request, folder, settings, launch)
        call_when_outputs_written(partial(remove_run_checkpoints, folder))
    if (folder / REPORT).exists():
        files = {
            folder / REPORT: "the recorded values, to open in a browser",
            folder / METRICS: "the recorded values as JSON lines",
        }
        print_local_files(f"{call.name} has run in", files)
    return returned

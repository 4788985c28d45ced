"""Run a user-defined function on ranks in the folder of the run, with the services that a pod needs."""

import glob
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flyte_ddp.core.errors import print_to_stderr
from flyte_ddp.core.loops.call import Call
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.checkpoint import GO_ON, describe_going_on, find_newest_step
from flyte_ddp.core.runs.run_folder import METRICS, REPORT
from flyte_ddp.core.runs.work import Launch
from flyte_ddp.core.settings import read_text_variable
from flyte_ddp.pods.live_page import publish_function_page
from flyte_ddp.pods.paths import print_local_files, resolve_folder
from flyte_ddp.pods.platforms import Platform, is_in_pod
from flyte_ddp.pods.retries import open_checkpoint_store, sync_checkpoints_with_store
from flyte_ddp.run_function import (
    disable_wandb_without_key,
    print_how_to_resume_on_error,
    remove_run_checkpoints,
    run_call_in_folder,
)


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


def print_saves_of_other_code(platform: Platform, run: str, folder: Path) -> None:
    """Print to stderr which run of the same task and inputs, but of other code, has a checkpoint.

    Prints nothing if this run has a checkpoint. In a pod, queries the blob store.
    """
    if find_newest_step(folder) != 0:
        return
    same = f"{run.rpartition('-')[0]}-"
    if is_in_pod():
        steps = open_checkpoint_store(platform, run).read_saved_steps(same)
    else:
        steps = {path.name: find_newest_step(path) or 0 for path in folder.parent.glob(f"{glob.escape(same)}*")}
    if steps and (step := max(steps.values())):
        other = max(steps, key=lambda name: steps[name])
        found = f"{other}, with the same inputs and different code, has saved step {step:,}"
        print_to_stderr(f"{run} starts from scratch; {found}: {describe_going_on(folder.with_name(other))}")


def run_in_folder(
    platform: Platform,
    call: Call,
    run: str,
    request: Request,
    launch: Launch | None,
    *,
    defer: Callable[[Callable[[], None]], object] = lambda action: action(),
) -> Any:
    """Run a call on ranks in the folder named ``run``, and return the result of rank 0.

    Waits for the ranks. Resumes an earlier attempt. In a pod, copies checkpoints from and to the blob store, uploads
    unsent wandb data, and publishes the console's page. In a local run, prints where the recorded values are.

    Args:
        platform: The platform that executes the task.
        call: The function and its arguments.
        run: The name of the run, from ``name_run``.
        request: The number of ranks.
        launch: Starts the ranks. None: on this machine.
        defer: Gets functions that remove the checkpoints and record the result, and must call them when the outputs of
            the task are written. The default calls them at once.
    """
    folder = resolve_folder(run)
    with (
        publish_function_page(platform, folder, run),
        sync_checkpoints_with_store(platform, folder, folder, defer=defer) as record_start_and_read_settings,
    ):
        settings = disable_wandb_without_key(record_start_and_read_settings())
        print_saves_of_other_code(platform, run, folder)
        with print_how_to_resume_on_error(folder):
            returned = run_call_in_folder(call, request, folder, settings, launch)
        defer(partial(remove_run_checkpoints, folder))
    if (folder / REPORT).exists():
        files = {
            folder / REPORT: "the recorded values, to open in a browser",
            folder / METRICS: "the recorded values as JSON lines",
        }
        print_local_files(f"{call.name} has run in", files)
    return returned

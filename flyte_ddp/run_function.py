"""Runs a user-defined function on ranks, under any launcher."""

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp.calls import pickle_call
from flyte_ddp.core import results
from flyte_ddp.core.errors import BusyError, RankError, UserError, print_to_stderr
from flyte_ddp.core.launch.default import choose_launcher
from flyte_ddp.core.loops.call import RETURNED, Call
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Identity
from flyte_ddp.core.runs.procedure import open_run
from flyte_ddp.core.runs.run_folder import METRICS, REPORT, lock_run_folder
from flyte_ddp.core.runs.work import Launch, Work
from flyte_ddp.core.settings import Settings, read_settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.storage.result_store import mirror_results


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int | None = None,
    folder: Path | str | None = None,
    launch: Launch | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)`` on each of ``num_ranks`` ranks, and return rank 0's return value.

    In the function, :func:`current_rank` returns its rank. Ranks import the function by its name. A function of a
    notebook or of the main script is pickled by value. Puts the working directory first on ``sys.path``.

    Args:
        function: The function that each rank calls.
        args: Positional arguments of the function, which are pickled.
        num_ranks: The number of ranks (None: 2, 0: as many as fit). If the machine has GPUs, each rank gets a separate
            GPU.
        folder: The folder for records, checkpoints and files of the run (None: a temporary folder). A run resumes from
            its folder. Success deletes the checkpoints.
        launch: Starts the ranks, such as ``flyte_ddp.engines.ray.launch``. By default, several ranks run in processes
            of this machine, and a single rank runs in this process.
        timeout: Seconds that a rank waits for other ranks in a collective operation (None: FLYTE_DDP_TIMEOUT).
        kwargs: Keyword arguments of the function, which are pickled. An argument with the name of a parameter above
            must be passed by functools.partial.

    Raises:
        UserError: Arguments cannot be pickled, the ranks outnumber the GPUs, another run is in the folder, or a
            checkpoint has other code or arguments.
        RankError: A rank failed. The error has the traceback of the rank that failed first.
        StoppedError: The run got SIGTERM. Before, ``due()`` is True, and the function has FLYTE_DDP_SAVE_SECONDS to
            save.
        KeyboardInterrupt: The run got Ctrl-C. The function can save as after SIGTERM.
    """
    given_ranks, num_ranks = num_ranks, 2 if num_ranks is None else num_ranks
    if type(num_ranks) is not int or num_ranks < 0:
        raise UserError(f"num_ranks={num_ranks!r}: must be a whole number of ranks, or 0 for as many as fit")
    settings = disable_wandb_without_key(read_settings())
    if timeout is not None:
        if not 0 < timeout < math.inf:
            raise UserError(f"timeout={timeout!r}: must be a number of seconds above 0")
        settings = replace(settings, timeout=float(timeout))
    own_keywords = {"num_ranks": given_ranks, "folder": folder, "launch": launch, "timeout": timeout}
    taken = [name for name, given in own_keywords.items() if given is not None]
    call, request = pickle_call(function, args, kwargs, taken), Request(num_ranks, exact=True)
    if folder is not None:
        folder = Path(folder).absolute()
        with print_how_to_resume_on_error(folder):
            value = run_call_in_folder(call, request, folder, settings, launch)
        remove_run_checkpoints(folder)  # so that the next run does not resume from these checkpoints
        return value
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-run-", ignore_cleanup_errors=True) as temporary:
        quiet = replace(settings, wandb_mode="disabled", results_copy="")
        return run_call_in_folder(call, request, Path(temporary, "run"), quiet, launch, is_temporary=True)


def disable_wandb_without_key(settings: Settings) -> Settings:
    asked = settings.wandb_mode == "online" or os.environ.get("WANDB_MODE")
    return settings if asked else replace(settings, wandb_mode="disabled")


def run_call_in_folder(
    call: Call,
    request: Request,
    folder: Path,
    settings: Settings,
    launch: Launch | None = None,
    *,
    is_temporary: bool = False,
) -> Any:
    """Run a user's function on ranks in a locked run folder, and return rank 0's return value.

    Resumes from the folder's checkpoint, and does not remove checkpoints. During the run, sends records to wandb and
    copies ``results/``, as ``settings`` say. Writes report.html, unless the folder is temporary.

    Raises:
        UserError: Another run is in the folder, or a checkpoint has other code or arguments. Also if FLYTE_DDP_GO_ON
            names the folder, which has no checkpoint.
        RankError, StoppedError, KeyboardInterrupt: As in :func:`run_ranks`.
    """
    from flyte_ddp.tracking import wandb_run  # takes 0.1 s, and most importers of this module need it later

    launch = launch or choose_launcher(request)
    if checkpoint.is_named_to_go_on(folder) and checkpoint.find_newest_step(folder) == 0:
        raise UserError(
            f"{checkpoint.GO_ON}={folder.name}: {folder} has no save to resume from; unset {checkpoint.GO_ON}"
        )
    work = Work(
        function="flyte_ddp.core.loops.in_rank:run_function",
        arguments=call,
        request=request,
        output_folder=folder,  # not unfinished/ in it, so that returned paths stay valid
        identity=Identity({"the function": call.name, **call.shown}, user_code=call.code),
        settings=settings,
        user_code=call.user_code,
    )
    with (
        open_run(work, folder, (REPORT, RETURNED), is_temporary=is_temporary) as work,
        mirror_results(folder, settings.results_copy, folder.name, resuming=work.checkpoint is not None),
        wandb_run.log_to_wandb(folder, settings, call.shown, on_first_record=True),
    ):
        launch(work)
        returned = (folder / RETURNED).read_bytes()
        (folder / RETURNED).unlink()
        if not is_temporary:
            write_function_page(folder)
        return cloudpickle.loads(returned)


@contextmanager
def print_how_to_resume_on_error(folder: Path) -> Iterator[None]:
    """If the block raises UserError or RankError, print how to resume from the last checkpoint. Errors pass through.

    If the machine caused the error, or no checkpoint exists, prints nothing.
    """
    try:
        yield
    except (UserError, RankError) as error:
        is_mended_in_code = isinstance(error, UserError) or not error.recoverable
        if is_mended_in_code and not isinstance(error, BusyError) and (step := checkpoint.find_newest_step(folder)):
            print_to_stderr(f"step {step:,} of {folder} is saved; {checkpoint.describe_going_on(folder)}")
        raise


def remove_run_checkpoints(folder: Path) -> None:
    """Delete a run's checkpoints, and their folder if the folder is then empty.

    If another run holds the lock of the run folder, or a file cannot be deleted, stops without an error.
    """
    with suppress(UserError, OSError), lock_run_folder(folder):
        for name in checkpoint.SLOTS:
            (folder / checkpoint.FOLDER / name).unlink(missing_ok=True)
        (folder / checkpoint.FOLDER).rmdir()


def write_function_page(folder: Path) -> None:
    """Write report.html into the run folder, if the function has recorded numbers or ``results/`` exists.

    If the page cannot be written, prints the reason to stderr.
    """
    try:
        is_recorded = any(record.get("kind") == "record" for record in read_records(folder / METRICS))
        if not is_recorded and not (folder / results.FOLDER).exists():
            return
        from flyte_ddp.report.function_page import render_function_page  # imports NumPy, for which ranks would wait
        from flyte_ddp.report.page import write_html

        write_html(folder / REPORT, render_function_page(folder, folder.name))
    except Exception as error:  # matplotlib may raise anything
        reason = f"{type(error).__name__}: {error}"
        print_to_stderr(f"{REPORT} could not be written ({reason}); the records are in {METRICS}")

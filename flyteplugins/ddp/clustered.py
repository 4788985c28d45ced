"""Ranks in the pods of a clustered task of Flyte 2, which is a JobSet of Kubernetes with ``torchrun`` in each pod."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import flyte.errors

from flyte_ddp.core.errors import print_to_stderr

if TYPE_CHECKING:
    from flyte_ddp.core.runs.work import Launch

RUN_ID = "TORCHELASTIC_RUN_ID"  # environment variable of the processes that torchrun starts
MARKERS = ("FLYTE_CLUSTERED_WORKER", RUN_ID)  # variables by which the SDK detects a clustered worker


@contextmanager
def open_launcher(prepare_pod: Callable[[], object] = lambda: None) -> Iterator["Launch"]:
    """Yield the launcher of the task's ranks, on this machine or in all workers of a clustered task.

    In the worker with rank 0, runs the block. In any other worker, runs a rank until the run is over, prints the run's
    error, and ends the process with code 0. The first worker of each other pod calls ``prepare_pod`` before the rank
    starts. An error of ``prepare_pod`` is only printed.
    """
    from flyte_ddp.engines import elastic

    if RUN_ID not in os.environ:
        yield elastic.launch
    elif elastic.is_leader():
        try:
            yield elastic.launch
        finally:
            elastic.release_followers()
    else:
        if os.environ["LOCAL_RANK"] == "0" and os.environ["GROUP_RANK"] != "0":
            try:
                prepare_pod()
            except Exception:  # the rank then prepares the data, and reports an error through rank 0
                traceback.print_exc()
        try:
            elastic.follow()
        except click.ClickException as error:  # reported by the worker with rank 0, unless that worker is lost
            print_to_stderr(error.format_message())
        raise SystemExit(0)


@contextmanager
def report_from_first_worker() -> Iterator[None]:
    """In a clustered task, let the worker with rank 0 report an error of the block like a task with a single pod.

    SDK 2.12.1 ends a clustered worker with exit code 1 after an error. Backend v2.0.43 then does not read the error,
    and retries also after a final error. Therefore this function deletes the variables by which the SDK detects a
    clustered worker. Any other worker that raises a final error, as the worker with rank 0 does, prints the error and
    ends with code 0. Other errors of such a worker pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if RUN_ID in os.environ and os.environ["RANK"] == "0":
            for name in MARKERS:
                os.environ.pop(name, None)
        elif RUN_ID in os.environ and isinstance(error, flyte.errors.NonRecoverableError):
            print_to_stderr(str(error))
            raise SystemExit(0) from None
        raise

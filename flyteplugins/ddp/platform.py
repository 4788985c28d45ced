"""Flyte 2 as the platform that runs tasks, and a decorator of tasks.

The body of a task runs in the main thread of its pod. Flyte 2 runs a plain function in another thread, where Python
handles no signals, so the body would not notice SIGTERM. Therefore each task is an ``async`` function. A task that
awaits other tasks must not raise an error at SIGTERM, because the SDK would then abort the other tasks.
"""

import inspect
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click
import flyte
import flyte.errors
import flyte.report

from flyte_ddp.core.errors import RankError, StoppedError
from flyte_ddp.pods.environment import FROM_SCRATCH_VARIABLE
from flyte_ddp.pods.outcomes import describe_ended_run, print_held_outcome
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.retries import raise_pod_terminated, raise_retryable_errors
from flyteplugins.ddp.clustered import report_from_first_worker
from flyteplugins.ddp.outages import is_outage


class Flyte2:
    """Facts about the current task of Flyte 2, and access to its report and retryable errors."""

    retraining_request = f"{FROM_SCRATCH_VARIABLE}=yes before the command"

    def is_retraining_requested(self) -> bool:
        return bool(os.environ.get(FROM_SCRATCH_VARIABLE) or flyte.ctx().disable_run_cache)

    def output_address(self) -> str:
        return flyte.ctx().raw_data_path.path

    def publish_page(self, title: str, html: str) -> None:
        """Set a tab of the task's report, and in a pod upload the report."""
        flyte.report.get_tab(title).replace(html)
        if is_in_pod():
            flyte.report.flush()

    def retryable_error(self, message: str) -> Exception:
        return RetryableError("RecoverableError", message)


class RetryableError(flyte.errors.RuntimeUserError):
    """An error after which Flyte 2 makes another attempt of the task."""


class FinalError(flyte.errors.NonRecoverableError):
    """An error after which Flyte 2 does not retry. ``is_mistake`` is whether the text alone tells the user enough."""

    def __init__(self, message: str, code: str, *, is_mistake: bool) -> None:
        super().__init__(message, code)
        self.is_mistake = is_mistake


PLATFORM = Flyte2()


def task(environment: flyte.TaskEnvironment, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function a task of ``environment``, with options of Flyte 2's ``task``.

    An ``async`` function may await other tasks. The task translates errors for Flyte's retries.
    """

    def make_task(function: Callable[..., Any]) -> Any:
        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            print_held_outcome()
            if not inspect.iscoroutinefunction(function):
                with translate_errors():
                    return function(*args, **kwargs)
            with translate_errors(exit_at_sigterm):
                return await function(*args, **kwargs)

        text = inspect.getdoc(function) or ""
        # For --help, each argument is a paragraph: click joins the lines of a paragraph.
        docs = flyte.Documentation(re.sub(r"\n(Args:\n)? {4}(?=\w+: )", r"\n\n", text))
        return environment.task(docs=docs, **options)(run)

    return make_task


def exit_at_sigterm(*_: object) -> None:
    """End this process at once, so that the awaited tasks go on. The task's next attempt finds the awaited tasks."""
    os._exit(128 + signal.SIGTERM)


@contextmanager
def translate_errors(on_sigterm: Callable[..., object] = raise_pod_terminated) -> Iterator[None]:
    """Translate errors of the block, so that Flyte 2 retries only if a retry may succeed.

    Handles SIGTERM during the block, in the main thread, by ``on_sigterm``. The default raises a retryable error.
    """
    with report_from_first_worker(), end_after_final_errors(), raise_retryable_errors(PLATFORM, on_sigterm):
        yield


@contextmanager
def end_after_final_errors() -> Iterator[None]:
    """Raise FinalError for an error of the block after which a retry cannot succeed.

    In a pod, raises RetryableError for an outage of a server that the SDK calls. The error of an awaited task is final,
    because all attempts of that task have failed. Errors of Flyte 2's system pass unchanged. Flyte 2 would retry after
    any error other than FinalError.
    """
    try:
        yield
    except (RetryableError, flyte.errors.RuntimeSystemError):
        raise
    except flyte.errors.BaseRuntimeError as error:
        raise FinalError(str(error), error.code, is_mistake=True) from error
    except (KeyboardInterrupt, RankError, StoppedError) as error:
        text = str(error) if is_in_pod() else describe_ended_run(error)
        raise FinalError(text, type(error).__name__, is_mistake=True) from error
    except click.ClickException as error:
        raise FinalError(error.format_message(), type(error).__name__, is_mistake=True) from error
    except Exception as error:
        kind = type(error).__name__
        if is_in_pod() and is_outage(error):
            raise RetryableError("RecoverableError", f"{kind}: {error}") from error
        raise FinalError(f"{kind}: {error}", kind, is_mistake=False) from error


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether a log record of Flyte 2 tells more than the text of a mistake, which is shown anyway."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, FinalError) and error.is_mistake) and "skipping remaining retries" not in str(
        record.msg
    )


logging.getLogger("flyte").addFilter(is_worth_logging)  # else Flyte 2 prints a traceback for each mistake

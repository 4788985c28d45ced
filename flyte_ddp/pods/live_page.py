"""Publish the console's page of a task that runs ranks, and update the page while the task runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from flyte_ddp.core.runs.run_folder import REPORT, UNFINISHED
from flyte_ddp.pods.platforms import Platform, is_in_pod
from flyte_ddp.pods.retries import start_thread_in_context

PAGE_SECONDS = 30.0  # between two pages
LAST_SECONDS = 10.0  # limit of the wait for the last page, and for a page before it that is being uploaded
TITLE = "Training report"
PLACEHOLDER = "<p>Training has not started yet. The report will appear after the first steps.</p>"
FUNCTION_PLACEHOLDER = "<p>The function has not started yet. This page will show the recorded values.</p>"

Render = Callable[[str, bool], str]  # (reason of the failure or "", whether the page is the last) -> HTML


@contextmanager
def publish_page_while_running(
    platform: Platform, render: Render, *, title: str = "Run", placeholder: str = FUNCTION_PLACEHOLDER
) -> Iterator[None]:
    """Publish a page in the platform's console every 30 s during the block, and once more at the end.

    A thread calls ``render``, and publishes ``placeholder`` until ``render`` returns a page. Errors are ignored. The
    end of the block waits up to 10 s for the last page. Outside of pods, does nothing.
    """
    if not is_in_pod():
        yield
        return
    ended, failure = threading.Event(), ""

    def publish_pages() -> None:
        """Publish the page every 30 s until the block has ended, and then once more. Ignores errors."""
        page, is_last = placeholder, False
        while not is_last:
            is_last = ended.is_set()
            with suppress(Exception):  # no metrics exist yet
                page = render(failure, is_last)
            with suppress(Exception):  # the blob store does not answer
                platform.publish_page(title, page)
            ended.wait(PAGE_SECONDS)

    thread = start_thread_in_context("page", publish_pages, daemon=True)
    try:
        yield
    except BaseException as error:
        failure = str(error) or type(error).__name__
        raise
    finally:
        ended.set()
        thread.join(LAST_SECONDS)


def publish_report_while_training(platform: Platform, run_folder: Path) -> AbstractContextManager[None]:
    """Publish the report of a training in the platform's console every 30 s during the block, from a thread.

    The last page is the finished report, or a report with the error. The end of the block waits up to 10 s for the last
    page. Errors are ignored. Outside of pods, does nothing.
    """

    def render(failure: str, is_last: bool) -> str:
        if is_last and not failure:
            return (run_folder / REPORT).read_text(encoding="ascii")
        from flyte_ddp.report.report import render_report

        return render_report(run_folder / UNFINISHED, run_folder.name, failure)

    return publish_page_while_running(platform, render, title=TITLE, placeholder=PLACEHOLDER)


def publish_function_page(platform: Platform, folder: Path, name: str) -> AbstractContextManager[None]:
    """Publish the recorded values of a user-defined function in the console every 30 s during the block.

    The end of the block waits up to 10 s for the last page. Errors are ignored. Outside of pods, does nothing.
    ``folder`` is the run's folder, and ``name`` is the run's name on the page.
    """

    def render(failure: str, _: bool) -> str:
        from flyte_ddp.report.function_page import render_function_page

        return render_function_page(folder, name, failure)

    return publish_page_while_running(platform, render)

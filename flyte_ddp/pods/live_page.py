"""The console's page of a training task, from its first second on: the report, with the figures so far."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flyte_ddp.pods.platforms import Platform, is_in_pod
from flyte_ddp.pods.retries import start_thread_in_context
from flyte_ddp.report import report
from flyte_ddp.runs.run_folder import UNFINISHED

PAGE_SECONDS = 30.0  # between two pages
LAST_SECONDS = 10.0  # limit of the wait for the last page, and for a page before it that is being uploaded
TITLE = "Training report"
PLACEHOLDER = "<p>Training has not begun yet; the report comes with its first steps.</p>"


@contextmanager
def publish_report_while_training(platform: Platform, run_folder: Path) -> Iterator[None]:
    """Publish a pod's report of its run every PAGE_SECONDS (30 s) during the block, and at its end; do nothing locally.

    The last page is the finished report; after an exception, the report so far with the error. A thread reads the run
    folder and uploads pages; its errors are ignored. The end of the block waits up to 10 s for the last page.
    """
    if not is_in_pod():
        yield
        return
    ended, failure = threading.Event(), ""

    def publish_pages() -> None:
        """Upload the report so far, or a placeholder, every PAGE_SECONDS until ``ended`` is set, then the last page."""
        page, is_last = PLACEHOLDER, False
        while not is_last:
            is_last = ended.is_set()
            with suppress(Exception):  # there are no metrics yet
                if is_last and not failure:
                    page = (run_folder / "report.html").read_text(encoding="ascii")
                else:
                    page = report.render_report(run_folder / UNFINISHED, run_folder.name, failure)
            with suppress(Exception):  # the blob store does not answer
                platform.publish_page(TITLE, page)
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

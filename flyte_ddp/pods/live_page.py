"""The console's page of a training task, from its first second on: the report, with the figures so far."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flyte_ddp.pods.platforms import Platform, is_in_pod
from flyte_ddp.pods.retries import start_thread_in_context
from flyte_ddp.report import report
from flyte_ddp.runs.run_folder import UNFINISHED

SECONDS = 30.0  # between two pages
LAST_SECONDS = 5.0  # limit of the wait for an upload
TITLE = "Training report"
PLACEHOLDER = "<p>Training has not begun yet; the report comes with its first steps.</p>"


@contextmanager
def publish_report_while_training(platform: Platform, run_folder: Path) -> Iterator[None]:
    """In a pod, publish the run's report every SECONDS during the block, and once more at its end; do nothing locally.

    The last page is the finished report, or after an exception the report with the reason. Threads render and upload,
    and no error of theirs fails the run. The end of the block waits up to LAST_SECONDS for a page that is being
    uploaded, and up to LAST_SECONDS for the last page.
    """
    if not is_in_pod():
        yield
        return
    stop, page = threading.Event(), PLACEHOLDER

    def publish_page(failure: str = "") -> None:
        """Render the report so far and upload the page, or the page before if there are no metrics yet."""
        nonlocal page
        with suppress(Exception):  # there are no metrics yet
            page = report.render(run_folder / UNFINISHED, run_folder.name, failure)
        with suppress(Exception):  # the blob store does not answer
            platform.publish_page(TITLE, page)

    def publish_pages_until_stopped() -> None:
        """Upload a page every SECONDS until ``stop`` is set."""
        while not stop.is_set():
            publish_page()
            stop.wait(SECONDS)

    def stop_publishing() -> None:
        """Set ``stop`` and wait up to LAST_SECONDS for the thread, whose older page might replace the last one."""
        stop.set()
        renewing.join(LAST_SECONDS)

    renewing = start_thread_in_context("page", publish_pages_until_stopped, daemon=True)
    try:
        yield
    except BaseException as error:
        reason = str(error)
        stop_publishing()
        start_thread_in_context("page", lambda: publish_page(reason), daemon=True).join(LAST_SECONDS)
        raise
    stop_publishing()
    last = (run_folder / "report.html").read_text(encoding="ascii")
    start_thread_in_context("page", lambda: platform.publish_page(TITLE, last), daemon=True).join(LAST_SECONDS)

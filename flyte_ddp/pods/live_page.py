"""The console's page of a training task, from its first second on: the report, with the figures so far."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flyte_ddp.pods.platforms import Platform
from flyte_ddp.pods.retries import start_thread
from flyte_ddp.report import report
from flyte_ddp.runs.run_folder import UNFINISHED

SECONDS = 30.0  # between two pages
LAST_SECONDS = 5.0  # to wait, at most, for a page that is on its way
TITLE = "Training report"
PLACEHOLDER = "<p>Training has not begun yet; the report comes with its first steps.</p>"


@contextmanager
def show_while_training(platform: Platform, run_folder: Path) -> Iterator[None]:
    """In a pod, publish the run's report every SECONDS while it trains, and after a failure once more, with the reason.

    A thread does that; no error of it fails the run, and its end waits LAST_SECONDS at most for a page on its way.
    """
    if platform.is_local():
        yield
        return
    stop, page = threading.Event(), PLACEHOLDER

    def show(failure: str = "") -> None:
        nonlocal page
        with suppress(Exception):  # there are no metrics yet
            page = report.render(run_folder / UNFINISHED, run_folder.name, failure)
        with suppress(Exception):  # the blob store does not answer
            platform.publish_page(TITLE, page)

    def keep_showing() -> None:
        while not stop.is_set():
            show()
            stop.wait(SECONDS)

    def stop_showing() -> None:
        stop.set()
        renewing.join(LAST_SECONDS)  # or an older page might come after the last one

    renewing = start_thread("page", keep_showing, daemon=True)
    try:
        yield
    except BaseException as error:
        reason = str(error)
        stop_showing()
        start_thread("page", lambda: show(reason), daemon=True).join(LAST_SECONDS)
        raise
    stop_showing()
    last = (run_folder / "report.html").read_text(encoding="ascii")
    start_thread("page", lambda: platform.publish_page(TITLE, last), daemon=True).join(LAST_SECONDS)

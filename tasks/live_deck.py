"""The console's page of a training task, from its first second on: the report, with the figures so far."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flytekit import Deck

from flyte_ddp.report import report
from flyte_ddp.runs.run_folder import UNFINISHED
from tasks import places

SECONDS = 30.0  # between two pages
LAST_SECONDS = 5.0  # to wait, at most, for a page that is on its way
NAME = "Training report"


class LiveDeck(Deck):  # type: ignore[misc]  # which flytekit leaves untyped
    """A page that can be replaced."""

    page = "<p>Training has not begun yet; the report comes with its first steps.</p>"

    @property
    def html(self) -> str:
        """The page."""
        return self.page


@contextmanager
def live_deck(run_folder: Path) -> Iterator[None]:
    """Shows a run while it trains, and why it has failed; this never delays the run or makes it fail."""
    if places.is_local():
        yield
        return
    deck, stop = LiveDeck(NAME), threading.Event()

    def show(failure: str = "") -> None:
        with suppress(Exception):  # there are no metrics yet
            deck.page = report.render(run_folder / UNFINISHED, run_folder.name, failure)
        Deck.publish()

    def keep_showing() -> None:
        while not stop.is_set():
            with suppress(Exception):
                show()
            stop.wait(SECONDS)

    def stop_showing() -> None:
        stop.set()
        renewing.join(LAST_SECONDS)  # or an older page might come after the last one

    renewing = background(keep_showing)
    try:
        yield
    except BaseException as error:
        said = str(error)
        stop_showing()
        background(lambda: show(said)).join(LAST_SECONDS)
        raise
    stop_showing()
    deck.page = (run_folder / "report.html").read_text(encoding="ascii")


def background(work: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that has Flyte's context."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="deck", daemon=True)
    thread.start()
    return thread

"""Compare a window of new samples with the champion's held-out samples."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import resources
from flyte_ddp.core.settings import read_settings
from flyte_ddp.monitor.records import read_windows, record_window
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.monitor.window import Window
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import NO_SCHEDULE, Platform, describe_author, is_in_pod
from flyte_ddp.release.promotion import require_champion
from flyte_ddp.task_bodies.release import open_registry


class Watched(NamedTuple):
    """The findings about a window, and the folder with the page and tables of columns."""

    found: Window
    folder: Path


def watch_champion(
    platform: Platform,
    model_name: str,
    window: WindowSource,
    kickoff_time: datetime,
    download: Callable[[str, bool], Path],
) -> Watched:
    """Predict a window with the champion, compare it with the held-out samples, and record the findings.

    The findings are written to the registry, and to a page, which is published. In a local run, prints the files.

    Args:
        platform: The platform that executes the task.
        model_name: Name of the model in the registry.
        window: Where the new samples are.
        kickoff_time: Time of a schedule, or NO_SCHEDULE for the present time.
        download: Downloads a remote address and returns the local path. The second argument is whether the address is
            a folder. Raises FileNotFoundError if nothing exists there.
    """
    from flyte_ddp.monitor.page import write_csv_table, write_window_page
    from flyte_ddp.monitor.watch import predict_window

    resources.check_expected_gpus(resources.count_gpus())
    source = window.fill_in_time(datetime.now(UTC) if kickoff_time == NO_SCHEDULE else kickoff_time)
    registry = open_registry(model_name)
    entry = require_champion(registry)
    with paths.make_dated_folder("windows") as folder:
        samples = find_or_download_samples(source, download)
        predicted, watched = predict_window(
            registry, entry, source, samples, settings=read_settings(), by=describe_author()
        )
        found = record_window(registry, entry, predicted, idempotent=is_in_pod())
        course = read_windows(registry, entry)
        page = write_window_page(found, watched, course, model_name, folder / "window.html")
        files = {
            page: "the columns that have moved, to open in a browser",
            write_csv_table(folder / "window.csv", watched.columns, watched.ids): "the window's columns",
            write_csv_table(folder / "reference.csv", watched.reference): "the held-out samples' columns",
        }
    platform.publish_page("Window", page.read_text(encoding="ascii"))
    paths.print_local_files(f"window {found.number}, {found.describe()}; written to", files)
    return Watched(found, folder)


def find_or_download_samples(source: WindowSource, download: Callable[[str, bool], Path]) -> Path:
    """Return the local path of a window's images or table, after a download if the address is remote.

    Raises:
        UserError: Nothing exists at the remote address.
    """
    address = source.images or source.table
    if (path := storage.find_local_path(address)) is not None:
        return path
    try:
        return download(address, bool(source.images))
    except FileNotFoundError:
        raise UserError(f"{address}: does not exist; check the address and its time placeholders") from None


def raise_alarm(found: Window, window: WindowSource) -> None:
    """Raise UserError if the window is an alarm, unless ``window.fail_on_alarm`` is false."""
    if found.alarm and window.fail_on_alarm:
        raise UserError(f"{found.address}: {found.describe()}; see the page window.html")

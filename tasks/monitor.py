"""Tasks that monitor a champion: compare a window of samples with the held-out samples, and raise an alarm.

None of these tasks is cached.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck
from flytekit.exceptions.user import FlyteDataNotFoundException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import resources
from flyte_ddp.core.settings import read_settings
from flyte_ddp.monitor.records import read_windows, record_window
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.monitor.window import Window
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import NO_SCHEDULE, describe_author, is_in_pod
from flyte_ddp.release.promotion import require_champion
from tasks import pods
from tasks.flyte import flyte_task, output_folder
from tasks.release import open_registry


class Monitored(NamedTuple):
    """The findings about a window, and a folder with the page and tables of columns.

    The tables are window.csv, and reference.csv for the held-out samples.
    """

    found: Window
    files: FlyteDirectory


@flyte_task(**pods.prediction_pod_options())
def watch_champion(model_name: str, window: WindowSource, kickoff_time: datetime) -> Monitored:
    """Predict a window with the champion, compare it with the held-out samples, and record the findings.

    The findings are written to the registry, and shown as a deck.
    """
    from flyte_ddp.monitor.page import write_csv_table, write_window_page
    from flyte_ddp.monitor.watch import predict_window

    resources.check_expected_gpus(resources.count_gpus())
    source = window.fill_in_time(datetime.now(UTC) if kickoff_time == NO_SCHEDULE else kickoff_time)
    registry = open_registry(model_name)
    entry = require_champion(registry)
    with paths.make_dated_folder("windows") as folder:
        predicted, watched = predict_window(
            registry, entry, source, fetch_samples(source), settings=read_settings(), by=describe_author()
        )
        found = record_window(registry, entry, predicted, idempotent=is_in_pod())
        course = read_windows(registry, entry)
        page = write_window_page(found, watched, course, model_name, folder / "window.html")
        files = {
            page: "the columns that have moved, to open in a browser",
            write_csv_table(folder / "window.csv", watched.columns, watched.ids): "the window's columns",
            write_csv_table(folder / "reference.csv", watched.reference): "the held-out samples' columns",
        }
    Deck("Window", page.read_text(encoding="ascii"))
    paths.print_local_files(f"window {found.number}, {found.describe()}; written to", files)
    return Monitored(found, output_folder(folder))


def fetch_samples(source: WindowSource) -> Path:
    """Return the local path of a window's images or table, after a download if the address is remote.

    Raises:
        UserError: Nothing exists at the remote address.
    """
    address = source.images or source.table
    if (path := storage.find_local_path(address)) is not None:
        return path
    try:
        return Path((FlyteDirectory if source.images else FlyteFile).from_source(address).download())
    except FlyteDataNotFoundException:
        raise UserError(f"{address}: does not exist; check the address and its time placeholders") from None


@flyte_task(**pods.registry_pod_options())
def raise_alarm(found: Window, window: WindowSource) -> None:
    """Fail if the window is an alarm, so that Flyte notifies people.

    Does nothing if ``window.fail_on_alarm`` is false.
    """
    if found.alarm and window.fail_on_alarm:
        raise UserError(f"{found.address}: {found.describe()}; see the page of watch_champion")

"""Tasks that monitor a champion: compare a window of samples with the held-out samples, and raise an alarm.

None of these tasks is cached.
"""

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from flytekit.exceptions.user import FlyteDataNotFoundException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.monitor.window import Window
from flyte_ddp.task_bodies import monitor
from tasks import pods
from tasks.flyte import PLATFORM, flyte_task, output_folder


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
    found, folder = monitor.watch_champion(PLATFORM, model_name, window, kickoff_time, download_address)
    return Monitored(found, output_folder(folder))


def download_address(address: str, is_folder: bool) -> Path:
    """Download a remote file or folder, and return the local path.

    Raises:
        FileNotFoundError: Nothing exists at the address.
    """
    try:
        return Path((FlyteDirectory if is_folder else FlyteFile).from_source(address).download())
    except FlyteDataNotFoundException as error:
        raise FileNotFoundError(address) from error


@flyte_task(**pods.registry_pod_options())
def raise_alarm(found: Window, window: WindowSource) -> None:
    """Fail if the window is an alarm, so that Flyte notifies people.

    Does nothing if ``window.fail_on_alarm`` is false.
    """
    monitor.raise_alarm(found, window)

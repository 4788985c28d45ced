"""Champion to alarm: compare the champion's predictions of new samples with the predictions of held-out samples.

Run it with ``flyte run --local flyte2/monitor.py monitor --model_name digits --window '{"dataset": "digits"}'``.
"""

from dataclasses import dataclass
from pathlib import Path

from flyte.io import Dir, File

from flyte2 import pods
from flyte2.files import download, output_folder
from flyte2.inputs import WindowInput
from flyte2.schedules import read_start_time, scheduled_task
from flyte_ddp.monitor.window import Window
from flyte_ddp.schedules.entries import MONITORING
from flyte_ddp.task_bodies import monitor as bodies
from flyteplugins.ddp.platform import PLATFORM


@dataclass
class Monitored:
    """The findings about a window, and a folder with the page and tables of columns."""

    found: Window
    files: Dir


def download_address(address: str, is_folder: bool) -> Path:
    """Download a remote file or folder, and return the local path.

    Raises:
        FileNotFoundError: Nothing exists at the address.
    """
    value = (Dir if is_folder else File).from_existing_remote(address)
    if not value.exists_sync():
        raise FileNotFoundError(address)
    return download(value)


@scheduled_task(pods.PREDICTION, MONITORING, retries=pods.RETRIES, timeout=pods.HOURS, report=True)
async def monitor(model_name: str, window: WindowInput = WindowInput()) -> Monitored:
    """Compare a window of new samples with the champion's held-out samples, and fail if columns move for long.

    Returns the findings, which the registry keeps, and a folder with a page and tables of the columns. The page is also
    the report. Trains and promotes nothing.

    Args:
        model_name: Name of the model in the registry (FLYTE_DDP_REGISTRY), such as digits.
        window: Where the new samples are, and perhaps their truth. Give images, a dataset or a table.
    """
    source, time = window.check(), await read_start_time()
    found, folder = bodies.watch_champion(PLATFORM, model_name, source, time, download_address)
    bodies.raise_alarm(found, source)
    return Monitored(found, output_folder(folder))

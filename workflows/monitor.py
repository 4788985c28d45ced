"""Champion to alarm: compare the champion's predictions of new samples with the predictions of held-out samples.

Run it with ``pyflyte run workflows/monitor.py monitor_wf --model_name digits --window '{"dataset": "digits"}'``.
"""

from datetime import datetime

from flytekit import workflow

from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.pods.platforms import NO_SCHEDULE
from tasks.monitor import Monitored, raise_alarm, watch_champion
from workflows.schedules import make_launch_plans


@workflow
def monitor_wf(
    model_name: str, window: WindowSource = WindowSource(), kickoff_time: datetime = NO_SCHEDULE
) -> Monitored:
    """Compare a window of new samples with the champion's held-out samples, and fail if columns move for long.

    Returns the findings, which the registry keeps, and a folder with a page and tables of the columns. The page is also
    the deck of watch_champion. Trains and promotes nothing.

    Args:
        model_name: Name of the model in the registry (FLYTE_DDP_REGISTRY), such as digits.
        window: Where the new samples are, and perhaps their truth. Give images, a dataset or a table.
        kickoff_time: Time at which a schedule started this execution, set by the schedule. Leave 1 January 1970 for
            now.
    """
    watched = watch_champion(model_name=model_name, window=window, kickoff_time=kickoff_time)
    raise_alarm(found=watched.found, window=window)
    return Monitored(watched.found, watched.files)


globals().update(make_launch_plans(monitor_wf, taken=globals()))

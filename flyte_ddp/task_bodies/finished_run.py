"""Load the model of a finished run, in place of training."""

from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.release.finished_run import FinishedRun
from flyte_ddp.run import Result, read_run_result


def load_finished_run(run: str, data_description: Path) -> Result:
    """Return the result of a finished run in place of training. Outside of pods, prints that nothing is trained.

    Args:
        run: Folder of the run, or its address, whose files are downloaded to a new folder.
        data_description: The description of the prepared data set, by which data of another run are rejected.

    Raises:
        UserError: The run was not trained on these data.
    """
    finished = FinishedRun.read(run)
    finished.check_data(data_description)
    folder = storage.find_local_path(run)
    if folder is None:
        with paths.make_dated_folder("loaded") as folder:
            finished.download(folder)
    if not is_in_pod():
        print(f"{run} is a finished run; its model is judged without training", flush=True)
    return read_run_result(folder)

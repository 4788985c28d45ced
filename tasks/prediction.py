"""The prediction task: applies a trained model to a folder of images, a data set's test split, or new rows."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Optional

from flytekit import Deck
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import resources
from flyte_ddp.core.settings import read_settings
from flyte_ddp.pods import paths
from flyte_ddp.pods.run_inputs import find_or_fetch_data_set
from flyte_ddp.release.promotion import download_champion
from flyte_ddp.release.registry import Registry
from tasks import pods
from tasks.flyte import PythonPickledFile, flyte_task, output_file, output_folder


class Predictions(NamedTuple):
    """A table (CSV) with a row for each sample, and a folder of PNG files if the model predicts masks."""

    table: FlyteFile
    masks: Optional[FlyteDirectory]


@flyte_task(**pods.prediction_pod_options())
def predict_images(
    model_state: Optional[PythonPickledFile] = None,
    sidecar: Optional[FlyteFile] = None,
    model_name: str = "",
    images: Optional[FlyteDirectory] = None,
    dataset: str = "",
    data_source: str = "",
    test_dataset: str = "",
    bad_samples: Optional[int] = None,
    table: Optional[FlyteFile] = None,
    top_classes: int = 5,
) -> Predictions:
    """Predict a folder of images, the test split of a data set, or the rows of a file.

    Returns a table (CSV) of predictions. The inputs are those of predict_wf. The first predictions are on the task's
    page.
    """
    from flyte_ddp.predict.predict import get_mask_folder, read_sample_setting, write_prediction_table

    resources.check_expected_gpus(resources.count_gpus())
    with paths.make_dated_folder("predictions") as folder, TemporaryDirectory() as fetched:
        if model_name and model_state is None and sidecar is None:
            model = download_champion(Registry(paths.read_registry_address(), model_name), Path(fetched))
        elif not model_name and model_state is not None and sidecar is not None:
            model = Path(model_state.download()), Path(sidecar.download())
        else:
            given = "the name of a model in the registry, or model_state and sidecar of a run"
            raise UserError(f"model_name={model_name!r}: give either {given}")
        written = write_prediction_table(
            *model,
            images=Path(images.download()) if images is not None else None,
            dataset=find_or_fetch_data_set(dataset, data_source, test_dataset, sample=read_sample_setting(model[1]))
            if dataset
            else None,
            table=Path(table.download()) if table is not None else None,
            output=folder / "predictions.csv",
            bad_samples=bad_samples,
            top_classes=top_classes,
            settings=read_settings(),
        )
    page = written.with_suffix(".html")
    Deck("First predictions", page.read_text(encoding="ascii"))
    files = {written: "one row for each sample", page: "the first predictions, to open in a browser"}
    masks = get_mask_folder(written)
    if masks.is_dir():
        files[masks] = "the predicted masks, PNG files of class numbers"
    paths.print_local_files("predictions written to", files)
    return Predictions(table=output_file(FlyteFile, written), masks=output_folder(masks) if masks.is_dir() else None)

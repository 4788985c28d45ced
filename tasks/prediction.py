"""The prediction task: applies a trained model to a folder of images, a data set's test split, or new rows."""

from pathlib import Path
from typing import NamedTuple, Optional

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.task_bodies import prediction
from tasks import pods
from tasks.flyte import PLATFORM, PythonPickledFile, flyte_task, output_file, output_folder


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
    prediction.check_one_model_is_given(model_name, model_state, sidecar)
    model = (Path(model_state.download()), Path(sidecar.download())) if model_state and sidecar else None
    written = prediction.predict(
        PLATFORM,
        model=model,
        model_name=model_name,
        images=Path(images.download()) if images is not None else None,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        bad_samples=bad_samples,
        table=Path(table.download()) if table is not None else None,
        top_classes=top_classes,
    )
    masks = output_folder(written.masks) if written.masks is not None else None
    return Predictions(table=output_file(FlyteFile, written.table), masks=masks)

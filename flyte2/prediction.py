"""Model to predictions of a folder of images, a data set's test split, or new rows.

Run it with ``flyte run --local flyte2/prediction.py predict --model_name digits --dataset digits``.
"""

from dataclasses import dataclass

from flyte.io import Dir, File

from flyte2 import pods
from flyte2.files import check_paths_exist, download, output_file, output_folder
from flyte_ddp.task_bodies import prediction
from flyteplugins.ddp.platform import PLATFORM, task


@dataclass
class Predictions:
    """A table (CSV) with a row for each sample, and a folder of PNG files if the model predicts masks."""

    table: File
    masks: Dir | None


@task(pods.PREDICTION, retries=pods.RETRIES, timeout=pods.HOURS, report=True)
def predict(
    model_state: File | None = None,
    sidecar: File | None = None,
    model_name: str = "",
    images: Dir | None = None,
    dataset: str = "",
    data_source: str = "",
    test_dataset: str = "",
    bad_samples: int | None = None,
    table: File | None = None,
    top_classes: int = 5,
) -> Predictions:
    """Predict a folder of images, the test split of a data set, or new rows, with a trained model.

    Give the model as model_state and sidecar, or as model_name. Give images, a dataset or a table. Returns a table
    (CSV) with a row for each sample. A model for segmentation also returns the predicted masks as PNG files.

    Args:
        model_state: Weights (model.pt) that a training returned. Give sidecar too.
        sidecar: The sidecar (model.json) that the same training returned.
        model_name: Name of a model in the registry (FLYTE_DDP_REGISTRY), whose champion predicts.
        images: Folder of images to predict, such as s3://bucket/images.
        dataset: Data set whose test split is predicted, such as fashion_mnist or shards:s3://bucket/val.json.
        data_source: Where the files of dataset are, as in the hyperparameters. Empty for the usual places.
        test_dataset: Data set to predict in place of the tenth of dataset that is held out.
        bad_samples: How many images may be undecodable. None allows as many as in training.
        table: File of new rows, read by the model's user-defined prepare, such as new.csv or s3://bucket/new.parquet.
        top_classes: How many of the likeliest classes or labels a row lists, of more than 100. 0 for a column for each.
    """
    check_paths_exist(model_state=model_state, sidecar=sidecar, images=images, table=table)
    prediction.check_one_model_is_given(model_name, model_state, sidecar)
    written = prediction.predict(
        PLATFORM,
        model=(download(model_state), download(sidecar)) if model_state and sidecar else None,
        model_name=model_name,
        images=download(images) if images is not None else None,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        bad_samples=bad_samples,
        table=download(table) if table is not None else None,
        top_classes=top_classes,
    )
    return Predictions(output_file(written.table), output_folder(written.masks) if written.masks else None)

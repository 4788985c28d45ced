"""Trained model to predictions.

This command predicts a folder of images:

    pyflyte run workflows/prediction.py predict_wf --model_state model.pt --sidecar model.json --images FOLDER
"""

from typing import Optional

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from tasks.prediction import Predictions, predict_images


@workflow
def predict_wf(
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
    return predict_images(
        model_state=model_state,
        sidecar=sidecar,
        model_name=model_name,
        images=images,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        bad_samples=bad_samples,
        table=table,
        top_classes=top_classes,
    )

"""Trained model to predictions.

Example: pyflyte run workflows/prediction.py predict_wf --model_state model.pt --sidecar model.json --images FOLDER
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
) -> Predictions:
    """Classify a folder of images, or the test split of a data set, with a trained model and its sidecar.

    In: model_state and sidecar as training_wf returns them, or model_name, whose champion in the registry
    (FLYTE_DDP_REGISTRY) is taken; and either images, a folder such as s3://bucket/images, or
    a data set, such as fashion_mnist or shards:s3://bucket/val.json. So many images may be impossible to decode as
    bad_samples says, and if it is not given, as many as in training. Out: a table (CSV) with a row for each image.

    Args:
        model_state: Weights (model.pt) that a training returned. Give sidecar too, or give model_name instead of both.
        sidecar: The sidecar (model.json) that the same training returned.
        model_name: Name of a model in the registry, whose champion predicts. Empty if model_state is given.
        images: Folder of images to classify, such as s3://bucket/images. Give this or dataset.
        dataset: Data set whose test split is classified, as in the hyperparameters. Empty if images is given.
        data_source: Where the files of dataset are, as in the hyperparameters. Empty for the usual places.
        test_dataset: Data set to classify in place of the tenth of dataset that is held out.
        bad_samples: How many images may be impossible to decode. None allows as many as in training.
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
    )

"""Trained model to predictions.

Example: pyflyte run workflows/prediction.py predict_wf --model_state model.pt --sidecar model.json --images FOLDER
"""

from typing import Optional

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from tasks.prediction import predict_images


@workflow
def predict_wf(
    model_state: PythonPickledFile,
    sidecar: FlyteFile,
    images: Optional[FlyteDirectory] = None,
    dataset: str = "",
    data_source: str = "",
    test_dataset: str = "",
    bad_samples: Optional[int] = None,
) -> FlyteFile:
    """Classify a folder of images, or the test split of a data set, with a trained model and its sidecar."""
    return predict_images(
        model_state=model_state,
        sidecar=sidecar,
        images=images,
        dataset=dataset,
        data_source=data_source,
        test_dataset=test_dataset,
        bad_samples=bad_samples,
    )

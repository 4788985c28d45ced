"""Apply a trained model to a folder of images, a data set's test split, or new rows."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine import resources
from flyte_ddp.core.settings import read_settings
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import Platform
from flyte_ddp.pods.run_inputs import find_or_fetch_data_set
from flyte_ddp.release.promotion import download_champion
from flyte_ddp.task_bodies.release import open_registry


class PredictionFiles(NamedTuple):
    """The table of predictions (CSV), and the folder of predicted masks if the model predicts masks."""

    table: Path
    masks: Path | None


def check_one_model_is_given(model_name: str, *files: object) -> None:
    """Check that either the name of a model or both files of a run are given. Missing files are None.

    Raises:
        UserError: Neither is given, both are given, or one of two files.
    """
    given = [file is not None for file in files]
    if any(given) if model_name else not all(given):
        either = "the name of a model in the registry, or model_state and sidecar of a run"
        raise UserError(f"model_name={model_name!r}: give either {either}")


def predict(
    platform: Platform,
    *,
    model: tuple[Path, Path] | None,
    model_name: str,
    images: Path | None,
    dataset: str,
    data_source: str,
    test_dataset: str,
    bad_samples: int | None,
    table: Path | None,
    top_classes: int,
) -> PredictionFiles:
    """Predict a folder of images, the test split of a data set, or the rows of a file.

    Downloads the champion and the data set, if they are named. Writes the files into a new folder, and publishes a page
    of the first predictions. In a local run, prints the files.

    Args:
        platform: The platform that executes the task.
        model: The paths of model.pt and model.json, or None for the champion of ``model_name``.
        model_name: Name of a model in the registry.
        images: Folder of images to predict.
        dataset: Data set whose test split is predicted.
        data_source: Location of the files of ``dataset``.
        test_dataset: Data set to predict in place of the tenth of ``dataset`` that is held out.
        bad_samples: How many images may be undecodable. None allows as many as in training.
        table: File of new rows.
        top_classes: How many of the likeliest classes or labels a row lists.

    Raises:
        UserError: ``bad_samples`` is negative, or the model, the samples or the registry are missing or unfit.
    """
    from flyte_ddp.predict.predict import get_mask_folder, read_sample_setting, write_prediction_table

    if bad_samples is not None and bad_samples < 0:
        raise UserError(f"bad_samples={bad_samples}: must be at least 0")
    resources.check_expected_gpus(resources.count_gpus())
    with paths.make_dated_folder("predictions") as folder, TemporaryDirectory() as fetched:
        if model is None:
            model = download_champion(open_registry(model_name), Path(fetched))
        prepared = None
        if dataset:
            prepared = find_or_fetch_data_set(dataset, data_source, test_dataset, sample=read_sample_setting(model[1]))
        written = write_prediction_table(
            *model,
            images=images,
            dataset=prepared,
            table=table,
            output=folder / "predictions.csv",
            bad_samples=bad_samples,
            top_classes=top_classes,
            settings=read_settings(),
        )
    page = written.with_suffix(".html")
    platform.publish_page("First predictions", page.read_text(encoding="ascii"))
    files = {written: "one row for each sample", page: "the first predictions, to open in a browser"}
    masks = get_mask_folder(written)
    if masks.is_dir():
        files[masks] = "the predicted masks, PNG files of class numbers"
    paths.print_local_files("predictions written to", files)
    return PredictionFiles(written, masks if masks.is_dir() else None)

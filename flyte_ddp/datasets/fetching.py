"""Find a data set by its name, compute its fingerprint, and fetch it into a prepared folder."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flyte_ddp.catalog import DATASET_FORMS, encoded_kind
from flyte_ddp.datasets.custom import CustomSet
from flyte_ddp.datasets.encoded_set import prepare_encoded_set, read_encoded_set
from flyte_ddp.datasets.identity import digest_lines
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.prepared_folder import read_description, write_prepared_set
from flyte_ddp.datasets.published import DATASETS, PublishedSet
from flyte_ddp.errors import UserError, print_to_stderr, unknown_name_error
from flyte_ddp.files import DISK_FULL
from flyte_ddp.progress import MODES, Progress


def find_dataset(dataset: str, source: str) -> PublishedSet | CustomSet | None:
    """Return a data set's definition, None for encoded images, without importing it; UserError for an unknown name."""
    if encoded_kind(dataset):
        if source:
            problem = f"dataset={dataset!r} says where its data are"
            raise UserError(f"data_source={source!r}: {problem}; leave data_source empty")
        return None
    if ":" in dataset:
        return CustomSet(dataset)
    if dataset not in DATASETS:
        raise unknown_name_error("dataset", dataset, [*DATASETS, *DATASET_FORMS])
    return DATASETS[dataset]


def fingerprint(dataset: str, source: str, test_dataset: str = "") -> str:
    """Return a text, fit for a file name, that changes with the data; it may ask servers. UserError for unfit data."""
    definition = find_dataset(dataset, source)
    if definition is not None:
        return definition.fingerprint(source)
    # The names hold the addresses. The prepared folder refers to the addresses, so another address is another folder.
    identity = digest_lines([dataset, test_dataset, read_encoded_set(dataset, test_dataset).digest])
    return f"{encoded_kind(dataset)}-{identity[:16]}"


def is_quickly_prepared(dataset: str) -> bool:
    """Return whether :func:`fetch` gets only an index, a list of files, or nothing."""
    return bool(encoded_kind(dataset)) or dataset == "digits"


def fetch(
    dataset: str, source: str, folder: Path, *, test_dataset: str = "", sample: str = "", progress: str = "auto"
) -> Path:
    """Download a data set, verify it and write it into ``folder``, which appears complete or not at all.

    Does nothing if ``folder`` holds this data set of this source, unchanged since; replaces one that is damaged, and
    says so. Does not notice changed content of the same source: put the :func:`fingerprint` into the folder's
    name. Calls the code of a ``package.module:callable``, whose errors are not caught.

    Args:
        dataset: a name in ``DATASETS``, ``package.module:callable``, or ``shards:...``, ``stream:...`` or
            ``image_folder:...``, of which only the index or the list of files is fetched, and a first sample.
        source: the hyperparameter ``data_source``.
        folder: destination; missing parents are created.
        test_dataset: shards or folder of images to test on.
        sample: the hyperparameter; if it is set, samples of shards need no image and no label.
        progress: auto, bar, lines or off; printed to stderr.

    Returns the absolute path of ``folder``. Raises a UserError for an unknown data set, unusable data, or a folder that
    holds something else or cannot be written.
    """
    if progress not in MODES:
        raise unknown_name_error("progress", progress, MODES)
    folder = Path(folder).absolute()
    requested = {"data_source": source, "test_dataset": test_dataset}
    if holds_usable_set(folder, dataset, requested):
        return folder
    with make_workspace_beside(folder) as workspace:
        definition = find_dataset(dataset, source)
        if definition is not None and test_dataset:
            raise UserError(
                f"test_dataset={test_dataset!r}: dataset={dataset!r} has its own test split; leave it empty"
            )
        try:
            if definition is None:
                prepare_encoded_set(dataset, test_dataset, workspace, decoded_by_user=bool(sample))
            else:
                data, called = definition.load(source, workspace, Progress(progress))
                write_prepared_set(data, workspace, {"source": called, **requested})
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise UserError(f"{folder}: the disk is full; free some space, or choose another folder") from error
        try:
            workspace.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            # The folder is damaged, or another process has just prepared it. Only a damaged one is replaced.
            if not holds_usable_set(folder, dataset, requested):
                with make_workspace_beside(folder) as damaged:
                    folder.rename(damaged / folder.name)
                    workspace.rename(folder)
    return folder


def holds_usable_set(folder: Path, dataset: str, requested: dict[str, str]) -> bool:
    """Return whether ``folder`` holds this data set in this release's format; UserError if it holds another one."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    description = read_description(folder)
    wanted = {"dataset": dataset, **requested}
    held = {"dataset": description.get("name"), **{key: description.get(key, "") for key in requested}}
    if held != wanted:
        held_text, wanted_text = (", ".join(f"{key}={each[key]!r}" for key in wanted) for each in (held, wanted))
        raise UserError(f"{folder}: holds {held_text}, not {wanted_text}; choose another folder or delete this one")
    if problem := find_problem(folder):
        print_to_stderr(f"{problem.partition(';')[0]}; it is fetched again")
    return not problem


def is_whole(folder: Path) -> bool:
    """Return whether a prepared data set can be opened and has this release's format."""
    return not find_problem(folder)


def find_problem(folder: Path) -> str:
    try:
        open_prepared(folder)
    except (UserError, OSError) as error:
        return str(error)
    return ""


@contextmanager
def make_workspace_beside(folder: Path) -> Iterator[Path]:
    """Yield a new temporary folder on the same file system; remove it after the block, unless it was renamed."""
    # Not tempfile.mkdtemp, whose folders other users cannot read.
    workspace = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        workspace.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose a folder that can") from error
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)

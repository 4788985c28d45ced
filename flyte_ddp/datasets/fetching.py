"""From a data set's name to its fingerprint, and to a prepared folder."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flyte_ddp.catalog import DATASET_FORMS, encoded_kind
from flyte_ddp.datasets.arrays import FORMAT, read_description, total_bytes, write_arrays
from flyte_ddp.datasets.custom import CustomSet
from flyte_ddp.datasets.encoded_set import look_up, write_encoded_set
from flyte_ddp.datasets.identity import digest_of
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.published import PublishedSet
from flyte_ddp.datasets.published_sets import DATASETS
from flyte_ddp.errors import UserError, unknown_name
from flyte_ddp.files import DISK_FULL
from flyte_ddp.progress import MODES, Progress, size


def find_dataset(dataset: str, source: str) -> PublishedSet | CustomSet | None:
    """Return the data set of that name, or the user's own; None for one of encoded images, which takes no source."""
    if encoded_kind(dataset):
        if source:
            raise UserError(
                f"data_source={source!r}: dataset={dataset!r} says where its data are; leave data_source empty"
            )
        return None
    if ":" in dataset:
        return CustomSet(dataset)
    if dataset not in DATASETS:
        raise unknown_name("dataset", dataset, [*DATASETS, *DATASET_FORMS])
    return DATASETS[dataset]


def fingerprint(dataset: str, source: str, test_dataset: str = "") -> str:
    """Return a short text, also fit for a file name, that changes exactly when the data's content does.

    Downloads no data: published data sets are named by their digests, of a mirror only its ``SHA256SUMS`` is read. For
    ``package.module:callable`` it covers the callable's source and the source's content, for shards their index and
    its address, for a folder of images its address and the list of its files, which are read for that.
    Raises a UserError for an unknown data set, or a source that is not there.
    """
    found = find_dataset(dataset, source)
    if found is not None:
        return found.fingerprint(source)
    # With the addresses, because what is prepared refers to them.
    identity = digest_of([dataset, test_dataset, look_up(dataset, test_dataset).digest])
    return f"{encoded_kind(dataset)}-{identity[:16]}"


def is_quickly_prepared(dataset: str) -> bool:
    """Return whether :func:`fetch` has little to download: an index, a list of files, or nothing."""
    return bool(encoded_kind(dataset)) or dataset == "digits"


def fetch(dataset: str, source: str, folder: Path, *, test_dataset: str = "", progress: str = "auto") -> Path:
    """Download a data set, check it and put it into ``folder``, which appears whole or not at all.

    Args:
        dataset: a name of ``DATASETS``, ``package.module:callable``, or ``shards:...`` or ``image_folder:...``, of
            which only the index or the list of files is fetched.
        source: a directory or a file://, s3:// or https:// mirror, which then is the only place that is asked; empty
            for the usual places: a copy of the operating system's, then the public addresses.
        folder: where to put it; if it holds this data set of this source already, and whole, nothing is done, so
            name it by the :func:`fingerprint` where the source can change.
        test_dataset: of shards and folders of images, what to test on.
        progress: auto, bar, lines or off; on stderr.

    Returns:
        The absolute path of ``folder``, for :func:`flyte_ddp.datasets.open_prepared`.

    Raises:
        UserError: an unknown data set; a source that is unreachable, empty, damaged or altered; shards whose first
            sample has no image or no label; a full disk; a folder that holds something else or cannot be written.
    """
    if progress not in MODES:
        raise unknown_name("progress", progress, MODES)
    folder = Path(folder).absolute()
    asked = {"data_source": source, "test_dataset": test_dataset}
    if is_prepared(folder, dataset, asked):
        return folder
    with workspace_beside(folder) as workspace:
        needed, found = "", find_dataset(dataset, source)
        try:
            if found is None:
                data = look_up(dataset, test_dataset)
                data.refuse_unreadable()
                write_encoded_set(data, workspace, asked)
            else:
                arrays, origin = found.load(source, workspace, Progress(progress))
                needed = f"{dataset} needs {size(total_bytes(arrays))}, "
                write_arrays(arrays, workspace, {"source": origin, **asked})
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            free = size(shutil.disk_usage(workspace).free)
            raise UserError(
                f"{folder}: the disk is full ({needed}{free} are free there); free some space or choose another folder"
            ) from error
        try:
            workspace.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            if not is_prepared(folder, dataset, asked):  # else another process was faster, with the same data
                with workspace_beside(folder) as damaged:
                    folder.rename(damaged / folder.name)
                    workspace.rename(folder)
    return folder


def is_prepared(folder: Path, dataset: str, asked: dict[str, str]) -> bool:
    """Return whether the folder holds this data set, and whole; raise a UserError if it holds something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    description = read_description(folder)
    held, held_source = description.get("name"), {key: description.get(key, "") for key in asked}
    if (held, held_source) != (dataset, asked):
        found, wanted = (", ".join(f"{key}={value!r}" for key, value in made.items()) for made in (held_source, asked))
        raise UserError(
            f"{folder}: holds {held!r} of {found} and not {dataset!r} of {wanted}; choose another folder or delete it"
        )
    return is_whole(folder)


def is_whole(folder: Path) -> bool:
    """Return whether a prepared data set can be opened, all of it, and is of this code's format."""
    try:
        open_prepared(folder)
        return FORMAT.items() <= read_description(folder).items()
    except (UserError, OSError):
        return False


@contextmanager
def workspace_beside(folder: Path) -> Iterator[Path]:
    """Give a temporary folder on the same file system, which is removed in the end unless it was renamed."""
    workspace = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")  # mkdtemp's are for one user alone
    try:
        workspace.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose a folder that can") from error
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)

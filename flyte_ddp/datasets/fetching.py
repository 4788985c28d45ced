"""Find a data set by name, compute a fingerprint of the data, and fetch the data into a prepared folder."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

from flyte_ddp.catalog import DATASET_NAMES, find_kind
from flyte_ddp.core.errors import UserError, print_to_stderr, unknown_name_error
from flyte_ddp.core.files import DISK_FULL
from flyte_ddp.core.progress import MODES, Progress
from flyte_ddp.datasets.custom import CustomSet
from flyte_ddp.datasets.prepared import open_prepared
from flyte_ddp.datasets.prepared_folder import DESCRIPTION, VERIFIED, read_description
from flyte_ddp.datasets.prepared_set import Definition, write_prepared_set
from flyte_ddp.datasets.published import DATASETS


def find_dataset(dataset: str, source: str, test_dataset: str = "", sample: str = "") -> Definition:
    """Return the definition of a data set. User code is not imported.

    Raises:
        UserError: The name is unknown. Also if encoded images have a ``data_source``, or others a ``test_dataset``.
    """
    if set_class := find_kind(dataset).set_class:
        if source:
            problem = f"dataset={dataset!r} already contains the address of its data"
            raise UserError(f"data_source={source!r}: {problem}; leave data_source empty")
        found: Definition = resolve_name(set_class).define(dataset, test_dataset, decoded_by_user=bool(sample))
        return found
    if ":" not in dataset and dataset not in DATASETS:
        raise unknown_name_error("dataset", dataset, DATASET_NAMES)
    if test_dataset:
        problem = f"dataset={dataset!r} has its own test split"
        raise UserError(f"test_dataset={test_dataset!r}: {problem}; leave test_dataset empty")
    return CustomSet(dataset) if ":" in dataset else DATASETS[dataset]


def fingerprint(dataset: str, source: str, test_dataset: str = "") -> str:
    """Return a text that changes with the data and can be part of a file name.

    The text of a published set never changes. The text of encoded images also changes with the addresses. May send
    requests to servers with retries, or download a file. For a user-defined callable, puts the working directory first
    on ``sys.path``.

    Args:
        dataset: The name of the data set, as for :func:`fetch`.
        source: The hyperparameter ``data_source``.
        test_dataset: Shards or a folder of images to test on. Only for encoded images.

    Raises:
        UserError: The data set is unknown, unreadable or unfit.
    """
    return find_dataset(dataset, source, test_dataset).fingerprint(source)


def needs_no_download(dataset: str) -> bool:
    """Return whether :func:`fetch` downloads at most an index, first samples or a list of files."""
    return find_kind(dataset).encoded or dataset == "digits"


def fetch(
    dataset: str, source: str, folder: Path, *, test_dataset: str = "", sample: str = "", progress: str = "auto"
) -> Path:
    """Download a data set, verify the data and write a prepared folder.

    The folder appears complete or not at all. If ``folder`` already holds this data set of this source, undamaged,
    nothing is done. A damaged folder is replaced, with a message on stderr, unless ``dataset.json`` or
    ``verified.json`` is missing. Changed content of the same source is not noticed, so put the :func:`fingerprint` into
    the folder's name.

    A ``package.module:callable`` is imported, with the working directory on ``sys.path``, and called. Exceptions of
    user code pass through. Waits for user code are then limited by FLYTE_DDP_TIMEOUT in this process.

    Args:
        dataset: A name in ``DATASETS``, ``package.module:callable``, ``shards:...``, ``stream:...`` or
            ``image_folder:...``. Of shards only the index and a first sample are fetched, of image folders only the
            list of files.
        source: The hyperparameter ``data_source``.
        folder: The destination. Missing parents are created.
        test_dataset: Shards or a folder of images to test on. Only for encoded images.
        sample: The hyperparameter ``sample``. If set, samples of shards need no image and no label.
        progress: auto, bar, lines or off. Progress is printed to stderr.

    Returns:
        The absolute path of ``folder``.

    Raises:
        UserError: The data set is unknown, unreachable or unusable, or the disk is full. Also if the folder holds
            something else, or cannot be created.
        UserCodeError: Reading an item of a user-defined set failed.
        MachineError: An item did not arrive within FLYTE_DDP_TIMEOUT.
        OSError: Writing failed for another reason.
    """
    if progress not in MODES:
        raise unknown_name_error("progress", progress, MODES)
    folder = Path(folder).absolute()
    requested = {"data_source": source, "test_dataset": test_dataset}
    if holds_usable_set(folder, dataset, requested):
        return folder
    with make_workspace_beside(folder) as workspace:
        definition = find_dataset(dataset, source, test_dataset, sample)
        try:
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
            # The folder is damaged, or another process has just prepared it. Only a damaged folder is replaced.
            if not holds_usable_set(folder, dataset, requested):
                with make_workspace_beside(folder) as damaged:
                    folder.rename(damaged / folder.name)
                    workspace.rename(folder)
    return folder


def holds_usable_set(folder: Path, dataset: str, requested: dict[str, str]) -> bool:
    """Return whether ``folder`` holds this data set, undamaged and in this release's format. Prints damage to stderr.

    If the folder is missing or empty, return False. ``requested`` holds ``data_source`` and ``test_dataset``. Files
    that changed since the last check are hashed.

    Raises:
        UserError: The folder holds another data set or other files.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        description = read_description(folder)
    except UserError as error:
        if not all((folder / name).exists() for name in (DESCRIPTION, VERIFIED)):  # perhaps files of the user
            raise
        problem = str(error)
    else:
        wanted = {"dataset": dataset, **requested}
        held = {"dataset": description.name, **{key: getattr(description, key) for key in requested}}
        if held != wanted:
            held_text, wanted_text = (", ".join(f"{key}={each[key]!r}" for key in wanted) for each in (held, wanted))
            raise UserError(f"{folder}: holds {held_text}, not {wanted_text}; choose another folder or delete this one")
        problem = find_problem(folder)
    if problem:
        print_to_stderr(f"{problem.partition(';')[0]}; it is fetched again")
    return not problem


def is_whole(folder: Path) -> bool:
    """Return whether a prepared data set has this release's format and can be opened.

    Hashes files that have changed.
    """
    return not find_problem(folder)


def find_problem(folder: Path) -> str:
    """Return why a prepared folder cannot be opened, or "" if it can be."""
    try:
        open_prepared(folder)
    except (UserError, OSError) as error:
        return str(error)
    return ""


@contextmanager
def make_workspace_beside(folder: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside ``folder``, on the same file system. Creates missing parent folders.

    After the block, the hidden folder is deleted unless the block renamed it. The parent folders remain.

    Raises:
        UserError: The folder cannot be created.
    """
    # tempfile.mkdtemp would create a folder that other users cannot read.
    workspace = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        workspace.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose a writable folder") from error
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)

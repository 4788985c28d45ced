"""Identity of a training run, and the name of its folder. Needs no torch."""

import hashlib
import re
from pathlib import Path

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.runs.checkpoint import Identity
from flyte_ddp.core.user_code.digest import format_package_versions, library_digest
from flyte_ddp.core.user_code.source import compute_user_code_digest
from flyte_ddp.datasets.prepared_folder import read_description
from flyte_ddp.models import initial_weights


def run_name(hp: Hyperparameters, data_fingerprint: str, trigger: str = "") -> str:
    """Return the name of a run, such as ``fashion_mnist-small_cnn-1f0c5a7e9b3d``.

    The parts are data set, model, and a digest of the run's identity. Reads the user's code and the file ``init_from``.
    For a remote ``init_from``, queries the server, and may download the file.

    Args:
        hp: The hyperparameters.
        data_fingerprint: A digest of the data set's origin, from ``fetching.fingerprint``.
        trigger: Any text that distinguishes otherwise equal runs, such as a schedule's kickoff time.

    Raises:
        UserError: A module or ``init_from`` cannot be read.
    """
    parts = (hp.to_json(), data_fingerprint, *model_identity(hp).values(), trigger)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    data = hp.dataset.replace(":", ".")
    if prefix := hp.data_kind.prefix:  # only the last part of an address
        last = hp.dataset.removeprefix(f"{prefix}:").rstrip("/").rpartition("/")[2].removesuffix(".json")
        data = f"{prefix}.{re.sub(r'[^A-Za-z0-9_.-]+', '_', last)[:40]}"
    return "-".join((data, hp.model.replace(":", "."), digest))


def checkpoint_identity(hp: Hyperparameters, data: Path) -> Identity:
    """Return the identity that a checkpoint must have for a run to resume from it.

    ``data`` is the folder of the prepared data set. The number of ranks is not part of the identity. For a remote
    ``init_from``, queries the server, and may download the file.

    Raises:
        UserError: A module or ``init_from`` cannot be read.
    """
    values = {name: value for name, value in hp.to_dict().items() if name != "num_ranks"}
    return Identity(values, data=read_description(data).digest, **model_identity(hp))


def model_identity(hp: Hyperparameters) -> dict[str, str]:
    """Return digests of the library, the user's code and ``init_from``, and the releases of libraries.

    The keys are fields of Identity. The releases are those of torch and other libraries that affect rounding. For a
    remote ``init_from``, asks the server for the ETag or the time of change. If the server gives neither, downloads the
    file.

    Raises:
        UserError: A module or ``init_from`` cannot be read.
    """
    own_code = hp.list_user_callables("dataset")  # the data set's code counts in the data's fingerprint
    weights = catalog.find_torchvision_weights(hp.model, hp.init_from)
    return {
        "code": library_digest(),
        "user_code": compute_user_code_digest(*own_code) if own_code else "",
        "initial_weights": initial_weights.hash_initial_weights(hp.init_from, weights),
        "releases": format_package_versions(),
    }


def check_known_image_size(hp: Hyperparameters) -> None:
    """Raise UserError if the model does not accept the data set's images.

    Does nothing if the size of the images is not known yet.
    """
    encoded = catalog.ENCODED_SIDE if hp.data_kind.encoded else 0
    chosen = catalog.choose_image_side(hp.image_size, catalog.find_torchvision_weights(hp.model, hp.init_from))
    if side := chosen or catalog.DATASETS.get(hp.dataset, encoded):
        catalog.check_image_size(hp.model, side, side)

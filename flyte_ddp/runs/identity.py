"""What identifies a training run: the name of its folder, which contains the cache key. Needs no torch."""

import hashlib
import re
from pathlib import Path

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared_folder import read_description
from flyte_ddp.models import initial_weights
from flyte_ddp.runs.checkpoint import Identity
from flyte_ddp.user_code.digest import library_digest, list_releases
from flyte_ddp.user_code.source import user_source_digest


def run_name(hp: Hyperparameters, data_fingerprint: str, trigger: str = "") -> str:
    """Return a name such as ``fashion_mnist-small_cnn-1f0c5a7e9b3d``: data set, model, digest of the run's identity.

    ``trigger`` is any text that makes an otherwise equal run another run, such as a schedule's kickoff time.
    Reads the user's code, and the file ``init_from``, as :func:`model_identity` does.
    """
    parts = (hp.to_json(), data_fingerprint, *model_identity(hp).values(), trigger)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    kind, _, address = hp.dataset.partition(":")
    data = hp.dataset.replace(":", ".")
    if catalog.encoded_kind(hp.dataset):  # of an address only the last part
        last = address.rstrip("/").rpartition("/")[2].removesuffix(".json")
        data = f"{kind}.{re.sub(r'[^A-Za-z0-9_.-]+', '_', last)[:40]}"
    return "-".join((data, hp.model.replace(":", "."), digest))


def checkpoint_identity(hp: Hyperparameters, data: Path) -> Identity:
    """Return the identity that a checkpoint must have for a run to resume from it, whatever the number of ranks."""
    values = {name: value for name, value in hp.to_dict().items() if name != "num_ranks"}
    return Identity(values, data=read_description(data)["digest"], **model_identity(hp))


def model_identity(hp: Hyperparameters) -> dict[str, str]:
    """Return digests of the library, the user's own code and ``init_from``, and the releases of torch and the like.

    Keys are fields of Identity. Asks the server of a remote ``init_from`` for its ETag or time of change; without both
    downloads the file. Raises UserError if a module or ``init_from`` cannot be read.
    """
    own_code = hp.own_code("dataset")  # whose code counts in the data's fingerprint
    weights = catalog.find_weights(hp.model, hp.init_from)
    return {
        "code": library_digest(),
        "user_code": user_source_digest(*own_code) if own_code else "",
        "initial_weights": initial_weights.identify_weights(hp.init_from, weights),
        "releases": list_releases(),
    }


def check_known_image_size(hp: Hyperparameters) -> None:
    """Raise UserError if the model cannot take the data set's images; do nothing if their size is not known yet."""
    encoded = catalog.ENCODED_SIDE if catalog.encoded_kind(hp.dataset) else 0
    chosen = catalog.choose_side(hp.image_size, catalog.find_weights(hp.model, hp.init_from))
    if side := chosen or catalog.DATASETS.get(hp.dataset, encoded):
        catalog.check_image_size(hp.model, side, side)

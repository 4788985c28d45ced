"""torchvision's files of pretrained weights: fetch and verify one, and adapt its names to the models that are built."""

import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flyte_ddp import storage
from flyte_ddp.datasets.downloading import download_verified
from flyte_ddp.files import file_digest, replace_file
from flyte_ddp.progress import Progress
from flyte_ddp.torchvision_weights import ADDRESS, PretrainedWeights

AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # heads of GoogLeNet and Inception v3, which models here do not have
OLD_DENSE_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")


def fetch_pretrained_weights(weights: PretrainedWeights, progress: Progress, *, init_from: str, mirror: str) -> Path:
    """Return the path of torchvision's file of these weights, whose SHA-256 begins as the end of its name says.

    Uses torch hub's cache folder. Downloads from ``mirror``, a folder or address, or torchvision's, up to 4 times.
    Raises UserError if the file cannot be fetched or written.
    """
    path = torch_hub_folder() / "checkpoints" / weights.file
    with suppress(OSError):
        if file_digest(path).startswith(weights.digest_start):
            return path
    address = storage.join(mirror or ADDRESS, weights.file)
    verified = partial(download_verified, name=weights.file, algorithm="sha256", digests=[weights.digest_start])
    try:
        with replace_file(path) as file:
            storage.retry(address, partial(verified, file=file, progress=progress), progress.print_note)
    except storage.UnavailableError as error:
        raise error.to_user_error(
            f"init_from={init_from!r}: cannot get {address}: {error}; check the network, or set FLYTE_DDP_WEIGHTS to a "
            "folder or mirror that holds it"
        ) from None
    return path


def torch_hub_folder() -> Path:
    """Return the folder that torch.hub.get_dir() returns in a new process, without importing torch."""
    home = os.environ.get("TORCH_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torch"
    return Path(home).expanduser() / "hub"


def adapt_pretrained_names(state_dict: dict[str, Any]) -> None:
    """Rename DenseNet's layers as torchvision names them today, and remove auxiliary heads, in place."""
    for name in [*state_dict]:
        value = state_dict.pop(name)  # and put back, so that the order of names stays
        if not name.startswith(AUXILIARY):
            state_dict[OLD_DENSE_NAME.sub(r"\1\2.", name)] = value

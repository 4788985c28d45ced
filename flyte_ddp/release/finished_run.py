"""A finished run, in a folder or at an address, whose model is released without training again."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import SIDECAR, WEIGHTS, replace_file
from flyte_ddp.core.models.sidecar import parse_sidecar
from flyte_ddp.pods.platforms import is_in_pod


@dataclass(frozen=True)
class FinishedRun:
    """The address of a finished run, with hyperparameters and digests from the run's sidecar."""

    address: str  # of the run's folder
    hp: Hyperparameters
    data: str  # SHA-256 of the prepared data set
    weights: str  # SHA-256 of model.pt

    @classmethod
    def read(cls, address: str) -> Self:
        """Read the sidecar of a finished run, with retries.

        Raises:
            UserError: The folder has no sidecar, the sidecar cannot be read, is damaged, or has rejected
                hyperparameters. In a pod, also for an address that is not remote.
        """
        if is_in_pod() and "://" not in address:
            fix = "copy the folder to object storage, and give its address, such as s3://bucket/runs/NAME"
            raise UserError(f"run={address!r}: is a folder of your machine, which pods cannot reach; {fix}")
        sidecar = parse_sidecar(read_run_file(address, SIDECAR, storage.read_file), f"run={address!r}: {SIDECAR}")
        try:
            hp = Hyperparameters.from_json(json.dumps(sidecar.hyperparameters))
        except UserError as error:
            problem = f"{SIDECAR} has a hyperparameter that this release of flyte-ddp rejects: {error.message}"
            raise UserError(f"run={address!r}: {problem}; give the folder of another run, or train again") from None
        return cls(address, hp, sidecar.digests.data, sidecar.digests.weights)

    def check_weights(self) -> None:
        """Raise UserError if model.pt cannot be read, or has another SHA-256 than the sidecar says. Reads the file."""
        digest = read_run_file(self.address, WEIGHTS, storage.hash_file)
        if digest != self.weights:
            raise UserError(
                f"run={self.address!r}: {WEIGHTS} has the SHA-256 {digest[:12]}..., and {SIDECAR} describes "
                f"{self.weights[:12]}...; both files must be of the same run; copy them again from the run's folder"
            )

    def check_hyperparameters(self, given: Hyperparameters) -> None:
        """Raise UserError if a field that ``given`` sets (to another value than the default) differs from the run's."""
        for name, value in json.loads(given.json()).items():
            if (trained := getattr(self.hp, name)) != value:
                raise UserError(
                    f"hp: has {name}={value!r}, but the model of run={self.address!r} was trained with {trained!r}; "
                    "omit hp to use the run's hyperparameters"
                )

    def check_data(self, description: Path) -> None:
        """Raise UserError unless a prepared data set has the digest of the run's data.

        ``description`` is the path of the data set's dataset.json.
        """
        today = str(json.loads(description.read_bytes())["digest"])
        if today != self.data:
            named = f"dataset={self.hp.dataset!r}"
            named += f", data_source={self.hp.data_source!r}" if self.hp.data_source else ""
            raise UserError(
                f"run={self.address!r}: was trained on data with the SHA-256 {self.data[:12]}..., and today's data of "
                f"{named} have {today[:12]}...; a finished run is judged on the test split of its own data; restore "
                "that data, or omit run to train on today's data"
            )

    def download(self, folder: Path) -> None:
        """Download model.pt and model.json into a folder, replacing existing files.

        Raises UserError if a file is missing or cannot be read.
        """
        for name in (WEIGHTS, SIDECAR):
            with replace_file(folder / name, durable=False) as file:
                read_run_file(self.address, name, partial(storage.download_file, file=file))


def read_run_file(run: str, name: str, read: Any) -> Any:
    """Return ``read(address)`` for the file ``name`` in the run's folder at ``run``, called with retries.

    Raises UserError if the file is missing or cannot be read.
    """
    try:
        return storage.call_with_retries(storage.join_address(run, name), read)
    except storage.MissingError:
        fix = "give the folder of a finished run, which the training prints at its end"
        raise UserError(f"run={run!r}: has no {name}; {fix}") from None
    except storage.UnavailableError as failure:
        problem = f"{name} cannot be read: {failure}; check the address and the rights"
        raise failure.to_user_error(f"run={run!r}: {problem}") from None

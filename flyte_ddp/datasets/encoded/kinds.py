"""The kinds of data sets of encoded images, by the word before the address."""

from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets.encoded.encoded_set import EncodedSet
from flyte_ddp.datasets.encoded.image_folder import ImageFolderSet
from flyte_ddp.datasets.encoded.shard_set import ShardSet, StreamSet
from flyte_ddp.storage.identity import digest_lines

KINDS: dict[str, type[EncodedSet]] = {"shards": ShardSet, "stream": StreamSet, "image_folder": ImageFolderSet}


def find_encoded_class(dataset: str) -> type[EncodedSet] | None:
    """Return the class of a data set such as ``shards:ADDRESS``, or None for other names."""
    kind, _, address = dataset.partition(":")
    return KINDS.get(kind) if address else None


@dataclass(frozen=True)
class EncodedSource:
    """The addresses of a data set of encoded images. Images are not copied."""

    kind: type[EncodedSet]
    dataset: str  # hyperparameters
    test_dataset: str
    decoded_by_user: bool = False  # else the first samples must have an image and a label

    def fingerprint(self, source: str) -> str:
        """Return a text that changes with the addresses and the lists of the images."""
        del source  # is empty
        # The names contain the addresses. A prepared folder refers to addresses, so another address needs another
        # folder.
        digest = self.kind.read(self.dataset, self.test_dataset).digest
        identity = digest_lines([self.dataset, self.test_dataset, digest])
        return f"{self.dataset.partition(':')[0]}-{identity[:16]}"

    def load(self, source: str, workspace: Path, progress: Progress) -> tuple[EncodedSet, str]:
        """Read the lists of the images, and return the data set and its name.

        Raises:
            UserError: The data cannot be read or are unfit.
        """
        del source, workspace, progress  # only lists are read
        data = self.kind.read(self.dataset, self.test_dataset)
        if not self.decoded_by_user:
            data.check_first_samples()
        return data, self.dataset

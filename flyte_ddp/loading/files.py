"""Images for training from files: one for each sample, on a disk or in an object store."""

from __future__ import annotations

from flyte_ddp import storage
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.errors import UserError
from flyte_ddp.loading.encoded import Encoded
from flyte_ddp.sampling import Indices


class FileImages:
    """Reads the images of a list."""

    def __init__(self, images: ImageList) -> None:
        self.images = images

    def read(self, sample: int) -> Encoded:
        """An image, encoded, and its label.

        Raises:
            UserError: it cannot be read, or is not the one that was listed.
        """
        address = storage.join(self.images.address, self.images.names[sample])
        try:
            content = storage.with_retries(address, [address], storage.read)
        except storage.AllFailedError as error:
            failure = next(iter(error.failures.values()))
            raise UserError(f"image {address}: cannot be read ({failure}), though it was there when listed") from None
        if len(content) != self.images.sizes[sample]:
            raise UserError(
                f"image {address}: has {len(content):,} bytes, and {self.images.sizes[sample]:,} when it was listed; "
                "run again to list what is there now"
            )
        return Encoded(content, int(self.images.labels[sample]), f"image {address}")

    def expect(self, samples: Indices) -> None:
        """Each image is fetched when it is to be decoded."""

    def close(self) -> None:
        """No file stays open."""

    def neighbours(self, sample: int) -> range:
        """All files."""
        del sample
        return range(len(self.images.names))

"""Read images for training from single files, on a disk or in object storage."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flyte_ddp import storage
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.loading.encoded import Encoded, ImageReader

CONNECTIONS = 32  # parallel requests of one rank: a request takes tens of milliseconds, nearly all of it waiting


class FileReader(ImageReader):
    """Reads the images of an ImageList. Keeps no copies."""

    def __init__(self, images: ImageList) -> None:
        self.images = images
        remote = storage.local_path(images.address) is None
        self.pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="reader") if remote else None

    def start_read(self, sample: int) -> Callable[[], Encoded]:
        """Return a function that returns the sample. The read of a remote image starts at once, in a thread."""
        return super().start_read(sample) if self.pool is None else self.pool.submit(self.read, sample).result

    def read(self, sample: int) -> Encoded:
        """Read an image file whole, with retries. Raises a UserError if it cannot be read."""
        content = self.images.read(sample)
        name, label = str(self.images.names[sample]), int(self.images.labels[sample])
        return Encoded(content, label, f"image {self.images.address_of(sample)}", name)

    def close(self) -> None:
        """Cancel the reads that have not started."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

"""Images for training from files: one for each sample, on a disk or in an object store."""

from concurrent.futures import Future, ThreadPoolExecutor

from flyte_ddp import storage
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.loading.encoded import Encoded, Reader

CONNECTIONS = 32  # requests of one rank at the same time: each takes tens of milliseconds, of which it works for one


class FileImages(Reader):
    """Reads the images of a list, of which no copies are kept."""

    def __init__(self, images: ImageList) -> None:
        self.images = images
        remote = storage.local_path(images.address) is None
        self.pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="reader") if remote else None

    def begin(self, sample: int) -> Future[Encoded] | None:
        """Begin to read an image; return None for one on this machine, which is read when it is decoded."""
        return self.pool.submit(self.read, sample) if self.pool is not None else None

    def read(self, sample: int) -> Encoded:
        """Return an image, encoded, and its label."""
        content = self.images.read(sample)
        name, label = str(self.images.names[sample]), int(self.images.labels[sample])
        return Encoded(content, label, f"image {self.images.address_of(sample)}", name)

    def close(self) -> None:
        """Cancel the requests that have not been made."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

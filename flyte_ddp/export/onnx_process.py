"""A process that computes the logits of an ONNX and cannot import torch; this file is also its program."""

import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray


class OnnxProcess:
    """A process that runs the ONNX ``model`` on CPU ``threads``; it starts at once, and is killed with the context."""

    def __init__(self, model: Path, threads: int) -> None:
        self.connection, other = Pipe()
        command = [sys.executable, "-I", __file__, str(model), str(threads), str(other.fileno())]
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  # no pipe, which would fill
        self.process = subprocess.Popen(command, pass_fds=[other.fileno()], stderr=self.stderr)
        other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.stderr.close()

    def compute_logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Send images [n, H, W, C] to the process, and return their logits [n, classes]; waits without a timeout.

        Raises OSError if the process has ended: the text is the last error on its stderr.
        """
        try:
            self.connection.send(images)
            logits: NDArray[np.float32] = self.connection.recv().astype(np.float32)
        except (EOFError, ConnectionError):
            self.process.wait()
            self.stderr.seek(0)
            lines = self.stderr.read().decode(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line]
            raise OSError(f"onnxruntime cannot run it: {errors[-1][:200] if errors else 'it was killed'}") from None
        return logits


def serve_logits(model: str, threads: str, descriptor: str) -> None:
    """Receive batches of images on a connection and send their logits, until the other end closes.

    ``model`` is the path of the ONNX, ``descriptor`` the number of the connection's open file. Makes each later import
    of torch in this process fail.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(threads)  # it would take all of the machine's, whatever the pod has
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with Connection(int(descriptor)) as connection:
        while True:
            try:
                images = connection.recv()
            except EOFError:
                return
            connection.send(session.run(None, {"images": images})[0])


if __name__ == "__main__":
    serve_logits(*sys.argv[1:])

"""A process that runs an exported model, and cannot import torch; this file is also its program."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


class OnnxProcess:
    """The process, which computes in that many threads and is killed at the end of the context."""

    def __init__(self, model: Path, threads: int) -> None:
        command = [sys.executable, "-I", __file__, str(model), str(threads)]
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  # no pipe, which would fill
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.stderr.close()

    def logits(self, images: Array) -> NDArray[np.float32]:
        """Return the logits [n, classes] of images uint8 [n, H, W, C], however long that takes.

        Raises:
            OSError: the process has ended; with the last error on its stderr.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            send(self.process.stdin, images)
            found = receive(self.process.stdout)
        except BrokenPipeError:
            found = None
        if found is None:
            self.process.wait()
            self.stderr.seek(0)
            lines = self.stderr.read().decode(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line]
            raise OSError(f"onnxruntime cannot run it: {errors[-1][:200] if errors else 'it was killed'}")
        return found.astype(np.float32)


def send(pipe: IO[bytes], array: Array) -> None:
    """Write an array to a pipe: a line of JSON with type and shape, and its bytes."""
    pipe.write(json.dumps([array.dtype.str, array.shape]).encode() + b"\n")
    pipe.write(np.ascontiguousarray(array).tobytes())
    pipe.flush()


def receive(pipe: IO[bytes]) -> Array | None:
    """Read an array from a pipe; None at its end."""
    header = pipe.readline()
    if not header:
        return None
    kind, shape = json.loads(header)
    return np.frombuffer(pipe.read(int(np.prod(shape)) * np.dtype(kind).itemsize), dtype=kind).reshape(shape)


def main(model: str, threads: str) -> None:
    """Read images from stdin and write their logits to stdout, until stdin ends."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails from now on
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(threads)  # it would take all of the machine's, whatever the pod has
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    while (images := receive(sys.stdin.buffer)) is not None:
        send(sys.stdout.buffer, session.run(None, {"images": images})[0])


if __name__ == "__main__":
    main(*sys.argv[1:])

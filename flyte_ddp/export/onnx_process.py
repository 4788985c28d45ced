"""A process that computes the logits of an ONNX and cannot import torch; this file is also its program."""

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
    """A process that runs the ONNX ``model`` on CPU ``threads``; it starts at once, and is killed with the context."""

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

    def compute_logits(self, images: Array) -> NDArray[np.float32]:
        """Send images uint8 [n, H, W, C] to the process, and return their logits [n, classes]; waits without a timeout.

        Raises OSError if the process has ended: the text is the last error on its stderr.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            write_array(self.process.stdin, images)
            return read_array(self.process.stdout).astype(np.float32)
        except (EOFError, BrokenPipeError):
            self.process.wait()
            self.stderr.seek(0)
            lines = self.stderr.read().decode(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line] or ["it was killed"]
            raise OSError(f"onnxruntime cannot run it: {errors[-1][:200]}") from None


# A pipe takes a batch of photos in a quarter of the time of multiprocessing's Connection, which copies it twice.
def write_array(pipe: IO[bytes], array: Array) -> None:
    """Write an array to a pipe: a line of JSON with type and shape, then its bytes."""
    pipe.write(json.dumps([array.dtype.str, array.shape]).encode() + b"\n")
    pipe.write(np.ascontiguousarray(array).tobytes())
    pipe.flush()


def read_array(pipe: IO[bytes]) -> Array:
    """Read and return an array that write_array wrote to a pipe, read-only; waits for it. EOFError if the pipe ends."""
    header = pipe.readline()
    if not header.endswith(b"\n"):
        raise EOFError
    kind, shape = json.loads(header)
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    if len(content := pipe.read(size)) < size:
        raise EOFError
    return np.frombuffer(content, dtype=kind).reshape(shape)


def serve_logits_on_stdio(model_path: str, threads: str) -> None:
    """Read batches of images from stdin and write their logits to stdout, until stdin ends; both as by write_array.

    Runs the ONNX at the path ``model_path`` on CPU ``threads``. Makes each later import of torch in this process fail.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(threads)  # it would take all of the machine's, whatever the pod has
    session = onnxruntime.InferenceSession(model_path, options, providers=["CPUExecutionProvider"])
    while True:
        try:
            images = read_array(sys.stdin.buffer)
        except EOFError:
            return
        write_array(sys.stdout.buffer, session.run(None, {"images": images})[0])


if __name__ == "__main__":
    serve_logits_on_stdio(*sys.argv[1:])

"""A process that computes the outputs of an ONNX and cannot import torch; this file is also its program."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]


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

    def compute_outputs(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a batch by name, without a timeout; OSError if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            write_arrays(self.process.stdin, inputs)
            return read_arrays(self.process.stdout)
        except (EOFError, BrokenPipeError):
            self.process.wait()
            self.stderr.seek(0)
            lines = self.stderr.read().decode(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line] or ["it was killed"]
            raise OSError(f"onnxruntime cannot run it: {errors[-1][:200]}") from None


# A pipe takes a batch of photos in a quarter of the time of multiprocessing's Connection, which copies it twice.
def write_arrays(pipe: IO[bytes], arrays: Arrays) -> None:
    """Write arrays by name to a pipe: a line of JSON with their names, types and shapes, then the bytes of each."""
    header = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    pipe.write(json.dumps(header).encode() + b"\n")
    for array in arrays.values():
        pipe.write(np.ascontiguousarray(array).tobytes())
    pipe.flush()


def read_arrays(pipe: IO[bytes]) -> dict[str, Array]:
    """Return read-only arrays that write_arrays wrote to a pipe; EOFError if the pipe ends."""
    header = pipe.readline()
    if not header.endswith(b"\n"):
        raise EOFError
    arrays = {}
    for name, kind, shape in json.loads(header):
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        if len(content := pipe.read(size)) < size:
            raise EOFError
        arrays[name] = np.frombuffer(content, dtype=kind).reshape(shape)
    return arrays


def serve_outputs_on_stdio(model_path: str, threads: str) -> None:
    """Compute the outputs of batches from stdin until it ends, and write them to stdout."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of torch now fails
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(threads)  # it would take all of the machine's, whatever the pod has
    session = onnxruntime.InferenceSession(model_path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    while True:
        try:
            inputs = read_arrays(sys.stdin.buffer)
        except EOFError:
            return
        write_arrays(sys.stdout.buffer, dict(zip(names, session.run(names, inputs), strict=True)))


if __name__ == "__main__":
    serve_outputs_on_stdio(*sys.argv[1:])

"""A process that computes the outputs of an ONNX, and cannot import torch. This file is also the process's program."""

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


class OnnxProcess:
    """A process that runs the ONNX file ``model`` on CPU ``threads``.

    Starts at once, and is killed when the context ends. Use the object in a ``with`` block.
    """

    def __init__(self, model: Path, threads: int) -> None:
        command = [sys.executable, "-I", __file__, str(model), str(threads)]
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe would fill up
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.stderr.close()

    def compute_batch_outputs(self, inputs: Arrays) -> Arrays:
        """Send a batch to the process, wait without a timeout, and return the outputs by name.

        Raises:
            OSError: The process has ended. The text has the process's last error.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump(inputs, self.process.stdin, protocol=5)
            self.process.stdin.flush()
            outputs: Arrays = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.process.kill()
            self.process.wait()
            self.stderr.seek(0)
            lines = self.stderr.read().decode(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line] or ["its process was killed"]
            raise OSError(f"onnxruntime cannot run the model: {errors[-1][:200]}") from None
        return outputs


def serve_outputs_on_stdio(model_path: str, threads: str) -> None:
    """Read pickled batches from stdin until stdin ends, and write the outputs of the ONNX file to stdout.

    Is the main function of the process. After the call, this process cannot import torch.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of torch now fails
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = int(threads)  # the default is all cores of the machine, not of the pod
    session = onnxruntime.InferenceSession(model_path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    while True:
        try:
            inputs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(dict(zip(names, session.run(names, inputs), strict=True)), sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve_outputs_on_stdio(*sys.argv[1:])

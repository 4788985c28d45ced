"""The stack of another process, which its handler writes line by line."""

import subprocess
import sys
from multiprocessing import Pipe

from flyte_ddp.core.machine.process import request_stack

# Writes a stack as faulthandler does on a machine that is busy between two lines.
SLOW = """
import os, signal, sys, time
def write(*_):
    for line in ["Stack (most recent call first):", "  File a.py", "  File b.py"]:
        os.write(int(sys.argv[1]), line.encode() + b"\\n")
        time.sleep(0.2)
signal.signal(signal.SIGUSR1, write)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_stack_that_comes_line_by_line_is_read_whole() -> None:
    ours, theirs = Pipe(duplex=False)
    arguments = [sys.executable, "-c", SLOW, str(theirs.fileno())]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        assert request_stack(process.pid, ours, 30).splitlines()[1:] == ["  File a.py", "  File b.py"]
        process.kill()


def test_a_process_that_has_ended_has_no_stack() -> None:
    ours, theirs = Pipe(duplex=False)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        theirs.close()
        assert request_stack(process.pid, ours, 30) == ""

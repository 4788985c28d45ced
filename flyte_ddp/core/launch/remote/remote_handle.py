"""The launcher's handle of a rank on another host, whose agent relays the messages."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flyte_ddp.core import results
from flyte_ddp.core.files import FilePiece
from flyte_ddp.core.launch.remote.connection import WorkerConnection
from flyte_ddp.core.launch.remote.file_sync import read_pieces, write_piece
from flyte_ddp.core.launch.supervise.failure_report import FailureReport
from flyte_ddp.core.launch.supervise.messages import Exited, Message, Notice, Stack
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.runs.run_folder import METRICS
from flyte_ddp.core.runs.work import Work

END_SECONDS = 10.0  # for a killed rank's exit code to come, or for agents to end
STACK_SECONDS = 3.0  # for a stack to come; longer than the agent itself waits


class RemoteHandle(RankHandle):
    """A rank with an agent, which may be on another host.

    ``worker`` is the connection to the rank's agent. ``host`` is the rank's address for other ranks. ``files_in`` is
    the folder on the rank's host with the files of ``output_folder``.
    """

    def __init__(self, worker: WorkerConnection, host: str, output_folder: Path, files_in: Path) -> None:
        super().__init__(worker.rank, worker.pipe, host)
        self.worker, self.network, self.output_folder, self.files_in = worker, host, output_folder, files_in
        self.sees_run_folder = worker.folder is None
        self.out_of_memory = False
        self.answer: Message | None = None  # the last answer to a request
        self.results = results.ResultWriter(output_folder)

    def ran_out_of_memory(self) -> bool:
        # A lost agent cannot report a lack of memory. On this host, the kernel's count shows the lack.
        return self.out_of_memory or (self.lost and self.worker.is_on_launcher_host and super().ran_out_of_memory())

    def send_work(self, work: Work) -> None:
        """Send the files that the host lacks, and then the work with the host's paths.

        Only the host's lowest rank gets the files. Waits without a limit until the host has stored each file.
        """
        if self.worker.folder is not None:
            checkpoint, folder = work.checkpoint, self.files_in
            log = work.output_folder / METRICS if self.rank == 0 else None
            if folder == self.worker.folder:  # the host's lowest rank
                with suppress(OSError, EOFError):  # a lost agent is detected when its messages are read
                    for path in filter(None, [*work.files.values(), checkpoint.path if checkpoint else None, log]):
                        self.answer = None
                        for piece in read_pieces(path, path.name):
                            self.pipe.send(piece)
                        self._take_messages(lambda: self.answer is not None, None)  # other ranks will read the file
            work = replace(
                work,
                output_folder=folder,
                checkpoint=replace(checkpoint, path=folder / checkpoint.path.name) if checkpoint else None,
                files={key: folder / path.name for key, path in work.files.items()},
                sees_run_folder=False,
            )
        super().send_work(work)

    def handle_message(self, message: Message) -> None:
        """Store the state that a message reports, or write the file, result or event in the message."""
        match message:
            case FailureReport() if not self.worker.is_on_launcher_host:
                self.report = replace(message, time=time.monotonic())  # not of another host's clock
            case Exited():
                self.exitcode, self.out_of_memory = message.code, message.out_of_memory
            case Stack() | Notice.FILE_STORED:
                self.answer = message
            case results.ResultPiece() | results.Event():
                self.results.write(message)
            case FilePiece():
                write_piece(self.output_folder, message)
            case _:
                super().handle_message(message)

    def request_stack(self) -> str:
        self.answer = None
        self.send(Notice.READ_STACK)
        self._take_messages(lambda: self.answer is not None, STACK_SECONDS)
        return self.answer.text if isinstance(self.answer, Stack) else ""

    def kill(self) -> None:
        self.send(Notice.KILL)

    def close(self) -> None:
        """Wait up to 10 s for the rank's exit code and its last files, and close the pipe."""
        self._take_messages(lambda: False, END_SECONDS)
        self.pipe.close()

    def restart(self) -> bool:
        """Wait up to 10 s for the killed rank's exit code, and request a new start from its agent.

        Returns False if no exit code comes.
        """
        self._take_messages(lambda: False, END_SECONDS)
        if self.exitcode is not None:
            self.send(Notice.RESTART)
        return self.exitcode is not None

    def _take_messages(self, is_enough: Callable[[], bool], seconds: float | None) -> None:
        """Handle messages until ``is_enough()``, or the rank's exit code, or the end of ``seconds``.

        The exit code is a rank's last message.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with suppress(EOFError, OSError):
            while self.exitcode is None and not is_enough():
                if not self.pipe.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return
                self.handle_message(self.pipe.recv())

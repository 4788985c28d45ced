"""All messages between a launcher, the agents on other hosts, and the ranks. Imports no torch.

An agent passes on the messages between its rank and the launcher. The list lacks only an agent's first message, which
may come from an agent with another release (``connection.connect_to_launcher``).
"""

from dataclasses import dataclass
from enum import Enum, auto

from flyte_ddp.core.files import FilePiece
from flyte_ddp.core.launch.supervise.failure_report import FailureReport
from flyte_ddp.core.results import Event, ResultPiece
from flyte_ddp.core.runs.checkpoint import Handover


@dataclass(frozen=True)
class Assignment:
    """The work of a rank, sent by the launcher."""

    work: bytes  # pickle of the Work, which the rank unpickles in its main thread
    resumed_step: int  # step of the checkpoint from which the run resumes; 0 without a checkpoint
    network: str  # address of the interface for connections to other ranks; empty: any


@dataclass(frozen=True)
class StoreAddress:
    """The address of the ranks' common store. Rank 0 sends the message, and the launcher sends it to other ranks."""

    host: str
    port: int


@dataclass(frozen=True)
class Save:
    """The launcher's request for a checkpoint within so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Saved:
    """A rank's answer to Save or Handover."""

    step: int | None  # of the newest checkpoint; 0 without a checkpoint; None: the rank has no state to save


@dataclass(frozen=True)
class Stack:
    """An agent's answer to Notice.READ_STACK."""

    text: str


@dataclass(frozen=True)
class Exited:
    """The end of a rank's process. An agent sends no further message about the rank."""

    code: int | None
    out_of_memory: bool = False  # whether the kernel has killed a process of the host for lack of memory


@dataclass(frozen=True)
class RunOver:
    """The end of the run, sent to an agent."""

    error: BaseException | None  # None: the run has completed


class Notice(Enum):
    """Messages without values."""

    # From a rank:
    READY = auto()  # the rank waits for its work
    RESUMED = auto()  # rank 0 has resumed from a checkpoint after a restart
    WRITING = auto()  # the rank begins writing a checkpoint
    WRITTEN = auto()  # the rank has ended the writing, also after an error
    STOP = auto()  # the rank, or its agent, got SIGTERM
    COMPLETED = auto()  # the work is done
    # From an agent:
    FILE_STORED = auto()  # other agents of the host may read the file
    # To an agent:
    READ_STACK = auto()
    KILL = auto()  # kill the rank
    RESTART = auto()  # start the rank again


ToRank = Assignment | StoreAddress | Save | Handover  # Handover: a request for a checkpoint in rank 0's place
ToAgent = ToRank | FilePiece | RunOver | Notice
FromRank = StoreAddress | Saved | FailureReport | ResultPiece | Event | Notice
FromAgent = FromRank | FilePiece | Stack | Exited
Message = ToAgent | FromAgent

"""Types for failures of torch's collective operations.

Where another rank has ended or does not come, gloo raises a bare RuntimeError, as any code of the user's may. Only the
place tells the two apart: the first comes out of the wait for a collective operation.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from flyte_ddp.errors import CollectiveError, CollectiveTimeoutError
from flyte_ddp.parallel import distributed

NEARLY = 0.9  # of the time limit: gloo's clock starts a little earlier than the one here
OF_ITS_GROUP = timedelta()  # torch's own default
WAIT = dist.Work.wait


def type_failures_of_collectives() -> None:
    """Replace ``torch.distributed.Work.wait`` in this process by one whose RuntimeErrors are CollectiveErrors.

    torch's own blocking functions, such as ``all_reduce``, call it as well, and so do collective operations of users'
    code. Not covered: what waits in C++ (DistributedDataParallel, see strategies.py, and functional collectives).
    """
    dist.Work.wait = wait  # type: ignore[assignment,method-assign]


def wait(work: dist.Work, timeout: timedelta = OF_ITS_GROUP) -> bool:
    """Wait for a collective operation as torch does; raise CollectiveError where torch raises RuntimeError."""
    with waiting_for_ranks():
        return WAIT(work, timeout)


@contextmanager
def waiting_for_ranks(since: float | None = None) -> Iterator[None]:
    """Turn a RuntimeError of the block, which only waits for other ranks, into a CollectiveError with the same text.

    It is a CollectiveTimeoutError if the wait has lasted for the time limit of collectives, by this rank's own clock.

    Args:
        since: when the wait began, by ``time.monotonic()``; None: now.
    """
    begin = time.monotonic() if since is None else since
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        limit = distributed.timeout()
        if time.monotonic() - begin >= NEARLY * limit:
            raise CollectiveTimeoutError(f"other ranks did not come within {limit:g} s: {error}") from error
        raise CollectiveError(str(error)) from error

"""Types for failures of torch's collective operations.

If another rank has ended or does not come, gloo raises a plain RuntimeError, as any user code may. A RuntimeError is
the collective's own if it is raised while the rank waits for the collective.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from flyte_ddp.errors import CollectiveError, CollectiveTimeoutError
from flyte_ddp.parallel import distributed

TIMEOUT_SHARE = 0.9  # of the time limit; not 1, because gloo's clock starts a little earlier than ours
GROUP_TIMEOUT = timedelta()  # means "the process group's limit", and is the default of Work.wait
TORCH_WAIT = dist.Work.wait


def patch_collective_wait() -> None:
    """Replace ``torch.distributed.Work.wait`` in this process by a wait that raises CollectiveError, not RuntimeError.

    torch's own blocking functions, such as ``all_reduce``, call it, and collective operations in user code. Waits in
    C++ stay as they are: those of DistributedDataParallel (see strategies.py) and of functional collectives.
    """
    dist.Work.wait = wait  # type: ignore[assignment,method-assign]


def wait(work: dist.Work, timeout: timedelta = GROUP_TIMEOUT) -> bool:
    """Wait for a collective operation as ``Work.wait`` does and return its result.

    Raises CollectiveError if torch raised a RuntimeError; see :func:`translate_collective_errors` for the timeout's subclass.
    """
    with translate_collective_errors():
        return TORCH_WAIT(work, timeout)


@contextmanager
def translate_collective_errors(since: float | None = None) -> Iterator[None]:
    """Turn a RuntimeError of the block, which must only wait for other ranks, into a CollectiveError of the same text.

    Args:
        since: when the wait began, by ``time.monotonic()``; None: at the start of the block.

    Raises:
        CollectiveTimeoutError: the block failed after at least TIMEOUT_SHARE of the collectives' time limit.
        CollectiveError: the block failed earlier.
    """
    begin = time.monotonic() if since is None else since
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        limit = distributed.collective_timeout()
        if time.monotonic() - begin >= TIMEOUT_SHARE * limit:
            raise CollectiveTimeoutError(f"other ranks did not come within {limit:g} s: {error}") from error
        raise CollectiveError(str(error)) from error

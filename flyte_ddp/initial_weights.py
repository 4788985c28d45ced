"""Weights to start from: a file on this machine, or one fetched from a URI for all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flyte_ddp.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def fetched(init_from: str, folder: Path) -> Iterator[Path | None]:
    """A local path with the contents of ``init_from``; None if that is empty.

    Args:
        init_from: a path or a URI.
        folder: where a temporary file may be put.

    Raises:
        UserError: it is not there or cannot be read.

    """
    if not init_from:
        yield None
    elif "://" not in init_from:
        if not Path(init_from).is_file():
            raise UserError(f"init_from={init_from!r}: no such file; give a state_dict saved by torch.save")
        yield Path(init_from).absolute()
    else:
        from flyte_ddp.storage import UnavailableError, open_file

        path = folder / ".initial_weights.tmp"
        try:
            with open_file(init_from) as found, path.open("wb") as target:
                target.writelines(found.chunks)
            yield path
        except UnavailableError as error:
            raise error.explained(f"init_from={init_from!r}: cannot be fetched: {error}; check the address") from None
        finally:
            path.unlink(missing_ok=True)


def load_initial_weights(model: nn.Module, path: Path, name: str) -> None:
    """Loads a state_dict into a fresh model.

    Raises:
        UserError: not a state_dict, or one whose names or shapes do not fit.

    """
    import torch  # the launcher, which only fetches, does without

    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds for a file that is not what it should be
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"init_from={name!r}: it does not fit the model: {reason}") from None

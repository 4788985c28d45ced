"""Failed calls to a Flyte cluster, each explained in a sentence."""

from __future__ import annotations

import traceback
from types import FrameType

from flyte_ddp.errors import UnreachableError, UserError

CALL_SECONDS = 30.0  # that a cluster has to answer a call


def refusal(error: BaseException | None, config: str | None) -> UserError | None:
    """The error for a failed call to the cluster; None if no call has failed.

    Args:
        error: what was raised, or an error that a failed call has caused.
        config: the file that names the cluster.
    """
    from flytekit.clients.grpc_utils.wrap_exception_interceptor import RetryExceptionWrapperInterceptor
    from flytekit.configuration import PlatformConfig

    while error is not None:
        if any(frame.f_code is RetryExceptionWrapperInterceptor._raise_if_exc.__code__ for frame in frames(error)):
            return explained(error, PlatformConfig.auto(config).endpoint, config or "")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def explained(error: BaseException, endpoint: str, config: str) -> UserError:
    """The sentence for the error that flytekit raises for a failed call."""
    import grpc
    from flytekit.exceptions.system import FlyteSystemUnavailableException
    from flytekit.exceptions.user import FlyteTimeout

    cause = error.__cause__
    if not isinstance(cause, grpc.RpcError):  # raised by flytekit itself, which has tried to log in
        return UserError(f"{endpoint} asks for a login, which failed: {cause}; see admin in {config}")
    details = " ".join((cause.details() or "").split())
    if "handshake failed" in details:
        return UserError(f"{endpoint} does not speak TLS, or its certificate is not trusted: see admin in {config}")
    if isinstance(error, FlyteSystemUnavailableException):
        return UnreachableError(
            f"nothing answers at {endpoint}: {details.rpartition(': ')[2] or 'unavailable'}; start the cluster, or "
            "name another one with --config FILE"
        )
    if isinstance(error, FlyteTimeout):
        return UnreachableError(f"{endpoint} is too slow: a call had no answer in time; try again later")
    said = {
        grpc.StatusCode.UNAUTHENTICATED: f"asks for a login: {details}; see admin.authType in {config}",
        grpc.StatusCode.UNIMPLEMENTED: (
            f"does not know a call of flytekit's ({details}): its Flyte is too old, or it asks for a login of another "
            f"kind; see README.md for the versions tried, and admin.authType in {config}"
        ),
    }
    return UserError(f"{endpoint} {said.get(cause.code(), f'refuses what it was asked for: {details}')}")


def frames(error: BaseException) -> list[FrameType]:
    """Where an error came through, the innermost last."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]

"""Errors of a blob store or of Flyte 2's backend after which a retry may succeed."""


def is_outage(error: BaseException) -> bool:
    """Return whether an error means that a server did not answer or has failed. A group must have no other errors.

    The SDK raises the errors of its clients of servers, which have no common type.
    """
    from connectrpc.code import Code
    from connectrpc.errors import ConnectError
    from obstore.exceptions import GenericError

    if isinstance(error, BaseExceptionGroup):
        return all(is_outage(each) for each in error.exceptions)
    if isinstance(error, ConnectError):
        return error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
    return isinstance(error, (GenericError, ConnectionError, TimeoutError))

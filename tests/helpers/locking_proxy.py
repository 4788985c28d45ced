"""A proxy on loopback before rclone's S3 server that keeps ``If-None-Match: *``, as S3 does and rclone does not."""

from contextlib import AbstractContextManager

from faulty_proxy import Proxy, faulty_proxy
from s3_server import S3Server


def locking_proxy(server: S3Server) -> AbstractContextManager[Proxy]:
    """Run a proxy before the server in a thread until the end of the block."""
    return faulty_proxy(server.endpoint, server.folder)

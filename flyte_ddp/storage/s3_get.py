"""GET for S3 objects with a third of botocore's work: each of millions of small images is one.

botocore builds, signs and sends a request, and parses the answer, by rules that it looks up anew each time. Here its
own client says once what the addresses of a bucket begin with; then its signer and its connections are used directly.
A bucket of which it gets nothing in this way is left to the client, such as one in another region.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import quote

from flyte_ddp.storage.failures import passing


class PlainGets:
    """Sends GETs to where a client would.

    Args:
        client: botocore's, for S3.
        credentials: botocore's; None for anonymous requests.
    """

    def __init__(self, client: Any, credentials: Any) -> None:
        self.client, self.credentials = client, credentials
        self.http = client._endpoint.http_session  # so that there is one pool of connections
        self.lock = threading.Lock()
        self.prefixes: dict[str, str | None] = {}  # of the addresses of a bucket; None: leave it to the client
        self.proved: set[str] = set()  # buckets of which we got something

    def get(self, bucket: str, key: str, headers: dict[str, str]) -> Any:
        """The answer, as botocore's ``AWSResponse``; None if the client may get more out of the bucket."""
        prefix = self.prefix(bucket)
        if prefix is None:
            return None
        answer = self.http.send(self.signed(f"{prefix}{quote(key, safe='/~')}", headers))
        if answer.status_code in (200, 206):
            self.proved.add(bucket)
            return answer
        answer.content  # noqa: B018 - is read, so that the connection can be used again
        return answer if bucket in self.proved or passing(answer.status_code) else None

    def prefix(self, bucket: str) -> str | None:
        """What the addresses of the bucket's objects begin with."""
        with self.lock:
            if bucket not in self.prefixes:
                address = self.client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
                self.prefixes[bucket] = address.partition("?")[0].removesuffix("k")
            return self.prefixes[bucket]

    def leave(self, bucket: str) -> None:
        """Leaves the bucket to the client, which got from it what we did not."""
        with self.lock:
            self.prefixes[bucket] = None

    def signed(self, address: str, headers: dict[str, str]) -> Any:
        """A request that is ready to be sent."""
        from botocore.auth import S3SigV4Auth  # type: ignore[import-untyped,unused-ignore]
        from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped,unused-ignore]

        agent = {"User-Agent": self.client.meta.config.user_agent}
        request = AWSRequest("GET", address, headers=agent | headers, stream_output=True)
        if self.credentials is not None:
            S3SigV4Auth(self.credentials.get_frozen_credentials(), "s3", self.client.meta.region_name).add_auth(request)
        return request.prepare()

"""How often a test split has been looked at: each look is claimed once, before anything is decided by it.

judgements/TEST_DIGEST/looks/00000007.json     the seventh look: which two models were compared
judgements/TEST_DIGEST/pairs/ONE-OTHER.json    the look of these two, who may be compared again without another one
judgements/TEST_DIGEST/verdicts/00000007.json  what came of it
"""

from __future__ import annotations

import json
import secrets

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.release.registry import Registry, file_name
from flyte_ddp.storage import MissingError


def claim(registry: Registry, test_digest: str, challenger: str, champion: str) -> int:
    """The number of this look at a test split, from 1; that of the same two models before, if there was one.

    Raises:
        UserError: the registry cannot be read or written.
    """
    folder = registry.at("judgements", test_digest)
    pair = storage.join(folder, f"pairs/{challenger}-{champion}.json")
    with registry.explained("read"):
        try:
            return int(json.loads(storage.retried(pair, storage.read))["look"])
        except MissingError:
            pass
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{pair}: is damaged; restore it, or delete it to spend another look") from None
    with registry.explained("listed"):
        looks = storage.join(folder, "looks")
        try:
            number = sum(1 for _ in storage.retried(looks, lambda of: [*storage.list_files(of)]))
        except MissingError:
            number = 0
    with registry.explained("written"):
        while True:
            number += 1
            claimed = {"look": number, "challenger": challenger, "champion": champion, "nonce": secrets.token_hex(16)}
            if registry.created(storage.join(looks, file_name(number)), json.dumps(claimed, indent=1).encode()):
                break
        # Two who judge the same pair at the same time have two looks: the first one's counts for both from now on.
        registry.created(pair, json.dumps({"look": number}).encode())
    return number

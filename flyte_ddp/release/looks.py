"""How often a test split has been looked at: each look is claimed once, before anything is decided by it.

judgements/TEST_DIGEST/looks/00000007.json            the seventh look: which two models were compared
judgements/TEST_DIGEST/pairs/DIGEST.json              the look of two models by a rule: by it they may be compared again
judgements/TEST_DIGEST/verdicts/00000007-DIGEST.json  what came of it
"""

import hashlib
import json
import secrets

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.release.registry import Registry, entry_file
from flyte_ddp.storage import MissingError


def claim_look(registry: Registry, test_digest: str, challenger: str, champion: str, rule: str) -> int:
    """Return the number of this look at a test split, from 1: that of the same models and rule, or a new file's.

    A judge who is killed between its two writes has spent a look for nothing: that makes later ones stricter only.

    Raises:
        UserError: the registry cannot be read or written.
    """
    folder = registry.at("judgements", test_digest)
    compared = {"challenger": challenger, "champion": champion, "rule": rule}
    pair = storage.join(folder, f"pairs/{hashlib.sha256(json.dumps(compared).encode()).hexdigest()}.json")
    looks = storage.join(folder, "looks")
    with registry.explain_failures("read"):
        try:
            return int(json.loads(storage.retried(pair, storage.read))["look"])
        except MissingError:
            pass
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{pair}: is damaged; restore it, or delete it to spend another look") from None
        try:
            number = 1 + len(storage.retried(looks, lambda of: [*storage.list_files(of)]))
        except MissingError:
            number = 1
    content = {**compared, "nonce": secrets.token_hex(16)}
    while not registry.create_if_absent(
        storage.join(looks, entry_file(number)), json.dumps({"look": number, **content}, indent=1).encode()
    ):
        number += 1
    # Two who judge the same pair at the same time have two looks: the first one's counts for both from now on.
    registry.create_if_absent(pair, json.dumps({"look": number}).encode())
    return number

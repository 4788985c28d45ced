"""Counting the looks at a test split: a judgement claims its look before it decides anything by the test samples.

judgements/TEST_DIGEST/looks/00000007.json            the seventh look: which two models were compared
judgements/TEST_DIGEST/pairs/DIGEST.json              the look of two models by a rule: by it they may be compared again
judgements/TEST_DIGEST/verdicts/00000007-DIGEST.json  what came of it
"""

import hashlib
import json
import secrets

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.release.registry import Registry, entry_file_name
from flyte_ddp.storage import MissingError


def claim_look(registry: Registry, test_digest: str, challenger: str, champion: str, rule: str) -> int:
    """Return the number of this look at a test split, from 1; write two files to the registry if the look is a new one.

    The same two models by the same rule have one look, however often they are compared. A process that is killed
    between the two writes has spent a look for nothing, which only makes later looks stricter.

    Args:
        registry: of the model.
        test_digest: of the test split.
        challenger: the SHA-256 of its weights.
        champion: the SHA-256 of its weights, or a word that stands for no champion.
        rule: of the decision, with its margin and alpha.

    Raises:
        UserError: the registry cannot be read or written, or the file of this pair is damaged.
    """
    folder = registry.at("judgements", test_digest)
    compared = {"challenger": challenger, "champion": champion, "rule": rule}
    pair = storage.join(folder, f"pairs/{hashlib.sha256(json.dumps(compared).encode()).hexdigest()}.json")
    looks = storage.join(folder, "looks")
    with registry.explain_failures("read"):
        try:
            return int(json.loads(storage.retry(pair, storage.read_file))["look"])
        except MissingError:
            pass
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{pair}: is damaged; restore it, or delete it to spend another look") from None
        try:
            number = 1 + len(storage.retry(looks, lambda of: [*storage.list_files(of)]))
        except MissingError:
            number = 1
    content = {**compared, "nonce": secrets.token_hex(16)}
    while not registry.create_if_absent(
        storage.join(looks, entry_file_name(number)), json.dumps({"look": number, **content}, indent=1).encode()
    ):
        number += 1
    # Two who judge the same pair at the same time have two looks: the first one's counts for both from now on.
    registry.create_if_absent(pair, json.dumps({"look": number}).encode())
    return number

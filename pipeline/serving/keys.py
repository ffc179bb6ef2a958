"""A bearer token -> the name of the API key it is.

How long it takes says nothing about the keys: all are compared, as digests of one length, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from pydantic import SecretStr

EVERYBODY = "everybody"  # who asks where no keys are configured


class Keys:
    """The API keys of a server."""

    def __init__(self, keys: Mapping[str, SecretStr]) -> None:
        self.names = tuple(keys)
        self._digests = [(name, _digest(key.get_secret_value())) for name, key in keys.items()]

    def name_of(self, authorization: str) -> str | None:
        """Whose key an ``Authorization`` header has; None for nobody's."""
        if not self._digests:
            return EVERYBODY
        scheme, _, token = authorization.partition(" ")
        shown, found = _digest(token.strip()), None
        for name, digest in self._digests:
            if hmac.compare_digest(shown, digest):
                found = name
        return found if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

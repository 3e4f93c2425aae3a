"""A shared secret: what bears its signature was written by a worker of this job, for this place, and was not changed.

Without a secret it signs with the job's name alone, which keeps jobs apart that share a store by mistake.

>>> signer = Signer("job 7", secret="our word")
>>> signer.verified_text(signer.sign_text("hello", "round 1"), "round 1")
'hello'
>>> Signer("job 7", secret="another").verified_text(signer.sign_text("hello", "round 1"), "round 1") is None
True
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import TypeVar

from cadenza.errors import UsageError

__all__ = ["Signer", "shared_secret"]

MAC_BYTES = 16

T = TypeVar("T")


def shared_secret(given: str | None = None) -> str | None:
    """Return the secret that was given, or else that of ``CADENZA_SECRET``; None if there is none.

    >>> shared_secret("")
    Traceback (most recent call last):
    cadenza.errors.UsageError: The secret is empty, so anyone could sign with it: set CADENZA_SECRET, or secret=… of \
join(), to a word that only this job's workers know, or set neither to let anyone join.
    """
    secret = os.environ.get("CADENZA_SECRET") if given is None else given
    if secret is not None and not secret.strip():
        raise UsageError(
            "The secret is empty, so anyone could sign with it: set CADENZA_SECRET, or secret=… of join(), to a word "
            "that only this job's workers know, or set neither to let anyone join."
        )
    try:
        (secret or "").encode()
    except UnicodeEncodeError:
        raise UsageError(
            "The secret holds bytes that are no UTF-8: set CADENZA_SECRET, or secret=… of join(), to a word of letters "
            "and digits, the same for all of this job's workers."
        ) from None
    return secret


class Signer:
    """Signs texts and bytes with the job's secret; a signature belongs to a place, and is worth nothing elsewhere.

    Attributes:
        job: What tells this job from others that use the store.
        secret: The secret, if there is one.
        space: A name for all that know the secret: they write below it, and do not disturb those with another one.
        ignored: How many entries were ignored: they bear no right signature, or cannot be read.
    """

    def __init__(self, job: str, *, secret: str | None) -> None:
        self.job = job
        self.secret = secret
        self.ignored = 0
        self._key = hashlib.blake2b((secret or "").encode(), digest_size=32, person=b"cadenza seal").digest()
        self.space = self.sign(b"", "space").hex()[:8] if secret is not None else "open"

    def sign(self, data: bytes, place: str) -> bytes:
        """Return the signature of data at a place."""
        told = f"{len(self.job)} {self.job} {len(place)} {place} ".encode() + data
        return hmac.new(self._key, told, hashlib.sha256).digest()[:MAC_BYTES]

    def is_right(self, signature: bytes, data: bytes, place: str) -> bool:
        """Tell whether a signature is that of data at a place."""
        return hmac.compare_digest(signature, self.sign(data, place))

    def sign_text(self, text: str, place: str) -> str:
        """Return a text with its signature."""
        return f"{self.sign(text.encode(), place).hex()} {text}"

    def verified_text(self, signed: str | bytes, place: str) -> str | None:
        """Return the text without its signature, or None, and count it, if that is not right; whatever was written."""
        data = signed.encode(errors="surrogatepass") if isinstance(signed, str) else signed
        signature, _, text = data.partition(b" ")
        if hmac.compare_digest(signature, self.sign(text, place).hex().encode()):
            return self.understood(lambda: text.decode())
        self.ignored += 1
        return None

    def understood(self, read: Callable[[], T]) -> T | None:
        """Return what can be read, or None, and count it: another version, or a stranger where there is no secret."""
        try:
            return read()
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError):
            self.ignored += 1
            return None

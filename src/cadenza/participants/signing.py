"""A shared secret: what bears its signature was written by a worker of this job, for this place, and was not changed.

Without a secret it signs with the the job's name, which keeps jobs apart that share a store by mistake.

>>> signer = Signer("job 7", secret="our word")
>>> signer.verified_text(signer.sign_text("hello", "round 1"), "round 1")
'hello'
>>> Signer("job 7", secret="another").verified_text(signer.sign_text("hello", "round 1"), "round 1") is None
True
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["Signer"]

MAC_BYTES = 16


class Signer:
    """Signs texts and bytes with the job's secret; a signature belongs to a place, and is worth nothing elsewhere."""

    def __init__(self, job: str, *, secret: str | None) -> None:
        self.secret = secret is not None
        self._key = hashlib.blake2b((secret or "").encode(), digest_size=32, person=b"cadenza seal").digest()
        self._job = job

    def sign(self, data: bytes, place: str) -> bytes:
        """Return the signature of data at a place."""
        told = f"{len(self._job)} {self._job} {len(place)} {place} ".encode() + data
        return hmac.new(self._key, told, hashlib.sha256).digest()[:MAC_BYTES]

    def sign_text(self, text: str, place: str) -> str:
        """Return a text with its signature."""
        return f"{self.sign(text.encode(), place).hex()} {text}"

    def verified_text(self, signed: str, place: str) -> str | None:
        """Return the text without its signature, or None if that is not right."""
        signature, _, text = signed.partition(" ")
        return text if hmac.compare_digest(signature, self.sign(text.encode(), place).hex()) else None

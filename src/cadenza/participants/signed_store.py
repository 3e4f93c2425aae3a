"""A store in which everything is signed: what bears no right signature is not there for those who read.

An entry is a line: a signature for its key, and a text. So what a stranger writes is ignored and counted, and written
over where it is in the way; an entry that was copied to another key, job or round is worth nothing there.

>>> mine, other = (Signer("job", secret=word) for word in ("ours", "theirs"))
>>> below = dist.HashStore()
>>> SignedStore(below, mine).set("color", "green")
>>> SignedStore(below, mine).read("color"), SignedStore(below, other).read("color"), other.ignored
('green', None, 1)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from cadenza.errors import StoreLostError
from cadenza.participants.private_store.client import PrivateStore
from cadenza.participants.signing import Signer

__all__ = ["SignedStore"]

_NOTHING = b"\0nothing is here"  # as an expected value: a way to read that neither waits nor writes
_SPACES = "spaces"
_ATTEMPTS = 20  # to write where a stranger writes too


class SignedStore(dist.Store):
    """Signs what is written and verifies what is read; reading never waits.

    Args:
        below: The store itself: a private one, or one of torch's.
        signer: The job's signer.
        who: What tells this client from others, where they are counted.
        shared: The place of the job in the store, for those with this secret and those with another one.
        mark: What tells this generation from others in which the same keys are used; see `bound`.

    Attributes:
        below: The store itself, for those who cannot sign.
    """

    def __init__(
        self,
        below: dist.Store,
        signer: Signer,
        *,
        who: str = "",
        shared: dist.Store | None = None,
        mark: str = "",
    ) -> None:
        super().__init__()
        self.below = below
        self._signer, self._who, self._shared, self._mark = signer, who, shared, mark

    def bound(self, mark: str) -> SignedStore:
        """Return the store for those who know a mark: entries with another one, or with none, are not there for them.

        So what an earlier run of the job has written under the same keys is worth nothing when it is written again.

        >>> store = SignedStore(dist.HashStore(), Signer("job", secret="word"))
        >>> store.bound("one run").set("verdict", "commit")
        >>> store.bound("one run").read("verdict"), store.bound("another").read("verdict")
        ('commit', None)
        """
        return SignedStore(self.below, self._signer, who=self._who, shared=self._shared, mark=mark)

    def unsigned(self, place: str) -> dist.Store:
        """Return what stands below a place, for those who cannot sign."""
        if isinstance(self.below, PrivateStore):
            return self.below.below(place)
        return dist.PrefixStore(place, self.below)

    def has_strangers(self) -> bool:
        """Note that workers with this secret use the job's name, and tell whether some with another one do, or did.

        Anybody can write this note: it says why nobody came, and decides nothing.
        """
        if self._shared is None:
            return False
        found = set((_find(self._shared, _SPACES) or b"").split(b"\n")) - {b""}
        if self._signer.space.encode() not in found:
            self._shared.append(_SPACES, f"{self._signer.space}\n")  # type: ignore[attr-defined]
        return bool(found - {self._signer.space.encode()})

    def read(self, key: str) -> str | None:
        """Return the text under a key, or None if there is none with a right signature."""
        lines = self.lines(key)
        return lines[0] if lines else None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return the texts under several keys, on one way to the store if all are there."""
        found = _find_all(self.below, list(keys))
        lines = [self._verified(key, data or b"") for key, data in zip(keys, found, strict=True)]
        return [line[0] if line else None for line in lines]

    def lines(self, key: str) -> list[str]:
        """Return all texts that were set or appended under a key."""
        return self._verified(key, _find(self.below, key) or b"")

    def set(self, key: str, value: str | bytes) -> None:
        self.below.set(key, self._signed(key, value))

    def append(self, key: str, value: str | bytes) -> None:
        """Add a text to those under a key, at once, whoever else does so too."""
        line = _text(value).removesuffix("\n")
        self.below.append(key, f"\n{self._signed(key, line)}")  # type: ignore[attr-defined]

    def get(self, key: str) -> bytes:
        """Return the texts under a key, a line each; nothing if there is none."""
        return "\n".join(self.lines(key)).encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.lines(key) for key in keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a text if the expected one stands there, or none does and none is expected; return what stands then."""
        expected = _text(expected_value)
        for _ in range(_ATTEMPTS):
            found = _find(self.below, key)
            standing = next(iter(self._verified(key, found or b"")), "")
            if standing != expected:
                return (standing or expected).encode()
            signed = self._signed(key, desired_value).encode()
            if _compare_set(self.below, key, found or b"", signed) == signed:
                return _text(desired_value).encode()
        raise StoreLostError(f"somebody else writes to {key!r} all the time")

    def mark(self, key: str) -> None:
        """Count this client, once however often it calls."""
        self.append(key, self._who)

    def add(self, key: str, amount: int) -> int:
        """Count this client, once however often it calls; return how many are counted."""
        self.mark(key)
        return len(set(self.lines(key)))

    def delete_key(self, key: str) -> bool:
        return bool(self.below.delete_key(key))

    def _signed(self, key: str, value: str | bytes) -> str:
        text = _text(value)
        if "\n" in text:
            raise ValueError(f"An entry of the store is one line; got {text!r} for {key!r}.")
        return self._signer.sign_text(text, self._place(key)) + "\n"  # what somebody appends is a line of its own

    def _verified(self, key: str, data: bytes) -> list[str]:
        place = self._place(key)
        found = (self._signer.verified_text(line, place) for line in data.split(b"\n") if line)
        return [text for text in found if text is not None]

    def _place(self, key: str) -> str:
        return f"{key} {self._mark}" if self._mark else key


def _find_all(store: dist.Store, keys: list[str]) -> list[bytes | None]:
    if isinstance(store, PrivateStore):
        return store.find_all(keys)
    if len(keys) > 1 and store.check(keys):
        return [bytes(data) for data in store.multi_get(keys)]
    return [_find(store, key) for key in keys]


def _find(store: dist.Store, key: str) -> bytes | None:
    """Return what stands under a key, whatever it is; where torch's own `get` would wait, None."""
    if isinstance(store, PrivateStore):
        return store.find(key)
    found = _compare_set(store, key, _NOTHING, _NOTHING)
    return None if found == _NOTHING else found


def _compare_set(store: dist.Store, key: str, expected: bytes, desired: bytes) -> bytes:
    return bytes(store.compare_set(key, expected, desired))  # type: ignore[arg-type] # torch takes bytes too


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode()

"""Where users find what elastic training needs: `join`, `Membership`, and the store in a process of its own.

From the shell: ``python -m cadenza.membership --port 29400``.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from contextlib import suppress

from cadenza.participants.membership import Membership, join
from cadenza.participants.name_lookup import use_hosts_file_only
from cadenza.participants.signing import shared_secret
from cadenza.participants.store import serve

__all__ = ["Membership", "join", "serve"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a store until this process is ended: one for those who know the secret, if CADENZA_SECRET is set."""
    import resource  # Unix alone has it, and `signal.pause`

    parser = argparse.ArgumentParser(prog="python -m cadenza.membership", description=main.__doc__)
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen at")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one, which is printed")
    given = parser.parse_args(arguments)
    use_hosts_file_only()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # or a thousand idle connections would shut all others out
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    store = serve(given.port, host=given.host, secret=shared_secret())
    print(store.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()

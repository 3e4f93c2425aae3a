"""The store of a supervised run, ``python -m cadenza.membership`` on a leash: it ends when its supervisor does."""

from __future__ import annotations

from cadenza.cli.leash import follow_parent
from cadenza.membership import main

if __name__ == "__main__":
    follow_parent()
    main()

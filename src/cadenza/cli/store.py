"""The store of a supervised run, ``python -m cadenza.membership``: it ends when its supervisor does."""

from __future__ import annotations

from cadenza.cli.parent_death import end_with_parent
from cadenza.membership import main

if __name__ == "__main__":
    end_with_parent()
    main()

"""``python -m cadenza.cli.selftest`` is ``cadenza selftest``."""

import sys

from cadenza.cli.app import main

main(["selftest", *sys.argv[1:]])

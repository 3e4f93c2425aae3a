"""``python -m cadenza.cli.bench`` is ``cadenza bench``, for torchrun's ``-m``."""

import sys

from cadenza.cli.app import main

main(["bench", *sys.argv[1:]])

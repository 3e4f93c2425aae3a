"""``python -m cadenza.cli.doctor`` is ``cadenza doctor``, for torchrun's ``-m``."""

import sys

from cadenza.cli.app import main

main(["doctor", *sys.argv[1:]])

"""``python -m cadenza.cli`` is the program `cadenza`."""

from cadenza.cli.app import main

if __name__ == "__main__":
    main()

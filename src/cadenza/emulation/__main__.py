"""``python -m cadenza.emulation --hosts 4 --rate 100mbit -- python train.py``."""

from cadenza.emulation import main

if __name__ == "__main__":
    main()

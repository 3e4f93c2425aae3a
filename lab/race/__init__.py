"""The race: Cadenza and its rivals on the same model, the same data and the same emulated links.

python -m lab.race headline    the table of `make race`, under 15 minutes on 2 cores
python -m lab.race --help      every race, and how long it takes
"""

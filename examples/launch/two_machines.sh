#!/bin/sh
# One training on two machines, without a scheduler. On each of them, in the same shared folder (NFS or the like):
#
#     sh two_machines.sh HOST          # HOST: the name or address of one of the two, as the other one sees it
#
# The one at HOST shows the display; start them in any order. Ctrl-C on either stops both, and saves; the same line
# goes on. Port 29400 of HOST must be reachable, and ports between the machines at which the workers meet.
set -eu

HOST=${1:?the host name or address of one of the machines}
RUN=${RUN:-runs/two-machines}
WORKERS=${WORKERS:-2}            # on each machine

if [ -e "$RUN/config.toml" ]; then
    set -- --resume "$RUN"
else
    set -- --run "$RUN"          # add your task and flags here, the same on both: mypkg.task:build --period 64 …
fi
exec cadenza train "$@" --nnodes 2 --rdzv-endpoint "$HOST:29400" --workers "$WORKERS"

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# lose_a_rank.sh MPIEXEC PROGRAM killed|stopped: succeeds if three of four ranks answer all requests
# after the fourth one is lost. MPICH's mpiexec kills all processes when one that it started dies of
# a signal, and sends SIGUSR1 when one fails; so it starts shells.
rank='trap "" USR1; "$0" "$@"; exit $?'
lines=$("$1" -disable-auto-cleanup -n 4 sh -c "$rank" "$2" "--$3")
echo "$lines"
[ "$(echo "$lines" | grep -c '4 of 4 requests failed, 4 answered, in time')" = 3 ]

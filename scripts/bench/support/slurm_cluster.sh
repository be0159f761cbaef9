#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Runs a command on a Slurm cluster of two nodes, all on this machine: slurm_cluster.sh ROOT COMMAND...
#
# ROOT is a Debian system with Slurm (scripts/bench/slurm makes it); the command runs in it, in this source tree. The
# nodes n1 and n2 are namespaces of their own (network, processes, hostname, mounts, IPC), each with a slurmd, on a
# bridge; the command runs beside slurmctld on `head`, where v1 and v2 are the nodes' links. The folder /cluster is
# shared by all of them. Everything ends with the command, and nothing is left on the machine. Needs root.
set -euo pipefail
if [ "$1" != --inside ]; then
    exec unshare --mount --uts --ipc --net --pid --fork --kill-child --mount-proc --propagation private \
        "${BASH_SOURCE[0]}" --inside "$@"
fi
root=$2
shift 2
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)

hostname head
ip link set lo up
ip link add bridge type bridge
ip addr add 10.98.0.1/24 dev bridge
ip link set bridge up

mkdir -p "$root/cluster" "$root$tree"
touch "$root/etc/hosts"
mount --bind "$tree" "$root$tree"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
for folder in run tmp dev/shm cluster; do mount -t tmpfs tmpfs "$root/$folder"; done
mkdir -p "$root/run/munge" "$root/cluster/save" "$root/cluster/n1" "$root/cluster/n2"
printf '%s\n' '127.0.0.1 localhost' '10.98.0.1 head' '10.98.0.11 n1' '10.98.0.12 n2' >"$root/cluster/hosts"
mount --bind "$root/cluster/hosts" "$root/etc/hosts"

# Each node pretends to have 4 processors. Preempted jobs get 10 s; a requeued job starts again after 5 s (cred_expire),
# not after 2 minutes; SIGKILL follows SIGTERM after 5 s.
cat >"$root/cluster/slurm.conf" <<'TEXT'
ClusterName=bench
SlurmctldHost=head(10.98.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmix
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldPidFile=/cluster/slurmctld.pid
SlurmctldLogFile=/cluster/slurmctld.log
SlurmdPidFile=/cluster/%n/slurmd.pid
SlurmdLogFile=/cluster/%n/slurmd.log
SlurmdSpoolDir=/cluster/%n/spool
StateSaveLocation=/cluster/save
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
NodeName=n1 NodeAddr=10.98.0.11 CPUs=4
NodeName=n2 NodeAddr=10.98.0.12 CPUs=4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
TEXT
export SLURM_CONF=/cluster/slurm.conf

chroot "$root" sh -c 'head -c 1024 /dev/urandom >/cluster/key && chmod 400 /cluster/key && chmod 755 /run /run/munge &&
    munged --force --key-file=/cluster/key --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/pid \
        --log-file=/cluster/munge.log --seed-file=/cluster/seed && slurmctld' >"$root/cluster/start.log" 2>&1
for k in 1 2; do
    unshare --mount --uts --ipc --net --pid --fork --propagation private sh -ec "
        hostname n$k
        mount -t proc proc '$root/proc'
        mount -t tmpfs tmpfs '$root/dev/shm'
        mount -t tmpfs tmpfs '$root/tmp'
        ip link set lo up
        until ip link show node$k; do sleep 0.05; done
        ip link set node$k name eth0
        ip addr add 10.98.0.1$k/24 dev eth0
        ip link set eth0 up
        exec chroot '$root' slurmd -D -N n$k" >"$root/cluster/n$k/out" 2>&1 &
    node=$!
    until [ "$(readlink "/proc/$node/ns/net")" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
    ip link add v$k type veth peer name node$k netns "$node"
    ip link set v$k master bridge up
done
for ((k = 0; k < 300; k++)); do
    [ "$(chroot "$root" sinfo -h -N -p low -t idle 2>/dev/null | wc -l)" = 2 ] && break
    sleep 0.1
done
if [ $k = 300 ]; then
    tail -n 5 "$root"/cluster/*.log "$root"/cluster/n?/*.log >&2
    echo "slurm: the nodes did not come up within 30 s" >&2
    exit 1
fi
chroot "$root" sh -c 'cd "$0" && exec "$@"' "$tree" "$@"

#!/bin/sh
# Installs Debian's Slurm and munge, for tests. Starts nothing: the tests start their own daemons.
set -eu
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null &&
    exit 0
[ "$(id -u)" = 0 ] || { echo "installing Slurm needs root" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "Slurm is installed by apt-get, which is missing" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y --no-install-recommends slurm-wlm munge

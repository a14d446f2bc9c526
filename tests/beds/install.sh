#!/bin/bash
# Installs what the test beds need, on Debian and Ubuntu as root. Where that is not possible the tests that need a
# bed are skipped and say why.
set -u
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
  echo "beds: not root or no apt-get: nothing installed"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
packages=(strace e2fsprogs xfsprogs btrfs-progs user-mode-linux nfs-kernel-server nfs-common rpcbind kmod iproute2 procps
  slurmctld slurmd slurm-client munge systemd systemd-container dbus)
# For the pages of `syncd serve`: a browser without a window, and a font.
command -v chromium >/dev/null || packages+=(chromium-headless-shell fonts-dejavu-core)
command -v cc >/dev/null || packages+=(tcc)
missing=()
for package in "${packages[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
((${#missing[@]})) || exit 0
timeout 240 apt-get -qq update || echo "beds: apt-get update failed"
# One by one where they do not all exist: the sweep needs strace alone.
timeout 600 apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null && exit 0
for package in "${missing[@]}"; do
  timeout 300 apt-get -qq install -y --no-install-recommends "$package" >/dev/null ||
    echo "beds: $package is not installed"
done
exit 0

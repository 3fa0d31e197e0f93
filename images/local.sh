#!/usr/bin/env bash
# Build both images on this machine, with what it has: images/local.sh [scheduler] [executor]
#
# Where no base image is there, a minimal Debian stands in (Debian's mmdebstrap); BASE chooses another one, which is there or can be
# pulled. pip inside reads what pip outside reads: its configuration, and a directory of wheels, such as CPU wheels of torch.
# Needs root and Debian's buildah.
set -euo pipefail
cd "$(dirname "$0")/.."
export BUILDAH_ISOLATION=chroot

base=${BASE:-docker.io/library/python:3.11-slim-bookworm}
if [ -z "${BASE:-}" ] && ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/rootfs.tar"
  printf 'FROM scratch\nADD rootfs.tar /\n' >"$work/Containerfile"
  buildah bud --quiet --tag "$base" "$work" >/dev/null
fi

flags="--quiet --layers --network host --pull=$([ -n "${BASE:-}" ] && echo missing || echo never) --volume /etc/ssl/certs:/etc/ssl/certs:ro"
[ ! -f /etc/pip.conf ] || flags+=" --volume /etc/pip.conf:/etc/pip.conf:ro"
wheels=$(python3 -m pip config get global.find-links 2>/dev/null || true)
if [ -d "$wheels" ]; then
  flags+=" --volume $wheels:$wheels:ro --build-arg TORCH_OPTIONS='--find-links $wheels'"
fi

[ $# -gt 0 ] || set -- scheduler executor
for image in "$@"; do
  started=$SECONDS
  output=$(BUILD_FLAGS=$flags images/build.sh "$image" 2>&1) || { printf '%s\n' "$output" >&2 && exit 1; }
  echo "$image: built in $((SECONDS - started)) s"
done

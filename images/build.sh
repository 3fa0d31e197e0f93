#!/usr/bin/env bash
# Build the images: images/build.sh [scheduler] [executor], by default both.
#
# BUILD        the command that builds, default "buildah bud"; "podman build" does as well
# BUILD_FLAGS  what else it is told, e.g. --build-arg TORCH_OPTIONS="..." (see the head of executor.Containerfile)
# BASE         the base image, default that of the Containerfiles; a release needs one with a digest, NAME@sha256:DIGEST
# REPOSITORY   in front of the names, default "octavo": octavo/scheduler:0.3.0.dev0
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' octavo/__init__.py)
base=${BASE:-$(sed -n 's/^ARG BASE=//p' images/scheduler.Containerfile)}
images/check_base.sh "$version" "$base"
read -r -a build <<<"${BUILD:-buildah bud}"
eval "flags=(${BUILD_FLAGS:-})" # may hold quoted words
[ $# -gt 0 ] || set -- scheduler executor

for image in "$@"; do
  "${build[@]}" "${flags[@]}" --build-arg VERSION="$version" --build-arg BASE="$base" --file "images/$image.Containerfile" \
    --tag "${REPOSITORY:-octavo}/$image:$version" .
done

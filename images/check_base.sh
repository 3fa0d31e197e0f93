#!/usr/bin/env bash
# images/check_base.sh VERSION BASE: refuse the base image of a release that names no digest: a tag may be moved.
set -euo pipefail
if [[ $1 != *.dev* && ! $2 =~ @sha256:[0-9a-f]{64}$ ]]; then
  echo "octavo: $1 is a release, and its base image '$2' has no digest: set BASE=NAME@sha256:DIGEST" >&2
  exit 1
fi

#!/usr/bin/env bash
# Apply the manifests to a cluster and break what runs there: make cluster-test, or tests/cluster/run.sh PYTEST_ARGUMENTS
#
# KUBECONFIG  a cluster that is there; without it CLUSTER starts one, and ends it
# CLUSTER     how images get into its nodes: kind, k3s, or a program with the commands `up`, `load IMAGE.tar`, `stop NODE`,
#             `start NODE` and `down`; the tests that cut a node's power need the program. The overlay `production` needs
#             cert-manager, KEDA, Prometheus and Envoy Gateway: they are there, or the program has the command `add NAME`
# PYTHON      by default the one of .venv
#
# Builds the images with images/local.sh (root, buildah). Everything that it starts ends with it.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
cluster=${CLUSTER:-}
[ -n "$cluster" ] || { echo "cluster-test: CLUSTER is not set: kind, k3s, or a program that runs a cluster" >&2 && exit 1; }
case $cluster in kind | k3s) ;; *) CLUSTER=$(realpath "$cluster") && cluster=$CLUSTER && export CLUSTER ;; esac

work=$(mktemp -d)
started=
at_end() {
  rm -rf "$work" /var/tmp/octavo-models
  [ -z "$started" ] || "$cluster" down
}
trap at_end EXIT
trap 'exit 130' INT TERM

if [ -z "${KUBECONFIG:-}" ]; then
  started=yes
  "$cluster" up >"$work/up"
  KUBECONFIG=$(sed -n 's/^export KUBECONFIG=//p' "$work/up")
  export KUBECONFIG
fi

images/local.sh
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' octavo/__init__.py)
"$python" -m pip install --quiet --target "$work/clients" openai
BUILDAH_ISOLATION=chroot buildah bud --quiet --pull=never --build-arg "SCHEDULER=localhost/octavo/scheduler:$version" \
  --file tests/cluster/client.Containerfile --tag octavo/client:test "$work" >/dev/null
for image in "scheduler:$version" "executor:$version" client:test; do
  file=$work/${image%%:*}.tar
  buildah push --quiet "octavo/$image" "docker-archive:$file:registry.example.com/octavo/$image"
  case $cluster in
    kind) kind load image-archive "$file" ;;
    k3s) k3s ctr images import "$file" ;;
    *) "$cluster" load "$file" ;;
  esac
  rm "$file"
done

mkdir -p /var/tmp/octavo-models/smollm2
cp "$("$(dirname "$python")/octavo" model path smollm2)" /var/tmp/octavo-models/smollm2/
chmod -R a+rX /var/tmp/octavo-models
OCTAVO_CLUSTER_TEST=1 "$python" -m pytest -m cluster -v -s "${@:-tests/cluster}"

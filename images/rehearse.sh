#!/usr/bin/env bash
# Build the images where no base image can be pulled, and let a scheduler and an executor from them serve a request.
#
# images/rehearse.sh MODEL, a directory or GGUF file such as `octavo model path smollm2` prints. local.sh says what BASE is: for a
# release, one with a digest. What it prints is kept in images/build.log.
set -euo pipefail
model=$(realpath "$1")
cd "$(dirname "$0")/.."

base=${BASE:-docker.io/library/python:3.11-slim-bookworm}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' octavo/__init__.py)
images/check_base.sh "$version" "$base"
export BUILDAH_ISOLATION=chroot

work=$(mktemp -d)
containers=()
running=()
at_end() {
  for process in "${running[@]}"; do kill -KILL "$process" 2>/dev/null || true; done
  wait
  for container in "${containers[@]}"; do buildah rm "$container" >/dev/null; done
  rm -rf "$work"
}
trap at_end EXIT

images/local.sh

# entrypoint CONTAINER: what Kubernetes starts in it.
entrypoint() { buildah inspect --format '{{range .OCIv1.Config.Entrypoint}}{{.}} {{end}}' "$1"; }

for image in "scheduler:$version" "executor:$version"; do
  container=$(buildah from --pull-never "localhost/octavo/$image")
  containers+=("$container")
  root=$(buildah mount "$container")
  user=$(buildah inspect --format '{{.OCIv1.Config.User}}' "$container")
  total=$(du -smx "$root" | cut -f1)
  echo "$image: $total MB, of which Python packages $(du -smx "$root"/opt | cut -f1) MB; user $user;" \
    "torch: $([ -d "$root"/opt/octavo/lib/python3.11/site-packages/torch ] && echo yes || echo no)"
  buildah umount "$container" >/dev/null
  read -r -a start <<<"$(entrypoint "$container")"
  buildah run "$container" -- "${start[@]}" --help >"$work/help"
  echo "$image: ${start[*]} --help: $(wc -l <"$work/help") lines"
done

# launch NAME CONTAINER FLAGS...: start the entrypoint, wait until it says where it serves, put that into `address`.
launch() {
  local name=$1 container=$2 start
  shift 2
  read -r -a start <<<"$(entrypoint "$container")"
  mkfifo "$work/$name"
  touch "$work/$name.out"
  buildah run --env OCTAVO_CACHE_DIR=/tmp/cache --volume "$model:/models/$(basename "$model"):ro" "$container" -- \
    "${start[@]}" --exit-on-stdin-close "$@" <"$work/$name" >"$work/$name.out" 2>"$work/$name.err" &
  running+=($!)
  exec {stdin}>"$work/$name"
  until grep -q 'serving on' "$work/$name.out"; do
    kill -0 "${running[-1]}" 2>/dev/null || { cat "$work/$name.err" && exit 1; }
    sleep 0.2
  done
  address=$(sed -n 's/.*serving on //p' "$work/$name.out")
}

launch executor "${containers[1]}" --model "/models/$(basename "$model")" --listen 127.0.0.1:0 --kv-cache-gib 0.5
executor=$address executor_stdin=$stdin
launch scheduler "${containers[0]}" --executor "$executor" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0
for _ in {1..60}; do # until the model is loaded
  if buildah run "${containers[0]}" -- octavo generate "The capital of France is" --raw --no-stream --temperature 0 \
    --max-tokens 6 --timeout 120 --address "$address" >"$work/answer" 2>"$work/trouble"; then break; fi
  sleep 2
done
echo "octavo generate, from the scheduler's image: $(tr '\n' ' ' <"$work/answer")"
[ -s "$work/answer" ] || { cat "$work/trouble" && exit 1; }
exec {stdin}>&- {executor_stdin}>&-
for index in 1 0; do
  wait "${running[$index]}" && code=0 || code=$?
  echo "$([ "$index" = 1 ] && echo scheduler || echo executor): asked to end, exit code $code"
done
running=()

#!/bin/sh
# haproxy.sh CONFIG DIRECTORY: run HAProxy, and have it read its certificate again when a file of DIRECTORY changes.
#
# On SIGUSR2 HAProxy's master starts a new worker; the old one ends with its streams. SIGTERM ends all.
set -eu
config=$1
directory=$2

contents() { cat "$directory"/* | cksum; }

# Before HAProxy reads them, so that no change falls between.
before=$(contents)
haproxy -W -db -f "$config" &
haproxy=$!
trap 'kill -TERM "$haproxy"' TERM

while sleep "${CHECK_INTERVAL_S:-30}"; do
  now=$(contents)
  if [ "$now" != "$before" ]; then
    kill -USR2 "$haproxy"
    before=$now
  fi
done &
watcher=$!

status=0
wait "$haproxy" || status=$?
if kill -0 "$haproxy" 2>/dev/null; then # SIGTERM ended the wait, not HAProxy
  wait "$haproxy" || status=$?
fi
kill "$watcher" 2>/dev/null || true
exit "$status"

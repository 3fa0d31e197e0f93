#!/usr/bin/env bash
# tests/packaging/strangers.sh [STEP...]: what strangers type, with what the package index has for everybody.
#
# Each step has a new clone of what is committed, an environment of its own and an empty home, and nothing of this machine: no wheels or
# settings that pip is told of, no uv, nothing that is installed. On Linux that is torch with CUDA: a step takes up to
# 8 GB of disk and a quarter of an hour, and leaves nothing. The last table is in docs/releasing.md.
#
# demo       make demo
# scheduler  pip install '.[scheduler]'
# executor   pip install '.[executor]'
# newest     the wheel by its name, away from the clone, with the newest versions that its ranges allow; octavo demo
# oldest     the same with the oldest ones
# images     make images (BUILD, BUILD_FLAGS and BASE as in images/build.sh)
# test       make test
set -uo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
table=()

# What is kept: where programs, certificates and temporary files are. uv is hidden: with it, torch is another build.
path=$(tr : '\n' <<<"$PATH" | while read -r folder; do [ -x "$folder/uv" ] || [[ $folder == *.venv* ]] || echo "$folder"; done | paste -sd:)
stranger() {
	env -i HOME="$home" PATH="$path" LANG=C.UTF-8 TMPDIR="${TMPDIR:-/tmp}" PIP_CONFIG_FILE=/dev/null PIP_CACHE_DIR="$(python3 -m pip cache dir)" \
		${PIP_CERT:+PIP_CERT="$PIP_CERT"} ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
		${BUILD:+BUILD="$BUILD"} ${BUILD_FLAGS:+BUILD_FLAGS="$BUILD_FLAGS"} ${BASE:+BASE="$BASE"} "$@"
}

install_by_name() { # OPTIONS of pip
	stranger python3 -m venv build && stranger build/bin/pip install -q build &&
		stranger build/bin/python -m build -q --wheel --outdir dist octavo &&
		stranger python3 -m venv venv &&
		stranger venv/bin/pip install -q "$@" "$(echo dist/*.whl)[scheduler,executor]" &&
		stranger venv/bin/pip check && stranger venv/bin/octavo demo
}

install_clone() { # EXTRA COMMAND
	stranger python3 -m venv venv && stranger venv/bin/pip install -q "./octavo[$1]" && stranger venv/bin/pip check &&
		stranger "venv/bin/$2" --help >/dev/null && echo "$2 --help prints its flags"
}

do_demo() { stranger make --no-print-directory -C octavo demo; }
do_test() { stranger make --no-print-directory -C octavo test; }
do_images() { stranger make --no-print-directory -C octavo images; }
do_scheduler() { install_clone scheduler octavo-scheduler; }
do_executor() { install_clone executor octavo-executor; }
do_newest() { install_by_name; }
do_oldest() {
	"$repository/.venv/bin/uv" --no-config pip compile --quiet octavo/pyproject.toml --extra scheduler --extra executor \
		--resolution lowest-direct --no-header --no-annotate --python "$(command -v python3)" --output-file oldest.txt &&
		install_by_name --constraint oldest.txt
}

failed=0
for step in "${@:-demo}"; do
	work=$(mktemp -d) && home=$work/home && mkdir "$home" && cd "$work" || exit
	git clone --quiet "$repository" octavo || exit
	began=$SECONDS
	if "do_$step" 2>&1 | tee log; then ended=right; else ended=FAILED failed=1; fi
	last=$(grep -v '^$' log | tail -1 | cut -c1-90)
	table+=("| $step | $ended | $((SECONDS - began)) s | $(du -sh --exclude=home . | cut -f1) | $last |")
	cd / && rm -rf "$work"
done
printf '%s\n' '| step | ended | time | disk | its last line |' '|---|---|---|---|---|' "${table[@]}"
exit $failed

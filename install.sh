#!/bin/sh
# ./install.sh runtime | dev: install Octavo into the virtual environment VENV (.venv), made with PYTHON (python3).
# runtime: the two services. dev: what tests, checks and documentation need beside them. `make` runs this.
set -u
cd "$(dirname "$0")" || exit
what=${1:?runtime or dev}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
torch=$(grep '^torch==' constraints.txt)
# What torch with CUDA and Octavo take, with room for pip to unpack.
needed_gb=8

say() { echo "installing: $*"; }
end() { echo "install: $*" >&2; exit 1; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# run WHAT COMMAND...: what pip or uv says about a failure stands above ours.
run() {
	doing=$1
	shift
	"$@" || end "could not install $doing; if the lines above name the network or the disk, mend that and run make again: it goes on from here"
}

if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))'); then
	end "needs Python 3.11 or newer, and $python is ${version:-not there}; name another one: make demo PYTHON=python3.12"
fi
say "into $venv, which takes some minutes the first time"
if [ ! -x "$venv/bin/python" ]; then
	"$python" -c 'import ensurepip, venv' 2>/dev/null ||
		end "$python has no module venv, which makes virtual environments; on Debian and Ubuntu: apt install python3-venv"
	run "a virtual environment" "$python" -m venv "$venv"
fi
run pip pip install -qq --upgrade pip

# torch first, in the build that suits the machine. One that is installed stays; else pip's, if it is one for CPUs, such as
# on macOS or on a machine that keeps one. PyPI's for Linux is for CUDA; uv knows better where it is installed.
if pip show --quiet torch 2>/dev/null; then
	say "torch is in $venv already"
else
	report=$(pip install -qq --dry-run --constraint constraints.txt --report - torch) ||
		end "could not find $torch; pip says why above: without a network nothing can be installed"
	if ! echo "$report" | grep -q '"name": "nvidia-'; then
		say "torch, in the build for CPUs that pip finds"
		run torch pip install -qq --constraint constraints.txt torch
	elif command -v uv >/dev/null; then
		say "torch, in the build that uv chooses for this machine"
		run torch uv pip install --quiet --python "$venv/bin/python" --torch-backend=auto --constraint constraints.txt torch
	else
		say "torch with its CUDA libraries: 5 GB, about four minutes"
		say "(for the build for CPUs, 0.2 GB, stop this, then: $venv/bin/pip install $torch --index-url https://download.pytorch.org/whl/cpu)"
		free_gb=$(df -Pk "$venv" | awk 'NR == 2 { print int($4 / 1000000) }')
		[ "${free_gb:-$needed_gb}" -ge "$needed_gb" ] ||
			say "warning: $free_gb GB are free here, and this takes up to $needed_gb"
		run torch pip install -qq --constraint constraints.txt torch
	fi
fi
say "Octavo and what it needs"
run Octavo pip install -qq --constraint constraints.txt --editable '.[scheduler,executor]'
if [ "$what" = dev ]; then
	say "what tests, checks and documentation need"
	run "the tools" pip install -qq --constraint constraints.txt --editable '.[scheduler,executor,dev]'
fi

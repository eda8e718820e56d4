#!/bin/sh
# Makes .venv in the checkout and installs the package there, editable, with its tools.
# Usage: sh tools/setup.sh [PYTHON]. Called by make, which also remembers that it was done.
# With no PYTHON, or with python3: python3 if it is new enough, else the newest other one that is.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "error: $*" >&2
    exit 1
}

version() { # prints e.g. 3.11, or nothing where the command does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

asked=${1:-python3}
candidates=$asked
if [ "$asked" = python3 ]; then
    candidates="python3 python3.14 python3.13 python3.12 python3.11 python"
fi

python= too_old= no_venv=
for candidate in $candidates; do
    found=$(version "$candidate")
    if [ -z "$found" ]; then
        continue
    elif ! new_enough "$candidate"; then
        too_old=${too_old:-$found}
    elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
        no_venv=${no_venv:-$found}
    else
        python=$candidate
        break
    fi
done

if [ -z "$python" ]; then
    if [ -n "$no_venv" ]; then
        fail "Python $no_venv has no venv module; install it (Debian, Ubuntu: apt install python$no_venv-venv) and run make again"
    elif [ -n "$too_old" ]; then
        fail "Python 3.11 or newer is needed and $asked is $too_old; install a newer one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name it: make PYTHON=/path/to/python"
    else
        fail "$asked was not found or does not run; install Python 3.11 or newer (Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python"
    fi
fi

# Scripts in a .venv hold its absolute path: one from another folder, or half made, is of no use.
if [ "$(cat .venv/made-in 2>/dev/null)" != "$PWD" ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    rm -rf .venv
    echo "creating .venv with Python $(version "$python") ($(command -v "$python"))"
    "$python" -m venv .venv || fail "$python could not create .venv; see above"
    echo "$PWD" >.venv/made-in
fi

install() {
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt "$@" ||
        fail "installing failed; see above (is the network up, and is there about 2 GB of free disk?)"
}

echo "installing perfmodel and what it needs into .venv (one to two minutes)"
install hatchling editables
install --no-build-isolation -e '.[dev]'
echo "ready: .venv"

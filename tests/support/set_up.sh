#!/usr/bin/env bash
# Sets up the virtual environment for make: `set_up.sh FOLDER [PYTHON]`. Does nothing if neither requirements.lock nor
# pyproject.toml changed. Makes a new environment if PYTHON is another interpreter than the one in FOLDER.
set -euo pipefail

folder=$1
wanted=${2:-}
own=$folder/bin/python
installed=$folder/.installed
every_s=${SET_UP_EVERY_S:-10} # Between two lines of progress where the output is no terminal.

refuse() {
    echo "$1; name one: make PYTHON=…" >&2
    exit 1
}

# Old interpreters read these too.
ask() { "$1" -c "import sys; $2" 2>/dev/null; }
new_enough() { ask "$1" 'sys.exit(sys.version_info < (3, 11))'; }
version() { ask "$1" 'print(".".join(map(str, sys.version_info[:3])))'; }
identity() { ask "$1" 'print(sys.version, sys.base_prefix)'; }
has_venv() { ask "$1" 'import ensurepip, venv'; }

check_wanted() {
    local found
    found=$(version "$wanted") || refuse "PYTHON=$wanted doesn't start, and aijobs needs Python 3.11 or newer"
    new_enough "$wanted" || refuse "PYTHON=$wanted is Python $found, and aijobs needs 3.11 or newer"
}

# The first that is new enough and starts: a version manager's shim may exist and refuse.
find_python() {
    local python
    for python in python3.13 python3.12 python3.11 python3; do
        if new_enough "$python" && has_venv "$python"; then
            echo "$python"
            return
        fi
    done
    refuse "aijobs needs Python 3.11 or newer with venv (Debian: apt install python3-venv), and none was found"
}

# Whether the environment that is there will do. A half-made one has no pip yet.
is_sound() {
    new_enough "$own" && ask "$own" 'import pip' && { [ -z "$wanted" ] || [ "$(identity "$wanted")" = "$(identity "$own")" ]; }
}

# The same line again on a terminal; a line now and then elsewhere.
show() {
    if [ -t 2 ]; then
        printf '\r\033[K  %s' "$1" >&2
    elif [ $((SECONDS - shown_at)) -ge "$every_s" ]; then
        echo "  $1" >&2
        shown_at=$SECONDS
    fi
}
shown_at=0

# Reads what pip writes, and shows how far it is. It writes nothing while it unpacks: then the folders are counted.
follow() {
    local line state total=$1 n=0 doing=Downloading
    while :; do
        state=0
        IFS= read -r -t 1 line || state=$?
        if [ "$state" -gt 0 ] && [ "$state" -le 128 ]; then
            break # The end; above 128 is a second without a line.
        elif [ "$state" -eq 0 ]; then
            case $line in
            Ignoring\ *) total=$((total - 1)) ;;
            Collecting\ * | Processing\ * | Requirement\ already\ *) n=$((n + 1)) ;;
            Installing\ collected\ *) doing=Installing ;;
            esac
        fi
        if [ "$doing" = Installing ]; then
            n=$(find "$folder"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
        fi
        show "$doing: $((n < total ? n : total)) of $total packages, $SECONDS s"
    done
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
}

pip_install() {
    local errors total
    errors=$(mktemp)
    # shellcheck disable=SC2064
    trap "rm -f '$errors'" EXIT
    total=$(grep -c '^[a-z0-9].*==' requirements.lock || true)
    if ! { "$own" -m pip install --disable-pip-version-check --require-hashes -r requirements.lock 2>"$errors" | follow "$total"; } \
        || ! "$own" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . 2>"$errors"; then
        tail -n 20 "$errors" >&2
        echo "Setting up $folder failed." >&2
        exit 1
    fi
}

if [ -n "$wanted" ]; then check_wanted; fi
if ! is_sound; then
    if [ -n "$wanted" ]; then python=$wanted; else python=$(find_python); fi
    has_venv "$python" || refuse "$python has no venv (Debian: apt install python$(version "$python" | cut -d. -f1,2)-venv)"
    echo "Setting up $folder with Python $(version "$python"): once, about a minute…" >&2
    "$python" -m venv --clear "$folder"
elif [ requirements.lock -nt "$installed" ] || [ pyproject.toml -nt "$installed" ]; then
    echo "Bringing $folder up to date with requirements.lock…" >&2
else
    exit 0
fi
pip_install
touch "$installed"
echo "$folder is ready, after $SECONDS s." >&2

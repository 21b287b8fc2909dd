#!/usr/bin/env bash
# Installs the system's packages that the tests need and that are missing. Elsewhere than as root on
# Debian it only says what is missing: the tests that need it then skip, or fail where CI=true.
set -euo pipefail

# Where servers are on Debian; not on everybody's PATH.
PATH=$PATH:/usr/sbin:/sbin

missing=()
# The -core packages bring the programs without a service: nothing is started by installing them.
command -v mariadbd >/dev/null && command -v mariadb-install-db >/dev/null || missing+=(mariadb-server-core)
# my_print_defaults, which mariadb-install-db calls.
command -v my_print_defaults >/dev/null || missing+=(mariadb-client-core)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
    || missing+=(chromium)
# The Node.js inside Playwright's wheel is linked against it.
compgen -G '/usr/lib*/*/libatomic.so.1' >/dev/null || compgen -G '/usr/lib*/libatomic.so.1' >/dev/null \
    || missing+=(libatomic1)
compgen -G '/usr/share/fonts/*/noto/NotoSansCJK*' >/dev/null || missing+=(fonts-noto-cjk)

if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || [ ! -e /etc/debian_version ]; then
    echo "Not installed, as this is not root on Debian: ${missing[*]}" >&2
    exit 0
fi

echo "Installing ${missing[*]}…" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "Installing ${missing[*]} failed." >&2
    exit 1
fi

# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by the other commands in this folder. `use_venv` creates .venv in the
# top folder of the repository, with the packages of constraints.txt that are
# needed to run and to test, unless it is up to date; it sets VENV.
# `use_venv stack-requirements.txt` also installs the packages of that file.
# `need_databases` and `need_stack_servers` install servers, `need_prometheus`
# and `need_browser` what further tests need. `use_nova 33 ...` is use_venv for
# a separate environment with that release of Nova.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
CONSTRAINTS=constraints.txt
# Files that determine the packages in .venv.
INPUTS=(constraints.txt requirements.txt test-requirements.txt setup.cfg
    setup.py pyproject.toml)
IS_NEW='import sys; sys.exit(sys.version_info < (3, 11))'

say() {
    printf '%s\n' "$*" >&2
}

die() {
    say "$@"
    exit 1
}

# Prints the first Python of at least 3.11, or the one of PYTHON=...
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$name" -c "$IS_NEW" >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    die "Python 3.11 or later is needed, and ${PYTHON:-python3} is none." \
        "On Debian 12 or Ubuntu 24.04: apt-get install python3 python3-venv"
}

can_make_venv() {
    "$1" -c 'import ensurepip, venv; ensurepip.version()' >/dev/null 2>&1
}

# Debian and Ubuntu have a separate package for Python's venv module.
need_venv_module() {
    local python=$1 package
    can_make_venv "$python" && return
    package=$("$python" -c \
        'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        die "$python cannot make virtual environments. On Debian or" \
            "Ubuntu, run this and try again: sudo apt-get install $package"
    fi
    say "Installing $package ..."
    apt_install "$package"
    can_make_venv "$python" || die "apt-get could not install $package."
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends \
        "$@"; } >/dev/null || true
}

# Prints the packages of missing database servers.
missing_databases() {
    local path=$PATH:/usr/sbin:/usr/local/sbin
    PATH=$path command -v mariadbd >/dev/null || echo mariadb-server
    compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null ||
        command -v postgres >/dev/null || echo postgresql
}

# Prints the packages of missing servers of a stack, given its database
# (mariadb or postgresql) and the server of nova-api (waitress or uwsgi).
missing_stack_servers() {
    missing_databases | grep "^$1" || true
    [[ ${2-} != uwsgi ]] || missing_nginx
    [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] || echo rabbitmq-server
}

# nginx is the proxy of uWSGI.
missing_nginx() {
    PATH=$PATH:/usr/sbin command -v nginx >/dev/null || echo nginx-light
}

missing_browser() {
    command -v chromium >/dev/null || echo chromium
    command -v chromedriver >/dev/null || echo chromium-driver
}

missing_prometheus() {
    command -v prometheus >/dev/null || echo prometheus
}

# Runs a command in which installed packages start no services: invoke-rc.d
# and deb-systemd-invoke run this file first.
without_services() (
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    "$@"
)

# Tests start private servers; the packages must not start services.
need_databases() {
    need_or_skip missing_databases
}

need_browser() {
    need_or_skip missing_browser
}

need_nginx() {
    need_or_skip missing_nginx
}

need_prometheus() {
    need_or_skip missing_prometheus
}

# Installs the packages that a function prints. Failures are not fatal, as
# tests that need them are skipped.
need_or_skip() {
    local missing
    mapfile -t missing < <("$1")
    [[ ${#missing[@]} == 0 ]] && return
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        say "Tests of ${missing[*]} will be skipped. To have them, on" \
            "Debian or Ubuntu: sudo apt-get install ${missing[*]}"
        return
    fi
    say "Installing ${missing[*]} (half a minute or so) ..."
    without_services apt_install "${missing[@]}"
    mapfile -t missing < <("$1")
    [[ ${#missing[@]} == 0 ]] ||
        say "apt-get could not install ${missing[*]}: tests that need them" \
            "will be skipped."
}

# Installs the servers of a stack, which are all required.
need_stack_servers() {
    local missing
    mapfile -t missing < <(missing_stack_servers "$@")
    [[ ${#missing[@]} == 0 ]] && return
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        die "Not installed: ${missing[*]}. On Debian or Ubuntu, run this" \
            "and try again: sudo apt-get install ${missing[*]}"
    fi
    say "Installing ${missing[*]} (half a minute or so) ..."
    without_services apt_install "${missing[@]}"
    mapfile -t missing < <(missing_stack_servers "$@")
    [[ ${#missing[@]} == 0 ]] ||
        die "apt-get could not install ${missing[*]}."
}

# An environment is valid for its path (its scripts contain it), its Python,
# and the files of packages to install.
place_stamp() {
    printf '%s %s\n' "$VENV" "$("$1" -V)"
}

input_stamp() {
    (cd "$ROOT" && sha256sum -- "$@")
}

# Reads pip's output, and shows its progress.
show_pip() {
    local line count=0 shown=$SECONDS
    while IFS= read -r line; do
        case $line in
            Collecting*) count=$((count + 1)) ;;
            Installing\ collected*)
                say "  all there; unpacking them, half a minute ..." ;;
        esac
        if ((SECONDS >= shown + 3)); then
            shown=$SECONDS
            say "  $count packages so far, ${SECONDS} s ..."
        fi
    done
}

# pbr gets the version from git. That fails in a tarball, without git, and in a
# folder of another user.
need_version() {
    [[ -e $ROOT/PKG-INFO ]] && return
    git -C "$ROOT" rev-parse HEAD >/dev/null 2>&1 && return
    export PBR_VERSION=${PBR_VERSION:-0.0.1}
}

run_pip() {
    cd "$ROOT" || return
    # The constraints also apply to build dependencies.
    PIP_CONSTRAINT=$ROOT/$CONSTRAINTS PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$VENV/bin/python" -m pip install --no-compile \
        -c "$CONSTRAINTS" "$@"
}

install_packages() {
    local log=$VENV/pip.log
    need_version
    if ! run_pip "$@" 2>&1 | tee "$log" | show_pip; then
        tail -n 20 "$log" >&2
        die "The packages could not be installed; all that pip said: $log"
    fi
}

# Adds options to $wanted, and a record to $records, unless the same was
# installed with the same contents of these files.
want() {
    local record=$VENV/$1 files stamp
    read -ra files <<<"$2"
    shift 2
    stamp=$(input_stamp "${files[@]}")
    [[ ${records[$record]-$(cat "$record" 2>/dev/null)} == "$stamp" ]] &&
        return
    records[$record]=$stamp
    wanted+=("$@")
}

# Installs what is wanted, all at once, and records it.
install_wanted() {
    local record
    [[ ${#wanted[@]} != 0 ]] || return 0
    say "Installing the packages of $CONSTRAINTS (a minute or so) ..."
    install_packages "${wanted[@]}"
    for record in "${!records[@]}"; do
        printf '%s\n' "${records[$record]}" >"$record"
    done
    say "Installed in $SECONDS s."
}

use_venv() {
    local python lock place more wanted=()
    local -A records=()
    # Or each process compiles what it imports: six seconds for Nova.
    unset PYTHONDONTWRITEBYTECODE
    python=$(find_python) || exit 1
    # Only one of several concurrent commands at a time.
    exec {lock}<"$ROOT"
    flock "$lock"
    place=$(place_stamp "$python")
    if [[ $(cat "$VENV/place" 2>/dev/null) != "$place" ]]; then
        need_venv_module "$python"
        say "Making $VENV with $("$python" -V) ..."
        "$python" -m venv --clear "$VENV" || die "$VENV could not be made."
        echo "$place" >"$VENV/place"
    fi
    want inputs "${INPUTS[*]}" \
        -r requirements.txt -r test-requirements.txt -e .
    for more in "$@"; do
        want "inputs-$more" "constraints.txt $more" -r "$more"
    done
    install_wanted
    exec {lock}<&-
}

# Equals use_venv without a release, or with that of constraints.txt.
use_nova() {
    local release=$1 CONSTRAINTS=constraints.txt wanted=()
    local -A records=()
    shift
    if [[ ! -e $ROOT/constraints-nova$release.txt ]]; then
        grep -q "^nova==${release}[.0-9]" "$ROOT/constraints.txt" ||
            die "There is no constraints-nova$release.txt."
        release=
    fi
    [[ -z $release ]] || VENV=$ROOT/.venv-nova$release
    use_venv "$@"
    [[ -n $release ]] || return 0
    CONSTRAINTS=constraints-nova$release.txt
    want inputs-nova "${INPUTS[*]} $CONSTRAINTS" --no-deps nova
    install_wanted
}

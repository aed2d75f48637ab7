# Makes the private environment in .venv: sourced by ./demo and ./test, which set `root` to the repository.
#
#     prepare_environment NAME EXTRAS [PACKAGE...]
#
# installs Tilewright from the working tree with these extras and packages, once: a stamp remembers what was asked for
# and the digest of pyproject.toml. Afterwards `python` is the environment's interpreter, which keeps compiled sources
# inside .venv.

fail() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 \
            && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer, and found $(python3 --version 2>&1 || echo none); install one, or name it: PYTHON=/path/to/python3.12 $0"
}

has_c_compiler() {
    [ -n "${TILEWRIGHT_CC:-}" ] || command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || command -v clang >/dev/null 2>&1
}

prepare_environment() {
    local name="$1" extras="$2" venv="$root/.venv" found home stamp wanted
    shift 2
    local packages=("$@")
    home="$venv/.tilewright-home"
    stamp="$venv/.tilewright-$name"
    python="$venv/bin/python"
    # Every process would compile PyTorch's sources again, seconds each, where nothing may be written beside them.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="$venv/bytecode"
    if ! has_c_compiler; then
        echo "No C compiler on this machine: the ziglang package brings one."
        packages+=(ziglang)
    fi
    # An environment knows its own path: after the folder was moved or copied it has to be made anew.
    if [ ! -f "$home" ] || [ "$(cat "$home")" != "$root" ] || ! "$python" -c '' >/dev/null 2>&1; then
        found="$(find_python)" || exit 1
        echo "Making a private environment in .venv with $("$found" --version) ..."
        "$found" -m venv --clear "$venv" || fail "could not make $venv; on Debian and Ubuntu: apt install python3-venv"
        printf '%s' "$root" >"$home"
    fi
    wanted="$("$python" - "$root/pyproject.toml" "$extras" ${packages[@]+"${packages[@]}"} <<'PYTHON'
import hashlib, pathlib, sys
path, *asked = sys.argv[1:]
print(hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest(), *asked)
PYTHON
)" || fail "could not read $root/pyproject.toml"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "Installing Tilewright and what it needs (the first time takes a few minutes) ..."
    "$python" -m pip install --quiet --quiet --no-compile --disable-pip-version-check --editable "$root$extras" ${packages[@]+"${packages[@]}"} \
        || fail "pip could not install it; the reason is above"
    printf '%s\n' "$wanted" >"$stamp"
}

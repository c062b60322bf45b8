#!/usr/bin/env bash
# The peers, each in an environment of its own, of the releases that the figures were measured with.
# usage: setup.sh DIR     (pip alone; about 3 minutes and 1 GB)
set -euo pipefail
mkdir -p "$1" && cd "$1"
make_one() { # NAME REQUIREMENT …: left as it is where it is whole
  [ -e "$1/.ready" ] && return
  python3 -m venv "$1"
  "$1/bin/pip" install -q --disable-pip-version-check "${@:2}"
  touch "$1/.ready"
}
make_one openai openai==3.57.0
make_one datatrove 'datatrove[io]==0.10.1' openai==3.57.0 xxhash aiofiles aiosqlite httpx==0.28.1
make_one ray 'ray[data]==2.60.0' pydantic aiohttp==3.14.5

#!/usr/bin/env bash
# The main job from end to end: a checkpoint that is never on disk becomes a pack, which is inspected, verified and used.
# PYTHON names the interpreter that has stream_pack; all files are in a temporary folder.
set -euo pipefail

python=${PYTHON:-python3}
examples=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
exec 2>&1  # reports go to stderr: keep them in order with the rest

say() { printf '\n\033[1m%s\033[0m\n' "$1"; }
[ -t 1 ] || say() { printf '\n%s\n' "$1"; }

say '$ python make_checkpoint.py | python -m stream_pack convert - demo.pack'
"$python" "$examples/make_checkpoint.py" | "$python" -m stream_pack convert - demo.pack

say '$ python -m stream_pack inspect demo.pack'
"$python" -m stream_pack inspect demo.pack

say '$ python -m stream_pack inspect demo.pack --html demo.html'
"$python" -m stream_pack inspect demo.pack --html demo.html
grep '<title>' demo.html

say '$ python -m stream_pack verify demo.pack'
"$python" -m stream_pack verify demo.pack

say '>>> pack["head.weight"].torch()    # in place: the same bytes as the embedding'
"$python" - <<'PYTHON'
import stream_pack

with stream_pack.open("demo.pack") as pack:
    head, embedding = pack["head.weight"], pack["embedding.weight"]
    print(f"head.weight: {head.dtype} {list(head.shape)} at byte {head.file_offset:,}")
    assert head.torch().data_ptr() == embedding.torch().data_ptr()
    print(f"embedding.weight: the same {embedding.nbytes:,} bytes, stored once")
PYTHON

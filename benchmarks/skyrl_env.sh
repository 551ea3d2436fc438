#!/bin/sh
# Make a virtual environment in which publish_follow.py can run torch_delta beside SkyRL 0.4.0.
#
#   sh benchmarks/skyrl_env.sh DIR [python]      (python: 3.11 or newer; default python3)
#   DIR/bin/python benchmarks/publish_follow.py
#
# SkyRL is installed without its dependencies: its delta publisher and store need few of them, and the full set pins
# another torch and pulls in vLLM, Ray and CUDA.
set -eu
if [ $# -lt 1 ]; then
    echo "usage: $0 DIR [python]" >&2
    exit 2
fi
folder=$1
python=${2:-python3}
repository=$(cd "$(dirname "$0")/.." && pwd)

"$python" -m venv "$folder"
pip="$folder/bin/python -m pip install --quiet"
$pip torch==2.13.0
$pip --editable "$repository[fast]"
$pip numpy safetensors zstandard xxhash cloudpathlib pydantic typing_extensions
# Its metadata asks for Python 3.12; the parts used here run on 3.11 as well.
$pip --no-deps --ignore-requires-python skyrl==0.4.0
(cd "$repository/benchmarks" && "$folder/bin/python" -c '
from peers.skyrl import missing
reason = missing()
raise SystemExit(reason)
') && echo "ready: $folder/bin/python benchmarks/publish_follow.py"

#!/bin/sh
# Makes the environments of what bench/step_time.py compares ortc with, each for itself:
#
#     sh bench/make_peers.sh PEERS [PYTHON]
#
# PYTHON is 3.11, for which onnxruntime-training-cpu has its last packages. The builds of PyTorch for the CPU alone are enough;
# where pip finds others first, say so with pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS) or TORCH, a requirement or a file.
# torch.compile needs a C++ compiler when it runs.
set -eu
peers=$1
python=${2:-python3.11}
torch=${TORCH:-torch==2.13.0}

make() {
    name=$1
    shift
    [ -x "$peers/$name/bin/python" ] || "$python" -m venv "$peers/$name"
    "$peers/$name/bin/pip" install --quiet --only-binary :all: "$@"
}

make artifacts onnxruntime-training-cpu==1.19.2 onnx==1.16.2 "$torch"
make onnxsim onnxsim==0.8.1 onnxruntime==1.32.0 onnx==1.23.2
make torch "$torch" transformers==5.24.0 onnx==1.23.2 onnxscript==0.7.2
command -v c++ >/dev/null || echo "there is no C++ compiler: torch.compile will not run" >&2

#!/bin/bash
# Makes an environment with PyTorch's CUDA build on the simulated device: build.sh VENV [WHEEL]
#
# WHEEL: the CUDA wheel of torch; without it, torch===2.13.0 comes from the package index (526 MB),
# or the version that TORCH_VERSION names: the wheels of 2.10 (CUDA 12) to 2.15 work.
# FAKECUDA_NUMBERS=0 leaves the numbers out: kernels that do nothing, made in a few seconds.
# Needs gcc, g++, binutils, pip with a package index, and a Python that the wheel is for. Called
# again, it builds only the stubs and what changed of the numbers.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
version=${TORCH_VERSION:-2.13.0}
wheel=${2:-torch===$version} # three signs: two would accept 2.13.0+cpu
python=${PYTHON:-python3}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
venv=$(cd "$venv" && pwd)
pip() { "$venv/bin/python" -m pip "$@"; }
"$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null ||
    pip install -q --no-deps "$wheel"

# The version of cuDNN that the wheel was made for, which the stub must not be older than.
work=$venv/fakecuda
mkdir -p "$work/wheels" "$work/objects"
cudnn=$(sed -n 's/^Requires-Dist: nvidia-cudnn-cu[0-9]*==\([0-9]*\.[0-9]*\.[0-9]*\).*/\1/p' \
    "$venv"/lib/python*/site-packages/torch-*.dist-info/METADATA)
[ -z "$cudnn" ] || echo "$cudnn" >"$work/cudnn"

# The stubs take the place of NVIDIA's packages: nothing installed later may bring those.
sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' \
    "$venv"/lib/python*/site-packages/torch-*.dist-info/METADATA
pip install -q filelock typing_extensions sympy networkx jinja2 fsspec numpy 'setuptools>=77'
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')

# The headers of the runtime, for signatures and layouts (2.4 MB), of the wheel's CUDA version.
cuda=$(sed -n "s/^cuda.*= '\([0-9]*\.[0-9]*\)'.*/\1/p" "$site/torch/version.py")
case $cuda in
12.*)
    headers="nvidia-cuda-runtime-cu12==$cuda.* nvidia-cuda-nvcc-cu12==$cuda.*"
    include=$work/nvidia/cuda_runtime/include
    lib=$site/nvidia/cuda_runtime/lib # one of the folders where the wheel's libraries look
    ;;
*)
    headers="nvidia-cuda-runtime==$cuda.* nvidia-cuda-crt==$cuda.*"
    include=$work/nvidia/cu${cuda%.*}/include
    lib=$site/nvidia/cu${cuda%.*}/lib
    ;;
esac
if [ ! -d "$work/nvidia" ]; then
    # shellcheck disable=SC2086
    pip download -q --no-deps -d "$work/wheels" $headers
    for w in "$work"/wheels/*.whl; do "$venv/bin/python" -m zipfile -e "$w" "$work"; done
    if [ -d "$work/nvidia/cuda_nvcc/include/crt" ]; then
        cp -r "$work/nvidia/cuda_nvcc/include/crt" "$include/"
    fi
fi
export CUDNN_VERSION
CUDNN_VERSION=$(cat "$work/cudnn" 2>/dev/null || echo 9.20.0)
"$venv/bin/python" "$here/make_stubs.py" "$site/torch/lib" "$include" "$lib" "$work/objects"

cp "$here/fakecuda.py" "$site/"
if [ "${FAKECUDA_NUMBERS:-1}" = 0 ]; then
    rm -f "$site/fakecuda_numbers.so"
    cd "$venv"
    bin/python -c 'import torch; print(torch.__version__, torch.empty(5, device="cuda").numel())'
    exit
fi

# The numbers.
for f in numbers views sparse emulations host_memory; do
    o=$work/objects/$f.o
    [ "$o" -nt "$here/numbers/$f.cpp" ] && [ "$o" -nt "$here/numbers/numbers.hpp" ] ||
        g++ -std=c++20 -O1 -fPIC -Wall -Wno-sign-compare -isystem "$site/torch/include" \
            -isystem "$include" -c "$here/numbers/$f.cpp" -o "$o"
done
g++ -shared -o "$site/fakecuda_numbers.so" "$work"/objects/{numbers,views,sparse,emulations,host_memory}.o \
    -L"$site/torch/lib" -ltorch_cpu -ltorch_cuda -lc10 "$lib"/libcudart.so.* \
    -Wl,-rpath,'$ORIGIN/torch/lib' -Wl,-rpath,'$ORIGIN/'"${lib#"$site"/}" \
    -Wl,--allow-shlib-undefined

# The entry point by which torch finds them.
mkdir -p "$site/fakecuda-0.dist-info"
printf 'Metadata-Version: 2.1\nName: fakecuda\nVersion: 0\n' >"$site/fakecuda-0.dist-info/METADATA"
printf '[torch.backends]\nfakecuda = fakecuda:load\n' >"$site/fakecuda-0.dist-info/entry_points.txt"

cd "$venv" # here, fakecuda.py would hide the installed one
bin/python - <<'CHECK'
import torch

x = torch.arange(5.0, device="cuda")
assert (x * x).sum().item() == 30
print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.mem_get_info())
CHECK

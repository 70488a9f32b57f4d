#!/bin/bash
# Makes an environment with PyTorch's CUDA build on the simulated device: build.sh VENV [WHEEL]
#
# WHEEL: the CUDA wheel of torch; without it, torch===2.13.0 comes from the package index (526 MB).
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

# The stubs take the place of NVIDIA's packages: nothing installed later may bring those.
sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' \
    "$venv"/lib/python*/site-packages/torch-*.dist-info/METADATA
pip install -q filelock typing_extensions sympy networkx jinja2 fsspec numpy 'setuptools>=77'
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')

# The headers of the runtime, for signatures and layouts (2.4 MB).
work=$venv/fakecuda
include=$work/nvidia/cu13/include
mkdir -p "$work/wheels" "$work/objects"
if [ ! -d "$work/nvidia" ]; then
    pip download -q --no-deps -d "$work/wheels" \
        'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*'
    for w in "$work"/wheels/*.whl; do "$venv/bin/python" -m zipfile -e "$w" "$work"; done
fi
lib=$site/nvidia/cu13/lib # where the wheel's libraries look
"$venv/bin/python" "$here/make_stubs.py" "$site/torch/lib" "$include" "$lib" "$work/objects"

# The numbers.
for f in numbers views sparse emulations host_memory; do
    o=$work/objects/$f.o
    [ "$o" -nt "$here/numbers/$f.cpp" ] && [ "$o" -nt "$here/numbers/numbers.hpp" ] ||
        g++ -std=c++20 -O1 -fPIC -Wall -Wno-sign-compare -isystem "$site/torch/include" \
            -isystem "$include" -c "$here/numbers/$f.cpp" -o "$o"
done
g++ -shared -o "$site/fakecuda_numbers.so" "$work"/objects/{numbers,views,sparse,emulations,host_memory}.o \
    -L"$site/torch/lib" -ltorch_cpu -ltorch_cuda -lc10 "$lib/libcudart.so.13" \
    -Wl,-rpath,'$ORIGIN/torch/lib' -Wl,-rpath,'$ORIGIN/nvidia/cu13/lib' \
    -Wl,--allow-shlib-undefined

# The entry point by which torch finds them.
cp "$here/fakecuda.py" "$site/"
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

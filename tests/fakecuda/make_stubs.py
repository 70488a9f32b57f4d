"""Builds the stub libraries that PyTorch's CUDA build is linked against:

    python make_stubs.py TORCH_LIB INCLUDE OUT WORK

TORCH_LIB is torch/lib of the unpacked wheel, INCLUDE has the headers of the CUDA runtime, OUT
receives the libraries, WORK the objects. The undefined symbols of the wheel say what a library must
export. A symbol that src/ does not define becomes a function that returns the library's code for
"not supported"."""

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent / "src"
RUNTIME = [
    "config.c",
    "errors.c",
    "properties.c",
    "memory.c",
    "streams.c",
    "captures.c",
    "launch.c",
    "driver.c",
]

CUDART = "libcudart.so.13"  # first: the others are linked against it
FLAGS = ["-O2", "-g", "-fPIC", "-std=gnu11", "-Wall", "-Wextra"]
FLAGS += ["-Wno-builtin-declaration-mismatch", "-Wno-unused-parameter"]

# soname: (sources, prefixes of its symbols where they carry no version, their version, what a
# function returns that src/ does not define, flags)
LIBRARIES = {
    CUDART: (RUNTIME, (), CUDART, 801, []),
    "libcuda.so.1": ([], (), None, 801, []),
    "libnvidia-ml.so.1": (["nvml.c"], (), None, 3, []),
    "libcublas.so.13": (["blas.c"], (), "libcublas.so.13", 0, []),
    "libcublasLt.so.13": (["blas.c"], (), "libcublasLt.so.13", 0, ["-DLT"]),
    "libcudnn.so.9": (["dnn.c"], (), "libcudnn.so.9", 3000, []),
    "libcufft.so.12": (["fft.c"], (), "libcufft.so.12", 16, []),
    "libnvrtc.so.13": (["nvrtc.c"], (), "libnvrtc.so.13", 11, []),
    "libcurand.so.10": ([], ("curand",), None, 203, []),
    "libcusparse.so.12": (["sparse.c"], (), "libcusparse.so.12", 10, []),
    "libcusolver.so.12": ([], (), "libcusolver.so.12", 9, []),
    "libcupti.so.13": ([], (), "libcupti.so.13", 15, []),
    "libcusparseLt.so.0": ([], ("cusparseLt",), None, 10, []),
    "libnccl.so.2": (["nccl.c"], ("nccl",), None, 3, []),
    "libcufile.so.0": ([], ("cuFile",), None, 5001, []),
    "libnvshmem_host.so.3": ([], ("nvshmem",), "NVSHMEM", 7, []),
}


def symbols(file: Path, which: str) -> set[str]:
    out = subprocess.run(
        ["nm", "-D", which, str(file)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1] for line in out.splitlines() if line.strip()}


def defined(objects: list[Path]) -> set[str]:
    if not objects:
        return set()
    out = subprocess.run(
        ["nm", "-g", "--defined-only", *map(str, objects)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {line.split()[-1] for line in out.splitlines() if len(line.split()) == 3}


def symbols_of_wheel(torch_lib: Path) -> tuple[set[str], set[str]]:
    """What the wheel's libraries want, with versions (name@version), and what they define."""
    wanted: set[str] = set()
    offered: set[str] = set()
    for file in [*torch_lib.glob("*.so"), *torch_lib.glob("*.so.*")]:
        wanted |= symbols(file, "--undefined-only")
        offered |= {s.split("@")[0] for s in symbols(file, "--defined-only")}
    return wanted, offered


def names_of(soname: str, wanted: set[str], offered: set[str]) -> set[str]:
    """The functions that this library must export."""
    _, prefixes, version, _, _ = LIBRARIES[soname]
    names = set()
    for s in wanted:
        name, _, tag = s.partition("@")
        by_version = tag and tag.lstrip("@") == version
        by_prefix = not tag and prefixes and name.startswith(prefixes)
        if name not in offered and (by_version or by_prefix):
            names.add(name)
    return names


def build(soname: str, names: set[str], include: Path, out: Path, work: Path) -> None:
    sources, _, version, code, extra = LIBRARIES[soname]
    objects = []
    for source in sources:
        o = work / f"{soname}.{source}.o"
        compile_c = ["gcc", *FLAGS, f"-isystem{include}", *extra, "-c", str(SRC / source)]
        subprocess.run([*compile_c, "-o", str(o)], check=True)
        objects.append(o)
    missing = sorted(names - defined(objects))
    stub = work / f"{soname}.stub.c"
    stub.write_text("".join(f"int {name}(void) {{ return {code}; }}\n" for name in missing))
    script = work / f"{soname}.map"
    script.write_text(f"{version} {{ global: *; }};\n" if version else "{ global: *; };\n")
    link = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(out / soname)]
    link += [f"-Wl,-soname,{soname}", f"-Wl,--version-script,{script}", "-Wl,-rpath,$ORIGIN"]
    link += [str(stub), *map(str, objects)]
    if soname != CUDART:
        link += ["-Wl,--no-as-needed", str(out / CUDART)]
    subprocess.run([*link, "-lpthread"], check=True)
    listed = ": " + " ".join(missing) if soname == CUDART else ""
    n_written = len(names) - len(missing)
    print(f"{soname}: {n_written} functions, {len(missing)} stubs (return {code}){listed}")


def main(torch_lib: Path, include: Path, out: Path, work: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    wanted, offered = symbols_of_wheel(torch_lib)
    for soname in LIBRARIES:
        build(soname, names_of(soname, wanted, offered), include, out, work)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))

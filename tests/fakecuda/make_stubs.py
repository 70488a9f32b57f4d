"""Builds the stub libraries that PyTorch's CUDA build is linked against:

    python make_stubs.py TORCH_LIB INCLUDE OUT WORK

TORCH_LIB is torch/lib of the unpacked wheel, INCLUDE has the headers of the CUDA runtime, OUT
receives the libraries, WORK the objects. The wheel says which versions of the libraries it is
linked against, and its undefined symbols say what a library must export. A symbol that src/ does
not define becomes a function that returns the library's code for "not supported"."""

import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent / "src"
RUNTIME = [
    "config.c",
    "calls.c",
    "errors.c",
    "properties.c",
    "memory.c",
    "streams.c",
    "captures.c",
    "launch.c",
    "driver.c",
]

CUDART = "libcudart"  # first: the others are linked against it
FLAGS = ["-O2", "-g", "-fPIC", "-std=gnu11", "-Wall", "-Wextra"]
FLAGS += ["-Wno-builtin-declaration-mismatch", "-Wno-unused-parameter"]

SONAME = "the soname"  # the version of the symbols of most libraries

# The stub tells it, for torch refuses one that is older than it was made for.
CUDNN = "{" + os.environ.get("CUDNN_VERSION", "9.20.0").replace(".", ",") + "}"

# library: (sources, prefixes of its symbols where they carry no version, their version, what a
# function returns that src/ does not define, flags)
LIBRARIES = {
    CUDART: (RUNTIME, (), SONAME, 801, []),
    "libcuda": ([], (), None, 801, []),
    "libnvidia-ml": (["nvml.c"], (), None, 3, []),
    "libcublas": (["blas.c"], (), SONAME, 0, []),
    "libcublasLt": (["blas.c"], (), SONAME, 0, ["-DLT"]),
    "libcudnn": (["dnn.c"], (), SONAME, 3000, [f"-DCUDNN_PARTS={CUDNN}"]),
    "libcufft": (["fft.c"], (), SONAME, 16, []),
    "libnvrtc": (["nvrtc.c"], (), SONAME, 11, []),
    "libcurand": ([], ("curand",), None, 203, []),
    "libcusparse": (["sparse.c"], (), SONAME, 10, []),
    "libcusolver": ([], (), SONAME, 9, []),
    "libcupti": ([], (), SONAME, 15, []),
    "libcusparseLt": ([], ("cusparseLt",), None, 10, []),
    "libnccl": (["nccl.c"], ("nccl",), None, 3, []),
    "libcufile": ([], ("cuFile",), None, 5001, []),
    "libnvshmem_host": ([], ("nvshmem",), "NVSHMEM", 7, []),
}
# Found by name while torch runs: no library of the wheel is linked against these.
ASKED_FOR_LATER = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}


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


def sonames_of_wheel(torch_lib: Path) -> dict[str, str]:
    """Which version of each library the wheel is linked against: "libcudart" -> its soname."""
    found = dict(ASKED_FOR_LATER)
    for file in torch_lib.glob("*.so"):
        out = subprocess.run(
            ["objdump", "-p", str(file)], check=True, capture_output=True, text=True
        ).stdout
        for line in out.splitlines():
            library, dot, _ = line.removeprefix("  NEEDED ").strip().partition(".so.")
            if line.startswith("  NEEDED") and dot and library in LIBRARIES:
                found[library] = line.split()[1]
    return found


def names_of(library: str, soname: str, wanted: set[str], offered: set[str]) -> set[str]:
    """The functions that this library must export."""
    _, prefixes, version, _, _ = LIBRARIES[library]
    if version == SONAME:
        version = soname
    names = set()
    for s in wanted:
        name, _, tag = s.partition("@")
        by_version = tag and tag.lstrip("@") == version
        by_prefix = not tag and prefixes and name.startswith(prefixes)
        if name not in offered and (by_version or by_prefix):
            names.add(name)
    return names


def build(
    library: str, sonames: dict[str, str], names: set[str], include: Path, out: Path, work: Path
) -> None:
    soname = sonames[library]
    sources, _, version, code, extra = LIBRARIES[library]
    if version == SONAME:
        version = soname
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
    if library != CUDART:
        link += ["-Wl,--no-as-needed", str(out / sonames[CUDART])]
    subprocess.run([*link, "-lpthread"], check=True)
    listed = ": " + " ".join(missing) if library == CUDART else ""
    n_written = len(names) - len(missing)
    print(f"{soname}: {n_written} functions, {len(missing)} stubs (return {code}){listed}")


def main(torch_lib: Path, include: Path, out: Path, work: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    wanted, offered = symbols_of_wheel(torch_lib)
    sonames = sonames_of_wheel(torch_lib)
    for library in LIBRARIES:
        if library in sonames:
            names = names_of(library, sonames[library], wanted, offered)
            build(library, sonames, names, include, out, work)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))

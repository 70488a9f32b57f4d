"""The oracles inside fuzz targets, against faults planted in what they check: a target that never
fails checks nothing. Needs the source tree and a C compiler."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
SOURCES = {
    "ledger": "ledger ptrtab",
    "lines": "linetab meter columns linetext text idset vec",
    "history": "history text idset vec",
}

pytestmark = pytest.mark.skipif(
    CC is None or not (ROOT / "fuzz" / "replay_main.c").exists(),
    reason="needs the source tree and a C compiler",
)


def source_of(name):
    (found,) = ROOT.glob(f"src/*/{name}.c")
    return found


def compile(source, out):
    subprocess.run(
        [
            CC,
            "-std=gnu11",
            "-O1",
            "-w",
            "-c",
            str(source),
            "-o",
            str(out),
            f"-I{ROOT}/src",
            f"-I{ROOT}/include",
        ],
        check=True,
    )
    return out


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """{target: {name: object}}, as they are."""
    folder = tmp_path_factory.mktemp("objects")
    made = {}

    def get(target):
        wanted = {name: source_of(name) for name in [*SOURCES[target].split(), "alloc", "status"]}
        wanted |= {name: ROOT / "fuzz" / f"{name}.c" for name in (f"fuzz_{target}", "replay_main")}
        for name, source in wanted.items():
            if name not in made:
                made[name] = compile(source, folder / f"{name}.o")
        return {name: made[name] for name in wanted}

    return get


def run(target, parts, folder):
    subprocess.run(
        [CC, *map(str, parts.values()), "-o", str(folder / target), "-lm", "-lpthread"], check=True
    )
    return subprocess.run(
        [str(folder / target), "--mutate", "300", str(ROOT / "fuzz" / "corpora" / target)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("target", SOURCES)
def test_the_target_passes_as_it_is(target, objects, tmp_path):
    p = run(target, objects(target), tmp_path)
    assert p.returncode == 0 and " 1 passed, 0 failed" in p.stdout, p.stdout + p.stderr


FAULTS = {
    "ledger": [
        (
            "a release forgets to subtract",
            "ledger",
            "*now = SUB(l->current, *n) - *n;",
            "*now = LOAD(l->current) - *n;",
        ),
        ("the peak stays", "ledger", "koila__raise(&l->peak, now);", ""),
        (
            "the limit is for one block, not for all",
            "ledger",
            "if (n > limit || seen > limit - n)",
            "if (n > limit)",
        ),
        (
            "the allocation after the one to refuse is refused",
            "ledger",
            "return left == 1;",
            "return left == 2;",
        ),
        ("a block handed out twice is counted twice", "ledger", "SUB(l->current, replaced);", ""),
        (
            "an erased address hides those behind it",
            "ptrtab",
            "if (((j - home) & mask) >= ((j - i) & mask)) {",
            "if (0) {",
        ),
        (
            "a table that grows loses its first slot",
            "ptrtab",
            "for (size_t i = 0; i < s->capacity; i++) {\n        const void *p",
            "for (size_t i = 1; i < s->capacity; i++) {\n        const void *p",
        ),
        (
            "a cancelled block stays",
            "ledger",
            "    SUB(l->current, n);\n    ADD(l->n_refused, 1);",
            "    ADD(l->n_refused, 1);",
        ),
    ],
    "lines": [
        (
            "a row's peak is the last one",
            "linetab",
            "max_to(&rec->peak[q], m->peak[device][q]);",
            "rec->peak[q] = m->peak[device][q];",
        ),
        (
            "an event raises no peak and a window ends without looking",
            "meter",
            "max_to(&peak[d][q], now[d][q]);",
            "if (d) peak[d][q] = 0;",
        ),
        (
            "an open window is never closed",
            "linetab",
            "c->n_open[a->row]--;\n    a->row = -1;",
            "a->row = -1;",
        ),
        (
            "a left activation still counts",
            "linetab",
            "s->n--;\n    a->code->n_activations--;",
            "s->n--;",
        ),
        ("HTML is not escaped", "text", 'koila__text_puts(t, "&lt;")', 'koila__text_puts(t, "<")'),
        (
            "quotes in JSON are not escaped",
            "text",
            "if (c == '\"' || c == '\\\\')",
            "if (c == '\\\\')",
        ),
    ],
    "history": [
        ("a free is not subtracted", "history", "w->now -= (uint64_t)h->events[made].n_bytes;", ""),
        (
            "the peak is taken an event late",
            "history",
            "h->peak_at = w->n_kept;",
            "h->peak_at = w->n_kept + 1;",
        ),
        (
            "what was held at the beginning is no peak",
            "history",
            "if (h->start >= h->peak) {",
            "if (0) {",
        ),
        (
            "a free is not where its allocation says",
            "history",
            "w->other[made] = w->n_kept;",
            "w->other[made] = w->n_kept + 1;",
        ),
        (
            "a freed address is still found",
            "history",
            "koila__idset_remove_word(&w->live, &h->events->p, sizeof *h->events, made);",
            "",
        ),
        (
            "times go backwards",
            "history",
            "if (h->n && ns < h->events[h->n - 1].ns)",
            "if (0)",
        ),
        (
            "names are not escaped",
            "text",
            'koila__text_puts(t, "&lt;")',
            'koila__text_puts(t, "<")',
        ),
    ],
}


@pytest.mark.parametrize(
    "target, what, name, old, new",
    [(target, *fault) for target, faults in FAULTS.items() for fault in faults],
    ids=lambda s: re.sub(r"\W+", "-", s)[:50],
)
def test_a_planted_fault_is_caught(target, what, name, old, new, objects, tmp_path):
    text = source_of(name).read_text()
    assert text.count(old) == 1, f"{name}.c has changed: plant this fault anew"
    (tmp_path / f"{name}.c").write_text(text.replace(old, new))
    p = run(
        target,
        objects(target) | {name: compile(tmp_path / f"{name}.c", tmp_path / f"{name}.o")},
        tmp_path,
    )
    assert p.returncode < 0, f"not caught: {what}"

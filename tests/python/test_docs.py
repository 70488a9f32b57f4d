"""What is written for users is true: the examples of every page run and print what the page says,
links lead somewhere, the README stays short, and every public name has an example that runs."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import docstring_examples
import pages
import pytest
from test_examples import need_packages

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))
README_WORDS, LIMITS_WORDS, LIMITS = 700, 120, 8


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def parts_of_readme(text):
    """What stands before the limits, and the limits."""
    before, _, after = text.partition("\n## Limits\n")
    return before, after.partition("\n## ")[0]


def what_is_long(text):
    before, limits = parts_of_readme(text)
    bullets = [line for line in limits.splitlines() if line.strip()]
    wrong = []
    if pages.n_words(before) > README_WORDS:
        wrong.append(f"{pages.n_words(before)} words before Limits")
    if pages.n_words(limits) > LIMITS_WORDS:
        wrong.append(f"{pages.n_words(limits)} words of limits")
    if len(bullets) != LIMITS or not all(re.match(r"- .*\]\(docs/limits.md", b) for b in bullets):
        wrong.append("the limits are not eight bullets with a link to their page")
    return wrong


def test_the_readme_is_read_in_three_minutes_and_its_limits_in_one():
    text = read("README.md")
    assert what_is_long(text) == []
    assert what_is_long(text.replace("## Limits", "word " * 700 + "\n## Limits", 1)) != []
    assert what_is_long(text.replace("## Limits\n\n", "## Limits\n\n- One more.\n", 1)) != []
    assert what_is_long(text.replace("](docs/limits.md#storage)", "]", 1)) != []
    assert what_is_long(text.replace("do not shrink]", "do not" + " word" * 120 + "]", 1)) != []


def test_the_first_sample_shadows_no_builtin():
    first = next(b for b in pages.blocks(read("README.md")) if b.kind == "python")
    assigned = set(re.findall(r"\b(\w+)(?:, \w+)* =|for (\w+)", first.code))
    import builtins

    assert not {name for pair in assigned for name in pair} & set(dir(builtins))
    assert "lazy(" in first.code and first.code.count("\n") <= 8


@pytest.fixture(scope="module")
def runner():
    """Runs a page or a program in a process of its own; "" or what went wrong."""
    command = [sys.executable, str(ROOT / "tests/python/pages.py"), "--serve"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:

        def run(page, folder, *options):
            print(json.dumps([str(page), str(folder), *options]), file=server.stdin, flush=True)
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.long if pages.is_slow(read(n)) else ())
        for n in ["README.md", *PAGES]
    ],
)
def test_the_examples_of_a_page_run_and_print_what_it_says(name, runner, tmp_path):
    for package in pages.needs(read(name)):
        pytest.importorskip(package)
    wrong = runner(ROOT / name, tmp_path)
    assert not wrong, wrong


def test_the_docstring_of_each_public_name_has_an_example_that_runs(runner, tmp_path):
    names = list(docstring_examples.names())
    wrong = runner(ROOT / "tests/python/docstring_examples.py", tmp_path, *names)
    assert not wrong, wrong
    assert {"koila.lazy", "koila.OutOfMemory", "koila.memlab.measure"} <= set(names)


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("No example.", "f has no example"),
        (">>> 1 + 1\n3\n", "Got:\n    2"),
        (">>> lost()\n", "NameError"),
        (">>> 1 + 1\n2\n", ""),
    ],
)
def test_a_wrong_example_of_a_docstring_is_found(text, wrong):
    said = docstring_examples.wrong_of(text, "f")
    assert wrong in said and bool(wrong) == bool(said)


@pytest.mark.parametrize("name", ["README.md", *PAGES])
def test_the_links_of_a_page_lead_somewhere(name):
    assert pages.broken_links(ROOT / name) == []


def test_no_page_is_without_a_picture_or_an_example():
    assert [n for n in PAGES if not pages.has_picture_or_example(read(n))] == []
    assert not pages.has_picture_or_example("# Words\n\nNothing but [words](x.md).\n")


PICTURE = re.compile(r"!\[(\w[^\]]{20,})\]\(([^)]+)\)")


def test_each_page_of_the_memory_laboratory_has_a_picture_told_in_words():
    laboratory = [n for n in PAGES if n.startswith("docs/memlab/")]
    assert [n for n in laboratory if not PICTURE.search(read(n))] == [] and len(laboratory) == 7
    assert not PICTURE.search("![](time.png)") and not PICTURE.search(
        "[A curve of the memory](a.md)"
    )


def missing_of_the_reference(page, names):
    return [n for n in names if not re.search(rf"::? koila\.(?:\w+\.)*{n}$", page, re.MULTILINE)]


def test_every_public_name_is_in_the_reference():
    import koila
    from koila import memlab

    page = read("docs/reference/api.md")
    assert missing_of_the_reference(page, koila.__all__) == []
    assert missing_of_the_reference(page.replace("koila.lazy\n", "\n"), ["lazy"]) == ["lazy"]
    assert missing_of_the_reference(read("docs/reference/memlab.md"), memlab.__all__) == []


def test_the_site_shows_a_comment_only_where_it_is_code():
    spec = importlib.util.spec_from_file_location("conf_of_the_site", ROOT / "docs/conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    code = "```text\n<!-- run\nx = 1\n-->\n```\n"
    source = [f"<!-- needs: torch -->\n{code}<!-- run\ny = 2\n-->\n<!-- {{toctree}}\nstart\n-->\n"]
    conf.shown(None, "index", source)
    assert source[0] == f"{code}```{{toctree}}\nstart\n```\n"


def column_of(text, rows, name):
    """The numbers of one column of a table of Markdown whose first column is headed `rows`, by the
    names of its rows; a range is two numbers."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *lines = (
            [c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()
        )
        if head[0] == rows and name in head:
            k = head.index(name)
            return {line[0]: [float(n) for n in line[k].split("-")] for line in lines}
    raise KeyError(name)


def costs_of(bench):
    """The times of the rows of docs/understand/cost.md, from bench/README.md."""

    def told(numbers):
        low, high = min(min(n) for n in numbers), max(max(n) for n in numbers)
        return f"{low:.2f} to {high:.2f} ×" if low < high else f"{low:.2f} ×"

    whole = column_of(bench, "model", "whole : plain, time")
    slices = column_of(bench, "model", "slices : by hand, time")
    compiled = column_of(bench, "model", "koila, compiled")
    own = column_of(bench, "model", "`koila.compile()` : by hand")
    by_norm = {False: [], True: []}
    for model, numbers in slices.items():
        by_norm["batch norm" in model].append(numbers)
    rows = (whole.values(), by_norm[False], by_norm[True], compiled.values(), own.values())
    return [told(n) for n in rows]


def test_the_costs_are_those_of_the_benches():
    bench, page = read("bench/README.md"), read("docs/understand/cost.md")
    expected = costs_of(bench)
    table = page[page.index("| |") : page.index("```sh")].strip()
    assert [row[2] for row in rows_of(table)] == expected
    assert expected[0].replace(" ×", " times plain") in " ".join(read("README.md").split())
    worse = bench.replace("| 1.00-1.15 |", "| 1.00-1.25 |", 1)
    assert costs_of(worse)[0] == expected[0].replace("1.15", "1.25") != expected[0]


TABLE = re.compile(r"<!-- table: (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
TABLES = {
    recipe: table.strip()
    for n in PAGES
    if "recipes/" in n
    for recipe, table in TABLE.findall(read(n))
}


@pytest.mark.parametrize("recipe", TABLES)
def test_a_recipe_trains_under_a_third_of_the_memory_of_plain_pytorch(recipe, runner, tmp_path):
    name, *options = recipe.split()
    need_packages(name)
    wrong = runner(ROOT / "examples" / name, tmp_path, *options, "--steps", "2")
    assert not wrong, wrong
    told = re.search(
        r"needs ([\d.]+) MiB, the budget is ([\d.]+) MiB: (\d+) slices .* measured ([\d.]+) MiB",
        (tmp_path / "printed.txt").read_text(encoding="utf-8"),
    )
    needs, budget, slices, measured = map(float, told.groups())
    assert measured <= budget < needs / 2 and slices > 1


def rows_of(table):
    """The cells of a table of Markdown, without its head."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def differing(told, measured):
    """Budgets and peaks of a table that are over 15 % off (libraries differ between machines)."""
    pairs = zip(rows_of(told), rows_of(measured), strict=True)
    cells = [(a[k], b[k]) for a, b in pairs for k in (1, 2) if a[k] != "–"]
    return [(a, b) for a, b in cells if abs(float(a) - float(b)) > 0.15 * float(b)]


@pytest.mark.long
@pytest.mark.parametrize("recipe", TABLES)
def test_the_table_of_a_recipe_is_what_it_prints(recipe, runner, tmp_path):
    name, *options = recipe.split()
    need_packages(name)
    wrong = runner(ROOT / "examples" / name, tmp_path, *options, "--table", "--turns", "1")
    assert not wrong, wrong
    printed = (tmp_path / "printed.txt").read_text(encoding="utf-8")
    table = "\n".join(line for line in printed.splitlines() if line.startswith("|"))
    assert differing(TABLES[recipe], table) == []


def test_a_stale_table_is_found():
    for table in TABLES.values():
        assert len(rows_of(table)) == 4 and differing(table, table) == []
        peak = rows_of(table)[2][2]
        assert differing(table.replace(peak, f"{2 * float(peak):.1f}"), table) != []


def commands_of(text):
    """The lines of a page's shell blocks, without their comments."""
    lines = "\n".join(b.code for b in pages.blocks(text) if b.kind == "sh").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def missing_of(command):
    """What a shell command of a page names and the repository lacks: a script or a target."""
    words = command.split()
    if words[:1] == ["make"]:
        targets = [w for w in words[1:] if "=" not in w]
        known = re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)
        return [t for t in targets if t not in known]
    scripts = [w for w in words if re.fullmatch(r"(bench|examples|tools|tests)/\S+\.py", w)]
    return [s for s in scripts if not (ROOT / s).exists()]


def test_the_commands_of_the_pages_name_what_there_is():
    commands = [(n, c) for n in ["README.md", *PAGES] for c in commands_of(read(n))]
    assert [(n, c) for n, c in commands if missing_of(c)] == [] and len(commands) > 2
    assert missing_of("make tset") == ["tset"]
    assert missing_of("python examples/gone.py --table") == ["examples/gone.py"]


@pytest.mark.parametrize(
    "page, wrong",
    [
        ("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n", ""),
        ("<!-- run\nx = 2\n-->\n```python\nprint(x)\n```\n```text\n2\n```\n", ""),
        ("```python\nprint('a 3 b')\n```\n```text\na ... b\n```\n", ""),
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "the page says\n2\n"),
        ("```python\nprint(1)\n```\nwords\n```text\n2\n```\n", ""),
        ("\n```python\nlost()\n```\n", 'page.py", line 3, in <module>\n    lost()'),
        ("<!-- run\n1 / 0\n-->\n", "ZeroDivisionError"),
        ("```python\nimport os\nos.abort()\n```\n", "ended with status"),
    ],
)
def test_a_wrong_example_is_found(page, wrong, runner, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(page, encoding="utf-8")
    answer = runner(path, tmp_path)
    assert wrong in answer and bool(wrong) == bool(answer)


def test_a_broken_link_is_found(tmp_path):
    other = tmp_path / "other.md"
    other.write_text("# Two words: `a_b`, c\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](gone.md) [c](other.md#two-words-a_b-c) [d](other.md#gone) "
        "[e](https://example.org) `[f](no_link.md)`\n<!-- [g](hidden.md) -->\n",
        encoding="utf-8",
    )
    assert pages.broken_links(page) == ["gone.md", "other.md#gone"]

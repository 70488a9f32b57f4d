"""The site: Sphinx with MyST (Markdown) and Furo, from the pages in this folder and the docstrings.
`make docs` builds it into build-docs/html; nothing on its pages comes from the network."""

import pathlib
import re

import koila

project = "koila"
author = "koila's contributors"
version = release = koila.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
source_suffix = {".md": "markdown"}
root_doc = "index"
language = "en"

# ---- Markdown
myst_heading_anchors = 3
myst_links_external_new_tab = False

# ---- docstrings: single backticks are code, as everywhere in koila
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# ---- pages
html_theme = "furo"
html_title = f"koila {version}"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
html_theme_options = {"footer_icons": []}


DOCS = pathlib.Path(__file__).parent
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+\.md)(?:#[^)]*)?\)")
# A comment; or a block of code, whose comments are shown.
_COMMENT = re.compile(r"(?P<code>^```.*?^```)|<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
_SECTIONS = {"Args:", "Attributes:", "Example:", "Raises:", "Returns:"}


def shown(_app, docname, source):
    """A page as the site shows it: its table of contents, which is a comment for those who read the
    file itself, without the comments that only tests read. Markdown outside of this folder can be
    downloaded, as other files of the repository can."""
    folder = (DOCS / docname).parent

    def link(m):
        is_outside = not (folder / m[2]).resolve().is_relative_to(DOCS)
        return f"{{download}}`{m[1]} <{m[2]}>`" if is_outside else m[0]

    text = re.sub(r"<!-- (\{toctree\}.*?)-->", r"```\1```", source[0], flags=re.DOTALL)
    source[0] = _LINK.sub(link, _COMMENT.sub(lambda m: m["code"] or "", text))


def as_restructured_text(_app, _what, _name, _object, _options, lines):
    """Docstrings are plain text: stars and bars are themselves. `name: what it is`, with indented
    lines below, is an item of a list."""
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        parts = re.split(r"(`[^`]*`)", line)
        parts[::2] = (re.sub(r"([*|])", r"\\\1", part) for part in parts[::2])
        lines[i] = "".join(parts)
    is_item = False
    for i, line in enumerate(lines):
        starts = re.match(r"\w[^:]*: ", line)
        hangs = i + 1 < len(lines) and lines[i + 1].startswith("    ")
        if starts and line.strip() not in _SECTIONS and (hangs or is_item):
            lines[i] = "* " + line
            is_item = True
        elif is_item and line.startswith("    "):
            lines[i] = line[2:]
        else:
            is_item = False
    for i in range(len(lines) - 1, 0, -1):
        if lines[i].startswith("* ") and lines[i - 1][:1] not in ("", "*", " "):
            lines.insert(i, "")


def setup(app):
    app.connect("source-read", shown)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)

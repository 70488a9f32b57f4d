"""The pictures of a notebook: one is executed, with a kernel of its own, and its outputs are
read."""

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = (
    "%load_ext koila.memlab\nimport torch\nfrom koila.memlab import LineProfiler, "
    "MemReporter\nnet = torch.nn.Linear(100, 100)",
    "%%mlrun -c hits -f work\ndef work():\n    a = torch.empty(1_000_000)  # <b>4 MB</b>\n    "
    "return net(torch.ones(2, 100))\nout = work()",
    "with LineProfiler(work) as p:\n    work()\np.display(columns=('rise', 'backward'))",
    "%mlrun -c nope work()",
    "print(out.shape, MemReporter(net).report())",
)


def test_a_notebook_shows_tables_with_bars_and_mistakes_in_one_line(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    nbclient.NotebookClient(
        book,
        timeout=120,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [cell.outputs for cell in book.cells]
    assert not outputs[0]
    for shown, column in ((outputs[1], "hits"), (outputs[2], "backward")):
        [result] = [o for o in shown if o.output_type == "execute_result"]
        html, text = result.data["text/html"], result.data["text/plain"]
        assert (
            html.startswith('<h3><span style="font-family: monospace">work</span></h3><div')
            and "overflow-x: auto" in html
            and "linear-gradient" in html
            and column in html
        )
        assert "&lt;b&gt;4 MB&lt;/b&gt;" in html and "<b>4 MB" not in html and "<script" not in html
        assert text.startswith("## work\n") and "3.81M" in text and "3.81M" in html
    stream = "".join(o.get("text", "") + "".join(o.get("traceback", ())) for o in outputs[3])
    assert "three dot-separated parts" in stream and "Traceback" not in stream
    assert (
        "torch.Size([2, 100])" in outputs[4][-1].text
        and "39.06K" in outputs[4][-1].text
        and "(100, 100)" in outputs[4][-1].text
    )

"""``ortc inspect --html``: what the page holds, that it loads nothing, and that no name in a model can become part of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from timing import seconds

from ortc import page
from ortc.artifacts import compile
from ortc.page import Span, ticks, timeline
from ortc.recipe import parse_recipe
from ortc.report import make_report

pytestmark = pytest.mark.compiler

MODELS = Path(__file__).parent / "data" / "models"
EVIL = "</script><b onmouseover=alert(1)>&\"'\u202e\x1b]"
HALVES = {"pipeline": {"stages": 2, "micro_batches": 4}}


class Page(HTMLParser):
    """A page taken apart: elements with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("report")
    compile(MODELS / "mlp.legacy.onnx", root / "out", parse_recipe({**HALVES, "parameters": {"freeze": ["fc1.bias"]}}))
    rows = [{"step": s, "epoch": 1, "loss": 3.0 / s, "lr": 0.001, "time": 1.0} for s in range(1, 9)]
    rows += [{"step": 8, "eval_loss": 0.5}, {"step": 9, "loss": None}]
    lines = [json.dumps(row) for row in rows]
    (root / "out" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 10, "lo']))
    return root / "out"


def test_what_the_page_holds(folder):
    text = make_report(folder)
    found = Page(text)
    assert found.open == [], "everything is closed"
    assert [s["id"] for s in found.all("section")] == [
        "facts", "stages", "timeline", "memory", "operators", "passes", "runs", "weights",
    ]  # fmt: skip
    words = "\n".join(found.text)
    for expected in (
        "mlp.legacy.onnx",
        "1f1b",
        "2 on 2 ranks",
        "rank 1",
        "stage 1 backward",
        "frozen by the recipe",
        "gradients",
    ):
        assert expected in words
    names = {p["name"] for p in json.loads((folder / "plan.json").read_text())["parameters"]}
    assert names <= set(found.text)
    titles = [t for t in found.text if re.match(r"\d[FB]\d: ", t)]
    assert len(titles) == 16, "each action of two ranks, four micro-batches, has its name and time"
    assert "1F3: stage 1, micro-batch 3, forward" in " ".join(titles)
    assert {"loss", "training", "evaluation", "lr"} <= set(found.text)


def test_the_same_folder_gives_the_same_page(folder):
    assert make_report(folder) == make_report(folder)


def test_nothing_is_loaded(folder):
    text = make_report(folder)
    found = Page(text)
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert not any(found.all(tag) for tag in ("link", "img", "iframe", "object", "embed", "base", "form"))
    assert all((a["href"] or "").startswith("#") for a in found.all("a"))
    assert all("src" not in attributes for _, attributes in found.elements)
    policy = next(m["content"] for m in found.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_live_memory_is_that_of_the_largest_tensors(folder):
    """In the first stage's forward at batch 8: x W1ᵀ, [8, 128] in float32, and the Relu of it, which goes to the next stage."""
    words = make_report(folder, sizes={"batch": 8})
    section = words.partition('id="memory"')[2].partition("</section>")[0]
    row = next(r for r in section.split("<tr>") if "stage 0 forward" in r)
    assert ">8 KiB<" in row
    assert ">16 KiB<" in next(r for r in make_report(folder, sizes={"batch": 16}).split("<tr>") if "stage 0 forward" in r)


def hostile_model(path: Path) -> None:
    """Every name that a model can have is an attack."""
    proto = onnx.load_model(MODELS / "mlp.legacy.onnx")
    names = {v.name for v in [*proto.graph.input, *proto.graph.output, *proto.graph.initializer]}
    names |= {n for node in proto.graph.node for n in (*node.input, *node.output) if n}
    new = {n: f"{n}{EVIL}" for n in names}
    for node in proto.graph.node:
        node.name += EVIL
        for side in (node.input, node.output):
            side[:] = [new.get(n, n) for n in side]
    for value in [*proto.graph.input, *proto.graph.output, *proto.graph.initializer]:
        value.name = new[value.name]
    for value in [*proto.graph.input, *proto.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = EVIL
    del proto.graph.value_info[:]
    onnx.save(proto, path)


def test_names_stay_text(ortc, tmp_path):
    hostile_model(tmp_path / f"{EVIL[2:8]}.onnx")
    compile(tmp_path / f"{EVIL[2:8]}.onnx", tmp_path / "out", parse_recipe(HALVES))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, EVIL: 1.0}) + "\n")
    trace = {"traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"measured{EVIL}"}},
        {"ph": "X", "name": "0F0", "pid": 0, "tid": 0, "ts": 0, "dur": 5},
        {"ph": "X", "name": f"a{EVIL}", "cat": "Node", "pid": 1, "tid": 0, "ts": 0, "dur": 5, "args": {"op_name": EVIL}},
        {"ph": "X", "name": [1], "pid": {}, "ts": "x", "dur": float("inf"), "args": 3},
        7,
    ]}  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    code, _, err = ortc(
        "inspect", tmp_path / "out", "--html", tmp_path / "r.html", "--profile", tmp_path / "trace.json",
        "--metrics", tmp_path / "metrics.jsonl",
    )  # fmt: skip
    assert code == 0, err
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    found = Page(text)
    assert found.open == []
    assert not found.all("b")
    assert len(found.all("script")) == 1
    assert all(not key.startswith("on") for _, attributes in found.elements for key in attributes)
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert text.count("</script>") == 1
    assert "&lt;/script&gt;&lt;b onmouseover" in text


def test_a_profile_is_shown_beside_the_prediction(folder, tmp_path):
    events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "measured"}}]
    events += [{"ph": "X", "name": f"{r}F0", "pid": 1, "tid": r, "ts": 1e3 * r, "dur": 2e3, "args": {}} for r in (0, 1)]
    (tmp_path / "run.json").write_text(json.dumps({"traceEvents": events}))
    kernel = {"cat": "Node", "ph": "X", "name": "fc1_kernel_time", "pid": 3, "tid": 1, "ts": 0, "args": {"op_name": "Gemm"}}
    (tmp_path / "ort.json").write_text(json.dumps([{**kernel, "dur": 1500}, {**kernel, "dur": 500}]))
    words = Page(make_report(folder, profiles=[tmp_path / "run.json", tmp_path / "ort.json"])).text
    assert "measured: 3 ms" in words
    assert "1F0: forward, 2 ms" in words
    assert "measured, all runs" in words
    assert "2 ms" in words[words.index("Gemm") :][:12]


def test_mistakes(ortc, folder, tmp_path):
    def message(*arguments):
        code, _, err = ortc("inspect", *arguments)
        assert code == 2
        assert err.startswith("ortc: ")
        return err

    out = tmp_path / "r.html"
    assert "of an output folder" in message(MODELS / "mlp.legacy.onnx", "--html", out)
    assert "go with --html" in message(folder, "--size", "batch=3")
    assert "no input has a dimension 'nothing'" in message(folder, "--html", out, "--size", "nothing=3")
    assert "cannot read the profile" in message(folder, "--html", out, "--profile", tmp_path / "no.json")
    (tmp_path / "x.json").write_text("{}")
    assert "is no profile" in message(folder, "--html", out, "--profile", tmp_path / "x.json")
    assert "cannot read the metrics" in message(folder, "--html", out, "--metrics", tmp_path / "no.jsonl")
    out.write_text("something of mine")
    assert "is no report of ortc" in message(folder, "--html", out)
    assert out.read_text() == "something of mine"


def test_a_report_may_be_made_again(ortc, folder, tmp_path):
    for _ in range(2):
        assert ortc("inspect", folder, "--html", tmp_path / "r.html")[:2] == (
            0,
            f"{tmp_path / 'r.html'}: open it in a browser\n",
        )
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith(page.MARK)


def test_ten_thousand_nodes(tmp_path):
    """A large graph gives a page that a browser opens, in less time than the compilation took."""
    nodes = [
        helper.make_node("Mul" if i % 2 else "Tanh", [f"v{i}", "w"] if i % 2 else [f"v{i}"], [f"v{i + 1}"], name=f"n{i}")
        for i in range(2400)
    ]
    ports = [[helper.make_tensor_value_info(name, 1, ["N", 4])] for name in ("v0", "v2400")]
    weight = onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")
    graph = helper.make_graph(nodes, "chain", *ports, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    compiling = seconds(lambda: compile(tmp_path / "m.onnx", tmp_path / "out", parse_recipe({"loss": [{"name": "mse"}]})))
    assert len(onnx.load_model(tmp_path / "out" / "stage-0" / "train.onnx").graph.node) > 8000
    pages: list[str] = []
    reporting = seconds(lambda: pages.append(make_report(tmp_path / "out")))
    assert reporting < compiling, f"report {reporting:.1f} s, compilation {compiling:.1f} s"
    assert len(pages[0]) < 200_000


def test_long_timelines_are_drawn_as_areas():
    rows = [(f"rank {r}", [Span(i, i + 1, "F", f"{r}F{i}", "t") for i in range(100)]) for r in range(64)]
    text = timeline(rows, str, "many")
    assert "<title>" not in text
    assert text.count("<path") == 1
    assert len(text) < 400_000


def test_ticks():
    assert ticks(0, 10) == [0, 2.5, 5, 7.5, 10]
    assert ticks(0, 0) == [0]
    assert ticks(0.2, 0.9)[0] <= 0.2
    assert ticks(0.2, 0.9)[-1] >= 0.9
    assert ticks(0, float("inf")) == [0]

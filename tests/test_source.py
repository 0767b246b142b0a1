"""Reading a model: every fault of a file is told in words; weights are not read; safetensors files are whole."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors
import safetensors.numpy
from onnx import TensorProto, helper

from ortc.errors import ModelError
from ortc.source import MAX_OPSET, load_model, write_safetensors


def model(weight: TensorProto | None = None, opset: int = 17, nodes: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    """y = x · w, with w of shape (3, 4)."""
    weight = weight or onnx.numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(3, 4), "w")
    graph = helper.make_graph(
        nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def external(location: str, offset: int | None = None, length: int | None = None, name: str = "w") -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[3, 4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def write(folder: Path, proto: onnx.ModelProto, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def error(path: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    return str(caught.value)


def test_a_model_with_spaces_and_other_letters_in_its_name(tmp_path: Path):
    folder = tmp_path / "größe und 重み"
    folder.mkdir()
    (folder / "wägung 1.bin").write_bytes(np.arange(12, dtype=np.float32).tobytes())
    loaded = load_model(str(write(folder, model(external("wägung 1.bin")), "mein modell – é.onnx")))
    np.testing.assert_array_equal(loaded.graph.initializers["w"].const_value.numpy(), np.arange(12).reshape(3, 4))


def test_a_model_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "w.bin").write_bytes(np.arange(12, dtype=np.float32).tobytes())
    write(tmp_path, model(external("w.bin")))
    monkeypatch.chdir(tmp_path)
    loaded = load_model("model.onnx")
    monkeypatch.chdir("/")
    assert loaded.graph.initializers["w"].const_value.numpy()[2, 3] == 11


def test_no_such_file(tmp_path: Path):
    assert f"there is no file {tmp_path / 'none.onnx'}" in error(tmp_path / "none.onnx")


def test_a_folder(tmp_path: Path):
    write(tmp_path, model(), "a.onnx")
    assert "is a folder, not an ONNX file; it holds a.onnx" in error(tmp_path)


def test_an_empty_file(tmp_path: Path):
    (tmp_path / "m.onnx").touch()
    assert "m.onnx is empty" in error(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "data",
    [
        b"hello world, this is text\n",
        b"PK\x03\x04" + bytes(100),
        bytes(64),
        b"\x80\x02}q\x00.",
        json.dumps({"a": 1}).encode(),
    ],
)
def test_not_an_onnx_file(tmp_path: Path, data: bytes):
    (tmp_path / "m.onnx").write_bytes(data)
    assert "not an ONNX" in error(tmp_path / "m.onnx")


def test_a_truncated_file_at_every_length(tmp_path: Path):
    data = model().SerializeToString()
    path = tmp_path / "m.onnx"
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        text = error(path)
        assert "cut off" in text, (length, text)


def test_a_graph_without_outputs(tmp_path: Path):
    proto = model()
    del proto.graph.output[:]
    assert "no outputs" in error(write(tmp_path, proto))


def test_a_graph_that_was_cut_with_a_tool(tmp_path: Path):
    proto = model(nodes=[helper.make_node("Add", ["mm_out", "w"], ["y"], name="bias")])
    assert "node 'bias' (Add) reads 'mm_out'" in error(write(tmp_path, proto))
    proto = model()
    proto.graph.output[0].name = "elsewhere"
    assert "nothing makes the output 'elsewhere'" in error(write(tmp_path, proto))


def test_reading_what_nobody_makes_in_a_branch(tmp_path: Path):
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "ghost"], ["r"], name="inner")],
        "b",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
    ]
    assert "node 'inner' (Add) reads 'ghost'" in error(write(tmp_path, model(nodes=nodes)))


@pytest.mark.parametrize("opset", [6, MAX_OPSET + 1])
def test_an_opset_out_of_range(tmp_path: Path, opset: int):
    text = error(write(tmp_path, model(opset=opset)))
    assert f"opset {opset};" in text
    assert f"7 to {MAX_OPSET}" in text


def test_an_ir_version_that_is_too_new(tmp_path: Path):
    proto = model()
    proto.ir_version = onnx.IR_VERSION + 1
    assert f"IR version {onnx.IR_VERSION + 1}" in error(write(tmp_path, proto))


def test_operators_of_other_domains_and_functions_are_left_alone(tmp_path: Path):
    proto = model(nodes=[helper.make_node("Mystery", ["x", "w"], ["y"], domain="my.own")])
    proto.opset_import.append(helper.make_opsetid("my.own", 99))
    assert load_model(write(tmp_path, proto)).graph[0].op_type == "Mystery"


def test_weights_with_too_few_bytes(tmp_path: Path):
    weight = onnx.numpy_helper.from_array(np.zeros((3, 4), np.float32), "w")
    weight.raw_data = weight.raw_data[:-4]
    assert "the weight 'w' has 44 bytes" in error(write(tmp_path, model(weight)))


# ---- external data ---------------------------------------------------------------------------------------------------


def test_external_data_that_is_missing(tmp_path: Path):
    text = error(write(tmp_path, model(external("w.bin"))))
    assert "the data of the weight 'w' is missing" in text
    assert str(tmp_path / "w.bin") in text


@pytest.mark.parametrize(("offset", "length"), [(None, None), (8, 48), (0, None), (10**12, 48)])
def test_external_data_that_is_too_short(tmp_path: Path, offset: int | None, length: int | None):
    (tmp_path / "w.bin").write_bytes(bytes(44 if offset in (None, 0) else 48))
    assert "is cut off" in error(write(tmp_path, model(external("w.bin", offset, length))))


def test_external_data_with_a_length_that_does_not_fit(tmp_path: Path):
    (tmp_path / "w.bin").write_bytes(bytes(100))
    assert "has 40 bytes of data" in error(write(tmp_path, model(external("w.bin", 0, 40))))


@pytest.mark.parametrize("location", ["{outside}/w.bin", "../w.bin", "sub/../../w.bin", "link.bin", "linked/w.bin"])
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str):
    outside, inside = tmp_path / "out", tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    for folder in (outside, tmp_path):
        (folder / "w.bin").write_bytes(bytes(48))
    (inside / "link.bin").symlink_to(outside / "w.bin")
    (inside / "linked").symlink_to(outside)
    text = error(write(inside, model(external(location.format(outside=outside)))))
    assert "lies outside of the model's folder" in text
    assert "refused" in text


def test_external_data_in_a_folder_below_or_behind_a_link_that_stays_inside(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "real.bin").write_bytes(np.ones(12, np.float32).tobytes())
    (tmp_path / "w.bin").symlink_to(tmp_path / "sub" / "real.bin")
    for location in ("sub/real.bin", "w.bin"):
        loaded = load_model(write(tmp_path, model(external(location))))
        assert loaded.graph.initializers["w"].const_value.numpy().sum() == 12


def test_external_data_with_a_second_hard_link_is_refused(tmp_path: Path):
    (tmp_path / "w.bin").write_bytes(bytes(48))
    os.link(tmp_path / "w.bin", tmp_path / "other.bin")
    assert "hard links" in error(write(tmp_path, model(external("w.bin"))))


def test_external_data_of_constants_branches_and_functions_is_checked(tmp_path: Path):
    constant = helper.make_node("Constant", [], ["k"], name="k", value=external("k.bin", name="k"))
    nodes = [constant, helper.make_node("MatMul", ["x", "k"], ["y"])]
    assert "attribute 'value' of node 'k'" in error(write(tmp_path, model(nodes=nodes)))

    result = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "b"], ["r"])], "b", [], [result], [external("b.bin", name="b")]
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
    ]
    assert "the weight 'b' is missing" in error(write(tmp_path, model(nodes=nodes)))

    proto = model(nodes=[helper.make_node("F", ["x"], ["y"], domain="f")])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    body = [constant, helper.make_node("MatMul", ["a", "k"], ["z"])]
    proto.functions.append(helper.make_function("f", "F", ["a"], ["z"], body, imports))
    proto.opset_import.append(imports[1])
    assert "attribute 'value' of node 'k'" in error(write(tmp_path, proto))
    (tmp_path / "k.bin").write_bytes(bytes(48))
    load_model(write(tmp_path, proto))


# ---- safetensors -----------------------------------------------------------------------------------------------------

TYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
]


def test_what_is_written_is_read_by_the_safetensors_library(tmp_path: Path):
    rng = np.random.default_rng(0)
    arrays = {f"t.{kind}/é": (rng.normal(size=(3, 2)) * 9).astype(kind) for kind in TYPES}
    arrays |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    write_safetensors(tmp_path / "t.safetensors", {k: ir.tensor(v) for k, v in arrays.items()}, {"step": "7"})
    found = safetensors.numpy.load_file(tmp_path / "t.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with safetensors.safe_open(tmp_path / "t.safetensors", "numpy") as file:
        assert file.metadata() == {"step": "7"}


def test_bfloat16_keeps_its_bits(tmp_path: Path):
    array = np.array([1.5, -2.0, 3.0], ml_dtypes.bfloat16)
    write_safetensors(tmp_path / "t", {"b": ir.tensor(array)})
    data = (tmp_path / "t").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    assert json.loads(data[8 : 8 + size])["b"] == {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}
    assert data[8 + size :] == array.tobytes()


def test_the_bytes_do_not_depend_on_the_order_and_every_tensor_is_aligned(tmp_path: Path):
    arrays = {"flag": np.ones(3, np.bool_), "d": np.ones(1), "h": np.ones(3, np.float16), "f": np.ones(5, np.float32)}
    write_safetensors(tmp_path / "a", {k: ir.tensor(v) for k, v in arrays.items()}, {"x": "1", "a": "2"})
    write_safetensors(tmp_path / "b", {k: ir.tensor(arrays[k]) for k in reversed(arrays)}, {"a": "2", "x": "1"})
    data = (tmp_path / "a").read_bytes()
    assert data == (tmp_path / "b").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    for name, array in arrays.items():
        assert header[name]["data_offsets"][0] % array.dtype.itemsize == 0


def test_a_type_that_safetensors_does_not_have_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="'z' has the type COMPLEX64"):
        write_safetensors(tmp_path / "t", {"z": ir.tensor(np.zeros(2, np.complex64))})


def test_data_that_was_cut_after_the_model_was_read_is_noticed(tmp_path: Path):
    weight = external("w.bin")
    weight.dims[:] = [3, 40]  # small ones are read with the model
    (tmp_path / "w.bin").write_bytes(bytes(480))
    weights = {"w": load_model(write(tmp_path, model(weight))).graph.initializers["w"].const_value}
    (tmp_path / "w.bin").write_bytes(bytes(20))
    with pytest.raises(ModelError, match="'w'"):
        write_safetensors(tmp_path / "t", weights)


def test_small_external_tensors_are_read_with_the_model(tmp_path: Path):
    """As they are, whatever becomes of the file; a type of half a byte too."""
    (tmp_path / "w.bin").write_bytes(np.arange(12, dtype="<f4").tobytes())
    found = load_model(write(tmp_path, model(external("w.bin"))))
    (tmp_path / "w.bin").unlink()
    value = found.graph.initializers["w"].const_value
    assert np.array_equal(value.numpy(), np.arange(12, dtype=np.float32).reshape(3, 4))
    assert value.name == "w"

    (tmp_path / "w.bin").write_bytes(bytes([0x21, 0x43, 0x65]))
    weight = external("w.bin")
    weight.data_type, weight.dims[:] = onnx.TensorProto.INT4, [2, 3]
    value = load_model(write(tmp_path, model(weight))).graph.initializers["w"].const_value
    assert value.numpy().astype(int).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_large_external_weights_are_never_in_memory(tmp_path: Path):
    """600 MB of weights (a sparse file) with a peak that is far below."""
    count = 150_000_000
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(4 * count)
    weight = external("w.bin")
    weight.dims[:] = [3, count // 3]
    write(tmp_path, model(weight))
    script = (
        "import resource, sys\n"
        "from ortc.source import load_model, write_safetensors\n"
        "model = load_model(sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_safetensors(sys.argv[2], {'w': model.graph.initializers['w'].const_value})\n"
        "print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    out = tmp_path / "t.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.onnx"), str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = (int(kilobytes) / 1024 for kilobytes in done.stdout.split())
    assert after < before + 50
    assert out.stat().st_size > 4 * count
    out.unlink()

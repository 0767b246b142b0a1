"""Weights from other tools and back: PyTorch's own files (``data/make_weights.py``), names, shapes, and hostile files."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from on_device import is_there
from safetensors.numpy import load_file, save_file

from ortc.artifacts import compile
from ortc.errors import CheckpointError
from ortc.recipe import parse_recipe
from ortc.runtime import ort_checkpoint, pytorch_file
from ortc.runtime.exchange import export_weights, import_weights, renamed
from ortc.runtime.trainer import Trainer
from ortc.runtime.weight_files import open_weights

MODELS = Path(__file__).parent / "data" / "models"
FILES = Path(__file__).parent / "data" / "weights"
MODEL = MODELS / "mlp_dropout.legacy_train.onnx"
BCE = [{"name": "bce_with_logits"}]


@pytest.fixture
def folder(tmp_path) -> Path:
    compile(MODEL, tmp_path / "f", parse_recipe({"loss": BCE}))
    return tmp_path / "f"


@pytest.fixture
def trained(folder) -> Path:
    with Trainer(folder, threads=1) as trainer:
        for _ in range(2):
            trainer.step(batch())
        trainer.save()
    return folder


def batch() -> dict[str, np.ndarray]:
    stored = np.load(MODELS / "mlp_dropout.legacy_train.ref.npz")
    return {"x": stored["in/x"], "labels": stored["target"]}


def values(folder: Path) -> dict[str, np.ndarray]:
    with Trainer(folder, threads=1) as trainer:
        return {name: array.copy() for name, array in trainer.parameters.items()}


def expected() -> dict[str, np.ndarray]:
    return dict(np.load(FILES / "values.npz"))


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# ---- PyTorch's files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "rename"),
    [("state.pt", {}), ("state.safetensors", {}), ("views.pt", {}), ("run.pt", {"model.module.*": "*"})],
)
def test_files_that_pytorch_wrote_are_read(file, rename, folder):
    result = import_weights(folder, FILES / file, rename=rename)
    assert_equal(values(folder), expected())
    assert (len(result.taken), result.missing, result.step) == (6, [], 0)
    assert all(name.startswith("optimizer.") for name in result.unused)


def test_floats_of_another_precision_are_converted_when_asked(folder):
    with pytest.raises(CheckpointError, match=r"'fc1.weight' is bfloat16 in the file and float32 in the model \(--cast"):
        import_weights(folder, FILES / "half.pt")
    import_weights(folder, FILES / "half.pt", cast=True)
    for name, array in values(folder).items():
        np.testing.assert_allclose(array, expected()[name], rtol=2**-8)  # bfloat16 has 8 bits
        assert not (array.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("legacy.pt", "bare pickle"),
        ("module.pt", "names '__main__.Net'"),
        ("script.pt", "TorchScript"),
        ("values.npz", "no data.pkl"),
    ],
)
def test_other_files_of_pytorch_are_refused_with_advice(file, what, folder):
    before = values(folder)
    with pytest.raises(CheckpointError, match=what):
        import_weights(folder, FILES / file)
    assert_equal(values(folder), before)


def test_a_state_dict_that_we_write_has_the_opcodes_of_pytorchs(folder, tmp_path):
    """torch.load reads it (tried by hand; PyTorch is not needed to test): it names no more than torch's own."""
    import_weights(folder, FILES / "state.pt")
    export_weights(folder, tmp_path / "x.pt")
    found, read = pytorch_file.read_file(tmp_path / "x.pt")
    theirs, read_theirs = pytorch_file.read_file(FILES / "state.pt")
    assert list(found) == list(theirs)
    for name, tensor in found.items():
        np.testing.assert_array_equal(read(tensor), read_theirs(theirs[name]))
        assert (tensor.shape, tensor.strides, tensor.dtype) == (theirs[name].shape, theirs[name].strides, theirs[name].dtype)
    with zipfile.ZipFile(tmp_path / "x.pt") as ours, zipfile.ZipFile(FILES / "state.pt") as other:
        assert globals_of(ours.read("archive/data.pkl")) <= globals_of(other.read("state/data.pkl"))


def globals_of(data: bytes) -> set[str]:
    import pickletools

    return {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}


# ---- there and back ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["safetensors", "pt", "h5", "ckpt"])
def test_every_format_there_and_back(ending, trained, tmp_path):
    if ending == "h5":
        pytest.importorskip("h5py")
    wanted = values(trained)
    file = tmp_path / f"w.{ending}"
    source = export_weights(trained, file)
    assert source == trained / "checkpoint" / "step-2"
    compile(MODEL, tmp_path / "g", parse_recipe({"loss": BCE}))
    result = import_weights(tmp_path / "g", file)
    assert_equal(values(tmp_path / "g"), wanted)
    assert result.step == (2 if ending == "ckpt" else 0)  # the only one of them that holds the optimizer's state
    with pytest.raises(CheckpointError, match="exists already"):
        export_weights(trained, file)
    assert export_weights(trained, file, which="none", force=True).name == "step-0"


def test_an_imported_state_of_the_optimizer_goes_on_bit_for_bit(trained, tmp_path):
    export_weights(trained, tmp_path / "w.ckpt")
    compile(MODEL, tmp_path / "g", parse_recipe({"loss": BCE}))
    import_weights(tmp_path / "g", tmp_path / "w.ckpt")
    results = []
    for folder in (trained, tmp_path / "g"):
        with Trainer(folder, threads=1) as trainer:
            results.append(trainer.step(batch()))
    assert results[0] == results[1]


def test_hdf5_holds_names_with_slashes_and_reads_other_tools_datasets(folder, tmp_path):
    h5py = pytest.importorskip("h5py")
    export_weights(folder, tmp_path / "w.h5", rename={"*.weight": "/net/*/weight"})
    with h5py.File(tmp_path / "w.h5") as file:
        assert file["net/fc1/weight"].shape == (32, 12)
    with open_weights(tmp_path / "w.h5") as found:
        assert "/net/fc1/weight" in found.tensors
    with h5py.File(tmp_path / "other.h5", "w") as file:
        for name, array in expected().items():
            file[f"layers/{name.replace('.', '/')}"] = array
    rename = {"layers/*/*": "*.*"}
    import_weights(folder, tmp_path / "other.h5", rename=rename)
    assert_equal(values(folder), expected())


@pytest.mark.skipif(not is_there(), reason="the installed ONNX Runtime has no on-device training")
def test_onnx_runtime_reads_our_checkpoint_and_we_read_its(trained, tmp_path):
    from onnxruntime.capi import _pybind_state

    export_weights(trained, tmp_path / "ours.ckpt")
    state = _pybind_state.load_checkpoint(str(tmp_path / "ours.ckpt"))
    _pybind_state.save_checkpoint(state, str(tmp_path / "theirs.ckpt"), True)
    ours, theirs = (ort_checkpoint.read_checkpoint(tmp_path / f"{name}.ckpt") for name in ("ours", "theirs"))
    wanted = values(trained)
    assert_equal(theirs.trained, wanted)
    assert_equal(ours.trained, wanted)
    assert (theirs.step, ours.step) == (2, 2)
    assert theirs.states.keys() == ours.states.keys()
    assert {slot for _, slot in theirs.states} == {"momentum0", "momentum1"}
    for key, array in theirs.states.items():
        np.testing.assert_array_equal(ours.states[key], array)


@pytest.mark.skipif(not is_there(), reason="the installed ONNX Runtime has no on-device training")
def test_a_checkpoint_of_every_type_and_shape_is_read_by_onnx_runtime(tmp_path):
    """Through get_model_after_loading_checkpoint, which fills a model's initialisers: a scalar, an empty one, odd sizes."""
    from onnxruntime.capi import _pybind_state

    random = np.random.default_rng(0)
    shapes = [(), (0, 3), (1,), (3,), (5, 7)]
    types = ["float32", "float64", "float16", "int64", "int32", "int8", "uint8", "bool"]
    arrays = {f"{t}.{i}": (random.random(s) * 9).astype(t) for t in types for i, s in enumerate(shapes)}
    path = tmp_path / "c"
    ort_checkpoint.write_checkpoint(path, [ort_checkpoint.source(n, a) for n, a in arrays.items()], [])
    assert_equal(ort_checkpoint.read_checkpoint(path).trained, arrays)
    empty = [onnx.numpy_helper.from_array(np.zeros_like(a), n) for n, a in arrays.items()]
    x = onnx.helper.make_tensor_value_info("x", 1, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [x], [x], empty)
    graph.output[0].name = "y"
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    filled = onnx.ModelProto.FromString(_pybind_state.get_model_after_loading_checkpoint(str(path), model.SerializeToString()))
    assert_equal({i.name: onnx.numpy_helper.to_array(i) for i in filled.graph.initializer}, arrays)


# ---- names, shapes, types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rules", "new"),
    [
        ("module.a.b", {"module.*": "*"}, "a.b"),
        ("a.b", {"*": "net.*"}, "net.a.b"),
        ("enc.0.w", {"enc.*.*": "layer/*/*"}, "layer/0/w"),
        ("a", {"a": "b", "*": "c"}, "b"),
        ("x", {"y*": "z*"}, "x"),
        ("a[0].w+", {"a[0].*": "*"}, "w+"),
    ],
)
def test_renaming(name, rules, new):
    assert renamed(name, rules) == new


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, path)
    return path


def test_names_that_lack_are_told_with_what_is_close_and_a_rename_that_fits(folder, tmp_path):
    file = save(tmp_path / "w.safetensors", {f"module.{name}": a for name, a in expected().items()})
    with pytest.raises(CheckpointError, match=r"lacks 6 of the 6") as error:
        import_weights(folder, file)
    assert "'fc1.weight' (is it 'module.fc1.weight'?)" in str(error.value)
    assert "try --rename 'module.*=*'" in str(error.value)
    import_weights(folder, file, rename={"module.*": "*"})
    assert_equal(values(folder), expected())


def test_a_part_is_taken_only_when_asked_and_the_rest_stays(trained, tmp_path):
    before = values(trained)
    some = {name: a for name, a in expected().items() if name.startswith("fc1")} | {"extra": np.zeros(1, np.float32)}
    file = save(tmp_path / "w.safetensors", some)
    with pytest.raises(CheckpointError, match=r"lacks 4 of the 6(.|\n)*--partial"):
        import_weights(trained, file, force=True)
    result = import_weights(trained, file, partial=True, force=True)
    assert (result.missing, result.unused) == ([n for n in before if not n.startswith("fc1")], ["extra"])
    assert_equal(values(trained), before | {n: a for n, a in some.items() if n != "extra"})
    with pytest.raises(CheckpointError, match="lacks 6 of the 6"):
        import_weights(trained, save(tmp_path / "none.safetensors", {"z": np.zeros(1)}), partial=True, force=True)


def test_checkpoints_of_a_run_are_kept_and_passed_over_only_with_force(trained):
    with pytest.raises(CheckpointError, match=r"step-2(.|\n)*--force"):
        import_weights(trained, FILES / "state.pt")
    assert import_weights(trained, FILES / "state.pt", force=True).checkpoint.name == "step-0"
    with Trainer(trained, threads=1) as trainer:
        assert trainer.step_number == 0
    assert (trained / "checkpoint" / "step-2").exists()
    assert_equal(values(trained), expected())


def test_shapes_and_types_that_do_not_fit_are_told_all_at_once(folder, tmp_path):
    wrong = expected() | {"fc1.weight": expected()["fc1.weight"].T, "fc2.bias": np.zeros(16, np.int64), "fc3.bias": np.zeros(6)}
    with pytest.raises(CheckpointError) as error:
        import_weights(folder, save(tmp_path / "w.safetensors", wrong), cast=True)
    text = str(error.value)
    assert (
        "'fc1.weight' is [12, 32] in the file and [32, 12] in the model (--transpose 'fc1.weight' takes it transposed)" in text
    )
    assert "'fc2.bias' is int64 in the file and float32 in the model" in text
    assert "'fc3.bias' is [6] in the file and [5] in the model" in text


def test_a_transposed_matrix_is_taken_when_asked(folder, tmp_path):
    turned = expected() | {"fc1.weight": expected()["fc1.weight"].T}
    file = save(tmp_path / "w.safetensors", turned)
    import_weights(folder, file, transpose=["fc1.*t"])
    assert_equal(values(folder), expected())


def test_a_weight_that_the_model_holds_twice_is_taken_under_either_name(tmp_path):
    """The exporter wrote the embedding a second time, transposed, for the output's product."""
    compile(MODELS / "tied.legacy.onnx", tmp_path / "f")
    wanted = {n: np.random.default_rng(1).standard_normal(a.shape).astype(a.dtype) for n, a in values(tmp_path / "f").items()}
    import_weights(tmp_path / "f", save(tmp_path / "a.safetensors", wanted))
    assert_equal(values(tmp_path / "f"), wanted)
    embedding = wanted.pop("emb.weight")
    import_weights(tmp_path / "f", save(tmp_path / "b.safetensors", wanted | {"onnx::MatMul_33": 2 * embedding.T}))
    assert_equal(values(tmp_path / "f"), wanted | {"emb.weight": 2 * embedding})


def test_globs_that_match_nothing_and_names_that_collide_are_told(folder):
    with pytest.raises(CheckpointError, match=r"--rename fc1.weigth=…: (.|\n)*is it 'fc1.weight'"):
        import_weights(folder, FILES / "state.pt", rename={"fc1.weigth": "x"})
    with pytest.raises(CheckpointError, match="--transpose fc9"):
        import_weights(folder, FILES / "state.pt", transpose=["fc9"])
    with pytest.raises(CheckpointError, match=r"would both be 'fc1\.weight'"):
        import_weights(folder, FILES / "state.pt", rename={"*.bias": "*.weight"})
    with pytest.raises(CheckpointError, match=r"more \*"):
        import_weights(folder, FILES / "state.pt", rename={"fc1.weight": "*"})


# ---- hostile files ----------------------------------------------------------------------------------------------------------


class Evil:
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def zipped(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in members.items():
            archive.writestr(f"archive/data/{name[1:]}", data)
    return path


def tensor(
    size: bytes = b"K\x02\x85", stride: bytes = b"K\x01\x85", offset: bytes = b"K\x00", elements: bytes = b"K\x02"
) -> bytes:
    """A pickle of ``{"w": a float32 tensor}`` whose numbers are as given (opcodes)."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + elements + b"tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89NtR"
    return b"\x80\x02}X\x01\x00\x00\x00w" + call + b"s."


def test_the_pickles_of_the_tests_are_right(tmp_path):
    file = zipped(tmp_path / "w.pt", tensor(), _0=struct.pack("<2f", 1, 2))
    found, read = pytorch_file.read_file(file)
    np.testing.assert_array_equal(read(found["w"]), np.float32([1, 2]))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_code_in_a_pickle_never_runs(protocol, folder, tmp_path):
    target = tmp_path / "made by the pickle"
    file = zipped(tmp_path / "w.pt", pickle.dumps({"w": Evil(target)}, protocol))
    with pytest.raises(CheckpointError, match="is refused, its pickle"):
        import_weights(folder, file)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Evil(target), max(protocol, 2)))
    with pytest.raises(CheckpointError, match="bare pickle"):
        import_weights(folder, tmp_path / "bare.pt")
    assert not target.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        tensor(size=b"K\x03\x85"),  # reaches beyond its storage
        tensor(offset=b"K\x01"),
        tensor(stride=b"K\x02\x85"),
        tensor(stride=b"J\xff\xff\xff\xff\x85"),  # backwards
        tensor(size=b"J\xff\xff\xff\xff\x85"),
        tensor(size=b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85", stride=b"K\x00\x85"),  # one element, repeated
        tensor(elements=b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"),
        tensor(size=b"X\x01\x00\x00\x00a"),
        tensor(size=b"K\x02K\x02\x86"),
        b"\x80\x02X\xff\xff\xff\x7f.",  # a text that is not there
        b"\x80\x02)R.",
        b"\x80\x02ccollections\nOrderedDict\n.",
        b"\x80\x02]}b.",
        b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.",
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x02(X\x02\x00\x00\x00osX\x06\x00\x00\x00systemio.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"",
        b"\x80",
        b"garbage",
    ],
)
def test_pickles_with_wrong_numbers_or_opcodes_are_refused(pickled, folder, tmp_path):
    file = zipped(tmp_path / "w.pt", pickled, _0=struct.pack("<2f", 1, 2))
    with pytest.raises(CheckpointError):
        import_weights(folder, file, rename={"*": "fc1.bias"}, partial=True)
    with pytest.raises(CheckpointError):
        read_all(file)


def read_all(file: Path) -> list[np.ndarray]:
    """All tensors of a file that have the shape of a parameter, which is checked before they are read."""
    found, read = pytorch_file.read_file(file)
    if any(len(t.shape) > 2 or max(t.shape) > 100 for t in found.values()):
        raise CheckpointError("no parameter has such a shape")
    return [read(t) for t in found.values()]


def test_a_place_in_the_memo_takes_no_memory(tmp_path):
    """Python's own unpickler would ask for 32 GiB."""
    assert read_all(zipped(tmp_path / "w.pt", b"\x80\x02}r\xff\xff\xff\xff.")) == []


def test_a_table_that_holds_itself_many_times_is_refused(tmp_path):
    """Nested dictionaries that double at each level: 2**40 names in 400 bytes."""
    level = b"\x80\x02}q\x00"
    for i in range(40):
        level += b"}q" + bytes([i + 1]) + b"(X\x01\x00\x00\x00ah" + bytes([i]) + b"X\x01\x00\x00\x00bh" + bytes([i]) + b"u"
    with pytest.raises(CheckpointError, match="too many names"):
        pytorch_file.read_file(zipped(tmp_path / "w.pt", level + b"."))


def test_zip_bombs_and_cut_archives_are_refused(folder, tmp_path):
    bomb = zipped(tmp_path / "bomb.pt", tensor(), zipfile.ZIP_DEFLATED, _0=bytes(1 << 24))
    with pytest.raises(CheckpointError, match="is compressed"):
        import_weights(folder, bomb)
    whole = (FILES / "state.pt").read_bytes()
    for size in (*range(4, len(whole), 389), len(whole) - 1):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            import_weights(folder, tmp_path / "cut.pt")
    without = zipped(tmp_path / "without.pt", tensor())
    with pytest.raises(CheckpointError, match=r"lacks archive/data/0"):
        read_all(without)


def test_a_changed_byte_of_onnx_runtimes_checkpoint_never_breaks_the_reader(tmp_path):
    """Every byte, to several values: refused, or read with other numbers or names, and nothing else."""
    file = tmp_path / "changed.ckpt"
    tensors = [ort_checkpoint.source(name, np.arange(3, dtype=np.float32)) for name in ("w", "momentum0")]
    ort_checkpoint.write_checkpoint(file, tensors[:1], [], 7, {"w": tensors[1:]})
    whole = bytearray(file.read_bytes())
    refused = 0
    for at in range(len(whole)):
        for value in (0, 1, 0x7F, 0xFF):
            changed = whole.copy()
            changed[at] = value
            file.write_bytes(changed)
            try:
                found = ort_checkpoint.read_checkpoint(file)
                assert all(a.nbytes <= len(whole) for a in (*found.trained.values(), *found.states.values()))
            except CheckpointError:
                refused += 1
    assert len(whole) < refused < 4 * len(whole)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            ort_checkpoint.read_checkpoint(file)


def test_hdf5_that_points_elsewhere_is_refused(folder, tmp_path):
    h5py = pytest.importorskip("h5py")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(5 * 4))
    with h5py.File(tmp_path / "elsewhere.h5", "w") as file:
        file.create_dataset("fc3.bias", shape=(5,), dtype="f4", external=[(str(secret), 0, 20)])
    with pytest.raises(CheckpointError, match="in another file"):
        import_weights(folder, tmp_path / "elsewhere.h5", partial=True)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["fc3.bias"] = np.ones(5, np.float32)
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["fc3.bias"] = h5py.ExternalLink("other.h5", "/fc3.bias")
    with pytest.raises(CheckpointError, match="lacks"):  # a link to another file is not followed
        import_weights(folder, tmp_path / "link.h5", partial=True)
    whole = (tmp_path / "other.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError):
        import_weights(folder, tmp_path / "cut.h5", partial=True)


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\x10\0\0\0\0\0\0\0{", b"\xff" * 8 + b"{}", b"neither this nor that"])
def test_files_of_no_format_are_refused(data, folder, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        import_weights(folder, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        import_weights(folder, tmp_path / "missing")


# ---- the commands -----------------------------------------------------------------------------------------------------------


def test_the_commands(ortc, folder, tmp_path):
    code, out, _ = ortc("import-weights", folder, FILES / "run.pt", "--rename", "model.module.*=*")
    assert (code, "6 weights taken (pytorch)" in out) == (0, True)
    assert "not in the model, left out: optimizer.state" in out
    code, out, _ = ortc("export-weights", folder, "-o", tmp_path / "w.safetensors", "--rename", "fc*=layer*")
    assert code == 0
    assert_equal(load_file(tmp_path / "w.safetensors"), {n.replace("fc", "layer"): a for n, a in expected().items()})
    code, _, err = ortc("export-weights", folder, "-o", tmp_path / "w.xyz")
    assert (code, "the ending says no format" in err) == (2, True)
    code, _, err = ortc("import-weights", folder, FILES / "state.pt", "--rename", "nothing")
    assert (code, "'nothing' is not OLD=NEW" in err) == (2, True)
    code, _, err = ortc("import-weights", folder, FILES / "module.pt")
    assert (code, "Traceback" in err) == (2, False)

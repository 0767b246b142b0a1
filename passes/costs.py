"""What a node costs: floating-point operations, bytes moved, and the time that follows from them.

A multiplication and an addition count as one operation each. Heavy operators have their exact formula, every other operator
costs so many operations an element; both are the tables below. Sizes come from :func:`concrete_sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortc.autodiff import differentiable_inputs
from ortc.errors import ModelError
from ortc.graph.names import all_graphs, captured
from ortc.graph.shapes import Dims, constant, dims, is_float
from ortc.passes.inference import infer_shapes
from ortc.rules import CONTROL, GRADIENTS, OpKey, node_key, op_key

# Measured on one core of an AMD EPYC. Only their ratios move a partition: a quicker machine scales all.
# Operations a second: ONNX Runtime 1.19.2's Gemm and MatMul in a training step of GPT-2 (12 layers, 512 tokens), which agree
# within 1 %; NumPy 1.26 (OpenBLAS) has 127e9 for 1024 × 1024 × 1024.
PEAK_FLOPS = 224e9
# Bytes a second, read and written: y = x + 1 over 128 MiB in NumPy; ONNX Runtime's Add and Mul in the same step reach it.
MEMORY_BANDWIDTH = 43e9
# Bytes a second, one way between two processes: MPICH, messages of 1 MiB; 4 MiB and more reach 23e9.
LINK_BANDWIDTH = 14e9

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Work of one node in one micro-batch."""

    flops: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """The roofline (Williams, Waterman & Patterson 2009): the slower of arithmetic and memory."""
        return max(self.flops / PEAK_FLOPS, self.bytes / MEMORY_BANDWIDTH)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.flops * factor, self.bytes * factor)


@dataclass(frozen=True)
class NodeCost:
    """Forward, and the two parts of the backward: what an earlier node waits for, and what only the optimizer does."""

    forward: Cost
    backward_input: Cost = Cost()
    backward_weight: Cost = Cost()

    @property
    def backward_seconds(self) -> float:
        """Both parts, one after the other."""
        return self.backward_input.seconds + self.backward_weight.seconds


# ---- sizes -----------------------------------------------------------------------------------------------------------


# Sizes taken for symbolic dimensions that nobody tells: of the batch, and of others.
_BATCH, _OTHER = 8, 128


def default_sizes(shapes: Iterable[Sequence[int | str | None] | None]) -> dict[str, int]:
    """A size for each symbolic dimension of the inputs' shapes."""
    sizes: dict[str, int] = {}
    for shape in shapes:
        for axis, d in enumerate(shape or ()):
            if isinstance(d, str):
                sizes.setdefault(d, _BATCH if axis == 0 else _OTHER)
    return sizes


class Shapes:
    """The sizes of every value under one binding of the symbolic dimensions."""

    def __init__(self, sizes: Mapping[ir.Value, Sizes]) -> None:
        self._sizes = sizes

    def of(self, value: ir.Value) -> Sizes:
        """The sizes; of a value whose rank is unknown ``()``."""
        return self._sizes.get(value, ())

    def elements(self, value: ir.Value) -> int:
        """The number of elements."""
        return math.prod(self.of(value))

    def bytes(self, value: ir.Value) -> int:
        """Bytes in memory; of a value whose type is unknown as float32."""
        return math.ceil(self.elements(value) * (4 if value.dtype is None else value.dtype.itemsize))


def concrete_sizes(graph: ir.Graph, binding: Mapping[str, int], default: int = 1) -> Shapes:
    """Sizes of all values of a graph, its nested ones too.

    The shapes are inferred again, on a copy whose inputs have numbers, so that what follows from a bound dimension (the
    width after a strided convolution) follows here as well.

    Args:
        graph: a graph with types and shapes.
        binding: size of each symbolic dimension, by name.
        default: size of a name that is not bound.
    """
    sizes = {v: d for v in _values(graph) if (d := dims(v)) is not None}
    copy = graph.clone()
    for value in copy.inputs:
        if (known := dims(value)) is not None:
            value.shape = ir.Shape([_size(d, binding, default) for d in known])
    try:
        infer_shapes(ir.Model(copy, ir_version=10))
        inferred = {old: dims(new) for old, new in zip(_values(graph), _values(copy), strict=True)}
    except ModelError:  # sizes that the model does not allow, such as a sequence of 1 where it splits in two
        inferred = {}
    found = {v: d for v, d in inferred.items() if d is not None}
    return _bound({**sizes, **found}, binding, default)


def named_sizes(graph: ir.Graph, shapes: Shapes) -> dict[str, int]:
    """The size of every symbolic dimension of a graph, by its name."""
    sizes: dict[str, int] = {}
    for value in _values(graph):
        for dim, size in zip(dims(value) or (), shapes.of(value), strict=False):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    return sizes


def learned_sizes(graph: ir.Graph, names: dict[str, int]) -> Shapes:
    """As :func:`concrete_sizes`, but quick where all names are known; those that are not become so.

    Args:
        graph: a graph with types and shapes.
        names: size of each symbolic dimension, by name; what is learned is added.
    """
    known = {v: d for v in _values(graph) if (d := dims(v)) is not None}
    if not all(_follows(d, names) for d in dict.fromkeys(d for sizes in known.values() for d in sizes)):
        shapes = concrete_sizes(graph, names)
        names.update({n: size for n, size in named_sizes(graph, shapes).items() if n not in names})
        return shapes
    return _bound(known, names, 1)


def _bound(symbolic: Mapping[ir.Value, Dims], binding: Mapping[str, int], default: int) -> Shapes:
    """Numbers for all dimensions; those of one shape are found once, since a graph has few shapes and SymPy is slow."""
    numbers = {d: tuple(_size(x, binding, default) for x in d) for d in dict.fromkeys(symbolic.values())}
    return Shapes({v: numbers[d] for v, d in symbolic.items()})


def _follows(dimension: int | str | None, names: Mapping[str, int]) -> bool:
    """Whether a dimension's size is known from those of named ones."""
    if not isinstance(dimension, str):
        return dimension is not None
    if dimension in names:
        return True
    try:
        return all(name in names for name in ir.SymbolicDim(dimension).free_symbols())
    except ValueError:
        return False


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [
        v for g in all_graphs(graph) for v in [*g.inputs, *g.initializers.values(), *(o for node in g for o in node.outputs)]
    ]


def _size(dimension: int | str | None, binding: Mapping[str, int], default: int) -> int:
    """A number for a dimension: ``batch*sequence`` from the sizes of both."""
    if isinstance(dimension, int):
        return dimension
    if dimension is None:
        return default
    if dimension in binding:
        return binding[dimension]
    symbolic = ir.SymbolicDim(dimension)
    try:
        size = symbolic.evaluate({name: binding.get(name, default) for name in symbolic.free_symbols()})
    except ValueError:  # a name that is no expression
        return default
    return max(size, 0) if isinstance(size, int) else default


# ---- the tables ------------------------------------------------------------------------------------------------------
def _keys(operators: str) -> list[OpKey]:
    return [op_key(name) for name in operators.split()]


# Operators that move and compute nothing: their output is the input's memory, or a few integers.
_FREE = frozenset(
    _keys(
        "Identity Reshape Flatten Squeeze Unsqueeze Shape Size Constant Optional OptionalGetElement OptionalHasElement "
        "SequenceEmpty SequenceConstruct SequenceAt SequenceInsert SequenceErase SequenceLength"
    )
)

# Operators that read only a part of their first input, as large as their output.
_READS_PART = frozenset(_keys("Gather GatherElements GatherND Slice Compress Split SplitToSequence CenterCropPad"))

# Operations an element (the larger of the inputs' and the outputs' count). Everything else: one.
_PER_ELEMENT: dict[OpKey, float] = {
    **dict.fromkeys(_keys("Transpose Concat Split Slice Gather GatherND GatherElements Expand Tile Pad Cast CastLike"), 0),
    **dict.fromkeys(_keys("Div Sqrt Reciprocal HardSigmoid HardSwish Softsign Clip"), 4),
    **dict.fromkeys(_keys("BatchNormalization com.microsoft::BatchNormInternal"), 5),
    **dict.fromkeys(_keys("DequantizeLinear QuantizeLinear ortc::FakeQuantize"), 5),
    **dict.fromkeys(_keys("LayerNormalization GroupNormalization InstanceNormalization LpNormalization LRN"), 8),
    **dict.fromkeys(_keys("MeanVarianceNormalization SimplifiedLayerNormalization com.microsoft::BatchNormalizationGrad"), 8),
    **dict.fromkeys(_keys("com.microsoft::SkipLayerNormalization com.microsoft::EmbedLayerNormalization"), 9),
    **dict.fromkeys(_keys("Exp Log Sigmoid Tanh Sin Cos Erf Pow Softplus Elu Selu Celu Mod"), 10),
    **dict.fromkeys(_keys("Resize GridSample AffineGrid RoiAlign"), 11),
    **dict.fromkeys(_keys("Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Mish Gelu com.microsoft::Gelu"), 15),
    **dict.fromkeys(_keys("com.microsoft::FastGelu com.microsoft::BiasGelu com.microsoft::QuickGelu"), 15),
    **dict.fromkeys(_keys("Softmax LogSoftmax SoftmaxCrossEntropyLoss Hardmax"), 15),
    **dict.fromkeys(_keys("TopK NonMaxSuppression Unique"), 20),
}

Formula = Callable[[ir.Node, Sequence[Sizes], Sequence[Sizes]], float]
_FORMULAS: dict[OpKey, Formula] = {}


def _flops(*operators: str) -> Callable[[Formula], Formula]:
    """Declare the forward's operations: ``f(node, sizes of the inputs, sizes of the outputs)``; ``()`` for an absent one."""

    def declare(function: Formula) -> Formula:
        _FORMULAS.update({op_key(name): function for name in operators})
        return function

    return declare


@_flops("MatMul", "com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def _matmul(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·|Y|·K"""
    a = inputs[0]
    return 2 * math.prod(outputs[0]) * (a[-2] if node.attributes.get_int("transA", 0) else a[-1])


@_flops("MatMulInteger", "QLinearMatMul", "com.microsoft::MatMulNBits")
def _matmul_integer(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·|Y|·K"""
    return 2 * math.prod(outputs[0]) * inputs[0][-1]


@_flops("Gemm", "com.microsoft::FusedGemm", "com.microsoft::GemmFastGelu")
def _gemm(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·M·N·K, and M·N for C"""
    a, y = inputs[0], math.prod(outputs[0])
    return 2 * y * (a[0] if node.attributes.get_int("transA", 0) else a[-1]) + _bias(inputs, y)


@_flops("Conv", "ConvInteger", "com.microsoft::FusedConv")
def _conv(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·|Y|·(C/group)·kernel, and |Y| for the bias; W is [M, C/group, kernel…]"""
    y = math.prod(outputs[0])
    return 2 * y * math.prod(inputs[1][1:]) + _bias(inputs, y)


@_flops("com.microsoft::ConvGrad")
def _conv_grad(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·|dY|·(C/group)·kernel for each of dX and dW, and |dY| for dB; W is the third input, [M, C/group, kernel…]"""
    made = [bool(v.name) for v in node.outputs]
    return math.prod(inputs[0]) * (2 * math.prod(inputs[2][1:]) * sum(made[:2]) + sum(made[2:]))


@_flops("DeformConv", "com.microsoft::NhwcConv")
def _conv_without_bias(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·|Y|·(C/group)·kernel"""
    return 2 * math.prod(outputs[0]) * math.prod(inputs[1][1:])


@_flops("QLinearConv")
def _qlinear_conv(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·|Y|·(C/group)·kernel; W is the fourth input"""
    return 2 * math.prod(outputs[0]) * math.prod(inputs[3][1:])


@_flops("ConvTranspose")
def _conv_transpose(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·|X|·(M/group)·kernel, and |Y| for the bias; W is [C, M/group, kernel…]"""
    return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:]) + _bias(inputs, math.prod(outputs[0]))


def _bias(inputs: Sequence[Sizes], elements: int) -> int:
    return elements if len(inputs) > 2 and inputs[2] else 0


@_flops("Einsum")
def _einsum(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·(operands - 1) for each point of the index space, 1 with a single operand"""
    left = node.attributes["equation"].as_string().replace(" ", "").partition("->")[0]
    size: dict[str, int] = {}
    for term, sizes in zip(left.split(","), inputs, strict=True):
        before, dots, after = term.partition("...")
        hidden = len(sizes) - len(before) - len(after) if dots else 0
        labels = [*before, *(f"...{i}" for i in range(hidden, 0, -1)), *after]  # ellipses are aligned at their ends
        for label, n in zip(labels, sizes, strict=True):
            size[label] = max(size.get(label, 1), n)
    return max(2 * (len(inputs) - 1), 1) * math.prod(size.values())


@_flops("LSTM", "GRU", "RNN", "com.microsoft::LSTMTraining", "com.microsoft::GRUTraining")
def _recurrent(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·T·B·D·G·H·(I + H), and 10 for each gate's element; X is [T, B, I], W [D, G·H, I], R [D, G·H, H]"""
    gates = _gate_elements(inputs)
    return gates * (2 * (inputs[1][-1] + inputs[2][-1]) + 10)


def _gate_elements(inputs: Sequence[Sizes]) -> int:
    return math.prod(inputs[0][:2]) * math.prod(inputs[1][:2])


@_flops("com.microsoft::Attention")
def _attention(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2·B·S·D·3E for the projection, 4·B·S·S·E for scores and values; X is [B, S, D], W [D, 3E]"""
    (batch, length, width), projected = inputs[0], inputs[1][1]
    return 2 * batch * length * width * projected + 4 * batch * length * length * projected / 3


@_flops("com.microsoft::MultiHeadAttention", "com.microsoft::GroupQueryAttention")
def _attention_core(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """4·B·S·T·E; the query is [B, S, E], the key [B, T, …]"""
    batch, length, width = inputs[0][:3]
    return 4 * batch * length * (inputs[1][1] if len(inputs) > 1 and len(inputs[1]) > 1 else length) * width


@_flops("MaxPool", "AveragePool", "LpPool")
def _pool(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """|Y|·kernel"""
    return math.prod(outputs[0]) * math.prod(node.attributes["kernel_shape"].as_ints())


@_flops("DFT", "STFT", "com.microsoft::Rfft", "com.microsoft::Irfft")
def _fourier(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """5·N·log2 N over all elements, N at most their number in one signal (Cooley & Tukey 1965)"""
    largest = max([2, *(max(s, default=1) for s in (*inputs, *outputs))])
    return 5 * max(math.prod(s) for s in (*inputs[:1], *outputs)) * math.log2(largest)


@_flops("Det", "com.microsoft::Inverse")
def _elimination(node: ir.Node, inputs: Sequence[Sizes], outputs: Sequence[Sizes]) -> float:
    """2/3·N³ for the elimination of each matrix"""
    return math.prod(inputs[0]) * inputs[0][-1] * 2 / 3


# Operators whose gradient passes through: the backward of an operand as large as the output is a name for it.
_PASSES_THROUGH = frozenset(_keys("Add Sum Identity Reshape Flatten Squeeze Unsqueeze"))

_NORMS = _keys(
    "LayerNormalization InstanceNormalization GroupNormalization BatchNormalization com.microsoft::BatchNormInternal"
)

# The operands that the formula is about; the backward of any other (a bias, a scale) is a sum over the output.
_MAIN_OPERANDS: dict[OpKey, tuple[int, ...]] = {
    **dict.fromkeys(_keys("Gemm Conv ConvTranspose"), (0, 1)),
    **dict.fromkeys(_NORMS, (0,)),
}

# What the backward of a large operand costs, in forwards, where that is not one.
_BACKWARD_FACTOR: dict[OpKey, float] = {
    **dict.fromkeys(_NORMS, 2),
    **dict.fromkeys(_keys("Gelu Mish com.microsoft::Gelu Resize GridSample"), 2),
    **dict.fromkeys(_keys("Tanh Sigmoid Exp Softmax LogSoftmax SoftmaxCrossEntropyLoss"), 0.3),
}

# Inputs that a gradient rule reads for their shape alone, so that their elements need not be kept; None: all.
_SHAPE_READ: dict[OpKey, tuple[int, ...] | None] = {
    **dict.fromkeys(_keys("Reshape Flatten Transpose Squeeze Unsqueeze Concat Split Slice Pad Tile Trilu Cast CastLike"), None),
    **dict.fromkeys(_keys("Sum Mean ReduceSum ReduceMean GlobalAveragePool AveragePool Resize DepthToSpace CumSum"), None),
    **dict.fromkeys(_keys("SpaceToDepth Col2Im ReverseSequence CenterCropPad DFT"), None),
    **dict.fromkeys(_keys("Gather GatherElements GatherND Compress NegativeLogLikelihoodLoss"), (0,)),
    **dict.fromkeys(_keys("Gemm"), (2,)),
    **dict.fromkeys(_keys("Where"), (1, 2)),
}

# Operators of several factors: a factor is kept for the gradients of the others.
_FACTORS = frozenset(_keys("Mul MatMul Gemm Conv ConvTranspose Einsum"))

# Outputs that the backward reads, and adds to a node that has them not: bytes.
_ADDED: dict[OpKey, Callable[[ir.Node, Shapes], int]] = {
    ("", "SoftmaxCrossEntropyLoss"): lambda node, shapes: 4 * _elements(node, shapes),  # log_prob
    ("", "LayerNormalization"): lambda node, shapes: 8 * _rows(node, shapes),  # Mean, InvStdDev
    ("", "MaxPool"): lambda node, shapes: 8 * shapes.elements(node.outputs[0]),  # Indices
}


def _elements(node: ir.Node, shapes: Shapes) -> int:
    return 0 if node.inputs[0] is None else shapes.elements(node.inputs[0])


def _rows(node: ir.Node, shapes: Shapes) -> int:
    sizes = () if node.inputs[0] is None else shapes.of(node.inputs[0])
    return math.prod(sizes[: node.attributes.get_int("axis", -1)])


# ---- the cost of a node ----------------------------------------------------------------------------------------------


def forward_cost(node: ir.Node, shapes: Shapes) -> Cost:
    """The forward's operations and bytes.

    The body of a nested graph counts as often as it runs, once where that is not known; of several branches the dearest.
    """
    if node_key(node) in CONTROL:
        return _body_cost(node, shapes)
    if node_key(node) in _FREE:
        return Cost()
    inputs = [() if v is None else shapes.of(v) for v in node.inputs]
    outputs = [shapes.of(v) for v in node.outputs]
    formula = _FORMULAS.get(node_key(node))
    if formula is not None and all(inputs[i] for i in range(min(2, len(inputs)))):
        flops = formula(node, inputs, outputs)
    else:
        elements = max((math.prod(s) for s in [*inputs, *outputs]), default=0)
        flops = elements * _PER_ELEMENT.get(node_key(node), 1)
    return Cost(flops, _bytes(node, shapes))


def _bytes(node: ir.Node, shapes: Shapes) -> int:
    written = sum(shapes.bytes(v) for v in node.outputs)
    read = [shapes.bytes(v) for v in node.inputs if v is not None]
    if node_key(node) in _READS_PART and read:
        read[0] = min(read[0], written)
    return written + sum(read)


def _body_cost(node: ir.Node, shapes: Shapes) -> Cost:
    bodies = [a.value for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    costs = [sum((forward_cost(n, shapes) for n in body), Cost()) for body in bodies]
    dearest = max(costs, key=lambda c: c.seconds, default=Cost())
    return dearest * _trips(node, shapes)


def _trips(node: ir.Node, shapes: Shapes) -> int:
    """How often the body runs, 1 if unknown."""
    if node.op_type == "Loop":
        count = constant(node.inputs[0])
        return 1 if count is None else max(int(count.reshape(())), 0)
    if node.op_type == "Scan":
        scanned = node.attributes.get_int("num_scan_inputs", 1)
        axes = node.attributes.get_ints("scan_input_axes", [0] * scanned)
        first = node.inputs[len(node.inputs) - scanned]
        return 1 if first is None or not shapes.of(first) else shapes.of(first)[axes[0]]
    return 1


def node_cost(node: ir.Node, shapes: Shapes, active: Container[ir.Value], weights: Container[ir.Value]) -> NodeCost:
    """Forward and backward of a node on the way to the loss.

    Args:
        node: the node.
        shapes: see :func:`concrete_sizes`.
        active: the values whose gradients are needed.
        weights: the values that follow from parameters alone; their gradients are the weight part.
    """
    forward = forward_cost(node, shapes)
    wanted = [v for v in dict.fromkeys(differentiable_inputs(node)) if v in active]
    if node_key(node) in CONTROL:  # a body's backward is taken as one forward for its data, and one for its weights
        parts = [(v in weights, forward) for v in wanted]
        parts = [(w, c) for i, (w, c) in enumerate(parts) if w not in [p[0] for p in parts[:i]]]
    else:
        positions = {v: i for i, v in reversed(list(enumerate(node.inputs))) if v is not None}
        parts = [(v in weights, _operand_cost(node, shapes, positions[v], forward)) for v in wanted]
    return NodeCost(
        forward,
        sum((c for weight, c in parts if not weight), Cost()),
        sum((c for weight, c in parts if weight), Cost()),
    )


def _operand_cost(node: ir.Node, shapes: Shapes, position: int, forward: Cost) -> Cost:
    """The gradient of one operand: by default as much as the forward."""
    key, value = node_key(node), node.inputs[position]
    assert value is not None
    if key in _PASSES_THROUGH and shapes.elements(value) == shapes.elements(node.outputs[0]):
        return Cost()
    if key in _PASSES_THROUGH or position not in _MAIN_OPERANDS.get(key, (position,)):
        return Cost(shapes.elements(node.outputs[0]), shapes.bytes(node.outputs[0]) + shapes.bytes(value))
    if _FORMULAS.get(key) is _recurrent:
        return _recurrent_operand(node, shapes, position, forward)
    if key in _READS_PART:  # written to zeros as large as the operand
        arrives = sum(shapes.bytes(v) for v in node.outputs)
        return Cost(sum(map(shapes.elements, node.outputs)), 2 * arrives + shapes.bytes(value))
    return forward * _BACKWARD_FACTOR.get(key, 1)


def _recurrent_operand(node: ir.Node, shapes: Shapes, position: int, forward: Cost) -> Cost:
    """X's gradient includes that of every hidden state; W's is the input part alone, R's the hidden part."""
    inputs = [() if v is None else shapes.of(v) for v in node.inputs]
    gates = _gate_elements(inputs)
    if position in (1, 2):
        return Cost(2 * gates * inputs[position][-1], forward.bytes)
    return forward if position == 0 else Cost(gates, 4 * gates)


def kept_values(node: ir.Node, shapes: Shapes, active: Container[ir.Value]) -> tuple[list[ir.Value], int]:
    """What the backward of a node reads of the forward: values, and bytes of outputs that are added for it.

    Only for a node with an active input; a body keeps what it reads and makes.
    """
    key = node_key(node)
    if key in CONTROL:
        return [v for v in [*node.inputs, *captured(node), *node.outputs] if v is not None and is_float(v)], 0
    rule = GRADIENTS.get(key)
    read = [] if rule is None else list(dict.fromkeys(rule.reads(node)))
    extra = _ADDED[key](node, shapes) if key in _ADDED and len(node.outputs) == 1 else 0
    return [_stand_in(v) for v in read if _is_kept(node, v, active)], extra


def _stand_in(value: ir.Value) -> ir.Value:
    """What the model puts in place of a value where that is NaN (a masked softmax): the gradient rule does so too."""
    readers = [use.node for use in value.uses()]
    replaced = [node.outputs[0] for node in readers if node.op_type == "Where" and node.inputs[0] is not None]
    return replaced[0] if replaced and any(node.op_type == "IsNaN" for node in readers) else value


def _is_kept(node: ir.Node, value: ir.Value, active: Container[ir.Value]) -> bool:
    """Whether the elements of a value that the gradient rule reads matter."""
    key, places = node_key(node), [i for i, v in enumerate(node.inputs) if v is value]
    if key in _SHAPE_READ:
        by_shape = _SHAPE_READ[key]
        if by_shape is None or (places and all(i in by_shape for i in places)):
            return False
    if key == ("", "Pow") and not places:
        return len(node.inputs) > 1 and node.inputs[1] in active  # the power itself is for the exponent's gradient
    others = [v for v in node.inputs if v is not None and v in active and (v is not value or len(places) > 1)]
    return key not in _FACTORS or bool(others)

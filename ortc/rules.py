"""How the facts in ``passes/`` are declared, and how the engine finds them.

A gradient rule's signature is its declaration. Its parameters carry the formal names of the operator's ONNX schema:

====================  ========================================================================================
``op``                the builder (see :mod:`ortc.graph.builder`)
an input's name       the forward value (None where an optional input is left out; a list where it is variadic)
an output's name      the forward value (an optional output that the model leaves out is added to the node)
``d`` + output name   the gradient that arrives for it (None where nothing depends on that output)
keyword-only          the attribute of that name; its default is the operator's
====================  ========================================================================================

From the names it uses the engine knows which forward values the backward pass needs. The rule returns one gradient per
name in ``wrt`` (by default: every input), bare if there is only one. A gradient may have the output's broadcast shape:
the engine sums it back to the input's, accumulates over uses, and gives names, types, shapes and provenance.

Of each operator and input exactly one holds: a rule returns its gradient; it is declared without one (``no_gradient``,
or not in ``wrt``) and gradients stop there; or nothing is declared, and training through it is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from ortc.errors import RecipeError

F = TypeVar("F", bound=Callable[..., Any])
OpKey = tuple[str, str]  # (domain, operator)


class Unsupported(Exception):
    """Raised by a rule for a form of its operator that it does not cover; the message says which."""


@dataclass(frozen=True)
class GradientRule:
    """A declared gradient, with its signature taken apart."""

    key: OpKey
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variadic_input: bool
    variadic_output: bool
    wrt: tuple[str, ...]
    arguments: tuple[tuple[str, str], ...]  # (kind, formal name) per positional parameter after op
    attributes: Mapping[str, Any]  # attribute -> default; inspect.Parameter.empty if required
    samples: tuple[Mapping[str, Any], ...] = field(repr=False)

    def input_name(self, position: int) -> str:
        """The formal name of the input at a position."""
        last = len(self.inputs) - 1
        return self.inputs[min(position, last)] if self.variadic_input else self.inputs[position]

    def differentiable(self, position: int) -> bool:
        """Whether the rule gives a gradient for the input at a position."""
        return self.input_name(position) in self.wrt

    def reads(self, node: ir.Node) -> list[ir.Value]:
        """The forward values that the backward of ``node`` may read."""
        names = {name for kind, name in self.arguments if kind != "gradient"}
        values = [v for i, v in enumerate(node.inputs) if v is not None and self.input_name(i) in names]
        values += [v for i, v in enumerate(node.outputs) if self.outputs[min(i, len(self.outputs) - 1)] in names]
        return values

    def __call__(self, op: Any, node: ir.Node, gradients: Mapping[ir.Value, ir.Value]) -> list[ir.Value | None]:
        """The gradient of every input of ``node``, in order; None where there is none."""
        taken = {name for kind, name in self.arguments if kind == "gradient"}
        for position, value in enumerate(node.outputs):
            name = self.outputs[min(position, len(self.outputs) - 1)]
            if value in gradients and name not in taken:
                raise Unsupported(f"a gradient arrives for its output {name}")
        self._add_outputs(op, node)
        positional = [self._argument(kind, name, node, gradients) for kind, name in self.arguments]
        keywords = {name: self._attribute(name, default, node) for name, default in self.attributes.items()}
        result = self.function(op, *positional, **keywords)
        results = dict(zip(self.wrt, (result,) if len(self.wrt) == 1 else result, strict=True))
        found: list[ir.Value | None] = []
        first_variadic = len(self.inputs) - 1
        for position in range(len(node.inputs)):
            gradient = results.get(self.input_name(position))
            if self.variadic_input and position >= first_variadic and gradient is not None:
                gradient = gradient[position - first_variadic]
            found.append(gradient)
        return found

    def _add_outputs(self, op: Any, node: ir.Node) -> None:
        """Give the forward node the optional outputs that the rule reads."""
        read = [self.outputs.index(name) for kind, name in self.arguments if kind == "output"]
        last = len(self.outputs) - 1
        if read and max(read) >= len(node.outputs):
            node.resize_outputs(max(read) + 1)
        count = len(node.outputs) if self.variadic_output and last in read else max(read, default=-1) + 1
        formals = [self.outputs[min(position, last)] for position in range(count)]
        unnamed = [(v, formal) for v, formal in zip(node.outputs, formals, strict=False) if not v.name]
        for value, formal in unnamed:
            value.name = op.names.fresh(f"{node.name}.{formal}")
        if unnamed:
            op.infer(node)

    def _argument(self, kind: str, name: str, node: ir.Node, gradients: Mapping[ir.Value, ir.Value]) -> Any:
        if kind == "input":
            return _pick(list(node.inputs), self.inputs, name, self.variadic_input)
        outputs = [gradients.get(v) for v in node.outputs] if kind == "gradient" else list(node.outputs)
        return _pick(outputs, self.outputs, name, self.variadic_output)

    def _attribute(self, name: str, default: Any, node: ir.Node) -> Any:
        attribute = node.attributes.get(name)
        if attribute is not None:
            return attribute.value
        if default is inspect.Parameter.empty:
            raise Unsupported(f"attribute {name} is missing")
        return default


def _pick(values: list[Any], formals: tuple[str, ...], name: str, variadic: bool) -> Any:
    position = formals.index(name)
    if variadic and position == len(formals) - 1:
        return values[position:]
    return values[position] if position < len(values) else None


GRADIENTS: dict[OpKey, GradientRule] = {}
NO_GRADIENT: set[OpKey] = set()


def op_key(name: str) -> OpKey:
    """``"Tanh"`` is of the ONNX standard, ``"com.microsoft::Gelu"`` of that domain."""
    domain, _, op_type = name.rpartition("::")
    return domain, op_type


def node_key(node: ir.Node) -> OpKey:
    """The key under which rules for this node are found."""
    return node.domain, node.op_type


def gradient(
    *operators: str,
    wrt: str | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    inputs: str | None = None,
    outputs: str | None = None,
) -> Callable[[F], F]:
    """Declare the gradient of one or more operators; see the module's text.

    Args:
        operators: names, with ``domain::`` where it is not the standard one.
        wrt: the inputs that get a gradient, by formal name, separated by blanks; default: every input.
        samples: inputs for the generic test: formal input name -> a shape (random normal), an array, or a scalar;
            attribute name -> value.
        inputs: formal input names, for an operator that ONNX has no schema of; ``*`` before a variadic one.
        outputs: formal output names, likewise.
    """

    def declare(function: F) -> F:
        for name in operators:
            key = op_key(name)
            ins, variadic_in, outs, variadic_out = _formals(key, inputs, outputs)
            parameters = list(inspect.signature(function).parameters.values())
            arguments = [
                (
                    _kind(name, p.name, ins, outs),
                    p.name.removeprefix("d") if _is_gradient(p.name, ins, outs) else p.name,
                )
                for p in parameters[1:]
                if p.kind is not inspect.Parameter.KEYWORD_ONLY
            ]
            GRADIENTS[key] = GradientRule(
                key,
                function,
                ins,
                outs,
                variadic_in,
                variadic_out,
                tuple(wrt.split()) if wrt is not None else ins,
                tuple(arguments),
                {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY},
                tuple(samples),
            )
        return function

    return declare


def no_gradient(*operators: str) -> None:
    """Declare that gradients stop at these operators: their outputs do not depend smoothly on any input."""
    NO_GRADIENT.update(op_key(name) for name in operators)


OUT_OF_REACH: dict[OpKey, str] = {}


def out_of_reach(reason: str, *operators: str) -> None:
    """Declare that these operators have a derivative which ortc does not give, and why; the reason is told to the user."""
    OUT_OF_REACH.update({op_key(name): reason for name in operators})


def _formals(key: OpKey, inputs: str | None, outputs: str | None) -> tuple[tuple[str, ...], bool, tuple[str, ...], bool]:
    if inputs is not None and outputs is not None:
        ins, outs = inputs.split(), outputs.split()
        return (
            tuple(i.lstrip("*") for i in ins),
            ins[-1].startswith("*"),
            tuple(o.lstrip("*") for o in outs),
            outs[-1].startswith("*"),
        )
    domain, op_type = key
    schema = onnx.defs.get_schema(op_type, domain)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    return (
        tuple(i.name for i in schema.inputs),
        bool(schema.inputs) and schema.inputs[-1].option == variadic,
        tuple(o.name for o in schema.outputs),
        schema.outputs[-1].option == variadic,
    )


def _is_gradient(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> bool:
    return name not in inputs and name not in outputs and name[:1] == "d" and name[1:] in outputs


def _kind(operator: str, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> str:
    if _is_gradient(name, inputs, outputs):
        return "gradient"
    if name in inputs:
        return "input"
    if name in outputs:
        return "output"
    raise TypeError(
        f"the gradient rule of {operator} has a parameter {name!r} that is neither an input {inputs}, "
        f"an output {outputs}, nor d + an output"
    )


CONTROL: dict[OpKey, Callable[..., Any]] = {}


def control(operator: str) -> Callable[[F], F]:
    """Declare the gradient of an operator with nested graphs.

    The function is called as ``f(op, node, arrived, wanted) -> {value: gradient}``: ``arrived`` holds the gradients that came
    for the node's outputs, ``wanted`` the values, inputs of the node or captured by its nested graphs, that need one.
    """

    def declare(function: F) -> F:
        CONTROL[op_key(operator)] = function
        return function

    return declare


LOWERINGS: dict[OpKey, Callable[..., Any]] = {}


def lowering(operator: str) -> Callable[[F], F]:
    """Declare how an operator is written in others that the targets have, or have quicker.

    The function is called as ``f(op, *inputs, **attributes)``, with None for optional inputs left out at the end, and returns
    the outputs in order (fewer where nobody reads the others). It raises :class:`Unsupported` for a form that stays as it is.
    """

    def declare(function: F) -> F:
        LOWERINGS[op_key(operator)] = function
        return function

    return declare


def lowered(op: Any, node: ir.Node) -> Sequence[ir.Value | None]:
    """Write a node in others, by its lowering; what stands for its outputs.

    Raises:
        Unsupported: if the lowering does not cover the node's form.
    """
    function = LOWERINGS[node_key(node)]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    try:
        inspect.signature(function).bind(op, *node.inputs, **attributes)
    except TypeError as error:
        raise Unsupported(str(error)) from None
    results = function(op, *node.inputs, **attributes)
    if any(v.uses() or v.is_graph_output() for v in node.outputs[len(results) :]):
        raise Unsupported(f"more than {len(results)} outputs")
    return results


@dataclass(frozen=True)
class Declared:
    """A named entry of a table of functions: a loss, an optimizer."""

    name: str
    function: Callable[..., Any]
    elementwise: bool = False
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Option name -> default, from the function's keyword parameters."""
        return {
            p.name: p.default
            for p in inspect.signature(self.function).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }

    @property
    def summary(self) -> str:
        """The first line of the declaration's text."""
        return (self.function.__doc__ or "").strip().splitlines()[0]


LOSSES: dict[str, Declared] = {}
OPTIMIZERS: dict[str, Declared] = {}


def loss(name: str) -> Callable[[F], F]:
    """Declare a loss: ``f(op, output, labels, *, options…) -> scalar value``; see ``passes/loss.py``."""

    def declare(function: F) -> F:
        LOSSES[name] = Declared(name, function)
        return function

    return declare


def optimizer(name: str, *, elementwise: bool = False) -> Callable[[F], F]:
    """Declare an optimizer's update of one parameter; see ``passes/optimizer.py``.

    Args:
        name: what the recipe calls it.
        elementwise: each element is updated for itself, so that a parameter may be updated in chunks.
    """

    def declare(function: F) -> F:
        OPTIMIZERS[name] = Declared(name, function, elementwise)
        return function

    return declare


def optimizer_kernel(name: str, operator: str) -> Callable[[F], F]:
    """Declare how an operator makes the update of a declared optimizer, for the targets whose table ``[kernels]`` has it.

    Args:
        name: the optimizer.
        operator: ``domain::name``.
    """

    def declare(function: F) -> F:
        declared = OPTIMIZERS[name]
        OPTIMIZERS[name] = replace(declared, kernels={**declared.kernels, operator: function})
        return function

    return declare


def import_file(path: str | Path) -> ModuleType:
    """Run a Python file of the user's (rules, lowerings, a loss) and return it as a module.

    Raises:
        RecipeError: if there is no such file, or running it fails.
    """
    if not Path(path).is_file():
        raise RecipeError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"ortc_user_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # decorators such as onnxscript's look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RecipeError(f"{path}: {type(error).__name__}: {error}") from error
    return module


def load_declarations(package: str) -> None:
    """Import every module of a package, so that its declarations register. Order by name: deterministic."""
    found = importlib.import_module(package)
    for module in sorted(m.name for m in pkgutil.iter_modules(found.__path__)):
        importlib.import_module(f"{package}.{module}")
